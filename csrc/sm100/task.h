// What a CTA does at a time, and in which blocks of keys: every role derives it by itself from the
// task's index, which takes less time than to wait for another.

#ifndef JAX_FA4_CSRC_SM100_TASK_H_
#define JAX_FA4_CSRC_SM100_TASK_H_

#include "csrc/common/key_blocks.h"
#include "csrc/common/operands.h"
#include "csrc/common/tile_schedule.h"
#include "csrc/sm100/config.h"

namespace jax_fa4::sm100 {

// The blocks of keys of a task. All its tiles go through the same.
struct TaskBlocks : KeyBlocks {
  KeySpan hull;  // the keys from the first to the last that some row sees

  __device__ __forceinline__ explicit TaskBlocks(KeySpan of_hull)
      : KeyBlocks(Of<kTileKeys>(of_hull)), hull(of_hull) {}
};

// kQueryTiles query tiles of one pack of heads of one batch element.
template <Kind kKind>
struct Task {
  uint32_t batch;
  uint32_t head;      // the pack's first
  uint32_t kv_head;   // the one that they share
  uint32_t position;  // the first row's
  uint32_t positions_of_tile;
  __device__ __forceinline__ Task(const Parameters& p, uint32_t index) {
    const TileSchedule::Task at = Schedule(p).At(index);
    const uint32_t heads = p.heads, group = heads / static_cast<uint32_t>(p.kv_heads);
    const uint32_t packed_bits = __ffs(p.packed_heads) - 1, packs = heads >> packed_bits;
    batch = at.head / packs;
    head = at.head % packs << packed_bits;
    kv_head = head / group;
    positions_of_tile = kTileRows >> packed_bits;
    position = at.row * (kQueryTiles * positions_of_tile);
  }

  // Calls work(task) for each task of this CTA.
  template <class Work>
  static __device__ __forceinline__ void ForEach(const Parameters& p, const Work& work) {
    const uint32_t tasks = Schedule(p).Tasks();
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < tasks; index += gridDim.x) work(Task(p, index));
  }

  // All lanes of a warp call it together.
  __device__ __forceinline__ TaskBlocks Blocks(const Parameters& p) const {
    if (kKind == Kind::kFull) return TaskBlocks({0, static_cast<uint32_t>(p.keys)});
    return TaskBlocks(
        BoundsOf(p, batch).Hull(position, position + kQueryTiles * positions_of_tile));
  }

  // Where a row of a tile is in the arrays.
  __device__ __forceinline__ uint32_t PositionOf(uint32_t stage, uint32_t row) const {
    return position + stage * positions_of_tile + row * positions_of_tile / kTileRows;
  }
  __device__ __forceinline__ uint32_t HeadOf(uint32_t row) const {
    return head + row % (kTileRows / positions_of_tile);
  }
  // Its index in arrays (B, T, N), or -1 if its position is beyond T.
  __device__ __forceinline__ int64_t IndexOf(const Parameters& p,
                                             uint32_t stage,
                                             uint32_t row) const {
    const uint32_t at = PositionOf(stage, row), rows = p.rows;
    return at < rows ? (int64_t{batch} * rows + at) * p.heads + HeadOf(row) : -1;
  }

 private:
  static __device__ __forceinline__ TileSchedule Schedule(const Parameters& p) {
    return {static_cast<uint32_t>(p.row_tasks),
            static_cast<uint32_t>(p.head_tasks),
            static_cast<uint32_t>(p.section),
            p.last_first != 0};
  }
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_TASK_H_
