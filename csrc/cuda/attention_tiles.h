// Attention on tensor cores, for bfloat16; head_dim is a multiple of 16, at most 256.
#pragma once

#include "rows.h"

namespace apcbatch {
namespace cuda {

// Returns true if attention_tiles supports these dtypes and sizes on the current device. The result is the
// same for all calls of one model.
bool takes_tiles(const PagedAttention& params);

// Computes paged_attention, except that with `parts` the splits of single tokens are not joined yet.
void attention_tiles(const PagedAttention& params, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
