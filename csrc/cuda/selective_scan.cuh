// Selective scan of whole sequences, tile by tile, with the carry in registers. States are read from and
// written to slots. Each channel's tokens are processed strictly in order. So neither cuts, nor the rest of
// the batch, nor snapshots change a bit.
#pragma once

#include "launch.h"
#include "scan_walk.cuh"

namespace apcbatch {
namespace cuda {

// Which rows are aligned for vector access: x, dt and z; B and C; the output, for stores of pairs.
struct Alignment {
    bool inputs, bc, out;
};

// Iterator over the tiles of one sequence, of at most Sh::tokens tokens each. Every snapshot is at the end of
// a tile.
template <class Sh>
struct Tiles {
    const RaggedParams& ragged;
    std::int64_t next, end;
    int length, stop, t;  // stop: position of the next snapshot, or the end

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

    // Returns the number of tokens of the next tile, 0 after the last. slot: set to the slot of the snapshot
    // at its end; -1: none.
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

// Work of a block: one sequence, and channels beginning at c0.
struct Place {
    std::int64_t sequence, begin, c0;
};

// Walker warp: keeps the carry of its lanes in registers, and reads and writes slots.
template <class Sh>
struct Walker {
    static constexpr int kGroups = 32 / Sh::S;  // distance between lanes that share channels
    const std::int64_t state_stride, d_inner;
    const int warp, lane, stage, channel;  // stage: index of the lane among the S that share its channels
    float* arena;                          // slot 0, at this lane's first channel and state
    int channels, states;                  // existing channels and states of the lane, of K and N
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

    // Calls f(h, A, offset in the slot, exists) for each of the lane's states.
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

// Helper thread: copies, prepares and finishes tiles.
template <class Sh>
struct Helper {
    using T = typename Sh::T;
    using Inputs = Source<Sh, Sh::channels, Sh::channels>;
    using States = Source<Sh, Sh::states, Sh::bc_row>;
    SharedMemory<Sh>& memory;
    unsigned shared;  // address of `memory` in shared memory
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
        // Volatile, as the compiler would otherwise recompute the address at every use.
        asm volatile("mov.u32 %0, %1;" : "=r"(shared) : "r"(unsigned(__cvta_generic_to_shared(&block))));
    }

    template <class Columns>
    __device__ __forceinline__ void copy(const Columns& source, T* raw, int t, int count) const {
        const auto offset = reinterpret_cast<char*>(raw) - reinterpret_cast<char*>(&memory);
        source.copy(raw, shared + unsigned(offset), t, count);
    }

    // Starts the copies of tile i: `count` rows, beginning at token t.
    __device__ __forceinline__ void copy(unsigned i, int t, int count) const {
        copy(dt, memory.raw_dt[i % Sh::raw_buffers], t, count);
        copy(x, memory.raw_x[i % Sh::kept_buffers], t, count);
        if (finish.gated) copy(z, memory.raw_z[i % Sh::kept_buffers], t, count);
        copy(B, memory.raw_bc[i % Sh::raw_buffers], t, count);
        copy(C, memory.raw_bc[i % Sh::raw_buffers] + Sh::states, t, count);
        commit_copies();
    }

    // Prepares tile i, whose copies have arrived, for the walk.
    __device__ __forceinline__ void prepare(unsigned i, int count) const {
        prepare_steps<Sh>(memory.steps[i % Sh::buffers], own, bias, memory.raw_dt[i % Sh::raw_buffers],
                          memory.raw_x[i % Sh::kept_buffers], count);
        WidenBC<Sh>::tile(memory.bc[i % Sh::buffers], memory.raw_bc[i % Sh::raw_buffers], thread, count,
                          d_state);
    }

    // Finishes tile i after its walk, and stores its outputs.
    __device__ __forceinline__ void output(unsigned i, int t, int count) const {
        finish.tile(memory.sums[i % Sh::buffers], own, memory.raw_x[i % Sh::kept_buffers],
                    memory.raw_z[i % Sh::kept_buffers], t, count);
    }
};

// Barrier of walkers and helpers.
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

// While the walkers process tile i - 1, copies tile i + 2, prepares tile i and finishes tile i - 2. After
// each barrier, the copies of all helpers are visible.
template <class Sh>
__device__ __forceinline__ void help_sequence(const ScanParams& p, const Place& place,
                                              SharedMemory<Sh>& memory, Alignment aligned) {
    const Helper<Sh> helper(p, place, memory, aligned);
    Tiles<Sh> tiles(p.ragged, place.sequence);
    std::int64_t snapshot;
    int walked = 0, walking = 0, finished = 0;  // tokens of tile i - 2, of tile i - 1, of all earlier tiles
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

// Launches the scan. Returns false if a block needs more shared memory than the device has.
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
