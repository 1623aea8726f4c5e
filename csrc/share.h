// Distribute the pieces of a kernel over threads.
#pragma once

#include <cstdint>
#include <new>

#include "crew.h"
#include "dispatch.h"

namespace apcbatch {

// Elements below which one thread is faster than waking the others.
constexpr double kSerialElements = 1 << 16;

// The threads that this process may use, at most `wanted`; see share.cpp for forked processes.
int usable_threads(std::int64_t wanted);

// As usable_threads, but 1 for less work than `too_little`, or than a sixteenth of it if this thread leads a
// pool.
int useful_threads(double work, double too_little, std::int64_t wanted);

// Calls piece(i, scratch) once for each i < count, each thread with `scratch_bytes` of its own, by the crew
// that this thread leads, or by one of that many threads for this call alone. An exception must not leave a
// parallel region, so a piece never throws, and a thread that gets no scratch leaves its pieces to the
// others. std::bad_alloc if none of them gets any.
template <class Piece>
void share_pieces(std::int64_t count, std::int64_t num_threads, std::int64_t scratch_bytes,
                  const Piece& piece) {
    if (count <= 0) return;
    const int threads = usable_threads(num_threads < count ? num_threads : count);
    const auto one = [](const void* of, std::int64_t i, char* scratch) {
        (*static_cast<const Piece*>(of))(i, scratch);
    };
    Crew::lead(threads, [&] {
        if (!Crew::share(count, threads, scratch_bytes, one, &piece)) throw std::bad_alloc();
    });
}

// Calls rows(begin, end, scratch) on about equal runs of the t rows, one a thread.
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
