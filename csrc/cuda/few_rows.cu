// Products with few rows of x whose results are stored directly.
#include "few_rows.cuh"

namespace apcbatch {
namespace cuda {
namespace {

template <CodeKind kKind>
void launch(const ProductParams& p, cudaStream_t stream) {
    p.y_dtype == DType::float32 ? launch_few_rows<kKind>(p, Stored<float>(), stream)
                                : launch_few_rows<kKind>(p, Stored<Bf16>(), stream);
}

}  // namespace

bool takes_few_rows(const ProductParams& p) {
    const auto whole = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 == 0; };
    return p.dtype == DType::bfloat16 && p.rows <= kMostFewRows && takes_pieces(p.in, p.pieces) &&
           (p.rows == 1 || (p.x_stride >= p.in && p.x_stride % 8 == 0)) && whole(p.weight) && whole(p.x) &&
           (p.pieces == 1 || p.out <= kMostTileRows * shares_of(p)) &&
           attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 9;
}

void few_rows_product(const ProductParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.out == 0) return;
    if (!takes_few_rows(p))
        throw std::invalid_argument("few_rows_product does not take these sizes or addresses");
    with_kind(p.coding.kind, [&](auto kind) { launch<decltype(kind)::value>(p, stream); });
}

}  // namespace cuda
}  // namespace apcbatch
