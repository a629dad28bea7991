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

uint32_t OwnRank(const Context& context, uint32_t address, bool cluster) {
  return cluster || address >> 24 != 0 ? address : address | context.cta.rank << 24;
}

// Places in shared memory that one copy reads or writes: (offset, size) of one CTA, all within its
// window.
bool CheckShared(Context& context,
                 int lane,
                 uint32_t address,
                 uint32_t size,
                 uint32_t alignment,
                 std::optional<Machine::SharedPlace>* place) {
  *place = context.machine.FindShared(context.cta, address, size);
  if (*place && address % alignment == 0) return true;
  context.machine.Misuse(context,
                         lane,
                         "a bulk copy uses shared address " + Hex(address) + " (" +
                             std::to_string(size) +
                             " bytes), which is out of range or not aligned to " +
                             std::to_string(alignment) + " bytes.",
                         true,
                         Report::Kind::kMemory);
  return false;
}

// Adds what a copy engine's reduction stores. mode[2] of the instruction: the type.
enum class ReduceType : uint32_t { kF32, kF16, kBf16, kS32, kU32, kS64, kU64, kF64 };
enum class ReduceOperation : uint32_t { kAdd, kMin, kMax, kAnd, kOr, kXor, kInc, kDec };

template <typename T>
void CombineElements(ReduceOperation operation, uint8_t* to, const uint8_t* from, size_t bytes) {
  for (size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
    T a, b;
    std::memcpy(&a, to + i, sizeof(T));
    std::memcpy(&b, from + i, sizeof(T));
    switch (operation) {
      case ReduceOperation::kAdd:
        // Integers wrap.
        if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) {
          using Unsigned = std::make_unsigned_t<T>;
          a = static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
        } else {
          a = static_cast<T>(a + b);
        }
        break;
      case ReduceOperation::kMin:
        a = std::min(a, b);
        break;
      case ReduceOperation::kMax:
        a = std::max(a, b);
        break;
      default:
        if constexpr (std::is_integral_v<T>) {
          if (operation == ReduceOperation::kAnd) a = static_cast<T>(a & b);
          if (operation == ReduceOperation::kOr) a = static_cast<T>(a | b);
          if (operation == ReduceOperation::kXor) a = static_cast<T>(a ^ b);
        }
    }
    std::memcpy(to + i, &a, sizeof(T));
  }
}

void CombineHalves(
    ReduceOperation operation, HalfType type, uint8_t* to, const uint8_t* from, size_t bytes) {
  for (size_t i = 0; i + 2 <= bytes; i += 2) {
    uint16_t a, b;
    std::memcpy(&a, to + i, 2);
    std::memcpy(&b, from + i, 2);
    a = operation == ReduceOperation::kAdd   ? HalfAdd(type, a, b)
        : operation == ReduceOperation::kMin ? HalfMin(type, a, b)
                                             : HalfMax(type, a, b);
    std::memcpy(to + i, &a, 2);
  }
}

void CombineBytes(uint32_t mode, uint8_t* to, const uint8_t* from, size_t bytes) {
  const auto operation = static_cast<ReduceOperation>(mode >> 8);
  switch (static_cast<ReduceType>(mode & 0xff)) {
    case ReduceType::kF32:
      return CombineElements<float>(operation, to, from, bytes);
    case ReduceType::kS32:
      return CombineElements<int32_t>(operation, to, from, bytes);
    case ReduceType::kU32:
      return CombineElements<uint32_t>(operation, to, from, bytes);
    case ReduceType::kS64:
      return CombineElements<int64_t>(operation, to, from, bytes);
    case ReduceType::kU64:
      return CombineElements<uint64_t>(operation, to, from, bytes);
    case ReduceType::kF64:
      return CombineElements<double>(operation, to, from, bytes);
    case ReduceType::kF16:
      return CombineHalves(operation, HalfType::kF16, to, from, bytes);
    case ReduceType::kBf16:
      return CombineHalves(operation, HalfType::kBf16, to, from, bytes);
  }
}

// Whether the copy engine combines numbers of this type so (9.7.9.25.4.2, table of
// cp.reduce.async.bulk).
bool IsReduction(ReduceOperation operation, ReduceType type) {
  const bool is_half = type == ReduceType::kF16 || type == ReduceType::kBf16;
  if (operation == ReduceOperation::kAdd) return true;
  if (operation == ReduceOperation::kMin || operation == ReduceOperation::kMax) {
    return type != ReduceType::kF32 && type != ReduceType::kF64;
  }
  return !is_half && type != ReduceType::kF32 && type != ReduceType::kF64;
}

// The type of a tensor map's elements; false if the engine does not combine such.
bool ReduceTypeOf(const TensorMap& map, ReduceType* type) {
  switch (map.type) {
    case TensorMapType::kUint32:
      return *type = ReduceType::kU32, true;
    case TensorMapType::kInt32:
      return *type = ReduceType::kS32, true;
    case TensorMapType::kUint64:
      return *type = ReduceType::kU64, true;
    case TensorMapType::kInt64:
      return *type = ReduceType::kS64, true;
    case TensorMapType::kFloat16:
      return *type = ReduceType::kF16, true;
    case TensorMapType::kBfloat16:
      return *type = ReduceType::kBf16, true;
    case TensorMapType::kFloat32:
      return *type = ReduceType::kF32, true;
    case TensorMapType::kFloat64:
      return *type = ReduceType::kF64, true;
    default:
      return false;
  }
}

// Reports what goes wrong while a copy runs, with the instruction that issued it.
void Fault(Machine& machine, const Operation& operation, const std::string& message) {
  machine.OperationFault(operation, message);
}

// ---- Bulk copies to shared memory, which signal an mbarrier

// Arrives at the mbarrier of each destination with the bytes that were written there.
bool Complete(Machine& machine,
              Operation& operation,
              const std::vector<Machine::SharedPlace>& barriers,
              int64_t bytes) {
  for (const Machine::SharedPlace& place : barriers) {
    const auto it = place.cta->mbarriers.find(place.offset);
    if (it == place.cta->mbarriers.end()) {
      Fault(machine,
            operation,
            "the copy completes on shared address " + Hex(place.offset) +
                ", where there is no initialised mbarrier.");
      return false;
    }
    if (machine.options().strict && !it->second.fenced) {
      Fault(machine,
            operation,
            "the copy engine signals an mbarrier whose initialisation no "
            "fence.mbarrier_init has made visible to it.");
    }
    machine.Transact(*place.cta, it->second, -bytes, &operation.clock);
  }
  return true;
}

// Whether every lane can issue a copy now.
bool SlotsAreFree(const Context& context) {
  return context.cta.free_copy_slots.size() >= static_cast<size_t>(std::popcount(context.mask));
}

std::string WaitsForCopies(Context& context, const Inst&) {
  return "wait for some of the " + std::to_string(context.cta.copies.size()) +
         " copies in flight to end";
}

void Enqueue(Context& context, std::unique_ptr<Operation> operation) {
  context.cta.copies.push_back(std::move(operation));
  context.machine.Advance(context.warp, context.mask);
}

// source[0] destination, source[1] source, source[2] size, source[3] mbarrier, source[4] CTA mask.
Outcome BulkToShared(Context& context, const Inst& inst) {
  if (!SlotsAreFree(context)) return Outcome::kBlocked;
  Machine& machine = context.machine;
  const bool cluster = inst.mode[0] & kClusterAddress;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const auto size = static_cast<uint32_t>(LaneValue(context, inst.source[2], lane));
    const uint32_t to =
        OwnRank(context,
                static_cast<uint32_t>(LaneValue(context, inst.source[0], lane) + inst.immediate[0]),
                cluster);
    const uint64_t from =
        LaneValue(context, inst.source[1], lane) + static_cast<uint64_t>(inst.immediate[1]);
    const uint32_t barrier =
        OwnRank(context,
                static_cast<uint32_t>(LaneValue(context, inst.source[3], lane) + inst.mode[3]),
                cluster);
    if (size == 0 || size % 16 != 0) {
      machine.Misuse(context,
                     lane,
                     "a bulk copy's size must be a positive multiple of 16 bytes, not " +
                         std::to_string(size) + ".");
      return Outcome::kMoved;
    }
    std::optional<Machine::SharedPlace> place, source, signal;
    if (!CheckShared(context, lane, to, size, 16, &place) ||
        !CheckShared(context, lane, barrier, 8, 8, &signal)) {
      return Outcome::kMoved;
    }
    const bool from_shared = inst.mode[0] & kFromShared;
    if (from_shared) {
      if (!CheckShared(context,
                       lane,
                       OwnRank(context, static_cast<uint32_t>(from), false),
                       size,
                       16,
                       &source)) {
        return Outcome::kMoved;
      }
    } else if (machine.FindGlobal(from, size, false) == nullptr || from % 16 != 0) {
      machine.Misuse(context,
                     lane,
                     "a bulk copy reads global address " + Hex(from) + " (" + std::to_string(size) +
                         " bytes), which is out of range or not aligned to 16 bytes.",
                     true,
                     Report::Kind::kMemory);
      return Outcome::kMoved;
    }
    std::vector<Machine::SharedPlace> places, signals;
    if (inst.mode[0] & kMulticast) {
      const auto ctas = static_cast<uint32_t>(LaneValue(context, inst.source[4], lane));
      for (const auto& one : context.cta.cluster->ctas) {
        if (!(ctas >> one->rank & 1)) continue;
        places.push_back({one.get(), place->offset});
        signals.push_back({one.get(), signal->offset});
      }
    } else {
      places.push_back(*place);
      signals.push_back(*signal);
    }
    auto operation =
        machine.NewOperation(context, lane, "cp.async.bulk", machine.TakeCopySlot(context.cta));
    operation->run = [&machine, places, signals, source, from, size](Operation& self) {
      const uint8_t* bytes;
      if (source) {
        machine.AccessShared(self, *source, size, false);
        bytes = source->cta->shared.data() + source->offset;
      } else {
        bytes = machine.FindGlobal(from, size, false);
      }
      for (const Machine::SharedPlace& one : places) {
        machine.AccessShared(self, one, size, true);
        std::memmove(one.cta->shared.data() + one.offset, bytes, size);
      }
      Complete(machine, self, signals, size);
    };
    Enqueue(context, std::move(operation));
  }
  return Outcome::kNext;
}

// ---- Bulk copies to global memory, which a bulk group counts

using BulkGroups = std::vector<std::shared_ptr<BulkGroup>>;

std::function<void(Operation&)> InTwoSteps(Machine& machine,
                                           BulkGroups groups,
                                           std::function<void(Operation&)> read,
                                           std::function<void(Operation&)> write) {
  return [&machine, groups, read, write](Operation& self) {
    if (self.steps == 1) {
      read(self);
      for (const auto& group : groups) {
        --group->pending_reads;
        group->read_clock.Join(self.clock);
      }
      // What follows is later than the reads that a waiter may have learned of.
      self.only_global = true;
      self.time = ++machine.Time(*self.cta, self.slot);
      self.clock.SetSeen(self.slot, self.time);
    } else {
      write(self);
      for (const auto& group : groups) {
        --group->pending;
        group->clock.Join(self.clock);
      }
    }
  };
}

// Counts the copy in the open bulk groups of the lanes that issue it.
BulkGroups CountInGroups(Context& context, uint32_t lanes, Operation& operation) {
  BulkGroups groups;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    groups.push_back(context.warp.bulk_groups[lane].back());
    ++groups.back()->pending_reads;
    ++groups.back()->pending;
  }
  operation.steps = 2;
  return groups;
}

// source[0] global address, source[1] shared address, source[2] size.
Outcome BulkToGlobal(Context& context, const Inst& inst) {
  if (!SlotsAreFree(context)) return Outcome::kBlocked;
  Machine& machine = context.machine;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint64_t to =
        LaneValue(context, inst.source[0], lane) + static_cast<uint64_t>(inst.immediate[0]);
    const auto size = static_cast<uint32_t>(LaneValue(context, inst.source[2], lane));
    std::optional<Machine::SharedPlace> place;
    const uint32_t from =
        OwnRank(context,
                static_cast<uint32_t>(LaneValue(context, inst.source[1], lane) + inst.immediate[1]),
                false);
    if (size == 0 || size % 16 != 0) {
      machine.Misuse(context,
                     lane,
                     "a bulk copy's size must be a positive multiple of 16 bytes, not " +
                         std::to_string(size) + ".");
      return Outcome::kMoved;
    }
    if (!CheckShared(context, lane, from, size, 16, &place)) return Outcome::kMoved;
    if (machine.FindGlobal(to, size, true) == nullptr || to % 16 != 0) {
      machine.Misuse(context,
                     lane,
                     "a bulk copy writes global address " + Hex(to) + " (" + std::to_string(size) +
                         " bytes), which is out of range, not writable or not aligned to 16 bytes.",
                     true,
                     Report::Kind::kMemory);
      return Outcome::kMoved;
    }
    auto operation =
        machine.NewOperation(context, lane, "cp.async.bulk", machine.TakeCopySlot(context.cta));
    const BulkGroups groups = CountInGroups(context, 1u << lane, *operation);
    auto bytes = std::make_shared<std::vector<uint8_t>>(size);
    const uint32_t reduce = inst.mode[0] & kReduce ? inst.mode[2] : UINT32_MAX;
    operation->run = InTwoSteps(
        machine,
        groups,
        [&machine, place, bytes](Operation& self) {
          machine.AccessShared(self, *place, static_cast<uint32_t>(bytes->size()), false);
          std::memcpy(bytes->data(), place->cta->shared.data() + place->offset, bytes->size());
        },
        [&machine, to, bytes, reduce](Operation&) {
          uint8_t* data = machine.FindGlobal(to, bytes->size(), true);
          if (reduce == UINT32_MAX) {
            std::memcpy(data, bytes->data(), bytes->size());
          } else {
            CombineBytes(reduce, data, bytes->data(), bytes->size());
          }
        });
    Enqueue(context, std::move(operation));
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

// Whether the swizzled tile stays within its bytes, as far as that is known.
bool CheckSwizzle(Context& context, int lane, const TensorMap& map, uint32_t offset) {
  const std::string fault = CheckTile(map, offset);
  if (!fault.empty()) context.machine.Misuse(context, lane, fault + ".");
  return fault.empty();
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

// source[0] shared address, source[1] map, source[3] mbarrier, source[4] CTA mask; the list:
// coordinates.
Outcome TensorToShared(Context& context, const Inst& inst) {
  if (!SlotsAreFree(context)) return Outcome::kBlocked;
  Machine& machine = context.machine;
  const bool cluster = inst.mode[0] & kClusterAddress;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const TensorMap* map =
        MapAt(context, lane, LaneValue(context, inst.source[1], lane) + inst.immediate[1]);
    if (map == nullptr) return Outcome::kMoved;
    const std::vector<int32_t> coordinates = Coordinates(context, inst, lane);
    if (static_cast<int>(coordinates.size()) != map->rank) {
      machine.Misuse(context,
                     lane,
                     "a tensor copy has " + std::to_string(coordinates.size()) +
                         " coordinates for a map of rank " + std::to_string(map->rank) + ".");
      return Outcome::kMoved;
    }
    const uint32_t size = TileBytes(*map);
    const uint32_t to =
        OwnRank(context,
                static_cast<uint32_t>(LaneValue(context, inst.source[0], lane) + inst.immediate[0]),
                cluster);
    const uint32_t barrier =
        OwnRank(context,
                static_cast<uint32_t>(LaneValue(context, inst.source[3], lane) + inst.mode[3]),
                cluster);
    std::optional<Machine::SharedPlace> place, signal;
    if (!CheckShared(context, lane, to, size, 128, &place) ||
        !CheckShared(context, lane, barrier, 8, 8, &signal)) {
      return Outcome::kMoved;
    }
    if (!CheckSwizzle(context, lane, *map, place->offset)) return Outcome::kMoved;
    std::vector<Machine::SharedPlace> places, signals;
    if (inst.mode[0] & kMulticast) {
      const auto ctas = static_cast<uint32_t>(LaneValue(context, inst.source[4], lane));
      for (const auto& one : context.cta.cluster->ctas) {
        if (!(ctas >> one->rank & 1)) continue;
        places.push_back({one.get(), place->offset});
        signals.push_back({one.get(), signal->offset});
      }
    } else {
      places.push_back(*place);
      signals.push_back(*signal);
    }
    auto operation =
        machine.NewOperation(context, lane, "tensor load", machine.TakeCopySlot(context.cta));
    operation->run = [&machine, map, coordinates, places, signals, size](Operation& self) {
      for (const Machine::SharedPlace& one : places) {
        machine.AccessShared(self, one, size, true);
        bool in_range = true;
        ForEachTileChunk(*map, coordinates, one.offset, [&](const TileChunk& chunk) {
          uint8_t* data = one.cta->shared.data() + chunk.shared_address;
          if (chunk.first != 0 || chunk.last != 16) std::memcpy(data, FillPattern(*map).data(), 16);
          if (chunk.first == chunk.last) return;
          const uint32_t bytes = chunk.last - chunk.first;
          const uint8_t* from =
              machine.FindGlobal(chunk.global_address + chunk.first, bytes, false);
          if (from == nullptr)
            in_range = false;
          else
            std::memcpy(data + chunk.first, from, bytes);
        });
        if (!in_range) {
          Fault(machine,
                self,
                "the tensor map reaches outside of the memory that the launch may read.");
          return;
        }
      }
      Complete(machine, self, signals, size);
    };
    Enqueue(context, std::move(operation));
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
  if (!SlotsAreFree(context)) return Outcome::kBlocked;
  Machine& machine = context.machine;
  uint32_t done = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!((context.mask & ~done) >> lane & 1)) continue;
    const TensorMap* map =
        MapAt(context, lane, LaneValue(context, inst.source[0], lane) + inst.immediate[0]);
    if (map == nullptr) return Outcome::kMoved;
    const std::vector<int32_t> coordinates = Coordinates(context, inst, lane);
    if (static_cast<int>(coordinates.size()) != map->rank) {
      machine.Misuse(context,
                     lane,
                     "a tensor copy has " + std::to_string(coordinates.size()) +
                         " coordinates for a map of rank " + std::to_string(map->rank) + ".");
      return Outcome::kMoved;
    }
    uint32_t reduce = UINT32_MAX;
    if (inst.mode[0] & kReduce) {
      ReduceType type = ReduceType::kF32;
      if (!ReduceTypeOf(*map, &type) ||
          !IsReduction(static_cast<ReduceOperation>(inst.mode[2] >> 8), type)) {
        machine.Misuse(context, lane, "the elements of this tensor map cannot be combined so.");
        return Outcome::kMoved;
      }
      reduce = inst.mode[2] | static_cast<uint32_t>(type);
    }
    const uint32_t size = TileBytes(*map);
    const uint32_t from =
        OwnRank(context,
                static_cast<uint32_t>(LaneValue(context, inst.source[1], lane) + inst.immediate[1]),
                false);
    std::optional<Machine::SharedPlace> place;
    if (!CheckShared(context, lane, from, size, 128, &place)) return Outcome::kMoved;
    if (!CheckSwizzle(context, lane, *map, place->offset)) return Outcome::kMoved;
    auto operation =
        machine.NewOperation(context, lane, "tensor store", machine.TakeCopySlot(context.cta));
    // A store that a whole warp issues with the same operands, as kernels do, is issued once.
    uint32_t lanes = 1u << lane;
    for (int other = lane + 1; other < kLanes && !(inst.mode[0] & kReduce); ++other) {
      if (context.mask >> other & 1 && SameCopy(context, inst, lane, other)) lanes |= 1u << other;
    }
    done |= lanes;
    const BulkGroups groups = CountInGroups(context, lanes, *operation);
    auto tile = std::make_shared<std::vector<uint8_t>>(size);
    const uint32_t offset = place->offset;
    operation->run = InTwoSteps(
        machine,
        groups,
        [&machine, place, tile](Operation& self) {
          machine.AccessShared(self, *place, static_cast<uint32_t>(tile->size()), false);
          std::memcpy(tile->data(), place->cta->shared.data() + place->offset, tile->size());
        },
        [&machine, map, coordinates, offset, tile, reduce](Operation& self) {
          bool in_range = true;
          ForEachTileChunk(*map, coordinates, offset, [&](const TileChunk& chunk) {
            if (chunk.first == chunk.last) return;
            const uint32_t bytes = chunk.last - chunk.first;
            uint8_t* to = machine.FindGlobal(chunk.global_address + chunk.first, bytes, true);
            const uint8_t* data = tile->data() + (chunk.shared_address - offset) + chunk.first;
            if (to == nullptr)
              in_range = false;
            else if (reduce == UINT32_MAX)
              std::memcpy(to, data, bytes);
            else
              CombineBytes(reduce, to, data, bytes);
          });
          if (!in_range)
            Fault(machine,
                  self,
                  "the tensor map reaches outside of the memory that the launch may write.");
        });
    Enqueue(context, std::move(operation));
  }
  return Outcome::kNext;
}

Outcome CommitBulkGroup(Context& context, const Inst&) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    auto& groups = context.warp.bulk_groups[lane];
    // A kernel may commit for ever and never wait. What nothing is pending of joins the next group.
    if (groups.size() >= kMaxGroups && groups[0]->pending == 0) {
      groups[1]->read_clock.Join(groups[0]->read_clock);
      groups[1]->clock.Join(groups[0]->clock);
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
        const BulkGroup& group = *groups[static_cast<size_t>(i)];
        if (pass == 0 && (only_read ? group.pending_reads : group.pending) != 0)
          return Outcome::kBlocked;
        if (pass == 1) {
          context.machine.Learn(context.warp, 1u << lane, group.read_clock);
          if (!only_read) context.machine.Learn(context.warp, 1u << lane, group.clock);
        }
      }
      if (pass == 1) {
        for (int64_t i = 0; i < committed - inst.immediate[0] && groups.front()->pending == 0; ++i)
          groups.pop_front();
      }
    }
  }
  return Outcome::kNext;
}

// ---- cp.async (one thread's 4 to 16 bytes)

// source[0] shared, source[1] global, source[2] bytes to read (the rest is zero); mode[1]: size.
Outcome CopyAsync(Context& context, const Inst& inst) {
  Machine& machine = context.machine;
  const uint32_t size = inst.mode[1];
  const auto slot =
      static_cast<Slot>(context.cta.first_slot + context.warp.index * kWarpSlots + kAsyncCopySlot);
  const uint32_t time = ++machine.Time(context.cta, slot);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint32_t to =
        OwnRank(context,
                static_cast<uint32_t>(LaneValue(context, inst.source[0], lane) + inst.immediate[0]),
                false);
    const uint64_t from =
        LaneValue(context, inst.source[1], lane) + static_cast<uint64_t>(inst.immediate[1]);
    const uint32_t bytes =
        inst.source[2]
            ? std::min(size, static_cast<uint32_t>(LaneValue(context, inst.source[2], lane)))
            : size;
    std::optional<Machine::SharedPlace> place;
    if (!CheckShared(context, lane, to, size, size, &place)) return Outcome::kMoved;
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
    }
    uint8_t* target = place->cta->shared.data() + place->offset;
    std::memset(target, 0, size);
    if (bytes != 0) std::memcpy(target, data, bytes);
  }
  return Outcome::kNext;
}

Outcome CommitCopyGroup(Context& context, const Inst&) {
  const auto slot =
      static_cast<Slot>(context.cta.first_slot + context.warp.index * kWarpSlots + kAsyncCopySlot);
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
  const auto slot =
      static_cast<Slot>(context.cta.first_slot + context.warp.index * kWarpSlots + kAsyncCopySlot);
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
  }
  return Outcome::kNext;
}

// An mbarrier's arrival when the copies that its thread has issued are done. They are, as far as
// values go, so that only what is ordered behind them waits. mode[1]: .noinc, that is the arrival
// is one of those that a phase expects.
Outcome ArriveAfterCopies(Context& context, const Inst& inst) {
  Machine& machine = context.machine;
  const auto slot =
      static_cast<Slot>(context.cta.first_slot + context.warp.index * kWarpSlots + kAsyncCopySlot);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint32_t address =
        OwnRank(context,
                static_cast<uint32_t>(LaneValue(context, inst.source[0], lane) + inst.immediate[0]),
                false);
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
    if (!inst.mode[1]) ++barrier->pending;
    machine.Arrive(context.cta, *barrier, 1, clock);
  }
  return Outcome::kNext;
}

// st.async: stores a lane's values in shared memory of the cluster, and signals their bytes.
// source[0] address, source[3] mbarrier, the list: values; mode[1]: bytes of one; mode[3]: the
// mbarrier's offset.
Outcome StoreAsync(Context& context, const Inst& inst) {
  if (!SlotsAreFree(context)) return Outcome::kBlocked;
  Machine& machine = context.machine;
  const uint32_t size = inst.mode[1] * inst.source_count;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const auto to =
        static_cast<uint32_t>(LaneValue(context, inst.source[0], lane) + inst.immediate[0]);
    const auto barrier =
        static_cast<uint32_t>(LaneValue(context, inst.source[3], lane) + inst.mode[3]);
    std::optional<Machine::SharedPlace> place, signal;
    if (!CheckShared(context, lane, to, size, size, &place) ||
        !CheckShared(context, lane, barrier, 8, 8, &signal)) {
      return Outcome::kMoved;
    }
    if (place->cta != signal->cta) {
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
    auto operation =
        machine.NewOperation(context, lane, "st.async", machine.TakeCopySlot(context.cta));
    operation->run = [&machine, place = *place, signal = *signal, bytes, size](Operation& self) {
      machine.AccessShared(self, place, size, true);
      std::memcpy(place.cta->shared.data() + place.offset, bytes.data(), size);
      Complete(machine, self, {signal}, size);
    };
    Enqueue(context, std::move(operation));
  }
  return Outcome::kNext;
}

// ---- Decoding

bool TakeReduction(Parts& parts, uint32_t* mode) {
  static constexpr std::pair<std::string_view, ReduceOperation> kOperations[] = {
      {"add", ReduceOperation::kAdd},
      {"min", ReduceOperation::kMin},
      {"max", ReduceOperation::kMax},
      {"and", ReduceOperation::kAnd},
      {"or", ReduceOperation::kOr},
      {"xor", ReduceOperation::kXor}};
  for (const auto& [name, operation] : kOperations) {
    if (!parts.Take(name)) continue;
    *mode = static_cast<uint32_t>(operation) << 8;
    return true;
  }
  return false;
}

bool TakeReductionType(Parts& parts, uint32_t* mode) {
  static constexpr std::pair<std::string_view, ReduceType> kTypes[] = {{"f32", ReduceType::kF32},
                                                                       {"s32", ReduceType::kS32},
                                                                       {"u32", ReduceType::kU32},
                                                                       {"b32", ReduceType::kU32},
                                                                       {"s64", ReduceType::kS64},
                                                                       {"u64", ReduceType::kU64},
                                                                       {"b64", ReduceType::kU64},
                                                                       {"f64", ReduceType::kF64},
                                                                       {"f16", ReduceType::kF16},
                                                                       {"bf16", ReduceType::kBf16}};
  for (const auto& [name, type] : kTypes) {
    if (!parts.Take(name)) continue;
    *mode |= static_cast<uint32_t>(type);
    return true;
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
    if (is_reduce && tensor && !TakeReduction(parts, &inst.mode[2]))
      decoder.Fail("this reduction is not supported.");
    parts.Take("tile");
    if (!parts.Take("bulk_group"))
      decoder.Fail("a bulk copy to global memory completes by .bulk_group.");
    const bool policy = parts.Take("L2::cache_hint");
    if (is_reduce && !tensor) {
      // An addition of halves, and nothing else, has .noftz.
      bool known = TakeReduction(parts, &inst.mode[2]);
      const bool noftz = parts.Take("noftz");
      known = known && TakeReductionType(parts, &inst.mode[2]);
      const auto operation = static_cast<ReduceOperation>(inst.mode[2] >> 8);
      const auto type = static_cast<ReduceType>(inst.mode[2] & 0xff);
      const bool is_half_sum = operation == ReduceOperation::kAdd &&
                               (type == ReduceType::kF16 || type == ReduceType::kBf16);
      if (!known || noftz != is_half_sum || !IsReduction(operation, type)) {
        decoder.Fail("this reduction is not supported.");
      }
    }
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
      inst.execute = Nothing;
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
