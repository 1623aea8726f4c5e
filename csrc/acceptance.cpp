#include "acceptance.h"

#include <algorithm>

namespace apcbatch {
namespace {

// Shortest match of each class of lengths, in tokens, and its prior. An aligned reference has at least the
// prior of 16 tokens.
constexpr int kLengths[] = {0, 2, 3, 4, 5, 6, 8, 11, 16, 24, 40, 64};
constexpr double kPriors[] = {0.15, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.85, 0.9, 0.9};
constexpr int kLongPrior = 8;

int length_class(int length) {
    int found = 0;
    for (const int least : kLengths) found += least <= length ? 1 : 0;
    return found - 1;
}

// Class 0: one occurrence. 1: two or three, which all agree. 2: more, which all agree. 3 to 7: by the share
// that agrees.
int share_class(int agreeing, int total) {
    if (total == 1) return 0;
    if (agreeing == total) return total <= 3 ? 1 : 2;
    const int percent = 100 * agreeing / total;
    return percent >= 85 ? 3 : percent >= 65 ? 4 : percent >= 45 ? 5 : percent >= 25 ? 6 : 7;
}

}  // namespace

void Acceptance::Counts::learn(bool is_right) {
    if (tried >= kMost) {
        tried /= 2;
        right /= 2;
    }
    tried += 1;
    right += is_right ? 1 : 0;
}

int Acceptance::cell(Source source, bool aligned, int length, int agreeing, int total) {
    static_assert(sizeof(kLengths) / sizeof(kLengths[0]) == kNumLengths, "one prior a class");
    const int row = (int(source) * 2 + (aligned ? 1 : 0)) * kNumLengths + length_class(length);
    return row * kNumShares + share_class(agreeing, total);
}

double Acceptance::estimate(int cell) const {
    const int row = cell / kNumShares, length = row % kNumLengths;
    const bool aligned = row / kNumLengths % 2 == 1;
    const double prior = kPriors[aligned ? std::max(length, kLongPrior) : length];
    return cells_[cell].drawn(lengths_[row].drawn(prior, kPriorWeight), kWeight);
}

void Acceptance::learn(int cell, bool is_right) {
    cells_[cell].learn(is_right);
    lengths_[cell / kNumShares].learn(is_right);
}

}  // namespace apcbatch
