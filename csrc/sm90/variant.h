// What one kernel is compiled for, and what follows from that at compile time.

#ifndef JAX_FA4_CSRC_SM90_VARIANT_H_
#define JAX_FA4_CSRC_SM90_VARIANT_H_

#include "csrc/common/element.h"
#include "csrc/sm90/config.h"

namespace jax_fa4::sm90 {

// Of a thread, by role. The warpgroups of a CTA share what the launch gave it: all 64 K registers,
// but for what is left where each thread begins with the same multiple of 8.
struct Registers {
  uint32_t producer, consumer;
};

template <class OfElement, int32_t kShapeIndex, Kind kOfKind>
struct Variant {
  using Element = OfElement;
  static constexpr Kind kKind = kOfKind;
  static constexpr Shape kShape = kShapes[kShapeIndex];
  static constexpr int32_t kKeys = kShape.keys, kConsumers = kShape.consumers;
  static constexpr int32_t kStages = sm90::Stages(kShape);
  static constexpr int32_t kQueryStages = QueryStages(kShape);
  static constexpr bool kOutIsApart = OutIsApart(kShape);
  static_assert(kStages >= 2);

  static constexpr Registers kRegisters = kConsumers == 3 ? Registers{32, 160} : Registers{40, 232};
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer <=
                (1 + kConsumers) * (65536 / Threads(kShape) / 8 * 8));

  // Warpgroups take turns to start their products, so that one's softmax runs beside the others'
  // products. Products of wider heads take too long for that.
  static constexpr bool kTakesTurns = kShape.width <= 128;
};

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_VARIANT_H_
