// Further kernels of fixed-order products: the sum of pieces, products with few columns, and in float32.
#include <algorithm>

#include "async_copy.cuh"
#include "dependent_launch.cuh"
#include "element.cuh"
#include "matrix_unit.cuh"
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

// A thread scales four elements of a row, or one.
template <int kStep, class Out>
__global__ void __launch_bounds__(kChainThreads)
    scale_columns_kernel(const float* x, const float* factors, std::int64_t columns, Out* y) {
    let_next_begin();
    await_before();
    const std::int64_t column = (std::int64_t(blockIdx.y) * kChainThreads + threadIdx.x) * kStep;
    if (column >= columns) return;
    const std::int64_t at = blockIdx.x * columns + column;
    float values[4], factor[4];
    load<kStep>(x + at, values);
    load<kStep>(factors + column, factor);
#pragma unroll
    for (int i = 0; i < kStep; ++i) values[i] = __fmul_rn(values[i], factor[i]);
    store<kStep>(values, y + at);
}

// Computes kChainRows rows of a bfloat16 product with at most kOctetColumns columns. A warp has one piece of
// the inputs; the assignment of the 16 inputs of a step to lanes is arbitrary, but the same for weights and
// x.
constexpr int kChainRows = 16, kOctetColumns = 8;

template <class Out>
__global__ void __launch_bounds__(32 * kMostPieces)
    few_columns_kernel(const __grid_constant__ ProductParams p) {
    __shared__ float parts[kMostPieces][kChainRows][kOctetColumns];
    let_next_begin();
    await_before();
    const int piece = threadIdx.x / 32, row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    const int inputs = p.in / p.pieces, begin = piece * inputs + quarter * 4;
    const std::int64_t first = std::int64_t(blockIdx.x) * kChainRows;
    const auto x = [&](int its) {
        return static_cast<const __nv_bfloat16*>(p.x) +
               min(first + its, std::int64_t(p.rows - 1)) * p.x_stride + begin;
    };
    const __nv_bfloat16 *low = x(row), *high = x(row + 8);
    const auto* weight =
        static_cast<const __nv_bfloat16*>(p.weight) + std::int64_t(min(row, p.out - 1)) * p.in + begin;
    float sums[4] = {};
#pragma unroll 8
    for (int i = 0; i < inputs; i += 16) {
        const uint2 lows = *reinterpret_cast<const uint2*>(low + i),
                    highs = *reinterpret_cast<const uint2*>(high + i),
                    weights = *reinterpret_cast<const uint2*>(weight + i);
        multiply_add(sums, {lows.x, highs.x, lows.y, highs.y}, weights.x, weights.y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[piece][row + i / 2 * 8][quarter * 2 + i % 2] = sums[i];
    __syncthreads();
    for (int i = threadIdx.x; i < kChainRows * p.out; i += int(blockDim.x)) {
        const int its = i / p.out, column = i % p.out;
        if (first + its >= p.rows) break;
        float sum = parts[0][its][column];
        for (int other = 1; other < p.pieces; ++other) sum = __fadd_rn(sum, parts[other][its][column]);
        static_cast<Out*>(p.y)[(first + its) * p.out + column] = narrow<Out>(sum);
    }
}

// A thread computes one element, in float32. A block's rows of weights and of x come in parts through shared
// memory.
constexpr int kFloatColumns = kChainThreads / 32, kFloatRows = 32, kFloatInputs = 64, kFloatStages = 4;

// kStep: floats of a copy, 1 or 4.
template <int kStep>
__global__ void __launch_bounds__(kChainThreads) float_chain_kernel(const __grid_constant__ ProductParams p) {
    // Four floats more, so that eight lanes read from different banks.
    __shared__ alignas(16) float ring[kFloatStages][kFloatColumns + kFloatRows][kFloatInputs + 4];
    let_next_begin();
    await_before();
    const int first_column = int(blockIdx.x) * kFloatColumns,
              columns = min(kFloatColumns, p.out - first_column);
    const int first_row = int(blockIdx.y) * kFloatRows, rows = min(kFloatRows, p.rows - first_row);
    const auto* weight = static_cast<const float*>(p.weight) + std::int64_t(first_column) * p.in;
    const auto* x = static_cast<const float*>(p.x) + std::int64_t(first_row) * p.x_stride;
    const auto copy = [&](int part) {
        constexpr int kCopies = kFloatInputs / kStep;  // of a row
        const int its = int(threadIdx.x) % kCopies * kStep, input = part * kFloatInputs + its;
        for (int i = threadIdx.x / kCopies; input < p.in && i < columns + rows;
             i += kChainThreads / kCopies) {
            const float* from =
                i < columns ? weight + std::int64_t(i) * p.in : x + std::int64_t(i - columns) * p.x_stride;
            float* to = ring[part % kFloatStages][i < columns ? i : kFloatColumns + i - columns] + its;
            kStep == 4 ? copy_chunk(to, from + input, true) : copy_four(to, from + input);
        }
        commit_copies();
    };
    const int column = threadIdx.x / 32, row = threadIdx.x % 32;
    float sum = 0.0f;
    for (int part = 0; part < kFloatStages - 1; ++part) copy(part);
    for (int part = 0; part * kFloatInputs < p.in; ++part) {
        wait_for_copies<kFloatStages - 2>();
        __syncthreads();
        copy(part + kFloatStages - 1);
        const float* weights = ring[part % kFloatStages][column];
        const float* inputs = ring[part % kFloatStages][kFloatColumns + row];
        const int count = min(kFloatInputs, p.in - part * kFloatInputs);
        int i = 0;
#pragma unroll 4
        for (; i + 4 <= count; i += 4) {
            const float4 w = *reinterpret_cast<const float4*>(weights + i),
                         v = *reinterpret_cast<const float4*>(inputs + i);
            sum = __fmaf_rn(w.x, v.x, sum);
            sum = __fmaf_rn(w.y, v.y, sum);
            sum = __fmaf_rn(w.z, v.z, sum);
            sum = __fmaf_rn(w.w, v.w, sum);
        }
        for (; i < count; ++i) sum = __fmaf_rn(weights[i], inputs[i], sum);
    }
    if (column < columns && row < rows)
        static_cast<float*>(p.y)[std::int64_t(first_row + row) * p.out + first_column + column] = sum;
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
    if (rows == 0 || columns == 0) return;
    with_element(y_dtype, [&](auto element) {
        using Out = decltype(element);
        const bool quads = may_quad(x, columns, columns, DType::float32) &&
                           may_quad(y, columns, columns, y_dtype) &&
                           may_quad(factors, 4, columns, DType::float32);
        const std::int64_t of_block = kChainThreads * (quads ? 4 : 1);
        launch_dependent(quads ? scale_columns_kernel<4, Out> : scale_columns_kernel<1, Out>,
                         dim3(unsigned(rows), unsigned((columns + of_block - 1) / of_block)), kChainThreads,
                         0, stream, "scale_columns", x, factors, columns, static_cast<Out*>(y));
    });
}

void own_product(const ProductParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.out == 0) return;
    if (p.dtype == DType::float32) {
        const dim3 blocks(unsigned((p.out + kFloatColumns - 1) / kFloatColumns),
                          unsigned((p.rows + kFloatRows - 1) / kFloatRows));
        const bool quads =
            may_quad(p.weight, p.in, p.in, p.dtype) && may_quad(p.x, p.x_stride, p.in, p.dtype);
        return launch_dependent(quads ? float_chain_kernel<4> : float_chain_kernel<1>, blocks, kChainThreads,
                                0, stream, "float_chain", p);
    }
    const std::int64_t y_stride = p.y_stride ? p.y_stride : p.out;
    if (p.rows > kMostFewRows && p.out <= kOctetColumns && y_stride == p.out &&
        p.coding.kind == CodeKind::none) {
        const auto kernel =
            p.y_dtype == DType::float32 ? few_columns_kernel<float> : few_columns_kernel<__nv_bfloat16>;
        return launch_dependent(kernel, dim3(unsigned((p.rows + kChainRows - 1) / kChainRows)), 32 * p.pieces,
                                0, stream, "few_columns", p);
    }
    for (int begin = 0; begin < p.rows; begin += kMostFewRows) {
        ProductParams some = p;
        some.rows = std::min(kMostFewRows, p.rows - begin);
        some.x = static_cast<const char*>(p.x) + begin * p.x_stride * bytes_of(p.dtype);
        some.y = static_cast<char*>(p.y) + begin * y_stride * bytes_of(p.y_dtype);
        few_rows_product(some, stream);
    }
}

}  // namespace cuda
}  // namespace apcbatch
