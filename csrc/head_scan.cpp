#include "head_scan.h"

#include "partition.h"
#include "share.h"

namespace apcbatch {
namespace {

// Number of updates of state elements below which one thread is faster than waking the thread pool.
constexpr double kSerialWork = 1 << 18;
constexpr std::int64_t kUnitsEach = 4;  // units wanted per thread, so that all end at about the same time

std::int64_t padded(std::int64_t count) {
    return (count + kChannelGrain - 1) / kChannelGrain * kChannelGrain;
}

}  // namespace

std::int64_t head_scan_floats(const HeadScanParams& p, std::int64_t tokens) {
    return padded(tokens * (2 * p.key_heads * padded(p.key_dim) + p.value_heads * (p.value_dim + 2)));
}

std::int64_t head_scan_scratch_floats(const HeadScanParams& p, std::int64_t blocks) {
    return kRingTokens * padded(p.key_dim) + blocks * p.key_dim * padded(p.lanes);
}

std::int64_t head_scan_alone_floats(const HeadScanParams& p, std::int64_t tokens) {
    return head_scan_floats(p, tokens) + head_scan_scratch_floats(p, p.value_dim / p.lanes);
}

void head_scan(const HeadScanParams& p, float* memory, int num_threads) {
    const HeadScanInputs inputs(p, memory);
    const std::int64_t columns = 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim;
    const auto prepare = APC_FOR_ISA(head_scan_prepare);
    share_rows(inputs.tokens, columns, num_threads, 0,
               [&](std::int64_t begin, std::int64_t end, char*) { prepare(p, inputs, begin, end); });
    const double work = double(inputs.tokens) * double(p.value_heads * p.value_dim) * double(p.key_dim);
    const int threads = useful_threads(work, kSerialWork, num_threads);
    const std::int64_t blocks = p.value_dim / p.lanes, heads = p.ragged.num_sequences * p.value_heads;
    const std::int64_t parts = threads == 1 || heads >= kUnitsEach * threads ? 1 : blocks;
    const std::int64_t each = blocks / parts;
    const auto run = APC_FOR_ISA(head_scan_unit);
    share_pieces(heads * parts, threads, 4 * head_scan_scratch_floats(p, each),
                 [&](std::int64_t i, char* scratch) {
                     const std::int64_t head = i / parts;
                     run(p, inputs, {head / p.value_heads, head % p.value_heads, i % parts * each, each},
                         reinterpret_cast<float*>(scratch));
                 });
}

void head_scan_alone(const HeadScanParams& p, float* memory) {
    const HeadScanInputs inputs(p, memory);
    APC_FOR_ISA(head_scan_prepare)(p, inputs, 0, inputs.tokens);
    float* scratch = memory + head_scan_floats(p, inputs.tokens);
    const auto run = APC_FOR_ISA(head_scan_unit);
    for (std::int64_t s = 0; s < p.ragged.num_sequences; ++s) {
        for (std::int64_t head = 0; head < p.value_heads; ++head) {
            run(p, inputs, {s, head, 0, p.value_dim / p.lanes}, scratch);
        }
    }
}

}  // namespace apcbatch
