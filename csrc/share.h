// How the threads' share of a kernel is handed out, and which instruction set's function does it.
// Must not know: any one kernel.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

#include "dispatch.h"
#include "scratch.h"

namespace apcbatch {

// Elements below which one thread is faster than waking the others.
constexpr std::int64_t kSerialElements = 1 << 16;

// Of the threads asked for, those that this process may use; see share.cpp for forked processes.
int usable_threads(std::int64_t wanted);

// Calls piece(i, scratch) once for each i < count, each thread with `scratch_bytes` of its own. An exception
// must not leave a parallel region, so a piece never throws, and a thread that gets no scratch leaves its
// pieces to the others. std::bad_alloc if none of them gets any.
template <class Piece>
void share_pieces(std::int64_t count, std::int64_t num_threads, std::int64_t scratch_bytes,
                  const Piece& piece) {
    const int threads = usable_threads(num_threads < count ? num_threads : count);
    std::atomic<std::int64_t> next{0};
    const auto work = [&] {
        char* scratch = thread_scratch(scratch_bytes);
        while (scratch != nullptr) {
            const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
            if (i >= count) break;
            piece(i, scratch);
        }
    };
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        work();
    } else if (count > 0) {
        work();
    }
    if (next.load(std::memory_order_relaxed) < count) throw std::bad_alloc();
}

// Calls rows(begin, end, scratch) on about equal runs of the t rows, one a thread.
template <class Rows>
void share_rows(std::int64_t t, std::int64_t columns, std::int64_t num_threads, std::int64_t scratch_bytes,
                const Rows& rows) {
    if (t <= 0 || columns <= 0) return;
    const std::int64_t most = t < kSerialElements / columns ? 1 : num_threads;
    const std::int64_t runs = most < 1 ? 1 : most < t ? most : t;
    share_pieces(runs, runs, scratch_bytes, [&](std::int64_t i, char* scratch) {
        const std::int64_t whole = t / runs, left = t % runs;  // t * i would overflow for the largest t
        rows(whole * i + left * i / runs, whole * (i + 1) + left * (i + 1) / runs, scratch);
    });
}

}  // namespace apcbatch
