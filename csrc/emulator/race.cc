#include "csrc/emulator/race.h"

namespace jax_fa4::emulator {
namespace {

bool IsBefore(const Access& earlier, const VectorClock& clock) {
  return earlier.time == 0 || clock.seen(earlier.slot) >= earlier.time;
}

}  // namespace

bool Shadow::Read(size_t first, size_t count, const Access& access, const VectorClock& clock, Conflict* conflict) {
  bool found = false;
  for (size_t i = first; i < first + count; ++i) {
    Cell& cell = cells_[i];
    const Access& write = cell.write;
    if (write.time != 0) {
      const bool ordered = clock.seen(write.slot) >= write.time;
      const bool unfenced = access.async && !write.async && clock.fenced(write.slot) < write.time;
      if ((!ordered || unfenced) && !found) {
        *conflict = {write, true, ordered, i};
        found = true;
      }
    }
    if (cell.read.time != 0 && !IsBefore(cell.read, clock)) {
      if (cell.more < 0) {
        if (free_.empty()) {
          cell.more = static_cast<int32_t>(more_.size());
          more_.emplace_back();
        } else {
          cell.more = free_.back();
          free_.pop_back();
        }
      }
      std::vector<Access>& more = more_[cell.more];
      std::erase_if(more, [&](const Access& read) { return IsBefore(read, clock); });
      more.push_back(cell.read);
    }
    cell.read = access;
  }
  return found;
}

bool Shadow::Write(size_t first, size_t count, const Access& access, const VectorClock& clock, Conflict* conflict) {
  bool found = false;
  const auto check = [&](const Access& earlier, bool is_write, size_t i) {
    if (found || IsBefore(earlier, clock)) return;
    *conflict = {earlier, is_write, false, i};
    found = true;
  };
  for (size_t i = first; i < first + count; ++i) {
    Cell& cell = cells_[i];
    check(cell.write, true, i);
    check(cell.read, false, i);
    if (cell.more >= 0) {
      for (const Access& read : more_[cell.more]) check(read, false, i);
      more_[cell.more].clear();
      free_.push_back(cell.more);
      cell.more = -1;
    }
    cell.read = Access();
    cell.write = access;
  }
  return found;
}

}  // namespace jax_fa4::emulator
