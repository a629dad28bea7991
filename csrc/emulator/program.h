// A kernel decoded for execution: every statement becomes an Inst, whose operands are places in a
// warp's register file. Virtual registers are mapped to few physical rows by liveness, because a
// kernel of ten thousand virtual registers would otherwise not fit in any cache.

#ifndef JAX_FA4_CSRC_EMULATOR_PROGRAM_H_
#define JAX_FA4_CSRC_EMULATOR_PROGRAM_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/emulator/numerics.h"
#include "csrc/emulator/ptx.h"

namespace jax_fa4::emulator {

// One row holds 32 bits of each lane.
inline constexpr int kRowWords = kLanes;

// Where the machine places the module's .global variables: a variable's address is this plus its
// offset.
inline constexpr uint64_t kGlobalVariableBase = UINT64_C(1) << 40;

struct Context;  // machine.h
struct Inst;

// What an instruction did with the lanes that executed it.
enum class Outcome : uint8_t {
  kNext,     // they go on behind it
  kMoved,    // it set their program counters, or ended them
  kBlocked,  // it has had no effect yet: execute it again when something has changed
};
using Execute = Outcome (*)(Context&, const Inst&);

// An operand's place. Before allocation `index` is a virtual register; after it, a word offset in
// the warp's registers (kRegister), a predicate's number (kPredicate) or a word offset in the
// program's constants (kConstant), which hold every immediate once, broadcast over a row (two for
// 64 bits).
struct Ref {
  enum class Kind : uint8_t { kNone, kRegister, kPredicate, kConstant };
  Kind kind = Kind::kNone;
  bool negated = false;  // of a predicate
  uint8_t bits = 0;
  uint32_t index = 0;
  explicit operator bool() const { return kind != Kind::kNone; }
};

struct Inst {
  Execute execute = nullptr;
  Ref destination[2];
  Ref source[5];
  // More operands, such as a vector's elements: [first, first + count) of Program::refs.
  uint32_t first_destination = 0, destination_count = 0;
  uint32_t first_source = 0, source_count = 0;
  Ref guard;
  int64_t immediate[2] = {0, 0};  // an address offset, a count: what the instruction's decoder says
  uint32_t mode[4] = {0, 0, 0, 0};  // variants that one function executes
  int32_t target = -1;              // of a branch: index of an instruction
  bool may_time_out = false;        // it waits, and may give up without success
  // All that it changes are registers of the lanes that execute it, and these by what it finds in
  // their registers and in memory alone.
  bool is_pure = false;
  std::string (*describe_wait)(Context&, const Inst&) = nullptr;  // or polls, for reports
  int32_t statement = 0;  // index in ptx::Kernel::statements; instructions and statements match 1:1
  // What it does with registers that wgmma uses: [first, first + count) of Program::accesses.
  uint32_t first_access = 0, access_count = 0;
};

// An access of a register by an instruction.
struct RegisterAccess {
  uint32_t number = 0;  // of the register, in Program::tracked
  bool write = false;
};

struct Program {
  std::shared_ptr<const ptx::Module> module;
  const ptx::Kernel* kernel = nullptr;
  std::vector<Inst> instructions;  // ends with a return
  std::vector<Ref> refs;
  std::vector<std::vector<int32_t>> branch_tables;  // of brx.idx
  std::vector<uint32_t> constants;                  // rows
  uint32_t register_rows = 0;                       // of a warp
  uint32_t predicates = 0;
  uint32_t special[std::size(
      ptx::kSpecialRegisters)];  // word offset of each special register, or kUnused
  static constexpr uint32_t kUnused = UINT32_MAX;
  // Shared memory, from the start of the CTA's window: static variables, then the dynamic ones.
  uint32_t static_shared_bytes = 0;
  uint32_t dynamic_shared_alignment = 16;
  uint32_t local_bytes = 0;  // per thread
  // The registers that are accumulators or operand A of a wgmma.mma_async, and those that a mov
  // copies from or to such, as indices of ptx::Kernel::registers. Of a wgmma.mma_async `accesses`
  // has writes of accumulators and reads of A; of others, reads come before writes.
  std::vector<uint32_t> tracked;
  std::vector<RegisterAccess> accesses;
};

// Decodes a kernel. Throws ptx::Error with the line for whatever is not supported.
std::shared_ptr<const Program> Decode(std::shared_ptr<const ptx::Module> module,
                                      const ptx::Kernel& kernel);

// The parts of an opcode between its dots. Double colons bind: "shared::cta" is one part. A decoder
// takes the parts that it understands in any order that PTX allows; what is left at the end is
// refused, so that no variant is executed as another.
class Parts {
 public:
  explicit Parts(std::string_view opcode);
  bool Is(std::string_view part) const { return at_ < parts_.size() && parts_[at_] == part; }
  // Takes the next part if it is `part`.
  bool Take(std::string_view part) { return Is(part) && (++at_, true); }
  // Takes the next part, whatever it is; "" at the end.
  std::string_view Next() { return at_ < parts_.size() ? parts_[at_++] : std::string_view(); }
  std::string_view Peek() const { return at_ < parts_.size() ? parts_[at_] : std::string_view(); }
  bool done() const { return at_ >= parts_.size(); }

 private:
  std::vector<std::string_view> parts_;
  size_t at_ = 0;
};

// What decoders of single instructions work with: turns operands into Refs and notes which
// registers an instruction reads and writes.
class Decoder {
 public:
  virtual ~Decoder() = default;
  const ptx::Statement& statement() const { return *statement_; }
  Inst& inst() { return *inst_; }
  // The statement's operands. `Operand(i)` fails with a sentence where there is none.
  size_t operand_count() const { return statement_->operands.size(); }
  const ptx::Operand& Operand(size_t index) const;
  void ExpectOperands(size_t least, size_t most) const;

  // A register, immediate, special register or address of a variable, as `bits` bits. A register of
  // another width is refused, or with `any_width` only a narrower one. Immediates of float
  // instructions are given by bits.
  Ref Source(const ptx::Operand& operand, int bits, bool any_width = false);
  // kNone for a sink: only of some instructions may a result be discarded.
  Ref DestinationOrSink(const ptx::Operand& operand, int bits, bool any_width = false);
  Ref Destination(const ptx::Operand& operand, int bits, bool any_width = false);
  Ref PredicateSource(const ptx::Operand& operand);
  Ref PredicateDestination(const ptx::Operand& operand);  // kNone for a sink
  // The elements of a vector operand (or the operand itself, if it is none) behind Inst::first_*.
  void SourceList(const ptx::Operand& operand, int bits, bool any_width = false);
  void DestinationList(const ptx::Operand& operand, int bits, bool any_width = false);
  // An operand that must be a constant known now.
  int64_t Constant(const ptx::Operand& operand) const;
  // [base + offset]: the base as 32 or 64 bits (its own width), the offset in `offset`. A
  // variable's name is its address within its space.
  Ref Address(const ptx::Operand& operand, int64_t* offset);
  // The address of a variable or parameter within its space, and which space that is.
  const ptx::Variable* FindVariable(const std::string& symbol) const;
  int32_t Label(const ptx::Operand& operand) const;
  const std::vector<std::string>* BranchTargets(const ptx::Operand& operand) const;
  int32_t AddBranchTable(std::vector<int32_t> table);
  // The instruction also reads what it writes.
  void AlsoReads(const Ref& ref);
  // The carry flag of the extended-precision instructions (CC.CF): a predicate without a name.
  Ref CarrySource();
  Ref CarryDestination();

  [[noreturn]] void Fail(const std::string& message) const;

 protected:
  const ptx::Statement* statement_ = nullptr;
  Inst* inst_ = nullptr;
  const ptx::Kernel* kernel_ = nullptr;
  // Variables and parameters that the kernel can name, at their final offsets.
  std::map<std::string, ptx::Variable, std::less<>> variables_;
  virtual Ref Virtual(uint32_t reg, int bits, bool is_destination) = 0;
  virtual Ref ConstantRow(uint64_t value, int bits) = 0;
  virtual uint32_t AddRef(const Ref& ref) = 0;
  virtual Program& program() = 0;
};

// One decoder per family of instructions: true if the opcode is one of its own (then the
// instruction is complete), false to let the next family try.
bool DecodeScalar(Decoder& decoder,
                  Parts parts);  // arithmetic, logic, conversion, moves (isa_scalar.cc)
bool DecodeControl(Decoder& decoder,
                   Parts parts);  // branches, barriers, warp-wide ones (isa_control.cc)
bool DecodeMemory(Decoder& decoder,
                  Parts parts);  // ld, st, atom, red, fences, mbarrier (isa_memory.cc)
bool DecodeCopy(Decoder& decoder, Parts parts);    // cp.async and bulk copies (isa_copy.cc)
bool DecodeTensor(Decoder& decoder, Parts parts);  // tcgen05 (isa_tensor.cc)
bool DecodeMatrix(Decoder& decoder, Parts parts);  // wgmma, mma, ldmatrix, stmatrix (isa_mma.cc)

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_PROGRAM_H_
