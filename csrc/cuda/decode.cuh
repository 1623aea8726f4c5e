// A decode pass of a stack of Mamba mixers in one launch: each block is one of a fixed crew that stays for
// the whole pass. One of its threads streams the block's share of all weights, in the order of their use,
// into shared memory; the others compute, and meet the other blocks four times a layer, where a vector is
// complete: the convolved x, the low-rank (dt, B, C), the gated y, the residual. While they wait the weights
// go on arriving.
//
// The arithmetic of convolution and state is that of causal_conv and selective_scan. Must not know: Python.
#pragma once

#include "decode_block.cuh"
#include "quads.cuh"
#include "step_state.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kDecodeThreads = kReaders + 64;  // a warp streams, one prefetches
constexpr int kMostDecodeStates = kStatesAtOnce, kMostDecodeTaps = 4;

// What a kernel of width 1, 2 or 4 has room for.
template <class T>
constexpr int most_inner(int width) {
    return width * (sizeof(T) == 4 ? 1280 : 2560);
}
template <class T>
constexpr int most_hidden(int width) {
    return most_inner<T>(width > 1 ? width / 2 : 1);
}

// Floats in which a block collects the warps' parts of results, or has the weights of a norm.
__host__ __device__ constexpr int decode_partials(int hidden) {
    return kItems * kPartialStride > hidden ? kItems * kPartialStride : hidden;
}

// Bytes of shared memory beside the stream's slots.
constexpr int decode_scratch(int rows, int hidden, int low) {
    return kStreamBarriers * 8 + 2 * int(sizeof(DecodeLayer)) + 16 +
           4 * (decode_partials(hidden) + rows * kWarps + rows * low);
}

// The slots that a sequence's state comes from and goes to; -1 for none.
struct StateSlots {
    int initial, final, kept;

    __device__ StateSlots(const RaggedParams& ragged, int sequence)
        : initial(int(ragged.initial_slots[sequence])), final(int(ragged.final_slots[sequence])) {
        const std::int64_t first = ragged.snapshot_cu[sequence];
        kept = first < ragged.snapshot_cu[sequence + 1] ? int(ragged.snapshot_slots[first]) : -1;
    }
};

// in_proj's results: one half goes on as z, the other through the convolution (see causal_conv.cu).
template <class T>
struct Convolve {
    const DecodeParams& p;
    const DecodeLayer& layer;
    T window[kMostDecodeTaps];  // the newest last
    float weight[kMostDecodeTaps], bias;
    const StateSlots& slots;

    __device__ Convolve(const DecodeParams& params, const DecodeLayer& of, const StateSlots& its)
        : p(params), layer(of), slots(its) {}

    __device__ T* state(std::int64_t slot, int tap, int c) const {
        return static_cast<T*>(layer.conv) + slot * p.conv_stride + std::int64_t(tap) * p.shape.d_inner + c;
    }

    __device__ void prepare(int c, int b) {
        if (c >= p.shape.d_inner) return;
        const int width = p.shape.width;
        bias = layer.conv_bias ? layer.conv_bias[c] : 0.0f;
#pragma unroll
        for (int k = 0; k < kMostDecodeTaps; ++k) {
            weight[k] = layer.conv_weight[c * width + max(k - kMostDecodeTaps + width, 0)];
        }
#pragma unroll
        for (int k = 0; k < kMostDecodeTaps - 1 && width > 1; ++k) {
            const T kept = *state(max(slots.initial, 0), max(k - kMostDecodeTaps + width, 0), c);
            window[k] = slots.initial < 0 ? T(0.0f) : kept;
        }
    }

    __device__ void finish(int row, int b, float sum) {
        const int d = p.shape.d_inner, skipped = kMostDecodeTaps - p.shape.width;
        const T raw = narrow<T>(layer.in_bias ? sum + layer.in_bias[row] : sum);
        if (row >= d) {
            static_cast<T*>(p.z)[b * d + row - d] = raw;
            return;
        }
        window[kMostDecodeTaps - 1] = raw;
        float value = bias;
#pragma unroll
        for (int k = 0; k < kMostDecodeTaps; ++k) {
            if (k >= skipped) value = __fmaf_rn(weight[k], widen(window[k]), value);
        }
        static_cast<T*>(p.x)[b * d + row] = narrow<T>(silu(value));
#pragma unroll
        for (int k = 0; k < kMostDecodeTaps - 1; ++k) {
            if (k < skipped) continue;
            if (slots.kept >= 0) *state(slots.kept, k - skipped, row) = window[k + 1];
            if (slots.final >= 0) *state(slots.final, k - skipped, row) = window[k + 1];
        }
    }
};

// Results that are stored: (kRows, columns).
template <class Out>
struct Store {
    Out* to;
    int columns;

    __device__ void prepare(int, int) {}
    __device__ void finish(int row, int b, float sum) {
        to[std::int64_t(b) * columns + row] = narrow<Out>(sum);
    }
};

// out_proj's results: added to the residual.
struct AddTo {
    float* residual;
    const float* bias;
    int hidden;
    float before = 0.0f;

    __device__ AddTo(float* to, const float* out_bias, int h) : residual(to), bias(out_bias), hidden(h) {}
    __device__ void prepare(int row, int b) { before = __ldcg(residual + b * hidden + row); }
    __device__ void finish(int row, int b, float sum) {
        residual[b * hidden + row] = before + (bias ? sum + bias[row] : sum);
    }
};

// What a thread knows of its channel before the token's (dt, B, C) are there.
template <class T>
struct Channel {
    int c, b;
    bool takes;
    float h[kMostDecodeStates], A[kMostDecodeStates], x, gate, D, dt_bias;
    const StateSlots& slots;

    // The block's row-th; a block has at most kItems channels over all vectors.
    __device__ Channel(const DecodeShape& shape, int row, int vector, const StateSlots& its)
        : b(vector), slots(its) {
        const Share share(shape.d_inner);
        c = share.begin + row;
        takes = c < share.end;
    }

    // Loads what there is of states that are not there, too, so that no load waits for another.
    __device__ void load(const DecodeParams& p, const DecodeLayer& layer) {
        if (!takes) return;
        const std::int64_t d = p.shape.d_inner;
        const float* from = layer.ssm + max(slots.initial, 0) * p.ssm_stride + c;
#pragma unroll
        for (int i = 0; i < kMostDecodeStates; ++i) {
            const int state = min(i, p.shape.d_state - 1);
            h[i] = from[state * d];
            A[i] = layer.A[state * d + c];
        }
        x = widen(__ldcg(static_cast<const T*>(p.x) + b * d + c));
        gate = widen(__ldcg(static_cast<const T*>(p.z) + b * d + c));
        D = layer.D[c], dt_bias = layer.dt_bias[c];
    }

    // low: the row's dt (r), B (n) and C (n); see selective_step.cu.
    __device__ void step(const DecodeParams& p, const DecodeLayer& layer, float raw_dt, const float* low) {
        const int n = p.shape.d_state;
        const float dt = softplus(__fadd_rn(raw_dt, dt_bias)), input = __fmul_rn(dt, x);
        float rate[kStatesAtOnce], B[kStatesAtOnce], C[kStatesAtOnce];
#pragma unroll
        for (int i = 0; i < kStatesAtOnce; ++i) {
            const bool inside = i < n;
            const int state = min(i, n - 1);
            h[i] = inside && slots.initial >= 0 ? h[i] : 0.0f;
            rate[i] = rate_of(A[i]);
            B[i] = inside ? low[p.shape.dt_rank + state] : 0.0f;
            C[i] = inside ? low[p.shape.dt_rank + n + state] : -0.0f;
        }
        float y = step_states(h, rate, dt, input, B, C);
        y = __fmul_rn(__fmaf_rn(D, x, y), silu(gate));
        static_cast<T*>(p.y)[b * p.shape.d_inner + c] = narrow<T>(y);
        write(p, layer, slots.kept);
        write(p, layer, slots.final);
    }

    __device__ void write(const DecodeParams& p, const DecodeLayer& layer, int slot) const {
        if (slot < 0) return;
        float* to = layer.ssm + slot * p.ssm_stride + c;
#pragma unroll
        for (int i = 0; i < kMostDecodeStates; ++i, to += p.shape.d_inner) {
            if (i < p.shape.d_state) *to = h[i];
        }
    }
};

// dt_proj's results: the raw dt of the channels, which are stepped with it.
template <class T>
struct Step {
    const DecodeParams& p;
    const DecodeLayer& layer;
    Channel<T>& channel;
    const float* low;  // (rows, r + 2n)

    __device__ void prepare(int, int) {}
    __device__ void finish(int, int b, float sum) {
        const int columns = p.shape.dt_rank + 2 * p.shape.d_state;
        channel.step(p, layer, widen(narrow<T>(sum)), low + b * columns);
    }
};

template <class T, int kRows, int kInner>
class Decoder {
  public:
    using Hidden = Columns<T, kRows, groups_of<T>(most_hidden<T>(kInner))>;
    using Inner = Columns<T, kRows, groups_of<T>(most_inner<T>(kInner))>;
    using Few = Columns<T, kRows, 1>;

    __device__ Decoder(const DecodeParams& params, const WeightStream& stream, int* scratch)
        : p(params),
          stream_(stream),
          meeting_(params.arrivals, scratch + 1),
          slots_(params.ragged, vector_of_thread<kRows>()),
          reached_(scratch),
          calm_(scratch + 1),
          near_(reinterpret_cast<DecodeLayer*>(scratch + 4)),
          low_(params.shape.dt_rank + 2 * params.shape.d_state) {
        partials_ = reinterpret_cast<float*>(near_ + 2);
        squares_ = partials_ + decode_partials(p.shape.hidden);
        small_ = squares_ + kRows * kWarps;
    }

    __device__ void run() {
        fetch_layer(0);
        sync_readers();
        for (int i = 0; i < p.num_layers; ++i) layer(i);
        Hidden x(p.shape.hidden);
        normed(p.final_norm, x);
        product(stream_, p.shape.vocab, x, partials_, Store<float>{p.logits, p.shape.vocab});
    }

    // All weights, in the order in which `run` multiplies by them; by one thread.
    __device__ void fill() {
        const DecodeShape& s = p.shape;
        for (int i = 0; i < p.num_layers; ++i) {
            const DecodeLayer& layer = p.layers[i];
            fill(layer.in_proj, 2 * s.d_inner, s.hidden);
            fill(layer.x_proj, low_, s.d_inner);
            fill(layer.dt_proj, s.d_inner, s.dt_rank);
            fill(layer.out_proj, s.hidden, s.d_inner);
        }
        fill(p.head, s.vocab, s.hidden);
    }

    // By a warp of its own: brings what the block reads of a layer besides the streamed weights into the L2,
    // a layer ahead, as it takes long on a busy memory.
    __device__ void prefetch() const {
        for (int i = 1; i < p.num_layers; ++i) {
            while (*static_cast<volatile int*>(reached_) < i - 1) __nanosleep(500);
            prefetch_layer(p.layers[i]);
        }
    }

  private:
    __device__ void prefetch_layer(const DecodeLayer& of) const {
        const int d = p.shape.d_inner, n = p.shape.d_state, width = p.shape.width;
        const Share channels(d), rows(2 * d);
        const int begin = min(rows.begin, d), convolved = min(rows.end, d) - begin;
        const int share = channels.end - channels.begin;
        prefetch_rows(of.norm, 0, 1, p.shape.hidden);
        prefetch_rows(of.A + channels.begin, d, n, share);
        prefetch_rows(of.D + channels.begin, 0, 1, share);
        prefetch_rows(of.dt_bias + channels.begin, 0, 1, share);
        prefetch_rows(of.conv_weight + begin * width, 0, 1, convolved * width);
        if (of.conv_bias) prefetch_rows(of.conv_bias + begin, 0, 1, convolved);
        for (int b = 0; b < kRows; ++b) {
            const std::int64_t slot = p.ragged.initial_slots[b];
            if (slot < 0) continue;
            prefetch_rows(of.ssm + slot * p.ssm_stride + channels.begin, d, n, share);
            prefetch_rows(static_cast<const T*>(of.conv) + slot * p.conv_stride + begin, d, width - 1,
                          convolved);
        }
    }

    // Rows of `columns` elements, `stride` apart, by a warp; a lane takes 32 bytes.
    template <class E>
    static __device__ void prefetch_rows(const E* from, int stride, int rows, int columns) {
        constexpr int kStep = 32 / sizeof(E);
        const int steps =
            columns > 0 ? columns / kStep + 1 : 0;  // the last element too, wherever the rows begin
#pragma unroll 1
        for (int i = threadIdx.x % 32; from && i < rows * steps; i += 32) {
            const E* at = from + std::int64_t(i / steps) * stride + min(i % steps * kStep, columns - 1);
            asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
        }
    }

    __device__ void fill(const void* weights, int rows, int columns) {
        const Share share(rows);
        const int row_bytes = columns * int(sizeof(T)), per_slot = rows_a_slot(row_bytes, kRows);
        const unsigned char* from = static_cast<const unsigned char*>(weights);
#pragma unroll 1
        for (int row = share.begin; row < share.end; row += per_slot) {
            const int count = min(per_slot, share.end - row);
            stream_.fill(from + std::int64_t(row) * row_bytes, count * row_bytes, calm_);
        }
    }

    __device__ void layer(int i) {
        const DecodeShape& s = p.shape;
        const DecodeLayer& of = near_[i % 2];
        {
            Hidden x(s.hidden);
            normed(of.norm, x);
            if (threadIdx.x == 0) *static_cast<volatile int*>(reached_) = i;
            fetch_layer(i + 1);
            product(stream_, 2 * s.d_inner, x, partials_, Convolve<T>(p, of, slots_));
        }
        Inner x(s.d_inner);
        meeting_.arrive();
        meeting_.await();
        x.load(static_cast<const T*>(p.x));
        meeting_.loaded();
        product(stream_, low_, x, partials_, Store<T>{static_cast<T*>(p.low), low_});
        meeting_.arrive();
        Channel<T> channel(s, row_of_thread<kRows>(), vector_of_thread<kRows>(), slots_);
        channel.load(p, of);
        meeting_.await();
        Few dt(s.dt_rank);
        load_small(of, dt);
        product(stream_, s.d_inner, dt, partials_, Step<T>{p, of, channel, small_});
        meeting_.arrive();
        meeting_.await();
        x.load(static_cast<const T*>(p.y));
        meeting_.loaded();
        product(stream_, s.hidden, x, partials_, AddTo(p.residual, of.out_bias, s.hidden));
        meeting_.arrive();
    }

    // Brings the addresses of layer i into shared memory; to be read after a barrier.
    __device__ void fetch_layer(int i) {
        constexpr int kWords = sizeof(DecodeLayer) / 8;
        const std::uint64_t* from = reinterpret_cast<const std::uint64_t*>(p.layers + i);
        if (i < p.num_layers && threadIdx.x < kWords) {
            reinterpret_cast<std::uint64_t*>(near_ + i % 2)[threadIdx.x] = __ldg(from + threadIdx.x);
        }
    }

    // x = the RMS norm of the residual, once it is there.
    __device__ void normed(const float* weight, Hidden& x) {
        float value[Hidden::kMine][Hidden::kGroups][kVector<T>], squares[Hidden::kMine] = {};
        float* gain = partials_;
        for (int i = 4 * threadIdx.x; i < p.shape.hidden; i += 4 * kReaders) {
            const float4 ones = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            *reinterpret_cast<float4*>(gain + i) =
                weight ? *reinterpret_cast<const float4*>(weight + i) : ones;
        }
        meeting_.await();
#pragma unroll
        for (int m = 0; m < Hidden::kMine; ++m) {
#pragma unroll
            for (int g = 0; g < Hidden::kGroups; ++g) {
                const float* from = p.residual + std::int64_t(x.vector(m)) * p.shape.hidden + x.column(g);
#pragma unroll
                for (int v = 0; v < kVector<T>; v += 4) {
                    const float4 quad = __ldcg(reinterpret_cast<const float4*>(from + v));
                    value[m][g][v] = quad.x, value[m][g][v + 1] = quad.y;
                    value[m][g][v + 2] = quad.z, value[m][g][v + 3] = quad.w;
                }
            }
        }
#pragma unroll
        for (int m = 0; m < Hidden::kMine; ++m) {
#pragma unroll
            for (int g = 0; g < Hidden::kGroups; ++g) {
#pragma unroll
                for (float v : value[m][g]) squares[m] = x.has(g) ? __fmaf_rn(v, v, squares[m]) : squares[m];
            }
        }
        x.sum_warp(squares, squares_);
        sync_readers();
        meeting_.loaded();
#pragma unroll
        for (int m = 0; m < Hidden::kMine; ++m) {
            const float factor = norm_factor(squares_ + x.vector(m) * kWarps);
#pragma unroll
            for (int g = 0; g < Hidden::kGroups; ++g) {
#pragma unroll
                for (int v = 0; v < kVector<T>; ++v) {
                    value[m][g][v] = x.has(g) ? value[m][g][v] * factor * gain[x.column(g) + v] : 0.0f;
                }
                x.put(m, g, value[m][g]);
            }
        }
        sync_readers();
    }

    __device__ float norm_factor(const float* squares) const {
        float total = 0.0f;
        for (int warp = 0; warp < kWarps; ++warp) total += squares[warp];
        return 1.0f / sqrtf(total / float(p.shape.hidden) + p.norm_eps);
    }

    // The rows' (dt, B, C) as float32, normed where the family norms them, and dt for dt_proj.
    __device__ void load_small(const DecodeLayer& of, Few& dt) {
#pragma unroll 4
        for (int i = threadIdx.x; i < kRows * low_; i += kReaders) {
            small_[i] = widen(__ldcg(static_cast<const T*>(p.low) + i));
        }
        sync_readers();
        meeting_.loaded();
        if (p.inner_norms) norm_small(of);
        float values[kVector<T>];
#pragma unroll
        for (int m = 0; m < dt.kMine; ++m) {
#pragma unroll
            for (int g = 0; g < dt.kGroups; ++g) {
                const float* from = small_ + dt.vector(m) * low_ + dt.column(g);
#pragma unroll
                for (int v = 0; v < kVector<T>; ++v) values[v] = dt.has(g) ? from[v] : 0.0f;
                dt.put(m, g, values);
            }
        }
    }

    // Norms small_; a warp takes one of the three parts of a row.
    __device__ void norm_small(const DecodeLayer& of) {
        const int r = p.shape.dt_rank, n = p.shape.d_state, lane = threadIdx.x % 32;
#pragma unroll 1
        for (int task = threadIdx.x / 32; task < 3 * kRows; task += kWarps) {
            const int part = task % 3, size = part == 0 ? r : n;
            const float* gain = part == 0 ? of.dt_norm : part == 1 ? of.B_norm : of.C_norm;
            float *values = small_ + task / 3 * low_ + (part == 0 ? 0 : r + (part - 1) * n), square = 0.0f;
#pragma unroll 1
            for (int i = lane; i < size; i += 32) square = __fmaf_rn(values[i], values[i], square);
            const float factor = 1.0f / sqrtf(warp_sum(square) / float(size) + p.inner_eps);
#pragma unroll 1
            for (int i = lane; i < size; i += 32) {
                values[i] = widen(narrow<T>(values[i] * factor * (gain ? gain[i] : 1.0f)));
            }
        }
        sync_readers();
    }

    const DecodeParams& p;
    WeightStream stream_;
    Meeting meeting_;
    StateSlots slots_;          // of the sequence that is this thread's in every epilogue
    int* reached_;              // the layer that the readers are in
    const volatile int* calm_;  // see Meeting
    DecodeLayer* near_;         // two
    int low_;                   // dt, B and C of a row
    float *partials_, *squares_, *small_;
};

static_assert(8 * kStreamBarriers % 16 == 0 && 2 * sizeof(DecodeLayer) % 16 == 0,
              "what follows is read by quads");

template <class T, int kRows, int kInner>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, int num_slots) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(memory + num_slots * kSlotBytes);
    WeightStream stream(barriers, memory, num_slots);
    int* scratch = reinterpret_cast<int*>(barriers + kStreamBarriers);
    if (threadIdx.x == 0) {
        stream.init(kWarps);
        scratch[0] = scratch[1] = 0;
    }
    __syncthreads();
    Decoder<T, kRows, kInner> decoder(p, stream, scratch);
    if (threadIdx.x < kReaders) {
        decoder.run();
    } else if (threadIdx.x >= kReaders + 32) {
        decoder.prefetch();
    } else if (threadIdx.x == kReaders) {
        decoder.fill();
    }
#endif
}

// The kernel of so many rows, 1, 2, 4 or 8, and for d_inner at most `inner`, 1, 2 or 4, times what the
// readers take of a row at once.
template <class T, int kRows>
const void* decode_kernel_of(int inner) {
    if (inner == 1) return reinterpret_cast<const void*>(&decode_kernel<T, kRows, 1>);
    if (inner == 2) return reinterpret_cast<const void*>(&decode_kernel<T, kRows, 2>);
    if constexpr (sizeof(T) == 2 || kRows <= 4) {  // a thread's columns of float32 must fit its registers
        if (inner == 4) return reinterpret_cast<const void*>(&decode_kernel<T, kRows, 4>);
    }
    return nullptr;
}

template <class T>
const void* decode_kernel_of(int rows, int inner) {
    switch (rows) {
        case 1:
            return decode_kernel_of<T, 1>(inner);
        case 2:
            return decode_kernel_of<T, 2>(inner);
        case 4:
            return decode_kernel_of<T, 4>(inner);
        case 8:
            return decode_kernel_of<T, 8>(inner);
    }
    return nullptr;
}

const void* decode_kernel_float32(int rows, int inner);
const void* decode_kernel_bfloat16(int rows, int inner);

}  // namespace cuda
}  // namespace apcbatch
