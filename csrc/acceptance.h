// Learnt probability that the next token of a draft is right, by source, by how many tokens before it match,
// and by how many of the occurrences agree.
//
// A cell's estimate is its own share of right tokens, drawn towards that of all cells with its source and
// length, which is drawn towards a prior. Counts are halved now and then, so that old text weighs less.
#pragma once

#include <cstdint>

namespace apcbatch {

// In the order of apcbatch.types.DraftSource.
enum class Source : int { recorded = 0, previous = 1, siblings = 2, history = 3, lookup = 4 };
constexpr int kNumSources = 5;

class Acceptance {
  public:
    // aligned: the answer agrees with a reference from its start. length: matching tokens before this one.
    // agreeing: of `total` occurrences, those that go on with this token.
    static int cell(Source source, bool aligned, int length, int agreeing, int total);

    double estimate(int cell) const;
    void learn(int cell, bool is_right);

  private:
    static constexpr int kNumLengths = 12;
    static constexpr int kNumShares = 8;
    static constexpr float kMost = 512;       // counts are halved there
    static constexpr float kWeight = 4;       // tokens that the estimate of all shares counts for
    static constexpr float kPriorWeight = 2;  // tokens that the prior counts for

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
