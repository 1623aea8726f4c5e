// Attention in the matrix units: bfloat16 and float16, heads of up to 128 in multiples of 16.
#pragma once

#include "rows.h"

namespace apcbatch {
namespace cuda {

// Whether attention_tiles takes these dtypes and sizes on the current device. It depends on nothing that
// changes from call to call of one model.
bool takes_tiles(const PagedAttention& params);

// As paged_attention, but the parts of single tokens, where there are any, are not joined yet.
void attention_tiles(const PagedAttention& params, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
