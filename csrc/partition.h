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
constexpr std::int64_t kTokenGrain = 16;

// Of each of its sequences the tokens [token_begin, token_end): all of them but where cut_tokens says.
struct Unit {
    std::int64_t sequence_begin, sequence_end;
    std::int64_t channel_begin, channels;
    std::int64_t token_begin = 0, token_end = INT64_MAX;
};

// Every (sequence, channel) in exactly one unit, no unit with more than `widest` channels (a multiple of the
// grain, which is one of kChannelGrain). A grain of whole cache lines keeps threads from writing to one line.
// The width is the one of the least cost: a unit, a token and a sequence each cost something beside its
// channels.
std::vector<Unit> partition(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t grain,
                            std::int64_t widest, int num_threads);

// The same for an op that needs a few tokens before each of its own and no more: runs of tokens, the rows of
// which are read from end to end. A run is some whole sequences or, from a multiple of kTokenGrain on, a part
// of one.
std::vector<Unit> cut_tokens(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t widest,
                             int num_threads);

// Tokens of the longest sequence.
std::int64_t longest_sequence(const RaggedParams& ragged);

}  // namespace apcbatch
