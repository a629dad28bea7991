// The five products of attention's backward on the tensor cores.

#ifndef JAX_FA4_CSRC_SM100_BACKWARD_PRODUCTS_H_
#define JAX_FA4_CSRC_SM100_BACKWARD_PRODUCTS_H_

#include "csrc/common/element.h"
#include "csrc/common/lanes.h"
#include "csrc/common/panels.h"
#include "csrc/ptx/tcgen05.h"
#include "csrc/sm100/backward_barriers.h"

namespace jax_fa4::sm100 {

// One thread issues all products of a CTA: they are executed in that order.
template <class Variant>
class BackwardProducts {
 public:
  // All lanes of a warp call it together.
  __device__ __forceinline__ BackwardProducts(uint32_t tensor,
                                              const BackwardMemory<Variant>& memory)
      : tensor_(Uniform(tensor)),
        key_(Descriptor(memory.Key(), kKeys, tensor >> 31)),
        query_(Descriptor(memory.Query(0), kRows, tensor >> 30)) {}

  // S^T = K Q^T, where Q is in this stage.
  __device__ __forceinline__ void KeyQuery(int32_t stage) const {
    constexpr ptx::tcgen05_instruction kInstruction = {kElement, kRows, false};
    AcrossColumns<kShape.width>(
        kColumns.s, Opaque(key_), Opaque(query_) + QueryOffset(stage), kInstruction);
  }

  // dP^T = V dO^T.
  __device__ __forceinline__ void ValueDout(int32_t stage) const {
    constexpr ptx::tcgen05_instruction kInstruction = {kElement, kRows, false};
    AcrossColumns<kShape.value_width>(kColumns.dp,
                                      Opaque(key_) + BackwardKeyBytes(kShape) / 16,
                                      Opaque(query_) + DoutOffset(stage),
                                      kInstruction);
  }

  // dV = P^T dO, or is increased by it.
  __device__ __forceinline__ void WeightDout(int32_t stage, bool add) const {
    AcrossRows<kShape.value_width>(
        kColumns.dv, kColumns.s, Opaque(query_) + DoutOffset(stage), add);
  }

  // dK = dS^T Q, or is increased by it.
  __device__ __forceinline__ void DlogitsQuery(int32_t stage, bool add) const {
    AcrossRows<kShape.width>(kColumns.dk, kColumns.dp, Opaque(query_) + QueryOffset(stage), add);
  }

  // dQ = dS K. Of 64 rows, which take half of the lanes, columns from 128 on are in the other half.
  __device__ __forceinline__ void DlogitsKey() const {
    constexpr int32_t kFirst = kRows == 64 ? 128 : kShape.width, kRest = kShape.width - kFirst;
    constexpr ptx::tcgen05_instruction kInstruction = {kElement, kFirst, true, true, kRows},
                                       kOfRest = {kElement, kRest, true, true, kRows};
    const uint64_t a = Opaque(query_) + DlogitsOffset(), b = Opaque(key_);
#pragma unroll
    for (int32_t key = 0; key < kKeys; key += kStep) {
      const uint32_t offset = key * 128 / 16;
      ptx::tcgen05_mma_f16(
          tensor_ + kColumns.dq, a + offset, b + offset, kInstruction.descriptor(), key > 0);
    }
    if constexpr (kRest > 0) {
#pragma unroll
      for (int32_t key = 0; key < kKeys; key += kStep) {
        const uint32_t offset = key * 128 / 16;
        ptx::tcgen05_mma_f16(tensor_ + kColumns.dq + (16 << 16),
                             a + offset,
                             b + offset + ColumnOffset(kKeys, kFirst) / 16,
                             kOfRest.descriptor(),
                             key > 0);
      }
    }
  }

 private:
  static constexpr BackwardShape kShape = Variant::kShape;
  static constexpr BackwardColumns kColumns = Variant::kColumns;
  static constexpr int32_t kRows = Variant::kRows, kKeys = Variant::kKeys;
  static constexpr int32_t kStep = 16;  // what an instruction sums over
  static constexpr bool kElement = kIsBfloat16<typename Variant::Element>;

  // Descriptors of the first tile of keys, whose height V has too, and of the first of rows, whose
  // height dO has too.
  uint32_t tensor_;
  uint64_t key_, query_;

  // A product over columns of both operands, in shared memory.
  template <int32_t kWidth>
  __device__ __forceinline__ void AcrossColumns(uint32_t d,
                                                uint64_t a,
                                                uint64_t b,
                                                ptx::tcgen05_instruction instruction) const {
#pragma unroll
    for (int32_t column = 0; column < kWidth; column += kStep) {
      ptx::tcgen05_mma_f16(tensor_ + d,
                           a + ColumnOffset(kKeys, column) / 16,
                           b + ColumnOffset(kRows, column) / 16,
                           instruction.descriptor(),
                           column > 0);
    }
  }

  // A product over rows of the block: of what compute warps have stored where `a` was, the second
  // half of the rows beside the second half of that.
  template <int32_t kWidth>
  __device__ __forceinline__ void AcrossRows(uint32_t d, uint32_t a, uint64_t b, bool add) const {
    constexpr ptx::tcgen05_instruction kInstruction = {kElement, kWidth, true};
    constexpr int32_t kShare = Variant::kShare;
#pragma unroll
    for (int32_t row = 0; row < kRows; row += kStep) {
      ptx::tcgen05_mma_f16(tensor_ + d,
                           tensor_ + a + row / kShare * kShare + row % kShare / 2,
                           b + row * 128 / 16,
                           kInstruction.descriptor(),
                           row > 0 || add);
    }
  }

  // From the first stage of Q, in units of 16 bytes.
  static __device__ __forceinline__ uint32_t QueryOffset(int32_t stage) {
    return stage * (BackwardQueryBytes(kShape) / 16);
  }
  static __device__ __forceinline__ uint32_t DoutOffset(int32_t stage) {
    return QueryOffset(kBackwardQueryStages) + stage * (BackwardDoutBytes(kShape) / 16);
  }
  // Its tile is as high as those of keys.
  static __device__ __forceinline__ uint64_t DlogitsOffset() {
    constexpr uint32_t kPanel = (PanelBytes(kKeys) - PanelBytes(kRows)) / 16;
    return DoutOffset(BackwardDoutStages(kShape)) + (uint64_t{kPanel} << 16);
  }

  // Instructions take numbers from registers of the warp. There one instruction adds to a number of
  // 64 bits, but three do if the compiler knows the upper half, and two if both descriptors share
  // theirs. It does not know that `zero` is 0.
  static __device__ __forceinline__ uint64_t Descriptor(const void* tile,
                                                        int32_t rows,
                                                        uint32_t zero) {
    const uint64_t descriptor =
        ptx::tcgen05_matrix_descriptor(SharedAddress(tile), PanelBytes(rows));
    return uint64_t{Uniform(static_cast<uint32_t>(descriptor >> 32) | zero)} << 32 |
           Uniform(static_cast<uint32_t>(descriptor));
  }
  // What follows from it is computed where it is needed: the compiler would keep all of it through
  // the loop, for which there are too few registers.
  static __device__ __forceinline__ uint64_t Opaque(uint64_t descriptor) {
    asm volatile("" : "+l"(descriptor));
    return descriptor;
  }
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BACKWARD_PRODUCTS_H_
