// Locations of sequences of one token, for kernels in which a block processes several of them in order.
#pragma once

#include "../params.h"

namespace apcbatch {
namespace cuda {

constexpr std::int64_t kMostSequences = 8;  // maximum sequences of a block

// Token and state slots of a sequence. kept: slot of its snapshot; -1: none.
struct Where {
    std::int64_t token, initial, final, kept;
};

__device__ __forceinline__ Where where(const RaggedParams& ragged, std::int64_t sequence) {
    const std::int64_t first = ragged.snapshot_cu[sequence];
    const bool keeps = first < ragged.snapshot_cu[sequence + 1];
    return {ragged.cu_seqlens[sequence], ragged.initial_slots[sequence], ragged.final_slots[sequence],
            keeps ? ragged.snapshot_slots[first] : -1};
}

// Returns the number of sequences that a block processes. tiles: blocks per sequence. at_once: approximate
// number of blocks that run in parallel.
inline std::int64_t sequences_each(std::int64_t sequences, std::int64_t tiles, std::int64_t at_once) {
    const std::int64_t each = (tiles * sequences + at_once - 1) / at_once;
    return each < kMostSequences ? each : kMostSequences;
}

}  // namespace cuda
}  // namespace apcbatch
