// The tensor core: tcgen05 and its memory.
//
// Source: PTX ISA 9.0, 9.7.16 (tcgen05).

#include <bit>
#include <cstring>
#include <optional>

#include "csrc/emulator/machine.h"
#include "csrc/emulator/tensor_core.h"

namespace jax_fa4::emulator {
namespace {

constexpr uint32_t kTensorColumns = 512, kTensorLanes = 128, kColumnGroup = 32;

Slot WarpSlot(const Context& context, int which) {
  return static_cast<Slot>(context.cta.first_slot + context.warp.index * kWarpSlots + which);
}

Slot PipeSlot(const Cta& cta) {
  return static_cast<Slot>(cta.first_slot + cta.warps.size() * kWarpSlots);
}

// A kernel may issue for ever and never wait: the pipe takes this many operations.
bool PipeIsFull(const Cta& cta) { return cta.tensor_pipe.size() >= 1024; }

Outcome WaitForPipe(Context& context) {
  return context.machine.BlockedOn("tensor pipe", &context.cta.tensor_pipe, {});
}

// ---- Allocation

// Instructions that with .cta_group::2 are issued by a warp of each CTA of a pair, which perform
// them together (9.7.16.5). mode[0]: CTA group; mode[1]: which one.
enum PairOperation : uint32_t { kAllocate, kDeallocate, kRelinquish };

std::string NameOf(const Inst& inst) {
  static constexpr const char* kNames[] = {"alloc", "dealloc", "relinquish_alloc_permit"};
  return std::string("tcgen05.") + kNames[inst.mode[1]] +
         ".cta_group::" + std::to_string(inst.mode[0]);
}

// The other CTA of the pair, or null.
Cta* PeerOf(const Cta& cta) {
  const uint32_t rank = cta.rank ^ 1;
  return rank < cta.cluster->ctas.size() ? cta.cluster->ctas[rank].get() : nullptr;
}

// What an instruction waits for, as the trace knows it: that of a pair is one object for both.
const void* ObjectOf(const Cta& cta, uint32_t group, uint32_t operation) {
  const Cta& owner = group == 2 ? *cta.cluster->ctas[cta.rank & ~1u] : cta;
  if (operation == kAllocate) return &owner.tensor_columns;
  return &owner.pair_requests[operation];
}

Outcome WaitForTensorMemory(Context& context, const void* object, uint32_t columns) {
  return context.machine.BlockedOn("tensor memory", object, {{"columns", columns}});
}

std::string WaitsForTensorMemory(Context& context, const Inst& inst) {
  if (!WholeWarp(context)) return WaitsForWarp(context, inst);
  const int lane = std::countr_zero(context.mask);
  if (inst.mode[0] == 1) {
    return "wait for " + std::to_string(LaneValue(context, inst.source[1], lane)) +
           " columns of tensor memory";
  }
  if (!context.group.arrived)
    return "wait for another warp of their CTA that executes " + NameOf(inst);
  const PairRequest& own = context.cta.pair_requests[inst.mode[1]];
  const PairRequest& other = PeerOf(context.cta)->pair_requests[inst.mode[1]];
  if (!other.open || other.done)
    return "wait for a warp of the peer CTA to execute " + NameOf(inst) + ", too";
  return "wait for " + std::to_string(own.columns) +
         " columns of tensor memory in both CTAs of a pair";
}

// Does what a warp and one of the peer CTA have come to do: `perform` does it for both, once, or
// returns false as long as it cannot. Neither goes on before that: the PTX ISA lets all three of
// these instructions block until then. It does not say that one warp learns what the other did.
// Where several warps of a CTA come, the next one waits until the one before has gone on.
template <typename Perform>
Outcome Collectively(Context& context, const Inst& inst, uint32_t columns, Perform perform) {
  Machine& machine = context.machine;
  const int lane = std::countr_zero(context.mask);
  Cta* const peer = PeerOf(context.cta);
  if (peer == nullptr) {
    machine.Misuse(context, lane, NameOf(inst) + " needs a cluster of two CTAs.");
    return Outcome::kMoved;
  }
  PairRequest& own = context.cta.pair_requests[inst.mode[1]];
  PairRequest& other = peer->pair_requests[inst.mode[1]];
  const void* const object = ObjectOf(context.cta, 2, inst.mode[1]);
  if (!context.group.arrived) {
    if (own.open) return WaitForTensorMemory(context, &own.done, columns);
    own = {.open = true, .columns = columns, .by = machine.AccessOf(context, lane)};
    context.group.arrived = true;
  }
  if (!own.done) {
    if (!other.open || other.done) return WaitForTensorMemory(context, object, columns);
    if (own.columns != other.columns) {
      machine.Misuse(context,
                     lane,
                     NameOf(inst) + " is of " + std::to_string(own.columns) +
                         " columns here, but of " + std::to_string(other.columns) +
                         " in the peer CTA, at line " +
                         std::to_string(machine.PlaceOf(other.by.instruction).ptx_line) + ".");
      return Outcome::kMoved;
    }
    if (!perform(own, *peer, other)) return WaitForTensorMemory(context, object, columns);
    own.done = other.done = true;
    machine.Signal("tensor memory", object, {{"columns", columns}}, true);
  }
  own.open = false;
  context.group.arrived = false;
  machine.Signal("tensor memory", &own.done, {{"columns", columns}}, true);
  machine.Wake(context.cta);
  return Outcome::kNext;
}

// Where so many columns are free in both CTAs, which may be the same.
std::optional<uint32_t> FindColumns(const Cta& cta, const Cta& other, uint32_t columns) {
  uint32_t run = 0;
  for (uint32_t i = 0; i < cta.tensor_columns.size(); ++i) {
    run = cta.tensor_columns[i] || other.tensor_columns[i] ? 0 : run + 1;
    if (run == columns / kColumnGroup) return (i + 1) * kColumnGroup - columns;
  }
  return std::nullopt;
}

void TakeColumns(Machine& machine, Cta& cta, uint32_t first, uint32_t columns, const Access& by) {
  if (cta.tensor.empty()) {
    cta.tensor.assign(kTensorLanes * kTensorColumns,
                      0x7fbadbad);  // NaN: what a kernel must not rely on
    cta.tensor_shadow =
        Shadow(machine.options().check_races ? kTensorLanes * kTensorColumns / 8 : 0);
  }
  for (uint32_t i = first / kColumnGroup; i < (first + columns) / kColumnGroup; ++i) {
    cta.tensor_columns[i] = true;
    cta.tensor_owners[i] = by;
  }
}

Outcome Allocate(Context& context, const Inst& inst) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  Machine& machine = context.machine;
  const int lane = std::countr_zero(context.mask);
  const auto columns = static_cast<uint32_t>(LaneValue(context, inst.source[1], lane));
  if (columns < 32 || columns > kTensorColumns || !std::has_single_bit(columns)) {
    machine.Misuse(context,
                   lane,
                   "tcgen05.alloc takes 32, 64, 128, 256 or 512 columns, not " +
                       std::to_string(columns) + ".");
    return Outcome::kMoved;
  }
  Cta& cta = context.cta;
  if (!cta.may_allocate && !context.group.arrived) {
    machine.Misuse(context, lane, "tcgen05.alloc after tcgen05.relinquish_alloc_permit.");
    return Outcome::kMoved;
  }
  uint32_t first;
  if (inst.mode[0] == 2) {
    // The same columns of both CTAs: tcgen05.mma has one address for them.
    const Outcome outcome =
        Collectively(context, inst, columns, [&](PairRequest& own, Cta& peer, PairRequest& other) {
          const std::optional<uint32_t> found = FindColumns(cta, peer, columns);
          if (!found) return false;
          own.first = other.first = *found;
          TakeColumns(machine, cta, *found, columns, own.by);
          TakeColumns(machine, peer, *found, columns, other.by);
          return true;
        });
    if (outcome != Outcome::kNext) return outcome;
    first = cta.pair_requests[kAllocate].first;
  } else {
    const std::optional<uint32_t> found = FindColumns(cta, cta, columns);
    if (!found) return WaitForTensorMemory(context, &cta.tensor_columns, columns);
    first = *found;
    TakeColumns(machine, cta, first, columns, machine.AccessOf(context, lane));
  }
  const auto to =
      static_cast<uint32_t>(LaneValue(context, inst.source[0], lane) + inst.immediate[0]);
  const auto place = machine.FindShared(cta, to >> 24 ? to : to | cta.rank << 24, 4);
  if (!place || place->offset % 4 != 0) {
    machine.Misuse(context,
                   lane,
                   "tcgen05.alloc writes its result out of range.",
                   true,
                   Report::Kind::kMemory);
    return Outcome::kMoved;
  }
  machine.AccessShared(context, lane, *place, 4, true);
  std::memcpy(place->cta->shared.data() + place->offset, &first, 4);
  return Outcome::kNext;
}

// Of a pair, each CTA's warp gives back the columns of its own.
Outcome Deallocate(Context& context, const Inst& inst) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  const int lane = std::countr_zero(context.mask);
  const auto address = static_cast<uint32_t>(LaneValue(context, inst.source[0], lane));
  const auto columns = static_cast<uint32_t>(LaneValue(context, inst.source[1], lane));
  const uint32_t first = address / kColumnGroup, groups = columns / kColumnGroup;
  bool valid = columns % kColumnGroup == 0 && address % kColumnGroup == 0 && groups > 0 &&
               first + groups <= 16;
  for (uint32_t i = 0; valid && i < groups; ++i) valid = context.cta.tensor_columns[first + i];
  if (!valid) {
    context.machine.Misuse(context,
                           lane,
                           "tcgen05.dealloc of " + std::to_string(columns) + " columns at " +
                               std::to_string(address) + ", which are not allocated.");
    return Outcome::kMoved;
  }
  if (inst.mode[0] == 2) {
    const Outcome outcome =
        Collectively(context, inst, columns, [](auto&, auto&, auto&) { return true; });
    if (outcome != Outcome::kNext) return outcome;
  }
  context.machine.CheckOwner(context.machine.AccessOf(context, lane),
                             context.machine.KnowledgeOf(context.warp, context.mask),
                             context.cta,
                             address,
                             columns);
  context.machine.ReleaseTensor(context, lane, address, columns);
  for (uint32_t i = 0; i < groups; ++i) context.cta.tensor_columns[first + i] = false;
  context.machine.Signal("tensor memory",
                         ObjectOf(context.cta, inst.mode[0], kAllocate),
                         {{"columns", columns}},
                         true);
  context.machine.Wake(context.cta);
  return Outcome::kNext;
}

// The CTA's own right ends at once, even if the warp then waits for the peer's.
Outcome Relinquish(Context& context, const Inst& inst) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  context.cta.may_allocate = false;
  if (inst.mode[0] == 1) return Outcome::kNext;
  return Collectively(context, inst, 0, [](auto&, auto&, auto&) { return true; });
}

// ---- Matrix products

// Checks that columns of tensor memory are allocated.
bool Allocated(const Cta& cta, uint32_t column, uint32_t columns) {
  if (column + columns > kTensorColumns) return false;
  for (uint32_t i = column / kColumnGroup; i <= (column + columns - 1) / kColumnGroup; ++i) {
    if (!cta.tensor_columns[i]) return false;
  }
  return true;
}

struct Product {
  InstructionDescriptor descriptor;
  int cta_group = 1;
  bool accumulate = false;
  bool a_in_tensor = false;
  uint32_t d = 0, a_tensor = 0;
  MatrixDescriptor a, b;
};

// Reads `rows` of an operand from one CTA's shared memory, as the tensor core would.
std::string ReadOperand(Machine& machine,
                        const Operation& self,
                        Cta& cta,
                        const MatrixDescriptor& descriptor,
                        Major major,
                        int rows,
                        uint16_t* operand) {
  if (machine.options().check_races) {
    const Access access = self.access();
    const auto size = static_cast<uint32_t>(cta.shared.size());
    ForEachChunk(descriptor, major, rows, [&](uint32_t address) {
      if (size >= 16 && address <= size - 16)
        machine.CheckShared(access, self.clock, {&cta, address}, 16, false);
    });
  }
  return GatherOperand(descriptor, major, rows, cta.shared, operand);
}

void Multiply(Machine& machine, Operation& self, const Product& product) {
  std::vector<Cta*> ctas;
  if (product.cta_group == 2) {
    for (const auto& one : self.cta->cluster->ctas) {
      if (one->rank / 2 == self.cta->rank / 2) ctas.push_back(one.get());
    }
  } else {
    ctas.push_back(self.cta);
  }
  const InstructionDescriptor& shape = product.descriptor;
  const int rows = shape.m / static_cast<int>(ctas.size());
  const int columns_of_cta = shape.n / static_cast<int>(ctas.size());
  alignas(64) uint16_t a[128 * kMmaK], b[256 * kMmaK];
  std::string fault;
  for (size_t i = 0; i < ctas.size() && fault.empty(); ++i) {
    fault = ReadOperand(machine,
                        self,
                        *ctas[i],
                        product.b,
                        shape.b_major,
                        columns_of_cta,
                        b + i * columns_of_cta * kMmaK);
  }
  const Access access = self.access();
  const uint32_t lane = product.d >> 16, column = product.d & 0xffff;
  // The two CTAs of a pair allocate together.
  const auto check_owner = [&](uint32_t first, uint32_t count) {
    machine.CheckOwner(access, self.clock, *self.cta, first, count);
  };
  for (Cta* cta : ctas) {
    if (!fault.empty()) break;
    // Of a pair's 128 rows each CTA has 64, whose second half of columns lies in the upper 64
    // lanes. The 64 rows of one CTA lie in 16 lanes of each quarter, the lower or the upper ones.
    const bool scattered = rows == 64 && product.cta_group == 1;
    const bool folded = rows == 64 && product.cta_group == 2;
    const uint32_t columns = static_cast<uint32_t>(folded ? shape.n / 2 : shape.n);
    if (cta->tensor.empty() || !Allocated(*cta, column, columns) ||
        (lane != 0 && !(scattered && lane == 16))) {
      fault = "tcgen05.mma writes columns [" + std::to_string(column) + ", " +
              std::to_string(column + columns) + ") from lane " + std::to_string(lane) +
              " of tensor memory, which are not all allocated.";
      break;
    }
    check_owner(column, columns);
    if (product.a_in_tensor) {
      const uint32_t at = product.a_tensor & 0xffff;
      if (product.a_tensor >> 16 != 0 || !Allocated(*cta, at, 8)) {
        fault = "tcgen05.mma reads A from tensor memory that is not allocated.";
        break;
      }
      check_owner(at, 8);
      for (int row = 0; row < rows; ++row) {
        machine.AccessTensor(access,
                             self.clock,
                             *self.cta,
                             self.warp,
                             *cta,
                             static_cast<uint32_t>(row),
                             at,
                             8,
                             false);
        std::memcpy(a + row * kMmaK, &cta->tensor[row * kTensorColumns + at], 2 * kMmaK);
      }
    } else {
      fault = ReadOperand(machine, self, *cta, product.a, shape.a_major, rows, a);
      if (!fault.empty()) break;
    }
    MmaOptions options{.a_type = shape.a_type,
                       .b_type = shape.b_type,
                       .negate_a = shape.negate_a,
                       .negate_b = shape.negate_b,
                       .accumulate = product.accumulate};
    const int parts = folded ? 2 : scattered ? 4 : 1;
    for (int part = 0; part < parts; ++part) {
      const uint32_t first_lane = folded ? 64 * part : scattered ? lane + 32 * part : 0;
      const int rows_of_part = scattered ? 16 : rows;
      for (int row = 0; row < rows_of_part; ++row) {
        const uint32_t at = first_lane + static_cast<uint32_t>(row);
        machine.AccessTensor(
            access, self.clock, *self.cta, self.warp, *cta, at, column, columns, true);
      }
      MmaOperands operands;
      operands.m = rows_of_part;
      operands.n = static_cast<int>(columns);
      operands.a = a + (scattered ? part * rows_of_part * kMmaK : 0);
      operands.b = b + (folded ? part * static_cast<int>(columns) * kMmaK : 0);
      operands.d = reinterpret_cast<float*>(
          &cta->tensor[static_cast<size_t>(first_lane) * kTensorColumns + column]);
      operands.d_stride = kTensorColumns;
      MmaBlackwell(options, operands);
    }
  }
  if (!fault.empty()) machine.OperationFault(self, fault);
}

// source[0] D, source[1] A (descriptor or address), source[2] B, source[3] instruction descriptor,
// source[4] predicate: whether D is added. mode[0]: CTA group; mode[1]: A is in tensor memory;
// mode[2]: D is added if there is no predicate. immediate: offsets of D and A.
Outcome Mma(Context& context, const Inst& inst) {
  if (PipeIsFull(context.cta)) return WaitForPipe(context);
  Machine& machine = context.machine;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    Product product;
    product.cta_group = static_cast<int>(inst.mode[0]);
    product.a_in_tensor = inst.mode[1];
    product.accumulate =
        inst.source[4] ? context.Predicate(inst.source[4]) >> lane & 1 : inst.mode[2];
    product.d = static_cast<uint32_t>(LaneValue(context, inst.source[0], lane) + inst.immediate[0]);
    const auto bits = static_cast<uint32_t>(LaneValue(context, inst.source[3], lane));
    std::string fault = DecodeInstructionDescriptor(bits, product.cta_group, &product.descriptor);
    if (fault.empty() && product.descriptor.m == 64 && product.a_in_tensor) {
      fault = "M = 64 with A in tensor memory is not supported.";
    }
    if (fault.empty() && product.descriptor.a_major == Major::kMn && product.a_in_tensor) {
      fault =
          "A in tensor memory is K-major, so that bit 15 of the instruction descriptor must be 0.";
    }
    if (fault.empty() && !product.descriptor.d_is_f32)
      fault = "f16 accumulators are not supported.";
    const uint64_t a =
        LaneValue(context, inst.source[1], lane) + static_cast<uint64_t>(inst.immediate[1]);
    if (product.a_in_tensor) {
      product.a_tensor = static_cast<uint32_t>(a);
    } else if (fault.empty()) {
      fault = DecodeMatrixDescriptor(a, DescriptorForm::kBlackwell, &product.a);
    }
    if (fault.empty()) {
      fault = DecodeMatrixDescriptor(
          LaneValue(context, inst.source[2], lane), DescriptorForm::kBlackwell, &product.b);
    }
    if (fault.empty() && product.cta_group == 2 &&
        (context.cta.rank | 1) >= context.cta.cluster->ctas.size()) {
      fault = "cta_group::2 needs a cluster of two CTAs.";
    }
    for (uint32_t i = 0; i < inst.source_count && fault.empty(); ++i) {
      if (LaneValue(context, machine.program().refs[inst.first_source + i], lane) != 0) {
        fault = "masks of lanes that tcgen05.mma leaves alone are not supported.";
      }
    }
    if (!fault.empty()) {
      machine.Misuse(context, lane, fault);
      return Outcome::kMoved;
    }
    auto operation = machine.NewOperation(context, lane, "tcgen05.mma", PipeSlot(context.cta));
    const InstructionDescriptor& shape = product.descriptor;
    machine.Describe(*operation,
                     {{"m", shape.m},
                      {"n", shape.n},
                      {"k", kMmaK},
                      {"accumulate", product.accumulate},
                      {"d column", product.d & 0xffff},
                      {product.a_in_tensor ? "a column" : "a shared address",
                       product.a_in_tensor ? product.a_tensor & 0xffff : product.a.start_address},
                      {"b shared address", product.b.start_address}});
    for (const auto& one : context.cta.cluster->ctas) {
      const bool is_pair = product.cta_group == 2 && one->rank / 2 == context.cta.rank / 2;
      if (is_pair || one.get() == &context.cta) machine.Watch(*one, *operation);
    }
    operation->run = [&machine, product](Operation& self) { Multiply(machine, self, product); };
    context.cta.tensor_pipe.push_back(std::move(operation));
    machine.Advance(context.warp, context.mask);
  }
  return Outcome::kNext;
}

// Arrives at the mbarrier when all that its thread has issued is done. mode[1]: multicast.
Outcome Commit(Context& context, const Inst& inst) {
  if (PipeIsFull(context.cta)) return WaitForPipe(context);
  Machine& machine = context.machine;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    auto address =
        static_cast<uint32_t>(LaneValue(context, inst.source[0], lane) + inst.immediate[0]);
    if (inst.mode[1] == 0 && address >> 24 == 0) address |= context.cta.rank << 24;
    const auto place = machine.FindShared(context.cta, address, 8);
    if (!place) {
      machine.Misuse(context,
                     lane,
                     "tcgen05.commit names an mbarrier out of range.",
                     true,
                     Report::Kind::kMemory);
      return Outcome::kMoved;
    }
    std::vector<Machine::SharedPlace> places;
    if (inst.mode[1]) {
      const auto ctas = static_cast<uint32_t>(LaneValue(context, inst.source[1], lane));
      for (const auto& one : context.cta.cluster->ctas) {
        if (ctas >> one->rank & 1) places.push_back({one.get(), place->offset});
      }
    } else {
      places.push_back(*place);
    }
    auto operation = machine.NewOperation(context, lane, "tcgen05.commit", PipeSlot(context.cta));
    machine.Describe(*operation, {{"mbarrier", place->offset}});
    for (const Machine::SharedPlace& one : places) machine.Watch(*one.cta, *operation);
    operation->run = [&machine, places](Operation& self) {
      for (const Machine::SharedPlace& one : places) {
        const auto it = one.cta->mbarriers.find(one.offset);
        if (it == one.cta->mbarriers.end() || it->second.pending == 0) {
          machine.OperationFault(self, "tcgen05.commit arrives where no mbarrier is initialised.");
          return;
        }
        if (machine.options().strict && !it->second.fenced) {
          machine.OperationFault(self,
                                 "tcgen05.commit signals an mbarrier whose initialisation no "
                                 "fence.mbarrier_init has made visible to it.");
        }
        machine.UseBarrier(self, one);
        // A commit publishes what it waited for, as tcgen05.fence::before_thread_sync does.
        VectorClock clock = self.clock;
        clock.SetPublished(self.slot, self.time);
        machine.Arrive(*one.cta, it->second, 1, clock);
      }
    };
    context.cta.tensor_pipe.push_back(std::move(operation));
    machine.Advance(context.warp, context.mask);
  }
  return Outcome::kNext;
}

// ---- Tensor memory and registers

// Shapes of tcgen05.ld and st (9.7.16.2.3.1), which say where register r of thread t lies.
enum Shape : uint32_t { k32x32, k16x64, k16x128, k16x256, k16x32x2 };

struct RegisterPlace {
  uint32_t lane, column;  // from the address
};

// `split`: how far apart the halves of k16x32x2 are.
RegisterPlace PlaceOfRegister(uint32_t shape, uint32_t t, uint32_t r, uint32_t split) {
  switch (shape) {
    case k16x64:
      return {t / 4 + t % 2 * 8, r * 2 + t / 2 % 2};
    case k16x128:
      return {t / 4 + r % 2 * 8, r / 2 * 4 + t % 4};
    case k16x256:
      return {t / 4 + r / 2 % 2 * 8, r / 4 * 8 + t % 4 * 2 + r % 2};
    case k16x32x2:
      return {t % 16, r + t / 16 * split};
    default:
      return {t, r};
  }
}

// Consecutive columns of a lane that `registers` of the shape take; k16x32x2 takes as many from
// `split` on. With .pack::16b and .unpack::16b a register is the lower halves of two columns.
uint32_t ColumnsOf(const Inst& inst, uint32_t registers) {
  const uint32_t columns =
      inst.mode[0] == k32x32 || inst.mode[0] == k16x32x2 ? registers : 2 * registers;
  return inst.mode[1] ? 2 * columns : columns;
}

// The lane at which the warp's part starts and the column, checked; false after a report.
bool Quadrant(Context& context,
              const Inst& inst,
              uint32_t address,
              uint32_t columns,
              uint32_t* lane,
              uint32_t* column) {
  const uint32_t quarter = static_cast<uint32_t>(context.warp.index % 4) * 32;
  *lane = address >> 16;
  *column = address & 0xffff;
  const int first = std::countr_zero(context.mask);
  if (*lane != quarter && (inst.mode[0] == k32x32 || *lane != quarter + 16)) {
    context.machine.Misuse(context,
                           first,
                           "warp " + std::to_string(context.warp.index) + " reaches lanes " +
                               std::to_string(quarter) + " to " + std::to_string(quarter + 31) +
                               " of tensor memory only, but its address names lane " +
                               std::to_string(address >> 16) + ".");
    return false;
  }
  if (context.cta.tensor.empty() || !Allocated(context.cta, *column, columns)) {
    context.machine.Misuse(context,
                           first,
                           "columns [" + std::to_string(*column) + ", " +
                               std::to_string(*column + columns) +
                               ") of tensor memory are not all allocated.");
    return false;
  }
  return true;
}

bool SameAddress(Context& context, const Inst& inst, uint32_t* address) {
  const int first = std::countr_zero(context.mask);
  *address = static_cast<uint32_t>(LaneValue(context, inst.source[0], first) + inst.immediate[0]);
  for (int lane = first; lane < kLanes; ++lane) {
    if (!(context.mask >> lane & 1)) continue;
    if (LaneValue(context, inst.source[0], lane) + inst.immediate[0] != *address) {
      context.machine.Misuse(
          context, lane, "the lanes of a warp name different addresses of tensor memory.");
      return false;
    }
  }
  return true;
}

// What one of the warp's tensor-memory units knows: all that its lanes do, and itself.
VectorClock UnitClock(Context& context, Slot slot, uint32_t time) {
  VectorClock clock = context.machine.KnowledgeOf(context.warp, context.mask);
  clock.SetSeen(slot, time);
  return clock;
}

// Checks and notes what a warp's load or store touches; false after a report. mode[0]: the shape;
// mode[1]: whether registers are packed; immediate[1]: the offset between the halves of k16x32x2.
bool AccessTile(Context& context,
                const Inst& inst,
                uint32_t registers,
                Slot slot,
                bool write,
                uint32_t* lane,
                uint32_t* column) {
  Machine& machine = context.machine;
  const uint32_t shape = inst.mode[0], columns = ColumnsOf(inst, registers);
  const uint32_t halves = shape == k16x32x2 ? 2 : 1;
  uint32_t address;
  if (!SameAddress(context, inst, &address)) return false;
  for (uint32_t half = 0; half < halves; ++half) {
    const auto start = address + half * static_cast<uint32_t>(inst.immediate[1]);
    if (!Quadrant(context, inst, start, columns, lane, column)) return false;
  }
  *column = address & 0xffff;
  const uint32_t time = ++machine.Time(context.cta, slot);
  machine.Issue(slot,
                time,
                write ? "tcgen05.st" : "tcgen05.ld",
                {{"lane", *lane}, {"column", *column}, {"columns", columns}});
  const VectorClock clock = UnitClock(context, slot, time);
  const Access access{time, slot, 0, true, context.group.pc};
  for (uint32_t half = 0; half < halves; ++half) {
    const auto start = *column + half * static_cast<uint32_t>(inst.immediate[1]);
    machine.CheckOwner(access, clock, context.cta, start, columns);
  }
  for (uint32_t t = 0; t < (shape == k32x32 ? 32u : 16u); ++t) {
    for (uint32_t half = 0; half < halves; ++half) {
      machine.AccessTensor({time, slot, static_cast<uint8_t>(t), true, context.group.pc},
                           clock,
                           context.cta,
                           context.warp.index,
                           context.cta,
                           *lane + t,
                           *column + half * static_cast<uint32_t>(inst.immediate[1]),
                           columns,
                           write);
    }
  }
  return true;
}

Outcome LoadTensor(Context& context, const Inst& inst) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  Machine& machine = context.machine;
  uint32_t lane, column;
  const uint32_t registers = inst.destination_count;
  if (!AccessTile(
          context, inst, registers, WarpSlot(context, kTensorLoadSlot), false, &lane, &column)) {
    return Outcome::kMoved;
  }
  std::vector<uint64_t>& pending = context.warp.pending_rows;
  if (pending.empty()) pending.assign((machine.program().register_rows + 63) / 64, 0);
  const Ref* refs = &machine.program().refs[inst.first_destination];
  const uint32_t* from = &context.cta.tensor[lane * kTensorColumns + column];
  const auto split = static_cast<uint32_t>(inst.immediate[1]);
  const bool plain = inst.mode[0] == k32x32 && inst.mode[1] == 0;
  for (uint32_t r = 0; r < registers; ++r) {
    if (!refs[r]) continue;
    uint32_t* row = context.MutableRow(refs[r]);
    for (uint32_t t = 0; plain && t < kLanes; ++t) row[t] = from[t * kTensorColumns + r];
    for (uint32_t t = 0; !plain && t < kLanes; ++t) {
      const RegisterPlace cell = PlaceOfRegister(inst.mode[0], t, r, split);
      const uint32_t* lane_of_cell = from + cell.lane * kTensorColumns;
      row[t] = inst.mode[1] ? lane_of_cell[2 * cell.column + 1] << 16 |
                                  (lane_of_cell[2 * cell.column] & 0xffff)
                            : lane_of_cell[cell.column];
    }
    const uint32_t number = refs[r].index / kRowWords;
    pending[number / 64] |= uint64_t{1} << (number % 64);
  }
  return Outcome::kNext;
}

Outcome StoreTensor(Context& context, const Inst& inst) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  uint32_t lane, column;
  const uint32_t registers = inst.source_count;
  if (!AccessTile(
          context, inst, registers, WarpSlot(context, kTensorStoreSlot), true, &lane, &column)) {
    return Outcome::kMoved;
  }
  const Ref* refs = &context.machine.program().refs[inst.first_source];
  uint32_t* to = &context.cta.tensor[lane * kTensorColumns + column];
  const auto split = static_cast<uint32_t>(inst.immediate[1]);
  const bool plain = inst.mode[0] == k32x32 && inst.mode[1] == 0;
  for (uint32_t r = 0; r < registers; ++r) {
    const uint32_t* row = context.Row(refs[r]);
    for (uint32_t t = 0; plain && t < kLanes; ++t) to[t * kTensorColumns + r] = row[t];
    for (uint32_t t = 0; !plain && t < kLanes; ++t) {
      const RegisterPlace cell = PlaceOfRegister(inst.mode[0], t, r, split);
      uint32_t* lane_of_cell = to + cell.lane * kTensorColumns;
      if (inst.mode[1]) {
        lane_of_cell[2 * cell.column] = row[t] & 0xffff;
        lane_of_cell[2 * cell.column + 1] = row[t] >> 16;
      } else {
        lane_of_cell[cell.column] = row[t];
      }
    }
  }
  return Outcome::kNext;
}

// mode[0]: which unit of the warp.
Outcome WaitTensor(Context& context, const Inst& inst) {
  if (!WholeWarp(context)) return Outcome::kBlocked;
  context.machine.LearnSlot(
      context.warp, context.mask, WarpSlot(context, static_cast<int>(inst.mode[0])));
  if (inst.mode[0] == kTensorLoadSlot) context.warp.pending_rows.clear();
  return Outcome::kNext;
}

// mode[0]: before a thread's synchronization; otherwise after.
Outcome FenceTensor(Context& context, const Inst& inst) {
  for (Knowledge& one : context.warp.knowledge) {
    if (!(one.mask & context.mask)) continue;
    if (inst.mode[0]) {
      for (const int unit : {kTensorLoadSlot, kTensorStoreSlot}) {
        const Slot slot = WarpSlot(context, unit);
        one.clock.SetPublished(slot, one.clock.seen(slot));
      }
    } else {
      one.clock.RelyOnPublished();
    }
  }
  return Outcome::kNext;
}

// ---- Decoding

int TakeCtaGroup(Decoder& decoder, Parts& parts) {
  if (parts.Take("cta_group::1")) return 1;
  if (parts.Take("cta_group::2")) return 2;
  decoder.Fail("expected .cta_group::1 or .cta_group::2.");
}

void DecodeMma(Decoder& decoder, Parts& parts) {
  Inst& inst = decoder.inst();
  inst.mode[0] = static_cast<uint32_t>(TakeCtaGroup(decoder, parts));
  if (!parts.Take("kind::f16")) decoder.Fail("only .kind::f16 is supported.");
  // Where the collector keeps A has no effect on results.
  for (const std::string_view hint : {"collector::a::fill",
                                      "collector::a::use",
                                      "collector::a::lastuse",
                                      "collector::a::discard"}) {
    if (parts.Take(hint)) break;
  }
  // A vector of masks may say which lanes of D are left alone.
  const bool masked =
      decoder.operand_count() > 4 && decoder.Operand(4).kind == ptx::Operand::Kind::kVector;
  decoder.ExpectOperands(5 + masked, 5 + masked);
  if (masked) decoder.SourceList(decoder.Operand(4), 32);
  const ptx::Operand& accumulate = decoder.Operand(4 + masked);
  inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
  if (decoder.Operand(1).kind == ptx::Operand::Kind::kAddress) {
    inst.mode[1] = 1;
    inst.source[1] = decoder.Address(decoder.Operand(1), &inst.immediate[1]);
  } else {
    inst.source[1] = decoder.Source(decoder.Operand(1), 64);
  }
  inst.source[2] = decoder.Source(decoder.Operand(2), 64);
  inst.source[3] = decoder.Source(decoder.Operand(3), 32);
  if (accumulate.kind == ptx::Operand::Kind::kImmediate) {
    inst.mode[2] = decoder.Constant(accumulate) != 0;
  } else {
    inst.source[4] = decoder.PredicateSource(accumulate);
  }
  inst.execute = Mma;
}

void DecodeLoadStore(Decoder& decoder, Parts& parts, bool is_load) {
  Inst& inst = decoder.inst();
  if (!parts.Take("sync") || !parts.Take("aligned"))
    decoder.Fail("tcgen05.ld and st are .sync.aligned.");
  struct Name {
    std::string_view name;
    uint32_t shape, registers;  // of .x1
  };
  static constexpr Name kShapes[] = {{"32x32b", k32x32, 1},
                                     {"16x64b", k16x64, 1},
                                     {"16x128b", k16x128, 2},
                                     {"16x256b", k16x256, 4},
                                     {"16x32bx2", k16x32x2, 1}};
  uint32_t registers = 0;
  for (const Name& one : kShapes) {
    if (registers != 0 || !parts.Take(one.name)) continue;
    inst.mode[0] = one.shape;
    registers = one.registers;
  }
  if (registers == 0) decoder.Fail("this shape is not supported.");
  const std::string_view count = parts.Next();
  uint32_t repeats = 0;
  for (uint32_t power = 1; power * registers <= 128; power *= 2) {
    if (count == "x" + std::to_string(power)) repeats = power;
  }
  if (repeats == 0) decoder.Fail("of this shape there is no ." + std::string(count) + ".");
  registers *= repeats;
  inst.mode[1] = parts.Take(is_load ? "pack::16b" : "unpack::16b");
  if (inst.mode[1] && inst.mode[0] == k16x32x2)
    decoder.Fail("packing is not supported with this shape.");
  if (!parts.Take("b32")) decoder.Fail("tcgen05.ld and st move .b32.");
  // The offset of the second half stands behind the address.
  const bool split = inst.mode[0] == k16x32x2;
  decoder.ExpectOperands(2 + split, 2 + split);
  if (is_load) {
    decoder.DestinationList(decoder.Operand(0), 32);
    inst.source[0] = decoder.Address(decoder.Operand(1), &inst.immediate[0]);
  } else {
    inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
    decoder.SourceList(decoder.Operand(1 + split), 32);
  }
  if (split) inst.immediate[1] = decoder.Constant(decoder.Operand(is_load ? 2 : 1));
  if (inst.immediate[1] < 0 || inst.immediate[1] >= kTensorColumns)
    decoder.Fail("its offset is not a column.");
  if ((is_load ? inst.destination_count : inst.source_count) != registers) {
    decoder.Fail("the number of registers is not that of the opcode.");
  }
  inst.execute = is_load ? LoadTensor : StoreTensor;
  inst.describe_wait = WaitsForWarp;
}

}  // namespace

bool DecodeTensor(Decoder& decoder, Parts parts) {
  Inst& inst = decoder.inst();
  if (!parts.Take("tcgen05")) return false;
  const std::string_view what = parts.Next();
  if (what == "mma") {
    DecodeMma(decoder, parts);
  } else if (what == "ld" || what == "st") {
    DecodeLoadStore(decoder, parts, what == "ld");
  } else if (what == "wait::ld" || what == "wait::st") {
    if (!parts.Take("sync") || !parts.Take("aligned"))
      decoder.Fail("tcgen05.wait is .sync.aligned.");
    inst.mode[0] = what == "wait::ld" ? kTensorLoadSlot : kTensorStoreSlot;
    inst.execute = WaitTensor;
    inst.describe_wait = WaitsForWarp;
  } else if (what == "fence::before_thread_sync" || what == "fence::after_thread_sync") {
    inst.mode[0] = what == "fence::before_thread_sync";
    inst.execute = FenceTensor;
  } else if (what == "commit") {
    inst.mode[0] = static_cast<uint32_t>(TakeCtaGroup(decoder, parts));
    if (!parts.Take("mbarrier::arrive::one"))
      decoder.Fail("tcgen05.commit arrives by .mbarrier::arrive::one.");
    parts.Take("shared::cluster");
    inst.mode[1] = parts.Take("multicast::cluster");
    if (!parts.Take("b64")) decoder.Fail("tcgen05.commit ends in .b64.");
    decoder.ExpectOperands(1 + inst.mode[1], 1 + inst.mode[1]);
    inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
    if (inst.mode[1]) inst.source[1] = decoder.Source(decoder.Operand(1), 16, true);
    inst.execute = Commit;
  } else if (what == "alloc") {
    inst.mode[0] = static_cast<uint32_t>(TakeCtaGroup(decoder, parts));
    inst.mode[1] = kAllocate;
    if (!parts.Take("sync") || !parts.Take("aligned"))
      decoder.Fail("tcgen05.alloc is .sync.aligned.");
    parts.Take("shared::cta");
    parts.Take("b32");
    decoder.ExpectOperands(2, 2);
    inst.source[0] = decoder.Address(decoder.Operand(0), &inst.immediate[0]);
    inst.source[1] = decoder.Source(decoder.Operand(1), 32);
    inst.execute = Allocate;
    inst.describe_wait = WaitsForTensorMemory;
  } else if (what == "dealloc") {
    inst.mode[0] = static_cast<uint32_t>(TakeCtaGroup(decoder, parts));
    inst.mode[1] = kDeallocate;
    if (!parts.Take("sync") || !parts.Take("aligned"))
      decoder.Fail("tcgen05.dealloc is .sync.aligned.");
    parts.Take("b32");
    decoder.ExpectOperands(2, 2);
    inst.source[0] = decoder.Source(decoder.Operand(0), 32);
    inst.source[1] = decoder.Source(decoder.Operand(1), 32);
    inst.execute = Deallocate;
    inst.describe_wait = WaitsForTensorMemory;
  } else if (what == "relinquish_alloc_permit") {
    inst.mode[0] = static_cast<uint32_t>(TakeCtaGroup(decoder, parts));
    inst.mode[1] = kRelinquish;
    if (!parts.Take("sync") || !parts.Take("aligned"))
      decoder.Fail("this instruction is .sync.aligned.");
    inst.execute = Relinquish;
    inst.describe_wait = WaitsForTensorMemory;
  } else {
    decoder.Fail("tcgen05." + std::string(what) + " is not supported.");
  }
  if (!parts.done())
    decoder.Fail("modifier \"." + std::string(parts.Peek()) + "\" is not supported here.");
  return true;
}

}  // namespace jax_fa4::emulator
