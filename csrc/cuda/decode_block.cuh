// How the blocks of a decode launch share rows and wait for each other. Must not know: models.
#pragma once

#include <cstdint>

#include "signal.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kWarps = 10, kReaders = 32 * kWarps;  // the threads of a block that compute
constexpr int kItems = 320;                         // results that a block has at once, a thread each
constexpr int kPartialStride = kWarps + 1;

// Results are laid out with neighbouring rows of weights side by side, one vector's after the other's.
template <int kRows>
constexpr int kRowsAtOnce = kItems / kRows;
template <int kRows>
__device__ __forceinline__ int vector_of_thread() {
    return min(int(threadIdx.x) / kRowsAtOnce<kRows>, kRows - 1);
}
template <int kRows>
__device__ __forceinline__ int row_of_thread() {
    return int(threadIdx.x) - vector_of_thread<kRows>() * kRowsAtOnce<kRows>;
}

// A block's rows of a matrix of `total` rows; total * blocks < 2^32.
struct Share {
    int begin, end;

    __device__ explicit Share(int total)
        : begin(int(unsigned(total) * blockIdx.x / gridDim.x)),
          end(int(unsigned(total) * (blockIdx.x + 1) / gridDim.x)) {}
};

// Waits for the block's readers; those who fill the stream go on.
__device__ __forceinline__ void sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(kReaders) : "memory"); }

// All blocks' readers, each of which has written what others read afterwards (not through L1). From arriving
// until what they met for is loaded, they ask the stream to be calm: a busy memory answers late.
class Meeting {
  public:
    __device__ Meeting(unsigned* arrivals, const Signal& calm) : arrivals_(arrivals), calm_(calm) {}

    __device__ void arrive() {
        sync_readers();
        if (threadIdx.x == 0) {
            calm_.set(1);
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals_) : "memory");
        }
        expected_ += gridDim.x;
    }

    // By thread 0 once it has what it waited for.
    __device__ void loaded() const {
        if (threadIdx.x == 0) calm_.set(0);
    }

    __device__ void await() const {
        if (threadIdx.x == 0) {
            unsigned seen;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals_) : "memory");
            } while (seen < expected_);
        }
        sync_readers();
    }

  private:
    unsigned *arrivals_, expected_ = 0;
    const Signal calm_;
};

}  // namespace cuda
}  // namespace apcbatch
