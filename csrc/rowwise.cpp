// Distribute the rows of the row-wise ops over the threads.
#include "rowwise.h"

#include "share.h"

namespace apcbatch {

void rms_norm(const NormParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(rms_norm_rows);
    share_rows(params.t, params.h, num_threads, 0,
               [&](int64_t begin, int64_t end, char*) { run(params, begin, end); });
}

void gated_norm(const GatedNormParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(gated_norm_rows);
    share_rows(params.t, params.heads * params.d, num_threads, 0,
               [&](int64_t begin, int64_t end, char*) { run(params, begin, end); });
}

void silu_mul(const SiluMulParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(silu_mul_rows);
    share_rows(params.t, params.f, num_threads, 0,
               [&](int64_t begin, int64_t end, char*) { run(params, begin, end); });
}

void relu_square(const ReluSquareParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(relu_square_rows);
    share_rows(params.t, params.f, num_threads, 0,
               [&](int64_t begin, int64_t end, char*) { run(params, begin, end); });
}

void softmax_topk(const TopkParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(softmax_topk_rows);
    share_rows(params.t, params.n, num_threads, topk_scratch_bytes(params.n),
               [&](int64_t begin, int64_t end, char* scratch) { run(params, begin, end, scratch); });
}

void sigmoid_topk(const TopkParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(sigmoid_topk_rows);
    share_rows(params.t, params.n, num_threads, 3 * topk_scratch_bytes(params.n),
               [&](int64_t begin, int64_t end, char* scratch) { run(params, begin, end, scratch); });
}

void logprob(const LogprobParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(logprob_rows);
    share_rows(params.t, params.n, num_threads, 0,
               [&](int64_t begin, int64_t end, char*) { run(params, begin, end); });
}

}  // namespace apcbatch
