// cvt: PTX ISA 9.7.9.21 (cvt) and 9.7.9.22 (cvt.pack).

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "csrc/emulator/isa_scalar.h"

namespace jax_fa4::emulator {
namespace {

// Roundings of cvt: to the destination's precision, to an integer, or away from zero on ties.
enum class Round : uint32_t { kNone, kEven, kZero, kDown, kUp, kAway };

// What stands behind the dots besides the types.
struct Flags {
  Round to_float = Round::kNone;    // .rn .rz .rm .rp .rna
  Round to_integer = Round::kNone;  // .rni .rzi .rmi .rpi
  bool ftz = false, sat = false, relu = false, satfinite = false;
};

// An Inst of the general form: mode[0] is the destination's type, mode[1] the source's, mode[2] the
// rounding, mode[3] flags.
enum : uint32_t { kFtz = 1, kSat = 2, kToIntegral = 4 };

// ---- Rounding to any format

// Exact for every number of 64 bits, which double is not.
using Real = long double;

struct Format {
  int precision;  // significant bits, with the hidden one
  int least_exponent;
  int most_exponent;
};
constexpr Format kSingle = {24, -126, 127}, kDoubleFormat = {53, -1022, 1023},
                 kHalf = {11, -14, 15};
constexpr Format kBrain = {8, -126, 127};

Real RoundIntegral(Real x, Round round) {
  switch (round) {
    case Round::kZero:
      return std::trunc(x);
    case Round::kDown:
      return std::floor(x);
    case Round::kUp:
      return std::ceil(x);
    case Round::kAway:
      return std::round(x);
    default: {
      // The host's x87 rounds to nearest even, always: nobody sets its mode.
      return std::nearbyint(x);
    }
  }
}

// x, finite, in the format; what is beyond it overflows as IEEE 754 has it.
Real RoundTo(Real x, Format format, Round round) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), format.least_exponent);
  const int shift = format.precision - 1 - exponent;
  Real result = std::ldexp(RoundIntegral(std::ldexp(x, shift), round), -shift);
  if (result == 0) return std::copysign(Real{0}, x);
  const Real most = std::ldexp(2 - std::ldexp(Real{1}, 1 - format.precision), format.most_exponent);
  if (std::fabs(result) <= most) return result;
  const bool to_most =
      round == Round::kZero || (round == Round::kDown && x > 0) || (round == Round::kUp && x < 0);
  return std::copysign(to_most ? most : std::numeric_limits<Real>::infinity(), x);
}

// ---- The general form, lane by lane

// An integer of the type as 64 bits, by its sign.
uint64_t ExtendInteger(Type type, uint64_t bits) {
  switch (type) {
    case Type::kS8:
      return static_cast<uint64_t>(int64_t{static_cast<int8_t>(bits)});
    case Type::kS16:
      return static_cast<uint64_t>(int64_t{static_cast<int16_t>(bits)});
    case Type::kS32:
      return static_cast<uint64_t>(int64_t{static_cast<int32_t>(bits)});
    case Type::kU8:
      return static_cast<uint8_t>(bits);
    case Type::kU16:
      return static_cast<uint16_t>(bits);
    case Type::kU32:
      return static_cast<uint32_t>(bits);
    default:
      return bits;
  }
}

Real ToReal(Type type, uint64_t bits) {
  switch (type) {
    case Type::kF64:
      return std::bit_cast<double>(bits);
    case Type::kF32:
      return std::bit_cast<float>(static_cast<uint32_t>(bits));
    case Type::kF16:
      return HalfToFloat(HalfType::kF16, static_cast<uint16_t>(bits));
    case Type::kBf16:
      return HalfToFloat(HalfType::kBf16, static_cast<uint16_t>(bits));
    default: {
      const uint64_t integer = ExtendInteger(type, bits);
      return IsSigned(type) ? Real(static_cast<int64_t>(integer)) : Real(integer);
    }
  }
}

bool IsReal(Type type) {
  return type == Type::kF64 || type == Type::kF32 || type == Type::kF16 || type == Type::kBf16;
}

Format FormatOf(Type type) {
  return type == Type::kF64   ? kDoubleFormat
         : type == Type::kF32 ? kSingle
         : type == Type::kF16 ? kHalf
                              : kBrain;
}

uint64_t FromReal(Type type, Real x) {
  switch (type) {
    case Type::kF64:
      return std::bit_cast<uint64_t>(static_cast<double>(x));
    case Type::kF32:
      return std::bit_cast<uint32_t>(std::isnan(x) ? CanonicalNan() : static_cast<float>(x));
    default:
      if (std::isnan(x)) return kCanonicalHalfNan;
      return FloatToHalf(type == Type::kF16 ? HalfType::kF16 : HalfType::kBf16,
                         static_cast<float>(x));
  }
}

// Numbers beyond the type's range become its nearest; NaN becomes 0, except where a 64-bit type
// takes part: there it is the one whose upper bit alone is set.
uint64_t RealToInteger(Type type, Type source, Real x) {
  const int bits = BitsOf(type);
  if (std::isnan(x)) return bits == 64 || source == Type::kF64 ? uint64_t{1} << (bits - 1) : 0;
  const Real limit = std::ldexp(Real{1}, IsSigned(type) ? bits - 1 : bits);
  if (IsSigned(type)) {
    if (x >= limit) return (uint64_t{1} << (bits - 1)) - 1;
    if (x < -limit) return uint64_t{1} << (bits - 1);
    return static_cast<uint64_t>(static_cast<int64_t>(x));
  }
  if (x <= 0) return 0;
  if (x >= limit) return bits == 64 ? UINT64_MAX : (uint64_t{1} << bits) - 1;
  return static_cast<uint64_t>(x);
}

uint64_t SaturateInteger(Type type, Type source, uint64_t value) {
  const int bits = BitsOf(type);
  const bool negative = IsSigned(source) && static_cast<int64_t>(value) < 0;
  if (!IsSigned(type)) {
    if (negative) return 0;
    const uint64_t most = bits == 64 ? UINT64_MAX : (uint64_t{1} << bits) - 1;
    return std::min(value, most);
  }
  const int64_t most = static_cast<int64_t>((uint64_t{1} << (bits - 1)) - 1);
  if (negative) return static_cast<uint64_t>(std::max(static_cast<int64_t>(value), -most - 1));
  return std::min(value, static_cast<uint64_t>(most));
}

float FlushIf(bool ftz, Type type, Real x) {
  return ftz && type == Type::kF32 ? FlushSubnormal(static_cast<float>(x)) : static_cast<float>(x);
}

uint64_t ConvertLane(const Inst& inst, uint64_t bits) {
  const auto to = static_cast<Type>(inst.mode[0]), from = static_cast<Type>(inst.mode[1]);
  const auto round = static_cast<Round>(inst.mode[2]);
  const bool ftz = (inst.mode[3] & kFtz) != 0, sat = (inst.mode[3] & kSat) != 0;
  if (!IsReal(to) && !IsReal(from)) {
    const uint64_t value = ExtendInteger(from, bits);
    return ExtendInteger(to, sat ? SaturateInteger(to, from, value) : value);
  }
  Real x = ToReal(from, bits);
  if (from == Type::kF32 && ftz) x = FlushIf(true, from, x);
  if (!IsReal(to)) return ExtendInteger(to, RealToInteger(to, from, RoundIntegral(x, round)));
  if ((inst.mode[3] & kToIntegral) != 0)
    x = std::isfinite(x) ? std::copysign(RoundIntegral(x, round), x) : x;
  x = RoundTo(x, FormatOf(to), (inst.mode[3] & kToIntegral) != 0 ? Round::kEven : round);
  if (to == Type::kF32 && ftz && std::isfinite(x)) x = FlushIf(true, to, x);
  if (sat) x = x > 0 ? std::min<Real>(x, 1) : 0;  // NaN gives 0
  return FromReal(to, x);
}

// Registers may be wider than the types: what is above a source is ignored, and results are
// extended.
Outcome Convert(Context& context, const Inst& inst) {
  for (uint32_t rest = context.mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    SetLaneValue(context,
                 inst.destination[0],
                 lane,
                 ConvertLane(inst, LaneValue(context, inst.source[0], lane)));
  }
  return Outcome::kNext;
}

// Between integers without saturation, as vector code. Mode[0] is the mask of the destination's
// register where that is a word.
template <typename To, typename From, typename ToWord, typename FromWord>
Outcome ConvertInteger(Context& context, const Inst& inst) {
  const auto* from = reinterpret_cast<const FromWord*>(context.Row(inst.source[0]));
  auto* to = reinterpret_cast<ToWord*>(context.MutableRow(inst.destination[0]));
  const auto mask = static_cast<ToWord>(sizeof(ToWord) == 8 ? ~uint64_t{0} : inst.mode[0]);
  ToWord all[kLanes];
  // The type's extension to the word: of the sign, where it has one.
  using Extended = std::conditional_t<std::is_signed_v<To>, std::make_signed_t<ToWord>, ToWord>;
#pragma GCC ivdep
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto value = static_cast<To>(static_cast<From>(from[lane]));
    all[lane] = static_cast<ToWord>(static_cast<Extended>(value)) & mask;
  }
  Blend(to, all, context.mask);
  return Outcome::kNext;
}

template <typename Function>
Execute ForSmallInteger(Type type, Function function) {
  if (type == Type::kU8) return function(uint8_t());
  if (type == Type::kS8) return function(int8_t());
  return ForInteger(type, function);
}

Execute IntegerExecute(Type to, Type from, bool wide_to, bool wide_from) {
  return ForSmallInteger(to, [&](auto t) -> Execute {
    return ForSmallInteger(from, [&](auto f) -> Execute {
      using To = decltype(t);
      using From = decltype(f);
      // A type never is wider than its register.
      if constexpr (sizeof(To) == 8 && sizeof(From) == 8) {
        return ConvertInteger<To, From, uint64_t, uint64_t>;
      } else if constexpr (sizeof(To) == 8) {
        return wide_from ? ConvertInteger<To, From, uint64_t, uint64_t>
                         : ConvertInteger<To, From, uint64_t, uint32_t>;
      } else if constexpr (sizeof(From) == 8) {
        return wide_to ? ConvertInteger<To, From, uint64_t, uint64_t>
                       : ConvertInteger<To, From, uint32_t, uint64_t>;
      } else {
        if (wide_to || wide_from) return nullptr;
        return ConvertInteger<To, From, uint32_t, uint32_t>;
      }
    });
  });
}

// From f32 to an integer, or to an integer in f32, as vector code. Doubles hold all integers of 32
// bits.
template <Round kRound>
float RoundSingle(float x) {
  if constexpr (kRound == Round::kZero)
    return __builtin_truncf(x);
  else if constexpr (kRound == Round::kDown)
    return __builtin_floorf(x);
  else if constexpr (kRound == Round::kUp)
    return __builtin_ceilf(x);
  else
    return __builtin_rintf(x);
}
template <Round kRound>
int32_t SingleToSigned(float x) {
  const double rounded = RoundSingle<kRound>(x);
  const double low = rounded < -2147483648.0 ? -2147483648.0 : rounded;
  const double clamped = low > 2147483647.0 ? 2147483647.0 : low;
  return static_cast<int32_t>(x == x ? clamped : 0.0);
}
template <Round kRound>
uint32_t SingleToUnsigned(float x) {
  const double rounded = RoundSingle<kRound>(x);
  const double low = rounded < 0.0 ? 0.0 : rounded;
  const double clamped = low > 4294967295.0 ? 4294967295.0 : low;
  // There is a vector instruction for signed numbers only.
  const double shifted = (x == x ? clamped : 0.0) - 2147483648.0;
  return static_cast<uint32_t>(static_cast<int32_t>(shifted)) ^ 0x80000000;
}
template <Round kRound>
float SingleToIntegral(float x) {
  return x == x ? RoundSingle<kRound>(x) : CanonicalNan();
}

template <Round kRound>
Execute SingleExecute(Type to) {
  switch (to) {
    case Type::kS32:
      return Each<SingleToSigned<kRound>, int32_t, float>;
    case Type::kU32:
      return Each<SingleToUnsigned<kRound>, uint32_t, float>;
    case Type::kF32:
      return Each<SingleToIntegral<kRound>, float, float>;
    default:
      return nullptr;
  }
}
Execute SingleExecute(Type to, Round round) {
  switch (round) {
    case Round::kEven:
      return SingleExecute<Round::kEven>(to);
    case Round::kZero:
      return SingleExecute<Round::kZero>(to);
    case Round::kDown:
      return SingleExecute<Round::kDown>(to);
    case Round::kUp:
      return SingleExecute<Round::kUp>(to);
    default:
      return nullptr;
  }
}

constexpr auto kToSingle = [](auto x) { return static_cast<float>(x); };

// ---- Halves, pairs of them, and formats of 19, 8, 6 and 4 bits

ConvertMode ConvertModeOf(const Flags& flags) {
  return {flags.to_float == Round::kZero ? Rounding::kTowardZero : Rounding::kNearestEven,
          flags.relu,
          flags.satfinite};
}
ConvertMode ConvertModeOf(const Inst& inst) {
  return {static_cast<Rounding>(inst.mode[0]), inst.mode[1] != 0, inst.mode[2] != 0};
}

template <HalfType kType>
uint16_t SingleToHalf(const Inst& inst, float x) {
  return FloatToHalf(kType, x, ConvertModeOf(inst));
}
template <HalfType kType>
uint32_t SinglesToHalves(const Inst& inst, float a, float b) {
  return FloatToHalf2(kType, a, b, ConvertModeOf(inst));
}
uint32_t SingleToTf32(const Inst& inst, float x) {
  return FloatToTf32(
      x, static_cast<Tf32Rounding>(inst.mode[0]), inst.mode[1] != 0, inst.mode[2] != 0);
}
constexpr auto kHalfToSingle = [](const Inst&, uint16_t x) {
  return HalfToFloat(HalfType::kF16, x);
};
// A bf16 that is NaN is widened like any other; only arithmetic makes it canonical.
constexpr auto kBrainToSingle = [](uint32_t x) { return x << 16; };

// The hot form of the softmax: `a` to the upper half.
template <auto F>
Outcome SinglesToHalvesVector(Context& context, const Inst& inst) {
  const auto* a = reinterpret_cast<const float*>(context.Row(inst.source[0]));
  const auto* b = reinterpret_cast<const float*>(context.Row(inst.source[1]));
  uint32_t* to = context.MutableRow(inst.destination[0]);
  if (context.mask == kAllLanes) {
    F(to, a, b);
    return Outcome::kNext;
  }
  uint32_t all[kLanes];
  F(all, a, b);
  Blend(to, all, context.mask);
  return Outcome::kNext;
}

// Formats narrower than 16 bits, by the OCP definitions that PTX ISA 5.2.3 refers to.
struct Narrow {
  std::string_view name;  // of a pair
  int bits;               // each
  int mantissa;
  int bias;
  uint32_t most;  // the code of the largest finite number
  uint32_t nan;   // 0: the format has none
};
constexpr Narrow kNarrows[] = {
    {"e4m3x2", 8, 3, 7, 0x7e, 0x7f},
    {"e5m2x2", 8, 2, 15, 0x7b, 0x7f},
    {"e2m3x2", 6, 3, 1, 0x1f, 0},
    {"e3m2x2", 6, 2, 3, 0x1f, 0},
    {"e2m1x2", 4, 1, 1, 0x07, 0},
};

const Narrow* FindNarrow(std::string_view name) {
  for (const Narrow& narrow : kNarrows) {
    if (narrow.name == name) return &narrow;
  }
  return nullptr;
}

// To nearest even, with .satfinite, which cvt demands of these.
uint32_t ToNarrow(const Narrow& format, float x, bool relu) {
  if (std::isnan(x)) return format.nan != 0 ? format.nan : format.most;
  const bool negative = std::signbit(x);
  if (negative && relu) return 0;
  const uint32_t sign = negative ? 1u << (format.bits - 1) : 0;
  const double size = std::fabs(x);
  if (size == 0) return sign;
  const int least = 1 - format.bias;
  if (std::isinf(x)) return sign | format.most;
  const int exponent = std::max(std::ilogb(size), least);
  const auto steps = static_cast<uint64_t>(
      RoundIntegral(std::ldexp(size, format.mantissa - exponent), Round::kEven));
  // A carry out of the significand raises the exponent by itself.
  const uint64_t code = (static_cast<uint64_t>(exponent - least) << format.mantissa) + steps;
  return sign | static_cast<uint32_t>(std::min<uint64_t>(code, format.most));
}

float FromNarrow(const Narrow& format, uint32_t code) {
  const uint32_t sign = code >> (format.bits - 1) & 1;
  const uint32_t size = code & ((1u << (format.bits - 1)) - 1);
  if (format.nan != 0 && size > format.most) {
    // e5m2 has infinities just above its largest number; e4m3 does not.
    if (format.mantissa == 2 && size == format.most + 1) {
      return sign != 0 ? -std::numeric_limits<float>::infinity()
                       : std::numeric_limits<float>::infinity();
    }
    return CanonicalNan();
  }
  const uint32_t field = size >> format.mantissa;
  const uint32_t fraction = size & ((1u << format.mantissa) - 1);
  const uint32_t significand = field == 0 ? fraction : fraction | 1u << format.mantissa;
  const float value =
      std::ldexp(static_cast<float>(significand),
                 static_cast<int>(std::max(field, 1u)) - format.bias - format.mantissa);
  return sign != 0 ? -value : value;
}

// mode[0] is the format's number, mode[1] .relu, mode[2] the half type. Pairs of 4 bits share a
// byte, others have a byte each.
uint32_t PairOf(const Narrow& format, float high, float low, bool relu) {
  return ToNarrow(format, high, relu) << (format.bits == 4 ? 4 : 8) | ToNarrow(format, low, relu);
}
constexpr auto kSinglesToNarrow = [](const Inst& inst, float a, float b) {
  return PairOf(kNarrows[inst.mode[0]], a, b, inst.mode[1] != 0);
};
constexpr auto kHalvesToNarrow = [](const Inst& inst, uint32_t x) {
  const auto type = static_cast<HalfType>(inst.mode[2]);
  return PairOf(kNarrows[inst.mode[0]],
                HalfToFloat(type, static_cast<uint16_t>(x >> 16)),
                HalfToFloat(type, static_cast<uint16_t>(x)),
                inst.mode[1] != 0);
};
constexpr auto kNarrowToHalves = [](const Inst& inst, uint16_t x) {
  const Narrow& format = kNarrows[inst.mode[0]];
  const auto type = static_cast<HalfType>(inst.mode[2]);
  const ConvertMode mode{.relu = inst.mode[1] != 0};
  const uint32_t bits = format.bits == 4 ? 4 : 8;
  const uint32_t mask = (1u << format.bits) - 1;
  return FloatToHalf2(
      type, FromNarrow(format, x >> bits & mask), FromNarrow(format, x & mask), mode);
};

// ue8m0: powers of two, a byte each; 0xff is NaN. mode[0] is set for .rp, mode[1] for .satfinite.
uint32_t ToPower(float x, const Inst& inst) {
  if (std::isnan(x)) return 0xff;
  // Only magnitudes have a power; what is too small becomes the least of them.
  const uint32_t bits = std::bit_cast<uint32_t>(x) & 0x7fffffff;
  uint32_t code = bits >> 23;
  if (inst.mode[0] != 0 && (bits & 0x7fffff) != 0) {
    // 0 stands for 2^-127, which is half of the least normal number.
    if (code != 0 || bits > 0x400000) ++code;
  }
  // What is too large is NaN without .satfinite.
  return std::min(code, inst.mode[1] != 0 ? 0xfeu : 0xffu);
}
constexpr auto kSinglesToPowers = [](const Inst& inst, float a, float b) {
  return ToPower(a, inst) << 8 | ToPower(b, inst);
};
constexpr auto kBrainsToPowers = [](const Inst& inst, uint32_t x) {
  const auto value = [](uint32_t half) { return std::bit_cast<float>(half << 16); };
  return ToPower(value(x >> 16), inst) << 8 | ToPower(value(x & 0xffff), inst);
};
constexpr auto kPowersToBrains = [](const Inst&, uint16_t x) {
  // 0 is 2^-127, a subnormal of bf16.
  const auto value = [](uint32_t code) {
    return code == 0 ? 0x40u : code == 0xff ? 0x7fffu : code << 7;
  };
  return value(x >> 8) << 16 | value(x & 0xff);
};

// ---- Decoding

Flags TakeFlags(Form& form) {
  Flags flags;
  const auto take = [&](std::string_view name, Round* to, Round round) {
    if (!form.parts.Is(name)) return false;
    if (flags.to_float != Round::kNone || flags.to_integer != Round::kNone) form.Refuse();
    form.parts.Next();
    *to = round;
    return true;
  };
  const auto raise = [&](std::string_view name, bool* flag) {
    if (*flag || !form.Take(name)) return false;
    return *flag = true;
  };
  while (
      take("rn", &flags.to_float, Round::kEven) || take("rz", &flags.to_float, Round::kZero) ||
      take("rm", &flags.to_float, Round::kDown) || take("rp", &flags.to_float, Round::kUp) ||
      take("rna", &flags.to_float, Round::kAway) || take("rni", &flags.to_integer, Round::kEven) ||
      take("rzi", &flags.to_integer, Round::kZero) ||
      take("rmi", &flags.to_integer, Round::kDown) || take("rpi", &flags.to_integer, Round::kUp) ||
      raise("ftz", &flags.ftz) || raise("sat", &flags.sat) || raise("relu", &flags.relu) ||
      raise("satfinite", &flags.satfinite)) {
  }
  return flags;
}

void Need(Form& form, bool holds, const char* message) {
  if (!holds) form.decoder.Fail(message);
}

// d (a pair) from a and b in f32, or from a pair.
void DecodeHalves(Form& form, const Flags& flags, Type to) {
  form.Need("f32");
  Need(form,
       flags.to_float == Round::kEven || flags.to_float == Round::kZero,
       "it needs .rn or .rz.");
  Need(form, !flags.ftz && !flags.sat, "its modifiers are not supported with these types.");
  Inst& inst = form.inst();
  const ConvertMode mode = ConvertModeOf(flags);
  inst.mode[0] = static_cast<uint32_t>(mode.rounding);
  inst.mode[1] = mode.relu;
  inst.mode[2] = mode.satfinite;
  const bool is_plain = flags.to_float == Round::kEven && !flags.relu && !flags.satfinite;
  Execute execute = nullptr;
  if (to == Type::kBf16x2) {
    execute = is_plain ? SinglesToHalvesVector<&FloatToBf16x2_32>
                       : EachLane<SinglesToHalves<HalfType::kBf16>, uint32_t, float, float>;
  } else {
    execute = is_plain ? SinglesToHalvesVector<&FloatToF16x2_32>
                       : EachLane<SinglesToHalves<HalfType::kF16>, uint32_t, float, float>;
  }
  form.Emit(execute, to, {Type::kF32, Type::kF32});
}

void DecodeTf32(Form& form, const Flags& flags) {
  form.Need("f32");
  Need(form, !flags.ftz && !flags.sat, "its modifiers are not supported with these types.");
  Tf32Rounding rounding = Tf32Rounding::kNearestAway;
  if (flags.to_float == Round::kEven)
    rounding = Tf32Rounding::kNearestEven;
  else if (flags.to_float == Round::kZero)
    rounding = Tf32Rounding::kTowardZero;
  else
    Need(form, flags.to_float == Round::kAway, "it needs .rna, .rn or .rz.");
  Inst& inst = form.inst();
  inst.mode[0] = static_cast<uint32_t>(rounding);
  inst.mode[1] = flags.relu;
  inst.mode[2] = flags.satfinite;
  form.Emit(EachLane<SingleToTf32, uint32_t, float>, Type::kB32, {Type::kF32});
}

// A pair of 4 bits is a .b8, others are .b16.
void EmitNarrow(
    Form& form, Execute execute, Type to, std::initializer_list<Type> from, bool is_byte) {
  if (!is_byte) return form.Emit(execute, to, from);
  form.Finish();
  form.decoder.ExpectOperands(from.size() + 1, from.size() + 1);
  Inst& inst = form.inst();
  inst.execute = execute;
  inst.destination[0] =
      form.Destination(form.operand(0), to == Type::kB16 ? Type::kB8 : to, to == Type::kB16);
  size_t i = 0;
  for (const Type type : from) {
    inst.source[i] =
        form.Source(form.operand(i + 1), type == Type::kB16 ? Type::kB8 : type, type == Type::kB16);
    ++i;
  }
  if ((to == Type::kB16 && inst.destination[0].bits > 16) ||
      (*from.begin() == Type::kB16 && inst.source[0].bits > 16)) {
    form.decoder.Fail("a pair of 4 bits each needs a register of 8 bits.");
  }
}

void DecodeToNarrow(Form& form, const Flags& flags, const Narrow& narrow) {
  Need(form, flags.to_float == Round::kEven && flags.satfinite, "it needs .rn and .satfinite.");
  Need(form, !flags.ftz && !flags.sat, "its modifiers are not supported with these types.");
  Inst& inst = form.inst();
  inst.mode[0] = static_cast<uint32_t>(&narrow - kNarrows);
  inst.mode[1] = flags.relu;
  const Type from = form.TakeType({Type::kF32, Type::kF16x2, Type::kBf16x2});
  const bool is_byte = narrow.bits == 4;
  if (from == Type::kF32) {
    return EmitNarrow(form,
                      EachLane<kSinglesToNarrow, uint16_t, float, float>,
                      Type::kB16,
                      {Type::kF32, Type::kF32},
                      is_byte);
  }
  inst.mode[2] = static_cast<uint32_t>(from == Type::kF16x2 ? HalfType::kF16 : HalfType::kBf16);
  EmitNarrow(form, EachLane<kHalvesToNarrow, uint16_t, uint32_t>, Type::kB16, {from}, is_byte);
}

void DecodeFromNarrow(Form& form, const Flags& flags, Type to) {
  const std::string_view name = form.parts.Peek();
  Inst& inst = form.inst();
  if (name == "ue8m0x2") {
    form.parts.Next();
    Need(form,
         to == Type::kBf16x2 && flags.to_float == Round::kEven && !flags.relu,
         "its modifiers are not supported with these types.");
    return form.Emit(EachLane<kPowersToBrains, uint32_t, uint16_t>, to, {Type::kB16});
  }
  const Narrow* narrow = FindNarrow(name);
  if (narrow == nullptr) form.Refuse();
  form.parts.Next();
  Need(form, flags.to_float == Round::kEven, "it needs .rn.");
  Need(form,
       !flags.ftz && !flags.sat && !flags.satfinite,
       "its modifiers are not supported with these types.");
  inst.mode[0] = static_cast<uint32_t>(narrow - kNarrows);
  inst.mode[1] = flags.relu;
  inst.mode[2] = static_cast<uint32_t>(to == Type::kF16x2 ? HalfType::kF16 : HalfType::kBf16);
  EmitNarrow(
      form, EachLane<kNarrowToHalves, uint32_t, uint16_t>, to, {Type::kB16}, narrow->bits == 4);
}

void DecodePowers(Form& form, const Flags& flags) {
  Need(form,
       (flags.to_float == Round::kZero || flags.to_float == Round::kUp) && !flags.relu &&
           !flags.ftz && !flags.sat,
       "it needs .rz or .rp and no other modifier but .satfinite.");
  form.inst().mode[1] = flags.satfinite;
  form.inst().mode[0] = flags.to_float == Round::kUp;
  const Type from = form.TakeType({Type::kF32, Type::kBf16x2});
  if (from == Type::kF32) {
    return form.Emit(EachLane<kSinglesToPowers, uint16_t, float, float>, Type::kB16, {from, from});
  }
  form.Emit(EachLane<kBrainsToPowers, uint16_t, uint32_t>, Type::kB16, {from});
}

// All that is one number to one number of a fundamental type.
void DecodeSingle(Form& form, const Flags& flags, Type to) {
  const Type from = form.TakeType({Type::kU8,
                                   Type::kS8,
                                   Type::kU16,
                                   Type::kS16,
                                   Type::kU32,
                                   Type::kS32,
                                   Type::kU64,
                                   Type::kS64,
                                   Type::kF16,
                                   Type::kBf16,
                                   Type::kF32,
                                   Type::kF64});
  form.Finish();
  form.decoder.ExpectOperands(2, 2);
  Inst& inst = form.inst();
  const bool real_to = IsReal(to), real_from = IsReal(from);
  const bool is_half = to == Type::kF16 || to == Type::kBf16;
  Need(form,
       (!flags.relu && !flags.satfinite) || (is_half && from == Type::kF32),
       "its modifiers are not supported with these types.");
  Need(form,
       !flags.ftz || to == Type::kF32 || from == Type::kF32,
       "\".ftz\" needs a type \".f32\".");
  Need(form, flags.to_float != Round::kAway, "\".rna\" needs a destination of type \".tf32\".");
  Need(form,
       !flags.sat || (to != Type::kBf16 && from != Type::kBf16),
       "\".sat\" is not supported with bf16.");
  // Which rounding the types ask for (table "rounding modifiers" of cvt).
  const bool narrows =
      real_to && (!real_from || FormatOf(to).precision < FormatOf(from).precision ||
                  FormatOf(to).most_exponent < FormatOf(from).most_exponent);
  if (real_from && !real_to) {
    Need(form, flags.to_integer != Round::kNone, "it needs .rni, .rzi, .rmi or .rpi.");
  } else if (real_to && real_from && to == from) {
    Need(form, flags.to_float == Round::kNone, "it rounds to an integer or not at all.");
  } else if (real_to && real_from && narrows && is_half && from != Type::kF32 &&
             from != Type::kF64) {
    // Between f16 and bf16 to nearest even is understood.
    Need(form, flags.to_integer == Round::kNone, "it cannot round to an integer.");
  } else if (from == Type::kBf16 && real_to) {
    // All bf16 fit; ptxas takes a rounding all the same.
    Need(form, flags.to_integer == Round::kNone, "it cannot round to an integer.");
  } else if (narrows) {
    Need(form,
         flags.to_float != Round::kNone && flags.to_integer == Round::kNone,
         "it needs .rn, .rz, .rm or .rp.");
  } else {
    Need(form, flags.to_integer == Round::kNone, "it cannot round to an integer.");
    // Between integers there is nothing to round; a wider float takes all values of a narrower.
    Need(form, flags.to_float == Round::kNone, "it rounds nothing.");
  }
  // cvt takes registers wider than its types (9.4.1).
  const int least_to = BitsOf(to), least_from = BitsOf(from);
  inst.destination[0] = form.Destination(form.operand(0), to, true);
  inst.source[0] = form.Source(form.operand(1), from, true);
  const int to_bits = inst.destination[0].bits, from_bits = inst.source[0].bits;
  Need(form,
       to_bits >= least_to && from_bits >= least_from && to_bits <= 64 && from_bits <= 64,
       "a register is narrower than its type.");
  const bool is_exact_size = to_bits == least_to && from_bits == least_from;
  if (!real_to && !real_from && !flags.sat) {
    inst.execute = IntegerExecute(to, from, to_bits == 64, from_bits == 64);
    inst.mode[0] = to_bits == 8 ? 0xff : to_bits == 16 ? 0xffff : 0xffffffff;
    if (inst.execute != nullptr) return;
  }
  const bool is_plain = is_exact_size && !flags.sat && !flags.ftz;
  if (is_half && from == Type::kF32 && is_exact_size && !flags.sat && !flags.ftz &&
      (flags.to_float == Round::kEven || flags.to_float == Round::kZero)) {
    const ConvertMode mode = ConvertModeOf(flags);
    inst.mode[0] = static_cast<uint32_t>(mode.rounding);
    inst.mode[1] = mode.relu;
    inst.mode[2] = mode.satfinite;
    inst.execute = to == Type::kF16 ? EachLane<SingleToHalf<HalfType::kF16>, uint16_t, float>
                                    : EachLane<SingleToHalf<HalfType::kBf16>, uint16_t, float>;
    return;
  }
  Need(form, !flags.relu && !flags.satfinite, "its modifiers are not supported together.");
  if (from == Type::kF32 && is_plain && flags.to_integer != Round::kNone) {
    inst.execute = SingleExecute(to, flags.to_integer);
    if (inst.execute != nullptr) return;
  }
  if (to == Type::kF32 && is_plain) {
    if (from == Type::kF16) inst.execute = EachLane<kHalfToSingle, float, uint16_t>;
    if (from == Type::kBf16) inst.execute = Each<kBrainToSingle, uint32_t, uint32_t>;
    if (from == Type::kS32 && flags.to_float == Round::kEven)
      inst.execute = Each<kToSingle, float, int32_t>;
    if (from == Type::kU32 && flags.to_float == Round::kEven)
      inst.execute = Each<kToSingle, float, uint32_t>;
    if (inst.execute != nullptr) return;
  }
  inst.execute = Convert;
  inst.mode[0] = static_cast<uint32_t>(to);
  inst.mode[1] = static_cast<uint32_t>(from);
  const Round round = flags.to_integer != Round::kNone ? flags.to_integer : flags.to_float;
  inst.mode[2] = static_cast<uint32_t>(round);
  inst.mode[3] = (flags.ftz ? kFtz : 0u) | (flags.sat ? kSat : 0u) |
                 (flags.to_integer != Round::kNone ? kToIntegral : 0u);
}

// cvt.pack.sat.u16.s32 d, a, b and cvt.pack.sat.u8.s32.b32 d, a, b, c: a above b (above the upper
// part of c). mode[0] is the narrow type.
uint32_t PackSaturated(const Inst& inst, uint32_t a, uint32_t b) {
  const auto type = static_cast<Type>(inst.mode[0]);
  const uint32_t bits = static_cast<uint32_t>(BitsOf(type)), mask = (1u << bits) - 1;
  const auto narrow = [&](uint32_t x) {
    return static_cast<uint32_t>(SaturateInteger(type, Type::kS32, ExtendInteger(Type::kS32, x))) &
           mask;
  };
  return narrow(a) << bits | narrow(b);
}
uint32_t PackSaturatedOver(const Inst& inst, uint32_t a, uint32_t b, uint32_t c) {
  const auto type = static_cast<Type>(inst.mode[0]);
  return c << (2 * BitsOf(type)) | PackSaturated(inst, a, b);
}

void DecodePack(Form& form) {
  form.Need("sat");
  const Type to = form.TakeType({Type::kU16, Type::kS16, Type::kU8, Type::kS8});
  form.Need("s32");
  form.inst().mode[0] = static_cast<uint32_t>(to);
  if (form.Take("b32")) {
    Need(form, BitsOf(to) == 8, "only bytes are packed over a third operand.");
    return form.Emit(EachLane<PackSaturatedOver, uint32_t, uint32_t, uint32_t, uint32_t>,
                     Type::kB32,
                     {Type::kS32, Type::kS32, Type::kB32});
  }
  Need(form, BitsOf(to) == 16, "bytes are packed over a third operand.");
  form.Emit(
      EachLane<PackSaturated, uint32_t, uint32_t, uint32_t>, Type::kB32, {Type::kS32, Type::kS32});
}

}  // namespace

bool DecodeConvert(Form& form, std::string_view opcode) {
  if (opcode != "cvt") return false;
  if (form.Take("pack")) return DecodePack(form), true;
  const Flags flags = TakeFlags(form);
  const std::string_view name = form.parts.Peek();
  if (name == "tf32") {
    form.parts.Next();
    DecodeTf32(form, flags);
  } else if (name == "ue8m0x2") {
    form.parts.Next();
    DecodePowers(form, flags);
  } else if (const Narrow* narrow = FindNarrow(name)) {
    form.parts.Next();
    DecodeToNarrow(form, flags, *narrow);
  } else {
    const Type to = form.TakeType({Type::kU8,
                                   Type::kS8,
                                   Type::kU16,
                                   Type::kS16,
                                   Type::kU32,
                                   Type::kS32,
                                   Type::kU64,
                                   Type::kS64,
                                   Type::kF16,
                                   Type::kBf16,
                                   Type::kF32,
                                   Type::kF64,
                                   Type::kF16x2,
                                   Type::kBf16x2});
    if (to != Type::kF16x2 && to != Type::kBf16x2)
      DecodeSingle(form, flags, to);
    else if (form.parts.Is("f32"))
      DecodeHalves(form, flags, to);
    else
      DecodeFromNarrow(form, flags, to);
  }
  return true;
}

}  // namespace jax_fa4::emulator
