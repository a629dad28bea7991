// Scalar instructions that move, select and compare: PTX ISA 9.7.6 (Comparison and
// Selection), 9.7.9 (Data Movement: mov, prmt, cvta, isspacep), and what the decoders of the others
// share.

#include "csrc/emulator/isa_scalar.h"

#include <immintrin.h>

#include <array>
#include <cmath>
#include <optional>
#include <unordered_map>

namespace jax_fa4::emulator {

Type TypeOf(std::string_view name) {
  static const std::unordered_map<std::string_view, Type> kTypes = {
      {"pred", Type::kPred},   {"b8", Type::kB8},       {"u8", Type::kU8},
      {"s8", Type::kS8},       {"b16", Type::kB16},     {"u16", Type::kU16},
      {"s16", Type::kS16},     {"f16", Type::kF16},     {"bf16", Type::kBf16},
      {"b32", Type::kB32},     {"u32", Type::kU32},     {"s32", Type::kS32},
      {"f32", Type::kF32},     {"f16x2", Type::kF16x2}, {"bf16x2", Type::kBf16x2},
      {"u16x2", Type::kU16x2}, {"s16x2", Type::kS16x2}, {"b64", Type::kB64},
      {"u64", Type::kU64},     {"s64", Type::kS64},     {"f64", Type::kF64},
      {"f32x2", Type::kF32x2}, {"b128", Type::kB128}};
  const auto it = kTypes.find(name);
  return it == kTypes.end() ? Type::kNone : it->second;
}

int BitsOf(Type type) {
  if (type >= Type::kB128) return 128;
  if (type >= Type::kB64) return 64;
  if (type >= Type::kB32) return 32;
  if (type >= Type::kB16) return 16;
  return type >= Type::kB8 ? 8 : 1;
}

bool IsSigned(Type type) {
  return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
}

bool IsFloat(Type type) { return type == Type::kF32 || type == Type::kF64; }

// ---- Form

void Form::Refuse() {
  if (parts.done()) decoder.Fail("its opcode is incomplete.");
  decoder.Fail("\"." + std::string(parts.Peek()) + "\" is not supported here.");
}

Type Form::TakeType(std::initializer_list<Type> types) {
  const Type type = TypeOf(parts.Peek());
  for (const Type allowed : types) {
    if (type != allowed || type == Type::kNone) continue;
    parts.Next();
    return type;
  }
  Refuse();
}

bool Form::TakeRounding(Rounding* rounding) {
  if (Take("rn")) return *rounding = Rounding::kNearestEven, true;
  if (Take("rz")) return *rounding = Rounding::kTowardZero, true;
  if (Take("rm")) return *rounding = Rounding::kDown, true;
  if (Take("rp")) return *rounding = Rounding::kUp, true;
  return false;
}

void Form::Need(std::string_view part) {
  if (!Take(part)) Refuse();
}

void Form::Finish() {
  if (!parts.done()) Refuse();
}

Ref Form::Source(const ptx::Operand& operand, Type type, bool any_width) {
  if (operand.kind == ptx::Operand::Kind::kImmediate) {
    const bool is_bits = type == Type::kB8 || type == Type::kB16 || type == Type::kB32 ||
                         type == Type::kB64 || type == Type::kB128;
    if (IsFloat(type) && !operand.is_float) decoder.Fail("it takes no integer constant.");
    if (!IsFloat(type) && !is_bits && operand.is_float) {
      decoder.Fail("it takes no floating-point constant.");
    }
  }
  return decoder.Source(operand, BitsOf(type), any_width);
}

Ref Form::Destination(const ptx::Operand& operand, Type type, bool any_width) {
  const Ref ref = decoder.Destination(operand, BitsOf(type), any_width);
  if (!ref) decoder.Fail("its result cannot be discarded.");
  return ref;
}

void Form::Emit(Execute execute, Type destination, std::initializer_list<Type> sources) {
  Finish();
  if (execute == nullptr) decoder.Fail("its type is not supported.");
  decoder.ExpectOperands(sources.size() + 1, sources.size() + 1);
  inst().execute = execute;
  inst().destination[0] = Destination(operand(0), destination);
  size_t i = 0;
  for (const Type type : sources) {
    inst().source[i] = Source(operand(i + 1), type);
    ++i;
  }
}

namespace {

// ---- Predicates

// A predicate that is a constant (PTX takes 0 and others in mov and logic) stands in `immediate`.
void PredicateOperand(Form& form, const ptx::Operand& operand, int slot) {
  if (operand.kind == ptx::Operand::Kind::kImmediate && !operand.is_float) {
    form.inst().immediate[slot] = operand.value != 0 ? kAllLanes : 0;
  } else {
    form.inst().source[slot] = form.decoder.PredicateSource(operand);
  }
}

uint32_t PredicateValue(Context& context, const Inst& inst, int slot) {
  return inst.source[slot] ? context.Predicate(inst.source[slot])
                           : static_cast<uint32_t>(inst.immediate[slot]);
}

enum class Combine : uint32_t { kNone, kAnd, kOr, kXor };

uint32_t Combined(Combine how, uint32_t a, uint32_t b) {
  switch (how) {
    case Combine::kAnd:
      return a & b;
    case Combine::kOr:
      return a | b;
    case Combine::kXor:
      return a ^ b;
    default:
      return a;
  }
}

Combine TakeCombine(Form& form) {
  return form.Take("and")   ? Combine::kAnd
         : form.Take("or")  ? Combine::kOr
         : form.Take("xor") ? Combine::kXor
                            : Combine::kNone;
}

template <Combine kHow>
Outcome LogicPredicates(Context& context, const Inst& inst) {
  context.SetPredicate(
      inst.destination[0],
      Combined(kHow, PredicateValue(context, inst, 0), PredicateValue(context, inst, 1)));
  return Outcome::kNext;
}

Outcome MovePredicate(Context& context, const Inst& inst) {
  context.SetPredicate(inst.destination[0], PredicateValue(context, inst, 0));
  return Outcome::kNext;
}

Outcome NotPredicate(Context& context, const Inst& inst) {
  context.SetPredicate(inst.destination[0], ~PredicateValue(context, inst, 0));
  return Outcome::kNext;
}

void DecodePredicateLogic(Form& form, std::string_view opcode) {
  form.Finish();
  const bool is_binary = opcode == "and" || opcode == "or" || opcode == "xor";
  form.decoder.ExpectOperands(is_binary ? 3 : 2, is_binary ? 3 : 2);
  form.inst().execute = opcode == "and"   ? LogicPredicates<Combine::kAnd>
                        : opcode == "or"  ? LogicPredicates<Combine::kOr>
                        : opcode == "xor" ? LogicPredicates<Combine::kXor>
                        : opcode == "not" ? NotPredicate
                                          : MovePredicate;
  form.inst().destination[0] = form.decoder.PredicateDestination(form.operand(0));
  PredicateOperand(form, form.operand(1), 0);
  if (is_binary) PredicateOperand(form, form.operand(2), 1);
}

// ---- Comparison

enum class Test : uint8_t {
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kEqu,
  kNeu,
  kLtu,
  kLeu,
  kGtu,
  kGeu,
  kNum,
  kNan,
};

template <Test kTest, typename T>
bool Holds(T a, T b) {
  switch (kTest) {
    case Test::kEq:
      return a == b;
    // The ordered form: false for NaN, unlike != of C++.
    case Test::kNe:
      return std::is_floating_point_v<T> ? a < b || a > b : a != b;
    case Test::kLt:
      return a < b;
    case Test::kLe:
      return a <= b;
    case Test::kGt:
      return a > b;
    case Test::kGe:
      return a >= b;
    case Test::kEqu:
      return !(a < b || a > b);
    case Test::kNeu:
      return a != b;
    case Test::kLtu:
      return !(a >= b);
    case Test::kLeu:
      return !(a > b);
    case Test::kGtu:
      return !(a <= b);
    case Test::kGeu:
      return !(a < b);
    case Test::kNum:
      return a == a && b == b;
    case Test::kNan:
      return a != a || b != b;
  }
}

// A bit for each lane from a word that is all ones or zero.
uint32_t LaneBits(const int32_t* words) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i += 8) {
    const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i));
    bits |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(eight))) << i;
  }
  return bits;
}

// How operands become values to compare: a type, and what of a word (the upper half of a packed
// one).
struct AsHalf {
  using W = uint32_t;
  static float Value(uint32_t word) {
    return HalfToFloat(HalfType::kF16, static_cast<uint16_t>(word));
  }
};
struct AsBf16 {
  using W = uint32_t;
  static float Value(uint32_t word) { return std::bit_cast<float>(word << 16); }
};
template <typename Low>
struct Upper {
  using W = uint32_t;
  static float Value(uint32_t word) { return Low::Value(word >> 16); }
};
struct AsFlushedHalf {
  using W = uint32_t;
  static float Value(uint32_t word) {
    return AsHalf::Value((word & 0x7c00) == 0 ? word & 0x8000 : word & 0xffff);
  }
};
struct AsFlushed {
  using W = uint32_t;
  static float Value(uint32_t word) { return FlushSubnormal(std::bit_cast<float>(word)); }
};
template <typename T>
struct As {
  using W = Word<T>;
  static T Value(W word) { return Unpack<T>(word); }
};

template <Test kTest, typename Operand>
uint32_t CompareLanes(Context& context, const Inst& inst) {
  using W = typename Operand::W;
  const auto* a = reinterpret_cast<const W*>(context.Row(inst.source[0]));
  const auto* b = reinterpret_cast<const W*>(context.Row(inst.source[1]));
  int32_t words[kLanes];
#pragma GCC ivdep
  for (int lane = 0; lane < kLanes; ++lane) {
    words[lane] = Holds<kTest>(Operand::Value(a[lane]), Operand::Value(b[lane])) ? -1 : 0;
  }
  return LaneBits(words);
}

// setp: source[2] is the predicate to combine with, mode[0] how. The second destination gets the
// inverse comparison, combined with the same predicate.
template <Test kTest, typename Operand>
Outcome SetPredicates(Context& context, const Inst& inst) {
  const uint32_t holds = CompareLanes<kTest, Operand>(context, inst);
  const auto how = static_cast<Combine>(inst.mode[0]);
  const uint32_t other = how == Combine::kNone ? 0 : context.Predicate(inst.source[2]);
  context.SetPredicate(inst.destination[0], Combined(how, holds, other));
  context.SetPredicate(inst.destination[1], Combined(how, ~holds, other));
  return Outcome::kNext;
}

// setp of packed halves: the destinations get the comparisons of the lower and of the upper halves.
template <Test kTest, typename Low>
Outcome SetPackedPredicates(Context& context, const Inst& inst) {
  const uint32_t low = CompareLanes<kTest, Low>(context, inst);
  const uint32_t high = CompareLanes<kTest, Upper<Low>>(context, inst);
  const auto how = static_cast<Combine>(inst.mode[0]);
  const uint32_t other = how == Combine::kNone ? 0 : context.Predicate(inst.source[2]);
  context.SetPredicate(inst.destination[0], Combined(how, low, other));
  context.SetPredicate(inst.destination[1], Combined(how, high, other));
  return Outcome::kNext;
}

// set: mode[1] is what true gives, in each half of it.
template <Test kTest, typename Operand, bool kPacked>
Outcome SetRegister(Context& context, const Inst& inst) {
  const auto how = static_cast<Combine>(inst.mode[0]);
  const uint32_t other = how == Combine::kNone ? 0 : context.Predicate(inst.source[2]);
  const uint32_t low = Combined(how, CompareLanes<kTest, Operand>(context, inst), other);
  uint32_t high = low;
  if constexpr (kPacked)
    high = Combined(how, CompareLanes<kTest, Upper<Operand>>(context, inst), other);
  uint32_t* to = context.MutableRow(inst.destination[0]);
  for (uint32_t rest = context.mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    to[lane] = ((low >> lane & 1) != 0 ? inst.mode[1] & 0xffff : 0) |
               ((high >> lane & 1) != 0 ? inst.mode[1] & 0xffff0000 : 0);
  }
  return Outcome::kNext;
}

// Of the first kCount tests; null for the others.
template <size_t kCount = 14, typename Function>
Execute ForTest(Test test, Function function) {
  static_assert(static_cast<int>(Test::kNan) == 13);
  const auto pick = [&]<size_t... I>(std::index_sequence<I...>) {
    Execute execute = nullptr;
    ((static_cast<size_t>(test) == I
          ? void(execute = function(std::integral_constant<Test, static_cast<Test>(I)>()))
          : void()),
     ...);
    return execute;
  };
  return pick(std::make_index_sequence<kCount>());
}

template <typename Operand>
Execute CompareExecute(Test test, bool sets_register) {
  if (sets_register) {
    return ForTest(test, [](auto t) -> Execute { return SetRegister<t(), Operand, false>; });
  }
  return ForTest(test, [](auto t) -> Execute { return SetPredicates<t(), Operand>; });
}

template <typename Low>
Execute PackedCompareExecute(Test test, bool sets_register) {
  if (sets_register) {
    return ForTest(test, [](auto t) -> Execute { return SetRegister<t(), Low, true>; });
  }
  return ForTest(test, [](auto t) -> Execute { return SetPackedPredicates<t(), Low>; });
}

Test TakeTest(Form& form, bool* needs_unsigned, bool* needs_float) {
  struct Name {
    std::string_view name;
    Test test;
  };
  static constexpr Name kNames[] = {{"eq", Test::kEq},
                                    {"ne", Test::kNe},
                                    {"lt", Test::kLt},
                                    {"le", Test::kLe},
                                    {"gt", Test::kGt},
                                    {"ge", Test::kGe},
                                    {"equ", Test::kEqu},
                                    {"neu", Test::kNeu},
                                    {"ltu", Test::kLtu},
                                    {"leu", Test::kLeu},
                                    {"gtu", Test::kGtu},
                                    {"geu", Test::kGeu},
                                    {"num", Test::kNum},
                                    {"nan", Test::kNan},
                                    {"lo", Test::kLt},
                                    {"ls", Test::kLe},
                                    {"hi", Test::kGt},
                                    {"hs", Test::kGe}};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (!form.Take(kNames[i].name)) continue;
    *needs_unsigned = i >= 14;
    *needs_float = i >= 6 && i < 14;
    return kNames[i].test;
  }
  form.Refuse();
}

void DecodeCompare(Form& form, bool sets_register) {
  bool needs_unsigned = false, needs_float = false;
  const Test test = TakeTest(form, &needs_unsigned, &needs_float);
  Combine combine = TakeCombine(form);
  const bool ftz = form.Take("ftz");
  Inst& inst = form.inst();
  Type result = Type::kPred;
  if (sets_register) {
    result = form.TakeType({Type::kU32,
                            Type::kS32,
                            Type::kF32,
                            Type::kU16,
                            Type::kS16,
                            Type::kF16,
                            Type::kBf16,
                            Type::kF16x2,
                            Type::kBf16x2});
  }
  const Type type = form.TakeType({Type::kB16,
                                   Type::kU16,
                                   Type::kS16,
                                   Type::kB32,
                                   Type::kU32,
                                   Type::kS32,
                                   Type::kB64,
                                   Type::kU64,
                                   Type::kS64,
                                   Type::kF32,
                                   Type::kF64,
                                   Type::kF16,
                                   Type::kBf16,
                                   Type::kF16x2,
                                   Type::kBf16x2});
  // ptxas takes the combination behind the type as well.
  if (combine == Combine::kNone) combine = TakeCombine(form);
  form.Finish();
  const bool is_bits = type == Type::kB16 || type == Type::kB32 || type == Type::kB64;
  const bool is_half =
      type == Type::kF16 || type == Type::kBf16 || type == Type::kF16x2 || type == Type::kBf16x2;
  const bool is_packed = type == Type::kF16x2 || type == Type::kBf16x2;
  const bool is_integer = !is_half && !IsFloat(type);
  if (needs_float && is_integer) form.decoder.Fail("this comparison is of floating-point numbers.");
  if (needs_unsigned && (!is_integer || IsSigned(type) || is_bits)) {
    form.decoder.Fail("this comparison is of unsigned integers.");
  }
  if (is_bits && test != Test::kEq && test != Test::kNe) {
    form.decoder.Fail("untyped operands can only be equal or not.");
  }
  if (ftz && type != Type::kF32 && type != Type::kF16 && type != Type::kF16x2) {
    form.decoder.Fail("\".ftz\" is not supported with this type.");
  }
  if (sets_register && is_packed != (result == Type::kF16x2 || result == Type::kBf16x2) &&
      !(is_packed && (result == Type::kU32 || result == Type::kS32))) {
    form.decoder.Fail("its types do not go together.");
  }
  if (sets_register) {
    inst.mode[1] = result == Type::kF32      ? 0x3f800000
                   : result == Type::kF16    ? 0x3c00
                   : result == Type::kBf16   ? 0x3f80
                   : result == Type::kF16x2  ? 0x3c003c00
                   : result == Type::kBf16x2 ? 0x3f803f80
                   : BitsOf(result) == 16    ? 0xffff
                                             : 0xffffffff;
  }
  switch (type) {
    case Type::kF32:
      inst.execute = ftz ? CompareExecute<AsFlushed>(test, sets_register)
                         : CompareExecute<As<float>>(test, sets_register);
      break;
    case Type::kF64:
      inst.execute = CompareExecute<As<double>>(test, sets_register);
      break;
    case Type::kF16:
      inst.execute = ftz ? CompareExecute<AsFlushedHalf>(test, sets_register)
                         : CompareExecute<AsHalf>(test, sets_register);
      break;
    case Type::kBf16:
      inst.execute = CompareExecute<AsBf16>(test, sets_register);
      break;
    case Type::kF16x2:
      inst.execute = ftz ? PackedCompareExecute<AsFlushedHalf>(test, sets_register)
                         : PackedCompareExecute<AsHalf>(test, sets_register);
      break;
    case Type::kBf16x2:
      inst.execute = PackedCompareExecute<AsBf16>(test, sets_register);
      break;
    default:
      inst.execute = ForInteger(type, [&](auto zero) -> Execute {
        using T = decltype(zero);
        // Integers know the first six.
        if (sets_register) {
          return ForTest<6>(test, [](auto t) -> Execute { return SetRegister<t(), As<T>, false>; });
        }
        return ForTest<6>(test, [](auto t) -> Execute { return SetPredicates<t(), As<T>>; });
      });
  }
  const size_t operands = combine == Combine::kNone ? 3 : 4;
  form.decoder.ExpectOperands(operands, operands);
  const ptx::Operand& destination = form.operand(0);
  if (sets_register) {
    inst.destination[0] = form.Destination(destination, result);
  } else if (destination.kind == ptx::Operand::Kind::kPair) {
    inst.destination[0] = form.decoder.PredicateDestination(destination.elements[0]);
    inst.destination[1] = form.decoder.PredicateDestination(destination.elements[1]);
  } else {
    inst.destination[0] = form.decoder.PredicateDestination(destination);
  }
  inst.source[0] = form.Source(form.operand(1), type);
  inst.source[1] = form.Source(form.operand(2), type);
  inst.mode[0] = static_cast<uint32_t>(combine);
  if (combine != Combine::kNone) inst.source[2] = form.decoder.PredicateSource(form.operand(3));
}

// ---- Selection

template <typename T>
Outcome Select(Context& context, const Inst& inst) {
  const T* a = SourceRow<T>(context, inst.source[0]);
  const T* b = SourceRow<T>(context, inst.source[1]);
  T* to = DestinationRow<T>(context, inst.destination[0]);
  const uint32_t lanes = context.Predicate(inst.source[2]);
  const uint32_t mask = context.mask;
#pragma GCC ivdep
  for (int lane = 0; lane < kLanes; ++lane) {
    const T chosen = (lanes >> lane & 1) != 0 ? a[lane] : b[lane];
    to[lane] = (mask >> lane & 1) != 0 ? chosen : to[lane];
  }
  return Outcome::kNext;
}

Type TakeSelectedType(Form& form) {
  return form.TakeType({Type::kB16,
                        Type::kU16,
                        Type::kS16,
                        Type::kB32,
                        Type::kU32,
                        Type::kS32,
                        Type::kF32,
                        Type::kB64,
                        Type::kU64,
                        Type::kS64,
                        Type::kF64});
}

void DecodeSelect(Form& form) {
  const Type type = TakeSelectedType(form);
  form.Finish();
  form.decoder.ExpectOperands(4, 4);
  Inst& inst = form.inst();
  inst.execute = BitsOf(type) == 64 ? Select<uint64_t> : Select<uint32_t>;
  inst.destination[0] = form.Destination(form.operand(0), type);
  inst.source[0] = form.Source(form.operand(1), type);
  inst.source[1] = form.Source(form.operand(2), type);
  inst.source[2] = form.decoder.PredicateSource(form.operand(3));
}

constexpr auto kSelectBySign = [](auto a, auto b, auto c) { return c >= 0 ? a : b; };
constexpr auto kSelectByFlushedSign = [](auto a, auto b, float c) {
  return FlushSubnormal(c) >= 0 ? a : b;
};

// slct (9.7.6.4): -0 selects as +0, NaN selects b.
void DecodeSelectBySign(Form& form) {
  const bool ftz = form.Take("ftz");
  const Type type = TakeSelectedType(form);
  const Type sign = form.TakeType({Type::kS32, Type::kF32});
  if (ftz && sign != Type::kF32) form.decoder.Fail("\".ftz\" needs a selector of type \".f32\".");
  const auto pick = [&](auto zero) -> Execute {
    using T = decltype(zero);
    if (sign == Type::kS32) return Each<kSelectBySign, T, T, T, int32_t>;
    return ftz ? Each<kSelectByFlushedSign, T, T, T, float> : Each<kSelectBySign, T, T, T, float>;
  };
  form.Emit(BitsOf(type) == 64 ? pick(uint64_t()) : pick(uint32_t()), type, {type, type, sign});
}

// ---- mov

template <typename T>
Outcome Move(Context& context, const Inst& inst) {
  const T* from = SourceRow<T>(context, inst.source[0]);
  T* to = DestinationRow<T>(context, inst.destination[0]);
  if (context.mask == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = from[lane];
  } else {
    Blend(to, from, context.mask);
  }
  return Outcome::kNext;
}

Outcome Move128(Context& context, const Inst& inst) {
  const uint64_t* from = context.Wide(inst.source[0]);
  uint64_t* to = context.MutableWide(inst.destination[0]);
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((context.mask >> lane & 1) == 0) continue;
    to[2 * lane] = from[2 * lane];
    to[2 * lane + 1] = from[2 * lane + 1];
  }
  return Outcome::kNext;
}

// The address of a shared variable: that of the CTA's own window in shared::cluster. Kernels for
// CTA pairs clear the bit of the rank in such an address to name the even CTA.
template <typename T>
Outcome MoveSharedAddress(Context& context, const Inst& inst) {
  const T offset = static_cast<T>(inst.immediate[0]) + (static_cast<T>(context.cta.rank) << 24);
  Fill(context, inst.destination[0], offset);
  return Outcome::kNext;
}

// %clock and its relatives: mode[0] is the shift that selects a half.
template <typename T>
Outcome MoveTime(Context& context, const Inst& inst) {
  Fill(context,
       inst.destination[0],
       static_cast<T>(context.machine.instructions_executed() >> inst.mode[0]));
  return Outcome::kNext;
}

Outcome MoveSpecial16(Context& context, const Inst& inst) {
  return Each<[](uint32_t a) { return static_cast<uint16_t>(a); }, uint16_t, uint32_t>(context,
                                                                                       inst);
}

Outcome Pack2x32(Context& context, const Inst& inst) {
  return Each<[](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; },
              uint64_t,
              uint32_t,
              uint32_t>(context, inst);
}

Outcome Unpack2x32(Context& context, const Inst& inst) {
  const uint64_t* from = context.Wide(inst.source[0]);
  uint32_t low[kLanes], high[kLanes];
#pragma GCC ivdep
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = static_cast<uint32_t>(from[lane]);
    high[lane] = static_cast<uint32_t>(from[lane] >> 32);
  }
  if (inst.destination[0]) Blend(context.MutableRow(inst.destination[0]), low, context.mask);
  if (inst.destination[1]) Blend(context.MutableRow(inst.destination[1]), high, context.mask);
  return Outcome::kNext;
}

// The other shapes: mode[0] elements of mode[1] bits. A 128-bit value is two words of 64.
Outcome PackElements(Context& context, const Inst& inst) {
  const int count = static_cast<int>(inst.mode[0]), bits = static_cast<int>(inst.mode[1]);
  for (uint32_t rest = context.mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    uint64_t words[2] = {0, 0};
    for (int i = 0; i < count; ++i) {
      uint64_t value = LaneValue(context, inst.source[i], lane);
      if (bits < 32) value &= (uint64_t{1} << bits) - 1;
      words[i * bits / 64] |= value << (i * bits % 64);
    }
    if (count * bits == 128) {
      uint64_t* to = context.MutableWide(inst.destination[0]);
      to[2 * lane] = words[0];
      to[2 * lane + 1] = words[1];
    } else {
      SetLaneValue(context, inst.destination[0], lane, words[0]);
    }
  }
  return Outcome::kNext;
}

// An Inst has two destinations: the third and fourth are in source[1] and source[2].
Outcome UnpackElements(Context& context, const Inst& inst) {
  const int count = static_cast<int>(inst.mode[0]), bits = static_cast<int>(inst.mode[1]);
  for (uint32_t rest = context.mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    uint64_t words[2] = {0, 0};
    if (count * bits == 128) {
      words[0] = context.Wide(inst.source[0])[2 * lane];
      words[1] = context.Wide(inst.source[0])[2 * lane + 1];
    } else {
      words[0] = LaneValue(context, inst.source[0], lane);
    }
    for (int i = 0; i < count; ++i) {
      const Ref& to = i < 2 ? inst.destination[i] : inst.source[i - 1];
      uint64_t value = words[i * bits / 64] >> (i * bits % 64);
      if (bits < 64) value &= (uint64_t{1} << bits) - 1;
      if (to) SetLaneValue(context, to, lane, value);
    }
  }
  return Outcome::kNext;
}

void DecodeVectorMove(Form& form, Type type) {
  Inst& inst = form.inst();
  const bool packs = form.operand(1).kind == ptx::Operand::Kind::kVector;
  const ptx::Operand& vector = form.operand(packs ? 1 : 0);
  const size_t count = vector.elements.size();
  const int bits = count == 0 ? 0 : BitsOf(type) / static_cast<int>(count);
  if ((count != 2 && count != 4) || bits < 8)
    form.decoder.Fail("its vector has not 2 or 4 elements.");
  if (IsFloat(type)) form.decoder.Fail("a vector needs an untyped mov.");
  inst.mode[0] = static_cast<uint32_t>(count);
  inst.mode[1] = static_cast<uint32_t>(bits);
  const bool is_common = count == 2 && bits == 32;
  // Elements of 8 bits are in registers of 16.
  const bool any_width = bits == 8;
  if (packs) {
    inst.execute = is_common ? Pack2x32 : PackElements;
    inst.destination[0] = form.Destination(form.operand(0), type);
    for (size_t i = 0; i < count; ++i) {
      inst.source[i] = form.decoder.Source(vector.elements[i], bits, any_width);
    }
  } else {
    inst.execute = is_common ? Unpack2x32 : UnpackElements;
    inst.source[0] = form.Source(form.operand(1), type);
    for (size_t i = 0; i < count; ++i) {
      (i < 2 ? inst.destination[i] : inst.source[i - 1]) =
          form.decoder.DestinationOrSink(vector.elements[i], bits, any_width);
    }
  }
}

std::string_view SpecialNameOf(const ptx::Operand& operand) {
  if (operand.kind != ptx::Operand::Kind::kRegister || operand.reg >= 0) return {};
  return ptx::kSpecialRegisters[-1 - operand.reg];
}

void DecodeMove(Form& form) {
  if (form.Take("pred")) return DecodePredicateLogic(form, "mov");
  const Type type = form.TakeType({Type::kB16,
                                   Type::kU16,
                                   Type::kS16,
                                   Type::kF16,
                                   Type::kBf16,
                                   Type::kB32,
                                   Type::kU32,
                                   Type::kS32,
                                   Type::kF32,
                                   Type::kB64,
                                   Type::kU64,
                                   Type::kS64,
                                   Type::kF64,
                                   Type::kB128});
  form.Finish();
  form.decoder.ExpectOperands(2, 2);
  Inst& inst = form.inst();
  const int bits = BitsOf(type);
  if (form.operand(0).kind == ptx::Operand::Kind::kVector ||
      form.operand(1).kind == ptx::Operand::Kind::kVector) {
    return DecodeVectorMove(form, type);
  }
  const ptx::Operand& from = form.operand(1);
  inst.destination[0] = form.Destination(form.operand(0), type);
  const std::string_view special = SpecialNameOf(from);
  if (special.starts_with("%clock") || special.starts_with("%globaltimer")) {
    if (bits < 32 || IsFloat(type)) form.decoder.Fail("time has 32 or 64 bits.");
    inst.mode[0] = special.ends_with("_hi") ? 32 : 0;
    inst.execute = bits == 64 ? MoveTime<uint64_t> : MoveTime<uint32_t>;
    return;
  }
  if (!special.empty() && bits != 64) {
    // Old code reads them as .u16, and the low half of %gridid as .u32.
    const Ref ref = form.decoder.Source(from, bits, true);
    inst.source[0] = ref;
    if (ref.bits == 64) {
      inst.execute = Each<[](uint64_t a) { return static_cast<uint32_t>(a); }, uint32_t, uint64_t>;
    } else {
      inst.execute = bits == 16 ? MoveSpecial16 : Move<uint32_t>;
    }
    return;
  }
  if (from.kind == ptx::Operand::Kind::kSymbol) {
    const ptx::Variable* variable = form.decoder.FindVariable(from.symbol);
    if (variable != nullptr && variable->space == ptx::Space::kShared && bits >= 32 && bits <= 64) {
      inst.immediate[0] = variable->offset + from.value;
      inst.execute = bits == 64 ? MoveSharedAddress<uint64_t> : MoveSharedAddress<uint32_t>;
      return;
    }
  }
  inst.source[0] = form.Source(from, type);
  inst.execute = bits == 128 ? Move128 : bits == 64 ? Move<uint64_t> : Move<uint32_t>;
}

// ---- prmt (9.7.9.7)

// One byte of the result: the selector's lower three bits name a byte of {b, a}, the fourth asks
// for that byte's sign in all bits.
uint32_t PermutedByte(uint64_t bytes, uint32_t selector) {
  const uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (selector & 7))) & 0xff;
  return (selector & 8) != 0 ? (byte >> 7) * 0xff : byte;
}

constexpr auto kPermute = [](uint32_t a, uint32_t b, uint32_t c) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  return PermutedByte(bytes, c) | PermutedByte(bytes, c >> 4) << 8 |
         PermutedByte(bytes, c >> 8) << 16 | PermutedByte(bytes, c >> 12) << 24;
};

// The selector is nearly always a constant: then each byte is one shift of one operand. mode[0]
// holds it.
Outcome PermuteConstant(Context& context, const Inst& inst) {
  uint32_t all[kLanes] = {};
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = inst.mode[0] >> (4 * i) & 15;
    const uint32_t* from = context.Row(inst.source[(selector & 4) != 0 ? 1 : 0]);
    const uint32_t shift = 8 * (selector & 3), to = 8 * i;
    const uint32_t sign = (selector & 8) != 0 ? 0xff : 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t byte = from[lane] >> shift & 0xff;
      const uint32_t signs = (byte >> 7) * 0xff;
      all[lane] |= ((signs & sign) | (byte & ~sign)) << to;
    }
  }
  Blend(context.MutableRow(inst.destination[0]), all, context.mask);
  return Outcome::kNext;
}

// The modes: for each value of the selector's lower two bits, which bytes the result takes.
template <int kMode>
uint32_t PermuteBy(uint32_t a, uint32_t b, uint32_t c) {
  static constexpr uint32_t kSelectors[6][4] = {
      {0x3210, 0x4321, 0x5432, 0x6543},   // f4e: forward, four from the selector on
      {0x5670, 0x6701, 0x7012, 0x0123},   // b4e: backward
      {0x0000, 0x1111, 0x2222, 0x3333},   // rc8: one byte four times
      {0x3210, 0x3211, 0x3222, 0x3333},   // ecl: clamped from the left
      {0x0000, 0x1110, 0x2210, 0x3210},   // ecr: clamped from the right
      {0x1010, 0x3232, 0x1010, 0x3232}};  // rc16: one half twice
  return kPermute(a, b, kSelectors[kMode][c & 3]);
}

void DecodePermute(Form& form) {
  form.Need("b32");
  Execute execute = Each<kPermute, uint32_t, uint32_t, uint32_t, uint32_t>;
  const auto mode = [&]<int kMode>(std::string_view name, std::integral_constant<int, kMode>) {
    if (form.Take(name)) execute = Each<PermuteBy<kMode>, uint32_t, uint32_t, uint32_t, uint32_t>;
  };
  mode("f4e", std::integral_constant<int, 0>());
  mode("b4e", std::integral_constant<int, 1>());
  mode("rc8", std::integral_constant<int, 2>());
  mode("ecl", std::integral_constant<int, 3>());
  mode("ecr", std::integral_constant<int, 4>());
  mode("rc16", std::integral_constant<int, 5>());
  const bool has_mode = execute != Each<kPermute, uint32_t, uint32_t, uint32_t, uint32_t>;
  form.Emit(execute, Type::kB32, {Type::kB32, Type::kB32, Type::kB32});
  if (!has_mode && form.operand(3).kind == ptx::Operand::Kind::kImmediate) {
    form.inst().execute = PermuteConstant;
    form.inst().mode[0] = static_cast<uint32_t>(form.decoder.Constant(form.operand(3)));
  }
}

// ---- cvta and isspacep (9.7.9.20, 9.7.9.19)

Outcome AddImmediate64(Context& context, const Inst& inst) {
  const uint64_t* from = context.Wide(inst.source[0]);
  uint64_t* to = context.MutableWide(inst.destination[0]);
  const uint64_t window = static_cast<uint64_t>(inst.immediate[0]);
  const uint32_t mask = context.mask;
#pragma GCC ivdep
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = (mask >> lane & 1) != 0 ? from[lane] + window : to[lane];
  }
  return Outcome::kNext;
}

struct AddressSpace {
  std::string_view name;
  uint64_t window;
};
constexpr AddressSpace kSpaces[] = {
    {"global", 0},
    {"shared", Machine::kSharedWindow},
    {"shared::cta", Machine::kSharedWindow},
    {"shared::cluster", Machine::kSharedWindow},
    {"local", Machine::kLocalWindow},
    {"param", Machine::kParameterWindow},
    {"param::entry", Machine::kParameterWindow},
    {"const", Machine::kConstWindow},
};

const AddressSpace& TakeSpace(Form& form) {
  for (const AddressSpace& space : kSpaces) {
    if (form.Take(space.name)) return space;
  }
  form.Refuse();
}

void DecodeConvertAddress(Form& form) {
  const bool is_to = form.Take("to");
  const AddressSpace& space = TakeSpace(form);
  form.Need("u64");
  form.Finish();
  form.decoder.ExpectOperands(2, 2);
  Inst& inst = form.inst();
  const ptx::Operand& from = form.operand(1);
  inst.destination[0] = form.Destination(form.operand(0), Type::kU64);
  inst.immediate[0] = static_cast<int64_t>(is_to ? 0 - space.window : space.window);
  if (from.kind == ptx::Operand::Kind::kSymbol) {
    const ptx::Variable* variable = form.decoder.FindVariable(from.symbol);
    if (variable != nullptr && variable->space == ptx::Space::kShared) {
      inst.immediate[0] += variable->offset + from.value;
      inst.execute = MoveSharedAddress<uint64_t>;
      return;
    }
  }
  inst.execute = AddImmediate64;
  inst.source[0] = form.Source(from, Type::kU64);
}

// mode[0] is the window's number; mode[1] is set where only the own CTA's shared memory counts.
Outcome IsInSpace(Context& context, const Inst& inst) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint64_t address = LaneValue(context, inst.source[0], lane);
    bool is_in = address >> 56 == inst.mode[0];
    if (inst.mode[1] != 0) is_in = is_in && (address >> 24 & 0xffffffff) == context.cta.rank;
    lanes |= uint32_t{is_in} << lane;
  }
  context.SetPredicate(inst.destination[0], lanes);
  return Outcome::kNext;
}

void DecodeIsSpace(Form& form) {
  const AddressSpace& space = TakeSpace(form);
  form.Finish();
  form.decoder.ExpectOperands(2, 2);
  Inst& inst = form.inst();
  inst.execute = IsInSpace;
  inst.mode[0] = static_cast<uint32_t>(space.window >> 56);
  inst.mode[1] = space.name == "shared" || space.name == "shared::cta";
  inst.destination[0] = form.decoder.PredicateDestination(form.operand(0));
  inst.source[0] = form.Source(form.operand(1), Type::kB64);
}

bool DecodeMoves(Form& form, std::string_view opcode) {
  const bool is_logic = opcode == "and" || opcode == "or" || opcode == "xor" || opcode == "not";
  if (is_logic && form.Take("pred")) {
    DecodePredicateLogic(form, opcode);
  } else if (opcode == "mov") {
    DecodeMove(form);
  } else if (opcode == "setp" || opcode == "set") {
    DecodeCompare(form, opcode == "set");
  } else if (opcode == "selp") {
    DecodeSelect(form);
  } else if (opcode == "slct") {
    DecodeSelectBySign(form);
  } else if (opcode == "prmt") {
    DecodePermute(form);
  } else if (opcode == "cvta") {
    DecodeConvertAddress(form);
  } else if (opcode == "isspacep") {
    DecodeIsSpace(form);
  } else {
    return false;
  }
  return true;
}

}  // namespace

bool DecodeScalar(Decoder& decoder, Parts parts) {
  const std::string_view opcode = parts.Next();
  Form form(decoder, parts);
  return DecodeMoves(form, opcode) || DecodeInteger(form, opcode) || DecodeFloat(form, opcode) ||
         DecodeConvert(form, opcode);
}

}  // namespace jax_fa4::emulator
