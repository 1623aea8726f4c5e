#include "partition.h"

#include <algorithm>

namespace apcbatch {
namespace {

constexpr std::int64_t kUnitsPerThread = 2;
constexpr std::int64_t kNarrow = 64;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Ends of about `wanted` runs of sequences with equal numbers of tokens.
std::vector<std::int64_t> cut_sequences(const RaggedParams& ragged, std::int64_t wanted) {
    const std::int64_t b = ragged.num_sequences, tokens = ragged.cu_seqlens[b];
    std::vector<std::int64_t> ends;
    std::int64_t run = 0;
    for (std::int64_t s = 0; s < b; ++s) {
        if (s + 1 == b || ragged.cu_seqlens[s + 1] * wanted >= tokens * (run + 1)) {
            ends.push_back(s + 1);
            run = tokens == 0 ? run + 1 : ragged.cu_seqlens[s + 1] * wanted / tokens;
        }
    }
    return ends;
}

}  // namespace

std::vector<Unit> partition(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t widest,
                            int num_threads) {
    std::vector<Unit> units;
    if (ragged.num_sequences == 0) return units;
    const std::int64_t wanted = num_threads > 1 ? kUnitsPerThread * num_threads : 1;
    const std::int64_t narrowest = ragged.num_sequences > 1 ? kNarrow : kChannelGrain;
    std::int64_t width = ceil_div(ceil_div(d_inner, wanted), kChannelGrain) * kChannelGrain;
    width = std::min(std::max(width, narrowest), widest);
    const std::int64_t ranges = ceil_div(d_inner, width);
    const std::vector<std::int64_t> ends =
        cut_sequences(ragged, std::min(ragged.num_sequences, ceil_div(wanted, ranges)));
    units.reserve(ends.size() * static_cast<std::size_t>(ranges));
    std::int64_t begin = 0;
    for (const std::int64_t end : ends) {
        for (std::int64_t c = 0; c < d_inner; c += width) {
            units.push_back({begin, end, c, std::min(width, d_inner - c)});
        }
        begin = end;
    }
    return units;
}

std::int64_t longest_sequence(const RaggedParams& ragged) {
    std::int64_t longest = 0;
    for (std::int64_t s = 0; s < ragged.num_sequences; ++s) {
        longest = std::max(longest, ragged.cu_seqlens[s + 1] - ragged.cu_seqlens[s]);
    }
    return longest;
}

}  // namespace apcbatch
