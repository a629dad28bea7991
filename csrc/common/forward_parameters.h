// What the forwards on tensor cores, for Hopper and for Blackwell, and their host code agree on.

#ifndef JAX_FA4_CSRC_COMMON_FORWARD_PARAMETERS_H_
#define JAX_FA4_CSRC_COMMON_FORWARD_PARAMETERS_H_

#include "csrc/common/integers.h"
#include "csrc/common/mask_kind.h"
#include "csrc/common/tensor_map.h"

namespace jax_fa4 {

// All arrays are contiguous, in the layouts of docs/spec.md. Operands whose leading axis is shorter
// than `batch` divide it: batch element b uses row b % length.
//
// The rows of a query tile are of `packed_heads` heads that share a key/value head: row r is of
// position r / packed_heads, and of head r % packed_heads among these. packed_heads is the largest
// power of two that divides both the group N / K and the rows of a box.
struct ForwardParameters {
  // Of four dimensions: width, heads, positions, batch. Boxes are 64 elements wide, with a swizzle
  // of 128 bytes; those of query and out have so many rows as the kernel's products, {64,
  // packed_heads, rows / packed_heads, 1}, those of key and value a block's keys, {64, 1, keys, 1}.
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

  // The schedule: see csrc/common/tile_schedule.h. A task is as many packed rows as a CTA has in
  // flight, of one pack of heads of one batch element.
  int32_t packed_heads;
  int32_t row_tasks;   // of a pack of heads
  int32_t head_tasks;  // packs of heads in all batch elements: B * N / packed_heads
  int32_t section;     // packs of heads whose keys and values the L2 cache holds together
  int32_t last_first;  // whether tasks of later rows come first
};

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_FORWARD_PARAMETERS_H_
