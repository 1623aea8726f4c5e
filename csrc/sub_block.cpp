#include "sub_block.h"

#include <cstring>

#include "parts.h"
#include "rowwise.h"
#include "share.h"

namespace apcbatch {

void pre_norm(const PreNorm& norm, const Residual& residual, const Rows& normed, int num_threads) {
    const PartTimer timer(Part::norms);
    NormParams p;
    p.t = normed.t;
    p.h = p.x_stride = p.delta_stride = normed.stride;
    p.x = residual.sum;
    p.delta = residual.has_delta ? residual.delta : nullptr;
    p.weight = norm.weight;
    p.eps = norm.eps;
    p.y = normed.data;
    p.y_dtype = normed.dtype;
    rms_norm(p, num_threads);
}

void keep_rows(const SubBlockInputs& inputs, std::int64_t row_bytes, std::initializer_list<KeptColumns> parts,
               int num_threads) {
    share_rows(inputs.kept.count, row_bytes / 4, num_threads, 0,
               [&](std::int64_t begin, std::int64_t end, char*) {
                   for (std::int64_t i = begin; i < end; ++i) {
                       char* to = inputs.kept_inputs + i * row_bytes;
                       for (const KeptColumns& part : parts) {
                           const std::int64_t bytes = part.columns * bytes_of(part.rows.dtype);
                           const Rows from = columns_from(part.rows, inputs.kept.rows[i] * part.rows.stride);
                           std::memcpy(to, from.data, std::size_t(bytes));
                           to += bytes;
                       }
                   }
               });
}

}  // namespace apcbatch
