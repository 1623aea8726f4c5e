#include "short_conv.h"

#include <cstring>

#include "parts.h"
#include "rowwise.h"
#include "scan.h"
#include "share.h"

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

// Copies the inputs of the convolution of the rows inputs.kept to inputs.kept_inputs.
void keep(const SubBlockInputs& inputs, const Rows& raw, std::int64_t h, std::int64_t row_bytes) {
    for (std::int64_t i = 0; i < inputs.kept.count; ++i) {
        const Rows row = columns_from(raw, inputs.kept.rows[i] * raw.stride);
        std::memcpy(inputs.kept_inputs + i * row_bytes, row.data, std::size_t(h * bytes_of(raw.dtype)));
    }
}

}  // namespace

std::int64_t ShortConv::kept_bytes() const { return whole_lines(out_proj.in * bytes_of(conv.dtype)); }

void ShortConv::replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                       char* /*memory*/) const {
    const std::int64_t row_bytes = kept_bytes();
    for (const Replay* one = replays; one < replays + num_replays; ++one) {
        shift_in(conv, one->slot, kept + one->first * row_bytes, row_bytes, one->count);
    }
}

std::int64_t ShortConv::scratch_bytes(std::int64_t t) const {
    const std::int64_t row = whole_lines(t * in_proj.in * bytes_of(conv.dtype));
    return row + whole_lines(t * in_proj.out * bytes_of(conv.dtype));
}

void ShortConv::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                    int num_threads) const {
    const std::int64_t t = inputs.t, h = in_proj.in;
    const Rows normed{t, memory, h, conv.dtype};
    const Rows b{t, memory + whole_lines(t * h * bytes_of(conv.dtype)), in_proj.out, conv.dtype};
    const Rows c = columns_from(b, h), x = columns_from(b, 2 * h);
    pre_norm(norm, t, h, residual, normed.data, conv.dtype, num_threads);
    project(in_proj, normed, nullptr, b, num_threads);  // (t, h) -> (t, 3h): B, C, x
    multiply(b, x, h, num_threads);
    convolve(conv, inputs.ragged, b, x, num_threads);
    if (inputs.kept.count > 0) keep(inputs, b, h, kept_bytes());
    multiply(c, x, h, num_threads);
    project(out_proj, c, nullptr, {t, residual.delta, h, DType::float32}, num_threads);  // (t, h) -> (t, h)
}

}  // namespace apcbatch
