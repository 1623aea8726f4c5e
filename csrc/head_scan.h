// Recurrences over ragged sequences with a matrix (K, V) as the state of each value head: arguments, entry
// points, and the computation per instruction set.
//
// For each value head h, with key head h / (value_heads / key_heads), and each token, in float32:
//   decay = exp(A dt);  S_i = fma(k_i, u, decay S_i);  o = sum_i q_i S_i
// S_i is row i of the state. Sums are chains of fma from 0, i ascending. o uses the new S_i. The rules:
//
// delta, the gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464,
// equation 10):
//   q = q / sqrt(sum q^2 + 1e-6) / sqrt(K);  k = k / sqrt(sum k^2 + 1e-6)
//   dt = softplus(a + dt_bias);  m = sum_i (decay k_i) S_i;  u = sigmoid(b) (v - m)
// ssd, the scan of Mamba-2 (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, equation 1), where q is C,
// k is B and v is x, with K = d_state and V = head_dim:
//   dt = min(max(softplus(a + dt_bias), dt_min), dt_max);  u = dt v;  then o = fma(D, v, o)
#pragma once

#include "instruction_sets.h"
#include "params.h"

namespace apcbatch {

enum class HeadRule { delta, ssd };

struct HeadScanParams {
    RaggedParams ragged;
    HeadRule rule = HeadRule::delta;
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
    const void* b = nullptr;  // (t, value_heads), before the sigmoid; delta only
    std::int64_t b_stride = 0;
    const void* a = nullptr;  // (t, value_heads), before the bias and softplus
    std::int64_t a_stride = 0;
    const float* A = nullptr;            // (value_heads), -exp(A_log)
    const float* dt_bias = nullptr;      // (value_heads)
    const float* D = nullptr;            // (value_heads); ssd only
    float dt_min = 0.0f, dt_max = 0.0f;  // ssd only
    float* state = nullptr;  // (num_slots, value_heads, V / lanes, K, lanes), slot stride state_stride
    std::int64_t state_stride = 0;
    float* out = nullptr;  // (t, value_heads, V), with a stride for tokens and one for heads
    std::int64_t out_stride = 0, out_head_stride = 0;
};

// Returns the arguments of a recurrence over a batch. x: (t, 2 key_heads K + value_heads V), columns of q, k
// and v. gates: columns of b and a, of ssd of a alone, (t, value_heads) each. out: (t, value_heads V)
// contiguous.
inline HeadScanParams head_scan_over(HeadScanParams p, const RaggedParams& ragged, const void* x,
                                     std::int64_t x_stride, const void* gates, std::int64_t gates_stride,
                                     float* out) {
    const std::int64_t size = bytes_of(p.dtype), keys = p.key_heads * p.key_dim;
    const char *columns = static_cast<const char*>(x), *gate = static_cast<const char*>(gates);
    p.ragged = ragged;
    p.q = columns;
    p.k = columns + keys * size;
    p.v = columns + 2 * keys * size;
    p.q_stride = p.k_stride = p.v_stride = x_stride;
    p.b = gate;
    p.a = p.rule == HeadRule::delta ? gate + p.value_heads * size : gate;
    p.b_stride = p.a_stride = gates_stride;
    p.out = out;
    p.out_stride = p.value_heads * p.value_dim;
    p.out_head_stride = p.value_dim;
    return p;
}

// Blocks [block, block + blocks) of a value head of one sequence.
struct HeadScanUnit {
    std::int64_t sequence, head, block, blocks;
};

// Runs the rule. memory: head_scan_floats(params, tokens of the batch) floats.
void head_scan(const HeadScanParams& params, float* memory, int num_threads);
// Runs the rule on this thread alone, with the same bits. memory: head_scan_alone_floats(params, n) floats, n
// at least the tokens of the batch, aligned to 64 bytes.
void head_scan_alone(const HeadScanParams& params, float* memory);
std::int64_t head_scan_floats(const HeadScanParams& params, std::int64_t tokens);
std::int64_t head_scan_alone_floats(const HeadScanParams& params, std::int64_t tokens);

// Layout of the prepared inputs of a batch, in float32: for each key head a row per token, q then k (normed
// in the delta rule), each padded with zeros to `columns`; then for each value head a row of v per token;
// then for each value head decay and sigmoid(b) or dt per token. So a unit reads them front to back, while in
// the packed batch the rows of one head are pages apart.
struct HeadScanInputs {
    std::int64_t tokens;   // of the batch
    std::int64_t columns;  // K, rounded up to a multiple of 16
    std::int64_t value_dim;
    float *keys, *values, *gates;
    HeadScanInputs(const HeadScanParams& p, float* memory)
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

// Maximum tokens of a tile. Each tile loads every block of the state into the L1 cache and, in the delta
// rule, computes m of its first token by a separate pass over the block, so tiles are long. But the inputs of
// a tile must stay in the L2 cache for the other blocks of the unit.
constexpr std::int64_t kScanTile = 256;
constexpr std::int64_t kRingTokens = 4;  // tokens of the ring of prepared decay k

// Returns the scratch of a unit of `blocks` blocks, in floats.
std::int64_t head_scan_scratch_floats(const HeadScanParams& params, std::int64_t blocks);

#define APC_DECLARE(argument, name, ...)                                                                   \
    namespace name {                                                                                       \
    void head_scan_prepare(const HeadScanParams& params, const HeadScanInputs& inputs, std::int64_t begin, \
                           std::int64_t end);                                                              \
    void head_scan_unit(const HeadScanParams& params, const HeadScanInputs& inputs,                        \
                        const HeadScanUnit& unit, float* scratch);                                         \
    }
APC_ISAS(APC_DECLARE, )
#undef APC_DECLARE

}  // namespace apcbatch
