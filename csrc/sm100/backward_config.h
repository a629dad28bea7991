// What the Blackwell backward and its host code agree on besides parameters: tiles, the plans of
// shared and of tensor memory.

#ifndef JAX_FA4_CSRC_SM100_BACKWARD_CONFIG_H_
#define JAX_FA4_CSRC_SM100_BACKWARD_CONFIG_H_

#include "csrc/common/backward_parameters.h"
#include "csrc/common/integers.h"
#include "csrc/common/panels.h"

namespace jax_fa4::sm100 {

// Head widths that kernels are compiled for, and their tiles: rows of query and dout at a time, and
// the keys that a CTA keeps. A narrower head runs padded with zeros, in shared memory only, by the
// least of these that holds it.
struct BackwardShape {
  int32_t width, value_width;  // D, Dv
  int32_t row_block, key_block;
};
inline constexpr BackwardShape kBackwardShapes[] = {
    {64, 64, 128, 128}, {96, 96, 128, 128}, {128, 128, 128, 128}, {192, 128, 64, 128}};

JAX_FA4_HOST_DEVICE constexpr int32_t BackwardThreads(BackwardShape) { return 512; }

// Shared memory of a CTA: control, K, V, the stages of Q and of dO, dS, and stages by which dQ
// leaves.
inline constexpr uint32_t kBackwardControlBytes = 3 << 10;
inline constexpr int32_t kBackwardQueryStages = 2;
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardKeyBytes(BackwardShape shape) {
  return TileBytes(shape.key_block, shape.width);
}
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardValueBytes(BackwardShape shape) {
  return TileBytes(shape.key_block, shape.value_width);
}
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardQueryBytes(BackwardShape shape) {
  return TileBytes(shape.row_block, shape.width);
}
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardDoutBytes(BackwardShape shape) {
  return TileBytes(shape.row_block, shape.value_width);
}
// A row is a key's.
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardDlogitsBytes(BackwardShape shape) {
  return TileBytes(shape.key_block, shape.row_block);
}
JAX_FA4_HOST_DEVICE constexpr int32_t BackwardDoutStages(BackwardShape shape) {
  return BackwardDoutBytes(shape) <= 16 << 10 ? 2 : 1;
}

// dQ of a block of rows leaves in an even number of pieces, of so many columns of all rows, which
// take turns with two stages. Of 64 rows there is a stage for all of it.
JAX_FA4_HOST_DEVICE constexpr int32_t BackwardPieceColumns(BackwardShape shape) {
  return shape.row_block == 64 ? 64 : shape.width == 96 ? 24 : 32;
}
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardPieceBytes(BackwardShape shape) {
  return BackwardPieceColumns(shape) * shape.row_block * sizeof(float);
}
JAX_FA4_HOST_DEVICE constexpr int32_t BackwardPieceStages(BackwardShape shape) {
  return shape.row_block == 64 ? shape.width / BackwardPieceColumns(shape) : 2;
}

JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardSharedBytes(BackwardShape shape) {
  return kBackwardControlBytes + BackwardKeyBytes(shape) + BackwardValueBytes(shape) +
         kBackwardQueryStages * BackwardQueryBytes(shape) +
         BackwardDoutStages(shape) * BackwardDoutBytes(shape) + BackwardDlogitsBytes(shape) +
         BackwardPieceStages(shape) * BackwardPieceBytes(shape);
}
static_assert(BackwardSharedBytes(kBackwardShapes[0]) == (3 + 128 + 32) << 10 &&
              BackwardSharedBytes(kBackwardShapes[1]) == (3 + 192 + 24) << 10 &&
              BackwardSharedBytes(kBackwardShapes[2]) == kMostSharedBytes &&
              BackwardSharedBytes(kBackwardShapes[3]) == kMostSharedBytes);

// Tensor memory: 512 columns of 32 bits for each of 128 lanes. A lane is a key's, but for dQ, whose
// lanes are of rows. P and dS, of 16 bits an element, lie over the S and dP that they are made of;
// and so does dQ over dP where there is no room beside it: there the next dP waits until it is
// read.
struct BackwardColumns {
  uint32_t s, dv, dp, dq, dk;
};
JAX_FA4_HOST_DEVICE constexpr BackwardColumns ColumnsOf(BackwardShape shape) {
  if (shape.row_block == 64) return {0, 192, 64, 64, 320};  // dQ has 128 columns of half the lanes
  return shape.width == 64 ? BackwardColumns{0, 128, 256, 384, 192}
                           : BackwardColumns{0, 128, 256, 256, 384};
}
inline constexpr uint32_t kBackwardTensorColumns = 512;

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BACKWARD_CONFIG_H_
