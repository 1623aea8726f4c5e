// A thread pool that lives for one OpenMP region and runs many kernels. One thread, the leader, submits
// kernels; the others wait for pieces of work.
//
// A kernel's pieces are divided into one run per thread. Each run is claimed from its own cache line, so busy
// threads never contend. A thread that has been idle for some microseconds steals pieces from other runs. The
// leader waits until all pieces are done, not for each thread. So a preempted thread delays a kernel by at
// most its current piece.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace apcbatch {

class ThreadPool {
  public:
    // Runs piece i of `pieces`. Must not throw.
    using Piece = void (*)(const void* pieces, std::int64_t i, char* scratch);
    using Work = void (*)(const void* work);

    // Returns the thread pool that the calling thread leads; null if it leads none.
    static ThreadPool* led();

    // Runs `work` on this thread, which leads a pool of `threads` (fewer if the system has no more) until it
    // returns. Rethrows its exceptions. A nested call reuses the pool that this thread already leads.
    static void lead(int threads, Work function, const void* work);
    template <class Function>
    static void lead(int threads, const Function& work) {
        lead(threads, [](const void* of) { (*static_cast<const Function*>(of))(); }, &work);
    }

    // Runs each piece i < count once, on at most `threads` threads of the pool that this thread leads, or on
    // this thread alone if it leads none. Each thread has `scratch_bytes` of scratch. A thread that cannot
    // allocate it leaves its pieces to the others. Returns false if no thread can.
    static bool share(std::int64_t count, std::int64_t threads, std::int64_t scratch_bytes, Piece piece,
                      const void* pieces);

  private:
    // Alignment in bytes: two cache lines, as processors fetch adjacent lines in pairs.
    static constexpr std::size_t kApart = 128;

    // Unclaimed blocks of a thread's run, packed: kernel number, next block, end. The leader writes it; all
    // threads claim from it.
    struct alignas(kApart) Run {
        std::atomic<std::uint64_t> left{0};
    };
    // Counters that only their own thread writes.
    struct alignas(kApart) Record {
        std::atomic<std::int64_t> blocks{0};    // blocks computed by this thread, over all kernels
        std::atomic<double> busy_s{0.0};        // seconds spent on them, while parts are recorded
        std::atomic<std::uint32_t> refused{0};  // last kernel for which it could not allocate scratch
    };

    std::unique_ptr<Run[]> runs_;
    std::unique_ptr<Record[]> records_;
    int capacity_ = 0;  // capacity of runs_ and records_, in threads
    int size_ = 1;
    std::uint32_t kernel_ = 0;
    std::int64_t expected_ = 0;  // blocks of all kernels so far, without those that the leader has finished

    // The current kernel. Fields that are read before a block is claimed are atomic: they may already belong
    // to a later kernel, and then the claim fails.
    struct alignas(kApart) {
        std::atomic<std::int64_t> scratch_bytes{0};
        std::atomic<int> threads{1};
        std::atomic<bool> timed{false};
        Piece piece = nullptr;
        const void* pieces = nullptr;
        std::int64_t count = 0, blocks = 0, block = 1;  // count: pieces; block: pieces per block
    } at_;

    void open(int threads);
    void close();
    bool submit(std::int64_t count, std::int64_t threads, std::int64_t scratch_bytes, Piece piece,
                const void* pieces, char* scratch);
    void serve(int member);
    std::int64_t take(int run, std::uint32_t kernel, char* scratch);
    double busy_s() const;
    std::int64_t take_others(int member, std::uint32_t kernel, char* scratch);
};

}  // namespace apcbatch
