// Reusable working memory of each thread, so that repeated kernel calls allocate nothing.
#pragma once

#include <cstdint>

namespace apcbatch {

// Returns at least `bytes`, aligned to 64, valid on the calling thread until its next call. The memory grows
// and is freed when the thread ends. Returns null if out of memory, as callers must not throw.
char* thread_scratch(std::int64_t bytes) noexcept;

// Returns memory like thread_scratch, but separate from it: for the intermediate results of a call of several
// kernels, each of which uses thread_scratch. Throws std::bad_alloc.
char* thread_workspace(std::int64_t bytes);

// Returns memory separate from both: for the intermediate results of a whole pass, whose sub-blocks use
// thread_workspace.
char* thread_stream(std::int64_t bytes);

// For tests: make the next `count` allocations fail.
void refuse_scratch(std::int64_t count);

}  // namespace apcbatch
