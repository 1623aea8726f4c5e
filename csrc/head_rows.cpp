// Distribute the rows of norm_rope and sigmoid_mul over the threads.
#include "head_rows.h"

#include "share.h"

namespace apcbatch {

void norm_rope(const NormRopeParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(norm_rope_rows);
    share_rows(params.t, params.heads * params.head_dim, num_threads,
               norm_rope_scratch_bytes(params.head_dim, params.pairs),
               [&](int64_t begin, int64_t end, char* scratch) { run(params, begin, end, scratch); });
}

void sigmoid_mul(const SigmoidMulParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(sigmoid_mul_rows);
    share_rows(params.t, params.h, num_threads, 0,
               [&](int64_t begin, int64_t end, char*) { run(params, begin, end); });
}

}  // namespace apcbatch
