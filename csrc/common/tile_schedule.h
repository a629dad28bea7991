// In which order the tasks of a launch come, where a task is some rows of a pack of heads: the
// packs' tasks in sections of packs, and within a section all its packs have their turn with the
// same rows before the next rows do.
//
// A section's keys and values stay in the L2 cache while its rows are gone through. Tasks whose
// rows see more keys are better begun first, so that no CTA is left with a long one at the end:
// under a causal mask those of the last rows.

#ifndef JAX_FA4_CSRC_COMMON_TILE_SCHEDULE_H_
#define JAX_FA4_CSRC_COMMON_TILE_SCHEDULE_H_

#include "csrc/common/integers.h"

namespace jax_fa4 {

struct TileSchedule {
  struct Task {
    uint32_t row, head;  // of row_tasks and head_tasks
  };

  uint32_t row_tasks, head_tasks;
  uint32_t section;  // packs of heads; the last section may have fewer
  bool last_first;   // within a section later rows come first

  JAX_FA4_HOST_DEVICE constexpr uint32_t Tasks() const { return row_tasks * head_tasks; }

  // Of an index less than Tasks(), which is less than 2^31.
  JAX_FA4_HOST_DEVICE constexpr Task At(uint32_t index) const {
    const uint32_t tasks_of_section = section * row_tasks;
    const uint32_t first_head = index / tasks_of_section * section;
    const uint32_t in_section = index % tasks_of_section;
    const uint32_t left = head_tasks - first_head, heads = left < section ? left : section;
    const uint32_t row = in_section / heads;
    return {last_first ? row_tasks - 1 - row : row, first_head + in_section % heads};
  }
};

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_TILE_SCHEDULE_H_
