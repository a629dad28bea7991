// Pairs of float32: in one instruction since sm_100, before that in two. Numbers are sections of
// the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_F32X2_H_
#define JAX_FA4_CSRC_PTX_F32X2_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
inline constexpr bool kHasF32x2 = false;
#else
inline constexpr bool kHasF32x2 = true;
#endif

__device__ __forceinline__ uint64_t mov_b64(float2 x) {
  uint64_t y;
  asm("mov.b64 %0, {%1, %2};" : "=l"(y) : "f"(x.x), "f"(x.y));
  return y;
}
__device__ __forceinline__ float2 mov_b64(uint64_t x) {
  float2 y;
  asm("mov.b64 {%0, %1}, %2;" : "=f"(y.x), "=f"(y.y) : "l"(x));
  return y;
}

// 9.7.3.6 fma, .f32x2.
__device__ __forceinline__ float2 fma_rn_f32x2(float2 a, float2 b, float2 c) {
  if (!kHasF32x2) return make_float2(__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y));
  uint64_t d;
  asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(d) : "l"(mov_b64(a)), "l"(mov_b64(b)), "l"(mov_b64(c)));
  return mov_b64(d);
}

// 9.7.3.5 mul, .f32x2.
__device__ __forceinline__ float2 mul_rn_f32x2(float2 a, float2 b) {
  if (!kHasF32x2) return make_float2(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y));
  uint64_t d;
  asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(mov_b64(a)), "l"(mov_b64(b)));
  return mov_b64(d);
}

// 9.7.3.3 add, .f32x2: to nearest, and towards minus infinity.
__device__ __forceinline__ float2 add_rn_f32x2(float2 a, float2 b) {
  if (!kHasF32x2) return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y));
  uint64_t d;
  asm("add.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(mov_b64(a)), "l"(mov_b64(b)));
  return mov_b64(d);
}
__device__ __forceinline__ float2 add_rm_f32x2(float2 a, float2 b) {
  if (!kHasF32x2) return make_float2(__fadd_rd(a.x, b.x), __fadd_rd(a.y, b.y));
  uint64_t d;
  asm("add.rm.f32x2 %0, %1, %2;" : "=l"(d) : "l"(mov_b64(a)), "l"(mov_b64(b)));
  return mov_b64(d);
}

// 9.7.3.4 sub, .f32x2.
__device__ __forceinline__ float2 sub_rn_f32x2(float2 a, float2 b) {
  if (!kHasF32x2) return make_float2(__fsub_rn(a.x, b.x), __fsub_rn(a.y, b.y));
  uint64_t d;
  asm("sub.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(mov_b64(a)), "l"(mov_b64(b)));
  return mov_b64(d);
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_F32X2_H_
