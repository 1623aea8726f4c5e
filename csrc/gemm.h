// The register tiles of the packed matrix product, compiled once for each instruction set (gemm_<isa>.cpp).
// A piece of the output is walked by blocks of k, then by panels, then by tiles of rows: the panel's block
// stays in the first cache level while the rows of the piece, copied to scratch as float32, stream from the
// second. Must not know: threads, how a product is cut into pieces.
#include "linear.h"
#include "simd.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTilePanels = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTilePanels = 1;
#else
constexpr int kTileRows = 4, kTilePanels = 1;
#endif

constexpr int kWidth = Vec::lanes;
constexpr int kVecs = static_cast<int>(kPanel) / kWidth;  // vectors of one panel
// With bfloat16 weights, from this many row tiles on a panel's block is widened to scratch once and used by
// all.
constexpr int64_t kWidenTiles = 4;

enum class Mode {
    kFloat,    // float32 weights
    kWidened,  // bfloat16 weights, widened in registers; the arithmetic of kFloat
    kDot,      // bfloat16 weights and inputs in pairs, vdpbf16ps
};

APC_INLINE const float* floats(const char* p) { return reinterpret_cast<const float*>(p); }

// The even and the odd k of one vector of (even, odd) couples of bfloat16, widened.
APC_INLINE Vec even_k(const char* p) { return as_float(shift_left<16>(as_bits(Vec::load(floats(p))))); }
APC_INLINE Vec odd_k(const char* p) {
    return as_float(as_bits(Vec::load(floats(p))) & VecI::broadcast(int32_t(0xffff0000u)));
}

// What one tile reads and writes. a: rows in scratch. b: the panel's block; panel_bytes to the next panel.
// `from` and `to`: float32 partial sums, row and panel strides in elements; `from` null starts at zero. bias
// is added if not null.
struct Tile {
    const char* a;
    const char* b;
    int64_t panel_bytes, k, ahead;
    const float* from;
    float* to;
    int64_t from_row, from_panel, to_row, to_panel;
    const float* bias;
};

template <int Rows, int Vecs>
APC_INLINE void multiply(Vec (&acc)[Rows][Vecs], const Vec (&b)[Vecs], const char* a) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        const Vec x = Vec::broadcast(*floats(a + r * kRowBytes));
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) acc[r][v] = fma(x, b[v], acc[r][v]);
    }
}

#if defined(__AVX512BF16__)
template <int Rows, int Vecs>
APC_INLINE void multiply_pairs(Vec (&acc)[Rows][Vecs], const char* const (&b)[Vecs], const char* a) {
    __m512bh w[Vecs];
#pragma GCC unroll 8
    for (int v = 0; v < Vecs; ++v) w[v] = (__m512bh)_mm512_loadu_si512(b[v]);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        const __m512bh x = (__m512bh)_mm512_castps_si512(Vec::broadcast(*floats(a + r * kRowBytes)).v);
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) acc[r][v].v = _mm512_dpbf16_ps(acc[r][v].v, x, w[v]);
    }
}
#endif

template <int Rows, int Panels, Mode mode>
void tile(const Tile& t) {
    constexpr int vecs = Panels * kVecs;
    Vec acc[Rows][vecs];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vecs; ++v) {
            const int64_t at = r * t.from_row + (v / kVecs) * t.from_panel + (v % kVecs) * kWidth;
            acc[r][v] = t.from ? Vec::load(t.from + at) : Vec::zero();
        }
    }
    const char* a = t.a;
    const char* b = t.b;
    const int64_t panel_bytes = t.panel_bytes, ahead = t.ahead;
    const int64_t steps = mode == Mode::kFloat ? t.k : mode == Mode::kDot ? (t.k + 1) / 2 : t.k / 2;
    for (int64_t step = 0; step < steps; ++step) {
        const char* at[vecs];
#pragma GCC unroll 8
        for (int v = 0; v < vecs; ++v) at[v] = b + (v / kVecs) * panel_bytes + (v % kVecs) * kWidth * 4;
#pragma GCC unroll 8
        for (int p = 0; p < Panels; ++p) __builtin_prefetch(b + p * panel_bytes + ahead, 0, 2);
        if constexpr (mode == Mode::kFloat) {
            Vec w[vecs];
#pragma GCC unroll 8
            for (int v = 0; v < vecs; ++v) w[v] = Vec::load(floats(at[v]));
            multiply(acc, w, a);
            a += 4;
        } else if constexpr (mode == Mode::kWidened) {
            Vec w[vecs];
#pragma GCC unroll 8
            for (int v = 0; v < vecs; ++v) w[v] = even_k(at[v]);
            multiply(acc, w, a);
#pragma GCC unroll 8
            for (int v = 0; v < vecs; ++v) w[v] = odd_k(at[v]);
            multiply(acc, w, a + 4);
            a += 8;
        } else {
#if defined(__AVX512BF16__)
            multiply_pairs(acc, at, a);
#endif
            a += 4;
        }
        b += kPanel * 4;
    }
    if constexpr (mode == Mode::kWidened) {
        if (t.k % 2 != 0) {
            Vec w[vecs];
#pragma GCC unroll 8
            for (int v = 0; v < vecs; ++v)
                w[v] = even_k(b + (v / kVecs) * panel_bytes + (v % kVecs) * kWidth * 4);
            multiply(acc, w, a);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < vecs; ++v) {
        const Vec bias = t.bias ? Vec::load(t.bias + v * kWidth) : Vec::zero();
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const int64_t at = r * t.to_row + (v / kVecs) * t.to_panel + (v % kVecs) * kWidth;
            (t.bias ? acc[r][v] + bias : acc[r][v]).store(t.to + at);
        }
    }
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

// Panels that one tile takes at once: few rows take more panels, for enough independent sums.
inline int64_t tile_panels(int64_t rows, int64_t left) {
    int64_t panels = kTilePanels;
#if defined(__AVX512F__)
    panels = rows == 1 ? 8 : rows <= 3 ? 4 : 2;
#elif defined(__AVX2__)
    panels = rows == 1 ? 4 : rows <= 3 ? 2 : 1;
#else
    (void)rows;
#endif
    while (panels > left) panels /= 2;
    return panels;
}

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
#endif
    (void)panels;
    return run_rows<mode, 1>(rows, t);
}

// `count` values from one type to another, the last ones through the same vector code.
template <class From, class To>
APC_INLINE void convert(const From* from, To* to, int64_t count) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) Vec::load(from + i).store(to + i);
    if (i < count) store_partial(load_partial(from + i, count - i), to + i, count - i);
}

// Copies rows of x, inputs [k0, k0 + k), to scratch: as float32, rounded to bfloat16 first where the weights
// are; or, for kDot, as bfloat16 with an even count.
template <Mode mode>
void copy_rows(const LinearArgs& args, int64_t row, int64_t rows, int64_t k0, int64_t k, char* to) {
    for (int64_t r = 0; r < rows; ++r, to += kRowBytes) {
        const int64_t at = (row + r) * args.x_stride + k0;
        const float* wide = static_cast<const float*>(args.x) + at;
        const BFloat16* half = static_cast<const BFloat16*>(args.x) + at;
        float* out = reinterpret_cast<float*>(to);
        BFloat16* out_half = reinterpret_cast<BFloat16*>(to);
        if constexpr (mode == Mode::kDot) {
            if (args.x_dtype == DType::bfloat16) {
                memcpy(out_half, half, size_t(2 * k));
            } else {
                convert(wide, out_half, k);
            }
            if (k % 2 != 0) out_half[k] = {0};
        } else if (args.x_dtype == DType::bfloat16) {
            convert(half, out, k);
        } else if constexpr (mode == Mode::kWidened) {
            BFloat16 rounded[kBlockK];
            convert(wide, rounded, k);
            convert(rounded, out, k);
        } else {
            memcpy(out, wide, size_t(4 * k));
        }
    }
}

// Widens a block of bfloat16 panels to float32 panels, k by k.
inline void widen_panels(const char* from, int64_t from_bytes, int64_t k, int64_t panels, float* to) {
    for (int64_t p = 0; p < panels; ++p, from += from_bytes) {
        for (int64_t i = 0; i < k; ++i, to += kPanel) {
            const char* couple = from + (i / 2) * kPanel * 4;
            for (int v = 0; v < kVecs; ++v, couple += kWidth * 4) {
                (i % 2 == 0 ? even_k(couple) : odd_k(couple)).store(to + v * kWidth);
            }
        }
    }
}

// Rounds or copies finished sums (rows of kPanel values) to the valid columns of y, adding the bias.
template <class Y>
void finish(const LinearArgs& args, int64_t row, int64_t rows, int64_t panel, const float* sums) {
    const int64_t column = panel * kPanel;
    const int64_t columns = args.out - column < kPanel ? args.out - column : kPanel;
    float bias[kPanel] = {};
    if (args.bias) memcpy(bias, args.bias + column, size_t(4 * columns));
    for (int64_t r = 0; r < rows; ++r, sums += kPanel) {
        Y* to = static_cast<Y*>(args.y) + (row + r) * args.y_stride + column;
        Y done[kPanel];
        Y* target = columns == kPanel ? to : done;
        for (int64_t i = 0; i < kPanel; i += kWidth) {
            const Vec sum = Vec::load(sums + i);
            (args.bias ? sum + Vec::load(bias + i) : sum).store(target + i);
        }
        if (columns != kPanel) memcpy(to, done, sizeof(Y) * size_t(columns));
    }
}

struct Scratch {
    char* rows;      // the copy of x
    float* widened;  // one tile's panels
    float* sums;     // (panels, rows, kPanel) partial sums
};

// All panels of the piece, one block of k.
template <Mode mode>
void run_block(const LinearArgs& args, const LinearPiece& piece, int64_t k0, const Scratch& scratch) {
    const int64_t k = args.in - k0 < kBlockK ? args.in - k0 : kBlockK;
    const bool first = k0 == 0, last = k0 + k == args.in;
    const int64_t panel_bytes = (mode == Mode::kFloat ? k : (k + 1) / 2) * kPanel * 4;
    const int64_t block = k0 / (mode == Mode::kFloat ? 1 : 2) * kPanel * 4 * panels_of(args.out);
    const char* weights = static_cast<const char*>(args.w) + block + piece.panel * panel_bytes;
    copy_rows<mode>(args, piece.row, piece.rows, k0, k, scratch.rows);
    const int64_t tiles = (piece.rows + kTileRows - 1) / kTileRows;
    const bool widened = mode == Mode::kWidened && tiles >= kWidenTiles;
    for (int64_t p = 0; p < piece.panels;) {
        const int64_t panels = tile_panels(piece.rows, piece.panels - p);
        const char* b = weights + p * panel_bytes;
        if (widened) widen_panels(b, panel_bytes, k, panels, scratch.widened);
        const int64_t column = (piece.panel + p) * kPanel;
        const bool direct = last && args.y_dtype == DType::float32 && column + panels * kPanel <= args.out;
        for (int64_t i = 0, row = 0; i < tiles; ++i) {
            const int64_t rows = (piece.rows - row + tiles - i - 1) / (tiles - i);
            float* sums = scratch.sums + (p * piece.rows + row) * kPanel;
            Tile t{scratch.rows + row * kRowBytes,
                   b,
                   panel_bytes,
                   k,
                   panels * panel_bytes,
                   first ? nullptr : sums,
                   sums,
                   kPanel,
                   piece.rows * kPanel,
                   kPanel,
                   piece.rows * kPanel,
                   nullptr};
            if (direct) {
                t.to = static_cast<float*>(args.y) + (piece.row + row) * args.y_stride + column;
                t.to_row = args.y_stride;
                t.to_panel = kPanel;
                t.bias = args.bias ? args.bias + column : nullptr;
            }
            if (widened) {
                t.b = reinterpret_cast<const char*>(scratch.widened);
                t.panel_bytes = k * kPanel * 4;
                t.ahead = 0;
                run_tile<Mode::kFloat>(rows, panels, t);
            } else {
                run_tile<mode>(rows, panels, t);
            }
            row += rows;
        }
        if (last && !direct) {
            for (int64_t q = p; q < p + panels; ++q) {
                const float* sums = scratch.sums + q * piece.rows * kPanel;
                if (args.y_dtype == DType::float32) {
                    finish<float>(args, piece.row, piece.rows, piece.panel + q, sums);
                } else {
                    finish<BFloat16>(args, piece.row, piece.rows, piece.panel + q, sums);
                }
            }
        }
        p += panels;
    }
}

template <Mode mode>
void run_piece(const LinearArgs& args, const LinearPiece& piece, const Scratch& scratch) {
    for (int64_t k0 = 0; k0 < args.in; k0 += kBlockK) run_block<mode>(args, piece, k0, scratch);
}

void run(const LinearArgs& args, const LinearPiece& piece, char* memory) {
    Scratch scratch;
    scratch.rows = memory;
    scratch.widened = reinterpret_cast<float*>(memory + piece.rows * kRowBytes);
    scratch.sums = scratch.widened + kWidenedFloats;
    if (args.w_dtype == DType::float32) return run_piece<Mode::kFloat>(args, piece, scratch);
#if defined(__AVX512BF16__)
    return run_piece<Mode::kDot>(args, piece, scratch);
#else
    return run_piece<Mode::kWidened>(args, piece, scratch);
#endif
}

}  // namespace

LinearIsa linear_isa() { return {run, kTileRows}; }

}  // namespace APC_ISA
}  // namespace apcbatch
