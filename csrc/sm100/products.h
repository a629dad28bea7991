// The two products of attention on the tensor cores.

#ifndef JAX_FA4_CSRC_SM100_PRODUCTS_H_
#define JAX_FA4_CSRC_SM100_PRODUCTS_H_

#include "csrc/ptx/tcgen05.h"
#include "csrc/sm100/variant.h"

namespace jax_fa4::sm100 {

inline constexpr int32_t kStep = 16;  // columns of A that an instruction sums over
inline constexpr uint32_t kPanelBytes = kTileRows * 128;

// One thread issues all products of a CTA: they are executed in that order.
template <class Variant>
struct Products {
  static constexpr bool kElement = kIsBfloat16<typename Variant::Element>;

  // S = Q K^T, or its negative.
  static __device__ __forceinline__ void QueryKey(int32_t stage,
                                                  const unsigned char* query,
                                                  const unsigned char* key,
                                                  bool negate) {
    constexpr ptx::tcgen05_instruction kInstruction = {kElement, kTileKeys, false};
    const uint32_t instruction = kInstruction.descriptor() | (negate ? ptx::kNegateA : 0);
    const uint64_t a = Descriptor(query), b = Descriptor(key);
#pragma unroll
    for (int32_t column = 0; column < Variant::kWidths.query_key; column += kStep) {
      const uint32_t offset = (column / 64 * kPanelBytes + column % 64 * 2) / 16;
      ptx::tcgen05_mma_f16(ColumnOfS(stage), a + offset, b + offset, instruction, column > 0);
    }
  }

  // O = P V, or O += P V, over keys [kBegin, kEnd) of a block.
  template <int32_t kBegin, int32_t kEnd>
  static __device__ __forceinline__ void WeightValue(int32_t stage,
                                                     const unsigned char* value,
                                                     bool add) {
    constexpr ptx::tcgen05_instruction kInstruction = {kElement, Variant::kWidths.value, true};
    const uint64_t b = Descriptor(value);
#pragma unroll
    for (int32_t key = kBegin; key < kEnd; key += kStep) {
      ptx::tcgen05_mma_f16(ColumnOfO(stage, Variant::kWidths),
                           ColumnOfP(stage) + key / 2,
                           b + key * 128 / 16,
                           kInstruction.descriptor(),
                           key > kBegin || add);
    }
  }

 private:
  static __device__ __forceinline__ uint64_t Descriptor(const unsigned char* tile) {
    return ptx::tcgen05_matrix_descriptor(static_cast<uint32_t>(__cvta_generic_to_shared(tile)),
                                          kPanelBytes);
  }
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_PRODUCTS_H_
