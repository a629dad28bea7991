// Words of global memory by which CTAs take turns. Numbers are sections of the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_TURNS_H_
#define JAX_FA4_CSRC_PTX_TURNS_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.9.8 ld, .acquire: what was done before the number was released is seen from here on.
__device__ __forceinline__ uint32_t ld_acquire_gpu_global(const uint32_t* address) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

// 9.7.13.7 red, .release, .add.
__device__ __forceinline__ void red_release_gpu_global_add(uint32_t* address, uint32_t x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_TURNS_H_
