#include "csrc/host/tensor_cores.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace jax_fa4 {

// Not every GPU of major version 10 has what the kernels use: 10.1 is of another family.
constinit const Architecture kBlackwell = {"Blackwell", "10.0 or 10.3", [](int major, int minor) {
                                             return major == 10 && (minor == 0 || minor == 3);
                                           }};

// The kernels are for one architecture, sm_90a.
constinit const Architecture kHopper = {
    "Hopper", "9.0", [](int major, int minor) { return major == 9 && minor == 0; }};

MaskKind MaskKindOf(const Problem& problem) {
  if (problem.attributes.softcap != 0) return MaskKind::kSoftcap;
  // The last row decides for the lower bound, the first one for the upper.
  const bool sees_all = problem.lower_batch == 0 &&
                        int64_t{problem.rows} - 1 + problem.attributes.band_low <= 0 &&
                        problem.attributes.band_high >= problem.keys;
  return sees_all ? MaskKind::kFull : MaskKind::kBounds;
}

std::string KernelName(std::string pass,
                       const Problem& problem,
                       int32_t width,
                       int32_t value_width) {
  std::string name =
      std::move(pass) + "_" + std::string(problem.dtype) + "_" + std::to_string(width);
  if (value_width != width) name += "_" + std::to_string(value_width);
  switch (MaskKindOf(problem)) {
    case MaskKind::kFull:
      return name + "_full";
    case MaskKind::kBounds:
      return name + "_bounds";
    case MaskKind::kSoftcap:
      break;
  }
  return name + "_softcap";
}

std::string WhyNotGpu(const Architecture& architecture, const char* pass, const Device& device) {
  if (architecture.serves(device.major, device.minor)) return "";
  return "the " + std::string(architecture.name) + " " + pass + " needs compute capability " +
         architecture.capabilities + ", and the GPU has " + std::to_string(device.major) + "." +
         std::to_string(device.minor);
}

std::string WhyNotHeads(
    const std::string& takes, const Problem& problem, bool fits, int32_t most, int32_t most_value) {
  if (problem.dtype == "float32") return takes + "float16 and bfloat16, and these are float32";
  const std::string widths =
      "D " + std::to_string(problem.width) + " and Dv " + std::to_string(problem.value_width);
  if (!fits) {
    return takes + "heads of D up to " + std::to_string(most) + " and Dv up to " +
           std::to_string(most_value) + ", and these have " + widths;
  }
  // Rows of the heads start at multiples of the copy engine's 16 bytes.
  if (problem.width % 8 != 0 || problem.value_width % 8 != 0) {
    return takes + "heads whose widths are multiples of 8, and these have " + widths;
  }
  return "";
}

std::string WhyNotKeys(const std::string& takes, const Problem& problem) {
  if (problem.keys <= kMostRows) return "";
  return takes + "up to " + std::to_string(kMostRows) + " keys, and these are " +
         std::to_string(problem.keys);
}

std::string WhyNotMaps(const std::string& takes,
                       std::span<const TensorMapParameter> maps,
                       const char* (*name_of)(int buffer)) {
  constexpr uint64_t kStrideLimit = uint64_t{1} << 40;  // of a tensor map, in bytes
  for (const TensorMapParameter& one : maps) {
    const uint64_t bytes = one.map.strides[3];
    if (bytes >= kStrideLimit) {
      return takes + "less than 2^40 bytes in a batch element, and those of `" +
             name_of(one.buffer) + "` have " + std::to_string(bytes);
    }
  }
  return "";
}

int32_t Section(const Device& device, uint64_t bytes, int64_t heads) {
  const uint64_t cached = std::max(device.l2_bytes / bytes, uint64_t{1});
  return static_cast<int32_t>(
      std::min(std::bit_floor(cached), std::bit_ceil(static_cast<uint64_t>(heads))));
}

TensorMapParameter Map(size_t at,
                       int buffer,
                       const std::array<int32_t, 4>& dims,
                       int32_t box_heads,
                       int32_t box_positions) {
  TensorMapParameter parameter;
  parameter.at = static_cast<uint32_t>(at);
  parameter.buffer = buffer;
  emulator::TensorMap& map = parameter.map;
  map.type = emulator::TensorMapType::kUint16;  // of either dtype: they are moved as they are
  map.swizzle = emulator::TensorMapSwizzle::k128Bytes;
  map.rank = static_cast<int>(dims.size());
  uint64_t stride = 2;
  for (size_t i = 0; i < dims.size(); ++i) {
    map.dims[i] = static_cast<uint64_t>(dims[dims.size() - 1 - i]);
    if (i > 0) map.strides[i] = stride;
    stride *= map.dims[i];
  }
  map.box = {64, static_cast<uint32_t>(box_heads), static_cast<uint32_t>(box_positions), 1};
  return parameter;
}

}  // namespace jax_fa4
