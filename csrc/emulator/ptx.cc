#include "csrc/emulator/ptx.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>

namespace jax_fa4::emulator::ptx {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%';
}
bool IsNamePart(char c) { return IsNameStart(c) || IsDigit(c); }

// Limits that no kernel comes near, so that no text can make the parser take all memory or time.
constexpr size_t kMaxRegisters = 1 << 18;
constexpr size_t kMaxScopes = 64;
constexpr size_t kMaxTargets = 4096;
constexpr uint32_t kMaxInitial = 1 << 26;

constexpr char kNoCalls[] = "calls are not supported: compile with every function inlined.";

uint32_t AlignUp(uint64_t offset, uint32_t alignment, int line) {
  offset = (offset + alignment - 1) / alignment * alignment;
  if (offset > UINT32_MAX / 2) throw Error(line, "the variables of this space exceed 2 GiB.");
  return static_cast<uint32_t>(offset);
}

// The width in bits of a fundamental type (".b32"), or 0 if it is none.
int TypeBits(std::string_view type) {
  static const std::unordered_map<std::string_view, int> bits = {
      {".pred", 1}, {".b8", 8},   {".u8", 8},   {".s8", 8},     {".b16", 16},
      {".u16", 16}, {".s16", 16}, {".f16", 16}, {".bf16", 16},  {".b32", 32},
      {".u32", 32}, {".s32", 32}, {".f32", 32}, {".f16x2", 32}, {".bf16x2", 32},
      {".b64", 64}, {".u64", 64}, {".s64", 64}, {".f64", 64},   {".b128", 128}};
  const auto it = bits.find(type);
  return it == bits.end() ? 0 : it->second;
}

// Names that a pair of braces in a kernel's body declares.
struct Scope {
  int parent = -1;
  std::unordered_map<std::string_view, int> registers;
  std::unordered_map<std::string_view, int> labels;  // statement index
  std::unordered_map<std::string_view, std::vector<std::string_view>> branch_targets;
};

class Parser {
 public:
  explicit Parser(std::string text) : module_(std::make_unique<Module>()) {
    module_->text = std::move(text);
    rest_ = module_->text;
  }

  std::unique_ptr<Module> Run() {
    while (SkipSpace(), !rest_.empty()) ModuleDirective();
    return std::move(module_);
  }

 private:
  // ---- Tokens

  [[noreturn]] void Fail(const std::string& message) const { throw Error(line_, message); }

  void Advance(size_t count) {
    line_ += static_cast<int>(std::count(rest_.begin(), rest_.begin() + count, '\n'));
    rest_.remove_prefix(count);
  }

  void SkipSpace() {
    while (!rest_.empty()) {
      const char c = rest_.front();
      if (c == '\n') {
        ++line_;
        rest_.remove_prefix(1);
      } else if (c == ' ' || c == '\t' || c == '\r' || c == '\0') {
        rest_.remove_prefix(1);
      } else if (rest_.starts_with("//")) {
        rest_.remove_prefix(std::min(rest_.find('\n'), rest_.size()));
      } else if (rest_.starts_with("/*")) {
        const size_t end = rest_.find("*/", 2);
        if (end == rest_.npos) Fail("this comment does not end.");
        Advance(end + 2);
      } else {
        return;
      }
    }
  }

  char Peek() {
    SkipSpace();
    return rest_.empty() ? '\0' : rest_.front();
  }

  bool Accept(char c) {
    if (Peek() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void Expect(char c) {
    if (!Accept(c)) Fail(std::string("expected '") + c + "' before " + Next() + ".");
  }

  // What comes next, for error messages.
  std::string Next() {
    SkipSpace();
    if (rest_.empty()) return "the end of the text";
    return "\"" + std::string(rest_.substr(0, std::min<size_t>(rest_.find('\n'), 30))) + "\"";
  }

  // The longest prefix whose characters `part` accepts.
  template <typename Part>
  std::string_view Take(Part part) {
    size_t size = 0;
    while (size < rest_.size() && part(rest_[size])) ++size;
    const std::string_view token = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return token;
  }

  std::string_view Name(const char* what) {
    if (!IsNameStart(Peek())) Fail(std::string("expected ") + what + " before " + Next() + ".");
    return Take(IsNamePart);
  }

  // ".name" with dots and double colons inside, or "".
  std::string_view Dotted() {
    if (Peek() != '.') return {};
    return Take([](char c) { return IsNamePart(c) || c == '.' || c == ':'; });
  }

  std::string_view Directive() {
    if (Peek() != '.') return {};
    const std::string_view whole = rest_;
    rest_.remove_prefix(1);
    return whole.substr(0, 1 + Take(IsNamePart).size());
  }

  std::string Quoted() {
    if (!Accept('"')) Fail("expected a string before " + Next() + ".");
    const size_t end = rest_.find('"');
    if (end == rest_.npos) Fail("this string does not end.");
    std::string text(rest_.substr(0, end));
    Advance(end + 1);
    return text;
  }

  // An integer constant, or the bits of a floating-point one.
  Operand Number() {
    Operand operand;
    operand.kind = Operand::Kind::kImmediate;
    const bool negative = Accept('-');
    SkipSpace();
    if (rest_.starts_with("WARP_SZ")) {
      rest_.remove_prefix(7);
      operand.value = negative ? -32 : 32;
      return operand;
    }
    const std::string_view token = Take([](char c) { return IsNamePart(c) || c == '.'; });
    if (token.empty() || !IsDigit(token.front())) Fail("expected a number before " + Next() + ".");
    std::string_view digits = token;
    int base = 10;
    if (digits.size() > 2 && digits[0] == '0' && (digits[1] == 'f' || digits[1] == 'F')) {
      operand.is_float = true;
      base = 16;
    } else if (digits.size() > 2 && digits[0] == '0' && (digits[1] == 'd' || digits[1] == 'D')) {
      operand.is_float = operand.is_double = true;
      base = 16;
    } else if (digits.size() > 2 && digits[0] == '0' && (digits[1] == 'x' || digits[1] == 'X')) {
      base = 16;
    } else if (digits.size() > 2 && digits[0] == '0' && (digits[1] == 'b' || digits[1] == 'B')) {
      base = 2;
    } else if (digits.find_first_of(".eE") != digits.npos) {
      double number = 0;
      const auto [end, error] =
          std::from_chars(digits.data(), digits.data() + digits.size(), number);
      if (error != std::errc() || end != digits.data() + digits.size()) {
        Fail("\"" + std::string(token) + "\" is no number.");
      }
      number = negative ? -number : number;
      operand.is_float = operand.is_double = true;
      std::memcpy(&operand.value, &number, sizeof(number));
      return operand;
    } else if (digits.size() > 1 && digits[0] == '0') {
      base = 8;
    }
    if (base == 16 || base == 2) digits.remove_prefix(2);
    if (base == 8) digits.remove_prefix(1);
    if (digits.ends_with('U')) digits.remove_suffix(1);
    uint64_t number = 0;
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), number, base);
    if (error != std::errc() || end != digits.data() + digits.size()) {
      // A lone "0U" loses its only digit to the octal prefix.
      if (!(digits.empty() && base == 8)) Fail("\"" + std::string(token) + "\" is no number.");
    }
    if (operand.is_float && negative) {
      number ^= operand.is_double ? uint64_t{1} << 63 : uint64_t{1} << 31;
    } else if (negative) {
      number = 0 - number;
    }
    operand.value = static_cast<int64_t>(number);
    return operand;
  }

  int64_t Integer(const char* what, int64_t least, int64_t most) {
    const Operand number = Number();
    if (number.is_float || number.value < least || number.value > most) {
      Fail(std::string(what) + " must be an integer from " + std::to_string(least) + " to " +
           std::to_string(most) + ".");
    }
    return number.value;
  }

  void SkipBlock() {
    Expect('{');
    for (int depth = 1; depth > 0;) {
      SkipSpace();
      if (rest_.empty()) Fail("this block does not end.");
      if (rest_.front() == '"') {
        Quoted();
        continue;
      }
      depth += (rest_.front() == '{') - (rest_.front() == '}');
      rest_.remove_prefix(1);
    }
  }

  void SkipStatement() {
    while (Peek() != ';') {
      if (rest_.empty()) Fail("this statement does not end.");
      if (rest_.front() == '"') {
        Quoted();
      } else {
        rest_.remove_prefix(1);
      }
    }
    rest_.remove_prefix(1);
  }

  // ---- Modules

  void ModuleDirective() {
    const std::string_view name = Directive();
    if (name == ".version") {
      Version();
    } else if (name == ".target") {
      module_->target = Name("a target");
      while (Accept(',')) Name("a target");
    } else if (name == ".address_size") {
      if (Integer("the address size", 32, 64) != 64) Fail("only .address_size 64 is supported.");
    } else if (name == ".file") {
      FileDirective();
    } else if (name == ".section") {
      Dotted();
      SkipBlock();
    } else if (name == ".pragma" || name == ".alias") {
      SkipStatement();
    } else if (name == ".visible" || name == ".weak" || name == ".common") {
      // Linking does not matter: there is one module.
    } else if (name == ".extern") {
      is_extern_ = true;
    } else if (name == ".entry") {
      EntryDirective();
    } else if (name == ".func") {
      SkipFunction();
    } else if (name == ".global" || name == ".const" || name == ".shared") {
      module_->variables.push_back(VariableDirective(name, module_offsets_));
      is_extern_ = false;
    } else {
      Fail("expected a directive that is supported, not " +
           (name.empty() ? Next() : "\"" + std::string(name) + "\"") + ".");
    }
  }

  void Version() {
    SkipSpace();
    const std::string_view token = Take([](char c) { return IsDigit(c) || c == '.'; });
    const auto [dot, error] =
        std::from_chars(token.data(), token.data() + token.size(), module_->version_major);
    if (error != std::errc() || dot == token.data() + token.size() || *dot != '.' ||
        std::from_chars(dot + 1, token.data() + token.size(), module_->version_minor).ec !=
            std::errc()) {
      Fail("the version must be two numbers, such as 8.8.");
    }
  }

  void FileDirective() {
    const auto index = static_cast<int>(Integer("the file's number", 0, INT32_MAX));
    module_->files[index] = Quoted();
    while (Accept(',')) Number();
  }

  // A declaration is skipped; a call of it is refused where it is made, as every unknown opcode is.
  void SkipFunction() {
    while (Peek() != '{' && Peek() != ';') {
      if (rest_.empty()) Fail("this function does not end.");
      rest_.remove_prefix(1);
    }
    if (Peek() == '{')
      SkipBlock();
    else
      rest_.remove_prefix(1);
    is_extern_ = false;
  }

  // `.global .align 16 .b8 name[256] = {1, 2};` after its first word.
  Variable VariableDirective(std::string_view space, std::array<uint32_t, 5>& offsets) {
    Variable variable;
    variable.space = space == ".shared"  ? Space::kShared
                     : space == ".const" ? Space::kConst
                     : space == ".local" ? Space::kLocal
                     : space == ".param" ? Space::kParam
                                         : Space::kGlobal;
    variable.is_extern = is_extern_;
    uint32_t element = 0;
    uint32_t alignment = 0;
    for (std::string_view word = Directive(); !word.empty(); word = Directive()) {
      if (word == ".align") {
        alignment = static_cast<uint32_t>(Integer("an alignment", 1, 1 << 20));
        if (!std::has_single_bit(alignment)) Fail("an alignment must be a power of two.");
      } else if (word == ".ptr") {
        // What a pointer parameter points to does not matter here; its own alignment does not
        // follow.
        for (std::string_view more = PeekDirective();
             more == ".global" || more == ".shared" || more == ".const" || more == ".local";
             more = PeekDirective()) {
          Directive();
        }
        if (PeekDirective() == ".align") {
          Directive();
          Integer("an alignment", 1, 1 << 20);
        }
      } else if (word == ".attribute") {
        Fail("variable attributes are not supported.");
      } else if (const int bits = TypeBits(word); bits >= 8) {
        element = static_cast<uint32_t>(bits / 8);
      } else {
        Fail("\"" + std::string(word) + "\" is not supported in a variable's declaration.");
      }
    }
    if (element == 0) Fail("expected a type before " + Next() + ".");
    variable.alignment = std::max(alignment, element);
    variable.name = Name("a variable's name");
    uint64_t count = 1;
    while (Accept('[')) {
      if (Accept(']')) {
        count = 0;
        break;
      }
      count *= static_cast<uint64_t>(Integer("an array's length", 0, INT32_MAX));
      if (count > INT32_MAX) Fail("this array exceeds 2 GiB.");
      Expect(']');
    }
    if (count * element > INT32_MAX) Fail("this array exceeds 2 GiB.");
    variable.size = static_cast<uint32_t>(count * element);
    if (count == 0 && !variable.is_extern) Fail("only an extern array may leave its length open.");
    if (Accept('=')) Initial(variable, element);
    uint32_t& offset = offsets[static_cast<size_t>(variable.space)];
    variable.offset = AlignUp(offset, variable.alignment, line_);
    // The dynamic shared memory of a launch starts behind all static variables: see Program.
    if (!variable.is_extern) offset = AlignUp(uint64_t{variable.offset} + variable.size, 1, line_);
    if (variable.space != Space::kParam) Expect(';');
    return variable;
  }

  std::string_view PeekDirective() {
    SkipSpace();
    const std::string_view saved = rest_;
    const std::string_view word = Directive();
    rest_ = saved;
    return word;
  }

  void Initial(Variable& variable, uint32_t element) {
    std::vector<Operand> values;
    if (Accept('{')) {
      if (!Accept('}')) {
        do values.push_back(Number());
        while (Accept(','));
        Expect('}');
      }
    } else {
      values.push_back(Number());
    }
    if (values.size() * element > variable.size) Fail("more initial values than elements.");
    if (variable.size > kMaxInitial) Fail("an initialised array may have 64 MiB.");
    variable.initial.resize(variable.size);
    for (size_t i = 0; i < values.size(); ++i) {
      if (element > 8) Fail("initial values of this type are not supported.");
      std::memcpy(&variable.initial[i * element], &values[i].value, element);
    }
  }

  // ---- Kernels

  void EntryDirective() {
    module_->kernels.push_back(std::make_unique<Kernel>());
    kernel_ = module_->kernels.back().get();
    kernel_->name = Name("a kernel's name");
    kernel_->line = line_;
    scopes_.assign(1, Scope());
    label_uses_.clear();
    location_ = -1;
    std::array<uint32_t, 5> offsets = {};
    if (Accept('(')) {
      if (!Accept(')')) {
        do {
          if (Directive() != ".param") Fail("expected .param before " + Next() + ".");
          kernel_->parameters.push_back(VariableDirective(".param", offsets));
        } while (Accept(','));
        Expect(')');
      }
    }
    kernel_->parameter_bytes = offsets[static_cast<size_t>(Space::kParam)];
    while (Peek() != '{') TuningDirective();
    Expect('{');
    Body(offsets);
    Resolve();
    is_extern_ = false;
  }

  void TuningDirective() {
    const std::string_view name = Directive();
    if (name == ".reqntid" || name == ".maxntid" || name == ".reqnctapercluster") {
      std::array<uint32_t, 3> sizes = {1, 1, 1};
      int axis = 0;
      do sizes[axis++] = static_cast<uint32_t>(Integer("a size", 1, INT32_MAX));
      while (axis < 3 && Accept(','));
      (name == ".reqntid"   ? kernel_->required_block
       : name == ".maxntid" ? kernel_->maximal_block
                            : kernel_->required_cluster) = sizes;
    } else if (name == ".minnctapersm") {
      kernel_->minimal_ctas_per_sm = static_cast<uint32_t>(Integer("the number of CTAs", 1, 64));
    } else if (name == ".maxnreg") {
      kernel_->maximal_registers =
          static_cast<uint32_t>(Integer("the number of registers", 1, 512));
    } else if (name == ".maxclusterrank") {
      Integer("the rank", 1, 64);
    } else if (name == ".explicitcluster" || name == ".blocksareclusters" || name == ".noreturn") {
    } else if (name == ".pragma") {
      SkipStatement();
    } else {
      Fail("expected the kernel's body or a tuning directive that is supported, not " +
           (name.empty() ? Next() : "\"" + std::string(name) + "\"") + ".");
    }
  }

  // Statements up to the brace that closes the kernel.
  void Body(std::array<uint32_t, 5>& offsets) {
    std::vector<int> open = {0};
    while (!open.empty()) {
      scope_ = open.back();
      switch (Peek()) {
        case '\0':
          Fail("the kernel's body does not end.");
        case ';':
          rest_.remove_prefix(1);
          break;
        case '{':
          rest_.remove_prefix(1);
          // Every look-up of a name walks outward through the scopes.
          if (open.size() >= kMaxScopes) Fail("blocks are nested too deeply.");
          open.push_back(static_cast<int>(scopes_.size()));
          scopes_.push_back(
              Scope{.parent = scope_, .registers = {}, .labels = {}, .branch_targets = {}});
          break;
        case '}':
          rest_.remove_prefix(1);
          open.pop_back();
          break;
        case '.':
          BodyDirective(offsets);
          break;
        default:
          LabelOrInstruction();
      }
    }
  }

  void BodyDirective(std::array<uint32_t, 5>& offsets) {
    const std::string_view name = Directive();
    if (name == ".reg") {
      RegisterDirective();
    } else if (name == ".loc") {
      LocationDirective();
    } else if (name == ".pragma") {
      SkipStatement();
    } else if (name == ".shared" || name == ".local") {
      kernel_->variables.push_back(VariableDirective(name, offsets));
    } else {
      if (name == ".param") Fail(kNoCalls);
      Fail("directive \"" + std::string(name) + "\" is not supported in a kernel.");
    }
  }

  void RegisterDirective() {
    const std::string_view type = Directive();
    const int bits = TypeBits(type);
    if (bits == 0) Fail("registers of type \"" + std::string(type) + "\" are not supported.");
    do {
      const std::string_view name = Name("a register's name");
      if (Accept('<')) {
        const int64_t count = Integer("the number of registers", 0, 1 << 20);
        Expect('>');
        for (int64_t i = 0; i < count; ++i) {
          names_.push_back(std::string(name) + std::to_string(i));
          DeclareRegister(names_.back(), bits);
        }
      } else {
        DeclareRegister(name, bits);
      }
    } while (Accept(','));
    Expect(';');
  }

  void DeclareRegister(std::string_view name, int bits) {
    const auto index = static_cast<int>(kernel_->registers.size());
    if (!scopes_[scope_].registers.emplace(name, index).second) {
      Fail("register \"" + std::string(name) + "\" is declared twice.");
    }
    if (kernel_->registers.size() >= kMaxRegisters) {
      Fail("a kernel may declare " + std::to_string(kMaxRegisters) + " registers here.");
    }
    kernel_->registers.push_back(Register{std::string(name), static_cast<uint8_t>(bits)});
  }

  void LocationDirective() {
    Location location;
    location.file = static_cast<int>(Integer("the file's number", 0, INT32_MAX));
    location.line = static_cast<int>(Integer("the line", 0, INT32_MAX));
    location.column = static_cast<int>(Integer("the column", 0, INT32_MAX));
    while (Accept(',')) {
      const std::string_view word = Name("function_name or inlined_at");
      if (word == "function_name") {
        Name("a label");
        if (Accept('+')) Number();
      } else if (word == "inlined_at") {
        Location outer;
        outer.file = static_cast<int>(Integer("the file's number", 0, INT32_MAX));
        outer.line = static_cast<int>(Integer("the line", 0, INT32_MAX));
        outer.column = static_cast<int>(Integer("the column", 0, INT32_MAX));
        // The caller's own .loc came before: through it the chain goes on outward.
        const auto [latest, is_new] =
            latest_.try_emplace(std::array{outer.file, outer.line, outer.column},
                                static_cast<int>(module_->locations.size()));
        if (is_new) module_->locations.push_back(outer);
        location.inlined_at = latest->second;
      } else {
        Fail("expected function_name or inlined_at, not \"" + std::string(word) + "\".");
      }
    }
    location_ = static_cast<int>(module_->locations.size());
    latest_[std::array{location.file, location.line, location.column}] = location_;
    module_->locations.push_back(location);
  }

  void LabelOrInstruction() {
    Statement statement;
    if (Accept('@')) {
      statement.guard_negated = Accept('!');
      const std::string_view name = Name("a predicate");
      const std::optional<int> index = FindRegister(name);
      if (!index || kernel_->registers[*index].bits != 1) {
        Fail("\"" + std::string(name) + "\" is no predicate.");
      }
      statement.guard = *index;
      SkipSpace();
    } else {
      const std::string_view saved = rest_;
      const std::string_view name = Name("an instruction");
      if (Peek() == ':' && !rest_.starts_with("::")) {
        rest_.remove_prefix(1);
        Label(name);
        return;
      }
      rest_ = saved;
    }
    statement.line = line_;
    statement.location = location_;
    statement.opcode = Take([](char c) { return IsNamePart(c) || c == '.' || c == ':'; });
    if (statement.opcode.empty()) Fail("expected an instruction before " + Next() + ".");
    if (statement.opcode == "call" || statement.opcode.starts_with("call.")) Fail(kNoCalls);
    if (Peek() != ';') {
      do statement.operands.push_back(ParseOperand(0));
      while (Accept(','));
    }
    Expect(';');
    kernel_->statements.push_back(std::move(statement));
  }

  void Label(std::string_view name) {
    const auto at = static_cast<int>(kernel_->statements.size());
    if (PeekDirective() == ".branchtargets") {
      Directive();
      auto& targets = scopes_[scope_].branch_targets[name];
      do targets.push_back(Name("a label"));
      while (Accept(','));
      if (targets.size() > kMaxTargets) Fail("this list of targets is too long.");
      Expect(';');
      return;
    }
    if (!scopes_[scope_].labels.emplace(name, at).second) {
      Fail("label \"" + std::string(name) + "\" is defined twice.");
    }
  }

  std::optional<int> FindRegister(std::string_view name) const {
    for (int scope = scope_; scope >= 0; scope = scopes_[scope].parent) {
      const auto it = scopes_[scope].registers.find(name);
      if (it != scopes_[scope].registers.end()) return it->second;
    }
    return std::nullopt;
  }

  Operand ParseOperand(int depth) {
    Operand operand = SingleOperand(depth);
    if (!Accept('|')) return operand;
    Operand pair;
    pair.kind = Operand::Kind::kPair;
    pair.elements.push_back(std::move(operand));
    pair.elements.push_back(SingleOperand(depth));
    return pair;
  }

  Operand SingleOperand(int depth) {
    if (depth > 4) Fail("operands are nested too deeply.");
    Operand operand;
    const char c = Peek();
    if (c == '!') {
      rest_.remove_prefix(1);
      operand = SingleOperand(depth + 1);
      operand.negated = !operand.negated;
      if (operand.kind != Operand::Kind::kRegister) Fail("only a predicate can be negated.");
    } else if (c == '{' || c == '(') {
      rest_.remove_prefix(1);
      const char close = c == '{' ? '}' : ')';
      operand.kind = Operand::Kind::kVector;
      if (!Accept(close)) {
        do operand.elements.push_back(ParseOperand(depth + 1));
        while (Accept(','));
        Expect(close);
      }
    } else if (c == '[') {
      rest_.remove_prefix(1);
      operand.kind = Operand::Kind::kAddress;
      operand.elements.push_back(SingleOperand(depth + 1));
      if (Accept('+')) {
        operand.value = Integer("an offset", INT32_MIN, INT64_C(0xffffffff));
      } else if (Peek() == '-') {
        operand.value = Integer("an offset", INT32_MIN, INT64_C(0xffffffff));
      }
      if (Accept(',')) operand.elements.push_back(ParseOperand(depth + 1));
      Expect(']');
    } else if (c == '-' || IsDigit(c) || rest_.starts_with("WARP_SZ")) {
      operand = Number();
    } else if (IsNameStart(c)) {
      NamedOperand(operand);
    } else {
      Fail("expected an operand before " + Next() + ".");
    }
    return operand;
  }

  void NamedOperand(Operand& operand) {
    std::string_view name = Name("an operand");
    if (name == "_") return;
    if (const std::optional<int> index = FindRegister(name)) {
      operand.kind = Operand::Kind::kRegister;
      operand.reg = *index;
      return;
    }
    if (name.front() == '%') {
      const size_t suffix = !rest_.empty() && rest_.front() == '.' ? 2 : 0;
      const std::string_view whole(name.data(), name.size() + std::min(suffix, rest_.size()));
      for (size_t i = 0; i < std::size(kSpecialRegisters); ++i) {
        if (kSpecialRegisters[i] != whole) continue;
        rest_.remove_prefix(suffix);
        operand.kind = Operand::Kind::kRegister;
        operand.reg = -1 - static_cast<int>(i);
        return;
      }
      Fail("register \"" + std::string(whole) +
           "\" is neither declared nor a special register that is supported.");
    }
    operand.kind = Operand::Kind::kSymbol;
    operand.symbol = name;
    // Whether the symbol is a label is known at the end of the kernel.
    label_uses_.push_back({name, scope_});
    if (rest_.starts_with("+")) {
      rest_.remove_prefix(1);
      operand.value = Integer("an offset", 0, INT32_MAX);
    }
  }

  // Makes labels unique by statement, now that all are known.
  void Resolve() {
    const auto find = [&](std::string_view name, int scope) -> std::optional<int> {
      for (; scope >= 0; scope = scopes_[scope].parent) {
        const auto it = scopes_[scope].labels.find(name);
        if (it != scopes_[scope].labels.end()) return it->second;
      }
      return std::nullopt;
    };
    size_t use = 0;
    for (Statement& statement : kernel_->statements) {
      for (Operand& operand : statement.operands)
        ResolveOperand(operand, use, find, statement.line);
    }
  }

  template <typename Find>
  void ResolveOperand(Operand& operand, size_t& use, const Find& find, int line) {
    if (operand.kind == Operand::Kind::kSymbol) {
      const auto [name, scope] = label_uses_[use++];
      if (const std::optional<int> target = find(name, scope)) {
        operand.symbol = "@" + std::to_string(*target);
        kernel_->labels[operand.symbol] = *target;
      }
      for (int s = scope; s >= 0; s = scopes_[s].parent) {
        const auto it = scopes_[s].branch_targets.find(name);
        if (it == scopes_[s].branch_targets.end()) continue;
        operand.symbol = std::string(name) + "@" + std::to_string(s);
        auto& list = kernel_->branch_targets[operand.symbol];
        list.clear();
        for (const std::string_view label : it->second) {
          const std::optional<int> target = find(label, s);
          if (!target) throw Error(line, "label \"" + std::string(label) + "\" is not defined.");
          list.push_back("@" + std::to_string(*target));
          kernel_->labels[list.back()] = *target;
        }
        break;
      }
    }
    for (Operand& element : operand.elements) ResolveOperand(element, use, find, line);
  }

  std::unique_ptr<Module> module_;
  std::string_view rest_;
  int line_ = 1;
  bool is_extern_ = false;
  std::array<uint32_t, 5> module_offsets_ = {};

  Kernel* kernel_ = nullptr;
  std::vector<Scope> scopes_;
  std::vector<std::pair<std::string_view, int>>
      label_uses_;                 // symbol operands in order, and their scopes
  std::deque<std::string> names_;  // of registers declared by number; keys of scopes point into it
  std::map<std::array<int, 3>, int> latest_;  // the last location with this file, line and column
  int scope_ = 0;
  int location_ = -1;
};

}  // namespace

const Kernel* Module::FindKernel(std::string_view name) const {
  for (const auto& kernel : kernels) {
    if (kernel->name == name) return kernel.get();
  }
  return nullptr;
}

std::string Module::Describe(int location) const {
  std::string text;
  // A chain longer than this is a cycle.
  for (int depth = 0; location >= 0 && depth < 64; ++depth) {
    const Location& at = locations[location];
    const auto file = files.find(at.file);
    if (file == files.end()) break;
    const std::string_view path = file->second;
    text += (depth > 0 ? ", inlined at " : "") +
            std::string(path.substr(path.find_last_of('/') + 1)) + ":" + std::to_string(at.line) +
            ":" + std::to_string(at.column);
    location = at.inlined_at;
  }
  return text;
}

std::unique_ptr<Module> Parse(std::string text) { return Parser(std::move(text)).Run(); }

}  // namespace jax_fa4::emulator::ptx
