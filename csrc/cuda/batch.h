// Packed batch on the device.
#pragma once

#include "launch.h"

namespace apcbatch {
namespace cuda {

// Packed batch. longer: its sequences of several tokens. single: its sequences of one token.
struct Batch {
    RaggedParams ragged;
    std::int64_t num_tokens, longest;  // longest: tokens of the longest sequence
    Selection longer, single;
};

}  // namespace cuda
}  // namespace apcbatch
