// What the forwards on tensor cores do in shared memory: see csrc/common/panels.h.

#ifndef JAX_FA4_CSRC_COMMON_SHARED_MEMORY_H_
#define JAX_FA4_CSRC_COMMON_SHARED_MEMORY_H_

#include "csrc/common/barrier.h"
#include "csrc/common/forward_parameters.h"
#include "csrc/common/lanes.h"
#include "csrc/common/panels.h"
#include "csrc/common/row_bounds.h"
#include "csrc/ptx/copy.h"

namespace jax_fa4 {

// One thread loads a tile. It completes on a barrier.
template <int32_t kRows, int32_t kColumns>
__device__ __forceinline__ void LoadTile(unsigned char* tile,
                                         const TensorMap& map,
                                         int32_t head,
                                         int32_t position,
                                         int32_t batch,
                                         Barrier& full) {
  ptx::mbarrier_arrive_expect_tx(full.Get(), TileBytes(kRows, kColumns));
#pragma unroll
  for (int32_t panel = 0; panel < Panels(kColumns); ++panel) {
    ptx::cp_async_bulk_tensor_4d_load(
        tile + panel * PanelBytes(kRows), &map, 64 * panel, head, position, batch, full.Get());
  }
}

// A warp makes rows [begin, end) of a tile zeros.
template <int32_t kRows, int32_t kColumns>
__device__ __forceinline__ void ClearRows(unsigned char* tile, uint32_t begin, uint32_t end) {
#pragma unroll 1
  for (int32_t panel = 0; panel < Panels(kColumns); ++panel) {
#pragma unroll 1
    for (uint32_t at = begin * 128 + threadIdx.x % 32 * 16; at < end * 128; at += 32 * 16) {
      *reinterpret_cast<uint4*>(tile + panel * PanelBytes(kRows) + at) = make_uint4(0, 0, 0, 0);
    }
  }
}

// Whether a block has keys outside of the hull of those that a task's rows see. They have weights
// of 0, but their values may be NaN.
__device__ __forceinline__ bool HasUnseen(KeySpan block, KeySpan hull) {
  return hull.begin > block.begin || hull.end < block.end;
}
// A warp makes their values zeros, before the tensor cores read the tile. (Where a block has fewer
// keys than the tile has rows, the copy engine has filled it up with zeros.)
template <int32_t kKeys, int32_t kColumns>
__device__ __forceinline__ void ClearUnseen(unsigned char* values, KeySpan block, KeySpan hull) {
  if (hull.begin > block.begin) {
    ClearRows<kKeys, kColumns>(values, 0, hull.begin - block.begin);
  }
  if (hull.end < block.end) {
    ClearRows<kKeys, kColumns>(values, hull.end - block.begin, block.end - block.begin);
  }
  ptx::fence_proxy_async();
  __syncwarp();
}

// Runs a forward's roles in the shared memory of the launch.
template <class Forward>
__device__ __forceinline__ void RunForward(const ForwardParameters& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& control = *reinterpret_cast<typename Forward::Memory::Control*>(shared);
  Forward{p, {shared}, control}.Run();
}

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_SHARED_MEMORY_H_
