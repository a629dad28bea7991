#include "csrc/emulator/program.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <queue>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "csrc/emulator/numerics.h"

namespace jax_fa4::emulator {
namespace {

constexpr uint32_t kSpecialCount = static_cast<uint32_t>(std::size(ptx::kSpecialRegisters));

std::string_view SpecialName(const ptx::Operand& operand) {
  return ptx::kSpecialRegisters[-1 - operand.reg];
}

int SpecialBits(std::string_view name) {
  return name == "%clock64" || name == "%globaltimer" || name == "%gridid" ? 64 : 32;
}

// Values that change while a kernel runs: only a mov reads them, at the time of its execution.
bool IsTime(std::string_view name) {
  return name.starts_with("%clock") || name.starts_with("%globaltimer");
}

// What 24 bits of a shared address reach, and what hardware gives a thread.
constexpr uint64_t kMaxShared = 1 << 24, kMaxLocal = 512 << 10;
// Of the bits of the liveness equations, in 64-bit words: 256 MiB.
constexpr size_t kMaxLivenessWords = size_t{1} << 25;

uint64_t AlignUp(uint64_t offset, uint32_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

// Registers that share a layout may share rows. Those of different layouts may not, even if they
// never live at the same place of the program: lanes of a warp that have diverged are at different
// places, and a word that is one lane's half of a 64-bit value would be another lane's 32-bit
// value.
enum Layout { kWord, kDouble, kQuad, kPredicate, kLayouts };

Layout LayoutOf(int bits) {
  return bits == 1 ? kPredicate : bits <= 32 ? kWord : bits == 64 ? kDouble : kQuad;
}

// Instructions that some targets have, and ptxas refuses for the others.
struct Requirement {
  std::string_view opcode;  // what it starts with
  std::string_view part;    // and holds
  int first, last;          // architectures
  bool specific;            // only targets of one architecture or family: sm_90a, sm_100f
  std::string_view targets;
};
constexpr int kNewest = 999;
constexpr std::string_view kHopper = "sm_90 or later";
constexpr Requirement kRequirements[] = {
    {"wgmma.", "", 90, 90, true, "sm_90a"},
    {"tcgen05.", "", 100, 119, true, "sm_100a, sm_101a, sm_103a, sm_110a and their families"},
    {"setmaxnreg.", "", 90, kNewest, true, "sm_90a, sm_100a and later ones with such a suffix"},
    {"", ".f32x2", 100, kNewest, false, "sm_100 or later"},
    {"cp.async.bulk", "", 90, kNewest, false, kHopper},
    {"cp.reduce.async.bulk", "", 90, kNewest, false, kHopper},
    {"barrier.cluster.", "", 90, kNewest, false, kHopper},
    {"mapa.", "", 90, kNewest, false, kHopper},
    {"elect.sync", "", 90, kNewest, false, kHopper},
};

// Throws if the module's target, where it is a GPU's, does not have the instruction.
void CheckTarget(const ptx::Statement& statement, std::string_view target) {
  if (!target.starts_with("sm_")) return;
  int architecture = 0;
  const char* end = target.data() + target.size();
  const auto [suffix, error] = std::from_chars(target.data() + 3, end, architecture);
  if (error != std::errc()) return;
  for (const Requirement& one : kRequirements) {
    if (!statement.opcode.starts_with(one.opcode) ||
        statement.opcode.find(one.part) == std::string::npos ||
        (architecture >= one.first && architecture <= one.last &&
         (!one.specific || suffix != end))) {
      continue;
    }
    throw ptx::Error(statement.line,
                     "target " + std::string(target) + " has no \"" +
                         std::string(statement.opcode) + "\": it takes " +
                         std::string(one.targets) + ".");
  }
}

std::string Bits(int bits) { return bits == 1 ? "a predicate" : std::to_string(bits) + " bits"; }

}  // namespace

// ---- Parts

Parts::Parts(std::string_view opcode) {
  parts_.reserve(8);
  while (true) {
    const size_t dot = opcode.find('.');
    parts_.push_back(opcode.substr(0, dot));
    if (dot == opcode.npos) return;
    opcode.remove_prefix(dot + 1);
  }
}

// ---- Decoder

void Decoder::Fail(const std::string& message) const {
  throw ptx::Error(statement_->line,
                   "instruction \"" + std::string(statement_->opcode) + "\": " + message);
}

const ptx::Operand& Decoder::Operand(size_t index) const {
  if (index >= operand_count()) Fail("operand " + std::to_string(index + 1) + " is missing.");
  return statement_->operands[index];
}

void Decoder::ExpectOperands(size_t least, size_t most) const {
  if (operand_count() >= least && operand_count() <= most) return;
  Fail("it takes " + std::to_string(least) + (most == least ? "" : " to " + std::to_string(most)) +
       " operands, not " + std::to_string(operand_count()) + ".");
}

Ref Decoder::Source(const ptx::Operand& operand, int bits, bool any_width) {
  if (operand.negated) Fail("only a predicate can be negated.");
  switch (operand.kind) {
    case ptx::Operand::Kind::kRegister: {
      if (operand.reg < 0) {
        const std::string_view name = SpecialName(operand);
        if (IsTime(name)) Fail("only a mov can read " + std::string(name) + ".");
        const int width = SpecialBits(name);
        if (width < bits || (width != bits && !any_width)) {
          Fail(std::string(name) + " has " + Bits(width) + " where the instruction takes " +
               Bits(bits) + ".");
        }
        const uint32_t index = static_cast<uint32_t>(kernel_->registers.size()) - 1 - operand.reg;
        return Virtual(index, width, false);
      }
      const ptx::Register& reg = kernel_->registers[operand.reg];
      if (reg.bits < std::max(bits, 8) || (reg.bits != bits && !any_width)) {
        Fail("register " + reg.name + " has " + Bits(reg.bits) + " where the instruction takes " +
             Bits(bits) + ".");
      }
      return Virtual(static_cast<uint32_t>(operand.reg), reg.bits, false);
    }
    case ptx::Operand::Kind::kImmediate: {
      if (!operand.is_float) return ConstantRow(static_cast<uint64_t>(operand.value), bits);
      const double value = operand.is_double
                               ? std::bit_cast<double>(operand.value)
                               : std::bit_cast<float>(static_cast<uint32_t>(operand.value));
      // The bits of a 0f constant are taken as they are: a NaN keeps its payload.
      if (bits == 32 && !operand.is_double) {
        return ConstantRow(static_cast<uint32_t>(operand.value), 32);
      }
      if (bits == 32) return ConstantRow(std::bit_cast<uint32_t>(static_cast<float>(value)), 32);
      if (bits == 64) return ConstantRow(std::bit_cast<uint64_t>(value), 64);
      Fail("a floating-point constant cannot have " + Bits(bits) + " here.");
    }
    case ptx::Operand::Kind::kSymbol: {
      const ptx::Variable* variable = FindVariable(operand.symbol);
      if (variable == nullptr) Fail("\"" + operand.symbol + "\" is not declared.");
      if (bits < 32) Fail("an address does not fit in " + Bits(bits) + ".");
      uint64_t address = variable->offset + static_cast<uint64_t>(operand.value);
      if (variable->space == ptx::Space::kGlobal) address += kGlobalVariableBase;
      return ConstantRow(address, bits);
    }
    default:
      Fail("an operand is not a register, constant or variable.");
  }
}

Ref Decoder::DestinationOrSink(const ptx::Operand& operand, int bits, bool any_width) {
  if (operand.kind == ptx::Operand::Kind::kSink) return Ref();
  return Destination(operand, bits, any_width);
}

Ref Decoder::Destination(const ptx::Operand& operand, int bits, bool any_width) {
  if (operand.kind != ptx::Operand::Kind::kRegister || operand.reg < 0 || operand.negated) {
    Fail("the destination must be a register.");
  }
  const ptx::Register& reg = kernel_->registers[operand.reg];
  if (reg.bits < std::max(bits, 8) || (reg.bits != bits && !any_width)) {
    Fail("register " + reg.name + " has " + Bits(reg.bits) + " where the instruction gives " +
         Bits(bits) + ".");
  }
  return Virtual(static_cast<uint32_t>(operand.reg), reg.bits, true);
}

Ref Decoder::PredicateSource(const ptx::Operand& operand) {
  if (operand.kind != ptx::Operand::Kind::kRegister || operand.reg < 0 ||
      kernel_->registers[operand.reg].bits != 1) {
    Fail("an operand must be a predicate.");
  }
  Ref ref = Virtual(static_cast<uint32_t>(operand.reg), 1, false);
  ref.negated = operand.negated;
  return ref;
}

Ref Decoder::PredicateDestination(const ptx::Operand& operand) {
  if (operand.kind == ptx::Operand::Kind::kSink) return Ref();
  if (operand.kind != ptx::Operand::Kind::kRegister || operand.reg < 0 || operand.negated ||
      kernel_->registers[operand.reg].bits != 1) {
    Fail("the destination must be a predicate.");
  }
  return Virtual(static_cast<uint32_t>(operand.reg), 1, true);
}

void Decoder::SourceList(const ptx::Operand& operand, int bits, bool any_width) {
  const bool is_vector = operand.kind == ptx::Operand::Kind::kVector;
  const size_t count = is_vector ? operand.elements.size() : 1;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t at = AddRef(Source(is_vector ? operand.elements[i] : operand, bits, any_width));
    if (inst_->source_count == 0) inst_->first_source = at;
    if (inst_->first_source + inst_->source_count++ != at) Fail("its lists of operands are mixed.");
  }
}

void Decoder::DestinationList(const ptx::Operand& operand, int bits, bool any_width) {
  const bool is_vector = operand.kind == ptx::Operand::Kind::kVector;
  const size_t count = is_vector ? operand.elements.size() : 1;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t at =
        AddRef(DestinationOrSink(is_vector ? operand.elements[i] : operand, bits, any_width));
    if (inst_->destination_count == 0) inst_->first_destination = at;
    if (inst_->first_destination + inst_->destination_count++ != at) {
      Fail("its lists of operands are mixed.");
    }
  }
}

int64_t Decoder::Constant(const ptx::Operand& operand) const {
  if (operand.kind != ptx::Operand::Kind::kImmediate || operand.is_float) {
    Fail("an operand must be an integer constant.");
  }
  return operand.value;
}

Ref Decoder::Address(const ptx::Operand& operand, int64_t* offset) {
  if (operand.kind != ptx::Operand::Kind::kAddress) Fail("an operand must be an address.");
  const ptx::Operand& base = operand.elements[0];
  *offset = operand.value;
  switch (base.kind) {
    case ptx::Operand::Kind::kRegister: {
      const int bits =
          base.reg < 0 ? SpecialBits(SpecialName(base)) : kernel_->registers[base.reg].bits;
      if (bits != 32 && bits != 64) Fail("an address must be in a register of 32 or 64 bits.");
      return Source(base, bits);
    }
    case ptx::Operand::Kind::kSymbol: {
      const ptx::Variable* variable = FindVariable(base.symbol);
      if (variable == nullptr) Fail("\"" + base.symbol + "\" is not declared.");
      ptx::Operand plain = base;
      *offset += plain.value;
      plain.value = 0;
      return Source(plain, variable->space == ptx::Space::kGlobal ? 64 : 32);
    }
    case ptx::Operand::Kind::kImmediate:
      return Source(base, 64);
    default:
      Fail("an address must start with a register, a variable or a constant.");
  }
}

const ptx::Variable* Decoder::FindVariable(const std::string& symbol) const {
  const auto it = variables_.find(symbol);
  return it == variables_.end() ? nullptr : &it->second;
}

int32_t Decoder::Label(const ptx::Operand& operand) const {
  if (operand.kind != ptx::Operand::Kind::kSymbol) Fail("an operand must be a label.");
  const auto it = kernel_->labels.find(operand.symbol);
  if (it == kernel_->labels.end()) Fail("label \"" + operand.symbol + "\" is not defined.");
  return it->second;
}

const std::vector<std::string>* Decoder::BranchTargets(const ptx::Operand& operand) const {
  if (operand.kind != ptx::Operand::Kind::kSymbol) return nullptr;
  const auto it = kernel_->branch_targets.find(operand.symbol);
  return it == kernel_->branch_targets.end() ? nullptr : &it->second;
}

int32_t Decoder::AddBranchTable(std::vector<int32_t> table) {
  program().branch_tables.push_back(std::move(table));
  return static_cast<int32_t>(program().branch_tables.size()) - 1;
}

void Decoder::AlsoReads(const Ref& ref) {
  if (ref.kind == Ref::Kind::kRegister || ref.kind == Ref::Kind::kPredicate) {
    Virtual(ref.index, ref.bits, false);
  }
}

Ref Decoder::CarrySource() {
  return Virtual(static_cast<uint32_t>(kernel_->registers.size()) + kSpecialCount, 1, false);
}

Ref Decoder::CarryDestination() {
  return Virtual(static_cast<uint32_t>(kernel_->registers.size()) + kSpecialCount, 1, true);
}

// ---- Program

// Decodes with virtual registers, then finds how long each lives and gives it a place.
class ProgramBuilder final : public Decoder {
 public:
  ProgramBuilder(std::shared_ptr<const ptx::Module> module, const ptx::Kernel& kernel)
      : program_(std::make_shared<Program>()) {
    program_->module = std::move(module);
    program_->kernel = kernel_ = &kernel;
    std::fill(std::begin(program_->special), std::end(program_->special), Program::kUnused);
  }

  std::shared_ptr<const Program> Build() {
    if (kernel_->statements.empty())
      throw ptx::Error(kernel_->line, "the kernel has no instruction.");
    PlaceVariables();
    DecodeAll();
    TrackWarpgroupRegisters();
    FindBlocks();
    FindLiveness();
    Allocate();
    Patch();
    return program_;
  }

 protected:
  Ref Virtual(uint32_t reg, int bits, bool is_destination) override {
    touches_.push_back(reg << 1 | (is_destination ? 1u : 0u));
    Ref ref;
    ref.kind = bits == 1 ? Ref::Kind::kPredicate : Ref::Kind::kRegister;
    ref.bits = static_cast<uint8_t>(bits);
    ref.index = reg;
    return ref;
  }

  Ref ConstantRow(uint64_t value, int bits) override {
    Ref ref;
    ref.kind = Ref::Kind::kConstant;
    ref.bits = static_cast<uint8_t>(bits);
    if (bits < 32) value &= (uint64_t{1} << bits) - 1;
    if (bits == 32) value = static_cast<uint32_t>(value);
    const int words = bits <= 32 ? 1 : bits / 32;
    std::vector<uint32_t>& constants = program_->constants;
    const auto [it, is_new] =
        constant_rows_[LayoutOf(bits)].emplace(value, static_cast<uint32_t>(constants.size()));
    if (is_new) {
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int word = 0; word < words; ++word) {
          constants.push_back(word < 2 ? static_cast<uint32_t>(value >> (32 * word)) : 0);
        }
      }
    }
    ref.index = it->second;
    return ref;
  }

  uint32_t AddRef(const Ref& ref) override {
    program_->refs.push_back(ref);
    return static_cast<uint32_t>(program_->refs.size()) - 1;
  }

  Program& program() override { return *program_; }

 private:
  // A run of instructions that are executed one after the other.
  struct Block {
    int32_t first = 0;
    int32_t last = 0;
    std::vector<int32_t> successors;
    std::vector<int32_t> predecessors;
  };
  struct Interval {
    int32_t first = INT32_MAX;
    int32_t last = -1;
    void Cover(int32_t at) {
      first = std::min(first, at);
      last = std::max(last, at);
    }
  };

  // Offsets of all variables. Kernels see the module's shared variables only where they name them,
  // as the linker leaves out the rest; dynamic shared memory starts behind all static variables.
  void PlaceVariables() {
    std::unordered_set<std::string_view> named;
    const auto note = [&](const auto& self, const ptx::Operand& operand) -> void {
      if (operand.kind == ptx::Operand::Kind::kSymbol) named.insert(operand.symbol);
      for (const ptx::Operand& element : operand.elements) self(self, element);
    };
    for (const ptx::Statement& statement : kernel_->statements) {
      for (const ptx::Operand& operand : statement.operands) note(note, operand);
    }
    uint64_t shared = 0;
    uint64_t local = 0;
    std::vector<ptx::Variable*> dynamic;
    const auto place = [&](const ptx::Variable& original, bool of_module) {
      if (of_module && original.space == ptx::Space::kShared && !named.contains(original.name))
        return;
      ptx::Variable& variable = variables_.insert_or_assign(original.name, original).first->second;
      if (variable.space == ptx::Space::kLocal) {
        local = std::max(local, uint64_t{variable.offset} + variable.size);
      } else if (variable.space == ptx::Space::kShared && variable.is_extern) {
        dynamic.push_back(&variable);
        program_->dynamic_shared_alignment =
            std::max(program_->dynamic_shared_alignment, variable.alignment);
      } else if (variable.space == ptx::Space::kShared) {
        const uint64_t offset = AlignUp(shared, variable.alignment);
        shared = offset + variable.size;
        if (shared > kMaxShared) {
          throw ptx::Error(kernel_->line, "the kernel's variables in shared memory exceed 16 MiB.");
        }
        variable.offset = static_cast<uint32_t>(offset);
      }
    };
    for (const ptx::Variable& variable : program_->module->variables) place(variable, true);
    for (const ptx::Variable& variable : kernel_->parameters) place(variable, false);
    for (const ptx::Variable& variable : kernel_->variables) place(variable, false);
    for (ptx::Variable* variable : dynamic) {
      variable->offset = static_cast<uint32_t>(AlignUp(shared, program_->dynamic_shared_alignment));
    }
    if (local > kMaxLocal) {
      throw ptx::Error(kernel_->line,
                       "the kernel's variables in local memory exceed 512 KiB a thread.");
    }
    program_->static_shared_bytes = static_cast<uint32_t>(shared);
    program_->local_bytes = static_cast<uint32_t>(AlignUp(local, 16));
  }

  void DecodeStatement(const ptx::Statement& statement, size_t index) {
    Inst& inst = program_->instructions.emplace_back();
    inst.statement = static_cast<int32_t>(std::min(index, kernel_->statements.size() - 1));
    first_touch_.push_back(static_cast<uint32_t>(touches_.size()));
    statement_ = &statement;
    inst_ = &inst;
    const size_t tables = program_->branch_tables.size();
    if (statement.guard >= 0) {
      inst.guard = Virtual(static_cast<uint32_t>(statement.guard), 1, false);
      inst.guard.negated = statement.guard_negated;
    }
    const Parts parts(statement.opcode);
    is_scalar_ = DecodeScalar(*this, parts);
    if (!is_scalar_ && !DecodeControl(*this, parts) && !DecodeMemory(*this, parts) &&
        !DecodeCopy(*this, parts) && !DecodeTensor(*this, parts) && !DecodeMatrix(*this, parts)) {
      throw ptx::Error(statement.line,
                       "instruction \"" + std::string(statement.opcode) + "\" is not supported.");
    }
    CheckTarget(statement, program_->module->target);
    if (program_->branch_tables.size() > tables) tables_of_.emplace(index, tables);
    inst.is_pure = IsPure(statement);
  }

  bool IsPure(const ptx::Statement& statement) {
    for (const ptx::Operand& operand : statement.operands) {
      if (operand.kind == ptx::Operand::Kind::kRegister && operand.reg < 0 &&
          IsTime(SpecialName(operand)))
        return false;
    }
    if (is_scalar_ || statement.opcode == "bra") return true;
    for (const std::string_view start : {"bra.",
                                         "ld.",
                                         "mbarrier.test_wait",
                                         "mbarrier.try_wait",
                                         "nanosleep",
                                         "fence.",
                                         "membar."}) {
      if (statement.opcode.starts_with(start)) return true;
    }
    return false;
  }

  void DecodeAll() {
    const size_t count = kernel_->statements.size();
    program_->instructions.reserve(count + 1);
    first_touch_.reserve(count + 2);
    touches_.reserve(count * 4);
    for (size_t i = 0; i < count; ++i) DecodeStatement(kernel_->statements[i], i);
    // Labels may stand behind the last instruction.
    static const ptx::Statement kReturn = [] {
      ptx::Statement statement;
      statement.opcode = "ret";
      return statement;
    }();
    DecodeStatement(kReturn, count);
    first_touch_.push_back(static_cast<uint32_t>(touches_.size()));
  }

  bool IsOpcode(size_t instruction, std::string_view start) const {
    return program_->kernel->statements[program_->instructions[instruction].statement]
        .opcode.starts_with(start);
  }

  // Numbers the registers of Program::tracked, and lists every instruction's accesses of them.
  void TrackWarpgroupRegisters() {
    constexpr uint32_t kUntracked = UINT32_MAX;
    constexpr std::string_view kWarpgroup = "wgmma.mma_async.";
    const size_t count = program_->instructions.size();
    std::vector<uint32_t>& tracked = program_->tracked;
    std::vector<uint32_t> numbers(kernel_->registers.size(), kUntracked);
    const auto is_tracked = [&](uint32_t touch) {
      return touch >> 1 < numbers.size() && numbers[touch >> 1] != kUntracked;
    };
    const auto track = [&](uint32_t touch) {
      const uint32_t reg = touch >> 1;
      if (reg >= numbers.size() || BitsOf(reg) == 1 || is_tracked(touch)) return;
      numbers[reg] = static_cast<uint32_t>(tracked.size());
      tracked.push_back(reg);
    };
    std::vector<size_t> moves;
    for (size_t i = 0; i < count; ++i) {
      if (IsOpcode(i, "mov.")) moves.push_back(i);
      if (!IsOpcode(i, kWarpgroup)) continue;
      for (uint32_t t = first_touch_[i]; t < first_touch_[i + 1]; ++t) {
        if (BitsOf(touches_[t] >> 1) == 32) track(touches_[t]);
      }
    }
    if (tracked.empty()) return;
    for (size_t before = 0; before != tracked.size();) {
      before = tracked.size();
      for (const size_t i : moves) {
        const auto first = touches_.begin() + first_touch_[i];
        const auto last = touches_.begin() + first_touch_[i + 1];
        if (std::any_of(first, last, is_tracked)) std::for_each(first, last, track);
      }
    }
    for (size_t i = 0; i < count; ++i) {
      Inst& inst = program_->instructions[i];
      const bool is_warpgroup = IsOpcode(i, kWarpgroup);
      inst.first_access = static_cast<uint32_t>(program_->accesses.size());
      for (const bool write : {is_warpgroup, !is_warpgroup}) {
        const auto end = static_cast<uint32_t>(program_->accesses.size());
        for (uint32_t t = first_touch_[i]; t < first_touch_[i + 1]; ++t) {
          const uint32_t reg = touches_[t] >> 1;
          if (((touches_[t] & 1) != 0) != write || !is_tracked(touches_[t]) ||
              (is_warpgroup && BitsOf(reg) != 32)) {
            continue;
          }
          // The accumulators of a wgmma.mma_async are read as well, which says nothing new.
          bool known = false;
          for (uint32_t a = inst.first_access; is_warpgroup && !write && a < end; ++a) {
            known = known || program_->accesses[a].number == numbers[reg];
          }
          if (!known) program_->accesses.push_back({numbers[reg], write});
        }
      }
      inst.access_count = static_cast<uint32_t>(program_->accesses.size()) - inst.first_access;
    }
  }

  bool FallsThrough(int32_t at) const {
    if (program_->instructions[at].guard) return true;
    if (at >= static_cast<int32_t>(kernel_->statements.size())) return false;
    const std::string_view opcode = kernel_->statements[at].opcode;
    return !(opcode == "ret" || opcode == "exit" || opcode == "trap" || opcode == "bra" ||
             opcode.starts_with("bra.") || opcode.starts_with("brx.") ||
             opcode.starts_with("ret."));
  }

  void FindBlocks() {
    const auto count = static_cast<int32_t>(program_->instructions.size());
    std::vector<uint8_t> is_first(count + 1, 0);
    is_first[0] = 1;
    const auto mark = [&](int32_t target) {
      if (target < 0 || target >= count) {
        throw ptx::Error(kernel_->line, "a branch leads out of the kernel.");
      }
      is_first[target] = 1;
    };
    std::vector<int32_t> branches;
    for (int32_t i = 0; i < count; ++i) {
      const Inst& inst = program_->instructions[i];
      if (inst.target >= 0) mark(inst.target);
      const auto table = tables_of_.find(i);
      if (table != tables_of_.end()) {
        for (const int32_t target : program_->branch_tables[table->second]) mark(target);
      }
      if (inst.target >= 0 || table != tables_of_.end() || !FallsThrough(i)) is_first[i + 1] = 1;
    }
    block_of_.resize(count);
    for (int32_t i = 0; i < count; ++i) {
      if (is_first[i]) blocks_.emplace_back().first = i;
      blocks_.back().last = i;
      block_of_[i] = static_cast<int32_t>(blocks_.size()) - 1;
    }
    for (size_t b = 0; b < blocks_.size(); ++b) {
      const int32_t last = blocks_[b].last;
      const auto link = [&](int32_t target) {
        blocks_[b].successors.push_back(block_of_[target]);
        blocks_[block_of_[target]].predecessors.push_back(static_cast<int32_t>(b));
      };
      if (FallsThrough(last) && last + 1 < count) link(last + 1);
      if (program_->instructions[last].target >= 0) link(program_->instructions[last].target);
      const auto table = tables_of_.find(last);
      if (table != tables_of_.end()) {
        for (const int32_t target : program_->branch_tables[table->second]) link(target);
      }
    }
  }

  // Which registers each block reads before it writes them, and which it surely writes; then,
  // backward to a fixed point, which live where. A register's interval is the hull of all that.
  void FindLiveness() {
    const size_t registers = kernel_->registers.size() + kSpecialCount + 1;
    intervals_.assign(registers, Interval());
    // Only registers that live across the end of a block matter to the equations, and these are
    // few: they get dense numbers.
    constexpr uint32_t kLocal = UINT32_MAX;
    std::vector<uint32_t> dense(registers, kLocal);
    std::vector<uint32_t> names;
    std::vector<int32_t> home(registers, -1);
    for (size_t i = 0; i < program_->instructions.size(); ++i) {
      for (uint32_t t = first_touch_[i]; t < first_touch_[i + 1]; ++t) {
        const uint32_t reg = touches_[t] >> 1;
        intervals_[reg].Cover(static_cast<int32_t>(i));
        if (home[reg] < 0) home[reg] = block_of_[i];
        // Also a register of one block, where that is a loop and reads it before it writes it.
        const bool first_is_use = first_seen_use(reg, i, t);
        if ((home[reg] != block_of_[i] || first_is_use) && dense[reg] == kLocal) {
          dense[reg] = static_cast<uint32_t>(names.size());
          names.push_back(reg);
        }
      }
    }
    const size_t words = (names.size() + 63) / 64;
    const size_t count = blocks_.size();
    if (count * words > kMaxLivenessWords) {
      throw ptx::Error(kernel_->line,
                       "the kernel is too large: " + std::to_string(count) + " blocks, and " +
                           std::to_string(names.size()) + " registers that live across them.");
    }
    std::vector<uint64_t> use(count * words, 0), kill(count * words, 0);
    for (size_t b = 0; b < count; ++b) {
      uint64_t* uses = use.data() + b * words;
      uint64_t* kills = kill.data() + b * words;
      for (int32_t i = blocks_[b].first; i <= blocks_[b].last; ++i) {
        const bool is_guarded = static_cast<bool>(program_->instructions[i].guard);
        // All of an instruction's reads come before its writes.
        for (const bool writes : {false, true}) {
          for (uint32_t t = first_touch_[i]; t < first_touch_[i + 1]; ++t) {
            if (((touches_[t] & 1) != 0) != writes) continue;
            const uint32_t reg = dense[touches_[t] >> 1];
            if (reg == kLocal) continue;
            const uint64_t bit = uint64_t{1} << (reg % 64);
            // A guarded write leaves the old value in lanes whose guard fails: it counts as a read.
            if ((!writes || is_guarded) && !(kills[reg / 64] & bit)) uses[reg / 64] |= bit;
            if (writes && !is_guarded) kills[reg / 64] |= bit;
          }
        }
      }
    }
    std::vector<uint64_t> in = use, out(count * words, 0);
    std::vector<uint8_t> is_queued(count, 1);
    std::vector<int32_t> queue;
    for (size_t b = 0; b < count; ++b) queue.push_back(static_cast<int32_t>(b));
    while (!queue.empty()) {
      const int32_t b = queue.back();
      queue.pop_back();
      is_queued[b] = 0;
      bool changed = false;
      for (size_t w = 0; w < words; ++w) {
        uint64_t live = 0;
        for (const int32_t s : blocks_[b].successors) live |= in[s * words + w];
        out[b * words + w] = live;
        live = use[b * words + w] | (live & ~kill[b * words + w]);
        changed |= live != in[b * words + w];
        in[b * words + w] = live;
      }
      if (!changed) continue;
      for (const int32_t p : blocks_[b].predecessors) {
        if (!is_queued[p]) queue.push_back(p);
        is_queued[p] = 1;
      }
    }
    for (size_t b = 0; b < count; ++b) {
      for (size_t w = 0; w < words; ++w) {
        for (uint64_t live = in [b * words + w]; live != 0; live &= live - 1) {
          intervals_[names[w * 64 + std::countr_zero(live)]].Cover(blocks_[b].first);
        }
        for (uint64_t live = out[b * words + w]; live != 0; live &= live - 1) {
          intervals_[names[w * 64 + std::countr_zero(live)]].Cover(blocks_[b].last);
        }
      }
    }
  }

  // Whether the touch `t` of instruction `i` is a register's first and may read what came before: a
  // use, or a guarded write.
  bool first_seen_use(uint32_t reg, size_t i, uint32_t t) const {
    if (intervals_[reg].first != static_cast<int32_t>(i)) return false;
    return (touches_[t] & 1) == 0 || program_->instructions[i].guard;
  }

  int BitsOf(uint32_t reg) const {
    const auto named = static_cast<uint32_t>(kernel_->registers.size());
    if (reg < named) return kernel_->registers[reg].bits;
    return reg == named + kSpecialCount ? 1 : SpecialBits(ptx::kSpecialRegisters[reg - named]);
  }

  // Linear scan in the order in which the intervals begin. An instruction's destination never takes
  // the place of a source that dies there: it may be executed again (Outcome::kBlocked), and may
  // write a lane before it has read another.
  void Allocate() {
    const auto named = static_cast<uint32_t>(kernel_->registers.size());
    place_.assign(intervals_.size(), 0);
    std::array<uint32_t, kLayouts> used = {};
    std::vector<uint32_t> order;
    for (uint32_t reg = 0; reg < intervals_.size(); ++reg) {
      if (intervals_[reg].last < 0) continue;
      // The machine fills special registers at launch.
      if (reg >= named && reg < named + kSpecialCount) {
        place_[reg] = used[LayoutOf(BitsOf(reg))]++;
      } else {
        order.push_back(reg);
      }
    }
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return std::pair(intervals_[a].first, a) < std::pair(intervals_[b].first, b);
    });
    using Active = std::pair<int32_t, uint32_t>;  // end, place
    std::array<std::priority_queue<Active, std::vector<Active>, std::greater<Active>>, kLayouts>
        active;
    std::array<std::vector<uint32_t>, kLayouts> free;
    for (const uint32_t reg : order) {
      const Layout layout = LayoutOf(BitsOf(reg));
      auto& live = active[layout];
      while (!live.empty() && live.top().first < intervals_[reg].first) {
        free[layout].push_back(live.top().second);
        live.pop();
      }
      uint32_t place = 0;
      if (free[layout].empty()) {
        place = used[layout]++;
      } else {  // the place left last is the one most likely to be in the cache
        place = free[layout].back();
        free[layout].pop_back();
      }
      place_[reg] = place;
      live.emplace(intervals_[reg].last, place);
    }
    const uint32_t doubles = used[kWord];
    const uint32_t quads = doubles + 2 * used[kDouble];
    program_->register_rows = quads + 4 * used[kQuad];
    program_->predicates = used[kPredicate];
    for (uint32_t reg = 0; reg < intervals_.size(); ++reg) {
      if (intervals_[reg].last < 0) continue;
      switch (LayoutOf(BitsOf(reg))) {
        case kWord:
          place_[reg] *= kRowWords;
          break;
        case kDouble:
          place_[reg] = (doubles + 2 * place_[reg]) * kRowWords;
          break;
        case kQuad:
          place_[reg] = (quads + 4 * place_[reg]) * kRowWords;
          break;
        default:
          break;
      }
      if (reg >= named && reg < named + kSpecialCount) program_->special[reg - named] = place_[reg];
    }
  }

  void Patch() {
    const auto patch = [&](Ref& ref) {
      if (ref.kind == Ref::Kind::kRegister || ref.kind == Ref::Kind::kPredicate) {
        ref.index = place_[ref.index];
      }
    };
    for (Inst& inst : program_->instructions) {
      for (Ref& ref : inst.destination) patch(ref);
      for (Ref& ref : inst.source) patch(ref);
      patch(inst.guard);
    }
    for (Ref& ref : program_->refs) patch(ref);
  }

  const std::shared_ptr<Program> program_;
  bool is_scalar_ = false;  // the instruction decoded last
  std::array<std::unordered_map<uint64_t, uint32_t>, kLayouts> constant_rows_;
  std::vector<uint32_t> touches_;                 // register << 1 | is a write, by instruction
  std::vector<uint32_t> first_touch_;             // of each instruction, in touches_
  std::unordered_map<size_t, size_t> tables_of_;  // instruction to branch table
  std::vector<Block> blocks_;
  std::vector<int32_t> block_of_;
  std::vector<Interval> intervals_;
  std::vector<uint32_t> place_;
};

std::shared_ptr<const Program> Decode(std::shared_ptr<const ptx::Module> module,
                                      const ptx::Kernel& kernel) {
  return ProgramBuilder(std::move(module), kernel).Build();
}

}  // namespace jax_fa4::emulator
