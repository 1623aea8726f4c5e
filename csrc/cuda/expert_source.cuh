// The experts' weights and the rows of their tokens, on their way into shared memory: tiles, where a block is
// among them, and what a warp copies next. Must not know: what becomes of them.
#pragma once

#include "async_copy.cuh"
#include "element.cuh"
#include "experts.h"

namespace apcbatch {
namespace cuda {

using Bf16 = __nv_bfloat16;

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStepInputs = 64;                // of a warp before the next warp's: a cache line of a row
constexpr int kWeightRows = 16, kColumns = 8;  // of one matrix instruction
constexpr int kLineChunks = 8;                 // a cache line has so many of 16 bytes
constexpr int kCopiedRows = 32 / kLineChunks;  // by one instruction of a warp

// A tile has kMTiles x 16 rows of weights and kNTiles x 8 tokens; a stage is 64 inputs of each for every
// warp.
template <int kMTiles_, int kNTiles_, int kStages_>
struct Tile {
    static constexpr int kMTiles = kMTiles_, kNTiles = kNTiles_, kStages = kStages_;
    static constexpr int kRows = kMTiles * kWeightRows, kTokens = kNTiles * kColumns;
    static constexpr int kStage = (kRows + kTokens) * kLineChunks;  // chunks of a warp
    static constexpr int kRingBytes = kWarps * kStage * kStages * 16;
    static constexpr int kPitch = kTokens == 8 ? 9 : kTokens + 9;  // few bank conflicts either way
    static constexpr int kSums = kRows * kPitch;                   // floats of one warp
    static constexpr int kBytes = kRingBytes + kWarps / 2 * kSums * int(sizeof(float));
};
using OneToEight = Tile<2, 1, 5>;
using ToSixteen = Tile<2, 2, 4>;
using More = Tile<4, 3, 2>;  // 24 at a time

// Where a stage has this chunk of this row: eight lanes that read a row's half each, of two rows, meet no
// bank twice.
__device__ __forceinline__ int chunk_of(int row, int chunk) {
    return row * kLineChunks + (chunk ^ row % 2 * (kLineChunks / 2));
}

// 16 bytes from global memory, or zeros, that many blocks read.
__device__ __forceinline__ void copy_inputs(uint4* to, const void* from, bool there) {
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
        "l"(from), "r"(there ? 16 : 0)
        : "memory");
}

// Where a block is among the tiles: those of one expert follow each other, and of one piece of weights those
// of all its tokens.
template <class T>
struct Place {
    int active = 0, before = 0;  // experts passed, and the tiles of these
    int row_tile, first, count;  // first: of the tokens, by place

    // Goes to this tile, which is not before the last; false past the end.
    __device__ __forceinline__ bool seek(const Groups& groups, int tile, int row_tiles) {
        for (; active < groups.experts; ++active) {
            const int begin = groups.begins[active], tokens = groups.begins[active + 1] - begin;
            const int parts = (tokens + T::kTokens - 1) / T::kTokens;
            if (tile < before + parts * row_tiles) {
                const int part = (tile - before) % parts;
                row_tile = (tile - before) / parts;
                first = begin + part * T::kTokens;
                count = min(T::kTokens, tokens - part * T::kTokens);
                return true;
            }
            before += parts * row_tiles;
        }
        return false;
    }
};

// What a warp will copy next, and where its lane finds it: chunk lane % 8 of every fourth row.
template <class T, bool kGated>
struct Source {
    static constexpr int kRowsEach = kGated ? T::kRows / 2 : T::kRows;  // of y
    static constexpr int kWeightCopies = T::kRows / kCopiedRows, kTokenCopies = T::kTokens / kCopiedRows;

    const ExpertProduct& p;
    const Groups& groups;
    const int row_tiles, row, chunk;
    Place<T> place;
    int tile, step;
    const Bf16* weights;  // the lane's first row of the tile
    const Bf16* tokens[kTokenCopies];
    bool any;

    __device__ __forceinline__ Source(const ExpertProduct& p, const Groups& groups, int row_tiles, int warp,
                                      int lane)
        : p(p),
          groups(groups),
          row_tiles(row_tiles),
          row(lane / kLineChunks),
          chunk(lane % kLineChunks),
          tile(int(blockIdx.x)),
          step(warp) {
        any = warp * kStepInputs < p.in;
        if (any) find();
    }

    __device__ __forceinline__ void find() {
        any = place.seek(groups, tile, row_tiles);
        if (!any) return;
        const auto* base =
            static_cast<const Bf16*>(static_cast<const void* const*>(p.weights)[groups.expert[place.active]]);
        weights = base + (std::int64_t(place.row_tile) * kRowsEach + row) * p.in + chunk * 8;
#pragma unroll
        for (int j = 0; j < kTokenCopies; ++j) {
            const int at = place.first + min(j * kCopiedRows + row, place.count - 1);
            const int from = kGated ? groups.pairs[at] / p.per_token : at;
            tokens[j] = static_cast<const Bf16*>(p.x) + std::int64_t(from) * p.in + chunk * 8;
        }
    }

    // Copies one stage into the warp's part of the ring, then goes on.
    __device__ __forceinline__ void copy(uint4* ring) {
        if (any) {
            const int input = step * kStepInputs;
            const bool there = input + chunk * 8 < p.in;
#pragma unroll
            for (int i = 0; i < kWeightCopies; ++i) {
                const int within = i * kCopiedRows % kRowsEach;  // the up's rows are `out` after the gate's
                const bool is_row = place.row_tile * kRowsEach + within + row < p.out;
                const std::int64_t before = within + (i * kCopiedRows < kRowsEach ? 0 : p.out);
                copy_chunk(ring + chunk_of(i * kCopiedRows + row, chunk),
                           there && is_row ? weights + before * p.in + input : p.x, there && is_row);
            }
#pragma unroll
            for (int j = 0; j < kTokenCopies; ++j) {
                if (j * kCopiedRows >= place.count) break;
                const bool is_token = there && j * kCopiedRows + row < place.count;
                copy_inputs(ring + chunk_of(T::kRows + j * kCopiedRows + row, chunk),
                            is_token ? tokens[j] + input : p.x, is_token);
            }
            go_on();
        }
        commit_copies();
    }

    __device__ __forceinline__ void go_on() {
        step += kWarps;
        if (step * kStepInputs < p.in) return;
        step = threadIdx.x / 32;
        tile += int(gridDim.x);
        find();
    }
};

}  // namespace cuda
}  // namespace apcbatch
