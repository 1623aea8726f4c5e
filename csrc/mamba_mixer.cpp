#include "mamba_mixer.h"

#include <cstring>
#include <vector>

#include "parts.h"
#include "rowwise.h"
#include "scan.h"
#include "share.h"

namespace apcbatch {
namespace {

// Layout of the activations between the projections, consecutive in the workspace.
class Layout {
  public:
    Layout(const MambaMixer& p, std::int64_t t) : dtype_(p.dtype), t_(t) {
        const std::int64_t d = p.dt_proj.out, low = p.x_proj.out;
        const std::int64_t columns[] = {2 * d, d, low, p.has_norms ? low : 0, d, p.in_proj.in};
        for (int i = 0; i < 6; ++i) {
            offset_[i] = bytes_;
            stride_[i] = columns[i];
            bytes_ += whole_lines(t * columns[i] * bytes_of(dtype_));
        }
    }
    std::int64_t bytes() const { return bytes_; }
    Rows xz(char* memory) const { return rows(memory, 0); }
    Rows x(char* memory) const { return rows(memory, 1); }
    Rows low(char* memory) const { return rows(memory, 2); }  // dt, B and C side by side
    Rows low_normed(char* memory) const { return rows(memory, 3); }
    Rows dt(char* memory) const { return rows(memory, 4); }
    Rows normed(char* memory) const { return rows(memory, 5); }

  private:
    DType dtype_;
    std::int64_t t_, bytes_ = 0;
    std::int64_t offset_[6] = {}, stride_[6] = {};

    Rows rows(char* memory, int i) const { return {t_, memory + offset_[i], stride_[i], dtype_}; }
};

// Norms the first `columns` columns of the rows into contiguous rows at `to`. Returns these.
Rows norm(const MambaMixer& p, const Rows& rows, std::int64_t columns, const float* weight, void* to,
          int num_threads) {
    const PartTimer timer(Part::norms);
    NormParams norm;
    norm.t = rows.t;
    norm.h = columns;
    norm.x = rows.data;
    norm.x_stride = rows.stride;
    norm.x_dtype = rows.dtype;
    norm.weight = weight;
    norm.eps = p.norm_eps;
    norm.y = to;
    norm.y_dtype = rows.dtype;
    rms_norm(norm, num_threads);
    return {rows.t, to, columns, rows.dtype};
}

struct Selection {
    Rows dt, B, C;
};

Selection select(const MambaMixer& p, const Rows& low, const Rows& normed, int num_threads) {
    const std::int64_t r = p.dt_proj.in, n = p.d_state;
    Selection s{low, columns_from(low, r), columns_from(low, r + n)};
    if (!p.has_norms) return s;
    char* to = static_cast<char*>(normed.data);
    const std::int64_t column = low.t * bytes_of(low.dtype);
    s.dt = norm(p, s.dt, r, p.dt_norm, to, num_threads);
    s.B = norm(p, s.B, n, p.B_norm, to + r * column, num_threads);
    s.C = norm(p, s.C, n, p.C_norm, to + (r + n) * column, num_threads);
    return s;
}

// Runs the scan. y overwrites dt: a unit of the scan reads a tile's dt before it writes the tile's y.
void scan(const MambaMixer& p, const RaggedParams& ragged, const Rows& x, const Rows& z, const Selection& s,
          int num_threads) {
    const PartTimer timer(Part::scan);
    ScanParams scan;
    scan.ragged = ragged;
    scan.dtype = p.dtype;
    scan.d_inner = p.dt_proj.out;
    scan.d_state = p.d_state;
    scan.x = x.data;
    scan.x_stride = x.stride;
    scan.dt = s.dt.data;
    scan.dt_stride = s.dt.stride;
    scan.A = p.A;
    scan.B = s.B.data;
    scan.B_stride = s.B.stride;
    scan.C = s.C.data;
    scan.C_stride = s.C.stride;
    scan.D = p.D;
    scan.z = z.data;
    scan.z_stride = z.stride;
    scan.dt_bias = p.dt_bias;
    scan.state = p.ssm;
    scan.state_stride = p.ssm_stride;
    scan.out = s.dt.data;
    scan.out_stride = s.dt.stride;
    selective_scan(scan, num_threads);
}

// Copies the inputs of the recurrence of some rows to inputs.kept_inputs.
void keep(const MambaMixer& p, const SubBlockInputs& inputs, const Rows& raw, const Rows& x,
          const Selection& s, int num_threads) {
    const std::int64_t size = bytes_of(p.dtype), d = p.dt_proj.out, row_bytes = p.kept_bytes();
    share_rows(inputs.kept.count, 3 * d, num_threads, 0, [&](std::int64_t begin, std::int64_t end, char*) {
        for (std::int64_t i = begin; i < end; ++i) {
            char* to = inputs.kept_inputs + i * row_bytes;
            const auto copy = [&](const Rows& from, std::int64_t columns) {
                const char* row =
                    static_cast<const char*>(from.data) + inputs.kept.rows[i] * from.stride * size;
                std::memcpy(to, row, std::size_t(columns * size));
                to += columns * size;
            };
            copy(raw, d);
            copy(x, d);
            copy(s.dt, d);
            copy(s.B, p.d_state);
        }
    });
}

}  // namespace

std::int64_t MambaMixer::kept_bytes() const {
    return whole_lines((3 * dt_proj.out + d_state) * bytes_of(dtype));
}

std::int64_t MambaMixer::replay_bytes(std::int64_t count) const {
    const std::int64_t output = whole_lines(dt_proj.out * bytes_of(dtype));
    return output + scan_alone_bytes(dt_proj.out, d_state, count);
}

void MambaMixer::replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                        char* memory) const {
    const std::int64_t size = bytes_of(dtype), d = dt_proj.out, row_bytes = kept_bytes();
    // The rows of a replay are a sequence, and so are those between it and the next one.
    const std::size_t sequences = 2 * std::size_t(num_replays);
    std::vector<std::int64_t> cu_seqlens(sequences + 1), slots(sequences), snapshot_cu(sequences + 1);
    for (std::int64_t i = 0; i < num_replays; ++i) {
        const Replay& one = replays[i];
        shift_in(conv, one.slot, kept + one.first * row_bytes, row_bytes, one.count);
        cu_seqlens[2 * std::size_t(i)] = one.first;
        cu_seqlens[2 * std::size_t(i) + 1] = cu_seqlens[2 * std::size_t(i) + 2] = one.first + one.count;
        slots[2 * std::size_t(i)] = one.slot;
    }
    ScanParams scan;
    scan.ragged = {std::int64_t(sequences), cu_seqlens.data(), slots.data(), slots.data(),
                   snapshot_cu.data(),      nullptr,           nullptr};
    scan.dtype = dtype;
    scan.d_inner = d;
    scan.d_state = d_state;
    scan.x = kept + d * size;
    scan.dt = kept + 2 * d * size;
    scan.B = scan.C = kept + 3 * d * size;  // the outputs, which C selects, are not used
    scan.x_stride = scan.dt_stride = scan.B_stride = scan.C_stride = row_bytes / size;
    scan.A = A;
    scan.dt_bias = dt_bias;
    scan.state = ssm;
    scan.state_stride = ssm_stride;
    scan.out = memory;  // of every row
    selective_scan_alone(scan, memory + whole_lines(d * size));
}

std::int64_t MambaMixer::scratch_bytes(std::int64_t t) const { return Layout(*this, t).bytes(); }

void MambaMixer::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                     int num_threads) const {
    const MambaMixer& p = *this;
    const RaggedParams& ragged = inputs.ragged;
    const std::int64_t t = inputs.t, h = p.in_proj.in;
    const Layout layout(p, t);
    const Rows normed = layout.normed(memory), out{t, residual.delta, h, DType::float32};
    pre_norm(p.norm, t, h, residual, normed.data, p.dtype, num_threads);
    const Rows xz = layout.xz(memory), u = layout.x(memory), low = layout.low(memory);
    project(p.in_proj, normed, nullptr, xz, num_threads);  // (t, h) -> (t, 2d)
    convolve(p.conv, ragged, xz, u, num_threads);          // (t, d) of it -> (t, d)
    project(p.x_proj, u, nullptr, low, num_threads);       // (t, d) -> (t, r + 2n)
    Selection s = select(p, low, layout.low_normed(memory), num_threads);
    const Rows dt = layout.dt(memory);
    project(p.dt_proj, s.dt, nullptr, dt, num_threads);  // (t, r) -> (t, d)
    s.dt = dt;
    if (inputs.kept.count > 0) keep(p, inputs, xz, u, s, num_threads);
    scan(p, ragged, u, columns_from(xz, p.dt_proj.out), s, num_threads);
    project(p.out_proj, dt, nullptr, out, num_threads);  // (t, d) -> (t, h)
}

}  // namespace apcbatch
