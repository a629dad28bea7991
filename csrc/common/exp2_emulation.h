// 2^x without the unit for exponentials, on the FMA units, two numbers at a time.
//
// Attention on Blackwell needs as many cycles of the unit for exponentials as of the tensor cores;
// a part of the exponentials computed here makes the unit wait for nobody.
//
// Source: Zadouri et al., "FlashAttention-4" (2026), section 3.1: Cody and Waite's split of x into
// an integer and a fraction, and a polynomial for the fraction's power. Theirs is of degree 3,
// whose error of 8.8e-5 is far below the rounding of weights to 16 bits; but the sum of a row's
// weights, and with it lse, is not rounded to that. Two degrees more cost a 30th of the softmax.

#ifndef JAX_FA4_CSRC_COMMON_EXP2_EMULATION_H_
#define JAX_FA4_CSRC_COMMON_EXP2_EMULATION_H_

#include "csrc/ptx/f32x2.h"

namespace jax_fa4 {

// Of numbers up to 127: the relative error is below 2.1e-7, and results below 2^-126 are at most
// that. 2^-inf is 0. NaN gives no NaN: callers see to it.
__device__ __forceinline__ float2 Exp2OnFmaUnits(float2 x) {
  // The least relative error of a polynomial of degree 5 with the constant 1 on [0, 1).
  constexpr float kC1 = 0x1.62e4bep-1f, kC2 = 0x1.ebdae6p-3f, kC3 = 0x1.c921acp-5f,
                  kC4 = 0x1.27634cp-7f, kC5 = 0x1.e9b62cp-10f;
  // The sum's last mantissa bit is worth 1: rounded down, its low bits are the integer part of x.
  constexpr float kIntegerPart = 0x1.8p23f;
  const auto both = [](float y) { return make_float2(y, y); };

  x = make_float2(fmaxf(x.x, -127.0f), fmaxf(x.y, -127.0f));
  const float2 shifted = ptx::add_rm_f32x2(x, both(kIntegerPart));
  const float2 fraction = ptx::sub_rn_f32x2(x, ptx::sub_rn_f32x2(shifted, both(kIntegerPart)));
  float2 power = ptx::fma_rn_f32x2(fraction, both(kC5), both(kC4));
  power = ptx::fma_rn_f32x2(power, fraction, both(kC3));
  power = ptx::fma_rn_f32x2(power, fraction, both(kC2));
  power = ptx::fma_rn_f32x2(power, fraction, both(kC1));
  power = ptx::fma_rn_f32x2(power, fraction, both(1));
  // The integer is added to the exponent, in which the other bits of `shifted` are lost.
  const auto scale = [](float y, float integer) {
    return __uint_as_float(__float_as_uint(y) + (__float_as_uint(integer) << 23));
  };
  return make_float2(scale(power.x, shifted.x), scale(power.y, shifted.y));
}

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_EXP2_EMULATION_H_
