// The five products of the backward on the tensor cores, of one warpgroup.

#ifndef JAX_FA4_CSRC_SM90_BACKWARD_PRODUCTS_H_
#define JAX_FA4_CSRC_SM90_BACKWARD_PRODUCTS_H_

#include "csrc/common/lanes.h"
#include "csrc/common/panels.h"
#include "csrc/ptx/wgmma.h"

namespace jax_fa4::sm90 {

template <class Variant>
class BackwardProducts {
 public:
  using Element = typename Variant::Element;
  static constexpr int32_t kRows = Variant::kRows, kKeys = Variant::kKeys;
  static constexpr int32_t kWidth = Variant::kWidth, kValueWidth = Variant::kValueWidth;
  static constexpr int32_t kPartRows = Variant::kPartRows, kPieceRows = Variant::kPieceRows;
  static constexpr int32_t kStep = 16;
  using Logits = float[kPartRows / 2];                           // S^T and dP^T, keys by rows
  using Weights = uint32_t[kRows / kPieceRows][kPieceRows / 4];  // P^T and dS^T
  using KeySum = float[kWidth / 2];
  using ValueSum = float[kValueWidth / 2];

  // The tiles of the first stage; of dS too.
  __device__ __forceinline__ BackwardProducts(uint32_t consumer,
                                              const void* key,
                                              const void* value,
                                              const void* query,
                                              const void* dout,
                                              const void* weights)
      : consumer_(consumer),
        all_keys_(Descriptor(key, kKeys)),
        key_(all_keys_ + FirstKey(consumer)),
        value_(Descriptor(value, kKeys) + FirstKey(consumer)),
        query_(Descriptor(query, kRows)),
        dout_(Descriptor(dout, kRows)),
        weights_(Descriptor(weights, kRows)) {}

  // The same products, if `zero` is 0. Where that is new in each turn of a loop, the compiler
  // cannot keep the descriptors of all steps across turns, for which there are no registers. The
  // latter is for WeightKey alone.
  __device__ __forceinline__ BackwardProducts Anew(uint32_t zero) const {
    BackwardProducts products = *this;
    products.key_ += zero;
    products.value_ += zero;
    products.weights_ += zero;
    return products;
  }
  __device__ __forceinline__ BackwardProducts WithNewKeys(uint32_t zero) const {
    BackwardProducts products = *this;
    products.all_keys_ += zero;
    return products;
  }

  // S^T = K Q^T, of the warpgroup's keys and a part of the rows.
  __device__ __forceinline__ void KeyQuery(Logits& s, uint32_t stage, int32_t part) const {
    Rows<kWidth>(s, key_, query_ + stage * (TileBytes(kRows, kWidth) / 16), part);
  }
  // dP^T = V dO^T.
  __device__ __forceinline__ void ValueDout(Logits& s, uint32_t stage, int32_t part) const {
    Rows<kValueWidth>(s, value_, dout_ + stage * (TileBytes(kRows, kValueWidth) / 16), part);
  }

  // dV += P^T dO, of a piece of the rows.
  __device__ __forceinline__ void WeightDout(ValueSum& sum,
                                             const Weights& weights,
                                             uint32_t stage,
                                             int32_t piece) const {
    Keys(sum, weights, dout_ + stage * (TileBytes(kRows, kValueWidth) / 16), piece);
    ptx::wgmma_commit_group();
  }
  // dK += dS^T Q, of all rows.
  __device__ __forceinline__ void WeightQuery(KeySum& sum,
                                              const Weights& weights,
                                              uint32_t stage) const {
#pragma unroll
    for (int32_t piece = 0; piece < kRows / kPieceRows; ++piece) {
      Keys(sum, weights, query_ + stage * (TileBytes(kRows, kWidth) / 16), piece);
    }
    ptx::wgmma_commit_group();
  }

  // dQ = dS K: some of its columns, from a multiple of 32 on, in the warpgroup's rows.
  template <int32_t kCount>
  __device__ __forceinline__ void WeightKey(float (&sum)[kCount],
                                            uint32_t weight_stage,
                                            uint32_t column) const {
    const uint64_t weights = weights_ + weight_stage * (TileBytes(kRows, kKeys) / 16) +
                             (Variant::kSharesRows ? consumer_ * (PanelBytes(64) / 16) : 0);
    const uint64_t key = all_keys_ + ColumnOffset(kKeys, column) / 16;
    Step<false>(sum, weights, key);
#pragma unroll
    for (int32_t i = kStep; i < kKeys; i += kStep) Step<true>(sum, weights, key, i);
  }

 private:
  uint32_t consumer_;
  uint64_t all_keys_, key_, value_;  // the latter two from the warpgroup's first key on
  uint64_t query_, dout_, weights_;

  template <int32_t kColumns>
  static __device__ __forceinline__ void Rows(Logits& s,
                                              uint64_t keys,
                                              uint64_t rows,
                                              int32_t part) {
    rows += part * (PanelBytes(kPartRows) / 16);
    ptx::wgmma_m64k16_tiles<Element, false, false>(s, keys, rows);
#pragma unroll
    for (int32_t i = kStep; i < kColumns; i += kStep) {
      ptx::wgmma_m64k16_tiles<Element, true, false>(
          s, keys + ColumnOffset(kKeys, i) / 16, rows + ColumnOffset(kRows, i) / 16);
    }
    ptx::wgmma_commit_group();
  }

  template <int32_t kCount>
  static __device__ __forceinline__ void Keys(float (&sum)[kCount],
                                              const Weights& weights,
                                              uint64_t rows,
                                              int32_t piece) {
#pragma unroll
    for (int32_t i = 0; i < kPieceRows; i += kStep) {
      ptx::wgmma_m64k16_rs<Element>(
          sum, weights[piece] + i / 4, rows + PanelBytes(piece * kPieceRows + i) / 16);
    }
  }

  template <bool kAdd, int32_t kCount>
  static __device__ __forceinline__ void Step(float (&sum)[kCount],
                                              uint64_t weights,
                                              uint64_t key,
                                              int32_t i = 0) {
    ptx::wgmma_m64k16_tiles<Element, kAdd, true>(
        sum, weights + ColumnOffset(kRows, i) / 16, key + PanelBytes(i) / 16);
  }

  static __device__ __forceinline__ uint32_t FirstKey(uint32_t consumer) {
    return Variant::kSharesKeys ? consumer * (PanelBytes(Variant::kGroupKeys) / 16) : 0;
  }
  // Panels follow each other where rows of the tile are summed over.
  static __device__ __forceinline__ uint64_t Descriptor(const void* tile, int32_t rows) {
    return ptx::wgmma_matrix_descriptor(Uniform(SharedAddress(tile)), PanelBytes(rows));
  }
};

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_BACKWARD_PRODUCTS_H_
