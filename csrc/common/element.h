// Elements of 16 bits, by type.

#ifndef JAX_FA4_CSRC_COMMON_ELEMENT_H_
#define JAX_FA4_CSRC_COMMON_ELEMENT_H_

#include "csrc/ptx/convert.h"

namespace jax_fa4 {

template <class Element>
inline constexpr bool kIsBfloat16 = false;
template <>
inline constexpr bool kIsBfloat16<ptx::bfloat16> = true;

// Two elements in a register, the first in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  return kIsBfloat16<Element> ? ptx::cvt_rn_bf16x2_f32(low, high)
                              : ptx::cvt_rn_f16x2_f32(low, high);
}

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_ELEMENT_H_
