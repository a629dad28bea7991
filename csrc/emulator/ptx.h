// PTX text as a syntax tree. Parsing knows the grammar of statements and operands but no
// instruction: which opcodes exist and what their operands mean is decided when a kernel is decoded
// (program.h).
//
// Source: PTX ISA 9.0, chapters 4 (Syntax), 5 (State spaces, types and variables), 6 (Operands) and
// 11 (Directives).

#ifndef JAX_FA4_CSRC_EMULATOR_PTX_H_
#define JAX_FA4_CSRC_EMULATOR_PTX_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace jax_fa4::emulator::ptx {

// The text is not PTX that the emulator takes. what() names the line.
class Error : public std::runtime_error {
 public:
  Error(int line, const std::string& message)
      : std::runtime_error("PTX line " + std::to_string(line) + ": " + message), line(line) {}
  const int line;
};

// Where in the source the compiler says an instruction came from (.loc): a line, and the calls into
// which it was inlined, innermost first.
struct Location {
  int file = 0;  // key of Module::files; 0 is "unknown"
  int line = 0;
  int column = 0;
  int inlined_at = -1;  // index in Module::locations, -1 where it ends
};

struct Operand {
  enum class Kind : uint8_t {
    kRegister,   // %r1, or a special register such as %tid.x; `!%p1` has `negated`
    kImmediate,  // 42, 0f3F800000, WARP_SZ
    kSymbol,     // a variable, label or function
    kVector,     // {a, b}
    kAddress,    // [a], [a+8], [a, {b, c}]: `elements` holds a and, where given, the coordinate
                 // vector
    kPair,       // a|b
    kSink,       // _
  };
  Kind kind = Kind::kSink;
  bool negated = false;
  bool is_float = false;   // an immediate given by its bits (0f, 0d) or as a decimal fraction
  bool is_double = false;  // of these, one of 64 bits
  int32_t reg =
      -1;  // index in Kernel::registers; of special registers -1 - index in kSpecialRegisters
  int64_t value = 0;  // an immediate's value or bits; the constant offset of an address
  std::string symbol;
  std::vector<Operand> elements;
};

// One instruction: `@!%p opcode.with.suffixes operands;`
struct Statement {
  int line = 0;
  int location = -1;   // index in Module::locations
  int32_t guard = -1;  // a predicate register
  bool guard_negated = false;
  std::string_view opcode;  // into Module::text
  std::vector<Operand> operands;
};

enum class Space : uint8_t { kParam, kShared, kGlobal, kConst, kLocal };

// A variable in a state space, or a kernel parameter.
struct Variable {
  std::string name;
  Space space = Space::kGlobal;
  uint32_t size = 0;  // in bytes; 0 for an extern array, whose size the launch decides
  uint32_t alignment = 1;
  uint32_t offset =
      0;  // within the space of the kernel (param, shared, local) or the module (global, const)
  bool is_extern = false;
  std::vector<uint8_t> initial;  // initial bytes; empty means zeros
};

struct Register {
  std::string name;
  uint8_t bits = 0;  // 1 for predicates, else 8, 16, 32, 64 or 128
};

struct Kernel {
  std::string name;
  int line = 0;
  std::vector<Variable> parameters;
  uint32_t parameter_bytes = 0;
  std::vector<Variable> variables;  // .shared and .local ones declared in its body
  std::vector<Register> registers;
  std::vector<Statement> statements;
  std::map<std::string, int, std::less<>> labels;  // statement index; scoped names are made unique
  std::map<std::string, std::vector<std::string>, std::less<>>
      branch_targets;                                    // .branchtargets lists
  std::array<uint32_t, 3> required_block = {0, 0, 0};    // .reqntid, 0 where not given
  std::array<uint32_t, 3> maximal_block = {0, 0, 0};     // .maxntid, 0 where not given
  std::array<uint32_t, 3> required_cluster = {0, 0, 0};  // .reqnctapercluster, 0 where not given
  uint32_t minimal_ctas_per_sm = 0;                      // .minnctapersm
  uint32_t maximal_registers = 0;                        // .maxnreg
};

struct Module {
  std::string text;
  std::string target;  // sm_100a
  int version_major = 0;
  int version_minor = 0;
  std::map<int, std::string> files;
  std::vector<Location> locations;
  std::vector<Variable> variables;  // .global, .const and .shared ones outside kernels
  std::vector<std::unique_ptr<Kernel>> kernels;

  const Kernel* FindKernel(std::string_view name) const;
  // "kernel.cu:12:3 (inlined at kernel.cu:80:1)", or "" where the compiler said nothing.
  std::string Describe(int location) const;
};

// Special registers, by the names that PTX gives them.
inline constexpr std::string_view kSpecialRegisters[] = {
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%lanemask_eq",
    "%lanemask_le",
    "%lanemask_lt",
    "%lanemask_ge",
    "%lanemask_gt",
    "%clock",
    "%clock64",
    "%globaltimer",
    "%clusterid.x",
    "%clusterid.y",
    "%clusterid.z",
    "%nclusterid.x",
    "%nclusterid.y",
    "%nclusterid.z",
    "%cluster_ctaid.x",
    "%cluster_ctaid.y",
    "%cluster_ctaid.z",
    "%cluster_nctaid.x",
    "%cluster_nctaid.y",
    "%cluster_nctaid.z",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%is_explicit_cluster",
    "%dynamic_smem_size",
    "%total_smem_size",
    "%gridid",
    "%globaltimer_lo",
    "%globaltimer_hi",
};

// Parses a whole module. Throws Error for what is no PTX, and for directives that are not
// supported.
std::unique_ptr<Module> Parse(std::string text);

}  // namespace jax_fa4::emulator::ptx

#endif  // JAX_FA4_CSRC_EMULATOR_PTX_H_
