// Rows of heads: the gated norm after a recurrence, RMS norm with rotary position embedding, and the output
// gate of attention (csrc/rowwise.h, csrc/head_rows.h).
//
// Invariant: a row's sum is a fixed tree over its columns, so a row of the result depends on that row alone.
#include <stdexcept>

#include "dependent_launch.cuh"
#include "heads.h"
#include "quads.cuh"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr std::int64_t kNarrowRow = 256;  // maximum columns of a row that one warp processes
constexpr int kNarrowRows = 4;            // narrow rows of a block
constexpr int kWideThreads = 256;

// Returns the sum over the threads of a row: a warp's if kThreads is 32.
template <int kThreads>
__device__ __forceinline__ float row_sum(float value) {
    if constexpr (kThreads == 32) {
        return warp_sum(value);
    } else {
        return block_sum<kThreads>(value);
    }
}

// kHeld: columns of a thread that it loads at once. kAgain: a row may have more than kHeld kThreads columns;
// they are read again for the result. kBlocks: blocks on a multiprocessor, which limit a thread's registers.
template <int kThreads, int kHeld, int kBlocks, bool kAgain, class T>
__global__ void __launch_bounds__(kThreads == 32 ? 32 * kNarrowRows : kThreads, kBlocks)
    gated_norm_kernel(const __grid_constant__ GatedNormParams p) {
    constexpr int kColumns = kThreads * kHeld;
    let_next_begin();
    const std::int64_t row = std::int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= p.t * p.heads) return await_before();
    const std::int64_t token = row / p.heads, head = row % p.heads;
    const float* x = p.x + token * p.x_stride + head * p.x_head_stride;
    const T* gate = static_cast<const T*>(p.gate) + token * p.gate_stride + head * p.d;
    const float* weight = p.weight + head * p.weight_stride;
    T* y = static_cast<T*>(p.y) + row * p.d;
    const int first = int(threadIdx.x), d = int(p.d);
    float values[kHeld], weights[kHeld], gates[kHeld];
    // Absent columns are zeros, which add nothing to the sum, so that nothing branches. Elements are widened
    // only after all loads, as otherwise each load would wait for the one before.
    const auto load_weights = [&](int begin) {
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
            const int at = begin + j * kThreads;
            weights[j] = p.weight && at < d ? weight[at] : 1.0f;
        }
    };
    const auto load_values = [&](int begin) {
        T raw[kHeld];
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
            const int at = begin + j * kThreads;
            values[j] = at < d ? x[at] : 0.0f;
            raw[j] = at < d ? gate[at] : T(0.0f);
        }
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
            gates[j] = silu(widen(raw[j]));
            values[j] = p.gate_first ? __fmul_rn(values[j], gates[j]) : values[j];
        }
    };
    load_weights(first);
    await_before();
    float sum = 0.0f, factor = 1.0f;
#pragma unroll 1
    for (int begin = first; begin < d; begin += kColumns) {
        load_values(begin);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) sum = __fmaf_rn(values[j], values[j], sum);
    }
    if (p.weight) {
        const float mean = __fdiv_rn(row_sum<kThreads>(sum), float(p.d));
        factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, p.eps)));
    }
#pragma unroll 1
    for (int begin = first; begin < d; begin += kColumns) {
        if (kAgain) load_weights(begin), load_values(begin);
#pragma unroll
        for (int j = 0; j < kHeld; ++j) {
            float result = __fmul_rn(__fmul_rn(values[j], factor), weights[j]);
            result = p.gate_first ? result : __fmul_rn(result, gates[j]);
            if (begin + j * kThreads < d) y[begin + j * kThreads] = narrow<T>(result);
        }
    }
}

// Cosine and sine of position * step: as csrc/head_rows_kernel.h, where the bits of double may differ.
__device__ __forceinline__ float2 rotation(std::int64_t position, std::int64_t step) {
    const std::uint64_t angle = std::uint64_t(position) * std::uint64_t(step);
    const std::uint64_t quarter = (angle + (std::uint64_t(1) << 61)) >> 62;
    const double x = double(std::int64_t(angle - (quarter << 62))) * 0x1.921fb54442d18p-62, x2 = x * x;
    double s = -1.0 / 1307674368000.0;  // 1 / 15!
    s = fma(s, x2, 1.0 / 6227020800.0);
    s = fma(s, x2, -1.0 / 39916800.0);
    s = fma(s, x2, 1.0 / 362880.0);
    s = fma(s, x2, -1.0 / 5040.0);
    s = fma(s, x2, 1.0 / 120.0);
    s = fma(s, x2, -1.0 / 6.0);
    s = fma(__dmul_rn(s, x2), x, x);
    double c = 1.0 / 20922789888000.0;  // 1 / 16!
    c = fma(c, x2, -1.0 / 87178291200.0);
    c = fma(c, x2, 1.0 / 479001600.0);
    c = fma(c, x2, -1.0 / 3628800.0);
    c = fma(c, x2, 1.0 / 40320.0);
    c = fma(c, x2, -1.0 / 720.0);
    c = fma(c, x2, 1.0 / 24.0);
    c = fma(c, x2, -0.5);
    c = fma(c, x2, 1.0);
    const double of_cosine = quarter & 1 ? s : c, of_sine = quarter & 1 ? c : s;
    return make_float2(float((quarter + 1) & 2 ? -of_cosine : of_cosine),
                       float(quarter & 2 ? -of_sine : of_sine));
}

constexpr int kRopeWarps = 4;

// A block processes a token, a warp one head at a time.
template <class T>
__global__ void __launch_bounds__(32 * kRopeWarps)
    norm_rope_kernel(const __grid_constant__ NormRopeParams p) {
    __shared__ float2 rotations[kMostRotaryPairs];
    let_next_begin();
    await_before();
    const std::int64_t token = blockIdx.x;
    for (int i = int(threadIdx.x); i < p.pairs; i += 32 * kRopeWarps) {
        rotations[i] = rotation(p.positions[token], p.steps[i]);
    }
    __syncthreads();
    const int lane = int(threadIdx.x) % 32;
    for (std::int64_t head = threadIdx.x / 32; head < p.heads; head += kRopeWarps) {
        const T* x = static_cast<const T*>(p.x) + token * p.x_stride + head * p.head_dim;
        T* y = static_cast<T*>(p.y) + token * p.y_stride + head * p.head_dim;
        float sum = 0.0f;
        for (int at = lane; at < p.head_dim; at += 32) sum = __fmaf_rn(widen(x[at]), widen(x[at]), sum);
        const float mean = __fdiv_rn(warp_sum(sum), float(p.head_dim));
        const float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, p.eps)));
        const auto normed = [&](std::int64_t at) {
            const float value = widen(x[at]);  // without a weight there is no norm
            return p.weight ? __fmul_rn(__fmul_rn(value, factor), p.weight[at]) : value;
        };
        for (int i = lane; i < p.pairs; i += 32) {
            const float a = normed(i), b = normed(p.pairs + i);
            const float2 angle = rotations[i];
            y[i] = narrow<T>(__fsub_rn(__fmul_rn(a, angle.x), __fmul_rn(b, angle.y)));
            y[p.pairs + i] = narrow<T>(__fadd_rn(__fmul_rn(b, angle.x), __fmul_rn(a, angle.y)));
        }
        for (std::int64_t at = 2 * p.pairs + lane; at < p.head_dim; at += 32) y[at] = narrow<T>(normed(at));
    }
}

template <class T>
__global__ void __launch_bounds__(kWideThreads)
    sigmoid_mul_kernel(const __grid_constant__ SigmoidMulParams p) {
    let_next_begin();
    await_before();
    const std::int64_t at = std::int64_t(blockIdx.x) * kWideThreads + threadIdx.x;
    if (at >= p.t * p.h) return;
    const std::int64_t row = at / p.h, column = at % p.h;
    const float x = widen(static_cast<const T*>(p.x)[row * p.x_stride + column]);
    const float gate = widen(static_cast<const T*>(p.gate)[row * p.gate_stride + column]);
    static_cast<T*>(p.y)[row * p.y_stride + column] = narrow<T>(__fmul_rn(x, sigmoid(gate)));
}

}  // namespace

void gated_norm(const GatedNormParams& p, cudaStream_t stream) {
    const std::int64_t rows = p.t * p.heads;
    if (rows == 0) return;
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        if (p.d <= kNarrowRow) {
            const unsigned blocks = unsigned((rows + kNarrowRows - 1) / kNarrowRows);
            return launch_dependent(gated_norm_kernel<32, kNarrowRow / 32, 8, false, T>, dim3(blocks),
                                    dim3(32, kNarrowRows), 0, stream, "gated_norm", p);
        }
        constexpr int kOne = kWideThreads;
        const auto kernel = p.d <= 4 * kOne    ? gated_norm_kernel<kOne, 4, 5, false, T>
                            : p.d <= 12 * kOne ? gated_norm_kernel<kOne, 12, 4, false, T>
                            : p.d <= 20 * kOne ? gated_norm_kernel<kOne, 20, 3, false, T>
                            : p.d <= 32 * kOne ? gated_norm_kernel<kOne, 32, 2, false, T>
                                               : gated_norm_kernel<kOne, 12, 4, true, T>;
        launch_dependent(kernel, dim3(unsigned(rows)), dim3(kWideThreads), 0, stream, "gated_norm", p);
    });
}

void norm_rope(const NormRopeParams& p, cudaStream_t stream) {
    if (p.t == 0) return;
    if (p.pairs > kMostRotaryPairs) {
        throw std::invalid_argument("CUDA rotates at most " + std::to_string(kMostRotaryPairs) +
                                    " pairs of columns; it got " + std::to_string(p.pairs));
    }
    with_element(p.dtype, [&](auto element) {
        launch_dependent(norm_rope_kernel<decltype(element)>, dim3(unsigned(p.t)), dim3(32 * kRopeWarps), 0,
                         stream, "norm_rope", p);
    });
}

void sigmoid_mul(const SigmoidMulParams& p, cudaStream_t stream) {
    if (p.t * p.h == 0) return;
    const unsigned blocks = unsigned((p.t * p.h + kWideThreads - 1) / kWideThreads);
    with_element(p.dtype, [&](auto element) {
        launch_dependent(sigmoid_mul_kernel<decltype(element)>, dim3(blocks), dim3(kWideThreads), 0, stream,
                         "sigmoid_mul", p);
    });
}

}  // namespace cuda
}  // namespace apcbatch
