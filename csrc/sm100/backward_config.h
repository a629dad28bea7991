// PROVISIONAL: replaced by the kernels' own.

#ifndef JAX_FA4_CSRC_SM100_BACKWARD_CONFIG_H_
#define JAX_FA4_CSRC_SM100_BACKWARD_CONFIG_H_

#include "csrc/common/integers.h"
#include "csrc/common/panels.h"

namespace jax_fa4::sm100 {

struct BackwardShape {
  int32_t width, value_width, row_block, key_block;
};
inline constexpr BackwardShape kBackwardShapes[] = {{64, 64, 128, 128}, {96, 96, 128, 128}, {128, 128, 128, 128}, {192, 128, 128, 128}};

JAX_FA4_HOST_DEVICE constexpr int32_t BackwardThreads(const BackwardShape&) { return 512; }
JAX_FA4_HOST_DEVICE constexpr uint32_t BackwardSharedBytes(const BackwardShape&) {
  return kMostSharedBytes;
}

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_BACKWARD_CONFIG_H_
