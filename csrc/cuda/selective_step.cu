// Selective scan of sequences of one token, for decode passes. A thread has one channel or two, and issues
// all its loads at once. Arithmetic and order are those of selective_scan, so the bits are the same.
#include "dependent_launch.cuh"
#include "element.cuh"
#include "launch.h"
#include "quads.cuh"
#include "single_token.cuh"
#include "step_state.cuh"

namespace apcbatch {
namespace cuda {

namespace {

constexpr int kStepThreads = 64;
constexpr std::int64_t kBlocksAtOnce = 768;

template <class T>
__device__ __forceinline__ float at(const void* base, std::int64_t i) {
    return widen(static_cast<const T*>(base)[i]);
}

template <class T>
__global__ void __launch_bounds__(kStepThreads)
    selective_step_kernel(const __grid_constant__ ScanParams p, const std::int64_t* sequences,
                          int channel_tiles) {
    let_next_begin();
    await_before();
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

// Operands of one sequence for a thread's two adjacent channels.
template <class T>
struct Inputs {
    float2 h[kStatesAtOnce];
    Pair<T> x, dt, z;
    T B[kStatesAtOnce], C[kStatesAtOnce];

    __device__ __forceinline__ void load(const ScanParams& p, const Where& at, std::int64_t c) {
        const int n = int(p.d_state);
        const float* state = p.state + at.initial * p.state_stride + c;
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
            h[i] = make_float2(0.0f, 0.0f);
            if (i < n && at.initial >= 0)
                h[i] = __ldcs(reinterpret_cast<const float2*>(state + i * p.d_inner));
        }
        x = pair(p.x, at.token * p.x_stride + c);
        dt = pair(p.dt, at.token * p.dt_stride + c);
        z = p.z ? pair(p.z, at.token * p.z_stride + c) : zero_pair(T(0.0f));
        row(static_cast<const T*>(p.B) + at.token * p.B_stride, n, 0.0f, B);
        row(static_cast<const T*>(p.C) + at.token * p.C_stride, n, -0.0f, C);
    }

    static __device__ __forceinline__ Pair<T> pair(const void* base, std::int64_t i) {
        return load_pair(static_cast<const T*>(base) + i, true, true);
    }

    // Loads 16 elements, four at a time if they are aligned.
    static __device__ __forceinline__ void row(const T* from, int n, float absent, T (&to)[kStatesAtOnce]) {
        if (n == kStatesAtOnce && reinterpret_cast<std::uintptr_t>(from) % sizeof(Quad<T>) == 0) {
#pragma unroll
            for (int i = 0; i < kStatesAtOnce; i += 4) {
                const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(from + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) to[i + j] = quad.at[j];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kStatesAtOnce; ++i) to[i] = i < n ? from[i] : narrow<T>(absent);
        }
    }
};

__device__ __forceinline__ void store_states(const ScanParams& p, std::int64_t slot, std::int64_t c,
                                             const float (&even)[kStatesAtOnce],
                                             const float (&odd)[kStatesAtOnce]) {
    if (slot < 0) return;
    float* state = p.state + slot * p.state_stride + c;
#pragma unroll
    for (int i = 0; i < kStatesAtOnce; ++i) {
        if (i < p.d_state) {
            __stcs(reinterpret_cast<float2*>(state + i * p.d_inner), make_float2(even[i], odd[i]));
        }
    }
}

// Advances one channel's states by one token and returns its y.
__device__ __forceinline__ float step_channel(float (&h)[kStatesAtOnce], const float (&rate)[kStatesAtOnce],
                                              float x, float dt, float bias, float D,
                                              const float (&B)[kStatesAtOnce],
                                              const float (&C)[kStatesAtOnce]) {
    const float step = softplus(__fadd_rn(dt, bias));
    return __fmaf_rn(D, x, step_states(h, rate, step, __fmul_rn(step, x), B, C));
}

// Computes two channels per thread, for up to 16 states and pairs of channels that are aligned. A thread
// processes several sequences and prefetches the next one's inputs during each. States use streaming
// loads and stores (evict-first in the caches), as they are not read again.
template <class T>
__global__ void __launch_bounds__(kStepThreads, 6)
    selective_steps_kernel(const __grid_constant__ ScanParams p, const std::int64_t* sequences, int count,
                           int each, int channel_tiles) {
    __shared__ Where all[kMostSequences];
    let_next_begin();
    const std::int64_t c = (std::int64_t(blockIdx.x % channel_tiles) * kStepThreads + threadIdx.x) * 2;
    const int first = int(blockIdx.x) / channel_tiles * each, here = min(each, count - first);
    const bool any = c < p.d_inner;
    float rates[2][kStatesAtOnce];
#pragma unroll
    for (int i = 0; i < kStatesAtOnce; ++i) {
        float2 A = make_float2(0.0f, 0.0f);
        if (any && i < p.d_state) A = __ldg(reinterpret_cast<const float2*>(p.A + i * p.d_inner + c));
        rates[0][i] = rate_of(A.x);
        rates[1][i] = rate_of(A.y);
    }
    float2 bias = make_float2(0.0f, 0.0f), D = bias;
    if (any && p.dt_bias) bias = *reinterpret_cast<const float2*>(p.dt_bias + c);
    if (any && p.D) D = *reinterpret_cast<const float2*>(p.D + c);
    await_before();
    if (int(threadIdx.x) < here) all[threadIdx.x] = where(p.ragged, sequences[first + threadIdx.x]);
    __syncthreads();
    if (!any) return;
    Inputs<T> next;
    next.load(p, all[0], c);
#pragma unroll 1
    for (int i = 0; i < here; ++i) {
        float h[2][kStatesAtOnce], B[kStatesAtOnce], C[kStatesAtOnce];
#pragma unroll
        for (int n = 0; n < kStatesAtOnce; ++n) {
            h[0][n] = next.h[n].x;
            h[1][n] = next.h[n].y;
            B[n] = widen(next.B[n]);
            C[n] = widen(next.C[n]);
        }
        const float2 x = widen_pair<T>(next.x), dt = widen_pair<T>(next.dt), z = widen_pair<T>(next.z);
        if (i + 1 < here) next.load(p, all[i + 1], c);
        float2 y = make_float2(step_channel(h[0], rates[0], x.x, dt.x, bias.x, D.x, B, C),
                               step_channel(h[1], rates[1], x.y, dt.y, bias.y, D.y, B, C));
        if (p.z) y = make_float2(__fmul_rn(y.x, silu(z.x)), __fmul_rn(y.y, silu(z.y)));
        store_states(p, all[i].kept, c, h[0], h[1]);
        store_states(p, all[i].final, c, h[0], h[1]);
        store_pair(static_cast<T*>(p.out) + all[i].token * p.out_stride + c, y, true, true);
    }
}

template <class T>
bool lies_in_pairs(const ScanParams& p) {
    return p.d_state <= kStatesAtOnce &&
           aligned<T>({{p.x, p.x_stride}, {p.dt, p.dt_stride}, {p.z, p.z_stride}, {p.out, p.out_stride}},
                      p.d_inner, 2) &&
           aligned<float>({{p.state, p.state_stride}, {p.A, 0}, {p.D, 0}, {p.dt_bias, 0}}, p.d_inner, 2);
}

template <class T>
void launch(const ScanParams& p, const Selection& selection, cudaStream_t stream) {
    const bool pairs = lies_in_pairs<T>(p);
    const std::int64_t channels = kStepThreads * (pairs ? 2 : 1);
    const std::int64_t tiles = (p.d_inner + channels - 1) / channels;
    if (pairs) {
        const std::int64_t each = sequences_each(selection.count, tiles, kBlocksAtOnce);
        const std::int64_t groups = (selection.count + each - 1) / each;
        launch_dependent(selective_steps_kernel<T>, dim3(unsigned(tiles * groups)), kStepThreads, 0, stream,
                         "selective_step", p, selection.sequences, int(selection.count), int(each),
                         int(tiles));
    } else {
        launch_dependent(selective_step_kernel<T>, dim3(unsigned(tiles * selection.count)), kStepThreads, 0,
                         stream, "selective_step", p, selection.sequences, int(tiles));
    }
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
