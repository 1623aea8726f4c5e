// Learnt probability that the next token of a draft is right, by source, by alignment with a reference, by
// the number of matching tokens before it, and by the share of occurrences that agree. A cell is one
// combination.
//
// A cell's estimate is its own share of right tokens, shrunk towards the share of all cells with the same
// source, alignment and length, which is shrunk towards a prior. Counts are halved when they reach kMost,
// so that old text weighs less.
#pragma once

#include <cstdint>

namespace apcbatch {

// In the order of apcbatch.types.DraftSource.
enum class Source : int { recorded = 0, previous = 1, siblings = 2, history = 3, lookup = 4 };
constexpr int kNumSources = 5;

class Acceptance {
  public:
    // aligned: the answer so far equals the beginning of a reference. length: matching tokens before this
    // one. agreeing: number of the `total` occurrences whose next token is this one.
    static int cell(Source source, bool aligned, int length, int agreeing, int total);

    double estimate(int cell) const;
    void learn(int cell, bool is_right);

  private:
    static constexpr int kNumLengths = 12;
    static constexpr int kNumShares = 8;
    static constexpr float kMost = 512;       // counts are halved when `tried` reaches it
    static constexpr float kWeight = 4;       // weight of the share over all cells of a length, in tokens
    static constexpr float kPriorWeight = 2;  // weight of the prior, in tokens

    struct Counts {
        float tried = 0, right = 0;
        void learn(bool is_right);
        double drawn(double towards, double weight) const {
            return (right + weight * towards) / (tried + weight);
        }
    };

    Counts cells_[kNumSources * 2 * kNumLengths * kNumShares];
    Counts lengths_[kNumSources * 2 * kNumLengths];
};

}  // namespace apcbatch
