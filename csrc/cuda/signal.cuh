// A number in shared memory that a block's threads tell each other without waiting for one another. Nothing
// else is ordered by it. Must not know: what it says.
#pragma once

#include <cuda_runtime.h>

namespace apcbatch {
namespace cuda {

class Signal {
  public:
    __device__ explicit Signal(int* shared) : value_(shared) {}
    __device__ void set(int value) const { atomicExch(value_, value); }
    __device__ int get() const { return atomicOr(value_, 0); }

  private:
    int* value_;
};

}  // namespace cuda
}  // namespace apcbatch
