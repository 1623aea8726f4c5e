// Products with few rows of x and what a Mamba mixer does with them in a decode pass, in one launch each:
// in_proj and the convolution, dt_proj and the state's step. The bits are those of the product and of the op
// after it. Must not know: Python.
#include "decode_epilogues.cuh"
#include "few_rows.cuh"
#include "quads.cuh"

namespace apcbatch {
namespace cuda {
namespace {

struct Convolved {
    static constexpr bool kCollected = true;
    static constexpr int kHeld = 2;
    DecodeParams pass;
    DecodeLayer layer;

    struct Item {
        int row, token;
        Convolve<Bf16> convolve;

        __device__ __forceinline__ Item(const Convolved& of, int row_of_block, int its_token)
            : row(Share(2 * of.pass.shape.d_inner).begin + row_of_block),
              token(its_token),
              convolve(of.pass, of.layer, StateSlots(of.pass.ragged, token)) {
            convolve.prepare(row, token);
        }
        __device__ __forceinline__ void finish(float sum) { convolve.finish(row, token, sum); }
    };
};

struct Stepped {
    static constexpr bool kCollected = true;
    static constexpr int kHeld = 1;
    DecodeParams pass;
    DecodeLayer layer;
    const Bf16 *B, *C;
    std::int64_t B_stride, C_stride;

    struct Item {
        const Stepped& of;
        Channel<Bf16> channel;
        Quad<Bf16> B[kStatesAtOnce / 4], C[kStatesAtOnce / 4];

        __device__ __forceinline__ Item(const Stepped& results, int row_of_block, int token)
            : of(results), channel(of.pass.shape, row_of_block, token, StateSlots(of.pass.ragged, token)) {
            channel.load(of.pass, of.layer);
#pragma unroll
            for (int i = 0; i < kStatesAtOnce / 4; ++i) {
                B[i] = reinterpret_cast<const Quad<Bf16>*>(of.B + token * of.B_stride)[i];
                C[i] = reinterpret_cast<const Quad<Bf16>*>(of.C + token * of.C_stride)[i];
            }
        }
        __device__ __forceinline__ void finish(float sum) {
            float wide_B[kStatesAtOnce], wide_C[kStatesAtOnce];
#pragma unroll
            for (int i = 0; i < kStatesAtOnce; ++i) {
                wide_B[i] = widen(B[i / 4].at[i % 4]);
                wide_C[i] = widen(C[i / 4].at[i % 4]);
            }
            channel.step(of.pass, of.layer, widen(narrow<Bf16>(sum)), wide_B, wide_C);
        }
    };
};

bool single_tokens(const ProductParams& product, const RaggedParams& ragged) {
    return product.rows == ragged.num_sequences && product.rows <= kMostMixerRows && product.pieces == 1 &&
           takes_few_rows(product);
}

bool takes_convolution(const ProductParams& product, const ConvParams& p) {
    return single_tokens(product, p.ragged) && product.out == 2 * p.d_inner && p.width >= 1 &&
           p.width <= kMostDecodeTaps && p.weight_dtype == DType::float32 && p.dtype == DType::bfloat16;
}

bool takes_step(const ProductParams& product, const ScanParams& p) {
    return single_tokens(product, p.ragged) && product.out == p.d_inner && p.d_state == kStatesAtOnce &&
           p.dtype == DType::bfloat16 && p.D != nullptr && p.dt_bias != nullptr && p.z != nullptr &&
           p.x_stride == p.d_inner && p.z_stride == p.d_inner && p.out_stride == p.d_inner &&
           aligned<Bf16>({{p.B, p.B_stride}, {p.C, p.C_stride}}, p.d_state, 4);
}

}  // namespace

void few_rows_convolution(const ProductParams& product, const ConvParams& p, void* z, cudaStream_t stream) {
    if (!takes_convolution(product, p))
        throw std::invalid_argument("few_rows_convolution does not take these sizes or addresses");
    Convolved results = {};
    results.pass.ragged = p.ragged;
    results.pass.shape.d_inner = int(p.d_inner);
    results.pass.shape.width = int(p.width);
    results.pass.conv_stride = p.state_stride;
    results.pass.x = p.out;
    results.pass.z = z;
    results.layer.conv_weight = static_cast<const float*>(p.weight);
    results.layer.conv_bias = static_cast<const float*>(p.bias);
    results.layer.conv = p.state;
    if (product.rows > 0) launch_few_rows<1>(product, results, stream);
}

void few_rows_step(const ProductParams& product, const ScanParams& p, cudaStream_t stream) {
    if (!takes_step(product, p))
        throw std::invalid_argument("few_rows_step does not take these sizes or addresses");
    Stepped results = {};
    results.pass.ragged = p.ragged;
    results.pass.shape.d_inner = int(p.d_inner);
    results.pass.shape.d_state = int(p.d_state);
    results.pass.ssm_stride = p.state_stride;
    results.pass.x = const_cast<void*>(p.x);
    results.pass.z = const_cast<void*>(p.z);
    results.pass.y = p.out;
    results.layer.A = p.A;
    results.layer.D = p.D;
    results.layer.dt_bias = p.dt_bias;
    results.layer.ssm = p.state;
    results.B = static_cast<const Bf16*>(p.B), results.B_stride = p.B_stride;
    results.C = static_cast<const Bf16*>(p.C), results.C_stride = p.C_stride;
    if (product.rows > 0) launch_few_rows<1>(product, results, stream);
}

}  // namespace cuda
}  // namespace apcbatch
