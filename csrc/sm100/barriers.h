// Shared memory of a CTA: the barriers by which its roles hand on what they made, and give back
// what they have used; and the tiles.

#ifndef JAX_FA4_CSRC_SM100_BARRIERS_H_
#define JAX_FA4_CSRC_SM100_BARRIERS_H_

#include "csrc/common/barrier.h"
#include "csrc/ptx/mbarrier.h"
#include "csrc/ptx/warp.h"
#include "csrc/sm100/config.h"

namespace jax_fa4::sm100 {

inline constexpr int32_t kWarpRows = 32;  // of a tile, a thread each

// Parities of the phases of barriers that are used once a block of keys, and once a task: in one
// register, of which softmax threads have none to spare.
class Phases {
 public:
  __device__ __forceinline__ uint32_t OfBlock() const { return parities_ & 1; }
  __device__ __forceinline__ uint32_t OfTask() const { return parities_ >> 1; }
  __device__ __forceinline__ void NextBlock() { parities_ ^= 1; }
  __device__ __forceinline__ void NextTask() { parities_ ^= 2; }

 private:
  uint32_t parities_ = 0;
};

// What belongs to a query tile.
struct TileControl {
  // From the load warp to the MMA warp and back: Q has arrived; the products that read it are done.
  Barrier q_load_full, q_load_empty;
  // From the MMA warp: S is computed.
  Barrier s_ready;
  // To the MMA warp: the first part of P is stored and O is rescaled; the rest of P is stored.
  Barrier p_o_rescale, p_ready_2;
  // From the MMA warp: the last product is added to O.
  Barrier o_ready;
  // From the correction warps to the softmax warps: row_scale has been read.
  Barrier softmax_corr_empty;
  // From the epilogue to the store warp and back: the tile of out is staged; there is room for it.
  Barrier corr_epi_full, corr_epi_empty;
  // What a row hands to its correction thread: by what to multiply O, and at last, where that is
  // who writes out, the sum of its weights.
  float row_scale[kTileRows];
};

// From the load warp to the MMA warp and back: a tile of keys or values has arrived; the products
// that read it are done.
struct KvControl {
  Barrier kv_load_full, kv_load_empty;
};

// The first kControlBytes.
template <int32_t kKvStages>
struct Control {
  TileControl tiles[kQueryTiles];
  KvControl ring[kKvStages];
  uint32_t tensor_memory;  // where tcgen05.alloc writes

  __device__ __forceinline__ void Init() {
    constexpr uint32_t kGroup = kTileRows;  // threads of a warpgroup
    for (TileControl& tile : tiles) {
      tile.q_load_full.Init(1);
      tile.q_load_empty.Init(1);
      tile.s_ready.Init(1);
      tile.p_o_rescale.Init(2 * kGroup);
      tile.p_ready_2.Init(kGroup);
      tile.o_ready.Init(1);
      tile.softmax_corr_empty.Init(kGroup);
      tile.corr_epi_full.Init(kGroup);
      tile.corr_epi_empty.Init(32);
    }
    for (KvControl& stage : ring) {
      stage.kv_load_full.Init(1);
      stage.kv_load_empty.Init(1);
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
  using Control = sm100::Control<kKvStages>;
  static_assert(sizeof(Control) <= kControlBytes);

  unsigned char* start;

  __device__ __forceinline__ unsigned char* Query(int32_t stage) const {
    return start + kControlBytes + stage * TileBytes(Variant::kWidths.query_key);
  }
  __device__ __forceinline__ unsigned char* Out(int32_t stage) const {
    return Query(kQueryTiles) + stage % kOutStages * TileBytes(Variant::kWidths.value);
  }
  __device__ __forceinline__ unsigned char* KeyValue(int32_t stage) const {
    return Out(0) + kOutStages * TileBytes(Variant::kWidths.value) +
           stage * KvStageBytes(Variant::kWidths);
  }
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BARRIERS_H_
