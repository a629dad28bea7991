// What the Blackwell forward and its host code agree on: parameters, tiles, the plans of shared and
// of tensor memory.

#ifndef JAX_FA4_CSRC_SM100_CONFIG_H_
#define JAX_FA4_CSRC_SM100_CONFIG_H_

#include "csrc/common/integers.h"
#include "csrc/common/tensor_map.h"

namespace jax_fa4::sm100 {

// Head widths that kernels are compiled for. A narrower head runs padded with zeros, in shared
// memory only, by the least of these that holds it.
struct Widths {
  int32_t query_key, value;  // D, Dv
};
inline constexpr Widths kWidths[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}};

// What differs between kernels of the same widths and dtype.
enum class Kind {
  kFull,    // every row sees every key
  kBounds,  // rows see intervals, from the band or from arrays
  kSoftcap  // the same, and logits are capped
};

inline constexpr int32_t kThreads = 512;
inline constexpr int32_t kTileRows = 128;  // of a query tile, packed: see Parameters::packed_heads
inline constexpr int32_t kTileKeys = 128;
inline constexpr int32_t kQueryTiles = 2;  // in flight in a CTA: the stages 0 and 1

// All arrays are contiguous, in the layouts of docs/spec.md. Operands whose leading axis is shorter
// than `batch` divide it: batch element b uses row b % length.
//
// The rows of a query tile are of `packed_heads` heads that share a key/value head: row r is of
// position r / packed_heads, and of head r % packed_heads among these. packed_heads is the largest
// power of two that divides both the group N / K and kTileRows.
struct Parameters {
  // Of four dimensions: width, heads, positions, batch. Boxes are 64 elements wide, with a swizzle
  // of 128 bytes; those of query and out have kTileRows rows, {64, packed_heads, kTileRows /
  // packed_heads, 1}, those of key and value are {64, 1, kTileKeys, 1}.
  TensorMap query, key, value;
  TensorMap out;  // zeros where out is float32

  const float* scale;    // (scale_batch,)
  const int32_t* lower;  // (lower_batch, T): row bounds; both null where the band below tells them
  const int32_t* upper;  // (upper_batch, T)
  float* out_float;      // (B, T, N, Dv) where out is float32, whatever query's dtype is; else null
  float* lse;            // (B, T, N)
  float* lse_rounding;   // (B, T, N): exact lse minus lse

  int32_t batch, rows, keys, heads, kv_heads;  // B, T, S, N, K
  int32_t width, value_width;                  // D, Dv
  int32_t query_batch, key_batch, value_batch, scale_batch, lower_batch, upper_batch;
  // Row i sees keys [i + band_low, i + band_high) cut to [0, S): an unbounded side is -T or S.
  int32_t band_low, band_high;
  float softcap;  // c of c * tanh(logits / c); 0 but in the kernels of kSoftcap

  // The schedule: see csrc/common/tile_schedule.h. A task is kQueryTiles query tiles of one pack of
  // heads of one batch element.
  int32_t packed_heads;
  int32_t row_tasks;   // of a pack of heads: ceil(T * packed_heads / (kQueryTiles * kTileRows))
  int32_t head_tasks;  // packs of heads in all batch elements: B * N / packed_heads
  int32_t section;     // packs of heads whose keys and values the L2 cache holds together
  int32_t last_first;  // whether tasks of later rows come first
};

// Shared memory of a CTA, in this order. Tiles are panels of 64 columns, 128 bytes a row, swizzled
// as the copy engine does for boxes of 128 bytes; they lie at multiples of 1024 bytes.
JAX_FA4_HOST_DEVICE constexpr int32_t Panels(int32_t width) { return (width + 63) / 64; }
JAX_FA4_HOST_DEVICE constexpr uint32_t TileBytes(int32_t width) {
  return Panels(width) * kTileRows * 128;
}
inline constexpr uint32_t kMostSharedBytes = 227 << 10;
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
