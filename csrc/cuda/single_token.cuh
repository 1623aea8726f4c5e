// Sequences of one token: where each is, for the kernels that take several of them one after the other. Must
// not know: kernels.
#pragma once

#include "../params.h"

namespace apcbatch {
namespace cuda {

constexpr std::int64_t kMostSequences = 8;  // of a block, one after the other

// Where a sequence's token and states are.
struct Where {
    std::int64_t token, initial, final, kept;
};

__device__ __forceinline__ Where where(const RaggedParams& ragged, std::int64_t sequence) {
    const std::int64_t first = ragged.snapshot_cu[sequence];
    const bool keeps = first < ragged.snapshot_cu[sequence + 1];
    return {ragged.cu_seqlens[sequence], ragged.initial_slots[sequence], ragged.final_slots[sequence],
            keeps ? ragged.snapshot_slots[first] : -1};
}

// How many sequences a block takes, where each of so many would need `tiles` blocks and about `at_once`
// blocks run side by side.
inline std::int64_t sequences_each(std::int64_t sequences, std::int64_t tiles, std::int64_t at_once) {
    const std::int64_t each = (tiles * sequences + at_once - 1) / at_once;
    return each < kMostSequences ? each : kMostSequences;
}

}  // namespace cuda
}  // namespace apcbatch
