// What becomes of the results of a decode pass's products, one thread a result: the convolution after
// in_proj, the state's step after dt_proj, the residual after out_proj. The arithmetic of convolution and
// state is that of causal_conv.cu and selective_scan. Must not know: streams, meetings.
#pragma once

#include "decode.h"
#include "decode_block.cuh"
#include "element.cuh"
#include "step_state.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kMostDecodeStates = kStatesAtOnce, kMostDecodeTaps = 4;

// The slots that a sequence's state comes from and goes to; -1 for none.
struct StateSlots {
    int initial, final, kept;

    __device__ StateSlots(const RaggedParams& ragged, int sequence)
        : initial(int(ragged.initial_slots[sequence])), final(int(ragged.final_slots[sequence])) {
        const std::int64_t first = ragged.snapshot_cu[sequence];
        kept = first < ragged.snapshot_cu[sequence + 1] ? int(ragged.snapshot_slots[first]) : -1;
    }
};

// in_proj's results: one half goes on as z, the other through the convolution (see causal_conv.cu).
template <class T>
struct Convolve {
    const DecodeParams& p;
    const DecodeLayer& layer;
    T window[kMostDecodeTaps];  // the newest last
    float weight[kMostDecodeTaps], bias;
    const StateSlots slots;

    __device__ Convolve(const DecodeParams& params, const DecodeLayer& of, const StateSlots& its)
        : p(params), layer(of), slots(its) {}

    __device__ T* state(std::int64_t slot, int tap, int c) const {
        return static_cast<T*>(layer.conv) + slot * p.conv_stride + std::int64_t(tap) * p.shape.d_inner + c;
    }

    __device__ void prepare(int c, int b) {
        if (c >= p.shape.d_inner) return;
        const int width = p.shape.width;
        bias = layer.conv_bias ? layer.conv_bias[c] : 0.0f;
#pragma unroll
        for (int k = 0; k < kMostDecodeTaps; ++k) {
            weight[k] = layer.conv_weight[c * width + max(k - kMostDecodeTaps + width, 0)];
        }
#pragma unroll
        for (int k = 0; k < kMostDecodeTaps - 1 && width > 1; ++k) {
            const T kept = *state(max(slots.initial, 0), max(k - kMostDecodeTaps + width, 0), c);
            window[k] = slots.initial < 0 ? T(0.0f) : kept;
        }
    }

    __device__ void finish(int row, int b, float sum) {
        const int d = p.shape.d_inner, skipped = kMostDecodeTaps - p.shape.width;
        const T raw = narrow<T>(layer.in_bias ? sum + layer.in_bias[row] : sum);
        if (row >= d) {
            static_cast<T*>(p.z)[b * d + row - d] = raw;
            return;
        }
        window[kMostDecodeTaps - 1] = raw;
        float value = bias;
#pragma unroll
        for (int k = 0; k < kMostDecodeTaps; ++k) {
            if (k >= skipped) value = __fmaf_rn(weight[k], widen(window[k]), value);
        }
        static_cast<T*>(p.x)[b * d + row] = narrow<T>(silu(value));
#pragma unroll
        for (int k = 0; k < kMostDecodeTaps - 1; ++k) {
            if (k < skipped) continue;
            if (slots.kept >= 0) *state(slots.kept, k - skipped, row) = window[k + 1];
            if (slots.final >= 0) *state(slots.final, k - skipped, row) = window[k + 1];
        }
    }
};

// Results that are stored: (kRows, columns).
template <class Out>
struct Store {
    Out* to;
    int columns;

    __device__ void prepare(int, int) {}
    __device__ void finish(int row, int b, float sum) {
        to[std::int64_t(b) * columns + row] = narrow<Out>(sum);
    }
};

// out_proj's results: added to the residual.
struct AddTo {
    float* residual;
    const float* bias;
    int hidden;
    float before = 0.0f;

    __device__ AddTo(float* to, const float* out_bias, int h) : residual(to), bias(out_bias), hidden(h) {}
    __device__ void prepare(int row, int b) { before = __ldcg(residual + b * hidden + row); }
    __device__ void finish(int row, int b, float sum) {
        residual[b * hidden + row] = before + (bias ? sum + bias[row] : sum);
    }
};

// What a thread knows of its channel before the token's (dt, B, C) are there.
template <class T>
struct Channel {
    int c, b;
    bool takes;
    float h[kMostDecodeStates], A[kMostDecodeStates], x, gate, D, dt_bias;
    const StateSlots slots;

    // The block's row-th; a block has at most kItems channels over all vectors.
    __device__ Channel(const DecodeShape& shape, int row, int vector, const StateSlots& its)
        : b(vector), slots(its) {
        const Share share(shape.d_inner);
        c = share.begin + row;
        takes = c < share.end;
    }

    // Loads what there is of states that are not there, too, so that no load waits for another.
    __device__ void load(const DecodeParams& p, const DecodeLayer& layer) {
        if (!takes) return;
        const std::int64_t d = p.shape.d_inner;
        const float* from = layer.ssm + max(slots.initial, 0) * p.ssm_stride + c;
#pragma unroll
        for (int i = 0; i < kMostDecodeStates; ++i) {
            const int state = min(i, p.shape.d_state - 1);
            h[i] = from[state * d];
            A[i] = layer.A[state * d + c];
        }
        x = widen(__ldcg(static_cast<const T*>(p.x) + b * d + c));
        gate = widen(__ldcg(static_cast<const T*>(p.z) + b * d + c));
        D = layer.D[c], dt_bias = layer.dt_bias[c];
    }

    // B, C: 0 and -0 of states that are not there; see selective_step.cu.
    __device__ void step(const DecodeParams& p, const DecodeLayer& layer, float raw_dt,
                         const float (&B)[kMostDecodeStates], const float (&C)[kMostDecodeStates]) {
        const float dt = softplus(__fadd_rn(raw_dt, dt_bias)), input = __fmul_rn(dt, x);
        float rate[kMostDecodeStates];
#pragma unroll
        for (int i = 0; i < kMostDecodeStates; ++i) {
            h[i] = i < p.shape.d_state && slots.initial >= 0 ? h[i] : 0.0f;
            rate[i] = rate_of(A[i]);
        }
        float y = step_states(h, rate, dt, input, B, C);
        y = __fmul_rn(__fmaf_rn(D, x, y), silu(gate));
        static_cast<T*>(p.y)[b * p.shape.d_inner + c] = narrow<T>(y);
        write(p, layer, slots.kept);
        write(p, layer, slots.final);
    }

    __device__ void write(const DecodeParams& p, const DecodeLayer& layer, int slot) const {
        if (slot < 0) return;
        float* to = layer.ssm + slot * p.ssm_stride + c;
#pragma unroll
        for (int i = 0; i < kMostDecodeStates; ++i, to += p.shape.d_inner) {
            if (i < p.shape.d_state) *to = h[i];
        }
    }
};

// dt_proj's results: the raw dt of the channels, which are stepped with it.
template <class T>
struct Step {
    const DecodeParams& p;
    const DecodeLayer& layer;
    Channel<T>& channel;
    const float* low;  // (rows, r + 2n)

    __device__ void prepare(int, int) {}
    __device__ void finish(int, int b, float sum) {
        const int r = p.shape.dt_rank, n = p.shape.d_state;
        const float* row = low + b * (r + 2 * n);
        float B[kMostDecodeStates], C[kMostDecodeStates];
#pragma unroll
        for (int i = 0; i < kMostDecodeStates; ++i) {
            const int state = min(i, n - 1);
            B[i] = i < n ? row[r + state] : 0.0f;
            C[i] = i < n ? row[r + n + state] : -0.0f;
        }
        channel.step(p, layer, widen(narrow<T>(sum)), B, C);
    }
};

}  // namespace cuda
}  // namespace apcbatch
