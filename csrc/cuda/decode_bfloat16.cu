// The decode kernels of bfloat16; one file an element type, compiled side by side.
#include "decode.cuh"

namespace apcbatch {
namespace cuda {

const void* decode_kernel_bfloat16(int rows, int inner) {
    return decode_kernel_of<__nv_bfloat16>(rows, inner);
}

}  // namespace cuda
}  // namespace apcbatch
