// Recurrence of one unit: some blocks of a value head of one sequence. head_scan.h has the equations,
// head_scan_update.h the inner loops.
//
// Tokens are processed in tiles, which end at snapshots. Each group of vectors of a block runs over the tile.
// In the delta rule it computes m of the first token, and the update by a token also computes m of the next;
// decay k of a token is prepared two tokens ahead, in a ring that stays in the L1 cache beside the block. In
// ssd it takes two tokens at a time. The first update reads the state from its slot and the last one writes
// it to its slot, if the tile begins or ends with one; in between the state is in scratch.
// Blocks whose lanes are not whole vectors are padded in scratch, and copied from and to slots.
#pragma once

#include "head_scan.h"
#include "head_scan_update.h"
#include "square_sum.h"
#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {
namespace scan_of_heads {

APC_INLINE int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }

// Computes decay, and sigmoid(b) or dt, of all value heads of a token.
template <class T>
void prepare_gates(const HeadScanParams& p, const HeadScanInputs& inputs, int64_t token) {
    const bool is_ssd = p.rule == HeadRule::ssd;
    const T* a = static_cast<const T*>(p.a) + token * p.a_stride;
    const T* b = is_ssd ? nullptr : static_cast<const T*>(p.b) + token * p.b_stride;
    float decay[kLanes], factor[kLanes];
    for (int64_t h = 0; h < p.value_heads; h += kLanes) {
        const int64_t left = p.value_heads - h;
        Vec dt = softplus(load_first(a + h, left) + load_first(p.dt_bias + h, left));
        // NaN is the second operand, and so the result
        if (is_ssd) dt = min(Vec::broadcast(p.dt_max), max(Vec::broadcast(p.dt_min), dt));
        exp(load_first(p.A + h, left) * dt).store(decay);
        (is_ssd ? dt : sigmoid(load_first(b + h, left))).store(factor);
        for (int64_t i = 0; i < smaller(left, kLanes); ++i) {
            float* to = inputs.gates_of(h + i, token);
            to[0] = decay[i];
            to[1] = factor[i];
        }
    }
}

// Multiplies a row of `count` values by `scale`, in the delta rule divides it by its Euclidean length, and
// pads it with zeros to `columns`.
template <class T>
APC_INLINE void prepare_row(HeadRule rule, const T* x, int64_t count, int64_t columns, float scale,
                            float* to) {
    if (rule == HeadRule::delta) scale = 1.0f / __builtin_sqrtf(square_sum(x, count) + 1e-6f) * scale;
    const Vec factor = Vec::broadcast(scale);
    for (int64_t i = 0; i < columns; i += kLanes) {
        (i < count ? load_first(x + i, count - i) * factor : Vec::zero()).store(to + i);
    }
}

template <class T>
void prepare_tokens(const HeadScanParams& p, const HeadScanInputs& inputs, int64_t begin, int64_t end) {
    const float scale = p.rule == HeadRule::delta ? 1.0f / __builtin_sqrtf(float(p.key_dim)) : 1.0f;
    for (int64_t t = begin; t < end; ++t) {
        const T* q = static_cast<const T*>(p.q) + t * p.q_stride;
        const T* k = static_cast<const T*>(p.k) + t * p.k_stride;
        for (int64_t head = 0; head < p.key_heads; ++head) {
            float* to = inputs.q(head, t);
            prepare_row(p.rule, q + head * p.key_dim, p.key_dim, inputs.columns, scale, to);
            prepare_row(p.rule, k + head * p.key_dim, p.key_dim, inputs.columns, 1.0f, to + inputs.columns);
        }
        const T* v = static_cast<const T*>(p.v) + t * p.v_stride;
        for (int64_t head = 0; head < p.value_heads; ++head, v += p.value_dim) {
            convert_row(v, inputs.v(head, t), p.value_dim);
        }
        prepare_gates<T>(p, inputs, t);
    }
}

// Tokens [token, token + tokens) of the packed batch. from, to: slots that hold the state before and after
// them; -1: scratch. more: tokens of the sequence after them.
struct Tile {
    int64_t token, tokens;
    int64_t from, to;
    int64_t more;
};

// Computation of one unit. Scratch, head_scan_scratch_floats floats:
//   rows (ring of kRingTokens tokens, decay k) | states (block, key, lane)
template <HeadRule kRule>
class UnitScan {
  public:
    UnitScan(const HeadScanParams& params, const HeadScanInputs& inputs_, const HeadScanUnit& unit_,
             float* scratch)
        : p(params), inputs(inputs_), unit(unit_), columns(inputs_.columns) {
        is_whole = p.lanes % kLanes == 0;
        stride = is_whole ? p.lanes : padded(p.lanes);
        rows = scratch;
        states = scratch + kRingTokens * columns;
        key_head = unit.head / (p.value_heads / p.key_heads);
    }

    void run() {
        const RaggedParams& ragged = p.ragged;
        const int64_t s = unit.sequence, begin = ragged.cu_seqlens[s],
                      length = ragged.cu_seqlens[s + 1] - begin;
        const int64_t initial = ragged.initial_slots[s], final = ragged.final_slots[s];
        int64_t snapshot = ragged.snapshot_cu[s], at = begin_sequence(initial);
        const int64_t snapshots_end = ragged.snapshot_cu[s + 1];
        for (int64_t done = 0; done < length;) {
            int64_t end = smaller(done + kScanTile, length), to = end == length ? final : -1;
            if (snapshot < snapshots_end && ragged.snapshot_positions[snapshot] <= end) {
                end = ragged.snapshot_positions[snapshot];
                to = ragged.snapshot_slots[snapshot++];
            }
            at = run_tile({begin + done, end - done, at, to, length - end});
            done = end;
        }
        if (final >= 0 && at != final) copy_states(at, final);
    }

  private:
    const HeadScanParams& p;
    const HeadScanInputs& inputs;
    const HeadScanUnit unit;
    const int64_t columns;  // floats of a row of keys
    bool is_whole;          // the lanes of a block are whole vectors
    int64_t stride;         // floats of a row of lanes in scratch
    float *rows, *states;
    int64_t key_head;

    float* slot(int64_t index, int64_t block) const {
        const int64_t number = unit.head * (p.value_dim / p.lanes) + unit.block + block;
        return p.state + index * p.state_stride + number * p.key_dim * p.lanes;
    }
    float* state(int64_t index, int64_t block) const {
        return index >= 0 && is_whole ? slot(index, block) : states + block * p.key_dim * stride;
    }

    // Returns where the state before the first token is: a slot, or -1 for scratch.
    int64_t begin_sequence(int64_t initial) {
        if (initial >= 0 && is_whole) return initial;
        memset(states, 0, sizeof(float) * size_t(unit.blocks * p.key_dim * stride));
        if (initial >= 0) copy_rows(initial, false);
        return -1;
    }

    // Copies blocks between scratch, where rows are padded, and a slot. out: to the slot.
    void copy_rows(int64_t index, bool out) const {
        for (int64_t block = 0; block < unit.blocks; ++block) {
            for (int64_t i = 0; i < p.key_dim; ++i) {
                float* inside = states + (block * p.key_dim + i) * stride;
                float* outside = slot(index, block) + i * p.lanes;
                memcpy(out ? outside : inside, out ? inside : outside, sizeof(float) * size_t(p.lanes));
            }
        }
    }

    void copy_states(int64_t from, int64_t to) const {
        if (!is_whole) return copy_rows(to, true);
        for (int64_t block = 0; block < unit.blocks; ++block) {
            memcpy(slot(to, block), state(from, block), sizeof(float) * size_t(p.key_dim * p.lanes));
        }
    }

    // Returns where the state after the tile is: a slot, or -1 for scratch.
    int64_t run_tile(const Tile& tile) {
        for (int64_t block = 0; block < unit.blocks; ++block) {
            constexpr int kMost = kRule == HeadRule::ssd ? kPair : kGroup;
            const int64_t vectors = (p.lanes + kLanes - 1) / kLanes;
            for (int64_t v = 0; v < vectors; v += kMost) {
                with_number<kMost>(smaller(vectors - v, kMost), [&](auto count) {
                    run_columns<decltype(count)::value>(tile, block, v * kLanes);
                });
            }
        }
        if (is_whole) return tile.to;
        if (tile.to >= 0) copy_rows(tile.to, true);
        return -1;
    }

    float* decay_k(int64_t t) const { return rows + t % kRingTokens * columns; }

    // Prepares decay k of token t of the tile.
    void prepare(const Tile& tile, int64_t t) const {
        const Vec decay = Vec::broadcast(*inputs.gates_of(unit.head, tile.token + t));
        const float* k = inputs.q(key_head, tile.token + t) + columns;
        float* to = decay_k(t);
        for (int64_t i = 0; i < columns; i += kLanes) (decay * Vec::load(k + i)).store(to + i);
    }

    template <int kVecs>
    void run_columns(const Tile& tile, int64_t block, int64_t column) const {
        if (stride == kBlock) {
            run_group<kVecs, int(kBlock)>(tile, block, column);
        } else {
            run_group<kVecs, 0>(tile, block, column);
        }
    }

    // Addresses of a group of vectors over a tile: of its columns in the state before the tile, between its
    // tokens and after it, and in v and the outputs of its first token. left: columns from the group on.
    struct Group {
        const float* from;
        float *work, *to;
        const float* values;
        float* out;
        int64_t left;
        uintptr_t after;
    };

    // Runs kVecs vectors from `column` of a block over the tile.
    template <int kVecs, int kStride>
    void run_group(const Tile& tile, int64_t block, int64_t column) const {
        const int64_t value = (unit.block + block) * p.lanes + column;
        const Group group = {
            state(tile.from, block) + column,
            states + block * p.key_dim * stride + column,
            state(tile.to, block) + column,
            inputs.v(unit.head, tile.token) + value,
            p.out + unit.head * p.out_head_stride + tile.token * p.out_stride + value,
            p.lanes - column,
            after(tile, block, column),
        };
        if constexpr (kRule == HeadRule::ssd) {
            run_ssd<kVecs, kStride>(tile, group);
        } else {
            run_delta<kVecs, kStride>(tile, group);
        }
    }

    template <int kVecs>
    APC_INLINE void load_value(const Group& group, int64_t t, Vec* x) const {
        for (int v = 0; v < kVecs; ++v) {
            x[v] = load_first(group.values + t * p.value_dim + v * kLanes, group.left - v * kLanes);
        }
    }
    template <int kVecs>
    APC_INLINE void store_output(const Group& group, int64_t t, const Vec* o) const {
        for (int v = 0; v < kVecs; ++v) {
            store_first(o[v], group.out + t * p.out_stride + v * kLanes, group.left - v * kLanes);
        }
    }

    template <int kVecs, int kStride>
    void run_ssd(const Tile& tile, const Group& group) const {
        const float* from = group.from;
        const Vec D = Vec::broadcast(p.D[unit.head]);
        Vec x[2][kVecs], u[2][kVecs], o[2][kVecs], none[kVecs];
        for (int64_t t = 0; t < tile.tokens;) {
            const int count = t + 1 < tile.tokens ? 2 : 1;
            const float* gates = inputs.gates_of(unit.head, tile.token + t);
            Keys keys[2];
            for (int i = 0; i < count; ++i) {
                const float* q = inputs.q(key_head, tile.token + t + i);
                keys[i] = {q, q + columns, q, p.key_dim};
                load_value<kVecs>(group, t + i, x[i]);
                for (int v = 0; v < kVecs; ++v) u[i][v] = Vec::broadcast(gates[2 * i + 1]) * x[i][v];
            }
            float* to = t + count < tile.tokens ? group.work : group.to;
            const Columns<kStride> rows = {from, to, stride};
            if (count == 2) {
                const float decay[2] = {gates[0], gates[2]};
                update_block_twice<kVecs, kStride>(keys, rows, decay, u, o);
            } else {
                update_block<kVecs, kStride, false>(keys[0], rows, gates[0], u[0], group.after, o[0], none);
            }
            from = to;
            for (int i = 0; i < count; ++i, ++t) {
                for (int v = 0; v < kVecs; ++v) accumulate(o[i][v], D, x[i][v]);
                store_output<kVecs>(group, t, o[i]);
            }
        }
    }

    template <int kVecs, int kStride>
    void run_delta(const Tile& tile, const Group& group) const {
        const float* from = group.from;
        Vec u[kVecs], o[kVecs], m[kVecs];
        prepare(tile, 0);
        if (tile.tokens > 1) prepare(tile, 1);
        read_block<kVecs, kStride>(decay_k(0), p.key_dim, {from, group.work, stride}, m);
        for (int64_t t = 0; t < tile.tokens; ++t) {
            // Two tokens ahead, so that it overlaps with the sums of the previous update.
            if (t + 2 < tile.tokens) prepare(tile, t + 2);
            const float* gate = inputs.gates_of(unit.head, tile.token + t);
            const Vec beta = Vec::broadcast(gate[1]);
            load_value<kVecs>(group, t, u);
            for (int v = 0; v < kVecs; ++v) u[v] = beta * (u[v] - m[v]);
            const float* q = inputs.q(key_head, tile.token + t);
            if (t + 1 < tile.tokens) {
                const Keys token = {q, q + columns, decay_k(t + 1), p.key_dim};
                update_block<kVecs, kStride, true>(token, {from, group.work, stride}, gate[0], u, 0, o, m);
                from = group.work;
            } else {
                const Keys token = {q, q + columns, q, p.key_dim};
                update_block<kVecs, kStride, false>(token, {from, group.to, stride}, gate[0], u, group.after,
                                                    o, m);
            }
            store_output<kVecs>(group, t, o);
        }
    }

    // Returns the address that the last update of a tile prefetches: the next block of the slot that the
    // tile began with, if the tile ends its sequence (as in a decode pass); else scratch, which is in the
    // cache.
    uintptr_t after(const Tile& tile, int64_t block, int64_t column) const {
        const bool is_last =
            unit.head + 1 == p.value_heads && unit.block + block + 1 == p.value_dim / p.lanes;
        if (tile.more > 0 || tile.from < 0 || is_last || !is_whole) return uintptr_t(states);
        return uintptr_t(slot(tile.from, block + 1) + column);
    }
};

}  // namespace scan_of_heads

void head_scan_prepare(const HeadScanParams& params, const HeadScanInputs& inputs, int64_t begin,
                       int64_t end) {
    with_type(params.dtype, [&](auto x) {
        scan_of_heads::prepare_tokens<TypeOf<decltype(x)>>(params, inputs, begin, end);
    });
}

void head_scan_unit(const HeadScanParams& params, const HeadScanInputs& inputs, const HeadScanUnit& unit,
                    float* scratch) {
    if (params.rule == HeadRule::ssd) {
        scan_of_heads::UnitScan<HeadRule::ssd>(params, inputs, unit, scratch).run();
    } else {
        scan_of_heads::UnitScan<HeadRule::delta>(params, inputs, unit, scratch).run();
    }
}

}  // namespace APC_ISA
}  // namespace apcbatch
