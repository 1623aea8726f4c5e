// What the CUDA kernels are called with: csrc/params.h's structs, every address on the device, and a stream.
// No Python, no torch. The functions return at once and throw std::runtime_error if a launch was refused.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "../params.h"

namespace apcbatch {
namespace cuda {

constexpr std::int64_t kMostStates = 128, kMostTaps = 8;

// `count` of the batch's sequences, by index, on the device.
struct Selection {
    const std::int64_t* sequences;
    std::int64_t count;
};

// For any sequences. `lanes` (1, 2, 4 or 8): about how many share a channel's states, so how far the work is
// spread; 0 lets the launch choose, by how many channels there are. Every choice gives the same bits.
void selective_scan(const ScanParams& params, const Selection& selection, int lanes, cudaStream_t stream);

// For sequences of one token: the same bits as selective_scan, a thread a channel.
void selective_step(const ScanParams& params, const Selection& selection, cudaStream_t stream);

// For the whole batch of `num_tokens` tokens; `longest` is the tokens of its longest sequence.
void causal_conv(const ConvParams& params, std::int64_t num_tokens, std::int64_t longest,
                 cudaStream_t stream);

// For a batch of sequences of one token each, where it takes the sizes and the addresses: the same bits as
// causal_conv, which calls it.
bool takes_conv_step(const ConvParams& params);
void causal_conv_step(const ConvParams& params, cudaStream_t stream);

// Throws unless a call of CUDA's runtime, made for this, succeeded.
void check(cudaError_t error, const char* purpose);

// Of the current device.
int attribute_of_device(cudaDeviceAttr which);

// Throws unless the last launch, of this kernel, was accepted.
void check_launch(const char* kernel);

}  // namespace cuda
}  // namespace apcbatch
