// Steps of fixed-order accumulation: each adds 16 bfloat16 inputs by tensor cores, from shared memory.
//
// Rows of weights and of x are in slices of 64 inputs, 128 bytes per row, in the swizzled layout of tensor
// copies: the 16-byte chunk c of row r is at position c xor (r % 8).
#pragma once

#include "matrix_unit.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kSliceInputs = 64, kSliceSteps = kSliceInputs / 16;
constexpr int kSliceRow = kSliceInputs * 2;      // bytes
constexpr int kOctet = 8;                        // rows: half of an instruction's weight rows, all its x rows
constexpr int kOctetBytes = kOctet * kSliceRow;  // bytes of an octet in a slice; slices are aligned to it
constexpr int kSliceChunks = kSliceRow / 16;

// Returns the row of an octet that the tensor core has in place i. The permutation avoids bank conflicts: the
// four rows that half a warp reads at once are in different banks.
__device__ __forceinline__ int row_in_place(int i) { return i % 4 * 2 + i / 4; }

// Returns the offset of a row's chunk in a slice.
__device__ __forceinline__ int chunk_at(int row, int chunk) {
    return row * kSliceRow + ((chunk ^ row % kOctet) << 4);
}

// Offsets of a lane's four inputs per step, in its row of an octet. The assignment of the 16 inputs to lanes
// is arbitrary, but the same for weights and x.
struct LaneSteps {
    int at[kSliceSteps];

    __device__ __forceinline__ LaneSteps() {
        const int row = row_in_place(threadIdx.x % 32 / 4), quarter = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kSliceSteps; ++i) at[i] = chunk_at(row, i * 2 + quarter / 2) + quarter % 2 * 8;
    }
};

// Multiplies two octets of weight rows with kTiles consecutive octets of x rows, over the first `steps` steps
// of a slice. The sums have the layout of matrix_unit.cuh, with rows and columns permuted as in row_in_place.
template <int kTiles, int kSums>
__device__ __forceinline__ void add_slice(float (&sums)[kSums][4], const LaneSteps& lane,
                                          const unsigned char* low, const unsigned char* high,
                                          const unsigned char* x, int steps) {
    static_assert(kTiles <= kSums, "a sum for each octet of x");
    uint2 lows[kSliceSteps], highs[kSliceSteps], xs[kSliceSteps][kTiles];
#pragma unroll
    for (int i = 0; i < kSliceSteps; ++i) {
        lows[i] = *reinterpret_cast<const uint2*>(low + lane.at[i]);
        highs[i] = *reinterpret_cast<const uint2*>(high + lane.at[i]);
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
            xs[i][j] = *reinterpret_cast<const uint2*>(x + j * kOctetBytes + lane.at[i]);
    }
#pragma unroll
    for (int i = 0; i < kSliceSteps; ++i) {
        if (i >= steps) break;
        const std::uint32_t a[4] = {lows[i].x, highs[i].x, lows[i].y, highs[i].y};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) multiply_add(sums[j], a, xs[i][j].x, xs[i][j].y);
    }
}

// Return the row, of 16, and the column, of 8, of a lane's sum number i.
__device__ __forceinline__ int row_of_sum(int i) {
    return i / 2 * kOctet + row_in_place(threadIdx.x % 32 / 4);
}
__device__ __forceinline__ int column_of_sum(int i) { return row_in_place(threadIdx.x % 4 * 2 + i % 2); }

}  // namespace cuda
}  // namespace apcbatch
