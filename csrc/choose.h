// Softmax or sigmoids with top-k of experts, argmax and log-probabilities of a row of logits.
//
// Invariant: exponentials are float32 (vmath.h) of logit - max. Those of a vocabulary are summed in float64:
// element i is added to lane i mod 32, then the lanes are added in a fixed tree. Those of experts are summed
// in float32, ascending.
#pragma once

#include <math.h>

#include "rowwise.h"
#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

constexpr int64_t kExpLanes = 32;

// Loads `count` logits, with minus infinity in the other lanes.
APC_INLINE Vec load_logits(const float* p, int64_t count) {
    if (count >= kLanes) return Vec::load(p);
    float padded[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) padded[i] = i < count ? p[i] : -__builtin_inff();
    return Vec::load(padded);
}

// Maximum of a row, and whether all its elements are finite: x - x is 0 for a finite x and NaN otherwise.
struct Top {
    float value;
    bool finite;
};

APC_INLINE Top row_top(const float* logits, int64_t n) {
    constexpr int kWays = 4;  // independent maxima, to hide the latency of one
    Vec best[kWays], nothing[kWays];
    for (int way = 0; way < kWays; ++way) {
        best[way] = Vec::broadcast(-__builtin_inff());
        nothing[way] = Vec::zero();
    }
    int64_t at = 0;
    for (; at + kWays * kLanes <= n; at += kWays * kLanes) {
#pragma GCC unroll 4
        for (int way = 0; way < kWays; ++way) {
            const Vec x = Vec::load(logits + at + way * kLanes);
            best[way] = max(best[way], x);
            nothing[way] = nothing[way] + (x - x);
        }
    }
    for (int way = 1; way < kWays; ++way) {
        best[0] = max(best[0], best[way]);
        nothing[0] = nothing[0] + nothing[way];
    }
    float lane[kLanes];
    best[0].store(lane);
    Top top = {lane[0], (nothing[0] <= Vec::zero()).all()};
    for (int i = 1; i < kLanes; ++i) top.value = lane[i] > top.value ? lane[i] : top.value;
    for (; at < n; ++at) {
        top.value = logits[at] > top.value ? logits[at] : top.value;
        top.finite = top.finite && logits[at] - logits[at] == 0.0f;
    }
    return top;
}

// Returns the sum of exp(logit - highest), in float64.
APC_INLINE double exp_sum(const float* logits, int64_t n, float highest) {
    const Vec base = Vec::broadcast(highest);
    double sum[kExpLanes] = {};
    for (int64_t block = 0; block < n; block += kExpLanes) {
        float part[kExpLanes] = {};
        for (int64_t at = 0; at < kExpLanes && block + at < n; at += kLanes) {
            exp(load_logits(logits + block + at, n - block - at) - base).store(part + at);
        }
        for (int64_t i = 0; i < kExpLanes; ++i) sum[i] += double(part[i]);
    }
    for (int64_t half = kExpLanes / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) sum[i] += sum[i + half];
    }
    return sum[0];
}

// Returns the first index of a row's largest value.
APC_INLINE int64_t first_of(const float* logits, int64_t n, float largest) {
    const Vec value = Vec::broadcast(largest);
    int64_t i = 0;
    while (i + kLanes <= n && (Vec::load(logits + i) < value).all()) i += kLanes;
    while (i < n - 1 && logits[i] != largest) ++i;
    return i;
}

// Selects the indices of the k largest logits of a row, one by one, as k is small.
APC_INLINE void select_largest(const float* logits, int64_t n, int64_t k, int64_t* indices) {
    for (int64_t j = 0; j < k; ++j) {
        int64_t best = -1;
        for (int64_t i = 0; i < n; ++i) {
            bool taken = false;
            for (int64_t q = 0; q < j; ++q) taken = taken || indices[q] == i;
            if (!taken && (best < 0 || logits[i] > logits[best])) best = i;
        }
        indices[j] = best;
    }
}

// Returns the sum of the two largest values.
APC_INLINE float top_two_sum(const float* values, int64_t n) {
    int64_t largest[2];
    select_largest(values, n, 2, largest);
    return values[largest[0]] + values[largest[1]];
}

// Replaces the scores of all groups but the top_groups by minus infinity. The lower group comes first on
// ties.
APC_INLINE void keep_top_groups(const RoutingParams& p, float* scores, float* sums) {
    const int64_t columns = p.n / p.groups;
    for (int64_t g = 0; g < p.groups; ++g) sums[g] = top_two_sum(scores + g * columns, columns);
    for (int64_t g = 0; g < p.groups; ++g) {
        int64_t before = 0;
        for (int64_t i = 0; i < p.groups; ++i) before += sums[i] > sums[g] || (sums[i] == sums[g] && i < g);
        if (before < p.top_groups) continue;
        for (int64_t i = g * columns; i < (g + 1) * columns; ++i) scores[i] = -__builtin_inff();
    }
}

}  // namespace

void sigmoid_topk_rows(const RoutingParams& p, int64_t begin, int64_t end, char* scratch) {
    float *sigmoids = reinterpret_cast<float*>(scratch), *scores = sigmoids + p.n + 16;
    for (int64_t r = begin; r < end; ++r) {
        const float* logits = p.logits + r * p.stride;
        for (int64_t at = 0; at < p.n; at += kLanes) {
            sigmoid(load_first(logits + at, p.n - at)).store(sigmoids + at);
        }
        for (int64_t i = 0; i < p.n; ++i) scores[i] = sigmoids[i] + p.bias[i];
        const bool finite = row_top(logits, p.n).finite && row_top(scores, p.n).finite;
        if (p.top_groups < p.groups) keep_top_groups(p, scores, scores + p.n + 16);
        int64_t* indices = p.indices + r * p.k;
        select_largest(scores, p.n, p.k, indices);
        for (int64_t j = 0; j < p.k; ++j)
            p.weights[r * p.k + j] = finite ? sigmoids[indices[j]] : __builtin_nanf("");
    }
}

void softmax_topk_rows(const RoutingParams& p, int64_t begin, int64_t end, char* scratch) {
    float* exponentials = reinterpret_cast<float*>(scratch);
    for (int64_t r = begin; r < end; ++r) {
        const float* logits = p.logits + r * p.stride;
        const Vec base = Vec::broadcast(row_top(logits, p.n).value);
        for (int64_t at = 0; at < p.n; at += kLanes) {
            exp(load_logits(logits + at, p.n - at) - base).store(exponentials + at);
        }
        float sum = 0.0f;
        for (int64_t i = 0; i < p.n; ++i) sum += exponentials[i];
        int64_t* indices = p.indices + r * p.k;
        select_largest(logits, p.n, p.k, indices);
        for (int64_t j = 0; j < p.k; ++j) p.weights[r * p.k + j] = exponentials[indices[j]] / sum;
    }
}

void logprob_rows(const LogprobParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        const float* logits = p.logits + r * p.stride;
        const Top top = row_top(logits, p.n);
        if (p.choose) p.tokens[r] = top.finite ? first_of(logits, p.n, top.value) : -1;
        if (!p.logprobs) continue;
        if (p.tokens[r] < 0) {
            p.logprobs[r] = __builtin_nanf("");
            continue;
        }
        const double gap = double(logits[p.tokens[r]]) - double(top.value);
        p.logprobs[r] = float(gap - ::log(exp_sum(logits, p.n, top.value)));
    }
}

}  // namespace APC_ISA
}  // namespace apcbatch
