// Products with 33 to 128 rows of x: the weights are read once, each element is one chain (see products.h).
//
// Blocks, one a multiprocessor, share the rows of weights. One thread of a block has inputs of its rows
// copied into a ring in shared memory, several stages ahead, another one those of x; warpgroups have 64 rows
// of x each and all of the block's rows of weights. As x is more than a block's weights, `sharers` blocks of
// a cluster copy a part of it each into the memory of all. Where the inputs are cut into pieces, such blocks
// have one piece each, and their sums meet in the first. The weights are asked for before the kernel that
// makes x has ended. Must not know: models.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "chain_steps.cuh"
#include "dependent_launch.cuh"
#include "element.cuh"
#include "products.h"
#include "shared_barrier.cuh"
#include "tensor_map.h"
#include "warpgroup.cuh"

namespace apcbatch {
namespace cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kGroupRows = 64, kGroupThreads = 128;  // of a warpgroup
constexpr int kGroupBytes = kGroupRows * kSliceRow;  // of a slice of its x
constexpr int kMostGroups = kMostWideRows / kGroupRows;
constexpr int kCopyWarps = 2;  // a thread of each copies
constexpr int kMostStages = 16;
static_assert(8 * (2 * kMostStages + 1) <= kOctetBytes, "the barriers lie before the ring");
constexpr int kStageBytes = 40 * 1024, kRingBytes = 200 * 1024, kMostBlockBytes = 220 * 1024;
constexpr int kEarlyBytes = 64 * 1024;  // of weights, asked for before x is awaited
constexpr int kMostTileRows = 240, kFewestTileRows = 24, kMostCluster = 8;

// How a launch cuts its work: blocks of a piece, and how many of them share x; rows of weights at once, and
// how often; slices of a stage, stages of the ring, and how many of these are asked for before x is awaited;
// rows of x that a block copies, and the bytes of its shared memory.
struct Cut {
    int shares, sharers, tile_rows, tiles, slices, stages, early, part_rows, bytes, join;
};

struct Maps {  // for tensor copies of tile_rows rows of the weights, and of part_rows of x
    CUtensorMap weight, x;
};

// kTimes products of kColumns rows of weights each make a tile.
template <int kColumns, int kTimes>
class WideRows {
  public:
    static constexpr int kWeights = kTimes * kColumns * kSliceRow;  // bytes of a slice

    __device__ WideRows(const ProductParams& params, const Maps& maps, const Cut& cut, unsigned char* memory)
        : p(params),
          maps_(maps),
          cut_(cut),
          groups_((params.rows + kGroupRows - 1) / kGroupRows),
          pitch_(kWeights + groups_ * kGroupBytes),
          stage_(cut.slices * pitch_),
          ring_(memory),
          behind_(reinterpret_cast<float*>(memory + cut.stages * stage_)),
          barriers_(shared_address(memory - kOctetBytes)),
          inputs_(params.in / params.pieces) {
        const int cluster = p.pieces * cut.sharers, rank = int(blockIdx.x) % cluster;
        piece_ = rank % p.pieces;
        sharer_ = rank / p.pieces;
        const int share = int(blockIdx.x) / cluster * cut.sharers + sharer_;
        const int unit = p.out % 2 ? 1 : 2;  // so that pairs are stored where they can be
        begin_ = int(std::int64_t(p.out / unit) * share / cut.shares) * unit;
        end_ = int(std::int64_t(p.out / unit) * (share + 1) / cut.shares) * unit;
    }

    __device__ void init() const {
        for (int i = 0; i < cut_.stages; ++i) {
            init_barrier(full(i), 2);
            init_barrier(free(i), 4 * groups_ * cut_.sharers);
        }
        init_barrier(parts_there(), cut_.join ? 1 : max(1, kGroupThreads * groups_ * (p.pieces - 1)));
        publish_barriers();
        if (cut_.join) arrive_expecting(parts_there(), (p.pieces - 1) * part_floats() * int(sizeof(float)));
    }

    // By one thread.
    __device__ void copy_weights() const {
        int early = cut_.early;
        each_stage([&](int row, int column, int slices, int slot) {
            if (early-- == 0) await_before();
            arrive_expecting(full(slot), slices * cut_.tile_rows * kSliceRow);
            unsigned to = shared_address(ring_ + slot * stage_);
            for (int i = 0; i < slices; ++i, to += unsigned(pitch_), column += kSliceInputs)
                tensor_copy(to, &maps_.weight, column, row, full(slot));
        });
    }

    // By another one, once the other blocks of the cluster have begun and x is there.
    __device__ void copy_x() const {
        unsigned blocks = 0;
        for (int i = 0; i < cut_.sharers; ++i) blocks |= 1u << (piece_ + p.pieces * i);
        const int row = sharer_ * cut_.part_rows, all = cut_.sharers * cut_.part_rows;
        each_stage([&](int, int column, int slices, int slot) {
            arrive_expecting(full(slot), slices * all * kSliceRow);
            unsigned to = shared_address(ring_ + slot * stage_ + kWeights + row * kSliceRow);
            for (int i = 0; i < slices; ++i, to += unsigned(pitch_), column += kSliceInputs) {
                if (cut_.sharers == 1) {
                    tensor_copy(to, &maps_.x, column, row, full(slot));
                } else {
                    tensor_copy_to(blocks, to, &maps_.x, column, row, full(slot));
                }
            }
        });
    }

    // By the warpgroups, once the other blocks of the cluster have begun and the kernels before have ended.
    __device__ void multiply() const {
        const int group = int(threadIdx.x) / kGroupThreads;
        const int whole = inputs_ / kSliceInputs, slices = slices_of_piece();
        int slot = 0;
        unsigned parity = 0;
        for (int tile = 0; tile < cut_.tiles; ++tile) {
            float sums[kTimes][kColumns / 2] = {};
            int held = -1;  // the slot that the products under way read
            for (int slice = 0; slice < slices; slice += cut_.slices) {
                wait_barrier(full(slot), parity);
                unsigned weights = shared_address(ring_ + slot * stage_);
                for (int i = slice; i < min(slice + cut_.slices, slices); ++i, weights += unsigned(pitch_)) {
                    const unsigned x = weights + kWeights + group * kGroupBytes;
                    if (i < whole) {
                        add_steps<kSliceSteps>(sums, x, weights);
                    } else {
                        for (int step = 0; step < inputs_ % kSliceInputs / 16; ++step)
                            add_steps<1>(sums, x + step * kStepBytes, weights + step * kStepBytes);
                    }
                }
                await_products<1>();
                if (held >= 0) release(held);
                held = slot;
                if (++slot == cut_.stages) slot = 0, parity ^= 1u;
            }
            await_products<0>();
            release(held);
#pragma unroll
            for (int i = 0; i < kTimes; ++i) settle(sums[i]);
            if (p.pieces > 1) add_pieces(sums);
            if (piece_ == 0) put(sums, begin_ + tile * cut_.tile_rows);
        }
    }

  private:
    __device__ unsigned full(int slot) const { return barriers_ + 8 * slot; }
    __device__ unsigned free(int slot) const { return barriers_ + 8 * (kMostStages + slot); }
    __device__ unsigned parts_there() const { return barriers_ + 8 * (2 * kMostStages); }
    __device__ int slices_of_piece() const { return (inputs_ + kSliceInputs - 1) / kSliceInputs; }

    // copy(first row of weights, first column of weights and x, slices, slot) for all stages, each once its
    // slot is free in all blocks that share x.
    template <class Copy>
    __device__ void each_stage(Copy copy) const {
        const int slices = slices_of_piece();
        int slot = 0;
        unsigned parity = 1;  // of the slots' last release: at first they are free
        for (int tile = 0; tile < cut_.tiles; ++tile) {
            for (int slice = 0; slice < slices; slice += cut_.slices) {
                wait_barrier(free(slot), parity);
                copy(begin_ + tile * cut_.tile_rows, piece_ * inputs_ + slice * kSliceInputs,
                     min(cut_.slices, slices - slice), slot);
                if (++slot == cut_.stages) slot = 0, parity ^= 1u;
            }
        }
    }

    template <int kSteps>
    static __device__ __forceinline__ void add_steps(float (&sums)[kTimes][kColumns / 2], unsigned x,
                                                     unsigned weights) {
        begin_products();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < kTimes; ++i)
                add_product(sums[i], rows_at(x + step * kStepBytes),
                            rows_at(weights + i * kColumns * kSliceRow + step * kStepBytes));
        }
        end_products();
    }

    // By a warp, for all blocks that share x.
    __device__ void release(int slot) const {
        const int lane = threadIdx.x % 32;
        if (lane < cut_.sharers) arrive_in_block(in_block(free(slot), unsigned(piece_ + p.pieces * lane)));
    }

    __device__ int tile_octets() const { return (cut_.tile_rows + kOctet - 1) / kOctet; }
    // Sums of a piece, as they lie in the first one's block: four of a lane together.
    __device__ int part_floats() const { return groups_ * kGroupThreads * tile_octets() * 4; }

    // The first piece's block gets the sum of all, in ascending order. There is one tile.
    __device__ void add_pieces(float (&sums)[kTimes][kColumns / 2]) const {
        const int threads = groups_ * kGroupThreads, mine = int(threadIdx.x);
        if (piece_ > 0) {
            const unsigned first = unsigned(sharer_ * p.pieces), there = in_block(parts_there(), first);
            const unsigned to =
                in_block(shared_address(behind_ + (piece_ - 1) * part_floats() + mine * 4), first);
            each_octet(sums, [&](float* four, int octet) {
                const float4 value = make_float4(four[0], four[1], four[2], four[3]);
                if (cut_.join) {
                    send_far(to + unsigned(octet * threads * 16), value, there);
                } else {
                    for (int i = 0; i < 4; ++i)
                        store_far(to + unsigned(octet * threads * 16 + i * 4), four[i]);
                }
            });
            if (!cut_.join) arrive_far(there);
        } else {
            wait_far(parts_there(), 0);
            for (int other = 0; other < p.pieces - 1; ++other) {
                const float4* parts = reinterpret_cast<const float4*>(behind_ + other * part_floats()) + mine;
                each_octet(sums, [&](float* four, int octet) {
                    const float4 part = parts[octet * threads];
                    four[0] = __fadd_rn(four[0], part.x);
                    four[1] = __fadd_rn(four[1], part.y);
                    four[2] = __fadd_rn(four[2], part.z);
                    four[3] = __fadd_rn(four[3], part.w);
                });
            }
        }
    }

    // what(a lane's four sums, octet of columns) for those of a tile.
    template <class What>
    __device__ __forceinline__ void each_octet(float (&sums)[kTimes][kColumns / 2], What what) const {
#pragma unroll
        for (int octet = 0; octet < kTimes * kColumns / kOctet; ++octet) {
            if (octet < tile_octets())
                what(sums[octet / (kColumns / kOctet)] + octet % (kColumns / kOctet) * 4, octet);
        }
    }

    // Stores the sums of a tile whose first row of weights this is.
    __device__ void put(float (&sums)[kTimes][kColumns / 2], int first) const {
        const int end = min(first + cut_.tile_rows, end_), lane = threadIdx.x % 32;
        const int row = int(threadIdx.x) / 32 * 16 + lane / 4, column = first + lane % 4 * 2;
        each_octet(sums, [&](const float* four, int octet) {
            const int at = column + octet * kOctet;
            put_pair(row, at, end, make_float2(four[0], four[1]));
            put_pair(row + 8, at, end, make_float2(four[2], four[3]));
        });
    }

    __device__ __forceinline__ void put_pair(int row, int column, int end, float2 pair) const {
        if (row >= p.rows || column >= end) return;
        const std::int64_t at = std::int64_t(row) * p.out + column;
        const bool both = column + 1 < end, paired = p.out % 2 == 0;
        if (p.y_dtype == DType::float32) {
            store_pair(static_cast<float*>(p.y) + at, pair, both, paired);
        } else {
            store_pair(static_cast<Bf16*>(p.y) + at, pair, both, paired);
        }
    }

    const ProductParams& p;
    const Maps& maps_;
    const Cut& cut_;
    const int groups_, pitch_, stage_;  // warpgroups; bytes of a slice and of a stage
    unsigned char* ring_;
    float* behind_;  // the ring: the sums of pieces
    const unsigned barriers_;
    const int inputs_;  // of a piece
    int piece_, sharer_;
    int begin_, end_;  // rows of weights
};

template <int kColumns, int kTimes>
__global__ void __launch_bounds__(kMostGroups* kGroupThreads + 32 * kCopyWarps, 1)
    wide_rows_kernel(const __grid_constant__ ProductParams p, const __grid_constant__ Maps maps,
                     const __grid_constant__ Cut cut) {
    extern __shared__ unsigned char memory[];
    const unsigned past = shared_address(memory) % kOctetBytes;
    const WideRows<kColumns, kTimes> product(p, maps, cut,
                                             memory + (past ? kOctetBytes - past : 0) + kOctetBytes);
    if (threadIdx.x == 0) product.init();
    __syncthreads();
    arrive_relaxed_at_cluster();
    let_next_begin();
    const int copier = int(threadIdx.x) / 32 - (int(blockDim.x) / 32 - kCopyWarps);
    if (copier == 0 && threadIdx.x % 32 == 0) product.copy_weights();
    __syncwarp();
    wait_for_cluster();
    await_before();
    if (copier < 0) {
        product.multiply();
    } else if (copier == 1 && threadIdx.x % 32 == 0) {
        product.copy_x();
    }
    __syncwarp();
    arrive_relaxed_at_cluster();  // none ends while others still use its memory
    wait_for_cluster();
}

using Kernel = void (*)(ProductParams, Maps, Cut);

// A kernel whose tiles have so many rows of weights at least, and the bytes of a slice of them.
struct Tiles {
    Kernel kernel;
    int weights;
};

template <int kColumns, int kTimes>
Tiles tiles() {
    return {wide_rows_kernel<kColumns, kTimes>, WideRows<kColumns, kTimes>::kWeights};
}

Tiles tiles_of(int rows) {
    if (rows <= 16) return tiles<16, 1>();
    if (rows <= 40) return tiles<40, 1>();
    if (rows <= 80) return tiles<80, 1>();
    return rows <= 160 ? tiles<80, 2>() : tiles<80, 3>();
}

int device_attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), "the current device");
    check(cudaDeviceGetAttribute(&value, which, device), "an attribute of the device");
    return value;
}

int whole(int count, int parts) { return (count + parts - 1) / parts; }

int knob(const char* name, int usual) {
    const char* value = std::getenv(name);
    return value ? std::atoi(value) : usual;
}

// Clusters of so many blocks that the device has at once, one block a multiprocessor.
int clusters_at_once(int size) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(size), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(size));
    config.blockDim = dim3(kMostGroups * kGroupThreads + 32 * kCopyWarps);
    config.dynamicSmemBytes = kMostBlockBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    const Kernel kernel = tiles_of(kMostTileRows).kernel;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBlockBytes),
          "the shared memory of wide_rows_product");
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "the clusters of wide_rows_product");
    return clusters;
}

// How the work is cut; no stages where it does not fit.
Cut cut_of(const ProductParams& p) {
    static const int clusters[] = {clusters_at_once(1), clusters_at_once(2), clusters_at_once(4),
                                   clusters_at_once(8)};
    Cut cut = {};
    cut.sharers = std::min(knob("WIDE_SHARERS", 4), knob("WIDE_CLUSTER", kMostCluster) / p.pieces);
    int at_once = 0;
    for (int size = p.pieces * cut.sharers, i = 0; i < 4; ++i) {
        if (1 << i == size) at_once = clusters[i];
    }
    const int most =
        std::min(at_once, std::max(1, p.out / (knob("WIDE_FEWEST", kFewestTileRows) * cut.sharers)));
    cut.shares = most * cut.sharers;
    const int unit = p.out % 2 ? 1 : 2, rows = whole(p.out / unit, cut.shares) * unit;
    cut.tiles = whole(rows, kMostTileRows);
    cut.tile_rows = whole(whole(rows, cut.tiles), unit) * unit;
    cut.part_rows = whole(whole(p.rows, kOctet), cut.sharers) * kOctet;
    const int groups = whole(p.rows, kGroupRows), slices = whole(p.in / p.pieces, kSliceInputs);
    const int pitch = tiles_of(cut.tile_rows).weights + groups * kGroupBytes;
    cut.slices = std::max(1, std::min(knob("WIDE_STAGE", kStageBytes) / pitch, slices));
    const int behind =
        (p.pieces - 1) * groups * kGroupThreads * whole(cut.tile_rows, kOctet) * 4 * int(sizeof(float));
    const int ring = std::min(knob("WIDE_RING", kRingBytes), kMostBlockBytes - 2 * kOctetBytes - behind);
    cut.stages = std::min({ring / (cut.slices * pitch), kMostStages, cut.tiles * whole(slices, cut.slices)});
    cut.early = std::max(
        1, std::min(knob("WIDE_EARLY", kEarlyBytes) / (cut.slices * cut.tile_rows * kSliceRow), cut.stages));
    cut.join = knob("WIDE_JOIN", 1) && p.pieces > 1;
    cut.bytes = 2 * kOctetBytes + cut.stages * cut.slices * pitch + behind;
    if (p.pieces > 1 && cut.tiles > 1) cut.stages = 0;
    return cut;
}

}  // namespace

bool takes_wide_rows(const ProductParams& p) {
    const auto aligned_to = [](const void* at, std::size_t bytes) {
        return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
    };
    return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
           device_attribute(cudaDevAttrComputeCapabilityMinor) == 0 && p.dtype == DType::bfloat16 &&
           p.rows > 0 && p.rows <= kMostWideRows && p.out > 0 && takes_pieces(p.in, p.pieces) &&
           p.x_stride >= p.in && p.x_stride % 8 == 0 && aligned_to(p.weight, 16) && aligned_to(p.x, 16) &&
           aligned_to(p.y, 2 * bytes_of(p.y_dtype)) && cut_of(p).stages > 0;
}

void wide_rows_product(const ProductParams& p, cudaStream_t stream) {
    if (!takes_wide_rows(p))
        throw std::invalid_argument("wide_rows_product does not take these sizes or addresses");
    const Cut cut = cut_of(p);
    const Kernel kernel = tiles_of(cut.tile_rows).kernel;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, cut.bytes),
          "the shared memory of wide_rows_product");
    const Maps maps = {tensor_map(p.weight, p.out, p.in, p.in, cut.tile_rows),
                       tensor_map(p.x, p.rows, p.in, p.x_stride, cut.part_rows)};
    const int threads = whole(p.rows, kGroupRows) * kGroupThreads + 32 * kCopyWarps;
    launch_clusters(kernel, dim3(unsigned(cut.shares * p.pieces)), unsigned(threads), p.pieces * cut.sharers,
                    cut.bytes, stream, "wide_rows_product", p, maps, cut);
}

}  // namespace cuda
}  // namespace apcbatch
