// Sums in global memory. Numbers are sections of the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_ACCUMULATE_H_
#define JAX_FA4_CSRC_PTX_ACCUMULATE_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.13.7 red, .v4.f32: adds to four neighbours, at a multiple of 16 bytes, each of them
// atomically.
__device__ __forceinline__ void red_global_add_v4_f32(float* sums, const float* x) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums),
               "f"(x[0]),
               "f"(x[1]),
               "f"(x[2]),
               "f"(x[3])
               : "memory");
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_ACCUMULATE_H_
