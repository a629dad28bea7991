// Loads, stores, atomics, fences and mbarriers.
//
// Source: PTX ISA 9.0, 9.7.9 (Data movement), 9.7.13.4-6 (membar, atom, red), 9.7.13.15 (mbarrier).

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "csrc/emulator/machine.h"

namespace jax_fa4::emulator {
namespace {

enum class Area : uint32_t { kGeneric, kGlobal, kShared, kSharedCluster, kLocal, kParam, kConst };

bool TakeArea(Parts& parts, Area* area) {
  if (parts.Take("global"))
    *area = Area::kGlobal;
  else if (parts.Take("shared") || parts.Take("shared::cta"))
    *area = Area::kShared;
  else if (parts.Take("shared::cluster"))
    *area = Area::kSharedCluster;
  else if (parts.Take("local"))
    *area = Area::kLocal;
  else if (parts.Take("param") || parts.Take("param::entry"))
    *area = Area::kParam;
  else if (parts.Take("const"))
    *area = Area::kConst;
  else
    return false;
  return true;
}

uint64_t LaneAddress(const Context& context, const Ref& base, int64_t offset, int lane) {
  const uint64_t start = base.bits == 64 ? context.Wide(base)[lane] : context.Row(base)[lane];
  const uint64_t address = start + static_cast<uint64_t>(offset);
  return base.bits == 64 ? address : address & 0xffffffff;
}

// Where a generic address lies.
Area AreaOf(uint64_t address) {
  switch (address & ~UINT64_C(0xffffffff)) {
    case Machine::kSharedWindow:
      return Area::kSharedCluster;
    case Machine::kLocalWindow:
      return Area::kLocal;
    case Machine::kParameterWindow:
      return Area::kParam;
    case Machine::kConstWindow:
      return Area::kConst;
    default:
      return Area::kGlobal;
  }
}

// The bytes of one lane's access, and where they are, as far as accesses are noted there.
struct Target {
  uint8_t* bytes = nullptr;
  Cta* cta = nullptr;  // whose shared memory it is
  bool is_global = false;
  uint64_t address = 0;  // in that memory

  explicit operator bool() const { return bytes != nullptr; }
};

// Null after a report.
Target Find(Context& context, Area area, uint64_t address, uint32_t size, int lane, bool write) {
  Machine& machine = context.machine;
  const char* what = write ? "a store to" : "a load from";
  const auto fail = [&](const std::string& where) -> Target {
    machine.Misuse(context,
                   lane,
                   std::string(what) + " " + where + " address " + Hex(address) + " (" +
                       std::to_string(size) + " bytes) is out of range.",
                   true,
                   Report::Kind::kMemory);
    return {};
  };
  if (address % size != 0) {
    machine.Misuse(context,
                   lane,
                   std::string(what) + " address " + Hex(address) + " is not aligned to its " +
                       std::to_string(size) + " bytes.",
                   true,
                   Report::Kind::kMemory);
    return {};
  }
  if (area == Area::kGeneric) {
    area = AreaOf(address);
    if (area != Area::kGlobal) address &= 0xffffffff;
  }
  switch (area) {
    case Area::kShared:
    case Area::kSharedCluster: {
      // The own window may be named without the CTA's rank.
      if (area == Area::kShared && address >> 24 == 0) address |= uint64_t{context.cta.rank} << 24;
      const auto place = address <= UINT32_MAX
                             ? machine.FindShared(context.cta, static_cast<uint32_t>(address), size)
                             : std::nullopt;
      if (!place || (area == Area::kShared && place->cta != &context.cta)) return fail("shared");
      return {place->cta->shared.data() + place->offset, place->cta, false, place->offset};
    }
    case Area::kLocal: {
      const uint32_t bytes = machine.program().local_bytes;
      if (address > bytes || size > bytes - address) return fail("local");
      return {context.warp.local.data() + size_t{bytes} * lane + address};
    }
    case Area::kParam: {
      const uint64_t bytes = machine.launch().parameters.size();
      if (write || address > bytes || size > bytes - address) return fail("parameter");
      return {const_cast<uint8_t*>(machine.launch().parameters.data()) + address};
    }
    case Area::kConst: {
      if (write) return fail("constant");
      address |= Machine::kConstWindow;
      [[fallthrough]];
    }
    default: {
      uint8_t* bytes = machine.FindGlobal(address, size, write);
      if (bytes != nullptr) return {bytes, nullptr, true, address};
      const Buffer* buffer = nullptr;
      if (!write || machine.FindGlobal(address, size, false, &buffer) == nullptr)
        return fail("global");
      machine.Misuse(context,
                     lane,
                     "a store to global address " + Hex(address) + " (" + std::to_string(size) +
                         " bytes) changes \"" + buffer->name + "\", which is read-only.",
                     true,
                     Report::Kind::kMemory);
      return {};
    }
  }
}

// How an instruction's accesses are ordered.
struct Ordering {
  Scope scope = Scope::kNone;  // kNone of a weak access
  bool is_strong = false, is_volatile = false, acquires = false, releases = false;

  uint32_t Pack() const {
    return static_cast<uint32_t>(scope) | is_volatile << 2 | acquires << 3 | releases << 4;
  }
  static Ordering Unpack(uint32_t mode) {
    return {static_cast<Scope>(mode & 3),
            (mode & 3) != 0,
            (mode >> 2 & 1) != 0,
            (mode >> 3 & 1) != 0,
            (mode >> 4 & 1) != 0};
  }
  // Variables in shared memory are often volatile only so that the compiler keeps the accesses:
  // there it makes none strong.
  Scope ScopeAt(const Target& target) const {
    return is_volatile && target.cta != nullptr ? Scope::kNone : scope;
  }
};

void Note(Context& context,
          int lane,
          const Target& target,
          uint32_t size,
          Machine::Use use,
          Scope scope) {
  Machine& machine = context.machine;
  if (target.cta != nullptr) {
    const bool write = use != Machine::Use::kRead;
    const Machine::SharedPlace place{target.cta, static_cast<uint32_t>(target.address)};
    if (write) machine.CheckBarriers(context, lane, place, size);
    machine.AccessShared(context, lane, place, size, write, scope);
  } else if (target.is_global) {
    machine.AccessGlobal(context, lane, target.address, size, use, scope);
  }
}

// Where strong accesses of a target release and acquire, and which byte it is there.
Locations* LocationsOf(Context& context, const Target& target, uint64_t* first) {
  *first = target.address;
  if (target.cta != nullptr) return context.machine.LocationsOf(*target.cta);
  return target.is_global ? context.machine.LocationsOf(target.address, first) : nullptr;
}

// What the strong reads of a warp's lanes observe. Lanes that observe the same learn together.
class Observations {
 public:
  void Add(Context& context, int lane, const Target& target, uint32_t size, Scope scope) {
    uint64_t first;
    const Locations* locations = LocationsOf(context, target, &first);
    Messages messages;
    if (locations == nullptr || !locations->Read(first / 4,
                                                 (first + size + 3) / 4,
                                                 context.cta.cluster->number,
                                                 context.cta.rank,
                                                 scope,
                                                 &messages)) {
      return;
    }
    for (auto& [lanes, known] : groups_) {
      if (known != messages) continue;
      lanes |= 1u << lane;
      return;
    }
    groups_.emplace_back(1u << lane, std::move(messages));
  }
  void Apply(Context& context, bool acquires) {
    for (const auto& [lanes, messages] : groups_) {
      context.machine.Observe(context.warp, lanes, messages, acquires);
    }
  }

 private:
  std::vector<std::pair<uint32_t, Messages>> groups_;
};

void WriteStrongly(Context& context,
                   int lane,
                   const Target& target,
                   uint32_t size,
                   const Ordering& ordering,
                   bool is_atomic) {
  uint64_t first;
  Locations* locations = LocationsOf(context, target, &first);
  if (locations == nullptr) return;
  context.machine.WriteStrongly(
      context, lane, *locations, first, size, ordering.scope, ordering.releases, is_atomic);
}

void Put(Context& context,
         const Ref& ref,
         int lane,
         const uint8_t* from,
         uint32_t size,
         bool is_signed) {
  uint64_t value = 0;
  std::memcpy(&value, from, std::min<uint32_t>(size, 8));
  if (is_signed && size < 8) {
    const int shift = 64 - static_cast<int>(size) * 8;
    value = static_cast<uint64_t>(static_cast<int64_t>(value << shift) >> shift);
  }
  if (ref.bits == 128) {
    uint8_t wide[16] = {};
    std::memcpy(wide, &value, 8);
    if (size == 16) std::memcpy(wide, from, 16);
    std::memcpy(context.MutableRow(ref) + 4 * lane, wide, 16);
  } else if (ref.bits == 64) {
    context.MutableWide(ref)[lane] = value;
  } else {
    context.MutableRow(ref)[lane] =
        static_cast<uint32_t>(ref.bits < 32 ? value & ((1u << ref.bits) - 1) : value);
  }
}

void Get(const Context& context, const Ref& ref, int lane, uint8_t* to, uint32_t size) {
  if (ref.bits == 128) {
    std::memcpy(to, context.Row(ref) + 4 * lane, size);
  } else if (ref.bits == 64) {
    std::memcpy(to, &context.Wide(ref)[lane], size);
  } else {
    std::memcpy(to, &context.Row(ref)[lane], size);
  }
}

// mode[0]: the area; mode[1]: bytes of an element; mode[2]: signed; mode[3]: the ordering.
Outcome Load(Context& context, const Inst& inst) {
  const auto area = static_cast<Area>(inst.mode[0]);
  const uint32_t size = inst.mode[1];
  const uint32_t total = size * inst.destination_count;
  const Ordering ordering = Ordering::Unpack(inst.mode[3]);
  Observations observations;
  const Program& program = context.machine.program();
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint64_t address = LaneAddress(context, inst.source[0], inst.immediate[0], lane);
    const Target target = Find(context, area, address, total, lane, false);
    if (!target) return Outcome::kMoved;
    const Scope scope = ordering.ScopeAt(target);
    Note(context, lane, target, total, Machine::Use::kRead, scope);
    if (scope != Scope::kNone) observations.Add(context, lane, target, total, scope);
    for (uint32_t i = 0; i < inst.destination_count; ++i) {
      const Ref& ref = program.refs[inst.first_destination + i];
      if (ref) Put(context, ref, lane, target.bytes + i * size, size, inst.mode[2] != 0);
    }
  }
  observations.Apply(context, ordering.acquires);
  return Outcome::kNext;
}

std::string PollsValue(Context& context, const Inst& inst) {
  const int lane = std::countr_zero(context.mask);
  const uint64_t address = LaneAddress(context, inst.source[0], inst.immediate[0], lane);
  const uint8_t* bytes =
      Find(context, static_cast<Area>(inst.mode[0]), address, inst.mode[1], lane, false).bytes;
  uint64_t value = 0;
  if (bytes != nullptr) std::memcpy(&value, bytes, std::min<uint32_t>(inst.mode[1], 8));
  return "read address " + Hex(address) + ", which holds " + Hex(value) + ", again and again";
}

Outcome Store(Context& context, const Inst& inst) {
  const auto area = static_cast<Area>(inst.mode[0]);
  const uint32_t size = inst.mode[1];
  const Ordering ordering = Ordering::Unpack(inst.mode[3]);
  const Program& program = context.machine.program();
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint64_t address = LaneAddress(context, inst.source[0], inst.immediate[0], lane);
    uint8_t values[64];
    const uint32_t total = size * inst.source_count;
    for (uint32_t i = 0; i < inst.source_count; ++i) {
      Get(context, program.refs[inst.first_source + i], lane, values + i * size, size);
    }
    const Target target = Find(context, area, address, total, lane, true);
    if (!target) return Outcome::kMoved;
    const Scope scope = ordering.ScopeAt(target);
    // Warps of others' kernels store the same value in no order: in relaxed mode a store that
    // changes nothing races with nothing.
    if (context.machine.options().strict || scope != Scope::kNone ||
        std::memcmp(target.bytes, values, total) != 0) {
      Note(context, lane, target, total, Machine::Use::kWrite, scope);
    }
    if (scope != Scope::kNone) WriteStrongly(context, lane, target, total, ordering, false);
    std::memcpy(target.bytes, values, total);
  }
  if (ordering.releases) context.machine.Advance(context.warp, context.mask);
  return Outcome::kNext;
}

struct ValueType {
  uint32_t bits = 0;
  bool is_signed = false;
  bool is_float = false;
  uint32_t half = 0;  // of two packed numbers: 1 + their HalfType
};

bool TakeType(Parts& parts, ValueType* type) {
  const std::string_view name = parts.Peek();
  static constexpr struct {
    std::string_view name;
    ValueType type;
  } kTypes[] = {{"b8", {8, false, false}},
                {"u8", {8, false, false}},
                {"s8", {8, true, false}},
                {"b16", {16, false, false}},
                {"u16", {16, false, false}},
                {"s16", {16, true, false}},
                {"f16", {16, false, true}},
                {"bf16", {16, false, true}},
                {"b32", {32, false, false}},
                {"u32", {32, false, false}},
                {"s32", {32, true, false}},
                {"f32", {32, false, true}},
                {"b64", {64, false, false}},
                {"u64", {64, false, false}},
                {"s64", {64, true, false}},
                {"f64", {64, false, true}},
                {"b128", {128, false, false}},
                {"f16x2", {32, false, true, 1}},
                {"bf16x2", {32, false, true, 2}}};
  for (const auto& one : kTypes) {
    if (one.name != name) continue;
    *type = one.type;
    parts.Next();
    return true;
  }
  return false;
}

bool IsScope(std::string_view part, Scope* scope) {
  if (part == "cta")
    *scope = Scope::kCta;
  else if (part == "cluster")
    *scope = Scope::kCluster;
  else if (part == "gpu" || part == "sys")
    *scope = Scope::kGpu;
  else
    return false;
  return true;
}

// Takes what says how an access is ordered and cached. Caching has no effect here.
void TakeOrdering(Parts& parts, Ordering* ordering) {
  for (;;) {
    const std::string_view part = parts.Peek();
    if (part == "relaxed" || part == "mmio") {
      ordering->is_strong = true;
    } else if (part == "volatile") {
      ordering->is_strong = ordering->is_volatile = true;
    } else if (part == "acquire" || part == "release" || part == "acq_rel") {
      ordering->is_strong = true;
      ordering->acquires |= part != "release";
      ordering->releases |= part != "acquire";
    } else if (!IsScope(part, &ordering->scope)) {
      const bool known = part == "weak" || part == "nc" || part == "ca" || part == "cg" ||
                         part == "cs" || part == "lu" || part == "cv" || part == "wb" ||
                         part == "wt" || part == "L2::cache_hint" || part.starts_with("L1::") ||
                         part == "L2::64B" || part == "L2::128B" || part == "L2::256B" ||
                         part.starts_with("L2::evict");
      if (!known) return;
    }
    parts.Next();
  }
}

void DecodeLoadStore(Decoder& decoder, Parts& parts, bool is_load) {
  Inst& inst = decoder.inst();
  Area area = Area::kGeneric;
  Ordering ordering;
  TakeOrdering(parts, &ordering);
  TakeArea(parts, &area);
  TakeOrdering(parts, &ordering);
  if (ordering.is_strong && ordering.scope == Scope::kNone) ordering.scope = Scope::kGpu;
  const uint32_t count = parts.Take("v2") ? 2 : parts.Take("v4") ? 4 : parts.Take("v8") ? 8 : 1;
  ValueType type;
  if (!TakeType(parts, &type))
    decoder.Fail("expected a type, not \"." + std::string(parts.Peek()) + "\".");
  decoder.ExpectOperands(2, 3);  // a third is a cache policy
  if (count * type.bits > 256) decoder.Fail("a lane moves at most 256 bits.");
  inst.mode[0] = static_cast<uint32_t>(area);
  inst.mode[1] = type.bits / 8;
  inst.mode[2] = type.is_signed;
  inst.mode[3] = ordering.Pack();
  const int bits = static_cast<int>(type.bits);
  if (is_load) {
    decoder.DestinationList(decoder.Operand(0), bits, true);
    inst.source[0] = decoder.Address(decoder.Operand(1), &inst.immediate[0]);
    if (inst.destination_count != count)
      decoder.Fail("the vector's length is not that of the type.");
    inst.execute = Load;
    inst.describe_wait = PollsValue;
  } else {
    inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
    decoder.SourceList(decoder.Operand(1), bits, true);
    if (inst.source_count != count) decoder.Fail("the vector's length is not that of the type.");
    inst.execute = Store;
  }
}

// ---- Atomics

enum AtomicOperation : uint32_t {
  kAdd,
  kExchange,
  kCompare,
  kMin,
  kMax,
  kAnd,
  kOr,
  kXor,
  kIncrement,
  kDecrement
};

// ftz: whether f32 sums flush subnormal numbers, as they do in global memory and not in shared
// memory (PTX ISA, atom).
uint64_t Combine(
    uint32_t operation, const ValueType& type, bool ftz, uint64_t old, uint64_t x, uint64_t y) {
  const auto extend = [&](uint64_t value) {
    const int shift = 64 - static_cast<int>(type.bits);
    return static_cast<int64_t>(value << shift) >> shift;
  };
  switch (operation) {
    case kAdd:
      if (type.half != 0) {
        const auto half = static_cast<HalfType>(type.half - 1);
        const auto sum = [half](uint16_t a, uint16_t b) { return HalfAdd(half, a, b); };
        return PerHalf(sum, static_cast<uint32_t>(old), static_cast<uint32_t>(x));
      }
      if (type.is_float && type.bits == 64) {
        return std::bit_cast<uint64_t>(std::bit_cast<double>(old) + std::bit_cast<double>(x));
      }
      if (type.is_float) {
        return std::bit_cast<uint32_t>(Add(std::bit_cast<float>(static_cast<uint32_t>(old)),
                                           std::bit_cast<float>(static_cast<uint32_t>(x)),
                                           {.ftz = ftz}));
      }
      return old + x;
    case kExchange:
      return x;
    case kCompare:
      return old == x ? y : old;
    case kMin:
      if (type.is_signed) return extend(old) < extend(x) ? old : x;
      return std::min(old, x);
    case kMax:
      if (type.is_signed) return extend(old) > extend(x) ? old : x;
      return std::max(old, x);
    case kAnd:
      return old & x;
    case kOr:
      return old | x;
    case kXor:
      return old ^ x;
    case kIncrement:
      return old >= x ? 0 : old + 1;
    default:
      return old == 0 || old > x ? x : old - 1;
  }
}

// mode[0]: area, mode[1]: operation, mode[2]: type's bits | signed << 8 | float << 9 | half << 10,
// mode[3]: the ordering.
Outcome Atomic(Context& context, const Inst& inst) {
  const auto area = static_cast<Area>(inst.mode[0]);
  const ValueType type{inst.mode[2] & 0xff,
                       (inst.mode[2] >> 8 & 1) != 0,
                       (inst.mode[2] >> 9 & 1) != 0,
                       inst.mode[2] >> 10};
  const uint32_t size = type.bits / 8;
  const uint32_t elements = std::max<uint32_t>(1, inst.source_count);
  const Ordering ordering = Ordering::Unpack(inst.mode[3]);
  const Program& program = context.machine.program();
  std::array<Target, kLanes> targets;
  Observations observations;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint64_t address = LaneAddress(context, inst.source[0], inst.immediate[0], lane);
    targets[lane] = Find(context, area, address, size * elements, lane, true);
    if (!targets[lane]) return Outcome::kMoved;
    observations.Add(context, lane, targets[lane], size * elements, ordering.scope);
  }
  // What an operation acquires it releases in turn.
  observations.Apply(context, ordering.acquires);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    Note(context, lane, targets[lane], size * elements, Machine::Use::kBoth, ordering.scope);
    WriteStrongly(context, lane, targets[lane], size * elements, ordering, true);
    uint8_t* const bytes = targets[lane].bytes;
    for (uint32_t i = 0; i < elements; ++i) {
      uint64_t old = 0, x = 0, y = 0;
      std::memcpy(&old, bytes + i * size, size);
      Get(context,
          inst.source_count > 0 ? program.refs[inst.first_source + i] : inst.source[1],
          lane,
          reinterpret_cast<uint8_t*>(&x),
          size);
      if (inst.source[2]) Get(context, inst.source[2], lane, reinterpret_cast<uint8_t*>(&y), size);
      const uint64_t result = Combine(inst.mode[1], type, targets[lane].is_global, old, x, y);
      std::memcpy(bytes + i * size, &result, size);
      if (inst.destination[0])
        Put(context, inst.destination[0], lane, reinterpret_cast<uint8_t*>(&old), size, false);
    }
  }
  if (ordering.releases) context.machine.Advance(context.warp, context.mask);
  context.machine.Wake(context.cta);
  return Outcome::kNext;
}

void DecodeAtomic(Decoder& decoder, Parts& parts, bool has_result) {
  Inst& inst = decoder.inst();
  Area area = Area::kGeneric;
  Ordering ordering;
  TakeOrdering(parts, &ordering);
  TakeArea(parts, &area);
  TakeOrdering(parts, &ordering);
  const std::string_view name = parts.Next();
  static constexpr struct {
    std::string_view name;
    uint32_t operation;
  } kOperations[] = {{"add", kAdd},
                     {"exch", kExchange},
                     {"cas", kCompare},
                     {"min", kMin},
                     {"max", kMax},
                     {"and", kAnd},
                     {"or", kOr},
                     {"xor", kXor},
                     {"inc", kIncrement},
                     {"dec", kDecrement}};
  bool known = false;
  for (const auto& one : kOperations) {
    if (one.name != name) continue;
    inst.mode[1] = one.operation;
    known = true;
  }
  if (!known) decoder.Fail("atomic operation \"" + std::string(name) + "\" is not supported.");
  TakeOrdering(parts, &ordering);
  if (ordering.scope == Scope::kNone) ordering.scope = Scope::kGpu;
  const bool noftz = parts.Take("noftz");
  const uint32_t count = parts.Take("v2") ? 2 : parts.Take("v4") ? 4 : 1;
  ValueType type;
  if (!TakeType(parts, &type) || type.bits < 32 || type.bits > 64 ||
      (type.is_float && inst.mode[1] != kAdd)) {
    decoder.Fail("this type is not supported in an atomic operation.");
  }
  if (noftz != (type.half != 0))
    decoder.Fail("packed numbers of 16 bits, and no others, need \".noftz\".");
  inst.mode[0] = static_cast<uint32_t>(area);
  inst.mode[2] = type.bits | static_cast<uint32_t>(type.is_signed) << 8 |
                 static_cast<uint32_t>(type.is_float) << 9;
  inst.mode[2] |= type.half << 10;
  inst.mode[3] = ordering.Pack();
  size_t at = 0;
  const int bits = static_cast<int>(type.bits);
  if (has_result)
    inst.destination[0] = decoder.DestinationOrSink(decoder.Operand(at++), bits, true);
  inst.source[0] = decoder.Address(decoder.Operand(at++), &inst.immediate[0]);
  if (count > 1) {
    decoder.SourceList(decoder.Operand(at++), bits, true);
    if (inst.source_count != count) decoder.Fail("the vector's length is not that of the type.");
  } else {
    inst.source[1] = decoder.Source(decoder.Operand(at++), bits, true);
  }
  if (inst.mode[1] == kCompare) inst.source[2] = decoder.Source(decoder.Operand(at++), bits, true);
  inst.execute = Atomic;
}

// ---- Fences

// mode[0]: bit 0 of shared memory, bit 1 of global memory.
Outcome ProxyFence(Context& context, const Inst& inst) {
  if (!context.machine.options().check_races) return Outcome::kNext;
  Warp& warp = context.warp;
  const auto first = static_cast<Slot>(context.cta.first_slot + warp.index * kWarpSlots);
  for (Knowledge& one : warp.knowledge) {
    if (!(one.mask & context.mask)) continue;
    if (inst.mode[0] & 1) {
      // The writes of these lanes may stand under any slot that their warp has used for them.
      for (Slot slot = first; slot < first + kKnowledgeSlots; ++slot)
        one.clock.SetFenced(slot, one.clock.seen(slot));
    }
    if (inst.mode[0] & 2) one.clock.MakeVisible(context.cta.cluster->number);
  }
  // What they write from now on is later.
  context.machine.Advance(warp, context.mask);
  return Outcome::kNext;
}

Outcome BarrierInitFence(Context& context, const Inst&) {
  for (const uint32_t address : context.warp.unfenced_barriers) {
    const auto it = context.cta.mbarriers.find(address);
    if (it == context.cta.mbarriers.end()) continue;
    it->second.fenced = true;
    VectorClock& initialised = context.warp.initialised;
    if (initialised.empty()) initialised = VectorClock(context.cta.cluster->times.size());
    initialised.SetSeen(it->second.init.slot, it->second.init.time);
  }
  context.warp.unfenced_barriers.clear();
  // What these lanes do from now on is no part of it.
  context.machine.Advance(context.warp, context.mask);
  return Outcome::kNext;
}

// mode[0]: the scope.
Outcome MemoryFence(Context& context, const Inst& inst) {
  context.machine.Fence(context.warp, context.mask, static_cast<Scope>(inst.mode[0]));
  return Outcome::kNext;
}

// ---- mbarriers

std::string WaitsForPhase(Context& context, const Inst& inst) {
  const int lane = std::countr_zero(context.mask);
  const auto address =
      static_cast<uint32_t>(LaneAddress(context, inst.source[0], inst.immediate[0], lane));
  const MBarrier* barrier = context.machine.FindBarrier(context.cta, address);
  if (barrier == nullptr) return "wait";
  return "wait for the mbarrier at " + Hex(address & 0xffffff) + ": " +
         std::to_string(barrier->phase) + " phases are complete; this one still needs " +
         std::to_string(barrier->pending) + " arrivals and " + MissingBytes(*barrier);
}

// The shared address that a lane gives, with the rank of the CTA that it means.
uint32_t BarrierAddress(const Context& context, const Inst& inst, int lane) {
  auto address =
      static_cast<uint32_t>(LaneAddress(context, inst.source[0], inst.immediate[0], lane));
  if (static_cast<Area>(inst.mode[0]) != Area::kSharedCluster && address >> 24 == 0)
    address |= context.cta.rank << 24;
  return address;
}

MBarrier* BarrierOf(Context& context, const Inst& inst, int lane) {
  const uint32_t address = BarrierAddress(context, inst, lane);
  MBarrier* barrier = context.machine.FindBarrier(context.cta, address);
  if (barrier == nullptr) {
    context.machine.Misuse(
        context, lane, "there is no initialised mbarrier at shared address " + Hex(address) + ".");
  }
  return barrier;
}

void Use(Context& context, const Inst& inst, int lane) {
  const uint32_t address = BarrierAddress(context, inst, lane);
  context.machine.UseBarrier(context, lane, *context.machine.FindShared(context.cta, address, 8));
}

Outcome BarrierInit(Context& context, const Inst& inst) {
  const uint32_t* count = context.Row(inst.source[1]);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    const uint32_t address = BarrierAddress(context, inst, lane);
    const auto place = context.machine.FindShared(context.cta, address, 8);
    if (!place || place->offset % 8 != 0 || place->cta != &context.cta) {
      context.machine.Misuse(context,
                             lane,
                             "mbarrier.init at shared address " + Hex(address) +
                                 " is out of range, or not aligned to 8 bytes.");
      return Outcome::kMoved;
    }
    if (count[lane] == 0 || count[lane] >= 1u << 20) {
      context.machine.Misuse(
          context,
          lane,
          "an mbarrier expects 1 to 2^20 - 1 arrivals, not " + std::to_string(count[lane]) + ".");
      return Outcome::kMoved;
    }
    if (context.machine.options().strict && context.cta.mbarriers.contains(place->offset)) {
      context.machine.Misuse(context,
                             lane,
                             "mbarrier.init at shared address " + Hex(address) +
                                 ", where there is an mbarrier that no mbarrier.inval has ended.",
                             false);
    }
    context.machine.AccessShared(context, lane, *place, 8, true);
    MBarrier barrier;
    barrier.expected = count[lane];
    barrier.pending = count[lane];
    barrier.init = context.machine.AccessOf(context, lane);
    context.cta.mbarriers[place->offset] = std::move(barrier);
    context.cta.first_barrier = std::min(context.cta.first_barrier, place->offset);
    context.cta.last_barrier = std::max(context.cta.last_barrier, place->offset);
    auto& unfenced = context.warp.unfenced_barriers;
    if (std::find(unfenced.begin(), unfenced.end(), place->offset) == unfenced.end())
      unfenced.push_back(place->offset);
  }
  return Outcome::kNext;
}

Outcome BarrierInvalidate(Context& context, const Inst& inst) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    if (BarrierOf(context, inst, lane) == nullptr) return Outcome::kMoved;
    const uint32_t address = BarrierAddress(context, inst, lane);
    const auto place = context.machine.FindShared(context.cta, address, 8);
    context.machine.AccessShared(context, lane, *place, 8, true);
    place->cta->mbarriers.erase(place->offset);
  }
  return Outcome::kNext;
}

// Bits of mode[1].
constexpr uint32_t kExpects = 1, kArrives = 2, kDrops = 4, kRelaxed = 8, kHasOperand = 16,
                   kCompletes = 32;

// arrive, arrive_drop, arrive.expect_tx, expect_tx and complete_tx.
Outcome BarrierArrive(Context& context, const Inst& inst) {
  Machine& machine = context.machine;
  const VectorClock none;
  // Lanes that know the same and arrive at the same phase of the same barrier hand it over once.
  const MBarrier* last = nullptr;
  const Knowledge* last_known = nullptr;
  uint64_t last_phase = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    MBarrier* barrier = BarrierOf(context, inst, lane);
    if (barrier == nullptr) return Outcome::kMoved;
    const Knowledge& known = machine.KnowledgeOfLane(context.warp, lane);
    if (barrier != last || &known != last_known) Use(context, inst, lane);
    const uint32_t operand = inst.mode[1] & kHasOperand ? context.Row(inst.source[1])[lane] : 1;
    if (inst.destination[0]) context.MutableWide(inst.destination[0])[lane] = barrier->phase;
    if (inst.mode[1] & (kExpects | kCompletes)) {
      const int64_t bytes = inst.mode[1] & kCompletes ? -static_cast<int64_t>(operand) : operand;
      if (barrier->transactions + bytes >= 1 << 20 || barrier->transactions + bytes <= -(1 << 20)) {
        machine.Misuse(
            context, lane, "the transaction count of an mbarrier leaves the range of 2^20 bytes.");
        return Outcome::kMoved;
      }
      // An expectation does not complete a phase that an arrival of the same instruction still
      // needs.
      barrier->transactions += bytes;
      if (!(inst.mode[1] & kArrives)) machine.Transact(context.cta, *barrier, 0, nullptr);
    }
    if (inst.mode[1] & kArrives) {
      const uint32_t count = inst.mode[1] & kExpects ? 1 : operand;
      if (count > barrier->pending) {
        machine.Misuse(context,
                       lane,
                       "more arrivals at an mbarrier than the " +
                           std::to_string(barrier->expected) + " that a phase expects.");
        return Outcome::kMoved;
      }
      if (inst.mode[1] & kDrops) barrier->expected -= count;
      const bool relaxed = inst.mode[1] & kRelaxed;
      const bool again = barrier == last && &known == last_known && barrier->phase == last_phase;
      last_phase = barrier->phase;
      machine.Arrive(context.cta, *barrier, count, relaxed || again ? none : known.clock);
    }
    last = barrier;
    last_known = &known;
  }
  if (inst.mode[1] & kArrives) machine.Advance(context.warp, context.mask);
  return Outcome::kNext;
}

// mode[1]: bit 0 parity instead of a state, bit 1 may suspend (try_wait), bit 2 relaxed.
Outcome BarrierWait(Context& context, const Inst& inst) {
  Machine& machine = context.machine;
  uint32_t complete = 0;
  const MBarrier* last = nullptr;
  const Knowledge* last_known = nullptr;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    MBarrier* barrier = BarrierOf(context, inst, lane);
    if (barrier == nullptr) return Outcome::kMoved;
    const Knowledge& known = machine.KnowledgeOfLane(context.warp, lane);
    if (barrier != last || &known != last_known) Use(context, inst, lane);
    last = barrier;
    last_known = &known;
    const bool done = inst.mode[1] & 1
                          ? (barrier->phase & 1) != (context.Row(inst.source[1])[lane] & 1)
                          : barrier->phase != context.Wide(inst.source[1])[lane];
    complete |= static_cast<uint32_t>(done) << lane;
  }
  // A waiting warp may be woken without a reason, as hardware does; and lanes of one barrier go
  // together.
  if (complete != context.mask && inst.mode[1] & 2 && !context.group.timed_out &&
      machine.random().Below(16) != 0) {
    return Outcome::kBlocked;
  }
  context.group.timed_out = false;
  if (!(inst.mode[1] & 4)) {
    // Lanes that wait for the same barrier learn together.
    for (uint32_t rest = complete; rest != 0;) {
      const uint32_t address = BarrierAddress(context, inst, std::countr_zero(rest));
      uint32_t same = 0;
      for (int lane = 0; lane < kLanes; ++lane) {
        if (rest >> lane & 1 && BarrierAddress(context, inst, lane) == address) same |= 1u << lane;
      }
      machine.Learn(context.warp, same, machine.FindBarrier(context.cta, address)->completed);
      rest &= ~same;
    }
  }
  context.SetPredicate(inst.destination[0], complete);
  return Outcome::kNext;
}

void DecodeMBarrier(Decoder& decoder, Parts& parts) {
  Inst& inst = decoder.inst();
  const std::string_view what = parts.Next();
  Area area = Area::kShared;
  const auto places = [&] {
    for (;;) {
      if (parts.Take("relaxed")) {
        inst.mode[1] |= what == "test_wait" || what == "try_wait" ? 4u : kRelaxed;
      } else if (!parts.Take("release") && !parts.Take("acquire") && !parts.Take("cta") &&
                 !parts.Take("cluster") && !TakeArea(parts, &area)) {
        return;
      }
    }
  };
  inst.mode[1] = 0;
  if (what == "init" || what == "inval") {
    places();
    parts.Take("b64");
    decoder.ExpectOperands(what == "init" ? 2 : 1, what == "init" ? 2 : 1);
    inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
    if (what == "init") inst.source[1] = decoder.Source(decoder.Operand(1), 32);
    inst.execute = what == "init" ? BarrierInit : BarrierInvalidate;
  } else if (what == "arrive" || what == "arrive_drop") {
    inst.mode[1] = kArrives | (what == "arrive_drop" ? kDrops : 0);
    if (parts.Take("expect_tx")) inst.mode[1] |= kExpects;
    places();
    if (parts.Take("noComplete")) decoder.Fail(".noComplete is not supported.");
    if (!parts.Take("b64")) decoder.Fail("mbarrier instructions end in .b64.");
    // The state is left out where the barrier may be in another CTA.
    const bool has_state = decoder.Operand(0).kind != ptx::Operand::Kind::kAddress;
    size_t at = 0;
    if (has_state && decoder.Operand(at++).kind != ptx::Operand::Kind::kSink) {
      inst.destination[0] = decoder.Destination(decoder.Operand(0), 64);
    }
    inst.source[0] = decoder.Address(decoder.Operand(at++), &inst.immediate[0]);
    if (at < decoder.operand_count()) {
      inst.source[1] = decoder.Source(decoder.Operand(at++), 32);
      inst.mode[1] |= kHasOperand;
    }
    decoder.ExpectOperands(at, at);
    if (inst.mode[1] & kExpects && !(inst.mode[1] & kHasOperand))
      decoder.Fail("expect_tx needs a byte count.");
    inst.execute = BarrierArrive;
  } else if (what == "expect_tx" || what == "complete_tx") {
    places();
    parts.Take("b64");
    decoder.ExpectOperands(2, 2);
    inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
    inst.source[1] = decoder.Source(decoder.Operand(1), 32);
    inst.mode[1] = kHasOperand | (what == "expect_tx" ? kExpects : kCompletes);
    inst.execute = BarrierArrive;
  } else if (what == "test_wait" || what == "try_wait") {
    const bool parity = parts.Take("parity");
    places();
    if (!parts.Take("b64")) decoder.Fail("mbarrier instructions end in .b64.");
    decoder.ExpectOperands(3, 4);  // a fourth is a time limit, which a simulation has no clock for
    inst.destination[0] = decoder.PredicateDestination(decoder.Operand(0));
    inst.source[0] = decoder.Address(decoder.Operand(1), &inst.immediate[0]);
    inst.source[1] = decoder.Source(decoder.Operand(2), parity ? 32 : 64);
    inst.mode[1] |= (parity ? 1u : 0u) | (what == "try_wait" ? 2u : 0u);
    inst.may_time_out = what == "try_wait";
    inst.describe_wait = WaitsForPhase;
    inst.execute = BarrierWait;
  } else {
    decoder.Fail("mbarrier." + std::string(what) + " is not supported.");
  }
  inst.mode[0] = static_cast<uint32_t>(area);
}

// ---- Addresses in a cluster

// mode[0]: 64-bit generic addresses.
Outcome MapAddress(Context& context, const Inst& inst) {
  const uint32_t* rank = context.Row(inst.source[1]);
  const auto ranks = static_cast<uint32_t>(context.cta.cluster->ctas.size());
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    if (rank[lane] >= ranks) {
      context.machine.Misuse(context,
                             lane,
                             "mapa names CTA " + std::to_string(rank[lane]) + " of a cluster of " +
                                 std::to_string(ranks) + ".");
      return Outcome::kMoved;
    }
    const uint64_t address = LaneAddress(context, inst.source[0], 0, lane);
    const uint64_t mapped = (address & ~UINT64_C(0xff000000)) | uint64_t{rank[lane]} << 24;
    if (inst.destination[0].bits == 64) {
      context.MutableWide(inst.destination[0])[lane] = mapped;
    } else {
      context.MutableRow(inst.destination[0])[lane] = static_cast<uint32_t>(mapped);
    }
  }
  return Outcome::kNext;
}

Outcome RankOfAddress(Context& context, const Inst& inst) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    context.MutableRow(inst.destination[0])[lane] =
        static_cast<uint32_t>(LaneAddress(context, inst.source[0], 0, lane) >> 24 & 0xff);
  }
  return Outcome::kNext;
}

Outcome CreatePolicy(Context& context, const Inst& inst) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (context.mask >> lane & 1) context.MutableWide(inst.destination[0])[lane] = 0;
  }
  return Outcome::kNext;
}

}  // namespace

bool DecodeMemory(Decoder& decoder, Parts parts) {
  Inst& inst = decoder.inst();
  const std::string_view name = parts.Next();
  if (name == "ld" || name == "ldu") {
    DecodeLoadStore(decoder, parts, true);
  } else if (name == "st") {
    if (parts.Is("async") || parts.Is("bulk")) return false;
    DecodeLoadStore(decoder, parts, false);
  } else if (name == "atom" || name == "red") {
    if (parts.Is("async")) return false;
    DecodeAtomic(decoder, parts, name == "atom");
  } else if (name == "fence" || name == "membar") {
    if (parts.Take("proxy")) {
      if (parts.Take("async") || parts.Take("async::generic")) {
        inst.execute = ProxyFence;
        inst.mode[0] = 3;
        if (parts.Take("global"))
          inst.mode[0] = 2;
        else if (parts.Take("shared::cta") || parts.Take("shared::cluster"))
          inst.mode[0] = 1;
        while (parts.Take("acquire") || parts.Take("release") ||
               parts.Take("sync_restrict::shared::cta") ||
               parts.Take("sync_restrict::shared::cluster") || parts.Take("cluster")) {
        }
      } else if (parts.Take("alias")) {
        inst.execute = Nothing;
      } else if (parts.Take("tensormap::generic")) {
        while (parts.Take("acquire") || parts.Take("release") || parts.Take("gpu") ||
               parts.Take("cta") || parts.Take("cluster") || parts.Take("sys")) {
        }
        inst.execute = Nothing;
      } else {
        decoder.Fail("this proxy fence is not supported.");
      }
      if (decoder.operand_count() > 2) decoder.Fail("a fence has at most two operands.");
    } else if (parts.Take("mbarrier_init")) {
      parts.Take("release");
      parts.Take("cluster");
      inst.execute = BarrierInitFence;
    } else {
      Scope scope = Scope::kCta;
      while (parts.Take("sc") || parts.Take("acq_rel") || parts.Take("acquire") ||
             parts.Take("release") || parts.Take("sync_restrict::shared::cta") ||
             parts.Take("sync_restrict::shared::cluster") ||
             (IsScope(parts.Peek(), &scope) && parts.Take(parts.Peek()))) {
      }
      if (name == "membar" && parts.Take("gl")) scope = Scope::kGpu;
      inst.mode[0] = static_cast<uint32_t>(scope);
      inst.execute = MemoryFence;
    }
  } else if (name == "mbarrier") {
    DecodeMBarrier(decoder, parts);
  } else if (name == "mapa") {
    parts.Take("shared::cluster");
    const int bits = parts.Take("u64") ? 64 : 32;
    if (bits == 32 && !parts.Take("u32")) decoder.Fail("mapa ends in .u32 or .u64.");
    decoder.ExpectOperands(3, 3);
    inst.destination[0] = decoder.Destination(decoder.Operand(0), bits);
    inst.source[0] = decoder.Source(decoder.Operand(1), bits);
    inst.source[1] = decoder.Source(decoder.Operand(2), 32);
    inst.execute = MapAddress;
  } else if (name == "getctarank") {
    parts.Take("shared::cluster");
    const int bits = parts.Take("u64") ? 64 : 32;
    if (bits == 32 && !parts.Take("u32")) decoder.Fail("getctarank ends in .u32 or .u64.");
    decoder.ExpectOperands(2, 2);
    inst.destination[0] = decoder.Destination(decoder.Operand(0), 32);
    inst.source[0] = decoder.Source(decoder.Operand(1), bits);
    inst.execute = RankOfAddress;
  } else if (name == "createpolicy") {
    // A cache policy, which is opaque to kernels and has no effect here.
    if (!parts.Take("fractional")) decoder.Fail("only createpolicy.fractional is supported.");
    while (parts.Peek().starts_with("L2::evict")) parts.Next();
    if (!parts.Take("b64")) decoder.Fail("a cache policy is a .b64.");
    decoder.ExpectOperands(1, 2);
    inst.destination[0] = decoder.Destination(decoder.Operand(0), 64);
    inst.execute = CreatePolicy;
  } else if (name == "prefetch" || name == "prefetchu" || name == "discard" ||
             name == "applypriority") {
    // Hints about caches, which are not modelled.
    while (!parts.done()) parts.Next();
    inst.execute = Nothing;
  } else {
    return false;
  }
  if (!parts.done())
    decoder.Fail("modifier \"." + std::string(parts.Peek()) + "\" is not supported here.");
  return true;
}

}  // namespace jax_fa4::emulator
