// Reductions over neighbouring lanes of a warp; every lane gets the result, and the same bits.

#ifndef JAX_FA4_CSRC_COMMON_LANES_H_
#define JAX_FA4_CSRC_COMMON_LANES_H_

#include "csrc/common/integers.h"

namespace jax_fa4 {

inline constexpr uint32_t kAllLanes = 0xffffffff;

// Over each kLanes lanes, a power of two, that start at a multiple of it.
template <int32_t kLanes>
__device__ __forceinline__ float LaneMax(float x) {
#pragma unroll
  for (int32_t apart = kLanes / 2; apart > 0; apart /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, apart));
  }
  return x;
}

template <int32_t kLanes>
__device__ __forceinline__ float LaneSum(float x) {
#pragma unroll
  for (int32_t apart = kLanes / 2; apart > 0; apart /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, apart);
  }
  return x;
}

// Where in shared memory it is.
__device__ __forceinline__ uint32_t SharedAddress(const void* x) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(x));
}

// A number that all lanes have, such that the compiler knows this and nothing else of it: it
// computes with it once for the warp, and does not compute it anew wherever it is needed.
__device__ __forceinline__ uint32_t Uniform(uint32_t x) { return __shfl_sync(kAllLanes, x, 0); }

// The same for the address of a variable in shared memory.
template <class Variable>
__device__ __forceinline__ Variable& UniformReference(Variable& x) {
  const uint32_t address = Uniform(SharedAddress(&x));
  return *static_cast<Variable*>(__cvta_shared_to_generic(address));
}

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_LANES_H_
