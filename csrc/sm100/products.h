// The two products of attention on the tensor cores.

#ifndef JAX_FA4_CSRC_SM100_PRODUCTS_H_
#define JAX_FA4_CSRC_SM100_PRODUCTS_H_

#include "csrc/common/element.h"
#include "csrc/common/lanes.h"
#include "csrc/common/panels.h"
#include "csrc/ptx/tcgen05.h"
#include "csrc/sm100/variant.h"

namespace jax_fa4::sm100 {

inline constexpr int32_t kStep = 16;  // columns of A that an instruction sums over

// One thread issues all products of a CTA: they are executed in that order.
template <class Variant>
class Products {
 public:
  // All lanes of a warp call it together, with the first tile of a kind: the others follow without
  // gaps between them.
  __device__ __forceinline__ Products(uint32_t tensor, const void* query, const void* key_value)
      : tensor_(Uniform(tensor)), query_(Descriptor(query)), key_value_(Descriptor(key_value)) {}

  // S = Q K^T, or its negative, where K is in this stage of the ring.
  __device__ __forceinline__ void QueryKey(int32_t stage, int32_t key, bool negate) const {
    constexpr ptx::tcgen05_instruction kInstruction = {kElement, kTileKeys, false};
    const uint32_t instruction = kInstruction.descriptor() | (negate ? ptx::kNegateA : 0);
    const uint64_t a = Tile<TileBytes(Variant::kWidths.query_key)>(query_, stage);
    const uint64_t b = Tile<KvStageBytes(Variant::kWidths)>(key_value_, key);
#pragma unroll
    for (int32_t column = 0; column < Variant::kWidths.query_key; column += kStep) {
      const uint32_t offset = ColumnOffset(kTileRows, column) / 16;
      ptx::tcgen05_mma_f16(
          tensor_ + ColumnOfS(stage), a + offset, b + offset, instruction, column > 0);
    }
  }

  // O = P V, or O += P V, over keys [kBegin, kEnd) of a block, where V is in this stage of the
  // ring.
  template <int32_t kBegin, int32_t kEnd>
  __device__ __forceinline__ void WeightValue(int32_t stage, int32_t value, bool add) const {
    constexpr ptx::tcgen05_instruction kInstruction = {kElement, Variant::kWidths.value, true};
    const uint64_t b = Tile<KvStageBytes(Variant::kWidths)>(key_value_, value);
#pragma unroll
    for (int32_t key = kBegin; key < kEnd; key += kStep) {
      ptx::tcgen05_mma_f16(tensor_ + ColumnOfO(stage, Variant::kWidths),
                           tensor_ + ColumnOfP(stage) + key / 2,
                           b + key * 128 / 16,
                           kInstruction.descriptor(),
                           key > kBegin || add);
    }
  }

 private:
  static constexpr bool kElement = kIsBfloat16<typename Variant::Element>;

  uint32_t tensor_;
  uint64_t query_, key_value_;  // descriptors of the first tiles

  // Instructions take numbers from registers of the warp. There one instruction adds to a number,
  // but two make a constant.
  static __device__ __forceinline__ uint64_t Descriptor(const void* tile) {
    const uint64_t descriptor =
        ptx::tcgen05_matrix_descriptor(SharedAddress(tile), PanelBytes(kTileRows));
    return uint64_t{Uniform(static_cast<uint32_t>(descriptor >> 32))} << 32 |
           Uniform(static_cast<uint32_t>(descriptor));
  }
  // What follows from it is computed where it is needed: the compiler would keep all of it through
  // the loop over keys, for which there are too few registers.
  template <uint32_t kBytes>
  static __device__ __forceinline__ uint64_t Tile(uint64_t descriptor, int32_t index) {
    asm volatile("" : "+l"(descriptor));
    return descriptor + static_cast<uint32_t>(index) * (kBytes / 16);
  }
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_PRODUCTS_H_
