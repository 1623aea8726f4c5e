// A packed batch on the device. No Python, no torch.
#pragma once

#include "launch.h"

namespace apcbatch {
namespace cuda {

// Its sequences are ordered: the longer ones first, then those of one token.
struct Batch {
    RaggedParams ragged;
    std::int64_t num_tokens, longest;  // longest: the tokens of its longest sequence
    Selection longer, single;
};

}  // namespace cuda
}  // namespace apcbatch
