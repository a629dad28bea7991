// What the tensor cores' products of queries and keys become.

#ifndef JAX_FA4_CSRC_COMMON_LOGITS_H_
#define JAX_FA4_CSRC_COMMON_LOGITS_H_

#include "csrc/common/online_softmax.h"
#include "csrc/ptx/ex2.h"
#include "csrc/ptx/f32x2.h"
#include "csrc/ptx/scalar.h"

namespace jax_fa4 {

__device__ __forceinline__ float2 Both(float x) { return make_float2(x, x); }

// By what products are multiplied, under a cap after Cap. The sign of the call's scale is in the
// products already.
struct LogitScale {
  float scale;       // positive, or NaN
  float scale_log2;  // the same times log2(e)
  float into_cap;    // of products, to what Cap takes; only under a cap

  __device__ __forceinline__ LogitScale(float of_logits, float softcap) {
    // A scale of 0 becomes the least normal number, for which all weights are 1 as they should be,
    // and yet -inf stays -inf.
    constexpr float kLeast = 0x1p-126f;
    const float magnitude = fabsf(of_logits);
    scale = softcap != 0 ? softcap / kCapped : magnitude < kLeast ? kLeast : magnitude;
    scale_log2 = scale * kLog2E;
    // Infinite, it would make NaN of products of 0.
    into_cap = ptx::min_nan_f32(magnitude / softcap * (2 * kLog2E), kLargest);
  }

  // What stands for a cap once reached, so that the largest cap times log2(e) is still finite.
  static constexpr float kCapped = 4;
};

// kCapped * tanh(x ln(2) / 2): what remains of e^2x is 2^x. Where the result is small, so is the
// difference of 1 that it would be: there a polynomial keeps the relative error below 2^-20 as
// elsewhere. (tanh.approx has one of 2^-11, far too coarse for a logit.)
inline constexpr float kCapNearZero = 1.15f;
// Of numbers up to that.
__device__ __forceinline__ float2 CapNearZero(float2 x) {
  constexpr float kCapped = LogitScale::kCapped;
  // The least relative error, 2^-23, of x times a polynomial of degree 3 in x^2 up to there.
  constexpr float kC0 = 0x1.62e43p-2f * kCapped, kC1 = -0x1.c6ab7cp-7f * kCapped,
                  kC2 = 0x1.5c122ap-11f * kCapped, kC3 = -0x1.e19302p-16f * kCapped;
  const float2 square = ptx::mul_rn_f32x2(x, x);
  float2 small = ptx::fma_rn_f32x2(square, Both(kC3), Both(kC2));
  small = ptx::fma_rn_f32x2(small, square, Both(kC1));
  small = ptx::fma_rn_f32x2(small, square, Both(kC0));
  return ptx::mul_rn_f32x2(small, x);
}
__device__ __forceinline__ float2 Cap(float2 x) {
  constexpr float kCapped = LogitScale::kCapped;
  const float2 small = CapNearZero(x);
  float2 large = make_float2(ptx::ex2_approx_ftz_f32(x.x), ptx::ex2_approx_ftz_f32(x.y));
  large = ptx::add_rn_f32x2(large, Both(1));
  large = make_float2(ptx::rcp_approx_ftz_f32(large.x), ptx::rcp_approx_ftz_f32(large.y));
  large = ptx::fma_rn_f32x2(large, Both(-2 * kCapped), Both(kCapped));
  return make_float2(fabsf(x.x) < kCapNearZero ? small.x : large.x,
                     fabsf(x.y) < kCapNearZero ? small.y : large.y);
}

template <int32_t kCount>
__device__ __forceinline__ void Cap(float (&s)[kCount], float into_cap) {
#pragma unroll
  for (int32_t i = 0; i < kCount; i += 2) {
    const float2 capped = Cap(ptx::mul_rn_f32x2(make_float2(s[i], s[i + 1]), Both(into_cap)));
    s[i] = capped.x;
    s[i + 1] = capped.y;
  }
}

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_LOGITS_H_
