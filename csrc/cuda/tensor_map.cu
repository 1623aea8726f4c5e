// Make tensor maps by a driver function that is looked up at run time, so that a build does not link the
// driver.
#include "tensor_map.h"

#include <stdexcept>
#include <string>

#include "launch.h"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kBoxColumns = 64;  // 128 bytes of bfloat16, the span of the swizzle

decltype(&cuTensorMapEncodeTiled) encoder() {
    static const auto found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                               &result),
              "the driver's tensor maps");
#else
        check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result),
              "the driver's tensor maps");
#endif
        if (result != cudaDriverEntryPointSuccess)
            throw std::runtime_error("the driver has no tensor maps: install one for CUDA 12 or newer");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    return found;
}

// sizes, box: columns first. strides: of the other dimensions, in elements.
template <int kDimensions>
CUtensorMap encoded(const void* matrix, const cuuint64_t (&sizes)[kDimensions],
                    const cuuint64_t (&strides)[kDimensions - 1], const cuuint32_t (&box)[kDimensions]) {
    CUtensorMap map = {};
    cuuint64_t bytes[kDimensions - 1];
    for (int i = 0; i < kDimensions - 1; ++i) bytes[i] = strides[i] * 2;
    cuuint32_t steps[kDimensions];
    for (cuuint32_t& step : steps) step = 1;
    // L2 promotion to 128 bytes, as 256 bytes would be 6 % slower.
    const CUresult error =
        encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kDimensions, const_cast<void*>(matrix), sizes,
                  bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error != CUDA_SUCCESS) {
        std::string shape;
        for (const cuuint64_t size : sizes)
            shape = std::to_string(size) + (shape.empty() ? "" : " x ") + shape;
        throw std::runtime_error("the driver refused the map of a matrix of " + shape + " with error " +
                                 std::to_string(int(error)));
    }
    return map;
}

}  // namespace

CUtensorMap tensor_map(const void* matrix, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                       int box_rows) {
    return encoded<2>(matrix, {cuuint64_t(columns), cuuint64_t(rows)}, {cuuint64_t(stride)},
                      {kBoxColumns, cuuint32_t(box_rows)});
}

CUtensorMap paired_map(const void* matrices, std::int64_t parts, std::int64_t rows, std::int64_t columns,
                       int box_rows) {
    const cuuint64_t row = cuuint64_t(columns);
    return encoded<5>(matrices, {row, 8, 2, cuuint64_t(rows / 16), cuuint64_t(parts)},
                      {2 * row, row, 16 * row, cuuint64_t(rows) * row},
                      {kBoxColumns, 8, 2, cuuint32_t(box_rows / 16), cuuint32_t(parts)});
}

}  // namespace cuda
}  // namespace apcbatch
