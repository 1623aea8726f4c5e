// Fused kernels of a mixer for decode passes of few sequences: in_proj with the convolution, and in Mamba-1
// dt_proj with the state's step. The bits equal those of the product and the op run separately.
#include "few_rows.cuh"
#include "quads.cuh"
#include "step_state.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kTaps = 4;  // maximum taps

// Slots that a sequence's state is read from and written to; -1: none.
struct StateSlots {
    int initial, final, kept;

    __device__ StateSlots(const RaggedParams& ragged, int sequence)
        : initial(int(ragged.initial_slots[sequence])), final(int(ragged.final_slots[sequence])) {
        const std::int64_t first = ragged.snapshot_cu[sequence];
        kept = first < ragged.snapshot_cu[sequence + 1] ? int(ragged.snapshot_slots[first]) : -1;
    }
};

// Results of in_proj: the first d_inner columns are convolved (see causal_conv.cu), the rest is stored.
struct Convolved {
    static constexpr bool kCollected = true;
    static constexpr int kHeld = 2;
    ConvParams convolution;
    Bf16* rest;  // (rows, columns)
    int columns;

    class Item {
      public:
        __device__ __forceinline__ Item(const Convolved& of, int row, int token)
            : p(of.convolution),
              rest_(of.rest + token * of.columns),
              row_(row),
              token_(token),
              slots_(p.ragged, token) {
            if (row >= int(p.d_inner)) return;
            const int width = int(p.width);
            bias_ = p.bias ? p.bias[row] : 0.0f;
#pragma unroll
            for (int k = 0; k < kTaps; ++k) weight_[k] = p.weight[row * width + max(k - kTaps + width, 0)];
#pragma unroll
            for (int k = 0; k < kTaps - 1 && width > 1; ++k) {
                const Bf16 kept = *state(max(slots_.initial, 0), max(k - kTaps + width, 0));
                window_[k] = slots_.initial < 0 ? Bf16(0.0f) : kept;
            }
        }

        __device__ __forceinline__ void finish(float sum) {
            const int d = int(p.d_inner), skipped = kTaps - int(p.width);
            const Bf16 raw = narrow<Bf16>(sum);
            if (row_ >= d) {
                rest_[row_ - d] = raw;
                return;
            }
            window_[kTaps - 1] = raw;
            float value = bias_;
#pragma unroll
            for (int k = 0; k < kTaps; ++k) {
                if (k >= skipped) value = __fmaf_rn(weight_[k], widen(window_[k]), value);
            }
            static_cast<Bf16*>(p.out)[token_ * d + row_] = narrow<Bf16>(silu(value));
#pragma unroll
            for (int k = 0; k < kTaps - 1; ++k) {
                if (k < skipped) continue;
                if (slots_.kept >= 0) *state(slots_.kept, k - skipped) = window_[k + 1];
                if (slots_.final >= 0) *state(slots_.final, k - skipped) = window_[k + 1];
            }
        }

      private:
        __device__ Bf16* state(std::int64_t slot, int tap) const {
            return static_cast<Bf16*>(p.state) + slot * p.state_stride + tap * p.d_inner + row_;
        }

        const ConvParams& p;
        Bf16* const rest_;  // of the token
        const int row_, token_;
        const StateSlots slots_;
        Bf16 window_[kTaps];  // raw inputs, the newest last
        float weight_[kTaps], bias_;
    };
};

// Results of dt_proj: the raw dt of a channel, with which its states take one step (see
// selective_scan_short.cu).
struct Stepped {
    static constexpr bool kCollected = true;
    static constexpr int kHeld = 1;
    ScanParams scan;

    class Item {
      public:
        __device__ __forceinline__ Item(const Stepped& of, int channel, int token)
            : p(of.scan), channel_(channel), token_(token), slots_(p.ragged, token) {
            const float* from =
                state(max(slots_.initial, 0));  // loads slot 0 if there is none, to avoid a branch
#pragma unroll
            for (int i = 0; i < kStatesAtOnce; ++i) {
                h_[i] = from[i * p.d_inner];
                A_[i] = p.A[i * p.d_inner + channel];
            }
            x_ = widen(static_cast<const Bf16*>(p.x)[token * p.d_inner + channel]);
            gate_ = widen(static_cast<const Bf16*>(p.z)[token * p.z_stride + channel]);
            D_ = p.D[channel], dt_bias_ = p.dt_bias[channel];
            load_quads(p.B, p.B_stride, B_);
            load_quads(p.C, p.C_stride, C_);
        }

        __device__ __forceinline__ void finish(float sum) {
            const float dt = softplus(__fadd_rn(widen(narrow<Bf16>(sum)), dt_bias_));
            float rate[kStatesAtOnce], B[kStatesAtOnce], C[kStatesAtOnce];
#pragma unroll
            for (int i = 0; i < kStatesAtOnce; ++i) {
                h_[i] = slots_.initial >= 0 ? h_[i] : 0.0f;
                rate[i] = rate_of(A_[i]);
                B[i] = widen(B_[i / 4].at[i % 4]);
                C[i] = widen(C_[i / 4].at[i % 4]);
            }
            const float y = step_states(h_, rate, dt, __fmul_rn(dt, x_), B, C);
            static_cast<Bf16*>(p.out)[token_ * p.d_inner + channel_] =
                narrow<Bf16>(__fmul_rn(__fmaf_rn(D_, x_, y), silu(gate_)));
            write(slots_.kept);
            write(slots_.final);
        }

      private:
        using Quads = Quad<Bf16>[kStatesAtOnce / 4];

        __device__ float* state(std::int64_t slot) const {
            return p.state + slot * p.state_stride + channel_;
        }

        __device__ void load_quads(const void* rows, std::int64_t stride, Quads& to) const {
            const auto* row =
                reinterpret_cast<const Quad<Bf16>*>(static_cast<const Bf16*>(rows) + token_ * stride);
#pragma unroll
            for (int i = 0; i < kStatesAtOnce / 4; ++i) to[i] = row[i];
        }

        __device__ void write(int slot) const {
            if (slot < 0) return;
            float* to = state(slot);
#pragma unroll
            for (int i = 0; i < kStatesAtOnce; ++i, to += p.d_inner) *to = h_[i];
        }

        const ScanParams& p;
        const int channel_, token_;
        const StateSlots slots_;
        float h_[kStatesAtOnce], A_[kStatesAtOnce], x_, gate_, D_, dt_bias_;
        Quads B_, C_;
    };
};

bool single_tokens(const ProductParams& product, const RaggedParams& ragged) {
    return product.rows == ragged.num_sequences && product.rows <= kMostMixerRows && product.pieces == 1 &&
           takes_few_rows(product);
}

bool takes_convolution(const ProductParams& product, const ConvParams& p) {
    return single_tokens(product, p.ragged) && product.out >= p.d_inner && p.width >= 1 && p.width <= kTaps &&
           p.dtype == DType::bfloat16 && p.out_stride == p.d_inner;
}

bool takes_step(const ProductParams& product, const ScanParams& p) {
    return single_tokens(product, p.ragged) && product.out == p.d_inner && p.d_state == kStatesAtOnce &&
           p.dtype == DType::bfloat16 && p.D != nullptr && p.dt_bias != nullptr && p.z != nullptr &&
           p.x_stride == p.d_inner && p.out_stride == p.d_inner &&
           aligned<Bf16>({{p.B, p.B_stride}, {p.C, p.C_stride}}, p.d_state, 4);
}

}  // namespace

void few_rows_convolution(const ProductParams& product, const ConvParams& p, void* rest,
                          cudaStream_t stream) {
    if (!takes_convolution(product, p))
        throw std::invalid_argument("few_rows_convolution does not take these sizes or addresses");
    if (product.rows == 0) return;
    const Convolved results = {p, static_cast<Bf16*>(rest), product.out - int(p.d_inner)};
    launch_few_rows<CodeKind::none, 1>(product, results, stream);
}

void few_rows_step(const ProductParams& product, const ScanParams& p, cudaStream_t stream) {
    if (!takes_step(product, p))
        throw std::invalid_argument("few_rows_step does not take these sizes or addresses");
    if (product.rows > 0) launch_few_rows<CodeKind::none, 1>(product, Stepped{p}, stream);
}

}  // namespace cuda
}  // namespace apcbatch
