// Index of token sequences by their n-grams: where did the last tokens occur before, and what came next?
//
// Tokens lie in a ring, so new tokens overwrite the oldest. For each gram length of kLevels, a token is
// linked to the previous token that follows the same n-gram (as in zlib: a table of heads, and a link at
// each token). So the cost of an append is constant, and overwritten tokens need no work: a link to an
// overwritten slot ends a chain. Hashes only choose a chain; every occurrence is compared token by token.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace apcbatch {

using Token = std::int32_t;  // a token id, 0 or more

constexpr int kNumLevels = 5;
constexpr int kLevels[kNumLevels] = {1, 2, 4, 8, 16};  // gram lengths, ascending
constexpr int kLongestGram = kLevels[kNumLevels - 1];
constexpr int kLongestMatch = 64;     // maximum tokens compared
constexpr int kMostOccurrences = 32;  // maximum occurrences compared for one match, the newest
constexpr int kMostSteps = 128;       // maximum links of a chain to follow, those of hash collisions included

// Last tokens of a sequence that grows, with the hash of each suffix of up to kLongestGram tokens.
class Tail {
  public:
    void push(Token token);
    void clear() { size_ = 0; }

    std::int64_t size() const { return size_; }
    // The hash of the last `length` tokens; length: at most kLongestGram and size().
    std::uint64_t hash(int length) const;

  private:
    static constexpr int kRing = 32;  // a power of two above kLongestGram
    std::uint64_t prefix_[kRing] = {};
    std::int64_t size_ = 0;
};

struct Occurrence {
    std::uint32_t slot;  // of the token that follows the occurrence
    int length;          // matching tokens before that token, at most kLongestMatch
};

// Occurrences of the longest match, newest first. is_cut: a chain was left after kMostSteps, so longer
// matches or older occurrences may be missing.
struct Match {
    int count = 0;
    bool is_cut = false;
    Occurrence at[kMostOccurrences];
};

class TokenIndex {
  public:
    // max_bytes: limit on bytes(). Below 2 * kLongestGram slots (1,408 bytes) the index stays empty.
    explicit TokenIndex(std::int64_t max_bytes);
    ~TokenIndex();
    TokenIndex(const TokenIndex&) = delete;
    TokenIndex& operator=(const TokenIndex&) = delete;

    // Bytes of a slot: its token, its links, and its share of the heads.
    static constexpr std::int64_t kSlotBytes = 4 + 8 * kNumLevels;

    // Makes capacity for `count` more tokens, as far as the limit allows.
    void reserve(std::int64_t count);
    // Ends the current text: no gram contains tokens of two texts.
    void begin_text();
    // Appends a token to the current text. context: the token is part of grams, but no occurrence is
    // followed by it. Returns its slot.
    std::uint32_t append(Token token, bool context);

    // Finds the longest match of the end of a sequence: of the newest occurrences of the longest gram that
    // occurs, those with the largest number of matching tokens. tail: the sequence's hashes. end: one past
    // its last token. size: number of its tokens in memory before `end`.
    void find(const Tail& tail, const Token* end, int size, Match& match) const;

    // The token in a slot, or -1 at the end of its text.
    Token token(std::uint32_t slot) const { return size_ == 0 || slot == next_ ? Token(-1) : tokens_[slot]; }
    std::uint32_t after(std::uint32_t slot) const { return slot + 1 == capacity_ ? 0 : slot + 1; }

    std::int64_t bytes() const { return std::int64_t(capacity_) * kSlotBytes; }
    std::int64_t size() const { return size_; }

  private:
    static constexpr Token kBorder = -1;
    static constexpr std::uint32_t kContext = 0xffffffffu;  // first link of a context token or border

    void grow(std::int64_t wanted);
    void put(Token token);
    // Returns the number of tokens from a slot to the newest one, both included.
    std::int64_t age(std::uint32_t slot) const {
        return slot < next_ ? next_ - slot : std::int64_t(next_) + capacity_ - slot;
    }
    std::uint32_t& head(int level, std::uint64_t hash) const {
        const std::uint64_t place = ((hash >> 32) * capacity_) >> 32;
        return heads_[std::size_t(level) * capacity_ + place];
    }
    int matched(std::uint32_t slot, std::int64_t age, const Token* end, int size) const;

    std::int64_t limit_;              // slots
    std::uint32_t capacity_ = 0;      // slots
    std::uint32_t next_ = 0;          // slot to write
    std::int64_t size_ = 0;           // slots written, at most capacity_
    Token* tokens_ = nullptr;         // (capacity)
    std::uint32_t* links_ = nullptr;  // (capacity, kNumLevels): slot + 1 of the previous token, 0: none
    std::uint32_t* heads_ = nullptr;  // (kNumLevels, capacity): slot + 1 of the newest token, 0: none
    Tail text_;                       // the last tokens of the current text
};

}  // namespace apcbatch
