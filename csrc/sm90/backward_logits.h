// What the backward makes of products of keys and queries: weights, and the slope of the cap.

#ifndef JAX_FA4_CSRC_SM90_BACKWARD_LOGITS_H_
#define JAX_FA4_CSRC_SM90_BACKWARD_LOGITS_H_

#include "csrc/common/logits.h"
#include "csrc/ptx/ex2.h"
#include "csrc/ptx/scalar.h"

namespace jax_fa4::sm90 {

// By what products are multiplied, under a cap after CapWithSlope.
struct BackwardScale {
  float scale_log2;  // of logits, times log2(e); of any sign
  float into_cap;    // of products, to what CapWithSlope takes; only under a cap

  __device__ __forceinline__ BackwardScale(float scale, float softcap)
      : scale_log2((softcap != 0 ? softcap / LogitScale::kCapped : scale) * kLog2E),
        // Infinite, it would make NaN of products of 0.
        into_cap(
            copysignf(ptx::min_nan_f32(fabsf(scale) / softcap * (2 * kLog2E), kLargest), scale)) {}
};

struct CappedWithSlope {
  float capped, slope;
};
// The same as Cap of csrc/common/logits.h, of one number; and the slope of tanh there, which loses
// nothing where the cap is all but reached: with r = 1 / (e^2x + 1) it is 4 r (1 - r).
__device__ __forceinline__ CappedWithSlope CapWithSlope(float x) {
  constexpr float kPolynomialUpTo = 1.15f, kCapped = LogitScale::kCapped;
  constexpr float kC0 = 0x1.62e43p-2f * kCapped, kC1 = -0x1.c6ab7cp-7f * kCapped,
                  kC2 = 0x1.5c122ap-11f * kCapped, kC3 = -0x1.e19302p-16f * kCapped;
  const float square = x * x;
  const float small = fmaf(fmaf(fmaf(square, kC3, kC2), square, kC1), square, kC0) * x;
  const float r = ptx::rcp_approx_ftz_f32(ptx::ex2_approx_ftz_f32(x) + 1);
  const float large = fmaf(r, -2 * kCapped, kCapped);
  return {fabsf(x) < kPolynomialUpTo ? small : large, fmaf(r * -4, r, r * 4)};
}

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_BACKWARD_LOGITS_H_
