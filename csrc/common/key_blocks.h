// The blocks of keys that the forwards on tensor cores go through, from the last to the first.

#ifndef JAX_FA4_CSRC_COMMON_KEY_BLOCKS_H_
#define JAX_FA4_CSRC_COMMON_KEY_BLOCKS_H_

#include "csrc/common/forward_parameters.h"
#include "csrc/common/row_bounds.h"

namespace jax_fa4 {

struct KeyBlocks {
  uint32_t first, end;

  // Those that the hull of what rows see lies in; one if it is empty.
  template <int32_t kKeys>
  static __device__ __forceinline__ KeyBlocks Of(KeySpan hull) {
    const uint32_t first = hull.begin / kKeys;
    return {first, max((hull.end + kKeys - 1) / kKeys, first + 1)};
  }
  __device__ __forceinline__ uint32_t Count() const { return end - first; }
};

// The keys of a block, of which the last may have fewer.
template <int32_t kKeys>
__device__ __forceinline__ KeySpan KeysOfBlock(const ForwardParameters& p, uint32_t block) {
  const uint32_t first = block * kKeys, keys = p.keys;
  return {first, min(first + kKeys, keys)};
}

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_KEY_BLOCKS_H_
