// Select the number of lanes per channel, and the element type, of a selective scan.
#include <stdexcept>

#include "launch.h"
#include "quads.cuh"

namespace apcbatch {
namespace cuda {

// Defined by scan_dispatch.cuh, in one file per element type.
template <class T>
void selective_scan_of(const ScanParams& p, const Selection& selection, int lanes, cudaStream_t stream);

namespace {

// Chooses the lanes per channel. Few lanes do the least work per token; more lanes fill the GPU if there are
// few channels (measured: docs/performance-cuda.md).
int choose_lanes(const ScanParams& p, const Selection& selection) {
    const double channels =
        double(p.d_inner) * double(selection.count) / attribute_of_device(cudaDevAttrMultiProcessorCount);
    if (channels > 192) return 1;
    if (channels > 40) return 2;
    return channels > 24 ? 4 : 8;
}

}  // namespace

void selective_scan(const ScanParams& p, const Batch& batch, int lanes, cudaStream_t stream) {
    Selection selection = {batch.order, p.ragged.num_sequences};
    if (takes_scan_short(p)) {
        selective_scan_short(p, batch, stream);
        selection.count = batch.num_longer;
    }
    if (selection.count == 0) return;
    if (p.d_state > kMostStates) {
        throw std::invalid_argument("the CUDA scan has at most " + std::to_string(kMostStates) +
                                    " states a channel; it got " + std::to_string(p.d_state));
    }
    if (lanes == 0) lanes = choose_lanes(p, selection);
    with_element(p.dtype,
                 [&](auto element) { selective_scan_of<decltype(element)>(p, selection, lanes, stream); });
}

void check(cudaError_t error, const char* purpose) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears the error, so that check_launch does not report it for the next launch
    throw std::runtime_error(std::string(purpose) + ": CUDA says " + cudaGetErrorString(error));
}

int attribute_of_device(cudaDeviceAttr which) {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), "the current device");
    check(cudaDeviceGetAttribute(&value, which, device), "an attribute of the device");
    return value;
}

void check_launch(const char* kernel) {
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string("the CUDA kernel ") + kernel +
                             " was not accepted: " + cudaGetErrorString(error));
}

}  // namespace cuda
}  // namespace apcbatch
