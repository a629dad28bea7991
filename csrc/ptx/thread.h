// What a thread knows of itself. Numbers are sections of the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_THREAD_H_
#define JAX_FA4_CSRC_PTX_THREAD_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 10.1 %tid: the same as threadIdx.x, but read at this place in the code, and not kept from an
// earlier one.
__device__ __forceinline__ uint32_t tid_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_THREAD_H_
