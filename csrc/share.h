// Distribute the pieces of a kernel over threads.
#pragma once

#include <cstdint>
#include <new>

#include "dispatch.h"
#include "thread_pool.h"

namespace apcbatch {

// Elements below which one thread is faster than waking the thread pool.
constexpr double kSerialElements = 1 << 16;

// Returns the number of threads that this process may use, at most `wanted`. For forks see share.cpp.
int usable_threads(std::int64_t wanted);

// Like usable_threads, but returns 1 if `work` is below `too_little`, or below a sixteenth of it if this
// thread already leads a pool.
int useful_threads(double work, double too_little, std::int64_t wanted);

// Calls piece(i, scratch) once for each i < count. It runs on the thread pool that this thread leads, or on a
// pool of `num_threads` made for this call. Each thread has `scratch_bytes` of scratch. A piece must not
// throw, as an exception must not leave a parallel region. A thread that cannot allocate scratch leaves its
// pieces to the others. Throws std::bad_alloc if no thread can.
template <class Piece>
void share_pieces(std::int64_t count, std::int64_t num_threads, std::int64_t scratch_bytes,
                  const Piece& piece) {
    if (count <= 0) return;
    const int threads = usable_threads(num_threads < count ? num_threads : count);
    const auto one = [](const void* of, std::int64_t i, char* scratch) {
        (*static_cast<const Piece*>(of))(i, scratch);
    };
    ThreadPool::lead(threads, [&] {
        if (!ThreadPool::share(count, threads, scratch_bytes, one, &piece)) throw std::bad_alloc();
    });
}

// Splits the t rows into nearly equal runs, one per thread, and calls rows(begin, end, scratch) on each.
template <class Rows>
void share_rows(std::int64_t t, std::int64_t columns, std::int64_t num_threads, std::int64_t scratch_bytes,
                const Rows& rows) {
    if (t <= 0 || columns <= 0) return;
    const std::int64_t most = useful_threads(double(t) * double(columns), kSerialElements, num_threads);
    const std::int64_t runs = most < 1 ? 1 : most < t ? most : t;
    share_pieces(runs, runs, scratch_bytes, [&](std::int64_t i, char* scratch) {
        const std::int64_t whole = t / runs, left = t % runs;  // t * i would overflow for the largest t
        rows(whole * i + left * i / runs, whole * (i + 1) + left * (i + 1) / runs, scratch);
    });
}

}  // namespace apcbatch
