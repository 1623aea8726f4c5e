// The decode kernels of float32; one file an element type, compiled side by side.
#include "decode.cuh"

namespace apcbatch {
namespace cuda {

const void* decode_kernel_float32(int rows, int inner) { return decode_kernel_of<float>(rows, inner); }

}  // namespace cuda
}  // namespace apcbatch
