// What the backward on tensor cores, for Hopper and for Blackwell, the kernels that run before and
// after it (backward_rows), and their host code agree on.
//
// Three launches. `before` reduces each row to two numbers and zeroes sums; the backward goes, for
// each block of keys, through the blocks of rows that see it, keeps dkey and dvalue of the keys,
// and adds its part to sums of dquery; `after` makes dquery and dscale of the sums.

#ifndef JAX_FA4_CSRC_COMMON_BACKWARD_PARAMETERS_H_
#define JAX_FA4_CSRC_COMMON_BACKWARD_PARAMETERS_H_

#include "csrc/common/integers.h"
#include "csrc/common/mask_kind.h"
#include "csrc/common/tensor_map.h"

namespace jax_fa4 {

// What the rows of a block see: from the first key that one of them sees to the one behind the
// last; end is not above begin if they see none.
struct alignas(16) RowBlockHull {
  int32_t begin, end;
  int32_t idle;    // whether some row before T sees nothing
  int32_t unused;  // 0
};

// All arrays are contiguous, in the layouts of docs/spec.md. Operands whose leading axis is shorter
// than `batch` divide it: batch element b uses row b % length.
struct BackwardParameters {
  // Of four dimensions: width, heads, positions, batch. Boxes are {64, 1, row_block, 1} of query
  // and dout, and {64, 1, key_block, 1} of the others, with a swizzle of 128 bytes.
  TensorMap query, dout, key, value;
  TensorMap dkey, dvalue;  // stored; of all batch elements

  const void* query_rows;     // (query_batch, T, N, D)
  const void* out_rows;       // (B, T, N, Dv)
  const void* dout_rows;      // (B, T, N, Dv)
  void* dquery_rows;          // (B, T, N, D)
  float* dscale;              // (B, T, N)
  const float* lse;           // (B, T, N)
  const float* lse_rounding;  // (B, T, N): exact lse minus lse
  const float* dlse;          // (B, T, N) or null

  const float* scale;    // (scale_batch,)
  const int32_t* lower;  // (lower_batch, T): row bounds; both null where the band below tells them
  const int32_t* upper;  // (upper_batch, T)

  // In the workspace, all written by `before`. R is row_blocks * row_block, W compiled_width.
  float* lse_log2;  // (B, N, R): lse * log2(e); inf of rows that see nothing, and from T on, and
                    // of no others
  float* delta;     // (B, N, R): sum of dout * out, minus dlse; 0 of such rows
  RowBlockHull* hulls;  // (hull_batch, row_blocks)
  float* dquery_sum;    // (B, N, row_blocks, row_block * W): of dS K, unscaled, each block in the
                        // order of csrc/common/dquery_sum.h; zeros at first
  uint32_t* turns;  // (B, N, row_blocks): key blocks that have added their part, where the order
                    // is fixed (deterministic); zeros at first

  int32_t batch, rows, keys, heads, kv_heads;  // B, T, S, N, K
  int32_t width, value_width;                  // D, Dv
  int32_t compiled_width;                      // of query and key, in the backward's kernel
  int32_t query_batch, key_batch, value_batch, scale_batch, lower_batch, upper_batch;
  int32_t hull_batch;  // the least multiple of lower_batch and upper_batch; 1 without them
  // Row i sees keys [i + band_low, i + band_high) cut to [0, S): an unbounded side is -T or S.
  int32_t band_low, band_high;
  float softcap;  // c of c * tanh(logits / c); 0 but in the kernels of kSoftcap

  int32_t row_block, row_blocks;  // rows of a block; ceil(T / row_block)

  // The schedule: see csrc/common/tile_schedule.h. A task is a block of keys of one key/value head
  // of one batch element, for all query heads that share it.
  int32_t key_blocks;  // ceil(S / key_block)
  int32_t head_tasks;  // B * K
  int32_t section;     // key/value heads whose rows the L2 cache holds together
  int32_t deterministic;
};

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_BACKWARD_PARAMETERS_H_
