// One tile of tokens of the selective scan, before and after the recurrence: copy raw inputs to shared
// memory, prepare the steps, then sum over lanes and gate. scan_walk.cuh runs the recurrence (the walk).
#pragma once

#include "async_copy.cuh"
#include "element.cuh"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {

// Sizes of one kernel. T: element type. N: states per lane. S: lanes per channel. K: channels per lane.
//
// A block has W walker warps, which run the recurrence over the tokens, each for its own channels. Its H
// helper warps copy inputs, prepare steps and finish sums while the walkers process another tile. With H = 0
// the walkers do both, alternately.
template <class Element, int kStates, int kLanes, int kChannels, int kWalkers, int kHelpers>
struct Shape {
    using T = Element;
    static constexpr int N = kStates, S = kLanes, K = kChannels, W = kWalkers, H = kHelpers;
    static constexpr int states = N * S, threads = 32 * (W + H);
    static constexpr int blocks_at_once = H == 0   ? 12 / W
                                          : N == 8 ? 2
                                                   : 1;  // per multiprocessor; limits the registers
    static constexpr int warp_channels = K * 32 / S, channels = W * warp_channels;
    static constexpr int tokens = H == 0 ? 16 : N == 2 ? 64 : 32;
    static constexpr int unroll = N == 2 ? 4 : N == 4 ? 2 : 1;  // tokens of one block of the walk
    static constexpr int rows = tokens + 2 * unroll;            // the walk reads two blocks ahead
    // Steps are stored by blocks of the walk: dt (channel, token), then dt x.
    static constexpr int inputs = channels * unroll, step_block = 2 * inputs;
    static constexpr int sum_warp =
        32 * K + 4;  // padded, so that threads that read adjacent channels use different banks
    static constexpr int sum_row = W * sum_warp;
    static constexpr int bc_row = 2 * states;
    // Threads that prepare and finish, and buffers that let them process other tiles than the walk.
    static constexpr int helping = 32 * (H == 0 ? W : H), buffers = H == 0 ? 1 : 2;
    // Raw dt, B and C are kept until a tile is prepared, x and z until it is finished. Helpers copy two tiles
    // ahead.
    static constexpr int raw_buffers = H == 0 ? 1 : 3, kept_buffers = H == 0 ? 2 : 5;
    static constexpr int row_pairs = channels / 2, rows_at_once = helping / row_pairs;
    static constexpr int pairs = tokens / rows_at_once;  // pairs of channels per helping thread and tile
    static_assert(K <= 2 && helping % row_pairs == 0 && tokens % rows_at_once == 0 &&
                  tokens % (4 * unroll) == 0);
};

template <class Sh>
struct SharedMemory {
    using T = typename Sh::T;
    static constexpr int kRaw = Sh::tokens * Sh::channels;
    float bc[Sh::buffers][Sh::rows * Sh::bc_row];
    float steps[Sh::buffers][Sh::rows / Sh::unroll * Sh::step_block];
    float sums[Sh::buffers][Sh::tokens * Sh::sum_row];  // partial sums of each lane, for its K channels
    T raw_dt[Sh::raw_buffers][kRaw], raw_x[Sh::kept_buffers][kRaw], raw_z[Sh::kept_buffers][kRaw];
    T raw_bc[Sh::raw_buffers][Sh::tokens * Sh::bc_row];  // B, then C
};

// Starts an asynchronous copy. to: address in shared memory.
template <int kBytes>
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
}

// Returns the address `t` rows of `bytes` bytes after `first`, in global memory, by one instruction.
template <class T>
__device__ __forceinline__ T* row_at(T* first, int t, int bytes) {
    T* row;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(row) : "r"(t), "r"(bytes), "l"(first));
    __builtin_assume(__isGlobal(row));
    return row;
}

// Copies rows of one input: kColumns elements to rows of kPitch. A thread copies one piece in every
// kRowsAtOnce-th row.
template <class Sh, int kColumns, int kPitch>
struct Source {
    using T = typename Sh::T;
    static constexpr int kRowBytes = kColumns * int(sizeof(T));
    static constexpr int kPieceBytes = kRowBytes % 16 == 0 ? 16 : kRowBytes % 8 == 0 ? 8 : 4;
    static constexpr int kPiece = kPieceBytes / int(sizeof(T)), kPieces = kColumns / kPiece;
    static constexpr int kRowsAtOnce = Sh::helping / kPieces;
    const T* first;       // this thread's first piece in the sequence
    int stride;           // row stride in bytes
    int row, to, inside;  // first row; index of the first piece in a tile; elements of a piece that exist
    bool whole;           // pieces are aligned, so that one copy takes a whole piece

    __device__ __forceinline__ Source(const void* base, std::int64_t row_stride, std::int64_t first_row,
                                      std::int64_t c0, std::int64_t columns, int thread, bool aligned)
        : stride(int(row_stride * sizeof(T))), row(thread / kPieces), whole(aligned) {
        const int column = thread % kPieces * kPiece;
        first = static_cast<const T*>(base) + (first_row + row) * row_stride + c0 + column;
        to = row * kPitch + column;
        inside = row < kRowsAtOnce ? int(min(std::int64_t(kPiece), columns - c0 - column)) : 0;
    }

    // Copies `count` rows, beginning at the sequence's token t. shared: address of `raw` in shared memory.
    __device__ __forceinline__ void copy(T* raw, unsigned shared, int t, int count) const {
        const int rows = inside > 0 ? count - row : 0;
        if (whole) {
            shared += to * int(sizeof(T));
#pragma unroll
            for (int r = 0; r < Sh::tokens; r += kRowsAtOnce) {
                if (r < rows) {
                    copy_async<kPieceBytes>(shared + r * kPitch * int(sizeof(T)),
                                            row_at(first, t + r, stride));
                }
            }
        } else {
            copy_elements(raw + to, row_at(first, t, stride), stride, rows, inside);
        }
    }

    __device__ __noinline__ static void copy_elements(T* to, const T* from, int stride, int rows,
                                                      int columns) {
        for (int r = 0; r < rows; r += kRowsAtOnce) {
            for (int i = 0; i < columns; ++i) to[r * kPitch + i] = row_at(from, r, stride)[i];
        }
    }
};

// Pair of channels that a helping thread prepares and gates, in every rows_at_once-th row.
template <class Sh>
struct OwnPair {
    int row, channel;   // first row; first channel, counted within the block
    bool inside, both;  // the first channel exists; the second one too

    __device__ __forceinline__ OwnPair(int thread, std::int64_t channels_left)
        : row(thread / Sh::row_pairs),
          channel(2 * (thread % Sh::row_pairs)),
          inside(channel < channels_left),
          both(channel + 1 < channels_left) {}

    __device__ __forceinline__ float2 parameters(const float* of, std::int64_t c0) const {
        if (of == nullptr) return make_float2(0.0f, 0.0f);
        return make_float2(inside ? of[c0 + channel] : 0.0f, both ? of[c0 + channel + 1] : 0.0f);
    }

    // Returns the pair of this thread's row number i.
    __device__ __forceinline__ float2 pair(const typename Sh::T* raw, int i) const {
        using T = typename Sh::T;
        const T* at = raw + (row + i * Sh::rows_at_once) * Sh::channels + channel;
        return widen_pair<T>(*reinterpret_cast<const Pair<T>*>(at));
    }
};

// Rows to read from shared memory before the first store to it, as the compiler cannot reorder them.
template <class Sh>
constexpr int kAtOnce = Sh::pairs < 4 ? Sh::pairs : 4;

// Prepares the steps of the block's channels. Rows past `count` leave states unchanged: h = exp2(0 A) h +
// (-0) 0, where -0 keeps the sign of a zero.
template <class Sh>
__device__ __forceinline__ void prepare_steps(float* steps, const OwnPair<Sh>& own, float2 bias,
                                              const typename Sh::T* raw_dt, const typename Sh::T* raw_x,
                                              int count) {
    const auto store = [&](int i, float2 dt, float2 input) {
        const int row = own.row + i * Sh::rows_at_once;
        float* to = steps + row / Sh::unroll * Sh::step_block + own.channel * Sh::unroll + row % Sh::unroll;
        to[0] = dt.x;
        to[Sh::unroll] = dt.y;
        to[Sh::inputs] = input.x;
        to[Sh::inputs + Sh::unroll] = input.y;
    };
#pragma unroll
    for (int first = 0; first < Sh::pairs; first += kAtOnce<Sh>) {
        float2 dt[kAtOnce<Sh>], x[kAtOnce<Sh>];
#pragma unroll
        for (int i = 0; i < kAtOnce<Sh>; ++i)
            dt[i] = own.pair(raw_dt, first + i), x[i] = own.pair(raw_x, first + i);
#pragma unroll
        for (int i = 0; i < kAtOnce<Sh>; ++i) {
            dt[i].x = softplus(__fadd_rn(dt[i].x, bias.x));
            dt[i].y = softplus(__fadd_rn(dt[i].y, bias.y));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce<Sh>; ++i) {
            store(first + i, dt[i], make_float2(__fmul_rn(dt[i].x, x[i].x), __fmul_rn(dt[i].y, x[i].y)));
        }
    }
    if (count == Sh::tokens) return;
    for (int i = 0; i < Sh::pairs; ++i) {
        if (own.row + i * Sh::rows_at_once < count) continue;
        store(i, make_float2(0.0f, 0.0f), make_float2(-0.0f, -0.0f));
    }
}

// Widens B and C of a tile to (B0, B1, C0, C1), (B2, B3, C2, C3) ... Rows past `count` get B = 0.
template <class Sh>
struct WidenBC {
    using T = typename Sh::T;
    static constexpr int kPairs = Sh::states / 2, kItems = Sh::tokens * kPairs;
    static constexpr int kOwn = (kItems + Sh::helping - 1) / Sh::helping;  // items per thread

    // Fills absent values in a thread's part of the raw rows.
    __device__ __noinline__ static void complete(T* raw, int thread, int count, int d_state) {
        for (int item = thread; item < kItems; item += Sh::helping) {
            const int row = item / kPairs, state = 2 * (item % kPairs);
            for (int i = state; i < state + 2; ++i) {
                if (i < d_state && row < count) continue;
                raw[row * Sh::bc_row + i] = T(0.0f);
                raw[row * Sh::bc_row + Sh::states + i] = T(-0.0f);
            }
        }
    }

    __device__ __forceinline__ static void tile(float* bc, T* raw, int thread, int count, int d_state) {
        if (count < Sh::tokens || d_state < Sh::states) complete(raw, thread, count, d_state);
        Pair<T> B[kOwn], C[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int item = thread + i * Sh::helping;
            if (kItems % Sh::helping != 0 && item >= kItems) break;
            const T* from = raw + item / kPairs * Sh::bc_row + 2 * (item % kPairs);
            B[i] = *reinterpret_cast<const Pair<T>*>(from);
            C[i] = *reinterpret_cast<const Pair<T>*>(from + Sh::states);
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int item = thread + i * Sh::helping;
            if (kItems % Sh::helping != 0 && item >= kItems) break;
            const float2 b = widen_pair<T>(B[i]), c = widen_pair<T>(C[i]);
            reinterpret_cast<float4*>(bc)[item] = make_float4(b.x, b.y, c.x, c.y);
        }
    }
};

// Finishes a tile: adds D x to the sums, gates by z if present, and stores the output.
template <class Sh>
struct Finish {
    using T = typename Sh::T;
    static constexpr int kOutputs = Sh::pairs < 2 ? Sh::pairs : 2;  // pairs computed before they are stored
    T* first;    // output of this thread's first row and channel in the sequence
    int stride;  // row stride in bytes
    float2 D;
    bool gated, paired;

    // Finishes `count` rows, beginning at the sequence's token t.
    __device__ __forceinline__ void tile(const float* sums, const OwnPair<Sh>& own, const T* raw_x,
                                         const T* raw_z, int t, int count) const {
        const float* from = sums + own.row * Sh::sum_row + own.channel / Sh::warp_channels * Sh::sum_warp +
                            own.channel % Sh::warp_channels * Sh::S;
        const int rows = own.inside ? count - own.row : 0;
        if (gated && paired) {
#pragma unroll
            for (int i = 0; i < Sh::pairs; i += kOutputs) {
                float2 y[kOutputs];
#pragma unroll
                for (int j = 0; j < kOutputs; ++j) {
                    y[j] = gate(sum(from, own, raw_x, i + j), own.pair(raw_z, i + j));
                }
#pragma unroll
                for (int j = 0; j < kOutputs; ++j) {
                    const int r = (i + j) * Sh::rows_at_once;
                    if (r < rows) store_pair<T>(row_at(first, t + r, stride), y[j], true, true);
                }
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < Sh::pairs && i * Sh::rows_at_once < rows; ++i) {
                float2 y = sum(from, own, raw_x, i);
                if (gated) y = gate(y, own.pair(raw_z, i));
                store_pair<T>(row_at(first, t + i * Sh::rows_at_once, stride), y, own.both, paired);
            }
        }
    }

    // Returns the sums over lanes plus D x, for the pair in this thread's row number i.
    __device__ __forceinline__ float2 sum(const float* sums, const OwnPair<Sh>& own, const T* raw_x,
                                          int i) const {
        const float* from = sums + i * Sh::rows_at_once * Sh::sum_row;
        float flat[2 * Sh::S], parts[2][Sh::S];
        if constexpr (Sh::S == 1) {
            const float2 two = *reinterpret_cast<const float2*>(from);
            flat[0] = two.x, flat[1] = two.y;
        } else {
#pragma unroll
            for (int j = 0; j < 2 * Sh::S; j += 4) {
                const float4 four = *reinterpret_cast<const float4*>(from + j);
                flat[j] = four.x, flat[j + 1] = four.y, flat[j + 2] = four.z, flat[j + 3] = four.w;
            }
        }
#pragma unroll
        for (int j = 0; j < Sh::S; ++j) {
            parts[0][j] = flat[Sh::K == 2 ? 2 * j : j];
            parts[1][j] = flat[Sh::K == 2 ? 2 * j + 1 : Sh::S + j];
        }
        const float2 x = own.pair(raw_x, i);
        return make_float2(__fmaf_rn(D.x, x.x, join_lanes(parts[0])),
                           __fmaf_rn(D.y, x.y, join_lanes(parts[1])));
    }

    __device__ __forceinline__ static float join_lanes(const float* parts) {
        constexpr int kGroup = Sh::states <= 16 ? Sh::S : 16 / Sh::N;
        float y = tree_sum<kGroup>(parts);
#pragma unroll
        for (int j = kGroup; j < Sh::S; j += kGroup) y = __fadd_rn(y, tree_sum<kGroup>(parts + j));
        return y;
    }

    __device__ __forceinline__ static float2 gate(float2 y, float2 z) {
        return make_float2(__fmul_rn(y.x, silu(z.x)), __fmul_rn(y.y, silu(z.y)));
    }
};

}  // namespace cuda
}  // namespace apcbatch
