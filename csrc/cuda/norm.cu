// RMS norm (Zhang and Sennrich 2019, equation 4), alone or after the residual addition, and silu(gate) * up.
//
// Invariant: a row's sum is a fixed tree over its columns, so a row of the result depends on that row alone.
#include "dependent_launch.cuh"
#include "quads.cuh"
#include "rows.h"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kWideThreads = 256;
constexpr std::int64_t kNarrowRow = 256;  // maximum columns of a row that one warp processes
constexpr int kMostQuads = 4;             // maximum quads per thread if a block holds the row in registers

// What is pending for one row. Made after await_before.
struct RowPending {
    const float* aside;  // rows to sum, h columns each; or null
    int count;           // of them
    bool is_padding;     // their sum is zero
    float gate;

    __device__ __forceinline__ RowPending(const SumNormParams& p, std::int64_t row) {
        const Pending& its = p.pending;
        count = its.experts.rows ? its.experts.per_token : 1;
        aside = its.experts.rows ? its.experts.rows : its.aside;
        if (aside) aside += row * count * p.h;
        is_padding = its.experts.present && row >= *its.experts.present;
        // torch's sigmoid
        gate = its.gate ? __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-its.gate[row]))) : 1.0f;
    }

    // Adds aside + delta * factors * gate to x. sum: of aside.
    template <int kStep>
    __device__ __forceinline__ void add(const SumNormParams& p, float (&x)[4], const float (&delta)[4],
                                        const float (&factors)[4], const float (&sum)[4]) const {
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            const float other = is_padding ? 0.0f : sum[i];
            float addend = p.pending.factors ? __fmul_rn(delta[i], factors[i]) : delta[i];
            if (p.pending.gate) addend = __fmul_rn(addend, gate);
            if (aside) addend = p.delta ? __fadd_rn(other, addend) : other;
            x[i] = __fadd_rn(x[i], addend);
        }
    }
};

template <int kThreads, int kStep, class X, class Delta, class Y>
__device__ __forceinline__ void norm_row(const SumNormParams& p, std::int64_t row) {
    X* x = static_cast<X*>(p.x) + row * p.x_stride;
    const Delta* delta = p.delta ? static_cast<const Delta*>(p.delta) + row * p.delta_stride : nullptr;
    Y* y = static_cast<Y*>(p.y) + row * p.h;
    const RowPending pending(p, row);
    float sum = 0.0f;
    for (std::int64_t at = threadIdx.x * kStep; at < p.h; at += kThreads * kStep) {
        float value[4], addend[4], factors[4], aside[1][4];
        load<kStep>(x + at, value);
        if (delta || pending.aside) {
            if (delta) load<kStep>(delta + at, addend);
            if (p.pending.factors) load<kStep>(p.pending.factors + at, factors);
            if (pending.aside) sum_rows<kStep>(pending.aside + at, pending.count, p.h, aside);
            pending.add<kStep>(p, value, addend, factors, aside[0]);
            store<kStep>(value, x + at);
        }
#pragma unroll
        for (int i = 0; i < kStep; ++i) sum = fmaf(value[i], value[i], sum);
    }
    const float factor = 1.0f / sqrtf(block_sum<kThreads>(sum) / float(p.h) + p.eps);
    for (std::int64_t at = threadIdx.x * kStep; at < p.h; at += kThreads * kStep) {
        float value[4], weight[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        load<kStep>(x + at, value);
        if (p.weight) load<kStep>(p.weight + at, weight);
#pragma unroll
        for (int i = 0; i < kStep; ++i) value[i] = value[i] * factor * weight[i];
        store<kStep>(value, y + at);
    }
}

template <int kThreads, int kStep, class X, class Delta, class Y>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const __grid_constant__ SumNormParams p) {
    let_next_begin();
    await_before();
    norm_row<kThreads, kStep, X, Delta, Y>(p, blockIdx.x);
}

struct NarrowNorms {
    SumNormParams parts[kMostNorms];
};

template <class X, class Y>
__global__ void __launch_bounds__(32) narrow_norms_kernel(const __grid_constant__ NarrowNorms p) {
    let_next_begin();
    await_before();
    norm_row<32, 1, X, float, Y>(p.parts[blockIdx.y], blockIdx.x);
}

// The same for rows that fit in a block's registers: issues all loads at once and reads each element once.
template <int kQuads, class X, class Delta, class Y>
__global__ void __launch_bounds__(kWideThreads)
    held_rms_norm_kernel(const __grid_constant__ SumNormParams p) {
    let_next_begin();
    const std::int64_t row = blockIdx.x;
    X* x = static_cast<X*>(p.x) + row * p.x_stride;
    const Delta* delta = p.delta ? static_cast<const Delta*>(p.delta) + row * p.delta_stride : nullptr;
    Y* y = static_cast<Y*>(p.y) + row * p.h;
    float value[kQuads][4] = {}, addend[kQuads][4] = {}, weight[kQuads][4];
    float factors[kQuads][4], aside[kQuads][4];
    const int first = int(threadIdx.x) * 4;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
        const int at = (j * kWideThreads + int(threadIdx.x)) * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[j][i] = 1.0f;
        if (p.weight && at < p.h) load<4>(p.weight + at, weight[j]);
        if (p.pending.factors && at < p.h) load<4>(p.pending.factors + at, factors[j]);
    }
    await_before();
    const RowPending pending(p, row);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
        const int at = (j * kWideThreads + int(threadIdx.x)) * 4;
        if (at >= p.h) continue;
        load<4>(x + at, value[j]);
        if (delta) load<4>(delta + at, addend[j]);
    }
    if (pending.aside && first < p.h)
        sum_rows<4>(pending.aside + first, pending.count, p.h, aside, kWideThreads * 4, int(p.h) - first);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
        const int at = (j * kWideThreads + int(threadIdx.x)) * 4;
        if ((delta || pending.aside) && at < p.h) {
            pending.add<4>(p, value[j], addend[j], factors[j], aside[j]);
            store<4>(value[j], x + at);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = fmaf(value[j][i], value[j][i], sum);
    }
    const float factor = 1.0f / sqrtf(block_sum<kWideThreads>(sum) / float(p.h) + p.eps);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
        const int at = (j * kWideThreads + int(threadIdx.x)) * 4;
        if (at >= p.h) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) value[j][i] = value[j][i] * factor * weight[j][i];
        store<4>(value[j], y + at);
    }
}

template <class X, class Delta, class Y>
void launch_rms_norm(const SumNormParams& p, bool quads, cudaStream_t stream) {
    const auto start = [&](auto kernel, unsigned threads) {
        launch_dependent(kernel, dim3(unsigned(p.t)), threads, 0, stream, "rms_norm", p);
    };
    if (p.h <= kNarrowRow) {
        start(rms_norm_kernel<32, 1, X, Delta, Y>, 32);
    } else if (quads && p.h <= kMostQuads / 2 * kWideThreads * 4) {
        start(held_rms_norm_kernel<kMostQuads / 2, X, Delta, Y>, kWideThreads);
    } else if (quads && p.h <= kMostQuads * kWideThreads * 4) {
        start(held_rms_norm_kernel<kMostQuads, X, Delta, Y>, kWideThreads);
    } else if (quads) {
        start(rms_norm_kernel<kWideThreads, 4, X, Delta, Y>, kWideThreads);
    } else {
        start(rms_norm_kernel<kWideThreads, 1, X, Delta, Y>, kWideThreads);
    }
}

template <int kStep, class T>
__global__ void __launch_bounds__(kWideThreads) silu_mul_kernel(SiluMulParams p) {
    let_next_begin();
    await_before();
    const std::int64_t at = (std::int64_t(blockIdx.x) * kWideThreads + threadIdx.x) * kStep;
    if (at >= p.t * p.f) return;
    const std::int64_t row = at / p.f, column = at % p.f;
    float gate[4], up[4];
    load<kStep>(static_cast<const T*>(p.gate) + row * p.gate_stride + column, gate);
    load<kStep>(static_cast<const T*>(p.up) + row * p.up_stride + column, up);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
        gate[i] = (p.has_silu ? gate[i] / (1.0f + expf(-gate[i])) : gate[i]) * up[i];
    }
    store<kStep>(gate, static_cast<T*>(p.y) + row * p.y_stride + column);
}

}  // namespace

void rms_norm(const SumNormParams& p, cudaStream_t stream) {
    if (p.t == 0) return;
    const bool quads = may_quad(p.x, p.x_stride, p.h, p.x_dtype) && may_quad(p.y, p.h, p.h, p.y_dtype) &&
                       may_quad(p.weight, p.h, p.h, DType::float32) &&
                       may_quad(p.delta, p.delta_stride, p.h, p.delta_dtype) &&
                       may_quad(p.pending.factors, p.h, p.h, DType::float32) &&
                       may_quad(p.pending.aside, p.h, p.h, DType::float32) &&
                       may_quad(p.pending.experts.rows, p.h, p.h, DType::float32);
    with_element(p.y_dtype, [&](auto y) {
        if (p.delta) {
            with_element(p.delta_dtype, [&](auto delta) {
                launch_rms_norm<float, decltype(delta), decltype(y)>(p, quads, stream);
            });
        } else {
            with_element(p.x_dtype,
                         [&](auto x) { launch_rms_norm<decltype(x), float, decltype(y)>(p, quads, stream); });
        }
    });
}

void rms_norms(const SumNormParams* parts, int count, cudaStream_t stream) {
    NarrowNorms norms = {};
    bool alike = count > 1 && count <= kMostNorms && parts[0].t > 0;
    for (int i = 0; alike && i < count; ++i) {
        norms.parts[i] = parts[i];
        alike = parts[i].t == parts[0].t && parts[i].h <= kNarrowRow && !parts[i].delta &&
                parts[i].x_dtype == parts[0].x_dtype && parts[i].y_dtype == parts[0].y_dtype;
    }
    if (!alike) {
        for (int i = 0; i < count; ++i) rms_norm(parts[i], stream);
        return;
    }
    const dim3 blocks(unsigned(parts[0].t), unsigned(count));
    with_element(parts[0].y_dtype, [&](auto y) {
        with_element(parts[0].x_dtype, [&](auto x) {
            launch_dependent(narrow_norms_kernel<decltype(x), decltype(y)>, blocks, 32, 0, stream,
                             "rms_norms", norms);
        });
    });
}

void silu_mul(const SiluMulParams& p, cudaStream_t stream) {
    if (p.t == 0) return;
    const bool quads = may_quad(p.gate, p.gate_stride, p.f, p.dtype) &&
                       may_quad(p.up, p.up_stride, p.f, p.dtype) && may_quad(p.y, p.y_stride, p.f, p.dtype);
    const std::int64_t threads = p.t * p.f / (quads ? 4 : 1);
    const unsigned blocks = unsigned((threads + kWideThreads - 1) / kWideThreads);
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        launch_dependent(quads ? silu_mul_kernel<4, T> : silu_mul_kernel<1, T>, dim3(blocks), kWideThreads, 0,
                         stream, "silu_mul", p);
    });
}

}  // namespace cuda
}  // namespace apcbatch
