// Entry points of the recurrent CUDA kernels. They take the structs of csrc/params.h, with device addresses,
// and a stream. They return without waiting for the device, and throw std::runtime_error if a launch fails.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "../params.h"

namespace apcbatch {
namespace cuda {

constexpr std::int64_t kMostStates = 128, kMostTaps = 8;

// Indices of `count` sequences of the batch, on the device.
struct Selection {
    const std::int64_t* sequences;
    std::int64_t count;
};

// Runs the selective scan for any sequences. lanes: 1, 2, 4 or 8, the approximate number of lanes that share
// a channel's states; 0: chosen by the number of channels. Every choice gives the same bits.
void selective_scan(const ScanParams& params, const Selection& selection, int lanes, cudaStream_t stream);

// Runs the selective scan for sequences of one token, one thread per channel, with the same bits as
// selective_scan.
void selective_step(const ScanParams& params, const Selection& selection, cudaStream_t stream);

// Runs the convolution for the whole batch. num_tokens: tokens of the batch. longest: tokens of its longest
// sequence.
void causal_conv(const ConvParams& params, std::int64_t num_tokens, std::int64_t longest,
                 cudaStream_t stream);

// Runs the convolution for a batch of sequences of one token each, with the same bits as causal_conv, which
// calls it. takes_conv_step: returns true if it supports the sizes and addresses.
bool takes_conv_step(const ConvParams& params);
void causal_conv_step(const ConvParams& params, cudaStream_t stream);

// Throws unless a call of the CUDA runtime succeeded. purpose: the call's purpose, for the message.
void check(cudaError_t error, const char* purpose);

// Returns an attribute of the current device.
int attribute_of_device(cudaDeviceAttr which);

// Throws unless the last launch succeeded. kernel: its name, for the message.
void check_launch(const char* kernel);

}  // namespace cuda
}  // namespace apcbatch
