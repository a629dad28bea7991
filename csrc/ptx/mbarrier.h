// mbarriers: barriers in shared memory at which threads arrive and asynchronous copies complete.
// Numbers are sections of the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_MBARRIER_H_
#define JAX_FA4_CSRC_PTX_MBARRIER_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.13.15.9 mbarrier.init: the barrier's phases each wait for `arrivals`.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"l"(__cvta_generic_to_shared(barrier)),
               "r"(arrivals)
               : "memory");
}

// 9.7.13.4 fence.mbarrier_init: shows initialised barriers to the copy engine and to other CTAs of
// the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// 9.7.13.15.13 mbarrier.arrive: what this thread did before is seen by those who wait.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"l"(__cvta_generic_to_shared(barrier))
               : "memory");
}

// 9.7.13.15.13 mbarrier.arrive, .expect_tx: arrives, and makes the phase wait for `bytes` of
// copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"l"(
                   __cvta_generic_to_shared(barrier)),
               "r"(bytes)
               : "memory");
}

// 9.7.13.15.16 mbarrier.try_wait, .parity: whether the phase of this parity has completed, after a
// while. The first phase has parity 0.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t completed;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(completed)
      : "l"(__cvta_generic_to_shared(barrier)), "r"(parity)
      : "memory");
  return completed != 0;
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_MBARRIER_H_
