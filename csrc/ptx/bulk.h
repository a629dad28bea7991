// The copy engine: bytes without a tensor map. Numbers are sections of the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_BULK_H_
#define JAX_FA4_CSRC_PTX_BULK_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.9.25.4.1 cp.async.bulk, global to shared memory: a multiple of 16 bytes, at such addresses.
// They complete on `barrier`.
__device__ __forceinline__ void cp_async_bulk_load(void* to,
                                                   const void* from,
                                                   uint32_t bytes,
                                                   uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"l"(
          __cvta_generic_to_shared(to)),
      "l"(from),
      "r"(bytes),
      "l"(__cvta_generic_to_shared(barrier))
      : "memory");
}

// 9.7.9.25.4.2 cp.reduce.async.bulk: adds floats of shared memory to floats of global memory, each
// of them atomically. Part of the thread's current bulk group.
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(float* to,
                                                             const void* from,
                                                             uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "l"(__cvta_generic_to_shared(from)),
      "r"(bytes)
      : "memory");
}

// 9.7.9.25.3.2 cp.async.bulk.wait_group: waits until all of this thread's bulk groups are through,
// and what they wrote is seen by it.
__device__ __forceinline__ void cp_async_bulk_wait_group_0() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// 9.7.13.4 fence.proxy.async, of all memory: orders what this thread knows to have been done in one
// of the two, by the copy engine and otherwise, before what it does next in the other.
__device__ __forceinline__ void fence_proxy_async_all() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_BULK_H_
