// The order in which a block of rows of the backward's dquery_sum lies: that in which its kernels'
// accumulators are stored without a detour, so that whole pieces of 16 bytes are added.

#ifndef JAX_FA4_CSRC_COMMON_DQUERY_SUM_H_
#define JAX_FA4_CSRC_COMMON_DQUERY_SUM_H_

#include "csrc/common/integers.h"

namespace jax_fa4 {

// Blackwell: a thread has a row. Pieces of four columns, each of all rows in turn.
namespace sm100 {
JAX_FA4_HOST_DEVICE constexpr int32_t PlaceInDquerySum(int32_t row_block,
                                                       int32_t row,
                                                       int32_t column) {
  return (column / 4 * row_block + row) * 4 + column % 4;
}
}  // namespace sm100

// Hopper: units of 64 rows, each one warpgroup's accumulator (PTX ISA 9.7.15.5.1.1.3): for each
// eight columns, two columns of a row and of the one eight rows below by each of 128 threads.
namespace sm90 {
JAX_FA4_HOST_DEVICE constexpr int32_t PlaceInDquerySum(int32_t width, int32_t row, int32_t column) {
  const int32_t thread = row % 64 / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  return row / 64 * 64 * width + (column / 8 * 128 + thread) * 4 + row % 16 / 8 * 2 + column % 2;
}
}  // namespace sm90

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_DQUERY_SUM_H_
