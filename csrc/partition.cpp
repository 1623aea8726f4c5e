#include "partition.h"

#include <algorithm>

namespace apcbatch {
namespace {

constexpr std::int64_t kUnitsPerThread = 2;
// Overheads of the cost model, in (token, channel) updates: a unit costs kUnitTokens more tokens, each token
// kTokenChannels more channels, and each sequence, whose state is fetched, kSequenceChannels. kUneven: delay
// of the slowest thread, in units.
constexpr double kUnitTokens = 1.0, kTokenChannels = 4.0, kSequenceChannels = 64.0;
constexpr double kUneven = 0.25;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Splits the sequences into about `wanted` runs of nearly equal token count. Returns the end of each run.
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

// Estimates the time of all units if each has `width` channels.
double cost_of(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t width, int num_threads) {
    const std::int64_t b = ragged.num_sequences, ranges = ceil_div(d_inner, width);
    const std::int64_t runs = std::min(b, ceil_div(kUnitsPerThread * num_threads, ranges));
    const double rounds = double(ceil_div(ranges * runs, num_threads)) + kUneven;
    const double sequences = double(b) / double(runs), tokens = double(ragged.cu_seqlens[b]) / double(runs);
    return rounds *
           ((tokens + kUnitTokens) * double(width) + tokens * kTokenChannels + sequences * kSequenceChannels);
}

// Chooses the number of channels of a unit: the maximum for one thread, else the one of least cost among 1,
// 2, 3, 4, 6, 8, 12, ... grains.
std::int64_t width_of(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t grain,
                      std::int64_t widest, int num_threads) {
    std::int64_t best = std::min(widest, ceil_div(d_inner, grain) * grain);
    if (num_threads == 1) return best;
    double least = cost_of(ragged, d_inner, best, num_threads);
    const auto compare = [&](std::int64_t width) {
        const double cost = cost_of(ragged, d_inner, width, num_threads);
        if (cost >= least) return;
        best = width;
        least = cost;
    };
    const std::int64_t end = best;
    for (std::int64_t width = grain; width < end; width *= 2) {
        compare(width);
        if (width > grain && width / 2 * 3 < end) compare(width / 2 * 3);
    }
    return best;
}

}  // namespace

std::vector<Unit> partition(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t grain,
                            std::int64_t widest, int num_threads) {
    std::vector<Unit> units;
    if (ragged.num_sequences == 0) return units;
    const std::int64_t wanted = num_threads > 1 ? kUnitsPerThread * num_threads : 1;
    const std::int64_t width = width_of(ragged, d_inner, grain, widest, num_threads);
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

std::vector<Unit> cut_tokens(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t widest,
                             int num_threads) {
    const std::int64_t b = ragged.num_sequences, wanted = kUnitsPerThread * num_threads;
    const std::int64_t tokens = ceil_div(ceil_div(ragged.cu_seqlens[b], wanted), kTokenGrain) * kTokenGrain;
    std::vector<Unit> units;
    const auto add = [&](Unit unit) {
        for (unit.channel_begin = 0; unit.channel_begin < d_inner; unit.channel_begin += widest) {
            unit.channels = std::min(widest, d_inner - unit.channel_begin);
            units.push_back(unit);
        }
    };
    for (std::int64_t s = 0, end; s < b; s = end) {
        for (end = s + 1; end < b && ragged.cu_seqlens[end + 1] - ragged.cu_seqlens[s] <= tokens;) ++end;
        const std::int64_t length = ragged.cu_seqlens[s + 1] - ragged.cu_seqlens[s];
        if (end > s + 1 || length <= tokens) {
            add({s, end, 0, 0});
        } else {
            for (std::int64_t t = 0; t < length; t += tokens) add({s, end, 0, 0, t, t + tokens});
        }
    }
    return units;
}

}  // namespace apcbatch
