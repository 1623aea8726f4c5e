// The gated delta rule and the scan of Mamba-2: recurrences over heads with matrix states (csrc/head_scan.h).
// Tokens go strictly in sequence, with the state in registers in float32, so a sequence may be cut anywhere,
// and decoding gives the bits of prefill.
//
// A block has 32 columns of one value head of one sequence. Eight lanes share two columns: lane l has the
// rows 32 j + 4 l + r of the state, r < 4. A sum over the rows is four chains of fma over j, ascending, one
// for each r, then (0 + 1) + (2 + 3), then lanes that differ in their first bit, second, third. The rules,
// where S_i is row i of the state:
//
// delta: m = decay sum_i k_i S_i;  u = beta (v - m);  S_i = fma(k_i, u, decay S_i);  o = sum_i q_i S_i
// ssd: u = dt x;  S_i = fma(B_i, u, decay S_i);  y = fma(D, x, sum_i C_i S_i)
#include <stdexcept>

#include "async_copy.cuh"
#include "dependent_launch.cuh"
#include "heads.h"
#include "quads.cuh"
#include "short_sequences.cuh"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kLanes = 8, kPair = 2, kColumns = 32, kThreads = kLanes * kColumns / kPair;
constexpr int kPrepareWarps = 4;

// Maximum tokens of a sequence for a scan that is launched early, while the inputs are prepared. Its blocks
// then lie where that leaves room, several on one multiprocessor and none on others, which slows long scans.
constexpr std::int64_t kMostEarly = 64;

// Rows of a padded key, a multiple of 16 that a kernel exists for: 64, 128 or 256.
std::int64_t padded_keys(std::int64_t key_dim) { return key_dim <= 64 ? 64 : key_dim <= 128 ? 128 : 256; }

// Inputs of the scan in float32: for each token and key head q, then k, padded with zeros; for each token and
// value head decay and beta, or decay and dt.
struct Prepared {
    float* keys;    // (t, key_heads, 2, padded)
    float2* gates;  // (t, value_heads)
    int padded;

    Prepared(const HeadScanParams& p, std::int64_t num_tokens, void* memory)
        : keys(static_cast<float*>(memory)), padded(int(padded_keys(p.key_dim))) {
        gates = reinterpret_cast<float2*>(keys + num_tokens * p.key_heads * 2 * padded);
    }
};

// A block prepares a token; a warp processes q or k of a head at a time.
template <class T, bool kDelta>
__global__ void __launch_bounds__(32 * kPrepareWarps)
    prepare_kernel(const __grid_constant__ HeadScanParams p, Prepared to) {
    let_next_begin();
    await_before();
    const std::int64_t token = blockIdx.x;
    const int lane = int(threadIdx.x) % 32;
    for (int item = int(threadIdx.x) / 32; item < 2 * int(p.key_heads); item += kPrepareWarps) {
        const int head = item / 2;
        const bool is_k = item % 2 == 1;
        const T* from = static_cast<const T*>(is_k ? p.k : p.q) + token * (is_k ? p.k_stride : p.q_stride) +
                        head * p.key_dim;
        float factor = 1.0f, divisor = 1.0f;
        if constexpr (kDelta) {
            float sum = 0.0f;
            for (int at = lane; at < p.key_dim; at += 32)
                sum = __fmaf_rn(widen(from[at]), widen(from[at]), sum);
            factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(warp_sum(sum), 1e-6f)));
            if (!is_k) divisor = __fsqrt_rn(float(p.key_dim));
        }
        float* row = to.keys + ((token * p.key_heads + head) * 2 + item % 2) * to.padded;
        for (int at = lane; at < to.padded; at += 32) {
            float value = at < p.key_dim ? widen(from[at]) : 0.0f;
            if constexpr (kDelta) value = __fdiv_rn(__fmul_rn(value, factor), divisor);
            row[at] = value;
        }
    }
    for (int head = int(threadIdx.x); head < p.value_heads; head += 32 * kPrepareWarps) {
        const float a = widen(static_cast<const T*>(p.a)[token * p.a_stride + head]);
        float dt = softplus(__fadd_rn(a, p.dt_bias[head])), gate = dt;
        if constexpr (kDelta) {
            gate = sigmoid(widen(static_cast<const T*>(p.b)[token * p.b_stride + head]));
        } else {
            gate = dt = fminf(fmaxf(dt, p.dt_min), p.dt_max);
        }
        const float decay = exp2_unit(__fmul_rn(__fmul_rn(p.A[head], dt), kLog2e));
        to.gates[token * p.value_heads + head] = make_float2(decay, gate);
    }
}

// Four chains of fma for each column of a thread.
struct Chains {
    float of[kPair][4] = {};

    __device__ __forceinline__ void add(int c, int r, float a, float b) {
        of[c][r] = __fmaf_rn(a, b, of[c][r]);
    }

    // Returns the sum of column c over the lanes, to all of them.
    __device__ __forceinline__ float sum(int c) const { return over_lanes(joined(c), 1); }

    // Returns the sum of column 0 to the even lanes, and of column 1 to the odd ones: half the exchanges.
    __device__ __forceinline__ float own_sum(int lane) const {
        const float first = joined(0), second = joined(1);
        const bool odd = lane % 2 == 1;
        const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
        return over_lanes(__fadd_rn(odd ? second : first, other), 2);
    }

  private:
    __device__ __forceinline__ float joined(int c) const {
        return __fadd_rn(__fadd_rn(of[c][0], of[c][1]), __fadd_rn(of[c][2], of[c][3]));
    }

    static __device__ __forceinline__ float over_lanes(float total, int lane) {
        for (; lane < kLanes; lane *= 2) {
            total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, lane));
        }
        return total;
    }
};

// A lane's rows of two adjacent columns of the state.
template <int kRows>
struct PairState {
    float rows[kRows][kPair];

    static __device__ __forceinline__ int row_of(int i, int lane) {
        return i / 4 * 4 * kLanes + lane * 4 + i % 4;
    }

    // columns: address of row 0 of each column, null past the last one. paired: they are adjacent and
    // aligned.
    __device__ __forceinline__ void load(float* const (&columns)[kPair], int key_dim, int stride, int lane,
                                         bool paired) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = row_of(i, lane);
            float2 both = make_float2(0.0f, 0.0f);
            if (row < key_dim && columns[0]) {
                if (paired) {
                    both = __ldcs(reinterpret_cast<const float2*>(columns[0] + row * stride));
                } else {
                    both.x = columns[0][row * stride];
                    if (columns[1]) both.y = columns[1][row * stride];
                }
            }
            rows[i][0] = both.x;
            rows[i][1] = both.y;
        }
    }

    __device__ __forceinline__ void store(float* const (&columns)[kPair], int key_dim, int stride, int lane,
                                          bool paired) const {
        if (!columns[0]) return;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = row_of(i, lane);
            if (row >= key_dim) continue;
            if (paired) {
                __stcs(reinterpret_cast<float2*>(columns[0] + row * stride),
                       make_float2(rows[i][0], rows[i][1]));
            } else {
                columns[0][row * stride] = rows[i][0];
                if (columns[1]) columns[1][row * stride] = rows[i][1];
            }
        }
    }
};

// Inputs of a tile in shared memory. keys: q, then k of each token.
template <int kPadded>
struct TileInputs {
    static constexpr int kTokens = kPadded <= 128 ? 16 : 8;
    alignas(16) float keys[kTokens][2][kPadded];
    float values[kTokens][kColumns];
    float2 gates[kTokens];

    // Reads a lane's rows of q (0) or k (1) of token t.
    template <int kRows>
    __device__ __forceinline__ void read(int t, int which, int lane, float (&to)[kRows]) const {
#pragma unroll
        for (int i = 0; i < kRows; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&keys[t][which][i * kLanes + lane * 4]);
            to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
        }
    }
};

template <class T, bool kDelta, int kPadded>
__global__ void __launch_bounds__(kThreads, kPadded <= 128 ? 4 : 2)
    head_scan_kernel(const __grid_constant__ HeadScanParams p, Prepared from, const std::int64_t* order) {
    using Inputs = TileInputs<kPadded>;
    constexpr int kRows = kPadded / kLanes, kTokens = Inputs::kTokens;
    constexpr int kShare = kTokens * kColumns / kThreads;  // values of a tile that a thread loads
    __shared__ Inputs tiles[2];
    let_next_begin();
    const int lane = int(threadIdx.x) % kLanes, pair = int(threadIdx.x) / kLanes * kPair;
    const std::int64_t first_column = std::int64_t(blockIdx.x) * kColumns;
    const std::int64_t head = blockIdx.y, key_head = head / (p.value_heads / p.key_heads);
    const int key_dim = int(p.key_dim), stride = int(p.lanes);
    const float D = kDelta ? 0.0f : p.D[head];
    std::int64_t offset[kPair];  // of row 0 of each column in a slot; -1: past the last column
#pragma unroll
    for (int j = 0; j < kPair; ++j) {
        const std::int64_t c = first_column + pair + j, block = head * (p.value_dim / p.lanes) + c / p.lanes;
        offset[j] = c < p.value_dim ? block * p.key_dim * p.lanes + c % p.lanes : -1;
    }
    const bool paired = p.lanes % 2 == 0 && p.state_stride % 2 == 0 &&
                        reinterpret_cast<std::uintptr_t>(p.state) % sizeof(float2) == 0;
    const auto columns_of = [&](std::int64_t slot, float*(&columns)[kPair]) {
#pragma unroll
        for (int j = 0; j < kPair; ++j) {
            columns[j] = slot < 0 || offset[j] < 0 ? nullptr : p.state + slot * p.state_stride + offset[j];
        }
    };
    await_before();
    const Where at = where(p.ragged, order[blockIdx.z]);

    T values[kShare];  // of the next tile, and gates
    float2 gates;
    const auto fetch = [&](std::int64_t first, Inputs& to) {
        const int count = int(min(std::int64_t(kTokens), at.end - first));
        constexpr int kChunks = 2 * kPadded / 4;  // of 16 bytes, of a token
#pragma unroll
        for (int k = int(threadIdx.x); k < kTokens * kChunks; k += kThreads) {
            const int t = k / kChunks, chunk = k % kChunks;
            const float* keys = from.keys + ((first + t) * p.key_heads + key_head) * 2 * kPadded;
            if (t < count) copy_chunk(&to.keys[t][0][0] + chunk * 4, keys + chunk * 4, true);
        }
        commit_copies();
#pragma unroll
        for (int k = 0; k < kShare; ++k) {
            const int t = int(threadIdx.x) / kColumns + k * (kThreads / kColumns);
            const std::int64_t v = first_column + threadIdx.x % kColumns;
            values[k] = T(0.0f);
            if (t < count && v < p.value_dim) {
                values[k] = static_cast<const T*>(p.v)[(first + t) * p.v_stride + head * p.value_dim + v];
            }
        }
        if (int(threadIdx.x) < count) gates = from.gates[(first + threadIdx.x) * p.value_heads + head];
    };
    const auto arrive = [&](Inputs& to) {
        wait_for_copies<0>();
#pragma unroll
        for (int k = 0; k < kShare; ++k) {
            const int t = int(threadIdx.x) / kColumns + k * (kThreads / kColumns);
            to.values[t][threadIdx.x % kColumns] = widen(values[k]);
        }
        if (int(threadIdx.x) < kTokens) to.gates[threadIdx.x] = gates;
        __syncthreads();
    };

    fetch(at.begin, tiles[0]);
    PairState<kRows> S;
    float* columns[kPair];
    columns_of(at.initial, columns);
    S.load(columns, key_dim, stride, lane, paired);
    arrive(tiles[0]);
    float* out = p.out + at.begin * p.out_stride + head * p.out_head_stride + first_column + pair + lane;
    const bool writes = lane < kPair && first_column + pair + lane < p.value_dim;
    // The next snapshot, and the token that it follows: as its position is loaded long before that token, no
    // token waits for it.
    std::int64_t snapshot = at.snapshot, last;
    const auto find = [&] {
        last = snapshot < at.snapshots_end ? at.begin + p.ragged.snapshot_positions[snapshot] - 1 : at.end;
    };
    find();
    int odd = 0;
#pragma unroll 1
    for (std::int64_t first = at.begin; first < at.end; first += kTokens, odd = 1 - odd) {
        const bool more = first + kTokens < at.end;
        if (more) fetch(first + kTokens, tiles[1 - odd]);
        const Inputs& tile = tiles[odd];
        const int count = int(min(std::int64_t(kTokens), at.end - first));
        float k[kRows], read[kPair] = {};  // read: sum_i k_i S_i of the next token
        tile.read(0, 1, lane, k);
        if constexpr (kDelta) {
            Chains m;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
                for (int c = 0; c < kPair; ++c) m.add(c, i % 4, k[i], S.rows[i][c]);
            }
#pragma unroll
            for (int c = 0; c < kPair; ++c) read[c] = m.sum(c);
        }
        int t = 0;
#pragma unroll 1
        while (t < count) {
            const int stop =
                int(min(std::int64_t(count), last + 1 - first));  // a run without a snapshot inside
#pragma unroll 2
            for (; t < stop; ++t) {
                const float decay = tile.gates[t].x, gate = tile.gates[t].y;
                const float2 v = *reinterpret_cast<const float2*>(&tile.values[t][pair]);
                const float value[kPair] = {v.x, v.y};
                float u[kPair], next[kRows];
#pragma unroll
                for (int c = 0; c < kPair; ++c) {
                    u[c] = kDelta ? __fmul_rn(gate, __fsub_rn(value[c], __fmul_rn(decay, read[c])))
                                  : __fmul_rn(gate, value[c]);
                }
                tile.read(min(t + 1, count - 1), 1, lane, next);
                Chains o, m;
#pragma unroll
                for (int i = 0; i < kRows; i += 4) {
                    const float4 four =
                        *reinterpret_cast<const float4*>(&tile.keys[t][0][i * kLanes + lane * 4]);
                    const float q[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
#pragma unroll
                        for (int c = 0; c < kPair; ++c) {
                            float& s = S.rows[i + r][c];
                            s = __fmaf_rn(k[i + r], u[c], __fmul_rn(decay, s));
                            o.add(c, r, q[r], s);
                            if constexpr (kDelta) m.add(c, r, next[i + r], s);
                        }
                    }
                }
                if constexpr (kDelta) {
#pragma unroll
                    for (int c = 0; c < kPair; ++c) read[c] = m.sum(c);
                }
                float y = o.own_sum(lane);
                if constexpr (!kDelta) y = __fmaf_rn(D, lane % 2 == 1 ? value[1] : value[0], y);
                if (writes) *out = y;
                out += p.out_stride;
#pragma unroll
                for (int i = 0; i < kRows; ++i) k[i] = next[i];
            }
            if (first + t != last + 1 || snapshot >= at.snapshots_end) continue;
            columns_of(p.ragged.snapshot_slots[snapshot++], columns);
            find();
            S.store(columns, key_dim, stride, lane, paired);
        }
        if (more) arrive(tiles[1 - odd]);
    }
    columns_of(at.final, columns);
    S.store(columns, key_dim, stride, lane, paired);
}

template <class T, bool kDelta, int kPadded>
void launch_scan(const HeadScanParams& p, const Batch& batch, const Prepared& prepared, cudaStream_t stream) {
    const dim3 grid(unsigned((p.value_dim + kColumns - 1) / kColumns), unsigned(p.value_heads),
                    unsigned(p.ragged.num_sequences));
    const auto kernel = head_scan_kernel<T, kDelta, kPadded>;
    if (batch.longest <= kMostEarly) {
        return launch_dependent(kernel, grid, kThreads, 0, stream, "head_scan", p, prepared, batch.order);
    }
    kernel<<<grid, kThreads, 0, stream>>>(p, prepared, batch.order);
    check_launch("head_scan");
}

template <class T, bool kDelta>
void launch(const HeadScanParams& p, const Batch& batch, void* memory, cudaStream_t stream) {
    const Prepared prepared(p, batch.num_tokens, memory);
    launch_dependent(prepare_kernel<T, kDelta>, dim3(unsigned(batch.num_tokens)), 32 * kPrepareWarps, 0,
                     stream, "head_scan", p, prepared);
    switch (prepared.padded) {
        case 64:
            return launch_scan<T, kDelta, 64>(p, batch, prepared, stream);
        case 128:
            return launch_scan<T, kDelta, 128>(p, batch, prepared, stream);
        default:
            return launch_scan<T, kDelta, 256>(p, batch, prepared, stream);
    }
}

}  // namespace

std::int64_t head_scan_bytes(const HeadScanParams& p, std::int64_t num_tokens) {
    return 4 * num_tokens * 2 * (p.key_heads * padded_keys(p.key_dim) + p.value_heads);
}

void head_scan(const HeadScanParams& p, const Batch& batch, void* memory, cudaStream_t stream) {
    if (batch.num_tokens == 0) return;
    if (p.key_dim > kMostKeyDim) {
        throw std::invalid_argument("the CUDA scan over heads has at most " + std::to_string(kMostKeyDim) +
                                    " columns of a key; it got " + std::to_string(p.key_dim));
    }
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        p.rule == HeadRule::delta ? launch<T, true>(p, batch, memory, stream)
                                  : launch<T, false>(p, batch, memory, stream);
    });
}

}  // namespace cuda
}  // namespace apcbatch
