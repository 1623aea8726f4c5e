#include "thread_pool.h"

#include <exception>

#include "parts.h"
#include "scratch.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

namespace apcbatch {
namespace {

constexpr std::uint32_t kEnd = 0xffffffff;  // kernel number that ends the thread pool
constexpr std::int64_t kMostBlocks = 0xffff;

constexpr std::uint64_t packed(std::uint32_t kernel, std::int64_t next, std::int64_t end) {
    return std::uint64_t(kernel) << 32 | std::uint64_t(next) << 16 | std::uint64_t(end);
}

// Waiting policy: spin first, so that a thread begins a new kernel in less than a microsecond; after kSpins
// turns, yield the processor.
class SpinWait {
  public:
    void wait() {
        ++turns_;
#if defined(__unix__) || defined(__APPLE__)
        if (turns_ > kSpins) {
            sched_yield();
            return;
        }
#endif
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    // True when it is time to steal pieces from other runs: after kBeforeTaking turns, and again and again,
    // as a run may be published, or its own thread refused scratch, after the first attempt.
    bool has_lasted() const { return turns_ % kBeforeTaking == 0; }

  private:
    static constexpr int kBeforeTaking = 200, kSpins = 4000;
    std::int64_t turns_ = 0;
};

thread_local ThreadPool* leads = nullptr;

}  // namespace

ThreadPool* ThreadPool::led() { return leads; }

void ThreadPool::lead(int threads, Work function, const void* work) {
    if (leads != nullptr || threads <= 1) return function(work);
    thread_local ThreadPool own;
    ThreadPool& pool = own;  // inside the region, each thread's `own` is a different, thread-local object
    pool.open(threads);
    std::exception_ptr error;  // an exception must not leave the region
#pragma omp parallel num_threads(threads)
    {
#if defined(_OPENMP)
        const int member = omp_get_thread_num();
        if (member == 0) pool.size_ = omp_get_num_threads();
#else
        const int member = 0;
#endif
        if (member == 0) {
            leads = &pool;
            try {
                function(work);
            } catch (...) {
                error = std::current_exception();
            }
            leads = nullptr;
            pool.close();
        } else {
            pool.serve(member);
        }
    }
    if (error) std::rethrow_exception(error);
}

// Resets the pool for a new region. No other thread is in the region yet, so relaxed stores suffice.
void ThreadPool::open(int threads) {
    if (capacity_ < threads) {
        runs_ = std::make_unique<Run[]>(std::size_t(threads));
        records_ = std::make_unique<Record[]>(std::size_t(threads));
        capacity_ = threads;
    }
    for (int i = 0; i < capacity_; ++i) {
        runs_[std::size_t(i)].left.store(0, std::memory_order_relaxed);
        records_[std::size_t(i)].blocks.store(0, std::memory_order_relaxed);
        records_[std::size_t(i)].busy_s.store(0.0, std::memory_order_relaxed);
        records_[std::size_t(i)].refused.store(0, std::memory_order_relaxed);
    }
    size_ = 1;
    kernel_ = 0;
    expected_ = 0;
}

void ThreadPool::close() {
    for (int i = 1; i < size_; ++i)
        runs_[std::size_t(i)].left.store(packed(kEnd, 0, 0), std::memory_order_release);
}

void ThreadPool::serve(int member) {
    const std::atomic<std::uint64_t>& left = runs_[std::size_t(member)].left;
    Record& record = records_[std::size_t(member)];
    std::uint32_t kernel = 0;
    char* scratch = nullptr;
    const auto work = [&](bool others) {
        const bool timed = at_.timed.load(std::memory_order_relaxed);
        const double begin = timed ? clock_s() : 0.0;
        const std::int64_t blocks =
            others ? take_others(member, kernel, scratch) : take(member, kernel, scratch);
        if (blocks == 0) return;
        const double before = record.busy_s.load(std::memory_order_relaxed);
        if (timed) record.busy_s.store(before + clock_s() - begin, std::memory_order_relaxed);
        record.blocks.store(record.blocks.load(std::memory_order_relaxed) + blocks,
                            std::memory_order_release);
    };
    for (SpinWait spin;;) {
        const std::uint32_t now = std::uint32_t(left.load(std::memory_order_acquire) >> 32);
        if (now == kEnd) return;
        if (now != kernel) {
            kernel = now;
            scratch = thread_scratch(at_.scratch_bytes.load(std::memory_order_relaxed));
            if (scratch == nullptr) {
                record.refused.store(kernel, std::memory_order_release);
            } else {
                work(false);
            }
            spin = SpinWait();
            continue;
        }
        spin.wait();
        if (spin.has_lasted() && scratch != nullptr) work(true);
    }
}

// Claims and computes the remaining blocks of a thread's run, while it belongs to this kernel. Returns the
// number of blocks computed.
std::int64_t ThreadPool::take(int run, std::uint32_t kernel, char* scratch) {
    std::atomic<std::uint64_t>& left = runs_[std::size_t(run)].left;
    std::int64_t taken = 0;
    std::uint64_t seen = left.load(std::memory_order_acquire);
    while (std::uint32_t(seen >> 32) == kernel && (seen >> 16 & 0xffff) < (seen & 0xffff)) {
        if (!left.compare_exchange_weak(seen, seen + (1 << 16), std::memory_order_acq_rel)) continue;
        const std::int64_t threads = at_.threads.load(std::memory_order_relaxed);
        const std::int64_t block = at_.blocks * run / threads + std::int64_t(seen >> 16 & 0xffff);
        const std::int64_t end = (block + 1) * at_.block;
        for (std::int64_t i = block * at_.block; i < end && i < at_.count; ++i)
            at_.piece(at_.pieces, i, scratch);
        ++taken;
        seen = left.load(std::memory_order_acquire);
    }
    return taken;
}

// Busy seconds of all threads except the leader.
double ThreadPool::busy_s() const {
    double sum = 0.0;
    for (int i = 1; i < size_; ++i) sum += records_[std::size_t(i)].busy_s.load(std::memory_order_relaxed);
    return sum;
}

std::int64_t ThreadPool::take_others(int member, std::uint32_t kernel, char* scratch) {
    const int threads = at_.threads.load(std::memory_order_relaxed);
    std::int64_t taken = 0;
    for (int i = 1; i < threads; ++i) taken += take((member + i) % threads, kernel, scratch);
    return taken;
}

bool ThreadPool::share(std::int64_t count, std::int64_t threads, std::int64_t scratch_bytes, Piece piece,
                       const void* pieces) {
    const int size = leads == nullptr ? 1 : leads->size_;
    threads = threads < size ? threads : size;
    threads = threads < count ? threads : count;
    char* scratch = thread_scratch(scratch_bytes);
    if (threads > 1) return leads->submit(count, threads, scratch_bytes, piece, pieces, scratch);
    for (std::int64_t i = 0; scratch != nullptr && i < count; ++i) piece(pieces, i, scratch);
    return scratch != nullptr || count <= 0;
}

bool ThreadPool::submit(std::int64_t count, std::int64_t threads, std::int64_t scratch_bytes, Piece piece,
                        const void* pieces, char* scratch) {
    const bool timed = recording_parts();
    const double begin = timed ? clock_s() : 0.0, busy_before = timed ? busy_s() : 0.0;
    at_.timed.store(timed, std::memory_order_relaxed);
    at_.scratch_bytes.store(scratch_bytes, std::memory_order_relaxed);
    at_.threads.store(int(threads), std::memory_order_relaxed);
    at_.piece = piece;
    at_.pieces = pieces;
    at_.count = count;
    at_.block = (count - 1) / (threads * kMostBlocks) + 1;
    at_.blocks = (count - 1) / at_.block + 1;
    if (++kernel_ == kEnd) kernel_ = 1;
    expected_ += at_.blocks;
    for (std::int64_t i = threads - 1; i >= 0; --i) {
        const std::int64_t length = at_.blocks * (i + 1) / threads - at_.blocks * i / threads;
        runs_[std::size_t(i)].left.store(packed(kernel_, 0, length), std::memory_order_release);
    }
    std::int64_t own = scratch == nullptr ? 0 : take(0, kernel_, scratch);
    double own_s = timed ? clock_s() - begin : 0.0;
    SpinWait spin;
    for (;;) {
        std::int64_t done = own, refusals = 0;
        for (int i = 1; i < size_; ++i)
            done += records_[std::size_t(i)].blocks.load(std::memory_order_acquire);
        if (done == expected_) break;
        spin.wait();
        if (scratch != nullptr) {
            if (!spin.has_lasted()) continue;
            const double again = timed ? clock_s() : 0.0;
            own += take_others(0, kernel_, scratch);
            if (timed) own_s += clock_s() - again;
            continue;
        }
        for (std::int64_t i = 1; i < threads; ++i)
            refusals += records_[std::size_t(i)].refused.load(std::memory_order_acquire) == kernel_;
        if (refusals < threads - 1) continue;
        expected_ -= at_.blocks;
        return false;
    }
    expected_ -= own;
    if (timed)
        add_part(Part::waiting, clock_s() - begin - (own_s + busy_s() - busy_before) / double(threads));
    return true;
}

}  // namespace apcbatch
