// Steps of a chain: 16 inputs of bfloat16 each, added in the matrix units, out of shared memory. There rows
// of weights and of x lie in slices of 64 inputs, as tensor copies of 128 bytes a row swizzle them: the
// chunks of 16 bytes of row r stand at their number xor r % 8. Must not know: how what is multiplied comes
// there.
#pragma once

#include "matrix_unit.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kSliceInputs = 64, kSliceSteps = kSliceInputs / 16;
constexpr int kSliceRow = kSliceInputs * 2;      // bytes
constexpr int kOctet = 8;                        // rows: half of a matrix instruction's of weights, its x
constexpr int kOctetBytes = kOctet * kSliceRow;  // of a slice; slices begin at multiples of it
constexpr int kSliceChunks = kSliceRow / 16;

// Which of eight rows the matrix units have in place i: so the four that half a warp reads at once lie in
// different banks.
__device__ __forceinline__ int row_in_place(int i) { return i % 4 * 2 + i / 4; }

// Where a chunk of a row lies in a slice.
__device__ __forceinline__ int chunk_at(int row, int chunk) {
    return row * kSliceRow + ((chunk ^ row % kOctet) << 4);
}

// Where a lane finds, of its row of an octet, its four inputs of each step. Which of the 16 they are is the
// same for weights and x, and nothing else matters.
struct LaneSteps {
    int at[kSliceSteps];

    __device__ __forceinline__ LaneSteps() {
        const int row = row_in_place(threadIdx.x % 32 / 4), quarter = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kSliceSteps; ++i) at[i] = chunk_at(row, i * 2 + quarter / 2) + quarter % 2 * 8;
    }
};

// Two octets of rows of weights times kTiles octets of x, which lie one behind the other: `steps` of a slice,
// or all. Sums are as matrix_unit.cuh has them, with rows and columns in place.
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
        for (int j = 0; j < kTiles; ++j) multiply_add<__nv_bfloat16>(sums[j], a, xs[i][j].x, xs[i][j].y);
    }
}

// Of a lane's i-th sum: the row among 16, and the column among 8.
__device__ __forceinline__ int row_of_sum(int i) {
    return i / 2 * kOctet + row_in_place(threadIdx.x % 32 / 4);
}
__device__ __forceinline__ int column_of_sum(int i) { return row_in_place(threadIdx.x % 4 * 2 + i % 2); }

}  // namespace cuda
}  // namespace apcbatch
