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
#include "codes.cuh"
#include "dependent_launch.cuh"
#include "element.cuh"
#include "experts.h"
#include "shared_barrier.cuh"

namespace apcbatch {
namespace cuda {
namespace {

using Bf16 = __nv_bfloat16;

// Sizes of a tile. kMultiply: warps that multiply, 16 weight rows each. kSlices: slices of x per stage.
// kBlocks: blocks of a multiprocessor: two hide the time that decoding takes. Blocks without a tile leave
// room for those of the next launch, which copy their first weights meanwhile.
template <CodeKind kKind_, int kMultiply_, int kNTiles_, int kStages_, int kBlocks_>
struct ChainTile {
    static constexpr CodeKind kKind = kKind_;
    static constexpr bool kCoded = kKind != CodeKind::none;
    static constexpr int kMultiply = kMultiply_, kNTiles = kNTiles_, kSlices = 2, kStages = kStages_,
                         kBlocks = kBlocks_;
    static constexpr int kRows = kMultiply * 16, kTokens = kNTiles * kOctet;
    static constexpr int kX = kTokens * kSliceRow;                          // bytes of x in a slice
    static constexpr int kRow = code_row(kKind);                            // of a row of weights in a slice
    static constexpr int kWeights = (kCoded ? 1 : kSlices) * kRows * kRow;  // of weights in a stage
    static constexpr int kGroup = kCoded ? kRows * int(sizeof(float)) : 0;  // of the scales of a group
    static constexpr int kStage = kWeights + 4 * kGroup + kSlices * kX;
    static constexpr int kBytes = kStages * kStage + kOctetBytes;  // kOctetBytes more, for the alignment
    static constexpr int kThreads = 32 * (kMultiply + 2);
    static_assert(kBytes <= 216 * 1024, "beside the groups");
};
template <CodeKind kKind>
using ChainEight = ChainTile<kKind, 4, 1,
                             kKind == CodeKind::none   ? 5
                             : kKind == CodeKind::int4 ? 12
                                                       : 8,
                             kKind == CodeKind::none ? 1 : 2>;
template <CodeKind kKind>
using ChainMore = ChainTile<kKind, 8, 4,
                            kKind == CodeKind::none   ? 3
                            : kKind == CodeKind::int4 ? 8
                                                      : 6,
                            1>;

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

    __device__ __forceinline__ unsigned char* x_of(int slot) const {
        return stage(slot) + T::kWeights + 4 * T::kGroup;
    }

    // Copies the weights of all tiles. Run by one thread.
    __device__ void copy_weights() const {
        const auto* maps = static_cast<const ExpertMaps*>(p.weights);
        const CUtensorMap* acquired = nullptr;
        for (At at(p, groups); at.any; at.go_on()) {
            const ExpertMaps& its = maps[groups.expert[at.at.active]];
            const CUtensorMap* map = &its.chains;
            if (map != acquired) {
                acquire_map(acquired = map);
                if constexpr (T::kCoded) acquire_map(&its.scales);
            }
            const int scaled = T::kCoded ? groups_of_slice(p.coding) : 0;
            wait_barrier(free(at.slot), at.parity ^ 1u);
            arrive_expecting(full(at.slot), T::kWeights + scaled * T::kGroup);
            const int row = at.at.row_tile * At::kRowsEach;
            unsigned to = shared_address(stage(at.slot)), scales = to + T::kWeights;
#pragma unroll
            for (int slice = 0; slice < (T::kCoded ? 1 : T::kSlices); ++slice) {
#pragma unroll
                for (int i = 0; i < T::kRows; i += kExpertBoxRows, to += kExpertBoxRows * T::kRow) {
                    const int from = i < At::kRowsEach ? row + i : p.out + row + i - At::kRowsEach;
                    const int column =
                        T::kCoded ? code_bytes(T::kKind, at.input) : at.input + slice * kSliceInputs;
                    tensor_copy(to, map, column, from, full(at.slot));
                    for (int group = 0; group < scaled; ++group)
                        tensor_copy(scales + group * T::kGroup + i * int(sizeof(float)), &its.scales, from,
                                    (at.input >> p.coding.shift) + group, full(at.slot));
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
            unsigned char* to = x_of(at.slot) + chunk / kSliceChunks * T::kX;
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
        const int first = (kGated ? warp : 2 * warp) * kOctet,
                  second = first + (kGated ? T::kRows / 2 : kOctet);
        const int low = first * T::kRow, high = second * T::kRow;
        const std::conditional_t<T::kCoded, LaneCodes<T::kKind>, LaneSteps> lane;
        float sums[T::kNTiles][4] = {};
        Factors its;
        for (At at(p, groups); at.any;) {
            const bool begins = at.input == 0;
            if (begins) its.load_pairs(p, at.at);
            const unsigned char* weights = stage(at.slot);
            const unsigned char* x = x_of(at.slot);
            const int octets = (at.at.count + kOctet - 1) / kOctet;
            wait_barrier(full(at.slot), at.parity);
#pragma unroll
            for (int slice = 0; slice < T::kSlices; ++slice, x += T::kX) {
                const auto add = [&](auto tiles) {
                    constexpr int kTiles = decltype(tiles)::value;
                    if constexpr (T::kCoded) {
                        const auto scales = [&](int row) {
                            return reinterpret_cast<const float*>(weights + T::kWeights) + row + lane.row;
                        };
                        add_codes<T::kKind, kTiles>(sums, lane, slice, weights + low, weights + high,
                                                    scales(first), scales(second), T::kRows, p.coding.shift,
                                                    x, kSliceSteps);
                    } else {
                        const unsigned char* its = weights + slice * T::kRows * T::kRow;
                        add_slice<kTiles>(sums, lane, its + low, its + high, x, kSliceSteps);
                    }
                };
                if (T::kNTiles == 1 || octets == 1) {
                    add(std::integral_constant<int, 1>());
                } else if (octets == 2) {
                    add(std::integral_constant<int, T::kNTiles == 1 ? 1 : 2>());
                } else {
                    add(std::integral_constant<int, T::kNTiles>());
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
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
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
    const int blocks = T::kBlocks * attribute_of_device(cudaDevAttrMultiProcessorCount);
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

template <CodeKind kKind>
void launch(const ExpertProduct& p, cudaStream_t stream) {
    if (p.tokens <= ChainEight<kKind>::kTokens) return launch<ChainEight<kKind>>(p, stream);
    launch<ChainMore<kKind>>(p, stream);
}

constexpr int kMostBytes = std::max({ChainEight<CodeKind::none>::kBytes, ChainMore<CodeKind::none>::kBytes,
                                     ChainEight<CodeKind::fp8>::kBytes, ChainMore<CodeKind::fp8>::kBytes});

}  // namespace

ExpertMaps expert_maps(const void* weights, const Coding& coding, std::int64_t out, std::int64_t in,
                       bool gated) {
    const int parts = gated ? 2 : 1;
    return {
        tensor_map(weights, parts * out, in, in, kExpertBoxRows, coding.bits()),
        paired_map(weights, parts, out, in, kExpertTileRows / parts, coding.bits()),
        coding.kind != CodeKind::none ? scale_map(coding, parts * out, in, kExpertBoxRows) : CUtensorMap{}};
}

void expert_product(const ExpertProduct& p, cudaStream_t stream) {
    if (p.tokens == 0) return;
    if (p.in % 16 || p.out % 16) throw std::invalid_argument("an expert's sizes must be multiples of 16");
    if (takes_expert_tiles(p)) return expert_tiles(p, stream);
    with_kind(p.coding.kind, [&](auto kind) { launch<decltype(kind)::value>(p, stream); });
}

bool takes_experts() {
    return attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 9 &&
           attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= kMostBytes + int(sizeof(Groups));
}

}  // namespace cuda
}  // namespace apcbatch
