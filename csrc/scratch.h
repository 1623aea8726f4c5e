// Reusable working memory of each thread, so that a kernel call allocates nothing once it has run before.
#pragma once

#include <cstdint>

namespace apcbatch {

// At least `bytes`, aligned to 64, private to the calling thread until its next call; grows and is never
// given back before the thread ends.
char* thread_scratch(int64_t bytes);

// The same for a call made of several kernels: what they hand to each other, while each uses thread_scratch.
char* thread_workspace(int64_t bytes);

}  // namespace apcbatch
