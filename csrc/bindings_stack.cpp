// Python bindings (pybind11) of a whole pass in one call. The constructor takes what is constant over all
// passes.
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "stack.h"

namespace apcbatch {
namespace {

// layers: of each its sub-blocks, and whether each runs in parallel with the previous one.
StackParams stack_params(const py::list& layers, const PreNorm& norm, const Projection& head,
                         Address embedding, float embedding_scale) {
    StackParams p;
    for (const py::handle one : layers) {
        bool is_first = true;
        for (const auto& [sub_block, is_beside] :
             one.cast<std::vector<std::pair<std::shared_ptr<SubBlock>, bool>>>()) {
            p.entries.push_back({sub_block, is_beside, is_first});
            is_first = false;
        }
    }
    p.norm = norm;
    p.head = head;
    p.embedding = values({embedding, 0, head.dtype}, kMaybe);
    p.embedding_scale = embedding_scale;
    return p;
}

// KV cache of a pass: page_table and its columns, context, token_slots, number of pages.
using Pages = std::tuple<Address, std::int64_t, Address, Address, std::int64_t>;
// Rows of the residual to compute outputs for: their count, the address of their numbers, the output's
// address.
using Wanted = std::tuple<std::int64_t, Address, Address>;

// Pass by the addresses of its inputs, whose values may change between runs, and buffers for the tokens
// chosen.
struct BoundPass {
    PassParams params;
    std::vector<std::int64_t> likeliest;
    std::vector<float> logprobs;  // empty if not requested
};

// kept: number of rows whose inputs are kept, and the address of their numbers.
BoundPass bound_pass(Address tokens, const RaggedParams& ragged, const Pages& pages, const Wanted& logits,
                     const Wanted& hidden, bool with_logprobs, const std::pair<std::int64_t, Address>& kept) {
    BoundPass pass;
    PassParams& p = pass.params;
    const std::int64_t b = ragged.num_sequences;
    const auto& [page_table, columns, context, token_slots, num_pages] = pages;
    p.tokens = integers(tokens, b);
    p.ragged = ragged;
    p.sequences = {b,
                   integers(page_table, kMaybe),
                   columns,
                   ragged.cu_seqlens,
                   integers(context, kMaybe),
                   integers(token_slots, kMaybe)};
    p.num_pages = num_pages;
    const std::int64_t r = std::get<0>(logits), s = std::get<0>(hidden);
    p.for_logits = {r, integers(std::get<1>(logits), r)};
    p.logits = floats(std::get<2>(logits), r);
    pass.likeliest.resize(std::size_t(r));
    pass.logprobs.resize(with_logprobs ? std::size_t(r) : 0);
    p.for_hidden = {s, integers(std::get<1>(hidden), s)};
    p.hidden = checked(std::get<2>(hidden), s, 1);
    p.kept = {kept.first, integers(kept.second, kept.first)};
    return pass;
}

struct BoundStack {
    StackParams params;
    KeptInputs kept;
};

// Runs a pass. on_layer: callable or None. Returns lists of the likeliest tokens and, if requested, of their
// log-probabilities. Returns None if a token id, row or page is out of range.
py::object bound_run_stack(BoundStack& stack, BoundPass& pass, const py::object& on_layer, int num_threads) {
    PassParams& p = pass.params;
    p.likeliest = pass.likeliest.data();
    p.logprobs = pass.logprobs.empty() ? nullptr : pass.logprobs.data();
    std::function<void()> tell;
    if (!on_layer.is_none()) {
        tell = [&on_layer] {
            const py::gil_scoped_acquire python;
            on_layer();
        };
    }
    if (!fits(stack.params, p)) return py::none();
    {
        const py::gil_scoped_release others;
        run_stack(stack.params, p, stack.kept, tell, num_threads);
    }
    return py::make_tuple(pass.likeliest, pass.logprobs);
}

// Replays: (slot, first kept row, count) each.
void bound_replay(BoundStack& stack,
                  const std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>& wanted,
                  int num_threads) {
    std::vector<Replay> replays;
    for (const auto& [slot, first, count] : wanted) replays.push_back({slot, first, count});
    bool is_kept = false;
    {
        const py::gil_scoped_release others;
        is_kept = replay_stack(stack.params, replays, stack.kept, num_threads);
    }
    if (!is_kept) throw std::invalid_argument("only rows that the last pass kept can be replayed");
}

}  // namespace
}  // namespace apcbatch

void bind_stack(py::module_& m) {
    using namespace apcbatch;
    py::class_<BoundPass>(m, "Pass").def(py::init(&bound_pass));
    py::class_<BoundStack>(m, "Stack")
        .def(py::init([](const py::list& layers, const PreNorm& norm, const Projection& head,
                         Address embedding, float embedding_scale) {
            return std::make_unique<BoundStack>(
                BoundStack{stack_params(layers, norm, head, embedding, embedding_scale), {}});
        }))
        .def("run", &bound_run_stack)
        .def("replay", &bound_replay);
}
