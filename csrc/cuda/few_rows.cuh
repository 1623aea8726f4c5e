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
#include "codes.cuh"
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
// stage; of codes, each with two slices of x, and the scales of all groups. stages: stages of the ring.
// early: stages of weights to copy before waiting for x.
struct Cut {
    int tile_rows, warps, slices, stages, early;
};

// Tensor maps of the weights, with boxes of tile_rows rows, and of x, with boxes of all rows that have sums.
// scales: of codes, with boxes of scale_rows rows.
struct Maps {
    CUtensorMap weight, x, scales;
};

// Rows whose scales a tile copies: from its first row on, rounded down to a multiple of 4, as copies begin at
// multiples of 16 bytes. Bytes of them in shared memory, in one group and in all groups of a slice of codes.
__host__ __device__ inline int scale_rows(int tile_rows) { return (tile_rows + 3 + 3) / 4 * 4; }
__host__ __device__ inline int scale_pitch(int tile_rows) { return (scale_rows(tile_rows) + 31) / 32 * 128; }
__host__ __device__ inline int scale_bytes(int tile_rows, const Coding& coding) {
    const int bytes = groups_of_slice(coding) * scale_pitch(tile_rows);
    return coding.kind == CodeKind::none ? 0 : (bytes + kOctetBytes - 1) / kOctetBytes * kOctetBytes;
}

// Results that are stored directly.
template <class Out>
struct Stored {
    static constexpr bool kCollected = false;
    using Element = Out;
};

// Product of a block. kOctets: octets of x rows. Results: Stored, or a type that consumes elements collected
// in shared memory. For each of those elements a thread makes an Item(results, weight row, x row), which
// loads its other operands, and then calls its finish(element).
template <CodeKind kKind, int kOctets, class Results>
class FewRows {
  public:
    static constexpr int kHalves = kKind == CodeKind::none ? 1 : 2;  // slices of x beside one of weights
    static constexpr int kInputs = kHalves * kSliceInputs;
    static constexpr int kRow = code_row(kKind);
    static constexpr int kX = kOctets * kOctetBytes;  // bytes of a slice of x

    __device__ FewRows(const ProductParams& params, const Maps& maps, const Cut& cut, unsigned char* memory)
        : p(params),
          maps_(maps),
          cut_(cut),
          weights_(weight_bytes(cut.tile_rows)),
          scales_(scale_bytes(cut.tile_rows, params.coding)),
          stage_(cut.slices * (weights_ + scales_ + kHalves * kX)),
          part_(cut.slices * kInputs),
          ring_(memory),
          behind_(reinterpret_cast<float*>(ring_ + cut.stages * stage_)),
          barriers_(shared_address(ring_ - kOctetBytes)),
          piece_(int(blockIdx.x) % params.pieces),
          inputs_(params.in / params.pieces) {
        const int share = int(blockIdx.x) / p.pieces, shares = int(gridDim.x) / p.pieces;
        begin_ = int(std::int64_t(p.out) * share / shares);
        end_ = int(std::int64_t(p.out) * (share + 1) / shares);
    }

    // Returns the bytes of a slice of weights.
    static __host__ __device__ int weight_bytes(int tile_rows) {
        const int bytes = (tile_rows + kOctet - 1) / kOctet * kOctet * kRow;
        return (bytes + kOctetBytes - 1) / kOctetBytes * kOctetBytes;
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
            int bytes = cut_.tile_rows * kRow;
            if constexpr (kKind != CodeKind::none)
                bytes += groups_of_slice(p.coding) * scale_rows(cut_.tile_rows) * 4;
            arrive_expecting(full(slot), slices * bytes);
            copy_slices<kKind>(&maps_.weight, row, input, slices, ring_ + slot * stage_, weights_,
                               full(slot));
            if constexpr (kKind != CodeKind::none) copy_scales(row, input, slices, slot);
        });
        await_before();
    }

    // Copies x. Run by one other thread.
    __device__ void copy_x() const {
        await_before();
        each_stage([&](int, int input, int slices, int slot) {
            slices = min(kHalves * cut_.slices, (inputs_ - input + kSliceInputs - 1) / kSliceInputs);
            arrive_expecting(full(slot), slices * kX);
            copy_slices<CodeKind::none>(&maps_.x, 0, input, slices, x_of(slot), kX, full(slot));
        });
    }

    // Multiplies. Run by the first cut.warps warps.
    __device__ void multiply() const {
        const int warp = threadIdx.x / 32, octets = (cut_.tile_rows + kOctet - 1) / kOctet;
        const int first = 2 * warp * kOctet, second = min(2 * warp + 1, octets - 1) * kOctet;
        const int low = first * kRow, high = second * kRow;
        const std::conditional_t<kKind == CodeKind::none, LaneSteps, LaneCodes<kKind>> lane;
        int slot = 0;
        unsigned parity = 0;
        for (int row = begin_; row < end_; row += cut_.tile_rows) {
            float sums[kOctets][4] = {};
            for (int input = 0; input < inputs_; input += part_) {
                wait_barrier(full(slot), parity);
                const unsigned char* weights = ring_ + slot * stage_;
                const unsigned char* x = x_of(slot);
                int steps = min(part_, inputs_ - input) / 16;
                if constexpr (kKind == CodeKind::none) {
#pragma unroll 2
                    for (; steps >= kSliceSteps; steps -= kSliceSteps, weights += weights_, x += kX)
                        add_slice<kOctets>(sums, lane, weights + low, weights + high, x, kSliceSteps);
                    if (steps > 0) add_slice<kOctets>(sums, lane, weights + low, weights + high, x, steps);
                } else {
                    const unsigned char* scales = weights + cut_.slices * weights_;
                    const auto add = [&](int half, int its) {
                        const auto of = [&](int octet) {
                            return reinterpret_cast<const float*>(scales) + row % 4 + octet + lane.row;
                        };
                        add_codes<kKind, kOctets>(sums, lane, half, weights + low, weights + high, of(first),
                                                  of(second),
                                                  scale_pitch(cut_.tile_rows) / int(sizeof(float)),
                                                  p.coding.shift, x + half * kX, its);
                    };
                    for (; steps > 0; steps -= 2 * kSliceSteps) {
                        if (steps >= 2 * kSliceSteps) {
                            add(0, kSliceSteps), add(1, kSliceSteps);
                        } else {
                            add(0, steps);
                            if (steps > kSliceSteps) add(1, steps - kSliceSteps);
                        }
                        weights += weights_, scales += scales_, x += 2 * kX;
                    }
                }
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
    __device__ const unsigned char* x_of(int slot) const {
        return ring_ + slot * stage_ + cut_.slices * (weights_ + scales_);
    }
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
                copy(row, input, min(cut_.slices, (inputs_ - input + kInputs - 1) / kInputs), slot);
                if (++slot == cut_.stages) slot = 0, parity ^= 1u;
            }
        }
    }

    // Copies consecutive slices of a matrix, of codes of a kind. pitch: bytes between slices in shared
    // memory.
    template <CodeKind kOf>
    __device__ void copy_slices(const CUtensorMap* matrix, int row, int input, int slices,
                                const unsigned char* stage, int pitch, unsigned barrier) const {
        constexpr bool kOfCodes = kOf != CodeKind::none;
        unsigned to = shared_address(stage);
        int column = piece_ * inputs_ + input;
        if constexpr (kOfCodes) column = code_bytes(kOf, column);
#pragma unroll 4
        for (int i = 0; i < slices;
             ++i, to += unsigned(pitch), column += kOfCodes ? code_row(kOf) : kSliceInputs)
            tensor_copy(to, matrix, column, row, barrier);
    }

    // Copies the scales of consecutive slices.
    __device__ void copy_scales(int row, int input, int slices, int slot) const {
        unsigned to = shared_address(ring_ + slot * stage_ + cut_.slices * weights_);
        int column = piece_ * inputs_ + input;
        for (int i = 0; i < slices; ++i, to += unsigned(scales_), column += kInputs) {
            for (int group = 0; group < groups_of_slice(p.coding); ++group)
                tensor_copy(to + group * scale_pitch(cut_.tile_rows), &maps_.scales, row / 4 * 4,
                            (column >> p.coding.shift) + group, full(slot));
        }
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
            static_cast<Out*>(p.y)[token * p.y_stride + row] = narrow<Out>(sum);
        }
    }

    const ProductParams& p;
    const Maps& maps_;
    const Cut& cut_;
    const int weights_, scales_;  // bytes of weights and of scales in a slice
    const int stage_, part_;      // bytes of a stage; inputs of a stage
    unsigned char* ring_;
    float* behind_;  // after the ring: sums of the pieces, or elements (x rows, weight rows of this block)
    unsigned barriers_;
    const int piece_, inputs_;  // number of this block's piece; inputs of a piece
    int begin_, end_;           // weight rows of this block
};

template <CodeKind kKind, int kOctets, class Results>
__global__ void __launch_bounds__(32 * (kMostWarps + kCopyWarps + (Results::kCollected ? kResultWarps : 0)),
                                  Results::kCollected ? 1 : 2)
    few_rows_kernel(const __grid_constant__ ProductParams p, const __grid_constant__ Maps maps,
                    const __grid_constant__ Cut cut, const __grid_constant__ Results results) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ unsigned char memory[];
    const unsigned past = shared_address(memory) % kOctetBytes;
    const FewRows<kKind, kOctets, Results> product(p, maps, cut,
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

template <CodeKind kKind, int kOctets, class Results>
void launch_few_rows(const ProductParams& params, const Results& results, cudaStream_t stream) {
    using Product = FewRows<kKind, kOctets, Results>;
    const auto kernel = few_rows_kernel<kKind, kOctets, Results>;
    constexpr bool kCoded = kKind != CodeKind::none;
    ProductParams p = params;
    if (p.y_stride == 0) p.y_stride = p.out;
    const int shares = shares_of(p), most = (p.out + shares - 1) / shares;
    const int tiles = (most + kMostTileRows - 1) / kMostTileRows;
    Cut cut = {};
    cut.tile_rows = (most + tiles - 1) / tiles;
    cut.warps = (cut.tile_rows + 2 * kOctet - 1) / (2 * kOctet);
    const int weights = Product::weight_bytes(cut.tile_rows);
    const int slice = weights + scale_bytes(cut.tile_rows, p.coding) + Product::kHalves * Product::kX;
    const int slices = (p.in / p.pieces + Product::kInputs - 1) / Product::kInputs;
    cut.slices = std::max(1, std::min(kStageBytes / slice, slices));
    const int stage = cut.slices * slice;
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
    const Maps maps = {tensor_map(p.weight, p.out, p.in, p.in, cut.tile_rows, p.coding.bits()),
                       tensor_map(p.x, p.rows, p.in, p.rows == 1 ? p.in : p.x_stride, kOctets * kOctet),
                       kCoded ? scale_map(p.coding, p.out, p.in, scale_rows(cut.tile_rows)) : CUtensorMap{}};
    const int threads = 32 * (cut.warps + kCopyWarps + (Results::kCollected ? kResultWarps : 0));
    launch_clusters(kernel, dim3(unsigned(shares * p.pieces)), unsigned(threads), p.pieces, bytes, stream,
                    "few_rows_product", p, maps, cut, results);
}

template <CodeKind kKind = CodeKind::none, class Results>
void launch_few_rows(const ProductParams& p, const Results& results, cudaStream_t stream) {
    if (p.rows <= kOctet) return launch_few_rows<kKind, 1>(p, results, stream);
    if (p.rows <= 2 * kOctet) return launch_few_rows<kKind, 2>(p, results, stream);
    launch_few_rows<kKind, 4>(p, results, stream);
}

}  // namespace cuda
}  // namespace apcbatch
