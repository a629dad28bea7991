// The copy engine: boxes of a tensor between global and shared memory. Numbers are sections of the
// PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_COPY_H_
#define JAX_FA4_CSRC_PTX_COPY_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.9.27.1.2 cp.async.bulk.tensor, global to shared memory: the box at the coordinates, innermost
// first. What lies outside of the tensor is filled with zeros. Its bytes, these too, complete on
// `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(
    void* box, const void* map, int32_t column, int32_t row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"l"(__cvta_generic_to_shared(box)),
      "l"(map),
      "r"(column),
      "r"(row),
      "l"(__cvta_generic_to_shared(barrier))
      : "memory");
}

// 9.7.9.27.1.2 cp.async.bulk.tensor, shared to global memory: what lies outside of the tensor is
// not written. Part of the thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(const void* map,
                                                              int32_t column,
                                                              int32_t row,
                                                              const void* box) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column),
      "r"(row),
      "l"(__cvta_generic_to_shared(box))
      : "memory");
}

// The same for tensors of four dimensions.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_load(
    void* box, const void* map, int32_t x, int32_t y, int32_t z, int32_t w, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"l"(__cvta_generic_to_shared(box)),
      "l"(map),
      "r"(x),
      "r"(y),
      "r"(z),
      "r"(w),
      "l"(__cvta_generic_to_shared(barrier))
      : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(
    const void* map, int32_t x, int32_t y, int32_t z, int32_t w, const void* box) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], "
      "[%5];" ::"l"(map),
      "r"(x),
      "r"(y),
      "r"(z),
      "r"(w),
      "l"(__cvta_generic_to_shared(box))
      : "memory");
}

// 9.7.13.4 fence.proxy.async: the copy engine and the tensor cores see what this thread has stored
// to shared memory.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// 9.7.9.27.2.1 cp.async.bulk.commit_group: closes the thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// 9.7.9.27.2.2 cp.async.bulk.wait_group.read: waits until all but the latest kGroups bulk groups
// have read shared memory, which may then be overwritten or given up.
template <int32_t kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_COPY_H_
