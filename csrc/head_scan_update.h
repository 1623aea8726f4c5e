// The inner loops of the recurrences over heads, with the vectors of simd.h: multiply a block of the state by
// a key, and update it by one token or by two.
//
// Lanes run over the columns of v, keys ascend, and nothing is added across lanes. So every vector width
// gives the same bits. m is a sum from 0 with one fma per key, whether `read_block` computes it at the
// beginning of a tile or `update_block` computes it in the previous update. So no bit depends on where a
// sequence is cut.
#pragma once

#include "simd.h"

namespace apcbatch {
namespace APC_ISA {
namespace scan_of_heads {

constexpr int kGroup = 4;  // vectors of a group: their o, m and u stay in registers
// Vectors updated by two tokens at a time: their two o and u, of 16 registers without AVX-512, stay there.
constexpr int kPair = kLanes == 16 ? 4 : 2;
constexpr int kUnrolled = 4;    // keys per iteration
constexpr int64_t kBlock = 64;  // lanes of a whole block: its row stride is a constant of the loop

// Rows of a group of vectors in a block of the state, `stride` floats apart.
template <int kStride>
struct Columns {
    const float* from;
    float* to;
    int64_t stride;
    APC_INLINE int64_t at(int64_t key) const { return key * (kStride > 0 ? kStride : stride); }
};

// Values of one token, one per key. next: decay k of the next token.
struct Keys {
    const float *q, *k, *next;
    int64_t count;
};

// m = sum_i key_i S_i.
template <int kVecs, int kStride>
APC_INLINE void read_block(const float* key, int64_t keys, const Columns<kStride>& s, Vec* m) {
    for (int v = 0; v < kVecs; ++v) m[v] = Vec::zero();
    for (int64_t i = 0; i < keys; ++i) {
        const Vec one = Vec::broadcast(key[i]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) m[v] = fma(one, Vec::load(s.from + s.at(i) + v * kLanes), m[v]);
    }
}

// kNext: also compute m of the next token.
template <int kVecs, int kStride, bool kNext>
APC_INLINE void update_row(const Keys& keys, int64_t i, const Columns<kStride>& s, int64_t at, Vec decay,
                           const Vec* u, Vec* o, Vec* m) {
    const Vec k = Vec::broadcast(keys.k[i]), q = Vec::broadcast(keys.q[i]);
    Vec next = Vec::zero();
    if (kNext) next = Vec::broadcast(keys.next[i]);
    Vec value[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
        value[v] = decay * Vec::load(s.from + at + v * kLanes);
        accumulate(value[v], k, u[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
        value[v].store(s.to + at + v * kLanes);
        accumulate(o[v], q, value[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; kNext && v < kVecs; ++v) accumulate(m[v], next, value[v]);
}

// Updates the last keys, fewer than kUnrolled, with o and m in memory. Not inlined, so that the loop before
// it can keep o and m in registers.
template <int kVecs, int kStride, bool kNext>
__attribute__((noinline)) void update_rest(const Keys& keys, const Columns<kStride>& s, float decay,
                                           const Vec* u, Vec* o, Vec* m) {
    for (int64_t i = 0; i < keys.count; ++i) {
        update_row<kVecs, kStride, kNext>(keys, i, s, s.at(i), Vec::broadcast(decay), u, o, m);
    }
}

// S_i = fma(k_i, u, decay S_i), o = sum_i q_i S_i and, with kNext, m = sum_i next_i S_i: four operations
// per vector of the state. Without kNext it prefetches the same columns of the block at address `ahead`.
template <int kVecs, int kStride, bool kNext>
APC_INLINE void update_block(Keys keys, Columns<kStride> s, float decay_, const Vec* u_, uintptr_t ahead,
                             Vec* o_, Vec* m_) {
    const Vec decay = Vec::broadcast(decay_);
    Vec u[kVecs], o[kVecs], m[kVecs];
    for (int v = 0; v < kVecs; ++v) {
        u[v] = u_[v];
        o[v] = m[v] = Vec::zero();
    }
    for (; keys.count >= kUnrolled; keys.count -= kUnrolled) {
#pragma GCC unroll 4
        for (int j = 0; j < kUnrolled; ++j) {
            update_row<kVecs, kStride, kNext>(keys, j, s, s.at(j), decay, u, o, m);
            if (!kNext) {
                for (int v = 0; v < kVecs * kLanes; v += 16) {
                    __builtin_prefetch(reinterpret_cast<const void*>(ahead + 4 * uintptr_t(s.at(j) + v)), 0,
                                       2);
                }
            }
        }
        s.from += s.at(kUnrolled);
        s.to += s.at(kUnrolled);
        ahead += 4 * uintptr_t(s.at(kUnrolled));
        keys.q += kUnrolled;
        keys.k += kUnrolled;
        keys.next += kUnrolled;
    }
    for (int v = 0; v < kVecs; ++v) {
        o_[v] = o[v];
        m_[v] = m[v];
    }
    if (keys.count > 0) update_rest<kVecs, kStride, kNext>(keys, s, decay_, u_, o_, m_);
}

// Updates row i by two tokens: the bits of two updates, with one load and one store of the state.
template <int kVecs, int kStride>
APC_INLINE void update_row_twice(const Keys* keys, int64_t i, const Columns<kStride>& s, const Vec* decay,
                                 Vec (*u)[kVecs], Vec (*o)[kVecs]) {
    const int64_t at = s.at(i);
    Vec value[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) value[v] = Vec::load(s.from + at + v * kLanes);
#pragma GCC unroll 2
    for (int t = 0; t < 2; ++t) {
        const Vec k = Vec::broadcast(keys[t].k[i]), q = Vec::broadcast(keys[t].q[i]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            value[v] = decay[t] * value[v];
            accumulate(value[v], k, u[t][v]);
            accumulate(o[t][v], q, value[v]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) value[v].store(s.to + at + v * kLanes);
}

// Updates a block by two tokens, without m.
template <int kVecs, int kStride>
APC_INLINE void update_block_twice(const Keys* keys, const Columns<kStride>& s, const float* decay_,
                                   Vec (*u)[kVecs], Vec (*o_)[kVecs]) {
    const Vec decay[2] = {Vec::broadcast(decay_[0]), Vec::broadcast(decay_[1])};
    Vec o[2][kVecs];
    for (int t = 0; t < 2; ++t) {
        for (int v = 0; v < kVecs; ++v) o[t][v] = Vec::zero();
    }
    const int64_t whole = keys->count / kUnrolled * kUnrolled;
    for (int64_t i = 0; i < whole; i += kUnrolled) {
#pragma GCC unroll 4
        for (int j = 0; j < kUnrolled; ++j) update_row_twice<kVecs, kStride>(keys, i + j, s, decay, u, o);
    }
    for (int64_t i = whole; i < keys->count; ++i) {
        update_row_twice<kVecs, kStride>(keys, i, s, decay, u, o);
    }
    for (int t = 0; t < 2; ++t) {
        for (int v = 0; v < kVecs; ++v) o_[t][v] = o[t][v];
    }
}

}  // namespace scan_of_heads
}  // namespace APC_ISA
}  // namespace apcbatch
