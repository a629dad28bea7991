// 16-bit floating-point numbers, and their conversions: PTX ISA 9.7.9, cvt and mov.

#ifndef JAX_FA4_CSRC_PTX_CONVERT_H_
#define JAX_FA4_CSRC_PTX_CONVERT_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// Only what memory holds: arithmetic is float32's.
struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

__device__ __forceinline__ float cvt_f32_f16(float16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Rounds to nearest, ties to even, as do all conversions here.
__device__ __forceinline__ float16 cvt_rn_f16_f32(float x) {
  float16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// A bfloat16 is the upper half of a float32. (cvt.f32.bf16 is for sm_90 and newer.)
__device__ __forceinline__ float mov_f32_bf16(bfloat16 x) {
  float y;
  asm("mov.b32 %0, {%1, %2};" : "=f"(y) : "h"(uint16_t{0}), "h"(x.bits));
  return y;
}

__device__ __forceinline__ bfloat16 cvt_rn_bf16_f32(float x) {
  bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Two at a time: the first is the lower half.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// The same by type, for code that is written once for all element types.
__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(float16 x) { return cvt_f32_f16(x); }
__device__ __forceinline__ float ToFloat(bfloat16 x) { return mov_f32_bf16(x); }
__device__ __forceinline__ void FromFloat(float x, float& y) { y = x; }
__device__ __forceinline__ void FromFloat(float x, float16& y) { y = cvt_rn_f16_f32(x); }
__device__ __forceinline__ void FromFloat(float x, bfloat16& y) { y = cvt_rn_bf16_f32(x); }

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_CONVERT_H_
