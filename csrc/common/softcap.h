// The soft cap of logits, c * tanh(logit / c), and its slope.

#ifndef JAX_FA4_CSRC_COMMON_SOFTCAP_H_
#define JAX_FA4_CSRC_COMMON_SOFTCAP_H_

namespace jax_fa4 {

// The slope is a difference of near-equal numbers where the cap is all but reached: so tanhf and
// not tanh.approx, whose error of 2^-11 would be all of it.
struct Softcap {
  float cap, inverse;

  __device__ __forceinline__ explicit Softcap(float c) : cap(c), inverse(1 / c) {}
  // logit / c on the capped scale, from which both other numbers follow.
  __device__ __forceinline__ float Ratio(float logit) const { return tanhf(logit * inverse); }
  __device__ __forceinline__ float Capped(float ratio) const { return cap * ratio; }
  __device__ __forceinline__ float Slope(float ratio) const { return fmaf(-ratio, ratio, 1); }
};

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_SOFTCAP_H_
