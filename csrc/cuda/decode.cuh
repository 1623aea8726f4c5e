// A decode pass of a stack of Mamba mixers in one launch: each block is one of a fixed crew that stays for
// the whole pass. One of its threads streams the block's share of all weights, in the order of their use,
// into shared memory; the others compute, and meet the other blocks four times a layer, where a vector is
// complete: the convolved x, the low-rank (dt, B, C), the gated y, the residual. While they wait the weights
// go on arriving. Must not know: Python.
#pragma once

#include "decode_epilogues.cuh"
#include "decode_product.cuh"
#include "quads.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kDecodeThreads = kReaders + 64;  // a warp streams, one prefetches

// The most columns of a kernel of size 1 or 2; with twice as many, a thread's columns do not fit its
// registers and the ops one by one are faster.
template <class T>
constexpr int most_inner(int size) {
    return size * (sizeof(T) == 4 ? 1280 : 2560);
}
template <class T>
constexpr int most_hidden(int size) {
    return most_inner<T>(size > 1 ? size / 2 : 1);
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

template <class T, int kRows, int kSize>
class Decoder {
  public:
    using Hidden = Columns<T, kRows, groups_of<T>(most_hidden<T>(kSize))>;
    using Inner = Columns<T, kRows, groups_of<T>(most_inner<T>(kSize))>;
    using Few = Columns<T, kRows, 1>;

    __device__ Decoder(const DecodeParams& params, const WeightStream& stream, int* scratch)
        : p(params),
          stream_(stream),
          meeting_(params.arrivals, Signal(scratch + 1)),
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
            if (threadIdx.x % 32 == 0) {
                while (reached_.get() < i - 1) __nanosleep(500);
            }
            __syncwarp();
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
            if (threadIdx.x == 0) reached_.set(i);
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
    StateSlots slots_;   // of the sequence that is this thread's in every epilogue
    Signal reached_;     // the layer that the readers are in
    Signal calm_;        // see Meeting
    DecodeLayer* near_;  // two
    int low_;            // dt, B and C of a row
    float *partials_, *squares_, *small_;
};

static_assert(8 * kStreamBarriers % 16 == 0 && 2 * sizeof(DecodeLayer) % 16 == 0,
              "what follows is read by quads");

template <class T, int kRows, int kSize>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, int num_slots) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    std::uint64_t* barriers = reinterpret_cast<std::uint64_t*>(memory + num_slots * kSlotBytes);
    WeightStream stream(barriers, memory, num_slots);
    int* scratch = reinterpret_cast<int*>(barriers + kStreamBarriers);
    if (threadIdx.x == 0) {
        stream.init(kReaders);
        scratch[0] = scratch[1] = 0;
    }
    __syncthreads();
    Decoder<T, kRows, kSize> decoder(p, stream, scratch);
    if (threadIdx.x < kReaders) {
        decoder.run();
    } else if (threadIdx.x >= kReaders + 32) {
        decoder.prefetch();
    } else if (threadIdx.x == kReaders) {
        decoder.fill();
    }
#endif
}

// The kernel of so many rows, 1, 2, 4 or 8, and of size 1 or 2.
template <class T, int kRows>
const void* decode_kernel_of(int size) {
    if (size == 1) return reinterpret_cast<const void*>(&decode_kernel<T, kRows, 1>);
    if (size == 2) return reinterpret_cast<const void*>(&decode_kernel<T, kRows, 2>);
    return nullptr;
}

template <class T>
const void* decode_kernel_of(int rows, int size) {
    switch (rows) {
        case 1:
            return decode_kernel_of<T, 1>(size);
        case 2:
            return decode_kernel_of<T, 2>(size);
        case 4:
            return decode_kernel_of<T, 4>(size);
        case 8:
            return decode_kernel_of<T, 8>(size);
    }
    return nullptr;
}

const void* decode_kernel_float32(int rows, int size);
const void* decode_kernel_bfloat16(int rows, int size);

}  // namespace cuda
}  // namespace apcbatch
