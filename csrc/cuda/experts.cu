// The products of experts with the rows of few tokens: reading their weights once, at the memory's speed.
//
// Blocks, one a multiprocessor, go round the tiles (an expert, some of its rows of weights, some of its
// tokens). The eight warps of a block share the inputs of a tile: warp w takes inputs 64 w to 64 w + 63 of
// every 512. It copies them into a ring of its own in shared memory, whole cache lines at a time, several
// stages ahead and across the ends of tiles, so that warps wait for each other only where a tile's sums meet.
//
// Invariant: an element of y is made by one sequence of operations that depends on `in` alone: not on how
// many rows come together, nor on which shape of tile was chosen for them. Must not know: what was chosen
// why.
#include <stdexcept>

#include "expert_source.cuh"

namespace apcbatch {
namespace cuda {
namespace {

// 16 rows of weights times 8 tokens, 16 inputs: a lane's halves of two rows, and of a token. Which 16 they
// are is the same for both, and nothing else matters.
__device__ __forceinline__ void multiply(float (&sums)[4], unsigned low, unsigned high, unsigned low_next,
                                         unsigned high_next, unsigned x, unsigned x_next) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(low), "r"(high), "r"(low_next), "r"(high_next), "r"(x), "r"(x_next));
}

__device__ __forceinline__ void clear(float (&sums)[4]) {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
}

// Multiplies one stage of the warp's part of the ring. A lane reads the halves of a matrix instruction's two
// rows, and of its token.
template <class T>
__device__ __forceinline__ void add_stage(const uint4* ring, int count, int lane,
                                          float (&sums)[T::kMTiles][T::kNTiles][4]) {
    const int row = lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int chunk = half * 4 + lane % 4;
        uint4 w[2 * T::kMTiles];
#pragma unroll
        for (int i = 0; i < 2 * T::kMTiles; ++i) w[i] = ring[chunk_of(i * 8 + row, chunk)];
#pragma unroll
        for (int j = 0; j < T::kNTiles; ++j) {
            if (j * kColumns >= count) break;
            const uint4 x = ring[chunk_of(T::kRows + j * kColumns + row, chunk)];
#pragma unroll
            for (int m = 0; m < T::kMTiles; ++m) {
                const uint4 &low = w[2 * m], &high = w[2 * m + 1];
                multiply(sums[m][j], low.x, high.x, low.y, high.y, x.x, x.y);
                multiply(sums[m][j], low.z, high.z, low.w, high.w, x.z, x.w);
            }
        }
    }
}

// Calls function(place in a warp's part of the sums, the lane's sum there) for each of them.
template <class T, class Function>
__device__ __forceinline__ void each_sum(float (&sums)[T::kMTiles][T::kNTiles][4], int lane,
                                         Function function) {
#pragma unroll
    for (int m = 0; m < T::kMTiles; ++m) {
#pragma unroll
        for (int j = 0; j < T::kNTiles; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = m * kWeightRows + i / 2 * 8 + lane / 4,
                          column = j * kColumns + lane % 4 * 2 + i % 2;
                function(row * T::kPitch + column, sums[m][j][i]);
            }
        }
    }
}

// The warps' sums meet: the later half joins the earlier one's, and then these, in ascending order.
template <class T>
__device__ __forceinline__ void gather(float (&sums)[T::kMTiles][T::kNTiles][4], float* shared, int warp,
                                       int lane) {
    float* mine = shared + warp % (kWarps / 2) * T::kSums;
    if (warp >= kWarps / 2) each_sum<T>(sums, lane, [&](int at, float sum) { mine[at] = sum; });
    __syncthreads();
    if (warp < kWarps / 2)
        each_sum<T>(sums, lane, [&](int at, float sum) { mine[at] = __fadd_rn(sum, mine[at]); });
    __syncthreads();
}

template <class T>
__device__ __forceinline__ float gathered(const float* shared, int row, int column) {
    const float* at = shared + row * T::kPitch + column;
    float sum = at[0];
#pragma unroll
    for (int warp = 1; warp < kWarps / 2; ++warp) sum = __fadd_rn(sum, at[warp * T::kSums]);
    return sum;
}

template <class T, bool kGated>
__device__ __forceinline__ void write(const ExpertProduct& p, const Groups& groups, const Place<T>& place,
                                      const float* shared) {
    constexpr int kRows = Source<T, kGated>::kRowsEach;
    for (int i = threadIdx.x; i < kRows * place.count; i += kThreads) {
        const int row = i % kRows, column = i / kRows, out = place.row_tile * kRows + row;
        if (out >= p.out) continue;
        const int at = place.first + column;
        const float sum = gathered<T>(shared, row, column);
        if constexpr (kGated) {
            const float up = gathered<T>(shared, row + kRows, column);
            static_cast<Bf16*>(p.y)[std::int64_t(at) * p.out + out] =
                narrow<Bf16>(sum / (1.0f + expf(-sum)) * up);
        } else {
            static_cast<float*>(p.y)[std::int64_t(groups.pairs[at]) * p.out + out] = sum;
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void fetch(const Groups* groups, Groups& shared) {
    const int* from = reinterpret_cast<const int*>(groups);
    for (int i = threadIdx.x; i < int(sizeof(Groups) / sizeof(int)); i += kThreads)
        reinterpret_cast<int*>(&shared)[i] = from[i];
    __syncthreads();
}

template <class T, bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    expert_product_kernel(const __grid_constant__ ExpertProduct p) {
    extern __shared__ uint4 memory[];
    __shared__ Groups groups;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    fetch(p.groups, groups);
    uint4* const ring = memory + warp * T::kStages * T::kStage;
    float* const shared = reinterpret_cast<float*>(memory + T::kRingBytes / 16);
    constexpr int kRows = Source<T, kGated>::kRowsEach;
    const int row_tiles = (p.out + kRows - 1) / kRows;
    Source<T, kGated> source(p, groups, row_tiles, warp, lane);
#pragma unroll
    for (int stage = 0; stage < T::kStages - 1; ++stage) source.copy(ring + stage * T::kStage);
    int filled = T::kStages - 1, read = 0;  // the stage that is copied next, and the one multiplied next
    Place<T> place;
    for (int tile = int(blockIdx.x); place.seek(groups, tile, row_tiles); tile += int(gridDim.x)) {
        float sums[T::kMTiles][T::kNTiles][4];
#pragma unroll
        for (int m = 0; m < T::kMTiles; ++m) {
#pragma unroll
            for (int j = 0; j < T::kNTiles; ++j) clear(sums[m][j]);
        }
        for (int step = warp; step * kStepInputs < p.in; step += kWarps) {
            __syncwarp();  // all lanes have read the stage that is written now
            source.copy(ring + filled * T::kStage);
            filled = filled + 1 == T::kStages ? 0 : filled + 1;
            wait_for_copies<T::kStages - 1>();
            __syncwarp();
            add_stage<T>(ring + read * T::kStage, place.count, lane, sums);
            read = read + 1 == T::kStages ? 0 : read + 1;
        }
        gather<T>(sums, shared, warp, lane);
        write<T, kGated>(p, groups, place, shared);
    }
}

int attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}

template <class T, bool kGated>
void launch(const ExpertProduct& p, cudaStream_t stream) {
    const auto kernel = expert_product_kernel<T, kGated>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kBytes);
    kernel<<<unsigned(attribute(cudaDevAttrMultiProcessorCount)), kThreads, T::kBytes, stream>>>(p);
    check_launch("expert_product");
}

template <class T>
void launch(const ExpertProduct& p, cudaStream_t stream) {
    p.gated ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
}

}  // namespace

void expert_product(const ExpertProduct& p, cudaStream_t stream) {
    if (p.tokens == 0) return;
    if (p.in % 8) throw std::invalid_argument("an expert's inputs must be a multiple of 8");
    if (p.tokens <= OneToEight::kTokens) return launch<OneToEight>(p, stream);
    if (p.tokens <= ToSixteen::kTokens) return launch<ToSixteen>(p, stream);
    launch<More>(p, stream);
}

bool takes_experts() {
    constexpr int kBytes = OneToEight::kBytes > ToSixteen::kBytes ? OneToEight::kBytes : ToSixteen::kBytes;
    return attribute(cudaDevAttrComputeCapabilityMajor) >= 9 &&
           attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >=
               (kBytes > More::kBytes ? kBytes : More::kBytes) + int(sizeof(Groups));
}

}  // namespace cuda
}  // namespace apcbatch
