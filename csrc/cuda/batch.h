// Packed batch on the device.
#pragma once

#include "launch.h"

namespace apcbatch {
namespace cuda {

// order: (sequences,) on the device; the first num_longer are those of many tokens.
struct Batch {
    RaggedParams ragged;
    std::int64_t num_tokens;
    const std::int64_t* order;
    std::int64_t num_longer;
};

}  // namespace cuda
}  // namespace apcbatch
