// How the warps of a decode block multiply a few vectors by the block's rows of weights. Must not know:
// models.
//
// Invariant: a product is summed in an order that its number of columns settles: within a thread or the
// matrix units, within a warp, then over the warps in ascending order. So a sequence's bits do not depend on
// how many sequences come together, nor on how many blocks there are.
#pragma once

#include "decode_block.cuh"
#include "element.cuh"
#include "weight_stream.cuh"

namespace apcbatch {
namespace cuda {

template <class T>
constexpr int kVector = 16 / int(sizeof(T));

// How many rows of weights one slot of the stream holds; each gives `rows` results.
__host__ __device__ constexpr int rows_a_slot(int row_bytes, int rows) {
    return kSlotBytes / row_bytes < kItems / rows ? kSlotBytes / row_bytes : kItems / rows;
}

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

// The columns of kRows vectors that a thread multiplies by: kGroups groups of 16 bytes.
template <class T, int kRows, int kGroups>
struct Columns;

// The groups that a thread needs of vectors of at most `columns` columns.
template <class T>
constexpr int groups_of(int columns) {
    const int at_once = kReaders * (sizeof(T) == 4 ? 4 : 1);  // of bfloat16, eight threads have each group
    return (columns + at_once - 1) / at_once;
}

// float32: a thread has columns of all vectors, kReaders groups apart.
template <int kRows, int kCount>
struct Columns<float, kRows, kCount> {
    static constexpr int kGroups = kCount, kMine = kRows;  // groups and vectors of a thread
    float at[kMine][kGroups][4];
    int groups;  // of a vector

    __device__ explicit Columns(int columns) : groups(columns / 4) {}
    __device__ int group(int g) const { return int(threadIdx.x) + g * kReaders; }
    __device__ bool has(int g) const { return group(g) < groups; }
    // The group's first column; of a group that is not there, some other.
    __device__ int column(int g) const { return has(g) ? 4 * group(g) : 0; }
    static __device__ int vector(int mine) { return mine; }

    // Values of group g of vector `mine`.
    __device__ void put(int mine, int g, const float (&values)[4]) {
#pragma unroll
        for (int v = 0; v < 4; ++v) at[mine][g][v] = values[v];
    }

    // Vectors (kRows, columns) that other blocks have written.
    __device__ void load(const float* from) {
#pragma unroll
        for (int b = 0; b < kRows; ++b) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const float* group_at = from + std::int64_t(b) * 4 * groups + column(g);
                const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(group_at));
                widen_vector<float>(has(g) ? raw : make_uint4(0, 0, 0, 0), at[b][g]);
            }
        }
    }

    // to[b * kWarps + warp] = the warp's sum of values[b].
    static __device__ void sum_warp(float (&values)[kMine], float* to) {
        const float sum = warp_sums<kRows>(values);
        const int lane = threadIdx.x % 32;
        if (lane % (32 / kRows) == 0) to[lane * kRows / 32 * kWarps + threadIdx.x / 32] = sum;
    }
};

// bfloat16: a thread has columns of one vector, its lane / 4, for the matrix units; a warp has every
// kWarps-th run of four groups.
template <int kRows, int kCount>
struct Columns<__nv_bfloat16, kRows, kCount> {
    static constexpr int kGroups = kCount, kMine = 1;
    uint4 at[kGroups];
    int groups;

    __device__ explicit Columns(int columns) : groups(columns / 8) {}
    __device__ int group(int g) const {
        return 4 * (g * kWarps + int(threadIdx.x) / 32) + int(threadIdx.x % 4);
    }
    __device__ bool has(int g) const { return int(threadIdx.x % 32) / 4 < kRows && group(g) < groups; }
    __device__ int column(int g) const { return has(g) ? 8 * group(g) : 0; }
    static __device__ int vector(int) { return int(threadIdx.x % 32) / 4 % kRows; }

    __device__ void put(int, int g, const float (&values)[8]) {
        at[g] = make_uint4(join(narrow<__nv_bfloat16>(values[0]), narrow<__nv_bfloat16>(values[1])),
                           join(narrow<__nv_bfloat16>(values[2]), narrow<__nv_bfloat16>(values[3])),
                           join(narrow<__nv_bfloat16>(values[4]), narrow<__nv_bfloat16>(values[5])),
                           join(narrow<__nv_bfloat16>(values[6]), narrow<__nv_bfloat16>(values[7])));
    }

    __device__ void load(const __nv_bfloat16* from) {
        from += std::int64_t(vector(0)) * 8 * groups;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) at[g] = __ldcg(reinterpret_cast<const uint4*>(from + column(g)));
#pragma unroll
        for (int g = 0; g < kGroups; ++g) at[g] = has(g) ? at[g] : make_uint4(0, 0, 0, 0);
    }

    static __device__ void sum_warp(float (&values)[1], float* to) {
        values[0] += __shfl_xor_sync(0xffffffffu, values[0], 1);
        values[0] += __shfl_xor_sync(0xffffffffu, values[0], 2);
        if (threadIdx.x % 4 == 0 && threadIdx.x % 32 / 4 < kRows) {
            to[vector(0) * kWarps + threadIdx.x / 32] = values[0];
        }
    }
};

// Both of the following: `count` rows of weights in shared memory times kRows vectors; each warp's part of
// the result of row i and vector b goes to partials[(b * kRowsAtOnce + i) * kPartialStride + warp].
template <int kRows, int kGroups>
__device__ __forceinline__ void multiply(const unsigned char* weights, int count,
                                         const Columns<float, kRows, kGroups>& x, float* partials) {
    constexpr int kAtOnce = 4 / kGroups, kSums = kAtOnce * kRows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
        float sums[kSums] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const unsigned char* group_at = weights + 16 * ((first + i) * x.groups + x.group(g));
                uint4 raw = make_uint4(0, 0, 0, 0);
                if (x.has(g) && first + i < count) raw = *reinterpret_cast<const uint4*>(group_at);
                float weight[4];
                widen_vector<float>(raw, weight);
#pragma unroll
                for (int v = 0; v < 4; ++v) {
#pragma unroll
                    for (int b = 0; b < kRows; ++b) {
                        sums[i * kRows + b] = __fmaf_rn(weight[v], x.at[b][g][v], sums[i * kRows + b]);
                    }
                }
            }
        }
        const float sum = warp_sums<kSums>(sums);
        const int row = first + lane * kSums / 32 / kRows, b = lane * kSums / 32 % kRows;
        if (lane % (32 / kSums) == 0 && row < count) {
            partials[(b * kRowsAtOnce<kRows> + row) * kPartialStride + warp] = sum;
        }
    }
}

// Adds up the products of 8 rows of weights and 8 vectors over 16 of the 32 columns that four lanes hold
// together, in the matrix units. A lane gives 16 bytes of row lane / 4, and of vector lane / 4 the first and
// third word (sums[0] and [1] are what matters, the results of row lane / 4 and of vectors lane % 4 * 2 and +
// 1) or the second and fourth (sums[2] and [3]): the other half of the results mixes columns and is left
// alone.
__device__ __forceinline__ void multiply_16(float (&sums)[4], uint4 weight, std::uint32_t x0,
                                            std::uint32_t x1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(weight.x), "r"(weight.y), "r"(weight.z), "r"(weight.w), "r"(x0), "r"(x1));
}

// Not to be moved: several are to be on their way at once.
__device__ __forceinline__ uint4 load_shared(const unsigned char* from) {
    uint4 value;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(unsigned(__cvta_generic_to_shared(from))));
    return value;
}

// The products of the row of weights at `row` and the lane's vector. kWhole: every group of x is there; of
// one that is not, the row's first is multiplied by zero.
template <bool kWhole, class X>
__device__ __forceinline__ void multiply_row(const unsigned char* row, const X& x, float (&sums)[4][4]) {
    constexpr int kAtOnce = X::kGroups < 8 ? X::kGroups : 8;
#pragma unroll
    for (int from = 0; from < X::kGroups; from += kAtOnce) {
        uint4 weight[kAtOnce];
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) {
            const int group = kWhole ? x.group(0) + (from + g) * 4 * kWarps : x.group(from + g);
            weight[g] = load_shared(row + 16 * (kWhole || group < x.groups ? group : 0));
        }
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) {
            const uint4 columns = x.at[from + g];
            multiply_16(sums[g % 2], weight[g], columns.x, columns.z);
            multiply_16(sums[2 + g % 2], weight[g], columns.y, columns.w);
        }
    }
}

template <int kRows, int kGroups>
__device__ __forceinline__ void multiply(const unsigned char* weights, int count,
                                         const Columns<__nv_bfloat16, kRows, kGroups>& x, float* partials) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int first = 0; first < count; first += 8) {
        const int row = first + lane / 4;
        const unsigned char* row_at = weights + 16 * x.groups * min(row, count - 1);
        float sums[4][4] = {};
        if (x.groups == kGroups * kWarps * 4) {
            multiply_row<true>(row_at, x, sums);
        } else {
            multiply_row<false>(row_at, x, sums);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int b = lane % 4 * 2 + i;
            const float sum = (sums[0][i] + sums[1][i]) + (sums[2][2 + i] + sums[3][2 + i]);
            if (b < kRows && row < count) {
                partials[(b * kRowsAtOnce<kRows> + row) * kPartialStride + warp] = sum;
            }
        }
    }
}

// The block's share of weights (total, columns) times kRows vectors. For each result, one thread calls
// epilogue.prepare(row, b) before and epilogue.finish(row, b, sum) after.
template <class T, int kRows, int kGroups, class Epilogue>
__device__ __forceinline__ void product(WeightStream& stream, int total, const Columns<T, kRows, kGroups>& x,
                                        float* partials, Epilogue epilogue) {
    const Share share(total);
    const int per_slot = rows_a_slot(16 * x.groups, kRows);
    const int at_once = kRowsAtOnce<kRows> / per_slot * per_slot, b = vector_of_thread<kRows>();
#pragma unroll 1
    for (int first = share.begin; first < share.end; first += at_once) {
        const int count = min(at_once, share.end - first), mine = first + row_of_thread<kRows>();
        const bool takes = mine < first + count;
        if (takes) epilogue.prepare(mine, b);
#pragma unroll 1
        for (int row = 0; row < count; row += per_slot) {
            multiply(stream.next(), min(per_slot, count - row), x, partials + row * kPartialStride);
            stream.release();
        }
        sync_readers();
        if (takes) {
            float sum = 0.0f;
            for (int warp = 0; warp < kWarps; ++warp) sum += partials[threadIdx.x * kPartialStride + warp];
            epilogue.finish(mine, b, sum);
        }
        sync_readers();
    }
}

}  // namespace cuda
}  // namespace apcbatch
