// The softmax of a row whose logits come in pieces, and how the backward gets its weights again.
//
// Source: Dao, "FlashAttention-2" (2023), sections 3.1 and 3.2.

#ifndef JAX_FA4_CSRC_COMMON_ONLINE_SOFTMAX_H_
#define JAX_FA4_CSRC_COMMON_ONLINE_SOFTMAX_H_

#include "csrc/ptx/ex2.h"

namespace jax_fa4 {

inline constexpr float kLargest = 3.402823466e38f;
inline constexpr float kLog2E = 1.4426950408889634f;
__device__ __forceinline__ float Infinity() { return __int_as_float(0x7f800000); }

// e^x, for differences of logits: a caller subtracts first, which is exact where it matters, and
// scales afterwards, which costs x roundoffs. Weights below 2^-126 are 0, next to one of 1 or to a
// sum of 1.
__device__ __forceinline__ float Exp(float x) { return ptx::ex2_approx_ftz_f32(x * kLog2E); }

// What the forward leaves of a row to the backward. lse alone may be so large that rounding it
// loses log(total): `rounding` is what it lost.
struct LogSumExp {
  float lse, rounding;  // -inf and 0 of a row that sees nothing
};

// The running state of a row: maximum and sum of weights e^(logit - top). A sum may be over a
// share of the row, if each weight is in one share only.
struct OnlineSoftmax {
  // Finite, so that e^(-inf - top) is 0 and never NaN, also before any key was seen.
  float top = -kLargest;
  float total = 0;

  // Takes in the maximum of new logits; what was summed so far is to be multiplied by the result.
  __device__ __forceinline__ float Raise(float highest) {
    const float old = top;
    top = fmaxf(top, highest);
    const float decay = Exp(old - top);
    total *= decay;
    return decay;
  }

  // The weight of a logit that is at most `top`.
  __device__ __forceinline__ float Weigh(float logit) {
    const float weight = Exp(logit - top);
    total += weight;
    return weight;
  }

  // When `total` is that of the whole row, and not 0.
  __device__ __forceinline__ LogSumExp Finish() const {
    const float log_total = logf(total), lse = top + log_total;
    return {lse, log_total - (lse - top)};
  }
};

// The weights that a finished row gave its logits: e^(logit - lse), and what rounding took from
// lse.
struct RowWeights {
  float lse, correction;

  // Rows that see nothing, of lse = -inf, have weights of 0: e^(logit - inf).
  static __device__ __forceinline__ RowWeights Of(LogSumExp row) {
    return {row.lse == -Infinity() ? Infinity() : row.lse, Exp(-row.rounding)};
  }
  __device__ __forceinline__ float Weigh(float logit) const {
    return Exp(logit - lse) * correction;
  }
};

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_ONLINE_SOFTMAX_H_
