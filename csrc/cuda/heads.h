// Entry points of the CUDA kernels over heads: recurrences with matrix states, their gated norm, and the rows
// around gated attention. They take the CPU's structs, with device addresses, and a stream. They return
// without waiting for the device, and throw std::runtime_error if a launch fails.
#pragma once

#include "../head_rows.h"
#include "../head_scan.h"
#include "../rowwise.h"
#include "launch.h"

namespace apcbatch {
namespace cuda {

constexpr std::int64_t kMostKeyDim = 256;  // columns of a key, or d_state
constexpr std::int64_t kMostRotaryPairs = 128;

// Runs a recurrence for the whole batch. own: 1, 2 or 4 columns of the state for each thread, or the nearest
// number with a kernel; 0: chosen by the number of columns. Every choice gives the same bits. memory:
// head_scan_bytes(params, tokens of the batch) bytes.
void head_scan(const HeadScanParams& params, const Batch& batch, int own, void* memory, cudaStream_t stream);
std::int64_t head_scan_bytes(const HeadScanParams& params, std::int64_t num_tokens);

// head_scan for a batch of single tokens, with the same bits, at the rate of memory. takes_head_step: returns
// true if it supports the sizes and addresses on the current device.
bool takes_head_step(const HeadScanParams& params);
void head_step(const HeadScanParams& params, const Batch& batch, cudaStream_t stream);

void gated_norm(const GatedNormParams& params, cudaStream_t stream);
void norm_rope(const NormRopeParams& params, cudaStream_t stream);
void sigmoid_mul(const SigmoidMulParams& params, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
