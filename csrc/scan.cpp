#include "scan.h"

#include <algorithm>
#include <cstring>

#include "parts.h"
#include "share.h"

namespace apcbatch {
namespace {

// Returns the maximum channels of a unit. With 16 states, h and A of a unit stay in the L2 cache; with more
// states, nearly all of them do.
std::int64_t widest_scan_range(std::int64_t d_state) {
    const std::int64_t channels = 32768 / d_state / kTileChannels * kTileChannels;
    return std::max(channels, kTileChannels);
}

constexpr std::int64_t kWidestConvRange = 4096;

// Returns the number of channels that fill a cache line.
std::int64_t line_of(DType dtype) { return 64 / bytes_of(dtype); }

// Updates, of a state or of a convolution's sum, below which one thread is faster than waking the thread
// pool.
constexpr double kSerialWork = 1 << 18;
constexpr std::int64_t kConvSetUp = 4;  // cost of widening and transposing the weights, in tokens
constexpr std::int64_t kManyTokens = 8 * kConvSetUp;  // tokens per thread from which splitting by tokens pays

// Returns the number of threads to use. set_up: cost of a unit before its first token, in tokens.
int threads_for(const RaggedParams& ragged, std::int64_t set_up, std::int64_t updates_per_token,
                int num_threads) {
    const std::int64_t tokens = set_up + ragged.cu_seqlens[ragged.num_sequences];
    return useful_threads(double(tokens) * double(updates_per_token), kSerialWork, num_threads);
}

// Runs `unit_function` on every unit. Each thread has scratch for the widest unit.
template <class Params, class UnitFunction>
void run_units(const Params& params, const std::vector<Unit>& units, UnitFunction unit_function,
               std::int64_t scratch_floats, int num_threads) {
    share_pieces(std::int64_t(units.size()), num_threads, scratch_floats * std::int64_t(sizeof(float)),
                 [&](std::int64_t i, char* scratch) {
                     unit_function(params, units[std::size_t(i)], reinterpret_cast<float*>(scratch));
                 });
}

std::int64_t longest_sequence(const RaggedParams& ragged) {
    std::int64_t longest = 0;
    for (std::int64_t s = 0; s < ragged.num_sequences; ++s) {
        longest = std::max(longest, ragged.cu_seqlens[s + 1] - ragged.cu_seqlens[s]);
    }
    return longest;
}

std::int64_t padded(std::int64_t channels) {
    return (channels + kChannelGrain - 1) / kChannelGrain * kChannelGrain;
}

// Returns the floats of selective_scan_unit's scratch: A, h, dt_bias, D and the largest A of every channel;
// the rows of a tile, with one cache line of padding per vector; B and C.
std::int64_t scan_scratch_floats(std::int64_t longest, std::int64_t d_state, std::int64_t channels) {
    const std::int64_t tokens = std::min(longest, kTileTokens), all = padded(channels);
    return 2 * d_state * (all + tokens) + (3 * tokens + 2) * kTileChannels + 3 * all;
}

}  // namespace

void causal_conv(const ConvParams& params, int num_threads) {
    num_threads = threads_for(params.ragged, kConvSetUp, params.d_inner * params.width, num_threads);
    const std::int64_t tokens = params.ragged.cu_seqlens[params.ragged.num_sequences];
    const bool many = num_threads > 1 && tokens >= kManyTokens * num_threads;
    const auto units =
        many ? cut_tokens(params.ragged, params.d_inner, kWidestConvRange, num_threads)
             : partition(params.ragged, params.d_inner, line_of(params.dtype), kWidestConvRange, num_threads);
    if (units.empty()) return;
    // The weights and bias of every channel, and the inputs before the first token.
    run_units(params, units, APC_FOR_ISA(causal_conv_unit), 2 * params.width * padded(units[0].channels),
              num_threads);
}

void selective_scan(const ScanParams& params, int num_threads) {
    num_threads = threads_for(params.ragged, 0, params.d_inner * params.d_state, num_threads);
    const auto units = partition(params.ragged, params.d_inner, line_of(params.dtype),
                                 widest_scan_range(params.d_state), num_threads);
    if (units.empty()) return;
    run_units(params, units, APC_FOR_ISA(selective_scan_unit),
              scan_scratch_floats(longest_sequence(params.ragged), params.d_state, units[0].channels),
              num_threads);
}

void selective_scan_alone(const ScanParams& params, char* memory) {
    const std::int64_t widest = widest_scan_range(params.d_state);
    for (std::int64_t c = 0; c < params.d_inner; c += widest) {
        Unit unit{0, params.ragged.num_sequences, c, std::min(widest, params.d_inner - c)};
        unit.sequence_step = 2;
        APC_FOR_ISA(selective_scan_unit)(params, unit, reinterpret_cast<float*>(memory));
    }
}

std::int64_t scan_alone_bytes(std::int64_t d_inner, std::int64_t d_state, std::int64_t tokens) {
    const std::int64_t widest = std::min(d_inner, widest_scan_range(d_state));
    return std::int64_t(sizeof(float)) * scan_scratch_floats(tokens, d_state, widest);
}

void convolve(ConvParams conv, const RaggedParams& ragged, const Rows& from, const Rows& to,
              int num_threads) {
    const PartTimer timer(Part::convolution);
    conv.ragged = ragged;
    conv.x = from.data;
    conv.x_stride = from.stride;
    conv.out = to.data;
    conv.out_stride = to.stride;
    causal_conv(conv, num_threads);
}

void shift_in(const ConvParams& conv, std::int64_t slot, const char* rows, std::int64_t row_bytes,
              std::int64_t count) {
    const std::int64_t size = bytes_of(conv.dtype), past = conv.width - 1, input_bytes = conv.d_inner * size;
    char* state = static_cast<char*>(conv.state) + slot * conv.state_stride * size;
    const std::int64_t left = count < past ? past - count : 0;
    std::memmove(state, state + (past - left) * input_bytes, std::size_t(left * input_bytes));
    for (std::int64_t i = left; i < past; ++i) {
        std::memcpy(state + i * input_bytes, rows + (count - past + i) * row_bytes, std::size_t(input_bytes));
    }
}

void elementwise(Elementwise function, const float* from, float* to, std::int64_t count) {
    APC_FOR_ISA(elementwise)(function, from, to, count);
}

}  // namespace apcbatch
