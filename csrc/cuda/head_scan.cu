// The gated delta rule and the scan of Mamba-2: recurrences over heads with matrix states (csrc/head_scan.h).
// Tokens go strictly in sequence, with the state in registers in float32, so a sequence may be cut anywhere,
// and decoding gives the bits of prefill.
//
// A block has 16, 32 or 64 columns of one value head of one sequence. Eight lanes share one, two or four of
// them: lane l has the rows 32 j + 4 l + r of the state, r < 4. A sum over the rows is four chains of fma
// over j, ascending, one for each r, then (0 + 1) + (2 + 3), then lanes that differ in their first bit,
// second, third. The rules, where S_i is row i of the state:
//
// delta: m = decay sum_i k_i S_i;  u = beta (v - m);  S_i = fma(k_i, u, decay S_i);  o = sum_i q_i S_i
// ssd: u = dt x;  S_i = fma(B_i, u, decay S_i);  y = fma(D, x, sum_i C_i S_i)
#include <algorithm>
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

constexpr int kLanes = 8, kThreads = 128, kPrepareWarps = 16;

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
    await_before();
    let_next_begin();  // only now: the scan reads its states before this kernel has ended
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

// Four chains of fma for each of a thread's columns.
template <int kOwn>
struct Chains {
    float of[kOwn][4] = {};

    __device__ __forceinline__ void add(int c, int r, float a, float b) {
        of[c][r] = __fmaf_rn(a, b, of[c][r]);
    }
};

// The sum of a lane's chains for each of its columns.
template <int kOwn>
struct LaneSums {
    float of[kOwn] = {};

    LaneSums() = default;
    __device__ __forceinline__ explicit LaneSums(const Chains<kOwn>& chains) {
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
            of[c] = __fadd_rn(__fadd_rn(chains.of[c][0], chains.of[c][1]),
                              __fadd_rn(chains.of[c][2], chains.of[c][3]));
        }
    }

    // Adds lanes that differ in one bit, 1 << kLevel. While a lane has more than one column left, it keeps
    // half of them and gives the other half away.
    template <int kLevel>
    __device__ __forceinline__ void join(int lane) {
        constexpr int kApart = 1 << kLevel, kLeft = kOwn >> kLevel;  // kLeft: columns left
        const bool odd = lane & kApart;
#pragma unroll
        for (int c = 0; c < (kLeft > 1 ? kLeft / 2 : 1); ++c) {
            const float kept = kLeft > 1 && odd ? of[kLeft > 1 ? 2 * c + 1 : 0] : of[kLeft > 1 ? 2 * c : 0];
            const float given = kLeft > 1 && odd ? of[2 * c] : of[kLeft > 1 ? 2 * c + 1 : 0];
            of[c] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, given, kApart));
        }
    }
};

// Sums over the lanes; of[0] is then the sum of column lane % kOwn. Several sums advance together, as each
// step waits for its exchange.
template <class... Sums>
__device__ __forceinline__ void join_lanes(int lane, Sums&... sums) {
    (sums.template join<0>(lane), ...);
    (sums.template join<1>(lane), ...);
    (sums.template join<2>(lane), ...);
}

// A lane's rows of kOwn adjacent columns of the state.
template <int kPadded, int kOwn>
struct ColumnsOfState {
    static constexpr int kRows = kPadded / kLanes;
    float rows[kRows][kOwn];

    // Where the columns lie in a slot, from column `first` on: see HeadScanParams::state.
    struct Place {
        std::int64_t head_block, first, value_dim;
        int key_dim, lanes;
        bool aligned;  // the columns are adjacent in memory and one access loads them
    };

    // Calls use(address, row, column) for each row that the state has: once if aligned, with the address of
    // the first column, else for each column. row, column: indices in `rows`.
    template <class Use>
    __device__ __forceinline__ void each(float* slot, const Place& at, int lane, Use use) {
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
            const std::int64_t column = at.first + c;
            if (column >= at.value_dim || (at.aligned && c)) break;
            float* from =
                slot + (at.head_block + column / at.lanes) * at.key_dim * at.lanes + column % at.lanes;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const int row = i / 4 * 4 * kLanes + lane * 4 + i % 4;
                if (row < at.key_dim) use(from + row * at.lanes, i, c);
            }
        }
    }

    // slot: address of a slot's state, or null for zeros.
    __device__ __forceinline__ void load(float* slot, const Place& at, int lane) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int c = 0; c < kOwn; ++c) rows[i][c] = 0.0f;
        }
        if (!slot) return;
        each(slot, at, lane, [&](const float* from, int i, int c) {
            if (at.aligned) {
                const auto all = __ldcs(reinterpret_cast<const Vector*>(from));
                memcpy(rows[i], &all, sizeof all);
            } else {
                rows[i][c] = *from;
            }
        });
    }

    __device__ __forceinline__ void store(float* slot, const Place& at, int lane) {
        if (!slot) return;
        each(slot, at, lane, [&](float* to, int i, int c) {
            if (at.aligned) {
                Vector all;
                memcpy(&all, rows[i], sizeof all);
                __stcs(reinterpret_cast<Vector*>(to), all);
            } else {
                *to = rows[i][c];
            }
        });
    }

  private:
    using Vector = std::conditional_t<kOwn == 1, float, std::conditional_t<kOwn == 2, float2, float4>>;
};

// Inputs of a tile in shared memory. keys: q, then k of each token.
template <class T, int kPadded, int kColumns>
struct TileInputs {
    static constexpr int kTokens = kPadded <= 128 ? 16 : 8;
    alignas(16) float keys[kTokens][2][kPadded];
    alignas(16) T values[kTokens][kColumns];
    float2 gates[kTokens];

    // Reads a lane's rows of q (0) or k (1) of token t: the four that begin at row i of the thread's.
    __device__ __forceinline__ void read(int t, int which, int lane, int i, float (&to)[4]) const {
        const float4 four = *reinterpret_cast<const float4*>(&keys[t][which][i * kLanes + lane * 4]);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }
};

// kOwn: columns of a thread. The bits do not depend on it.
template <class T, bool kDelta, int kPadded, int kOwn>
__global__ void __launch_bounds__(kThreads, kPadded <= 128 ? 4 : 2)
    head_scan_kernel(const __grid_constant__ HeadScanParams p, Prepared from, const std::int64_t* order) {
    constexpr int kColumns = kThreads / kLanes * kOwn;
    using Inputs = TileInputs<T, kPadded, kColumns>;
    constexpr int kRows = kPadded / kLanes, kTokens = Inputs::kTokens;
    using State = ColumnsOfState<kPadded, kOwn>;
    __shared__ Inputs tiles[2];
    let_next_begin();
    const int lane = int(threadIdx.x) % kLanes, column = int(threadIdx.x) / kLanes * kOwn;
    const int own = lane % kOwn;  // the column whose sums this lane completes
    const std::int64_t first_column = std::int64_t(blockIdx.x) * kColumns;
    const std::int64_t head = blockIdx.y, key_head = head / (p.value_heads / p.key_heads);
    const float D = kDelta ? 0.0f : p.D[head];
    const typename State::Place place = {
        head * (p.value_dim / p.lanes),
        first_column + column,
        p.value_dim,
        int(p.key_dim),
        int(p.lanes),
        p.lanes % kOwn == 0 && p.state_stride % kOwn == 0 &&
            reinterpret_cast<std::uintptr_t>(p.state) % (kOwn * sizeof(float)) == 0};
    const auto slot_of = [&](std::int64_t slot) {
        return slot < 0 ? nullptr : p.state + slot * p.state_stride;
    };
    // prepare_kernel writes neither the lists of the batch nor states
    const Where at = where(p.ragged, order[blockIdx.z]);
    State S;
    S.load(slot_of(at.initial), place, lane);
    await_before();

    const char* first_value =
        reinterpret_cast<const char*>(static_cast<const T*>(p.v) + head * p.value_dim + first_column);
    const std::int64_t value_bytes = p.v_stride * std::int64_t(sizeof(T));
    const bool in_chunks = p.value_dim % kColumns == 0 && value_bytes % 16 == 0 &&
                           reinterpret_cast<std::uintptr_t>(first_value) % 16 == 0;
    const auto fetch = [&](std::int64_t first, Inputs& to) {
        const int count = int(min(std::int64_t(kTokens), at.end - first));
        constexpr int kChunks = 2 * kPadded / 4, kValueChunks = kColumns * int(sizeof(T)) / 16;
#pragma unroll
        for (int k = int(threadIdx.x); k < kTokens * kChunks; k += kThreads) {
            const int t = k / kChunks, chunk = k % kChunks;
            const float* keys = from.keys + ((first + t) * p.key_heads + key_head) * 2 * kPadded;
            if (t < count) copy_chunk(&to.keys[t][0][0] + chunk * 4, keys + chunk * 4, true);
        }
        if (int(threadIdx.x) < count) {
            copy_eight(&to.gates[threadIdx.x], &from.gates[(first + threadIdx.x) * p.value_heads + head]);
        }
        if (in_chunks) {
            for (int k = int(threadIdx.x); k < count * kValueChunks; k += kThreads) {
                const int t = k / kValueChunks, chunk = k % kValueChunks * 16;
                copy_chunk(reinterpret_cast<char*>(to.values[t]) + chunk,
                           first_value + (first + t) * value_bytes + chunk, true);
            }
        } else {
            for (int k = int(threadIdx.x); k < count * kColumns; k += kThreads) {
                const int t = k / kColumns, c = k % kColumns;
                const T* row = reinterpret_cast<const T*>(first_value + (first + t) * value_bytes);
                to.values[t][c] = first_column + c < p.value_dim ? row[c] : T(0.0f);
            }
        }
        commit_copies();
    };
    const auto arrive = [&] {
        wait_for_copies<0>();
        __syncthreads();
    };

    fetch(at.begin, tiles[0]);
    arrive();
    // of the token before the next one, whose sum is written last
    float* out =
        p.out + (at.begin - 1) * p.out_stride + head * p.out_head_stride + first_column + column + own;
    const bool writes = lane < kOwn && first_column + column + own < p.value_dim;
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
        float read = 0.0f;  // sum_i k_i S_i of the next token and the lane's own column
        if constexpr (kDelta) {
            Chains<kOwn> chains;
#pragma unroll
            for (int i = 0; i < kRows; i += 4) {
                float k[4];
                tile.read(0, 1, lane, i, k);
#pragma unroll
                for (int r = 0; r < 4; ++r) {
#pragma unroll
                    for (int c = 0; c < kOwn; ++c) chains.add(c, r, k[r], S.rows[i + r][c]);
                }
            }
            LaneSums<kOwn> m(chains);
            join_lanes(lane, m);
            read = m.of[0];
        }
        // A thread of one column is mostly alone on its scheduler: it reads operands a token ahead, so that
        // it does not wait for them. Others read rows when they need them, which takes fewer registers.
        constexpr bool kAhead = kOwn == 1 && kPadded <= 128;
        constexpr int kHeld = kAhead ? kRows : 4;
        float k[kHeld], q[kHeld], next[kHeld];
        const auto read_rows = [&](int t, int which, float (&to)[kHeld]) {
            if constexpr (kAhead) {
#pragma unroll
                for (int i = 0; i < kRows; i += 4) {
                    tile.read(t, which, lane, i, reinterpret_cast<float (&)[4]>(to[i]));
                }
            }
        };
        read_rows(0, 1, k);
        read_rows(0, 0, q);
        read_rows(min(1, count - 1), 1, next);
        float2 gates = tile.gates[0];
        float value = widen(tile.values[0][column + own]);
        int t = 0;
#pragma unroll 1
        while (t < count) {
            const int begin = t,
                      stop = int(min(std::int64_t(count), last + 1 - first));  // no snapshot inside
            LaneSums<kOwn> o;      // of the token before, joined with those of the next m
            float o_value = 0.0f;  // that token's value
            const auto write = [&](bool is_there) {
                if constexpr (!kDelta) o.of[0] = __fmaf_rn(D, o_value, o.of[0]);
                if (writes && is_there) *out = o.of[0];
            };
#pragma unroll 2
            for (; t < stop; ++t) {
                const int after = min(t + 1, count - 1);
                float next_q[kHeld], next_but_one[kHeld];
                read_rows(after, 0, next_q);
                read_rows(min(t + 2, count - 1), 1, next_but_one);
                const float decay = gates.x;
                const float own_u = kDelta ? __fmul_rn(gates.y, __fsub_rn(value, __fmul_rn(decay, read)))
                                           : __fmul_rn(gates.y, value);
                const float this_value = value;
                gates = tile.gates[after];
                value = widen(tile.values[after][column + own]);
                float u[kOwn];
#pragma unroll
                for (int c = 0; c < kOwn; ++c) {
                    u[c] = kOwn == 1 ? own_u : __shfl_sync(0xffffffffu, own_u, c, kLanes);
                }
                Chains<kOwn> of_m, of_o;
#pragma unroll
                for (int i = 0; i < kRows; i += 4) {
                    const int at = kAhead ? i : 0;
                    if constexpr (!kAhead) {
                        tile.read(t, 1, lane, i, k);
                        tile.read(t, 0, lane, i, q);
                        if constexpr (kDelta) tile.read(after, 1, lane, i, next);
                    }
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
#pragma unroll
                        for (int c = 0; c < kOwn; ++c) {
                            float& s = S.rows[i + r][c];
                            s = __fmaf_rn(k[at + r], u[c], __fmul_rn(decay, s));
                            if constexpr (kDelta) of_m.add(c, r, next[at + r], s);
                            of_o.add(c, r, q[at + r], s);
                        }
                    }
                }
                if constexpr (kDelta) {
                    LaneSums<kOwn> m(of_m);
                    join_lanes(lane, m, o);
                    read = m.of[0];
                } else {
                    join_lanes(lane, o);
                }
                write(t > begin);
                out += p.out_stride;
                o = LaneSums<kOwn>(of_o);
                o_value = this_value;
                if constexpr (kAhead) {
#pragma unroll
                    for (int i = 0; i < kRows; ++i)
                        k[i] = next[i], q[i] = next_q[i], next[i] = next_but_one[i];
                }
            }
            join_lanes(lane, o);
            write(true);
            if (first + t != last + 1 || snapshot >= at.snapshots_end) continue;
            const std::int64_t slot = p.ragged.snapshot_slots[snapshot++];
            find();
            S.store(slot_of(slot), place, lane);
        }
        if (more) arrive();
    }
    S.store(slot_of(at.final), place, lane);
}

template <class T, bool kDelta, int kPadded, int kOwn>
void launch_scan(const HeadScanParams& p, const Batch& batch, const Prepared& prepared, cudaStream_t stream) {
    constexpr int kColumns = kThreads / kLanes * kOwn;
    const dim3 grid(unsigned((p.value_dim + kColumns - 1) / kColumns), unsigned(p.value_heads),
                    unsigned(p.ragged.num_sequences));
    const auto kernel = head_scan_kernel<T, kDelta, kPadded, kOwn>;
    if (batch.longest <= kMostEarly) {
        return launch_dependent(kernel, grid, kThreads, 0, stream, "head_scan", p, prepared, batch.order);
    }
    kernel<<<grid, kThreads, 0, stream>>>(p, prepared, batch.order);
    check_launch("head_scan");
}

// Returns the columns of a thread: as many as leave most multiprocessors enough blocks.
int own_columns(const HeadScanParams& p) {
    const double columns = double(p.value_heads) * double(p.ragged.num_sequences) * double(p.value_dim);
    const double each = columns / attribute_of_device(cudaDevAttrMultiProcessorCount);
    return each >= 96 ? 4 : each >= 24 ? 2 : 1;
}

template <class T, bool kDelta, int kPadded>
void launch_scan(const HeadScanParams& p, const Batch& batch, const Prepared& prepared, int own,
                 cudaStream_t stream) {
    constexpr int kMost = kPadded <= 128 ? 4 : 2;
    switch (std::min(own ? own : own_columns(p), kMost)) {
        case 1:
            return launch_scan<T, kDelta, kPadded, 1>(p, batch, prepared, stream);
        case 2:
            return launch_scan<T, kDelta, kPadded, 2>(p, batch, prepared, stream);
        default:
            return launch_scan<T, kDelta, kPadded, kMost>(p, batch, prepared, stream);
    }
}

template <class T, bool kDelta>
void launch(const HeadScanParams& p, const Batch& batch, int own, void* memory, cudaStream_t stream) {
    const Prepared prepared(p, batch.num_tokens, memory);
    launch_dependent(prepare_kernel<T, kDelta>, dim3(unsigned(batch.num_tokens)), 32 * kPrepareWarps, 0,
                     stream, "head_scan", p, prepared);
    switch (prepared.padded) {
        case 64:
            return launch_scan<T, kDelta, 64>(p, batch, prepared, own, stream);
        case 128:
            return launch_scan<T, kDelta, 128>(p, batch, prepared, own, stream);
        default:
            return launch_scan<T, kDelta, 256>(p, batch, prepared, own, stream);
    }
}

}  // namespace

HeadScanParams head_scan_over(HeadScanParams p, const Batch& batch, const void* x, std::int64_t x_stride,
                              const void* gates, std::int64_t gates_stride, float* out) {
    const std::int64_t size = bytes_of(p.dtype), keys = p.key_heads * p.key_dim;
    const char *columns = static_cast<const char*>(x), *gate = static_cast<const char*>(gates);
    p.ragged = batch.ragged;
    p.q = columns;
    p.k = columns + keys * size;
    p.v = columns + 2 * keys * size;
    p.q_stride = p.k_stride = p.v_stride = x_stride;
    p.b = gate;
    p.a = p.rule == HeadRule::delta ? gate + p.value_heads * size : gate;
    p.b_stride = p.a_stride = gates_stride;
    p.out = out;
    p.out_stride = p.value_heads * p.value_dim;
    p.out_head_stride = p.value_dim;
    return p;
}

std::int64_t head_scan_bytes(const HeadScanParams& p, std::int64_t num_tokens) {
    return 4 * num_tokens * 2 * (p.key_heads * padded_keys(p.key_dim) + p.value_heads);
}

void head_scan(const HeadScanParams& p, const Batch& batch, int own, void* memory, cudaStream_t stream) {
    if (batch.num_tokens == 0) return;
    if (p.key_dim > kMostKeyDim) {
        throw std::invalid_argument("the CUDA scan over heads has at most " + std::to_string(kMostKeyDim) +
                                    " columns of a key; it got " + std::to_string(p.key_dim));
    }
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        p.rule == HeadRule::delta ? launch<T, true>(p, batch, own, memory, stream)
                                  : launch<T, false>(p, batch, own, memory, stream);
    });
}

}  // namespace cuda
}  // namespace apcbatch
