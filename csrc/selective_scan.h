// Selective scan of one unit (a run of sequences times a tile of channels), over the vectors of simd.h:
//   dt = softplus(dt_raw + dt_bias);  h_n = 2^(dt (A_n log2 e)) h_n + dt x B_n;
//   y = (D x + sum_n C_n h_n) silu(z)
// (Gu and Dao 2023, Mamba, equation 2 with the discretisation of its section 3.2). h is (n, d), channels
// contiguous.
//
// Invariants: the operations on one (channel, state) are one fixed chain over the tokens, in float32. y sums
// the states in ascending order in one accumulator. So no bit depends on where a sequence is cut, nor on
// tiles, threads or lanes. A snapshot is a copy of the carry itself.
//
// Tokens are processed in tiles. A tile's rows (dt, dt x and the running y) are prepared once in scratch.
// Then, for each vector of channels, blocks of states run over the tile with their h in registers. B and C
// are widened and packed once per tile, for all channels.
#pragma once

#include "scan.h"
#include "scan_states.h"

namespace apcbatch {
namespace APC_ISA {
namespace scan {

// Computation of one unit. T: type of x, dt, B, C, z and out. Scratch, scan_scratch_floats floats:
//   A (vector, n, lane), times log2 e | largest_A, dt_bias, D (vector, lane) | h (vector, n, lane) |
//   BC (block of states, token, B then C) | rows (vector of the tile, token, dt then dt x then y).
template <class T>
class UnitScan {
  public:
    UnitScan(const ScanParams& params, const Unit& unit, float* scratch)
        : p(params), c0(unit.channel_begin), channels(unit.channels), n(params.d_state) {
        vectors = (channels + kLanes - 1) / kLanes;
        tile_tokens = 1;
        for (int64_t s = unit.sequence_begin; s < unit.sequence_end; s += unit.sequence_step) {
            const int64_t length = p.ragged.cu_seqlens[s + 1] - p.ragged.cu_seqlens[s];
            if (length > tile_tokens) tile_tokens = smaller(length, kTileTokens);
        }
        const int64_t padded = vectors * kLanes;
        A = scratch;
        largest_A = A + n * padded;
        dt_bias = largest_A + padded;
        D = dt_bias + padded;
        h = D + padded;
        BC = h + n * padded;
        rows = BC + 2 * n * tile_tokens;
        vector_rows = tile_tokens * kRow + 16;
        prepare_A();
        copy_or_zero(p.dt_bias, dt_bias);
        copy_or_zero(p.D, D);
    }

    // Processes sequence s. next: slot of the unit's next sequence, to prefetch; -1: none.
    void run(int64_t s, int64_t next) {
        begin_sequence(s, next);
        const int64_t begin = p.ragged.cu_seqlens[s], length = p.ragged.cu_seqlens[s + 1] - begin;
        int64_t snapshot = p.ragged.snapshot_cu[s];
        const int64_t snapshots_end = p.ragged.snapshot_cu[s + 1];
        for (int64_t done = 0; done < length;) {
            int64_t end = smaller(done + tile_tokens, length);
            bool keep = false;
            if (snapshot < snapshots_end && p.ragged.snapshot_positions[snapshot] <= end) {
                end = p.ragged.snapshot_positions[snapshot];
                keep = true;
            }
            scan_tokens(begin + done, end - done, end == length && !keep);
            if (keep) write_state(p.ragged.snapshot_slots[snapshot++]);
            done = end;
        }
        if (!final_written) write_state(p.ragged.final_slots[s]);
    }

  private:
    // Tile: at most kTileChannels consecutive channels, and a range of tokens.
    struct Tile {
        int64_t vector, vectors;
        int64_t t0, tokens;  // first token in the packed batch, number of tokens
    };

    const ScanParams& p;
    const int64_t c0, channels, n;
    int64_t vectors, tile_tokens;
    int64_t
        vector_rows;  // floats of a vector's rows, padded by a cache line to avoid conflicts of cache sets
    float *A, *largest_A, *dt_bias, *D, *h, *BC, *rows;
    alignas(64) float largest_dt[kTileChannels];  // per channel, over the tokens of the tile
    alignas(64) float zeros[16] = {};
    Carry source;           // state before the next tokens: a slot, zeros, or h
    int64_t source_vector;  // increment of source.base per vector of channels
    Carry target;           // slot for the state after the last tokens, or null
    bool final_written;
    const float *state_now, *state_next;  // slots to prefetch for sequences of one token, or null

    int64_t lanes_of(int64_t v) const { return smaller(channels - v * kLanes, kLanes); }
    float* slot(int64_t index) const { return p.state + index * p.state_stride + c0; }

    void prepare_A() {
        const Vec log2e = Vec::broadcast(0x1.715476p+0f);
        for (int64_t v = 0; v < vectors; ++v) {
            VecI largest = VecI::broadcast(0);  // compares bits, so that NaN counts as larger than infinity
            for (int64_t i = 0; i < n; ++i) {
                const Vec a = load_first(p.A + i * p.d_inner + c0 + v * kLanes, lanes_of(v)) * log2e;
                a.store(A + (v * n + i) * kLanes);
                largest = max(largest, as_bits(absolute(a)));
            }
            as_float(largest).store(largest_A + v * kLanes);
        }
    }

    void copy_or_zero(const float* from, float* to) const {
        for (int64_t v = 0; v < vectors; ++v) {
            const Vec value = from == nullptr ? Vec::zero() : load_first(from + c0 + v * kLanes, lanes_of(v));
            value.store(to + v * kLanes);
        }
    }

    void begin_sequence(int64_t s, int64_t next) {
        const int64_t from = p.ragged.initial_slots[s], to = p.ragged.final_slots[s];
        const bool whole = channels % kLanes == 0;
        source = {zeros, 0};
        source_vector = 0;
        if (from >= 0 && whole) {
            source = {slot(from), p.d_inner};
            source_vector = kLanes;
        } else if (from >= 0) {
            read_state(from);
            continue_in_scratch();
        }
        final_written = to < 0;
        target = {to >= 0 && whole ? slot(to) : nullptr, p.d_inner};
        state_now = from >= 0 ? slot(from) : nullptr;
        state_next = next >= 0 ? slot(next) : nullptr;
    }

    void continue_in_scratch() {
        source = {h, kLanes};
        source_vector = n * kLanes;
    }

    // Processes tokens [t0, t0 + tokens) of the packed batch. last: they end the sequence, and only the final
    // state is needed after them.
    void scan_tokens(int64_t t0, int64_t tokens, bool last) {
        const bool direct = last && target.base != nullptr;
        pack_BC(t0, tokens);
        for (int64_t v = 0; v < vectors; v += kTileChannels / kLanes) {
            scan_tile({v, smaller(vectors - v, kTileChannels / kLanes), t0, tokens}, direct);
        }
        continue_in_scratch();
        if (direct) final_written = true;
    }

    void scan_tile(const Tile& tile, bool direct) {
        prepare_rows(tile);
        int64_t v = tile.vector;
        const int64_t end = tile.vector + tile.vectors;
        for (; tile.tokens == 1 && v + kGroup <= end; v += kGroup) {
            prefetch_state(v + kTileChannels / kLanes);
            scan_group(tile, v, direct);
        }
        for (; v < end; ++v) scan_vector(tile, v, direct);
        finish_rows(tile);
    }

    Carry source_of(int64_t v) const { return {source.base + v * source_vector, source.stride}; }

    // Returns the destination of the state after the tile: the target slot if direct, else h for the next
    // tile.
    Carry target_of(int64_t v, bool direct) const {
        return direct ? Carry{target.base + v * kLanes, target.stride} : Carry{h + v * n * kLanes, kLanes};
    }

    // Returns true if |dt A log2 e| <= 125 for every state and token of the vector.
    bool bounded(const Tile& tile, int64_t v) const {
        const Vec largest = Vec::load(largest_dt + (v - tile.vector) * kLanes);
        return (Vec::load(largest_A + v * kLanes) * largest <= Vec::broadcast(125.0f)).all();
    }

    void scan_group(const Tile& tile, int64_t v, bool direct) {
        bool all_bounded = true;
        for (int g = 0; g < kGroup; ++g) all_bounded = all_bounded && bounded(tile, v + g);
        const Step step = {rows + (v - tile.vector) * vector_rows,
                           A + v * n * kLanes,
                           BC,
                           source_of(v),
                           target_of(v, direct),
                           vector_rows,
                           n * kLanes,
                           source_vector,
                           direct ? kLanes : n * kLanes};
        if (all_bounded) {
            scan_step<true>(step, n);
        } else {
            scan_step<false>(step, n);
        }
    }

    void scan_vector(const Tile& tile, int64_t v, bool direct) {
        const Carry from = source_of(v), to = target_of(v, direct);
        const bool is_bounded = bounded(tile, v);
        float* row = rows + (v - tile.vector) * vector_rows;
        const float* packed = BC;
        int64_t number = (v - tile.vector) * ((n + kBlockStates - 1) / kBlockStates);
        each_block(n, [&](int64_t i, auto states) {
            constexpr int kStates = decltype(states)::value;
            const Pass pass = {row,
                               tile.tokens,
                               A + (v * n + i) * kLanes,
                               packed,
                               {from.base + i * from.stride, from.stride},
                               {to.base + i * to.stride, to.stride},
                               ahead_of(tile, row, number++)};
            if (is_bounded) {
                scan_states<kStates, true>(pass);
            } else {
                scan_states<kStates, false>(pass);
            }
            packed += 2 * kStates * tile.tokens;
        });
    }

    // Returns the memory to prefetch during block number `number` of the tile. Rows are far apart, so the
    // hardware prefetcher misses them, and prefetching all at once would stall. So each block of states
    // prefetches one column of two cache lines, of this tile's output and z or of the next tile's x and dt.
    Ahead ahead_of(const Tile& tile, const float* row, int64_t number) const {
        const int64_t c = tile.vector * kLanes, last = c + kTileChannels >= channels;
        const int64_t columns = (smaller(kTileChannels, channels - c) * int64_t(sizeof(T)) + 127) / 128;
        const int64_t t = last ? tile.t0 + tile.tokens : tile.t0, next = last ? 0 : c + kTileChannels;
        const int64_t offset = number % columns * 128;
        switch (number / columns) {
            case 0:
                return column(p.out, p.out_stride, tile.t0, c, offset);
            case 1:
                return column(p.x, p.x_stride, t, next, offset);
            case 2:
                return column(p.dt, p.dt_stride, t, next, offset);
            case 3:
                if (p.z != nullptr) return column(p.z, p.z_stride, tile.t0, c, offset);
        }
        return {reinterpret_cast<uintptr_t>(row), 0};
    }

    Ahead column(const void* base, int64_t stride, int64_t t, int64_t c, int64_t offset) const {
        const int64_t size = int64_t(sizeof(T));
        return {reinterpret_cast<uintptr_t>(base) + uintptr_t((t * stride + c0 + c) * size + offset),
                stride * size};
    }

    // Prefetches the states of a tile while the previous tile is computed, as a short sequence uses each
    // state only a few times.
    void prefetch_state(int64_t v) const {
        const float* at = v < vectors ? state_now : state_next;
        if (v >= vectors) v -= vectors;
        if (at == nullptr || v >= vectors) return;
        for (int64_t i = 0; i < n; ++i) __builtin_prefetch(at + i * p.d_inner + v * kLanes, 0, 2);
    }

    void pack_BC(int64_t t0, int64_t tokens) {
        const T* B = static_cast<const T*>(p.B) + t0 * p.B_stride;
        const T* C = static_cast<const T*>(p.C) + t0 * p.C_stride;
        float* to = BC;
        each_block(n, [&](int64_t i, auto states) {
            pack_states<decltype(states)::value>(Selected<T>{B + i, C + i, p.B_stride, p.C_stride, tokens},
                                                 to);
            to += 2 * states.value * tokens;
        });
    }

    void prepare_rows(const Tile& tile) {
        for (int64_t c = 0; c < kTileChannels; c += kLanes) Vec::zero().store(largest_dt + c);
        for (int64_t t = 0; t < tile.tokens; ++t) {
            const T* x = static_cast<const T*>(p.x) + (tile.t0 + t) * p.x_stride + c0;
            const T* dt = static_cast<const T*>(p.dt) + (tile.t0 + t) * p.dt_stride + c0;
            float* to = rows + t * kRow;
            const int64_t end = tile.vector + tile.vectors;
            for (int64_t v = tile.vector; v < end; ++v, to += vector_rows) {
                float* largest = largest_dt + (v - tile.vector) * kLanes;
                if (lanes_of(v) == kLanes) {
                    prepare_row(Vec::load(x + v * kLanes), Vec::load(dt + v * kLanes), v, to, largest);
                } else {
                    const int64_t count = lanes_of(v);
                    prepare_row(load_partial(x + v * kLanes, count), load_partial(dt + v * kLanes, count), v,
                                to, largest);
                }
            }
        }
    }

    APC_INLINE void prepare_row(Vec x, Vec raw, int64_t v, float* to, float* largest) const {
        const Vec dt = softplus(raw + Vec::load(dt_bias + v * kLanes));
        dt.store(to);
        (dt * x).store(to + kLanes);
        (Vec::load(D + v * kLanes) * x).store(to + 2 * kLanes);
        as_float(max(as_bits(Vec::load(largest)), as_bits(absolute(dt)))).store(largest);
    }

    void finish_rows(const Tile& tile) const {
        const int64_t c = c0 + tile.vector * kLanes;
        const int64_t whole = smaller(tile.vectors, channels / kLanes - tile.vector), next = vector_rows;
        for (int64_t t = 0; t < tile.tokens; ++t) {
            const float* y = rows + t * kRow + 2 * kLanes;
            const T* z = static_cast<const T*>(p.z);
            if (z != nullptr) z += (tile.t0 + t) * p.z_stride + c;
            T* out = static_cast<T*>(p.out) + (tile.t0 + t) * p.out_stride + c;
            if (z != nullptr) {
                for (int64_t v = 0; v < whole; ++v) {
                    (Vec::load(y + v * next) * silu(Vec::load(z + v * kLanes))).store(out + v * kLanes);
                }
            } else {
                for (int64_t v = 0; v < whole; ++v) Vec::load(y + v * next).store(out + v * kLanes);
            }
            if (whole == tile.vectors) continue;
            const int64_t count = lanes_of(tile.vector + whole);
            Vec value = Vec::load(y + whole * next);
            if (z != nullptr) value = value * silu(load_partial(z + whole * kLanes, count));
            store_partial(value, out + whole * kLanes, count);
        }
    }

    void read_state(int64_t index) {
        for (int64_t i = 0; i < n; ++i) {
            const float* from = slot(index) + i * p.d_inner;
            for (int64_t v = 0; v < vectors; ++v) {
                load_first(from + v * kLanes, lanes_of(v)).store(h + (v * n + i) * kLanes);
            }
        }
    }

    void write_state(int64_t index) {
        for (int64_t i = 0; i < n; ++i) {
            float* to = slot(index) + i * p.d_inner;
            for (int64_t v = 0; v < vectors; ++v) {
                store_first(Vec::load(h + (v * n + i) * kLanes), to + v * kLanes, lanes_of(v));
            }
        }
    }
};

template <class T>
void run_unit(const ScanParams& params, const Unit& unit, float* scratch) {
    UnitScan<T> scan(params, unit, scratch);
    for (int64_t s = unit.sequence_begin; s < unit.sequence_end; s += unit.sequence_step) {
        const int64_t next = s + unit.sequence_step;
        scan.run(s, next < unit.sequence_end ? params.ragged.initial_slots[next] : -1);
    }
}

}  // namespace scan

void selective_scan_unit(const ScanParams& params, const Unit& unit, float* scratch) {
    with_type(params.dtype, [&](auto x) { scan::run_unit<TypeOf<decltype(x)>>(params, unit, scratch); });
}

}  // namespace APC_ISA
}  // namespace apcbatch
