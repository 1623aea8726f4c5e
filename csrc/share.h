// How the threads' share of a kernel is handed out, and which instruction set's function does it.
#pragma once

#include <stdint.h>

#include "dispatch.h"

#if APC_HAS_X86_ISAS
#define APC_FOR_ISA(function) for_isa(&plain::function, &avx2::function, &avx512::function)
#else
#define APC_FOR_ISA(function) for_isa(&plain::function, &plain::function, &plain::function)
#endif

namespace apcbatch {

// Elements below which one thread is faster than waking the others.
constexpr int64_t kSerialElements = 1 << 16;

// Calls rows(begin, end) on about equal runs of the t rows, one a thread.
template <class Rows>
void share_rows(int64_t t, int64_t elements, int num_threads, const Rows& rows) {
    int64_t runs = elements < kSerialElements ? 1 : num_threads;
    if (runs > t) runs = t;
    if (runs <= 1) {
        if (t > 0) rows(int64_t(0), t);
        return;
    }
#pragma omp parallel for num_threads(int(runs)) schedule(static, 1)
    for (int64_t i = 0; i < runs; ++i) rows(t * i / runs, t * (i + 1) / runs);
}

}  // namespace apcbatch
