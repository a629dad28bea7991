// The two products of attention on the tensor cores, of one warpgroup's rows and a block of keys.

#ifndef JAX_FA4_CSRC_SM90_PRODUCTS_H_
#define JAX_FA4_CSRC_SM90_PRODUCTS_H_

#include "csrc/common/lanes.h"
#include "csrc/common/panels.h"
#include "csrc/ptx/wgmma.h"
#include "csrc/sm90/variant.h"

namespace jax_fa4::sm90 {

inline constexpr int32_t kStep = 16;  // that an instruction sums over

// A number that all lanes have, in such a way that the assembler knows that they do: descriptors
// are then computed from it once for a warp, which takes half as many instructions.
__device__ __forceinline__ uint32_t Known(uint32_t x) { return __reduce_or_sync(kAllLanes, x); }

template <class Variant>
class Products {
 public:
  static constexpr Shape kShape = Variant::kShape;
  using S = float[kShape.keys / 2];
  using P = uint32_t[kShape.keys / 4];
  using O = float[kShape.value_width / 2];

  // Q of the warpgroup, K and V of the first stage.
  __device__ __forceinline__ Products(const void* query, const void* key, const void* value)
      : query_(Descriptor(query, 0)),
        key_(Descriptor(key, 0)),
        value_(Descriptor(value, PanelBytes(kShape.keys))) {}

  // S = Q K^T.
  __device__ __forceinline__ void QueryKey(S& s, uint32_t query_stage, uint32_t stage) const {
    const uint64_t query = query_ + Known(query_stage) * (QueryBytes(kShape) / 16);
    const uint64_t key = key_ + Known(stage) * (TileBytes(kShape.keys, kShape.width) / 16);
    ptx::wgmma_m64k16_ss<typename Variant::Element, false>(s, query, key);
#pragma unroll
    for (int32_t column = kStep; column < kShape.width; column += kStep) {
      ptx::wgmma_m64k16_ss<typename Variant::Element, true>(
          s,
          query + ColumnOffset(kGroupRows, column) / 16,
          key + ColumnOffset(kShape.keys, column) / 16);
    }
    ptx::wgmma_commit_group();
  }

  // O += P V.
  __device__ __forceinline__ void WeightValue(O& o, const P& p, uint32_t stage) const {
    const uint64_t value =
        value_ + Known(stage) * (TileBytes(kShape.keys, kShape.value_width) / 16);
#pragma unroll
    for (int32_t key = 0; key < kShape.keys; key += kStep) {
      ptx::wgmma_m64k16_rs<typename Variant::Element>(o, p + key / 4, value + key * 128 / 16);
    }
    ptx::wgmma_commit_group();
  }

 private:
  uint64_t query_, key_, value_;

  static __device__ __forceinline__ uint64_t Descriptor(const void* tile, uint32_t panel_bytes) {
    return ptx::wgmma_matrix_descriptor(Uniform(SharedAddress(tile)), panel_bytes);
  }
};

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_PRODUCTS_H_
