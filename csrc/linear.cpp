// Pack weights, and split a packed matrix product into pieces for the threads. gemm.h computes a piece.
#include "linear.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "parts.h"
#include "share.h"

namespace apcbatch {
namespace {

// Maximum rows of one piece, whose copy stays in the L2 cache, and maximum panels of one piece.
constexpr int64_t kMaxRows = 144;
constexpr int64_t kMaxPanels = 32;
// Work, in multiply-adds, from which waking the thread pool pays: about 80 us. Reading a weight costs as much
// as kWeightCost multiply-adds, which dominates for few rows.
constexpr double kSerialWork = 1 << 22;
constexpr int64_t kWeightCost = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Number of k values stored side by side in a panel: those that fill 4 bytes.
template <class T>
constexpr int64_t kCouple = int64_t(sizeof(float) / sizeof(T));

// Packs one panel of one block of k.
template <class T>
void pack_panel(const T* weight, int64_t stride, int64_t out, int64_t k, int64_t panel, T* to) {
    constexpr int64_t group = kCouple<T>;
    std::memset(to, 0, sizeof(T) * size_t(packed_k(k, sizeof(T)) * kPanel));
    for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel && n < out; ++n) {
        T* column = to + (n - panel * kPanel) * group;
        for (int64_t i = 0; i < k; ++i)
            column[(i / group) * kPanel * group + i % group] = weight[n * stride + i];
    }
}

template <class T>
void pack(const T* weight, int64_t stride, int64_t out, int64_t in, T* packed, int num_threads) {
    const int64_t panels = panels_of(out), blocks = ceil_div(in, kBlockK);
    share_rows(blocks * panels, kBlockK * kPanel, num_threads, 0, [&](int64_t begin, int64_t end, char*) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t k0 = i / panels * kBlockK, panel = i % panels;
            const int64_t k = in - k0 < kBlockK ? in - k0 : kBlockK;
            T* to = packed + k0 * panels * kPanel + panel * packed_k(k, sizeof(T)) * kPanel;
            pack_panel(weight + k0, stride, out, k, panel, to);
        }
    });
}

// Packs one panel of one block of k. scales, zeros: of the panel's first row and the block's first group.
void pack_code_panel(const uint8_t* codes, int64_t stride, const float* scales, const int8_t* zeros,
                     int64_t row_groups, int64_t rows, int64_t k, const PanelRun& run, char* to) {
    std::memset(to, 0, size_t(code_bytes(run, k)));
    const int64_t groups = ceil_div(k, run.group), bytes = run.codes == Codes::int4 ? (k + 1) / 2 : k;
    char* zeros_to = to + groups * kPanel * scale_bytes(run.scales);
    char* codes_to = zeros_to + (run.zeros ? groups * kPanel : 0);
    for (int64_t n = 0; n < rows; ++n) {
        for (int64_t g = 0; g < groups; ++g) {
            const float* scale = scales + n * row_groups + g;
            if (run.scales == Scales::bfloat16) {  // the upper half of a float whose lower half is zero
                std::memcpy(to + 2 * (g * kPanel + n), reinterpret_cast<const char*>(scale) + 2, 2);
            } else {
                std::memcpy(to + 4 * (g * kPanel + n), scale, 4);
            }
            if (run.zeros) zeros_to[g * kPanel + n] = char(zeros[n * row_groups + g]);
        }
        for (int64_t i = 0; i < bytes; ++i) codes_to[i * kPanel + n] = char(codes[n * stride + i]);
    }
}

template <class T>
void unpack(const Projection& weights, const int64_t* indices, int64_t count, T* rows, int num_threads) {
    constexpr int64_t group = kCouple<T>;
    const T* packed = static_cast<const T*>(weights.weights);
    const int64_t in = weights.in, panels = panels_of(weights.out);
    share_rows(count, in, num_threads, 0, [&](int64_t begin, int64_t end, char*) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t panel = indices[r] / kPanel;
            for (int64_t k0 = 0; k0 < in; k0 += kBlockK) {
                const int64_t k = in - k0 < kBlockK ? in - k0 : kBlockK;
                const T* column = packed + k0 * panels * kPanel + panel * packed_k(k, sizeof(T)) * kPanel +
                                  indices[r] % kPanel * group;
                for (int64_t i = 0; i < k; ++i)
                    rows[r * in + k0 + i] = column[(i / group) * kPanel * group + i % group];
            }
        }
    });
}

// Split of a product into a grid of row blocks and panel blocks. rows, panels: sizes of one piece.
struct Cut {
    int64_t rows, row_blocks, panels, panel_blocks;
};

// Estimates the time of one piece. Each panel is read while the previous one is multiplied.
double piece_cost(const LinearShape& shape, int64_t rows, int64_t panels) {
    const double panel = double(rows) < shape.panel_costs ? shape.panel_costs : double(rows);
    return double(panels) * panel + shape.row_costs * double(rows);
}

// Key of a split: all that it depends on.
struct Question {
    int64_t t, panels, threads;
    LinearShape shape;
    bool operator==(const Question& other) const {
        return t == other.t && panels == other.panels && threads == other.threads &&
               shape.tile_rows == other.shape.tile_rows && shape.panel_costs == other.shape.panel_costs &&
               shape.row_costs == other.shape.row_costs;
    }
};

// Delay of the slowest thread, in pieces, for more than kFewRows rows. With fewer rows memory bandwidth is
// the limit, and pieces as long as possible are best.
constexpr double kUneven = 0.25;
constexpr int64_t kFewRows = 16;

// Searches the split of the shortest estimated time. As each row block reads all weights, more row blocks
// than needed are tried only with few panels. A thread gets at most about eight pieces of at most kMaxPanels
// panels.
Cut search(const Question& question) {
    const int64_t panels = question.panels, t = question.t, threads = question.threads;
    const LinearShape& shape = question.shape;
    const int64_t fewest = ceil_div(t, kMaxRows);
    const int64_t most = threads > 1 && panels < 8 * threads ? fewest * 4 : fewest;
    const double behind = t > kFewRows ? kUneven : 0.0;
    Cut best{};
    double best_time = 0.0;
    for (int64_t row_blocks = fewest; row_blocks <= most; ++row_blocks) {
        int64_t rows = ceil_div(t, row_blocks);
        if (row_blocks > 1) rows = ceil_div(rows, shape.tile_rows) * shape.tile_rows;
        const int64_t real_row_blocks = ceil_div(t, rows);
        const int64_t enough = ceil_div(8 * threads, real_row_blocks);
        for (int64_t wanted = ceil_div(panels, kMaxPanels); wanted <= panels; ++wanted) {
            const int64_t width = ceil_div(panels, wanted);
            const int64_t panel_blocks = ceil_div(panels, width);
            const int64_t rounds = ceil_div(real_row_blocks * panel_blocks, threads);
            const double time = (double(rounds) + behind) * piece_cost(shape, rows, width);
            if (best_time == 0.0 || time < best_time) {
                best = {rows, real_row_blocks, width, panel_blocks};
                best_time = time;
            }
            if (wanted > enough) break;
        }
    }
    return best;
}

// Returns the split from a cache: every layer of a pass needs the same few, and a search takes microseconds.
Cut cut(const Question& question) {
    struct Answer {
        Question question;
        Cut cut;
    };
    constexpr int64_t kAnswers = 64;
    thread_local Answer answers[kAnswers] = {};
    Answer& answer = answers[(question.t * 31 + question.panels * 7 + question.threads) % kAnswers];
    if (!(answer.question == question)) answer = {question, search(question)};
    return answer.cut;
}

int64_t scratch_bytes(const LinearArgs& args, int64_t rows, int64_t panels) {
    const int64_t decoded = args.w.runs ? kDecodedPanels * kBlockK * kPanel * 4 : 0;
    return scratch_rows(rows) * (kRowBytes + 4 * panels * kPanel) + decoded;
}

}  // namespace

int64_t packed_bytes(int64_t out, int64_t in, DType dtype) {
    int64_t values = 0, bytes = 0;
    if (out < 0 || out > INT64_MAX - kPanel || in < 0 || in > INT64_MAX - kTileK ||
        __builtin_mul_overflow(panels_of(out) * kPanel, packed_k(in, bytes_of(dtype)), &values) ||
        __builtin_mul_overflow(values, bytes_of(dtype), &bytes)) {
        throw std::length_error("packed weights must have fewer than 2^63 bytes; " + std::to_string(out) +
                                " rows of " + std::to_string(in) + " columns have more");
    }
    return bytes;
}

void pack_linear(const void* weight, int64_t stride, int64_t out, int64_t in, DType dtype, void* packed,
                 int num_threads) {
    with_type(dtype, [&](auto of) {
        using T = TypeOf<decltype(of)>;
        pack(static_cast<const T*>(weight), stride, out, in, static_cast<T*>(packed), num_threads);
    });
}

void pack_codes(const uint8_t* codes, int64_t stride, const float* scales, const int8_t* zeros, int64_t out,
                int64_t in, const PanelRun& run, int num_threads) {
    const int64_t panels = run.end - run.begin, blocks = ceil_div(in, kBlockK),
                  row_groups = ceil_div(in, run.group);
    char* const packed = const_cast<char*>(run.weights);
    share_rows(blocks * panels, kBlockK * kPanel, num_threads, 0, [&](int64_t begin, int64_t end, char*) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t k0 = i / panels * kBlockK, panel = i % panels, row = panel * kPanel;
            const int64_t k = in - k0 < kBlockK ? in - k0 : kBlockK,
                          group = row * row_groups + k0 / run.group;
            pack_code_panel(
                codes + row * stride + (run.codes == Codes::int4 ? k0 / 2 : k0), stride, scales + group,
                zeros ? zeros + group : nullptr, row_groups, out - row < kPanel ? out - row : kPanel, k, run,
                packed + k0 / kBlockK * panels * code_bytes(run, kBlockK) + panel * code_bytes(run, k));
        }
    });
}

void unpack_rows(const Projection& packed, const int64_t* indices, int64_t count, void* rows,
                 int num_threads) {
    with_type(packed.dtype, [&](auto of) {
        unpack(packed, indices, count, static_cast<TypeOf<decltype(of)>*>(rows), num_threads);
    });
}

void linear(const LinearArgs& args, int num_threads) {
    const LinearIsa isa = APC_FOR_OWN_ISA(linear_isa)();
    const int64_t t = args.y.t, panels = panels_of(args.w.out);
    if (t == 0 || panels == 0) return;
    const LinearShape& shape = args.w.dtype == DType::bfloat16 ? isa.bfloat16 : isa.float32;
    const double work = double(t + kWeightCost) * double(args.w.out) * double(args.w.in);
    const int64_t threads = useful_threads(work, kSerialWork, num_threads);
    const Cut c = cut({t, panels, threads, shape});
    const int64_t pieces = c.row_blocks * c.panel_blocks;
    share_pieces(pieces, threads, scratch_bytes(args, c.rows, c.panels), [&](int64_t piece, char* scratch) {
        const int64_t row = piece / c.panel_blocks * c.rows, panel = piece % c.panel_blocks * c.panels;
        const int64_t rows = t - row < c.rows ? t - row : c.rows;
        const int64_t left = panels - panel;
        isa.run(args, {row, rows, panel, left < c.panels ? left : c.panels}, scratch);
    });
}

void project(const Projection& projection, const Rows& x, const int64_t* x_rows, const Rows& y,
             int num_threads) {
    const PartTimer timer(Part::products);
    linear({projection, x, x_rows, y}, num_threads);
}

Rows columns_from(const Rows& rows, int64_t first) {
    return {rows.t, static_cast<char*>(rows.data) + first * bytes_of(rows.dtype), rows.stride, rows.dtype};
}

}  // namespace apcbatch
