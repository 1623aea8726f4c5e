#include "head_mixer.h"

#include <cstring>

#include "parts.h"
#include "rowwise.h"
#include "scan.h"
#include "share.h"

namespace apcbatch {
namespace {

std::int64_t whole_lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Buffers of a pass, consecutive in the workspace.
struct Buffers {
    Rows normed;     // (t, h)
    Rows projected;  // (t, c + Hv V + gates()): q, k, v, z, b, a
    Rows convolved;  // (t, c): q, k, v; norm_heads overwrites them with its outputs (t, Hv V)
    float* out;      // outputs of the scan: delta (Hv, t, V), ssd (t, Hv, V)
    float* scan;     // memory of the scan, head_scan_floats floats
    std::int64_t bytes = 0;

    Buffers(const HeadMixer& p, const HeadScanParams& scan_params, std::int64_t t, char* memory) {
        const auto next = [&](std::int64_t size) {
            char* at = memory == nullptr ? nullptr : memory + bytes;  // null: count bytes only
            bytes += whole_lines(size);
            return at;
        };
        const auto rows = [&](std::int64_t columns) {
            return Rows{t, next(t * columns * bytes_of(p.dtype)), columns, p.dtype};
        };
        normed = rows(p.in_proj.in);
        projected = rows(p.in_proj.out);
        convolved = rows(p.channels());
        out = reinterpret_cast<float*>(next(4 * t * p.out_proj.in));
        scan = reinterpret_cast<float*>(next(4 * head_scan_floats(scan_params, t)));
    }
};

const char* column(const Rows& rows, std::int64_t first) {
    return static_cast<const char*>(rows.data) + first * bytes_of(rows.dtype);
}

// Returns the parameters that are the same in every pass.
HeadScanParams scan_of(const HeadMixer& p) {
    HeadScanParams scan;
    scan.rule = p.rule;
    scan.dtype = p.dtype;
    scan.key_heads = p.key_heads;
    scan.value_heads = p.value_heads;
    scan.key_dim = p.key_dim;
    scan.value_dim = p.value_dim;
    scan.lanes = p.lanes;
    scan.A = p.A;
    scan.dt_bias = p.dt_bias;
    scan.D = p.D;
    scan.dt_min = p.dt_min;
    scan.dt_max = p.dt_max;
    scan.state = p.state;
    scan.state_stride = p.state_stride;
    return scan;
}

void convolve(const HeadMixer& p, const RaggedParams& ragged, const Rows& from, const Rows& to,
              int num_threads) {
    const PartTimer timer(Part::convolution);
    ConvParams conv;
    conv.ragged = ragged;
    conv.dtype = p.dtype;
    conv.d_inner = p.channels();
    conv.width = p.width;
    conv.x = from.data;
    conv.x_stride = from.stride;
    conv.weight = p.conv_weight;
    conv.weight_dtype = DType::float32;
    conv.bias = p.conv_bias;
    conv.state = p.conv;
    conv.state_stride = p.conv_stride;
    conv.out = to.data;
    conv.out_stride = to.stride;
    causal_conv(conv, num_threads);
}

void run_scan(const HeadMixer& p, const RaggedParams& ragged, const Buffers& buffers, HeadScanParams scan,
              int num_threads) {
    const PartTimer timer(Part::scan);
    const std::int64_t keys = p.key_heads * p.key_dim, values = p.value_heads * p.value_dim;
    const Rows &x = buffers.convolved, &projected = buffers.projected;
    scan.ragged = ragged;
    scan.q = column(x, 0);
    scan.k = column(x, keys);
    scan.v = column(x, 2 * keys);
    scan.q_stride = scan.k_stride = scan.v_stride = x.stride;
    scan.b = column(projected, p.channels() + values);
    scan.a = column(projected, p.channels() + values + p.gates() - p.value_heads);
    scan.b_stride = scan.a_stride = projected.stride;
    scan.out = buffers.out;
    scan.out_stride = p.rule == HeadRule::ssd ? values : p.value_dim;
    scan.out_head_stride = p.rule == HeadRule::ssd ? p.value_dim : x.t * p.value_dim;
    head_scan(scan, buffers.scan, num_threads);
}

// Norms the scan's outputs and gates them by z. Overwrites buffers.convolved with the result and returns
// it.
Rows norm_heads(const HeadMixer& p, const Buffers& buffers, int num_threads) {
    const PartTimer timer(Part::norms);
    GatedNormParams norm;
    norm.t = buffers.projected.t;
    norm.gate_first = p.rule == HeadRule::ssd;
    norm.heads = norm.gate_first ? p.key_heads : p.value_heads;
    norm.d = p.value_heads * p.value_dim / norm.heads;
    norm.x = buffers.out;
    norm.x_stride = norm.gate_first ? norm.heads * norm.d : norm.d;
    norm.x_head_stride = norm.gate_first ? norm.d : norm.t * norm.d;
    norm.weight_stride = norm.gate_first ? norm.d : 0;
    norm.gate = column(buffers.projected, p.channels());
    norm.gate_stride = buffers.projected.stride;
    norm.weight = p.head_norm;
    norm.eps = p.head_norm_eps;
    norm.y = buffers.convolved.data;
    norm.dtype = p.dtype;
    gated_norm(norm, num_threads);
    return {norm.t, norm.y, p.value_heads * p.value_dim, p.dtype};
}

// Copies the recurrence inputs of the rows inputs.kept to inputs.kept_inputs.
void keep(const HeadMixer& p, const SubBlockInputs& inputs, const Buffers& buffers, int num_threads) {
    const std::int64_t size = bytes_of(p.dtype), row_bytes = p.kept_bytes(), channels = p.channels();
    const std::int64_t keys = p.key_heads * p.key_dim, values = p.value_heads * p.value_dim;
    const Rows &raw = buffers.projected, &x = buffers.convolved;
    share_rows(inputs.kept.count, 2 * channels, num_threads, 0,
               [&](std::int64_t begin, std::int64_t end, char*) {
                   for (std::int64_t i = begin; i < end; ++i) {
                       char* to = inputs.kept_inputs + i * row_bytes;
                       const auto copy = [&](const Rows& from, std::int64_t first, std::int64_t columns) {
                           const char* row = column(from, inputs.kept.rows[i] * from.stride + first);
                           std::memcpy(to, row, std::size_t(columns * size));
                           to += columns * size;
                       };
                       copy(raw, 0, channels);
                       copy(x, keys, keys + values);
                       copy(raw, channels + values, p.gates());
                   }
               });
}

}  // namespace

std::int64_t HeadMixer::kept_bytes() const {
    const std::int64_t columns = channels() + key_heads * key_dim + value_heads * value_dim + gates();
    return whole_lines(columns * bytes_of(dtype));
}

std::int64_t HeadMixer::replay_bytes(std::int64_t count) const {
    return whole_lines(4 * value_heads * value_dim) + 4 * head_scan_alone_floats(scan_of(*this), count);
}

void HeadMixer::replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                       char* memory) const {
    const std::int64_t size = bytes_of(dtype), row_bytes = kept_bytes();
    const std::int64_t keys = key_heads * key_dim, values = value_heads * value_dim;
    const std::int64_t no_snapshots[] = {0, 0};
    HeadScanParams scan = scan_of(*this);
    scan.q_stride = scan.k_stride = scan.v_stride = scan.b_stride = scan.a_stride = row_bytes / size;
    scan.out = reinterpret_cast<float*>(memory);  // overwritten by every row: out_stride is 0
    scan.out_head_stride = value_dim;
    for (const Replay* one = replays; one < replays + num_replays; ++one) {
        const char* rows = kept + one->first * row_bytes;
        shift_in(static_cast<char*>(conv) + one->slot * conv_stride * size, width - 1, channels() * size,
                 rows, row_bytes, one->count);
        const std::int64_t cu_seqlens[] = {0, one->count};
        scan.ragged = {1, cu_seqlens, &one->slot, &one->slot, no_snapshots, nullptr, nullptr};
        scan.q = scan.k = rows + channels() * size;  // any q: it affects only the outputs, which are not used
        scan.v = rows + (channels() + keys) * size;
        scan.b = rows + (channels() + keys + values) * size;
        scan.a = rows + (channels() + keys + values + gates() - value_heads) * size;
        head_scan_alone(scan, reinterpret_cast<float*>(memory + whole_lines(4 * values)));
    }
}

std::int64_t HeadMixer::scratch_bytes(std::int64_t t) const {
    return Buffers(*this, scan_of(*this), t, nullptr).bytes;
}

void HeadMixer::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                    int num_threads) const {
    const std::int64_t t = inputs.t, h = in_proj.in;
    const HeadScanParams scan = scan_of(*this);
    const Buffers buffers(*this, scan, t, memory);
    pre_norm(norm, t, h, residual, buffers.normed.data, dtype, num_threads);
    project(in_proj, buffers.normed, nullptr, buffers.projected, num_threads);  // (t, h) -> q, k, v, z, b, a
    convolve(*this, inputs.ragged, buffers.projected, buffers.convolved, num_threads);  // columns q, k, v
    if (inputs.kept.count > 0) keep(*this, inputs, buffers, num_threads);
    run_scan(*this, inputs.ragged, buffers, scan, num_threads);
    const Rows normed = norm_heads(*this, buffers, num_threads), out{t, residual.delta, h, DType::float32};
    project(out_proj, normed, nullptr, out, num_threads);  // (t, Hv V) -> (t, h)
}

}  // namespace apcbatch
