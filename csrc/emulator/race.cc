#include "csrc/emulator/race.h"

#include <utility>

namespace jax_fa4::emulator {
namespace {

// How many accesses of one kind that nothing orders are remembered of a cell. Of more of them, as
// of a counter that all CTAs of a large grid add to, the oldest are forgotten: whoever is ordered
// behind all others, and not behind those, is not noticed.
constexpr size_t kMaxConcurrent = 16;

bool IsBefore(const Access& earlier, const VectorClock& clock) {
  return earlier.time == 0 || clock.seen(earlier.slot) >= earlier.time;
}

}  // namespace

// ---- Clocks

GridClock::Leaf GridClock::JoinLeaves(const Leaf& a, const Leaf& b) {
  std::vector<AgentTimes> times;
  times.reserve(std::max(a->size(), b->size()));
  auto x = a->begin(), y = b->begin();
  while (x != a->end() || y != b->end()) {
    if (y == b->end() || (x != a->end() && x->slot < y->slot)) {
      times.push_back(*x++);
    } else if (x == a->end() || y->slot < x->slot) {
      times.push_back(*y++);
    } else {
      times.push_back({x->slot,
                       std::max(x->seen, y->seen),
                       std::max(x->fenced, y->fenced),
                       std::max(x->published, y->published)});
      ++x, ++y;
    }
  }
  // What there is already is shared.
  if (times == *a) return a;
  if (times == *b) return b;
  return std::make_shared<const std::vector<AgentTimes>>(std::move(times));
}

GridClock::Pointer GridClock::Join(const Pointer& a, const Pointer& b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  auto joined = std::make_shared<GridClock>(*a);
  joined->blocks_.resize(std::max(a->blocks_.size(), b->blocks_.size()));
  bool is_a = joined->blocks_.size() == a->blocks_.size();
  bool is_b = joined->blocks_.size() == b->blocks_.size();
  for (size_t i = 0; i < joined->blocks_.size(); ++i) {
    const auto x = i < a->blocks_.size() ? a->blocks_[i] : nullptr;
    const auto y = i < b->blocks_.size() ? b->blocks_[i] : nullptr;
    if (x == y || y == nullptr) {
      is_b &= x == y;
      continue;
    }
    if (x == nullptr) {
      joined->blocks_[i] = y;
      is_a = false;
      continue;
    }
    auto block = std::make_shared<Block>(*x);
    bool is_x = true, is_y = true;
    for (size_t j = 0; j < kBlock; ++j) {
      const Leaf &p = (*x)[j], &q = (*y)[j];
      if (p != q && q != nullptr) (*block)[j] = p == nullptr ? q : JoinLeaves(p, q);
      is_x &= (*block)[j] == p;
      is_y &= (*block)[j] == q;
    }
    is_a &= is_x;
    is_b &= is_y;
    joined->blocks_[i] = is_x ? x : is_y ? y : std::move(block);
  }
  return is_a ? a : is_b ? b : joined;
}

GridClock::Pointer GridClock::With(const Pointer& base,
                                   uint32_t cluster,
                                   std::vector<AgentTimes> times) {
  auto leaf = std::make_shared<const std::vector<AgentTimes>>(std::move(times));
  auto clock = base == nullptr ? std::make_shared<GridClock>() : std::make_shared<GridClock>(*base);
  if (clock->blocks_.size() <= cluster / kBlock) clock->blocks_.resize(cluster / kBlock + 1);
  auto& place = clock->blocks_[cluster / kBlock];
  auto block = place == nullptr ? std::make_shared<Block>() : std::make_shared<Block>(*place);
  Leaf& known = (*block)[cluster % kBlock];
  known = known == nullptr ? std::move(leaf) : JoinLeaves(known, leaf);
  place = std::move(block);
  return clock;
}

const std::vector<AgentTimes>* GridClock::Find(uint32_t cluster) const {
  if (cluster / kBlock >= blocks_.size() || blocks_[cluster / kBlock] == nullptr) return nullptr;
  return (*blocks_[cluster / kBlock])[cluster % kBlock].get();
}

uint32_t GridClock::seen(uint32_t cluster, Slot slot) const {
  const std::vector<AgentTimes>* times = Find(cluster);
  if (times == nullptr) return 0;
  const auto at =
      std::lower_bound(times->begin(), times->end(), slot, [](const AgentTimes& one, Slot s) {
        return one.slot < s;
      });
  return at != times->end() && at->slot == slot ? at->seen : 0;
}

Message VectorClock::Release(uint32_t cluster) const {
  std::vector<AgentTimes> times;
  for (size_t i = 0; i < slots(); ++i) {
    const auto slot = static_cast<Slot>(i);
    if (seen(slot) != 0) times.push_back({slot, seen(slot), fenced(slot), published(slot)});
  }
  const Message known = abroad_ == nullptr ? Message() : abroad_->known;
  return {GridClock::With(known.times, cluster, std::move(times)), known.visible};
}

void VectorClock::Acquire(uint32_t cluster, const Message& message) {
  if (message.empty()) return;
  JoinAbroad(std::make_shared<Abroad>(Abroad{.known = message, .released = {}, .observed = {}}));
  const std::vector<AgentTimes>* own =
      message.times == nullptr ? nullptr : message.times->Find(cluster);
  if (own == nullptr) return;
  for (const AgentTimes& one : *own) {
    SetSeen(one.slot, std::max(seen(one.slot), one.seen));
    SetFenced(one.slot, std::max(fenced(one.slot), one.fenced));
    SetPublished(one.slot, std::max(published(one.slot), one.published));
  }
}

void VectorClock::Fence(uint32_t cluster, Scope scope) {
  const int levels = static_cast<int>(scope);
  if (abroad_ != nullptr) {
    const Messages observed = abroad_->observed;
    for (int level = 0; level < levels; ++level) Acquire(cluster, observed[level]);
  }
  auto abroad =
      abroad_ == nullptr ? std::make_shared<Abroad>() : std::make_shared<Abroad>(*abroad_);
  const Message all = Release(cluster);
  for (int level = 0; level < levels; ++level) {
    abroad->observed[level] = Message();
    abroad->released[level] = all;
  }
  abroad_ = std::move(abroad);
}

void VectorClock::Observe(const Messages& messages) {
  JoinAbroad(std::make_shared<Abroad>(Abroad{.known = {}, .released = {}, .observed = messages}));
}

void VectorClock::MakeVisible(uint32_t cluster) {
  Message visible{nullptr, Release(cluster).times};
  JoinAbroad(std::make_shared<Abroad>(Abroad{std::move(visible), {}, {}}));
}

void VectorClock::JoinAbroad(const std::shared_ptr<const Abroad>& other) {
  if (abroad_ == nullptr) {
    abroad_ = other;
    return;
  }
  // Mostly all levels hold the same, and remain so.
  const auto join = [](Messages& to, const Messages& from) {
    const Messages before = to;
    for (int level = 0; level < kLevels; ++level) {
      const bool again =
          level > 0 && before[level] == before[level - 1] && from[level] == from[level - 1];
      if (again) {
        to[level] = to[level - 1];
      } else {
        to[level].Join(from[level]);
      }
    }
  };
  auto joined = std::make_shared<Abroad>(*abroad_);
  joined->known.Join(other->known);
  join(joined->released, other->released);
  join(joined->observed, other->observed);
  if (*joined == *other) {
    abroad_ = other;
  } else if (*joined != *abroad_) {
    abroad_ = std::move(joined);
  }
}

// ---- Memory of a cluster

// Whether an access may rely on earlier ones; and if not, why.
class Shadow::Order {
 public:
  Order(const Access& access, const VectorClock& clock, const Own& own, size_t slots_of_cta)
      : clock_(clock), access_(access), own_(own), slots_of_cta_(slots_of_cta) {}

  bool Holds(const Access& earlier) const {
    if (earlier.time == 0) return true;
    if (clock_.seen(earlier.slot) < earlier.time) return Covers(earlier);
    return !NeedsFences(earlier) || (clock_.published(earlier.slot) >= earlier.time &&
                                     clock_.relied(earlier.slot) >= earlier.time);
  }

  // Of an access for which Holds() is false.
  Fault Why(const Access& earlier) const {
    if (clock_.seen(earlier.slot) < earlier.time) {
      const bool both = earlier.scope != Scope::kNone && access_.scope != Scope::kNone;
      return both ? Fault::kNarrow : Fault::kUnordered;
    }
    return clock_.published(earlier.slot) < earlier.time ? Fault::kUnpublished : Fault::kUnrelied;
  }

 private:
  bool NeedsFences(const Access& earlier) const {
    return own_.first != own_.last && earlier.slot != access_.slot &&
           (earlier.slot < own_.first || earlier.slot >= own_.last);
  }
  // Whether both are strong, and the scope of each contains the other's thread.
  bool Covers(const Access& earlier) const {
    const bool same_cta = earlier.slot / slots_of_cta_ == access_.slot / slots_of_cta_;
    return std::min(earlier.scope, access_.scope) >= (same_cta ? Scope::kCta : Scope::kCluster);
  }

  const VectorClock& clock_;
  const Access& access_;
  const Own own_;
  const size_t slots_of_cta_;
};

std::vector<Access>& Shadow::More(History& history) {
  if (history.more == 0) {
    if (free_.empty()) {
      more_.emplace_back();
      history.more = static_cast<int32_t>(more_.size());
    } else {
      history.more = free_.back();
      free_.pop_back();
    }
  }
  return more_[history.more - 1];
}

void Shadow::Forget(History& history) {
  if (history.more == 0) return;
  more_[history.more - 1].clear();
  free_.push_back(history.more);
  history.more = 0;
}

uint32_t Shadow::NewHistory() {
  if (free_histories_.empty()) {
    histories_.emplace_back();
    return static_cast<uint32_t>(histories_.size() - 1);
  }
  const uint32_t history = free_histories_.back();
  free_histories_.pop_back();
  histories_[history] = History();
  return history;
}

bool Shadow::Note(
    const Step& step, size_t first, size_t count, const VectorClock& clock, Conflict* conflict) {
  if (step != step_) {
    step_ = step;
    before_ = after_ = kNone;
  }
  bool found = false;
  uint32_t* const cells = cells_.data();
  for (size_t at = first, end = first + count; at < end;) {
    const uint32_t before = cells[at];
    size_t last = at + 1;
    while (last < end && cells[last] == before) ++last;
    const auto length = static_cast<uint32_t>(last - at);
    if (before != before_) {
      conflicts_ = Conflicts(histories_[before], clock, &conflict_);
      before_ = before;
      if (step.replaces() && after_ != kNone) {
        // As it is.
      } else if (before != 0 && histories_[before].cells == length) {
        // No other cells have it.
        Follow(before, clock);
        after_ = before;
      } else {
        after_ = NewHistory();
        if (!step.replaces()) {
          History& after = histories_[after_];
          after.write = histories_[before].write;
          after.read = histories_[before].read;
          if (histories_[before].more != 0) {
            std::vector<Access>& more = More(after);
            more = more_[histories_[before].more - 1];
          }
        }
        Follow(after_, clock);
      }
    }
    if (conflicts_ && !found) {
      found = true;
      *conflict = conflict_;
      conflict->cell = at;
    }
    if (before == after_) {
      // A history that has changed in place is another one for the next access.
      before_ = kNone;
    } else {
      std::fill(cells + at, cells + last, after_);
      histories_[after_].cells += length;
      if (before != 0) {
        histories_[before].cells -= length;
        if (histories_[before].cells == 0) {
          Forget(histories_[before]);
          free_histories_.push_back(before);
          before_ = kNone;
        }
      }
    }
    at = last;
  }
  return found;
}

// Whether this step conflicts with a history, and with what of it.
bool Shadow::Conflicts(const History& history, const VectorClock& clock, Conflict* conflict) const {
  const Access& access = step_.access;
  const Order order(access, clock, step_.own, slots_of_cta_);
  const auto check = [&](const Access& earlier, bool is_write) {
    if (!order.Holds(earlier)) {
      *conflict = {earlier, is_write, order.Why(earlier), 0};
      return true;
    }
    if (!step_.write && earlier.time != 0 && access.async && !earlier.async &&
        clock.fenced(earlier.slot) < earlier.time) {
      *conflict = {earlier, true, Fault::kUnfenced, 0};
      return true;
    }
    return false;
  };
  if (check(history.write, true)) return true;
  if (step_.write && check(history.read, false)) return true;
  if (history.more == 0) return false;
  for (const Access& one : more_[history.more - 1]) {
    if ((step_.write || one.write) && check(one, one.write)) return true;
  }
  return false;
}

// What this step makes of a history.
void Shadow::Follow(uint32_t history, const VectorClock& clock) {
  History& one = histories_[history];
  const Access& access = step_.access;
  if (access.scope != Scope::kNone) {
    Strong(one, clock);
  } else if (step_.write) {
    Forget(one);
    one.read = Access();
    one.write = access;
  } else {
    if (one.read.time != 0 && !IsBefore(one.read, clock)) {
      std::vector<Access>& more = More(one);
      std::erase_if(more, [&](const Access& read) { return !read.write && IsBefore(read, clock); });
      more.push_back(one.read);
    }
    one.read = access;
  }
}

void Shadow::Strong(History& history, const VectorClock& clock) {
  const Access& access = step_.access;
  std::vector<Access>& more = More(history);
  std::erase_if(more, [&](const Access& one) {
    return one.scope >= access.scope && (access.write || !one.write) && IsBefore(one, clock);
  });
  if (more.size() >= 2 * kMaxConcurrent) {
    const auto oldest = std::find_if(
        more.begin(), more.end(), [&](const Access& one) { return one.write == access.write; });
    if (oldest != more.end()) more.erase(oldest);
  }
  more.push_back(access);
}

// ---- Global memory

// Whether both are strong, and the scope of each contains the other's thread.
bool GlobalShadow::Covers(const GlobalAccess& a, const GlobalAccess& b) const {
  const Scope needed = a.cluster != b.cluster                             ? Scope::kGpu
                       : a.slot / slots_of_cta_ != b.slot / slots_of_cta_ ? Scope::kCluster
                                                                          : Scope::kCta;
  return static_cast<Scope>(std::min<uint16_t>(a.scope, b.scope)) >= needed;
}

bool GlobalShadow::Note(uint64_t first,
                        uint64_t last,
                        GlobalAccess access,
                        const VectorClock& clock,
                        Conflict* conflict) {
  bool found = false;
  for (uint64_t at = first; at < last;) {
    const uint64_t cell = at / 4;
    uint64_t end = std::min(last, 4 * cell + 4);
    const uint32_t before = cells_[cell];
    access.bytes = ((1u << (end - 4 * cell)) - 1) & ~((1u << (at - 4 * cell)) - 1);
    if (access.bytes == 15) {
      while (end + 4 <= last && cells_[end / 4] == before) end += 4;
    }
    GlobalAccess earlier;
    Fault fault = Fault::kUnordered;
    const uint32_t after = Follow(before, access, clock, &earlier, &fault);
    if (earlier.time != 0 && !found) {
      found = true;
      const uint32_t both = earlier.bytes & access.bytes;
      *conflict = {earlier,
                   fault,
                   4 * cell + static_cast<uint64_t>(std::countr_zero(both)),
                   (end - 1) / 4 * 4 + static_cast<uint64_t>(std::bit_width(both))};
    }
    if (after != before) {
      std::fill(cells_.data() + cell, cells_.data() + (end + 3) / 4, after);
      const uint64_t count = (end + 3) / 4 - cell;
      histories_[after].cells += count;
      Release(before, count);
    }
    at = end;
  }
  return found;
}

// Cells cease to have a history.
void GlobalShadow::Release(uint32_t history, uint64_t cells) {
  if (history == 0) return;
  histories_[history].cells -= cells;
  if (histories_[history].cells != 0) return;
  histories_[history].others = nullptr;
  free_.push_back(history);
  if (history == last_before_ || history == last_after_) last_access_ = GlobalAccess();
}

// The history that an access makes of another, and in *earlier an access that it conflicts with.
uint32_t GlobalShadow::Follow(uint32_t before,
                              const GlobalAccess& access,
                              const VectorClock& clock,
                              GlobalAccess* earlier,
                              Fault* fault) {
  if (before == last_before_ && access == last_access_) return last_after_;
  // Whoever polls a flag makes the same access over and over.
  if (histories_[before].last == access) return before;
  kept_.clear();
  size_t same_kind = 0;
  const auto meet = [&](const GlobalAccess& one) {
    const bool is_before =
        (one.cluster == access.cluster ? clock.seen(one.slot)
                                       : clock.SeenAbroad(one.cluster, one.slot)) >= one.time;
    const bool both_strong = one.scope != 0 && access.scope != 0;
    if (earlier->time == 0 && (one.write || access.write) && (one.bytes & access.bytes) != 0) {
      if (!is_before && !Covers(one, access)) {
        *earlier = one;
        *fault = both_strong ? Fault::kNarrow : Fault::kUnordered;
      } else if (is_before && one.write && !one.async && access.async && access.read &&
                 !both_strong && !clock.IsVisible(one.cluster, one.slot, one.time)) {
        *earlier = one;
        *fault = Fault::kUnfenced;
      }
    }
    // An access puts another out of mind if whatever conflicts with that conflicts with this too. A
    // weak write does so even with what it races with, of which one report is enough.
    const bool replaces = (one.bytes & ~access.bytes) == 0 && (access.write || !one.write) &&
                          access.scope <= one.scope &&
                          (is_before || (access.write && access.scope == 0));
    if (replaces) return;
    kept_.push_back(one);
    same_kind += one.write == access.write && one.scope == access.scope;
  };
  if (before != 0) {
    if (histories_[before].others != nullptr) {
      for (const GlobalAccess& one : *histories_[before].others) meet(one);
    }
    meet(histories_[before].last);
  }
  if (same_kind >= kMaxConcurrent) {
    kept_.erase(std::find_if(kept_.begin(), kept_.end(), [&](const GlobalAccess& one) {
      return one.write == access.write && one.scope == access.scope;
    }));
  }
  uint32_t after;
  if (free_.empty()) {
    after = static_cast<uint32_t>(histories_.size());
    histories_.emplace_back();
  } else {
    after = free_.back();
    free_.pop_back();
  }
  histories_[after].last = access;
  if (!kept_.empty()) {
    histories_[after].others = std::make_unique<std::vector<GlobalAccess>>(kept_);
  }
  last_before_ = before;
  last_after_ = after;
  last_access_ = access;
  return after;
}

// ---- Releases by way of memory

void Locations::Location::Add(uint32_t cluster,
                              uint32_t rank,
                              const Message& message,
                              uint32_t oldest) {
  if (message.empty()) return;
  for (Near& one : near) {
    if (one.cluster == cluster && one.rank == rank) return one.message.Join(message);
  }
  std::erase_if(near, [&](const Near& one) { return one.cluster < oldest; });
  near.push_back({cluster, rank, message});
}

void Locations::Write(uint64_t first,
                      uint64_t last,
                      uint32_t cluster,
                      uint32_t rank,
                      Scope scope,
                      const Messages& messages,
                      bool is_atomic,
                      uint32_t oldest) {
  bool empty = true;
  for (const Message& message : messages) empty &= message.empty();
  if (!is_atomic) Forget(first, last);
  if (empty) return;
  const Step step{cluster, rank, scope, messages};
  for (uint64_t at = first; at < last; ++at) {
    Pointer& place = locations_[at];
    if (last_after_ == nullptr || last_before_ != place || step != last_) {
      auto location =
          place == nullptr ? std::make_shared<Location>() : std::make_shared<Location>(*place);
      location->Add(cluster, rank, messages[0], oldest);
      if (scope >= Scope::kCluster) location->Add(cluster, kAnyRank, messages[1], oldest);
      if (scope >= Scope::kGpu) location->grid.Join(messages[2]);
      last_ = step;
      last_before_ = place;
      last_after_ = std::move(location);
    }
    place = last_after_;
  }
}

bool Locations::Read(uint64_t first,
                     uint64_t last,
                     uint32_t cluster,
                     uint32_t rank,
                     Scope scope,
                     Messages* messages) const {
  if (locations_.empty()) return false;
  const auto end = locations_.lower_bound(last);
  for (auto it = locations_.lower_bound(first); it != end; ++it) {
    for (const Near& one : it->second->near) {
      if (one.cluster != cluster) continue;
      if (one.rank == rank) (*messages)[0].Join(one.message);
      if (one.rank == kAnyRank && scope >= Scope::kCluster) (*messages)[1].Join(one.message);
    }
    if (scope >= Scope::kGpu) (*messages)[2].Join(it->second->grid);
  }
  return *messages != Messages();
}

}  // namespace jax_fa4::emulator
