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

// Returns true if a block has one sequence and that is padding. present: see Batch.
__device__ __forceinline__ bool is_padding(const std::int64_t* present, const Where& at, int each) {
    return each == 1 && present && at.begin >= *present;
}

constexpr int kTileTokens = 4;     // tokens whose inputs are loaded together, ahead of their turn
constexpr int kTableTokens = 256;  // tokens of a SlotTable

// A position in the short sequences of a block: `count` tokens from `first` on, of sequence i.
struct Tile {
    int i;
    std::int64_t first;
    int count;
};

template <int kTokens = kTileTokens>
__device__ __forceinline__ Tile tile_at(const Where* all, int i, std::int64_t first) {
    return {i, first, int(min(std::int64_t(kTokens), all[i].end - first))};
}

// Returns the tile after this one; its `i` is past the last sequence if there is none. A sequence has at
// least one token.
template <int kTokens = kTileTokens>
__device__ __forceinline__ Tile tile_after(const Where* all, const Tile& tile, int sequences) {
    const std::int64_t next = tile.first + tile.count;
    if (next < all[tile.i].end) return tile_at<kTokens>(all, tile.i, next);
    if (tile.i + 1 < sequences) return tile_at<kTokens>(all, tile.i + 1, all[tile.i + 1].begin);
    return {sequences, 0, 0};
}

// The slot of the snapshot after each token of a sequence, for kTableTokens tokens at a time. It is in shared
// memory, so that no token waits for global memory.
struct SlotTable {
    std::int64_t slots[kTableTokens];

    // Fills the table for at most kTableTokens tokens [first, end) of a sequence, if it has a snapshot.
    // Called by all threads of the block.
    __device__ __forceinline__ void fill(const RaggedParams& ragged, const Where& at, std::int64_t first,
                                         std::int64_t end) {
        if (at.snapshot == at.snapshots_end) return;
        __syncthreads();  // its last contents were read
        const int here = int(min(std::int64_t(kTableTokens), end - first));
        for (int k = int(threadIdx.x); k < here; k += int(blockDim.x)) slots[k] = -1;
        __syncthreads();
        for (std::int64_t s = at.snapshot + threadIdx.x; s < at.snapshots_end; s += blockDim.x) {
            const std::int64_t k = at.begin + ragged.snapshot_positions[s] - 1 - first;
            if (0 <= k && k < here) slots[k] = ragged.snapshot_slots[s];
        }
        __syncthreads();
    }

    // Returns the slot for the state after token k of the table; -1: none.
    __device__ __forceinline__ std::int64_t slot_after(const Where& at, std::int64_t k) const {
        return at.snapshot == at.snapshots_end ? -1 : slots[k % kTableTokens];
    }
};

// Returns the number of sequences that a block processes: one if a sequence has more than a tile. tiles:
// blocks per sequence. at_once: approximate number of blocks that run in parallel.
inline std::int64_t sequences_each(std::int64_t sequences, std::int64_t longest, std::int64_t tiles,
                                   std::int64_t at_once) {
    if (longest > kTileTokens) return 1;
    const std::int64_t each = (tiles * sequences + at_once - 1) / at_once;
    return each < kMostSequences ? each : kMostSequences;
}

}  // namespace cuda
}  // namespace apcbatch
