// What the Hopper backward and its host code agree on besides parameters: tiles, the plan of shared
// memory.

#ifndef JAX_FA4_CSRC_SM90_BACKWARD_CONFIG_H_
#define JAX_FA4_CSRC_SM90_BACKWARD_CONFIG_H_

#include "csrc/common/backward_parameters.h"
#include "csrc/common/integers.h"
#include "csrc/common/panels.h"
#include "csrc/sm90/config.h"

namespace jax_fa4::sm90 {

// Head widths that kernels are compiled for, and their tiles. A narrower head runs padded with
// zeros, in shared memory only, by the first of these that holds it.
struct BackwardShape {
  int32_t width, value_width;  // D, Dv
  int32_t row_block;           // rows of a block
  int32_t key_block;           // keys of a CTA
  int32_t weight_stages;       // of dS
};
inline constexpr BackwardShape kBackwardShapes[] = {{64, 64, 128, 128, 2},
                                                    {96, 96, 64, 128, 2},
                                                    {128, 128, 64, 128, 2},
                                                    {192, 128, 64, 128, 1},
                                                    {256, 256, 64, 64, 1}};

inline constexpr int32_t kBackwardConsumers = 2;  // warpgroups that compute
inline constexpr int32_t kBackwardStages = 2;     // of Q and dO

// Whether each warpgroup has keys of its own. In the widest heads there are no registers for both
// dK and dV: one warpgroup has the one, of all keys of the CTA, the other the other.
JAX_FA4_HOST_DEVICE constexpr bool SharesKeys(const BackwardShape& shape) {
  return shape.key_block == kBackwardConsumers * 64;
}

// Whether the copy engine adds to sums of dquery, from shared memory; or the threads themselves, as
// they do in any case where there is no room for that.
inline constexpr bool kBackwardAddsInBulk = true;
JAX_FA4_HOST_DEVICE constexpr bool BackwardAddsInBulk(const BackwardShape& shape) {
  return kBackwardAddsInBulk && SharesKeys(shape);
}

JAX_FA4_HOST_DEVICE constexpr int32_t BackwardThreads(const BackwardShape&) {
  return (1 + kBackwardConsumers) * kGroupThreads;
}

// Shared memory of a CTA, in this order: barriers and notes; what there is of single rows; K; V; Q
// and dO by stage; dS by stage; parts of dquery, or what warpgroups exchange.
inline constexpr uint32_t kBackwardControlBytes = 512;

JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardRowBytes(const BackwardShape& shape) {
  constexpr uint32_t kLse = 4, kDelta = 4, kSpan = 8;
  return (kLse + kDelta + kSpan) * shape.row_block;
}
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardHeaderBytes(const BackwardShape& shape) {
  return (kBackwardControlBytes + kBackwardStages * BackwardRowBytes(shape) + 1023) / 1024 * 1024;
}
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardKeyBytes(const BackwardShape& shape) {
  return TileBytes(shape.key_block, shape.width) + TileBytes(shape.key_block, shape.value_width);
}
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardStageBytes(const BackwardShape& shape) {
  return TileBytes(shape.row_block, shape.width) + TileBytes(shape.row_block, shape.value_width);
}
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardSumBytes(const BackwardShape& shape) {
  return BackwardAddsInBulk(shape) ? shape.row_block * shape.width * 4 : 0;
}
// What one warpgroup tells the other of weights, as float32.
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardExchangeBytes(const BackwardShape& shape) {
  return SharesKeys(shape) ? 0 : shape.row_block * shape.key_block * 4;
}
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardSharedBytes(const BackwardShape& shape) {
  return BackwardHeaderBytes(shape) + BackwardKeyBytes(shape) +
         kBackwardStages * BackwardStageBytes(shape) +
         shape.weight_stages * TileBytes(shape.row_block, shape.key_block) +
         BackwardSumBytes(shape) + BackwardExchangeBytes(shape);
}

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_BACKWARD_CONFIG_H_
