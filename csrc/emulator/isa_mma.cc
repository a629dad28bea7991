// Matrix products whose results are in registers: wgmma and mma.sync, and the loads and stores that
// go with them (ldmatrix, stmatrix).
//
// Source: PTX ISA 9.0, 9.7.14 (mma, ldmatrix, stmatrix), 9.7.15 (wgmma).

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "csrc/emulator/machine.h"
#include "csrc/emulator/tensor_core.h"

namespace jax_fa4::emulator {
namespace {

Slot WarpgroupSlot(const Context& context) {
  return static_cast<Slot>(context.cta.first_slot + context.warp.index * kWarpSlots +
                           kWarpgroupSlot);
}

// The 16 x 16 operand A of a warp from its four registers (9.7.14.5.8).
void GatherA(const Context& context, const Ref* refs, uint16_t* a) {
  for (int r = 0; r < 4; ++r) {
    const uint32_t* row = context.Row(refs[r]);
    for (int lane = 0; lane < kLanes; ++lane) {
      uint16_t* to = a + (lane / 4 + 8 * (r % 2)) * kMmaK + lane % 4 * 2 + 8 * (r / 2);
      std::memcpy(to, &row[lane], 4);
    }
  }
}

// Accumulators of a warp: 16 rows by n columns, register i of lane l at row l/4 + 8 (i/2 % 2),
// column 8 (i/4) + l%4 * 2 + i%2. So two registers of four lanes are eight columns of a row.
void GatherD(const Context& context, const Ref* refs, uint32_t count, int n, float* d) {
  for (uint32_t i = 0; i < count; i += 2) {
    const auto* even = reinterpret_cast<const float*>(context.Row(refs[i]));
    const auto* odd = reinterpret_cast<const float*>(context.Row(refs[i + 1]));
    float* to = d + 8 * (i / 2 % 2) * n + 8 * (i / 4);
    for (int lane = 0; lane < kLanes; lane += 8) {
      const __m256 x = _mm256_loadu_ps(even + lane), y = _mm256_loadu_ps(odd + lane);
      const __m256 left = _mm256_unpacklo_ps(x, y), right = _mm256_unpackhi_ps(x, y);
      _mm256_storeu_ps(to + lane / 4 * n, _mm256_permute2f128_ps(left, right, 0x20));
      _mm256_storeu_ps(to + (lane / 4 + 1) * n, _mm256_permute2f128_ps(left, right, 0x31));
    }
  }
}

void ScatterD(Context& context, const Ref* refs, uint32_t count, int n, const float* d) {
  for (uint32_t i = 0; i < count; i += 2) {
    auto* even = refs[i] ? reinterpret_cast<float*>(context.MutableRow(refs[i])) : nullptr;
    auto* odd = refs[i + 1] ? reinterpret_cast<float*>(context.MutableRow(refs[i + 1])) : nullptr;
    const float* from = d + 8 * (i / 2 % 2) * n + 8 * (i / 4);
    for (int lane = 0; lane < kLanes; lane += 8) {
      const __m256 x = _mm256_loadu_ps(from + lane / 4 * n);
      const __m256 y = _mm256_loadu_ps(from + (lane / 4 + 1) * n);
      const __m256 left = _mm256_permute2f128_ps(x, y, 0x20);
      const __m256 right = _mm256_permute2f128_ps(x, y, 0x31);
      if (even != nullptr) _mm256_storeu_ps(even + lane, _mm256_shuffle_ps(left, right, 0x88));
      if (odd != nullptr) _mm256_storeu_ps(odd + lane, _mm256_shuffle_ps(left, right, 0xdd));
    }
  }
}

// ---- wgmma: its registers
//
// The results of a wgmma.mma_async appear in the accumulators when it is issued, which is as good
// as any other time: whoever accesses them before it is known to be complete is reported.

using Use = WarpgroupRegister::Use;

bool InFlight(const Warp& warp, const WarpgroupRegister& one) {
  return one.time > warp.warpgroup_completed;
}

int ShapeOf(const Machine& machine, const WarpgroupRegister& one) {
  return static_cast<int>(machine.program().instructions[one.instruction].mode[0]);
}

std::string NameOf(const Machine& machine, uint32_t number) {
  return machine.program().kernel->registers[machine.program().tracked[number]].name;
}

void ReportRegister(Context& context,
                    const std::string& message,
                    const char* role,
                    int32_t other,
                    const char* other_role) {
  Machine& machine = context.machine;
  Report report{.kind = Report::Kind::kMisuse, .message = message, .places = {}, .fatal = false};
  const auto add = [&](int32_t instruction, const char* what) {
    Report::Place place = machine.PlaceOf(instruction);
    place.cta = context.cta.index;
    place.warp = context.warp.index;
    place.lane = std::countr_zero(context.mask);
    place.role = what;
    report.places.push_back(std::move(place));
  };
  add(context.group.pc, role);
  if (other >= 0) add(other, other_role);
  machine.AddReport(std::move(report));
}

// A register of a wgmma.mma_async that is not known to be complete is accessed by this instruction.
void ReportInFlight(Context& context, uint32_t number, const char* does) {
  Warp& warp = context.warp;
  const WarpgroupRegister& one = warp.warpgroup_registers[number];
  const auto& groups = warp.warpgroup_groups;
  size_t group = 0;
  while (group < groups.size() && groups[group] < one.time) ++group;
  std::string message = "register " + NameOf(context.machine, number);
  message += one.use == Use::kCopy
                 ? ", a copy of an accumulator of a wgmma.mma_async under way, is "
             : one.use == Use::kOperand ? ", operand A of a wgmma.mma_async under way, is "
                                        : ", an accumulator of a wgmma.mma_async under way, is ";
  message += does;
  message += group == groups.size() ? " before a wgmma.commit_group and a wgmma.wait_group."
                                    : " without a wgmma.wait_group of at most " +
                                          std::to_string(groups.size() - 1 - group) + " before.";
  ReportRegister(
      context, message, "this access", one.instruction, "wgmma.mma_async was issued here");
  // One fault makes one report: from here on it is as if a wait had come.
  warp.warpgroup_completed = std::max(warp.warpgroup_completed, one.time);
}

// Checks the registers of a wgmma.mma_async that is being issued.
void IssueRegisters(Context& context, const Inst& inst, uint32_t time) {
  Machine& machine = context.machine;
  Warp& warp = context.warp;
  const Program& program = machine.program();
  // What a wgmma.fence is missing after, or null.
  const auto unfenced = [&](const WarpgroupRegister& one, bool write) -> const char* {
    if (one.accessed == warp.warpgroup_fences) return "has been accessed by another instruction";
    if (one.instruction < 0 || one.fences != warp.warpgroup_fences) return nullptr;
    if ((one.use == Use::kOperand) == write) return "has been used by another wgmma.mma_async";
    if (write && ShapeOf(machine, one) != static_cast<int>(inst.mode[0]))
      return "has been an accumulator of a wgmma.mma_async of another shape";
    return nullptr;
  };
  if (warp.warpgroup_fences == 0) {
    ReportRegister(context,
                   "no wgmma.fence stands before the first wgmma.mma_async of a warp.",
                   "this one",
                   -1,
                   "");
    warp.warpgroup_fences = 1;
  }
  for (uint32_t i = 0; i < inst.access_count; ++i) {
    const auto [number, write] = program.accesses[inst.first_access + i];
    WarpgroupRegister& one = warp.warpgroup_registers[number];
    // Accumulators may be those of a product under way that has the same shape, operand A that of
    // any other.
    if (InFlight(warp, one) && (one.use == Use::kOperand) == write) {
      ReportInFlight(context, number, write ? "an accumulator here" : "operand A here");
    } else if (InFlight(warp, one) && write &&
               ShapeOf(machine, one) != static_cast<int>(inst.mode[0])) {
      ReportInFlight(context, number, "used by one of another shape");
    } else if (const char* what = unfenced(one, write)) {
      ReportRegister(
          context,
          "register " + NameOf(machine, number) + " " + what + " since the last wgmma.fence.",
          "wgmma.mma_async uses it here",
          one.accessed == warp.warpgroup_fences ? one.accessed_by : one.instruction,
          "the earlier access");
      // One fault makes one report: from here on it is as if a fence had come.
      ++warp.warpgroup_fences;
    }
    one = {.use = write ? Use::kAccumulator : Use::kOperand,
           .time = time,
           .instruction = context.group.pc,
           .origin = InFlight(warp, one) && write ? one.origin : number,
           .fences = warp.warpgroup_fences,
           .accessed = -1};
  }
}

// ---- wgmma

std::string WaitsForWarpgroup(Context& context, const Inst&) {
  const Warpgroup& warpgroup = context.cta.warpgroups[context.warp.index / 4];
  if (!context.group.arrived) return "wait for all 32 lanes of their warp to arrive here";
  std::string warps;
  for (int i = 0; i < 4; ++i) {
    if (warpgroup.arrived >> i & 1) continue;
    warps += (warps.empty() ? "" : ", ") + std::to_string(context.warp.index / 4 * 4 + i);
  }
  return "wait for warps " + warps + " of their warpgroup to execute this wgmma.mma_async";
}

// Whether the four warps of the warpgroup, with all their lanes, have come to this wgmma.mma_async.
// Warps that bring something else, or other operands, are reported.
bool Meet(Context& context, const Inst& inst) {
  Machine& machine = context.machine;
  Group& group = context.group;
  Warpgroup& warpgroup = context.cta.warpgroups[context.warp.index / 4];
  if (!group.arrived) {
    if (context.mask != ~0u) return false;
    const auto value = [&](int operand, int lane) -> uint64_t {
      if (operand < 2)
        return inst.source[operand] ? LaneValue(context, inst.source[operand], lane) : 0;
      return inst.source[2] ? context.Predicate(inst.source[2]) >> lane & 1 : inst.mode[3];
    };
    static constexpr const char* kNames[] = {
        "descriptor of A", "descriptor of B", "predicate scale-d"};
    const uint32_t bit = 1u << context.warp.index % 4;
    const auto different = [&](int lane, const std::string& what) {
      machine.Misuse(context,
                     lane,
                     "the threads of a warpgroup execute wgmma.mma_async with different " + what);
    };
    if (warpgroup.arrived != 0 && warpgroup.instruction != group.pc) {
      different(0,
                "instructions: warp " + std::to_string(warpgroup.first) + " is at line " +
                    std::to_string(machine.PlaceOf(warpgroup.instruction).ptx_line) + ".");
      return false;
    }
    for (int operand = 0; operand < 3; ++operand) {
      const uint64_t own = value(operand, 0);
      for (int lane = 1; lane < kLanes; ++lane) {
        const uint64_t other = value(operand, lane);
        if (own == other) continue;
        different(lane,
                  "values of the " + std::string(kNames[operand]) + ": " + Hex(own) + " and " +
                      Hex(other) + ".");
        return false;
      }
      if (warpgroup.arrived == 0) warpgroup.operands[operand] = own;
      if (warpgroup.operands[operand] == own) continue;
      different(0,
                "values of the " + std::string(kNames[operand]) + ": " +
                    Hex(warpgroup.operands[operand]) + " in warp " +
                    std::to_string(warpgroup.first) + " and " + Hex(own) + ".");
      return false;
    }
    if (warpgroup.arrived == 0) {
      warpgroup.first = context.warp.index;
      warpgroup.instruction = group.pc;
    }
    group.arrived = true;
    group.ticket = warpgroup.generation;
    warpgroup.arrived |= bit;
    if (warpgroup.arrived == 0xf) {
      warpgroup.arrived = 0;
      ++warpgroup.generation;
      machine.Wake(context.cta);
    }
  }
  if (warpgroup.generation == group.ticket) return false;
  group.arrived = false;
  return true;
}

// mode[0]: n; mode[1]: types (bit 0 A, bit 1 B is bf16) and bit 2: A is in registers; mode[2]: bits
// 0 and 1 negate A and B, bits 2 and 3 A and B are MN-major. source[0] A, source[1] B, source[2]
// predicate: add D. The list of destinations is D, the list of sources D again and then A's
// registers.
Outcome WarpgroupMma(Context& context, const Inst& inst) {
  if (!Meet(context, inst)) return Outcome::kBlocked;
  Machine& machine = context.machine;
  const int n = static_cast<int>(inst.mode[0]);
  const bool a_in_registers = inst.mode[1] & 4;
  const int first = std::countr_zero(context.mask);
  alignas(64) uint16_t a[64 * kMmaK], b[256 * kMmaK];
  alignas(64) float d[16 * 256];
  const Slot slot = WarpgroupSlot(context);
  const uint32_t time = ++machine.Time(context.cta, slot);
  VectorClock clock = machine.KnowledgeOf(context.warp, context.mask);
  clock.SetSeen(slot, time);
  IssueRegisters(context, inst, time);
  const Access access{time, slot, static_cast<uint8_t>(first), true, context.group.pc};
  const auto read =
      [&](const Ref& source, Major major, int rows, uint16_t* operand) -> std::string {
    MatrixDescriptor descriptor;
    std::string fault = DecodeMatrixDescriptor(
        LaneValue(context, source, first), DescriptorForm::kHopper, &descriptor);
    if (!fault.empty()) return fault;
    if (machine.options().check_races) {
      const auto size = static_cast<uint32_t>(context.cta.shared.size());
      ForEachChunk(descriptor, major, rows, [&](uint32_t address) {
        if (size >= 16 && address <= size - 16)
          machine.CheckShared(access, clock, {&context.cta, address}, 16, false);
      });
    }
    return GatherOperand(descriptor, major, rows, context.cta.shared, operand);
  };
  std::string fault = read(inst.source[1], inst.mode[2] & 8 ? Major::kMn : Major::kK, n, b);
  const Ref* refs = &machine.program().refs[inst.first_source];
  const uint32_t count = inst.destination_count;
  uint16_t* rows_of_warp = a;
  if (a_in_registers) {
    GatherA(context, refs + count, a);
  } else if (fault.empty()) {
    fault = read(inst.source[0], inst.mode[2] & 4 ? Major::kMn : Major::kK, 64, a);
    rows_of_warp = a + context.warp.index % 4 * 16 * kMmaK;
  }
  if (!fault.empty()) {
    machine.Misuse(context, first, fault);
    return Outcome::kMoved;
  }
  MmaOptions options;
  options.a_type = inst.mode[1] & 1 ? HalfType::kBf16 : HalfType::kF16;
  options.b_type = inst.mode[1] & 2 ? HalfType::kBf16 : HalfType::kF16;
  options.negate_a = inst.mode[2] & 1;
  options.negate_b = inst.mode[2] & 2;
  options.accumulate =
      inst.source[2] ? context.Predicate(inst.source[2]) >> first & 1 : inst.mode[3] != 0;
  GatherD(context, refs, count, n, d);
  MmaHopper(options,
            {.m = 16,
             .n = n,
             .a = rows_of_warp,
             .a_stride = kMmaK,
             .b = b,
             .b_stride = kMmaK,
             .d = d,
             .d_stride = n});
  ScatterD(context, &machine.program().refs[inst.first_destination], count, n, d);
  machine.Issue(
      slot, time, "wgmma", {{"m", 64}, {"n", n}, {"k", kMmaK}, {"accumulate", options.accumulate}});
  return Outcome::kNext;
}

Outcome WarpgroupFence(Context& context, const Inst&) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  ++context.warp.warpgroup_fences;
  return Outcome::kNext;
}

Outcome WarpgroupCommit(Context& context, const Inst&) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  auto& groups = context.warp.warpgroup_groups;
  // Who waits for the second oldest waits for the oldest as well.
  if (groups.size() >= kMaxGroups) groups.pop_front();
  groups.push_back(context.machine.Time(context.cta, WarpgroupSlot(context)));
  return Outcome::kNext;
}

Outcome WarpgroupWait(Context& context, const Inst& inst) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  auto& groups = context.warp.warpgroup_groups;
  uint32_t time = 0;
  while (static_cast<int64_t>(groups.size()) > inst.immediate[0]) {
    time = groups.front();
    groups.pop_front();
  }
  if (time != 0) {
    context.warp.warpgroup_completed = std::max(context.warp.warpgroup_completed, time);
    VectorClock clock(context.cta.cluster->times.size());
    clock.SetSeen(WarpgroupSlot(context), time);
    context.machine.Learn(context.warp, context.mask, clock);
    context.machine.Retire(context.cta, WarpgroupSlot(context), time);
  }
  return Outcome::kNext;
}

// ---- mma.sync.m16n8k16

// mode[1]: types as above. The list of sources: A (4), B (2), C (4).
Outcome WarpMma(Context& context, const Inst& inst) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  alignas(64) uint16_t a[16 * kMmaK], b[8 * kMmaK];
  alignas(64) float d[16 * 8];
  const Ref* refs = &context.machine.program().refs[inst.first_source];
  GatherA(context, refs, a);
  for (int r = 0; r < 2; ++r) {
    const uint32_t* row = context.Row(refs[4 + r]);
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(b + lane / 4 * kMmaK + lane % 4 * 2 + 8 * r, &row[lane], 4);
    }
  }
  GatherD(context, refs + 6, 4, 8, d);
  MmaOptions options;
  options.a_type = options.b_type = inst.mode[1] & 1 ? HalfType::kBf16 : HalfType::kF16;
  MmaHopper(options,
            {.m = 16,
             .n = 8,
             .a = a,
             .a_stride = kMmaK,
             .b = b,
             .b_stride = kMmaK,
             .d = d,
             .d_stride = 8});
  ScatterD(context, &context.machine.program().refs[inst.first_destination], 4, 8, d);
  return Outcome::kNext;
}

// ---- ldmatrix and stmatrix: 8 x 8 matrices of 16-bit elements, whose rows' addresses lanes 8i to
// 8i + 7 give

// The bytes of row `row` of matrix `matrix`, checked; null after a report.
uint8_t* MatrixRow(Context& context, const Inst& inst, int matrix, int row, bool write) {
  const int lane = matrix * 8 + row;
  auto address =
      static_cast<uint32_t>(LaneValue(context, inst.source[0], lane) + inst.immediate[0]);
  if (address >> 24 == 0) address |= context.cta.rank << 24;
  const auto place = context.machine.FindShared(context.cta, address, 16);
  if (!place || place->offset % 16 != 0) {
    context.machine.Misuse(context,
                           lane,
                           "a row of a matrix lies out of range, or not aligned to 16 bytes.",
                           true,
                           Report::Kind::kMemory);
    return nullptr;
  }
  if (write) context.machine.CheckBarriers(context, lane, *place, 16);
  context.machine.AccessShared(context, lane, *place, 16, write);
  return place->cta->shared.data() + place->offset;
}

// mode[0]: matrices; mode[1]: transposed.
Outcome MoveMatrices(Context& context, const Inst& inst, bool load) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  const Program& program = context.machine.program();
  for (int matrix = 0; matrix < static_cast<int>(inst.mode[0]); ++matrix) {
    uint8_t* rows[8];
    for (int row = 0; row < 8; ++row) {
      rows[row] = MatrixRow(context, inst, matrix, row, !load);
      if (rows[row] == nullptr) return Outcome::kMoved;
    }
    const Ref& ref = program.refs[(load ? inst.first_destination : inst.first_source) +
                                  static_cast<uint32_t>(matrix)];
    uint32_t values[kLanes];
    if (!load) std::memcpy(values, context.Row(ref), sizeof(values));
    for (int lane = 0; lane < kLanes; ++lane) {
      uint16_t pair[2];
      if (!load) std::memcpy(pair, &values[lane], 4);
      for (int j = 0; j < 2; ++j) {
        const int row = inst.mode[1] ? lane % 4 * 2 + j : lane / 4;
        const int column = inst.mode[1] ? lane / 4 : lane % 4 * 2 + j;
        uint8_t* element = rows[row] + 2 * column;
        if (load)
          std::memcpy(&pair[j], element, 2);
        else
          std::memcpy(element, &pair[j], 2);
      }
      if (load) std::memcpy(&values[lane], pair, 4);
    }
    if (load && ref) std::memcpy(context.MutableRow(ref), values, sizeof(values));
  }
  return Outcome::kNext;
}

Outcome LoadMatrix(Context& context, const Inst& inst) { return MoveMatrices(context, inst, true); }
Outcome StoreMatrix(Context& context, const Inst& inst) {
  return MoveMatrices(context, inst, false);
}

// ---- Decoding

// "m64n128k16" as three numbers.
bool Shape(std::string_view text, int* m, int* n, int* k) {
  int values[3] = {};
  const char letters[3] = {'m', 'n', 'k'};
  for (int i = 0; i < 3; ++i) {
    if (text.empty() || text[0] != letters[i]) return false;
    text.remove_prefix(1);
    while (!text.empty() && text[0] >= '0' && text[0] <= '9' && values[i] < 10000) {
      values[i] = values[i] * 10 + (text[0] - '0');
      text.remove_prefix(1);
    }
  }
  *m = values[0];
  *n = values[1];
  *k = values[2];
  return text.empty();
}

void DecodeWarpgroup(Decoder& decoder, Parts& parts) {
  Inst& inst = decoder.inst();
  int m = 0, n = 0, k = 0;
  if (!parts.Take("sync") || !parts.Take("aligned") || !Shape(parts.Next(), &m, &n, &k) ||
      m != 64 || k != 16 || n % 8 != 0 || n < 8 || n > 256) {
    decoder.Fail("wgmma.mma_async is .sync.aligned.m64nNk16 with N a multiple of 8 up to 256.");
  }
  if (!parts.Take("f32")) decoder.Fail("only .f32 accumulators are supported.");
  const std::string_view a = parts.Next(), b = parts.Next();
  if (a != b || (a != "bf16" && a != "f16")) decoder.Fail("wgmma operands are .bf16 or .f16.");
  const bool in_registers = decoder.Operand(1).kind == ptx::Operand::Kind::kVector;
  decoder.ExpectOperands(in_registers ? 7 : 8, in_registers ? 7 : 8);
  inst.mode[0] = static_cast<uint32_t>(n);
  inst.mode[1] = (a == "bf16" ? 3 : 0) | (in_registers ? 4 : 0);
  decoder.DestinationList(decoder.Operand(0), 32);
  ptx::Operand sources = decoder.Operand(0);
  if (sources.kind != ptx::Operand::Kind::kVector)
    decoder.Fail("wgmma's accumulators are a vector.");
  if (in_registers) {
    const auto& more = decoder.Operand(1).elements;
    if (more.size() != 4) decoder.Fail("wgmma takes A from 4 registers.");
    sources.elements.insert(sources.elements.end(), more.begin(), more.end());
  } else {
    inst.source[0] = decoder.Source(decoder.Operand(1), 64);
  }
  decoder.SourceList(sources, 32);
  if (inst.destination_count != inst.mode[0] / 2)
    decoder.Fail("the number of accumulators is not that of the shape.");
  inst.source[1] = decoder.Source(decoder.Operand(2), 64);
  if (decoder.Operand(3).kind == ptx::Operand::Kind::kImmediate) {
    inst.mode[3] = decoder.Constant(decoder.Operand(3)) != 0;
  } else {
    inst.source[2] = decoder.PredicateSource(decoder.Operand(3));
  }
  if (decoder.Constant(decoder.Operand(4)) < 0) inst.mode[2] |= 1;
  if (decoder.Constant(decoder.Operand(5)) < 0) inst.mode[2] |= 2;
  if (in_registers) {
    if (decoder.Constant(decoder.Operand(6)) != 0) inst.mode[2] |= 8;
  } else {
    if (decoder.Constant(decoder.Operand(6)) != 0) inst.mode[2] |= 4;
    if (decoder.Constant(decoder.Operand(7)) != 0) inst.mode[2] |= 8;
  }
  inst.execute = WarpgroupMma;
  inst.describe_wait = WaitsForWarpgroup;
}

}  // namespace

// A mov is no access: compilers copy registers where they like. It hands on what is known of its
// source, so that a copy of an accumulator is as little of use as the accumulator itself.
void CheckWarpgroupRegisters(Context& context, const Inst& inst) {
  if (inst.execute == WarpgroupMma) return;
  Warp& warp = context.warp;
  const Program& program = context.machine.program();
  const bool is_move = program.kernel->statements[inst.statement].opcode.starts_with("mov.");
  WarpgroupRegister moved{.accessed = -1};
  for (uint32_t i = 0; i < inst.access_count; ++i) {
    const auto [number, write] = program.accesses[inst.first_access + i];
    WarpgroupRegister& one = warp.warpgroup_registers[number];
    const bool in_flight = InFlight(warp, one);
    if (!write && is_move) {
      if (one.accessed > moved.accessed) {
        moved.accessed = one.accessed;
        moved.accessed_by = one.accessed_by;
      }
      if (!in_flight || one.use == Use::kOperand) continue;
      moved.use = Use::kCopy;
      moved.time = one.time;
      moved.instruction = one.instruction;
      moved.origin = one.origin;
      moved.fences = one.fences;
      continue;
    }
    if (in_flight && (!write || one.use != Use::kCopy)) {
      // An accumulator may get back what products under way have made of a copy of it.
      if (is_move && InFlight(warp, moved) && moved.origin == one.origin) {
        moved.use = Use::kAccumulator;
      } else {
        ReportInFlight(context, number, write ? "written" : "read");
      }
    }
    if (is_move) {
      one = moved;
    } else if (write) {
      one = {.accessed = warp.warpgroup_fences, .accessed_by = context.group.pc};
    } else if (context.machine.options().strict) {
      // Only writes change what a product gets.
      one.accessed = warp.warpgroup_fences;
      one.accessed_by = context.group.pc;
    }
  }
}

bool DecodeMatrix(Decoder& decoder, Parts parts) {
  Inst& inst = decoder.inst();
  const std::string_view name = parts.Next();
  if (name == "wgmma") {
    const std::string_view what = parts.Next();
    if (what == "mma_async") {
      DecodeWarpgroup(decoder, parts);
    } else {
      if (!parts.Take("sync") || !parts.Take("aligned"))
        decoder.Fail("wgmma instructions are .sync.aligned.");
      if (what == "fence") {
        inst.execute = WarpgroupFence;
      } else if (what == "commit_group") {
        inst.execute = WarpgroupCommit;
      } else if (what == "wait_group") {
        decoder.ExpectOperands(1, 1);
        inst.immediate[0] = decoder.Constant(decoder.Operand(0));
        if (inst.immediate[0] < 0) decoder.Fail("the number of groups cannot be negative.");
        inst.execute = WarpgroupWait;
      } else {
        decoder.Fail("wgmma." + std::string(what) + " is not supported.");
      }
      inst.describe_wait = WaitsForWarp;
    }
  } else if (name == "mma") {
    int m = 0, n = 0, k = 0;
    if (!parts.Take("sync") || !parts.Take("aligned") || !Shape(parts.Next(), &m, &n, &k) ||
        m != 16 || n != 8 || k != 16 || !parts.Take("row") || !parts.Take("col") ||
        !parts.Take("f32")) {
      decoder.Fail("of mma.sync, only .m16n8k16.row.col with .f32 accumulators is supported.");
    }
    const std::string_view a = parts.Next(), b = parts.Next();
    if (a != b || (a != "bf16" && a != "f16") || !parts.Take("f32"))
      decoder.Fail("mma operands are .bf16 or .f16.");
    inst.mode[1] = a == "bf16";
    decoder.ExpectOperands(4, 4);
    decoder.DestinationList(decoder.Operand(0), 32);
    ptx::Operand sources = decoder.Operand(1);
    for (const size_t i : {size_t{2}, size_t{3}}) {
      const auto& more = decoder.Operand(i).elements;
      sources.elements.insert(sources.elements.end(), more.begin(), more.end());
    }
    decoder.SourceList(sources, 32);
    if (inst.source_count != 10 || inst.destination_count != 4)
      decoder.Fail("the number of registers is wrong.");
    inst.execute = WarpMma;
    inst.describe_wait = WaitsForWarp;
  } else if (name == "ldmatrix" || name == "stmatrix") {
    const bool load = name == "ldmatrix";
    if (!parts.Take("sync") || !parts.Take("aligned") || !parts.Take("m8n8")) {
      decoder.Fail("matrices are moved by .sync.aligned.m8n8.");
    }
    inst.mode[0] = parts.Take("x4") ? 4 : parts.Take("x2") ? 2 : parts.Take("x1") ? 1 : 0;
    if (inst.mode[0] == 0) decoder.Fail("matrices are moved by .x1, .x2 or .x4.");
    inst.mode[1] = parts.Take("trans");
    if (!parts.Take("shared")) parts.Take("shared::cta");
    if (!parts.Take("b16")) decoder.Fail("matrices have .b16 elements.");
    decoder.ExpectOperands(2, 2);
    if (load) {
      decoder.DestinationList(decoder.Operand(0), 32);
      inst.source[0] = decoder.Address(decoder.Operand(1), &inst.immediate[0]);
    } else {
      inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
      decoder.SourceList(decoder.Operand(1), 32);
    }
    if ((load ? inst.destination_count : inst.source_count) != inst.mode[0]) {
      decoder.Fail("the number of registers is not that of the opcode.");
    }
    inst.execute = load ? LoadMatrix : StoreMatrix;
    inst.describe_wait = WaitsForWarp;
  } else {
    return false;
  }
  if (!parts.done())
    decoder.Fail("modifier \"." + std::string(parts.Peek()) + "\" is not supported here.");
  return true;
}

}  // namespace jax_fa4::emulator
