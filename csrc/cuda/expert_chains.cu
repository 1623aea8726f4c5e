// The products of experts with the rows of few tokens, each element one chain (see products.h), so that a
// token has the bits that it has among many. The weights are read once for every 8 or 32 tokens of an expert.
//
// Crews go round tiles (an expert, some of its rows of weights, some of its tokens) over all inputs; so no
// sums meet. A crew copies a tile into a ring of its own in shared memory, whole cache lines at a time,
// several stages ahead and across the ends of tiles, and each of its warps multiplies 16 of the rows. For few
// tokens a warp is a crew, so that nobody waits for another; for more a block is one, so that its warps share
// the tokens' rows. Of a gated tile a warp has 8 of the gate's rows and 8 of the up's, so that both sums of
// an element come to one lane. Must not know: what was chosen why.
#include <stdexcept>

#include "dependent_launch.cuh"
#include "expert_source.cuh"
#include "matrix_unit.cuh"

namespace apcbatch {
namespace cuda {
namespace {

// kCrew: warps.
template <int kCrew_, int kNTiles_, int kInputs_, int kStages_>
struct ChainTile {
    static constexpr int kCrew = kCrew_, kNTiles = kNTiles_, kInputs = kInputs_, kStages = kStages_,
                         kTokens = kNTiles * kColumns;
    static constexpr int kCrews = kWarps / kCrew, kRows = kCrew * kWeightRows;
    static constexpr int kChunks = kInputs / 8;  // of a row in one stage
    static constexpr int kRowsAtOnce = 32 * kCrew / kChunks;
    static constexpr int kStage = (kRows + kTokens) * kChunks;
    static constexpr int kBytes = kCrews * kStage * kStages * 16;
    static_assert(kRows % kRowsAtOnce == 0 && kBytes <= 200 * 1024, "a tile is copied as a whole, and fits");

    static __device__ __forceinline__ void meet() {
        if constexpr (kCrew == 1) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    }

    // Where a stage has this chunk of this row: the four rows that half a warp reads at once lie in different
    // banks.
    static __device__ __forceinline__ int at(int row, int chunk) {
        return row * kChunks + (chunk ^ row % 4 * 2);
    }
};
// The longer the piece of a row that is asked for at once, the faster the memory.
using ChainEight = ChainTile<1, 1, 256, 2>;
using ChainMore = ChainTile<kWarps, 4, 128, 4>;

// Where a crew is: a tile, and an input of it.
template <class T, bool kGated>
struct ChainPlace {
    static constexpr int kOfWarp = kGated ? kWeightRows / 2 : kWeightRows;  // rows of y
    static constexpr int kRowsEach = T::kCrew * kOfWarp;
    Place<T> place;
    int tile, input = 0;
    bool any;

    __device__ __forceinline__ ChainPlace(const Groups& groups, int row_tiles, int crew)
        : tile(int(blockIdx.x) + crew * int(gridDim.x)), any(place.seek(groups, tile, row_tiles)) {}

    // The next stage; true where the tile ends.
    __device__ __forceinline__ bool go_on(const ExpertProduct& p, const Groups& groups, int row_tiles) {
        input += T::kInputs;
        if (input < p.in) return false;
        input = 0;
        tile += int(gridDim.x) * T::kCrews;
        any = place.seek(groups, tile, row_tiles);
        return true;
    }
};

// Neighbouring threads copy neighbouring chunks of a row.
template <class T, bool kGated>
__device__ __forceinline__ void copy_stage(uint4* stage, const ExpertProduct& p, const Groups& groups,
                                           const ChainPlace<T, kGated>& at) {
    constexpr int kOfWarp = ChainPlace<T, kGated>::kOfWarp, kRowsEach = ChainPlace<T, kGated>::kRowsEach;
    const int thread = threadIdx.x % (32 * T::kCrew), row = thread / T::kChunks, chunk = thread % T::kChunks;
    const int input = at.input + chunk * 8;
    const bool there = input < p.in;
    const auto* weights = static_cast<const Bf16*>(p.weights[groups.expert[at.place.active]]);
#pragma unroll
    for (int i = 0; i < T::kRows; i += T::kRowsAtOnce) {
        const int warp = (i + row) / kWeightRows, of_warp = (i + row) % kWeightRows;
        const int out = at.place.row_tile * kRowsEach + warp * kOfWarp + of_warp % kOfWarp;
        const std::int64_t from = out + (of_warp < kOfWarp ? 0 : p.out);  // the up's after the gate's
        const bool is_row = there && out < p.out;
        copy_chunk(stage + T::at(i + row, chunk), is_row ? weights + from * p.in + input : p.x, is_row);
    }
#pragma unroll
    for (int i = 0; i < T::kTokens; i += T::kRowsAtOnce) {
        if (i >= at.place.count) break;
        const bool is_token = there && i + row < at.place.count;
        const int place = at.place.first + min(i + row, at.place.count - 1);
        const std::int64_t from = kGated ? groups.pairs[place] / p.per_token : place;
        if (i + row < T::kTokens)
            copy_inputs(stage + T::at(T::kRows + i + row, chunk),
                        is_token ? static_cast<const Bf16*>(p.x) + from * p.in + input : p.x, is_token);
    }
}

// A lane has four inputs of a row of each 16; which they are is the same for all.
template <class T>
__device__ __forceinline__ uint2 four_inputs(const uint4* stage, int row, int step, int quarter) {
    const uint4* chunk = stage + T::at(row, step * 2 + quarter / 2);
    return reinterpret_cast<const uint2*>(chunk)[quarter % 2];
}

template <class T>
__device__ __forceinline__ void add_stage(float (&sums)[T::kNTiles][4], const uint4* stage, int count) {
    const int token = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    const int row = int(threadIdx.x) / 32 % T::kCrew * kWeightRows + token;
#pragma unroll 4
    for (int step = 0; step < T::kInputs / 16; ++step) {
        const uint2 low = four_inputs<T>(stage, row, step, quarter),
                    high = four_inputs<T>(stage, row + kWeightRows / 2, step, quarter);
        const std::uint32_t a[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
        for (int j = 0; j < T::kNTiles; ++j) {
            if (j * kColumns >= count) break;
            const uint2 x = four_inputs<T>(stage, T::kRows + j * kColumns + token, step, quarter);
            multiply_add<Bf16>(sums[j], a, x.x, x.y);
        }
    }
}

template <class T, bool kGated>
__device__ __forceinline__ void put(const ExpertProduct& p, const Groups& groups, const Place<T>& place,
                                    const float (&sums)[T::kNTiles][4]) {
    constexpr int kOfWarp = ChainPlace<T, kGated>::kOfWarp, kRowsEach = ChainPlace<T, kGated>::kRowsEach;
    const int lane = threadIdx.x % 32, warp = int(threadIdx.x) / 32 % T::kCrew;
#pragma unroll
    for (int j = 0; j < T::kNTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = j * kColumns + lane % 4 * 2 + i % 2, at = place.first + column;
            if (column >= place.count || (kGated && i >= 2)) continue;
            const int half = i / 2 * (kWeightRows / 2);
            const int out = place.row_tile * kRowsEach + warp * kOfWarp + half + lane / 4;
            if (out >= p.out) continue;
            if constexpr (kGated) {  // as one product stores both, and silu_mul goes on
                const float gate = widen(narrow<Bf16>(sums[j][i])),
                            up = widen(narrow<Bf16>(sums[j][i % 2 + 2]));
                static_cast<Bf16*>(p.y)[std::int64_t(at) * p.out + out] =
                    narrow<Bf16>(gate / (1.0f + expf(-gate)) * up);
            } else {
                static_cast<float*>(p.y)[std::int64_t(groups.pairs[at]) * p.out + out] = sums[j][i];
            }
        }
    }
}

template <class T, bool kGated>
__global__ void __launch_bounds__(kThreads, 1) expert_chains_kernel(const __grid_constant__ ExpertProduct p) {
    extern __shared__ uint4 memory[];
    __shared__ Groups groups;
    let_next_begin();
    await_before();
    for (int i = threadIdx.x; i < int(sizeof(Groups) / sizeof(int)); i += kThreads)
        reinterpret_cast<int*>(&groups)[i] = reinterpret_cast<const int*>(p.groups)[i];
    __syncthreads();
    constexpr int kRows = ChainPlace<T, kGated>::kRowsEach;
    const int crew = int(threadIdx.x) / 32 / T::kCrew, row_tiles = (p.out + kRows - 1) / kRows;
    uint4* const ring = memory + crew * T::kStages * T::kStage;
    ChainPlace<T, kGated> copied(groups, row_tiles, crew), multiplied = copied;
    const auto copy = [&](int slot) {
        if (copied.any) {
            copy_stage<T, kGated>(ring + slot * T::kStage, p, groups, copied);
            copied.go_on(p, groups, row_tiles);
        }
        commit_copies();
    };
#pragma unroll 1
    for (int slot = 0; slot < T::kStages - 1; ++slot) copy(slot);
    int filled = T::kStages - 1, read = 0;  // the slot that is copied next, and the one multiplied next
    float sums[T::kNTiles][4] = {};
    while (multiplied.any) {
        T::meet();  // all have read the slot that is written now
        copy(filled);
        filled = filled + 1 == T::kStages ? 0 : filled + 1;
        wait_for_copies<T::kStages - 1>();
        T::meet();
        add_stage<T>(sums, ring + read * T::kStage, multiplied.place.count);
        read = read + 1 == T::kStages ? 0 : read + 1;
        const Place<T> place = multiplied.place;
        if (multiplied.go_on(p, groups, row_tiles)) {
            put<T, kGated>(p, groups, place, sums);
#pragma unroll
            for (float (&tile)[4] : sums) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
        }
    }
}

template <class T, bool kGated>
void launch(const ExpertProduct& p, cudaStream_t stream) {
    const auto kernel = expert_chains_kernel<T, kGated>;
    int device = 0, blocks = 0;
    check(cudaGetDevice(&device), "the current device");
    check(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device), "the multiprocessors");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kBytes),
          "the shared memory of expert_chains");
    launch_dependent(kernel, dim3(unsigned(blocks)), kThreads, T::kBytes, stream, "expert_chains", p);
}

template <class T>
void launch(const ExpertProduct& p, cudaStream_t stream) {
    p.gated ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

}  // namespace

void expert_chains(const ExpertProduct& p, cudaStream_t stream) {
    if (p.tokens == 0) return;
    if (p.in % 16) throw std::invalid_argument("an expert's inputs must be a multiple of 16 for chains");
    if (p.tokens <= ChainEight::kTokens) return launch<ChainEight>(p, stream);
    launch<ChainMore>(p, stream);
}

}  // namespace cuda
}  // namespace apcbatch
