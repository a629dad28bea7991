// What a thread of the backward makes of the products: it has a key, and half of a block's rows.

#ifndef JAX_FA4_CSRC_SM100_BACKWARD_WEIGHTS_H_
#define JAX_FA4_CSRC_SM100_BACKWARD_WEIGHTS_H_

#include "csrc/common/element.h"
#include "csrc/common/lanes.h"
#include "csrc/common/logits.h"
#include "csrc/common/row_bounds.h"
#include "csrc/ptx/ex2.h"
#include "csrc/ptx/f32x2.h"
#include "csrc/ptx/scalar.h"
#include "csrc/sm100/backward_variant.h"

namespace jax_fa4::sm100 {

// By what products are multiplied: to logits in base 2, or under a cap into Cap and out of it.
struct BackwardScale {
  float scale_log2, into_cap;

  __device__ __forceinline__ BackwardScale(float scale, float softcap) {
    scale_log2 = (softcap != 0 ? softcap / LogitScale::kCapped : scale) * kLog2E;
    // Infinite, it would make NaN of products of 0.
    const float ratio = scale / softcap * (2 * kLog2E);
    into_cap = fabsf(ratio) > kLargest ? copysignf(kLargest, ratio) : ratio;
  }
};

// Cap, and the cap's slope, 1 - tanh^2: not as a difference of near-equal numbers, of which little
// would be left where the cap is all but reached.
struct CapAndSlope {
  float2 capped, slope;

  __device__ __forceinline__ explicit CapAndSlope(float2 x) {
    constexpr float kCapped = LogitScale::kCapped;
    // tanh is 1 - 2r, and 1 - tanh^2 is 4r (1 - r).
    float2 r =
        make_float2(ptx::ex2_approx_ftz_f32(fabsf(x.x)), ptx::ex2_approx_ftz_f32(fabsf(x.y)));
    r = ptx::add_rn_f32x2(r, Both(1));
    r = make_float2(ptx::rcp_approx_ftz_f32(r.x), ptx::rcp_approx_ftz_f32(r.y));
    slope = ptx::mul_rn_f32x2(ptx::mul_rn_f32x2(r, Both(4)), ptx::sub_rn_f32x2(Both(1), r));
    const float2 large = ptx::fma_rn_f32x2(r, Both(-2 * kCapped), Both(kCapped));
    const float2 small = CapNearZero(x);
    capped = make_float2(fabsf(x.x) < kCapNearZero ? small.x : copysignf(large.x, x.x),
                         fabsf(x.y) < kCapNearZero ? small.y : copysignf(large.y, x.y));
  }
};

// A 32 x 32 matrix of bits, a row in each lane, becomes its transpose.
__device__ __forceinline__ uint32_t TransposeBits(uint32_t x) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t apart = 16; apart > 0; apart /= 2) {
    // Bits of numbers without `apart` in them.
    const uint32_t low = ~0u / ((1u << apart) + 1);
    const uint32_t other = __shfl_xor_sync(kAllLanes, x, apart);
    x = lane & apart ? (x & ~low) | (other >> apart & low) : (x & low) | (other << apart & ~low);
  }
  return x;
}

// Whether a key is seen by each row of a thread's: a bit a row, 32 rows in a word.
template <int32_t kShare>
struct KeepRows {
  static constexpr int32_t kWords = kShare / 32;
  uint32_t words[kWords];

  // Of the spans of rows 32 i + lane; the warp's keys start at `key`. Whether one of the warp's
  // rows does not see all of its keys.
  __device__ __forceinline__ bool Set(const KeySpan (&seen)[kWords], uint32_t key) {
    bool all = true;
#pragma unroll
    for (int32_t i = 0; i < kWords; ++i) {
      words[i] = ptx::bits_from(static_cast<int32_t>(seen[i].begin - key), 0) &
                 ~ptx::bits_from(static_cast<int32_t>(seen[i].end - key), 0);
      all = all && words[i] == ~0u;
    }
    if (__all_sync(kAllLanes, all)) return false;
#pragma unroll
    for (int32_t i = 0; i < kWords; ++i) words[i] = TransposeBits(words[i]);
    return true;
  }
};

// Products become weights, in place: P = 2^(logit - lse); and under a cap also, in `slopes`, those
// times the slope of the cap.
template <class Variant, bool kMasked>
__device__ __forceinline__ void Weigh(float (&s)[32],
                                      uint32_t (&packed)[16],
                                      const float* lse_log2,
                                      const BackwardScale& scale,
                                      uint32_t keep) {
#pragma unroll
  for (int32_t row = 0; row < 32; row += 4) {
    const float4 lse = *reinterpret_cast<const float4*>(lse_log2 + row);
#pragma unroll
    for (int32_t i = row; i < row + 4; i += 2) {
      float2 x = make_float2(s[i], s[i + 1]), slope = Both(1);
      if (Variant::kKind == BackwardKind::kSoftcap) {
        const CapAndSlope cap(ptx::mul_rn_f32x2(x, Both(scale.into_cap)));
        x = cap.capped;
        slope = cap.slope;
      }
      // The unit for exponentials negates for nothing.
      x = ptx::fma_rn_f32x2(
          x, Both(-scale.scale_log2), i == row ? make_float2(lse.x, lse.y) : make_float2(lse.z, lse.w));
      x = make_float2(ptx::ex2_approx_ftz_f32(-x.x), ptx::ex2_approx_ftz_f32(-x.y));
      if (kMasked) {
        x = make_float2(ptx::selp_f32_bit(x.x, 0, keep, i), ptx::selp_f32_bit(x.y, 0, keep, i + 1));
      }
      packed[i / 2] = Pack<typename Variant::Element>(x.x, x.y);
      if (Variant::kKind == BackwardKind::kSoftcap) x = ptx::mul_rn_f32x2(x, slope);
      s[i] = x.x;
      s[i + 1] = x.y;
    }
  }
}

// dS = P (dP - delta).
template <class Variant>
__device__ __forceinline__ void Differentiate(const float (&weights)[32],
                                              const float (&dp)[32],
                                              uint32_t (&packed)[16],
                                              const float* deltas) {
#pragma unroll
  for (int32_t row = 0; row < 32; row += 4) {
    const float4 delta = *reinterpret_cast<const float4*>(deltas + row);
#pragma unroll
    for (int32_t i = row; i < row + 4; i += 2) {
      float2 x = ptx::sub_rn_f32x2(
          make_float2(dp[i], dp[i + 1]),
          i == row ? make_float2(delta.x, delta.y) : make_float2(delta.z, delta.w));
      x = ptx::mul_rn_f32x2(make_float2(weights[i], weights[i + 1]), x);
      packed[i / 2] = Pack<typename Variant::Element>(x.x, x.y);
    }
  }
}

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BACKWARD_WEIGHTS_H_
