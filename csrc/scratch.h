// Reusable working memory of each thread, so that a kernel call allocates nothing once it has run before.
#pragma once

#include <cstdint>

namespace apcbatch {

// At least `bytes`, aligned to 64, private to the calling thread until its next call; grows and is never
// freed before the thread ends. Null if out of memory, as callers must not throw.
char* thread_scratch(std::int64_t bytes) noexcept;

// The same for the intermediate results of a call of several kernels, each of which uses thread_scratch.
// Throws std::bad_alloc.
char* thread_workspace(std::int64_t bytes);

// The same for the intermediate results of a call of several such calls.
char* thread_stream(std::int64_t bytes);

// For tests: the next `count` calls of either find no memory.
void refuse_scratch(std::int64_t count);

}  // namespace apcbatch
