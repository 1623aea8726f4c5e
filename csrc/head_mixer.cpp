#include "head_mixer.h"

#include "parts.h"
#include "rowwise.h"
#include "scan.h"

namespace apcbatch {
namespace {

// Buffers of a pass, consecutive in the workspace.
struct Buffers {
    Rows normed;     // (t, h)
    Rows projected;  // (t, c + Hv V + gates()): q, k, v, z, b, a
    Rows convolved;  // (t, c): q, k, v; norm_heads overwrites them with its outputs (t, Hv V)
    float* out;      // outputs of the scan: delta (Hv, t, V), ssd (t, Hv, V)
    float* scan;     // memory of the scan, head_scan_floats floats
    std::int64_t bytes;

    Buffers(const HeadMixer& p, std::int64_t t, char* memory) {
        Workspace workspace(memory);
        normed = workspace.rows(t, p.in_proj.in, p.scan.dtype);
        projected = workspace.rows(t, p.in_proj.out, p.scan.dtype);
        convolved = workspace.rows(t, p.channels(), p.scan.dtype);
        out = workspace.take<float>(t * p.out_proj.in);
        scan = workspace.take<float>(head_scan_floats(p.scan, t));
        bytes = workspace.bytes();
    }
};

void run_scan(const HeadMixer& p, const RaggedParams& ragged, const Buffers& buffers, int num_threads) {
    const PartTimer timer(Part::scan);
    const Rows &x = buffers.convolved, gates = columns_from(buffers.projected, p.channels() + p.values());
    HeadScanParams scan =
        head_scan_over(p.scan, ragged, x.data, x.stride, gates.data, gates.stride, buffers.out);
    if (!p.is_ssd()) {
        scan.out_stride = scan.value_dim;
        scan.out_head_stride = x.t * scan.value_dim;
    }
    head_scan(scan, buffers.scan, num_threads);
}

// Norms the scan's outputs and gates them by z. Overwrites buffers.convolved with the result and returns
// it.
Rows norm_heads(const HeadMixer& p, const Buffers& buffers, int num_threads) {
    const PartTimer timer(Part::norms);
    GatedNormParams norm;
    norm.t = buffers.projected.t;
    norm.gate_first = p.gate_first;
    norm.heads = p.is_ssd() ? p.scan.key_heads : p.scan.value_heads;
    norm.d = p.values() / norm.heads;
    norm.x = buffers.out;
    norm.x_stride = p.is_ssd() ? p.values() : norm.d;
    norm.x_head_stride = p.is_ssd() ? norm.d : norm.t * norm.d;
    norm.weight_stride = p.is_ssd() ? norm.d : 0;
    norm.gate = columns_from(buffers.projected, p.channels()).data;
    norm.gate_stride = buffers.projected.stride;
    norm.weight = p.head_norm;
    norm.eps = p.head_norm_eps;
    norm.y = buffers.convolved.data;
    norm.dtype = p.scan.dtype;
    gated_norm(norm, num_threads);
    return {norm.t, norm.y, p.values(), p.scan.dtype};
}

// Keeps the recurrence inputs.
void keep(const HeadMixer& p, const SubBlockInputs& inputs, const Buffers& buffers, int num_threads) {
    const Rows& raw = buffers.projected;
    const Rows k = columns_from(buffers.convolved, p.keys());  // and v
    const Rows gates = columns_from(raw, p.channels() + p.values());
    keep_rows(inputs, p.kept_bytes(), {{raw, p.channels()}, {k, p.keys() + p.values()}, {gates, p.gates()}},
              num_threads);
}

}  // namespace

std::int64_t HeadMixer::kept_bytes() const {
    return whole_lines((channels() + keys() + values() + gates()) * bytes_of(scan.dtype));
}

std::int64_t HeadMixer::replay_bytes(std::int64_t count) const {
    return whole_lines(4 * values()) + 4 * head_scan_alone_floats(scan, count);
}

void HeadMixer::replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                       char* memory) const {
    const std::int64_t size = bytes_of(scan.dtype), row_bytes = kept_bytes();
    const std::int64_t no_snapshots[] = {0, 0};
    HeadScanParams one = scan;
    one.q_stride = one.k_stride = one.v_stride = one.b_stride = one.a_stride = row_bytes / size;
    one.out = reinterpret_cast<float*>(memory);  // overwritten by every row: out_stride is 0
    one.out_head_stride = scan.value_dim;
    for (const Replay* replay = replays; replay < replays + num_replays; ++replay) {
        const char* rows = kept + replay->first * row_bytes;
        shift_in(conv, replay->slot, rows, row_bytes, replay->count);
        const std::int64_t cu_seqlens[] = {0, replay->count};
        one.ragged = {1, cu_seqlens, &replay->slot, &replay->slot, no_snapshots, nullptr, nullptr};
        const char *k = rows + channels() * size, *v = k + keys() * size, *gate = v + values() * size;
        one.q = one.k = k;  // any q: it affects only the outputs, which are not used
        one.v = v;
        one.b = gate;
        one.a = gate + (gates() - scan.value_heads) * size;
        head_scan_alone(one, reinterpret_cast<float*>(memory + whole_lines(4 * values())));
    }
}

std::int64_t HeadMixer::scratch_bytes(std::int64_t t) const { return Buffers(*this, t, nullptr).bytes; }

void HeadMixer::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                    int num_threads) const {
    const std::int64_t t = inputs.t, h = in_proj.in;
    const Buffers buffers(*this, t, memory);
    pre_norm(norm, residual, buffers.normed, num_threads);
    project(in_proj, buffers.normed, nullptr, buffers.projected, num_threads);  // (t, h) -> q, k, v, z, b, a
    convolve(conv, inputs.ragged, buffers.projected, buffers.convolved, num_threads);  // columns q, k, v
    keep(*this, inputs, buffers, num_threads);
    run_scan(*this, inputs.ragged, buffers, num_threads);
    const Rows normed = norm_heads(*this, buffers, num_threads), out{t, residual.delta, h, DType::float32};
    project(out_proj, normed, nullptr, out, num_threads);  // (t, Hv V) -> (t, h)
}

}  // namespace apcbatch
