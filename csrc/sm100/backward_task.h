// What a CTA of the backward does, and through which blocks of rows it goes: every role derives it
// by itself, which takes less time than to wait for another.

#ifndef JAX_FA4_CSRC_SM100_BACKWARD_TASK_H_
#define JAX_FA4_CSRC_SM100_BACKWARD_TASK_H_

#include "csrc/common/backward_parameters.h"
#include "csrc/common/lanes.h"
#include "csrc/common/operands.h"
#include "csrc/common/tile_schedule.h"
#include "csrc/sm100/backward_variant.h"

namespace jax_fa4::sm100 {

// A block of keys of one key/value head of one batch element.
template <class Variant>
struct BackwardTask {
  uint32_t batch, kv_head;
  uint32_t head, group;  // the query heads that share it: the first, and how many
  uint32_t block;
  KeySpan keys;  // of the block, of which the last may have fewer

  __device__ __forceinline__ explicit BackwardTask(const BackwardParameters& p) {
    const TileSchedule schedule = {static_cast<uint32_t>(p.key_blocks),
                                   static_cast<uint32_t>(p.head_tasks),
                                   static_cast<uint32_t>(p.section),
                                   false};
    const TileSchedule::Task at = schedule.At(blockIdx.x);
    const uint32_t kv_heads = p.kv_heads;
    batch = at.head / kv_heads;
    kv_head = at.head % kv_heads;
    group = static_cast<uint32_t>(p.heads) / kv_heads;
    head = kv_head * group;
    block = at.row;
    const uint32_t first = block * Variant::kKeys;
    keys = {first, min(first + Variant::kKeys, static_cast<uint32_t>(p.keys))};
  }
  __device__ __forceinline__ const RowBlockHull* Hulls(const BackwardParameters& p) const {
    return p.hulls + int64_t{ElementOf(batch, p.hull_batch)} * p.row_blocks;
  }
};

// Goes through the blocks of rows of which some row sees some of a task's keys, and for each of
// them through the query heads. All lanes of a warp call it together.
template <class Variant>
class RowBlocks {
 public:
  __device__ __forceinline__ RowBlocks(const BackwardParameters& p,
                                       const BackwardTask<Variant>& task)
      : hulls_(Variant::kKind == MaskKind::kFull ? nullptr : task.Hulls(p)),
        row_blocks_(p.row_blocks),
        keys_(task.keys),
        group_(task.group),
        in_group_(task.group - 1) {}

  // Whether there is a next block; the first call is for the first.
  __device__ __forceinline__ bool Next() {
    if (++in_group_ < group_) return true;
    in_group_ = 0;
    if constexpr (Variant::kKind == MaskKind::kFull) {
      return ++block_ < row_blocks_;
    } else {
      while (meeting_ == 0) {
        if (scanned_ >= row_blocks_) return false;
        const uint32_t block = scanned_ + threadIdx.x % 32;
        RowBlockHull hull = {};
        if (block < row_blocks_) hull = hulls_[block];
        const KeySpan span = {static_cast<uint32_t>(hull.begin), static_cast<uint32_t>(hull.end)};
        meeting_ = Uniform(__ballot_sync(kAllLanes, span.Meets(keys_)));
        idle_ = Uniform(__ballot_sync(kAllLanes, hull.idle != 0));
        scanned_ += 32;
      }
      const uint32_t bit = __ffs(meeting_) - 1;
      meeting_ &= meeting_ - 1;
      block_ = scanned_ - 32 + bit;
      return true;
    }
  }

  __device__ __forceinline__ uint32_t Block() const { return block_; }
  __device__ __forceinline__ uint32_t InGroup() const { return in_group_; }  // of the head
  // Whether some row of the block sees nothing.
  __device__ __forceinline__ bool Idle() const {
    return Variant::kKind != MaskKind::kFull && (idle_ >> block_ % 32 & 1) != 0;
  }

 private:
  const RowBlockHull* hulls_;
  uint32_t row_blocks_;
  KeySpan keys_;
  uint32_t group_, in_group_;
  uint32_t block_ = ~0u;
  // Of the 32 blocks before `scanned_`: those that are yet to come, and those with idle rows.
  uint32_t scanned_ = 0, meeting_ = 0, idle_ = 0;
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BACKWARD_TASK_H_
