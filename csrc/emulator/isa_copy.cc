// Asynchronous copies: the copy engine (cp.async.bulk, tensors and plain) and cp.async.
//
// Source: PTX ISA 9.0, 9.7.9.25 (Asynchronous copy), 9.7.9.27 (Tensor copy).

#include <array>
#include <bit>
#include <cstring>

#include "csrc/emulator/machine.h"
#include "csrc/emulator/tensor_map.h"

namespace jax_fa4::emulator {
namespace {

// mode[0] of all copies: what they copy, and how they signal.
enum Flag : uint32_t {
  kTensor = 1,      // by a tensor map
  kToGlobal = 2,    // from shared memory to global memory
  kFromShared = 4,  // from this CTA's shared memory to another's
  kReduce = 8,      // adds, or otherwise combines, instead of storing
  kMulticast = 16,
  kClusterAddress = 32,  // the destination is given in shared::cluster
};

// An address operand, in shared::cluster. One without a rank is in this CTA, unless it is given in
// shared::cluster (`cluster`).
uint32_t SharedAddress(
    const Context& context, const Ref& base, int64_t offset, int lane, bool cluster = false) {
  const auto address = static_cast<uint32_t>(LaneValue(context, base, lane) + offset);
  return cluster || address >> 24 != 0 ? address : address | context.cta.rank << 24;
}

// The place of `size` bytes of shared memory; none after a report.
std::optional<Machine::SharedPlace> FindPlace(
    Context& context, int lane, uint32_t address, uint32_t size, uint32_t alignment) {
  const auto place = context.machine.FindShared(context.cta, address, size);
  const bool aligned = address % alignment == 0;
  if (place && aligned) return place;
  context.machine.Misuse(context,
                         lane,
                         "a bulk copy uses shared address " + Hex(address) + " (" +
                             std::to_string(size) + " bytes), which is " +
                             (aligned ? "outside of the CTA's shared memory."
                                      : "not aligned to " + std::to_string(alignment) + " bytes."),
                         true,
                         Report::Kind::kMemory);
  return std::nullopt;
}

// Whether a bulk copy can use `size` bytes of global memory. Reports it if not.
bool CheckGlobal(Context& context, int lane, uint64_t address, uint32_t size, bool write) {
  if (context.machine.FindGlobal(address, size, write) != nullptr && address % 16 == 0) return true;
  context.machine.Misuse(context,
                         lane,
                         std::string("a bulk copy ") + (write ? "writes" : "reads") +
                             " global address " + Hex(address) + " (" + std::to_string(size) +
                             " bytes), which is out of range" + (write ? ", not writable" : "") +
                             " or not aligned to 16 bytes.",
                         true,
                         Report::Kind::kMemory);
  return false;
}

// How many bytes a bulk copy is told to move; 0 after a report.
uint32_t BulkBytes(Context& context, const Inst& inst, int lane) {
  const auto size = static_cast<uint32_t>(LaneValue(context, inst.source[2], lane));
  if (size != 0 && size % 16 == 0) return size;
  context.machine.Misuse(context,
                         lane,
                         "a bulk copy's size must be a positive multiple of 16 bytes, not " +
                             std::to_string(size) + ".");
  return 0;
}

// Whether every lane can issue a copy now.
bool SlotsAreFree(const Context& context) {
  return context.cta.free_copy_slots.size() >= static_cast<size_t>(std::popcount(context.mask));
}

Outcome WaitForSlots(Context& context) {
  return context.machine.BlockedOn("copies in flight",
                                   &context.cta.free_copy_slots,
                                   {{"copies", static_cast<int64_t>(context.cta.copies.size())}});
}

std::string WaitsForCopies(Context& context, const Inst&) {
  return "wait for some of the " + std::to_string(context.cta.copies.size()) +
         " copies in flight to end";
}

std::unique_ptr<Operation> NewCopy(Context& context, int lane, const char* name) {
  Machine& machine = context.machine;
  return machine.NewOperation(context, lane, name, machine.TakeCopySlot(context.cta));
}

void Enqueue(Context& context, std::unique_ptr<Operation> operation) {
  context.cta.copies.push_back(std::move(operation));
  context.machine.Advance(context.warp, context.mask);
}

// ---- Copies to shared memory, which signal an mbarrier

// Where one copy writes, and the mbarriers that it signals: in each CTA that it is for.
struct Targets {
  std::vector<Machine::SharedPlace> places, barriers;
  Cta* source = nullptr;  // whose shared memory it reads, if any
};

// source[0] (and immediate[0]) destination, source[3] (and mode[3]) mbarrier, source[4] CTA mask.
// None after a report.
std::optional<Targets> FindTargets(
    Context& context, const Inst& inst, int lane, uint32_t size, uint32_t alignment) {
  const bool cluster = inst.mode[0] & kClusterAddress;
  const uint32_t to = SharedAddress(context, inst.source[0], inst.immediate[0], lane, cluster);
  const auto place = FindPlace(context, lane, to, size, alignment);
  if (!place) return std::nullopt;
  const uint32_t barrier = SharedAddress(context, inst.source[3], inst.mode[3], lane, cluster);
  const auto signal = FindPlace(context, lane, barrier, 8, 8);
  if (!signal) return std::nullopt;
  if (!(inst.mode[0] & kMulticast)) return Targets{{*place}, {*signal}, nullptr};
  Targets targets;
  const auto ctas = static_cast<uint32_t>(LaneValue(context, inst.source[4], lane));
  for (const auto& one : context.cta.cluster->ctas) {
    if (!(ctas >> one->rank & 1)) continue;
    targets.places.push_back({one.get(), place->offset});
    targets.barriers.push_back({one.get(), signal->offset});
  }
  return targets;
}

// Arrives at mbarriers with the bytes that a copy has written beside each.
void Complete(Machine& machine,
              Operation& operation,
              const std::vector<Machine::SharedPlace>& barriers,
              int64_t bytes) {
  for (const Machine::SharedPlace& place : barriers) {
    const auto it = place.cta->mbarriers.find(place.offset);
    if (it == place.cta->mbarriers.end()) {
      machine.OperationFault(operation,
                             "the copy completes on shared address " + Hex(place.offset) +
                                 ", where there is no initialised mbarrier.");
      return;
    }
    if (machine.options().strict && !it->second.fenced) {
      machine.OperationFault(operation,
                             "the copy engine signals an mbarrier whose initialisation no "
                             "fence.mbarrier_init has made visible to it.");
    }
    machine.UseBarrier(operation, place);
    machine.Transact(*place.cta, it->second, -bytes, &operation.clock);
  }
}

// Bytes of shared memory that a copy uses, from its place on.
struct Piece {
  uint32_t first = 0, size = 0;
};

// Those of a tile at an offset of shared memory. Between narrow rows there are others.
std::vector<Piece> PiecesOf(const TensorMap& map, uint32_t offset) {
  if (TileSpan(map) == TileBytes(map)) return {{0, TileBytes(map)}};
  std::vector<Piece> pieces;
  const std::array<int32_t, kMaxRank> anywhere = {};
  ForEachTileChunk(map, anywhere, offset, [&](const TileChunk& chunk) {
    pieces.push_back({chunk.shared_address - offset, 16});
  });
  return pieces;
}

// Issues a copy of `size` bytes (of the tile at `coordinates`). write(operation, place) puts them
// to one place, and returns false after a report.
template <typename Write>
void EnqueueLoad(Context& context,
                 int lane,
                 const char* name,
                 Targets targets,
                 uint32_t size,
                 std::vector<Piece> pieces,
                 std::span<const int32_t> coordinates,
                 Write write) {
  auto operation = NewCopy(context, lane, name);
  for (const Machine::SharedPlace& place : targets.places) {
    context.machine.Watch(*place.cta, *operation);
  }
  if (targets.source != nullptr) context.machine.Watch(*targets.source, *operation);
  if (!targets.places.empty()) {
    context.machine.Describe(*operation,
                             {{"bytes", size},
                              {"shared address", targets.places.front().offset},
                              {"mbarrier", targets.barriers.front().offset}},
                             coordinates);
  }
  operation->run = [&machine = context.machine,
                    targets = std::move(targets),
                    size,
                    pieces = std::move(pieces),
                    write](Operation& self) {
    for (const Machine::SharedPlace& place : targets.places) {
      for (const Piece& one : pieces) {
        machine.AccessShared(self, {place.cta, place.offset + one.first}, one.size, true);
      }
      if (!write(self, place)) return;
    }
    Complete(machine, self, targets.barriers, size);
  };
  Enqueue(context, std::move(operation));
}

// source[1] source, source[2] size; the rest as FindTargets has it.
Outcome BulkToShared(Context& context, const Inst& inst) {
  if (!SlotsAreFree(context)) return WaitForSlots(context);
  Machine& machine = context.machine;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint32_t size = BulkBytes(context, inst, lane);
    if (size == 0) return Outcome::kMoved;
    auto targets = FindTargets(context, inst, lane, size, 16);
    if (!targets) return Outcome::kMoved;
    const uint64_t from =
        LaneValue(context, inst.source[1], lane) + static_cast<uint64_t>(inst.immediate[1]);
    std::optional<Machine::SharedPlace> source;
    if (inst.mode[0] & kFromShared) {
      source = FindPlace(
          context, lane, SharedAddress(context, inst.source[1], inst.immediate[1], lane), size, 16);
      if (!source) return Outcome::kMoved;
      targets->source = source->cta;
    } else if (!CheckGlobal(context, lane, from, size, false)) {
      return Outcome::kMoved;
    }
    EnqueueLoad(context,
                lane,
                "cp.async.bulk",
                *std::move(targets),
                size,
                {{0, size}},
                {},
                [&machine, source, from, size](Operation& self, const Machine::SharedPlace& place) {
                  if (source) machine.AccessShared(self, *source, size, false);
                  if (!source) machine.AccessGlobal(self, from, size, Machine::Use::kRead);
                  std::memmove(place.cta->shared.data() + place.offset,
                               source ? source->cta->shared.data() + source->offset
                                      : machine.FindGlobal(from, size, false),
                               size);
                  return true;
                });
  }
  return Outcome::kNext;
}

Outcome Prefetch(Context& context, const Inst&) {
  if (context.machine.trace() != nullptr) context.machine.trace()->IssueHint("prefetch");
  return Outcome::kNext;
}

// ---- Copies to global memory, which a bulk group counts

// Issues a copy by `lanes`, which it counts in the open bulk group of each. It reads `span` bytes
// of shared memory, or the pieces of them that it uses, at one time, and write(operation, bytes)
// takes what it read at a later one.
template <typename Write>
void EnqueueStore(Context& context,
                  uint32_t lanes,
                  const char* name,
                  const Machine::SharedPlace& place,
                  uint32_t size,
                  uint32_t span,
                  std::vector<Piece> pieces,
                  std::span<const int32_t> coordinates,
                  Write write) {
  auto operation = NewCopy(context, std::countr_zero(lanes), name);
  context.machine.Describe(
      *operation, {{"bytes", size}, {"shared address", place.offset}}, coordinates);
  operation->steps = 2;
  std::vector<std::shared_ptr<BulkGroup>> groups;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    groups.push_back(context.warp.bulk_groups[lane].back());
    ++groups.back()->pending_reads;
    ++groups.back()->pending;
    groups.back()->unwaited = operation->instruction;
  }
  operation->run = [&machine = context.machine,
                    groups = std::move(groups),
                    place,
                    pieces = std::move(pieces),
                    bytes = std::vector<uint8_t>(span),
                    write](Operation& self) mutable {
    if (self.steps == 1) {
      for (const Piece& one : pieces) {
        machine.AccessShared(self, {place.cta, place.offset + one.first}, one.size, false);
      }
      std::memcpy(bytes.data(), place.cta->shared.data() + place.offset, bytes.size());
      for (const auto& group : groups) {
        --group->pending_reads;
        machine.Signal("bulk group", group.get(), {}, group->pending_reads == 0);
        group->read_clock.Join(self.clock);
      }
      // What follows is later than the reads that a waiter may have learned of.
      self.only_global = true;
      self.time = ++machine.Time(*self.cta, self.slot);
      self.clock.SetSeen(self.slot, self.time);
    } else {
      write(self, bytes.data());
      for (const auto& group : groups) {
        --group->pending;
        machine.Signal("bulk group", group.get(), {}, group->pending == 0);
        group->clock.Join(self.clock);
      }
    }
  };
  Enqueue(context, std::move(operation));
}

// With kReduce, mode[1] is the reduction and mode[2] its type, where no tensor map says it.
Reduction ReductionOf(const Inst& inst) { return static_cast<Reduction>(inst.mode[1]); }

// A reduction is atomic: as if every element were combined by red.relaxed.gpu.
constexpr Scope kReductionScope = Scope::kGpu;

// source[0] global address, source[1] shared address, source[2] size.
Outcome BulkToGlobal(Context& context, const Inst& inst) {
  if (!SlotsAreFree(context)) return WaitForSlots(context);
  Machine& machine = context.machine;
  const bool reduces = inst.mode[0] & kReduce;
  const auto type = static_cast<TensorMapType>(inst.mode[2]);
  const uint32_t step = ElementBytes(type);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint32_t size = BulkBytes(context, inst, lane);
    if (size == 0) return Outcome::kMoved;
    const uint32_t from = SharedAddress(context, inst.source[1], inst.immediate[1], lane);
    const auto place = FindPlace(context, lane, from, size, 16);
    if (!place) return Outcome::kMoved;
    const uint64_t to =
        LaneValue(context, inst.source[0], lane) + static_cast<uint64_t>(inst.immediate[0]);
    if (!CheckGlobal(context, lane, to, size, true)) return Outcome::kMoved;
    EnqueueStore(
        context,
        1u << lane,
        "cp.async.bulk",
        *place,
        size,
        size,
        {{0, size}},
        {},
        [&machine, &inst, to, size, reduces, type, step](Operation& self, const uint8_t* bytes) {
          if (reduces) {
            machine.AccessGlobal(self, to, size, Machine::Use::kBoth, kReductionScope);
          } else {
            machine.AccessGlobal(self, to, size, Machine::Use::kWrite);
          }
          uint8_t* data = machine.FindGlobal(to, size, true);
          if (!reduces) std::memcpy(data, bytes, size);
          for (uint32_t i = 0; reduces && i < size; i += step) {
            ReduceElement(type, ReductionOf(inst), bytes + i, data + i);
          }
        });
  }
  return Outcome::kNext;
}

// ---- Tensor copies

// The tensor map at a generic, parameter or global address; null after a report.
const TensorMap* MapAt(Context& context, int lane, uint64_t address) {
  Machine& machine = context.machine;
  const uint8_t* bytes = nullptr;
  if ((address & ~UINT64_C(0xffffffff)) == Machine::kParameterWindow) {
    const std::vector<uint8_t>& parameters = machine.launch().parameters;
    const uint64_t offset = address & 0xffffffff;
    if (offset + kTensorMapBytes <= parameters.size()) bytes = parameters.data() + offset;
  } else {
    bytes = machine.FindGlobal(address, kTensorMapBytes, false);
  }
  const TensorMap* map = bytes == nullptr ? nullptr : machine.DecodeMap(bytes);
  if (map == nullptr) {
    machine.Misuse(context, lane, "there is no tensor map at address " + Hex(address) + ".");
  }
  return map;
}

std::vector<int32_t> Coordinates(const Context& context, const Inst& inst, int lane) {
  std::vector<int32_t> coordinates;
  const Program& program = context.machine.program();
  for (uint32_t i = 0; i < inst.source_count; ++i) {
    coordinates.push_back(
        static_cast<int32_t>(context.Row(program.refs[inst.first_source + i])[lane]));
  }
  return coordinates;
}

struct Tile {
  const TensorMap* map = nullptr;
  std::vector<int32_t> coordinates;
};

// The tile of a map (source[operand] and immediate[operand]) at the list's coordinates; none after
// a report.
std::optional<Tile> FindTile(
    Context& context, const Inst& inst, int lane, int operand, bool is_store) {
  Tile tile{
      MapAt(
          context, lane, LaneValue(context, inst.source[operand], lane) + inst.immediate[operand]),
      Coordinates(context, inst, lane)};
  if (tile.map == nullptr) return std::nullopt;
  std::string fault;
  if (static_cast<int>(tile.coordinates.size()) != tile.map->rank) {
    fault = "a tensor copy has " + std::to_string(tile.coordinates.size()) +
            " coordinates for a map of rank " + std::to_string(tile.map->rank);
  } else {
    fault = CheckCoordinates(*tile.map, tile.coordinates, is_store);
  }
  if (fault.empty()) return tile;
  context.machine.Misuse(context, lane, fault + ".");
  return std::nullopt;
}

// Global memory as a tile's copy sees it: notes the accesses, and reports at the end that the
// tensor reaches outside of it.
class TileMemory {
 public:
  TileMemory(Machine& machine, const Operation& operation, Machine::Use use)
      : machine_(machine), operation_(operation), use_(use) {}
  // Null outside.
  uint8_t* Find(uint64_t address, uint32_t bytes) {
    uint8_t* data = machine_.FindGlobal(address, bytes, use_ != Machine::Use::kRead);
    in_range_ = in_range_ && data != nullptr;
    if (data == nullptr) return nullptr;
    // What follows each other is noted together.
    if (address != last_) {
      Note();
      first_ = address;
    }
    last_ = address + bytes;
    return data;
  }
  bool Check() {
    Note();
    if (!in_range_) {
      machine_.OperationFault(operation_,
                              std::string("the tensor map reaches outside of the memory that the "
                                          "launch may ") +
                                  (use_ == Machine::Use::kRead ? "read." : "write."));
    }
    return in_range_;
  }

 private:
  void Note() {
    const Scope scope = use_ == Machine::Use::kBoth ? kReductionScope : Scope::kNone;
    if (first_ != last_) machine_.AccessGlobal(operation_, first_, last_ - first_, use_, scope);
  }

  Machine& machine_;
  const Operation& operation_;
  const Machine::Use use_;
  bool in_range_ = true;
  uint64_t first_ = 0, last_ = 0;
};

// source[1] map; the rest as FindTargets has it.
Outcome TensorToShared(Context& context, const Inst& inst) {
  if (!SlotsAreFree(context)) return WaitForSlots(context);
  Machine& machine = context.machine;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const auto tile = FindTile(context, inst, lane, 1, false);
    if (!tile) return Outcome::kMoved;
    const uint32_t size = TileBytes(*tile->map);
    auto targets = FindTargets(context, inst, lane, TileSpan(*tile->map), 128);
    if (!targets) return Outcome::kMoved;
    const uint32_t offset = targets->places.empty() ? 0 : targets->places.front().offset;
    auto pieces = PiecesOf(*tile->map, offset);
    EnqueueLoad(context,
                lane,
                "tensor load",
                *std::move(targets),
                size,
                std::move(pieces),
                tile->coordinates,
                [&machine, tile = *tile](Operation& self, const Machine::SharedPlace& place) {
                  TileMemory memory(machine, self, Machine::Use::kRead);
                  LoadTile(
                      *tile.map,
                      tile.coordinates,
                      place.offset,
                      [&](uint64_t address, uint32_t bytes, uint8_t* to) {
                        const uint8_t* from = memory.Find(address, bytes);
                        if (from != nullptr) std::memcpy(to, from, bytes);
                      },
                      [&](uint32_t address, const uint8_t* from) {
                        std::memcpy(place.cta->shared.data() + address, from, 16);
                      });
                  return memory.Check();
                });
  }
  return Outcome::kNext;
}

bool SameCopy(const Context& context, const Inst& inst, int lane, int other) {
  return LaneValue(context, inst.source[0], lane) == LaneValue(context, inst.source[0], other) &&
         LaneValue(context, inst.source[1], lane) == LaneValue(context, inst.source[1], other) &&
         Coordinates(context, inst, lane) == Coordinates(context, inst, other);
}

// source[0] map, source[1] shared address; the list: coordinates.
Outcome TensorToGlobal(Context& context, const Inst& inst) {
  if (!SlotsAreFree(context)) return WaitForSlots(context);
  Machine& machine = context.machine;
  uint32_t done = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!((context.mask & ~done) >> lane & 1)) continue;
    const auto tile = FindTile(context, inst, lane, 0, true);
    if (!tile) return Outcome::kMoved;
    const bool reduces = inst.mode[0] & kReduce;
    if (reduces && !CheckReduction(tile->map->type, ReductionOf(inst)).empty()) {
      machine.Misuse(context, lane, "the elements of this tensor map cannot be combined so.");
      return Outcome::kMoved;
    }
    const uint32_t size = TileBytes(*tile->map);
    const uint32_t from = SharedAddress(context, inst.source[1], inst.immediate[1], lane);
    const uint32_t span = TileSpan(*tile->map);
    const auto place = FindPlace(context, lane, from, span, 128);
    if (!place) return Outcome::kMoved;
    // A store that a whole warp issues with the same operands, as kernels do, is issued once.
    uint32_t lanes = 1u << lane;
    for (int other = lane + 1; other < kLanes && !reduces; ++other) {
      if (context.mask >> other & 1 && SameCopy(context, inst, lane, other)) lanes |= 1u << other;
    }
    done |= lanes;
    EnqueueStore(context,
                 lanes,
                 reduces ? "tensor reduction" : "tensor store",
                 *place,
                 size,
                 span,
                 PiecesOf(*tile->map, place->offset),
                 tile->coordinates,
                 [&machine, &inst, tile = *tile, offset = place->offset, reduces](
                     Operation& self, const uint8_t* data) {
                   TileMemory memory(
                       machine, self, reduces ? Machine::Use::kBoth : Machine::Use::kWrite);
                   const auto read = [&](uint32_t address, uint8_t* to) {
                     std::memcpy(to, data + (address - offset), 16);
                   };
                   if (reduces) {
                     const TensorMapType type = tile.map->type;
                     ReduceTile(*tile.map,
                                tile.coordinates,
                                offset,
                                read,
                                [&](uint64_t address, const uint8_t* from) {
                                  uint8_t* to = memory.Find(address, ElementBytes(type));
                                  if (to != nullptr)
                                    ReduceElement(type, ReductionOf(inst), from, to);
                                });
                   } else {
                     StoreTile(*tile.map,
                               tile.coordinates,
                               offset,
                               read,
                               [&](uint64_t address, uint32_t bytes, const uint8_t* from) {
                                 uint8_t* to = memory.Find(address, bytes);
                                 if (to != nullptr) std::memcpy(to, from, bytes);
                               });
                   }
                   memory.Check();
                 });
  }
  return Outcome::kNext;
}

Outcome CommitBulkGroup(Context& context, const Inst&) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    auto& groups = context.warp.bulk_groups[lane];
    // A kernel may commit for ever and never wait. What nothing is pending of joins the next group.
    if (groups.size() >= kMaxBulkGroups && groups[0]->pending == 0) {
      groups[1]->read_clock.Join(groups[0]->read_clock);
      groups[1]->clock.Join(groups[0]->clock);
      groups[1]->unwaited = std::max(groups[1]->unwaited, groups[0]->unwaited);
      groups.pop_front();
    }
    groups.push_back(std::make_shared<BulkGroup>());
  }
  return Outcome::kNext;
}

std::string WaitsForBulkGroup(Context& context, const Inst& inst) {
  const int lane = std::countr_zero(context.mask);
  return "wait for all but " + std::to_string(inst.immediate[0]) + " of " +
         std::to_string(context.warp.bulk_groups[lane].size() - 1) + " bulk groups";
}

// immediate[0]: how many of the newest groups may be incomplete; mode[0]: only until their sources
// are read.
Outcome WaitBulkGroup(Context& context, const Inst& inst) {
  const bool only_read = inst.mode[0];
  for (int pass = 0; pass < 2; ++pass) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(context.mask >> lane & 1)) continue;
      auto& groups = context.warp.bulk_groups[lane];
      const auto committed = static_cast<int64_t>(groups.size()) - 1;
      for (int64_t i = 0; i < committed - inst.immediate[0]; ++i) {
        BulkGroup& group = *groups[static_cast<size_t>(i)];
        if (pass == 0 && (only_read ? group.pending_reads : group.pending) != 0) {
          return context.machine.BlockedOn(
              "bulk group",
              &group,
              {{"allowed groups", inst.immediate[0]},
               {"committed groups", committed},
               {"copies", only_read ? group.pending_reads : group.pending}});
        }
        if (pass == 1) {
          context.machine.Learn(context.warp, 1u << lane, group.read_clock);
          if (!only_read) context.machine.Learn(context.warp, 1u << lane, group.clock);
          group.unwaited = -1;
        }
      }
      // Who has waited for reads alone may wait for the writes yet.
      if (pass == 1 && !only_read) {
        for (int64_t i = 0; i < committed - inst.immediate[0]; ++i) groups.pop_front();
      }
    }
  }
  return Outcome::kNext;
}

// ---- cp.async (one thread's 4 to 16 bytes)

Slot CopySlot(const Context& context) {
  return static_cast<Slot>(context.cta.first_slot + context.warp.index * kWarpSlots +
                           kAsyncCopySlot);
}

// source[0] shared, source[1] global, source[2] bytes to read (the rest is zero); mode[1]: size.
Outcome CopyAsync(Context& context, const Inst& inst) {
  Machine& machine = context.machine;
  const uint32_t size = inst.mode[1];
  const Slot slot = CopySlot(context);
  const uint32_t time = ++machine.Time(context.cta, slot);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint32_t to = SharedAddress(context, inst.source[0], inst.immediate[0], lane);
    const uint64_t from =
        LaneValue(context, inst.source[1], lane) + static_cast<uint64_t>(inst.immediate[1]);
    const uint32_t bytes =
        inst.source[2]
            ? std::min(size, static_cast<uint32_t>(LaneValue(context, inst.source[2], lane)))
            : size;
    const auto place = FindPlace(context, lane, to, size, size);
    if (!place) return Outcome::kMoved;
    const uint8_t* data = bytes == 0 ? nullptr : machine.FindGlobal(from, bytes, false);
    if (bytes != 0 && (data == nullptr || from % size != 0)) {
      machine.Misuse(context,
                     lane,
                     "cp.async reads global address " + Hex(from) +
                         ", which is out of range or not "
                         "aligned to " +
                         std::to_string(size) + " bytes.",
                     true,
                     Report::Kind::kMemory);
      return Outcome::kMoved;
    }
    VectorClock clock = machine.KnowledgeOfLane(context.warp, lane).clock;
    clock.SetSeen(slot, time);
    if (machine.options().check_races) {
      machine.CheckShared({time, slot, static_cast<uint8_t>(lane), false, context.group.pc},
                          clock,
                          *place,
                          size,
                          true);
      if (bytes != 0) {
        machine.CheckGlobal({time, slot, static_cast<uint8_t>(lane), false, context.group.pc},
                            clock,
                            context.cta,
                            context.warp.index,
                            from,
                            bytes,
                            Machine::Use::kRead);
      }
    }
    uint8_t* target = place->cta->shared.data() + place->offset;
    std::memset(target, 0, size);
    if (bytes != 0) std::memcpy(target, data, bytes);
  }
  machine.Issue(slot, time, "cp.async", {{"bytes", size * std::popcount(context.mask)}});
  return Outcome::kNext;
}

Outcome CommitCopyGroup(Context& context, const Inst&) {
  const Slot slot = CopySlot(context);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    auto& groups = context.warp.copy_groups[lane];
    // Who waits for the second oldest waits for the oldest as well.
    if (groups.size() >= kMaxGroups) groups.pop_front();
    groups.push_back(context.machine.Time(context.cta, slot));
  }
  return Outcome::kNext;
}

// immediate[0]: how many of the newest groups may be incomplete, or -1 for none, committed or not.
Outcome WaitCopyGroup(Context& context, const Inst& inst) {
  Machine& machine = context.machine;
  const Slot slot = CopySlot(context);
  if (inst.immediate[0] < 0) {
    machine.LearnSlot(context.warp, context.mask, slot);
    for (auto& groups : context.warp.copy_groups) groups.clear();
    return Outcome::kNext;
  }
  uint32_t time = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    auto& groups = context.warp.copy_groups[lane];
    while (static_cast<int64_t>(groups.size()) > inst.immediate[0]) {
      time = std::max(time, groups.front());
      groups.pop_front();
    }
  }
  if (time != 0) {
    VectorClock clock(context.cta.cluster->times.size());
    clock.SetSeen(slot, time);
    machine.Learn(context.warp, context.mask, clock);
    machine.Retire(context.cta, slot, time);
  }
  return Outcome::kNext;
}

// An mbarrier's arrival when the copies that its thread has issued are done. They are, as far as
// values go, so that only what is ordered behind them waits. mode[1]: .noinc, that is the arrival
// is one of those that a phase expects.
Outcome ArriveAfterCopies(Context& context, const Inst& inst) {
  Machine& machine = context.machine;
  const Slot slot = CopySlot(context);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint32_t address = SharedAddress(context, inst.source[0], inst.immediate[0], lane);
    MBarrier* barrier = machine.FindBarrier(context.cta, address);
    if (barrier == nullptr || (inst.mode[1] && barrier->pending == 0)) {
      machine.Misuse(context,
                     lane,
                     barrier == nullptr ? "there is no initialised mbarrier at shared address " +
                                              Hex(address) + "."
                                        : "more arrivals at an mbarrier than a phase expects.");
      return Outcome::kMoved;
    }
    VectorClock clock(context.cta.cluster->times.size());
    clock.SetSeen(slot, machine.Time(context.cta, slot));
    machine.UseBarrier(context, lane, *machine.FindShared(context.cta, address, 8));
    if (!inst.mode[1]) ++barrier->pending;
    machine.Arrive(context.cta, *barrier, 1, clock);
  }
  return Outcome::kNext;
}

// st.async: stores a lane's values in shared memory of the cluster, and signals their bytes.
// The list: values; mode[1]: bytes of one; the rest as FindTargets has it.
Outcome StoreAsync(Context& context, const Inst& inst) {
  if (!SlotsAreFree(context)) return WaitForSlots(context);
  Machine& machine = context.machine;
  const uint32_t size = inst.mode[1] * inst.source_count;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    auto targets = FindTargets(context, inst, lane, size, size);
    if (!targets) return Outcome::kMoved;
    if (targets->places[0].cta != targets->barriers[0].cta) {
      machine.Misuse(
          context, lane, "st.async signals an mbarrier of another CTA than the one it stores to.");
      return Outcome::kMoved;
    }
    std::array<uint8_t, 32> bytes = {};
    for (uint32_t i = 0; i < inst.source_count; ++i) {
      const uint64_t value =
          LaneValue(context, machine.program().refs[inst.first_source + i], lane);
      std::memcpy(bytes.data() + i * inst.mode[1], &value, inst.mode[1]);
    }
    EnqueueLoad(context,
                lane,
                "st.async",
                *std::move(targets),
                size,
                {{0, size}},
                {},
                [bytes, size](Operation&, const Machine::SharedPlace& place) {
                  std::memcpy(place.cta->shared.data() + place.offset, bytes.data(), size);
                  return true;
                });
  }
  return Outcome::kNext;
}

// ---- Decoding

bool TakeReduction(Parts& parts, Reduction* reduction) {
  static constexpr std::pair<std::string_view, Reduction> kReductions[] = {
      {"add", Reduction::kAdd},
      {"min", Reduction::kMin},
      {"max", Reduction::kMax},
      {"inc", Reduction::kInc},
      {"dec", Reduction::kDec},
      {"and", Reduction::kAnd},
      {"or", Reduction::kOr},
      {"xor", Reduction::kXor}};
  for (const auto& [name, one] : kReductions) {
    if (parts.Take(name)) return *reduction = one, true;
  }
  return false;
}

bool TakeReductionType(Parts& parts, TensorMapType* type) {
  static constexpr std::pair<std::string_view, TensorMapType> kTypes[] = {
      {"f32", TensorMapType::kFloat32},
      {"s32", TensorMapType::kInt32},
      {"u32", TensorMapType::kUint32},
      {"b32", TensorMapType::kUint32},
      {"s64", TensorMapType::kInt64},
      {"u64", TensorMapType::kUint64},
      {"b64", TensorMapType::kUint64},
      {"f64", TensorMapType::kFloat64},
      {"f16", TensorMapType::kFloat16},
      {"bf16", TensorMapType::kBfloat16}};
  for (const auto& [name, one] : kTypes) {
    if (parts.Take(name)) return *type = one, true;
  }
  return false;
}

// `[address]` or `[map, {coordinates}]`.
void DecodeTensorOperand(Decoder& decoder,
                         const ptx::Operand& operand,
                         uint32_t source,
                         int immediate) {
  if (operand.kind != ptx::Operand::Kind::kAddress || operand.elements.size() != 2) {
    decoder.Fail("a tensor copy names its tensor as [map, {coordinates}].");
  }
  Inst& inst = decoder.inst();
  inst.source[source] = decoder.Address(operand, &inst.immediate[immediate]);
  decoder.SourceList(operand.elements[1], 32);
}

void DecodeBulk(Decoder& decoder, Parts& parts, bool is_reduce) {
  Inst& inst = decoder.inst();
  const bool tensor = parts.Take("tensor");
  uint32_t rank = 0;
  if (tensor) {
    const std::string_view dimensions = parts.Next();
    if (dimensions.size() != 2 || dimensions[0] < '1' || dimensions[0] > '5' ||
        dimensions[1] != 'd') {
      decoder.Fail("a tensor copy is .1d to .5d.");
    }
    rank = static_cast<uint32_t>(dimensions[0] - '0');
  }
  uint32_t flags = (tensor ? kTensor : 0u) | (is_reduce ? kReduce : 0u);
  if (parts.Take("global")) {
    flags |= kToGlobal;
    if (!parts.Take("shared::cta"))
      decoder.Fail("a bulk copy to global memory comes from .shared::cta.");
    Reduction reduction = Reduction::kAdd;
    if (is_reduce && tensor && !TakeReduction(parts, &reduction))
      decoder.Fail("this reduction is not supported.");
    parts.Take("tile");
    if (!parts.Take("bulk_group"))
      decoder.Fail("a bulk copy to global memory completes by .bulk_group.");
    const bool policy = parts.Take("L2::cache_hint");
    if (is_reduce && !tensor) {
      // An addition of halves, and nothing else, has .noftz.
      TensorMapType type = TensorMapType::kFloat32;
      bool known = TakeReduction(parts, &reduction);
      const bool noftz = parts.Take("noftz");
      known = known && TakeReductionType(parts, &type);
      const bool is_half_sum = reduction == Reduction::kAdd && ElementBytes(type) == 2;
      if (!known || noftz != is_half_sum || !CheckReduction(type, reduction).empty()) {
        decoder.Fail("this reduction is not supported.");
      }
      inst.mode[2] = static_cast<uint32_t>(type);
    }
    inst.mode[1] = static_cast<uint32_t>(reduction);
    const size_t operands = (tensor ? 2 : 3) + policy;
    decoder.ExpectOperands(operands, operands);
    if (tensor) {
      DecodeTensorOperand(decoder, decoder.Operand(0), 0, 0);
    } else {
      inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
      inst.source[2] = decoder.Source(decoder.Operand(2), 32);
    }
    inst.source[1] = decoder.Address(decoder.Operand(1), &inst.immediate[1]);
    inst.execute = tensor ? TensorToGlobal : BulkToGlobal;
  } else {
    if (is_reduce) decoder.Fail("only reductions to global memory are supported.");
    if (parts.Take("shared::cluster"))
      flags |= kClusterAddress;
    else if (!parts.Take("shared::cta"))
      decoder.Fail("a bulk copy goes to shared or global memory.");
    if (parts.Take("shared::cta"))
      flags |= kFromShared;
    else if (!parts.Take("global"))
      decoder.Fail("a bulk copy comes from shared or global memory.");
    parts.Take("tile");
    if (!parts.Take("mbarrier::complete_tx::bytes")) {
      decoder.Fail("a bulk copy to shared memory completes by .mbarrier::complete_tx::bytes.");
    }
    if (parts.Take("multicast::cluster")) flags |= kMulticast;
    bool policy = parts.Take("L2::cache_hint");
    if (!parts.Take("cta_group::1")) parts.Take("cta_group::2");
    policy = policy || parts.Take("L2::cache_hint");
    const bool multicast = flags & kMulticast;
    const size_t barrier = tensor ? 2 : 3;
    decoder.ExpectOperands(barrier + 1 + multicast + policy, barrier + 1 + multicast + policy);
    inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
    if (tensor) {
      DecodeTensorOperand(decoder, decoder.Operand(1), 1, 1);
    } else {
      inst.source[1] = decoder.Address(decoder.Operand(1), &inst.immediate[1]);
      inst.source[2] = decoder.Source(decoder.Operand(2), 32);
    }
    int64_t offset = 0;
    inst.source[3] = decoder.Address(decoder.Operand(barrier), &offset);
    inst.mode[3] = static_cast<uint32_t>(offset);
    if (multicast) inst.source[4] = decoder.Source(decoder.Operand(barrier + 1), 16, true);
    inst.execute = tensor ? TensorToShared : BulkToShared;
  }
  inst.describe_wait = WaitsForCopies;
  if (tensor && inst.source_count != rank)
    decoder.Fail("the number of coordinates is not that of the opcode.");
  inst.mode[0] = flags;
}

void DecodeStoreAsync(Decoder& decoder, Parts& parts) {
  Inst& inst = decoder.inst();
  parts.Take("weak");
  parts.Take("shared::cluster");
  if (!parts.Take("mbarrier::complete_tx::bytes")) {
    decoder.Fail("st.async completes by .mbarrier::complete_tx::bytes.");
  }
  const uint32_t count = parts.Take("v2") ? 2 : parts.Take("v4") ? 4 : 1;
  static constexpr std::pair<std::string_view, int> kTypes[] = {{"b32", 32},
                                                                {"u32", 32},
                                                                {"s32", 32},
                                                                {"f32", 32},
                                                                {"b64", 64},
                                                                {"u64", 64},
                                                                {"s64", 64},
                                                                {"f64", 64}};
  int bits = 0;
  for (const auto& [name, width] : kTypes) {
    if (bits == 0 && parts.Take(name)) bits = width;
  }
  if (bits == 0) decoder.Fail("st.async stores types of 32 or 64 bits.");
  decoder.ExpectOperands(3, 3);
  inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
  decoder.SourceList(decoder.Operand(1), bits);
  if (inst.source_count != count) decoder.Fail("the vector's length is not that of the type.");
  int64_t offset = 0;
  inst.source[3] = decoder.Address(decoder.Operand(2), &offset);
  inst.mode[3] = static_cast<uint32_t>(offset);
  inst.mode[1] = static_cast<uint32_t>(bits) / 8;
  inst.mode[0] = kClusterAddress;
  inst.execute = StoreAsync;
  inst.describe_wait = WaitsForCopies;
}

}  // namespace

bool DecodeCopy(Decoder& decoder, Parts parts) {
  Inst& inst = decoder.inst();
  const std::string_view name = parts.Next();
  if (name == "st" && parts.Take("async")) {
    DecodeStoreAsync(decoder, parts);
    if (!parts.done())
      decoder.Fail("modifier \"." + std::string(parts.Peek()) + "\" is not supported here.");
    return true;
  }
  if (name != "cp") return false;
  const bool is_reduce = parts.Take("reduce");
  if (!parts.Take("async")) return false;
  if (parts.Take("bulk")) {
    if (parts.Take("commit_group")) {
      decoder.ExpectOperands(0, 0);
      inst.execute = CommitBulkGroup;
    } else if (parts.Take("wait_group")) {
      inst.mode[0] = parts.Take("read");
      decoder.ExpectOperands(1, 1);
      inst.immediate[0] = decoder.Constant(decoder.Operand(0));
      if (inst.immediate[0] < 0) decoder.Fail("the number of groups cannot be negative.");
      inst.execute = WaitBulkGroup;
      inst.describe_wait = WaitsForBulkGroup;
    } else if (parts.Take("prefetch")) {
      // A hint, whose operands are checked no further.
      const bool tensor = parts.Take("tensor");
      std::string_view rank;
      if (tensor) rank = parts.Next();
      if (!parts.Take("L2") || !parts.Take("global"))
        decoder.Fail("it prefetches to .L2 from .global.");
      if (tensor) parts.Take("tile");
      const bool policy = parts.Take("L2::cache_hint");
      const size_t operands = (tensor ? 1 : 2) + policy;
      decoder.ExpectOperands(operands, operands);
      if (tensor) {
        DecodeTensorOperand(decoder, decoder.Operand(0), 0, 0);
        if (rank != std::to_string(inst.source_count) + "d") {
          decoder.Fail("the number of coordinates is not that of the opcode.");
        }
      } else {
        inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
        inst.source[1] = decoder.Source(decoder.Operand(1), 32);
      }
      inst.execute = Prefetch;
    } else {
      DecodeBulk(decoder, parts, is_reduce);
    }
  } else if (parts.Take("commit_group")) {
    decoder.ExpectOperands(0, 0);
    inst.execute = CommitCopyGroup;
  } else if (parts.Take("wait_group") || parts.Is("wait_all")) {
    const bool all = parts.Take("wait_all");
    decoder.ExpectOperands(all ? 0 : 1, all ? 0 : 1);
    inst.immediate[0] = all ? -1 : decoder.Constant(decoder.Operand(0));
    if (!all && inst.immediate[0] < 0) decoder.Fail("the number of groups cannot be negative.");
    inst.execute = WaitCopyGroup;
  } else if (parts.Take("mbarrier")) {
    if (!parts.Take("arrive")) decoder.Fail("cp.async.mbarrier arrives.");
    inst.mode[1] = parts.Take("noinc");
    if (!parts.Take("shared")) parts.Take("shared::cta");
    if (!parts.Take("b64")) decoder.Fail("it ends in .b64.");
    decoder.ExpectOperands(1, 1);
    inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
    inst.execute = ArriveAfterCopies;
  } else if (parts.Take("ca") || parts.Take("cg")) {
    if (!parts.Take("shared")) parts.Take("shared::cta");
    if (!parts.Take("global")) decoder.Fail("cp.async copies from .global to .shared.");
    const bool policy = parts.Take("L2::cache_hint");
    if (!parts.Take("L2::64B") && !parts.Take("L2::128B")) parts.Take("L2::256B");
    decoder.ExpectOperands(3, 4 + policy);
    inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
    inst.source[1] = decoder.Address(decoder.Operand(1), &inst.immediate[1]);
    const int64_t size = decoder.Constant(decoder.Operand(2));
    if (size != 4 && size != 8 && size != 16) decoder.Fail("cp.async copies 4, 8 or 16 bytes.");
    inst.mode[1] = static_cast<uint32_t>(size);
    if (decoder.operand_count() > 3 + static_cast<size_t>(policy)) {
      inst.source[2] = decoder.Source(decoder.Operand(3), 32);
    }
    inst.execute = CopyAsync;
  } else {
    return false;
  }
  if (!parts.done())
    decoder.Fail("modifier \"." + std::string(parts.Peek()) + "\" is not supported here.");
  return true;
}

}  // namespace jax_fa4::emulator
