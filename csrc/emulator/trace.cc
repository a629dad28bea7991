#include "csrc/emulator/trace.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <map>
#include <tuple>

#include "csrc/emulator/machine.h"

namespace jax_fa4::emulator {
namespace {

// Group::wait of lanes that wait for nothing, and of those whose wait there was no room for.
constexpr int32_t kNoWait = -1, kMissingWait = -2;

// Where an mbarrier of a cluster is.
struct BarrierPlace {
  uint32_t rank = 0, offset = 0;
};

BarrierPlace Find(const Cta& cta, const MBarrier& barrier) {
  for (const auto& one : cta.cluster->ctas) {
    for (const auto& [offset, candidate] : one->mbarriers) {
      if (&candidate == &barrier) return {one->rank, offset};
    }
  }
  return {};
}

}  // namespace

// ---- Recording

int32_t Trace::Add(Event event, std::span<const Argument> arguments) {
  if (events_.size() >= limit_) {
    ++missing_;
    return -1;
  }
  event.first_argument = static_cast<uint32_t>(arguments_.size());
  event.argument_count = static_cast<uint32_t>(arguments.size());
  arguments_.insert(arguments_.end(), arguments.begin(), arguments.end());
  events_.push_back(event);
  return static_cast<int32_t>(events_.size()) - 1;
}

// An event that the executing instruction is: it begins and ends with it.
int32_t Trace::AddOfWarp(Kind kind, const char* name, std::span<const Argument> arguments) {
  return Add({.kind = kind,
              .open = false,
              .lane = static_cast<int8_t>(std::countr_zero(mask_)),
              .warp = static_cast<int16_t>(warp_->index),
              .lanes = mask_,
              .cta = NumberOf(*warp_->cta),
              .instruction = instruction_,
              .name = name,
              .issue = now_,
              .start = now_ - 1,
              .end = now_},
             arguments);
}

uint32_t Trace::NumberOf(const Cta& cta) const {
  return cta.cluster->number * static_cast<uint32_t>(cta.cluster->ctas.size()) + cta.rank;
}

Trace::Unit Trace::UnitOf(const Cta& cta, Slot slot) const {
  const size_t within = slot - cta.first_slot, units = cta.warps.size() * kWarpSlots;
  if (within == units) return Unit::kTensorPipe;
  if (within > units) return Unit::kCopyEngine;
  switch (within % kWarpSlots) {
    case kTensorLoadSlot:
      return Unit::kTensorLoad;
    case kTensorStoreSlot:
      return Unit::kTensorStore;
    case kAsyncCopySlot:
      return Unit::kAsyncCopy;
    default:
      return Unit::kWarpgroup;
  }
}

uint64_t Trace::KeyOf(const Cta& cta, Slot slot) const {
  return uint64_t{cta.cluster->number} << 16 | slot;
}

void Trace::Launch(const Cluster& cluster) {
  for (const auto& cta : cluster.ctas) {
    CtaPlace place{.index = cta->index,
                   .rank = cta->rank,
                   .cluster = cluster.number,
                   .cluster_size = static_cast<uint32_t>(cluster.ctas.size()),
                   .warps = {}};
    for (const auto& warp : cta->warps) {
      const Argument registers{"registers", warp->register_count};
      place.warps.push_back(Add({.kind = Kind::kWarp,
                                 .warp = static_cast<int16_t>(warp->index),
                                 .lanes = warp->live,
                                 .cta = static_cast<uint32_t>(ctas_.size()),
                                 .name = "warp",
                                 .start = now_},
                                {&registers, 1}));
    }
    ctas_.push_back(std::move(place));
  }
}

Outcome Trace::Execute(Context& context, const Inst& inst) {
  ++now_;
  Warp& warp = context.warp;
  // Copies of the group that the instruction makes shall not wait, too.
  const int32_t wait = std::exchange(context.group.wait, kNoWait);
  warp_ = &warp;
  mask_ = context.mask;
  instruction_ = context.group.pc;
  wanted_.name = nullptr;
  wanted_.objects.clear();
  signals_.clear();
  const Outcome outcome = inst.execute(context, inst);
  if (outcome == Outcome::kBlocked) {
    context.group.wait = Block(context, wait);
  } else if (wait >= 0) {
    CloseWait(wait, mask_ & ~events_[wait].lanes);
  }
  // An instruction of some lanes may let others go on.
  for (Group& group : warp.groups) {
    if (group.wait < 0 || group.pc == events_[group.wait].instruction) continue;
    CloseWait(std::exchange(group.wait, kNoWait), mask_);
  }
  warp_ = nullptr;
  return outcome;
}

// The instruction that executes has blocked. Its lanes waited before, if `wait` is an event, and
// may have come to wait for something else. Returns the event of what they wait for now.
int32_t Trace::Block(const Context& context, int32_t wait) {
  if (wait == kMissingWait) return wait;
  const bool for_lanes = wanted_.name == nullptr;
  const char* const name = for_lanes ? "lanes" : wanted_.name;
  if (wait >= 0 && events_[wait].name != name) {
    CloseWait(wait, mask_ & ~events_[wait].lanes);
    wait = kNoWait;
  }
  if (wait < 0) {
    wait = Add({.kind = Kind::kWait,
                .lane = static_cast<int8_t>(std::countr_zero(mask_)),
                .warp = static_cast<int16_t>(warp_->index),
                .cta = NumberOf(context.cta),
                .instruction = instruction_,
                .name = name,
                .start = now_},
               for_lanes ? std::span<const Argument>() : wanted_.arguments);
    if (wait < 0) return kMissingWait;
  }
  Event& event = events_[wait];
  event.lanes = mask_;
  // What has happened since did not let the lanes go on.
  event.cause = -1;
  event.caused = 0;
  if (event.listening || for_lanes) return wait;
  event.listening = true;
  for (const void* object : wanted_.objects) listeners_.emplace(object, wait);
  return wait;
}

void Trace::CloseWait(int32_t wait, uint32_t more_lanes) {
  Event& event = events_[wait];
  event.open = false;
  event.end = std::max(event.start, now_ - 1);
  if (event.caused != 0) {
    event.ending = Ending::kSignal;
  } else if (std::string_view(event.name) == "lanes") {
    event.ending = Ending::kLanes;
    event.more_lanes = more_lanes;
  } else {
    event.ending = event.timed_out ? Ending::kTimeOut : Ending::kSpurious;
  }
}

void Trace::Execute(Operation& operation) {
  ++now_;
  operation_ = &operation;
  const uint64_t key = KeyOf(*operation.cta, operation.slot);
  if (operation.event >= 0 && !events_[operation.event].started) {
    Event& event = events_[operation.event];
    event.started = true;
    const auto busy = busy_.find(key);
    event.start = std::max(event.issue, busy == busy_.end() ? 0 : busy->second);
  }
  operation.run(operation);
  operation_ = nullptr;
  if (operation.steps > 0) return;
  // It leaves room for another, or lets the next one start.
  Cta& cta = *operation.cta;
  const Unit unit = UnitOf(cta, operation.slot);
  if (unit == Unit::kCopyEngine) {
    EndWaits(&cta.free_copy_slots, operation.event);
  } else {
    busy_[key] = now_;
  }
  if (unit == Unit::kTensorPipe) EndWaits(&cta.tensor_pipe, operation.event);
  if (operation.event < 0) return;
  events_[operation.event].open = false;
  events_[operation.event].end = now_;
}

// Lanes at one instruction go on as one group, which has one wait.
void Trace::Merge(Group& into, Group& from) {
  if (from.wait < 0) return;
  if (into.wait < 0) {
    into.wait = from.wait;
  } else {
    CloseWait(from.wait, into.mask);
  }
}

void Trace::TimeOut(const Group& group) {
  if (group.wait >= 0) events_[group.wait].timed_out = true;
}

void Trace::EndWarp(const Warp& warp) {
  const Cta& cta = *warp.cta;
  const int32_t life = ctas_[NumberOf(cta)].warps[warp.index];
  if (life >= 0) {
    events_[life].open = false;
    events_[life].end = now_;
  }
  for (const int unit : {kTensorLoadSlot, kTensorStoreSlot, kAsyncCopySlot, kWarpgroupSlot}) {
    Retire(cta, static_cast<Slot>(cta.first_slot + warp.index * kWarpSlots + unit), UINT32_MAX);
  }
  EndWaits(&cta.free_registers, life);
}

void Trace::EndRun() {
  for (Event& event : events_) {
    if (!event.open) continue;
    if (event.kind == Kind::kOperation && !event.started) event.start = now_;
    event.end = now_;
  }
}

// ---- Asynchronous operations

void Trace::Issue(Operation& operation) {
  operation.event = Add({.kind = Kind::kOperation,
                         .unit = UnitOf(*operation.cta, operation.slot),
                         .lane = static_cast<int8_t>(operation.lane),
                         .warp = static_cast<int16_t>(operation.warp),
                         .lanes = 1u << operation.lane,
                         .cta = NumberOf(*operation.cta),
                         .instruction = operation.instruction,
                         .name = operation.name,
                         .issue = now_},
                        {});
}

void Trace::Describe(const Operation& operation,
                     Arguments arguments,
                     std::span<const int32_t> coordinates) {
  if (operation.event < 0) return;
  static constexpr const char* kNames[] = {
      "coordinate 0", "coordinate 1", "coordinate 2", "coordinate 3", "coordinate 4"};
  Event& event = events_[operation.event];
  event.first_argument = static_cast<uint32_t>(arguments_.size());
  arguments_.insert(arguments_.end(), arguments.begin(), arguments.end());
  for (size_t i = 0; i < coordinates.size() && i < std::size(kNames); ++i) {
    arguments_.emplace_back(kNames[i], coordinates[i]);
  }
  event.argument_count = static_cast<uint32_t>(arguments_.size()) - event.first_argument;
}

void Trace::Issue(Slot slot, uint32_t time, const char* name, Arguments arguments) {
  const int32_t issued = AddOfWarp(Kind::kOperation, name, arguments);
  pending_[KeyOf(*warp_->cta, slot)].push_back({time, issued});
  if (issued < 0) return;
  Event& event = events_[issued];
  event.unit = UnitOf(*warp_->cta, slot);
  event.open = true;
  event.started = true;
  event.start = now_;
}

void Trace::Retire(const Cta& cta, Slot slot, uint32_t time) {
  const auto found = pending_.find(KeyOf(cta, slot));
  if (found == pending_.end()) return;
  std::vector<Pending>& pending = found->second;
  int32_t last = -1;
  size_t count = 0;
  for (; count < pending.size() && pending[count].time <= time; ++count) {
    last = pending[count].event;
    if (last < 0) continue;
    events_[last].open = false;
    events_[last].end = now_;
  }
  pending.erase(pending.begin(), pending.begin() + static_cast<ptrdiff_t>(count));
  if (pending.empty()) pending_.erase(found);
  if (count == 0 || warp_ == nullptr) return;
  const int32_t wait = AddOfWarp(Kind::kWait, last < 0 ? "" : events_[last].name, {});
  if (wait < 0) return;
  events_[wait].ending = Ending::kSignal;
  events_[wait].cause = last;
  events_[wait].caused = now_;
}

void Trace::IssueHint(const char* name) {
  const int32_t issued = AddOfWarp(Kind::kOperation, name, {});
  if (issued < 0) return;
  Event& event = events_[issued];
  event.unit = Unit::kCopyEngine;
  event.started = true;
  event.start = now_;
  event.end = now_ + 1;
}

// ---- Waits and signals

void Trace::Wait(const char* name, const void* object, Arguments arguments) {
  wanted_.name = name;
  wanted_.objects.assign(1, object);
  wanted_.arguments.assign(arguments.begin(), arguments.end());
}

void Trace::LookUp(const Cta& cta, uint32_t address, const MBarrier& barrier) {
  if (warp_ == nullptr || !program_->instructions[instruction_].may_time_out) return;
  // Lanes may wait for several, of which the event names the first.
  if (wanted_.objects.empty()) {
    Wait("mbarrier",
         &barrier,
         {{"mbarrier", address},
          {"rank", cta.rank},
          {"phase", static_cast<int64_t>(barrier.phase)},
          {"pending arrivals", barrier.pending},
          {"pending bytes", barrier.transactions}});
  } else if (wanted_.objects.back() != &barrier) {
    wanted_.objects.push_back(&barrier);
  }
}

// The event of the operation that executes, or of the instruction, which makes one for each object
// that it contributes to.
int32_t Trace::Contribute(const char* name,
                          const void* object,
                          std::span<const Argument> arguments) {
  if (operation_ != nullptr) return operation_->event;
  if (warp_ == nullptr) return -1;
  for (const auto& [known, event] : signals_) {
    if (known == object) return event;
  }
  const int32_t event = AddOfWarp(Kind::kSignal, name, arguments);
  signals_.emplace_back(object, event);
  return event;
}

void Trace::Signal(const char* name, const void* object, Arguments arguments, bool completes) {
  const int32_t cause = Contribute(name, object, arguments);
  if (completes) EndWaits(object, cause);
}

void Trace::Arrive(const Cta& cta, const MBarrier& barrier) {
  // The lanes of a warp arrive one by one: the place is looked for once.
  for (const auto& signal : signals_) {
    if (warp_ != nullptr && signal.first == &barrier) return;
  }
  const BarrierPlace place = Find(cta, barrier);
  Signal("mbarrier", &barrier, {{"mbarrier", place.offset}, {"rank", place.rank}}, false);
}

void Trace::CompletePhase(const Cta& cta, const MBarrier& barrier) {
  const int32_t cause = Contribute("mbarrier", &barrier, {});
  const BarrierPlace place = Find(cta, barrier);
  const Argument arguments[] = {{"mbarrier", place.offset},
                                {"rank", place.rank},
                                {"phase", static_cast<int64_t>(barrier.phase) - 1}};
  Add({.kind = Kind::kPhase,
       .unit = Unit::kBarriers,
       .open = false,
       .warp = -1,
       .cta = NumberOf(*cta.cluster->ctas[place.rank]),
       .cause = cause,
       .name = "mbarrier",
       .start = now_,
       .end = now_},
      arguments);
  EndWaits(&barrier, cause);
}

void Trace::EndWaits(const void* object, int32_t cause) {
  const auto [first, last] = listeners_.equal_range(object);
  for (auto it = first; it != last; ++it) {
    Event& wait = events_[it->second];
    if (!wait.open) continue;
    wait.listening = false;
    wait.cause = cause;
    wait.caused = now_;
  }
  listeners_.erase(first, last);
}

void Trace::SetRegisters(uint32_t count) {
  const Argument argument{"registers", count};
  AddOfWarp(Kind::kRegisters, "registers", {&argument, 1});
}

// ---- What was recorded

const ptx::Statement* Trace::StatementOf(const Event& event) const {
  const auto& statements = program_->kernel->statements;
  if (event.instruction < 0 || event.instruction >= static_cast<int32_t>(statements.size()))
    return nullptr;
  return &statements[event.instruction];
}

std::string Trace::SourceOf(const Event& event) const {
  const ptx::Statement* statement = StatementOf(event);
  return statement == nullptr ? "" : program_->module->Describe(statement->location);
}

// ---- The Chrome trace

namespace {

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      quoted += escape;
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

// Half ticks, so that an arrow begins and ends inside a slice and not at its border.
std::string Time(uint64_t halves) {
  return std::to_string(halves / 2) + (halves % 2 != 0 ? ".5" : "");
}

// A thread of the Chrome trace: of one warp or unit, in which slices that overlap take several.
struct TrackKey {
  uint32_t cta;
  int32_t order;  // of the CTA's tracks, as they are shown
  Trace::Unit unit;
  int32_t warp;
  uint32_t line;
  bool operator<(const TrackKey& other) const {
    return std::tie(cta, order, line) < std::tie(other.cta, other.order, other.line);
  }
};

TrackKey KeyOfTrack(uint32_t cta, Trace::Unit unit, int32_t warp) {
  int32_t order = 0;
  switch (unit) {
    case Trace::Unit::kCopyEngine:
      order = 0;
      break;
    case Trace::Unit::kTensorPipe:
      order = 1;
      break;
    case Trace::Unit::kBarriers:
      order = INT32_MAX;
      break;
    default:
      order = 16 * (warp + 1) + static_cast<int32_t>(unit);
  }
  const bool shared = unit == Trace::Unit::kCopyEngine || unit == Trace::Unit::kTensorPipe ||
                      unit == Trace::Unit::kBarriers;
  return {cta, order, unit, shared ? -1 : warp, 0};
}

std::string NameOfTrack(const TrackKey& key) {
  static constexpr const char* kNames[] = {"",
                                           " tensor memory loads",
                                           " tensor memory stores",
                                           " cp.async",
                                           " wgmma",
                                           "tensor pipe",
                                           "copy engine",
                                           "mbarriers"};
  std::string name = key.warp >= 0 ? "warp " + std::to_string(key.warp) : "";
  name += kNames[static_cast<int>(key.unit)];
  if (key.line == 0) return name;
  return name + (key.unit == Trace::Unit::kWarp ? ", other lanes " : " ") +
         std::to_string(key.line + 1);
}

struct Slice {
  enum class Role : uint8_t { kEvent, kIssue };
  uint64_t start, end;
  int32_t event;
  Role role = Role::kEvent;
};

// One line of the file. Sorted by time, a slice before those that it holds.
struct Line {
  uint64_t halves;
  uint64_t length;
  uint32_t thread;
  char phase;
  Slice::Role role;
  int32_t event;
  uint64_t flow;
};

}  // namespace

std::string Trace::ChromeJson() const {
  // Slices, in the order in which they begin.
  std::vector<Slice> slices;
  for (size_t i = 0; i < events_.size(); ++i) {
    const Event& event = events_[i];
    const auto index = static_cast<int32_t>(i);
    if (event.kind == Kind::kPhase || event.kind == Kind::kRegisters) continue;
    slices.push_back({event.start, event.end, index});
    if (event.kind == Kind::kOperation)
      slices.push_back({event.issue - 1, event.issue, index, Slice::Role::kIssue});
  }
  std::stable_sort(slices.begin(), slices.end(), [](const Slice& a, const Slice& b) {
    return std::pair(a.start, ~a.end) < std::pair(b.start, ~b.end);
  });

  // Each on a line of its track that is free. A warp's life holds what stands on its first line.
  // One instruction that issues several operations is one slice.
  std::map<TrackKey, uint64_t> ends;
  std::map<std::tuple<uint32_t, int32_t, uint64_t>, TrackKey> issues;
  std::vector<std::pair<TrackKey, Slice>> placed;
  std::vector<TrackKey> issued(events_.size()), executed(events_.size());
  for (const Slice& slice : slices) {
    const Event& event = events_[slice.event];
    const bool is_issue = slice.role == Slice::Role::kIssue;
    TrackKey key = KeyOfTrack(event.cta, is_issue ? Unit::kWarp : event.unit, event.warp);
    if (is_issue) {
      const auto known = issues.find({event.cta, event.warp, event.issue});
      if (known != issues.end()) {
        issued[slice.event] = known->second;
        continue;
      }
    }
    if (event.kind == Kind::kWarp) {
      ends.emplace(key, 0);
    } else {
      for (;; ++key.line) {
        const auto [at, is_new] = ends.emplace(key, 0);
        if (at->second > slice.start) continue;
        at->second = slice.end;
        break;
      }
    }
    if (is_issue) issues.emplace(std::tuple(event.cta, int32_t{event.warp}, event.issue), key);
    (is_issue ? issued : executed)[slice.event] = key;
    placed.emplace_back(key, slice);
  }
  for (const Event& event : events_) {
    if (event.kind == Kind::kPhase) ends.emplace(KeyOfTrack(event.cta, event.unit, -1), 0);
  }
  // The numbers of the threads are their order.
  std::map<TrackKey, uint32_t> threads;
  for (const auto& [key, end] : ends) {
    const auto number = static_cast<uint32_t>(threads.size()) + 1;
    threads.emplace(key, number);
  }

  std::vector<Line> lines;
  for (const auto& [key, slice] : placed) {
    lines.push_back({2 * slice.start,
                     2 * (slice.end - slice.start),
                     threads.at(key),
                     'X',
                     slice.role,
                     slice.event,
                     0});
  }
  uint64_t flow = 0;
  for (size_t i = 0; i < events_.size(); ++i) {
    const Event& event = events_[i];
    const auto index = static_cast<int32_t>(i);
    const auto line = [&](char phase, uint64_t halves, uint32_t thread) {
      lines.push_back({halves, 0, thread, phase, Slice::Role::kEvent, index, flow});
    };
    switch (event.kind) {
      case Kind::kOperation:
        ++flow;
        line('s', 2 * event.issue - 1, threads.at(issued[i]));
        line('f', 2 * event.start + (event.end > event.start ? 1 : 0), threads.at(executed[i]));
        break;
      case Kind::kWait: {
        if (event.ending != Ending::kSignal || event.cause < 0) break;
        ++flow;
        line('s', 2 * event.caused - 1, threads.at(executed[event.cause]));
        line('f', 2 * event.end - 1, threads.at(executed[i]));
        break;
      }
      case Kind::kPhase:
        line('i', 2 * event.start, threads.at(KeyOfTrack(event.cta, event.unit, -1)));
        break;
      case Kind::kRegisters:
        line('C', 2 * event.end, 0);
        break;
      default:
        break;
    }
  }
  std::stable_sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) {
    return std::pair(a.halves, ~a.length) < std::pair(b.halves, ~b.length);
  });

  const auto number = [](uint64_t value) { return std::to_string(value); };
  const auto described = [&](const Event& event) {
    const ptx::Statement* statement = StatementOf(event);
    std::string text = std::string(event.name);
    if (event.kind == Kind::kOperation) text += " issued";
    if (event.kind == Kind::kWarp) text = "the end";
    if (event.warp >= 0) text += " by warp " + number(static_cast<uint64_t>(event.warp));
    const CtaPlace& cta = ctas_[event.cta];
    if (cta.cluster_size > 1) text += " of rank " + number(cta.rank);
    if (statement != nullptr) text += ", PTX line " + std::to_string(statement->line);
    return text;
  };
  const auto arguments = [&](const Event& event) {
    std::string text;
    const auto add = [&](std::string_view name, const std::string& value) {
      text += (text.empty() ? "" : ", ") + Quoted(name) + ": " + value;
    };
    if (const ptx::Statement* statement = StatementOf(event)) {
      add("PTX line", std::to_string(statement->line));
      add("opcode", Quoted(statement->opcode));
      const std::string source = SourceOf(event);
      if (!source.empty()) add("source", Quoted(source));
    }
    if (event.warp >= 0) add("lanes", Quoted(Hex(event.lanes)));
    for (const auto& [name, value] : ArgumentsOf(event)) add(name, std::to_string(value));
    if (event.kind == Kind::kOperation) {
      add("issue", number(event.issue));
      if (event.open) add("end", Quoted("none: the run ended first"));
    }
    if (event.kind == Kind::kPhase && event.cause >= 0)
      add("completed by", Quoted(described(events_[event.cause])));
    if (event.kind == Kind::kWait) {
      std::string ending;
      switch (event.ending) {
        case Ending::kNone:
          ending = "nothing: the run ended first";
          break;
        case Ending::kSignal:
          ending =
              event.cause < 0 ? "what the trace has no room for" : described(events_[event.cause]);
          break;
        case Ending::kLanes:
          ending = "the arrival of lanes " + Hex(event.more_lanes);
          break;
        case Ending::kTimeOut:
          ending = "its time limit";
          break;
        case Ending::kSpurious:
          ending = "no reason, as a try_wait may";
          break;
      }
      add("ended by", Quoted(ending));
    }
    return text;
  };
  const auto title = [&](const Event& event, Slice::Role role) -> std::string {
    if (role == Slice::Role::kIssue) return "issue " + std::string(event.name);
    std::string about;
    for (const auto& [name, value] : ArgumentsOf(event)) {
      const std::string_view key = name;
      if (key == "mbarrier") about += " " + Hex(static_cast<uint64_t>(value));
      if (key == "barrier") about += " " + std::to_string(value);
      if (key == "phase") about += " phase " + std::to_string(value);
    }
    switch (event.kind) {
      case Kind::kWait:
        return "wait: " + std::string(event.name) + about + (event.open ? " (open)" : "");
      case Kind::kSignal:
        return "signal: " + std::string(event.name) + about;
      case Kind::kOperation:
        return event.name;
      case Kind::kWarp:
        return "warp " + std::to_string(event.warp);
      default:
        return event.name + about;
    }
  };

  std::string json = "{\"displayTimeUnit\": \"ns\",\n\"otherData\": {\"kernel\": " +
                     Quoted(program_->kernel->name) +
                     ", \"clock\": \"1 us is an instruction of a warp or a step of a unit: an "
                     "order, not a duration\", \"truncated\": " +
                     (missing_ != 0 ? "true" : "false") +
                     ", \"missing events\": " + number(missing_) + "},\n\"traceEvents\": [\n";
  const auto process = [&](uint32_t cta) { return number(uint64_t{cta} + 1); };
  bool first = true;
  const auto emit = [&](const std::string& text) {
    json += (first ? "" : ",\n") + ("{" + text + "}");
    first = false;
  };
  for (size_t i = 0; i < ctas_.size(); ++i) {
    const CtaPlace& cta = ctas_[i];
    std::string name = "CTA (" + number(cta.index[0]) + ", " + number(cta.index[1]) + ", " +
                       number(cta.index[2]) + ")";
    if (cta.cluster_size > 1)
      name += ", rank " + number(cta.rank) + " of cluster " + number(cta.cluster);
    const std::string id = process(static_cast<uint32_t>(i));
    emit("\"ph\": \"M\", \"name\": \"process_name\", \"pid\": " + id +
         ", \"args\": {\"name\": " + Quoted(name) + "}");
    emit("\"ph\": \"M\", \"name\": \"process_sort_index\", \"pid\": " + id +
         ", \"args\": {\"sort_index\": " + id + "}");
  }
  std::vector<uint32_t> ctas_of_threads(threads.size() + 1);
  for (const auto& [key, thread] : threads) {
    ctas_of_threads[thread] = key.cta;
    const std::string where =
        "\"pid\": " + process(key.cta) + ", \"tid\": " + std::to_string(thread);
    emit("\"ph\": \"M\", \"name\": \"thread_name\", " + where +
         ", \"args\": {\"name\": " + Quoted(NameOfTrack(key)) + "}");
    emit("\"ph\": \"M\", \"name\": \"thread_sort_index\", " + where +
         ", \"args\": {\"sort_index\": " + std::to_string(thread) + "}");
  }
  for (const Line& line : lines) {
    const Event& event = events_[line.event];
    std::string text = "\"ph\": \"" + std::string(1, line.phase) +
                       "\", \"ts\": " + Time(line.halves) + ", \"pid\": ";
    if (line.phase == 'C') {
      text += process(event.cta) + ", \"name\": \"registers of warp " + std::to_string(event.warp) +
              "\", \"args\": {\"registers\": " + std::to_string(ArgumentsOf(event)[0].second) + "}";
      emit(text);
      continue;
    }
    text += process(ctas_of_threads[line.thread]) + ", \"tid\": " + std::to_string(line.thread);
    switch (line.phase) {
      case 'X':
        text += ", \"dur\": " + Time(line.length) +
                ", \"name\": " + Quoted(title(event, line.role)) + ", \"args\": {" +
                arguments(event) + "}";
        break;
      case 'i':
        text += ", \"s\": \"t\", \"name\": " + Quoted(title(event, line.role)) + ", \"args\": {" +
                arguments(event) + "}";
        break;
      default:
        text += ", \"cat\": \"flow\", \"id\": " + number(line.flow) +
                ", \"name\": " + (event.kind == Kind::kWait ? "\"ends\"" : "\"issues\"");
        if (line.phase == 'f') text += ", \"bp\": \"e\"";
    }
    emit(text);
  }
  if (missing_ != 0) {
    emit("\"ph\": \"i\", \"s\": \"g\", \"ts\": " + Time(2 * now_) + ", \"pid\": 1, \"name\": " +
         Quoted("the trace was cut: " + number(missing_) + " later events are missing"));
  }
  return json + "\n]}\n";
}

}  // namespace jax_fa4::emulator
