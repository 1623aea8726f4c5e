// One tile of tokens of the selective scan, as the warps of a block see it: raw inputs copied ahead into
// shared memory, the steps prepared from them, and the gate. scan_walk.cuh goes over the tokens. Must not
// know: sequences, slots.
#pragma once

#include "element.cuh"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// The sizes of one kernel: elements T, N states a lane, S lanes a channel.
//
// Lane j of a channel walks j * lag tokens behind lane 0, so that the sum over the states runs through the
// lanes in ascending order, like a relay: its order, and with it every bit, is the same for every S. The rows
// before and after a tile are steps that change nothing, for the lanes that have not begun or have ended.
template <class Element, int kStates, int kLanes>
struct Shape {
    using T = Element;
    static constexpr int N = kStates, S = kLanes, states = N * S;
    static constexpr int warp_channels = 32 / S, block_channels = kWarps * warp_channels;
    static constexpr int lag = N <= 4 ? 2 : 1;  // with few states a lane, one token is shorter than a shuffle
    static constexpr int idle = lag * (S - 1);  // rows before a tile, and after it
    static constexpr int tokens = S == 1 ? 16 : states > 64 ? 16 : states > 32 ? 32 : S == 2 ? 24 : 64;
    static constexpr int rows = idle + tokens + idle + 2;  // the walk reads two rows ahead
    // Lanes that read different tokens meet different banks.
    static constexpr int step_row = 2 * warp_channels + (S > 1 ? 32 / S : 0);
    static constexpr int bc_row = 2 * states + (states >= 32 ? 4 : 0);
    static constexpr int rows_at_once = 2 * S;  // 32 lanes hold so many rows of the warp's channel pairs
    static constexpr int pairs = tokens / rows_at_once;
    static constexpr int bc_rows_at_once = kThreads / states;
    static constexpr int bc_pairs = (tokens + bc_rows_at_once - 1) / bc_rows_at_once;
    static_assert(states <= kThreads && tokens % rows_at_once == 0);
};

template <class Sh>
struct SharedMemory {
    static constexpr int kRaw = Sh::tokens * Sh::warp_channels;
    float bc[2][Sh::rows * Sh::bc_row];
    float steps[kWarps][Sh::rows * Sh::step_row];  // (dt, dt x); the walk puts y over dt
    typename Sh::T raw_dt[kWarps][kRaw], raw_x[kWarps][2][kRaw], raw_z[kWarps][2][kRaw];
};

// Copies that go on while the warp computes.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    const unsigned address = unsigned(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kBytes)
                 : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Rows of one input as a warp copies them: a lane takes one piece of every so many rows.
template <class Sh>
struct Source {
    using T = typename Sh::T;
    static constexpr int kRowBytes = Sh::warp_channels * int(sizeof(T));
    static constexpr int kPieceBytes = kRowBytes < 16 ? kRowBytes : 16, kPiece = kPieceBytes / int(sizeof(T));
    static constexpr int kPieces = kRowBytes / kPieceBytes, kRowsAtOnce = 32 / kPieces;
    const T* next;  // this lane's piece of the tile to copy next
    std::int64_t stride;

    __device__ __forceinline__ Source(const void* base, std::int64_t row_stride, std::int64_t first_row,
                                      std::int64_t c0, int lane)
        : next(static_cast<const T*>(base) + (first_row + lane / kPieces) * row_stride + c0 +
               lane % kPieces * kPiece),
          stride(row_stride) {}

    // `count` rows; `whole`: every piece is inside the channels and aligned.
    __device__ __forceinline__ void copy(T* to, int lane, int count, std::int64_t channels_left, bool whole) {
        const int row = lane / kPieces, column = lane % kPieces * kPiece;
        to += row * Sh::warp_channels + column;
        if (whole) {
            const T* from = next;
            const std::int64_t jump = kRowsAtOnce * stride;
#pragma unroll
            for (int r = 0; r < Sh::tokens; r += kRowsAtOnce, from += jump) {
                if (row + r < count) copy_async<kPieceBytes>(to + r * Sh::warp_channels, from);
            }
        } else {
            copy_elements(to, next, stride, count - row,
                          int(min(std::int64_t(kPiece), channels_left - column)));
        }
        next += count * stride;
    }

    __device__ __noinline__ static void copy_elements(T* to, const T* from, std::int64_t stride, int rows,
                                                      int columns) {
        for (int r = 0; r < rows; r += kRowsAtOnce) {
            for (int i = 0; i < columns; ++i) to[r * Sh::warp_channels + i] = from[r * stride + i];
        }
    }
};

// The pairs of channels that this lane prepares and gates: the same for each tile.
template <class Sh>
struct PairLanes {
    int row, channel;   // the first row, and the first channel within the warp's
    bool inside, both;  // whether the first, and the second, of the two channels exist

    __device__ __forceinline__ PairLanes(int lane, std::int64_t channels_left)
        : row(lane / (Sh::warp_channels / 2)),
          channel(2 * (lane % (Sh::warp_channels / 2))),
          inside(channel < channels_left),
          both(channel + 1 < channels_left) {}

    __device__ __forceinline__ float2 parameters(const float* of, std::int64_t c0) const {
        if (of == nullptr) return make_float2(0.0f, 0.0f);
        return make_float2(inside ? of[c0 + channel] : 0.0f, both ? of[c0 + channel + 1] : 0.0f);
    }

    // The pair of this lane's i-th row.
    __device__ __forceinline__ float2 pair(const typename Sh::T* raw, int i) const {
        const typename Sh::T* at = raw + (row + i * Sh::rows_at_once) * Sh::warp_channels + channel;
        return widen_pair<typename Sh::T>(*reinterpret_cast<const Pair<typename Sh::T>*>(at));
    }
};

// A step that leaves a state as it is: exp2(0 A) h + (-0) 0, where -0 keeps the sign of a zero.
__device__ __forceinline__ float2 idle_step() { return make_float2(0.0f, -0.0f); }

// Makes every row idle; the tiles then write theirs between the first and last Sh::idle ones.
template <class Sh>
__device__ __forceinline__ void clear(SharedMemory<Sh>& memory, int warp, int lane) {
    for (int i = threadIdx.x; i < 2 * Sh::rows * Sh::bc_row; i += kThreads) (&memory.bc[0][0])[i] = 0.0f;
    float2* steps = reinterpret_cast<float2*>(memory.steps[warp]);
    for (int i = lane; i < Sh::rows * Sh::step_row / 2; i += 32) steps[i] = idle_step();
}

// The steps of the warp's channels; rows of the tile past `count` become idle.
template <class Sh>
__device__ __forceinline__ void prepare_steps(float* steps, const PairLanes<Sh>& own, float2 bias,
                                              const typename Sh::T* raw_dt, const typename Sh::T* raw_x,
                                              int count) {
    float* to = steps + own.row * Sh::step_row + 2 * own.channel;
#pragma unroll
    for (int i = 0; i < Sh::pairs; ++i) {
        const float2 raw = own.pair(raw_dt, i), x = own.pair(raw_x, i);
        const float a = softplus(__fadd_rn(raw.x, bias.x)), b = softplus(__fadd_rn(raw.y, bias.y));
        *reinterpret_cast<float4*>(to + i * Sh::rows_at_once * Sh::step_row) =
            make_float4(a, __fmul_rn(a, x.x), b, __fmul_rn(b, x.y));
    }
    if (count == Sh::tokens) return;
    for (int i = 0; i < Sh::pairs; ++i) {
        if (own.row + i * Sh::rows_at_once < count) continue;
        float2* idle = reinterpret_cast<float2*>(to + i * Sh::rows_at_once * Sh::step_row);
        idle[0] = idle[1] = idle_step();
    }
}

// B and C of a tile, which the block's threads fetch together, a thread one column of every so many rows.
template <class Sh>
struct SharedColumn {
    using T = typename Sh::T;
    int row, item;
    bool is_B, inside, both, paired;
    const T* next;
    std::int64_t stride;
    Pair<T> raw[Sh::bc_pairs];

    __device__ __forceinline__ SharedColumn(const ScanParams& p, std::int64_t first_row, bool may_pair)
        : row(threadIdx.x / Sh::states),
          item(threadIdx.x % Sh::states),
          is_B(item < Sh::states / 2),
          paired(may_pair) {
        const int state = 2 * (item % (Sh::states / 2));
        inside = state < p.d_state;
        both = state + 1 < p.d_state;
        stride = is_B ? p.B_stride : p.C_stride;
        next = static_cast<const T*>(is_B ? p.B : p.C) + (first_row + row) * stride + state;
    }

    __device__ __forceinline__ void fetch(int count) {
        const int rows = inside ? count - row : 0;
        if (paired) {
            load<true>(rows);
        } else {
            load<false>(rows);
        }
        next += count * stride;
    }

    template <bool kPaired>
    __device__ __forceinline__ void load(int rows) {
        const T* from = next;
        const std::int64_t jump = Sh::bc_rows_at_once * stride;
#pragma unroll
        for (int i = 0; i < Sh::bc_pairs; ++i, from += jump) {
            raw[i] = i * Sh::bc_rows_at_once < rows ? load_pair<T>(from, both, kPaired) : zero_pair(T(0.0f));
        }
    }

    // Laid out as (B0, B1, C0, C1), (B2, B3, C2, C3) ...
    __device__ __forceinline__ void store(float* bc) const {
        float* to = bc + row * Sh::bc_row + 4 * (item % (Sh::states / 2)) + (is_B ? 0 : 2);
#pragma unroll
        for (int i = 0; i < Sh::bc_pairs; ++i) {
            if (Sh::tokens % Sh::bc_rows_at_once == 0 || row + i * Sh::bc_rows_at_once < Sh::tokens) {
                *reinterpret_cast<float2*>(to + i * Sh::bc_rows_at_once * Sh::bc_row) = widen_pair<T>(raw[i]);
            }
        }
    }
};

// What becomes of the sums: y + D x, gated by z where there is one, to the output.
template <class Sh>
struct Finish {
    using T = typename Sh::T;
    T* out;  // this lane's first row and channel
    std::int64_t stride;
    float2 D;
    bool gated, paired;

    __device__ __forceinline__ void tile(const float* steps, const PairLanes<Sh>& own, const T* raw_x,
                                         const T* raw_z, int count) {
        const float* from = steps + own.row * Sh::step_row + 2 * own.channel;
        const int rows = own.inside ? count - own.row : 0;
        if (gated && paired) {
            T* to = out;
            const std::int64_t jump = Sh::rows_at_once * stride;
#pragma unroll
            for (int i = 0; i < Sh::pairs; ++i, to += jump) {
                const float2 y = gate(sum(from, own, raw_x, i), own.pair(raw_z, i));
                if (i * Sh::rows_at_once < rows) store_pair<T>(to, y, true, true);
            }
        } else {
            for (int i = 0; i < Sh::pairs && i * Sh::rows_at_once < rows; ++i) {
                float2 y = sum(from, own, raw_x, i);
                if (gated) y = gate(y, own.pair(raw_z, i));
                store_pair<T>(out + i * Sh::rows_at_once * stride, y, own.both, paired);
            }
        }
        out += count * stride;
    }

    __device__ __forceinline__ float2 sum(const float* from, const PairLanes<Sh>& own, const T* raw_x,
                                          int i) const {
        const float4 step = *reinterpret_cast<const float4*>(from + i * Sh::rows_at_once * Sh::step_row);
        const float2 x = own.pair(raw_x, i);
        return make_float2(__fmaf_rn(D.x, x.x, step.x), __fmaf_rn(D.y, x.y, step.z));
    }

    __device__ __forceinline__ static float2 gate(float2 y, float2 z) {
        return make_float2(__fmul_rn(y.x, silu(z.x)), __fmul_rn(y.y, silu(z.y)));
    }
};

}  // namespace cuda
}  // namespace apcbatch
