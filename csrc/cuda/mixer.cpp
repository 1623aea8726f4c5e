// See mixer.h.
#include "mixer.h"

#include <algorithm>

namespace apcbatch {
namespace cuda {
namespace {

constexpr std::size_t kAlignment = 256;  // alignment in bytes of each array in the workspace

// Returns true if cuBLASLt leaves the pieces of a product to sum_pieces.
bool leaves_parts(const ChainWeights& weights, const ChainKernel& kernel) {
    return kernel.of_library && weights.pieces > 1 && !kernel.in_turn;
}

// Intermediate results between the ops of a pass, each (t, columns).
class Workspace {
  public:
    Workspace(const Mixer& m, std::int64_t tokens, const MixerKernels& kernels, void* begin)
        : begin_(static_cast<char*>(begin)), tokens_(tokens) {
        const std::size_t size = std::size_t(bytes_of(m.dtype));
        normed = take(m.in_proj.in, size);
        xz = take(m.in_proj.out, size);
        x = take(m.x_proj.in, size);
        low = take(m.x_proj.out, size);
        if (m.has_inner_norms) {
            low_dt = take(m.dt_proj.in, size);
            B = take(m.scan.d_state, size);
            C = take(m.scan.d_state, size);
        }
        dt = take(m.dt_proj.out, size);
        y = take(m.out_proj.in, size);
        const auto floats = [](const ChainWeights& weights, const ChainKernel& kernel) {
            return leaves_parts(weights, kernel) ? std::int64_t(weights.pieces) * weights.out : 0;
        };
        parts = take(std::max({floats(m.in_proj, kernels.in_proj), floats(m.x_proj, kernels.x_proj),
                               floats(m.dt_proj, kernels.dt_proj), floats(m.out_proj, kernels.out_proj)}),
                     sizeof(float));
    }

    std::size_t bytes() const { return used_; }

    void *normed, *xz, *x, *low, *low_dt = nullptr, *B = nullptr, *C = nullptr, *dt, *y, *parts;

  private:
    void* take(std::int64_t columns, std::size_t size) {
        void* array = begin_ ? begin_ + used_ : nullptr;
        const std::size_t bytes = std::size_t(tokens_ * columns) * size;
        used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
        return array;
    }

    char* begin_;
    std::int64_t tokens_;
    std::size_t used_ = 0;
};

// Multiplies in row blocks by our own kernel.
void multiply_few(const ProductParams& all, cudaStream_t stream) {
    const std::int64_t x_row = all.x_stride * bytes_of(all.dtype), y_row = all.out * bytes_of(all.y_dtype);
    for (int begin = 0; begin < all.rows; begin += kMostFewRows) {
        ProductParams some = all;
        some.rows = std::min(kMostFewRows, all.rows - begin);
        some.x = static_cast<const char*>(all.x) + begin * x_row;
        some.y = static_cast<char*>(all.y) + begin * y_row;
        all.dtype == DType::bfloat16 ? few_rows_product(some, stream) : chain_product(some, stream);
    }
}

// Multiplies by a cuBLASLt kernel. Returns false if cuBLASLt does not support the call.
bool multiply_many(const ProductParams& p, const ChainKernel& kernel, void* parts, cudaStream_t stream) {
    ProductParams made = p;
    if (parts) {
        made.y = parts;
        made.y_dtype = DType::float32;
    }
    if (!library_product(made, kernel.in_turn, kernel.choice, stream)) return false;
    if (parts)
        sum_pieces(static_cast<const float*>(parts), std::int64_t(p.rows) * p.out, p.pieces, p.y, p.y_dtype,
                   stream);
    return true;
}

// Returns the address of element `column` of the first row.
void* column(void* rows, std::int64_t column, DType dtype) {
    return static_cast<char*>(rows) + column * bytes_of(dtype);
}

NormParams norm_of(NormParams norm, std::int64_t tokens, std::int64_t columns, void* x, std::int64_t x_stride,
                   DType x_dtype, void* y, DType y_dtype) {
    norm.t = tokens;
    norm.h = columns;
    norm.x = x;
    norm.x_stride = x_stride;
    norm.x_dtype = x_dtype;
    norm.y = y;
    norm.y_dtype = y_dtype;
    return norm;
}

void run_mixer(const Mixer& m, const MixerPass& pass, cudaStream_t stream) {
    const std::int64_t t = pass.batch.num_tokens, d = m.scan.d_inner, n = m.scan.d_state, r = m.dt_proj.in;
    const Workspace at(m, t, pass.kernels, pass.workspace);
    const auto multiply = [&](const ChainWeights& weights, const ChainKernel& kernel, const void* x,
                              std::int64_t x_stride, void* y, DType y_dtype) {
        const ProductParams p = {int(t), weights.in, weights.out, m.dtype, weights.weight,
                                 x,      x_stride,   y,           y_dtype, weights.pieces};
        void* parts = leaves_parts(weights, kernel) ? at.parts : nullptr;
        if (!kernel.of_library || !multiply_many(p, kernel, parts, stream)) multiply_few(p, stream);
    };

    NormParams norm =
        norm_of(m.norm, t, m.in_proj.in, pass.sum, m.in_proj.in, DType::float32, at.normed, m.dtype);
    norm.delta = pass.delta;
    norm.delta_stride = m.in_proj.in;
    rms_norm(norm, stream);
    multiply(m.in_proj, pass.kernels.in_proj, at.normed, m.in_proj.in, at.xz, m.dtype);

    ConvParams convolution = m.convolution;
    convolution.ragged = pass.batch.ragged;
    convolution.x = at.xz;
    convolution.x_stride = 2 * d;
    convolution.out = at.x;
    convolution.out_stride = d;
    causal_conv(convolution, pass.batch, stream);
    multiply(m.x_proj, pass.kernels.x_proj, at.x, d, at.low, m.dtype);

    const std::int64_t low = r + 2 * n;
    void *low_dt = at.low, *B = column(at.low, r, m.dtype), *C = column(at.low, r + n, m.dtype);
    std::int64_t dt_stride = low, BC_stride = low;
    if (m.has_inner_norms) {
        const NormParams norms[] = {norm_of(m.dt_norm, t, r, low_dt, low, m.dtype, at.low_dt, m.dtype),
                                    norm_of(m.B_norm, t, n, B, low, m.dtype, at.B, m.dtype),
                                    norm_of(m.C_norm, t, n, C, low, m.dtype, at.C, m.dtype)};
        rms_norms(norms, 3, stream);
        low_dt = at.low_dt;
        B = at.B;
        C = at.C;
        dt_stride = r;
        BC_stride = n;
    }
    multiply(m.dt_proj, pass.kernels.dt_proj, low_dt, dt_stride, at.dt, m.dtype);

    ScanParams scan = m.scan;
    scan.ragged = pass.batch.ragged;
    scan.x = at.x;
    scan.dt = at.dt;
    scan.x_stride = scan.dt_stride = scan.out_stride = d;
    scan.B = B;
    scan.C = C;
    scan.B_stride = scan.C_stride = BC_stride;
    scan.z = column(at.xz, d, m.dtype);
    scan.z_stride = 2 * d;
    scan.out = at.y;
    selective_scan(scan, pass.batch, 0, stream);
    multiply(m.out_proj, pass.kernels.out_proj, at.y, d, pass.left, DType::float32);
}

}  // namespace

std::size_t workspace_bytes(const Mixer& mixer, std::int64_t tokens, const MixerKernels& kernels) {
    return Workspace(mixer, tokens, kernels, nullptr).bytes();
}

void run_mixers(const std::vector<const Mixer*>& mixers, const MixerPass& pass, cudaStream_t stream) {
    MixerPass next = pass;
    for (const Mixer* mixer : mixers) {
        run_mixer(*mixer, next, stream);
        next.delta = pass.left;
    }
}

}  // namespace cuda
}  // namespace apcbatch
