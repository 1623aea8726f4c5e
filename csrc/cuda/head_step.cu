// One token of each sequence in the recurrences over heads (head_scan.cu), for decode passes. States are
// nearly all of its traffic, each read once and written once.
//
// A block has one block of a head's state, which is contiguous: one bulk copy brings it into shared memory.
// Six blocks share a multiprocessor, and the copies of some are under way while others compute. A thread has
// four columns of the rows of one lane, see head_inputs.cuh, so that a warp's accesses are of whole rows.
#include "dependent_launch.cuh"
#include "head_inputs.cuh"
#include "shared_barrier.cuh"
#include "short_sequences.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kOwn = 4;  // columns of a thread
constexpr int kMostColumns = 64, kMostThreads = kLanes * kMostColumns / kOwn, kBlocks = 6;

// Chains of a thread's columns, and their sum over the lanes.
struct Sums {
    float of[kOwn][2] = {};

    __device__ __forceinline__ void add(int row, float key, const float4& state) {
        const float values[kOwn] = {state.x, state.y, state.z, state.w};
#pragma unroll
        for (int c = 0; c < kOwn; ++c) of[c][row % 2] = __fmaf_rn(key, values[c], of[c][row % 2]);
    }

    // Called by all threads of the block. lanes: scratch for a row of columns of each lane.
    __device__ __forceinline__ void join(float (&lanes)[kLanes][kMostColumns], int lane, int column,
                                         float (&sums)[kOwn]) const {
#pragma unroll
        for (int c = 0; c < kOwn; ++c) sums[c] = __fadd_rn(of[c][0], of[c][1]);
        *reinterpret_cast<float4*>(&lanes[lane][column]) = make_float4(sums[0], sums[1], sums[2], sums[3]);
        __syncthreads();
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
            float all[kLanes];
#pragma unroll
            for (int other = 0; other < kLanes; ++other) all[other] = lanes[other][column + c];
            sums[c] = tree_sum<kLanes>(all);
        }
    }
};

template <class T, bool kDelta, int kKeys>
__global__ void __launch_bounds__(kMostThreads, kBlocks)
    head_step_kernel(const __grid_constant__ HeadScanParams p, const std::int64_t* present) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ float4 memory[];  // the block of the state
    __shared__ alignas(16) float keys[2][kKeys];
    __shared__ alignas(16) float lanes[kLanes][kMostColumns];
    __shared__ std::uint64_t barrier;
    let_next_begin();
    // No kernel of a pass writes its lists.
    const Where at = where(p.ragged, blockIdx.z);
    const std::int64_t head = blockIdx.y, key_head = head / (p.value_heads / p.key_heads);
    const int columns = int(p.lanes), bytes = kKeys * columns * int(sizeof(float));
    const auto block_of = [&](std::int64_t slot) {
        return slot < 0 ? nullptr
                        : reinterpret_cast<float4*>(p.state + slot * p.state_stride +
                                                    (head * gridDim.x + blockIdx.x) * kKeys * columns);
    };
    const float4* const from = block_of(at.initial);
    if (threadIdx.x == 0) {
        init_barrier(shared_address(&barrier), 1);
        publish_barriers();
        if (from) bulk_prefetch(from, bytes);
    }
    const float A = p.A[head], dt_bias = p.dt_bias[head], D = kDelta ? 0.0f : p.D[head];
    const bool is_absent = is_padding(present, at, 1);
    await_before();
    if (is_absent) return;
    if (threadIdx.x == 0 && from) {
        arrive_expecting(shared_address(&barrier), bytes);
        bulk_copy(shared_address(memory), from, bytes, shared_address(&barrier));
    }
    const int quads = columns / kOwn, lane = int(threadIdx.x) / quads;
    const int quad = int(threadIdx.x) % quads, column = quad * kOwn;
    const auto row_of = [&](const void* of, std::int64_t stride, std::int64_t first) {
        return static_cast<const T*>(of) + at.begin * stride + first;
    };
    const float of_a = widen(*row_of(p.a, p.a_stride, head));
    const float of_b = kDelta ? widen(*row_of(p.b, p.b_stride, head)) : 0.0f;
    const std::int64_t first = std::int64_t(blockIdx.x) * columns + column;
    float v[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) v[c] = widen(row_of(p.v, p.v_stride, head * p.value_dim + first)[c]);
    const T *q = row_of(p.q, p.q_stride, key_head * kKeys), *k = row_of(p.k, p.k_stride, key_head * kKeys);
    if (threadIdx.x < 64) {  // a warp for q and one for k
        const bool is_key = threadIdx.x >= 32;
        float row[kKeys / 32];
#pragma unroll
        for (int j = 0; j < kKeys / 32; ++j) row[j] = widen((is_key ? k : q)[threadIdx.x % 32 + 32 * j]);
        if constexpr (kDelta) is_key ? norm_key<false>(row, kKeys) : norm_key<true>(row, kKeys);
#pragma unroll
        for (int j = 0; j < kKeys / 32; ++j) keys[is_key][threadIdx.x % 32 + 32 * j] = row[j];
    }
    const float2 gates = gates_of<kDelta>(p, A, dt_bias, of_a, of_b);
    __syncthreads();
    if (from) wait_barrier(shared_address(&barrier), 0);

    // Calls use(row of the lane, index of its quad in the block, k, q) for each row of the lane.
    const auto each_row = [&](auto use) {
#pragma unroll 2
        for (int j = 0; j < kKeys / (4 * kLanes); ++j) {
            const int row = (j * kLanes + lane) * 4, i = row * quads + quad;
            const float4 of_k = *reinterpret_cast<const float4*>(&keys[1][row]),
                         of_q = *reinterpret_cast<const float4*>(&keys[0][row]);
            use(0, i, of_k.x, of_q.x), use(1, i + quads, of_k.y, of_q.y);
            use(2, i + 2 * quads, of_k.z, of_q.z), use(3, i + 3 * quads, of_k.w, of_q.w);
        }
    };
    const auto state = [&](int i) { return from ? memory[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f); };
    const float decay = gates.x;
    float u[kOwn];
    if constexpr (kDelta) {
        Sums read;
        each_row([&](int row, int i, float k, float) { read.add(row, k, state(i)); });
        read.join(lanes, lane, column, u);
        __syncthreads();  // the lanes' sums are read
#pragma unroll
        for (int c = 0; c < kOwn; ++c) u[c] = __fmul_rn(gates.y, __fsub_rn(v[c], __fmul_rn(decay, u[c])));
    } else {
#pragma unroll
        for (int c = 0; c < kOwn; ++c) u[c] = __fmul_rn(gates.y, v[c]);
    }
    float4* const to = block_of(at.final);
    const bool is_kept = at.snapshot < at.snapshots_end;
    Sums o;
    each_row([&](int row, int i, float k, float q) {
        float4 s = state(i);
        s.x = __fmaf_rn(k, u[0], __fmul_rn(decay, s.x)), s.y = __fmaf_rn(k, u[1], __fmul_rn(decay, s.y));
        s.z = __fmaf_rn(k, u[2], __fmul_rn(decay, s.z)), s.w = __fmaf_rn(k, u[3], __fmul_rn(decay, s.w));
        o.add(row, q, s);
        if (to) __stcs(to + i, s);
        if (is_kept) memory[i] = s;
    });
    for (std::int64_t s = at.snapshot; s < at.snapshots_end; ++s) {
        float4* const kept = block_of(p.ragged.snapshot_slots[s]);
        if (kept) each_row([&](int, int i, float, float) { kept[i] = memory[i]; });
    }
    float sums[kOwn];
    o.join(lanes, lane, column, sums);
    if (lane > 0) return;
    float* const out = p.out + at.begin * p.out_stride + head * p.out_head_stride + first;
#pragma unroll
    for (int c = 0; c < kOwn; ++c) out[c] = kDelta ? sums[c] : __fmaf_rn(D, v[c], sums[c]);
#endif
}

}  // namespace

bool takes_head_step(const HeadScanParams& p) {
    return (p.key_dim == 128 || p.key_dim == 256) && p.lanes % 16 == 0 && p.lanes >= 32 &&
           p.lanes <= kMostColumns && p.state_stride % 4 == 0 &&
           reinterpret_cast<std::uintptr_t>(p.state) % 16 == 0 && begins_early();
}

void head_step(const HeadScanParams& p, const Batch& batch, cudaStream_t stream) {
    const auto launch = [&](auto kernel) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared),
              "the shared memory of head_step");
        const int bytes = int(p.key_dim * p.lanes * std::int64_t(sizeof(float)));
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
              "the shared memory of head_step");
        const dim3 blocks(unsigned(p.value_dim / p.lanes), unsigned(p.value_heads),
                          unsigned(p.ragged.num_sequences));
        launch_dependent(kernel, blocks, unsigned(kLanes * p.lanes / kOwn), bytes, stream, "head_step", p,
                         batch.present);
    };
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        const bool is_delta = p.rule == HeadRule::delta;
        if (p.key_dim == 128)
            return launch(is_delta ? head_step_kernel<T, true, 128> : head_step_kernel<T, false, 128>);
        launch(is_delta ? head_step_kernel<T, true, 256> : head_step_kernel<T, false, 256>);
    });
}

}  // namespace cuda
}  // namespace apcbatch
