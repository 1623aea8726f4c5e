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

void route(const RoutingParams& params, int num_threads) {
    const bool is_softmax = params.bias == nullptr;
    const auto run = is_softmax ? APC_FOR_ISA(softmax_topk_rows) : APC_FOR_ISA(sigmoid_topk_rows);
    share_rows(params.t, params.n, num_threads, (is_softmax ? 1 : 3) * topk_scratch_bytes(params.n),
               [&](int64_t begin, int64_t end, char* scratch) { run(params, begin, end, scratch); });
    const int64_t k = params.k;
    for (float* row = params.weights; row < params.weights + params.t * k; row += k) {
        float sum = 0.0f;
        for (int64_t j = 0; j < k; ++j) sum += row[j];
        for (int64_t j = 0; j < k; ++j) {
            if (params.is_normalised) row[j] /= sum + params.eps;
            row[j] *= params.scale;
        }
    }
}

void logprob(const LogprobParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(logprob_rows);
    share_rows(params.t, params.n, num_threads, 0,
               [&](int64_t begin, int64_t end, char*) { run(params, begin, end); });
}

}  // namespace apcbatch
