#include "csrc/emulator/race.h"

namespace jax_fa4::emulator {
namespace {

bool IsBefore(const Access& earlier, const VectorClock& clock) {
  return earlier.time == 0 || clock.seen(earlier.slot) >= earlier.time;
}

// Whether `access` may rely on `earlier`; if not, why.
bool IsOrdered(const Access& earlier, bool is_write, const Access& access, const VectorClock& clock,
               const Shadow::Own& own, Shadow::Conflict* why) {
  if (earlier.time == 0) return true;
  why->earlier = earlier;
  why->earlier_is_write = is_write;
  why->unfenced = why->unpublished = why->unrelied = false;
  if (clock.seen(earlier.slot) < earlier.time) return false;
  if (own.first == own.last || earlier.slot == access.slot) return true;
  if (earlier.slot >= own.first && earlier.slot < own.last) return true;
  why->unpublished = clock.published(earlier.slot) < earlier.time;
  why->unrelied = !why->unpublished && clock.relied(earlier.slot) < earlier.time;
  return !why->unpublished && !why->unrelied;
}

}  // namespace

bool Shadow::Read(size_t first, size_t count, const Access& access, const VectorClock& clock, const Own& own,
                  Conflict* conflict) {
  bool found = false;
  Conflict why;
  for (size_t i = first; i < first + count; ++i) {
    Cell& cell = cells_[i];
    if (!found && !IsOrdered(cell.write, true, access, clock, own, &why)) {
      found = true;
      *conflict = why;
      conflict->cell = i;
    }
    if (!found && cell.write.time != 0 && access.async && !cell.write.async &&
        clock.fenced(cell.write.slot) < cell.write.time) {
      found = true;
      *conflict = {.earlier = cell.write, .earlier_is_write = true, .unfenced = true, .cell = i};
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

bool Shadow::Write(size_t first, size_t count, const Access& access, const VectorClock& clock, const Own& own,
                   Conflict* conflict) {
  bool found = false;
  Conflict why;
  const auto check = [&](const Access& earlier, bool is_write, size_t i) {
    if (found || IsOrdered(earlier, is_write, access, clock, own, &why)) return;
    found = true;
    *conflict = why;
    conflict->cell = i;
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
