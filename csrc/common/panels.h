// Tiles in shared memory as the copy engine and the tensor cores use them: rows of 16-bit elements
// in panels of 64 columns, 128 bytes a row, swizzled as the copy engine does for boxes of 128
// bytes. They lie at multiples of 1024 bytes.

#ifndef JAX_FA4_CSRC_COMMON_PANELS_H_
#define JAX_FA4_CSRC_COMMON_PANELS_H_

#include "csrc/common/integers.h"

namespace jax_fa4 {

inline constexpr uint32_t kMostSharedBytes = 227 << 10;  // of a CTA, on Hopper and on Blackwell

JAX_FA4_HOST_DEVICE constexpr int32_t Panels(int32_t columns) { return (columns + 63) / 64; }
JAX_FA4_HOST_DEVICE constexpr uint32_t PanelBytes(int32_t rows) { return rows * 128; }
JAX_FA4_HOST_DEVICE constexpr uint32_t TileBytes(int32_t rows, int32_t columns) {
  return Panels(columns) * PanelBytes(rows);
}

// Where a column begins in a tile of so many rows, as matrix descriptors tell it: before the
// swizzle.
JAX_FA4_HOST_DEVICE constexpr uint32_t ColumnOffset(int32_t rows, int32_t column) {
  return column / 64 * PanelBytes(rows) + column % 64 * 2;
}
// Where the swizzle puts a piece of 16 bytes: pieces change places within a row.
JAX_FA4_HOST_DEVICE constexpr uint32_t PlaceOfPiece(uint32_t row, uint32_t piece) {
  return piece ^ row % 8;
}

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_PANELS_H_
