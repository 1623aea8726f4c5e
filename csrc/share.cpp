// OpenMP threads and fork. A forked process inherits OpenMP's list of idle threads, but not the threads. So
// its first parallel region would wait for them forever. Before a fork, the forking thread therefore releases
// its OpenMP threads; the next region, in either process, creates new ones. If the OpenMP library cannot
// release them (libgomp before GCC 9), the child uses one thread. The number of threads changes no bit of any
// result.
#include "share.h"

#include <atomic>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#endif

namespace apcbatch {
namespace {

std::atomic<bool> single{false};  // true: this process uses one thread from now on

#if defined(__unix__) || defined(__APPLE__)

thread_local bool released = false;  // this thread has released its OpenMP threads before a fork

// Looked up by name at run time, as the loaded OpenMP library (torch brings its own) may be older than the
// compiler's.
using PauseAll = int (*)(int);
constexpr int kHard = 2;  // omp_pause_hard
PauseAll pause_all = nullptr;

void before_fork() { released = pause_all != nullptr && pause_all(kHard) == 0; }

void in_child() {
    if (!released) single = true;
}

const bool watching = [] {
    pause_all = reinterpret_cast<PauseAll>(dlsym(RTLD_DEFAULT, "omp_pause_resource_all"));
    return pthread_atfork(&before_fork, nullptr, &in_child) == 0;
}();

#endif

}  // namespace

int usable_threads(std::int64_t wanted) {
    constexpr std::int64_t kMost = 1 << 16;
    if (wanted < 1 || single.load(std::memory_order_relaxed)) return 1;
    return int(wanted < kMost ? wanted : kMost);
}

int useful_threads(double work, double too_little, std::int64_t wanted) {
    constexpr double kAwake = 1.0 / 16;
    return work < (ThreadPool::led() != nullptr ? too_little * kAwake : too_little) ? 1
                                                                                    : usable_threads(wanted);
}

}  // namespace apcbatch
