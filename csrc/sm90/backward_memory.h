// Shared memory of a CTA of the backward: the barriers by which its roles hand on what they made,
// and give back what they have used; and the tiles.

#ifndef JAX_FA4_CSRC_SM90_BACKWARD_MEMORY_H_
#define JAX_FA4_CSRC_SM90_BACKWARD_MEMORY_H_

#include "csrc/common/barrier.h"
#include "csrc/common/row_bounds.h"
#include "csrc/ptx/mbarrier.h"
#include "csrc/ptx/warp.h"
#include "csrc/sm90/backward_variant.h"

namespace jax_fa4::sm90 {

// What a CTA does. It is in shared memory since no role has registers to keep it in.
struct BackwardTask {
  uint32_t batch, kv_head;
  uint32_t group;  // query heads that share the key/value head
  uint32_t first_key;
  // Along the leading axes of these operands.
  uint32_t query_element, lower_element, upper_element, hull_element;
};

// What the scan warp tells the others of a block of rows.
struct BackwardNote {
  enum Kind : uint32_t { kAllSee, kMasked, kEnd };  // kEnd: there is no further block
  uint32_t kind;
  uint32_t head, row_block;
  uint32_t idle;  // whether some rows before T see nothing
};

// The first kBackwardControlBytes.
template <class Variant>
struct BackwardControl {
  static constexpr int32_t kStages = Variant::kStages, kConsumers = Variant::kConsumers;
  // A note is written when the rows of kStages blocks before have been released. Then who adds dQ
  // is done with the notes of the blocks before those.
  static constexpr int32_t kNotes = 2 * kStages;

  struct Stage {
    Barrier noted;  // from the scan warp to the load warp
    Barrier query_full, query_empty, dout_full, dout_empty;
  };
  Stage stage[kStages];
  Barrier key_full, value_full;
  Barrier arrived;  // to the load warp itself, which clears some of what arrives
  Barrier weights_empty[Variant::kShape.weight_stages];
  BackwardTask task;
  BackwardNote notes[kNotes];

  __device__ __forceinline__ void Init() {
    constexpr uint32_t kConsumerWarps = kConsumers * kGroupThreads / 32;
    for (Stage& one : stage) {
      one.noted.Init(1);
      one.query_full.Init(1);
      one.query_empty.Init(kConsumerWarps);
      one.dout_full.Init(1);
      one.dout_empty.Init(kConsumerWarps);
    }
    key_full.Init(1);
    value_full.Init(1);
    arrived.Init(1);
    for (Barrier& one : weights_empty) one.Init(kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
};

// Named barriers. Barrier 0 is __syncthreads.
//
// The threads of all consumers.
__device__ __forceinline__ void SyncConsumers() {
  ptx::bar_sync(1, kBackwardConsumers * kGroupThreads);
}
// Where they have the same keys, the first hands on weights to the second.
struct WeightsHandedOn {
  static __device__ __forceinline__ void Wait() { ptx::bar_sync(4, 2 * kGroupThreads); }
  static __device__ __forceinline__ void Arrive() { ptx::bar_arrive(4, 2 * kGroupThreads); }
};
// The threads of a consumer.
__device__ __forceinline__ void SyncConsumer(uint32_t consumer) {
  ptx::bar_sync(2 + consumer, kGroupThreads);
}
// A consumer's part of dQ is there for the warp that adds it, or its place is free again.
struct SumPlace {
  static constexpr uint32_t kThreads = kGroupThreads + 32;
  static __device__ __forceinline__ uint32_t Full(uint32_t consumer) { return 4 + 2 * consumer; }
  static __device__ __forceinline__ uint32_t Empty(uint32_t consumer) { return 5 + 2 * consumer; }
};

template <class Variant>
struct BackwardMemory {
  static constexpr BackwardShape kShape = Variant::kShape;
  static constexpr int32_t kRows = Variant::kRows, kKeys = Variant::kKeys;
  using Control = BackwardControl<Variant>;
  static_assert(sizeof(Control) <= kBackwardControlBytes);

  unsigned char* start;

  // Of the rows of a stage: lse_log2, delta, and the keys that they see, as the first and their
  // number.
  __device__ __forceinline__ float* Lse(uint32_t stage) const {
    return reinterpret_cast<float*>(start + kBackwardControlBytes +
                                    stage * BackwardRowBytes(kShape));
  }
  __device__ __forceinline__ float* Delta(uint32_t stage) const { return Lse(stage) + kRows; }
  __device__ __forceinline__ uint2* Spans(uint32_t stage) const {
    return reinterpret_cast<uint2*>(Delta(stage) + kRows);
  }

  __device__ __forceinline__ unsigned char* Key() const {
    return start + BackwardHeaderBytes(kShape);
  }
  __device__ __forceinline__ unsigned char* Value() const {
    return Key() + TileBytes(kKeys, kShape.width);
  }
  __device__ __forceinline__ unsigned char* Query(uint32_t stage) const {
    return Key() + BackwardKeyBytes(kShape) + stage * TileBytes(kRows, kShape.width);
  }
  __device__ __forceinline__ unsigned char* Dout(uint32_t stage) const {
    return Query(Variant::kStages) + stage * TileBytes(kRows, kShape.value_width);
  }
  __device__ __forceinline__ unsigned char* Weights(uint32_t stage) const {
    return Dout(Variant::kStages) + stage * TileBytes(kRows, kKeys);
  }
  // A consumer's part of dQ.
  __device__ __forceinline__ unsigned char* Sum(uint32_t consumer) const {
    return Weights(kShape.weight_stages) + consumer * kSumBytes;
  }
  __device__ __forceinline__ float4* Exchange() const {
    return reinterpret_cast<float4*>(Weights(kShape.weight_stages));
  }
  static constexpr uint32_t kSumBytes = 64 * 4 * (64 + Variant::kRestColumns);
};

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_BACKWARD_MEMORY_H_
