// From the sizes of a model to the kernel of its decode passes, and its launch. Must not know: Python.
#include "decode.cuh"

#include <stdexcept>

namespace apcbatch {
namespace cuda {

namespace {

constexpr int kFewestSlots = 4;  // of a stream that is worth having

struct Device {
    int major, multiprocessors, shared_bytes, cooperative;
};

Device current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "the current device");
    const auto attribute = [device](cudaDeviceAttr which) {
        int value = 0;
        check(cudaDeviceGetAttribute(&value, which, device), "an attribute of the device");
        return value;
    };
    return {attribute(cudaDevAttrComputeCapabilityMajor), attribute(cudaDevAttrMultiProcessorCount),
            attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), attribute(cudaDevAttrCooperativeLaunch)};
}

template <class T>
const void* kernel_of(const DecodeShape& s, int rows, const void* (*of)(int rows, int size)) {
    for (int size : {1, 2}) {
        if (s.d_inner <= most_inner<T>(size) && s.hidden <= most_hidden<T>(size)) return of(rows, size);
    }
    return nullptr;
}

// The kernel for rows of this shape; null where there is none.
const void* kernel_of(const DecodeShape& s, int rows) {
    if (s.dtype == DType::float32) return kernel_of<float>(s, rows, decode_kernel_float32);
    if (s.dtype == DType::bfloat16) return kernel_of<__nv_bfloat16>(s, rows, decode_kernel_bfloat16);
    return nullptr;
}

int scratch_bytes(const DecodeShape& s, int rows) {
    return decode_scratch(rows, s.hidden, s.dt_rank + 2 * s.d_state);
}

int slots_of(const DecodeShape& s, int rows, const Device& device) {
    const int slots = (device.shared_bytes - scratch_bytes(s, rows)) / kSlotBytes;
    return slots < kMostSlots ? slots : kMostSlots;
}

bool takes(const DecodeShape& s, int rows, const Device& device) {
    const void* kernel = kernel_of(s, rows);
    const int channels = (s.d_inner + device.multiprocessors - 1) / device.multiprocessors;
    cudaFuncAttributes attributes = {};
    if (kernel == nullptr || cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
        cudaGetLastError();  // so that the next launch is not blamed
        return false;
    }
    return attributes.ptxVersion >= 90 && channels * rows <= kItems &&
           slots_of(s, rows, device) >= kFewestSlots;
}

}  // namespace

int most_decode_rows(const DecodeShape& s) {
    const Device device = current_device();
    const int vector = int(16 / bytes_of(s.dtype));
    const bool whole = s.hidden % vector == 0 && s.d_inner % vector == 0 && s.dt_rank % vector == 0;
    if (device.major < 9 || !device.cooperative || !whole || s.d_state > kMostDecodeStates ||
        s.width > kMostDecodeTaps || s.d_inner * bytes_of(s.dtype) > kSlotBytes ||
        s.hidden * bytes_of(s.dtype) > kSlotBytes || groups_of<__nv_bfloat16>(s.dt_rank) > 1) {
        return 0;
    }
    int rows = kMostDecodeRows;
    while (rows > 0 && !takes(s, rows, device)) rows /= 2;
    return rows;
}

void decode(const DecodeParams& p, cudaStream_t stream) {
    const Device device = current_device();
    const void* kernel = kernel_of(p.shape, p.rows);
    if (kernel == nullptr) throw std::invalid_argument("no decode kernel has this shape or number of rows");
    int slots = slots_of(p.shape, p.rows, device);
    const int bytes = slots * kSlotBytes + scratch_bytes(p.shape, p.rows);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "the shared memory of decode");
    cudaLaunchAttribute together;
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(device.multiprocessors));
    config.blockDim = dim3(kDecodeThreads);
    config.dynamicSmemBytes = std::size_t(bytes);
    config.stream = stream;
    config.attrs = &together;
    config.numAttrs = 1;
    DecodeParams params = p;
    void* arguments[] = {&params, &slots};
    check(cudaLaunchKernelExC(&config, kernel, arguments), "the launch of decode");
    check_launch("decode");
}

}  // namespace cuda
}  // namespace apcbatch
