// What kernels read of their parameters in the same way. All have fields of these names.

#ifndef JAX_FA4_CSRC_COMMON_OPERANDS_H_
#define JAX_FA4_CSRC_COMMON_OPERANDS_H_

#include "csrc/common/row_bounds.h"

namespace jax_fa4 {

// Which of the `length` elements along an operand's leading axis batch element `batch` uses. There
// is mostly one for each, and no need of a division: in a short call several would take long.
__device__ __forceinline__ uint32_t ElementOf(uint32_t batch, uint32_t length) {
  return batch < length ? batch : batch % length;
}

template <class Parameters>
__device__ __forceinline__ float ScaleOf(const Parameters& p, uint32_t batch) {
  return p.scale[ElementOf(batch, p.scale_batch)];
}

template <class Parameters>
__device__ __forceinline__ RowBounds BoundsOf(const Parameters& p, uint32_t batch) {
  const bool arrays = p.lower != nullptr;
  return {arrays ? p.lower + int64_t{ElementOf(batch, p.lower_batch)} * p.rows : nullptr,
          arrays ? p.upper + int64_t{ElementOf(batch, p.upper_batch)} * p.rows : nullptr,
          p.rows,
          p.keys,
          p.band_low,
          p.band_high};
}

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_OPERANDS_H_
