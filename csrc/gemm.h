// One piece of the packed matrix product, compiled once per instruction set (gemm_<isa>.cpp). The loops run
// over blocks of k, then panels, then tiles of rows. A panel's block stays in the L1 cache, while the rows of
// the piece, copied to scratch, stream from the L2 cache.
#pragma once

#include "gemm_amx.h"
#include "gemm_codes.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

template <Mode mode>
APC_INLINE void copy_row(const BFloat16* x, int64_t k, char* to) {
    if constexpr (mode == Mode::kDot || mode == Mode::kMatrix) {
        const int64_t padding = packed_k(k, 2) - k;
        memcpy(to, x, size_t(2 * k));
        memset(to + 2 * k, 0, size_t(2 * padding));
    } else {
        convert_row(x, reinterpret_cast<float*>(to), k);
    }
}

template <Mode mode>
APC_INLINE void copy_row(const float* x, int64_t k, char* to) {
    if constexpr (mode == Mode::kFloat) {
        memcpy(to, x, size_t(4 * k));
    } else {
        BFloat16 rounded[kBlockK];
        convert_row(x, rounded, k);
        copy_row<mode>(rounded, k, to);
    }
}

// Copies rows of x, inputs [k0, k0 + k), to scratch. They are stored as float32, rounded to bfloat16 first if
// the weights are bfloat16. For kDot and kMatrix they are stored as bfloat16, padded with zeros to packed_k.
template <Mode mode>
void copy_rows(const LinearArgs& args, const LinearPiece& piece, int64_t k0, int64_t k, char* to) {
    with_type(args.x.dtype, [&](auto of) {
        const auto* x = static_cast<const TypeOf<decltype(of)>*>(args.x.data);
        for (int64_t r = 0; r < piece.rows; ++r) {
            const int64_t row = args.x_rows ? args.x_rows[piece.row + r] : piece.row + r;
            copy_row<mode>(x + row * args.x.stride + k0, k, to + r * kRowBytes);
        }
    });
}

struct Scratch {
    char* rows;     // copy of the rows of x
    float* sums;    // (panels, scratch_rows, kPanel) partial sums
    char* decoded;  // kDecodedPanels panels
};

// Applies scale and bias to the finished sums of at most kMostPanels panels and writes the columns that
// exist. Where all columns exist, the register tiles do this themselves. Works row by row, to fill whole
// cache lines of y.
void finish(const LinearArgs& args, const LinearPiece& piece, const Scratch& scratch, int64_t p,
            int64_t panels) {
    const int64_t column = (piece.panel + p) * kPanel, panel = scratch_rows(piece.rows) * kPanel;
    const int64_t columns = args.w.out - column < panels * kPanel ? args.w.out - column : panels * kPanel;
    float scale[kMostPanels * kPanel] = {}, bias[kMostPanels * kPanel] = {};
    if (args.w.scale) memcpy(scale, args.w.scale + column, size_t(4 * columns));
    if (args.w.bias) memcpy(bias, args.w.bias + column, size_t(4 * columns));
    with_type(args.y.dtype, [&](auto y) {
        const float* sums = scratch.sums + p * panel;
        for (int64_t r = 0; r < piece.rows; ++r, sums += kPanel) {
            auto* to =
                static_cast<TypeOf<decltype(y)>*>(args.y.data) + (piece.row + r) * args.y.stride + column;
            for (int64_t i = 0; i < columns; i += kLanes) {
                Vec sum = Vec::load(sums + i / kPanel * panel + i % kPanel);
                if (args.w.scale) sum = sum * Vec::load(scale + i);
                store_first(args.w.bias ? sum + Vec::load(bias + i) : sum, to + i, columns - i);
            }
        }
    });
}

// One block of k.
struct Block {
    int64_t k0, k;
    bool first, last;
    int64_t panel_bytes;  // of a panel that is not encoded
};

template <Mode mode>
Block block_of(const LinearArgs& args, int64_t k0) {
    constexpr int64_t value_bytes = mode == Mode::kFloat ? 4 : 2;
    const int64_t k = args.w.in - k0 < kBlockK ? args.w.in - k0 : kBlockK;
    return {k0, k, k0 == 0, k0 + k == args.w.in, packed_k(k, value_bytes) * kPanel * value_bytes};
}

// Returns the memory of a panel of a run in a block.
template <Mode mode>
const char* panel_of(const PanelRun& run, const Block& block, int64_t panel) {
    constexpr int64_t value_bytes = mode == Mode::kFloat ? 4 : 2;
    const bool plain = run.codes == Codes::none;
    const int64_t before = plain ? kBlockK * kPanel * value_bytes : code_bytes(run, kBlockK);
    const int64_t bytes = plain ? block.panel_bytes : code_bytes(run, block.k);
    return run.weights + block.k0 / kBlockK * before * (run.end - run.begin) + (panel - run.begin) * bytes;
}

// Sets the prefetch address of tile i of `tiles`: its share of the next panels, so that memory is read evenly
// while all tiles compute. A single tile prefetches only its own weights, as it already reads at full speed.
void fetch_later(Tile& t, int64_t panels, int64_t i, int64_t tiles) {
    t.later = tiles == 1 ? t.b : t.b + panels * t.panel_bytes + t.panel_bytes * i / tiles;
    t.later_step = kPanel * 4 / tiles;
}

// Multiplies the panels [p, p + panels) of the piece, whose weights are at `weights`, in one block of k, with
// all its rows. run: of the panels if they are codes, for one row; otherwise null.
template <Mode mode>
void run_panels(const LinearArgs& args, const LinearPiece& piece, const Block& block, const Scratch& scratch,
                int64_t p, int64_t panels, const char* weights, const PanelRun* run = nullptr) {
    const int64_t tiles = (piece.rows + kTileRows - 1) / kTileRows;
    const int64_t column = (piece.panel + p) * kPanel;
    Tile t{};
    t.k = block.k;
    t.b = weights;
    t.panel_bytes = run ? code_bytes(*run, block.k) : block.panel_bytes;
    t.sums_panel = scratch_rows(piece.rows) * kPanel;
    t.y_row = args.y.stride;
    t.y_dtype = args.y.dtype;
    t.scale = args.w.scale ? args.w.scale + column : nullptr;
    t.bias = args.w.bias ? args.w.bias + column : nullptr;
    const bool direct = block.last && column + panels * kPanel <= args.w.out;
    for (int64_t i = 0, row = 0; i < tiles; ++i) {
        const int64_t rows = (piece.rows - row + tiles - i - 1) / (tiles - i);
        t.a = scratch.rows + row * kRowBytes;
        t.to = scratch.sums + p * t.sums_panel + row * kPanel;
        t.from = block.first ? nullptr : t.to;
        t.ahead = ahead_of(rows);
        fetch_later(t, panels, i, tiles);
        if (direct) {
            t.y = static_cast<char*>(args.y.data) +
                  ((piece.row + row) * args.y.stride + column) * bytes_of(args.y.dtype);
        }
        if (run) {
            run_code_tile(*run, rows, panels, t);
        } else {
            run_tile<mode>(rows, panels, t);
        }
        row += rows;
    }
    if (block.last && !direct) finish(args, piece, scratch, p, panels);
}

#if defined(__AMX_BF16__)
template <>
void run_panels<Mode::kMatrix>(const LinearArgs& args, const LinearPiece& piece, const Block& block,
                               const Scratch& scratch, int64_t p, int64_t panels, const char* weights,
                               const PanelRun*) {
    MatrixTile t{};
    t.b = weights;
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
    if (block.last) finish(args, piece, scratch, p, panels);
}
#endif

// Multiplies panels of codes. Where x is in float32, few rows decode in registers, and more rows decode to
// float32, which has the bits of widened bfloat16.
template <Mode mode>
void run_codes(const LinearArgs& args, const LinearPiece& piece, Block block, const Scratch& scratch,
               int64_t p, int64_t panels, const PanelRun& run) {
    constexpr Mode decoded = mode == Mode::kWidened ? Mode::kFloat : mode;
    const char* weights = panel_of<mode>(run, block, piece.panel + p);
    if (decoded == Mode::kFloat && piece.rows <= kCodeRows)
        return run_panels<mode>(args, piece, block, scratch, p, panels, weights, &run);
    if (decoded == Mode::kFloat) block.panel_bytes = block.k * kPanel * 4;
    decode_panels<decoded>(run, weights, panels, block.k, scratch.decoded, block.panel_bytes);
    run_panels<decoded>(args, piece, block, scratch, p, panels, scratch.decoded);
}

template <Mode mode>
void run_piece(const LinearArgs& args, const LinearPiece& piece, const Scratch& scratch) {
    const PanelRun whole{0,
                         panels_of(args.w.out),
                         static_cast<const char*>(args.w.weights),
                         Codes::none,
                         kBlockK,
                         Scales::float32,
                         0};
    for (int64_t k0 = 0; k0 < args.w.in; k0 += kBlockK) {
        const Block block = block_of<mode>(args, k0);
        copy_rows<mode>(args, piece, k0, block.k, scratch.rows);
        const PanelRun* run = args.w.runs ? args.w.runs : &whole;
        for (int64_t p = 0; p < piece.panels;) {
            while (run->end <= piece.panel + p) ++run;
            const int64_t left =
                run->end - piece.panel < piece.panels ? run->end - piece.panel : piece.panels;
            int64_t panels = tile_panels<mode>(piece.rows, left - p);
            if (run->codes == Codes::none) {
                run_panels<mode>(args, piece, block, scratch, p, panels,
                                 panel_of<mode>(*run, block, piece.panel + p));
            } else {
                const int64_t most = piece.rows > 1 && piece.rows <= kCodeRows ? 1 : kDecodedPanels;
                if (panels > most) panels = most;
                run_codes<mode>(args, piece, block, scratch, p, panels, *run);
            }
            p += panels;
        }
    }
}

void run(const LinearArgs& args, const LinearPiece& piece, char* memory) {
    Scratch scratch{};
    scratch.rows = memory;
    scratch.sums = reinterpret_cast<float*>(memory + scratch_rows(piece.rows) * kRowBytes);
    scratch.decoded =
        reinterpret_cast<char*>(scratch.sums + scratch_rows(piece.rows) * piece.panels * kPanel);
    with_type(args.w.dtype, [&](auto w) {
        constexpr Mode mode = mode_of(decltype(w)());
        [[maybe_unused]] const Registers<mode> registers;
        run_piece<mode>(args, piece, scratch);
    });
}

}  // namespace

LinearIsa linear_isa() { return {run, shape_of<mode_of(Of<float>())>, shape_of<mode_of(Of<BFloat16>())>}; }

}  // namespace APC_ISA
}  // namespace apcbatch
