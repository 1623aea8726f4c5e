// Split paged attention into units and distribute them over the threads.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "share.h"

namespace apcbatch {
namespace {

constexpr double kSerialWork =
    1 << 20;  // multiply-adds below which one thread is faster than waking the others

int64_t unit_cost(const AttentionParams& p, const AttentionUnit& unit) {
    return (unit.end - unit.begin) * (p.context[unit.sequence] + unit.end);
}

// Returns all units, the most expensive first, so that the last ones to run are short.
std::vector<AttentionUnit> cut(const AttentionParams& p) {
    const int64_t group = p.heads / p.kv_heads;
    const int64_t queries = std::max<int64_t>(1, kUnitRows / group);
    std::vector<AttentionUnit> units;
    for (int64_t s = 0; s < p.num_sequences; ++s) {
        const int64_t length = p.cu_seqlens[s + 1] - p.cu_seqlens[s];
        for (int64_t begin = 0; begin < length; begin += queries) {
            for (int64_t h = 0; h < p.kv_heads; ++h)
                units.push_back({s, h, begin, std::min(begin + queries, length)});
        }
    }
    std::stable_sort(units.begin(), units.end(), [&](const AttentionUnit& a, const AttentionUnit& b) {
        return unit_cost(p, a) > unit_cost(p, b);
    });
    return units;
}

}  // namespace

SequenceFault check_sequences(const PagedSequences& p, int64_t t, int64_t pages) {
    const int64_t columns = p.page_table_stride;
    if (p.cu_seqlens[0] != 0 || p.cu_seqlens[p.num_sequences] != t) return SequenceFault::cu_seqlens;
    for (int64_t s = 0; s < p.num_sequences; ++s) {
        const int64_t begin = p.cu_seqlens[s], end = p.cu_seqlens[s + 1];
        if (begin > end || end > t) return SequenceFault::cu_seqlens;
        if (p.context[s] < 0) return SequenceFault::context;
        const int64_t length = end - begin;
        if (length > columns * kPageTokens || p.context[s] > columns * kPageTokens - length)
            return SequenceFault::columns;
        const int64_t used = (p.context[s] + length + kPageTokens - 1) / kPageTokens;
        for (int64_t i = 0; i < used; ++i) {
            const int64_t page = p.page_table[s * p.page_table_stride + i];
            if (page < 0 || page >= pages) return SequenceFault::page;
        }
    }
    return SequenceFault::none;
}

void paged_attention(const AttentionParams& params, int num_threads) {
    const std::vector<AttentionUnit> units = cut(params);
    const int64_t group = params.heads / params.kv_heads;
    int64_t work = 0, rows = 0;
    for (const AttentionUnit& unit : units) {
        work += unit_cost(params, unit) * group * params.head_dim * 2;
        rows = std::max(rows, (unit.end - unit.begin) * group);
    }
    const auto run = APC_FOR_ISA_ATTENTION(attention_unit);
    const int64_t count = int64_t(units.size());
    share_pieces(count, useful_threads(double(work), kSerialWork, num_threads),
                 attention_scratch_bytes(params.head_dim, rows),
                 [&](int64_t i, char* scratch) { run(params, units[size_t(i)], scratch); });
}

void write_kv(const KvParams& params, int num_threads) {
    const auto run = APC_FOR_ISA(write_kv_rows);
    share_rows(params.t, params.row, num_threads, 0,
               [&](int64_t begin, int64_t end, char*) { run(params, begin, end); });
}

}  // namespace apcbatch
