// The selective scan of whole sequences: tile after tile with the carry in registers, states from and to
// their slots. Token order is strict for each channel, so neither a cut, nor a batch mate, nor a snapshot
// changes a bit. Must not know: Python, models.
#pragma once

#include "launch.h"
#include "scan_walk.cuh"

namespace apcbatch {
namespace cuda {

// Blocks that a multiprocessor should hold at once: bounds the registers.
constexpr int blocks_at_once(int n, int s) { return n == 8 && s == 2 ? 5 : n == 16 && s == 1 ? 4 : 3; }

// What may be read in groups: the rows of x, dt, z in the pieces of Source; of B and C, and of the output, in
// pairs.
struct Alignment {
    bool inputs, bc, out;
};

// Where the next tile ends: at the next snapshot, or at the sequence's end.
struct Stops {
    const RaggedParams& ragged;
    std::int64_t next, end;
    int length, at;  // at: the next stop

    __device__ __forceinline__ Stops(const RaggedParams& batch, std::int64_t sequence, int tokens)
        : ragged(batch),
          next(batch.snapshot_cu[sequence]),
          end(batch.snapshot_cu[sequence + 1]),
          length(tokens) {
        at = stop_of(next);
    }

    __device__ __forceinline__ int stop_of(std::int64_t i) const {
        return i < end ? int(ragged.snapshot_positions[i]) : length;
    }
    __device__ __forceinline__ int stop() const { return at; }

    // The slot of the snapshot at t, or -1; it is then done with.
    __device__ __forceinline__ std::int64_t slot_at(int t) {
        if (next >= end || at != t) return -1;
        const std::int64_t slot = ragged.snapshot_slots[next];
        at = stop_of(++next);
        return slot;
    }
};

// The carry of one lane between its registers and the slots.
template <class Sh>
struct States {
    float* arena;  // of slot 0, this lane's channel and its first state
    std::int64_t slot_stride, state_stride;
    int present;  // how many of the lane's N states there are

    __device__ __forceinline__ void read(Walk<Sh>& walk, std::int64_t slot) const {
        const float* from = arena + slot * slot_stride;
#pragma unroll
        for (int i = 0; i < Sh::N; ++i) walk.h[i] = slot >= 0 && i < present ? from[i * state_stride] : 0.0f;
    }
    __device__ __forceinline__ void write(const Walk<Sh>& walk, std::int64_t slot) const {
        if (slot < 0) return;
        float* to = arena + slot * slot_stride;
#pragma unroll
        for (int i = 0; i < Sh::N; ++i) {
            if (i < present) to[i * state_stride] = walk.h[i];
        }
    }
};

template <class Sh>
__global__ void __launch_bounds__(kThreads, blocks_at_once(Sh::N, Sh::S))
    selective_scan_kernel(const __grid_constant__ ScanParams p, const std::int64_t* sequences,
                          int channel_tiles, Alignment aligned) {
    using T = typename Sh::T;
    extern __shared__ float4 shared_memory[];
    SharedMemory<Sh>& memory = *reinterpret_cast<SharedMemory<Sh>*>(shared_memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const std::int64_t sequence = sequences[blockIdx.x / channel_tiles];
    const std::int64_t begin = p.ragged.cu_seqlens[sequence];
    const int length = int(p.ragged.cu_seqlens[sequence + 1] - begin);
    const std::int64_t c0 =
        std::int64_t(blockIdx.x % channel_tiles) * Sh::block_channels + warp * Sh::warp_channels;
    const std::int64_t channels_left = p.d_inner - c0;
    const bool whole = aligned.inputs && channels_left >= Sh::warp_channels;

    clear<Sh>(memory, warp, lane);
    Walk<Sh> walk;
    walk.stage = lane % Sh::S;
    const int channel = lane / Sh::S, first_state = walk.stage * Sh::N;
    const std::int64_t at = first_state * p.d_inner + c0 + channel;
    const States<Sh> states{p.state + at, p.state_stride, p.d_inner,
                            channel < channels_left ? int(p.d_state) - first_state : 0};
#pragma unroll
    for (int i = 0; i < Sh::N; ++i) {
        walk.A[i] = i < states.present ? __fmul_rn(p.A[at + i * p.d_inner], kLog2e) : 0.0f;
    }
    states.read(walk, p.ragged.initial_slots[sequence]);

    const PairLanes<Sh> own(lane, channels_left);
    const float2 bias = own.parameters(p.dt_bias, c0);
    Source<Sh> x(p.x, p.x_stride, begin, c0, lane), dt(p.dt, p.dt_stride, begin, c0, lane);
    Source<Sh> z(p.z, p.z_stride, begin, c0, lane);
    SharedColumn<Sh> bc(p, begin, aligned.bc);
    Finish<Sh> finish{static_cast<T*>(p.out) + (begin + own.row) * p.out_stride + c0 + own.channel,
                      p.out_stride, own.parameters(p.D, c0), p.z != nullptr, aligned.out};
    float* steps = memory.steps[warp] + Sh::idle * Sh::step_row;
    Stops stops(p.ragged, sequence, length);
    int parity = 0, t0 = 0, count = 0, next_count = min(Sh::tokens, stops.stop());
    const auto copy_ahead = [&](int stage) {
        dt.copy(memory.raw_dt[warp], lane, next_count, channels_left, whole);
        x.copy(memory.raw_x[warp][stage], lane, next_count, channels_left, whole);
        if (p.z != nullptr) z.copy(memory.raw_z[warp][stage], lane, next_count, channels_left, whole);
        bc.fetch(next_count);
    };
    copy_ahead(0);
    __syncthreads();  // what `clear` wrote
    while (next_count > 0) {
        count = next_count;
        t0 += count;
        wait_for_copies();
        __syncwarp();
        const T *raw_x = memory.raw_x[warp][parity], *raw_z = memory.raw_z[warp][parity];
        prepare_steps<Sh>(steps, own, bias, memory.raw_dt[warp], raw_x, count);
        float* bc_rows = memory.bc[parity] + Sh::idle * Sh::bc_row;
        bc.store(bc_rows);
        __syncthreads();
        const std::int64_t snapshot = stops.slot_at(t0);
        next_count = min(Sh::tokens, stops.stop() - t0);
        copy_ahead(parity ^ 1);
        walk.tile(steps + 2 * channel, bc_rows + walk.stage * (2 * Sh::N), count);
        states.write(walk, snapshot);
        __syncwarp();
        finish.tile(steps, own, raw_x, raw_z, count);
        __syncwarp();
        parity ^= 1;
    }
    states.write(walk, p.ragged.final_slots[sequence]);
}

template <class Sh>
void launch_scan(const ScanParams& p, const Selection& selection, cudaStream_t stream) {
    using T = typename Sh::T;
    const Alignment alignment{aligned<T>({{p.x, p.x_stride}, {p.dt, p.dt_stride}, {p.z, p.z_stride}},
                                         p.d_inner, Source<Sh>::kPiece),
                              aligned<T>({{p.B, p.B_stride}, {p.C, p.C_stride}}, p.d_state, 2),
                              aligned<T>({{p.out, p.out_stride}}, p.d_inner, 2)};
    const std::int64_t tiles = (p.d_inner + Sh::block_channels - 1) / Sh::block_channels;
    constexpr int bytes = int(sizeof(SharedMemory<Sh>));
    if (cudaFuncSetAttribute(selective_scan_kernel<Sh>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) ==
        cudaSuccess) {
        selective_scan_kernel<Sh><<<unsigned(tiles * selection.count), kThreads, bytes, stream>>>(
            p, selection.sequences, int(tiles), alignment);
    }
    check_launch("selective_scan");
}

}  // namespace cuda
}  // namespace apcbatch
