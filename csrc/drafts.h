// Drafts of a running answer: its likely next tokens, by the longest match of its last tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "acceptance.h"
#include "token_index.h"

namespace apcbatch {

// The reach of a drafted token is the probability that it and all drafted tokens before it are right.
constexpr int kMostDrafted = 64;
constexpr int kUsuallyDrafted = 16;  // tokens after these need a reach of kFarReach
constexpr double kFarReach = 0.5;
constexpr double kLeastReach = 0.02;  // minimum reach of the first kUsuallyDrafted tokens
constexpr double kLeastFirst = 0.1;   // minimum reach of the first token of a returned draft

// State that all answers of one engine share.
struct DraftState {
    explicit DraftState(std::int64_t history_bytes) : history(history_bytes) {}
    TokenIndex history;
    Acceptance acceptance;
};

// Next token of a draft. total: occurrences that have a next token. agreeing: those of them whose next
// token is `token`. length: maximum number of matching tokens before it among these. token: -1 if total is
// 0.
struct NextToken {
    Token token = -1;
    int length = 0, agreeing = 0, total = 0;
};

// Chooses the most frequent next token of the occurrences, on ties the one with the newest occurrence.
// Reduces `match` to the occurrences of that token, each moved past it.
NextToken next_token(const TokenIndex& index, Match& match);

// Draft of one source.
struct Proposal {
    Source source = Source::lookup;
    std::vector<Token> tokens;
    std::vector<double> reach;  // of each token
    std::vector<int> cells;     // of each token: its cell in Acceptance
    std::size_t checked = 0;    // tokens compared with the answer
    double expected = 0;        // expected number of right tokens
    bool is_open = false;       // all checked tokens were right, and unchecked ones are left
};

// Known answers to the request of a running answer, from one source (references). A reference is aligned
// while the running answer equals its beginning.
class References {
  public:
    explicit References(Source source) : source_(source), index_(kMostBytes) {}

    void add(const Token* tokens, std::int64_t count);
    void append(Token token);  // the running answer's next token
    // Fills `match` with the occurrences to draft from: the positions in aligned references, or without
    // any, the longest match in all references (TokenIndex::find). Returns whether they are from aligned
    // references.
    bool find(const Tail& tail, const Token* end, int size, Match& match) const;

    Source source() const { return source_; }
    const TokenIndex& index() const { return index_; }

  private:
    static constexpr std::int64_t kMostBytes = std::int64_t(1) << 30;

    Source source_;
    TokenIndex index_;
    std::vector<std::uint32_t> aligned_;  // slot of the next token in each aligned reference, newest first
    std::int64_t answered_ = 0;           // tokens of the running answer
};

// Drafts of one running answer.
class Drafter {
  public:
    // use_history, use_lookup: sources besides references.
    Drafter(std::shared_ptr<DraftState> state, bool use_history, bool use_lookup);

    void prompt(const Token* tokens, std::int64_t count);
    // Adds a known answer. Call it for the oldest one first, and before the first `append`.
    void reference(Source source, const Token* tokens, std::int64_t count);
    // Appends the answer's next token, and learns whether the last proposals were right.
    void append(Token token);
    // Makes a proposal from each source. Returns the one with the largest expected number of right tokens,
    // or null if none has a first token of kLeastFirst. It is valid until the next call. most: maximum
    // tokens; values above kMostDrafted count as kMostDrafted.
    const Proposal* propose(int most);

    std::int64_t bytes() const;  // of the index of prompt and answer, and of the references

  private:
    void push(Token token);
    void extend(Proposal& proposal, const TokenIndex& index, bool aligned, Match& match, int most) const;

    std::shared_ptr<DraftState> state_;
    bool use_history_;
    std::unique_ptr<TokenIndex> own_;  // prompt and answer; null without lookup
    std::vector<std::unique_ptr<References>> references_;
    Tail tail_;
    std::vector<Token> recent_;  // at least the last kLongestMatch tokens, or all if fewer
    Proposal proposals_[kNumSources];
};

}  // namespace apcbatch
