// What the kernels before and after the backward on tensor cores (backward_rows.cu) and their host
// code agree on besides parameters.

#ifndef JAX_FA4_CSRC_COMMON_BACKWARD_ROWS_H_
#define JAX_FA4_CSRC_COMMON_BACKWARD_ROWS_H_

#include "csrc/common/integers.h"

namespace jax_fa4::backward_rows {

// A tile is what a CTA has: in `before` some positions of some neighbouring heads, whose rows lie
// one behind the other; in `after` positions of one head. Four threads share a row of `before`, and
// two rows of `after`.
inline constexpr int32_t kTileRows = 64;
inline constexpr int32_t kBeforeThreads = 4 * kTileRows;
inline constexpr int32_t kAfterThreads = 2 * kTileRows;

// Of a tile of `before`: a power of two.
JAX_FA4_HOST_DEVICE constexpr int32_t HeadsOfTile(int32_t heads) {
  return heads > 4 ? 8 : heads > 2 ? 4 : heads;
}

}  // namespace jax_fa4::backward_rows

#endif  // JAX_FA4_CSRC_COMMON_BACKWARD_ROWS_H_
