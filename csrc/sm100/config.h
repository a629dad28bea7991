// What the Blackwell forward and its host code agree on besides parameters: tiles, the plans of
// shared and of tensor memory.

#ifndef JAX_FA4_CSRC_SM100_CONFIG_H_
#define JAX_FA4_CSRC_SM100_CONFIG_H_

#include "csrc/common/forward_parameters.h"
#include "csrc/common/integers.h"
#include "csrc/common/panels.h"

namespace jax_fa4::sm100 {

// Head widths that kernels are compiled for. A narrower head runs padded with zeros, in shared
// memory only, by the least of these that holds it.
struct Widths {
  int32_t query_key, value;  // D, Dv
};
inline constexpr Widths kWidths[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}};

using Parameters = ForwardParameters;
using Kind = MaskKind;

inline constexpr int32_t kThreads = 512;
inline constexpr int32_t kTileRows = 128;  // of a query tile, packed: see ForwardParameters
inline constexpr int32_t kTileKeys = 128;
inline constexpr int32_t kQueryTiles = 2;  // of a task, in flight in a CTA: the stages 0 and 1

// Shared memory of a CTA, in this order. All tiles are as high, of rows or of keys.
static_assert(kTileRows == kTileKeys);
JAX_FA4_HOST_DEVICE constexpr uint32_t TileBytes(int32_t width) {
  return jax_fa4::TileBytes(kTileRows, width);
}
inline constexpr uint32_t kControlBytes = 3 << 10;  // barriers, what rows hand on, and the like

JAX_FA4_HOST_DEVICE constexpr int32_t OutStages(Widths widths) {
  return widths.query_key > 128 ? 1 : 2;
}
JAX_FA4_HOST_DEVICE constexpr uint32_t KvStageBytes(Widths widths) {
  return TileBytes(widths.query_key > widths.value ? widths.query_key : widths.value);
}
// The ring of key and value tiles gets what is left.
JAX_FA4_HOST_DEVICE constexpr int32_t KvStages(Widths widths) {
  const uint32_t taken = kControlBytes + kQueryTiles * TileBytes(widths.query_key) +
                         OutStages(widths) * TileBytes(widths.value);
  return static_cast<int32_t>((kMostSharedBytes - taken) / KvStageBytes(widths));
}
JAX_FA4_HOST_DEVICE constexpr uint32_t SharedBytes(Widths widths) {
  return kControlBytes + kQueryTiles * TileBytes(widths.query_key) +
         OutStages(widths) * TileBytes(widths.value) + KvStages(widths) * KvStageBytes(widths);
}
static_assert(KvStages({64, 64}) == 10 && KvStages({96, 96}) == 3 && KvStages({128, 128}) == 3 &&
              KvStages({192, 128}) == 2);

// Tensor memory: 512 columns of 32 bits for each of 128 rows. P, of 16 bits an element, lies over
// the upper half of its S, which has been read by then.
JAX_FA4_HOST_DEVICE constexpr uint32_t ColumnOfS(int32_t stage) { return stage * kTileKeys; }
JAX_FA4_HOST_DEVICE constexpr uint32_t ColumnOfP(int32_t stage) {
  return ColumnOfS(stage) + kTileKeys / 2;
}
JAX_FA4_HOST_DEVICE constexpr uint32_t ColumnOfO(int32_t stage, Widths widths) {
  return kQueryTiles * kTileKeys + stage * widths.value;
}
inline constexpr uint32_t kTensorColumns = 512;

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_CONFIG_H_
