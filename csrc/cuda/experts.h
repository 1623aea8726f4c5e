// Experts with few tokens each. Tokens are grouped by expert on the device, without the host, so that a CUDA
// graph can capture the pass. Weights and activations are bfloat16.
#pragma once

#include "launch.h"

namespace apcbatch {
namespace cuda {

constexpr int kMostExperts = 512;

// Pairs grouped by expert. A pair is token * per_token + choice. In memory the pairs follow, tokens *
// per_token integers, by expert and ascending within an expert; a pair's place is its index there.
struct Groups {
    int experts;                   // number of experts with at least one pair
    int expert[kMostExperts];      // these experts, ascending
    int begins[kMostExperts + 1];  // place of each expert's first pair; then the number of pairs
};

// Arguments of the grouping. chosen: (tokens, per_token), experts. present: number of real tokens, which come
// first; null: all.
struct Grouping {
    int tokens, per_token, num_experts;
    const std::int64_t* chosen;
    const std::int64_t* present;
    Groups* groups;
};

void group(const Grouping& params, cudaStream_t stream);

__host__ __device__ inline int* pairs_of(Groups* groups) { return reinterpret_cast<int*>(groups + 1); }
__host__ __device__ inline const int* pairs_of(const Groups* groups) {
    return reinterpret_cast<const int*>(groups + 1);
}

// What an expert's product does with its sums. swiglu: y = silu(gate x) * up x; W has the rows of gate, then
// those of up. relu_square: y = max(x W^T, 0)^2. In both the sums are first rounded to bfloat16. none: y = x
// W^T.
enum class Activation : int { none = 0, swiglu = 1, relu_square = 2 };

// Product of every expert with the rows of its pairs, each element one fixed-order sum (see products.h).
//
// With an activation it reads row pair / per_token of x and writes row place of y, in bfloat16. Without, it
// reads row place of x and writes row pair of y, in float32, and follows a product with an activation of the
// same groups.
struct ExpertProduct {
    const Groups* groups;
    int tokens, per_token;
    int in, out;  // columns of x, a multiple of 16; columns of y
    Activation activation;
    const void* weights;  // (experts) tensor maps of (out or 2 out, in), boxes of kExpertBoxRows rows
    const void* x;        // rows of `in` bfloat16, contiguous, aligned to 16 bytes
    void* y;
};

constexpr int kExpertBoxRows = 32;
void expert_product(const ExpertProduct& params, cudaStream_t stream);

// Sum of experts: y (tokens, columns) = sum of weight * (row * scale) over a token's pairs, experts
// ascending.
struct ExpertSum {
    int tokens, per_token, columns;  // columns: a multiple of 4
    const std::int64_t* chosen;      // (tokens, per_token)
    const std::int64_t* present;     // as in Grouping; rows of padding tokens become zero
    const float *weights, *rows;     // (tokens, per_token), (tokens * per_token, columns)
    const float* scale;              // (columns) or null
    float* y;
};

void expert_sum(const ExpertSum& params, cudaStream_t stream);

// Returns true if the current device supports these kernels.
bool takes_experts();

}  // namespace cuda
}  // namespace apcbatch
