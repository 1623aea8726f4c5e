// Tiles of the packed matrix product in AMX tile registers: 16 or 32 rows of x times some panels, over one
// block of k.
//
// Arithmetic: tdpbf16ps takes kTileK inputs per step. For each element it adds the products of the even
// inputs and those of the odd inputs in two chains of fused multiply-adds from +0. It then adds the two
// chains, and their sum to the accumulator. Denormal numbers count as zero. An element depends on its own row
// and column alone. So a tile may be filled up with any rows that the scratch holds.
#pragma once

#include "gemm_tile.h"

#if defined(__AMX_BF16__)

namespace apcbatch {
namespace APC_ISA {
namespace {

// Rows of a tile register, and of the largest tile.
constexpr int64_t kRegisterRows = 16;
constexpr int64_t kMatrixRows = 2 * kRegisterRows;
constexpr int64_t kRegisterBytes = 64 * kRegisterRows;

// Operand of LDTILECFG: all eight registers have 16 rows of 64 bytes.
struct alignas(64) MatrixShape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Configures the tile registers of this thread for the scope of a piece. Between pieces, other libraries may
// configure them differently.
template <>
struct Registers<Mode::kMatrix> {
    Registers() {
        static constexpr MatrixShape shape;
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~Registers() { _tile_release(); }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
};

// Cost model of the split. Relative to arithmetic, which AMX makes faster, reading a panel costs more than
// with vectors.
template <>
constexpr LinearShape shape_of<Mode::kMatrix> = {kMatrixRows, 64.0, 4.0};

struct MatrixTile {
    const char* a;        // rows of x in scratch
    const char* b;        // block of the first panel
    int64_t panel_bytes;  // from a panel's block to the next panel's
    float* sums;          // rows of kPanel; panels are sums_panel apart
    int64_t sums_panel;
    bool first;         // first block of k: the sums begin at zero
    const char* later;  // weights to prefetch into the L2 cache, later_step bytes per step
    int64_t later_step;
};

// Compiler barrier: the compiler does not know which memory the tile loads read.
APC_INLINE void memory_is_written() { asm volatile("" ::: "memory"); }

// Multiplies one tile. Registers 0 to 3 hold the sums: of two panels by two registers of rows, or of up to
// four panels by one.
template <int Registers, int Panels>
__attribute__((noinline)) void matrix_tile(const MatrixTile& t) {
    static_assert(Registers * Panels <= 4, "the other four registers hold x and the weights");
    constexpr int64_t row = 4 * kPanel;
    float* below = t.sums + kRegisterRows * kPanel;
    const char* a = t.a;
    const char* b = t.b;
    const char* later = t.later;
    const int64_t panel_bytes = t.panel_bytes, later_step = t.later_step;
    memory_is_written();
    if (t.first) {
        _tile_zero(0);
        if constexpr (Panels > 1) _tile_zero(1);
        if constexpr (Registers > 1 || Panels > 2) _tile_zero(2);
        if constexpr (Registers * Panels > 2) _tile_zero(3);
    } else {
        _tile_loadd(0, t.sums, row);
        if constexpr (Panels > 1) _tile_loadd(1, t.sums + t.sums_panel, row);
        if constexpr (Panels > 2) _tile_loadd(2, t.sums + 2 * t.sums_panel, row);
        if constexpr (Panels > 3) _tile_loadd(3, t.sums + 3 * t.sums_panel, row);
        if constexpr (Registers > 1) _tile_loadd(2, below, row);
        if constexpr (Registers > 1 && Panels > 1) _tile_loadd(3, below + t.sums_panel, row);
    }
    for (const char* end = b + panel_bytes; b != end; a += 2 * kTileK, b += kRegisterBytes) {
        for (int64_t p = 0; p < Panels; ++p) {
            for (int64_t i = 0; i < later_step; i += 64)
                __builtin_prefetch(later + p * panel_bytes + i, 0, 2);
        }
        later += later_step;
        _tile_loadd(4, a, kRowBytes);
        _tile_loadd(6, b, row);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (Registers > 1) {
            _tile_loadd(5, a + kRegisterRows * kRowBytes, kRowBytes);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (Panels > 1) {
            _tile_loadd(7, b + panel_bytes, row);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (Registers > 1) _tile_dpbf16ps(3, 5, 7);
        }
        if constexpr (Panels > 2) {
            _tile_loadd(6, b + 2 * panel_bytes, row);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, b + 3 * panel_bytes, row);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, t.sums, row);
    if constexpr (Panels > 1) _tile_stored(1, t.sums + t.sums_panel, row);
    if constexpr (Panels > 2) _tile_stored(2, t.sums + 2 * t.sums_panel, row);
    if constexpr (Panels > 3) _tile_stored(3, t.sums + 3 * t.sums_panel, row);
    if constexpr (Registers > 1) _tile_stored(2, below, row);
    if constexpr (Registers > 1 && Panels > 1) _tile_stored(3, below + t.sums_panel, row);
}

// Makes vector arithmetic treat denormal numbers as zero during its lifetime, as tdpbf16ps does.
class DenormalsAreZero {
  public:
    DenormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~DenormalsAreZero() { _mm_setcsr(before_); }
    DenormalsAreZero(const DenormalsAreZero&) = delete;
    DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;

  private:
    unsigned before_;
};

// Computes what matrix_tile computes, with vectors, for so few rows that memory limits the speed anyway. Not
// inline: none of its code may move out of the lifetime of a DenormalsAreZero.
template <int Rows, int Panels>
__attribute__((noinline)) void vector_tile(const MatrixTile& t) {
    const char* a = t.a;
    const char* b = t.b;
    const int64_t panel_bytes = t.panel_bytes;
    Vec sums[Rows][Panels];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < Panels; ++p)
            sums[r][p] = t.first ? Vec::zero() : Vec::load(t.sums + r * kPanel + p * t.sums_panel);
    }
    for (const char* end = b + panel_bytes; b != end;) {
        Vec even[Rows][Panels], odd[Rows][Panels];
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
            for (int p = 0; p < Panels; ++p) even[r][p] = odd[r][p] = Vec::zero();
        }
        for (int pair = 0; pair < kTileK / 2; ++pair, a += 4, b += 4 * kPanel) {
            Vec x_even[Rows], x_odd[Rows];
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const Vec x = Vec::broadcast(load_lane(a + r * kRowBytes));
                x_even[r] = as_float(shift_left<16>(as_bits(x)));
                x_odd[r] = as_float(as_bits(x) & VecI::broadcast(int32_t(0xffff0000u)));
            }
#pragma GCC unroll 8
            for (int p = 0; p < Panels; ++p) {
                const char* w = b + p * panel_bytes;
                __builtin_prefetch(w + ahead_of(1));
                const Vec w_even = even_k(w), w_odd = odd_k(w);
#pragma GCC unroll 4
                for (int r = 0; r < Rows; ++r) {
                    even[r][p] = fma(x_even[r], w_even, even[r][p]);
                    odd[r][p] = fma(x_odd[r], w_odd, odd[r][p]);
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
            for (int p = 0; p < Panels; ++p) sums[r][p] = sums[r][p] + (even[r][p] + odd[r][p]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < Panels; ++p) sums[r][p].store(t.sums + r * kPanel + p * t.sums_panel);
    }
}

// Maximum rows that vectors multiply.
constexpr int64_t kVectorRows = 2;

// Returns the number of panels to multiply together, at most `left`. x stays in the L1 cache for all of them.
template <>
inline int64_t tile_panels<Mode::kMatrix>(int64_t rows, int64_t left) {
    int64_t panels = rows == 1 ? 8 : 4;
    while (panels > left) panels /= 2;
    return panels;
}

// Multiplies `rows` rows, at most those of the largest tile, with `panels` panels as returned by tile_panels.
inline void run_matrix_tile(int64_t rows, int64_t panels, const MatrixTile& t) {
    if (rows > kRegisterRows) {
        if (panels == 1) return matrix_tile<2, 1>(t);
        MatrixTile two = t;
        for (int64_t p = 0; p < panels; p += 2) {
            matrix_tile<2, 2>(two);
            two.b += 2 * t.panel_bytes;
            two.later += 2 * t.panel_bytes;
            two.sums += 2 * t.sums_panel;
        }
        return;
    }
    if (rows > kVectorRows)
        return panels == 4 ? matrix_tile<1, 4>(t) : panels == 2 ? matrix_tile<1, 2>(t) : matrix_tile<1, 1>(t);
    const DenormalsAreZero mode;
    if (panels == 8) return vector_tile<1, 8>(t);
    if (panels == 4) return rows == 1 ? vector_tile<1, 4>(t) : vector_tile<2, 4>(t);
    if (panels == 2) return rows == 1 ? vector_tile<1, 2>(t) : vector_tile<2, 2>(t);
    return rows == 1 ? vector_tile<1, 1>(t) : vector_tile<2, 1>(t);
}

}  // namespace
}  // namespace APC_ISA
}  // namespace apcbatch

#endif
