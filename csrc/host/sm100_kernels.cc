#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>
#include <numeric>

#include "csrc/host/problem.h"
#include "csrc/sm100/config.h"

namespace jax_fa4::sm100 {
namespace {

// The buffers of a forward's plan, as plan.h lists them.
enum Buffer { kQuery, kKey, kValue, kScale, kLower, kUpper, kOut, kLse, kLseRounding };

constexpr int64_t kMostTasks = std::numeric_limits<int32_t>::max();
// Of keys, and of rows in a pack of heads: tiles that end behind them are counted in 32 bits too.
constexpr int64_t kMostRows = (int64_t{1} << 31) - kQueryTiles * kTileRows;
constexpr uint64_t kMapStrideLimit = uint64_t{1} << 40;  // of a tensor map, in bytes

// The narrowest compiled widths that hold the heads; null if none do.
const Widths* CompiledWidths(const Problem& problem) {
  for (const Widths& widths : kWidths) {
    if (problem.width <= widths.query_key && problem.value_width <= widths.value) return &widths;
  }
  return nullptr;
}

Kind KindOf(const Problem& problem) {
  if (problem.attributes.softcap != 0) return Kind::kSoftcap;
  // The last row decides for the lower bound, the first one for the upper.
  const bool sees_all = problem.lower_batch == 0 &&
                        int64_t{problem.rows} - 1 + problem.attributes.band_low <= 0 &&
                        problem.attributes.band_high >= problem.keys;
  return sees_all ? Kind::kFull : Kind::kBounds;
}

int32_t PackedHeads(const Problem& problem) {
  return std::gcd(problem.heads / problem.kv_heads, kTileRows);
}

int64_t RowTasks(const Problem& problem) {
  return Tiles(int64_t{problem.rows} * PackedHeads(problem), kQueryTiles * kTileRows);
}

int64_t HeadTasks(const Problem& problem) {
  return int64_t{problem.batch} * (problem.heads / PackedHeads(problem));
}

// Packs of heads whose keys and values the cache holds: a power of two, which mostly divides
// HeadTasks, and no larger than all of them take.
int64_t Section(const Problem& problem) {
  const uint64_t bytes =
      uint64_t{2} * problem.keys * static_cast<uint64_t>(problem.width + problem.value_width);
  const uint64_t cached = std::max(problem.device.l2_bytes / bytes, uint64_t{1});
  return static_cast<int64_t>(
      std::min(std::bit_floor(cached), std::bit_ceil(static_cast<uint64_t>(HeadTasks(problem)))));
}

// Of an array (batch, positions, heads, width), whose boxes have kTileRows rows of `packed_heads`
// heads.
TensorMapParameter Map(size_t at,
                       Buffer buffer,
                       const std::array<int32_t, 4>& dims,
                       int32_t packed_heads) {
  static_assert(kTileKeys == kTileRows);
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
  map.box = {
      64, static_cast<uint32_t>(packed_heads), static_cast<uint32_t>(kTileRows / packed_heads), 1};
  return parameter;
}

std::vector<TensorMapParameter> Maps(const Problem& problem) {
  const int32_t packed_heads = PackedHeads(problem);
  std::vector<TensorMapParameter> maps = {
      Map(offsetof(Parameters, query),
          kQuery,
          {problem.query_batch, problem.rows, problem.heads, problem.width},
          packed_heads),
      Map(offsetof(Parameters, key),
          kKey,
          {problem.key_batch, problem.keys, problem.kv_heads, problem.width},
          1),
      Map(offsetof(Parameters, value),
          kValue,
          {problem.value_batch, problem.keys, problem.kv_heads, problem.value_width},
          1)};
  if (problem.out_dtype == problem.dtype) {
    maps.push_back(Map(offsetof(Parameters, out),
                       kOut,
                       {problem.batch, problem.rows, problem.heads, problem.value_width},
                       packed_heads));
  }
  return maps;
}

}  // namespace

std::string WhyNot(const Problem& problem) {
  const std::string takes = "the Blackwell forward takes ";
  // Not every GPU of major version 10 has what its kernels use: 10.1 is of another family.
  if (problem.device.major != 10 || (problem.device.minor != 0 && problem.device.minor != 3)) {
    return "the Blackwell forward needs compute capability 10.0 or 10.3, and the GPU has " +
           std::to_string(problem.device.major) + "." + std::to_string(problem.device.minor);
  }
  if (problem.dtype == "float32") return takes + "float16 and bfloat16, and these are float32";
  const std::string widths =
      "D " + std::to_string(problem.width) + " and Dv " + std::to_string(problem.value_width);
  if (CompiledWidths(problem) == nullptr) {
    const Widths& widest = kWidths[std::size(kWidths) - 1];
    return takes + "heads of D up to " + std::to_string(widest.query_key) + " and Dv up to " +
           std::to_string(widest.value) + ", and these have " + widths;
  }
  // Rows of the heads start at multiples of the copy engine's 16 bytes.
  if (problem.width % 8 != 0 || problem.value_width % 8 != 0) {
    return takes + "heads whose widths are multiples of 8, and these have " + widths;
  }
  if (int64_t{problem.rows} * PackedHeads(problem) > kMostRows) {
    return takes + "up to " + std::to_string(kMostRows) +
           " rows times packed heads, and these are " + std::to_string(problem.rows) + " times " +
           std::to_string(PackedHeads(problem));
  }
  if (problem.keys > kMostRows) {
    return takes + "up to " + std::to_string(kMostRows) + " keys, and these are " +
           std::to_string(problem.keys);
  }
  if (HeadTasks(problem) > kMostTasks / RowTasks(problem)) {
    return takes + "up to " + std::to_string(kMostTasks) + " tasks of " +
           std::to_string(kQueryTiles * kTileRows) + " packed rows, and these are " +
           std::to_string(RowTasks(problem)) + " for each of " +
           std::to_string(HeadTasks(problem)) + " packs of heads";
  }
  for (const TensorMapParameter& one : Maps(problem)) {
    const uint64_t bytes = one.map.strides[3];
    if (bytes >= kMapStrideLimit) {
      return takes + "less than 2^40 bytes in a batch element, and those of `" +
             (one.buffer == kOut ? "out" : kForwardOperands[static_cast<size_t>(one.buffer)]) +
             "` have " + std::to_string(bytes);
    }
  }
  return "";
}

std::vector<Launch> ForwardLaunches(const Problem& problem) {
  const Widths& widths = *CompiledWidths(problem);
  const Kind kind = KindOf(problem);
  const bool is_full = kind == Kind::kFull, out_is_float = problem.out_dtype != problem.dtype;

  Parameters parameters = {};
  parameters.packed_heads = PackedHeads(problem);
  parameters.row_tasks = static_cast<int32_t>(RowTasks(problem));
  parameters.head_tasks = static_cast<int32_t>(HeadTasks(problem));
  // Where all tasks take the same time, a CTA on each multiprocessor goes from one to the next.
  // Else each task is a CTA, and the longest come first: with a causal mask those of the last rows.
  parameters.section = is_full ? 1 : static_cast<int32_t>(Section(problem));
  parameters.last_first = !is_full;
  const int64_t tasks = RowTasks(problem) * HeadTasks(problem);
  const int64_t ctas = is_full ? std::min<int64_t>(tasks, problem.device.sm_count) : tasks;

  std::string kernel = "forward_" + std::string(problem.dtype) + "_";
  kernel += std::to_string(widths.query_key);
  if (widths.value != widths.query_key) kernel += "_" + std::to_string(widths.value);
  kernel += is_full ? "_full" : kind == Kind::kBounds ? "_bounds" : "_softcap";

  Launch launch =
      NewLaunch(problem, "sm100_forward", kernel, ctas, kThreads, SharedBytes(widths), parameters);
  const auto add = [&](size_t at, Buffer buffer) {
    launch.addresses.push_back({static_cast<uint32_t>(at), buffer, 0});
  };
  add(offsetof(Parameters, scale), kScale);
  if (problem.lower_batch > 0) {
    add(offsetof(Parameters, lower), kLower);
    add(offsetof(Parameters, upper), kUpper);
  }
  if (out_is_float) add(offsetof(Parameters, out_float), kOut);
  add(offsetof(Parameters, lse), kLse);
  add(offsetof(Parameters, lse_rounding), kLseRounding);
  launch.tensor_maps = Maps(problem);
  return {launch};
}

}  // namespace jax_fa4::sm100
