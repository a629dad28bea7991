// What one kernel is compiled for, and what follows from that at compile time.

#ifndef JAX_FA4_CSRC_SM100_VARIANT_H_
#define JAX_FA4_CSRC_SM100_VARIANT_H_

#include "csrc/sm100/config.h"

namespace jax_fa4::sm100 {

// Of a thread, by role. The four warpgroups of a CTA share 512 registers for a thread of each.
struct Registers {
  uint32_t softmax, correction, other;  // two warpgroups, one, one
};

// Which exponentials of a row and a block of keys are computed on the FMA units: those of the last
// four of each `period` keys, from the fragment `first` of 32 keys on. None are in the last
// fragment, for which the tensor cores wait: the FMA units take longer.
struct Emulation {
  int32_t first, period;

  __device__ __forceinline__ constexpr bool Holds(int32_t key) const {
    return key / 32 >= first && key / 32 < 3 && key % period >= period - 4;
  }
};

template <class OfElement, int32_t kQueryKeyWidth, int32_t kValueWidth, Kind kOfKind>
struct Variant {
  using Element = OfElement;
  static constexpr Widths kWidths = {kQueryKeyWidth, kValueWidth};
  static constexpr Kind kKind = kOfKind;

  // Rows that see all keys leave the softmax warps the busiest: there the correction warps write
  // out. Else they have time while others still have keys to go through.
  static constexpr bool kCorrectionWritesOut = kKind == Kind::kFull;

  static constexpr Registers kRegisters =
      kCorrectionWritesOut ? Registers{192, 80, 48} : Registers{200, 64, 48};
  static_assert(2 * kRegisters.softmax + kRegisters.correction + kRegisters.other <= 512);

  // Keys of a block whose weights are handed to the tensor cores before the rest.
  static constexpr int32_t kFirstPart = kKind == Kind::kFull ? 96 : 64;

  // sm_103 has twice as fast a unit for exponentials, which then nobody waits for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1030
  static constexpr Emulation kEmulation = {3, 16};
#else
  static constexpr Emulation kEmulation = kQueryKeyWidth <= 128  ? Emulation{1, 16}
                                          : kKind == Kind::kFull ? Emulation{0, 16}
                                                                 : Emulation{0, 32};
#endif
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_VARIANT_H_
