// The selective scan of whole sequences: tile after tile with the carry in registers, states from and to
// their slots. Token order is strict for each channel, so neither a cut, nor a batch mate, nor a snapshot
// changes a bit. Must not know: Python, models.
#pragma once

#include "launch.h"
#include "scan_walk.cuh"

namespace apcbatch {
namespace cuda {

// What may be read in pieces: the rows of x, dt, z; of B and C; and whether the output may be written in
// pairs.
struct Alignment {
    bool inputs, bc, out;
};

// The tiles of one sequence: of so many tokens at most, each snapshot at the end of one.
template <class Sh>
struct Tiles {
    const RaggedParams& ragged;
    std::int64_t next, end;
    int length, stop, t;  // stop: the next snapshot or the end

    __device__ __forceinline__ Tiles(const RaggedParams& batch, std::int64_t sequence)
        : ragged(batch),
          next(batch.snapshot_cu[sequence]),
          end(batch.snapshot_cu[sequence + 1]),
          length(int(batch.cu_seqlens[sequence + 1] - batch.cu_seqlens[sequence])),
          t(0) {
        stop = stop_of(next);
    }

    __device__ __forceinline__ int stop_of(std::int64_t i) const {
        return i < end ? int(ragged.snapshot_positions[i]) : length;
    }

    // The tokens of the next tile, 0 after the last, and the slot of the snapshot at its end or -1.
    __device__ __forceinline__ int take(std::int64_t& slot) {
        const int count = min(Sh::tokens, stop - t);
        t += count;
        slot = -1;
        if (t == stop && next < end) {
            slot = ragged.snapshot_slots[next];
            stop = stop_of(++next);
        }
        return count;
    }
};

// Where a block is: one sequence, and channels from c0 on.
struct Place {
    std::int64_t sequence, begin, c0;
};

// One warp that walks: the carry of its lanes, between registers and the slots.
template <class Sh>
struct Walker {
    static constexpr int kGroups = 32 / Sh::S;  // lanes that share channels are so many apart
    const std::int64_t state_stride, d_inner;
    const int warp, lane, stage, channel;  // stage: the lane's place among those of its channels
    float* arena;                          // of slot 0, this lane's first channel and state
    int channels, states;                  // how many of the lane's K and N there are
    Walk<Sh> walk;

    __device__ __forceinline__ Walker(const ScanParams& p, const Place& place)
        : state_stride(p.state_stride),
          d_inner(p.d_inner),
          warp(threadIdx.x / 32),
          lane(threadIdx.x % 32),
          stage(lane / kGroups),
          channel(warp * Sh::warp_channels + lane % kGroups * Sh::K) {
        const std::int64_t first_state = stage * Sh::N, c = place.c0 + channel;
        arena = p.state + first_state * d_inner + c;
        channels = int(min(std::int64_t(Sh::K), d_inner - c));
        states = int(p.d_state - first_state);
        const std::int64_t slot = p.ragged.initial_slots[place.sequence];
        const float *from = arena + slot * state_stride, *A = p.A + first_state * d_inner + c;
        each([&](float& h, float& rate, std::int64_t at, bool present) {
            h = present && slot >= 0 ? from[at] : 0.0f;
            rate = present ? __fmul_rn(A[at], kLog2e) : 0.0f;
        });
    }

    // Calls f(h, A, where it lies, whether it exists) for each of the lane's states.
    template <class F>
    __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int i = 0; i < Sh::N; ++i) {
#pragma unroll
            for (int k = 0; k < Sh::K; ++k) {
                f(walk.h[k][i], walk.A[k][i], i * d_inner + k, k < channels && i < states);
            }
        }
    }

    __device__ __forceinline__ void write(std::int64_t slot) {
        if (slot < 0) return;
        float* to = arena + slot * state_stride;
        each([&](float h, float, std::int64_t at, bool present) {
            if (present) to[at] = h;
        });
    }

    __device__ __forceinline__ void tile(SharedMemory<Sh>& memory, unsigned i, int count,
                                         std::int64_t snapshot) {
        const unsigned buffer = i % Sh::buffers;
        walk.tile(memory.steps[buffer] + channel * Sh::unroll, memory.bc[buffer] + stage * (2 * Sh::N),
                  memory.sums[buffer] + warp * Sh::sum_warp + (lane % kGroups * Sh::S + stage) * Sh::K,
                  count);
        write(snapshot);
    }
};

// The threads that copy, prepare and finish tiles.
template <class Sh>
struct Helper {
    using T = typename Sh::T;
    using Inputs = Source<Sh, Sh::channels, Sh::channels>;
    using States = Source<Sh, Sh::states, Sh::bc_row>;
    SharedMemory<Sh>& memory;
    unsigned shared;  // its address
    const int thread, d_state;
    const OwnPair<Sh> own;
    const float2 bias;
    const Inputs x, dt, z;
    const States B, C;
    const Finish<Sh> finish;

    __device__ __forceinline__ Helper(const ScanParams& p, const Place& place, SharedMemory<Sh>& block,
                                      Alignment aligned)
        : memory(block),
          thread(threadIdx.x - (Sh::threads - Sh::helping)),
          d_state(int(p.d_state)),
          own(thread, p.d_inner - place.c0),
          bias(own.parameters(p.dt_bias, place.c0)),
          x(p.x, p.x_stride, place.begin, place.c0, p.d_inner, thread, aligned.inputs),
          dt(p.dt, p.dt_stride, place.begin, place.c0, p.d_inner, thread, aligned.inputs),
          z(p.z, p.z_stride, place.begin, place.c0, p.d_inner, thread, aligned.inputs),
          B(p.B, p.B_stride, place.begin, 0, p.d_state, thread, aligned.bc),
          C(p.C, p.C_stride, place.begin, 0, p.d_state, thread, aligned.bc),
          finish{static_cast<T*>(p.out) + (place.begin + own.row) * p.out_stride + place.c0 + own.channel,
                 int(p.out_stride * sizeof(T)), own.parameters(p.D, place.c0), p.z != nullptr, aligned.out} {
        // Volatile: else the compiler would find it out again at every use.
        asm volatile("mov.u32 %0, %1;" : "=r"(shared) : "r"(unsigned(__cvta_generic_to_shared(&block))));
    }

    template <class Columns>
    __device__ __forceinline__ void copy(const Columns& source, T* raw, int t, int count) const {
        const auto offset = reinterpret_cast<char*>(raw) - reinterpret_cast<char*>(&memory);
        source.copy(raw, shared + unsigned(offset), t, count);
    }

    // Begins to copy tile i, `count` rows from token t on.
    __device__ __forceinline__ void copy(unsigned i, int t, int count) const {
        copy(dt, memory.raw_dt[i % Sh::raw_buffers], t, count);
        copy(x, memory.raw_x[i % Sh::kept_buffers], t, count);
        if (finish.gated) copy(z, memory.raw_z[i % Sh::kept_buffers], t, count);
        copy(B, memory.raw_bc[i % Sh::raw_buffers], t, count);
        copy(C, memory.raw_bc[i % Sh::raw_buffers] + Sh::states, t, count);
        commit_copies();
    }

    // Makes tile i, whose copies have arrived, ready to walk.
    __device__ __forceinline__ void prepare(unsigned i, int count) const {
        prepare_steps<Sh>(memory.steps[i % Sh::buffers], own, bias, memory.raw_dt[i % Sh::raw_buffers],
                          memory.raw_x[i % Sh::kept_buffers], count);
        WidenBC<Sh>::tile(memory.bc[i % Sh::buffers], memory.raw_bc[i % Sh::raw_buffers], thread, count,
                          d_state);
    }

    // The outputs of tile i, which has been walked over.
    __device__ __forceinline__ void output(unsigned i, int t, int count) const {
        finish.tile(memory.sums[i % Sh::buffers], own, memory.raw_x[i % Sh::kept_buffers],
                    memory.raw_z[i % Sh::kept_buffers], t, count);
    }
};

// Walkers and helpers meet.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

template <class Sh>
__device__ __forceinline__ void walk_sequence(const ScanParams& p, const Place& place,
                                              SharedMemory<Sh>& memory) {
    Walker<Sh> walker(p, place);
    Tiles<Sh> tiles(p.ragged, place.sequence);
    std::int64_t snapshot;
    meet();
    unsigned i = 0;
    for (int count; (count = tiles.take(snapshot)) > 0; ++i) {
        meet();
        walker.tile(memory, i, count, snapshot);
    }
    if (i > 0) meet();
    walker.write(p.ragged.final_slots[place.sequence]);
}

// While the walkers are at tile i - 1: copies tile i + 2, prepares tile i and finishes tile i - 2. Each
// meeting also tells the helpers that the copies of all of them have arrived.
template <class Sh>
__device__ __forceinline__ void help_sequence(const ScanParams& p, const Place& place,
                                              SharedMemory<Sh>& memory, Alignment aligned) {
    const Helper<Sh> helper(p, place, memory, aligned);
    Tiles<Sh> tiles(p.ragged, place.sequence);
    std::int64_t snapshot;
    int walked = 0, walking = 0, finished = 0;  // tokens of tiles i - 2, i - 1, and of those before
    int ready = tiles.take(snapshot);
    helper.copy(0, 0, ready);
    int t = tiles.t, coming = tiles.take(snapshot);
    helper.copy(1, t, coming);
    wait_for_copies<1>();
    meet();
    for (unsigned i = 0; ready + walking + walked > 0; ++i) {
        t = tiles.t;
        const int later = tiles.take(snapshot);
        helper.copy(i + 2, t, later);
        if (ready > 0) helper.prepare(i, ready);
        if (walked > 0) helper.output(i - 2, finished, walked);
        wait_for_copies<1>();
        if (ready + walking > 0) meet();
        finished += walked;
        walked = walking;
        walking = ready;
        ready = coming;
        coming = later;
    }
}

template <class Sh>
__device__ __forceinline__ void scan_alone(const ScanParams& p, const Place& place, SharedMemory<Sh>& memory,
                                           Alignment aligned) {
    const Helper<Sh> helper(p, place, memory, aligned);
    Walker<Sh> walker(p, place);
    Tiles<Sh> tiles(p.ragged, place.sequence);
    std::int64_t snapshot, next_snapshot;
    int t = 0, count = tiles.take(snapshot);
    helper.copy(0, t, count);
    for (unsigned i = 0; count > 0; ++i) {
        wait_for_copies<0>();
        __syncthreads();
        helper.prepare(i, count);
        __syncthreads();
        const int next_t = tiles.t, next = tiles.take(next_snapshot);
        helper.copy(i + 1, next_t, next);
        walker.tile(memory, i, count, snapshot);
        __syncthreads();
        helper.output(i, t, count);
        t = next_t;
        count = next;
        snapshot = next_snapshot;
    }
    walker.write(p.ragged.final_slots[place.sequence]);
}

template <class Sh>
__global__ void __launch_bounds__(Sh::threads, Sh::blocks_at_once)
    selective_scan_kernel(const __grid_constant__ ScanParams p, const std::int64_t* sequences,
                          int channel_tiles, Alignment aligned) {
    extern __shared__ float4 shared_memory[];
    SharedMemory<Sh>& memory = *reinterpret_cast<SharedMemory<Sh>*>(shared_memory);
    Place place{sequences[blockIdx.x / channel_tiles], 0,
                std::int64_t(blockIdx.x % channel_tiles) * Sh::channels};
    place.begin = p.ragged.cu_seqlens[place.sequence];
    if constexpr (Sh::H == 0) {
        scan_alone<Sh>(p, place, memory, aligned);
    } else if (threadIdx.x < 32 * Sh::W) {
        walk_sequence<Sh>(p, place, memory);
    } else {
        help_sequence<Sh>(p, place, memory, aligned);
    }
}

// False where a block's shared memory is more than the device has.
template <class Sh>
bool launch_scan(const ScanParams& p, const Selection& selection, cudaStream_t stream) {
    using T = typename Sh::T;
    constexpr int bytes = int(sizeof(SharedMemory<Sh>));
    if (cudaFuncSetAttribute(selective_scan_kernel<Sh>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) !=
        cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    const Alignment alignment{
        aligned<T>({{p.x, p.x_stride}, {p.dt, p.dt_stride}, {p.z, p.z_stride}}, p.d_inner,
                   Helper<Sh>::Inputs::kPiece),
        aligned<T>({{p.B, p.B_stride}, {p.C, p.C_stride}}, p.d_state, Helper<Sh>::States::kPiece),
        aligned<T>({{p.out, p.out_stride}}, p.d_inner, 2)};
    const std::int64_t tiles = (p.d_inner + Sh::channels - 1) / Sh::channels;
    selective_scan_kernel<Sh><<<unsigned(tiles * selection.count), Sh::threads, bytes, stream>>>(
        p, selection.sequences, int(tiles), alignment);
    check_launch("selective_scan");
    return true;
}

}  // namespace cuda
}  // namespace apcbatch
