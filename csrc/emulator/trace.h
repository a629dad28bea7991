// What happened in a run, in order: the issue, start and end of every asynchronous operation, the
// waits, and what ended them. Writes itself as a Chrome trace, which Perfetto (ui.perfetto.dev)
// opens.
//
// Source: Google, "Trace Event Format".

#ifndef JAX_FA4_CSRC_EMULATOR_TRACE_H_
#define JAX_FA4_CSRC_EMULATOR_TRACE_H_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/emulator/program.h"
#include "csrc/emulator/race.h"

namespace jax_fa4::emulator {

struct Cluster;
struct Cta;
struct Group;
struct MBarrier;
struct Operation;
struct Warp;

// The clock ticks with every instruction that a warp executes (one that has to wait executes again)
// and every step of an asynchronous unit, so that no two things happen in one tick: it gives an
// order, not durations. An instruction executed as the n-th takes [n - 1, n).
class Trace {
 public:
  // Named numbers. The names are literals.
  using Argument = std::pair<const char*, int64_t>;
  using Arguments = std::initializer_list<Argument>;

  enum class Kind : uint8_t {
    kWarp,       // a warp, from its launch to its end
    kOperation,  // of an asynchronous unit
    kWait,       // lanes that could not go on
    kSignal,     // an instruction that arrives at a barrier, or frees what others may wait for
    kPhase,      // an mbarrier completes one
    kRegisters,  // setmaxnreg has changed a warp's registers
  };
  enum class Unit : uint8_t {
    kWarp,
    kTensorLoad,
    kTensorStore,
    kAsyncCopy,
    kWarpgroup,
    kTensorPipe,
    kCopyEngine,
    kBarriers
  };
  enum class Ending : uint8_t {
    kNone,      // the run ended first
    kSignal,    // `cause`
    kLanes,     // the other lanes of the warp arrived
    kTimeOut,   // everything waited, and this wait has a time limit
    kSpurious,  // a try_wait gave up for no reason, as it may
  };

  struct Event {
    Kind kind = Kind::kWarp;
    Unit unit = Unit::kWarp;
    Ending ending = Ending::kNone;
    bool open = true;         // not over when the run ended
    bool timed_out = false;   // of a wait: its time limit has passed
    bool listening = false;   // of a wait: among listeners_
    bool started = false;     // of an operation
    int8_t lane = 0;          // the first that takes part
    int16_t warp = 0;         // of the CTA; -1 for none
    uint32_t lanes = 0;       // that take part
    uint32_t more_lanes = 0;  // of a wait: the lanes that it was for, where it was for lanes
    uint32_t cta = 0;         // index in ctas()
    int32_t instruction = -1;
    int32_t cause = -1;  // event that ended a wait or completed a phase; -1 where it is not known
    uint32_t first_argument = 0, argument_count = 0;
    const char* name = "";
    uint64_t issue = 0;  // of an operation: end of the instruction that issued it
    uint64_t start = 0, end = 0;
    uint64_t caused = 0;  // when the cause signalled
  };

  struct CtaPlace {
    std::array<uint32_t, 3> index = {0, 0, 0};
    uint32_t rank = 0, cluster = 0;
    uint32_t cluster_size = 1;
    std::vector<int32_t> warps;  // their events
  };

  // Keeps the first `limit` events.
  Trace(std::shared_ptr<const Program> program, size_t limit)
      : program_(std::move(program)), limit_(limit) {}

  // ---- What was recorded

  const std::vector<Event>& events() const { return events_; }
  const std::vector<CtaPlace>& ctas() const { return ctas_; }
  std::span<const Argument> ArgumentsOf(const Event& event) const {
    return std::span(arguments_).subspan(event.first_argument, event.argument_count);
  }
  const ptx::Statement* StatementOf(const Event& event) const;
  std::string SourceOf(const Event& event) const;
  // Events beyond the limit, which are missing.
  uint64_t missing() const { return missing_; }
  // The trace in the JSON object form of the Trace Event Format.
  std::string ChromeJson() const;

  // ---- What the machine tells

  void Launch(const Cluster& cluster);
  // Executes an instruction, a step of an operation.
  Outcome Execute(Context& context, const Inst& inst);
  void Execute(Operation& operation);
  void Merge(Group& into, Group& from);
  void TimeOut(const Group& group);
  void EndWarp(const Warp& warp);
  void EndRun();

  // An operation that runs later, and what it is about.
  void Issue(Operation& operation);
  void Describe(const Operation& operation,
                Arguments arguments,
                std::span<const int32_t> coordinates);
  // An operation that has run when it is issued and counts as complete when it is waited for.
  void Issue(Slot slot, uint32_t time, const char* name, Arguments arguments);
  void Retire(const Cta& cta, Slot slot, uint32_t time);
  // An operation that is complete when it is issued.
  void IssueHint(const char* name);

  // The executing instruction waits for an object: what it says last before it blocks.
  void Wait(const char* name, const void* object, Arguments arguments);
  // It has looked up an mbarrier, which is what it waits for if it is a wait.
  void LookUp(const Cta& cta, uint32_t address, const MBarrier& barrier);
  // What executes contributes to what waiters for an object need. One that `completes` it ends
  // their waits.
  void Signal(const char* name, const void* object, Arguments arguments, bool completes);
  void Arrive(const Cta& cta, const MBarrier& barrier);
  void CompletePhase(const Cta& cta, const MBarrier& barrier);
  void SetRegisters(uint32_t count);

 private:
  struct Wanted {
    const char* name = nullptr;
    std::vector<const void*> objects;
    std::vector<Argument> arguments;
  };
  struct Pending {
    uint32_t time = 0;
    int32_t event = -1;
  };
  int32_t Add(Event event, std::span<const Argument> arguments);
  int32_t AddOfWarp(Kind kind, const char* name, std::span<const Argument> arguments);
  uint32_t NumberOf(const Cta& cta) const;
  Unit UnitOf(const Cta& cta, Slot slot) const;
  uint64_t KeyOf(const Cta& cta, Slot slot) const;
  int32_t Contribute(const char* name, const void* object, std::span<const Argument> arguments);
  void EndWaits(const void* object, int32_t cause);
  int32_t Block(const Context& context, int32_t wait);
  void CloseWait(int32_t wait, uint32_t more_lanes);

  std::shared_ptr<const Program> program_;
  size_t limit_;
  uint64_t missing_ = 0;
  std::vector<Event> events_;
  std::vector<Argument> arguments_;
  std::vector<CtaPlace> ctas_;
  uint64_t now_ = 0;

  // What executes: an instruction of lanes of a warp, or an operation (or nothing).
  const Warp* warp_ = nullptr;
  uint32_t mask_ = 0;
  int32_t instruction_ = -1;
  const Operation* operation_ = nullptr;
  Wanted wanted_;                                         // by the instruction
  std::vector<std::pair<const void*, int32_t>> signals_;  // by the instruction, and their events

  std::unordered_multimap<const void*, int32_t> listeners_;     // waits, by their objects
  std::unordered_map<uint64_t, std::vector<Pending>> pending_;  // by KeyOf
  std::unordered_map<uint64_t, uint64_t> busy_;  // when a unit's last operation ended, by KeyOf
};

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_TRACE_H_
