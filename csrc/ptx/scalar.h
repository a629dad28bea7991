// Instructions on single numbers that C++ has no word for. Numbers are sections of the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_SCALAR_H_
#define JAX_FA4_CSRC_PTX_SCALAR_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.3.12 max, .NaN: NaN if one of the numbers is, unlike fmaxf. Three operands since sm_100.
__device__ __forceinline__ float max_nan_f32(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
__device__ __forceinline__ float max_nan_f32(float a, float b, float c) {
  float d;
  asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// 9.7.3.11 min, .NaN.
__device__ __forceinline__ float min_nan_f32(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// 9.7.3.13 rcp, with a relative error of 2^-23.
__device__ __forceinline__ float rcp_approx_ftz_f32(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.8.8 shl, which gives 0 where it shifts by 32 or more: the bits from number x - first on. In
// C++ the compiler makes more instructions of it, since it moves `first` behind the maximum.
__device__ __forceinline__ uint32_t bits_from(int32_t x, int32_t first) {
  uint32_t y;
  asm("{\n"
      ".reg .s32 t;\n"
      "sub.s32 t, %1, %2;\n"
      "max.s32 t, t, 0;\n"
      "shl.b32 %0, %3, t;\n"
      "}"
      : "=r"(y)
      : "r"(x), "r"(first), "r"(~0u));
  return y;
}

// 9.7.7.3 selp: a if this bit of x is set, else b. For all bits alike, so that ptxas moves many of
// them to predicates at once; in C++ the compiler makes other tests of the first and the last.
__device__ __forceinline__ float selp_f32_bit(float a, float b, uint32_t x, int32_t bit) {
  float y;
  asm("{\n"
      ".reg .pred p;\n"
      ".reg .b32 t;\n"
      "and.b32 t, %3, %4;\n"
      "setp.ne.u32 p, t, 0;\n"
      "selp.f32 %0, %1, %2, p;\n"
      "}"
      : "=f"(y)
      : "f"(a), "f"(b), "r"(x), "r"(1u << bit));
  return y;
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_SCALAR_H_
