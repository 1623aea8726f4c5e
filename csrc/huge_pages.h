// Ask the system for huge pages, so that memory that is read from end to end takes fewer TLB entries.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace apcbatch {

// Requests huge pages for every aligned 2 MiB inside the `bytes` bytes at `memory`. Call it before the first
// write. It has no effect on a system without huge pages.
inline void want_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t kPage = std::uintptr_t(2) << 20;
    const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t begin = (from + kPage - 1) / kPage * kPage;
    const std::uintptr_t end = (from + std::uintptr_t(bytes)) / kPage * kPage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace apcbatch
