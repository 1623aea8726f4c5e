// Entry points of the recurrent kernels: the whole op over threads, and the computation of one unit per
// instruction set.
#pragma once

#include <cstdint>

#include "linear.h"
#include "params.h"
#include "partition.h"

namespace apcbatch {

// Elementwise functions of vmath.h.
enum class Elementwise : int {
    exp = 0,
    exp2 = 1,
    exp2_bounded = 2,
    log1p_unit = 3,
    softplus = 4,
    silu = 5,
    sigmoid = 6
};

void causal_conv(const ConvParams& params, int num_threads);
// Convolves the first columns of the rows `from` into `to`, within a mixer. conv: the arguments that are the
// same in every pass, all but ragged, x and out.
void convolve(ConvParams conv, const RaggedParams& ragged, const Rows& from, const Rows& to, int num_threads);
void selective_scan(const ScanParams& params, int num_threads);
// Runs the scan of every second sequence, from the first, on this thread alone. memory: scan_alone_bytes for
// its sizes, at most `tokens` a sequence.
void selective_scan_alone(const ScanParams& params, char* memory);
std::int64_t scan_alone_bytes(std::int64_t d_inner, std::int64_t d_state, std::int64_t tokens);
// Shifts `count` raw inputs, row_bytes apart, into the convolution's state in a slot.
void shift_in(const ConvParams& conv, std::int64_t slot, const char* rows, std::int64_t row_bytes,
              std::int64_t count);
void elementwise(Elementwise function, const float* from, float* to, std::int64_t count);

// Maximum tokens and channels of a tile of the scan. The tile's rows stay in the L2 cache, those of one
// vector of channels in the L1 cache.
constexpr std::int64_t kTileTokens = 64;
constexpr std::int64_t kTileChannels = 64;

#define APC_DECLARE(argument, name, ...)                                                  \
    namespace name {                                                                      \
    void causal_conv_unit(const ConvParams& params, const Unit& unit, float* scratch);    \
    void selective_scan_unit(const ScanParams& params, const Unit& unit, float* scratch); \
    void elementwise(Elementwise function, const float* from, float* to, std::int64_t n); \
    }
APC_ISAS(APC_DECLARE, )
#undef APC_DECLARE

}  // namespace apcbatch
