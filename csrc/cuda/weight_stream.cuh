// Weights on their way through shared memory: a ring of slots that one thread fills by bulk copies, as far
// ahead as there are slots, and that the other warps empty. What the weights are multiplied with may come
// much later than they do. Must not know: models. Needs sm_90.
#pragma once

#include <cstdint>

#include "signal.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kSlotBytes = 40960, kMostSlots = 8, kPieces = 4, kPieceBytes = kSlotBytes / kPieces;
constexpr int kStreamBarriers = kMostSlots * (kPieces + 1);

// A ring's place in shared memory, and where one thread stands in it. Filling and emptying threads each have
// their own copy, and see the same slots in the same order.
class WeightStream {
  public:
    // barriers: kStreamBarriers; data: num_slots * kSlotBytes, aligned to 128 bytes.
    __device__ WeightStream(std::uint64_t* barriers, unsigned char* data, int num_slots)
        : data_(data), barriers_(address(barriers)), num_slots_(num_slots) {}

    // By one thread, before a barrier of the block. Each of `readers` threads will release every slot.
    __device__ void init(int readers) {
        for (int i = 0; i < num_slots_; ++i) {
            for (int piece = 0; piece < kPieces; ++piece) init(full(i, piece), 1);
            init(free(i), readers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // Copies `bytes` (a multiple of 16, at most kSlotBytes) into the next slot once it is free: a piece when
    // the same piece of the slot before has come or, while it is to be calm, when the piece before has.
    __device__ void fill(const void* from, int bytes, const Signal& calm) {
        const int before = (slot_ == 0 ? num_slots_ : slot_) - 1;
        const unsigned before_parity = slot_ == 0 ? parity_ ^ 1u : parity_;
        wait(free(slot_), parity_ ^ 1u);
        for (int piece = 0; piece < kPieces; ++piece) {
            wait(full(before, piece), before_parity);
            if (calm.get() && piece == 0) wait(full(before, kPieces - 1), before_parity);
            if (calm.get() && piece > 0) wait(full(slot_, piece - 1), parity_);
            const int begin = piece * kPieceBytes, count = max(min(bytes - begin, kPieceBytes), 0);
            copy(slot() + begin, static_cast<const unsigned char*>(from) + begin, count, full(slot_, piece));
        }
        advance();
    }

    // The next slot, once it is full; to be released by every reader.
    __device__ const unsigned char* next() {
        for (int piece = 0; piece < kPieces; ++piece) wait(full(slot_, piece), parity_);
        return slot();
    }

    __device__ void release() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(free(slot_)) : "memory");
        advance();
    }

  private:
    static constexpr std::uint64_t kReadOnce = 0x12F0000000000000;  // the L2's policy evict_first

    static __device__ unsigned address(const void* shared) {
        return unsigned(__cvta_generic_to_shared(shared));
    }
    __device__ unsigned full(int i, int piece) const { return barriers_ + 8 * (kPieces * i + piece); }
    __device__ unsigned free(int i) const { return barriers_ + 8 * (kPieces * kMostSlots + i); }
    __device__ const unsigned char* slot() const { return data_ + slot_ * kSlotBytes; }

    static __device__ void init(unsigned barrier, int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
    }

    static __device__ void copy(const void* to, const void* from, int bytes, unsigned barrier) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                     : "memory");
        if (bytes == 0) return;
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1], %2, [%3], %4;" ::"r"(address(to)),
            "l"(from), "r"(bytes), "r"(barrier), "l"(kReadOnce)
            : "memory");
    }

    __device__ void advance() {
        if (++slot_ == num_slots_) slot_ = 0, parity_ ^= 1u;
    }

    static __device__ void wait(unsigned barrier, unsigned parity) {
        unsigned done = 0;
        while (!done) {
            asm volatile(
                "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                " selp.u32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(barrier), "r"(parity)
                : "memory");
        }
    }

    unsigned char* data_;
    unsigned barriers_;
    int num_slots_, slot_ = 0;
    unsigned parity_ = 0;
};

}  // namespace cuda
}  // namespace apcbatch
