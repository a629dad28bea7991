// Shared memory of a CTA: the barriers by which its roles hand on what they made, and give back
// what they have used; and the tiles.

#ifndef JAX_FA4_CSRC_SM100_BARRIERS_H_
#define JAX_FA4_CSRC_SM100_BARRIERS_H_

#include "csrc/ptx/mbarrier.h"
#include "csrc/ptx/warp.h"
#include "csrc/sm100/config.h"

namespace jax_fa4::sm100 {

inline constexpr int32_t kWarpRows = 32;  // of a tile, a thread each

// An mbarrier. Its phases are counted from 0, and their parity is the last bit of the count.
class Barrier {
 public:
  __device__ __forceinline__ void Init(uint32_t arrivals) {
    ptx::mbarrier_init(&barrier_, arrivals);
  }
  __device__ __forceinline__ void Arrive() { ptx::mbarrier_arrive(&barrier_); }
  // Waits for the end of a phase. The phase before the first, of parity 1, counts as ended, so that
  // who fills a buffer begins without waiting.
  __device__ __forceinline__ void Wait(uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(&barrier_, parity)) {
    }
  }
  __device__ __forceinline__ uint64_t* Get() { return &barrier_; }

 private:
  uint64_t barrier_;
};

// A place in a ring of buffers, and the parity of the phase in which it is filled.
template <int32_t kStages>
struct RingPlace {
  int32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The first kControlBytes. Indices are stages of query tiles, but where another is named.
template <int32_t kKvStages, int32_t kOutStages>
struct Control {
  // From the load warp to the MMA warp and back: a tile has arrived; products that read it are
  // done.
  Barrier q_load_full[kQueryTiles], q_load_empty[kQueryTiles];
  Barrier kv_load_full[kKvStages], kv_load_empty[kKvStages];  // by stage of the ring
  // From the MMA warp: S is computed.
  Barrier s_ready[kQueryTiles];
  // To the MMA warp: the first part of P is stored and O is rescaled; the rest of P is stored.
  Barrier p_o_rescale[kQueryTiles], p_ready_2[kQueryTiles];
  // From the MMA warp: the last product is added to O.
  Barrier o_ready[kQueryTiles];
  // From the correction warps to the softmax warps: row_scale has been read.
  Barrier softmax_corr_empty[kQueryTiles];
  // From the epilogue to the store warp and back: a tile of out is staged; it has been read.
  Barrier corr_epi_full[kOutStages], corr_epi_empty[kOutStages];
  uint32_t tensor_memory;  // where tcgen05.alloc writes

  // What a row hands to its correction thread: by what to multiply O, and at last, where that is
  // who writes out, the sum of its weights.
  float row_scale[kQueryTiles][kTileRows];

  __device__ __forceinline__ void Init() {
    constexpr uint32_t kGroup = kTileRows;  // threads of a warpgroup
    for (int32_t i = 0; i < kQueryTiles; ++i) {
      q_load_full[i].Init(1);
      q_load_empty[i].Init(1);
      s_ready[i].Init(1);
      p_o_rescale[i].Init(2 * kGroup);
      p_ready_2[i].Init(kGroup);
      o_ready[i].Init(1);
      softmax_corr_empty[i].Init(kGroup);
    }
    for (int32_t i = 0; i < kKvStages; ++i) {
      kv_load_full[i].Init(1);
      kv_load_empty[i].Init(1);
    }
    for (int32_t i = 0; i < kOutStages; ++i) {
      corr_epi_full[i].Init(kGroup);
      corr_epi_empty[i].Init(32);
    }
    ptx::fence_mbarrier_init();
  }
};

// The named barrier by which a softmax warp tells the correction warp of the same rows that their
// row_scale is written. Barrier 0 is __syncthreads.
struct StatisticsBarrier {
  uint32_t number;

  __device__ __forceinline__ StatisticsBarrier(uint32_t stage, uint32_t warp)
      : number(1 + stage * (kTileRows / kWarpRows) + warp) {}
  __device__ __forceinline__ void Arrive() const { ptx::bar_arrive(number, 2 * kWarpRows); }
  __device__ __forceinline__ void Wait() const { ptx::bar_sync(number, 2 * kWarpRows); }
};

template <class Variant>
struct SharedMemory {
  static constexpr int32_t kKvStages = KvStages(Variant::kWidths);
  static constexpr int32_t kOutStages = OutStages(Variant::kWidths);
  using Barriers = Control<kKvStages, kOutStages>;
  static_assert(sizeof(Barriers) <= kControlBytes);

  // Where a tile of out is staged, and how often that buffer was used before.
  struct OutPlace {
    int32_t buffer;
    uint32_t use;
  };
  static __device__ __forceinline__ OutPlace OutPlaceOf(uint32_t task_index, uint32_t stage) {
    const uint32_t tile = task_index * kQueryTiles + stage;
    return {static_cast<int32_t>(tile % kOutStages), tile / kOutStages};
  }

  unsigned char* start;

  __device__ __forceinline__ Barriers& Control() const {
    return *reinterpret_cast<Barriers*>(start);
  }
  __device__ __forceinline__ unsigned char* Query(int32_t stage) const {
    return start + kControlBytes + stage * TileBytes(Variant::kWidths.query_key);
  }
  __device__ __forceinline__ unsigned char* Out(int32_t stage) const {
    return Query(kQueryTiles) + stage * TileBytes(Variant::kWidths.value);
  }
  __device__ __forceinline__ unsigned char* KeyValue(int32_t stage) const {
    return Out(kOutStages) + stage * KvStageBytes(Variant::kWidths);
  }
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BARRIERS_H_
