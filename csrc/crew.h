// A thread pool that lives for one OpenMP region and runs many kernels: one thread leads, the others wait for
// pieces of work.
//
// A kernel's pieces are divided into one run per thread beforehand, and each run is claimed from its own
// cache line, so that busy threads never contend. A thread that has been idle for some microseconds takes
// pieces from other runs; the leader waits for pieces, never for a thread. So a thread that the system has
// preempted delays a kernel at most by its current piece.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace apcbatch {

class Crew {
  public:
    // Calls piece number i of `pieces`. Never throws.
    using Piece = void (*)(const void* pieces, std::int64_t i, char* scratch);
    using Work = void (*)(const void* work);

    // The crew that the calling thread leads; null if it leads none.
    static Crew* led();

    // Calls work on this thread, which leads a pool of `threads` (fewer if the system has no more) until it
    // returns. Exceptions of the work are rethrown. Nested calls reuse the pool that this thread leads.
    static void lead(int threads, Work function, const void* work);
    template <class Function>
    static void lead(int threads, const Function& work) {
        lead(threads, [](const void* of) { (*static_cast<const Function*>(of))(); }, &work);
    }

    // Calls piece number i for each i < count once, on `threads` of the crew that this thread leads at most,
    // on this thread alone where it leads none, each with `scratch_bytes` of its own. A thread that gets no
    // scratch leaves its pieces to the others; false if none gets any.
    static bool share(std::int64_t count, std::int64_t threads, std::int64_t scratch_bytes, Piece piece,
                      const void* pieces);

  private:
    // A line of its own, and the one beside it, which processors fetch together.
    static constexpr std::size_t kApart = 128;

    // The unclaimed rest of a thread's run: the number of the kernel, the next block, the end. Written by the
    // leader, claimed from by all.
    struct alignas(kApart) Run {
        std::atomic<std::uint64_t> left{0};
    };
    // Written by one thread alone.
    struct alignas(kApart) Record {
        std::atomic<std::int64_t> blocks{0};    // computed by this thread, of all kernels
        std::atomic<double> busy_s{0.0};        // spent on them, while parts are recorded
        std::atomic<std::uint32_t> refused{0};  // number of the last kernel that it got no scratch for
    };

    std::unique_ptr<Run[]> runs_;
    std::unique_ptr<Record[]> records_;
    int room_ = 0;  // capacity of runs_ and records_, in threads
    int size_ = 1;
    std::uint32_t kernel_ = 0;
    std::int64_t expected_ = 0;  // blocks of all kernels

    // The current kernel. Fields read before a block is claimed are atomic: they may already be those of a
    // later kernel, and then the claim fails.
    struct alignas(kApart) {
        std::atomic<std::int64_t> scratch_bytes{0};
        std::atomic<int> threads{1};
        std::atomic<bool> timed{false};
        Piece piece = nullptr;
        const void* pieces = nullptr;
        std::int64_t count = 0, blocks = 0, block = 1;  // block: pieces of one
    } at_;

    void open(int threads);
    void close();
    bool hand_out(std::int64_t count, std::int64_t threads, std::int64_t scratch_bytes, Piece piece,
                  const void* pieces, char* scratch);
    void serve(int member);
    std::int64_t take(int run, std::uint32_t kernel, char* scratch);
    double busy_s() const;
    std::int64_t take_others(int member, std::uint32_t kernel, char* scratch);
};

}  // namespace apcbatch
