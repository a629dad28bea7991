// What a CTA does at a time, and in which blocks of keys.

#ifndef JAX_FA4_CSRC_SM90_TASK_H_
#define JAX_FA4_CSRC_SM90_TASK_H_

#include "csrc/common/key_blocks.h"
#include "csrc/common/operands.h"
#include "csrc/sm90/variant.h"

namespace jax_fa4::sm90 {

// A query tile of one pack of heads of one batch element.
template <class Variant>
struct Task {
  uint32_t batch;
  uint32_t head;      // the pack's first
  uint32_t position;  // the first row's

  static __device__ __forceinline__ Task At(const Parameters& p, uint32_t row, uint32_t head) {
    const uint32_t packs = static_cast<uint32_t>(p.heads) >> PackedBits(p);
    return {head / packs,
            head % packs << PackedBits(p),
            row * (TileRows(Variant::kShape) >> PackedBits(p))};
  }

  // The head of keys and values that all of them share.
  __device__ __forceinline__ uint32_t KvHead(const Parameters& p) const {
    return head / (static_cast<uint32_t>(p.heads) / static_cast<uint32_t>(p.kv_heads));
  }

  // The keys from the first to the last that some row of a warpgroup sees. All lanes of a warp call
  // it together.
  __device__ __forceinline__ KeySpan Hull(const Parameters& p, uint32_t consumer) const {
    const uint32_t rows = p.rows, begin = PositionOf(p, consumer * kGroupRows);
    if (begin >= rows) return {0, 0};
    if (Variant::kKind == Kind::kFull) return {0, static_cast<uint32_t>(p.keys)};
    return BoundsOf(p, batch).Hull(begin, begin + (kGroupRows >> PackedBits(p)));
  }
  // Where a row of the tile is in the arrays.
  __device__ __forceinline__ uint32_t PositionOf(const Parameters& p, uint32_t row) const {
    return position + (row >> PackedBits(p));
  }
  // Its index in arrays (B, T, N), or -1 if its position is beyond T.
  __device__ __forceinline__ int64_t IndexOf(const Parameters& p, uint32_t row) const {
    const uint32_t at = PositionOf(p, row), rows = p.rows;
    const uint32_t head_of_row = head + (row & ((1u << PackedBits(p)) - 1));
    return at < rows ? (int64_t{batch} * rows + at) * p.heads + head_of_row : -1;
  }

 private:
  static __device__ __forceinline__ uint32_t PackedBits(const Parameters& p) {
    return __ffs(p.packed_heads) - 1;
  }
};

// The tasks of this CTA. Those of a head come in pairs, of rows equally far from both ends, which
// under a causal mask take the same time together, and every CTA gets as many pairs. The CTAs work
// at neighbouring pairs, so that they read the same keys and values.
class Deal {
 public:
  __device__ __forceinline__ explicit Deal(const Parameters& p)
      : rows_(p.row_tasks), pairs_((rows_ + 1) / 2), end_(pairs_ * p.head_tasks) {}

  __device__ __forceinline__ bool Done() const { return pair_ >= end_; }
  // The row's and the head's number. The later rows of a pair come first.
  __device__ __forceinline__ uint32_t Row() const {
    const uint32_t row = pair_ % pairs_;
    return second_ ? row : rows_ - 1 - row;
  }
  __device__ __forceinline__ uint32_t Head() const { return pair_ / pairs_; }

  __device__ __forceinline__ void Advance() {
    second_ = !second_ && pair_ % pairs_ != rows_ / 2;
    if (!second_) pair_ += gridDim.x;
  }

 private:
  uint32_t rows_, pairs_, end_;
  uint32_t pair_ = blockIdx.x;
  bool second_ = false;
};

// What the load warp tells the consumers of a task.
template <class Variant>
struct TaskNote {
  Task<Variant> task;
  float scale;                         // of logits
  KeySpan hull;                        // the keys from the first to the last that some row sees
  KeyBlocks blocks;                    // that the tile goes through; none after the last task
  KeyBlocks own[Variant::kConsumers];  // those of a warpgroup's rows
};

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_TASK_H_
