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

}  // namespace

CUtensorMap tensor_map(const void* matrix, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                       int box_rows) {
    CUtensorMap map = {};
    const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[] = {cuuint64_t(stride) * 2};
    const cuuint32_t box[] = {kBoxColumns, cuuint32_t(box_rows)}, steps[] = {1, 1};
    // L2 promotion to 128 bytes, as 256 bytes would be 6 % slower.
    const CUresult error =
        encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix), sizes, strides, box,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error != CUDA_SUCCESS)
        throw std::runtime_error("the driver refused the map of a matrix of " + std::to_string(rows) + " x " +
                                 std::to_string(columns) + " with error " + std::to_string(int(error)));
    return map;
}

}  // namespace cuda
}  // namespace apcbatch
