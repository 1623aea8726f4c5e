#include "short_conv.h"

#include "parts.h"
#include "rowwise.h"
#include "scan.h"

namespace apcbatch {
namespace {

// Overwrites the first h columns of `rows` with their products with the first h columns of `factors`.
void multiply(const Rows& rows, const Rows& factors, std::int64_t h, int num_threads) {
    const PartTimer timer(Part::convolution);
    SiluMulParams product;
    product.has_silu = false;
    product.t = rows.t;
    product.f = h;
    product.gate = product.y = rows.data;
    product.gate_stride = product.y_stride = rows.stride;
    product.up = factors.data;
    product.up_stride = factors.stride;
    product.dtype = rows.dtype;
    silu_mul(product, num_threads);
}

// Buffers of a pass, consecutive in the workspace.
struct Buffers {
    Rows normed, b;  // (t, h); (t, 3h): B, C, x
    std::int64_t bytes;

    Buffers(const ShortConv& p, std::int64_t t, char* memory) {
        Workspace workspace(memory);
        normed = workspace.rows(t, p.in_proj.in, p.conv.dtype);
        b = workspace.rows(t, p.in_proj.out, p.conv.dtype);
        bytes = workspace.bytes();
    }
};

}  // namespace

std::int64_t ShortConv::kept_bytes() const { return whole_lines(out_proj.in * bytes_of(conv.dtype)); }

void ShortConv::replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                       char* /*memory*/) const {
    const std::int64_t row_bytes = kept_bytes();
    for (const Replay* one = replays; one < replays + num_replays; ++one) {
        shift_in(conv, one->slot, kept + one->first * row_bytes, row_bytes, one->count);
    }
}

std::int64_t ShortConv::scratch_bytes(std::int64_t t) const { return Buffers(*this, t, nullptr).bytes; }

void ShortConv::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                    int num_threads) const {
    const std::int64_t t = inputs.t, h = in_proj.in;
    const Buffers buffers(*this, t, memory);
    const Rows &b = buffers.b, c = columns_from(b, h), x = columns_from(b, 2 * h);
    pre_norm(norm, residual, buffers.normed, num_threads);
    project(in_proj, buffers.normed, nullptr, b, num_threads);  // (t, h) -> (t, 3h): B, C, x
    multiply(b, x, h, num_threads);
    convolve(conv, inputs.ragged, b, x, num_threads);
    keep_rows(inputs, kept_bytes(), {{b, h}}, num_threads);
    multiply(c, x, h, num_threads);
    project(out_proj, c, nullptr, {t, residual.delta, h, DType::float32}, num_threads);  // (t, h) -> (t, h)
}

}  // namespace apcbatch
