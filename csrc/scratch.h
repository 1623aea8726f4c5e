// Reusable working memory of each thread, so that a kernel call allocates nothing once it has run before.
#pragma once

#include <cstdint>

namespace apcbatch {

// At least `bytes`, aligned to 64, private to the calling thread until its next call; grows and is never
// given back before the thread ends. Null where there is no memory: it is called where nothing may be thrown.
char* thread_scratch(std::int64_t bytes) noexcept;

// The same for a call made of several kernels: what they hand to each other, while each uses thread_scratch.
// Throws std::bad_alloc.
char* thread_workspace(std::int64_t bytes);

// The same for a call made of several such calls: what goes from one to the next.
char* thread_stream(std::int64_t bytes);

// For tests: the next `count` calls of either find no memory.
void refuse_scratch(std::int64_t count);

}  // namespace apcbatch
