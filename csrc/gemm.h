// One piece of the packed matrix product, compiled once per instruction set (gemm_<isa>.cpp). The loops run
// over blocks of k, then panels, then tiles of rows. A panel's block stays in the L1 cache, while the rows of
// the piece, copied to scratch, stream from the L2 cache.
#pragma once

#include "gemm_amx.h"
#include "lanes.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

// Converts `count` values from one type to another.
template <class From, class To>
APC_INLINE void convert(const From* from, To* to, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes)
        store_first(load_first(from + i, count - i), to + i, count - i);
}

template <Mode mode>
APC_INLINE void copy_row(const BFloat16* x, int64_t k, char* to) {
    if constexpr (mode == Mode::kDot || mode == Mode::kMatrix) {
        const int64_t padding = packed_k(k, 2) - k;
        memcpy(to, x, size_t(2 * k));
        memset(to + 2 * k, 0, size_t(2 * padding));
    } else {
        convert(x, reinterpret_cast<float*>(to), k);
    }
}

template <Mode mode>
APC_INLINE void copy_row(const float* x, int64_t k, char* to) {
    if constexpr (mode == Mode::kFloat) {
        memcpy(to, x, size_t(4 * k));
    } else {
        BFloat16 rounded[kBlockK];
        convert(x, rounded, k);
        copy_row<mode>(rounded, k, to);
    }
}

// Copies rows of x, inputs [k0, k0 + k), to scratch. They are stored as float32, rounded to bfloat16 first if
// the weights are bfloat16. For kDot and kMatrix they are stored as bfloat16, padded with zeros to packed_k.
template <Mode mode>
void copy_rows(const LinearArgs& args, const LinearPiece& piece, int64_t k0, int64_t k, char* to) {
    with_type(args.x_dtype, [&](auto of) {
        const auto* x = static_cast<const TypeOf<decltype(of)>*>(args.x);
        for (int64_t r = 0; r < piece.rows; ++r) {
            const int64_t row = args.x_rows ? args.x_rows[piece.row + r] : piece.row + r;
            copy_row<mode>(x + row * args.x_stride + k0, k, to + r * kRowBytes);
        }
    });
}

struct Scratch {
    char* rows;   // copy of the rows of x
    float* sums;  // (panels, scratch_rows, kPanel) partial sums
};

// Applies scale and bias to the finished sums of at most kMostPanels panels and writes the columns that
// exist. Where all columns exist, the register tiles do this themselves. Works row by row, to fill whole
// cache lines of y.
template <class Y>
void finish(const LinearArgs& args, const LinearPiece& piece, const Scratch& scratch, int64_t p,
            int64_t panels) {
    const int64_t column = (piece.panel + p) * kPanel, panel = scratch_rows(piece.rows) * kPanel;
    const int64_t columns = args.out - column < panels * kPanel ? args.out - column : panels * kPanel;
    float scale[kMostPanels * kPanel] = {}, bias[kMostPanels * kPanel] = {};
    if (args.scale) memcpy(scale, args.scale + column, size_t(4 * columns));
    if (args.bias) memcpy(bias, args.bias + column, size_t(4 * columns));
    const float* sums = scratch.sums + p * panel;
    for (int64_t r = 0; r < piece.rows; ++r, sums += kPanel) {
        Y* to = static_cast<Y*>(args.y) + (piece.row + r) * args.y_stride + column;
        for (int64_t i = 0; i < columns; i += kLanes) {
            Vec sum = Vec::load(sums + i / kPanel * panel + i % kPanel);
            if (args.scale) sum = sum * Vec::load(scale + i);
            store_first(args.bias ? sum + Vec::load(bias + i) : sum, to + i, columns - i);
        }
    }
}

void finish_panels(const LinearArgs& args, const LinearPiece& piece, const Scratch& scratch, int64_t p,
                   int64_t panels) {
    with_type(args.y_dtype, [&](auto y) { finish<TypeOf<decltype(y)>>(args, piece, scratch, p, panels); });
}

// One block of k of a piece.
struct Block {
    int64_t k;
    bool first, last;
    int64_t panel_bytes;
    const char* weights;  // first panel of the piece
};

template <Mode mode>
Block block_of(const LinearArgs& args, const LinearPiece& piece, int64_t k0) {
    constexpr int64_t value_bytes = mode == Mode::kFloat ? 4 : 2;
    Block block{};
    block.k = args.in - k0 < kBlockK ? args.in - k0 : kBlockK;
    block.first = k0 == 0;
    block.last = k0 + block.k == args.in;
    block.panel_bytes = packed_k(block.k, value_bytes) * kPanel * value_bytes;
    block.weights = static_cast<const char*>(args.w) + k0 * kPanel * value_bytes * panels_of(args.out) +
                    piece.panel * block.panel_bytes;
    return block;
}

// Sets the prefetch address of tile i of `tiles`: its share of the next panels, so that memory is read evenly
// while all tiles compute. A single tile prefetches only its own weights, as it already reads at full speed.
void fetch_later(Tile& t, int64_t panels, int64_t i, int64_t tiles) {
    t.later = tiles == 1 ? t.b : t.b + panels * t.panel_bytes + t.panel_bytes * i / tiles;
    t.later_step = kPanel * 4 / tiles;
}

// Multiplies the panels [p, p + panels) of the piece, in one block of k, with all its rows.
template <Mode mode>
void run_panels(const LinearArgs& args, const LinearPiece& piece, const Block& block, const Scratch& scratch,
                int64_t p, int64_t panels) {
    const int64_t tiles = (piece.rows + kTileRows - 1) / kTileRows;
    const int64_t column = (piece.panel + p) * kPanel;
    Tile t{};
    t.k = block.k;
    t.b = block.weights + p * block.panel_bytes;
    t.panel_bytes = block.panel_bytes;
    t.sums_panel = scratch_rows(piece.rows) * kPanel;
    t.y_row = args.y_stride;
    t.y_dtype = args.y_dtype;
    t.scale = args.scale ? args.scale + column : nullptr;
    t.bias = args.bias ? args.bias + column : nullptr;
    const bool direct = block.last && column + panels * kPanel <= args.out;
    for (int64_t i = 0, row = 0; i < tiles; ++i) {
        const int64_t rows = (piece.rows - row + tiles - i - 1) / (tiles - i);
        t.a = scratch.rows + row * kRowBytes;
        t.to = scratch.sums + p * t.sums_panel + row * kPanel;
        t.from = block.first ? nullptr : t.to;
        t.ahead = ahead_of(rows);
        fetch_later(t, panels, i, tiles);
        if (direct) {
            t.y = static_cast<char*>(args.y) +
                  ((piece.row + row) * args.y_stride + column) * bytes_of(args.y_dtype);
        }
        run_tile<mode>(rows, panels, t);
        row += rows;
    }
    if (block.last && !direct) finish_panels(args, piece, scratch, p, panels);
}

#if defined(__AMX_BF16__)
template <>
void run_panels<Mode::kMatrix>(const LinearArgs& args, const LinearPiece& piece, const Block& block,
                               const Scratch& scratch, int64_t p, int64_t panels) {
    MatrixTile t{};
    t.b = block.weights + p * block.panel_bytes;
    t.panel_bytes = block.panel_bytes;
    t.sums_panel = scratch_rows(piece.rows) * kPanel;
    t.first = block.first;
    const int64_t tiles = (piece.rows + kMatrixRows - 1) / kMatrixRows;
    t.later_step = (kRegisterBytes / tiles + 63) / 64 * 64;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = i * kMatrixRows;
        t.later = t.b + panels * t.panel_bytes + t.panel_bytes * i / tiles;
        t.a = scratch.rows + row * kRowBytes;
        t.sums = scratch.sums + p * t.sums_panel + row * kPanel;
        run_matrix_tile(piece.rows - row, panels, t);
    }
    if (block.last) finish_panels(args, piece, scratch, p, panels);
}
#endif

template <Mode mode>
void run_piece(const LinearArgs& args, const LinearPiece& piece, const Scratch& scratch) {
    for (int64_t k0 = 0; k0 < args.in; k0 += kBlockK) {
        const Block block = block_of<mode>(args, piece, k0);
        copy_rows<mode>(args, piece, k0, block.k, scratch.rows);
        for (int64_t p = 0; p < piece.panels;) {
            const int64_t panels = tile_panels<mode>(piece.rows, piece.panels - p);
            run_panels<mode>(args, piece, block, scratch, p, panels);
            p += panels;
        }
    }
}

void run(const LinearArgs& args, const LinearPiece& piece, char* memory) {
    Scratch scratch{};
    scratch.rows = memory;
    scratch.sums = reinterpret_cast<float*>(memory + scratch_rows(piece.rows) * kRowBytes);
    with_type(args.w_dtype, [&](auto w) {
        constexpr Mode mode = mode_of(decltype(w)());
        [[maybe_unused]] const Registers<mode> registers;
        run_piece<mode>(args, piece, scratch);
    });
}

}  // namespace

LinearIsa linear_isa() { return {run, shape_of<mode_of(Of<float>())>, shape_of<mode_of(Of<BFloat16>())>}; }

}  // namespace APC_ISA
}  // namespace apcbatch
