// Products of experts with the rows of their tokens. Each element is one fixed-order sum (see products.h), so
// a token has the same bits as in a large batch. The weights are read once per 8 or 32 tokens of an expert.
//
// The blocks, one per multiprocessor, loop over tiles: an expert, some of its weight rows, some of its
// tokens, and all inputs. So no sums are combined across blocks. One thread copies weights to a ring buffer
// in shared memory, and one warp copies the tokens' rows; both run several stages ahead, also across tiles.
// The other warps multiply 16 weight rows each. In a gated tile a warp has 8 rows of gate and 8 of up, so
// that both sums of an element are in one lane.
#include <algorithm>
#include <stdexcept>

#include "async_copy.cuh"
#include "chain_steps.cuh"
#include "dependent_launch.cuh"
#include "element.cuh"
#include "experts.h"
#include "shared_barrier.cuh"

namespace apcbatch {
namespace cuda {
namespace {

using Bf16 = __nv_bfloat16;

// Sizes of a tile. kMultiply: warps that multiply, 16 weight rows each. kSlices: slices per stage.
template <int kMultiply_, int kNTiles_, int kSlices_, int kStages_>
struct ChainTile {
    static constexpr int kMultiply = kMultiply_, kNTiles = kNTiles_, kSlices = kSlices_, kStages = kStages_;
    static constexpr int kRows = kMultiply * 16, kTokens = kNTiles * kOctet;
    static constexpr int kWeights = kRows * kSliceRow, kX = kTokens * kSliceRow;  // bytes of a slice
    static constexpr int kStage = kSlices * (kWeights + kX);
    static constexpr int kBytes = kStages * kStage + kOctetBytes;  // kOctetBytes more, for the alignment
    static constexpr int kThreads = 32 * (kMultiply + 2);
    static_assert(kBytes <= 216 * 1024, "beside the groups");
};
using ChainEight = ChainTile<4, 1, 2, 5>;
using ChainMore = ChainTile<8, 4, 2, 3>;

// Position in the order of tiles: by expert, then by weight rows, then by tokens.
template <class T>
struct Place {
    int active = 0, before = 0;  // current expert; number of tiles of the experts before it
    int row_tile, first, count;  // tile of weight rows; place of the first token; number of tokens

    // Advances to a tile, which must not precede the current one. Returns false past the last tile.
    __device__ __forceinline__ bool seek(const Groups& groups, int tile, int row_tiles) {
        for (; active < groups.experts; ++active) {
            const int begin = groups.begins[active], tokens = groups.begins[active + 1] - begin;
            const int parts = (tokens + T::kTokens - 1) / T::kTokens;
            if (tile < before + parts * row_tiles) {
                const int part = (tile - before) % parts;
                row_tile = (tile - before) / parts;
                first = begin + part * T::kTokens;
                count = min(T::kTokens, tokens - part * T::kTokens);
                return true;
            }
            before += parts * row_tiles;
        }
        return false;
    }
};

// Position of one user of the ring buffer: tile, input, slot of the ring.
template <class T, Activation kActivation>
struct ChainPlace {
    // Columns of y in a tile.
    static constexpr int kRowsEach = kActivation == Activation::swiglu ? T::kRows / 2 : T::kRows;
    const ExpertProduct& p;
    const Groups& groups;
    const int row_tiles;
    Place<T> at;
    int tile = int(blockIdx.x), input = 0, slot = 0;
    unsigned parity = 0;
    bool any;

    __device__ __forceinline__ ChainPlace(const ExpertProduct& product, const Groups& its)
        : p(product), groups(its), row_tiles((p.out + kRowsEach - 1) / kRowsEach) {
        any = at.seek(groups, tile, row_tiles);
    }

    // Advances to the next stage. Returns true at the end of a tile.
    __device__ __forceinline__ bool go_on() {
        if (++slot == T::kStages) slot = 0, parity ^= 1u;
        input += T::kSlices * kSliceInputs;
        if (input < p.in) return false;
        input = 0;
        tile += int(gridDim.x);
        any = at.seek(groups, tile, row_tiles);
        return true;
    }
};

template <class T, Activation kActivation>
struct ExpertChains {
    static constexpr bool kGated = kActivation == Activation::swiglu;
    static constexpr bool kOfTokens = kActivation != Activation::none;  // reads rows of tokens
    using At = ChainPlace<T, kActivation>;

    const ExpertProduct& p;
    const Groups& groups;
    unsigned char* const ring;
    const unsigned barriers;

    __device__ __forceinline__ unsigned full(int slot) const { return barriers + 8 * slot; }
    __device__ __forceinline__ unsigned free(int slot) const { return barriers + 8 * (T::kStages + slot); }
    __device__ __forceinline__ unsigned char* stage(int slot) const { return ring + slot * T::kStage; }

    // Copies the weights of all tiles. Run by one thread.
    __device__ void copy_weights() const {
        const auto* maps = static_cast<const ExpertMaps*>(p.weights);
        const CUtensorMap* acquired = nullptr;
        for (At at(p, groups); at.any; at.go_on()) {
            const CUtensorMap* map = &maps[groups.expert[at.at.active]].chains;
            if (map != acquired) acquire_map(acquired = map);
            wait_barrier(free(at.slot), at.parity ^ 1u);
            arrive_expecting(full(at.slot), T::kSlices * T::kWeights);
            const int row = at.at.row_tile * At::kRowsEach;
            unsigned to = shared_address(stage(at.slot));
#pragma unroll
            for (int slice = 0; slice < T::kSlices; ++slice) {
#pragma unroll
                for (int i = 0; i < T::kRows; i += kExpertBoxRows, to += kExpertBoxRows * kSliceRow) {
                    const int from = i < At::kRowsEach ? row + i : p.out + row + i - At::kRowsEach;
                    tensor_copy(to, map, at.input + slice * kSliceInputs, from, full(at.slot));
                }
            }
        }
    }

    // Copies the tokens' rows of all tiles. Run by one warp. rows: scratch for T::kTokens integers. Pads with
    // zeros past the last input, as the copies of the weights do.
    __device__ void copy_tokens(int* rows) const {
        constexpr int kChunks = T::kSlices * kSliceChunks, kAtOnce = 32 / kChunks;
        static_assert(32 % kChunks == 0, "neighbouring lanes have neighbouring chunks");
        const int lane = threadIdx.x % 32, chunk = lane % kChunks;
        bool begins = true;
        for (At at(p, groups); at.any; begins = at.go_on()) {
            const int count = at.at.count;
            if (begins) {
                __syncwarp();
                for (int i = lane; i < count; i += 32) {
                    const int place = at.at.first + i;
                    rows[i] = kOfTokens ? __ldcg(pairs_of(p.groups) + place) / p.per_token : place;
                }
                __syncwarp();
            }
            wait_barrier(free(at.slot), at.parity ^ 1u);
            unsigned char* to = stage(at.slot) + T::kSlices * T::kWeights + chunk / kSliceChunks * T::kX;
            const int input = at.input + chunk * 8;
            const auto* x = static_cast<const Bf16*>(p.x) + input;
#pragma unroll 4
            for (int i = lane / kChunks; i < count; i += kAtOnce) {
                const bool there = input < p.in;
                copy_chunk(to + chunk_at(i, chunk % kSliceChunks),
                           there ? x + std::int64_t(rows[i]) * p.in : p.x, there);
            }
            arrive_with_copies(full(at.slot));
        }
    }

    // Multiplies all tiles and stores the results. Run by T::kMultiply warps.
    __device__ void multiply() const {
        const int warp = threadIdx.x / 32;
        const int low = (kGated ? warp : 2 * warp) * kOctetBytes,
                  high = low + (kGated ? T::kRows / 2 * kSliceRow : kOctetBytes);
        const LaneSteps lane;
        float sums[T::kNTiles][4] = {};
        Factors its;
        for (At at(p, groups); at.any;) {
            const bool begins = at.input == 0;
            if (begins) its.load_pairs(p, at.at);
            const unsigned char* weights = stage(at.slot);
            const unsigned char* x = weights + T::kSlices * T::kWeights;
            const int octets = (at.at.count + kOctet - 1) / kOctet;
            wait_barrier(full(at.slot), at.parity);
#pragma unroll
            for (int slice = 0; slice < T::kSlices; ++slice, weights += T::kWeights, x += T::kX) {
                if (octets == 1) {
                    add_slice<1>(sums, lane, weights + low, weights + high, x, kSliceSteps);
                } else if (octets == 2) {
                    add_slice<T::kNTiles == 1 ? 1 : 2>(sums, lane, weights + low, weights + high, x,
                                                       kSliceSteps);
                } else {
                    add_slice<T::kNTiles>(sums, lane, weights + low, weights + high, x, kSliceSteps);
                }
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(free(at.slot));
            if (begins) its.load_routing(p);
            const Place<T> place = at.at;
            if (at.go_on()) {
                put(place, its, sums);
#pragma unroll
                for (float (&tile)[4] : sums) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
            }
        }
    }

  private:
    // Returns the first column of y of this warp.
    static __device__ __forceinline__ int first_row(const Place<T>& place) {
        return place.row_tile * At::kRowsEach + int(threadIdx.x) / 32 * (kGated ? kOctet : 2 * kOctet);
    }

    // Factors of a lane's results, and the pairs of its tokens, loaded long before the results need them.
    struct Factors {
        int pairs[T::kNTiles][2];
        float routing[T::kNTiles][2], scales[2];

        __device__ __forceinline__ void load_pairs(const ExpertProduct& p, const Place<T>& place) {
            if constexpr (!kOfTokens) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int out = first_row(place) + row_of_sum(2 * i);
                    scales[i] = p.scale && out < p.out ? p.scale[out] : 1.0f;
                }
#pragma unroll
                for (int j = 0; j < T::kNTiles; ++j) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        pairs[j][i] = __ldcg(pairs_of(p.groups) + place.first +
                                             min(j * kOctet + column_of_sum(i), place.count - 1));
                }
            }
        }
        __device__ __forceinline__ void load_routing(const ExpertProduct& p) {
            if constexpr (!kOfTokens) {
#pragma unroll
                for (int j = 0; j < T::kNTiles; ++j) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) routing[j][i] = __ldcg(p.routing + pairs[j][i]);
                }
            }
        }
    };

    __device__ __forceinline__ void put(const Place<T>& place, const Factors& its,
                                        const float (&sums)[T::kNTiles][4]) const {
#pragma unroll
        for (int j = 0; j < T::kNTiles; ++j) {
            if (j * kOctet >= place.count) break;
#pragma unroll
            for (int i = 0; i < (kGated ? 2 : 4); ++i) {
                const int column = j * kOctet + column_of_sum(i), at = place.first + column;
                const int out = first_row(place) + row_of_sum(i);
                if (column >= place.count || out >= p.out) continue;
                if constexpr (kGated) {
                    Bf16 y[1];
                    gate({sums[j][i]}, {sums[j][i + 2]}, y);
                    static_cast<Bf16*>(p.y)[std::int64_t(at) * p.out + out] = y[0];
                } else if constexpr (kOfTokens) {
                    static_cast<Bf16*>(p.y)[std::int64_t(at) * p.out + out] = squared(sums[j][i]);
                } else {
                    static_cast<float*>(p.y)[std::int64_t(its.pairs[j][i % 2]) * p.out + out] =
                        weighted(sums[j][i], its.scales[i / 2], its.routing[j][i % 2]);
                }
            }
        }
    }
};

// The groups are complete before a product with an activation starts its dependent, one without. So the
// latter may read the groups and copy its weights before it waits for the tokens' rows.
template <class T, Activation kActivation>
__global__ void __launch_bounds__(T::kThreads, 1)
    expert_chains_kernel(const __grid_constant__ ExpertProduct p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ unsigned char memory[];
    __shared__ Groups groups;
    __shared__ std::uint64_t barriers[2 * T::kStages];
    __shared__ int rows[T::kTokens];
    const unsigned past = shared_address(memory) % kOctetBytes;
    constexpr bool kOfTokens = kActivation != Activation::none;
    const ExpertChains<T, kActivation> product = {p, groups, memory + (past ? kOctetBytes - past : 0),
                                                  shared_address(barriers)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < T::kStages; ++i) {
            init_barrier(product.full(i), 1 + 32);
            init_barrier(product.free(i), T::kMultiply);
        }
        publish_barriers();
    }
    if (kOfTokens) await_before();
    let_next_begin();
    for (int i = threadIdx.x; i < int(sizeof(Groups) / sizeof(int)); i += T::kThreads)
        reinterpret_cast<int*>(&groups)[i] = __ldcg(reinterpret_cast<const int*>(p.groups) + i);
    __syncthreads();
    if (threadIdx.x == 32 * T::kMultiply) product.copy_weights();
    if (!kOfTokens) await_before();
    const int helper = int(threadIdx.x) / 32 - T::kMultiply;
    if (helper < 0) {
        product.multiply();
    } else if (helper == 1) {
        product.copy_tokens(rows);
    }
#endif
}

template <class T, Activation kActivation>
void launch(const ExpertProduct& p, cudaStream_t stream) {
    const auto kernel = expert_chains_kernel<T, kActivation>;
    const int blocks = attribute_of_device(cudaDevAttrMultiProcessorCount);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kBytes),
          "the shared memory of expert_product");
    launch_dependent(kernel, dim3(unsigned(blocks)), T::kThreads, T::kBytes, stream, "expert_product", p);
}

template <class T>
void launch(const ExpertProduct& p, cudaStream_t stream) {
    switch (p.activation) {
        case Activation::none:
            return launch<T, Activation::none>(p, stream);
        case Activation::swiglu:
            return launch<T, Activation::swiglu>(p, stream);
        case Activation::relu_square:
            return launch<T, Activation::relu_square>(p, stream);
    }
}

}  // namespace

ExpertMaps expert_maps(const void* weights, std::int64_t out, std::int64_t in, bool gated) {
    const int parts = gated ? 2 : 1;
    return {tensor_map(weights, parts * out, in, in, kExpertBoxRows),
            paired_map(weights, parts, out, in, kExpertTileRows / parts)};
}

void expert_product(const ExpertProduct& p, cudaStream_t stream) {
    if (p.tokens == 0) return;
    if (p.in % 16 || p.out % 16) throw std::invalid_argument("an expert's sizes must be multiples of 16");
    if (takes_expert_tiles(p)) return expert_tiles(p, stream);
    if (p.tokens <= ChainEight::kTokens) return launch<ChainEight>(p, stream);
    launch<ChainMore>(p, stream);
}

bool takes_experts() {
    return attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 9 &&
           attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin) >=
               std::max(ChainEight::kBytes, ChainMore::kBytes) + int(sizeof(Groups));
}

}  // namespace cuda
}  // namespace apcbatch
