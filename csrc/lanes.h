// Partial vector loads and stores at the end of a row, for rows of any length.
#pragma once

#include "simd.h"

namespace apcbatch {
namespace APC_ISA {

// Loads the first `count` lanes of a vector, 1 or more, with zeros in the others.
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
