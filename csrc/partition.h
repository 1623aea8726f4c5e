// How a packed batch over channels is cut into units of work: a run of sequences times a range of channels.
// Channels are independent and a sequence is never cut, so the cut, like the number of threads, changes no
// bit of any result.
#pragma once

#include <cstdint>
#include <vector>

#include "params.h"

namespace apcbatch {

// Ranges of channels begin at multiples of it; itself a multiple of every instruction set's lanes.
constexpr std::int64_t kChannelGrain = 16;

struct Unit {
    std::int64_t sequence_begin, sequence_end;
    std::int64_t channel_begin, channels;
};

// Every (sequence, channel) in exactly one unit, no unit with more than `widest` channels (a multiple of the
// grain). Ranges are as wide as the threads allow: rows of tokens lie pages apart, and a wide range visits
// each page once. Units of all sequences cost the same each; sequences are split only where ranges would
// become narrow.
std::vector<Unit> partition(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t widest,
                            int num_threads);

// Tokens of the longest sequence.
std::int64_t longest_sequence(const RaggedParams& ragged);

}  // namespace apcbatch
