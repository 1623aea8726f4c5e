#include "drafts.h"

#include <algorithm>
#include <utility>

namespace apcbatch {

NextToken next_token(const TokenIndex& index, Match& match) {
    NextToken next;
    Token tokens[kMostOccurrences];
    for (int i = 0; i < match.count; ++i) {
        const Token token = index.token(match.at[i].slot);
        if (token < 0) continue;
        match.at[next.total] = match.at[i];
        tokens[next.total++] = token;
    }
    for (int i = 0; i < next.total && next.agreeing < next.total - i; ++i) {
        int count = 0;
        for (int j = i; j < next.total; ++j) count += tokens[j] == tokens[i] ? 1 : 0;
        if (count > next.agreeing) {
            next.agreeing = count;
            next.token = tokens[i];
        }
    }
    match.count = 0;
    for (int i = 0; i < next.total; ++i) {
        if (tokens[i] != next.token) continue;
        next.length = std::max(next.length, match.at[i].length);
        match.at[match.count++] = {index.after(match.at[i].slot), match.at[i].length + 1};
    }
    return next;
}

void References::add(const Token* tokens, std::int64_t count) {
    if (count == 0) return;
    index_.begin_text();
    index_.reserve(count + 1);
    const std::uint32_t first = index_.append(tokens[0], false);
    for (std::int64_t i = 1; i < count; ++i) index_.append(tokens[i], false);
    aligned_.insert(aligned_.begin(), first);
}

void References::append(Token token) {
    ++answered_;
    std::size_t kept = 0;
    for (const std::uint32_t slot : aligned_) {
        if (index_.token(slot) == token) aligned_[kept++] = index_.after(slot);
    }
    aligned_.resize(kept);
}

bool References::find(const Tail& tail, const Token* end, int size, Match& match) const {
    const int length = int(std::min<std::int64_t>(answered_, kLongestMatch));
    match.count = 0;
    for (const std::uint32_t slot : aligned_) {
        if (match.count == kMostOccurrences) break;
        if (index_.token(slot) >= 0) match.at[match.count++] = {slot, length};
    }
    if (match.count > 0) return true;
    index_.find(tail, end, size, match);
    return false;
}

Drafter::Drafter(std::shared_ptr<DraftState> state, bool use_history, bool use_lookup)
    : state_(std::move(state)), use_history_(use_history) {
    if (use_lookup) own_ = std::make_unique<TokenIndex>(std::int64_t(1) << 40);
}

void Drafter::prompt(const Token* tokens, std::int64_t count) {
    if (own_) {
        own_->reserve(count + count / 8 + 256);
        for (std::int64_t i = 0; i < count; ++i) own_->append(tokens[i], false);
    }
    for (std::int64_t i = std::max<std::int64_t>(0, count - kLongestMatch); i < count; ++i) push(tokens[i]);
}

void Drafter::reference(Source source, const Token* tokens, std::int64_t count) {
    for (const auto& references : references_) {
        if (references->source() == source) return references->add(tokens, count);
    }
    references_.push_back(std::make_unique<References>(source));
    references_.back()->add(tokens, count);
}

void Drafter::push(Token token) {
    if (recent_.size() == 4 * kLongestMatch) recent_.erase(recent_.begin(), recent_.end() - kLongestMatch);
    recent_.push_back(token);
    tail_.push(token);
}

void Drafter::append(Token token) {
    for (Proposal& proposal : proposals_) {
        if (!proposal.is_open) continue;
        const bool is_right = proposal.tokens[proposal.checked] == token;
        state_->acceptance.learn(proposal.cells[proposal.checked], is_right);
        ++proposal.checked;
        proposal.is_open = is_right && proposal.checked < proposal.tokens.size();
    }
    for (const auto& references : references_) references->append(token);
    if (own_) own_->append(token, false);
    push(token);
}

void Drafter::extend(Proposal& proposal, const TokenIndex& index, bool aligned, Match& match,
                     int most) const {
    double reach = 1;
    for (int count = 0; count < most; ++count) {
        const NextToken next = next_token(index, match);
        if (next.token < 0) break;
        const int cell = Acceptance::cell(proposal.source, aligned, next.length, next.agreeing, next.total);
        reach *= state_->acceptance.estimate(cell);
        const double least = count < kUsuallyDrafted ? kLeastReach : kFarReach;
        if (reach < least && count > 0) break;  // a first token is kept: the answer tells if it was right
        proposal.tokens.push_back(next.token);
        proposal.cells.push_back(cell);
        proposal.reach.push_back(reach);
        proposal.expected += reach;
        if (reach < least) break;
    }
    proposal.is_open = !proposal.tokens.empty();
}

const Proposal* Drafter::propose(int most) {
    for (Proposal& proposal : proposals_) {
        proposal.tokens.clear();
        proposal.cells.clear();
        proposal.reach.clear();
        proposal.expected = 0;
        proposal.checked = 0;
        proposal.is_open = false;
    }
    most = std::min(most, kMostDrafted);
    if (most <= 0) return nullptr;
    const Token* end = recent_.data() + recent_.size();
    const int size = int(recent_.size());
    Match match;
    for (const auto& references : references_) {
        Proposal& one = proposals_[int(references->source())];
        one.source = references->source();
        const bool aligned = references->find(tail_, end, size, match);
        extend(one, references->index(), aligned, match, most);
    }
    const auto indexed = [&](Source source, const TokenIndex& index) {
        Proposal& one = proposals_[int(source)];
        one.source = source;
        index.find(tail_, end, size, match);
        extend(one, index, false, match, most);
    };
    if (use_history_) indexed(Source::history, state_->history);
    if (own_) indexed(Source::lookup, *own_);
    const Proposal* best = nullptr;
    for (const Proposal& proposal : proposals_) {
        if (proposal.is_open && proposal.reach[0] >= kLeastFirst &&
            (!best || proposal.expected > best->expected)) {
            best = &proposal;
        }
    }
    return best;
}

std::int64_t Drafter::bytes() const {
    std::int64_t sum = own_ ? own_->bytes() : 0;
    for (const auto& references : references_) sum += references->index().bytes();
    return sum;
}

}  // namespace apcbatch
