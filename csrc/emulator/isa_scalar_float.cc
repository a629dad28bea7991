// Floating-point arithmetic: PTX ISA 9.7.3 (Floating Point), 9.7.4 (Half Precision) and 9.7.5
// (Mixed Precision). What a function gives is in numerics.h; here are the forms in which PTX asks
// for it.

#include <cfenv>
#include <cmath>
#include <utility>

#include "csrc/emulator/isa_scalar.h"

namespace jax_fa4::emulator {
namespace {

// How an Inst holds the modifiers: mode[0] is the rounding, mode[1] .ftz, mode[2] .sat or .NaN,
// mode[3] .relu or the flags of min and max.
enum MinMaxFlag : uint32_t { kAbsFlag = 1, kXorsignFlag = 2 };

ArithmeticMode ArithmeticOf(const Inst& inst) {
  return {static_cast<Rounding>(inst.mode[0]), inst.mode[1] != 0, inst.mode[2] != 0};
}
HalfMode HalfModeOf(const Inst& inst) {
  return {inst.mode[1] != 0, inst.mode[2] != 0, inst.mode[3] != 0};
}
MinMaxMode MinMaxOf(const Inst& inst) {
  return {inst.mode[1] != 0,
          inst.mode[2] != 0,
          (inst.mode[3] & kAbsFlag) != 0,
          (inst.mode[3] & kXorsignFlag) != 0};
}

// ---- Lanes by the vector functions of numerics.h: kRows is 2 for f32x2, which is 64 floats side
// by side.

template <auto F, int kRows, size_t... I>
void VectorOf(Context& context, const Inst& inst, std::index_sequence<I...>) {
  const bool ftz = inst.mode[1] != 0;
  const auto run = [&](uint32_t* to) {
    for (int row = 0; row < kRows; ++row) {
      F(reinterpret_cast<float*>(to + row * kRowWords),
        reinterpret_cast<const float*>(context.Row(inst.source[I]) + row * kRowWords)...,
        ftz);
    }
  };
  uint32_t* to = context.MutableRow(inst.destination[0]);
  if (context.mask == kAllLanes) return run(to);
  alignas(8) uint32_t all[kRows * kRowWords];
  run(all);
  if constexpr (kRows == 1) {
    Blend(to, all, context.mask);
  } else {
    for (int lane = 0; lane < kLanes; ++lane) {
      if ((context.mask >> lane & 1) == 0) continue;
      to[2 * lane] = all[2 * lane];
      to[2 * lane + 1] = all[2 * lane + 1];
    }
  }
}
template <auto F, int kRows, int kOperands>
Outcome Vector(Context& context, const Inst& inst) {
  VectorOf<F, kRows>(context, inst, std::make_index_sequence<kOperands>());
  return Outcome::kNext;
}

// Both halves of f32x2, lane by lane.
template <auto F, typename... A>
uint64_t BothFloats(const Inst& inst, A... packed) {
  const float low = F(inst, std::bit_cast<float>(static_cast<uint32_t>(packed))...);
  const float high = F(inst, std::bit_cast<float>(static_cast<uint32_t>(packed >> 32))...);
  return uint64_t{std::bit_cast<uint32_t>(high)} << 32 | std::bit_cast<uint32_t>(low);
}

// ---- Halves: F(type, halves..., mode) for one of them or for a pair.

template <auto F, HalfType kType, typename... A>
uint16_t OneHalf(const Inst& inst, A... a) {
  return F(kType, a..., HalfModeOf(inst));
}
template <auto F, HalfType kType, typename... A>
uint32_t TwoHalves(const Inst& inst, A... a) {
  return PerHalf([&](auto... half) { return F(kType, half..., HalfModeOf(inst)); }, a...);
}
template <auto F, HalfType kType, typename... A>
uint16_t OneHalfExtreme(const Inst& inst, A... a) {
  return F(kType, a..., MinMaxOf(inst));
}
template <auto F, HalfType kType, typename... A>
uint32_t TwoHalvesExtreme(const Inst& inst, A... a) {
  return PerHalf([&](auto... half) { return F(kType, half..., MinMaxOf(inst)); }, a...);
}

using H = uint16_t;
using P = uint32_t;

template <auto F>
Execute ForHalf2(Type type) {
  switch (type) {
    case Type::kF16:
      return EachLane<OneHalf<F, HalfType::kF16, H, H>, H, H, H>;
    case Type::kBf16:
      return EachLane<OneHalf<F, HalfType::kBf16, H, H>, H, H, H>;
    case Type::kF16x2:
      return EachLane<TwoHalves<F, HalfType::kF16, P, P>, P, P, P>;
    default:
      return EachLane<TwoHalves<F, HalfType::kBf16, P, P>, P, P, P>;
  }
}
template <auto F>
Execute ForHalf3(Type type) {
  switch (type) {
    case Type::kF16:
      return EachLane<OneHalf<F, HalfType::kF16, H, H, H>, H, H, H, H>;
    case Type::kBf16:
      return EachLane<OneHalf<F, HalfType::kBf16, H, H, H>, H, H, H, H>;
    case Type::kF16x2:
      return EachLane<TwoHalves<F, HalfType::kF16, P, P, P>, P, P, P, P>;
    default:
      return EachLane<TwoHalves<F, HalfType::kBf16, P, P, P>, P, P, P, P>;
  }
}
template <auto F>
Execute ForHalfExtreme(Type type) {
  switch (type) {
    case Type::kF16:
      return EachLane<OneHalfExtreme<F, HalfType::kF16, H, H>, H, H, H>;
    case Type::kBf16:
      return EachLane<OneHalfExtreme<F, HalfType::kBf16, H, H>, H, H, H>;
    case Type::kF16x2:
      return EachLane<TwoHalvesExtreme<F, HalfType::kF16, P, P>, P, P, P>;
    default:
      return EachLane<TwoHalvesExtreme<F, HalfType::kBf16, P, P>, P, P, P>;
  }
}

bool IsHalf(Type type) {
  return type == Type::kF16 || type == Type::kBf16 || type == Type::kF16x2 || type == Type::kBf16x2;
}
bool IsF16(Type type) { return type == Type::kF16 || type == Type::kF16x2; }

// ---- Arithmetic of doubles, and division in other roundings, by the host's rounding mode

template <typename T, typename F, typename... A>
T Rounded(Rounding rounding, F function, A... a) {
  static constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  // The compiler knows nothing of rounding modes: volatile keeps the operation between the two
  // calls.
  const int saved = std::fegetround();
  std::fesetround(kModes[static_cast<int>(rounding)]);
  const volatile T result = [&](volatile A... operands) {
    return function(static_cast<A>(operands)...);
  }(a...);
  std::fesetround(saved);
  return result;
}

constexpr auto kPlus = [](auto a, auto b) { return a + b; };
constexpr auto kMinus = [](auto a, auto b) { return a - b; };
constexpr auto kTimes = [](auto a, auto b) { return a * b; };
constexpr auto kOver = [](auto a, auto b) { return a / b; };
constexpr auto kFused = [](auto a, auto b, auto c) { return std::fma(a, b, c); };
constexpr auto kReciprocal = [](auto a) { return 1 / a; };
constexpr auto kRoot = [](auto a) { return std::sqrt(a); };

template <auto F, typename... A>
double RoundedDouble(const Inst& inst, A... a) {
  return Rounded<double>(static_cast<Rounding>(inst.mode[0]), F, a...);
}
template <auto F, typename... A>
float RoundedFloat(const Inst& inst, A... a) {
  const bool ftz = inst.mode[1] != 0;
  const auto in = [&](float x) { return ftz ? FlushSubnormal(x) : x; };
  const float result = Rounded<float>(static_cast<Rounding>(inst.mode[0]), F, in(a)...);
  return std::isnan(result) ? CanonicalNan() : in(result);
}

// ---- add, sub, mul, fma

constexpr auto kAddFloat = [](const Inst& inst, float a, float b) {
  return Add(a, b, ArithmeticOf(inst));
};
constexpr auto kSubFloat = [](const Inst& inst, float a, float b) {
  return Sub(a, b, ArithmeticOf(inst));
};
constexpr auto kMulFloat = [](const Inst& inst, float a, float b) {
  return Mul(a, b, ArithmeticOf(inst));
};
constexpr auto kFmaFloat = [](const Inst& inst, float a, float b, float c) {
  return Fma(a, b, c, ArithmeticOf(inst));
};

// One operation in all of its forms.
struct Add2 {
  static constexpr auto kFloat = kAddFloat;
  static constexpr auto kHost = kPlus;
  static constexpr auto kVector = &Add32;
  static constexpr auto kHalf = &HalfAdd;
};
struct Sub2 {
  static constexpr auto kFloat = kSubFloat;
  static constexpr auto kHost = kMinus;
  static constexpr auto kVector = &Sub32;
  static constexpr auto kHalf = &HalfSub;
};
struct Mul2 {
  static constexpr auto kFloat = kMulFloat;
  static constexpr auto kHost = kTimes;
  static constexpr auto kVector = &Mul32;
  static constexpr auto kHalf = &HalfMul;
};

// add.f32.bf16 d, a, c: only the first operand is a half.
template <auto F, HalfType kType>
float MixedBinary(const Inst& inst, uint16_t a, float b) {
  return F(inst, HalfToFloat(kType, a), b);
}
template <HalfType kType>
float MixedFma(const Inst& inst, uint16_t a, uint16_t b, float c) {
  return kFmaFloat(inst, HalfToFloat(kType, a), HalfToFloat(kType, b), c);
}

// The same to nearest without .sat, of bf16, as vector code.
constexpr auto kMixedFmaNearest = [](uint32_t a, uint32_t b, float c) {
  const float result =
      __builtin_fmaf(std::bit_cast<float>(a << 16), std::bit_cast<float>(b << 16), c);
  const uint32_t bits = std::bit_cast<uint32_t>(result);
  return (bits & 0x7fffffff) > 0x7f800000 ? kCanonicalNanBits : bits;
};

struct Modifiers {
  Rounding rounding = Rounding::kNearestEven;
  bool is_rounded = false;
  bool ftz = false, sat = false, relu = false;
  Type type = Type::kNone;

  bool IsPlain() const { return rounding == Rounding::kNearestEven && !sat; }
};

Modifiers TakeModifiers(Form& form, bool may_relu) {
  Modifiers m;
  m.is_rounded = form.TakeRounding(&m.rounding);
  m.ftz = form.Take("ftz");
  m.sat = form.Take("sat");
  m.relu = may_relu && form.Take("relu");
  m.type = form.TakeType(
      {Type::kF32, Type::kF32x2, Type::kF64, Type::kF16, Type::kF16x2, Type::kBf16, Type::kBf16x2});
  const auto refuse = [&](const char* what) {
    form.decoder.Fail(std::string("\".") + what + "\" is not supported with this type.");
  };
  if (m.ftz && (m.type == Type::kF64 || m.type == Type::kBf16 || m.type == Type::kBf16x2))
    refuse("ftz");
  if (m.sat && m.type != Type::kF32 && !IsF16(m.type)) refuse("sat");
  if (m.relu && !IsHalf(m.type)) refuse("relu");
  if (IsHalf(m.type) && m.rounding != Rounding::kNearestEven) refuse("rz, .rm or .rp");
  form.inst().mode[0] = static_cast<uint32_t>(m.rounding);
  form.inst().mode[1] = m.ftz;
  form.inst().mode[2] = m.sat;
  form.inst().mode[3] = m.relu;
  return m;
}

// The type of the half operands of a mixed-precision instruction, or kNone.
Type TakeMixed(Form& form, const Modifiers& m) {
  if (m.type != Type::kF32 || (!form.parts.Is("f16") && !form.parts.Is("bf16"))) return Type::kNone;
  if (m.ftz) form.decoder.Fail("\".ftz\" is not supported in mixed precision.");
  return form.TakeType({Type::kF16, Type::kBf16});
}

template <typename Operation>
void DecodeBinary(Form& form, bool may_mix) {
  const Modifiers m = TakeModifiers(form, false);
  const Type mixed = may_mix ? TakeMixed(form, m) : Type::kNone;
  if (mixed != Type::kNone) {
    return form.Emit(
        mixed == Type::kF16
            ? EachLane<MixedBinary<Operation::kFloat, HalfType::kF16>, float, uint16_t, float>
            : EachLane<MixedBinary<Operation::kFloat, HalfType::kBf16>, float, uint16_t, float>,
        m.type,
        {mixed, Type::kF32});
  }
  Execute execute = nullptr;
  const bool is_add_down =
      std::is_same_v<Operation, Add2> && m.rounding == Rounding::kDown && !m.sat;
  switch (m.type) {
    case Type::kF32:
      execute = m.IsPlain()   ? Vector<Operation::kVector, 1, 2>
                : is_add_down ? Vector<&AddDown32, 1, 2>
                              : EachLane<Operation::kFloat, float, float, float>;
      break;
    case Type::kF32x2:
      execute = m.IsPlain()   ? Vector<Operation::kVector, 2, 2>
                : is_add_down ? Vector<&AddDown32, 2, 2>
                              : EachLane<BothFloats<Operation::kFloat, uint64_t, uint64_t>,
                                         uint64_t,
                                         uint64_t,
                                         uint64_t>;
      break;
    case Type::kF64:
      execute =
          m.IsPlain()
              ? Each<Operation::kHost, double, double, double>
              : EachLane<RoundedDouble<Operation::kHost, double, double>, double, double, double>;
      break;
    default:
      execute = ForHalf2<Operation::kHalf>(m.type);
  }
  form.Emit(execute, m.type, {m.type, m.type});
}

}  // namespace

void DecodeFloatAdd(Form& form, std::string_view opcode) {
  if (opcode == "add")
    DecodeBinary<Add2>(form, true);
  else if (opcode == "sub")
    DecodeBinary<Sub2>(form, true);
  else
    DecodeBinary<Mul2>(form, false);
}

void DecodeFloatFma(Form& form, bool is_mad) {
  const Modifiers m = TakeModifiers(form, !is_mad);
  // From sm_20 on, mad of floats is fma; without a rounding it was another operation.
  if (!m.is_rounded) form.decoder.Fail("it needs a rounding.");
  if (is_mad && m.type != Type::kF32 && m.type != Type::kF64)
    form.decoder.Fail("its type is not supported.");
  const Type mixed = is_mad ? Type::kNone : TakeMixed(form, m);
  if (mixed != Type::kNone) {
    return form.Emit(
        mixed == Type::kF16 ? EachLane<MixedFma<HalfType::kF16>, float, uint16_t, uint16_t, float>
        : m.IsPlain()       ? Each<kMixedFmaNearest, uint32_t, uint32_t, uint32_t, float>
                            : EachLane<MixedFma<HalfType::kBf16>, float, uint16_t, uint16_t, float>,
        m.type,
        {mixed, mixed, Type::kF32});
  }
  Execute execute = nullptr;
  switch (m.type) {
    case Type::kF32:
      execute =
          m.IsPlain() ? Vector<&Fma32, 1, 3> : EachLane<kFmaFloat, float, float, float, float>;
      break;
    case Type::kF32x2:
      execute = m.IsPlain() ? Vector<&Fma32, 2, 3>
                            : EachLane<BothFloats<kFmaFloat, uint64_t, uint64_t, uint64_t>,
                                       uint64_t,
                                       uint64_t,
                                       uint64_t,
                                       uint64_t>;
      break;
    case Type::kF64:
      execute = m.IsPlain() ? Each<kFused, double, double, double, double>
                            : EachLane<RoundedDouble<kFused, double, double, double>,
                                       double,
                                       double,
                                       double,
                                       double>;
      break;
    default:
      execute = ForHalf3<&HalfFma>(m.type);
  }
  form.Emit(execute, m.type, {m.type, m.type, m.type});
}

// ---- Division and roots

namespace {

constexpr auto kDivApprox = [](const Inst& inst, float a, float b) {
  return DivApprox(a, b, inst.mode[1] != 0);
};
constexpr auto kDivFull = [](const Inst& inst, float a, float b) {
  return DivFull(a, b, inst.mode[1] != 0);
};
constexpr auto kDivNearest = [](const Inst& inst, float a, float b) {
  return DivRn(a, b, inst.mode[1] != 0);
};

}  // namespace

void DecodeFloatDivide(Form& form) {
  const bool approximates = form.Take("approx");
  const bool is_full = !approximates && form.Take("full");
  Rounding rounding = Rounding::kNearestEven;
  if (!approximates && !is_full && !form.TakeRounding(&rounding)) form.Refuse();
  const bool ftz = form.Take("ftz");
  const Type type = approximates || is_full || ftz ? form.TakeType({Type::kF32})
                                                   : form.TakeType({Type::kF32, Type::kF64});
  form.inst().mode[0] = static_cast<uint32_t>(rounding);
  form.inst().mode[1] = ftz;
  Execute execute = nullptr;
  if (type == Type::kF64) {
    execute = rounding == Rounding::kNearestEven
                  ? Each<kOver, double, double, double>
                  : EachLane<RoundedDouble<kOver, double, double>, double, double, double>;
  } else {
    execute = approximates ? EachLane<kDivApprox, float, float, float>
              : is_full    ? EachLane<kDivFull, float, float, float>
              : rounding == Rounding::kNearestEven
                  ? EachLane<kDivNearest, float, float, float>
                  : EachLane<RoundedFloat<kOver, float, float>, float, float, float>;
  }
  form.Emit(execute, type, {type, type});
}

// ---- abs, neg, min, max

namespace {

template <uint64_t kAnd, uint64_t kXor>
constexpr auto kBits =
    [](auto a) { return (a & static_cast<decltype(a)>(kAnd)) ^ static_cast<decltype(a)>(kXor); };

// `.ftz` applies to every half of 16 bits, or to one of 32.
template <auto F>
constexpr auto kFlushed =
    [](uint32_t a) { return F(std::bit_cast<uint32_t>(FlushSubnormal(std::bit_cast<float>(a)))); };
template <auto F>
constexpr auto kFlushedHalves = [](uint32_t a) {
  const uint32_t low = (a & 0x7c00) == 0 ? a & 0x8000 : a & 0xffff;
  const uint32_t high = (a & 0x7c000000) == 0 ? a & 0x80000000 : a & 0xffff0000;
  return F(low | high);
};

template <bool kMax>
double ExtremeDouble(const Inst&, double a, double b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  // -0 is below +0.
  if (a == b) return std::signbit(a) == kMax ? b : a;
  return (a < b) == kMax ? b : a;
}

constexpr auto kMaxFloat = [](const Inst& inst, float a, float b) {
  return Max(a, b, MinMaxOf(inst));
};
constexpr auto kMinFloat = [](const Inst& inst, float a, float b) {
  return Min(a, b, MinMaxOf(inst));
};
constexpr auto kMax3Float = [](const Inst& inst, float a, float b, float c) {
  return Max3(a, b, c, MinMaxOf(inst));
};
constexpr auto kMin3Float = [](const Inst& inst, float a, float b, float c) {
  return Min3(a, b, c, MinMaxOf(inst));
};

}  // namespace

void DecodeFloatSign(Form& form, std::string_view opcode) {
  const bool ftz = form.Take("ftz");
  const Type type =
      ftz ? form.TakeType({Type::kF32, Type::kF16, Type::kF16x2})
          : form.TakeType(
                {Type::kF32, Type::kF64, Type::kF16, Type::kF16x2, Type::kBf16, Type::kBf16x2});
  const bool is_abs = opcode == "abs";
  constexpr uint64_t kSign32 = 0x80000000, kSign16 = 0x8000, kSigns = 0x80008000;
  constexpr uint64_t kSign64 = uint64_t{1} << 63;
  constexpr auto kAbs32 = kBits<~kSign32, 0>;
  constexpr auto kAbs16 = kBits<~kSign16, 0>;
  constexpr auto kAbsBoth = kBits<~kSigns, 0>;
  constexpr auto kNeg32 = kBits<~uint64_t{0}, kSign32>;
  constexpr auto kNeg16 = kBits<~uint64_t{0}, kSign16>;
  constexpr auto kNegBoth = kBits<~uint64_t{0}, kSigns>;
  Execute execute = nullptr;
  switch (type) {
    case Type::kF32:
      execute = is_abs ? (ftz ? Each<kFlushed<kAbs32>, P, P> : Each<kAbs32, P, P>)
                       : (ftz ? Each<kFlushed<kNeg32>, P, P> : Each<kNeg32, P, P>);
      break;
    case Type::kF64:
      execute = is_abs ? Each<kBits<~kSign64, 0>, uint64_t, uint64_t>
                       : Each<kBits<~uint64_t{0}, kSign64>, uint64_t, uint64_t>;
      break;
    case Type::kF16:
    case Type::kBf16:
      execute = is_abs ? (ftz ? Each<kFlushedHalves<kAbs16>, P, P> : Each<kAbs16, P, P>)
                       : (ftz ? Each<kFlushedHalves<kNeg16>, P, P> : Each<kNeg16, P, P>);
      break;
    default:
      execute = is_abs ? (ftz ? Each<kFlushedHalves<kAbsBoth>, P, P> : Each<kAbsBoth, P, P>)
                       : (ftz ? Each<kFlushedHalves<kNegBoth>, P, P> : Each<kNegBoth, P, P>);
  }
  form.Emit(execute, type, {type});
}

void DecodeFloatMinMax(Form& form, bool is_max) {
  const bool ftz = form.Take("ftz");
  const bool nan = form.Take("NaN");
  const bool abs = form.Take("abs");
  bool xorsign = false;
  if (form.Take("xorsign")) {
    form.Need("abs");
    xorsign = true;
  }
  const Type type =
      form.TakeType({Type::kF32, Type::kF64, Type::kF16, Type::kF16x2, Type::kBf16, Type::kBf16x2});
  Inst& inst = form.inst();
  inst.mode[1] = ftz;
  inst.mode[2] = nan;
  inst.mode[3] = (abs ? uint32_t{kAbsFlag} : 0) | (xorsign ? uint32_t{kXorsignFlag} : 0);
  if (ftz && type != Type::kF32 && !IsF16(type))
    form.decoder.Fail("\".ftz\" is not supported with this type.");
  if (type == Type::kF64) {
    if (nan || abs || xorsign) form.decoder.Fail("its modifiers are not supported with this type.");
    return form.Emit(is_max ? EachLane<ExtremeDouble<true>, double, double, double>
                            : EachLane<ExtremeDouble<false>, double, double, double>,
                     type,
                     {type, type});
  }
  const bool is_three = form.decoder.operand_count() == 4;
  if (is_three && (type != Type::kF32 || xorsign)) form.decoder.Fail("it takes two operands.");
  if (!is_three && abs) form.decoder.Fail("\".abs\" needs three operands.");
  if (type != Type::kF32) {
    return form.Emit(is_max ? ForHalfExtreme<&HalfMax>(type) : ForHalfExtreme<&HalfMin>(type),
                     type,
                     {type, type});
  }
  const bool is_plain = !nan && !abs && !xorsign;
  if (is_three) {
    return form.Emit(is_max ? (is_plain ? Vector<&Max3x32, 1, 3>
                                        : EachLane<kMax3Float, float, float, float, float>)
                            : EachLane<kMin3Float, float, float, float, float>,
                     type,
                     {type, type, type});
  }
  form.Emit(is_max ? (is_plain ? Vector<&Max32, 1, 2> : EachLane<kMaxFloat, float, float, float>)
                   : (is_plain ? Vector<&Min32, 1, 2> : EachLane<kMinFloat, float, float, float>),
            type,
            {type, type});
}

// ---- Functions of one operand

namespace {

template <auto F>
constexpr auto kFunction = [](const Inst& inst, float x) { return F(x, inst.mode[1] != 0); };
constexpr auto kTanh = [](const Inst&, float x) { return TanhApprox(x); };

// ex2.approx.ftz.f32 has a vector function, which takes no flag.
constexpr auto kEx2Vector = [](float* to, const float* from, bool) { Ex2Approx32(to, from); };

template <HalfType kType>
uint16_t Ex2Half(const Inst& inst, uint16_t x) {
  return HalfEx2Approx(kType, x, inst.mode[1] != 0);
}
template <HalfType kType>
uint32_t Ex2Halves(const Inst& inst, uint32_t x) {
  return PerHalf([&](uint16_t half) { return Ex2Half<kType>(inst, half); }, x);
}
template <HalfType kType>
uint16_t TanhHalf(const Inst&, uint16_t x) {
  return HalfTanhApprox(kType, x);
}
template <HalfType kType>
uint32_t TanhHalves(const Inst&, uint32_t x) {
  return PerHalf([](uint16_t half) { return HalfTanhApprox(kType, half); }, x);
}

// The approximations in f64 (9.7.3.14, 9.7.3.18) work on the upper word of their operand, and give
// an upper word.
double UpperWord(double x) {
  return std::bit_cast<double>(std::bit_cast<uint64_t>(x) & 0xffffffff00000000);
}
double FlushDouble(double x) { return std::fabs(x) < 0x1p-1022 ? std::copysign(0.0, x) : x; }
double RcpDoubleApprox(const Inst&, double x) {
  return UpperWord(FlushDouble(1 / UpperWord(FlushDouble(x))));
}
double RsqrtDoubleApprox(const Inst& inst, double x) {
  if (inst.mode[1] == 0) return 1 / std::sqrt(x);
  return UpperWord(1 / std::sqrt(UpperWord(FlushDouble(x))));
}

void DecodeRoot(Form& form, std::string_view opcode) {
  const bool is_sqrt = opcode == "sqrt";
  Rounding rounding = Rounding::kNearestEven;
  const bool approximates = form.Take("approx");
  if (!approximates && !form.TakeRounding(&rounding)) form.Refuse();
  const bool ftz = form.Take("ftz");
  const Type type = form.TakeType({Type::kF32, Type::kF64});
  form.inst().mode[0] = static_cast<uint32_t>(rounding);
  form.inst().mode[1] = ftz;
  Execute execute = nullptr;
  if (type == Type::kF64) {
    if (approximates != ftz || (approximates && is_sqrt))
      form.decoder.Fail("its modifiers are not supported.");
    execute = approximates ? EachLane<RcpDoubleApprox, double, double>
              : is_sqrt    ? EachLane<RoundedDouble<kRoot, double>, double, double>
                           : EachLane<RoundedDouble<kReciprocal, double>, double, double>;
  } else if (approximates) {
    execute = is_sqrt ? EachLane<kFunction<&SqrtApprox>, float, float>
                      : EachLane<kFunction<&RcpApprox>, float, float>;
  } else if (rounding == Rounding::kNearestEven) {
    execute = is_sqrt ? EachLane<kFunction<&SqrtRn>, float, float>
                      : EachLane<kFunction<&RcpRn>, float, float>;
  } else {
    execute = is_sqrt ? EachLane<RoundedFloat<kRoot, float>, float, float>
                      : EachLane<RoundedFloat<kReciprocal, float>, float, float>;
  }
  form.Emit(execute, type, {type});
}

void DecodeRsqrt(Form& form) {
  form.Need("approx");
  const bool ftz = form.Take("ftz");
  const Type type = form.TakeType({Type::kF32, Type::kF64});
  form.inst().mode[1] = ftz;
  form.Emit(type == Type::kF32 ? EachLane<kFunction<&RsqrtApprox>, float, float>
                               : EachLane<RsqrtDoubleApprox, double, double>,
            type,
            {type});
}

void DecodeEx2(Form& form) {
  form.Need("approx");
  const bool ftz = form.Take("ftz");
  const Type type =
      form.TakeType({Type::kF32, Type::kF16, Type::kF16x2, Type::kBf16, Type::kBf16x2});
  const bool is_bf16 = type == Type::kBf16 || type == Type::kBf16x2;
  if (is_bf16 != ftz && type != Type::kF32) {
    form.decoder.Fail(ftz ? "\".ftz\" is not supported with this type."
                          : "this type needs \".ftz\".");
  }
  form.inst().mode[1] = ftz;
  Execute execute = nullptr;
  switch (type) {
    case Type::kF32:
      execute = ftz ? Vector<kEx2Vector, 1, 1> : EachLane<kFunction<&Ex2Approx>, float, float>;
      break;
    case Type::kF16:
      execute = EachLane<Ex2Half<HalfType::kF16>, H, H>;
      break;
    case Type::kBf16:
      execute = EachLane<Ex2Half<HalfType::kBf16>, H, H>;
      break;
    case Type::kF16x2:
      execute = EachLane<Ex2Halves<HalfType::kF16>, P, P>;
      break;
    default:
      execute = EachLane<Ex2Halves<HalfType::kBf16>, P, P>;
  }
  form.Emit(execute, type, {type});
}

void DecodeTanh(Form& form) {
  form.Need("approx");
  const Type type =
      form.TakeType({Type::kF32, Type::kF16, Type::kF16x2, Type::kBf16, Type::kBf16x2});
  Execute execute = nullptr;
  switch (type) {
    case Type::kF32:
      execute = EachLane<kTanh, float, float>;
      break;
    case Type::kF16:
      execute = EachLane<TanhHalf<HalfType::kF16>, H, H>;
      break;
    case Type::kBf16:
      execute = EachLane<TanhHalf<HalfType::kBf16>, H, H>;
      break;
    case Type::kF16x2:
      execute = EachLane<TanhHalves<HalfType::kF16>, P, P>;
      break;
    default:
      execute = EachLane<TanhHalves<HalfType::kBf16>, P, P>;
  }
  form.Emit(execute, type, {type});
}

template <auto F>
void DecodeApproximation(Form& form) {
  form.Need("approx");
  form.inst().mode[1] = form.Take("ftz");
  const Type type = form.TakeType({Type::kF32});
  form.Emit(EachLane<kFunction<F>, float, float>, type, {type});
}

// ---- copysign and testp (9.7.3.1, 9.7.3.2)

constexpr auto kCopySign32 = [](uint32_t a, uint32_t b) {
  return (a & 0x80000000) | (b & 0x7fffffff);
};
constexpr auto kCopySign64 = [](uint64_t a, uint64_t b) {
  constexpr uint64_t kSign = uint64_t{1} << 63;
  return (a & kSign) | (b & ~kSign);
};

enum class Property : uint32_t { kFinite, kInfinite, kNumber, kNotANumber, kNormal, kSubnormal };

template <typename T>
Outcome TestProperty(Context& context, const Inst& inst) {
  const Word<T>* from = SourceRow<T>(context, inst.source[0]);
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const T x = Unpack<T>(from[lane]);
    bool holds = false;
    switch (static_cast<Property>(inst.mode[0])) {
      case Property::kFinite:
        holds = std::isfinite(x);
        break;
      case Property::kInfinite:
        holds = std::isinf(x);
        break;
      case Property::kNumber:
        holds = !std::isnan(x);
        break;
      case Property::kNotANumber:
        holds = std::isnan(x);
        break;
      case Property::kNormal:
        holds = std::isnormal(x);
        break;
      case Property::kSubnormal:
        holds = std::fpclassify(x) == FP_SUBNORMAL;
        break;
    }
    lanes |= uint32_t{holds} << lane;
  }
  context.SetPredicate(inst.destination[0], lanes);
  return Outcome::kNext;
}

void DecodeTestProperty(Form& form) {
  static constexpr std::string_view kNames[] = {
      "finite", "infinite", "number", "notanumber", "normal", "subnormal"};
  uint32_t property = 0;
  while (property < std::size(kNames) && !form.Take(kNames[property])) ++property;
  if (property == std::size(kNames)) form.Refuse();
  const Type type = form.TakeType({Type::kF32, Type::kF64});
  form.Finish();
  form.decoder.ExpectOperands(2, 2);
  Inst& inst = form.inst();
  inst.execute = type == Type::kF32 ? TestProperty<float> : TestProperty<double>;
  inst.mode[0] = property;
  inst.destination[0] = form.decoder.PredicateDestination(form.operand(0));
  inst.source[0] = form.Source(form.operand(1), type);
}

}  // namespace

bool DecodeFloat(Form& form, std::string_view opcode) {
  if (opcode == "fma") {
    DecodeFloatFma(form, false);
  } else if (opcode == "rcp" || opcode == "sqrt") {
    DecodeRoot(form, opcode);
  } else if (opcode == "rsqrt") {
    DecodeRsqrt(form);
  } else if (opcode == "ex2") {
    DecodeEx2(form);
  } else if (opcode == "tanh") {
    DecodeTanh(form);
  } else if (opcode == "lg2") {
    DecodeApproximation<&Lg2Approx>(form);
  } else if (opcode == "sin") {
    DecodeApproximation<&SinApprox>(form);
  } else if (opcode == "cos") {
    DecodeApproximation<&CosApprox>(form);
  } else if (opcode == "copysign") {
    const Type type = form.TakeType({Type::kF32, Type::kF64});
    form.Emit(type == Type::kF32 ? Each<kCopySign32, uint32_t, uint32_t, uint32_t>
                                 : Each<kCopySign64, uint64_t, uint64_t, uint64_t>,
              type,
              {type, type});
  } else if (opcode == "testp") {
    DecodeTestProperty(form);
  } else {
    return false;
  }
  return true;
}

}  // namespace jax_fa4::emulator
