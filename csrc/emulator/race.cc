#include "csrc/emulator/race.h"

namespace jax_fa4::emulator {
namespace {

bool IsBefore(const Access& earlier, const VectorClock& clock) {
  return earlier.time == 0 || clock.seen(earlier.slot) >= earlier.time;
}

// Whether accesses may rely on earlier ones; and if not, why. Neighbouring cells mostly have the
// same history, so the last access found in order is remembered.
class Order {
 public:
  Order(const Access& access, const VectorClock& clock, const Shadow::Own& own)
      : clock_(clock), slot_(access.slot), own_(own) {}

  bool Holds(const Access& earlier) {
    if (earlier.time == 0 || (earlier.time == time_ && earlier.slot == last_slot_)) return true;
    if (clock_.seen(earlier.slot) < earlier.time) return false;
    if (NeedsFences(earlier) && (clock_.published(earlier.slot) < earlier.time ||
                                 clock_.relied(earlier.slot) < earlier.time)) {
      return false;
    }
    time_ = earlier.time;
    last_slot_ = earlier.slot;
    return true;
  }

  // Of an access for which Holds() is false.
  Shadow::Conflict Why(const Access& earlier, bool is_write, size_t cell) const {
    Shadow::Conflict why{.earlier = earlier, .earlier_is_write = is_write, .cell = cell};
    if (clock_.seen(earlier.slot) >= earlier.time) {
      why.unpublished = clock_.published(earlier.slot) < earlier.time;
      why.unrelied = !why.unpublished;
    }
    return why;
  }

 private:
  bool NeedsFences(const Access& earlier) const {
    return own_.first != own_.last && earlier.slot != slot_ &&
           (earlier.slot < own_.first || earlier.slot >= own_.last);
  }

  const VectorClock& clock_;
  const Slot slot_;
  const Shadow::Own own_;
  uint32_t time_ = 0;
  Slot last_slot_ = 0;
};

}  // namespace

bool Shadow::Read(size_t first,
                  size_t count,
                  const Access& access,
                  const VectorClock& clock,
                  const Own& own,
                  Conflict* conflict) {
  bool found = false;
  Order order(access, clock, own);
  for (size_t i = first; i < first + count; ++i) {
    Cell& cell = cells_[i];
    if (!found && !order.Holds(cell.write)) {
      found = true;
      *conflict = order.Why(cell.write, true, i);
    }
    if (!found && cell.write.time != 0 && access.async && !cell.write.async &&
        clock.fenced(cell.write.slot) < cell.write.time) {
      found = true;
      *conflict = {.earlier = cell.write, .earlier_is_write = true, .unfenced = true, .cell = i};
    }
    if (cell.read.time != 0 && !IsBefore(cell.read, clock)) {
      if (cell.more == 0) {
        if (free_.empty()) {
          more_.emplace_back();
          cell.more = static_cast<int32_t>(more_.size());
        } else {
          cell.more = free_.back();
          free_.pop_back();
        }
      }
      std::vector<Access>& more = more_[cell.more - 1];
      std::erase_if(more, [&](const Access& read) { return IsBefore(read, clock); });
      more.push_back(cell.read);
    }
    cell.read = access;
  }
  return found;
}

bool Shadow::Write(size_t first,
                   size_t count,
                   const Access& access,
                   const VectorClock& clock,
                   const Own& own,
                   Conflict* conflict) {
  bool found = false;
  Order order(access, clock, own);
  const auto check = [&](const Access& earlier, bool is_write, size_t i) {
    if (found || order.Holds(earlier)) return;
    found = true;
    *conflict = order.Why(earlier, is_write, i);
  };
  for (size_t i = first; i < first + count; ++i) {
    Cell& cell = cells_[i];
    check(cell.write, true, i);
    check(cell.read, false, i);
    if (cell.more != 0) {
      for (const Access& read : more_[cell.more - 1]) check(read, false, i);
      more_[cell.more - 1].clear();
      free_.push_back(cell.more);
      cell.more = 0;
    }
    cell.read = Access();
    cell.write = access;
  }
  return found;
}

}  // namespace jax_fa4::emulator
