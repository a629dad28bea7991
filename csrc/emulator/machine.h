// The machine that executes programs: CTAs with their shared and tensor memory, warps whose lanes
// may diverge, barriers, and the asynchronous units. One seeded scheduler interleaves them all.

#ifndef JAX_FA4_CSRC_EMULATOR_MACHINE_H_
#define JAX_FA4_CSRC_EMULATOR_MACHINE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "csrc/emulator/program.h"
#include "csrc/emulator/race.h"
#include "csrc/emulator/report.h"
#include "csrc/emulator/trace.h"

namespace jax_fa4::emulator {

struct Cta;
struct Warp;
struct TensorMap;  // tensor_map.h
class Machine;

// A seeded generator of small, fast state (xorshift64*).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du) {
    for (int i = 0; i < 4; ++i) Next();
  }
  uint64_t Next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du;
  }
  // Uniform enough in [0, limit).
  uint32_t Below(uint32_t limit) { return static_cast<uint32_t>(((Next() >> 32) * limit) >> 32); }

 private:
  uint64_t state_;
};

// A queue that takes no memory until it is used: every lane of every warp has several.
template <typename T>
class Queue {
 public:
  size_t size() const { return items_.size() - first_; }
  bool empty() const { return size() == 0; }
  T& operator[](size_t i) { return items_[first_ + i]; }
  const T& operator[](size_t i) const { return items_[first_ + i]; }
  T& front() { return items_[first_]; }
  T& back() { return items_.back(); }
  void push_back(T item) { items_.push_back(std::move(item)); }
  void pop_front() {
    items_[first_++] = T();
    if (2 * first_ < items_.size()) return;
    items_.erase(items_.begin(), items_.begin() + static_cast<ptrdiff_t>(first_));
    first_ = 0;
  }
  void clear() {
    items_.clear();
    first_ = 0;
  }

 private:
  std::vector<T> items_;
  size_t first_ = 0;
};

// How many groups of asynchronous operations a thread may have committed and not waited for, before
// the oldest are counted as one.
inline constexpr size_t kMaxGroups = 1024;
// The same of bulk groups, of which a wait looks at each.
inline constexpr size_t kMaxBulkGroups = 64;

// Lanes of a warp that are at the same instruction.
struct Group {
  uint32_t mask = 0;
  int32_t pc = 0;
  bool blocked = false;    // its instruction returned kBlocked, and nothing has happened since
  bool timed_out = false;  // its wait shall end without success
  // Where an instruction has to remember that it began (a barrier at which the group has arrived
  // already).
  bool arrived = false;
  uint64_t ticket = 0;
  int32_t wait = -1;  // in the event trace
};

// Lanes whose knowledge of others is the same. Lanes that acquire something apart from the rest
// know more.
struct Knowledge {
  uint32_t mask = 0;
  Slot slot = 0;
  VectorClock clock;
};

// Asynchronous copies that a lane has issued and committed (cp.async.bulk.commit_group).
struct BulkGroup {
  uint32_t pending_reads = 0;  // copies whose source was not read yet
  uint32_t pending = 0;        // copies not complete
  VectorClock read_clock;      // what a waiter for the reads learns
  VectorClock clock;
  int32_t unwaited = -1;  // instruction of one of its copies, until a wait for the group
};

// What wgmma has to do with a register (one of Program::tracked) of a warp.
struct WarpgroupRegister {
  enum class Use : uint8_t { kNone, kAccumulator, kOperand, kCopy };  // the last: by a mov
  Use use = Use::kNone;
  uint32_t time = 0;         // of the unit, when the last wgmma.mma_async that uses it was issued
  int32_t instruction = -1;  // that one
  uint32_t origin = 0;       // the accumulator that this is, or is a copy of
  uint32_t fences = 0;       // of the warp, when it was issued
  int64_t accessed = 0;      // fences of the warp at the last access by another instruction, or -1
  int32_t accessed_by = -1;
};

inline constexpr uint32_t kFullPace = 16;

struct Warp {
  Cta* cta = nullptr;
  int index = 0;  // in its CTA
  uint32_t live = 0;
  std::vector<Group> groups;
  std::vector<uint32_t> registers;
  std::vector<uint32_t> predicates;
  Zeros<uint8_t> local;  // Program::local_bytes of each lane, lane by lane
  std::vector<Knowledge> knowledge;
  uint32_t register_count = 0;  // per thread, as setmaxnreg counts
  std::array<uint64_t, kLanes> cluster_ticket =
      {};  // generation of barrier.cluster at which a lane arrived
  // Tensor-memory loads not waited for: rows of the register file that they wrote.
  std::vector<uint64_t> pending_rows;  // a bit a row; empty when nothing is pending
  std::array<Queue<std::shared_ptr<BulkGroup>>, kLanes> bulk_groups;  // the last one is open
  Queue<uint32_t> warpgroup_groups;  // of wgmma: times of the unit when they were committed
  uint32_t warpgroup_completed = 1;  // time of the unit up to which a wait has waited
  uint32_t warpgroup_fences = 0;     // executed
  std::vector<WarpgroupRegister> warpgroup_registers;  // by number in Program::tracked
  std::array<Queue<uint32_t>, kLanes>
      copy_groups;  // of cp.async: times of the unit when they were committed
  std::vector<uint32_t> unfenced_barriers;  // that this warp has initialised, and not fenced
  VectorClock initialised;  // when it did so, of those that a relaxed arrival makes known
  // Lanes that have arrived in the current phase of each named barrier.
  std::array<uint32_t, 16> arrived = {};
  // Votes of the last phase of each in which lanes have arrived.
  std::array<uint32_t, 16> votes = {};
  // While lanes have diverged: the backward branches since groups of them last took turns, and the
  // lane whose group is to run although others are behind it, or -1.
  int turn = 0;
  int turn_lane = -1;
  bool ready = true;
  uint32_t pace = kFullPace;  // of kFullPace turns that it could have, about how many it takes
};

// An mbarrier object. Its eight bytes in shared memory are opaque to kernels, so the state lives
// here.
struct MBarrier {
  Access init;               // by what it was initialised
  uint32_t expected = 0;     // arrivals a phase needs
  int64_t pending = 0;       // arrivals this phase still needs
  int64_t transactions = 0;  // bytes that this phase still expects
  uint64_t phase = 0;        // phases completed
  bool fenced =
      false;  // by fence.mbarrier_init, so that the asynchronous proxy and the cluster see it
  VectorClock arriving;   // of the current phase
  VectorClock completed;  // of the last phase completed
};

// What the current phase still needs beside arrivals, for reports.
std::string MissingBytes(const MBarrier& barrier);

struct NamedBarrier {
  uint32_t expected = 0;
  uint32_t arrived = 0;
  uint64_t generation = 0;
  // Whether somebody has named no count of threads: then all of the CTA have to arrive that have
  // not ended.
  bool awaits_all = false;
  // Of a barrier that reduces: how, as its instruction says, and the threads so far that vote for
  // the result, or for .and against it.
  uint32_t reduction = 0;
  uint32_t votes = 0;
  VectorClock arriving;
  VectorClock completed;
};

// Where the four warps of a warpgroup meet at a wgmma.mma_async.
struct Warpgroup {
  uint64_t generation = 0;
  uint32_t arrived = 0;  // a bit for each warp
  int first = 0;         // the warp that came first, and what it is about to execute
  int32_t instruction = -1;
  std::array<uint64_t, 3> operands = {};  // descriptors of A and B, and whether D is added
};

// An operation of an asynchronous unit, run by the scheduler at any time after its issue.
struct Operation {
  const char* name = "";
  Cta* cta = nullptr;  // whose warp issued it
  int warp = 0;
  uint8_t lane = 0;
  int32_t instruction = -1;
  Slot slot = 0;
  uint32_t time = 0;
  VectorClock clock;                    // what its issuer knew at issue, and itself
  std::function<void(Operation&)> run;  // does one step
  int steps = 1;                        // still to do; complete at 0
  bool only_global = false;             // the steps left use no memory of the CTA
  int32_t event = -1;                   // in the event trace

  Access access() const { return {time, slot, lane, true, instruction}; }
};

struct Cluster;

// What a warp has come to do together with a warp of the peer CTA (.cta_group::2).
struct PairRequest {
  bool open = false;  // until its warp goes on
  bool done = false;  // by both
  uint32_t columns = 0;
  uint32_t first = 0;  // of the columns that it has been given
  Access by;
};

// An asynchronous operation that uses memory of a CTA, which therefore has to know of its end
// before its own.
struct Watched {
  uint32_t time = 0;
  int32_t instruction = -1;
  std::array<uint32_t, 3> cta = {0, 0, 0};  // whose warp issued it
  int warp = -1;
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;  // in its cluster
  std::array<uint32_t, 3> index = {0, 0, 0};
  std::vector<uint8_t> shared;
  Shadow shared_shadow;                      // a cell is 4 bytes
  std::vector<uint32_t> tensor;              // 128 lanes x 512 columns; empty until allocated
  Shadow tensor_shadow;                      // a cell is 8 columns of a lane
  std::array<bool, 16> tensor_columns = {};  // which groups of 32 columns are allocated
  std::array<Access, 16> tensor_owners;      // by what
  bool may_allocate = true;                  // until relinquish_alloc_permit
  std::array<PairRequest, 3> pair_requests;  // to allocate, deallocate and relinquish
  std::vector<std::unique_ptr<Warp>> warps;
  std::unordered_map<uint32_t, MBarrier> mbarriers;  // by shared address
  uint32_t first_barrier = UINT32_MAX,
           last_barrier = 0;  // between these addresses all of them have been
  std::array<NamedBarrier, 16> barriers;
  Locations locations;  // of its shared memory
  std::array<Warpgroup, 8> warpgroups;
  std::deque<std::unique_ptr<Operation>> tensor_pipe;  // executes in order
  std::vector<std::unique_ptr<Operation>> copies;      // execute in any order
  Slot first_slot = 0;
  std::vector<Slot> free_copy_slots;  // oldest first
  uint32_t free_registers = 0;
  uint32_t live_warps = 0;
  VectorClock at_exit;              // what the warps that have ended knew
  std::map<Slot, Watched> watched;  // the last of each slot
  uint32_t smid = 0;
};

struct Cluster {
  uint32_t number = 0;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<uint32_t> times;  // current time of each slot
  NamedBarrier barrier;         // barrier.cluster
};

// What is noted of a buffer of global memory that kernels may write.
struct GlobalMemory {
  GlobalShadow shadow;
  Locations locations;
};

// Slots of a CTA, per warp and then for its asynchronous units.
inline constexpr int kKnowledgeSlots = 4;  // groups of lanes that know different things
inline constexpr int kTensorLoadSlot = 4, kTensorStoreSlot = 5, kAsyncCopySlot = 6,
                     kWarpgroupSlot = 7;
inline constexpr int kWarpSlots = 8;
inline constexpr int kCopySlots =
    96;  // bulk copies in flight, and as many as possible that have completed

// Global memory that a launch may touch.
struct Buffer {
  std::string name;
  uint8_t* data = nullptr;
  uint64_t size = 0;
  bool writable = false;
  uint64_t address = 0;  // in the kernel's address space
};

struct Launch {
  std::shared_ptr<const Program> program;
  std::array<uint32_t, 3> grid = {1, 1, 1};
  std::array<uint32_t, 3> block = {1, 1, 1};
  std::array<uint32_t, 3> cluster = {1, 1, 1};
  uint32_t dynamic_shared_bytes = 0;
  std::vector<uint8_t> parameters;  // the kernel's parameter space
  std::vector<Buffer> buffers;
};

struct Options {
  uint64_t seed = 0;
  bool strict = true;
  bool check_races = true;
  uint32_t sm_count = 148;
  uint64_t max_instructions = UINT64_C(1) << 40;  // of warps
  size_t max_reports = 20;                        // a fatal one comes on top
  bool trace = false;                             // whether to record one, and how much of it
  size_t max_trace_events = 1 << 20;
  // Called with the CTAs that have ended and all CTAs, and from time to time with UINT64_MAX and 0;
  // returns false to stop.
  std::function<bool(uint64_t done, uint64_t total)> progress;
};

// What lanes executing an instruction see.
struct Context {
  Machine& machine;
  Cta& cta;
  Warp& warp;
  Group& group;
  uint32_t mask;  // the group's lanes whose guard holds
  uint32_t* registers;
  const uint32_t* constants;
  uint32_t* predicates;

  const uint32_t* Row(const Ref& ref) const {
    return (ref.kind == Ref::Kind::kConstant ? constants : registers) + ref.index;
  }
  uint32_t* MutableRow(const Ref& ref) { return registers + ref.index; }
  // A 64-bit operand: 32 values side by side.
  const uint64_t* Wide(const Ref& ref) const { return reinterpret_cast<const uint64_t*>(Row(ref)); }
  uint64_t* MutableWide(const Ref& ref) { return reinterpret_cast<uint64_t*>(MutableRow(ref)); }
  // A predicate as a bit for each lane.
  uint32_t Predicate(const Ref& ref) const {
    return ref.negated ? ~predicates[ref.index] : predicates[ref.index];
  }
  void SetPredicate(const Ref& ref, uint32_t lanes) {
    if (ref) predicates[ref.index] = (predicates[ref.index] & ~mask) | (lanes & mask);
  }
};

// A lane's value of a register or constant of up to 64 bits.
inline uint64_t LaneValue(const Context& context, const Ref& ref, int lane) {
  return ref.bits == 64 ? context.Wide(ref)[lane] : context.Row(ref)[lane];
}

// Whether all lanes of the warp that have not ended are here, as `.aligned` instructions need.
inline bool WholeWarp(const Context& context) { return (context.warp.live & ~context.mask) == 0; }
inline std::string WaitsForWarp(Context&, const Inst&) {
  return "wait for the other lanes of their warp to arrive here";
}

// Executes what has no effect here.
inline Outcome Nothing(Context&, const Inst&) { return Outcome::kNext; }

inline std::string Hex(uint64_t number) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(number));
  return text;
}

class Machine {
 public:
  // Throws std::invalid_argument for a launch that a GPU would refuse, with a sentence that says
  // why.
  Machine(Launch launch, Options options);
  ~Machine();
  // Runs to the end, or to the first fatal report. Returns all reports.
  const std::vector<Report>& Run();

  const Launch& launch() const { return launch_; }
  const Options& options() const { return options_; }
  const Program& program() const { return *launch_.program; }
  Random& random() { return random_; }
  uint64_t instructions_executed() const { return executed_; }

  // ---- For instructions

  // Addresses: generic ones carry a window in their upper bits.
  static constexpr uint64_t kSharedWindow = UINT64_C(1) << 56;  // | cta rank << 24 | offset
  static constexpr uint64_t kLocalWindow = UINT64_C(2) << 56;
  static constexpr uint64_t kParameterWindow = UINT64_C(3) << 56;
  static constexpr uint64_t kConstWindow = UINT64_C(4) << 56;

  // The CTA and offset of an address in shared::cluster (its upper byte is the rank plus one, or 0
  // for the own CTA).
  struct SharedPlace {
    Cta* cta;
    uint32_t offset;
  };
  std::optional<SharedPlace> FindShared(Cta& cta, uint32_t address, uint32_t size);
  uint8_t* FindGlobal(uint64_t address, uint64_t size, bool write, const Buffer** buffer = nullptr);

  // An access by a lane of a warp, now.
  Access AccessOf(Context& context, int lane, Scope scope = Scope::kNone, bool write = false);
  // Checks and notes an access by lane `lane` of a warp. Sizes in bytes.
  void AccessShared(Context& context,
                    int lane,
                    const SharedPlace& place,
                    uint32_t size,
                    bool write,
                    Scope scope = Scope::kNone);
  // In strict mode, a store to an mbarrier that was not invalidated is misuse.
  void CheckBarriers(Context& context, int lane, const SharedPlace& place, uint32_t size);
  // By an asynchronous operation.
  void AccessShared(const Operation& operation,
                    const SharedPlace& place,
                    uint32_t size,
                    bool write);
  void CheckShared(const Access& access,
                   const VectorClock& clock,
                   const SharedPlace& place,
                   uint32_t size,
                   bool write);
  // How an access uses memory. An atomic operation does both.
  enum class Use : uint8_t { kRead, kWrite, kBoth };
  // The same for global memory, in bytes from `address` on, which FindGlobal has found.
  void AccessGlobal(
      Context& context, int lane, uint64_t address, uint64_t size, Use use, Scope scope);
  void AccessGlobal(const Operation& operation,
                    uint64_t address,
                    uint64_t size,
                    Use use,
                    Scope scope = Scope::kNone);
  void CheckGlobal(const Access& access,
                   const VectorClock& clock,
                   const Cta& cta,
                   int warp,
                   uint64_t address,
                   uint64_t size,
                   Use use);
  // Where the strong accesses of shared memory (of a CTA), or of global memory at an address,
  // release and acquire. Null where nothing does: races are not checked, or nobody writes there.
  Locations* LocationsOf(Cta& cta) { return options_.check_races ? &cta.locations : nullptr; }
  Locations* LocationsOf(uint64_t address, uint64_t* offset);
  // What strong reads by lanes have observed: they take it up now, or at their next fence.
  void Observe(Warp& warp, uint32_t mask, const Messages& messages, bool acquires);
  // A strong write by a lane of bytes [first, first + size).
  void WriteStrongly(Context& context,
                     int lane,
                     Locations& locations,
                     uint64_t first,
                     uint32_t size,
                     Scope scope,
                     bool releases,
                     bool is_atomic);
  // fence.acq_rel and fence.sc. Lanes that know the same are one agent: a fence of some is one of
  // all.
  void Fence(Warp& warp, uint32_t mask, Scope scope);
  // `warp` is the one whose instruction it is, or that issued the operation.
  void AccessTensor(const Access& access,
                    const VectorClock& clock,
                    Cta& issuer,
                    int warp,
                    Cta& cta,
                    uint32_t lane,
                    uint32_t column,
                    uint32_t columns,
                    bool write);
  // Columns of all lanes are used: that has to be ordered behind their allocation.
  void CheckOwner(
      const Access& access, const VectorClock& clock, Cta& cta, uint32_t column, uint32_t columns);
  // Columns of all lanes are given back: that has to be ordered behind all accesses, and what comes
  // later behind nothing, since an allocation waits for it. Threads need no tcgen05.fence here:
  // tcgen05.dealloc is not asynchronous.
  void ReleaseTensor(Context& context, int lane, uint32_t column, uint32_t columns);

  // What the lanes of `mask` know, joined; and teaching them more.
  VectorClock KnowledgeOf(Warp& warp, uint32_t mask);
  void Learn(Warp& warp, uint32_t mask, const VectorClock& clock);
  // The lanes have published what they did: what they do from now on is later.
  void Advance(Warp& warp, uint32_t mask);
  // What the unit of a slot has done by now is ordered before what the lanes do.
  void LearnSlot(Warp& warp, uint32_t mask, Slot slot);
  // All lanes of `mask` know the same from now on (bar.warp.sync).
  void Unify(Warp& warp, uint32_t mask);
  Knowledge& KnowledgeOfLane(Warp& warp, int lane);
  uint32_t& Time(Cta& cta, Slot slot);

  // Something happened that blocked warps of the cluster may wait for.
  void Wake(Cta& cta);

  // An mbarrier is used: that has to be ordered behind its initialisation, and before what writes
  // to its memory next. What signals it asynchronously was ordered where it was issued.
  void UseBarrier(Context& context, int lane, const SharedPlace& place);
  void UseBarrier(const Operation& operation, const SharedPlace& place);
  // The mbarrier at an address, or null.
  MBarrier* FindBarrier(Cta& cta, uint32_t address);
  void Arrive(Cta& cta, MBarrier& barrier, uint32_t count, const VectorClock& clock);
  void Transact(Cta& cta, MBarrier& barrier, int64_t bytes, const VectorClock* clock);

  // A new asynchronous operation issued by `lane`, knowing what the lane knows.
  std::unique_ptr<Operation> NewOperation(Context& context, int lane, const char* name, Slot slot);
  // The operation uses memory of the CTA, whose threads have to wait for it before they all end.
  void Watch(Cta& cta, const Operation& operation);
  Slot TakeCopySlot(Cta& cta);
  void ReturnCopySlot(Cta& cta, Slot slot);

  // Reports. A fatal one ends the run.
  void AddReport(Report report);
  void Misuse(Context& context,
              int lane,
              const std::string& message,
              bool fatal = true,
              Report::Kind kind = Report::Kind::kMisuse);
  Report::Place PlaceOf(int32_t instruction) const;
  Report::Place PlaceIn(const Cta& cta, int32_t instruction, int warp, const char* role) const;
  // A fatal fault that shows while an asynchronous operation runs.
  void OperationFault(const Operation& operation, const std::string& message);
  bool stopped() const { return stopped_; }
  // The tensor map in 128 bytes of a parameter or of global memory, or null where they hold none.
  // Valid as long as the machine.
  const TensorMap* DecodeMap(const uint8_t* bytes);

  // The event trace, or null in a run that records none.
  std::shared_ptr<Trace> trace() const { return trace_; }
  // What an instruction returns that waits for an object; the trace names both.
  Outcome BlockedOn(const char* name, const void* object, Trace::Arguments arguments) {
    if (trace_ != nullptr) trace_->Wait(name, object, arguments);
    return Outcome::kBlocked;
  }
  // What executes contributes to what waiters for an object need, or completes it.
  void Signal(const char* name, const void* object, Trace::Arguments arguments, bool completes) {
    if (trace_ != nullptr) trace_->Signal(name, object, arguments, completes);
  }
  // What an operation is about.
  void Describe(const Operation& operation,
                Trace::Arguments arguments,
                std::span<const int32_t> coordinates = {}) {
    if (trace_ != nullptr) trace_->Describe(operation, arguments, coordinates);
  }
  // An operation of a warp's unit that counts as complete when it is waited for, up to a time.
  void Issue(Slot slot, uint32_t time, const char* name, Trace::Arguments arguments) {
    if (trace_ != nullptr) trace_->Issue(slot, time, name, arguments);
  }
  void Retire(const Cta& cta, Slot slot, uint32_t time) {
    if (trace_ != nullptr) trace_->Retire(cta, slot, time);
  }

 private:
  Launch launch_;
  Options options_;
  Random random_;
  std::vector<std::unique_ptr<Cluster>> clusters_;     // resident
  std::vector<std::unique_ptr<GlobalMemory>> global_;  // of each buffer, null where no one writes
  std::vector<Report> reports_;
  uint64_t next_cluster_ = 0;
  uint64_t cluster_count_ = 0;
  uint64_t executed_ = 0;
  std::shared_ptr<Trace> trace_;
  bool stopped_ = false;

  std::map<const uint8_t*, std::shared_ptr<const TensorMap>> maps_;
  std::vector<uint8_t> global_variables_,
      const_variables_;                 // of the module, as they begin a launch
  std::unordered_set<uint64_t> races_;  // pairs of instructions reported already
  size_t capacity_ = 1;                 // clusters that are resident at once
  uint64_t next_poll_ = 0;
  uint64_t wakes_ = 0;        // how often anything happened that could end a wait
  uint64_t done_ = 0;         // CTAs
  uint64_t last_change_ = 0;  // executed_ when something last happened that is not pure
  uint64_t quiet_since_ = 0;  // last_change_ when it was last looked for warps that spin for good
  uint64_t patience_ = 0;     // how many instructions after that to look again

  void PlaceVariables();
  uint64_t BytesOfCluster() const;
  const uint32_t* OverwrittenBarrier(const SharedPlace& place, uint32_t size) const;
  void LaunchClusters();
  std::unique_ptr<Cluster> NewCluster(uint64_t number);
  void FillSpecial(Warp& warp);
  bool Step();
  bool StepCta(Cta& cta);
  void RunStep(Cta& cta, Operation& operation);
  bool RunWarp(Warp& warp, int budget);
  size_t ChooseGroup(Warp& warp);
  void MergeGroups(Warp& warp);
  void FinishWarp(Warp& warp);
  bool Retired(const Cluster& cluster) const;
  void CheckFinished(Warp& warp);
  void CheckExit(Cta& cta);
  void NoteUse(const Access& access, const VectorClock& clock, const SharedPlace& place);
  bool TimeOut();
  bool SpinsForGood();
  bool IsStuck(Warp& warp);
  bool IsStuck(Warp& warp, int lane);
  void Split(Warp& warp, uint32_t mask);
  void CheckPending(Context& context, const Inst& inst);
  void CompletePhase(Cta& cta, MBarrier& barrier);
  uint32_t SlotsOfCta() const;
  int WarpOfSlot(Slot slot) const;
  std::array<uint32_t, 3> IndexOf(uint32_t cluster, uint32_t rank) const;
  GlobalMemory* FindChecked(uint64_t address, const Buffer** buffer);
  std::string DescribeWait(Warp& warp, const Group& group, bool polls);
  bool IsNewRace(int32_t instruction, int32_t earlier);
  // `places` are those of the access and of the earlier one.
  void ReportRace(Fault fault, const std::string& where, std::array<Report::Place, 2> places);
  void ReportClusterRace(const Cta& cta,
                         const Access& access,
                         const char* role,
                         const Access& earlier,
                         const char* earlier_role,
                         Fault fault,
                         const std::string& where);
  void ReportStanding(Report::Kind kind, const std::string& message);
};

// Checks an instruction, other than wgmma.mma_async, that accesses registers which wgmma uses
// (isa_mma.cc).
void CheckWarpgroupRegisters(Context& context, const Inst& inst);

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_MACHINE_H_
