// What the blocks of a decode launch are made of: how they share rows and wait for each other, and how the
// warps of one multiply a few vectors by a few rows of weights. Must not know: models.
//
// Invariant: a product is summed in an order that its number of columns settles: 16 bytes of neighbouring
// weights a thread, then pairs of lanes 16, 8, 4, 2, 1 apart, then the warps in ascending order. So a
// sequence's bits do not depend on how many sequences come together, nor on how many blocks there are.
#pragma once

#include "decode.h"
#include "element.cuh"
#include "weight_stream.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kWarps = 10, kReaders = 32 * kWarps;  // the threads of a block that compute
constexpr int kPartialStride = kWarps + 1;

template <class T>
constexpr int kVector = 16 / int(sizeof(T));

// A block's rows of a matrix of `total` rows.
struct Share {
    int begin, end;

    __device__ explicit Share(int total)
        : begin(int(std::int64_t(total) * blockIdx.x / gridDim.x)),
          end(int(std::int64_t(total) * (blockIdx.x + 1) / gridDim.x)) {}
};

// How many rows of weights one slot of the stream holds; each gives `rows` results, and a thread takes one.
__host__ __device__ constexpr int rows_a_slot(int row_bytes, int rows) {
    return kSlotBytes / row_bytes < kReaders / rows ? kSlotBytes / row_bytes : kReaders / rows;
}

// Waits for the block's readers; those who fill the stream go on.
__device__ __forceinline__ void sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(kReaders) : "memory"); }

// All blocks' readers, each of which has written what others read afterwards (not through L1).
class Meeting {
  public:
    __device__ explicit Meeting(unsigned* arrivals) : arrivals_(arrivals) {}

    __device__ void arrive() {
        sync_readers();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(arrivals_, 1u);
        }
        expected_ += gridDim.x;
    }

    __device__ void await() const {
        if (threadIdx.x == 0) {
            unsigned seen;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals_) : "memory");
            } while (seen < expected_);
        }
        sync_readers();
    }

  private:
    unsigned *arrivals_, expected_ = 0;
};

template <class T>
__device__ __forceinline__ void widen_vector(uint4 raw, float* to) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            to[i] = __uint_as_float(words[i]);
        } else {
            const float2 pair = widen_pair<T>(words[i]);
            to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
        }
    }
}

// The sums over a warp of kCount (a power of two, at most 32) values a lane: value i comes to the lanes whose
// number divided by 32 / kCount is i.
template <int kCount, int kDistance = 16>
__device__ __forceinline__ float warp_sums(float (&values)[kCount]) {
    if constexpr (kDistance == 0) {
        return values[0];
    } else if constexpr (kCount == 1) {
        values[0] += __shfl_xor_sync(0xffffffffu, values[0], kDistance);
        return warp_sums<1, kDistance / 2>(values);
    } else {
        const bool upper = threadIdx.x & kDistance;
        float half[kCount / 2];
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            const float keep = upper ? values[i + kCount / 2] : values[i];
            const float give = upper ? values[i] : values[i + kCount / 2];
            half[i] = keep + __shfl_xor_sync(0xffffffffu, give, kDistance);
        }
        return warp_sums<kCount / 2, kDistance / 2>(half);
    }
}

// A thread's columns of kRows vectors, as float32: kGroups groups of 16 bytes of weights, kReaders groups
// apart.
template <class T, int kRows, int kGroups>
struct Columns {
    float at[kRows][kGroups * kVector<T>];
    int groups;  // of a whole row

    __device__ explicit Columns(int columns) : groups(columns / kVector<T>) {}
    __device__ bool has(int g) const { return int(threadIdx.x) + g * kReaders < groups; }
    __device__ int first(int g) const { return (int(threadIdx.x) + g * kReaders) * kVector<T>; }

    // Rows (kRows, columns) that other blocks have written.
    __device__ void load(const T* from) {
        uint4 raw[kRows][kGroups];
#pragma unroll
        for (int b = 0; b < kRows; ++b) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                raw[b][g] = make_uint4(0, 0, 0, 0);
                const T* group = from + std::int64_t(b) * groups * kVector<T> + first(g);
                if (has(g)) raw[b][g] = __ldcg(reinterpret_cast<const uint4*>(group));
            }
        }
#pragma unroll
        for (int b = 0; b < kRows; ++b) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) widen_vector<T>(raw[b][g], at[b] + g * kVector<T>);
        }
    }
};

// Multiplies `count` rows of weights in shared memory by kRows vectors: each warp's part of the result of row
// i and vector b goes to partials[(i * kRows + b) * kPartialStride + warp].
template <class T, int kRows, int kGroups>
__device__ __forceinline__ void multiply(const unsigned char* weights, int count, int row_bytes,
                                         const Columns<T, kRows, kGroups>& x, float* partials) {
    constexpr int kAtOnce = 4 / kGroups, kSums = kAtOnce * kRows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int first = 0; first < count; first += kAtOnce) {
        uint4 raw[kAtOnce][kGroups];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const int at = (first + i) * row_bytes + x.first(g) * int(sizeof(T));
                raw[i][g] = make_uint4(0, 0, 0, 0);
                if (x.has(g) && first + i < count) raw[i][g] = *reinterpret_cast<const uint4*>(weights + at);
            }
        }
        float sums[kSums] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                float weight[kVector<T>];
                widen_vector<T>(raw[i][g], weight);
#pragma unroll
                for (int v = 0; v < kVector<T>; ++v) {
#pragma unroll
                    for (int b = 0; b < kRows; ++b) {
                        float& sum = sums[i * kRows + b];
                        sum = __fmaf_rn(weight[v], x.at[b][g * kVector<T> + v], sum);
                    }
                }
            }
        }
        const float sum = warp_sums<kSums>(sums);
        const int result = first * kRows + lane * kSums / 32;
        if (lane % (32 / kSums) == 0 && result < count * kRows)
            partials[result * kPartialStride + warp] = sum;
    }
}

// The block's share of weights (total, columns) times kRows vectors. For each result, one thread calls
// epilogue.prepare(row, b) before and epilogue.finish(row, b, sum) after.
template <class T, int kRows, int kGroups, class Epilogue>
__device__ __forceinline__ void product(WeightStream& stream, int total, const Columns<T, kRows, kGroups>& x,
                                        float* partials, Epilogue epilogue) {
    const Share share(total);
    const int row_bytes = x.groups * 16, per_slot = rows_a_slot(row_bytes, kRows);
    const int at_once = kReaders / kRows / per_slot * per_slot, b = threadIdx.x % kRows;
    for (int first = share.begin; first < share.end; first += at_once) {
        const int count = min(at_once, share.end - first), mine = first + int(threadIdx.x) / kRows;
        const bool takes = mine < first + count;
        if (takes) epilogue.prepare(mine, b);
        for (int row = 0; row < count; row += per_slot) {
            multiply<T, kRows, kGroups>(stream.next(), min(per_slot, count - row), row_bytes, x,
                                        partials + row * kRows * kPartialStride);
            stream.release();
        }
        sync_readers();
        float sum = 0.0f;
        for (int warp = 0; warp < kWarps; ++warp) sum += partials[threadIdx.x * kPartialStride + warp];
        if (takes) epilogue.finish(mine, b, sum);
        sync_readers();
    }
}

}  // namespace cuda
}  // namespace apcbatch
