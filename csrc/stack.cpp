#include "stack.h"

#include <algorithm>
#include <cstring>

#include "parts.h"
#include "rowwise.h"
#include "scratch.h"
#include "share.h"
#include "thread_pool.h"

namespace apcbatch {
namespace {

// Buffers of a pass: the residual stream through the layers, and the rows selected at the end.
class Stream {
  public:
    Stream(std::int64_t t, std::int64_t taken, std::int64_t h, bool has_beside) {
        const std::int64_t one = (t * h + 15) / 16 * 16, two = (taken * h + 15) / 16 * 16;
        const std::int64_t more = has_beside ? one : 0;
        float* memory = reinterpret_cast<float*>(thread_stream(4 * (2 * one + 3 * two + more)));
        residual = {memory, memory + one, false};
        rows = {memory + 2 * one, memory + 2 * one + two, true};
        normed = memory + 2 * one + 2 * two;
        beside = memory + 2 * one + 3 * two;
    }
    Residual residual, rows;
    void* normed;
    float* beside;  // (t, h): output of a sub-block that runs in parallel with another
};

void widen(const BFloat16* from, std::int64_t count, float* to) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t bits = std::uint32_t(from[i].bits) << 16;
        std::memcpy(to + i, &bits, sizeof(bits));
    }
}

// Looks up the embeddings, times their scale: tokens (t) -> (t, h) float32.
void embed(const StackParams& p, std::int64_t t, const std::int64_t* tokens, float* to, int num_threads) {
    const PartTimer timer(Part::embedding);
    const std::int64_t h = p.head.in, row_bytes = h * bytes_of(p.head.dtype);
    const bool wide = p.head.dtype == DType::float32;
    char* rows = wide ? reinterpret_cast<char*>(to) : thread_workspace(t * row_bytes);
    if (p.embedding == nullptr) unpack_rows(p.head, tokens, t, rows, num_threads);
    const char* embedding = static_cast<const char*>(p.embedding);
    share_rows(t, h, num_threads, 0, [&](std::int64_t begin, std::int64_t end, char*) {
        for (std::int64_t r = begin; r < end; ++r) {
            const char* from =
                embedding == nullptr ? rows + r * row_bytes : embedding + tokens[r] * row_bytes;
            float* row = to + r * h;
            if (!wide) {
                widen(reinterpret_cast<const BFloat16*>(from), h, row);
            } else if (embedding != nullptr) {
                std::memcpy(row, from, std::size_t(row_bytes));
            }
            if (p.embedding_scale != 1.0f) {
                for (std::int64_t i = 0; i < h; ++i) row[i] *= p.embedding_scale;
            }
        }
    });
}

// Computes to += from over t rows of h columns.
void add_rows(const float* from, std::int64_t t, std::int64_t h, float* to, int num_threads) {
    const PartTimer timer(Part::norms);
    share_rows(t, h, num_threads, 0, [&](std::int64_t begin, std::int64_t end, char*) {
        for (std::int64_t i = begin * h; i < end * h; ++i) to[i] += from[i];
    });
}

bool has_beside(const StackParams& p) {
    for (const Entry& entry : p.entries) {
        if (entry.is_beside) return true;
    }
    return false;
}

std::int64_t scratch_bytes(const StackParams& p, std::int64_t t) {
    std::int64_t most = 0;
    for (const Entry& entry : p.entries) most = std::max(most, entry.sub_block->scratch_bytes(t));
    return most;
}

void run_entry(const Entry& entry, const SubBlockInputs& inputs, std::int64_t h, Stream& stream, char* memory,
               int num_threads) {
    Residual& residual = stream.residual;
    if (entry.is_beside) {  // the sum already contains the earlier delta, and is normed again unchanged
        const Residual own{residual.sum, stream.beside, false};
        entry.sub_block->run(inputs, own, memory, num_threads);
        add_rows(own.delta, inputs.t, h, residual.delta, num_threads);
    } else {
        entry.sub_block->run(inputs, residual, memory, num_threads);
        residual.has_delta = true;
    }
}

// Computes the final norm of some rows, without changing the residual.
void norm_rows(const StackParams& p, const Stream& stream, const WantedRows& wanted, void* normed,
               int num_threads) {
    const std::int64_t h = p.head.in;
    share_rows(wanted.count, h, num_threads, 0, [&](std::int64_t begin, std::int64_t end, char*) {
        for (std::int64_t r = begin; r < end; ++r) {
            const std::int64_t from = wanted.rows[r] * h;
            std::memcpy(stream.rows.sum + r * h, stream.residual.sum + from, std::size_t(4 * h));
            std::memcpy(stream.rows.delta + r * h, stream.residual.delta + from, std::size_t(4 * h));
        }
    });
    Residual rows = stream.rows;
    rows.has_delta = stream.residual.has_delta;
    pre_norm(p.norm, rows, {wanted.count, normed, h, p.head.dtype}, num_threads);
}

// Finds the likeliest token of each row of logits.
void choose(const PassParams& pass, std::int64_t vocabulary, int num_threads) {
    const PartTimer timer(Part::sampling);
    LogprobParams p;
    p.t = pass.for_logits.count;
    p.n = p.stride = vocabulary;
    p.logits = pass.logits;
    p.choose = true;
    p.tokens = pass.likeliest;
    p.logprobs = pass.logprobs;
    logprob(p, num_threads);
}

bool all_below(const std::int64_t* numbers, std::int64_t count, std::int64_t end) {
    bool all = true;
    for (std::int64_t i = 0; i < count; ++i) all = all && numbers[i] >= 0 && numbers[i] < end;
    return all;
}

}  // namespace

bool fits(const StackParams& p, const PassParams& pass) {
    const std::int64_t t = pass.ragged.cu_seqlens[pass.ragged.num_sequences];
    if (!all_below(pass.tokens, t, p.head.out)) return false;
    if (!all_below(pass.for_logits.rows, pass.for_logits.count, t)) return false;
    if (!all_below(pass.for_hidden.rows, pass.for_hidden.count, t)) return false;
    if (!all_below(pass.kept.rows, pass.kept.count, t)) return false;
    const PagedSequences& own = pass.sequences;
    if (own.token_slots == nullptr) return true;
    if (!all_below(own.token_slots, t, pass.num_pages * kPageTokens)) return false;
    return check_sequences(own, t, pass.num_pages) == SequenceFault::none;
}

void KeptInputs::reserve(const StackParams& params, std::int64_t rows) {
    if (offsets_.empty()) {
        std::int64_t sum = 0;
        for (const Entry& entry : params.entries) {
            offsets_.push_back(sum);
            sum += entry.sub_block->kept_bytes();
        }
        offsets_.push_back(sum);
    }
    if (rows > capacity_) {
        memory_.reset();
        capacity_ = rows_ = 0;
        memory_.reset(new char[std::size_t(offsets_.back() * rows)]);
        capacity_ = rows;
    }
    rows_ = rows;
}

constexpr std::int64_t kPiecesEach = 4;  // pieces per thread, so that all end at about the same time

bool replay_stack(const StackParams& p, const std::vector<Replay>& replays, KeptInputs& kept,
                  int num_threads) {
    std::vector<std::pair<const SubBlock*, const char*>> sub_blocks;  // those with kept rows, and these
    std::int64_t most = 0, scratch = 0;
    std::int64_t end = 0;
    for (const Replay& one : replays) {
        if (one.first < end || one.count < 1 || one.first + one.count > kept.rows()) return false;
        end = one.first + one.count;
        most = std::max(most, one.count);
    }
    for (std::size_t i = 0; i < p.entries.size(); ++i) {
        const SubBlock* sub_block = p.entries[i].sub_block.get();
        if (sub_block->kept_bytes() == 0) continue;
        sub_blocks.emplace_back(sub_block, kept.of(i));
        scratch = std::max(scratch, sub_block->replay_bytes(most));
    }
    // A piece: a part of the replays in one sub-block, so that it prepares that sub-block's weights only
    // once.
    const std::int64_t count = std::int64_t(sub_blocks.size()), num_replays = std::int64_t(replays.size());
    if (count == 0 || num_replays == 0) return true;
    const std::int64_t parts = std::min(num_replays, (kPiecesEach * num_threads + count - 1) / count);
    share_pieces(count * parts, num_threads, scratch, [&](std::int64_t i, char* memory) {
        const auto& [sub_block, rows] = sub_blocks[std::size_t(i / parts)];
        const std::int64_t begin = num_replays * (i % parts) / parts;
        const std::int64_t end = num_replays * (i % parts + 1) / parts;
        sub_block->replay(replays.data() + begin, end - begin, rows, memory);
    });
    return true;
}

void run_stack(const StackParams& p, const PassParams& pass, KeptInputs& kept,
               const std::function<void()>& on_layer, int num_threads) {
    const std::int64_t t = pass.ragged.cu_seqlens[pass.ragged.num_sequences], h = p.head.in;
    const std::int64_t r = pass.for_logits.count, s = pass.for_hidden.count;
    ThreadPool::lead(usable_threads(num_threads), [&] {
        Stream stream(t, r > s ? r : s, h, has_beside(p));
        embed(p, t, pass.tokens, stream.residual.sum, num_threads);
        SubBlockInputs inputs{t, pass.ragged, pass.sequences, pass.kept, nullptr};
        if (pass.kept.count > 0) kept.reserve(p, pass.kept.count);
        char* memory = thread_workspace(scratch_bytes(p, t));
        for (std::size_t i = 0; i < p.entries.size(); ++i) {
            if (p.entries[i].begins_layer && on_layer) on_layer();
            if (pass.kept.count > 0) inputs.kept_inputs = kept.of(i);
            run_entry(p.entries[i], inputs, h, stream, memory, num_threads);
        }
        norm_rows(p, stream, pass.for_hidden, pass.hidden, num_threads);
        norm_rows(p, stream, pass.for_logits, stream.normed, num_threads);
        project(p.head, {r, stream.normed, h, p.head.dtype}, nullptr,
                {r, pass.logits, p.head.out, DType::float32},
                num_threads);  // (r, h) -> (r, vocabulary)
        choose(pass, p.head.out, num_threads);
    });
}

}  // namespace apcbatch
