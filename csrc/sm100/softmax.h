// The softmax of a row: all of it in one thread, a block of keys at a time.
//
// Logits are in base 2 here: a weight is 2^(s * scale_log2 - reference), where s is a product of
// query and key, and the reference is a maximum of the row, times scale_log2: that of the keys so
// far, or one that is at most 2^8 of weight lower. Rescaling the sums for less than that would cost
// time and gain no precision.
//
// Sources: Dao, "FlashAttention-2" (2023), section 3.1; Zadouri et al., "FlashAttention-4" (2026),
// section 3.1.

#ifndef JAX_FA4_CSRC_SM100_SOFTMAX_H_
#define JAX_FA4_CSRC_SM100_SOFTMAX_H_

#include "csrc/common/exp2_emulation.h"
#include "csrc/common/online_softmax.h"
#include "csrc/common/row_bounds.h"
#include "csrc/ptx/ex2.h"
#include "csrc/ptx/f32x2.h"
#include "csrc/ptx/scalar.h"
#include "csrc/sm100/variant.h"

namespace jax_fa4::sm100 {

// What products become. The sign of `scale` is in the products already: see NegatesProducts.
struct LogitScale {
  float scale;       // of products, or of what the cap makes of them: positive, or NaN
  float scale_log2;  // the same times log2(e)
  float into_cap;    // of products, to what TanhOfBinary takes; only under a cap

  __device__ __forceinline__ LogitScale(float of_logits, float softcap) {
    // A scale of 0 becomes the least normal number, for which all weights are 1 as they should be,
    // and yet -inf stays -inf.
    constexpr float kLeast = 0x1p-126f;
    const float magnitude = fabsf(of_logits);
    scale = softcap != 0 ? softcap : magnitude < kLeast ? kLeast : magnitude;
    scale_log2 = scale * kLog2E;
    into_cap = magnitude / softcap * (2 * kLog2E);
  }
};

__device__ __forceinline__ float2 Both(float x) { return make_float2(x, x); }

// tanh(x ln(2) / 2): what remains of e^2x is 2^x. Where the result is small, so is the difference
// of 1 that it would be: there a polynomial keeps the relative error below 2^-20 as elsewhere.
// (tanh.approx has one of 2^-11, far too coarse for a logit.)
__device__ __forceinline__ float2 TanhOfBinary(float2 x) {
  constexpr float kPolynomialUpTo = 1.15f;
  // The least relative error, 2^-23, of x times a polynomial of degree 3 in x^2 up to there.
  constexpr float kC0 = 0x1.62e43p-2f, kC1 = -0x1.c6ab7cp-7f, kC2 = 0x1.5c122ap-11f,
                  kC3 = -0x1.e19302p-16f;
  const float2 square = ptx::mul_rn_f32x2(x, x);
  float2 small = ptx::fma_rn_f32x2(square, Both(kC3), Both(kC2));
  small = ptx::fma_rn_f32x2(small, square, Both(kC1));
  small = ptx::fma_rn_f32x2(small, square, Both(kC0));
  small = ptx::mul_rn_f32x2(small, x);

  float2 large = make_float2(ptx::ex2_approx_ftz_f32(x.x), ptx::ex2_approx_ftz_f32(x.y));
  large = ptx::add_rn_f32x2(large, Both(1));
  large = make_float2(ptx::rcp_approx_ftz_f32(large.x), ptx::rcp_approx_ftz_f32(large.y));
  large = ptx::fma_rn_f32x2(large, Both(-2), Both(1));
  return make_float2(fabsf(x.x) < kPolynomialUpTo ? small.x : large.x,
                     fabsf(x.y) < kPolynomialUpTo ? small.y : large.y);
}

template <int32_t kKeys>
__device__ __forceinline__ void Cap(float (&s)[kKeys], float into_cap) {
#pragma unroll
  for (int32_t k = 0; k < kKeys; k += 2) {
    const float2 capped =
        TanhOfBinary(ptx::mul_rn_f32x2(make_float2(s[k], s[k + 1]), Both(into_cap)));
    s[k] = capped.x;
    s[k + 1] = capped.y;
  }
}

// Hides keys that are not in `seen`, of the block of keys that starts at `first`.
template <int32_t kKeys>
__device__ __forceinline__ void Mask(float (&s)[kKeys], KeySpan seen, uint32_t first) {
  const int32_t begin = static_cast<int32_t>(seen.begin - first);
  const int32_t end = static_cast<int32_t>(seen.end - first);
#pragma unroll
  for (int32_t fragment = 0; fragment < kKeys; fragment += 32) {
    const uint32_t keep =
        ptx::bits_from(begin, fragment) & ~ptx::bits_from(end, fragment);  // a bit for each key
#pragma unroll
    for (int32_t k = 0; k < 32; ++k) {
      s[fragment + k] = ptx::selp_f32_bit(s[fragment + k], -Infinity(), keep, k);
    }
  }
}

// The maximum of a row's products and of `start`. It is NaN if one of them is: the exponentials on
// the FMA units would lose it.
template <int32_t kKeys>
__device__ __forceinline__ float Maximum(const float (&s)[kKeys], float start) {
  constexpr int32_t kChains = 4;
  float highest[kChains];
#pragma unroll
  for (int32_t c = 0; c < kChains; ++c) highest[c] = ptx::max_nan_f32(s[2 * c], s[2 * c + 1]);
#pragma unroll
  for (int32_t k = 2 * kChains; k < kKeys; k += 2) {
    float& chain = highest[k / 2 % kChains];
    chain = ptx::max_nan_f32(chain, s[k], s[k + 1]);
  }
  return ptx::max_nan_f32(ptx::max_nan_f32(highest[0], highest[1], highest[2]), highest[3], start);
}

// The sum of a row's weights.
template <int32_t kKeys>
__device__ __forceinline__ float Sum(const float (&weights)[kKeys]) {
  constexpr int32_t kChains = 4;
  float2 sums[kChains];
#pragma unroll
  for (int32_t k = 0; k < kKeys; k += 2) {
    float2& chain = sums[k / 2 % kChains];
    const float2 two = make_float2(weights[k], weights[k + 1]);
    chain = k / 2 < kChains ? two : ptx::add_rn_f32x2(chain, two);
  }
  const float2 sum =
      ptx::add_rn_f32x2(ptx::add_rn_f32x2(sums[0], sums[1]), ptx::add_rn_f32x2(sums[2], sums[3]));
  return sum.x + sum.y;
}

// Turns the products of a fragment, from its key `kFirst` in the block on, into weights, and packs
// them for the tensor cores.
template <class Variant, int32_t kFirst>
__device__ __forceinline__ void Weigh(float (&s)[kTileKeys],
                                      uint32_t (&packed)[16],
                                      float scale_log2,
                                      float reference) {
#pragma unroll
  for (int32_t k = kFirst; k < kFirst + 32; k += 2) {
    float2 x = ptx::fma_rn_f32x2(make_float2(s[k], s[k + 1]), Both(scale_log2), Both(-reference));
    x = Variant::kEmulation.Holds(k)
            ? Exp2OnFmaUnits(x)
            : make_float2(ptx::ex2_approx_ftz_f32(x.x), ptx::ex2_approx_ftz_f32(x.y));
    s[k] = x.x;
    s[k + 1] = x.y;
    packed[(k - kFirst) / 2] = Pack<typename Variant::Element>(x.x, x.y);
  }
}

// The state of a row between blocks.
struct SoftmaxRow {
  static constexpr float kThreshold = 8;  // in base 2

  float maximum = -Infinity();  // times scale_log2 it is the reference
  float sum = 0;                // of weights

  struct Step {
    float decay;      // what is summed so far is to be multiplied by it
    float reference;  // of the weights of this block
  };

  // A reference is rounded, and so far off is every weight: too far where it is as large as this.
  static __device__ __forceinline__ bool IsHuge(float reference) {
    return fabsf(reference) > 0x1p20f;
  }

  // Takes in the maximum of all keys so far.
  __device__ __forceinline__ Step Raise(float highest, float scale_log2) {
    // Where all keys are hidden so far, weights are 2^-inf and not NaN.
    const float safe = highest == -Infinity() ? 0 : highest;
    const float rise = (maximum - safe) * scale_log2;
    if (rise >= -kThreshold) return {1, maximum * scale_log2};
    maximum = highest;
    return {ptx::ex2_approx_ftz_f32(rise), safe * scale_log2};
  }

  // For a row whose reference is huge, takes it from the products before they are scaled.
  template <int32_t kKeys>
  __device__ __forceinline__ void SubtractHuge(float (&s)[kKeys], Step& step) const {
    const float2 subtracted = Both(IsHuge(step.reference) ? maximum : 0);
    if (IsHuge(step.reference)) step.reference = 0;
#pragma unroll
    for (int32_t k = 0; k < kKeys; k += 2) {
      const float2 x = ptx::sub_rn_f32x2(make_float2(s[k], s[k + 1]), subtracted);
      s[k] = x.x;
      s[k + 1] = x.y;
    }
  }

  // When all blocks are through.
  __device__ __forceinline__ void Close(float scale_log2) {
    // The weights of infinite logits are NaN, but for those that the FMA units computed.
    const float reference = maximum * scale_log2;
    if (maximum != -Infinity() && fabsf(reference) == Infinity()) sum = reference - reference;
  }

  // Of a row with a sum other than 0. The reference, as rounded, is not quite maximum * scale: what
  // lies between them was given to each weight, unless SubtractHuge was at work.
  __device__ __forceinline__ LogSumExp Finish(const LogitScale& scale) const {
    const float top = maximum * scale.scale, top_error = fmaf(maximum, scale.scale, -top);
    const float reference = maximum * scale.scale_log2;
    const float excess = IsHuge(reference) ? 0 : fmaf(maximum, scale.scale_log2, -reference) * kLn2;
    const float log_sum = logf(sum), lse = top + log_sum;
    return {lse, log_sum - (lse - top) + top_error - excess};
  }

 private:
  static constexpr float kLn2 = 0.6931471805599453f;
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_SOFTMAX_H_
