#include "mamba_mixer.h"

#include <vector>

#include "parts.h"
#include "rowwise.h"
#include "scan.h"

namespace apcbatch {
namespace {

// Buffers of a pass, consecutive in the workspace.
struct Buffers {
    Rows xz, x;
    Rows low, low_normed;  // dt, B and C side by side
    Rows dt, normed;
    std::int64_t bytes;

    Buffers(const MambaMixer& p, std::int64_t t, char* memory) {
        Workspace workspace(memory);
        const auto rows = [&](std::int64_t columns) { return workspace.rows(t, columns, p.scan.dtype); };
        const std::int64_t d = p.scan.d_inner;
        xz = rows(2 * d);
        x = rows(d);
        low = rows(p.x_proj.out);
        low_normed = rows(p.has_norms ? p.x_proj.out : 0);
        dt = rows(d);
        normed = rows(p.in_proj.in);
        bytes = workspace.bytes();
    }
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
    const std::int64_t r = p.dt_proj.in, n = p.scan.d_state;
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
void run_scan(const MambaMixer& p, const RaggedParams& ragged, const Rows& x, const Rows& z,
              const Selection& s, int num_threads) {
    const PartTimer timer(Part::scan);
    ScanParams scan = p.scan;
    scan.ragged = ragged;
    scan.x = x.data;
    scan.x_stride = x.stride;
    scan.dt = s.dt.data;
    scan.dt_stride = s.dt.stride;
    scan.B = s.B.data;
    scan.B_stride = s.B.stride;
    scan.C = s.C.data;
    scan.C_stride = s.C.stride;
    scan.z = z.data;
    scan.z_stride = z.stride;
    scan.out = s.dt.data;
    scan.out_stride = s.dt.stride;
    selective_scan(scan, num_threads);
}

}  // namespace

std::int64_t MambaMixer::kept_bytes() const {
    return whole_lines((3 * scan.d_inner + scan.d_state) * bytes_of(scan.dtype));
}

std::int64_t MambaMixer::replay_bytes(std::int64_t count) const {
    const std::int64_t output = whole_lines(scan.d_inner * bytes_of(scan.dtype));
    return output + scan_alone_bytes(scan.d_inner, scan.d_state, count);
}

void MambaMixer::replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                        char* memory) const {
    const std::int64_t size = bytes_of(scan.dtype), d = scan.d_inner, row_bytes = kept_bytes();
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
    ScanParams all = scan;
    all.ragged = {std::int64_t(sequences), cu_seqlens.data(), slots.data(), slots.data(),
                  snapshot_cu.data(),      nullptr,           nullptr};
    all.x = kept + d * size;
    all.dt = kept + 2 * d * size;
    all.B = all.C = kept + 3 * d * size;  // the outputs, which C selects, are not used
    all.x_stride = all.dt_stride = all.B_stride = all.C_stride = row_bytes / size;
    all.out = memory;  // of every row
    selective_scan_alone(all, memory + whole_lines(d * size));
}

std::int64_t MambaMixer::scratch_bytes(std::int64_t t) const { return Buffers(*this, t, nullptr).bytes; }

void MambaMixer::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                     int num_threads) const {
    const MambaMixer& p = *this;
    const RaggedParams& ragged = inputs.ragged;
    const std::int64_t d = p.scan.d_inner;
    const Buffers buffers(p, inputs.t, memory);
    const Rows &xz = buffers.xz, &u = buffers.x, &dt = buffers.dt;
    const Rows out{inputs.t, residual.delta, p.in_proj.in, DType::float32};
    pre_norm(p.norm, residual, buffers.normed, num_threads);
    project(p.in_proj, buffers.normed, nullptr, xz, num_threads);  // (t, h) -> (t, 2d)
    convolve(p.conv, ragged, xz, u, num_threads);                  // (t, d) of it -> (t, d)
    project(p.x_proj, u, nullptr, buffers.low, num_threads);       // (t, d) -> (t, r + 2n)
    Selection s = select(p, buffers.low, buffers.low_normed, num_threads);
    project(p.dt_proj, s.dt, nullptr, dt, num_threads);  // (t, r) -> (t, d)
    s.dt = dt;
    keep_rows(inputs, kept_bytes(), {{xz, d}, {u, d}, {dt, d}, {s.B, p.scan.d_state}}, num_threads);
    run_scan(p, ragged, u, columns_from(xz, d), s, num_threads);
    project(p.out_proj, dt, nullptr, out, num_threads);  // (t, d) -> (t, h)
}

}  // namespace apcbatch
