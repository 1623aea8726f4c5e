#include "token_index.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace apcbatch {
namespace {

constexpr std::uint64_t kBase = 0x9e3779b97f4a7c15u;
constexpr std::int64_t kFirstSlots = 256;
constexpr std::int64_t kMostSlots = 0x7fffffff;  // twice a number of slots fits in 32 bits

struct Powers {
    std::uint64_t of[kLongestGram + 1];
    constexpr Powers() : of() {
        of[0] = 1;
        for (int i = 1; i <= kLongestGram; ++i) of[i] = of[i - 1] * kBase;
    }
};
constexpr Powers kPowers;

std::uint64_t mixed(Token token) {
    std::uint64_t x = (std::uint64_t(std::uint32_t(token)) + 1) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 29);
}

template <class T>
T* resized(T* old, std::int64_t count) {
    T* made = static_cast<T*>(std::realloc(old, std::size_t(count) * sizeof(T)));
    if (made == nullptr) throw std::bad_alloc();
    return made;
}

void keep_longest(Match& match) {
    int longest = 0, kept = 0;
    for (int i = 0; i < match.count; ++i) longest = std::max(longest, match.at[i].length);
    for (int i = 0; i < match.count; ++i) {
        if (match.at[i].length == longest) match.at[kept++] = match.at[i];
    }
    match.count = kept;
}

}  // namespace

void Tail::push(Token token) {
    const std::uint64_t before = size_ == 0 ? 0 : prefix_[(size_ - 1) % kRing];
    prefix_[size_ % kRing] = before * kBase + mixed(token);
    ++size_;
}

std::uint64_t Tail::hash(int length) const {
    const std::uint64_t before = length == size_ ? 0 : prefix_[(size_ - 1 - length) % kRing];
    const std::uint64_t x = prefix_[(size_ - 1) % kRing] - before * kPowers.of[length];
    return (x ^ (x >> 31)) * 0x94d049bb133111ebu;
}

TokenIndex::TokenIndex(std::int64_t max_bytes) : limit_(std::min(max_bytes / kSlotBytes, kMostSlots)) {
    if (limit_ < 2 * kLongestGram) limit_ = 0;
}

TokenIndex::~TokenIndex() {
    std::free(tokens_);
    std::free(links_);
    std::free(heads_);
}

void TokenIndex::reserve(std::int64_t count) {
    const std::int64_t wanted = std::min(size_ + count, limit_);
    if (wanted > std::int64_t(capacity_)) grow(wanted);
}

// Grows the ring, which must not have wrapped yet, and links its tokens again. The heads are freed first, and
// realloc moves large blocks without a copy, so memory never exceeds that of the new capacity.
void TokenIndex::grow(std::int64_t wanted) {
    std::free(heads_);
    heads_ = nullptr;
    tokens_ = resized(tokens_, wanted);
    links_ = resized(links_, wanted * kNumLevels);
    const std::size_t num_heads = std::size_t(wanted) * kNumLevels;
    heads_ = static_cast<std::uint32_t*>(std::calloc(num_heads, sizeof(std::uint32_t)));
    if (heads_ == nullptr) throw std::bad_alloc();
    capacity_ = std::uint32_t(wanted);
    const std::int64_t count = size_;
    next_ = 0;
    size_ = 0;
    text_.clear();
    for (std::int64_t slot = 0; slot < count; ++slot) {
        const Token token = tokens_[slot];
        if (token == kBorder) {
            begin_text();
        } else {
            append(token, links_[slot * kNumLevels] == kContext);
        }
    }
}

void TokenIndex::put(Token token) {
    tokens_[next_] = token;
    next_ = after(next_);
    size_ = std::min(size_ + 1, std::int64_t(capacity_));
}

void TokenIndex::begin_text() {
    if (text_.size() == 0) return;
    if (size_ == std::int64_t(capacity_) && size_ < limit_) reserve(size_);
    text_.clear();
    if (capacity_ == 0) return;
    links_[std::size_t(next_) * kNumLevels] = kContext;
    put(kBorder);
}

std::uint32_t TokenIndex::append(Token token, bool context) {
    if (limit_ == 0) return 0;
    if (size_ == std::int64_t(capacity_) && size_ < limit_) reserve(std::max(size_, kFirstSlots));
    const std::uint32_t slot = next_;
    std::uint32_t* links = links_ + std::size_t(slot) * kNumLevels;
    std::fill(links, links + kNumLevels, 0u);
    if (context) {
        links[0] = kContext;
    } else {
        for (int level = 0; level < kNumLevels && text_.size() >= kLevels[level]; ++level) {
            std::uint32_t& first = head(level, text_.hash(kLevels[level]));
            links[level] = first;
            first = slot + 1;
        }
    }
    text_.push(token);
    put(token);
    return slot;
}

// Returns how many tokens before a slot equal those before `end`. age: the slot's.
int TokenIndex::matched(std::uint32_t slot, std::int64_t age, const Token* end, int size) const {
    const int most = int(std::min<std::int64_t>({size, kLongestMatch, size_ - age}));
    int count = 0;
    while (count < most) {
        slot = slot == 0 ? capacity_ - 1 : slot - 1;
        if (tokens_[slot] != end[-1 - count]) break;
        ++count;
    }
    return count;
}

void TokenIndex::find(const Tail& tail, const Token* end, int size, Match& match) const {
    match.count = 0;
    match.is_cut = false;
    if (size_ == 0) return;
    for (int level = kNumLevels - 1; level >= 0 && match.count == 0; --level) {
        const int length = kLevels[level];
        if (tail.size() < length || size < length) continue;
        std::int64_t before = 0;
        std::uint32_t link = head(level, tail.hash(length));
        for (int step = 0; link != 0; ++step) {
            if (step == kMostSteps) {
                match.is_cut = true;
                break;
            }
            const std::uint32_t slot = link - 1;
            const std::uint32_t* links = links_ + std::size_t(slot) * kNumLevels;
            const std::int64_t age = this->age(slot);
            if (age <= before || links[0] == kContext) break;  // the slot was overwritten by a newer token
            before = age;
            const int equal = matched(slot, age, end, size);
            if (equal >= length) {
                match.at[match.count++] = {slot, equal};
                if (match.count == kMostOccurrences) break;
            }
            link = links[level];
        }
        keep_longest(match);
    }
}

}  // namespace apcbatch
