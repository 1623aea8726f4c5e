// Products of experts with the rows of many tokens each, by warpgroups: the bits of expert_chains.cu. The
// weights are read once per tile of up to 160 tokens of an expert.
//
// The blocks, one per multiprocessor, loop over tiles: an expert, 256 of its weight rows, some of its tokens,
// and all inputs. Tiles that share weights are neighbours. A thread copies weights to a ring buffer in shared
// memory, and three warps copy the tokens' rows; both run several stages ahead, also across tiles. Two
// warpgroups multiply 128 weight rows each. In a gated tile these are 64 rows of gate and 64 of up, so that
// both sums of an element are in one lane.
#include "async_copy.cuh"
#include "codes.cuh"
#include "dependent_launch.cuh"
#include "element.cuh"
#include "experts.h"
#include "shared_barrier.cuh"
#include "warpgroup_unit.cuh"

namespace apcbatch {
namespace cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kUnit = 32;  // tokens of a tile come in units
constexpr int kTileRows = kExpertTileRows, kWarpgroups = 2;
constexpr int kTileScales = kTileRows * int(sizeof(float));  // bytes of the scales of a group
constexpr int kMultiplyWarps = kWarpgroups * 4, kTokenWarps = 3;
constexpr int kThreads = 32 * (kMultiplyWarps + 1 + kTokenWarps);
constexpr int kRowsAtOnce = 32 / kSliceChunks;  // rows of tokens that a warp copies at once
constexpr int kSearched = 16;                   // experts of a lane in a search; 32 lanes have them all
static_assert(32 * kSearched >= kMostExperts, "one search finds an expert");

// The groups, and the number of parts of the experts before each one. An expert's tokens are in as few parts
// as there can be, of equal sizes: parts that share weights and do not run together read them twice.
struct Parts {
    Groups groups;
    int before[kMostExperts + 1];

    __device__ __forceinline__ int tokens(int active) const {
        return groups.begins[active + 1] - groups.begins[active];
    }
};

struct Tile {
    int expert, row;          // first column of y
    int first, count, units;  // place of the first token; number of tokens, and of units
};

template <Activation kActivation, CodeKind kKind>
struct ExpertTiles {
    static constexpr bool kCoded = kKind != CodeKind::none;
    static constexpr int kStages = kCoded ? 3 : 4, kSlices = kCoded ? 2 : 1;  // kSlices: of x in a stage
    static constexpr int kMostUnits = kCoded ? 4 : 5, kMostTokens = kUnit * kMostUnits;
    static constexpr int kRow = code_row(kKind), kTileWeights = kTileRows * kRow;  // bytes of weights
    static constexpr int kScales = kCoded ? 4 * kTileScales : 0, kTileX = kMostTokens * kSliceRow;
    static constexpr int kStage = kTileWeights + kScales + kSlices * kTileX;
    static constexpr int kRingBytes = kStages * kStage + kOctetBytes;  // kOctetBytes more, for the alignment
    static constexpr bool kGated = kActivation == Activation::swiglu;
    static constexpr bool kOfTokens = kActivation != Activation::none;    // reads rows of tokens
    static constexpr int kRowsEach = kGated ? kTileRows / 2 : kTileRows;  // columns of y in a tile
    // Columns of y, and rows of weights, between those of two warpgroups.
    static constexpr int kApart = kRowsEach / kWarpgroups;
    static constexpr int kSecond = kGated ? kRowsEach : kWarpgroupRows;  // rows from first sums to second

    const ExpertProduct& p;
    const Parts& parts;
    unsigned char* const ring;
    const unsigned barriers;
    const int row_tiles, stages;  // stages: of a tile

    __device__ __forceinline__ unsigned full(int slot) const { return barriers + 8 * slot; }
    __device__ __forceinline__ unsigned free(int slot) const { return barriers + 8 * (kStages + slot); }
    __device__ __forceinline__ unsigned char* stage(int slot) const { return ring + slot * kStage; }

    __device__ __forceinline__ unsigned x_of(int slot) const {
        return shared_address(stage(slot)) + kTileWeights + kScales;
    }

    // Place in the ring of one user of it.
    struct Turn {
        int slot = 0;
        unsigned parity = 0;
        __device__ __forceinline__ void go_on() {
            if (++slot == kStages) slot = 0, parity ^= 1u;
        }
    };

    // Calls each(tile) for every tile of this block. Run by whole warps.
    template <class Each>
    __device__ __forceinline__ void each_tile(Each each) const {
        const int all = parts.before[parts.groups.experts] * row_tiles;
        for (int i = int(blockIdx.x); i < all; i += int(gridDim.x)) each(tile(i));
    }

    // Copies the weights of all tiles. Run by one warp.
    __device__ void copy_weights() const {
        const auto* maps = static_cast<const ExpertMaps*>(p.weights);
        const CUtensorMap* acquired = nullptr;
        Turn turn;
        each_tile([&](const Tile& at) {
            const CUtensorMap* map = &maps[at.expert].tiles;
            if (map != acquired) {
                acquire_map(acquired = map);
                if constexpr (kCoded) acquire_map(&maps[at.expert].scales);
            }
            for (int i = 0; i < stages; ++i, turn.go_on()) {
                if (threadIdx.x % 32) continue;
                const int input = i * kSlices * kSliceInputs, scaled = kCoded ? groups_of_slice(p.coding) : 0;
                const unsigned to = shared_address(stage(turn.slot));
                wait_barrier(free(turn.slot), turn.parity ^ 1u);
                arrive_expecting(full(turn.slot), kTileWeights + scaled * kTileScales);
                paired_copy(to, map, kCoded ? code_bytes(kKind, input) : input, at.row, full(turn.slot));
                for (int group = 0; group < scaled; ++group) {
                    for (int row = 0; row < kTileRows; row += kExpertBoxRows) {
                        const int from = row < kRowsEach ? at.row + row : p.out + at.row + row - kRowsEach;
                        tensor_copy(to + kTileWeights + group * kTileScales + row * int(sizeof(float)),
                                    &maps[at.expert].scales, from, (input >> p.coding.shift) + group,
                                    full(turn.slot));
                    }
                }
            }
            __syncwarp();
        });
    }

    // Copies the tokens' rows of all tiles. Run by kTokenWarps warps, of which this is number `warp`. Pads
    // with zeros past the last input, as the copies of the weights do.
    __device__ void copy_tokens(int warp) const {
        constexpr int kStride = kTokenWarps * kRowsAtOnce;  // rows between two copies of a lane
        constexpr int kCopies = (kMostTokens + kStride - 1) / kStride;
        const int lane = threadIdx.x % 32, chunk = lane % kSliceChunks;
        const int row = warp * kRowsAtOnce + lane / kSliceChunks;
        const auto* x = static_cast<const Bf16*>(p.x) + chunk * 8;
        Turn turn;
        each_tile([&](const Tile& at) {
            const Bf16* from[kCopies];
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const int place = at.first + min(row + i * kStride, at.count - 1);
                const int source = kOfTokens ? __ldcg(pairs_of(p.groups) + place) / p.per_token : place;
                from[i] = x + std::int64_t(source) * p.in;
            }
            // The last copies of a lane may be of rows past the tokens, which nothing reads.
            const int copies = (at.count - warp * kRowsAtOnce + kStride - 1) / kStride;
            for (int slice = 0; slice < stages * kSlices; ++slice) {
                const int half = slice % kSlices;
                if (half == 0) wait_barrier(free(turn.slot), turn.parity ^ 1u);
                const unsigned to = x_of(turn.slot) + half * kTileX;
                const unsigned even = to + chunk_at(row, chunk), odd = even ^ (kSliceRow / 2);
                const int bytes = slice * kSliceInputs + chunk * 8 < p.in ? 16 : 0;
#pragma unroll
                for (int i = 0; i < kCopies; ++i) {
                    if (i >= copies) break;
                    copy_bytes((i % 2 ? odd : even) + i * kStride * kSliceRow, from[i], bytes);
                    from[i] += kSliceInputs;
                }
                if (half < kSlices - 1) continue;
                arrive_with_copies(full(turn.slot));
                turn.go_on();
            }
        });
    }
    static_assert(kTokenWarps * kRowsAtOnce % kOctet == 4,
                  "the chunks of every other copy have the same places");

    // Multiplies all tiles and stores the results. Run by kWarpgroups warpgroups.
    __device__ void multiply() const {
        Turn turn;
        each_tile([&](const Tile& at) {
            switch (at.units) {
                case 1:
                    return multiply<1>(at, turn);
                case 2:
                    return multiply<2>(at, turn);
                case 3:
                    return multiply<3>(at, turn);
                case 4:
                    return multiply<4>(at, turn);
                default:
                    return multiply<kMostUnits>(at, turn);
            }
        });
    }

  private:
    // Finds a tile: by expert, then by weight rows, then by parts of the tokens. Run by a whole warp.
    __device__ __forceinline__ Tile tile(int i) const {
        const int lane = threadIdx.x % 32, part = i / row_tiles, experts = parts.groups.experts;
        const auto begun = [&](int active) { return active < experts && parts.before[active] <= part; };
        int active = kSearched * (__popc(__ballot_sync(0xffffffffu, begun(lane * kSearched))) - 1);
        active += __popc(__ballot_sync(0xffffffffu, lane < kSearched && begun(active + lane))) - 1;
        const int before = parts.before[active], its = parts.before[active + 1] - before;
        const int mine = i - before * row_tiles, part_of = mine % its, tokens = parts.tokens(active);
        const int first = tokens * part_of / its, count = tokens * (part_of + 1) / its - first;
        return {parts.groups.expert[active], mine / its * kRowsEach, parts.groups.begins[active] + first,
                count, (count + kUnit - 1) / kUnit};
    }

    template <int kUnits>
    __device__ __forceinline__ void multiply(const Tile& at, Turn& turn) const {
        const int low = int(threadIdx.x) / kWarpgroup * kApart;
        Results<kUnits> results(*this, at);
        float sums[2][kUnits * kUnit / 2] = {};
        if constexpr (kCoded) {
            multiply_codes(low, turn, sums);
        } else {
            multiply_weights(low, turn, sums);
        }
        results.load_routing();
        wait_for_products<0>();
        hold(sums[0]), hold(sums[1]);
        release(turn.slot == 0 ? kStages - 1 : turn.slot - 1);
        results.put(sums);
    }

    // Sum over all inputs. The last products may still run.
    template <int kSums>
    __device__ __forceinline__ void multiply_weights(int low, Turn& turn, float (&sums)[2][kSums]) const {
        for (int slice = 0; slice < stages; ++slice) {
            const unsigned weights = shared_address(stage(turn.slot));
            const std::uint64_t first = described(weights + low * kSliceRow),
                                second = described(weights + (low + kSecond) * kSliceRow),
                                x = described(x_of(turn.slot));
            wait_barrier(full(turn.slot), turn.parity);
            show_to_products();
            hold(sums[0]), hold(sums[1]);
            begin_products();
#pragma unroll
            for (int i = 0; i < kSliceSteps; ++i) {
                const int step = i * kDescribedStep;
                add_step(sums[0], first + step, x + step);
                add_step(sums[1], second + step, x + step);
            }
            commit_products();
            hold(sums[0]), hold(sums[1]);
            if (slice > 0) {
                wait_for_products<1>();
                release(turn.slot == 0 ? kStages - 1 : turn.slot - 1);
            }
            turn.go_on();
        }
    }

    // The same with weights that are decoded in registers, while the products of the step before run.
    template <int kSums>
    __device__ __forceinline__ void multiply_codes(int low, Turn& turn, float (&sums)[2][kSums]) const {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = lane / 4;
        std::uint32_t operands[2][2][4];  // of the even and the odd steps
        for (int i = 0; i < stages; ++i) {
            const unsigned char* weights = stage(turn.slot);
            const std::uint64_t x = described(x_of(turn.slot));
            wait_barrier(full(turn.slot), turn.parity);
            show_to_products();
            float2 scales[2];  // of the rows of a lane, in the first and the second sums
#pragma unroll
            for (int step = 0; step < kSlices * kSliceSteps; ++step) {
                auto& its = operands[step % 2];
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const int its_row = low + part * kSecond + warp * 16;
                    const unsigned char* codes =
                        weights + its_row * kRow + code_at<kKind>(row, step) + lane % 4 * 4;
                    if (step % 2 == 0)
                        scales[part] = reinterpret_cast<const float2*>(weights + kTileWeights +
                                                                       (step * 16 >> p.coding.shift) *
                                                                           kTileScales)[its_row / 2 + row];
                    const uint2 one = decoded<kKind>(*reinterpret_cast<const std::uint32_t*>(codes),
                                                     scales[part].x, step),
                                next = decoded<kKind>(
                                    *reinterpret_cast<const std::uint32_t*>(codes + kOctet * kRow),
                                    scales[part].y, step);
                    its[part][0] = one.x, its[part][1] = next.x, its[part][2] = one.y, its[part][3] = next.y;
                }
                const std::uint64_t at =
                    x + step / kSliceSteps * (kTileX / 16) + step % kSliceSteps * kDescribedStep;
                hold(its[0]), hold(its[1]), hold(sums[0]), hold(sums[1]);
                begin_products();
                add_step(sums[0], its[0], at);
                add_step(sums[1], its[1], at);
                commit_products();
                hold(sums[0]), hold(sums[1]);
                wait_for_products<1>();
                hold(operands[(step + 1) % 2][0]), hold(operands[(step + 1) % 2][1]);
                if (step == 0 && i > 0) release(turn.slot == 0 ? kStages - 1 : turn.slot - 1);
            }
            turn.go_on();
        }
        wait_for_products<0>();
        hold(operands[0][0]), hold(operands[0][1]), hold(operands[1][0]), hold(operands[1][1]);
    }

    __device__ __forceinline__ void release(int slot) const {
        if (threadIdx.x % 32 == 0) arrive(free(slot));
    }

    // What the results of a tile need beside the sums, and where they go. A lane loads it for some of the
    // tokens. Its sums of a token are two neighbouring columns of y, or two of each half.
    template <int kUnits>
    struct Results {
        using Sums = float[2][kUnits * kUnit / 2];
        const ExpertProduct& p;
        const Tile& at;
        int row;            // first column of y
        int pairs[kUnits];  // of tokens lane, lane + kUnit, ...
        float routing[kUnits];
        float2 scales[2];

        __device__ __forceinline__ Results(const ExpertTiles& tiles, const Tile& tile)
            : p(tiles.p), at(tile) {
            const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            row = at.row + warp / 4 * kApart + warp % 4 * 16 + lane / 4 * 2;
            if constexpr (!kOfTokens) {
#pragma unroll
                for (int i = 0; i < kUnits; ++i)
                    pairs[i] = __ldcg(pairs_of(p.groups) + at.first + min(lane + i * kUnit, at.count - 1));
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    scales[half] = p.scale && is_there(half)
                                       ? *reinterpret_cast<const float2*>(p.scale + row + half * kSecond)
                                       : make_float2(1.0f, 1.0f);
            }
        }

        // Apart from the pairs, so that nothing waits for these before the sums.
        __device__ __forceinline__ void load_routing() {
            if constexpr (!kOfTokens) {
#pragma unroll
                for (int i = 0; i < kUnits; ++i) routing[i] = __ldcg(p.routing + pairs[i]);
            }
        }

        __device__ __forceinline__ void put(const Sums& sums) const {
#pragma unroll
            for (int j = 0; j < kUnits * kUnit / kOctet; ++j) {
                const int column = j * kOctet + threadIdx.x % 4 * 2;
                if constexpr (kGated) {
                    Bf16 y[4];
                    gate({sums[0][4 * j], sums[0][4 * j + 1], sums[0][4 * j + 2], sums[0][4 * j + 3]},
                         {sums[1][4 * j], sums[1][4 * j + 1], sums[1][4 * j + 2], sums[1][4 * j + 3]}, y);
#pragma unroll
                    for (int i = 0; i < 2; ++i) put_inner(column + i, 0, y[i], y[i + 2]);
                } else {
#pragma unroll
                    for (int i = 0; i < 2; ++i) put_sums(sums, 4 * j + i, column + i);
                }
            }
        }

      private:
        __device__ __forceinline__ bool is_there(int half) const { return row + half * kSecond < p.out; }

        __device__ __forceinline__ void put_inner(int column, int half, Bf16 one, Bf16 next) const {
            Bf16* y =
                static_cast<Bf16*>(p.y) + std::int64_t(at.first + column) * p.out + row + half * kSecond;
            if (column < at.count && is_there(half)) *reinterpret_cast<std::uint32_t*>(y) = join(one, next);
        }

        __device__ __forceinline__ void put_sums(const Sums& sums, int sum, int column) const {
            if constexpr (kOfTokens) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    put_inner(column, half, squared(sums[half][sum]), squared(sums[half][sum + 2]));
            } else {
                const int unit = sum / (4 * kUnit / kOctet);
                const int pair = __shfl_sync(0xffffffffu, pairs[unit], column % kUnit);
                const float factor = __shfl_sync(0xffffffffu, routing[unit], column % kUnit);
                float* y = static_cast<float*>(p.y) + std::int64_t(pair) * p.out + row;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (column < at.count && is_there(half))
                        *reinterpret_cast<float2*>(y + half * kSecond) =
                            make_float2(weighted(sums[half][sum], scales[half].x, factor),
                                        weighted(sums[half][sum + 2], scales[half].y, factor));
                }
            }
        }
    };
};

// See expert_chains_kernel for what may be read before the kernel before has ended.
template <Activation kActivation, CodeKind kKind>
__global__ void __launch_bounds__(kThreads, 1) expert_tiles_kernel(const __grid_constant__ ExpertProduct p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    __shared__ Parts parts;
    using Tiles = ExpertTiles<kActivation, kKind>;
    __shared__ std::uint64_t barriers[2 * Tiles::kStages];
    const unsigned past = shared_address(memory) % kOctetBytes;
    const Tiles product = {p,
                           parts,
                           memory + (past ? kOctetBytes - past : 0),
                           shared_address(barriers),
                           (p.out + Tiles::kRowsEach - 1) / Tiles::kRowsEach,
                           (p.in + Tiles::kSlices * kSliceInputs - 1) / (Tiles::kSlices * kSliceInputs)};
    const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tiles::kStages; ++i) {
            init_barrier(product.full(i), 1 + 32 * kTokenWarps);
            init_barrier(product.free(i), kMultiplyWarps);
        }
        publish_barriers();
    }
    if (Tiles::kOfTokens) await_before();
    let_next_begin();
    for (int i = threadIdx.x; i < int(sizeof(Groups) / sizeof(int)); i += kThreads)
        reinterpret_cast<int*>(&parts.groups)[i] = __ldcg(reinterpret_cast<const int*>(p.groups) + i);
    __syncthreads();
    if (warp == 0) {
        int before = 0;
        for (int first = 0; first < parts.groups.experts; first += 32) {
            const int i = first + lane;
            const bool there = i < parts.groups.experts;
            int sum = there ? (parts.tokens(i) + Tiles::kMostTokens - 1) / Tiles::kMostTokens : 0;
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, sum, apart);
                if (lane >= apart) sum += other;
            }
            if (there) parts.before[i + 1] = before + sum;
            before += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane == 0) parts.before[0] = 0;
    }
    __syncthreads();
    if (warp < kMultiplyWarps) {
        take_registers<216>();
        if (!Tiles::kOfTokens) await_before();
        product.multiply();
    } else {
        leave_registers<72>();
        if (warp == kMultiplyWarps) product.copy_weights();
        if (!Tiles::kOfTokens) await_before();
        if (warp > kMultiplyWarps) product.copy_tokens(warp - kMultiplyWarps - 1);
    }
#endif
}

template <Activation kActivation, CodeKind kKind>
void launch(const ExpertProduct& p, cudaStream_t stream) {
    const auto kernel = expert_tiles_kernel<kActivation, kKind>;
    constexpr int kRingBytes = ExpertTiles<kActivation, kKind>::kRingBytes;
    const int blocks = attribute_of_device(cudaDevAttrMultiProcessorCount);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes),
          "the shared memory of expert_tiles");
    launch_dependent(kernel, dim3(unsigned(blocks)), kThreads, kRingBytes, stream, "expert_tiles", p);
}

template <Activation kActivation>
void launch(const ExpertProduct& p, cudaStream_t stream) {
    with_kind(p.coding.kind, [&](auto kind) { launch<kActivation, decltype(kind)::value>(p, stream); });
}

}  // namespace

void expert_tiles(const ExpertProduct& p, cudaStream_t stream) {
    switch (p.activation) {
        case Activation::none:
            return launch<Activation::none>(p, stream);
        case Activation::swiglu:
            return launch<Activation::swiglu>(p, stream);
        case Activation::relu_square:
            return launch<Activation::relu_square>(p, stream);
    }
}

bool takes_expert_tiles(const ExpertProduct& p) {
    const int pairs = p.tokens * p.per_token, most_tiles = pairs * ((p.out + kTileRows - 1) / kTileRows);
    const bool fills = most_tiles >= attribute_of_device(cudaDevAttrMultiProcessorCount);
    const bool is_faster = p.activation == Activation::none
                               ? p.tokens >= kFewestTiled || (p.in <= kShortInputs && fills)
                               : pairs > kFewPairs * p.experts;
    return is_faster && attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9 &&
           attribute_of_device(cudaDevAttrComputeCapabilityMinor) == 0;
}

}  // namespace cuda
}  // namespace apcbatch
