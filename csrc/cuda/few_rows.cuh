// Products with few rows of x. The weights are read once, and each element is one fixed-order sum (see
// products.h). The template argument Results consumes the elements.
//
// The blocks, one per multiprocessor, share the weight rows. In a block, one thread copies weights and
// another one x to a ring buffer in shared memory, several stages ahead. The warps multiply 16 weight rows
// each, over all inputs. If the inputs are cut into pieces, each block of a cluster computes one piece, and
// the first block adds the sums. Copies of weights begin before the kernel that computes x has ended.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "chain_steps.cuh"
#include "dependent_launch.cuh"
#include "element.cuh"
#include "products.h"
#include "shared_barrier.cuh"
#include "tensor_map.h"

namespace apcbatch {
namespace cuda {

using Bf16 = __nv_bfloat16;

constexpr int kMostWarps = 8;     // maximum warps that multiply
constexpr int kCopyWarps = 2;     // warps of which one thread copies
constexpr int kResultWarps = 10;  // warps that only compute results, and prefetch their other operands
constexpr int kResultThreads = 32 * kResultWarps;
constexpr int kMostStages = 16;
static_assert(8 * (2 * kMostStages + 1) <= kOctetBytes, "the barriers lie before the ring");
constexpr int kMostTileRows = kMostWarps * 2 * kOctet;
constexpr int kRingBytes = 160 * 1024, kStageBytes = 40 * 1024;
constexpr int kEarlyBytes = 64 * 1024;  // weights to copy before waiting for x
constexpr int kMostBlockBytes = 220 * 1024;

// Split of a launch. tile_rows: weight rows of a tile. warps: warps that multiply them. slices: slices per
// stage. stages: stages of the ring. early: stages of weights to copy before waiting for x.
struct Cut {
    int tile_rows, warps, slices, stages, early;
};

// Tensor maps of the weights, with boxes of tile_rows rows, and of x, with boxes of all rows that have sums.
struct Maps {
    CUtensorMap weight, x;
};

// Results that are stored directly.
template <class Out>
struct Stored {
    static constexpr bool kCollected = false;
    using Element = Out;
};

// Product of a block. kOctets: octets of x rows. Results: Stored, or a type that consumes elements collected
// in shared memory. For each of those elements a thread makes an Item(results, weight row, x row), which
// loads its other operands, and then calls its finish(element).
template <int kOctets, class Results>
class FewRows {
  public:
    static constexpr int kX = kOctets * kOctetBytes;  // bytes of x in a slice

    __device__ FewRows(const ProductParams& params, const Maps& maps, const Cut& cut, unsigned char* memory)
        : p(params),
          maps_(maps),
          cut_(cut),
          weights_((cut.tile_rows + kOctet - 1) / kOctet * kOctetBytes),
          stage_(cut.slices * (weights_ + kX)),
          part_(cut.slices * kSliceInputs),
          ring_(memory),
          behind_(reinterpret_cast<float*>(ring_ + cut.stages * stage_)),
          barriers_(shared_address(ring_ - kOctetBytes)),
          piece_(int(blockIdx.x) % params.pieces),
          inputs_(params.in / params.pieces) {
        const int share = int(blockIdx.x) / p.pieces, shares = int(gridDim.x) / p.pieces;
        begin_ = int(std::int64_t(p.out) * share / shares);
        end_ = int(std::int64_t(p.out) * (share + 1) / shares);
    }

    __device__ void init() const {
        for (int i = 0; i < cut_.stages; ++i) {
            init_barrier(full(i), 2);
            init_barrier(free(i), cut_.warps);
        }
        init_barrier(parts_there(), 32 * cut_.warps * (p.pieces - 1));
        publish_barriers();
    }

    // Copies the weights. Run by one thread.
    __device__ void copy_weights() const {
        int early = cut_.early;
        each_stage([&](int row, int input, int slices, int slot) {
            if (early-- == 0) await_before();
            copy_slices(&maps_.weight, row, input, slices, cut_.tile_rows * kSliceRow, ring_ + slot * stage_,
                        weights_, full(slot));
        });
        await_before();
    }

    // Copies x. Run by one other thread.
    __device__ void copy_x() const {
        await_before();
        each_stage([&](int, int input, int slices, int slot) {
            copy_slices(&maps_.x, 0, input, slices, kX, ring_ + slot * stage_ + cut_.slices * weights_, kX,
                        full(slot));
        });
    }

    // Multiplies. Run by the first cut.warps warps.
    __device__ void multiply() const {
        const int warp = threadIdx.x / 32, octets = (cut_.tile_rows + kOctet - 1) / kOctet;
        const int low = 2 * warp * kOctetBytes, high = min(2 * warp + 1, octets - 1) * kOctetBytes;
        const LaneSteps lane;
        int slot = 0;
        unsigned parity = 0;
        for (int row = begin_; row < end_; row += cut_.tile_rows) {
            float sums[kOctets][4] = {};
            for (int input = 0; input < inputs_; input += part_) {
                wait_barrier(full(slot), parity);
                const unsigned char* weights = ring_ + slot * stage_;
                const unsigned char* x = weights + cut_.slices * weights_;
                int steps = min(part_, inputs_ - input) / 16;
#pragma unroll 2
                for (; steps >= kSliceSteps; steps -= kSliceSteps, weights += weights_, x += kX)
                    add_slice<kOctets>(sums, lane, weights + low, weights + high, x, kSliceSteps);
                if (steps > 0) add_slice<kOctets>(sums, lane, weights + low, weights + high, x, steps);
                __syncwarp();
                if (threadIdx.x % 32 == 0) arrive(free(slot));
                if (++slot == cut_.stages) slot = 0, parity ^= 1u;
            }
            if (p.pieces > 1) add_pieces(sums);
            if (piece_ > 0) continue;
#pragma unroll
            for (int j = 0; j < kOctets; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int its = row + 2 * warp * kOctet + row_of_sum(i);
                    if (its < min(row + cut_.tile_rows, end_))
                        put(j * kOctet + column_of_sum(i), its, sums[j][i]);
                }
            }
        }
    }

    // Computes the results. Run by all threads after they have multiplied or copied. The last kResultThreads
    // threads compute them, and load the operands of their first results while the others still multiply.
    __device__ void make_results(const Results& results) const {
        using Item = typename Results::Item;
        const int rows = end_ - begin_, all = rows * p.rows;
        const int mine = int(threadIdx.x) - (int(blockDim.x) - kResultThreads);
        if (mine < 0) {
            __syncthreads();
            return;
        }
        const int first = min(mine, all - 1), second = min(mine + kResultThreads, all - 1);
        Item one(results, begin_ + first % rows, first / rows);
        if constexpr (Results::kHeld == 1) {
            __syncthreads();
            if (mine < all) one.finish(behind_[first]);
        } else {
            Item two(results, begin_ + second % rows, second / rows);
            __syncthreads();
            if (mine < all) one.finish(behind_[first]);
            if (mine + kResultThreads < all) two.finish(behind_[second]);
        }
#pragma unroll 1
        for (int i = mine + Results::kHeld * kResultThreads; i < all; i += kResultThreads) {
            Item next(results, begin_ + i % rows, i / rows);
            next.finish(behind_[i]);
        }
    }

  private:
    __device__ unsigned full(int slot) const { return barriers_ + 8 * slot; }
    __device__ unsigned free(int slot) const { return barriers_ + 8 * (kMostStages + slot); }
    __device__ unsigned parts_there() const { return barriers_ + 8 * (2 * kMostStages); }

    // Calls copy(first weight row, first input in the piece, slices, slot) for each stage, once its slot is
    // free.
    template <class Copy>
    __device__ void each_stage(Copy copy) const {
        int slot = 0;
        unsigned parity = 1;  // parity of the slots' last release; initially all slots are free
        for (int row = begin_; row < end_; row += cut_.tile_rows) {
            for (int input = 0; input < inputs_; input += part_) {
                wait_barrier(free(slot), parity);
                copy(row, input, min(cut_.slices, (inputs_ - input + kSliceInputs - 1) / kSliceInputs), slot);
                if (++slot == cut_.stages) slot = 0, parity ^= 1u;
            }
        }
    }

    // Copies consecutive slices of a matrix. bytes: size of a box. pitch: bytes between slices in shared
    // memory.
    __device__ void copy_slices(const CUtensorMap* matrix, int row, int input, int slices, int bytes,
                                const unsigned char* stage, int pitch, unsigned barrier) const {
        arrive_expecting(barrier, slices * bytes);
        unsigned to = shared_address(stage);
        int column = piece_ * inputs_ + input;
#pragma unroll 4
        for (int i = 0; i < slices; ++i, to += unsigned(pitch), column += kSliceInputs)
            tensor_copy(to, matrix, column, row, barrier);
    }

    // Adds the sums of all pieces, in ascending order, in the block of the first piece. The block has only
    // one tile.
    __device__ void add_pieces(float (&sums)[kOctets][4]) const {
        constexpr int kSums = kOctets * 4;
        const int warp = threadIdx.x / 32, each = cut_.warps * 32 * kSums;  // floats of a piece
        const int mine = warp * 32 * kSums + int(threadIdx.x) % 32;
        if (piece_ > 0) {
            const unsigned to = first_block(shared_address(behind_ + (piece_ - 1) * each + mine));
#pragma unroll
            for (int i = 0; i < kSums; ++i) store_far(to + i * 128, sums[i / 4][i % 4]);
            arrive_far(first_block(parts_there()));
        } else {
            wait_far(parts_there(), 0);
            for (int other = 0; other < p.pieces - 1; ++other) {
#pragma unroll
                for (int i = 0; i < kSums; ++i)
                    sums[i / 4][i % 4] = __fadd_rn(sums[i / 4][i % 4], behind_[other * each + mine + i * 32]);
            }
        }
    }

    __device__ void put(int token, int row, float sum) const {
        if (token >= p.rows) return;
        if constexpr (Results::kCollected) {
            behind_[token * (end_ - begin_) + row - begin_] = sum;
        } else {
            using Out = typename Results::Element;
            static_cast<Out*>(p.y)[std::int64_t(token) * p.out + row] = narrow<Out>(sum);
        }
    }

    const ProductParams& p;
    const Maps& maps_;
    const Cut& cut_;
    const int weights_, stage_, part_;  // bytes of weights in a slice; bytes of a stage; inputs of a stage
    unsigned char* ring_;
    float* behind_;  // after the ring: sums of the pieces, or elements (x rows, weight rows of this block)
    unsigned barriers_;
    const int piece_, inputs_;  // number of this block's piece; inputs of a piece
    int begin_, end_;           // weight rows of this block
};

template <int kOctets, class Results>
__global__ void __launch_bounds__(32 * (kMostWarps + kCopyWarps + (Results::kCollected ? kResultWarps : 0)),
                                  Results::kCollected ? 1 : 2)
    few_rows_kernel(const __grid_constant__ ProductParams p, const __grid_constant__ Maps maps,
                    const __grid_constant__ Cut cut, const __grid_constant__ Results results) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ unsigned char memory[];
    const unsigned past = shared_address(memory) % kOctetBytes;
    const FewRows<kOctets, Results> product(p, maps, cut,
                                            memory + (past ? kOctetBytes - past : 0) + kOctetBytes);
    if (threadIdx.x == 0) product.init();
    __syncthreads();
    if (p.pieces > 1) arrive_at_cluster();
    let_next_begin();
    const int warp = int(threadIdx.x) / 32 - cut.warps;
    if (warp == 0 && threadIdx.x % 32 == 0) {
        product.copy_weights();
    } else if (warp == 1 && threadIdx.x % 32 == 0) {
        product.copy_x();
    } else {
        await_before();
    }
    if (p.pieces > 1) wait_for_cluster();
    if (warp < 0) product.multiply();
    if constexpr (Results::kCollected) product.make_results(results);
#endif
}

// Returns the number of blocks per piece.
inline int shares_of(const ProductParams& p) {
    return std::min(std::max(attribute_of_device(cudaDevAttrMultiProcessorCount) / p.pieces, 1), p.out);
}

template <int kOctets, class Results>
void launch_few_rows(const ProductParams& p, const Results& results, cudaStream_t stream) {
    using Product = FewRows<kOctets, Results>;
    const auto kernel = few_rows_kernel<kOctets, Results>;
    const int shares = shares_of(p), most = (p.out + shares - 1) / shares;
    const int tiles = (most + kMostTileRows - 1) / kMostTileRows;
    Cut cut = {};
    cut.tile_rows = (most + tiles - 1) / tiles;
    cut.warps = (cut.tile_rows + 2 * kOctet - 1) / (2 * kOctet);
    const int weights = (cut.tile_rows + kOctet - 1) / kOctet * kOctetBytes;
    const int slices = (p.in / p.pieces + kSliceInputs - 1) / kSliceInputs;
    cut.slices = std::max(1, std::min(kStageBytes / (weights + Product::kX), slices));
    const int stage = cut.slices * (weights + Product::kX);
    const int behind = std::max(Results::kCollected ? (most + 1) * p.rows : 0,
                                (p.pieces - 1) * cut.warps * 32 * kOctets * 4) *
                       int(sizeof(float));
    const int ring = std::min(kRingBytes, kMostBlockBytes - 2 * kOctetBytes - behind);
    cut.stages =
        std::min({std::max(ring / stage, 2), kMostStages, tiles * ((slices + cut.slices - 1) / cut.slices)});
    cut.early = std::max(1, std::min(kEarlyBytes / (cut.slices * weights), cut.stages));
    const int bytes = 2 * kOctetBytes + cut.stages * stage + behind;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "the shared memory of few_rows_product");
    const Maps maps = {tensor_map(p.weight, p.out, p.in, p.in, cut.tile_rows),
                       tensor_map(p.x, p.rows, p.in, p.rows == 1 ? p.in : p.x_stride, kOctets * kOctet)};
    const int threads = 32 * (cut.warps + kCopyWarps + (Results::kCollected ? kResultWarps : 0));
    launch_clusters(kernel, dim3(unsigned(shares * p.pieces)), unsigned(threads), p.pieces, bytes, stream,
                    "few_rows_product", p, maps, cut, results);
}

template <class Results>
void launch_few_rows(const ProductParams& p, const Results& results, cudaStream_t stream) {
    if (p.rows <= kOctet) return launch_few_rows<1>(p, results, stream);
    if (p.rows <= 2 * kOctet) return launch_few_rows<2>(p, results, stream);
    launch_few_rows<4>(p, results, stream);
}

}  // namespace cuda
}  // namespace apcbatch
