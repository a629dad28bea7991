// What the plain kernels have in common of the problem: which heads of which arrays belong
// together, and what dot products become.

#ifndef JAX_FA4_CSRC_SM80_PROBLEM_H_
#define JAX_FA4_CSRC_SM80_PROBLEM_H_

#include "csrc/common/operands.h"
#include "csrc/common/softcap.h"
#include "csrc/sm80/config.h"
#include "csrc/sm80/tile.h"

namespace jax_fa4::sm80 {

// The operands, and where a query head of a batch element is in them.
template <class Element>
struct Heads {
  const Element *query, *key, *value;
  Head of_query, of_key, of_value, of_out;
  Head of_row;  // of arrays (B, T, N)

  __device__ __forceinline__ Heads(const Parameters& p, uint32_t batch, uint32_t head)
      : Heads(p, batch, head, KeyHead(p, head)) {}

 private:
  __device__ __forceinline__
  Heads(const Parameters& p, uint32_t batch, uint32_t head, uint32_t key_head)
      : query(static_cast<const Element*>(p.query)),
        key(static_cast<const Element*>(p.key)),
        value(static_cast<const Element*>(p.value)),
        of_query(ElementOf(batch, p.query_batch), p.rows, p.heads, head, p.width),
        of_key(ElementOf(batch, p.key_batch), p.keys, p.kv_heads, key_head, p.width),
        of_value(ElementOf(batch, p.value_batch), p.keys, p.kv_heads, key_head, p.value_width),
        of_out(batch, p.rows, p.heads, head, p.value_width),
        of_row(batch, p.rows, p.heads, head, 1) {}

  static __device__ __forceinline__ uint32_t KeyHead(const Parameters& p, uint32_t head) {
    const uint32_t heads = p.heads, kv_heads = p.kv_heads;
    return heads == kv_heads ? head : head / (heads / kv_heads);
  }
};

// Turns dot products into logits. Under a cap `with_slope` gets its slope at each (i, j).
template <int32_t kRows, int32_t kColumns, class WithSlope>
__device__ __forceinline__ void ScaleAndCap(float (&x)[kRows][kColumns],
                                            float scale,
                                            float softcap,
                                            const WithSlope& with_slope) {
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
#pragma unroll
    for (int32_t j = 0; j < kColumns; ++j) x[i][j] *= scale;
  }
  if (softcap == 0) return;
  const Softcap cap(Opaque(softcap));  // its inverse takes long, and is for calls with a cap only
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
#pragma unroll
    for (int32_t j = 0; j < kColumns; ++j) {
      const float ratio = cap.Ratio(x[i][j]);
      x[i][j] = cap.Capped(ratio);
      with_slope(i, j, cap.Slope(ratio));
    }
  }
}

}  // namespace jax_fa4::sm80

#endif  // JAX_FA4_CSRC_SM80_PROBLEM_H_
