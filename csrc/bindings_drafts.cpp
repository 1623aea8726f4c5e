// Python bindings (pybind11) of the drafts. Token ids are int32, contiguous, by address and count; the Python
// side checks them.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "drafts.h"

namespace apcbatch {
namespace {

const Token* tokens_at(Address address) { return reinterpret_cast<const Token*>(address); }

// Indexes tokens [begin, count) of a finished answer and its prompt.
void bound_add(DraftState& state, Address tokens, std::int64_t count, std::int64_t begin) {
    TokenIndex& history = state.history;
    history.begin_text();
    for (std::int64_t i = std::max<std::int64_t>(0, begin - kLongestMatch); i < count; ++i) {
        history.append(tokens_at(tokens)[i], i < begin);
    }
}

// Returns the draft by the longest match of the tokens in the history, without estimates, the length of the
// match, its occurrences, and whether all were visited; for tests.
py::object bound_match(const DraftState& state, Address tokens, std::int64_t count, int most) {
    const Token* const first = tokens_at(tokens);
    Tail tail;
    for (std::int64_t i = 0; i < count; ++i) tail.push(first[i]);
    Match match;
    state.history.find(tail, first + count, int(std::min<std::int64_t>(count, kLongestMatch)), match);
    const int length = match.count > 0 ? match.at[0].length : 0, occurrences = match.count;
    const bool is_cut = match.is_cut;
    std::vector<Token> draft;
    while (int(draft.size()) < most) {
        const NextToken next = next_token(state.history, match);
        if (next.token < 0) break;
        draft.push_back(next.token);
    }
    return py::make_tuple(draft, length, occurrences, !is_cut);
}

void bound_prompt(Drafter& drafter, Address tokens, std::int64_t count) {
    drafter.prompt(tokens_at(tokens), count);
}

void bound_reference(Drafter& drafter, int source, Address tokens, std::int64_t count) {
    drafter.reference(Source(source), tokens_at(tokens), count);
}

void bound_append(Drafter& drafter, const std::vector<Token>& tokens) {
    for (const Token token : tokens) {
        if (token < 0) throw std::overflow_error("token ids must lie in 0 .. 2147483647");
    }
    for (const Token token : tokens) drafter.append(token);
}

// Returns (tokens, reach, source), or None.
py::object bound_propose(Drafter& drafter, int most) {
    const Proposal* proposal = drafter.propose(most);
    if (proposal == nullptr) return py::none();
    std::size_t count = 0;
    while (count < proposal->reach.size() && proposal->reach[count] >= kLeastReach) ++count;
    const auto tokens = proposal->tokens.begin();
    const auto reach = proposal->reach.begin();
    return py::make_tuple(std::vector(tokens, tokens + count), std::vector(reach, reach + count),
                          int(proposal->source));
}

}  // namespace
}  // namespace apcbatch

void bind_drafts(py::module_& m) {
    using namespace apcbatch;
    py::class_<DraftState, std::shared_ptr<DraftState>>(m, "DraftState")
        .def(py::init<std::int64_t>())
        .def("add", &bound_add)
        .def("match", &bound_match)
        .def("bytes", [](const DraftState& state) { return state.history.bytes(); });
    py::class_<Drafter>(m, "Drafter")
        .def(py::init<std::shared_ptr<DraftState>, bool, bool>())
        .def("prompt", &bound_prompt)
        .def("reference", &bound_reference)
        .def("append", &bound_append)
        .def("propose", &bound_propose)
        .def("bytes", &Drafter::bytes);
}
