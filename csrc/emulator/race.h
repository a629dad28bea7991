// Happens-before between the agents of a cluster: vector clocks, and the last accesses of every
// memory cell.
//
// An agent is whatever executes in an order of its own: lanes of a warp that run together, a tensor
// core's pipe, one asynchronous copy. Each has a slot in the vector clocks. An access is ordered
// behind another if the clock that the accessing agent has seen of the other's slot has reached the
// time of that access.
//
// Source: Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection" (2009).

#ifndef JAX_FA4_CSRC_EMULATOR_RACE_H_
#define JAX_FA4_CSRC_EMULATOR_RACE_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace jax_fa4::emulator {

using Slot = uint16_t;

// What an agent knows of all agents of its cluster, as times of each: up to which it is ordered
// behind it (seen); up to which its generic-proxy writes are visible to the asynchronous proxy
// (fenced); up to which a tcgen05.fence::before_thread_sync has published its accesses of tensor
// memory (published); and up to which a tcgen05.fence::after_thread_sync lets the holder rely on
// that (relied). The last stays with its holder.
class VectorClock {
 public:
  VectorClock() = default;
  explicit VectorClock(size_t slots) : times_(4 * slots, 0), slots_(slots) {}
  size_t slots() const { return slots_; }
  bool empty() const { return times_.empty(); }
  uint32_t seen(Slot slot) const { return times_[slot]; }
  uint32_t fenced(Slot slot) const { return times_[slots() + slot]; }
  uint32_t published(Slot slot) const { return times_[2 * slots() + slot]; }
  uint32_t relied(Slot slot) const { return times_[3 * slots() + slot]; }
  void SetSeen(Slot slot, uint32_t time) { times_[slot] = time; }
  void SetFenced(Slot slot, uint32_t time) { times_[slots() + slot] = time; }
  void SetPublished(Slot slot, uint32_t time) { times_[2 * slots() + slot] = time; }
  // What another agent has handed over.
  void Join(const VectorClock& other) { JoinFirst(other, 3); }
  // What lanes of one warp know together.
  void Merge(const VectorClock& other) { JoinFirst(other, 4); }
  // tcgen05.fence::after_thread_sync.
  void RelyOnPublished() {
    const size_t count = slots();
    for (size_t i = 0; i < count; ++i) {
      times_[3 * count + i] = std::max(times_[3 * count + i], times_[2 * count + i]);
    }
  }
  void Clear() { std::fill(times_.begin(), times_.end(), 0); }

 private:
  void JoinFirst(const VectorClock& other, size_t kinds) {
    if (other.times_.empty()) return;
    if (times_.empty()) *this = VectorClock(other.slots_);
    const size_t size = other.slots_ * kinds;
    uint32_t* const to = times_.data();
    const uint32_t* const from = other.times_.data();
    for (size_t i = 0; i < size; ++i) to[i] = std::max(to[i], from[i]);
  }
  std::vector<uint32_t> times_;
  size_t slots_ = 0;
};

// One access of a cell: by whom, when, and by which instruction (for the report).
struct Access {
  uint32_t time = 0;  // 0: none yet
  Slot slot = 0;
  uint8_t lane = 0;
  bool async = false;  // through the asynchronous proxy or a tensor core
  int32_t instruction = -1;
};

// The last write of a cell, and the reads since that are not ordered behind each other.
struct Cell {
  Access write;
  Access read;       // of several reads, the last; the others are in `more`
  int32_t more = 0;  // 1 + index of a list, 0 for none
};

// An array of zeros, whose pages take no memory until they are written.
template <typename T>
class Zeros {
 public:
  Zeros() = default;
  explicit Zeros(size_t count) : items_(static_cast<T*>(std::calloc(count + 1, sizeof(T)))) {
    if (items_ == nullptr) throw std::bad_alloc();
  }
  T* data() { return items_.get(); }
  T& operator[](size_t i) { return items_[i]; }

 private:
  struct Free {
    void operator()(T* items) const { std::free(items); }
  };
  std::unique_ptr<T[], Free> items_;
};

// The cells of one memory. A cell of zeros is one without accesses, so that the pages of what a
// kernel leaves alone are never touched: with all SMs resident these would be hundreds of
// megabytes.
class Shadow {
 public:
  Shadow() = default;
  explicit Shadow(size_t cells) : cells_(cells), size_(cells) {}

  struct Conflict {
    Access earlier;
    bool earlier_is_write = false;
    bool unfenced = false;     // ordered, but the write is not visible to the asynchronous proxy
    bool unpublished = false;  // ordered, but without tcgen05.fence::before_thread_sync
    bool unrelied = false;     // ordered, but without tcgen05.fence::after_thread_sync
    size_t cell = 0;
  };

  // Who needs no tcgen05.fence: the slots of the accessing agent's own warp, [first, last). An
  // empty range turns the check of these fences off.
  struct Own {
    Slot first = 0, last = 0;
  };

  // Notes a read (or write) of cells [first, first + count) by an agent that has seen `clock`.
  // Returns true where it is not ordered behind an earlier access, and says which in *conflict.
  bool Read(size_t first,
            size_t count,
            const Access& access,
            const VectorClock& clock,
            const Own& own,
            Conflict* conflict);
  bool Write(size_t first,
             size_t count,
             const Access& access,
             const VectorClock& clock,
             const Own& own,
             Conflict* conflict);
  size_t size() const { return size_; }

 private:
  Zeros<Cell> cells_;
  size_t size_ = 0;
  std::vector<std::vector<Access>> more_;
  std::vector<int32_t> free_;
};

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_RACE_H_
