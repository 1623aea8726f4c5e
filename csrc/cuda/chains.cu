// Further kernels of fixed-order products: the sum of pieces, and the float32 product that serves as
// reference.
#include "dependent_launch.cuh"
#include "element.cuh"
#include "products.h"
#include "quads.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kChainThreads = 128;

// A thread sums four elements, or one.
template <int kStep, class Out>
__global__ void __launch_bounds__(kChainThreads)
    sum_pieces_kernel(const float* parts, std::int64_t count, int pieces, Out* y) {
    let_next_begin();
    await_before();
    const std::int64_t at = (std::int64_t(blockIdx.x) * kChainThreads + threadIdx.x) * kStep;
    if (at >= count) return;
    float sum[4], part[4];
    load<kStep>(parts + at, sum);
    for (int piece = 1; piece < pieces; ++piece) {
        load<kStep>(parts + piece * count + at, part);
#pragma unroll
        for (int i = 0; i < kStep; ++i) sum[i] = __fadd_rn(sum[i], part[i]);
    }
    store<kStep>(sum, y + at);
}

template <class Out>
void launch_sum(const float* parts, std::int64_t count, int pieces, Out* y, cudaStream_t stream) {
    const bool quads = count % 4 == 0;
    const std::int64_t threads = quads ? count / 4 : count;
    launch_dependent(quads ? sum_pieces_kernel<4, Out> : sum_pieces_kernel<1, Out>,
                     dim3(unsigned((threads + kChainThreads - 1) / kChainThreads)), kChainThreads, 0, stream,
                     "sum_pieces", parts, count, pieces, y);
}

template <class Out>
__global__ void __launch_bounds__(kChainThreads)
    scale_columns_kernel(const float* x, const float* factors, std::int64_t count, std::int64_t columns,
                         Out* y) {
    let_next_begin();
    await_before();
    const std::int64_t at = std::int64_t(blockIdx.x) * kChainThreads + threadIdx.x;
    if (at < count) y[at] = narrow<Out>(__fmul_rn(x[at], factors[at % columns]));
}

// A thread computes one element, in float32.
__global__ void __launch_bounds__(kChainThreads) float_chain_kernel(const __grid_constant__ ProductParams p) {
    const int row = int(blockIdx.x) * kChainThreads + int(threadIdx.x);
    if (row >= p.out) return;
    const float* weight = static_cast<const float*>(p.weight) + std::int64_t(row) * p.in;
    const float* x = static_cast<const float*>(p.x) + blockIdx.y * p.x_stride;
    float sum = 0.0f;
    for (int i = 0; i < p.in; ++i) sum = __fmaf_rn(weight[i], x[i], sum);
    static_cast<float*>(p.y)[std::int64_t(blockIdx.y) * p.out + row] = sum;
}

}  // namespace

bool takes_pieces(int in, int pieces) {
    return (pieces == 1 || pieces == 2 || pieces == 4 || pieces == kMostPieces) && in % (16 * pieces) == 0;
}

void sum_pieces(const float* parts, std::int64_t count, int pieces, void* y, DType y_dtype,
                cudaStream_t stream) {
    if (count == 0) return;
    if (y_dtype == DType::float32) return launch_sum(parts, count, pieces, static_cast<float*>(y), stream);
    launch_sum(parts, count, pieces, static_cast<__nv_bfloat16*>(y), stream);
}

void scale_columns(const float* x, const float* factors, std::int64_t rows, std::int64_t columns, void* y,
                   DType y_dtype, cudaStream_t stream) {
    const std::int64_t count = rows * columns;
    if (count == 0) return;
    const dim3 blocks(unsigned((count + kChainThreads - 1) / kChainThreads));
    with_element(y_dtype, [&](auto element) {
        using Out = decltype(element);
        launch_dependent(scale_columns_kernel<Out>, blocks, kChainThreads, 0, stream, "scale_columns", x,
                         factors, count, columns, static_cast<Out*>(y));
    });
}

void chain_product(const ProductParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.out == 0) return;
    const dim3 blocks(unsigned((p.out + kChainThreads - 1) / kChainThreads), unsigned(p.rows));
    float_chain_kernel<<<blocks, kChainThreads, 0, stream>>>(p);
    check_launch("chain_product");
}

}  // namespace cuda
}  // namespace apcbatch
