// The threads of one OpenMP region, held together for many kernels: one leads, the others wait for the pieces
// that it shares out. Must not know: any one kernel, instruction sets.
//
// A kernel's pieces are cut into a run for each thread beforehand, and each run is claimed from a cache line
// of its own, so that threads with enough to do never meet. A thread that has waited for some microseconds
// takes pieces from the others' runs; the leader waits for pieces, never for a thread. So a thread that the
// system has put aside delays a kernel by the piece that it is at and by no more.
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

    // Calls work on this thread, which leads a crew of `threads` meanwhile, fewer if the system has no more.
    // What the work throws is thrown on. A thread that leads one already goes on with it.
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

    // What is left of a thread's run: the number of the kernel, the next block, the end. Written by the
    // leader, claimed from by all.
    struct alignas(kApart) Run {
        std::atomic<std::uint64_t> left{0};
    };
    // Written by one thread alone.
    struct alignas(kApart) Record {
        std::atomic<std::int64_t> blocks{0};    // that it has computed, of all kernels
        std::atomic<double> busy_s{0.0};        // that it took for them, while parts are recorded
        std::atomic<std::uint32_t> refused{0};  // the kernel that it has no scratch for
    };

    std::unique_ptr<Run[]> runs_;
    std::unique_ptr<Record[]> records_;
    int room_ = 0;  // threads that these are for
    int size_ = 1;
    std::uint32_t kernel_ = 0;
    std::int64_t expected_ = 0;  // blocks of all kernels

    // The kernel under way. What is read before a block is claimed is atomic: it may be that of a later one,
    // and then the claim fails.
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
