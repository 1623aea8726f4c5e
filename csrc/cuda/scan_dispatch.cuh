// Select the kernel template of a selective scan by its run-time sizes.
#pragma once

#include <stdexcept>

#include "selective_scan.cuh"

namespace apcbatch {
namespace cuda {

// Launches the kernel with helper warps if the device has enough shared memory (see launch_scan), else
// without.
template <class T>
void selective_scan_of(const ScanParams& p, const Selection& selection, int lanes, cudaStream_t stream) {
    bool launched = false;
    if (p.d_state <= 8) {
        if (lanes > 2) launched = launch_scan<Shape<T, 2, 4, 1, 3, 6>>(p, selection, stream);
        if (!launched) launched = launch_scan<Shape<T, 8, 1, 1, 4, 0>>(p, selection, stream);
    } else if (p.d_state <= 16) {
        if (lanes == 2) launched = launch_scan<Shape<T, 8, 2, 1, 3, 3>>(p, selection, stream);
        if (lanes == 4) launched = launch_scan<Shape<T, 4, 4, 1, 5, 5>>(p, selection, stream);
        if (lanes == 8) launched = launch_scan<Shape<T, 2, 8, 1, 3, 6>>(p, selection, stream);
        if (!launched) launched = launch_scan<Shape<T, 8, 2, 2, 4, 0>>(p, selection, stream);
    } else if (p.d_state <= 32) {
        if (lanes > 2) launched = launch_scan<Shape<T, 4, 8, 1, 4, 4>>(p, selection, stream);
        if (!launched) launched = launch_scan<Shape<T, 8, 4, 2, 4, 0>>(p, selection, stream);
    } else if (p.d_state <= 64) {
        if (lanes > 4) launched = launch_scan<Shape<T, 8, 8, 1, 4, 4>>(p, selection, stream);
        if (!launched) launched = launch_scan<Shape<T, 16, 4, 1, 4, 0>>(p, selection, stream);
    } else {
        launched = launch_scan<Shape<T, 16, 8, 1, 4, 0>>(p, selection, stream);
    }
    if (!launched)
        throw std::runtime_error("the CUDA device has too little shared memory for selective_scan");
}

}  // namespace cuda
}  // namespace apcbatch
