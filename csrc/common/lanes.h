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

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_LANES_H_
