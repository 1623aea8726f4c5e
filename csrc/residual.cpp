#include "residual.h"

#include "parts.h"
#include "rowwise.h"

namespace apcbatch {

void pre_norm(const PreNorm& norm, std::int64_t t, std::int64_t h, const Residual& residual, void* normed,
              DType dtype, int num_threads) {
    const PartTimer timer(Part::norms);
    NormParams p;
    p.t = t;
    p.h = h;
    p.x = residual.sum;
    p.x_stride = p.delta_stride = h;
    p.x_dtype = p.delta_dtype = DType::float32;
    p.delta = residual.has_delta ? residual.delta : nullptr;
    p.weight = norm.weight;
    p.eps = norm.eps;
    p.y = normed;
    p.y_dtype = dtype;
    rms_norm(p, num_threads);
}

}  // namespace apcbatch
