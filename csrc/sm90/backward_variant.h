// What one backward kernel is compiled for, and what follows from that at compile time.

#ifndef JAX_FA4_CSRC_SM90_BACKWARD_VARIANT_H_
#define JAX_FA4_CSRC_SM90_BACKWARD_VARIANT_H_

#include "csrc/common/element.h"
#include "csrc/sm90/backward_config.h"

namespace jax_fa4::sm90 {

template <class OfElement, int32_t kShapeIndex, MaskKind kOfKind>
struct BackwardVariant {
  using Element = OfElement;
  static constexpr MaskKind kKind = kOfKind;
  static constexpr BackwardShape kShape = kBackwardShapes[kShapeIndex];
  static constexpr int32_t kRows = kShape.row_block, kKeys = kShape.key_block;
  static constexpr int32_t kWidth = kShape.width, kValueWidth = kShape.value_width;
  static constexpr int32_t kConsumers = kBackwardConsumers, kStages = kBackwardStages;
  static constexpr int32_t kGroupKeys = 64;  // of a warpgroup
  static constexpr bool kSharesKeys = SharesKeys(kShape), kAddsInBulk = BackwardAddsInBulk(kShape);
  static_assert(kKeys == (kSharesKeys ? kConsumers : 1) * kGroupKeys);
  static_assert(BackwardSharedBytes(kShape) <= kMostSharedBytes);

  // Rows whose S and dP a thread holds at a time: all, unless there is no room for them beside dK
  // and dV, or beside the weights of all of them.
  static constexpr int32_t kPartRows =
      (kSharesKeys && kWidth + kValueWidth > 256) || (kRows > 64 && kKind == MaskKind::kSoftcap)
          ? kRows / 2
          : kRows;
  static constexpr int32_t kParts = kRows / kPartRows;
  // Rows whose weights a thread packs, and has multiplied, at a time.
  static constexpr int32_t kPieceRows = kPartRows < 64 ? kPartRows : 64;
  static constexpr int32_t kPieces = kPartRows / kPieceRows;

  // The warpgroups share the block's dQ: each takes 64 rows of it, or else 64 columns and, of what
  // is left behind these, an equal part; of 96 the first takes 64 and the second 32. (Without keys
  // of its own, each takes half of the columns.)
  static constexpr bool kSharesRows = kRows == kConsumers * 64;
  static constexpr int32_t kSharedColumns = kWidth - kConsumers * 64;
  static constexpr int32_t kRestColumns =
      kSharesRows || kSharedColumns <= 0 ? 0 : kSharedColumns / kConsumers;
  static constexpr bool kIsUneven = !kSharesRows && kSharedColumns < 0;
  static constexpr int32_t kFewerColumns = kIsUneven ? kWidth - 64 : 64;  // of the second

  // Whether the product dP runs beside the computation of weights. Under a cap this has no
  // registers to spare.
  static constexpr bool kDoutIsEarly = kKind != MaskKind::kSoftcap;

  static constexpr uint32_t kProducerRegisters = 24, kConsumerRegisters = 240;
};

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_BACKWARD_VARIANT_H_
