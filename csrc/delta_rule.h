// Gated delta rule over ragged sequences (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv
// 2412.06464, equation 10): arguments, entry points, and the computation per instruction set.
//
// For each value head h, with key head h / (value_heads / key_heads), and each token, in float32:
//   q = q / sqrt(sum q^2 + 1e-6) / sqrt(K);  k = k / sqrt(sum k^2 + 1e-6)
//   decay = exp(A softplus(a + dt_bias));    beta = sigmoid(b)
//   m = sum_i (decay k_i) S_i;  u = beta (v - m);  S_i = fma(k_i, u, decay S_i);  o = sum_i q_i S_i
// S_i is row i of the state (K, V). Both sums are chains of fma from 0, i ascending. o uses the new S_i.
#pragma once

#include "instruction_sets.h"
#include "params.h"

namespace apcbatch {

struct DeltaParams {
    RaggedParams ragged;
    DType dtype = DType::float32;                 // of q, k, v, b and a
    std::int64_t key_heads = 0, value_heads = 0;  // value_heads: a multiple of key_heads
    std::int64_t key_dim = 0, value_dim = 0;      // columns of a head: K, V
    std::int64_t lanes = 0;                       // columns of v in a block of the state, a divisor of V
    const void* q = nullptr;                      // (t, key_heads, K)
    std::int64_t q_stride = 0;
    const void* k = nullptr;  // (t, key_heads, K)
    std::int64_t k_stride = 0;
    const void* v = nullptr;  // (t, value_heads, V)
    std::int64_t v_stride = 0;
    const void* b = nullptr;  // (t, value_heads), before the sigmoid
    std::int64_t b_stride = 0;
    const void* a = nullptr;  // (t, value_heads), before the bias and softplus
    std::int64_t a_stride = 0;
    const float* A = nullptr;        // (value_heads), -exp(A_log)
    const float* dt_bias = nullptr;  // (value_heads)
    float* state = nullptr;  // (num_slots, value_heads, V / lanes, K, lanes), slot stride state_stride
    std::int64_t state_stride = 0;
    float* out = nullptr;  // (t, value_heads, V), with a stride for tokens and one for heads
    std::int64_t out_stride = 0, out_head_stride = 0;
};

// Blocks [block, block + blocks) of a value head of one sequence.
struct DeltaUnit {
    std::int64_t sequence, head, block, blocks;
};

// Runs the rule. memory: delta_floats(params, tokens of the batch) floats.
void delta_rule(const DeltaParams& params, float* memory, int num_threads);
// Runs the rule on this thread alone, with the same bits. memory: delta_alone_floats(params, n) floats, n
// at least the tokens of the batch, aligned to 64 bytes.
void delta_rule_alone(const DeltaParams& params, float* memory);
std::int64_t delta_floats(const DeltaParams& params, std::int64_t tokens);
std::int64_t delta_alone_floats(const DeltaParams& params, std::int64_t tokens);

// Layout of the prepared inputs of a batch, in float32: for each key head a row per token, the normed q
// then the normed k, each padded with zeros to `columns`; then for each value head a row of v per token;
// then for each value head decay and beta per token. So a unit reads them front to back, while in the
// packed batch the rows of one head are pages apart.
struct DeltaInputs {
    std::int64_t tokens;   // of the batch
    std::int64_t columns;  // K, rounded up to a multiple of 16
    std::int64_t value_dim;
    float *keys, *values, *gates;
    DeltaInputs(const DeltaParams& p, float* memory)
        : tokens(p.ragged.cu_seqlens[p.ragged.num_sequences]),
          columns((p.key_dim + 15) / 16 * 16),
          value_dim(p.value_dim) {
        keys = memory;
        values = keys + p.key_heads * tokens * 2 * columns;
        gates = values + p.value_heads * tokens * value_dim;
    }
    float* q(std::int64_t key_head, std::int64_t token) const {
        return keys + (key_head * tokens + token) * 2 * columns;
    }
    float* v(std::int64_t head, std::int64_t token) const {
        return values + (head * tokens + token) * value_dim;
    }
    float* gates_of(std::int64_t head, std::int64_t token) const {
        return gates + (head * tokens + token) * 2;
    }
};

// Maximum tokens of a tile. Each tile loads every block of the state into the L1 cache and computes m of
// its first token by a separate pass over the block, so tiles are long. But the inputs of a tile must stay
// in the L2 cache for the other blocks of the unit.
constexpr std::int64_t kDeltaTile = 256;
constexpr std::int64_t kDeltaRows = 4;  // tokens of the ring of prepared decay k

// Returns the scratch of a unit of `blocks` blocks, in floats.
std::int64_t delta_scratch_floats(const DeltaParams& params, std::int64_t blocks);

#define APC_DECLARE(argument, name, ...)                                                              \
    namespace name {                                                                                  \
    void delta_prepare(const DeltaParams& params, const DeltaInputs& inputs, std::int64_t begin,      \
                       std::int64_t end);                                                             \
    void delta_rule_unit(const DeltaParams& params, const DeltaInputs& inputs, const DeltaUnit& unit, \
                         float* scratch);                                                             \
    }
APC_ISAS(APC_DECLARE, )
#undef APC_DECLARE

}  // namespace apcbatch
