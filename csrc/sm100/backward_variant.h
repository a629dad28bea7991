// What one kernel of the backward is compiled for, and what follows from that at compile time.

#ifndef JAX_FA4_CSRC_SM100_BACKWARD_VARIANT_H_
#define JAX_FA4_CSRC_SM100_BACKWARD_VARIANT_H_

#include "csrc/sm100/backward_config.h"

namespace jax_fa4::sm100 {

// Of a thread, by role. The four warpgroups of a CTA share 512 registers for a thread of each.
struct BackwardRegisters {
  uint32_t reduce, compute, other;  // one warpgroup, two, one
};

template <class OfElement, int32_t kShapeIndex, MaskKind kOfKind>
struct BackwardVariant {
  using Element = OfElement;
  static constexpr BackwardShape kShape = kBackwardShapes[kShapeIndex];
  static constexpr MaskKind kKind = kOfKind;
  static constexpr BackwardColumns kColumns = ColumnsOf(kShape);
  static constexpr int32_t kRows = kShape.row_block, kKeys = kShape.key_block;

  // A thread of the two compute warpgroups has a key, and this half of the rows.
  static constexpr int32_t kShare = kRows / 2;

  // Reduce threads hold a row of dQ, or 128 columns of one.
  static constexpr BackwardRegisters kRegisters =
      kShape.width < 128 ? BackwardRegisters{112, 168, 64} : BackwardRegisters{136, 160, 56};
  static_assert(kRegisters.reduce + 2 * kRegisters.compute + kRegisters.other <= 512);
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BACKWARD_VARIANT_H_
