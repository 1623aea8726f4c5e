// Make tensor maps by a driver function that is looked up at run time, so that a build does not link the
// driver.
#include "tensor_map.h"

#include <stdexcept>
#include <string>

#include "launch.h"

namespace apcbatch {
namespace cuda {
namespace {

// How a row lies in memory: bytes of an element, elements of a row, elements of a box's row.
struct Row {
    int size;
    cuuint64_t columns;
    cuuint32_t box;

    // bits: of a column: 16, 8 or 4.
    Row(std::int64_t its, int bits)
        : size(bits == 16 ? 2 : 1), columns(cuuint64_t(its * bits / 8 / size)), box(bits == 8 ? 128 : 64) {}
};

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

// sizes, box: columns first. strides: of the other dimensions, in elements. size: bytes of an element: 1, 2,
// or 4, which is not swizzled. Else the span of the swizzle is a box's row, 128 or 64 bytes.
template <int kDimensions>
CUtensorMap encoded(const void* matrix, int size, const cuuint64_t (&sizes)[kDimensions],
                    const cuuint64_t (&strides)[kDimensions - 1], const cuuint32_t (&box)[kDimensions]) {
    CUtensorMap map = {};
    cuuint64_t bytes[kDimensions - 1];
    for (int i = 0; i < kDimensions - 1; ++i) bytes[i] = strides[i] * cuuint64_t(size);
    const auto type = size == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                      : size == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    cuuint32_t steps[kDimensions];
    for (cuuint32_t& step : steps) step = 1;
    const auto swizzle = size == 4                   ? CU_TENSOR_MAP_SWIZZLE_NONE
                         : int(box[0]) * size == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                     : CU_TENSOR_MAP_SWIZZLE_64B;
    // L2 promotion to 128 bytes for weights, as 256 bytes would be 6 % slower: a stage has 256 bytes of a
    // row. Of codes it has 128 or 64, and 256 bytes bring those of the next stage to the L2 cache, too.
    const auto promotion =
        size == 1 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    const CUresult error =
        encoder()(&map, type, kDimensions, const_cast<void*>(matrix), sizes, bytes, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
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
                       int box_rows, int bits) {
    const Row row(columns, bits);
    return encoded<2>(matrix, row.size, {row.columns, cuuint64_t(rows)}, {Row(stride, bits).columns},
                      {row.box, cuuint32_t(box_rows)});
}

CUtensorMap scale_map(const Coding& coding, std::int64_t rows, std::int64_t columns, int box_rows) {
    const std::int64_t groups = ((columns - 1) >> coding.shift) + 1;
    return encoded<2>(coding.scales, 4, {cuuint64_t(rows), cuuint64_t(groups)}, {cuuint64_t(coding.stride)},
                      {cuuint32_t(box_rows), 1});
}

CUtensorMap paired_map(const void* matrices, std::int64_t parts, std::int64_t rows, std::int64_t columns,
                       int box_rows, int bits) {
    const Row its(columns, bits);
    const cuuint64_t row = its.columns;
    return encoded<5>(matrices, its.size, {row, 8, 2, cuuint64_t(rows / 16), cuuint64_t(parts)},
                      {2 * row, row, 16 * row, cuuint64_t(rows) * row},
                      {its.box, 8, 2, cuuint32_t(box_rows / 16), cuuint32_t(parts)});
}

}  // namespace cuda
}  // namespace apcbatch
