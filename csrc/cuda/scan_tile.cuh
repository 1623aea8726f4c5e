// One tile of tokens of the selective scan, as the threads see it that prepare it for the walk and finish it
// afterwards: raw inputs copied ahead into shared memory, the steps prepared from them, the sums and the
// gate. scan_walk.cuh goes over the tokens. Must not know: sequences, slots.
#pragma once

#include "async_copy.cuh"
#include "element.cuh"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {

// The sizes of one kernel: elements T, N states a lane, S lanes a channel, K channels a lane.
//
// A block has W warps that walk over the tokens, each with channels of its own, and H warps that help them:
// they copy inputs, prepare steps and finish sums while the walkers are at another tile. With H = 0 the
// walkers do that themselves, in turn.
template <class Element, int kStates, int kLanes, int kChannels, int kWalkers, int kHelpers>
struct Shape {
    using T = Element;
    static constexpr int N = kStates, S = kLanes, K = kChannels, W = kWalkers, H = kHelpers;
    static constexpr int states = N * S, threads = 32 * (W + H);
    static constexpr int blocks_at_once = H == 0   ? 12 / W
                                          : N == 8 ? 2
                                                   : 1;  // a multiprocessor: bounds the registers
    static constexpr int warp_channels = K * 32 / S, channels = W * warp_channels;
    static constexpr int tokens = H == 0 ? 16 : N == 2 ? 64 : 32;
    static constexpr int unroll = N == 2 ? 4 : N == 4 ? 2 : 1;  // tokens of one block of the walk
    static constexpr int rows = tokens + 2 * unroll;            // the walk reads two blocks ahead
    // The steps lie in the blocks of the walk: dt by channel and token, then dt x.
    static constexpr int inputs = channels * unroll, step_block = 2 * inputs;
    static constexpr int sum_warp =
        32 * K + 4;  // threads that read neighbouring channels meet different banks
    static constexpr int sum_row = W * sum_warp;
    static constexpr int bc_row = 2 * states;
    // The threads that prepare and finish, and how many buffers let them be at other tiles than the walk.
    static constexpr int helping = 32 * (H == 0 ? W : H), buffers = H == 0 ? 1 : 2;
    // Raw dt, B and C until a tile is prepared, x and z until it is finished; helpers copy two tiles ahead.
    static constexpr int raw_buffers = H == 0 ? 1 : 3, kept_buffers = H == 0 ? 2 : 5;
    static constexpr int row_pairs = channels / 2, rows_at_once = helping / row_pairs;
    static constexpr int pairs =
        tokens / rows_at_once;  // of channels, that each of these threads has in a tile
    static_assert(K <= 2 && helping % row_pairs == 0 && tokens % rows_at_once == 0 &&
                  tokens % (4 * unroll) == 0);
};

template <class Sh>
struct SharedMemory {
    using T = typename Sh::T;
    static constexpr int kRaw = Sh::tokens * Sh::channels;
    float bc[Sh::buffers][Sh::rows * Sh::bc_row];
    float steps[Sh::buffers][Sh::rows / Sh::unroll * Sh::step_block];
    float sums[Sh::buffers][Sh::tokens * Sh::sum_row];  // what each lane adds, for its K channels
    T raw_dt[Sh::raw_buffers][kRaw], raw_x[Sh::kept_buffers][kRaw], raw_z[Sh::kept_buffers][kRaw];
    T raw_bc[Sh::raw_buffers][Sh::tokens * Sh::bc_row];  // B, then C
};

// Copies that go on while the thread computes; `to`: an address in shared memory.
template <int kBytes>
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
}

// The row of global memory that is `t` rows of so many bytes after this one, in one instruction.
template <class T>
__device__ __forceinline__ T* row_at(T* first, int t, int bytes) {
    T* row;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(row) : "r"(t), "r"(bytes), "l"(first));
    __builtin_assume(__isGlobal(row));
    return row;
}

// Rows of one input as the helping threads copy them, kColumns elements into rows of kPitch: a thread takes
// one piece of every so many rows.
template <class Sh, int kColumns, int kPitch>
struct Source {
    using T = typename Sh::T;
    static constexpr int kRowBytes = kColumns * int(sizeof(T));
    static constexpr int kPieceBytes = kRowBytes % 16 == 0 ? 16 : kRowBytes % 8 == 0 ? 8 : 4;
    static constexpr int kPiece = kPieceBytes / int(sizeof(T)), kPieces = kColumns / kPiece;
    static constexpr int kRowsAtOnce = Sh::helping / kPieces;
    const T* first;       // this thread's first piece of the sequence
    int stride;           // bytes
    int row, to, inside;  // to: where its first piece goes; inside: how many of a piece's elements exist
    bool whole;           // they may be read at once

    __device__ __forceinline__ Source(const void* base, std::int64_t row_stride, std::int64_t first_row,
                                      std::int64_t c0, std::int64_t columns, int thread, bool aligned)
        : stride(int(row_stride * sizeof(T))), row(thread / kPieces), whole(aligned) {
        const int column = thread % kPieces * kPiece;
        first = static_cast<const T*>(base) + (first_row + row) * row_stride + c0 + column;
        to = row * kPitch + column;
        inside = row < kRowsAtOnce ? int(min(std::int64_t(kPiece), columns - c0 - column)) : 0;
    }

    // `count` rows from the sequence's token t on; `shared`: the address of `raw` in shared memory.
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

// The pair of channels that a helping thread prepares and gates, in every so many rows.
template <class Sh>
struct OwnPair {
    int row, channel;   // the first row, and the first channel within the block's
    bool inside, both;  // whether the first, and the second, of the two channels exist

    __device__ __forceinline__ OwnPair(int thread, std::int64_t channels_left)
        : row(thread / Sh::row_pairs),
          channel(2 * (thread % Sh::row_pairs)),
          inside(channel < channels_left),
          both(channel + 1 < channels_left) {}

    __device__ __forceinline__ float2 parameters(const float* of, std::int64_t c0) const {
        if (of == nullptr) return make_float2(0.0f, 0.0f);
        return make_float2(inside ? of[c0 + channel] : 0.0f, both ? of[c0 + channel + 1] : 0.0f);
    }

    // The pair of this thread's i-th row.
    __device__ __forceinline__ float2 pair(const typename Sh::T* raw, int i) const {
        using T = typename Sh::T;
        const T* at = raw + (row + i * Sh::rows_at_once) * Sh::channels + channel;
        return widen_pair<T>(*reinterpret_cast<const Pair<T>*>(at));
    }
};

// Reads of shared memory that come before the stores to it: the compiler cannot move them there.
template <class Sh>
constexpr int kAtOnce = Sh::pairs < 4 ? Sh::pairs : 4;

// The steps of the block's channels. Rows of the tile past `count` leave a state as it is: exp2(0 A) h + (-0)
// 0, where -0 keeps the sign of a zero.
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

// B and C of a tile, widened, as (B0, B1, C0, C1), (B2, B3, C2, C3) ...; rows past `count` have B = 0.
template <class Sh>
struct WidenBC {
    using T = typename Sh::T;
    static constexpr int kPairs = Sh::states / 2, kItems = Sh::tokens * kPairs;
    static constexpr int kOwn = (kItems + Sh::helping - 1) / Sh::helping;  // of a thread

    // Puts what is absent into a thread's own part of the raw rows.
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

// What becomes of the sums: y + D x, gated by z where there is one, to the output.
template <class Sh>
struct Finish {
    using T = typename Sh::T;
    static constexpr int kOutputs = Sh::pairs < 2 ? Sh::pairs : 2;  // pairs computed before they are stored
    T* first;    // this thread's first row and channel of the sequence
    int stride;  // bytes
    float2 D;
    bool gated, paired;

    // `count` rows from the sequence's token t on.
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

    // The pair's sums over its lanes, of this thread's i-th row, and D x.
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
