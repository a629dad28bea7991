// What warps do as a whole: one lane out of many, registers, named barriers. Numbers are sections
// of the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_WARP_H_
#define JAX_FA4_CSRC_PTX_WARP_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.13.14 elect.sync: true in one lane of the warp, always the same one.
__device__ __forceinline__ bool elect_sync() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// 9.7.19.5 setmaxnreg: from here on each thread has so many registers, a multiple of 8 from 24 to
// 256. All warps of a warpgroup call it. .inc waits until others have given up enough.
template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// 9.7.13.1 bar: a named barrier of so many threads of the CTA. What threads did before they arrive
// is seen by those who wait.
__device__ __forceinline__ void bar_arrive(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_sync(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_WARP_H_
