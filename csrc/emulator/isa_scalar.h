// What the decoders of scalar instructions share: operand types, and loops over the lanes of a
// warp.

#ifndef JAX_FA4_CSRC_EMULATOR_ISA_SCALAR_H_
#define JAX_FA4_CSRC_EMULATOR_ISA_SCALAR_H_

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "csrc/emulator/machine.h"
#include "csrc/emulator/numerics.h"
#include "csrc/emulator/program.h"

namespace jax_fa4::emulator {

inline constexpr uint32_t kAllLanes = 0xffffffff;

// Types of instructions (PTX ISA 5.2).
enum class Type : uint8_t {
  kNone,
  kPred,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kF16,
  kBf16,
  kB32,
  kU32,
  kS32,
  kF32,
  kF16x2,
  kBf16x2,
  kU16x2,
  kS16x2,
  kB64,
  kU64,
  kS64,
  kF64,
  kF32x2,
  kB128,
};
Type TypeOf(std::string_view name);  // kNone if it is no type
int BitsOf(Type type);
bool IsSigned(Type type);
bool IsFloat(Type type);  // of 32 or 64 bits, not packed

// ---- Lanes

// Values of up to 32 bits are in words of 32, the rest of which is zero.
template <typename T>
using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T>
T Unpack(Word<T> word) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::bit_cast<T>(word);
  } else {
    return static_cast<T>(word);
  }
}

template <typename T>
Word<T> Pack(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::bit_cast<Word<T>>(value);
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

template <typename T>
const Word<T>* SourceRow(Context& context, const Ref& ref) {
  return reinterpret_cast<const Word<T>*>(context.Row(ref));
}
template <typename T>
Word<T>* DestinationRow(Context& context, const Ref& ref) {
  return reinterpret_cast<Word<T>*>(context.MutableRow(ref));
}

// Lanes outside of the mask keep what they have.
template <typename W>
void Blend(W* to, const W* from, uint32_t mask) {
#pragma GCC ivdep
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = (mask >> lane & 1) != 0 ? from[lane] : to[lane];
  }
}

// The same value for all lanes of the mask.
template <typename W>
void Fill(Context& context, const Ref& ref, W value) {
  W* const to = DestinationRow<W>(context, ref);
  for (int lane = 0; lane < kLanes; ++lane) {
    to[lane] = (context.mask >> lane & 1) != 0 ? value : to[lane];
  }
}

inline void SetLaneValue(Context& context, const Ref& ref, int lane, uint64_t value) {
  if (ref.bits == 64) {
    context.MutableWide(ref)[lane] = value;
  } else {
    context.MutableRow(ref)[lane] =
        static_cast<uint32_t>(value) & (ref.bits == 16 ? 0xffff : 0xffffffff);
  }
}

// destination[0] = F(source[0], source[1], ...) for all lanes, as vector code. F must stand any
// input, since it also sees lanes outside of the mask. A destination may be one of the sources but
// never overlaps one otherwise (the register allocation of program.cc sees to that), so the loops
// have no dependence.
template <auto F, typename R, typename... A, size_t... I>
void EachOf(Context& context, const Inst& inst, std::index_sequence<I...>) {
  Word<R>* const to = DestinationRow<R>(context, inst.destination[0]);
  const auto run = [](Word<R>* out, const Word<A>*... in) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) {
      out[lane] = Pack<R>(static_cast<R>(F(Unpack<A>(in[lane])...)));
    }
  };
  if (context.mask == kAllLanes) {
    run(to, SourceRow<A>(context, inst.source[I])...);
  } else {
    Word<R> all[kLanes];
    run(all, SourceRow<A>(context, inst.source[I])...);
    Blend(to, all, context.mask);
  }
}
template <auto F, typename R, typename... A>
Outcome Each(Context& context, const Inst& inst) {
  EachOf<F, R, A...>(context, inst, std::index_sequence_for<A...>());
  return Outcome::kNext;
}

// The same, lane by lane, for what is no vector code: F(inst, source[0], ...), only in lanes of the
// mask.
template <auto F, typename R, typename... A, size_t... I>
void EachLaneOf(Context& context, const Inst& inst, std::index_sequence<I...>) {
  Word<R>* const to = DestinationRow<R>(context, inst.destination[0]);
  for (uint32_t rest = context.mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    to[lane] =
        Pack<R>(static_cast<R>(F(inst, Unpack<A>(SourceRow<A>(context, inst.source[I])[lane])...)));
  }
}
template <auto F, typename R, typename... A>
Outcome EachLane(Context& context, const Inst& inst) {
  EachLaneOf<F, R, A...>(context, inst, std::index_sequence_for<A...>());
  return Outcome::kNext;
}

// ---- Decoding

template <typename Function>
Execute ForInteger(Type type, Function function) {
  switch (type) {
    case Type::kB16:
    case Type::kU16:
      return function(uint16_t());
    case Type::kS16:
      return function(int16_t());
    case Type::kB32:
    case Type::kU32:
      return function(uint32_t());
    case Type::kS32:
      return function(int32_t());
    case Type::kB64:
    case Type::kU64:
      return function(uint64_t());
    case Type::kS64:
      return function(int64_t());
    default:
      return nullptr;
  }
}

// One instruction on its way from text to Inst.
class Form {
 public:
  Form(Decoder& decoder, Parts& parts) : decoder(decoder), parts(parts) {}

  bool Take(std::string_view part) { return parts.Take(part); }
  // The next part, which must be one of these types.
  Type TakeType(std::initializer_list<Type> types);
  // One of .rn, .rz, .rm, .rp, if the next part is one.
  bool TakeRounding(Rounding* rounding);
  // The next part must be this.
  void Need(std::string_view part);
  [[noreturn]] void Refuse();  // the next part, which is not supported
  // No part may be left.
  void Finish();
  Inst& inst() { return decoder.inst(); }
  const ptx::Operand& operand(size_t i) const { return decoder.Operand(i); }

  // An operand of the type. Constants must suit it.
  Ref Source(const ptx::Operand& operand, Type type, bool any_width = false);
  Ref Destination(const ptx::Operand& operand, Type type, bool any_width = false);
  // `d, a, b, ...` with nothing else: ends the opcode too.
  void Emit(Execute execute, Type destination, std::initializer_list<Type> sources);

  Decoder& decoder;
  Parts& parts;
};

bool DecodeInteger(Form& form, std::string_view opcode);  // isa_scalar_integer.cc
bool DecodeFloat(Form& form, std::string_view opcode);    // isa_scalar_float.cc
bool DecodeConvert(Form& form, std::string_view opcode);  // isa_scalar_convert.cc
// The floating-point halves of instructions that have both.
void DecodeFloatAdd(Form& form, std::string_view opcode);
void DecodeFloatFma(Form& form, bool is_mad);
void DecodeFloatDivide(Form& form);
void DecodeFloatSign(Form& form, std::string_view opcode);
void DecodeFloatMinMax(Form& form, bool is_max);

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_ISA_SCALAR_H_
