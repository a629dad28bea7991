// Shared memory of a CTA: the barriers by which its roles hand on what they made, and give back
// what they have used; and the tiles.

#ifndef JAX_FA4_CSRC_SM90_BARRIERS_H_
#define JAX_FA4_CSRC_SM90_BARRIERS_H_

#include "csrc/common/barrier.h"
#include "csrc/ptx/mbarrier.h"
#include "csrc/ptx/warp.h"
#include "csrc/sm90/task.h"
#include "csrc/sm90/variant.h"

namespace jax_fa4::sm90 {

// From the load warp to the consumers and back: a tile has arrived; who reads it is done.
struct TileBarriers {
  Barrier full, empty;
};

// The first kControlBytes.
template <class Variant>
struct Control {
  static constexpr int32_t kConsumers = Variant::kConsumers, kStages = Variant::kStages;
  // A note is written once the load of a value tile of the task before has begun. By then who was
  // the last to use that tile's place has done so, kStages blocks earlier and at most as many
  // tasks: who reads the note of the task before those is done with it.
  static constexpr int32_t kNotes = kStages + 2;

  TileBarriers query[Variant::kQueryStages][kConsumers];  // with the note of the task
  TileBarriers key[kStages], value[kStages];
  Barrier value_arrived;  // to the load warp itself, which clears some of its keys
  TaskNote<Variant> notes[kNotes];

  __device__ __forceinline__ void Init() {
    constexpr uint32_t kGroupWarps = kGroupThreads / 32;
    const auto init = [](TileBarriers& tile, uint32_t consumer_warps) {
      tile.full.Init(1);
      tile.empty.Init(consumer_warps);
    };
    for (auto& stage : query) {
      for (TileBarriers& tile : stage) init(tile, kGroupWarps);
    }
    for (TileBarriers& tile : key) init(tile, kConsumers * kGroupWarps);
    for (TileBarriers& tile : value) init(tile, kConsumers * kGroupWarps);
    value_arrived.Init(1);
    ptx::fence_mbarrier_init();
  }
};

// Named barriers. Barrier 0 is __syncthreads.
//
// The turns of the consumers: whose turn it is waits, the one before it arrives.
struct Turn {
  static __device__ __forceinline__ void Wait(uint32_t consumer) {
    ptx::bar_sync(1 + consumer, 2 * kGroupThreads);
  }
  static __device__ __forceinline__ void Give(uint32_t consumer) {
    ptx::bar_arrive(1 + consumer, 2 * kGroupThreads);
  }
};
// The threads of a consumer.
__device__ __forceinline__ void SyncGroup(uint32_t consumer) {
  ptx::bar_sync(4 + consumer, kGroupThreads);
}

template <class Variant>
struct SharedMemory {
  static constexpr Shape kShape = Variant::kShape;
  using Control = sm90::Control<Variant>;
  static_assert(sizeof(Control) <= kControlBytes);

  unsigned char* start;

  __device__ __forceinline__ unsigned char* Query(uint32_t stage, uint32_t consumer) const {
    return start + kControlBytes +
           (stage * kShape.consumers + consumer) * TileBytes(kGroupRows, kShape.width);
  }
  __device__ __forceinline__ unsigned char* Out(uint32_t consumer) const {
    return OutIsApart(kShape) ? Query(Variant::kQueryStages, 0) +
                                    consumer * TileBytes(kGroupRows, kShape.value_width)
                              : Query(0, consumer);
  }
  __device__ __forceinline__ unsigned char* Key(uint32_t stage) const {
    return start + kControlBytes + RowBytes(kShape) + stage * TileBytes(kShape.keys, kShape.width);
  }
  __device__ __forceinline__ unsigned char* Value(uint32_t stage) const {
    return Key(Variant::kStages) + stage * TileBytes(kShape.keys, kShape.value_width);
  }
};

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_BARRIERS_H_
