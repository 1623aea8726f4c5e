// The selective scan of sequences of one token, for decoding: one thread a channel, all its loads in flight
// at once. The arithmetic, and its order, are those of selective_scan, so the bits are the same. Must not
// know: Python.
#include "element.cuh"
#include "launch.h"
#include "step_state.cuh"

namespace apcbatch {
namespace cuda {

namespace {

constexpr int kStepThreads = 64;

template <class T>
__device__ __forceinline__ float at(const void* base, std::int64_t i) {
    return widen(static_cast<const T*>(base)[i]);
}

template <class T>
__global__ void __launch_bounds__(kStepThreads)
    selective_step_kernel(const __grid_constant__ ScanParams p, const std::int64_t* sequences,
                          int channel_tiles) {
    const std::int64_t c = std::int64_t(blockIdx.x % channel_tiles) * kStepThreads + threadIdx.x;
    const std::int64_t sequence = sequences[blockIdx.x / channel_tiles];
    if (c >= p.d_inner) return;
    const std::int64_t token = p.ragged.cu_seqlens[sequence];
    const std::int64_t initial = p.ragged.initial_slots[sequence], final = p.ragged.final_slots[sequence];
    const std::int64_t first = p.ragged.snapshot_cu[sequence];
    const std::int64_t kept =
        first < p.ragged.snapshot_cu[sequence + 1] ? p.ragged.snapshot_slots[first] : -1;
    const float x = at<T>(p.x, token * p.x_stride + c);
    const float bias = p.dt_bias == nullptr ? 0.0f : p.dt_bias[c];
    const float dt = softplus(__fadd_rn(at<T>(p.dt, token * p.dt_stride + c), bias)),
                input = __fmul_rn(dt, x);
    float y = 0.0f;
    for (int n0 = 0; n0 < p.d_state; n0 += kStatesAtOnce) {
        float h[kStatesAtOnce], rate[kStatesAtOnce];
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
            const bool inside = n0 + i < p.d_state;
            const std::int64_t state = (n0 + i) * p.d_inner + c;
            h[i] = inside && initial >= 0 ? p.state[initial * p.state_stride + state] : 0.0f;
            rate[i] = inside ? rate_of(__ldg(p.A + state)) : 0.0f;
        }
        float B[kStatesAtOnce], C[kStatesAtOnce];
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
            const bool inside = n0 + i < p.d_state;
            B[i] = inside ? at<T>(p.B, token * p.B_stride + n0 + i) : 0.0f;
            C[i] = inside ? at<T>(p.C, token * p.C_stride + n0 + i) : -0.0f;
        }
        const float sum = step_states(h, rate, dt, input, B, C);
        y = n0 == 0 ? sum : __fadd_rn(y, sum);
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
            if (n0 + i >= p.d_state) break;
            const std::int64_t state = (n0 + i) * p.d_inner + c;
            if (kept >= 0) p.state[kept * p.state_stride + state] = h[i];
            if (final >= 0) p.state[final * p.state_stride + state] = h[i];
        }
    }
    y = __fmaf_rn(p.D == nullptr ? 0.0f : p.D[c], x, y);
    if (p.z != nullptr) y = __fmul_rn(y, silu(at<T>(p.z, token * p.z_stride + c)));
    static_cast<T*>(p.out)[token * p.out_stride + c] = narrow<T>(y);
}

template <class T>
void launch(const ScanParams& p, const Selection& selection, cudaStream_t stream) {
    const std::int64_t tiles = (p.d_inner + kStepThreads - 1) / kStepThreads;
    selective_step_kernel<T>
        <<<unsigned(tiles * selection.count), kStepThreads, 0, stream>>>(p, selection.sequences, int(tiles));
    check_launch("selective_step");
}

}  // namespace

void selective_step(const ScanParams& p, const Selection& selection, cudaStream_t stream) {
    if (selection.count == 0) return;
    switch (p.dtype) {
        case DType::float32:
            return launch<float>(p, selection, stream);
        case DType::bfloat16:
            return launch<__nv_bfloat16>(p, selection, stream);
        case DType::float16:
            return launch<__half>(p, selection, stream);
    }
}

}  // namespace cuda
}  // namespace apcbatch
