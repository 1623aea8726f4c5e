// From the run-time sizes of a selective scan to a kernel. Must not know: Python.
#pragma once

#include "selective_scan.cuh"

namespace apcbatch {
namespace cuda {

template <class T>
void selective_scan_of(const ScanParams& p, const Selection& selection, int lanes, cudaStream_t stream) {
    if (p.d_state <= 8) {
        if (lanes <= 2) return launch_scan<Shape<T, 8, 1>>(p, selection, stream);
        return launch_scan<Shape<T, 2, 4>>(p, selection, stream);
    }
    if (p.d_state <= 16) {
        if (lanes == 1) return launch_scan<Shape<T, 16, 1>>(p, selection, stream);
        if (lanes == 2) return launch_scan<Shape<T, 8, 2>>(p, selection, stream);
        if (lanes == 4) return launch_scan<Shape<T, 4, 4>>(p, selection, stream);
        return launch_scan<Shape<T, 2, 8>>(p, selection, stream);
    }
    if (p.d_state <= 32) {
        if (lanes <= 2) return launch_scan<Shape<T, 16, 2>>(p, selection, stream);
        return launch_scan<Shape<T, 4, 8>>(p, selection, stream);
    }
    if (p.d_state <= 64) {
        if (lanes <= 4) return launch_scan<Shape<T, 16, 4>>(p, selection, stream);
        return launch_scan<Shape<T, 8, 8>>(p, selection, stream);
    }
    return launch_scan<Shape<T, 16, 8>>(p, selection, stream);
}

}  // namespace cuda
}  // namespace apcbatch
