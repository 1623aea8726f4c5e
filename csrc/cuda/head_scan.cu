// The gated delta rule and the scan of Mamba-2: recurrences over heads with matrix states (csrc/head_scan.h).
// Tokens go strictly in sequence, with the state in registers in float32, so a sequence may be cut anywhere,
// and decoding gives the bits of prefill.
//
// A block has 16, 32 or 64 columns of one value head of one sequence. Eight lanes share one, two or four of
// them. The rules and the order of a sum: see head_inputs.cuh.
#include <algorithm>
#include <stdexcept>

#include "async_copy.cuh"
#include "dependent_launch.cuh"
#include "head_inputs.cuh"
#include "short_sequences.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kThreads = 128, kPrepareWarps = 16;

// Maximum tokens of a sequence for a scan that is launched early, while the inputs are prepared. Its blocks
// then lie where that leaves room, several on one multiprocessor and none on others, which slows long scans.
constexpr std::int64_t kMostEarly = 64;

// Minimum blocks on a multiprocessor, which limits a thread's registers. padded: rows of a key; own: columns
// of a thread, of which one is for few blocks. Two are faster with more registers, but for the delta rule.
constexpr int least_blocks(int padded, int own, bool is_delta) {
    return padded > 128 || own == 1 || (own == 2 && !is_delta) ? 2 : padded * own > 256 ? 3 : 4;
}

constexpr int kMostOfTwo = 3;  // blocks of a multiprocessor, of threads with two columns

// Rows of a padded key, a multiple of 16 that a kernel exists for: 64, 128 or 256.
std::int64_t padded_keys(std::int64_t key_dim) { return key_dim <= 64 ? 64 : key_dim <= 128 ? 128 : 256; }

// Inputs of the scan in float32: for each key head, for each token, q, then k, padded with zeros; for each
// value head, for each token, decay and beta, or decay and dt.
struct Prepared {
    float* keys;          // (key_heads, tokens, 2, padded)
    float2* gates;        // (value_heads, tokens)
    std::int64_t tokens;  // of the batch

    Prepared(const HeadScanParams& p, std::int64_t num_tokens, void* memory)
        : keys(static_cast<float*>(memory)), tokens(num_tokens) {
        gates = reinterpret_cast<float2*>(keys + p.key_heads * tokens * 2 * padded_keys(p.key_dim));
    }
};

// A block prepares a token; a warp processes q and k of a head at a time.
template <class T, bool kDelta, int kPadded>
__global__ void __launch_bounds__(32 * kPrepareWarps)
    prepare_kernel(const __grid_constant__ HeadScanParams p, Prepared to) {
    constexpr int kEach = kPadded / 32;  // columns of a lane
    await_before();
    let_next_begin();  // only now: the scan reads its states before this kernel has ended
    const std::int64_t token = blockIdx.x;
    const int lane = int(threadIdx.x) % 32;
    const T* const a = static_cast<const T*>(p.a) + token * p.a_stride;
    const T* const b = static_cast<const T*>(p.b) + token * p.b_stride;
    // the gates' operands are loaded first, so that no block waits for them at its end
    int head = int(threadIdx.x);
    float of_a = 0.0f, of_b = 0.0f;
    const auto load_gates = [&] {
        if (head >= p.value_heads) return;
        of_a = widen(a[head]);
        if constexpr (kDelta) of_b = widen(b[head]);
    };
    load_gates();
    for (int item = int(threadIdx.x) / 32; item < p.key_heads; item += kPrepareWarps) {
        const T* from[2] = {static_cast<const T*>(p.q) + token * p.q_stride + item * p.key_dim,
                            static_cast<const T*>(p.k) + token * p.k_stride + item * p.key_dim};
        float rows[2][kEach];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int j = 0; j < kEach; ++j) {
                const int at = lane + 32 * j;
                rows[which][j] = at < p.key_dim ? widen(from[which][at]) : 0.0f;
            }
        }
        if constexpr (kDelta) {
            norm_key<true>(rows[0], p.key_dim);
            norm_key<false>(rows[1], p.key_dim);
        }
        float* row = to.keys + (item * to.tokens + token) * 2 * kPadded + lane;
#pragma unroll
        for (int j = 0; j < 2 * kEach; ++j) row[32 * j] = rows[j / kEach][j % kEach];
    }
    while (head < p.value_heads) {
        to.gates[head * to.tokens + token] = gates_of<kDelta>(p, p.A[head], p.dt_bias[head], of_a, of_b);
        head += 32 * kPrepareWarps;
        load_gates();
    }
}

// Chains of fma for each of a thread's columns: of even and of odd rows.
template <int kOwn>
struct Chains {
    float of[kOwn][2] = {};

    __device__ __forceinline__ void add(int c, int row, float a, float b) {
        of[c][row % 2] = __fmaf_rn(a, b, of[c][row % 2]);
    }
};

// The sum of a lane's chains for each of its columns.
template <int kOwn>
struct LaneSums {
    float of[kOwn] = {};

    LaneSums() = default;
    __device__ __forceinline__ explicit LaneSums(const Chains<kOwn>& chains) {
#pragma unroll
        for (int c = 0; c < kOwn; ++c) of[c] = __fadd_rn(chains.of[c][0], chains.of[c][1]);
    }

    // Adds lanes that differ in one bit, 1 << kLevel. While a lane has more than one column left, it keeps
    // half of them and gives the other half to the lane whose columns those are.
    template <int kLevel>
    __device__ __forceinline__ void join() {
        constexpr int kLeft = kOwn >> kLevel;  // columns left
        constexpr bool kHalves = kLeft > 1;
#pragma unroll
        for (int c = 0; c < (kHalves ? kLeft / 2 : 1); ++c) {
            const float given = of[kHalves ? 2 * c + 1 : 0];
            of[c] = __fadd_rn(of[kHalves ? 2 * c : 0], __shfl_xor_sync(0xffffffffu, given, 1 << kLevel));
        }
    }
};

// Sums over the lanes; of[0] is then the sum of column lane % kOwn. Several sums advance together, as each
// step waits for its exchange.
template <class... Sums>
__device__ __forceinline__ void join_lanes(Sums&... sums) {
    (sums.template join<0>(), ...);
    (sums.template join<1>(), ...);
    (sums.template join<2>(), ...);
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
    __device__ __forceinline__ static void each(float* slot, const Place& at, int lane, Use use) {
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

    // Exchanges element c of a row with element c ^ (lane % kOwn). Then element 0 is the column whose sum the
    // lane completes, and it gives away the sums of the others.
    __device__ __forceinline__ void turn(int lane) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) turn(rows[i], lane);
    }

    // Stores columns that have been turned.
    __device__ __forceinline__ void store(float* slot, const Place& at, int lane) const {
        if (!slot) return;
        each(slot, at, lane, [&](float* to, int i, int c) {
            float row[kOwn];
            memcpy(row, rows[i], sizeof row);
            turn(row, lane);
            if (at.aligned) {
                Vector all;
                memcpy(&all, row, sizeof all);
                __stcs(reinterpret_cast<Vector*>(to), all);
            } else {
                *to = row[c];
            }
        });
    }

  private:
    using Vector = std::conditional_t<kOwn == 1, float, std::conditional_t<kOwn == 2, float2, float4>>;

    __device__ __forceinline__ static void turn(float (&row)[kOwn], int lane) {
#pragma unroll
        for (int apart = 1; apart < kOwn; apart *= 2) {
#pragma unroll
            for (int c = 0; c < kOwn; ++c) {
                if (c & apart) continue;
                const float low = row[c], high = row[c + apart];
                row[c] = lane & apart ? high : low;
                row[c + apart] = lane & apart ? low : high;
            }
        }
    }
};

// Inputs of the tokens of four tiles in shared memory; token t of the sequence is at t % kTokens.
template <class T, int kPadded, int kColumns>
struct Ring {
    static constexpr int kTile = kPadded <= 128 ? 8 : 4, kTiles = 4, kTokens = kTile * kTiles;

    struct Token {
        alignas(16) float keys[2][kPadded];  // q, k
        alignas(16) T values[kColumns];
        float2 gates;

        // Reads a lane's rows of q (0) or k (1).
        __device__ __forceinline__ void read(int which, int lane, float (&to)[kPadded / kLanes]) const {
#pragma unroll
            for (int i = 0; i < kPadded / kLanes; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(&keys[which][i * kLanes + lane * 4]);
                to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
            }
        }
    };

    Token tokens[kTokens];
};

// Copies a block's inputs into the ring, a tile a call, in the order of the tokens.
template <class T, int kPadded, int kColumns>
struct Fetch {
    using Inputs = Ring<T, kPadded, kColumns>;
    static constexpr int kTile = Inputs::kTile, kKeyChunks = 2 * kPadded / 4;  // chunks: of a token
    static constexpr int kValueChunks = kColumns * int(sizeof(T)) / 16;
    static_assert(kThreads % kKeyChunks == 0 && kTile * kValueChunks <= kThreads);
    const float* keys;
    const char* values;
    const float2* gates;
    std::int64_t value_bytes;  // from a token to the next
    int left, columns;         // tokens; columns that the values have
    bool in_chunks;
    int next = 0;  // index of the next token

    __device__ __forceinline__ void operator()(Inputs& ring) {
        const int thread = int(threadIdx.x), count = min(kTile, left);
        typename Inputs::Token* const to = ring.tokens + next;
#pragma unroll
        for (int first = 0; first < kTile; first += kThreads / kKeyChunks) {
            const int t = first + thread / kKeyChunks, at = thread % kKeyChunks * 4;
            if (t < count) copy_chunk(&to[t].keys[0][0] + at, keys + t * 2 * kPadded + at, true);
        }
        if (thread < count) copy_eight(&to[thread].gates, gates + thread);
        if (in_chunks) {
            const int t = thread / kValueChunks, at = thread % kValueChunks * 16;
            if (t < count) {
                copy_chunk(reinterpret_cast<char*>(to[t].values) + at, values + t * value_bytes + at, true);
            }
        } else {
            for (int k = thread; k < count * kColumns; k += kThreads) {
                const int t = k / kColumns, c = k % kColumns;
                const T* row = reinterpret_cast<const T*>(values + t * value_bytes);
                to[t].values[c] = c < columns ? row[c] : T(0.0f);
            }
        }
        commit_copies();
        keys += kTile * 2 * kPadded;
        gates += kTile;
        values += kTile * value_bytes;
        left -= kTile;
        next = (next + kTile) % Inputs::kTokens;
    }
};

// kOwn: columns of a thread. The bits do not depend on it.
template <class T, bool kDelta, int kPadded, int kOwn>
__global__ void __launch_bounds__(kThreads, least_blocks(kPadded, kOwn, kDelta))
    head_scan_kernel(const __grid_constant__ HeadScanParams p, Prepared from, const std::int64_t* order) {
    constexpr int kColumns = kThreads / kLanes * kOwn;
    using Inputs = Ring<T, kPadded, kColumns>;
    using Token = typename Inputs::Token;
    constexpr int kRows = kPadded / kLanes, kTile = Inputs::kTile, kTokens = Inputs::kTokens;
    using State = ColumnsOfState<kPadded, kOwn>;
    __shared__ Inputs ring;
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
    const int length = int(at.end - at.begin);
    State S;
    S.load(slot_of(at.initial), place, lane);
    await_before();

    const T* values = static_cast<const T*>(p.v) + at.begin * p.v_stride + head * p.value_dim + first_column;
    const bool in_chunks = p.value_dim % kColumns == 0 && p.v_stride * sizeof(T) % 16 == 0 &&
                           reinterpret_cast<std::uintptr_t>(values) % 16 == 0;
    Fetch<T, kPadded, kColumns> fetch = {from.keys + (key_head * from.tokens + at.begin) * 2 * kPadded,
                                         reinterpret_cast<const char*>(values),
                                         from.gates + head * from.tokens + at.begin,
                                         p.v_stride * std::int64_t(sizeof(T)),
                                         length,
                                         int(p.value_dim - first_column),
                                         in_chunks};
#pragma unroll 1
    for (int tile = 0; tile < Inputs::kTiles - 1; ++tile) fetch(ring);
    // Waits for the next tile and the one after it, whose first tokens are read ahead.
    const auto arrive = [] {
        wait_for_copies<Inputs::kTiles - 3>();
        __syncthreads();
    };
    arrive();
    S.turn(lane);  // only now: the state was on its way

    // of the token before, whose sum is completed with the next m
    float* out =
        p.out + (at.begin - 1) * p.out_stride + head * p.out_head_stride + first_column + column + own;
    const bool writes = lane < kOwn && first_column + column + own < p.value_dim;
    // The next snapshot, and the token that it follows: as its position is loaded long before that token, no
    // token waits for it.
    std::int64_t snapshot = at.snapshot;
    int last;
    const auto find = [&] {
        last = snapshot < at.snapshots_end ? int(p.ragged.snapshot_positions[snapshot]) - 1 : length;
    };
    find();
    const auto keep = [&](int token) {
        if (token != last) return;
        const std::int64_t slot = p.ragged.snapshot_slots[snapshot++];
        find();
        S.store(slot_of(slot), place, lane);
    };

    // A thread of one column is mostly alone on its scheduler: it reads rows of k two tokens ahead and those
    // of q one, so that it does not wait for them. Others read them when they need them, which takes fewer
    // registers.
    constexpr bool kAhead = kOwn == 1 && kPadded <= 128;
    float even[kRows], odd[kRows], q[kRows];  // even, odd: k of such tokens; not ahead, `even` is of all
    ring.tokens[0].read(1, lane, even);
    if constexpr (kAhead) {
        ring.tokens[1].read(1, lane, odd);
        ring.tokens[0].read(0, lane, q);
    }
    float read = 0.0f;  // sum_i k_i S_i of the next token and the lane's own column
    if constexpr (kDelta) {
        Chains<kOwn> chains;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int c = 0; c < kOwn; ++c) chains.add(c, i, even[i], S.rows[i][c]);
        }
        LaneSums<kOwn> m(chains);
        join_lanes(m);
        read = m.of[0];
    }
    float2 gates = ring.tokens[0].gates;
    float value = widen(ring.tokens[0].values[column + own]);
    LaneSums<kOwn> o;  // of the token before
    float o_value = 0.0f;
    // k: rows of this token, at the end those of the next or the next but one. next_k: rows of the next
    // token.
    const auto step = [&](auto& k, auto& next_k, const Token& now, const Token& after,
                          const Token& after_that, bool has_before) {
        const float decay = gates.x, this_value = value;
        const float own_u =
            kDelta ? __fmul_rn(gates.y, __fsub_rn(value, __fmul_rn(decay, read))) : __fmul_rn(gates.y, value);
        gates = after.gates;
        value = widen(after.values[column + own]);
        float u[kOwn];
#pragma unroll
        for (int c = 0; c < kOwn; ++c) u[c] = c ? __shfl_xor_sync(0xffffffffu, own_u, c) : own_u;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int c = 0; c < kOwn; ++c) {
                S.rows[i][c] = __fmaf_rn(k[i], u[c], __fmul_rn(decay, S.rows[i][c]));
            }
        }
        if constexpr (kAhead) {
            after_that.read(1, lane, k);
        } else {
            after.read(1, lane, k);
            now.read(0, lane, q);
        }
        [[maybe_unused]] Chains<kOwn> of_m;
        Chains<kOwn> of_o;
        if constexpr (kDelta) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
                for (int c = 0; c < kOwn; ++c) of_m.add(c, i, next_k[i], S.rows[i][c]);
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int c = 0; c < kOwn; ++c) of_o.add(c, i, q[i], S.rows[i][c]);
        }
        if constexpr (kAhead) after.read(0, lane, q);
        if constexpr (kDelta) {
            LaneSums<kOwn> m(of_m);
            join_lanes(m, o);
            read = m.of[0];
        } else {
            join_lanes(o);
            o.of[0] = __fmaf_rn(D, o_value, o.of[0]);
        }
        if (writes && has_before) *out = o.of[0];
        out += p.out_stride;
        o = LaneSums<kOwn>(of_o);
        o_value = this_value;
    };
    unsigned now = 0;  // index of the token
#pragma unroll 1
    for (int first = 0; first < length; first += kTile) {
        if (first) arrive();
        fetch(ring);
        const int end = min(first + kTile, length);
        if constexpr (kAhead) {
#pragma unroll 1
            for (int token = first; token < end; token += 2) {
                const Token &one = ring.tokens[now], &two = ring.tokens[now + 1];
                now = (now + 2) % kTokens;
                const Token &three = ring.tokens[now], &four = ring.tokens[now + 1];
                if (token + 1 == end || unsigned(last - token) < 2) {
                    step(even, odd, one, two, three, token > 0);
                    keep(token);
                    if (token + 1 == end) break;
                    step(odd, even, two, three, four, true);
                    keep(token + 1);
                } else {  // without a branch between the two
                    step(even, odd, one, two, three, token > 0);
                    step(odd, even, two, three, four, true);
                }
            }
        } else {
#pragma unroll 1
            for (int token = first; token < end; ++token) {
                const Token& here = ring.tokens[now];
                now = (now + 1) % kTokens;
                step(even, even, here, ring.tokens[now], ring.tokens[now], token > 0);
                keep(token);
            }
        }
    }
    join_lanes(o);
    if constexpr (!kDelta) o.of[0] = __fmaf_rn(D, o_value, o.of[0]);
    if (writes) *out = o.of[0];
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

// Returns the columns of a thread. One is for the delta rule alone, whose tokens wait for each other, and for
// so few columns that they leave multiprocessors without a block. Otherwise the number with which the busiest
// multiprocessor needs less time: its blocks have 20 parts of a token's time each with four columns, and 11
// with two, besides 3 in all.
int own_columns(const HeadScanParams& p) {
    constexpr int kColumns = kThreads / kLanes;
    const std::int64_t multiprocessors = attribute_of_device(cudaDevAttrMultiProcessorCount);
    const std::int64_t heads = p.value_heads * p.ragged.num_sequences;
    const auto busiest = [&](int own) {
        const std::int64_t blocks = heads * ((p.value_dim + kColumns * own - 1) / (kColumns * own));
        return (blocks + multiprocessors - 1) / multiprocessors;
    };
    if (2 * heads * p.value_dim < 3 * kColumns * multiprocessors) return 1;
    if (p.value_dim <= 2 * kColumns) return 2;
    return busiest(2) > kMostOfTwo || 20 * busiest(4) <= 11 * busiest(2) + 3 ? 4 : 2;
}

template <class T, bool kDelta, int kPadded>
void launch_scan(const HeadScanParams& p, const Batch& batch, const Prepared& prepared, int own,
                 cudaStream_t stream) {
    constexpr int kLeast = kDelta ? 1 : 2, kMost = kPadded <= 128 ? 4 : 2;
    const int columns = std::clamp(own ? own : own_columns(p), kLeast, kMost);
    if (columns == kLeast) return launch_scan<T, kDelta, kPadded, kLeast>(p, batch, prepared, stream);
    if (columns == 2) return launch_scan<T, kDelta, kPadded, 2>(p, batch, prepared, stream);
    launch_scan<T, kDelta, kPadded, kMost>(p, batch, prepared, stream);
}

template <class T, bool kDelta>
void launch(const HeadScanParams& p, const Batch& batch, int own, void* memory, cudaStream_t stream) {
    const Prepared prepared(p, batch.num_tokens, memory);
    const auto run = [&](auto padded) {
        constexpr int kPadded = decltype(padded)::value;
        launch_dependent(prepare_kernel<T, kDelta, kPadded>, dim3(unsigned(batch.num_tokens)),
                         32 * kPrepareWarps, 0, stream, "head_scan", p, prepared);
        launch_scan<T, kDelta, kPadded>(p, batch, prepared, own, stream);
    };
    switch (padded_keys(p.key_dim)) {
        case 64:
            return run(std::integral_constant<int, 64>());
        case 128:
            return run(std::integral_constant<int, 128>());
        default:
            return run(std::integral_constant<int, 256>());
    }
}

}  // namespace

std::int64_t head_scan_bytes(const HeadScanParams& p, std::int64_t num_tokens) {
    return 4 * num_tokens * 2 * (p.key_heads * padded_keys(p.key_dim) + p.value_heads);
}

void head_scan(const HeadScanParams& p, const Batch& batch, int own, void* memory, cudaStream_t stream) {
    if (batch.num_tokens == 0) return;
    if (p.key_dim > kMostKeyDim) {
        throw std::invalid_argument("the CUDA scan over heads has at most " + std::to_string(kMostKeyDim) +
                                    " columns of a key; it got " + std::to_string(p.key_dim));
    }
    if (batch.longest == 1 && takes_head_step(p)) return head_step(p, batch, stream);
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        p.rule == HeadRule::delta ? launch<T, true>(p, batch, own, memory, stream)
                                  : launch<T, false>(p, batch, own, memory, stream);
    });
}

}  // namespace cuda
}  // namespace apcbatch
