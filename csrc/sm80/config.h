// What the plain kernels and their host code agree on: parameters, tile sizes, shared memory.
//
// The plain kernels compute in float32 on the FMA units. They run on every GPU since sm_80 and take
// any shape: a head's width is padded with zeros, in shared memory only, to one of kWidths.

#ifndef JAX_FA4_CSRC_SM80_CONFIG_H_
#define JAX_FA4_CSRC_SM80_CONFIG_H_

#include "csrc/common/integers.h"

namespace jax_fa4::sm80 {

// Widths that kernels are compiled for: the least that holds both D and Dv is used.
inline constexpr int32_t kWidths[] = {64, 128, 256};
inline constexpr int32_t kThreads = 256;

// All arrays are contiguous, in the layouts of docs/spec.md. Operands whose leading axis is shorter
// than `batch` divide it: batch element b uses row b % length.
struct Parameters {
  const void* query;     // (query_batch, T, N, D)
  const void* key;       // (key_batch, S, K, D)
  const void* value;     // (value_batch, S, K, Dv)
  const float* scale;    // (scale_batch,)
  const int32_t* lower;  // (lower_batch, T): row bounds; both null where the band below tells them
  const int32_t* upper;  // (upper_batch, T)
  void* out;             // (B, T, N, Dv): result of the forward, operand of the backward
  float* lse;            // (B, T, N): likewise
  float* lse_rounding;   // (B, T, N): likewise; exact lse minus lse
  // Only in the backward.
  const void* dout;   // (B, T, N, Dv), of out's dtype
  const float* dlse;  // (B, T, N), or null for zeros
  float* delta;       // (B, T, N): workspace, rowsum(dout * out) - dlse
  void* dquery;       // (B, T, N, D)
  void* dkey;         // (B, S, K, D)
  void* dvalue;       // (B, S, K, Dv)
  float* dscale;      // (B, T, N): each row's share of the scale's gradient

  int32_t batch, rows, keys, heads, kv_heads;  // B, T, S, N, K
  int32_t width, value_width;                  // D, Dv
  int32_t query_batch, key_batch, value_batch, scale_batch, lower_batch, upper_batch;
  // Row i sees keys [i + band_low, i + band_high) cut to [0, S): an unbounded side is -T or S.
  int32_t band_low, band_high;
  float softcap;         // c of c * tanh(logits / c); 0 is no cap
  int32_t out_is_float;  // whether out and dout are float32, whatever query's dtype is
};

// Rows of queries and of keys that a CTA holds at a time. They are multiples of 16, so that the
// 16 x 16 threads of a CTA share them evenly, and with P in float32 they fit in the 99 KiB of
// shared memory that a CTA may have on sm_86, sm_89 and sm_120. Of two tiles that fit the more
// square one is better: it takes fewer loads from shared memory for each FMA.
struct Tile {
  int32_t rows, keys;
};

// A CTA keeps `rows` of Q, and goes through K and V `keys` at a time.
JAX_FA4_HOST_DEVICE constexpr Tile ForwardTile(int32_t width) {
  return width <= 128 ? Tile{64, 64} : Tile{32, 32};
}
// A CTA of backward_query keeps `rows` of Q and dO, one of backward_key keeps `keys` of K and V.
JAX_FA4_HOST_DEVICE constexpr Tile BackwardTile(int32_t width) {
  return width <= 128 ? Tile{64, 64} : Tile{32, 32};
}
// So many keys or rows these two go through at a time.
JAX_FA4_HOST_DEVICE constexpr int32_t BackwardStep(int32_t width) { return width <= 128 ? 32 : 16; }

// Floats from one row of a tile in shared memory to the next: 16-byte loads of eight neighbouring
// rows then hit all banks once.
JAX_FA4_HOST_DEVICE constexpr int32_t Pitch(int32_t width) { return width + 4; }

// Dynamic shared memory of a CTA: Q, one tile that holds K and V in turn, and P.
JAX_FA4_HOST_DEVICE constexpr uint32_t ForwardSharedBytes(int32_t width) {
  const Tile tile = ForwardTile(width);
  return sizeof(float) *
         (tile.rows * Pitch(width) + tile.keys * Pitch(width) + tile.rows * Pitch(tile.keys));
}
// The two tiles that it keeps (rows and keys are as many), one that holds in turn what it goes
// through, and P or dS.
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardSharedBytes(int32_t width) {
  const int32_t kept = BackwardTile(width).rows, step = BackwardStep(width);
  return sizeof(float) * (2 * kept * Pitch(width) + step * Pitch(width) + kept * Pitch(step));
}
static_assert(ForwardSharedBytes(64) <= 99 << 10 && ForwardSharedBytes(128) <= 99 << 10 &&
              ForwardSharedBytes(256) <= 99 << 10);
static_assert(BackwardSharedBytes(64) <= 99 << 10 && BackwardSharedBytes(128) <= 99 << 10 &&
              BackwardSharedBytes(256) <= 99 << 10);
static_assert(BackwardTile(64).rows == BackwardTile(64).keys &&
              BackwardTile(128).rows == BackwardTile(128).keys &&
              BackwardTile(256).rows == BackwardTile(256).keys);

}  // namespace jax_fa4::sm80

#endif  // JAX_FA4_CSRC_SM80_CONFIG_H_
