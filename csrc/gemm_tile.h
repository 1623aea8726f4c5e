// The register tiles of the packed matrix product: some rows of x times one or more panels, over one block of
// k. Those of matrix registers are in gemm_amx.h.
#pragma once

#include "linear.h"
#include "simd.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

// Rows and panels of the largest tile: its sums fill the register file but for the operands.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTilePanels = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTilePanels = 1;
#else
constexpr int kTileRows = 4, kTilePanels = 1;
#endif

constexpr int kVecs = int(kPanel) / kLanes;  // vectors of one panel

constexpr int64_t kMostPanels = 8;  // of any tile

// Weights are fetched this many bytes before a tile uses them, also over the end of a panel's block into the
// next: few where few rows take many panels, whose streams the processor follows by itself.
constexpr int64_t ahead_of(int64_t rows) { return rows <= 3 ? 256 : 1024; }

enum class Mode {
    kFloat,    // float32 weights
    kWidened,  // bfloat16 weights, widened in registers; the arithmetic of kFloat
    kDot,      // bfloat16 weights and inputs in couples, vdpbf16ps
    kMatrix,   // bfloat16 weights and inputs in matrix registers, tdpbf16ps
};

// How weights of a type are multiplied here.
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

// What a thread must have while it multiplies.
template <Mode mode>
struct Registers {};

// What one tile reads and writes. Its sums start at zero or at `from`, and go to `to` (rows of kPanel, panels
// sums_panel apart) or, with the bias, to y (rows y_row apart).
struct Tile {
    const char* a;        // rows in scratch
    const char* b;        // the first panel's block
    int64_t panel_bytes;  // to the next panel's
    int64_t k;
    int64_t ahead;      // bytes from a weight to the one that is fetched into the first cache level meanwhile
    const char* later;  // weights fetched into the second level meanwhile, later_step bytes a step
    int64_t later_step;
    const float* from;  // or null
    float* to;
    int64_t sums_panel;
    void* y;  // or null
    int64_t y_row;
    DType y_dtype;
    const float* bias;  // or null
};

// A float of memory that may hold two bfloat16 values.
APC_INLINE float load_lane(const char* p) {
    float value;
    memcpy(&value, p, sizeof(value));
    return value;
}

// The even and the odd k of one vector of (even, odd) couples of bfloat16, widened.
APC_INLINE Vec even_k(const char* p) { return as_float(shift_left<16>(as_bits(Vec::load_bytes(p)))); }
APC_INLINE Vec odd_k(const char* p) {
    return as_float(as_bits(Vec::load_bytes(p)) & VecI::broadcast(int32_t(0xffff0000u)));
}

// Bytes from the first panel's row of weights to a tile's vector v.
APC_INLINE int64_t vector_bytes(int v, int64_t panel_bytes) {
    return (v / kVecs) * panel_bytes + (v % kVecs) * kLanes * 4;
}

// acc += x w for one k: Rows values of x at a, kRowBytes apart; Vecs vectors of weights, the v-th from
// weights(v). Many rows keep the vectors in registers, few rows the values of x.
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
// The same for one couple of k in bfloat16: each lane adds the products of its two couples (vdpbf16ps).
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

template <int Rows, int Vecs>
APC_INLINE void add_bias(Vec (&acc)[Rows][Vecs], const float* bias) {
#pragma GCC unroll 8
    for (int v = 0; v < Vecs; ++v) {
        const Vec value = Vec::load(bias + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) acc[r][v] = acc[r][v] + value;
    }
}

// Not inline: among other code the compiler runs out of registers in the loop.
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
    if (!t.y) return store_sums(acc, t.to, kPanel, t.sums_panel);
    if (t.bias) add_bias(acc, t.bias);
    with_type(t.y_dtype,
              [&](auto y) { store_sums(acc, static_cast<TypeOf<decltype(y)>*>(t.y), t.y_row, kPanel); });
}

template <Mode mode, int Panels>
void run_rows(int64_t rows, const Tile& t) {
    switch (rows) {
        case 1:
            return tile<1, Panels, mode>(t);
        case 2:
            return tile<2, Panels, mode>(t);
        case 3:
            return tile<3, Panels, mode>(t);
        case 4:
            return tile<4, Panels, mode>(t);
#if defined(__AVX2__)
        case 5:
            return tile<5, Panels, mode>(t);
        case 6:
            return tile<6, Panels, mode>(t);
#endif
#if defined(__AVX512F__)
        case 7:
            return tile<7, Panels, mode>(t);
        case 8:
            return tile<8, Panels, mode>(t);
        case 9:
            return tile<9, Panels, mode>(t);
        case 10:
            return tile<10, Panels, mode>(t);
        case 11:
            return tile<11, Panels, mode>(t);
        case 12:
            return tile<12, Panels, mode>(t);
#endif
        default:
            __builtin_unreachable();
    }
}

// Panels that one tile takes at once, of those left: few rows take more panels, for enough independent sums.
template <Mode mode>
int64_t tile_panels(int64_t rows, int64_t left) {
    int64_t panels = kTilePanels;
#if defined(__AVX512F__)
    panels = rows == 1 ? 8 : rows <= 3 ? 4 : 2;
#elif defined(__AVX2__)
    panels = rows == 1 ? 4 : rows == 2 || (rows == 3 && mode == Mode::kFloat) ? 2 : 1;
#else
    (void)rows;
#endif
    while (panels > left) panels /= 2;
    return panels;
}

// `panels` as tile_panels says.
template <Mode mode>
void run_tile(int64_t rows, int64_t panels, const Tile& t) {
#if defined(__AVX512F__)
    if (panels == 8) return tile<1, 8, mode>(t);
    if (panels == 4)
        return rows == 1 ? tile<1, 4, mode>(t) : rows == 2 ? tile<2, 4, mode>(t) : tile<3, 4, mode>(t);
    if (panels == 2) return run_rows<mode, 2>(rows, t);
#elif defined(__AVX2__)
    if (panels == 4) return tile<1, 4, mode>(t);
    if (panels == 2)
        return rows == 1 ? tile<1, 2, mode>(t) : rows == 2 ? tile<2, 2, mode>(t) : tile<3, 2, mode>(t);
#else
    (void)panels;
#endif
    return run_rows<mode, 1>(rows, t);
}

}  // namespace
}  // namespace APC_ISA
}  // namespace apcbatch
