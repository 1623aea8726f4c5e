// Locations of short sequences, for kernels in which a block processes several of them in order.
#pragma once

#include "../params.h"

namespace apcbatch {
namespace cuda {

constexpr std::int64_t kMostSequences = 8;  // maximum sequences of a block

// Tokens [begin, end) of a sequence in the packed batch, its state slots, and its snapshots [snapshot,
// snapshots_end) in the ragged's lists.
struct Where {
    std::int64_t begin, end, initial, final, snapshot, snapshots_end;
};

__device__ __forceinline__ Where where(const RaggedParams& ragged, std::int64_t sequence) {
    return {ragged.cu_seqlens[sequence],  ragged.cu_seqlens[sequence + 1], ragged.initial_slots[sequence],
            ragged.final_slots[sequence], ragged.snapshot_cu[sequence],    ragged.snapshot_cu[sequence + 1]};
}

// The snapshots of one sequence, in order.
class Snapshots {
  public:
    __device__ __forceinline__ Snapshots(const RaggedParams& ragged, const Where& at)
        : ragged_(ragged), begin_(at.begin), next_(at.snapshot), end_(at.snapshots_end) {
        find();
    }

    // Returns the slot for the state after a token, and goes on to the next snapshot; -1: none.
    __device__ __forceinline__ std::int64_t slot_after(std::int64_t token) {
        if (token != last_) return -1;
        const std::int64_t slot = ragged_.snapshot_slots[next_++];
        find();
        return slot;
    }

  private:
    __device__ __forceinline__ void find() {
        last_ = next_ < end_ ? begin_ + ragged_.snapshot_positions[next_] - 1 : -1;
    }

    const RaggedParams& ragged_;
    const std::int64_t begin_;
    std::int64_t next_, last_;  // last_: last token before the next snapshot; -1: none
    const std::int64_t end_;
};

// Returns the number of sequences that a block processes. tiles: blocks per sequence. at_once: approximate
// number of blocks that run in parallel.
inline std::int64_t sequences_each(std::int64_t sequences, std::int64_t tiles, std::int64_t at_once) {
    const std::int64_t each = (tiles * sequences + at_once - 1) / at_once;
    return each < kMostSequences ? each : kMostSequences;
}

}  // namespace cuda
}  // namespace apcbatch
