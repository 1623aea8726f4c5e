// Register tiles of the packed matrix product: some rows of x times one or more panels, over one block of k.
// Tiles of AMX registers are in gemm_amx.h.
#pragma once

#include "linear.h"
#include "simd.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

// Rows and panels of the largest tile: its sums fill the register file except for the operands.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTilePanels = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTilePanels = 1;
#else
constexpr int kTileRows = 4, kTilePanels = 1;
#endif

constexpr int kVecs = int(kPanel) / kLanes;  // vectors of one panel

constexpr int64_t kMostPanels = 8;  // maximum panels of a tile

// Returns how many bytes ahead of their use a tile prefetches weights, across the end of a panel's block into
// the next. Few rows use many panels at once; the hardware prefetcher follows their streams, so the distance
// is short.
constexpr int64_t ahead_of(int64_t rows) { return rows <= 3 ? 256 : 1024; }

enum class Mode {
    kFloat,    // float32 weights
    kWidened,  // bfloat16 weights, widened in registers; the arithmetic of kFloat
    kDot,      // bfloat16 weights and inputs in pairs, vdpbf16ps
    kMatrix,   // bfloat16 weights and inputs in AMX registers, tdpbf16ps
};

// Returns how this instruction set multiplies weights of a type.
constexpr Mode mode_of(Of<float>) { return Mode::kFloat; }
#if defined(__AMX_BF16__)
constexpr Mode mode_of(Of<BFloat16>) { return Mode::kMatrix; }
#elif defined(__AVX512BF16__)
constexpr Mode mode_of(Of<BFloat16>) { return Mode::kDot; }
#else
constexpr Mode mode_of(Of<BFloat16>) { return Mode::kWidened; }
#endif

template <Mode mode>
constexpr LinearShape shape_of = {kTileRows, 4.0, 0.5};

// Processor state that a thread needs while it multiplies; none by default.
template <Mode mode>
struct Registers {};

// Operands of one tile. Its sums start at zero or at `from`. They are written to `to` (rows of kPanel, panels
// sums_panel apart) or, with scale and bias applied, to y (rows y_row apart).
struct Tile {
    const char* a;        // rows of x in scratch
    const char* b;        // block of the first panel
    int64_t panel_bytes;  // from a panel's block to the next panel's
    int64_t k;
    int64_t ahead;      // distance in bytes of the prefetch into the L1 cache
    const char* later;  // weights to prefetch into the L2 cache, later_step bytes per step
    int64_t later_step;
    const float* from;  // or null
    float* to;
    int64_t sums_panel;
    void* y;  // or null
    int64_t y_row;
    DType y_dtype;
    const float *scale, *bias;  // or null
};

// Loads 4 bytes as a float; they may hold two bfloat16 values.
APC_INLINE float load_lane(const char* p) {
    float value;
    memcpy(&value, p, sizeof(value));
    return value;
}

// Widen the even, or the odd, k of one vector of (even, odd) pairs of bfloat16.
APC_INLINE Vec even_k(const char* p) { return as_float(shift_left<16>(as_bits(Vec::load_bytes(p)))); }
APC_INLINE Vec odd_k(const char* p) {
    return as_float(as_bits(Vec::load_bytes(p)) & VecI::broadcast(int32_t(0xffff0000u)));
}

// Returns the bytes from the first panel's row of weights to vector v of a tile.
APC_INLINE int64_t vector_bytes(int v, int64_t panel_bytes) {
    return (v / kVecs) * panel_bytes + (v % kVecs) * kLanes * 4;
}

// Computes acc += x w for one k. Rows values of x are at a, kRowBytes apart; weights(v) returns vector v of
// the Vecs vectors of weights. With many rows the vectors stay in registers, with few rows the values of x.
template <int Rows, int Vecs, class Weights>
APC_INLINE void multiply(Vec (&acc)[Rows][Vecs], const char* a, const Weights& weights) {
    if constexpr (Rows < Vecs) {
        Vec x[Rows];
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) x[r] = Vec::broadcast(load_lane(a + r * kRowBytes));
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) {
            const Vec w = weights(v);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) acc[r][v] = fma(x[r], w, acc[r][v]);
        }
    } else {
        Vec w[Vecs];
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) w[v] = weights(v);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const Vec x = Vec::broadcast(load_lane(a + r * kRowBytes));
#pragma GCC unroll 8
            for (int v = 0; v < Vecs; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
        }
    }
}

#if defined(__AVX512BF16__)
// The same for one pair of k in bfloat16: each lane adds the products of both k (vdpbf16ps).
template <int Rows, int Vecs, class Weights>
APC_INLINE void multiply_couples(Vec (&acc)[Rows][Vecs], const char* a, const Weights& weights) {
    Vec w[Vecs];
#pragma GCC unroll 8
    for (int v = 0; v < Vecs; ++v) w[v] = weights(v);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        const Vec x = Vec::broadcast(load_lane(a + r * kRowBytes));
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) {
            acc[r][v].v = _mm512_dpbf16_ps(acc[r][v].v, (__m512bh)x.v, (__m512bh)w[v].v);
        }
    }
}
#endif

template <int Rows, int Vecs>
APC_INLINE void load_sums(Vec (&acc)[Rows][Vecs], const float* from, int64_t panel) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) {
            const int64_t at = r * kPanel + (v / kVecs) * panel + (v % kVecs) * kLanes;
            acc[r][v] = from ? Vec::load(from + at) : Vec::zero();
        }
    }
}

template <class To, int Rows, int Vecs>
APC_INLINE void store_sums(const Vec (&acc)[Rows][Vecs], To* to, int64_t row, int64_t panel) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) {
            acc[r][v].store(to + r * row + (v / kVecs) * panel + (v % kVecs) * kLanes);
        }
    }
}

// Replaces each sum by apply(sum, values of its columns).
template <int Rows, int Vecs, class Apply>
APC_INLINE void apply_columns(Vec (&acc)[Rows][Vecs], const float* values, const Apply& apply) {
#pragma GCC unroll 8
    for (int v = 0; v < Vecs; ++v) {
        const Vec value = Vec::load(values + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) acc[r][v] = apply(acc[r][v], value);
    }
}

// Stores the sums of a block, or the results after the last one.
template <int Rows, int Vecs>
APC_INLINE void finish_tile(Vec (&acc)[Rows][Vecs], const Tile& t) {
    if (!t.y) return store_sums(acc, t.to, kPanel, t.sums_panel);
    if (t.scale) apply_columns(acc, t.scale, [](Vec sum, Vec value) { return sum * value; });
    if (t.bias) apply_columns(acc, t.bias, [](Vec sum, Vec value) { return sum + value; });
    with_type(t.y_dtype,
              [&](auto y) { store_sums(acc, static_cast<TypeOf<decltype(y)>*>(t.y), t.y_row, kPanel); });
}

// Not inline: inlined, the compiler would run out of registers in the loop.
template <int Rows, int Panels, Mode mode>
__attribute__((noinline)) void tile(const Tile& t) {
    Vec acc[Rows][Panels * kVecs];
    load_sums(acc, t.from, t.sums_panel);
    const char* a = t.a;
    const char* b = t.b;
    const char* later = t.later;
    const int64_t panel_bytes = t.panel_bytes, ahead = t.ahead, later_step = t.later_step;
    const auto whole = [&](int v) { return Vec::load_bytes(b + vector_bytes(v, panel_bytes)); };
    const auto even = [&](int v) { return even_k(b + vector_bytes(v, panel_bytes)); };
    const auto odd = [&](int v) { return odd_k(b + vector_bytes(v, panel_bytes)); };
    const int64_t steps = mode == Mode::kFloat ? t.k : mode == Mode::kDot ? (t.k + 1) / 2 : t.k / 2;
    for (int64_t step = 0; step < steps; ++step, b += kPanel * 4) {
#pragma GCC unroll 8
        for (int p = 0; p < Panels; ++p) {
            __builtin_prefetch(b + p * panel_bytes + ahead);
            __builtin_prefetch(later + p * panel_bytes, 0, 2);
        }
        later += later_step;
        if constexpr (mode == Mode::kFloat) {
            multiply(acc, a, whole);
            a += 4;
        } else if constexpr (mode == Mode::kWidened) {
            multiply(acc, a, even);
            multiply(acc, a + 4, odd);
            a += 8;
        } else {
#if defined(__AVX512BF16__)
            multiply_couples(acc, a, whole);
#endif
            a += 4;
        }
    }
    if (mode == Mode::kWidened && t.k % 2 != 0) multiply(acc, a, even);
    finish_tile(acc, t);
}

// Runs a tile of 1 to `most` rows.
template <Mode mode, int Panels, int most = kTileRows>
void run_rows(int64_t rows, const Tile& t) {
    with_number<most>(rows, [&](auto count) { tile<decltype(count)::value, Panels, mode>(t); });
}

// Returns the number of panels of the next tile, at most `left`: more panels for fewer rows, so that there
// are enough independent sums.
template <Mode mode>
int64_t tile_panels([[maybe_unused]] int64_t rows, int64_t left) {
    int64_t panels = kTilePanels;
#if defined(__AVX512F__)
    panels = rows == 1 ? 8 : rows <= 3 ? 4 : 2;
#elif defined(__AVX2__)
    panels = rows == 1 ? 4 : rows == 2 || (rows == 3 && mode == Mode::kFloat) ? 2 : 1;
#endif
    while (panels > left) panels /= 2;
    return panels;
}

// Runs one tile. panels: as returned by tile_panels.
template <Mode mode>
void run_tile(int64_t rows, [[maybe_unused]] int64_t panels, const Tile& t) {
#if defined(__AVX512F__)
    if (panels == 8) return run_rows<mode, 8, 1>(rows, t);
    if (panels == 4) return run_rows<mode, 4, 3>(rows, t);
    if (panels == 2) return run_rows<mode, 2>(rows, t);
#elif defined(__AVX2__)
    if (panels == 4) return run_rows<mode, 4, 1>(rows, t);
    if (panels == 2) return run_rows<mode, 2, 3>(rows, t);
#endif
    return run_rows<mode, 1>(rows, t);
}

}  // namespace
}  // namespace APC_ISA
}  // namespace apcbatch
