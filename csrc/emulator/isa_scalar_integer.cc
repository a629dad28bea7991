// Integer arithmetic, logic and shifts: PTX ISA 9.7.1 (Integer Arithmetic), 9.7.2
// (Extended-Precision Integer Arithmetic) and 9.7.8 (Logic and Shift). Where the ISA leaves a
// result open (division by zero, a base of fns beyond the mask) it is what the hardware's code
// gives, or all ones.

#include <algorithm>
#include <bit>
#include <limits>

#include "csrc/emulator/isa_scalar.h"

namespace jax_fa4::emulator {
namespace {

// An unsigned type in which arithmetic on T wraps around: narrow ones would be promoted to int,
// which does not.
template <typename T>
using Wrap = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
template <typename T>
Wrap<T> W(T value) {
  return static_cast<Wrap<T>>(value);
}
template <typename T>
using Wide = std::conditional_t<
    sizeof(T) == 8,
    std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
    std::conditional_t<sizeof(T) == 4,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>>;

template <typename T>
T Clamp(Wide<T> value) {
  constexpr Wide<T> least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
  return static_cast<T>(value < least ? least : value > most ? most : value);
}

constexpr auto kAdd = [](auto a, auto b) { return W(a) + W(b); };
constexpr auto kSub = [](auto a, auto b) { return W(a) - W(b); };
constexpr auto kAddSaturated = [](int32_t a, int32_t b) { return Clamp<int32_t>(int64_t{a} + b); };
constexpr auto kSubSaturated = [](int32_t a, int32_t b) { return Clamp<int32_t>(int64_t{a} - b); };
constexpr auto kMulLo = [](auto a, auto b) { return W(a) * W(b); };
constexpr auto kMulHi = [](auto a, auto b) {
  using T = decltype(a);
  return static_cast<T>((Wide<T>{a} * b) >> (8 * sizeof(T)));
};
constexpr auto kMulWide = [](auto a, auto b) { return Wide<decltype(a)>{a} * b; };
constexpr auto kMadLo = [](auto a, auto b, auto c) { return W(a) * W(b) + W(c); };
constexpr auto kMadHi = [](auto a, auto b, auto c) { return W(kMulHi(a, b)) + W(c); };
constexpr auto kMadHiSaturated = [](int32_t a, int32_t b, int32_t c) {
  return Clamp<int32_t>(int64_t{kMulHi(a, b)} + c);
};
constexpr auto kMadWide = [](auto a, auto b, auto c) { return W(c) + W(Wide<decltype(a)>{a} * b); };
constexpr auto kSad = [](auto a, auto b, auto c) {
  return W(c) + (a < b ? W(b) - W(a) : W(a) - W(b));
};
constexpr auto kMin = [](auto a, auto b) { return a < b ? a : b; };
constexpr auto kMax = [](auto a, auto b) { return a > b ? a : b; };
constexpr auto kAbs = [](auto a) { return a < 0 ? 0 - W(a) : W(a); };
constexpr auto kNeg = [](auto a) { return 0 - W(a); };
constexpr auto kAnd = [](auto a, auto b) { return a & b; };
constexpr auto kOr = [](auto a, auto b) { return a | b; };
constexpr auto kXor = [](auto a, auto b) { return a ^ b; };
constexpr auto kNot = [](auto a) { return ~W(a); };
constexpr auto kIsZero = [](auto a) { return a == 0 ? 1 : 0; };
constexpr auto kPopulation = [](auto a) { return std::popcount(a); };
constexpr auto kLeadingZeros = [](auto a) { return std::countl_zero(a); };

// Shift amounts are unsigned and clamped at the width (9.7.8.7, 9.7.8.8).
constexpr auto kShiftLeft = [](auto a, uint32_t by) {
  return by < 8 * sizeof(a) ? W(a) << (by & (8 * sizeof(W(a)) - 1)) : 0;
};
constexpr auto kShiftRight = [](auto a, uint32_t by) {
  using T = decltype(a);
  constexpr uint32_t kMost = 8 * sizeof(T) - 1;
  if constexpr (std::is_signed_v<T>) {
    return a >> (by < kMost ? by : kMost);
  } else {
    return by <= kMost ? W(a) >> (by & kMost) : 0;
  }
};

constexpr auto kDiv = [](const Inst&, auto a, auto b) {
  using T = decltype(a);
  if (b == 0) return static_cast<T>(-1);
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(0 - W(a));
  return static_cast<T>(a / b);
};
constexpr auto kRem = [](const Inst&, auto a, auto b) {
  using T = decltype(a);
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return T{0};
  return static_cast<T>(a % b);
};

// ---- Pairs of 16 bits

template <auto F, typename T>
uint32_t Halves(uint32_t a, uint32_t b) {
  const auto low = static_cast<uint16_t>(F(static_cast<T>(a), static_cast<T>(b)));
  const auto high = static_cast<uint16_t>(F(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
  return uint32_t{high} << 16 | low;
}
template <auto F>
Execute ForHalves(Type type) {
  return type == Type::kS16x2 ? Each<Halves<F, int16_t>, uint32_t, uint32_t, uint32_t>
                              : Each<Halves<F, uint16_t>, uint32_t, uint32_t, uint32_t>;
}
// min and max with .relu: negative results become 0.
template <auto F>
constexpr auto kRelu = [](auto a, auto b) {
  const auto result = F(a, b);
  return result < 0 ? decltype(result){0} : result;
};

// ---- Carries. source[3] is the flag that is read, destination[1] the one that is written.

template <auto F, typename T, int kOperands>
Outcome WithCarry(Context& context, const Inst& inst) {
  Word<T>* to = DestinationRow<T>(context, inst.destination[0]);
  const uint32_t in = inst.source[3] ? context.Predicate(inst.source[3]) : 0;
  uint32_t out = 0;
  for (uint32_t rest = context.mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    T values[3] = {};
    for (int i = 0; i < kOperands; ++i) {
      values[i] = static_cast<T>(SourceRow<T>(context, inst.source[i])[lane]);
    }
    bool carry = (in >> lane & 1) != 0;
    to[lane] = Pack<T>(F(values, &carry));
    out |= uint32_t{carry} << lane;
  }
  context.SetPredicate(inst.destination[1], out);
  return Outcome::kNext;
}

template <typename T>
T AddCarry(T a, T b, bool* carry) {
  const unsigned __int128 sum = static_cast<unsigned __int128>(W(a)) + W(b) + (*carry ? 1 : 0);
  *carry = (sum >> (8 * sizeof(T)) & 1) != 0;
  return static_cast<T>(sum);
}
constexpr auto kAddCarry = [](auto* x, bool* carry) { return AddCarry(x[0], x[1], carry); };
constexpr auto kSubBorrow = [](auto* x, bool* carry) {
  using T = std::remove_reference_t<decltype(*x)>;
  const unsigned __int128 less = static_cast<unsigned __int128>(W(x[1])) + (*carry ? 1 : 0);
  *carry = W(x[0]) < less;
  return static_cast<T>(W(x[0]) - static_cast<Wrap<T>>(less));
};
constexpr auto kMadLoCarry = [](auto* x, bool* carry) {
  using T = std::remove_reference_t<decltype(*x)>;
  return AddCarry(static_cast<T>(kMulLo(x[0], x[1])), x[2], carry);
};
constexpr auto kMadHiCarry = [](auto* x, bool* carry) {
  return AddCarry(kMulHi(x[0], x[1]), x[2], carry);
};

template <auto F, int kOperands>
void EmitCarry(Form& form, Type type, bool reads, bool writes) {
  const Execute execute = ForInteger(
      type, [](auto zero) -> Execute { return WithCarry<F, decltype(zero), kOperands>; });
  if constexpr (kOperands == 2)
    form.Emit(execute, type, {type, type});
  else
    form.Emit(execute, type, {type, type, type});
  if (reads) form.inst().source[3] = form.decoder.CarrySource();
  if (writes) form.inst().destination[1] = form.decoder.CarryDestination();
}

// ---- Bit fields (9.7.1.18 to 9.7.1.22)

template <typename T>
std::make_unsigned_t<T> FieldMask(uint32_t length) {
  using U = std::make_unsigned_t<T>;
  constexpr uint32_t kBits = 8 * sizeof(T);
  return length >= kBits ? static_cast<U>(-1)
                         : static_cast<U>((U{1} << (length & (kBits - 1))) - 1);
}

constexpr auto kExtract = [](auto a, uint32_t position, uint32_t length) {
  using T = decltype(a);
  using U = std::make_unsigned_t<T>;
  constexpr uint32_t kBits = 8 * sizeof(T);
  position &= 0xff;
  length &= 0xff;
  const U bits = static_cast<U>(a);
  const U mask = FieldMask<T>(length);
  U result = position < kBits ? static_cast<U>(bits >> (position & (kBits - 1))) & mask : U{0};
  if constexpr (std::is_signed_v<T>) {
    const uint32_t last = position + length - 1 < kBits - 1 ? position + length - 1 : kBits - 1;
    const bool sign = length != 0 && (bits >> (last & (kBits - 1)) & 1) != 0;
    // The sign fills the result from the field's end on, and where the field passes the end of `a`.
    const U inside = position < kBits ? mask & FieldMask<T>(kBits - position) : U{0};
    result = sign ? (result & inside) | static_cast<U>(~inside) : result;
  }
  return result;
};

constexpr auto kInsert = [](auto a, auto b, uint32_t position, uint32_t length) {
  using T = decltype(a);
  constexpr uint32_t kBits = 8 * sizeof(T);
  position &= 0xff;
  length &= 0xff;
  const uint32_t by = position & (kBits - 1);
  const T mask = position < kBits ? static_cast<T>(FieldMask<T>(length) << by) : T{0};
  return (b & ~mask) | (static_cast<T>(a << by) & mask);
};

template <bool kClampMode>
uint32_t BitMask(uint32_t a, uint32_t b) {
  const uint32_t first = a & 31, width = b & 31;
  uint32_t low = 0xffffffffu << first;
  uint32_t high = first + width < 32 ? 0xffffffffu << ((first + width) & 31) : 0;
  if (kClampMode) {
    low = a < 32 ? low : 0;
    high = a < 32 && b < 32 ? high : 0;
  }
  return low & ~high;
}

template <bool kClampMode, bool kSigned>
uint32_t SignOrZeroExtend(uint32_t a, uint32_t b) {
  const uint32_t width = b & 31;
  const uint32_t mask = kClampMode && b >= 32 ? 0 : 0xffffffffu << width;
  const bool sign = kSigned && width != 0 && (a >> ((width - 1) & 31) & 1) != 0;
  return (a & ~mask) | (sign ? mask : 0);
}

constexpr auto kReverse = [](auto a) {
  using T = decltype(a);
  constexpr T kPairs = static_cast<T>(0x5555555555555555),
              kFours = static_cast<T>(0x3333333333333333);
  constexpr T kBytes = static_cast<T>(0x0f0f0f0f0f0f0f0f);
  a = (a >> 1 & kPairs) | (a & kPairs) << 1;
  a = (a >> 2 & kFours) | (a & kFours) << 2;
  a = (a >> 4 & kBytes) | (a & kBytes) << 4;
  if constexpr (sizeof(T) == 8)
    return __builtin_bswap64(a);
  else
    return __builtin_bswap32(a);
};

// The highest bit that differs from the sign; -1 where there is none.
template <bool kAsShift>
constexpr auto kFindBit = [](const Inst&, auto a) {
  using T = decltype(a);
  using U = std::make_unsigned_t<T>;
  const U bits = static_cast<U>(std::is_signed_v<T> && a < 0 ? ~W(a) : W(a));
  if (bits == 0) return uint32_t{0xffffffff};
  const auto zeros = static_cast<uint32_t>(std::countl_zero(bits));
  return kAsShift ? zeros : static_cast<uint32_t>(8 * sizeof(T)) - 1 - zeros;
};

constexpr auto kFindNthSet = [](const Inst&, uint32_t mask, uint32_t base, int32_t offset) {
  constexpr uint32_t kNone = 0xffffffff;
  if (base > 31) return kNone;
  if (offset == 0) return (mask >> base & 1) != 0 ? base : kNone;
  int64_t count = offset > 0 ? int64_t{offset} : -int64_t{offset};
  for (int position = static_cast<int>(base); position >= 0 && position < 32;
       position += offset > 0 ? 1 : -1) {
    if ((mask >> position & 1) != 0 && --count == 0) return static_cast<uint32_t>(position);
  }
  return kNone;
};

// ---- Dot products (9.7.1.23, 9.7.1.24)

template <bool kSigned>
int32_t Byte(uint32_t word, int i) {
  return kSigned ? int32_t{static_cast<int8_t>(word >> (8 * i))}
                 : int32_t{static_cast<uint8_t>(word >> (8 * i))};
}
template <bool kSignedA, bool kSignedB>
uint32_t Dot4(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 4; ++i) c += W(Byte<kSignedA>(a, i) * Byte<kSignedB>(b, i));
  return c;
}
template <bool kSignedA, bool kSignedB, int kHalf>
uint32_t Dot2(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 2; ++i) {
    const auto bits = static_cast<uint16_t>(a >> (16 * i));
    const int32_t value = kSignedA ? int32_t{static_cast<int16_t>(bits)} : int32_t{bits};
    c += W(value * Byte<kSignedB>(b, i + 2 * kHalf));
  }
  return c;
}

void DecodeDot(Form& form, bool is_four) {
  const bool is_high = !is_four && form.Take("hi");
  if (!is_four && !is_high) form.Need("lo");
  const Type a = form.TakeType({Type::kU32, Type::kS32}),
             b = form.TakeType({Type::kU32, Type::kS32});
  const auto pick = [&](auto sa, auto sb) -> Execute {
    constexpr bool kA = decltype(sa)::value, kB = decltype(sb)::value;
    if (is_four) return Each<Dot4<kA, kB>, uint32_t, uint32_t, uint32_t, uint32_t>;
    return is_high ? Each<Dot2<kA, kB, 1>, uint32_t, uint32_t, uint32_t, uint32_t>
                   : Each<Dot2<kA, kB, 0>, uint32_t, uint32_t, uint32_t, uint32_t>;
  };
  const bool sa = IsSigned(a), sb = IsSigned(b);
  form.Emit(sa ? (sb ? pick(std::true_type(), std::true_type())
                     : pick(std::true_type(), std::false_type()))
               : (sb ? pick(std::false_type(), std::true_type())
                     : pick(std::false_type(), std::false_type())),
            Type::kU32,
            {a, b, Type::kB32});
}

// ---- lop3 (9.7.8.6)

// Bit 4a + 2b + c of the table is the function's value. mode[k] is all ones where bit k of it is
// set.
void LogicLanes(Context& context, const Inst& inst, uint32_t* to) {
  const uint32_t* a = context.Row(inst.source[0]);
  const uint32_t* b = context.Row(inst.source[1]);
  const uint32_t* c = context.Row(inst.source[2]);
  uint32_t table[8];
  for (int k = 0; k < 8; ++k) table[k] = (inst.mode[0] >> k & 1) != 0 ? 0xffffffff : 0;
#pragma GCC ivdep
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t x = a[lane], y = b[lane], z = c[lane];
    // Multiplexers by c, then b, then a.
    const uint32_t z0 = (table[0] & ~z) | (table[1] & z), z1 = (table[2] & ~z) | (table[3] & z);
    const uint32_t z2 = (table[4] & ~z) | (table[5] & z), z3 = (table[6] & ~z) | (table[7] & z);
    const uint32_t y0 = (z0 & ~y) | (z1 & y), y1 = (z2 & ~y) | (z3 & y);
    to[lane] = (y0 & ~x) | (y1 & x);
  }
}

Outcome Logic3(Context& context, const Inst& inst) {
  if (context.mask == kAllLanes) {
    LogicLanes(context, inst, context.MutableRow(inst.destination[0]));
    return Outcome::kNext;
  }
  uint32_t all[kLanes];
  LogicLanes(context, inst, all);
  Blend(context.MutableRow(inst.destination[0]), all, context.mask);
  return Outcome::kNext;
}

// lop3.or and lop3.and: also whether the result is not zero, combined with a predicate.
Outcome Logic3WithPredicate(Context& context, const Inst& inst) {
  uint32_t all[kLanes];
  LogicLanes(context, inst, all);
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) lanes |= uint32_t{all[lane] != 0} << lane;
  const uint32_t other = context.Predicate(inst.source[3]);
  context.SetPredicate(inst.destination[1], inst.mode[1] != 0 ? lanes & other : lanes | other);
  if (inst.destination[0]) Blend(context.MutableRow(inst.destination[0]), all, context.mask);
  return Outcome::kNext;
}

void DecodeLogic3(Form& form) {
  const bool is_and = form.Take("and");
  const bool with_predicate = is_and || form.Take("or");
  form.Need("b32");
  form.Finish();
  form.decoder.ExpectOperands(with_predicate ? 6 : 5, with_predicate ? 6 : 5);
  Inst& inst = form.inst();
  const int64_t table = form.decoder.Constant(form.operand(4));
  if (table < 0 || table > 255) form.decoder.Fail("its table must be from 0 to 255.");
  inst.mode[0] = static_cast<uint32_t>(table);
  for (int i = 0; i < 3; ++i) inst.source[i] = form.Source(form.operand(i + 1), Type::kB32);
  if (!with_predicate) {
    inst.execute = Logic3;
    inst.destination[0] = form.Destination(form.operand(0), Type::kB32);
    return;
  }
  inst.execute = Logic3WithPredicate;
  inst.mode[1] = is_and;
  const ptx::Operand& pair = form.operand(0);
  if (pair.kind != ptx::Operand::Kind::kPair) form.decoder.Fail("it has two results, d|p.");
  inst.destination[0] = form.decoder.DestinationOrSink(pair.elements[0], 32);
  inst.destination[1] = form.decoder.PredicateDestination(pair.elements[1]);
  inst.source[3] = form.decoder.PredicateSource(form.operand(5));
}

// ---- shf (9.7.8.9)

template <bool kLeft, bool kWrap>
uint32_t Funnel(uint32_t low, uint32_t high, uint32_t by) {
  const uint32_t n = kWrap ? by & 31 : by < 32 ? by : 32;
  const uint64_t both = uint64_t{high} << 32 | low;
  return static_cast<uint32_t>(kLeft ? both << n >> 32 : both >> n);
}

void DecodeFunnel(Form& form) {
  const bool is_left = form.Take("l");
  if (!is_left) form.Need("r");
  const bool wraps = form.Take("wrap");
  if (!wraps) form.Need("clamp");
  form.Need("b32");
  const Execute execute =
      is_left ? (wraps ? Each<Funnel<true, true>, uint32_t, uint32_t, uint32_t, uint32_t>
                       : Each<Funnel<true, false>, uint32_t, uint32_t, uint32_t, uint32_t>)
              : (wraps ? Each<Funnel<false, true>, uint32_t, uint32_t, uint32_t, uint32_t>
                       : Each<Funnel<false, false>, uint32_t, uint32_t, uint32_t, uint32_t>);
  form.Emit(execute, Type::kB32, {Type::kB32, Type::kB32, Type::kU32});
}

// ---- Decoding

constexpr std::initializer_list<Type> kIntegers = {
    Type::kU16, Type::kS16, Type::kU32, Type::kS32, Type::kU64, Type::kS64};

bool IsFloatOpcode(const Form& form) {
  // The floating-point type is somewhere behind modifiers of its own.
  Parts parts = form.parts;
  while (!parts.done()) {
    const Type type = TypeOf(parts.Next());
    switch (type) {
      case Type::kF16:
      case Type::kBf16:
      case Type::kF32:
      case Type::kF64:
      case Type::kF16x2:
      case Type::kBf16x2:
      case Type::kF32x2:
        return true;
      case Type::kNone:
        break;
      default:
        return false;
    }
  }
  return false;
}

template <auto F, int kOperands>
void EmitSame(Form& form, Type type) {
  const Execute execute = ForInteger(type, [](auto zero) -> Execute {
    using T = decltype(zero);
    if constexpr (kOperands == 1)
      return Each<F, T, T>;
    else if constexpr (kOperands == 2)
      return Each<F, T, T, T>;
    else
      return Each<F, T, T, T, T>;
  });
  if constexpr (kOperands == 1)
    form.Emit(execute, type, {type});
  else if constexpr (kOperands == 2)
    form.Emit(execute, type, {type, type});
  else
    form.Emit(execute, type, {type, type, type});
}

void DecodeAdd(Form& form, bool is_add, bool reads_carry) {
  const bool writes_carry = form.Take("cc");
  if (reads_carry || writes_carry) {
    const Type type = form.TakeType({Type::kU32, Type::kS32, Type::kU64, Type::kS64});
    return is_add ? EmitCarry<kAddCarry, 2>(form, type, reads_carry, writes_carry)
                  : EmitCarry<kSubBorrow, 2>(form, type, reads_carry, writes_carry);
  }
  if (form.Take("sat")) {
    const Type type = form.TakeType({Type::kS32});
    return form.Emit(is_add ? Each<kAddSaturated, int32_t, int32_t, int32_t>
                            : Each<kSubSaturated, int32_t, int32_t, int32_t>,
                     type,
                     {type, type});
  }
  const Type type = form.TakeType({Type::kU16,
                                   Type::kS16,
                                   Type::kU32,
                                   Type::kS32,
                                   Type::kU64,
                                   Type::kS64,
                                   Type::kU16x2,
                                   Type::kS16x2});
  if (type == Type::kU16x2 || type == Type::kS16x2) {
    return form.Emit(is_add ? ForHalves<kAdd>(type) : ForHalves<kSub>(type), type, {type, type});
  }
  is_add ? EmitSame<kAdd, 2>(form, type) : EmitSame<kSub, 2>(form, type);
}

Type Doubled(Type type) {
  switch (type) {
    case Type::kU16:
      return Type::kU32;
    case Type::kS16:
      return Type::kS32;
    case Type::kU32:
      return Type::kU64;
    default:
      return Type::kS64;
  }
}

template <auto F, bool kThree>
void EmitWide(Form& form) {
  const Type type = form.TakeType({Type::kU16, Type::kS16, Type::kU32, Type::kS32});
  const Type wide = Doubled(type);
  const Execute execute = ForInteger(type, [](auto zero) -> Execute {
    using T = decltype(zero);
    // Products of 64-bit factors have no register to go to.
    if constexpr (sizeof(T) == 8)
      return nullptr;
    else if constexpr (kThree)
      return Each<F, Wide<T>, T, T, Wide<T>>;
    else
      return Each<F, Wide<T>, T, T>;
  });
  if constexpr (kThree)
    form.Emit(execute, wide, {type, type, wide});
  else
    form.Emit(execute, wide, {type, type});
}

void DecodeMul(Form& form) {
  if (form.Take("wide")) return EmitWide<kMulWide, false>(form);
  const bool is_high = form.Take("hi");
  if (!is_high) form.Need("lo");
  const Type type = form.TakeType(kIntegers);
  is_high ? EmitSame<kMulHi, 2>(form, type) : EmitSame<kMulLo, 2>(form, type);
}

void DecodeMad(Form& form, bool reads_carry) {
  if (!reads_carry && form.Take("wide")) return EmitWide<kMadWide, true>(form);
  const bool is_high = form.Take("hi");
  if (!is_high) form.Need("lo");
  const bool writes_carry = form.Take("cc");
  if (reads_carry || writes_carry) {
    const Type type = form.TakeType({Type::kU32, Type::kS32, Type::kU64, Type::kS64});
    return is_high ? EmitCarry<kMadHiCarry, 3>(form, type, reads_carry, writes_carry)
                   : EmitCarry<kMadLoCarry, 3>(form, type, reads_carry, writes_carry);
  }
  if (is_high && form.Take("sat")) {
    const Type type = form.TakeType({Type::kS32});
    return form.Emit(
        Each<kMadHiSaturated, int32_t, int32_t, int32_t, int32_t>, type, {type, type, type});
  }
  const Type type = form.TakeType(kIntegers);
  is_high ? EmitSame<kMadHi, 3>(form, type) : EmitSame<kMadLo, 3>(form, type);
}

// mul24 and mad24 (9.7.1.5, 9.7.1.6): of 24-bit factors, the lower or upper 32 of the product's 48
// bits.
template <bool kSigned, bool kHigh>
uint32_t Product24(uint32_t a, uint32_t b) {
  const auto factor = [](uint32_t x) {
    return kSigned ? int64_t{static_cast<int32_t>(x << 8) >> 8} : int64_t{x & 0xffffff};
  };
  return static_cast<uint32_t>(factor(a) * factor(b) >> (kHigh ? 16 : 0));
}
template <bool kSigned, bool kHigh>
uint32_t Sum24(uint32_t a, uint32_t b, uint32_t c) {
  return Product24<kSigned, kHigh>(a, b) + c;
}

void Decode24(Form& form, bool is_mad) {
  const bool is_high = form.Take("hi");
  if (!is_high) form.Need("lo");
  const Type type = form.TakeType({Type::kU32, Type::kS32});
  const auto pick = [&](auto s) -> Execute {
    constexpr bool kS = decltype(s)::value;
    if (is_mad) {
      return is_high ? Each<Sum24<kS, true>, uint32_t, uint32_t, uint32_t, uint32_t>
                     : Each<Sum24<kS, false>, uint32_t, uint32_t, uint32_t, uint32_t>;
    }
    return is_high ? Each<Product24<kS, true>, uint32_t, uint32_t, uint32_t>
                   : Each<Product24<kS, false>, uint32_t, uint32_t, uint32_t>;
  };
  const Execute execute = IsSigned(type) ? pick(std::true_type()) : pick(std::false_type());
  if (is_mad)
    form.Emit(execute, type, {type, type, type});
  else
    form.Emit(execute, type, {type, type});
}

void DecodeMinMax(Form& form, bool is_max) {
  const bool relu = form.Take("relu");
  const Type type = form.TakeType({Type::kU16,
                                   Type::kS16,
                                   Type::kU32,
                                   Type::kS32,
                                   Type::kU64,
                                   Type::kS64,
                                   Type::kU16x2,
                                   Type::kS16x2});
  if (relu && type != Type::kS32 && type != Type::kS16x2) {
    form.decoder.Fail("\".relu\" is not supported with this type.");
  }
  if (type == Type::kU16x2 || type == Type::kS16x2) {
    const Execute execute =
        relu ? (is_max ? ForHalves<kRelu<kMax>>(type) : ForHalves<kRelu<kMin>>(type))
             : (is_max ? ForHalves<kMax>(type) : ForHalves<kMin>(type));
    return form.Emit(execute, type, {type, type});
  }
  if (relu)
    return is_max ? EmitSame<kRelu<kMax>, 2>(form, type) : EmitSame<kRelu<kMin>, 2>(form, type);
  is_max ? EmitSame<kMax, 2>(form, type) : EmitSame<kMin, 2>(form, type);
}

void DecodeShift(Form& form, bool is_left) {
  const Type type = is_left ? form.TakeType({Type::kB16, Type::kB32, Type::kB64})
                            : form.TakeType({Type::kB16,
                                             Type::kB32,
                                             Type::kB64,
                                             Type::kU16,
                                             Type::kS16,
                                             Type::kU32,
                                             Type::kS32,
                                             Type::kU64,
                                             Type::kS64});
  form.Emit(ForInteger(type,
                       [&](auto zero) -> Execute {
                         using T = decltype(zero);
                         return is_left ? Each<kShiftLeft, T, T, uint32_t>
                                        : Each<kShiftRight, T, T, uint32_t>;
                       }),
            type,
            {type, Type::kU32});
}

template <auto F>
void EmitLogic(Form& form) {
  EmitSame<F, 2>(form, form.TakeType({Type::kB16, Type::kB32, Type::kB64}));
}

void DecodeDivRem(Form& form, bool is_div) {
  const Type type = form.TakeType(kIntegers);
  form.Emit(ForInteger(type,
                       [&](auto zero) -> Execute {
                         using T = decltype(zero);
                         return is_div ? EachLane<kDiv, T, T, T> : EachLane<kRem, T, T, T>;
                       }),
            type,
            {type, type});
}

void DecodeCount(Form& form, bool is_population) {
  const Type type = form.TakeType({Type::kB32, Type::kB64});
  if (type == Type::kB32) {
    form.Emit(is_population ? Each<kPopulation, uint32_t, uint32_t>
                            : Each<kLeadingZeros, uint32_t, uint32_t>,
              Type::kU32,
              {type});
  } else {
    form.Emit(is_population ? Each<kPopulation, uint32_t, uint64_t>
                            : Each<kLeadingZeros, uint32_t, uint64_t>,
              Type::kU32,
              {type});
  }
}

void DecodeFindBit(Form& form) {
  const bool as_shift = form.Take("shiftamt");
  const Type type = form.TakeType({Type::kU32, Type::kS32, Type::kU64, Type::kS64});
  form.Emit(ForInteger(type,
                       [&](auto zero) -> Execute {
                         using T = decltype(zero);
                         return as_shift ? EachLane<kFindBit<true>, uint32_t, T>
                                         : EachLane<kFindBit<false>, uint32_t, T>;
                       }),
            Type::kU32,
            {type});
}

void DecodeBitMask(Form& form, bool is_extension) {
  const bool clamps = form.Take("clamp");
  if (!clamps) form.Need("wrap");
  if (!is_extension) {
    form.Need("b32");
    return form.Emit(clamps ? Each<BitMask<true>, uint32_t, uint32_t, uint32_t>
                            : Each<BitMask<false>, uint32_t, uint32_t, uint32_t>,
                     Type::kB32,
                     {Type::kB32, Type::kB32});
  }
  const Type type = form.TakeType({Type::kU32, Type::kS32});
  const Execute execute =
      IsSigned(type)
          ? (clamps ? Each<SignOrZeroExtend<true, true>, uint32_t, uint32_t, uint32_t>
                    : Each<SignOrZeroExtend<false, true>, uint32_t, uint32_t, uint32_t>)
          : (clamps ? Each<SignOrZeroExtend<true, false>, uint32_t, uint32_t, uint32_t>
                    : Each<SignOrZeroExtend<false, false>, uint32_t, uint32_t, uint32_t>);
  form.Emit(execute, type, {type, Type::kU32});
}

// abs and neg of integers; the widest negative number stays what it is.
template <auto F>
void EmitSign(Form& form) {
  EmitSame<F, 1>(form, form.TakeType({Type::kS16, Type::kS32, Type::kS64}));
}

}  // namespace

bool DecodeInteger(Form& form, std::string_view opcode) {
  const bool is_float = IsFloatOpcode(form);
  if (opcode == "add" || opcode == "sub") {
    is_float ? DecodeFloatAdd(form, opcode) : DecodeAdd(form, opcode == "add", false);
  } else if (opcode == "addc" || opcode == "subc") {
    DecodeAdd(form, opcode == "addc", true);
  } else if (opcode == "mul") {
    is_float ? DecodeFloatAdd(form, opcode) : DecodeMul(form);
  } else if (opcode == "mad") {
    is_float ? DecodeFloatFma(form, true) : DecodeMad(form, false);
  } else if (opcode == "madc") {
    DecodeMad(form, true);
  } else if (opcode == "mul24" || opcode == "mad24") {
    Decode24(form, opcode == "mad24");
  } else if (opcode == "div" || opcode == "rem") {
    opcode == "div" && is_float ? DecodeFloatDivide(form) : DecodeDivRem(form, opcode == "div");
  } else if (opcode == "min" || opcode == "max") {
    is_float ? DecodeFloatMinMax(form, opcode == "max") : DecodeMinMax(form, opcode == "max");
  } else if (opcode == "abs") {
    is_float ? DecodeFloatSign(form, opcode) : EmitSign<kAbs>(form);
  } else if (opcode == "neg") {
    is_float ? DecodeFloatSign(form, opcode) : EmitSign<kNeg>(form);
  } else if (opcode == "sad") {
    EmitSame<kSad, 3>(form, form.TakeType(kIntegers));
  } else if (opcode == "and") {
    EmitLogic<kAnd>(form);
  } else if (opcode == "or") {
    EmitLogic<kOr>(form);
  } else if (opcode == "xor") {
    EmitLogic<kXor>(form);
  } else if (opcode == "not") {
    EmitSame<kNot, 1>(form, form.TakeType({Type::kB16, Type::kB32, Type::kB64}));
  } else if (opcode == "cnot") {
    EmitSame<kIsZero, 1>(form, form.TakeType({Type::kB16, Type::kB32, Type::kB64}));
  } else if (opcode == "shl" || opcode == "shr") {
    DecodeShift(form, opcode == "shl");
  } else if (opcode == "shf") {
    DecodeFunnel(form);
  } else if (opcode == "lop3") {
    DecodeLogic3(form);
  } else if (opcode == "popc" || opcode == "clz") {
    DecodeCount(form, opcode == "popc");
  } else if (opcode == "brev") {
    const Type type = form.TakeType({Type::kB32, Type::kB64});
    form.Emit(type == Type::kB32 ? Each<kReverse, uint32_t, uint32_t>
                                 : Each<kReverse, uint64_t, uint64_t>,
              type,
              {type});
  } else if (opcode == "bfind") {
    DecodeFindBit(form);
  } else if (opcode == "fns") {
    form.Need("b32");
    form.Emit(EachLane<kFindNthSet, uint32_t, uint32_t, uint32_t, int32_t>,
              Type::kB32,
              {Type::kB32, Type::kB32, Type::kS32});
  } else if (opcode == "bfe") {
    const Type type = form.TakeType({Type::kU32, Type::kS32, Type::kU64, Type::kS64});
    form.Emit(ForInteger(type,
                         [](auto zero) -> Execute {
                           using T = decltype(zero);
                           return Each<kExtract, T, T, uint32_t, uint32_t>;
                         }),
              type,
              {type, Type::kU32, Type::kU32});
  } else if (opcode == "bfi") {
    const Type type = form.TakeType({Type::kB32, Type::kB64});
    form.Emit(type == Type::kB32 ? Each<kInsert, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>
                                 : Each<kInsert, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t>,
              type,
              {type, type, Type::kU32, Type::kU32});
  } else if (opcode == "bmsk" || opcode == "szext") {
    DecodeBitMask(form, opcode == "szext");
  } else if (opcode == "dp4a" || opcode == "dp2a") {
    DecodeDot(form, opcode == "dp4a");
  } else {
    return false;
  }
  return true;
}

}  // namespace jax_fa4::emulator
