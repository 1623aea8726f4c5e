// The recurrence of the selective scan over the vectors of simd.h, in two forms: a block of states over many
// tokens, and all states over one token.
//
// Both do the same operations on the same values in the same order, so they can alternate. Each state is one
// chain h = fma(2^(dt A log2 e), h, (dt x) B) over the tokens. Each token is one chain y = fma(C, h, y) over
// the states, ascending, for any block size.
#pragma once

#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {
namespace scan {

// States of a block, whose h stay in registers during the loop over tokens; more would be spilled.
constexpr int kBlockStates = 8;
// Vectors of channels that fill a cache line; single tokens are processed in such groups.
constexpr int kGroup = 16 / kLanes;
constexpr int64_t kRow = 3 * kLanes;  // floats of a row: vectors of dt, dt x, y

// Calls body(first, Number<states>()) for each block of n states: full blocks, then powers of two.
template <class Body>
APC_INLINE void each_block(int64_t n, const Body& body) {
    static_assert(kBlockStates == 8, "4, 2 and 1 are the sizes below it");
    int64_t first = 0;
    for (; first + kBlockStates <= n; first += kBlockStates) body(first, Number<kBlockStates>());
    if (n & 4) body(first, Number<4>());
    if (n & 2) body(first + (n & 4), Number<2>());
    if (n & 1) body(n - 1, Number<1>());
}

// B and C of a block's states, `tokens` rows each.
template <class T>
struct Selected {
    const T *B, *C;
    int64_t B_stride, C_stride, tokens;
};

// Widens B and C to one row per token: the block's B, then its C. The number of states is a template
// argument, so the compiler vectorises it.
template <int kStates, class T>
void pack_states(const Selected<T>& from, float* to) {
    for (int64_t t = 0; t < from.tokens; ++t, to += 2 * kStates) {
        const T *b = from.B + t * from.B_stride, *c = from.C + t * from.C_stride;
        for (int i = 0; i < kStates; ++i) to[i] = to_float(b[i]);
        for (int i = 0; i < kStates; ++i) to[kStates + i] = to_float(c[i]);
    }
}

// Source or destination of a block's h: state n of the block is at base + n * stride.
struct Carry {
    float* base;
    int64_t stride;
};

// Memory to prefetch, two cache lines per token: address + t * step, in bytes.
struct Ahead {
    uintptr_t address;
    int64_t step;
};

// Operands of one block of states of one vector of channels, over the rows of a tile.
struct Pass {
    float* rows;
    int64_t tokens;
    const float* A;   // a vector per state, multiplied by log2 e
    const float* BC;  // a row per token: the block's B, then its C
    Carry from, to;
    Ahead ahead;
};

// Runs one block of states over a tile. kBounded: |dt A log2 e| <= 125 holds for all states and tokens.
//
// The states of a token are independent except for y. Each is a chain of about 40 cycles, longer than the
// processor's out-of-order window. So their steps are software-pipelined: while one state is updated, the
// polynomial of the next is evaluated and the exponent of the one after it is split.
template <int kStates, bool kBounded>
void scan_states(Pass pass) {
    Vec h[kStates];
#pragma GCC unroll 8
    for (int i = 0; i < kStates; ++i) h[i] = Vec::load(pass.from.base + i * pass.from.stride);
    float* row = pass.rows;
    const float* BC = pass.BC;
    for (int64_t t = 0; t < pass.tokens; ++t, row += kRow, BC += 2 * kStates) {
        const Vec dt = Vec::load(row), dtx = Vec::load(row + kLanes);
        Vec y = Vec::load(row + 2 * kLanes);
        __builtin_prefetch(reinterpret_cast<const void*>(pass.ahead.address));
        __builtin_prefetch(reinterpret_cast<const void*>(pass.ahead.address + 64));
        pass.ahead.address += uintptr_t(pass.ahead.step);
        Split split[kStates];
        Vec decay[kStates];
#pragma GCC unroll 10
        for (int step = 0; step < kStates + 2; ++step) {
            const int first = step, second = step - 1, third = step - 2;
            if (first < kStates) {
                const Vec a = Vec::load(pass.A + first * kLanes);
                if (kBounded) {
                    split[first] = split_product(a, dt);
                } else {
                    decay[first] = exp2_any(a, dt);
                }
            }
            if (kBounded && second >= 0 && second < kStates) decay[second] = exp2_of(split[second]);
            if (third >= 0) {
                h[third] = fma(decay[third], h[third], dtx * Vec::broadcast(BC[third]));
                y = fma(Vec::broadcast(BC[kStates + third]), h[third], y);
            }
        }
        y.store(row + 2 * kLanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kStates; ++i) h[i].store(pass.to.base + i * pass.to.stride);
}

// Operands of all states of one token, for kGroup adjacent vectors of channels: one cache line per state.
// Base and strides: see Carry. The vectors of the group are `vector` floats apart.
struct Step {
    float* row;
    const float* A;
    const float* BC;
    Carry from, to;
    int64_t row_vector, A_vector, from_vector, to_vector;
};

template <bool kBounded>
APC_INLINE Vec decay_of(Vec a, Vec dt) {
    return kBounded ? exp2_of(split_product(a, dt)) : exp2_any(a, dt);
}

// Does the same operations on the same values as scan_states for one token, reading h from one slot and
// writing it to another.
template <int kStates, bool kBounded>
APC_INLINE void step_states(const Step& step, int64_t first, const float* BC, const Vec* dt, const Vec* dtx,
                            Vec* y) {
#pragma GCC unroll 8
    for (int i = 0; i < kStates; ++i) {
        const Vec B = Vec::broadcast(BC[i]), C = Vec::broadcast(BC[kStates + i]);
        const float* from = step.from.base + (first + i) * step.from.stride;
        float* to = step.to.base + (first + i) * step.to.stride;
#pragma GCC unroll 2
        for (int g = 0; g < kGroup; ++g) {
            const Vec decay =
                decay_of<kBounded>(Vec::load(step.A + g * step.A_vector + (first + i) * kLanes), dt[g]);
            const Vec h = fma(decay, Vec::load(from + g * step.from_vector), dtx[g] * B);
            h.store(to + g * step.to_vector);
            y[g] = fma(C, h, y[g]);
        }
    }
}

template <bool kBounded>
void scan_step(const Step& step, int64_t n) {
    Vec dt[kGroup], dtx[kGroup], y[kGroup];
    for (int g = 0; g < kGroup; ++g) {
        dt[g] = Vec::load(step.row + g * step.row_vector);
        dtx[g] = Vec::load(step.row + g * step.row_vector + kLanes);
        y[g] = Vec::load(step.row + g * step.row_vector + 2 * kLanes);
    }
    const float* BC = step.BC;
    each_block(n, [&](int64_t i, auto states) {
        step_states<decltype(states)::value, kBounded>(step, i, BC, dt, dtx, y);
        BC += 2 * states.value;
    });
    for (int g = 0; g < kGroup; ++g) y[g].store(step.row + g * step.row_vector + 2 * kLanes);
}

}  // namespace scan
}  // namespace APC_ISA
}  // namespace apcbatch
