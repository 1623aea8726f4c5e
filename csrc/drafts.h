// Drafts of a running answer: its likely next tokens, by the longest match of its last tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "acceptance.h"
#include "token_index.h"

namespace apcbatch {

constexpr int kMostDrafted = 64;
constexpr int kUsuallyDrafted = 16;  // further tokens need a reach of kFarReach
constexpr double kFarReach = 0.5;
constexpr double kLeastReach = 0.02;  // a draft ends before a token below it
constexpr double kLeastFirst = 0.1;   // reach of a draft's first token

// What the answers of one engine share.
struct DraftState {
    explicit DraftState(std::int64_t history_bytes) : history(history_bytes) {}
    TokenIndex history;
    Acceptance acceptance;
};

// Next token of a draft. length: matching tokens before it. agreeing: of the `total` occurrences that go on,
// those that go on with it. token: -1 if none goes on.
struct NextToken {
    Token token = -1;
    int length = 0, agreeing = 0, total = 0;
};

// Chooses the token that most occurrences go on with, the newest first among equals, and keeps those
// occurrences alone, each at the place behind it.
NextToken next_token(const TokenIndex& index, Match& match);

// Draft of one source.
struct Proposal {
    Source source = Source::lookup;
    std::vector<Token> tokens;
    std::vector<double> reach;  // probability that this token and those before it are right
    std::vector<int> cells;     // of Acceptance
    std::size_t checked = 0;    // tokens that the answer confirmed
    double expected = 0;        // number of right tokens of the draft
    bool is_open = false;       // whether the answer agrees so far
};

// Known answers to the request of a running one, from one source.
class References {
  public:
    explicit References(Source source) : source_(source), index_(kMostBytes) {}

    void add(const Token* tokens, std::int64_t count);
    void append(Token token);
    // Fills the occurrences to draft from: the aligned references, else the longest match. Returns whether
    // they are aligned.
    bool find(const Tail& tail, const Token* end, int size, Match& match) const;

    Source source() const { return source_; }
    const TokenIndex& index() const { return index_; }

  private:
    static constexpr std::int64_t kMostBytes = std::int64_t(1) << 30;

    Source source_;
    TokenIndex index_;
    std::vector<std::uint32_t> aligned_;  // slots of the next token, newest first
    std::int64_t answered_ = 0;           // tokens of the answer
};

class Drafter {
  public:
    // use_history, use_lookup: sources besides references.
    Drafter(std::shared_ptr<DraftState> state, bool use_history, bool use_lookup);

    void prompt(const Token* tokens, std::int64_t count);
    // Adds a known answer, the oldest first; before the first token of the answer.
    void reference(Source source, const Token* tokens, std::int64_t count);
    // Appends the answer's next token, and learns whether the last proposals were right.
    void append(Token token);
    // Makes a proposal from each source. Returns the one with the most expected tokens, null without any of
    // kLeastFirst; valid until the next call. most: tokens, at most kMostDrafted.
    const Proposal* propose(int most);

    std::int64_t bytes() const;  // of its own index and references

  private:
    void push(Token token);
    void extend(Proposal& proposal, const TokenIndex& index, bool aligned, Match& match, int most) const;

    std::shared_ptr<DraftState> state_;
    bool use_history_;
    std::unique_ptr<TokenIndex> own_;  // prompt and answer; null without lookup
    std::vector<std::unique_ptr<References>> references_;
    Tail tail_;
    std::vector<Token> recent_;  // the last kLongestMatch tokens at least, as far as there are so many
    Proposal proposals_[kNumSources];
};

}  // namespace apcbatch
