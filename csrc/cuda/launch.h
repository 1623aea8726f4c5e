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

// Packed batch on the device. longest: maximum tokens of a sequence. order: (sequences,) on the device, the
// first num_longer of them those of many tokens. present: number of real tokens, (1,) on the device; those
// after them are padding, whose outputs may be left as they are. Null: all tokens are real.
struct Batch {
    RaggedParams ragged;
    std::int64_t num_tokens, longest;
    const std::int64_t* order;
    std::int64_t num_longer;
    const std::int64_t* present;
};

// Runs the selective scan for the whole batch: sequences of many tokens in tiles, the others by
// selective_scan_short where it can. lanes: 1, 2, 4 or 8, the approximate number of lanes that share a
// channel's states in a tile; 0: chosen by the number of channels. Every choice gives the same bits.
void selective_scan(const ScanParams& params, const Batch& batch, int lanes, cudaStream_t stream);

// Runs the selective scan for all but the longer sequences of a batch, in time proportional to the longest
// one. takes_scan_short: returns true if it supports the sizes.
bool takes_scan_short(const ScanParams& params);
void selective_scan_short(const ScanParams& params, const Batch& batch, cudaStream_t stream);

// Runs the convolution for the whole batch; if it has no longer sequence, by causal_conv_short where it can,
// with the same bits.
void causal_conv(const ConvParams& params, const Batch& batch, cudaStream_t stream);

// Runs the convolution for a batch without longer sequences. takes_conv_short: returns true if it supports
// the sizes and addresses.
bool takes_conv_short(const ConvParams& params);
void causal_conv_short(const ConvParams& params, const Batch& batch, cudaStream_t stream);

// Throws unless a call of the CUDA runtime succeeded. purpose: the call's purpose, for the message.
void check(cudaError_t error, const char* purpose);

// Returns an attribute of the current device.
int attribute_of_device(cudaDeviceAttr which);

// Throws unless the last launch succeeded. kernel: its name, for the message.
void check_launch(const char* kernel);

}  // namespace cuda
}  // namespace apcbatch
