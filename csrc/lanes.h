// Vector loads and stores at the end of a row, for kernels whose rows have any length.
#pragma once

#include "simd.h"

namespace apcbatch {
namespace APC_ISA {

// The first `count` lanes of a vector (any count above 0), the others zero.
template <class T>
APC_INLINE Vec load_first(const T* p, int64_t count) {
    return count >= kLanes ? Vec::load(p) : load_partial(p, count);
}

template <class T>
APC_INLINE void store_first(Vec value, T* p, int64_t count) {
    if (count >= kLanes) {
        value.store(p);
    } else {
        store_partial(value, p, count);
    }
}

}  // namespace APC_ISA
}  // namespace apcbatch
