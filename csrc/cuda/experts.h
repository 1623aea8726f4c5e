// SwiGLU experts for the few tokens of a decode pass: which tokens an expert has is found, and its products
// are made, on the device alone, so that a CUDA graph can hold them. Weights and activations are bfloat16. No
// Python, no torch.
#pragma once

#include "launch.h"

namespace apcbatch {
namespace cuda {

constexpr int kMostExperts = 128;
constexpr int kMostTaken = 512;  // (token, choice) pairs of one pass

// The pairs by their experts. A pair is token * per_token + choice; its place is its position in `pairs`.
struct Groups {
    int experts;                   // that were chosen at all
    int expert[kMostExperts];      // which, ascending
    int begins[kMostExperts + 1];  // the place of each one's first pair; then the number of pairs
    int pairs[kMostTaken];         // each expert's ascending
};

// chosen (tokens, per_token). present: null, or how many tokens, the first ones, are there at all.
struct Grouping {
    int tokens, per_token, num_experts;
    const std::int64_t* chosen;
    const std::int64_t* present;
    Groups* groups;
};

void group(const Grouping& params, cudaStream_t stream);

// One product of every expert with the rows of its pairs, each element one chain (see products.h): y = x W^T,
// or, `gated`, silu(gate x) * up x of both as bfloat16, for W with the gate's rows before the up's. A gated
// product reads the row of a pair's token and writes that of its place, in bfloat16; a plain one reads that
// of its place and writes that of its pair, in float32. A plain one follows a gated one of the same groups.
struct ExpertProduct {
    const Groups* groups;
    int tokens, per_token;
    int in, out;  // in: a multiple of 16; out: columns of y
    bool gated;
    const void* weights;  // maps (experts) of (out or 2 out, in), boxes of kExpertBoxRows: see tensor_map.h
    const void* x;        // rows of `in` bfloat16, contiguous, aligned to 16 bytes
    void* y;
};

constexpr int kExpertBoxRows = 32;
void expert_product(const ExpertProduct& params, cudaStream_t stream);

// y (tokens, columns) = the sum over a token's pairs, in ascending order of expert, of weight * row.
struct ExpertSum {
    int tokens, per_token, columns;  // columns: a multiple of 4
    const std::int64_t* chosen;      // (tokens, per_token)
    const std::int64_t* present;     // as in Grouping: rows of others become zero
    const float *weights, *rows;     // (tokens, per_token), (tokens * per_token, columns)
    float* y;
};

void expert_sum(const ExpertSum& params, cudaStream_t stream);

// Whether the current device has what these kernels need.
bool takes_experts();

}  // namespace cuda
}  // namespace apcbatch
