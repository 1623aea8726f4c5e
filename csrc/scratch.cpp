#include "scratch.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace apcbatch {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr std::int64_t kGrain = 64;  // small, so that the sanitizer detects an access past the size asked for
constexpr bool kReused = false;
#else
constexpr std::int64_t kGrain = 4096;
constexpr bool kReused = true;
#endif

std::atomic<std::int64_t> refusals{0};

class Scratch {
  public:
    ~Scratch() { std::free(memory_); }

    // Returns at least `bytes` of memory; null only if out of memory.
    char* grown(std::int64_t bytes) noexcept {
        if (refusals.load(std::memory_order_relaxed) > 0 && refusals.fetch_sub(1) > 0) return nullptr;
        if (!kReused || memory_ == nullptr || bytes_ < bytes) {
            std::free(memory_);
            memory_ = nullptr;
            if (bytes < 0 || bytes > INT64_MAX - kGrain) return nullptr;
            bytes_ = (bytes / kGrain + 1) * kGrain;
            memory_ = static_cast<char*>(std::aligned_alloc(64, static_cast<std::size_t>(bytes_)));
        }
        return memory_;
    }

  private:
    char* memory_ = nullptr;
    std::int64_t bytes_ = 0;
};

char* existing(char* memory) {
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

char* thread_scratch(std::int64_t bytes) noexcept {
    thread_local Scratch scratch;
    return scratch.grown(bytes);
}

char* thread_workspace(std::int64_t bytes) {
    thread_local Scratch workspace;
    return existing(workspace.grown(bytes));
}

char* thread_stream(std::int64_t bytes) {
    thread_local Scratch stream;
    return existing(stream.grown(bytes));
}

void refuse_scratch(std::int64_t count) { refusals = count; }

}  // namespace apcbatch
