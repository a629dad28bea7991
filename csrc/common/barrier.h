// What warps of different roles wait at: mbarriers, one or a ring of them.

#ifndef JAX_FA4_CSRC_COMMON_BARRIER_H_
#define JAX_FA4_CSRC_COMMON_BARRIER_H_

#include "csrc/ptx/mbarrier.h"

namespace jax_fa4 {

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

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_BARRIER_H_
