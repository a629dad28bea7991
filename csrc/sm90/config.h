// What the Hopper forward and its host code agree on besides parameters: tiles, the plan of shared
// memory.

#ifndef JAX_FA4_CSRC_SM90_CONFIG_H_
#define JAX_FA4_CSRC_SM90_CONFIG_H_

#include "csrc/common/forward_parameters.h"
#include "csrc/common/integers.h"
#include "csrc/common/panels.h"

namespace jax_fa4::sm90 {

// Head widths that kernels are compiled for, and their tiles. A narrower head runs padded with
// zeros, in shared memory only, by the first of these that holds it.
struct Shape {
  int32_t width, value_width;  // D, Dv
  int32_t consumers;           // warpgroups that compute, each with kGroupRows rows of a query tile
  int32_t keys;                // of a block
};
inline constexpr Shape kShapes[] = {
    {64, 64, 3, 128}, {96, 96, 2, 128}, {128, 128, 2, 128}, {192, 128, 2, 112}, {256, 256, 2, 80}};

using Parameters = ForwardParameters;
using Kind = MaskKind;

inline constexpr int32_t kGroupRows = 64;      // of a query tile, packed: see ForwardParameters
inline constexpr int32_t kGroupThreads = 128;  // of a warpgroup

JAX_FA4_HOST_DEVICE constexpr int32_t Threads(const Shape& shape) {
  return (1 + shape.consumers) * kGroupThreads;
}
JAX_FA4_HOST_DEVICE constexpr int32_t TileRows(const Shape& shape) {
  return shape.consumers * kGroupRows;
}

// Shared memory of a CTA, in this order: barriers; Q of each warpgroup, by stage; out; K; V.
inline constexpr uint32_t kControlBytes = 1 << 10;

JAX_FA4_HOST_DEVICE constexpr uint32_t StageBytes(const Shape& shape) {  // K and V of a block
  return TileBytes(shape.keys, shape.width) + TileBytes(shape.keys, shape.value_width);
}
JAX_FA4_HOST_DEVICE constexpr uint32_t QueryBytes(const Shape& shape) {
  return TileBytes(TileRows(shape), shape.width);
}
JAX_FA4_HOST_DEVICE constexpr uint32_t OutBytes(const Shape& shape) {
  return TileBytes(TileRows(shape), shape.value_width);
}
// Out has room of its own, so that the next Q arrives meanwhile, where two stages leave enough;
// else it replaces Q.
JAX_FA4_HOST_DEVICE constexpr bool OutIsApart(const Shape& shape) {
  return kControlBytes + QueryBytes(shape) + OutBytes(shape) + 2 * StageBytes(shape) <=
         kMostSharedBytes;
}
// Two tiles of Q where they leave room for all of that: a task's arrives during the one before.
JAX_FA4_HOST_DEVICE constexpr int32_t QueryStages(const Shape& shape) {
  return kControlBytes + 2 * QueryBytes(shape) + OutBytes(shape) + 2 * StageBytes(shape) <=
                 kMostSharedBytes
             ? 2
             : 1;
}
JAX_FA4_HOST_DEVICE constexpr uint32_t RowBytes(const Shape& shape) {
  return QueryStages(shape) * QueryBytes(shape) + (OutIsApart(shape) ? OutBytes(shape) : 0);
}
JAX_FA4_HOST_DEVICE constexpr int32_t Stages(const Shape& shape) {
  return static_cast<int32_t>((kMostSharedBytes - kControlBytes - RowBytes(shape)) /
                              StageBytes(shape));
}
JAX_FA4_HOST_DEVICE constexpr uint32_t SharedBytes(const Shape& shape) {
  return kControlBytes + RowBytes(shape) + Stages(shape) * StageBytes(shape);
}

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_CONFIG_H_
