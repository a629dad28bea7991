// Shared memory of a CTA of the backward: the barriers by which its roles hand on what they made,
// and give back what they have used; and the tiles.

#ifndef JAX_FA4_CSRC_SM100_BACKWARD_BARRIERS_H_
#define JAX_FA4_CSRC_SM100_BACKWARD_BARRIERS_H_

#include "csrc/common/barrier.h"
#include "csrc/ptx/mbarrier.h"
#include "csrc/ptx/warp.h"
#include "csrc/sm100/backward_variant.h"

namespace jax_fa4::sm100 {

inline constexpr uint32_t kComputeWarps = 8, kReduceWarps = 4;

// The first kBackwardControlBytes. Of one block of rows follow s_ready, p_ready, dp_ready,
// ds_ready, dq_ready and dq_empty, in this order.
template <class Variant>
struct BackwardControl {
  // What rows need besides Q and dO: their lse in base 2, and their delta.
  struct alignas(16) RowNumbers {
    float lse_log2[Variant::kRows], delta[Variant::kRows];
  };

  RowNumbers row_numbers[kBackwardQueryStages];
  // From the load warp: K, V have arrived.
  Barrier k_full, v_full;
  // From the load warp, and from the MMA warp back: Q has arrived, and with it RowNumbers; the
  // products that read it are done, and before them what read these.
  Barrier q_full[kBackwardQueryStages], q_empty[kBackwardQueryStages];
  // The same for dO.
  Barrier do_full[BackwardDoutStages(Variant::kShape)],
      do_empty[BackwardDoutStages(Variant::kShape)];
  // From the MMA warp: S, dP are computed. From a compute warp: P, dS are stored.
  Barrier s_ready, p_ready, dp_ready, ds_ready;
  // From the MMA warp to the reduce warps, and from each of these back: dQ is computed; it is read.
  Barrier dq_ready, dq_empty;
  // From the MMA warp: the last product is added to dV, to dK.
  Barrier dv_ready, dk_ready;
  uint32_t tensor_memory;  // where tcgen05.alloc writes

  __device__ __forceinline__ void Init() {
    k_full.Init(1);
    v_full.Init(1);
    for (Barrier& barrier : q_full) barrier.Init(1);
    for (Barrier& barrier : q_empty) barrier.Init(1);
    for (Barrier& barrier : do_full) barrier.Init(1);
    for (Barrier& barrier : do_empty) barrier.Init(1);
    s_ready.Init(1);
    p_ready.Init(kComputeWarps);
    dp_ready.Init(1);
    ds_ready.Init(kComputeWarps);
    dq_ready.Init(1);
    dq_empty.Init(kReduceWarps);
    dv_ready.Init(1);
    dk_ready.Init(1);
    ptx::fence_mbarrier_init();
  }
};

// Named barriers. Barrier 0 is __syncthreads.

// Between the reduce warps and the add warp, of every other piece of dQ: it is staged; there is
// room for it.
class PieceBarrier {
 public:
  static __device__ __forceinline__ PieceBarrier Full(uint32_t piece) { return {1 + piece % 2}; }
  static __device__ __forceinline__ PieceBarrier Empty(uint32_t piece) { return {3 + piece % 2}; }
  __device__ __forceinline__ void Arrive() const { ptx::bar_arrive(number_, kThreads); }
  __device__ __forceinline__ void Wait() const { ptx::bar_sync(number_, kThreads); }

 private:
  static constexpr uint32_t kThreads = (kReduceWarps + 1) * 32;
  uint32_t number_;

  __device__ __forceinline__ PieceBarrier(uint32_t number) : number_(number) {}
};

// Of the compute warps: a tile of dK or dV is staged.
struct StoreBarrier {
  static __device__ __forceinline__ void Wait() { ptx::bar_sync(5, kComputeWarps * 32); }
};

template <class Variant>
struct BackwardMemory {
  static constexpr BackwardShape kShape = Variant::kShape;
  static constexpr int32_t kDoutStages = BackwardDoutStages(kShape);
  static_assert(sizeof(BackwardControl<Variant>) <= kBackwardControlBytes);

  unsigned char* start;

  __device__ __forceinline__ unsigned char* Key() const { return start + kBackwardControlBytes; }
  __device__ __forceinline__ unsigned char* Value() const {
    return Key() + BackwardKeyBytes(kShape);
  }
  __device__ __forceinline__ unsigned char* Query(int32_t stage) const {
    return Value() + BackwardValueBytes(kShape) + stage * BackwardQueryBytes(kShape);
  }
  __device__ __forceinline__ unsigned char* Dout(int32_t stage) const {
    return Query(kBackwardQueryStages) + stage * BackwardDoutBytes(kShape);
  }
  __device__ __forceinline__ unsigned char* Dlogits() const { return Dout(kDoutStages); }
  __device__ __forceinline__ unsigned char* Dquery() const {
    return Dlogits() + BackwardDlogitsBytes(kShape);
  }
};

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BACKWARD_BARRIERS_H_
