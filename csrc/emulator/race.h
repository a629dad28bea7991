// Happens-before between the agents of a grid: vector clocks, and the last accesses of every memory
// cell.
//
// An agent is whatever executes in an order of its own: lanes of a warp that run together, a tensor
// core's pipe, one asynchronous copy. Each has a slot in the vector clocks of its cluster. An
// access is ordered behind another if the clock that the accessing agent has seen of the other's
// slot has reached the time of that access. What an agent knows of other clusters it has by way of
// global memory; mostly that is nothing.
//
// Source: Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection" (2009).

#ifndef JAX_FA4_CSRC_EMULATOR_RACE_H_
#define JAX_FA4_CSRC_EMULATOR_RACE_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <vector>

namespace jax_fa4::emulator {

using Slot = uint16_t;

// Whose accesses of the same location a strong access (.relaxed, .volatile, an atomic) may meet
// without a race; kNone of a weak access. Beyond the GPU there is nobody here, so that .sys is
// kGpu.
enum class Scope : uint8_t { kNone, kCta, kCluster, kGpu };

// Which of the scopes contain both of two agents, as an index: their CTA, their cluster, the GPU.
inline constexpr int kLevels = 3;

// What is known of one agent, see VectorClock.
struct AgentTimes {
  Slot slot = 0;
  uint32_t seen = 0, fenced = 0, published = 0;
  bool operator==(const AgentTimes&) const = default;
};

// Times of the agents of any clusters of the grid. It never changes and is shared, so that handing
// it on costs nothing where both sides have the same, and grids of thousands of clusters that
// follow each other share what they know of those that have ended.
class GridClock {
 public:
  using Pointer = std::shared_ptr<const GridClock>;  // null: nothing is known
  static Pointer Join(const Pointer& a, const Pointer& b);
  // `base`, and of one cluster `times`, which are in the order of their slots.
  static Pointer With(const Pointer& base, uint32_t cluster, std::vector<AgentTimes> times);
  const std::vector<AgentTimes>* Find(uint32_t cluster) const;  // null: nothing is known
  uint32_t seen(uint32_t cluster, Slot slot) const;

 private:
  static constexpr size_t kBlock = 32;
  using Leaf = std::shared_ptr<const std::vector<AgentTimes>>;
  using Block = std::array<Leaf, kBlock>;
  std::vector<std::shared_ptr<const Block>> blocks_;  // by cluster / kBlock
  static Leaf JoinLeaves(const Leaf& a, const Leaf& b);
};

// What a release hands over by way of a memory location: what is known of the agents of the grid,
// and up to when their generic-proxy writes of global memory are visible to the asynchronous proxy.
struct Message {
  GridClock::Pointer times, visible;
  bool empty() const { return times == nullptr && visible == nullptr; }
  bool operator==(const Message&) const = default;
  void Join(const Message& other) {
    times = GridClock::Join(times, other.times);
    visible = GridClock::Join(visible, other.visible);
  }
};
using Messages = std::array<Message, kLevels>;

// What an agent knows by way of memory.
struct Abroad {
  // Times of other clusters' agents; and also of the own cluster's what is visible to the
  // asynchronous proxy.
  Message known;
  // By levels: what the last fences whose scope reaches so far let strong writes release, and what
  // strong reads have observed, which the next such fence takes up. Barriers hand both on: a fence
  // of every thread, a barrier and one thread's signal are as good as a barrier, a fence and a
  // signal of one thread.
  Messages released;
  Messages observed;
  bool operator==(const Abroad&) const = default;
};

// What an agent knows of all agents of its cluster, as times of each: up to which it is ordered
// behind it (seen); up to which its generic-proxy writes are visible to the asynchronous proxy
// (fenced); up to which a tcgen05.fence::before_thread_sync has published its accesses of tensor
// memory (published); and up to which a tcgen05.fence::after_thread_sync lets the holder rely on
// that (relied). The last stays with its holder.
class VectorClock {
 public:
  VectorClock() = default;
  explicit VectorClock(size_t slots) : times_(4 * slots, 0), slots_(slots) {}
  // Clocks of the same version have the same times.
  uint64_t version() const {
    static std::atomic<uint64_t> last = 0;
    if (version_ == 0) version_ = ++last;
    return version_;
  }
  size_t slots() const { return slots_; }
  bool empty() const { return times_.empty(); }
  uint32_t seen(Slot slot) const { return times_[slot]; }
  uint32_t fenced(Slot slot) const { return times_[slots() + slot]; }
  uint32_t published(Slot slot) const { return times_[2 * slots() + slot]; }
  uint32_t relied(Slot slot) const { return times_[3 * slots() + slot]; }
  void SetSeen(Slot slot, uint32_t time) { Set(slot, time); }
  void SetFenced(Slot slot, uint32_t time) { Set(slots() + slot, time); }
  void SetPublished(Slot slot, uint32_t time) { Set(2 * slots() + slot, time); }
  // What another agent has handed over.
  void Join(const VectorClock& other) { JoinFirst(other, 3); }
  // What lanes of one warp know together.
  void Merge(const VectorClock& other) { JoinFirst(other, 4); }
  // Everything that is known, by an agent of `cluster`.
  Message Release(uint32_t cluster) const;
  void Acquire(uint32_t cluster, const Message& message);
  // fence.acq_rel and fence.sc, and what strong accesses before and behind them do.
  void Fence(uint32_t cluster, Scope scope);
  void Observe(const Messages& messages);
  Messages released() const { return abroad_ == nullptr ? Messages() : abroad_->released; }
  // Up to which an agent of `cluster` has seen a slot of another cluster.
  uint32_t SeenAbroad(uint32_t cluster, Slot slot) const {
    return SeenIn(abroad_ == nullptr ? nullptr : abroad_->known.times.get(), cluster, slot);
  }
  // fence.proxy.async of global memory: all writes seen are visible to the asynchronous proxy.
  void MakeVisible(uint32_t cluster);
  bool IsVisible(uint32_t cluster, Slot slot, uint32_t time) const {
    return SeenIn(abroad_ == nullptr ? nullptr : abroad_->known.visible.get(), cluster, slot) >=
           time;
  }
  // tcgen05.fence::after_thread_sync.
  void RelyOnPublished() {
    version_ = 0;
    const size_t count = slots();
    for (size_t i = 0; i < count; ++i) {
      times_[3 * count + i] = std::max(times_[3 * count + i], times_[2 * count + i]);
    }
  }
  void Clear() {
    version_ = 0;
    std::fill(times_.begin(), times_.end(), 0);
    abroad_ = nullptr;
  }

 private:
  void Set(size_t at, uint32_t time) {
    version_ = 0;
    times_[at] = time;
  }
  void JoinFirst(const VectorClock& other, size_t kinds) {
    if (other.times_.empty()) return;
    if (times_.empty()) *this = VectorClock(other.slots_);
    version_ = 0;
    const size_t size = other.slots_ * kinds;
    uint32_t* const to = times_.data();
    const uint32_t* const from = other.times_.data();
    for (size_t i = 0; i < size; ++i) to[i] = std::max(to[i], from[i]);
    if (other.abroad_ != nullptr && other.abroad_ != abroad_) JoinAbroad(other.abroad_);
  }
  void JoinAbroad(const std::shared_ptr<const Abroad>& other);
  static uint32_t SeenIn(const GridClock* clock, uint32_t cluster, Slot slot) {
    return clock == nullptr ? 0 : clock->seen(cluster, slot);
  }
  std::vector<uint32_t> times_;
  size_t slots_ = 0;
  mutable uint64_t version_ = 0;          // 0: none since the times last changed
  std::shared_ptr<const Abroad> abroad_;  // null: nothing; shared with whom it was handed to
};

// One access of a cell: by whom, when, and by which instruction (for the report).
struct Access {
  Access() = default;
  Access(uint32_t when,
         Slot whose,
         uint8_t of_lane,
         bool is_async,
         int32_t by,
         Scope strong = Scope::kNone,
         bool writes = false)
      : time(when),
        slot(whose),
        lane(of_lane),
        async(is_async),
        scope(strong),
        write(writes),
        instruction(by) {}

  uint32_t time = 0;  // 0: none yet
  Slot slot = 0;
  uint8_t lane = 0;
  bool async : 1 = false;  // through the asynchronous proxy or a tensor core
  Scope scope : 2 = Scope::kNone;
  bool write : 1 = false;  // of strong ones
  int32_t instruction = -1;
  bool operator==(const Access&) const = default;
};
static_assert(sizeof(Access) == 12);

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

// Two accesses of which at least one writes, and nothing makes that right.
enum class Fault : uint8_t {
  kUnordered,
  kNarrow,       // both are strong, but the scope of one does not contain the other's thread
  kUnfenced,     // ordered, but the write is not visible to the asynchronous proxy
  kUnpublished,  // ordered, but without tcgen05.fence::before_thread_sync
  kUnrelied,     // ordered, but without tcgen05.fence::after_thread_sync
};

// The cells of one memory of a cluster. Most of it is accessed in large pieces, by copies and
// tensor cores, so that many cells have the same history: a cell holds the number of its history,
// and an access is checked once for each history that it meets. A cell of zeros is one without
// accesses, so that the pages of what a kernel leaves alone are never touched.
class Shadow {
 public:
  // About what a cell takes: its number, and its part of a history.
  static constexpr size_t kCellBytes = 28;

  Shadow() = default;
  explicit Shadow(size_t cells, size_t slots_of_cta = SIZE_MAX)
      : cells_(cells), histories_(1), size_(cells), slots_of_cta_(slots_of_cta) {}

  struct Conflict {
    Access earlier;
    bool earlier_is_write = false;
    Fault fault = Fault::kUnordered;
    size_t cell = 0;
  };

  // Who needs no tcgen05.fence: the slots of the accessing agent's own warp, [first, last). An
  // empty range turns the check of these fences off.
  struct Own {
    Slot first = 0, last = 0;
    bool operator==(const Own&) const = default;
  };

  // Notes a read (or write) of cells [first, first + count) by an agent that has seen `clock`.
  // Returns true where it is not ordered behind an earlier access, and says which in *conflict.
  bool Read(size_t first,
            size_t count,
            const Access& access,
            const VectorClock& clock,
            const Own& own,
            Conflict* conflict) {
    return Note({access, own, clock.version(), false}, first, count, clock, conflict);
  }
  bool Write(size_t first,
             size_t count,
             const Access& access,
             const VectorClock& clock,
             const Own& own,
             Conflict* conflict) {
    return Note({access, own, clock.version(), true}, first, count, clock, conflict);
  }
  size_t size() const { return size_; }

 private:
  // The last weak write of cells, and the accesses since that are not ordered behind each other.
  struct History {
    Access write;
    Access read;         // of several weak reads, the last; all other accesses are in `more`
    int32_t more = 0;    // 1 + index of a list, 0 for none
    uint32_t cells = 0;  // that have it
  };
  // What decides, of an access, what it makes of a history.
  struct Step {
    Access access;
    Own own;
    uint64_t version = 0;  // of the clock
    bool write = false;
    bool operator==(const Step&) const = default;
    // After which nothing is left of a history.
    bool replaces() const { return write && access.scope == Scope::kNone; }
  };
  class Order;
  static constexpr uint32_t kNone = UINT32_MAX;

  Zeros<uint32_t> cells_;  // index of the history; 0 is that without accesses
  std::vector<History> histories_;
  std::vector<uint32_t> free_histories_;
  size_t size_ = 0;
  size_t slots_of_cta_ = SIZE_MAX;
  std::vector<std::vector<Access>> more_;
  std::vector<int32_t> free_;
  // The last step, the last history that it met and has not changed in place, whether it conflicts
  // with that and how, and what it made of that, or, if it replaces, of any.
  Step step_;
  uint32_t before_ = kNone, after_ = kNone;
  bool conflicts_ = false;
  Conflict conflict_;

  bool Note(
      const Step& step, size_t first, size_t count, const VectorClock& clock, Conflict* conflict);
  bool Conflicts(const History& history, const VectorClock& clock, Conflict* conflict) const;
  uint32_t NewHistory();
  void Follow(uint32_t history, const VectorClock& clock);
  std::vector<Access>& More(History& history);
  void Forget(History& history);
  // Notes a strong access. It puts none of the weak ones out of mind: another strong one, which it
  // does not race with, may yet race with those.
  void Strong(History& history, const VectorClock& clock);
};

// An access of global memory. The cluster's number and the slot say whose.
struct GlobalAccess {
  uint32_t time = 0;
  uint32_t cluster = 0;
  Slot slot = 0;
  uint16_t lane : 5 = 0;
  uint16_t warp : 5 = 0;
  uint16_t async : 1 = 0;
  uint16_t read : 1 = 0;
  uint16_t write : 1 = 0;  // an atomic operation does both
  uint16_t scope : 2 = 0;  // a Scope
  uint32_t instruction : 28 = 0;
  uint32_t bytes : 4 = 0;  // of the cell, a bit each
  bool operator==(const GlobalAccess&) const = default;
};
static_assert(sizeof(GlobalAccess) == 16);

// The cells of one buffer of global memory. Most of it is accessed in large pieces, by bulk copies
// and warps, so that many cells have the same history: a cell holds the number of its history, and
// an access of a piece is checked once for each history in it.
class GlobalShadow {
 public:
  GlobalShadow(uint64_t bytes, uint32_t slots_of_cta)
      : cells_(bytes / 4 + 1), histories_(1), slots_of_cta_(slots_of_cta) {}

  struct Conflict {
    GlobalAccess earlier;
    Fault fault = Fault::kUnordered;
    uint64_t first = 0, last = 0;  // bytes
  };

  // Notes an access of bytes [first, last) by an agent that has seen `clock`. Returns true where
  // it conflicts with an earlier access, and says which in *conflict.
  bool Note(uint64_t first,
            uint64_t last,
            GlobalAccess access,
            const VectorClock& clock,
            Conflict* conflict);

 private:
  // The accesses that later ones may conflict with. Never changes while cells have it. Where lanes
  // write words of their own, every word has one: so it is small as long as one access is all.
  struct History {
    GlobalAccess last;
    std::unique_ptr<std::vector<GlobalAccess>> others;  // oldest first
    uint64_t cells = 0;                                 // that have it
  };
  Zeros<uint32_t> cells_;  // index of the history; 0 is that without accesses
  std::vector<History> histories_;
  std::vector<uint32_t> free_;
  uint32_t slots_of_cta_;
  // What the last access made of the last history it met.
  GlobalAccess last_access_;
  uint32_t last_before_ = 0, last_after_ = 0;
  std::vector<GlobalAccess> kept_;  // scratch of Follow

  bool Covers(const GlobalAccess& a, const GlobalAccess& b) const;
  uint32_t Follow(uint32_t before,
                  const GlobalAccess& access,
                  const VectorClock& clock,
                  GlobalAccess* earlier,
                  Fault* fault);
  void Release(uint32_t history, uint64_t cells);
};

// What the strong writes of a memory's locations have released, for those who read them. A location
// is 4 bytes, numbered as cells are.
class Locations {
 public:
  // A strong write of [first, last) by a thread of a CTA (of `rank` in its cluster) releases a
  // message to the threads of each level that its scope reaches. An atomic operation continues what
  // was released before; any other write ends it. Nobody is left to read what CTAs of clusters
  // before `oldest` released to themselves.
  void Write(uint64_t first,
             uint64_t last,
             uint32_t cluster,
             uint32_t rank,
             Scope scope,
             const Messages& messages,
             bool is_atomic,
             uint32_t oldest);
  // What a strong read by such a thread observes, by levels. Returns whether that is anything.
  bool Read(uint64_t first,
            uint64_t last,
            uint32_t cluster,
            uint32_t rank,
            Scope scope,
            Messages* messages) const;
  // A weak write.
  void Forget(uint64_t first, uint64_t last) {
    if (locations_.empty()) return;
    locations_.erase(locations_.lower_bound(first), locations_.lower_bound(last));
  }

 private:
  static constexpr uint32_t kAnyRank = UINT32_MAX;
  struct Near {
    uint32_t cluster = 0;
    uint32_t rank = 0;  // or kAnyRank, to the whole cluster
    Message message;
  };
  // Never changes, and is shared: a CTA that has fenced once may go on to add to a whole tensor.
  struct Location {
    std::vector<Near> near;
    Message grid;
    void Add(uint32_t cluster, uint32_t rank, const Message& message, uint32_t oldest);
  };
  using Pointer = std::shared_ptr<const Location>;
  struct Step {
    uint32_t cluster = 0, rank = 0;
    Scope scope = Scope::kNone;
    Messages messages;
    bool operator==(const Step&) const = default;
  };
  std::map<uint64_t, Pointer> locations_;
  // The last write, and what it made of the last location.
  Step last_;
  Pointer last_before_, last_after_;
};

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_RACE_H_
