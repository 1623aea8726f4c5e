#include "delta_mixer.h"

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
    Rows projected;  // (t, c + Hv V + 2 Hv): q, k, v, z, b, a
    Rows convolved;  // (t, c): q, k, v; norm_heads overwrites them with its outputs (t, Hv V)
    float* out;      // (Hv, t, V): outputs of the rule
    float* gates;    // memory of delta_rule, delta_floats floats
    std::int64_t bytes = 0;

    Buffers(const DeltaMixer& p, const DeltaParams& rule, std::int64_t t, char* memory) {
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
        gates = reinterpret_cast<float*>(next(4 * delta_floats(rule, t)));
    }
};

const char* column(const Rows& rows, std::int64_t first) {
    return static_cast<const char*>(rows.data) + first * bytes_of(rows.dtype);
}

// Returns the parameters that are the same in every pass.
DeltaParams rule_of(const DeltaMixer& p) {
    DeltaParams rule;
    rule.dtype = p.dtype;
    rule.key_heads = p.key_heads;
    rule.value_heads = p.value_heads;
    rule.key_dim = p.key_dim;
    rule.value_dim = p.value_dim;
    rule.lanes = p.lanes;
    rule.A = p.A;
    rule.dt_bias = p.dt_bias;
    rule.state = p.delta;
    rule.state_stride = p.delta_stride;
    return rule;
}

void convolve(const DeltaMixer& p, const RaggedParams& ragged, const Rows& from, const Rows& to,
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
    conv.state = p.conv;
    conv.state_stride = p.conv_stride;
    conv.out = to.data;
    conv.out_stride = to.stride;
    causal_conv(conv, num_threads);
}

void run_rule(const DeltaMixer& p, const RaggedParams& ragged, const Buffers& buffers, DeltaParams rule,
              int num_threads) {
    const PartTimer timer(Part::scan);
    const std::int64_t keys = p.key_heads * p.key_dim, values = p.value_heads * p.value_dim;
    const Rows &x = buffers.convolved, &projected = buffers.projected;
    rule.ragged = ragged;
    rule.q = column(x, 0);
    rule.k = column(x, keys);
    rule.v = column(x, 2 * keys);
    rule.q_stride = rule.k_stride = rule.v_stride = x.stride;
    rule.b = column(projected, p.channels() + values);
    rule.a = column(projected, p.channels() + values + p.value_heads);
    rule.b_stride = rule.a_stride = projected.stride;
    rule.out = buffers.out;
    rule.out_stride = p.value_dim;
    rule.out_head_stride = x.t * p.value_dim;
    delta_rule(rule, buffers.gates, num_threads);
}

// Norms the rule's outputs and gates them by z. Overwrites buffers.convolved with the result and returns
// it.
Rows norm_heads(const DeltaMixer& p, const Buffers& buffers, int num_threads) {
    const PartTimer timer(Part::norms);
    GatedNormParams norm;
    norm.t = buffers.projected.t;
    norm.heads = p.value_heads;
    norm.d = p.value_dim;
    norm.x = buffers.out;
    norm.x_stride = p.value_dim;
    norm.x_head_stride = norm.t * p.value_dim;
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
void keep(const DeltaMixer& p, const SubBlockInputs& inputs, const Buffers& buffers, int num_threads) {
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
                       copy(raw, channels + values, 2 * p.value_heads);
                   }
               });
}

}  // namespace

std::int64_t DeltaMixer::kept_bytes() const {
    const std::int64_t columns = channels() + key_heads * key_dim + value_heads * (value_dim + 2);
    return whole_lines(columns * bytes_of(dtype));
}

std::int64_t DeltaMixer::replay_bytes(std::int64_t count) const {
    return whole_lines(4 * value_heads * value_dim) + 4 * delta_alone_floats(rule_of(*this), count);
}

void DeltaMixer::replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                        char* memory) const {
    const std::int64_t size = bytes_of(dtype), row_bytes = kept_bytes();
    const std::int64_t keys = key_heads * key_dim, values = value_heads * value_dim;
    const std::int64_t no_snapshots[] = {0, 0};
    DeltaParams rule = rule_of(*this);
    rule.q_stride = rule.k_stride = rule.v_stride = rule.b_stride = rule.a_stride = row_bytes / size;
    rule.out = reinterpret_cast<float*>(memory);  // overwritten by every row: out_stride is 0
    rule.out_head_stride = value_dim;
    for (const Replay* one = replays; one < replays + num_replays; ++one) {
        const char* rows = kept + one->first * row_bytes;
        shift_in(static_cast<char*>(conv) + one->slot * conv_stride * size, width - 1, channels() * size,
                 rows, row_bytes, one->count);
        const std::int64_t cu_seqlens[] = {0, one->count};
        rule.ragged = {1, cu_seqlens, &one->slot, &one->slot, no_snapshots, nullptr, nullptr};
        rule.q = rule.k = rows + channels() * size;  // any q: it affects only the outputs, which are not used
        rule.v = rows + (channels() + keys) * size;
        rule.b = rows + (channels() + keys + values) * size;
        rule.a = rows + (channels() + keys + values + value_heads) * size;
        delta_rule_alone(rule, reinterpret_cast<float*>(memory + whole_lines(4 * values)));
    }
}

std::int64_t DeltaMixer::scratch_bytes(std::int64_t t) const {
    return Buffers(*this, rule_of(*this), t, nullptr).bytes;
}

void DeltaMixer::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                     int num_threads) const {
    const std::int64_t t = inputs.t, h = in_proj.in;
    const DeltaParams rule = rule_of(*this);
    const Buffers buffers(*this, rule, t, memory);
    pre_norm(norm, t, h, residual, buffers.normed.data, dtype, num_threads);
    project(in_proj, buffers.normed, nullptr, buffers.projected, num_threads);  // (t, h) -> q, k, v, z, b, a
    convolve(*this, inputs.ragged, buffers.projected, buffers.convolved, num_threads);  // columns q, k, v
    if (inputs.kept.count > 0) keep(*this, inputs, buffers, num_threads);
    run_rule(*this, inputs.ragged, buffers, rule, num_threads);
    const Rows normed = norm_heads(*this, buffers, num_threads), out{t, residual.delta, h, DType::float32};
    project(out_proj, normed, nullptr, out, num_threads);  // (t, Hv V) -> (t, h)
}

}  // namespace apcbatch
