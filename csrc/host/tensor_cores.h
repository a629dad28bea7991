// What the host code of the kernels for tensor cores, forward and backward, has in common: which
// GPUs they are for, what they take, tensor maps, names.

#ifndef JAX_FA4_CSRC_HOST_TENSOR_CORES_H_
#define JAX_FA4_CSRC_HOST_TENSOR_CORES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "csrc/common/mask_kind.h"
#include "csrc/host/problem.h"

namespace jax_fa4 {

// GPUs that share kernels for tensor cores.
struct Architecture {
  const char* name;
  const char* capabilities;  // in words
  bool (*serves)(int major, int minor);
};
extern const Architecture kBlackwell, kHopper;

// Of tasks, and of keys and (packed) rows: tiles that end behind them are counted in 32 bits too.
inline constexpr int64_t kMostTasks = std::numeric_limits<int32_t>::max();
inline constexpr int64_t kMostRows = (int64_t{1} << 31) - 256;

MaskKind MaskKindOf(const Problem& problem);

// The kernels' name for a call, "forward_bfloat16_192_128_full", by the widths that they are
// compiled for.
std::string KernelName(std::string pass,
                       const Problem& problem,
                       int32_t width,
                       int32_t value_width);

// The first of an architecture's tilings that a call's widths fit in; null if none does.
template <typename Tiling>
const Tiling* FirstThatFits(std::span<const Tiling> tilings, const Problem& problem) {
  for (const Tiling& tiling : tilings) {
    if (problem.width <= tiling.width && problem.value_width <= tiling.value_width) return &tiling;
  }
  return nullptr;
}

// Why the kernels of a pass, "forward" or "backward", cannot do it, "" if nothing is found: as for
// the GPU; as for dtype and widths, of which a tiling has `most` and `most_value`, and whether one
// fits; as for keys; and as for tensor maps, all of whose buffers `name_of` names.
std::string WhyNotGpu(const Architecture& architecture, const char* pass, const Device& device);
std::string WhyNotHeads(
    const std::string& takes, const Problem& problem, bool fits, int32_t most, int32_t most_value);
std::string WhyNotKeys(const std::string& takes, const Problem& problem);
std::string WhyNotMaps(const std::string& takes,
                       std::span<const TensorMapParameter> maps,
                       const char* (*name_of)(int buffer));

// Of `heads` that there are, how many the L2 cache holds together if each takes so many bytes: a
// power of two, which mostly divides all that there are, and no larger than all of them take.
int32_t Section(const Device& device, uint64_t bytes, int64_t heads);

// Of an array (batch, positions, heads, width) of 16-bit elements, whose boxes have 64 columns of
// so many heads and positions.
TensorMapParameter Map(size_t at,
                       int buffer,
                       const std::array<int32_t, 4>& dims,
                       int32_t box_heads,
                       int32_t box_positions);

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_HOST_TENSOR_CORES_H_
