// Products with few rows of x: the weights are read once, each element is one chain (see products.h), and
// what a launch makes of the elements is for its Results to say.
//
// Blocks, one a multiprocessor, share the rows of weights. Four warps of a block copy inputs of its rows into
// a ring in shared memory, several stages ahead, one warp those of x; the others have a piece of up to 16
// rows of weights each, and no sums meet but the pieces'. The weights are asked for before the kernel that
// makes x has ended. Must not know: models.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "async_copy.cuh"
#include "chain_steps.cuh"
#include "dependent_launch.cuh"
#include "element.cuh"
#include "products.h"
#include "shared_barrier.cuh"

namespace apcbatch {
namespace cuda {

using Bf16 = __nv_bfloat16;

constexpr int kMostWarps = 8, kCopyWarps = 4, kCopyThreads = 32 * kCopyWarps;
constexpr int kIdleThreads = kCopyThreads + 32;  // that do not multiply
constexpr int kOctet = 8;                        // rows of weights, half of a matrix instruction's
constexpr int kMostStages = 16, kBarrierBytes = 2 * kMostStages * 8;
constexpr int kRingBytes = 160 * 1024;
constexpr int kEarlyBytes = 16 * 1024;  // asked for before x is awaited: what is behind them answers late
constexpr int kFewestStages = 2;

// How a launch cuts its work: rows of weights at once, the warps that multiply them, stages of the ring, and
// how many of them are asked for before x is awaited.
struct Cut {
    int tile_rows, warps, stages, early;
};

// Elements that are stored as they come.
template <class Out>
struct Stored {
    static constexpr bool kCollected = false;
    using Element = Out;
};

// kInputs: of a stage, as many of each piece. Results: Stored, or what is made of elements that are collected
// in shared memory. For each of those a thread makes an Item(results, row of the block's, row of x), which
// loads what it needs besides, and then calls its finish(element).
template <int kInputs, class Results>
class FewRows {
  public:
    // 32 bytes more than a row's inputs: the rows that half a warp reads at once lie in different banks.
    static constexpr int kRow = kInputs * 2 + 32;

    __device__ FewRows(const ProductParams& params, const Cut& cut, unsigned char* memory)
        : p(params),
          cut_(cut),
          ring_(memory + kBarrierBytes),
          elements_(reinterpret_cast<float*>(ring_ + cut.stages * stage_bytes())),
          barriers_(shared_address(memory)),
          begin_(int(std::int64_t(params.out) * blockIdx.x / gridDim.x)),
          end_(int(std::int64_t(params.out) * (blockIdx.x + 1) / gridDim.x)),
          piece_(params.in / params.pieces),
          part_(kInputs / params.pieces) {}

    __device__ void init() const {
        for (int i = 0; i < cut_.stages; ++i) {
            init_barrier(full(i), kCopyThreads + 1);
            init_barrier(free(i), cut_.warps);
        }
        publish_barriers();
    }

    // By kCopyWarps warps; thread: among them.
    __device__ void copy_weights(int thread) const {
        int i = 0;
        each_stage([&](int row, int count, int input, int slot) {
            if (i++ == cut_.early) await_before();
            copy_rows<kCopyThreads>(static_cast<const Bf16*>(p.weight) + std::int64_t(row) * p.in, p.in,
                                    count, input, ring_ + slot * stage_bytes(), thread);
            arrive_with_copies(full(slot));
        });
    }

    // By one warp, by bulk copies: a lane takes a piece of a row.
    __device__ void copy_x() const {
        const int lane = threadIdx.x % 32, all = p.rows * p.pieces;
        each_stage([&](int, int, int input, int slot) {
            const int bytes = min(part_, piece_ - input) * 2;
            if (lane == 0) arrive_expecting(full(slot), all * bytes);
            __syncwarp();
            const unsigned to = shared_address(ring_ + slot * stage_bytes() + cut_.tile_rows * kRow);
            for (int i = lane; i < all; i += 32) {
                const int row = i / p.pieces, piece = i % p.pieces;
                const Bf16* from = static_cast<const Bf16*>(p.x) + row * p.x_stride + piece * piece_ + input;
                bulk_copy(to + unsigned(row * kRow + piece * part_ * 2), from, bytes, full(slot));
            }
        });
    }

    // Warps take the pieces of eight rows of weights, and of the eight that are as many rows further, side by
    // side. parts: 128 floats a warp.
    __device__ void multiply(float* parts) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int octet = warp / p.pieces, piece = warp % p.pieces;
        const int low = octet * kOctet + lane / 4, high = low + cut_.warps / p.pieces * kOctet;
        int slot = 0;
        unsigned parity = 0;
        for (int row = begin_; row < end_; row += cut_.tile_rows) {
            const int count = min(cut_.tile_rows, end_ - row);
            float sums[4] = {};
            for (int input = 0; input < piece_; input += part_) {
                wait_barrier(full(slot), parity);
                if (octet * kOctet < count) {
                    const unsigned char* stage =
                        ring_ + slot * stage_bytes() + piece * part_ * 2 + lane % 4 * 8;
                    add_chain(sums, stage + min(low, count - 1) * kRow, stage + min(high, count - 1) * kRow,
                              stage + (cut_.tile_rows + min(lane / 4, p.rows - 1)) * kRow,
                              min(part_, piece_ - input) / 16, part_ / 16);
                }
                __syncwarp();
                if (lane == 0) arrive(free(slot));
                if (++slot == cut_.stages) slot = 0, parity ^= 1u;
            }
            if (p.pieces > 1) add_pieces(sums, parts, warp, piece);
            if (piece > 0) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (low < count) put(lane % 4 * 2 + i, row + low, sums[i]);
                if (high < count) put(lane % 4 * 2 + i, row + high, sums[2 + i]);
            }
        }
    }

    // By all threads, once they have multiplied or copied. Those that copied come first: they load what the
    // first elements need while the others still multiply. Whoever has none meets the others all the same.
    __device__ void make_results(const Results& results) const {
        const int rows = end_ - begin_, all = rows * p.rows, threads = int(blockDim.x);
        const int mine = (int(threadIdx.x) + kIdleThreads) % threads, first = min(mine, all - 1);
        typename Results::Item item(results, first % rows, first / rows);
        __syncthreads();
        if (mine < all) item.finish(elements_[mine]);
#pragma unroll 1
        for (int i = mine + threads; i < all; i += threads) {
            typename Results::Item next(results, i % rows, i / rows);
            next.finish(elements_[i]);
        }
    }

  private:
    __device__ unsigned full(int slot) const { return barriers_ + 8 * slot; }
    __device__ unsigned free(int slot) const { return barriers_ + 8 * (kMostStages + slot); }
    __device__ int stage_bytes() const { return (cut_.tile_rows + p.rows) * kRow; }

    // copy(first row of weights, rows, first input of each piece, slot) for all stages, each once its slot is
    // free.
    template <class Copy>
    __device__ void each_stage(Copy copy) const {
        int slot = 0;
        unsigned parity = 1;  // of the slots' last release: at first they are free
        for (int row = begin_; row < end_; row += cut_.tile_rows) {
            const int count = min(cut_.tile_rows, end_ - row);
            for (int input = 0; input < piece_; input += part_) {
                wait_barrier(free(slot), parity);
                copy(row, count, input, slot);
                if (++slot == cut_.stages) slot = 0, parity ^= 1u;
            }
        }
    }

    // One stage of `count` rows; neighbouring threads take neighbouring chunks of 16 bytes.
    template <int kThreads>
    __device__ void copy_rows(const Bf16* from, std::int64_t stride, int count, int input, unsigned char* to,
                              int thread) const {
        constexpr int kChunks = kInputs / 8,
                      kSide = kThreads < kChunks ? kThreads : kChunks;  // threads side by side
        const int shift = 31 - __clz(part_ / 8);  // chunks of each piece: a power of two
#pragma unroll
        for (int chunk = thread % kSide; chunk < kChunks; chunk += kSide) {
            const int piece = chunk >> shift, within = input + (chunk - (piece << shift)) * 8;
            if (within >= piece_) continue;
            const Bf16* column = from + piece * piece_ + within;
#pragma unroll 4
            for (int r = thread / kSide; r < count; r += kThreads / kSide) {
                copy_chunk(to + r * kRow + chunk * 16, column + r * stride, true);
            }
        }
    }

    // The first piece's warp gets the sum of all, in ascending order.
    __device__ void add_pieces(float (&sums)[4], float* parts, int warp, int piece) const {
        float* mine = parts + warp * 128 + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[i * 32] = sums[i];
        sync_multiplying();
        for (int other = 1; piece == 0 && other < p.pieces; ++other) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = __fadd_rn(sums[i], mine[other * 128 + i * 32]);
        }
        sync_multiplying();
    }

    __device__ void sync_multiplying() const {
        asm volatile("bar.sync 1, %0;" ::"r"(32 * cut_.warps) : "memory");
    }

    __device__ void put(int token, int row, float sum) const {
        if (token >= p.rows) return;
        if constexpr (Results::kCollected) {
            elements_[token * (end_ - begin_) + row - begin_] = sum;
        } else {
            using Out = typename Results::Element;
            static_cast<Out*>(p.y)[std::int64_t(token) * p.out + row] = narrow<Out>(sum);
        }
    }

    const ProductParams& p;
    const Cut& cut_;
    unsigned char* ring_;
    float* elements_;  // (rows of x, rows of weights of this block), where they are collected
    unsigned barriers_;
    int begin_, end_, piece_, part_;  // rows; inputs of a piece, and of a piece in one stage
};

template <int kInputs, class Results>
__global__ void __launch_bounds__(32 * (kMostWarps + kCopyWarps + 1), 2)
    few_rows_kernel(const __grid_constant__ ProductParams p, const __grid_constant__ Cut cut,
                    const __grid_constant__ Results results) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ float parts[kMostWarps * 128];
    const FewRows<kInputs, Results> product(p, cut, memory);
    if (threadIdx.x == 0) product.init();
    __syncthreads();
    let_next_begin();
    const int thread = int(threadIdx.x) - 32 * cut.warps;
    if (thread >= 0 && thread < kCopyThreads) {
        product.copy_weights(thread);
        await_before();
    } else {
        await_before();
        if (thread < 0) {
            product.multiply(parts);
        } else {
            product.copy_x();
        }
    }
    if constexpr (Results::kCollected) product.make_results(results);
#endif
}

inline int device_attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}

template <int kInputs, class Results>
void launch_few_rows(const ProductParams& p, int blocks, Cut cut, const Results& results,
                     cudaStream_t stream) {
    const auto kernel = few_rows_kernel<kInputs, Results>;
    const int stage = (cut.tile_rows + p.rows) * FewRows<kInputs, Results>::kRow;
    const int all = (p.in + kInputs - 1) / kInputs * ((p.out / blocks + cut.tile_rows) / cut.tile_rows);
    cut.stages = std::min({std::max(kRingBytes / stage, kFewestStages), kMostStages, all});
    cut.early = std::max(kEarlyBytes / stage, 1);
    const int elements = Results::kCollected ? (p.out / blocks + 1) * p.rows * int(sizeof(float)) : 0;
    const int bytes = kBarrierBytes + cut.stages * stage + elements;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "the shared memory of few_rows_product");
    launch_dependent(kernel, dim3(unsigned(blocks)), unsigned(32 * cut.warps + kIdleThreads), bytes, stream,
                     "few_rows_product", p, cut, results);
}

// The fewer rows a block has, the more inputs of each are on their way.
template <class Results>
void launch_few_rows(const ProductParams& p, const Results& results, cudaStream_t stream) {
    const int blocks = std::min(device_attribute(cudaDevAttrMultiProcessorCount), p.out);
    const int octets = kMostWarps / p.pieces, most_rows = 2 * octets * kOctet;
    const int most = (p.out + blocks - 1) / blocks, tiles = (most + most_rows - 1) / most_rows;
    const int rows = (most + tiles - 1) / tiles;
    const Cut cut = {rows, std::min((rows + kOctet - 1) / kOctet, octets) * p.pieces, 0, 0};
    if (p.pieces > 2 && rows <= 16) return launch_few_rows<2048>(p, blocks, cut, results, stream);
    if (rows <= 24) return launch_few_rows<512>(p, blocks, cut, results, stream);
    if (rows <= 48) return launch_few_rows<256>(p, blocks, cut, results, stream);
    launch_few_rows<128>(p, blocks, cut, results, stream);
}

}  // namespace cuda
}  // namespace apcbatch
