// The softmax of a row by one thread, a block of keys at a time: see csrc/common/softmax_row.h.

#ifndef JAX_FA4_CSRC_SM100_SOFTMAX_H_
#define JAX_FA4_CSRC_SM100_SOFTMAX_H_

#include "csrc/common/element.h"
#include "csrc/common/exp2_emulation.h"
#include "csrc/common/row_bounds.h"
#include "csrc/common/softmax_row.h"
#include "csrc/ptx/ex2.h"
#include "csrc/ptx/f32x2.h"
#include "csrc/ptx/scalar.h"
#include "csrc/sm100/variant.h"

namespace jax_fa4::sm100 {

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

template <int32_t kKeys>
__device__ __forceinline__ void Subtract(float (&s)[kKeys], float subtracted) {
#pragma unroll
  for (int32_t k = 0; k < kKeys; k += 2) {
    const float2 x = ptx::sub_rn_f32x2(make_float2(s[k], s[k + 1]), Both(subtracted));
    s[k] = x.x;
    s[k + 1] = x.y;
  }
}

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_SOFTMAX_H_
