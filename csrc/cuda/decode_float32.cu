// The decode kernels of float32; one file an element type, compiled side by side.
#include "decode.cuh"

namespace apcbatch {
namespace cuda {

const void* decode_kernel_float32(int rows, int size) { return decode_kernel_of<float>(rows, size); }

}  // namespace cuda
}  // namespace apcbatch
