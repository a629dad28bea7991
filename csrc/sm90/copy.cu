// Copies a matrix through shared memory with the copy engine: see copy.h.
//
//   one thread   barrier set up -> load issued -> box arrived -> store issued -> box read

#include "csrc/ptx/copy.h"
#include "csrc/ptx/mbarrier.h"
#include "csrc/sm90/copy.h"

namespace jax_fa4::sm90 {

extern "C" __global__ void __launch_bounds__(kCopyThreads)
    copy(const __grid_constant__ CopyParameters parameters) {
  // The copy engine wants boxes at multiples of 128 bytes.
  __shared__ alignas(128) unsigned char box[kCopyBoxRows * kCopyBoxRowBytes];
  __shared__ uint64_t box_arrived;
  if (threadIdx.x != 0) return;

  const int32_t index = static_cast<int32_t>(blockIdx.x);
  const int32_t column = index % parameters.column_boxes * parameters.columns;
  const int32_t row = index / parameters.column_boxes * kCopyBoxRows;

  ptx::mbarrier_init(&box_arrived, 1);
  ptx::fence_mbarrier_init();
  ptx::mbarrier_arrive_expect_tx(&box_arrived, sizeof(box));
  ptx::cp_async_bulk_tensor_2d_load(box, &parameters.source, column, row, &box_arrived);
  while (!ptx::mbarrier_try_wait_parity(&box_arrived, 0)) {
  }

  ptx::cp_async_bulk_tensor_2d_store(&parameters.target, column, row, box);
  ptx::cp_async_bulk_commit_group();
  // Shared memory has to outlive the store's reads. That the result is written by the end of the
  // launch needs no waiting.
  ptx::cp_async_bulk_wait_group_read<0>();
}

}  // namespace jax_fa4::sm90
