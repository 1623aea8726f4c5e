// See codes.h.
#include <algorithm>

#include "codes.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kDecodeThreads = 256;

// A thread decodes 16 bytes of codes.
template <CodeKind kKind>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_kernel(const uint4* codes, const Coding coding, unsigned chunks, unsigned count, uint4* y) {
    constexpr int kSteps = kKind == CodeKind::int4 ? 2 : 1;
    const unsigned i = blockIdx.x * kDecodeThreads + threadIdx.x;
    if (i >= count) return;
    const unsigned row = i / chunks, input = (i - row * chunks) * (kSteps * 16);
    const float scale = coding.scales[(input >> coding.shift) * coding.stride + row];
    const uint4 all = codes[i];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint2 a = decoded<kKind>(all.x, scale, step), b = decoded<kKind>(all.y, scale, step),
                    c = decoded<kKind>(all.z, scale, step), d = decoded<kKind>(all.w, scale, step);
        uint4* to = y + (std::size_t(i) * kSteps + step) * 2;
        to[0] = make_uint4(a.x, b.x, c.x, d.x);
        to[1] = make_uint4(a.y, b.y, c.y, d.y);
    }
}

template <CodeKind kKind>
void launch_decode(const CodedRows& part, int in, void* y, cudaStream_t stream) {
    const unsigned chunks = unsigned(code_bytes(kKind, in) / 16), count = chunks * unsigned(part.rows);
    decode_kernel<kKind><<<(count + kDecodeThreads - 1) / kDecodeThreads, kDecodeThreads, 0, stream>>>(
        static_cast<const uint4*>(part.codes), part.coding, chunks, count, static_cast<uint4*>(y));
    check_launch("decode");
}

// Begins when the kernels before it have ended, and lets those after it begin early.
__global__ void settle_kernel() {}

}  // namespace

void decode(const CodedWeights& weights, cudaStream_t stream) {
    auto* y = static_cast<char*>(weights.scratch->memory);
    for (const CodedRows& part : weights.parts) {
        const std::int64_t bytes = std::int64_t(part.rows) * weights.in * 2;
        with_kind(part.coding.kind, [&](auto kind) {
            if constexpr (decltype(kind)::value == CodeKind::none) {
                check(cudaMemcpyAsync(y, part.codes, std::size_t(bytes), cudaMemcpyDeviceToDevice, stream),
                      "the copy of weights");
            } else {
                launch_decode<decltype(kind)::value>(part, weights.in, y, stream);
            }
        });
        y += bytes;
    }
    settle_kernel<<<1, 1, 0, stream>>>();
    check_launch("decode");
}

bool takes_coded_product(const CodedWeights& weights, int pieces) {
    for (const CodedRows& part : weights.parts) {
        const int shift = part.coding.kind == CodeKind::none ? 0 : std::min(part.coding.shift, 31);
        if (pieces > 1 && weights.in / pieces % (shift < 31 ? 1 << shift : 32)) return false;
    }
    return takes_pieces(weights.in, pieces);
}

void coded_product(const CodedWeights& weights, const ProductParams& params, cudaStream_t stream) {
    std::vector<ProductParams> products;
    int first = 0;
    for (const CodedRows& part : weights.parts) {
        ProductParams& p = products.emplace_back(params);
        p.weight = part.codes;
        p.coding = part.coding;
        p.out = part.rows;
        p.y = static_cast<char*>(p.y) + first * bytes_of(p.y_dtype);
        p.y_stride = params.out;
        first += part.rows;
    }
    // The largest comes last: it copies its first weights while the others run.
    std::sort(products.begin(), products.end(), [](const auto& a, const auto& b) { return a.out < b.out; });
    for (const ProductParams& p : products) own_product(p, stream);
}

}  // namespace cuda
}  // namespace apcbatch
