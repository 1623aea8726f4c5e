// Split a packed batch into units of work: a run of sequences times a range of channels.
//
// Channels are independent, and `partition` never cuts a sequence. So neither the split nor the number of
// threads changes a bit of any result.
#pragma once

#include <cstdint>
#include <vector>

#include "params.h"

namespace apcbatch {

// Channel ranges begin at multiples of kChannelGrain, a multiple of every instruction set's lanes.
constexpr std::int64_t kChannelGrain = 16;
constexpr std::int64_t kTokenGrain = 16;

// Unit of work. It covers the tokens [token_begin, token_end) of each of its sequences: all tokens, except in
// units of cut_tokens. Its sequences are all of the run, except in a replay, which leaves out the gaps.
struct Unit {
    std::int64_t sequence_begin, sequence_end;
    std::int64_t channel_begin, channels;
    std::int64_t token_begin = 0, token_end = INT64_MAX;
    std::int64_t sequence_step = 1;
};

// Splits the batch so that each (sequence, channel) is in exactly one unit, with at most `widest` channels
// per unit. grain: channel ranges begin at multiples of it; whole cache lines avoid false sharing. `widest`
// is a multiple of grain, which is a multiple of kChannelGrain. The width minimises a cost model with
// overheads per unit, token and sequence.
std::vector<Unit> partition(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t grain,
                            std::int64_t widest, int num_threads);

// Splits the batch by tokens, for an op that needs only a few tokens before each token, such as a
// convolution. So whole rows are read. A unit covers whole sequences, or a part of one that begins at a
// multiple of kTokenGrain.
std::vector<Unit> cut_tokens(const RaggedParams& ragged, std::int64_t d_inner, std::int64_t widest,
                             int num_threads);

}  // namespace apcbatch
