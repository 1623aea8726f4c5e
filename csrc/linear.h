// Packed matrix product y = x W^T (* scale) (+ bias): arguments, packed layout, entry points.
//
// Arithmetic of one output element: one float32 accumulator from +0, fused multiply-adds over k in strictly
// ascending order, then times the scale, plus the bias, then one rounding to the output type. Two instruction
// sets multiply bfloat16 in steps of several k, each step one instruction (gemm_tile.h, gemm_amx.h). An
// element always depends on its row of x and its row of W alone.
#pragma once

#include <stdint.h>

#include "instruction_sets.h"
#include "params.h"

namespace apcbatch {

// Layout of packed weights: blocks of kBlockK inputs; in a block, panels of kPanel outputs, one after the
// other; in a float32 panel, kPanel values per input k; in a bfloat16 panel, kPanel pairs (even k, odd k) per
// two inputs. Outputs are padded with zeros, and bfloat16 inputs to a multiple of kTileK: AMX loads 16 by 16
// pairs as one tile. The kernel reads in this order, so weights stream from memory front to back.
constexpr int64_t kPanel = 16;
constexpr int64_t kBlockK = 256;
constexpr int64_t kTileK = 32;

// Returns the number of values that k inputs of one output take in a panel.
constexpr int64_t packed_k(int64_t k, int64_t value_bytes) {
    return value_bytes == 2 ? (k + kTileK - 1) / kTileK * kTileK : k;
}

// Scratch of one piece: its rows of x, then the partial sums (panels, rows, kPanel), both with scratch_rows
// rows. kRowBytes: bytes between copied rows; not a power of two, or all rows of a tile would share cache
// sets.
constexpr int64_t kRowBytes = 4 * (kBlockK + 16);

// Rounds rows up to whole AMX tiles.
constexpr int64_t scratch_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

// How the weights of a panel are stored. A code's value is (code - zero) * scale, rounded to bfloat16. fp8 is
// e4m3, with scales times 2^120, which makes up for its exponents; the others are two's complement.
enum class Codes : int64_t { none = 0, int8 = 1, int4 = 2, fp8 = 3 };

// Scales by their significant bits: 24, 8 or 11. Those of bfloat16 are stored so, the others as float32.
enum class Scales : int64_t { float32 = 0, bfloat16 = 1, float16 = 2 };

constexpr int64_t scale_bytes(Scales scales) { return scales == Scales::bfloat16 ? 2 : 4; }

// Consecutive panels of a matrix that are stored alike: blocks of kBlockK inputs; in a block, panels. A panel
// of codes holds for each group of inputs kPanel scales; then for each group kPanel zeros (int8), if it has
// zeros; then kPanel codes for each input, or for each two inputs of int4, the even one in the low bits.
// group: an even divisor of kBlockK.
struct PanelRun {
    int64_t begin, end;  // panels of the matrix
    const char* weights;
    Codes codes;
    int64_t group;
    Scales scales;
    int64_t zeros;
};
static_assert(sizeof(PanelRun) == 7 * sizeof(int64_t), "Python fills in a row of integers");

// Returns the bytes of a panel with k inputs of codes.
constexpr int64_t code_bytes(const PanelRun& run, int64_t k) {
    const int64_t groups = (k + run.group - 1) / run.group;
    return kPanel * (groups * (scale_bytes(run.scales) + (run.zeros ? 1 : 0)) +
                     (run.codes == Codes::int4 ? (k + 1) / 2 : k));
}

// Most panels that are decoded at a time.
constexpr int64_t kDecodedPanels = 2;

// Projection: packed weights (out, in), whole or in runs of panels, and a scale and a bias (out), each of
// them or null.
struct Projection {
    int64_t out = 0, in = 0;
    const void* weights = nullptr;  // packed, if there are no runs
    DType dtype = DType::float32;   // of the weights, or of decoded ones
    const float *scale = nullptr, *bias = nullptr;
    const PanelRun* runs = nullptr;  // of all panels in order, or null
};

// Matrix of activations.
struct Rows {
    int64_t t = 0;
    void* data = nullptr;
    int64_t stride = 0;
    DType dtype = DType::float32;
};
// Returns the rows without their first columns.
Rows columns_from(const Rows& rows, int64_t first);

// Product of y.t rows.
struct LinearArgs {
    Projection w;
    Rows x;
    const int64_t* x_rows = nullptr;  // (y.t): row r of the product is row x_rows[r] of x; null: row r
    Rows y;
};

// Piece of the output: rows [row, row + rows) and panels [panel, panel + panels).
struct LinearPiece {
    int64_t row, rows, panel, panels;
};

using LinearKernel = void (*)(const LinearArgs&, const LinearPiece&, char* scratch);

// Parameters of the split, for weights of one type. Costs are per k, in units of one row of one panel.
struct LinearShape {
    int64_t tile_rows;   // rows of the largest register tile; row blocks are multiples of it
    double panel_costs;  // cost of reading a panel
    double row_costs;    // cost of copying a row of x
};

struct LinearIsa {
    LinearKernel run;
    LinearShape float32, bfloat16;
};

#define APC_DECLARE(argument, name, ...) \
    namespace name {                     \
    LinearIsa linear_isa();              \
    }
APC_ISAS(APC_DECLARE, )
#undef APC_DECLARE

constexpr int64_t panels_of(int64_t out) { return (out + kPanel - 1) / kPanel; }

// Returns the bytes of packed weights (out, in). Throws std::length_error on overflow.
int64_t packed_bytes(int64_t out, int64_t in, DType dtype);
// Packs weight (out, in) with `stride` elements between rows into `packed`, packed_bytes() large.
void pack_linear(const void* weight, int64_t stride, int64_t out, int64_t in, DType dtype, void* packed,
                 int num_threads);
// Packs codes (out, in) with `stride` bytes between rows, scales and zeros (out, groups) into the run's
// memory. zeros: null if the run has none.
void pack_codes(const uint8_t* codes, int64_t stride, const float* scales, const int8_t* zeros, int64_t out,
                int64_t in, const PanelRun& run, int num_threads);
// Writes rows `indices` (count) of the packed weights back as (count, in) in the packed type.
void unpack_rows(const Projection& packed, const int64_t* indices, int64_t count, void* rows,
                 int num_threads);
void linear(const LinearArgs& args, int num_threads);  // uses the current instruction set

// Computes the product, and counts its time as that of Part::products. x_rows: see LinearArgs.
void project(const Projection& projection, const Rows& x, const int64_t* x_rows, const Rows& y,
             int num_threads);

}  // namespace apcbatch
