#include <cstddef>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "csrc/host/array_text.h"
#include "csrc/host/plan.h"
#include "csrc/host/problem.h"
#include "csrc/sm90/copy.h"

namespace jax_fa4 {

Plan TensorCopyPlan(std::span<const Array> arrays, const Device& device) {
  using emulator::TensorMapType;
  if (arrays.size() != kTensorCopyOperands.size() + kTensorCopyResults.size()) {
    throw std::invalid_argument("a call has one operand, `x`, and one result, `copy`.");
  }
  const Array &x = arrays[0], &copy = arrays[1];
  const bool is_half = x.dtype == "float16" || x.dtype == "bfloat16";
  const int64_t element = is_half ? 2 : 4;
  const auto is_size = [](int64_t size) {
    return size >= 1 && size <= std::numeric_limits<int32_t>::max();
  };
  // The copy engine wants rows that start at multiples of 16 bytes.
  if ((!is_half && x.dtype != "float32" && x.dtype != "int32") || x.dims.size() != 2 ||
      !is_size(x.dims[0]) || !is_size(x.dims[1]) || x.dims[1] * element % 16 != 0) {
    throw std::invalid_argument(
        "the operand `x` must be a matrix of float16, bfloat16, float32 or int32 whose rows have a "
        "multiple of 16 bytes and whose sizes are from 1 to 2^31 - 1, not " +
        ArrayText(x) + ".");
  }
  if (copy.dtype != x.dtype || copy.dims.size() != 2 || copy.dims[0] != x.dims[0] ||
      copy.dims[1] != x.dims[1]) {
    throw std::invalid_argument("the result `copy` must be " + ArrayText(x) + ", not " +
                                ArrayText(copy) + ".");
  }
  if (device.major < 9) {
    throw std::invalid_argument(
        "no kernel can do this: tensor maps need compute capability 9.0 or newer, and the GPU "
        "has " +
        std::to_string(device.major) + "." + std::to_string(device.minor) + ".");
  }
  const int64_t rows = x.dims[0], columns = x.dims[1];

  sm90::CopyParameters parameters = {};
  parameters.columns = static_cast<int32_t>(sm90::kCopyBoxRowBytes / element);
  parameters.column_boxes = static_cast<int32_t>(Tiles(columns, parameters.columns));

  TensorMapParameter source;
  source.at = offsetof(sm90::CopyParameters, source);
  source.map.type = x.dtype == "bfloat16"  ? TensorMapType::kBfloat16
                    : x.dtype == "float16" ? TensorMapType::kFloat16
                    : x.dtype == "float32" ? TensorMapType::kFloat32
                                           : TensorMapType::kInt32;
  source.map.rank = 2;
  source.map.dims = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows)};
  source.map.strides = {0, static_cast<uint64_t>(columns * element)};
  source.map.box = {static_cast<uint32_t>(parameters.columns), sm90::kCopyBoxRows};
  TensorMapParameter target = source;
  target.at = offsetof(sm90::CopyParameters, target);
  target.buffer = 1;

  Launch launch;
  launch.module = "sm90_copy";
  launch.kernel = "copy";
  launch.grid = Grid(Tiles(rows, sm90::kCopyBoxRows) * parameters.column_boxes);
  launch.block = {sm90::kCopyThreads, 1, 1};
  launch.parameters.resize(sizeof(parameters));
  std::memcpy(launch.parameters.data(), &parameters, sizeof(parameters));
  launch.tensor_maps = {source, target};

  const uint64_t bytes = static_cast<uint64_t>(rows) * columns * element;
  return {{{kTensorCopyOperands[0], bytes, false}, {kTensorCopyResults[0], bytes, true}}, {launch}};
}

}  // namespace jax_fa4
