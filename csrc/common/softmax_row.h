// The softmax of a row whose products come from the tensor cores a block of keys at a time.
//
// Logits are in base 2 here: a weight is 2^(s * scale_log2 - reference), where s is a product of
// query and key, and the reference is a maximum of the row, times scale_log2: that of the keys so
// far, or one that is at most 2^8 of weight lower. Rescaling the sums for less than that would cost
// time and gain no precision.
//
// Sources: Dao, "FlashAttention-2" (2023), section 3.1; Zadouri et al., "FlashAttention-4" (2026),
// section 3.1.

#ifndef JAX_FA4_CSRC_COMMON_SOFTMAX_ROW_H_
#define JAX_FA4_CSRC_COMMON_SOFTMAX_ROW_H_

#include "csrc/common/logits.h"
#include "csrc/common/online_softmax.h"
#include "csrc/ptx/ex2.h"

namespace jax_fa4 {

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

  // What is to be subtracted from the products before they are scaled: of a row whose reference is
  // huge, all of it.
  __device__ __forceinline__ float SubtractFirst(Step& step) const {
    if (!IsHuge(step.reference)) return 0;
    step.reference = 0;
    return maximum;
  }

  // When all blocks are through.
  __device__ __forceinline__ void Close(float scale_log2) {
    // The weights of infinite logits are NaN, but for those that the FMA units computed.
    const float reference = maximum * scale_log2;
    if (maximum != -Infinity() && fabsf(reference) == Infinity()) sum = reference - reference;
  }

  // Of a row with a sum other than 0. The reference, as rounded, is not quite maximum * scale: what
  // lies between them was given to each weight, unless SubtractFirst was at work.
  __device__ __forceinline__ LogSumExp Finish(const LogitScale& scale) const {
    constexpr float kLn2 = 0.6931471805599453f;
    const float top = maximum * scale.scale, top_error = fmaf(maximum, scale.scale, -top);
    const float reference = maximum * scale.scale_log2;
    const float excess = IsHuge(reference) ? 0 : fmaf(maximum, scale.scale_log2, -reference) * kLn2;
    const float log_sum = logf(sum), lse = top + log_sum;
    return {lse, log_sum - (lse - top) + top_error - excess};
  }
};

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_SOFTMAX_ROW_H_
