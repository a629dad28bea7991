// Powers of two: PTX ISA 9.7.3, ex2.

#ifndef JAX_FA4_CSRC_PTX_EX2_H_
#define JAX_FA4_CSRC_PTX_EX2_H_

namespace jax_fa4::ptx {

// 2^x with a relative error of 2^-22; results below 2^-126 are 0.
__device__ __forceinline__ float ex2_approx_ftz_f32(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_EX2_H_
