#include "delta_rule.h"

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

std::int64_t delta_floats(const DeltaParams& p, std::int64_t tokens) {
    return padded(tokens * (2 * p.key_heads * padded(p.key_dim) + p.value_heads * (p.value_dim + 2)));
}

std::int64_t delta_scratch_floats(const DeltaParams& p, std::int64_t blocks) {
    return kDeltaRows * padded(p.key_dim) + blocks * p.key_dim * padded(p.lanes);
}

std::int64_t delta_alone_floats(const DeltaParams& p, std::int64_t tokens) {
    return delta_floats(p, tokens) + delta_scratch_floats(p, p.value_dim / p.lanes);
}

void delta_rule(const DeltaParams& p, float* memory, int num_threads) {
    const DeltaInputs inputs(p, memory);
    const std::int64_t columns = 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim;
    const auto prepare = APC_FOR_ISA(delta_prepare);
    share_rows(inputs.tokens, columns, num_threads, 0,
               [&](std::int64_t begin, std::int64_t end, char*) { prepare(p, inputs, begin, end); });
    const double work = double(inputs.tokens) * double(p.value_heads * p.value_dim) * double(p.key_dim);
    const int threads = useful_threads(work, kSerialWork, num_threads);
    const std::int64_t blocks = p.value_dim / p.lanes, heads = p.ragged.num_sequences * p.value_heads;
    const std::int64_t parts = threads == 1 || heads >= kUnitsEach * threads ? 1 : blocks;
    const std::int64_t each = blocks / parts;
    const auto run = APC_FOR_ISA(delta_rule_unit);
    share_pieces(heads * parts, threads, 4 * delta_scratch_floats(p, each),
                 [&](std::int64_t i, char* scratch) {
                     const std::int64_t head = i / parts;
                     run(p, inputs, {head / p.value_heads, head % p.value_heads, i % parts * each, each},
                         reinterpret_cast<float*>(scratch));
                 });
}

void delta_rule_alone(const DeltaParams& p, float* memory) {
    const DeltaInputs inputs(p, memory);
    APC_FOR_ISA(delta_prepare)(p, inputs, 0, inputs.tokens);
    float* scratch = memory + delta_floats(p, inputs.tokens);
    const auto run = APC_FOR_ISA(delta_rule_unit);
    for (std::int64_t s = 0; s < p.ragged.num_sequences; ++s) {
        for (std::int64_t head = 0; head < p.value_heads; ++head) {
            run(p, inputs, {s, head, 0, p.value_dim / p.lanes}, scratch);
        }
    }
}

}  // namespace apcbatch
