// Branches, barriers of threads, and what lanes of a warp do together.
//
// Source: PTX ISA 9.0, 9.7.12 (Control flow), 9.7.13 (Parallel synchronization), 9.7.9.6 (shfl),
// 9.7.20 (Miscellaneous).

#include <bit>
#include <cstring>

#include "csrc/emulator/machine.h"

namespace jax_fa4::emulator {
namespace {

// ---- Branches

Outcome Branch(Context& context, const Inst& inst) {
  Group& group = context.group;
  if (context.mask == group.mask) {
    group.pc = inst.target;
    return Outcome::kMoved;
  }
  Group taken = group;
  taken.mask = context.mask;
  taken.pc = inst.target;
  group.mask &= ~context.mask;
  ++group.pc;
  context.warp.groups.push_back(taken);
  return Outcome::kMoved;
}

Outcome BranchIndexed(Context& context, const Inst& inst) {
  const std::vector<int32_t>& table = context.machine.program().branch_tables[inst.mode[0]];
  const uint32_t* index = context.Row(inst.source[0]);
  Group& group = context.group;
  const uint32_t stay = group.mask & ~context.mask;
  std::vector<Group> moved;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    if (index[lane] >= table.size()) {
      context.machine.Misuse(context,
                             lane,
                             "brx.idx has index " + std::to_string(index[lane]) + " of a list of " +
                                 std::to_string(table.size()) + " targets.");
      return Outcome::kMoved;
    }
    Group one = group;
    one.mask = 1u << lane;
    one.pc = table[index[lane]];
    moved.push_back(one);
  }
  group.mask = stay;
  ++group.pc;
  context.warp.groups.insert(context.warp.groups.end(), moved.begin(), moved.end());
  return Outcome::kMoved;
}

void LeaveBarriers(Machine& machine, Cta& cta);

Outcome Exit(Context& context, const Inst&) {
  context.warp.live &= ~context.mask;
  LeaveBarriers(context.machine, context.cta);
  if (context.mask != context.group.mask) ++context.group.pc;
  context.group.mask &= ~context.mask;
  // Lanes that had to converge with these need not wait any longer.
  for (Group& group : context.warp.groups) group.blocked = false;
  return Outcome::kMoved;
}

Outcome Trap(Context& context, const Inst&) {
  context.machine.Misuse(context, std::countr_zero(context.mask), "the kernel executed a trap.");
  return Outcome::kMoved;
}

// ---- Convergence

// Whether all live lanes of `member` are here; if not, the lanes park until they are.
bool Converged(const Context& context, uint32_t member) {
  return (context.warp.live & member & ~context.mask) == 0;
}

std::string WaitsForLanes(Context& context, const Inst& inst) {
  uint32_t member = inst.mode[0] != 0 ? 0 : ~0u;
  for (int lane = 0; inst.mode[0] != 0 && lane < kLanes; ++lane) {
    if (context.mask >> lane & 1) member |= context.Row(inst.source[inst.mode[0] - 1])[lane];
  }
  char text[80];
  std::snprintf(text,
                sizeof(text),
                "wait for lanes %08x of their warp to arrive here",
                context.warp.live & member & ~context.mask);
  return text;
}

// The lanes of `lanes` whose member mask (source mode[0] - 1) is that of the lowest of them, and
// that mask. Lanes that are here together may be members of different sets, each of which
// synchronises for itself. Fails if a lane is not in its own mask.
bool Members(
    Context& context, const Inst& inst, uint32_t lanes, uint32_t* alike, uint32_t* member) {
  const uint32_t* masks = context.Row(inst.source[inst.mode[0] - 1]);
  *member = masks[std::countr_zero(lanes)];
  *alike = 0;
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (masks[lane] == *member) *alike |= 1u << lane;
  }
  if ((*alike & ~*member) == 0) return true;
  context.machine.Misuse(
      context,
      std::countr_zero(*alike & ~*member),
      "a lane executes a .sync instruction whose member mask does not contain it.");
  return false;
}

// Lets each set of lanes with the same member mask that is complete execute an instruction; the
// others wait.
template <Outcome (*kExecute)(Context&, const Inst&)>
Outcome Together(Context& context, const Inst& inst) {
  const uint32_t all = context.mask;
  uint32_t done = 0;
  for (uint32_t rest = all, alike; rest != 0; rest &= ~alike) {
    uint32_t member;
    if (!Members(context, inst, rest, &alike, &member)) return Outcome::kMoved;
    context.mask = alike;
    if (!Converged(context, member)) continue;
    if (kExecute(context, inst) != Outcome::kNext) return Outcome::kMoved;
    done |= alike;
  }
  context.mask = all;
  if (done == all) return Outcome::kNext;
  if (done == 0) return Outcome::kBlocked;
  Group next = context.group;
  next.mask = done;
  next.wait = -1;
  ++next.pc;
  context.group.mask &= ~done;
  context.warp.groups.push_back(next);
  return Outcome::kMoved;
}

// Lanes may execute bar.warp.sync at different places of the program: it is the member mask that
// makes them meet.
Outcome WarpSync(Context& context, const Inst& inst) {
  uint32_t alike, member;
  if (!Members(context, inst, context.mask, &alike, &member)) return Outcome::kMoved;
  if (alike != context.mask) {
    // Each set of lanes is a group of its own until it goes on.
    std::vector<Group> sets;
    for (uint32_t rest = context.mask; rest != 0; rest &= ~alike) {
      if (!Members(context, inst, rest, &alike, &member)) return Outcome::kMoved;
      Group set = context.group;
      set.mask = alike;
      set.arrived = true;
      set.wait = -1;
      sets.push_back(set);
    }
    context.group.mask &= ~context.mask;
    ++context.group.pc;
    context.warp.groups.insert(context.warp.groups.end(), sets.begin(), sets.end());
    return Outcome::kMoved;
  }
  Warp& warp = context.warp;
  const auto meets = [&](const Group& group) {
    if (&group == &context.group || !group.arrived) return false;
    const Inst& other = context.machine.program().instructions[group.pc];
    return other.execute == WarpSync &&
           context.Row(other.source[0])[std::countr_zero(group.mask)] == member;
  };
  uint32_t here = context.mask;
  for (const Group& group : warp.groups) {
    if (meets(group)) here |= group.mask;
  }
  if ((warp.live & member & ~here) != 0) {
    context.group.arrived = true;
    return Outcome::kBlocked;
  }
  for (Group& group : warp.groups) {
    if (!meets(group)) continue;
    ++group.pc;
    group.arrived = false;
    group.blocked = false;
  }
  context.group.arrived = false;
  context.machine.Unify(warp, here);
  context.machine.Advance(warp, here);
  return Outcome::kNext;
}

// Always the same lane, as kernels rely on it: the lowest.
Outcome Elect(Context& context, const Inst& inst) {
  const int leader = std::countr_zero(context.mask);
  if (inst.destination[0]) {
    uint32_t* row = context.MutableRow(inst.destination[0]);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (context.mask >> lane & 1) row[lane] = static_cast<uint32_t>(leader);
    }
  }
  context.SetPredicate(inst.destination[1], 1u << leader);
  return Outcome::kNext;
}

enum ShuffleMode : uint32_t { kUp, kDown, kButterfly, kIndex };

Outcome Shuffle(Context& context, const Inst& inst) {
  uint32_t from[kLanes];
  std::memcpy(from, context.Row(inst.source[0]), sizeof(from));
  const uint32_t* b = context.Row(inst.source[1]);
  const uint32_t* c = context.Row(inst.source[2]);
  uint32_t* row = context.MutableRow(inst.destination[0]);
  uint32_t result[kLanes];
  uint32_t in_range = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int value = static_cast<int>(b[lane] & 31);
    const int clamp = static_cast<int>(c[lane] & 31);
    const int segment = static_cast<int>(c[lane] >> 8 & 31);
    const int most = (lane & segment) | (clamp & ~segment);
    const int least = lane & segment;
    int source = lane;
    bool valid = false;
    switch (inst.mode[1]) {
      case kUp:
        source = lane - value;
        valid = source >= most;
        break;
      case kDown:
        source = lane + value;
        valid = source <= most;
        break;
      case kButterfly:
        source = lane ^ value;
        valid = source <= most;
        break;
      default:
        source = least | (value & ~segment);
        valid = source <= most;
    }
    if (!valid) source = lane;
    if (context.mask >> lane & 1 && valid && !(context.mask >> source & 1)) {
      context.machine.Misuse(
          context,
          lane,
          "shfl.sync reads lane " + std::to_string(source) + ", which does not take part.");
      return Outcome::kMoved;
    }
    result[lane] = from[source];
    in_range |= static_cast<uint32_t>(valid) << lane;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (context.mask >> lane & 1) row[lane] = result[lane];
  }
  context.SetPredicate(inst.destination[1], in_range);
  return Outcome::kNext;
}

enum VoteMode : uint32_t { kAll, kAny, kUniform, kBallot };

Outcome Vote(Context& context, const Inst& inst) {
  const uint32_t yes = context.Predicate(inst.source[0]) & context.mask;
  if (inst.mode[1] == kBallot) {
    uint32_t* row = context.MutableRow(inst.destination[0]);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (context.mask >> lane & 1) row[lane] = yes;
    }
    return Outcome::kNext;
  }
  const bool result = inst.mode[1] == kAll   ? yes == context.mask
                      : inst.mode[1] == kAny ? yes != 0
                                             : yes == 0 || yes == context.mask;
  context.SetPredicate(inst.destination[0], result ? ~0u : 0);
  return Outcome::kNext;
}

Outcome ActiveMask(Context& context, const Inst& inst) {
  uint32_t* row = context.MutableRow(inst.destination[0]);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (context.mask >> lane & 1) row[lane] = context.mask;
  }
  return Outcome::kNext;
}

Outcome Match(Context& context, const Inst& inst) {
  const auto value = [&](int lane) -> uint64_t {
    return inst.source[0].bits == 64 ? context.Wide(inst.source[0])[lane]
                                     : context.Row(inst.source[0])[lane];
  };
  uint32_t result[kLanes] = {};
  uint32_t all = ~0u;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    for (int other = 0; other < kLanes; ++other) {
      if (context.mask >> other & 1 && value(other) == value(lane)) result[lane] |= 1u << other;
    }
    if (result[lane] != context.mask) all = 0;
  }
  uint32_t* row = context.MutableRow(inst.destination[0]);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (context.mask >> lane & 1)
      row[lane] = inst.mode[1] == kAll ? context.mask & all : result[lane];
  }
  context.SetPredicate(inst.destination[1], all);
  return Outcome::kNext;
}

enum ReduceMode : uint32_t {
  kAdd,
  kMinSigned,
  kMaxSigned,
  kMinUnsigned,
  kMaxUnsigned,
  kAnd,
  kOr,
  kXor,
  kMinFloat,
  kMaxFloat
};

Outcome Reduce(Context& context, const Inst& inst) {
  const uint32_t* from = context.Row(inst.source[0]);
  const bool absolute = inst.mode[2] & 1, propagate = inst.mode[2] & 2;
  bool first = true;
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    uint32_t x = from[lane];
    if (absolute) x &= 0x7fffffff;
    if (first) {
      result = x;
      first = false;
      continue;
    }
    const auto a = std::bit_cast<float>(result), b = std::bit_cast<float>(x);
    switch (inst.mode[1]) {
      case kAdd:
        result += x;
        break;
      case kMinSigned:
        result =
            static_cast<uint32_t>(std::min(static_cast<int32_t>(result), static_cast<int32_t>(x)));
        break;
      case kMaxSigned:
        result =
            static_cast<uint32_t>(std::max(static_cast<int32_t>(result), static_cast<int32_t>(x)));
        break;
      case kMinUnsigned:
        result = std::min(result, x);
        break;
      case kMaxUnsigned:
        result = std::max(result, x);
        break;
      case kAnd:
        result &= x;
        break;
      case kOr:
        result |= x;
        break;
      case kXor:
        result ^= x;
        break;
      default:
        if (propagate && (a != a || b != b)) {
          result = 0x7fffffff;
        } else if (a != a) {
          result = x;
        } else if (b == b) {
          result = std::bit_cast<uint32_t>(inst.mode[1] == kMinFloat ? (b < a ? b : a)
                                                                     : (a < b ? b : a));
        }
    }
  }
  if (inst.mode[1] >= kMinFloat && (result & 0x7fffffff) > 0x7f800000) result = 0x7fffffff;
  uint32_t* row = context.MutableRow(inst.destination[0]);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (context.mask >> lane & 1) row[lane] = result;
  }
  return Outcome::kNext;
}

// ---- Barriers of threads

// Bits of mode[0].
constexpr uint32_t kWaits = 1, kAligned = 2, kHasCount = 4;
// mode[1] of barriers: what they reduce by.
enum Reduction : uint32_t { kNoReduction, kPopulation, kConjunction, kDisjunction };

std::string WaitsForBarrier(Context& context, const Inst& inst) {
  const uint32_t number = context.Row(inst.source[0])[std::countr_zero(context.mask)];
  if (number >= 16) return "wait";
  if (!context.group.arrived && inst.mode[0] & kAligned) return WaitsForWarp(context, inst);
  const NamedBarrier& barrier = context.cta.barriers[number];
  return "wait at barrier " + std::to_string(number) + ", where " +
         std::to_string(barrier.arrived) + " of " + std::to_string(barrier.expected) +
         " threads have arrived";
}

// Whether all have arrived at a barrier that it expects. Threads that have ended count as arrived
// where no count was named.
bool IsComplete(const Cta& cta, size_t number) {
  const NamedBarrier& barrier = cta.barriers[number];
  if (barrier.arrived == barrier.expected || !barrier.awaits_all)
    return barrier.arrived == barrier.expected;
  for (const auto& warp : cta.warps) {
    if ((warp->live & ~warp->arrived[number]) != 0) return false;
  }
  return true;
}

void CompleteBarrier(Machine& machine, Cta& cta, size_t number) {
  NamedBarrier& barrier = cta.barriers[number];
  std::swap(barrier.completed, barrier.arriving);
  barrier.arriving.Clear();
  barrier.arrived = 0;
  barrier.awaits_all = false;
  for (const auto& warp : cta.warps) {
    if (warp->arrived[number] != 0) warp->votes[number] = barrier.votes;
    warp->arrived[number] = 0;
  }
  barrier.votes = 0;
  ++barrier.generation;
  machine.Wake(cta);
}

// Threads have ended, for which others may have waited at barriers.
void LeaveBarriers(Machine& machine, Cta& cta) {
  for (uint32_t i = 0; i < cta.barriers.size(); ++i) {
    const NamedBarrier& barrier = cta.barriers[i];
    if (!barrier.awaits_all || !IsComplete(cta, i)) continue;
    machine.Signal("barrier",
                   &barrier,
                   {{"barrier", i}, {"arrived", barrier.arrived}, {"expected", barrier.expected}},
                   true);
    CompleteBarrier(machine, cta, i);
  }
}

Outcome Barrier(Context& context, const Inst& inst) {
  Machine& machine = context.machine;
  Warp& warp = context.warp;
  Group& group = context.group;
  const int first = std::countr_zero(context.mask);
  const uint32_t number = context.Row(inst.source[0])[first];
  if (number >= 16) {
    machine.Misuse(
        context, first, "there are barriers 0 to 15, not " + std::to_string(number) + ".");
    return Outcome::kMoved;
  }
  NamedBarrier& barrier = context.cta.barriers[number];
  if (!group.arrived) {
    if (inst.mode[0] & kAligned && !Converged(context, ~0u)) return Outcome::kBlocked;
    uint32_t expected = 0;
    if (inst.mode[0] & kHasCount) {
      expected = context.Row(inst.source[1])[first];
      if (expected == 0 || expected % kLanes != 0) {
        machine.Misuse(context,
                       first,
                       "the thread count of a barrier must be a positive multiple of 32, not " +
                           std::to_string(expected) + ".");
        return Outcome::kMoved;
      }
    } else {
      expected = static_cast<uint32_t>(context.cta.warps.size()) * kLanes;
    }
    if (barrier.arrived != 0 && barrier.expected != expected) {
      machine.Misuse(context,
                     first,
                     "barrier " + std::to_string(number) + " expects " +
                         std::to_string(barrier.expected) + " threads, but here " +
                         std::to_string(expected) + " are named.");
      return Outcome::kMoved;
    }
    if (barrier.arrived != 0 && barrier.reduction != inst.mode[1]) {
      machine.Misuse(context,
                     first,
                     "at barrier " + std::to_string(number) +
                         ", threads arrive by barriers that reduce differently, or not at all.");
      return Outcome::kMoved;
    }
    barrier.reduction = inst.mode[1];
    if (inst.mode[1] != kNoReduction) {
      const uint32_t yes = context.Predicate(inst.source[2]);
      const uint32_t votes = inst.mode[1] == kConjunction ? ~yes : yes;
      barrier.votes += static_cast<uint32_t>(std::popcount(votes & context.mask));
    }
    barrier.expected = expected;
    barrier.awaits_all |= !(inst.mode[0] & kHasCount);
    barrier.arriving.Join(machine.KnowledgeOf(warp, context.mask));
    machine.Advance(warp, context.mask);
    // An aligned barrier counts a whole warp, whichever of its lanes have ended.
    const bool whole = (warp.live & ~context.mask) == 0;
    barrier.arrived += whole ? kLanes : static_cast<uint32_t>(std::popcount(context.mask));
    warp.arrived[number] |= context.mask;
    group.ticket = barrier.generation;
    machine.Signal("barrier",
                   &barrier,
                   {{"barrier", number}, {"arrived", barrier.arrived}, {"expected", expected}},
                   IsComplete(context.cta, number));
    if (barrier.arrived > barrier.expected) {
      machine.Misuse(context,
                     first,
                     "more threads arrive at barrier " + std::to_string(number) + " than the " +
                         std::to_string(barrier.expected) + " that it expects.");
      return Outcome::kMoved;
    }
    if (IsComplete(context.cta, number)) CompleteBarrier(machine, context.cta, number);
    if (!(inst.mode[0] & kWaits)) return Outcome::kNext;
    group.arrived = true;
  }
  if (barrier.generation == group.ticket) {
    return machine.BlockedOn(
        "barrier",
        &barrier,
        {{"barrier", number}, {"arrived", barrier.arrived}, {"expected", barrier.expected}});
  }
  group.arrived = false;
  machine.Learn(warp, context.mask, barrier.completed);
  if ((warp.live & ~context.mask) == 0) machine.Unify(warp, context.mask);
  const uint32_t votes = warp.votes[number];
  if (inst.mode[1] == kPopulation) {
    uint32_t* row = context.MutableRow(inst.destination[0]);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (context.mask >> lane & 1) row[lane] = votes;
    }
  } else if (inst.mode[1] != kNoReduction) {
    context.SetPredicate(inst.destination[0],
                         (votes == 0) == (inst.mode[1] == kConjunction) ? ~0u : 0);
  }
  return Outcome::kNext;
}

std::string WaitsForCluster(Context& context, const Inst&) {
  return "wait at barrier.cluster, where " + std::to_string(context.cta.cluster->barrier.arrived) +
         " threads have arrived";
}

uint32_t LiveThreadsOfCluster(const Cta& cta) {
  uint32_t count = 0;
  for (const auto& one : cta.cluster->ctas) {
    for (const auto& warp : one->warps) count += static_cast<uint32_t>(std::popcount(warp->live));
  }
  return count;
}

void CompleteCluster(Context& context) {
  NamedBarrier& barrier = context.cta.cluster->barrier;
  if (barrier.arrived == 0 || barrier.arrived < LiveThreadsOfCluster(context.cta)) return;
  context.machine.Signal("cluster barrier", &barrier, {{"arrived", barrier.arrived}}, true);
  std::swap(barrier.completed, barrier.arriving);
  barrier.arriving.Clear();
  barrier.arrived = 0;
  ++barrier.generation;
  context.machine.Wake(context.cta);
}

// mode[1]: whether the arrival releases.
Outcome ClusterArrive(Context& context, const Inst& inst) {
  if (inst.mode[2] && !Converged(context, ~0u)) return Outcome::kBlocked;
  NamedBarrier& barrier = context.cta.cluster->barrier;
  if (inst.mode[1]) {
    barrier.arriving.Join(context.machine.KnowledgeOf(context.warp, context.mask));
    context.machine.Advance(context.warp, context.mask);
  } else {
    // What fence.mbarrier_init has released: clocks know no part of what a thread has done, so that
    // this hands on what came before the initialisations as well.
    barrier.arriving.Join(context.warp.initialised);
  }
  barrier.arrived += static_cast<uint32_t>(std::popcount(context.mask));
  for (int lane = 0; lane < kLanes; ++lane) {
    if (context.mask >> lane & 1) context.warp.cluster_ticket[lane] = barrier.generation;
  }
  context.machine.Signal("cluster barrier", &barrier, {{"arrived", barrier.arrived}}, false);
  CompleteCluster(context);
  return Outcome::kNext;
}

Outcome ClusterWait(Context& context, const Inst& inst) {
  if (inst.mode[2] && !Converged(context, ~0u)) return Outcome::kBlocked;
  CompleteCluster(context);  // threads that ended do not keep the others waiting
  NamedBarrier& barrier = context.cta.cluster->barrier;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (context.mask >> lane & 1 && context.warp.cluster_ticket[lane] == barrier.generation)
      return context.machine.BlockedOn("cluster barrier", &barrier, {{"arrived", barrier.arrived}});
  }
  if (inst.mode[1]) context.machine.Learn(context.warp, context.mask, barrier.completed);
  return Outcome::kNext;
}

// ---- Registers of warps

std::string WaitsForRegisters(Context& context, const Inst& inst) {
  return "wait for " + std::to_string(inst.immediate[0]) + " registers a thread, of which " +
         std::to_string(context.warp.register_count) + " are held and " +
         std::to_string(context.cta.free_registers / kLanes) + " are free";
}

Outcome SetMaxRegisters(Context& context, const Inst& inst) {
  if (!Converged(context, ~0u)) return Outcome::kBlocked;
  Warp& warp = context.warp;
  const auto wanted = static_cast<uint32_t>(inst.immediate[0]);
  if (inst.mode[1]) {  // inc
    if (wanted < warp.register_count) {
      context.machine.Misuse(context,
                             -1,
                             "setmaxnreg.inc to " + std::to_string(wanted) + " is below the " +
                                 std::to_string(warp.register_count) + " registers held.");
      return Outcome::kMoved;
    }
    const uint32_t more = (wanted - warp.register_count) * kLanes;
    if (more > context.cta.free_registers) {
      return context.machine.BlockedOn(
          "registers",
          &context.cta.free_registers,
          {{"registers", wanted}, {"free", context.cta.free_registers / kLanes}});
    }
    context.cta.free_registers -= more;
  } else {
    if (wanted > warp.register_count) {
      context.machine.Misuse(context,
                             -1,
                             "setmaxnreg.dec to " + std::to_string(wanted) + " is above the " +
                                 std::to_string(warp.register_count) + " registers held.");
      return Outcome::kMoved;
    }
    context.cta.free_registers += (warp.register_count - wanted) * kLanes;
    context.machine.Signal("registers", &context.cta.free_registers, {{"registers", wanted}}, true);
    context.machine.Wake(context.cta);
  }
  warp.register_count = wanted;
  if (context.machine.trace() != nullptr) context.machine.trace()->SetRegisters(wanted);
  return Outcome::kNext;
}

// ---- Decoding

void DecodeBarrier(Decoder& decoder, Parts& parts, bool aligned_by_name) {
  Inst& inst = decoder.inst();
  parts.Take("cta");
  const std::string_view what = parts.Next();
  const bool reduces = what == "red";
  if (reduces) {
    inst.mode[1] = parts.Take("popc")  ? kPopulation
                   : parts.Take("and") ? kConjunction
                   : parts.Take("or")  ? kDisjunction
                                       : kNoReduction;
    if (inst.mode[1] == kNoReduction) decoder.Fail("barriers reduce by popc, and or or.");
  } else if (what != "sync" && what != "arrive") {
    decoder.Fail("a barrier's instruction is sync, arrive or red.");
  }
  const bool aligned = parts.Take("aligned") || aligned_by_name;
  inst.execute = Barrier;
  inst.describe_wait = WaitsForBarrier;
  inst.mode[0] = (what == "arrive" ? 0 : kWaits) | (aligned ? kAligned : 0);
  size_t at = 0, end = decoder.operand_count();
  if (reduces) {
    decoder.ExpectOperands(3, 4);
    const bool counts = inst.mode[1] == kPopulation;
    if (!parts.Take(counts ? "u32" : "pred")) decoder.Fail("barrier.red has the wrong type.");
    inst.destination[0] = counts ? decoder.Destination(decoder.Operand(0), 32)
                                 : decoder.PredicateDestination(decoder.Operand(0));
    ++at;
    inst.source[2] = decoder.PredicateSource(decoder.Operand(--end));
  } else {
    decoder.ExpectOperands(what == "arrive" ? 2 : 1, 2);
  }
  inst.source[0] = decoder.Source(decoder.Operand(at), 32);
  if (end - at == 2) {
    inst.source[1] = decoder.Source(decoder.Operand(at + 1), 32);
    inst.mode[0] |= kHasCount;
  }
}

void DecodeClusterBarrier(Decoder& decoder, Parts& parts) {
  Inst& inst = decoder.inst();
  const std::string_view what = parts.Next();
  if (what != "arrive" && what != "wait") decoder.Fail("barrier.cluster arrives or waits.");
  const bool relaxed = parts.Take("relaxed");
  if (!relaxed) parts.Take(what == "arrive" ? "release" : "acquire");
  inst.mode[2] = parts.Take("aligned");
  inst.mode[1] = !relaxed;
  inst.execute = what == "arrive" ? ClusterArrive : ClusterWait;
  if (what == "wait") inst.describe_wait = WaitsForCluster;
  decoder.ExpectOperands(0, 0);
}

// The destination of an instruction that may give a predicate as well: `d|p`.
void DecodePair(Decoder& decoder, const ptx::Operand& operand, int bits) {
  Inst& inst = decoder.inst();
  if (operand.kind == ptx::Operand::Kind::kPair) {
    if (operand.elements[0].kind != ptx::Operand::Kind::kSink) {
      inst.destination[0] = decoder.Destination(operand.elements[0], bits);
    }
    inst.destination[1] = decoder.PredicateDestination(operand.elements[1]);
  } else {
    inst.destination[0] = decoder.Destination(operand, bits);
  }
}

void Member(Decoder& decoder, size_t operand, uint32_t source) {
  Inst& inst = decoder.inst();
  inst.source[source] = decoder.Source(decoder.Operand(operand), 32);
  inst.mode[0] = source + 1;
  inst.describe_wait = WaitsForLanes;
}

bool Lookup(std::string_view name,
            std::initializer_list<std::pair<std::string_view, uint32_t>> table,
            uint32_t* value) {
  for (const auto& [key, found] : table) {
    if (key == name) {
      *value = found;
      return true;
    }
  }
  return false;
}

}  // namespace

bool DecodeControl(Decoder& decoder, Parts parts) {
  Inst& inst = decoder.inst();
  const std::string_view name = parts.Next();
  if (name == "bra") {
    parts.Take("uni");
    decoder.ExpectOperands(1, 1);
    inst.target = decoder.Label(decoder.Operand(0));
    inst.execute = Branch;
  } else if (name == "brx") {
    if (!parts.Take("idx")) decoder.Fail("only brx.idx is known.");
    parts.Take("uni");
    decoder.ExpectOperands(2, 2);
    inst.source[0] = decoder.Source(decoder.Operand(0), 32);
    const std::vector<std::string>* targets = decoder.BranchTargets(decoder.Operand(1));
    if (targets == nullptr) decoder.Fail("brx.idx needs a list of .branchtargets.");
    std::vector<int32_t> table;
    for (const std::string& target : *targets) {
      ptx::Operand label;
      label.kind = ptx::Operand::Kind::kSymbol;
      label.symbol = target;
      table.push_back(decoder.Label(label));
    }
    inst.mode[0] = static_cast<uint32_t>(decoder.AddBranchTable(std::move(table)));
    inst.execute = BranchIndexed;
  } else if (name == "ret" || name == "exit") {
    parts.Take("uni");
    inst.execute = Exit;
  } else if (name == "trap" || name == "brkpt") {
    inst.execute = Trap;
  } else if (name == "nanosleep") {
    parts.Take("u32");
    inst.execute = Nothing;
  } else if (name == "griddepcontrol") {
    // Launches do not overlap here: what the earlier grid did is done.
    if (!parts.Take("wait") && !parts.Take("launch_dependents"))
      decoder.Fail("griddepcontrol waits or launches.");
    inst.execute = Nothing;
  } else if (name == "bar" && parts.Take("warp")) {
    parts.Take("sync");
    decoder.ExpectOperands(1, 1);
    Member(decoder, 0, 0);
    inst.execute = WarpSync;
  } else if (name == "barrier" && parts.Take("cluster")) {
    DecodeClusterBarrier(decoder, parts);
  } else if (name == "bar" || name == "barrier") {
    DecodeBarrier(decoder, parts, name == "bar");
  } else if (name == "elect") {
    if (!parts.Take("sync")) return false;
    decoder.ExpectOperands(2, 2);
    DecodePair(decoder, decoder.Operand(0), 32);
    Member(decoder, 1, 0);
    inst.execute = Together<Elect>;
  } else if (name == "shfl") {
    if (!parts.Take("sync")) decoder.Fail("shfl without .sync is not supported.");
    uint32_t mode;
    if (!Lookup(parts.Next(),
                {{"up", kUp}, {"down", kDown}, {"bfly", kButterfly}, {"idx", kIndex}},
                &mode)) {
      decoder.Fail("shfl.sync is up, down, bfly or idx.");
    }
    inst.mode[1] = mode;
    if (!parts.Take("b32")) decoder.Fail("shfl.sync moves .b32.");
    decoder.ExpectOperands(5, 5);
    DecodePair(decoder, decoder.Operand(0), 32);
    for (int i = 0; i < 3; ++i) inst.source[i] = decoder.Source(decoder.Operand(1 + i), 32);
    Member(decoder, 4, 3);
    inst.execute = Together<Shuffle>;
  } else if (name == "vote") {
    if (!parts.Take("sync")) decoder.Fail("vote without .sync is not supported.");
    uint32_t mode;
    if (!Lookup(parts.Next(),
                {{"all", kAll}, {"any", kAny}, {"uni", kUniform}, {"ballot", kBallot}},
                &mode)) {
      decoder.Fail("vote.sync is all, any, uni or ballot.");
    }
    inst.mode[1] = mode;
    if (!parts.Take(mode == kBallot ? "b32" : "pred"))
      decoder.Fail("vote.sync has the wrong type.");
    decoder.ExpectOperands(3, 3);
    inst.destination[0] = mode == kBallot ? decoder.Destination(decoder.Operand(0), 32)
                                          : decoder.PredicateDestination(decoder.Operand(0));
    inst.source[0] = decoder.PredicateSource(decoder.Operand(1));
    Member(decoder, 2, 1);
    inst.execute = Together<Vote>;
  } else if (name == "activemask") {
    parts.Take("b32");
    decoder.ExpectOperands(1, 1);
    inst.destination[0] = decoder.Destination(decoder.Operand(0), 32);
    inst.execute = ActiveMask;
  } else if (name == "match") {
    const std::string_view what = parts.Next();
    if ((what != "any" && what != "all") || !parts.Take("sync"))
      decoder.Fail("match is any.sync or all.sync.");
    inst.mode[1] = what == "all" ? kAll : kAny;
    const int bits = parts.Take("b64") ? 64 : 32;
    if (bits == 32 && !parts.Take("b32")) decoder.Fail("match.sync compares .b32 or .b64.");
    decoder.ExpectOperands(3, 3);
    DecodePair(decoder, decoder.Operand(0), 32);
    inst.source[0] = decoder.Source(decoder.Operand(1), bits);
    Member(decoder, 2, 1);
    inst.execute = Together<Match>;
  } else if (name == "redux") {
    if (!parts.Take("sync")) return false;
    const std::string_view what = parts.Next();
    if (parts.Take("abs")) inst.mode[2] |= 1;
    if (parts.Take("NaN")) inst.mode[2] |= 2;
    const std::string_view type = parts.Next();
    uint32_t mode;
    if (!Lookup(std::string(what) + "." + std::string(type),
                {{"add.s32", kAdd},
                 {"add.u32", kAdd},
                 {"min.s32", kMinSigned},
                 {"max.s32", kMaxSigned},
                 {"min.u32", kMinUnsigned},
                 {"max.u32", kMaxUnsigned},
                 {"and.b32", kAnd},
                 {"or.b32", kOr},
                 {"xor.b32", kXor},
                 {"min.f32", kMinFloat},
                 {"max.f32", kMaxFloat}},
                &mode)) {
      decoder.Fail("this redux.sync is not supported.");
    }
    inst.mode[1] = mode;
    decoder.ExpectOperands(3, 3);
    inst.destination[0] = decoder.Destination(decoder.Operand(0), 32);
    inst.source[0] = decoder.Source(decoder.Operand(1), 32);
    Member(decoder, 2, 1);
    inst.execute = Together<Reduce>;
  } else if (name == "setmaxnreg") {
    const std::string_view what = parts.Next();
    if ((what != "inc" && what != "dec") || !parts.Take("sync") || !parts.Take("aligned") ||
        !parts.Take("u32")) {
      decoder.Fail("setmaxnreg is inc or dec, .sync.aligned.u32.");
    }
    decoder.ExpectOperands(1, 1);
    inst.immediate[0] = decoder.Constant(decoder.Operand(0));
    if (inst.immediate[0] < 24 || inst.immediate[0] > 256 || inst.immediate[0] % 8 != 0) {
      decoder.Fail("setmaxnreg takes a multiple of 8 from 24 to 256.");
    }
    inst.mode[1] = what == "inc";
    inst.execute = SetMaxRegisters;
    inst.describe_wait = WaitsForRegisters;
  } else {
    return false;
  }
  if (!parts.done())
    decoder.Fail("modifier \"." + std::string(parts.Peek()) + "\" is not supported here.");
  return true;
}

}  // namespace jax_fa4::emulator
