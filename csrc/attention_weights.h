// Online softmax of attention: the rows of a unit, the keys of a page that each row sees, and the conversion
// of scores to weights.
#pragma once

#include "attention.h"
#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

constexpr int kPageVecs = int(kPageTokens) / kLanes;

// Rows of a unit, each a query of one head, and the keys of their sequence.
struct UnitRows {
    int64_t group, count;   // heads that share the kv head; number of rows, queries * group
    int64_t first, length;  // position of the first query; keys that the last query sees
    int64_t stride;         // elements from one key of a page to the next
    const int64_t* pages;

    UnitRows(const AttentionParams& p, const AttentionUnit& unit)
        : group(p.heads / p.kv_heads),
          count((unit.end - unit.begin) * group),
          first(p.context[unit.sequence] + unit.begin),
          length(p.context[unit.sequence] + unit.end),
          stride(p.kv_heads * p.head_dim),
          pages(p.page_table + unit.sequence * p.page_table_stride) {}

    // Returns how many keys of the page that begins at position `key` a row sees.
    int64_t seen(int64_t row, int64_t key) const {
        const int64_t seen = first + row / group + 1 - key;
        return seen < 0 ? 0 : seen < kPageTokens ? seen : kPageTokens;
    }
};

// Adds 16 lanes in a fixed tree.
APC_INLINE float add_lanes(const Vec (&sums)[16 / kLanes]) {
    float lane[16];
    for (int v = 0; v < 16 / kLanes; ++v) sums[v].store(lane + v * kLanes);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
}

APC_INLINE float largest_lane(Vec a) {
    float lane[kLanes];
    a.store(lane);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    }
    return lane[0];
}

// Replaces a row's first `count` scores by exp(score - running maximum), and the others by zero. Returns the
// sum.
APC_INLINE float weigh(float* scores, int64_t count, float* maximum) {
    for (int64_t i = count; i < kPageTokens; ++i) scores[i] = -__builtin_inff();
    Vec best = Vec::broadcast(*maximum);
#pragma GCC unroll 8
    for (int v = 0; v < kPageVecs; ++v) best = max(best, Vec::load(scores + v * kLanes));
    *maximum = largest_lane(best);
    const Vec base = Vec::broadcast(*maximum);
    Vec sums[16 / kLanes];
    for (Vec& sum : sums) sum = Vec::zero();
#pragma GCC unroll 8
    for (int v = 0; v < kPageVecs; ++v) {
        const Vec weight = exp(Vec::load(scores + v * kLanes) - base);
        weight.store(scores + v * kLanes);
        sums[v % (16 / kLanes)] = sums[v % (16 / kLanes)] + weight;
    }
    return add_lanes(sums);
}

}  // namespace
}  // namespace APC_ISA
}  // namespace apcbatch
