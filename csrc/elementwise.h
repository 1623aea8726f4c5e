// The functions of vmath.h over an array: for few values within a pass, and for tests of each one's error
// bound on each instruction set.
#pragma once

#include "scan.h"
#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {

template <class Function>
APC_INLINE void map(const float* from, float* to, int64_t count, Function function) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) function(Vec::load(from + i)).store(to + i);
    if (i < count) store_partial(function(load_partial(from + i, count - i)), to + i, count - i);
}

void elementwise(Elementwise function, const float* from, float* to, int64_t count) {
    switch (function) {
        case Elementwise::exp:
            return map(from, to, count, [](Vec v) { return exp(v); });
        case Elementwise::exp2:
            return map(from, to, count, [](Vec v) { return exp2_any(v, Vec::broadcast(1.0f)); });
        case Elementwise::exp2_bounded:
            return map(from, to, count,
                       [](Vec v) { return exp2_of(split_product(v, Vec::broadcast(1.0f))); });
        case Elementwise::log1p_unit:
            return map(from, to, count, [](Vec v) { return log1p_unit(v); });
        case Elementwise::softplus:
            return map(from, to, count, [](Vec v) { return softplus(v); });
        case Elementwise::silu:
            return map(from, to, count, [](Vec v) { return silu(v); });
        case Elementwise::sigmoid:
            return map(from, to, count, [](Vec v) { return sigmoid(v); });
    }
}

}  // namespace APC_ISA
}  // namespace apcbatch
