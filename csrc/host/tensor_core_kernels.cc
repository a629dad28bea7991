#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>

#include "csrc/common/forward_parameters.h"
#include "csrc/host/problem.h"
#include "csrc/sm100/config.h"
#include "csrc/sm90/config.h"

namespace jax_fa4 {
namespace {

// The buffers of a forward's plan, as plan.h lists them.
enum Buffer { kQuery, kKey, kValue, kScale, kLower, kUpper, kOut, kLse, kLseRounding };

// A kernel's tiles, by the widths that it is compiled for.
struct Tiling {
  int32_t width, value_width;  // of D and Dv that are at most so wide
  int32_t box_rows;            // packed rows of a box of query or out
  int32_t task_rows;           // packed rows of a task
  int32_t block_keys;
  int32_t threads;
  uint32_t shared_bytes;
};

// The kernels of one architecture.
struct Family {
  std::string name, module;
  std::string capabilities;  // in words
  bool (*serves)(int major, int minor);
  std::span<const Tiling> tilings;  // the first that fits is used
  // Whether a CTA on each multiprocessor goes from one task to the next even where some take longer
  // than others: the kernel deals them out evenly by itself.
  bool deals_tasks;

  // Null if none fits.
  const Tiling* For(const Problem& problem) const {
    for (const Tiling& tiling : tilings) {
      if (problem.width <= tiling.width && problem.value_width <= tiling.value_width) {
        return &tiling;
      }
    }
    return nullptr;
  }
};

// Of tasks, and of keys and packed rows: tiles that end behind them are counted in 32 bits too.
constexpr int64_t kMostTasks = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostRows = (int64_t{1} << 31) - 256;
constexpr uint64_t kMapStrideLimit = uint64_t{1} << 40;  // of a tensor map, in bytes

ForwardKind KindOf(const Problem& problem) {
  if (problem.attributes.softcap != 0) return ForwardKind::kSoftcap;
  // The last row decides for the lower bound, the first one for the upper.
  const bool sees_all = problem.lower_batch == 0 &&
                        int64_t{problem.rows} - 1 + problem.attributes.band_low <= 0 &&
                        problem.attributes.band_high >= problem.keys;
  return sees_all ? ForwardKind::kFull : ForwardKind::kBounds;
}

// What there is to do.
struct Tasks {
  int32_t packed_heads;
  int64_t rows, heads;  // of a pack of heads; packs of heads in all batch elements

  Tasks(const Problem& problem, const Tiling& tiling)
      : packed_heads(std::gcd(problem.heads / problem.kv_heads, tiling.box_rows)),
        rows(Tiles(int64_t{problem.rows} * packed_heads, tiling.task_rows)),
        heads(int64_t{problem.batch} * (problem.heads / packed_heads)) {}
};

// Packs of heads whose keys and values the cache holds: a power of two, which mostly divides
// all that there are, and no larger than all of them take.
int64_t Section(const Problem& problem, int64_t packs) {
  const uint64_t bytes =
      uint64_t{2} * problem.keys * static_cast<uint64_t>(problem.width + problem.value_width);
  const uint64_t cached = std::max(problem.device.l2_bytes / bytes, uint64_t{1});
  return static_cast<int64_t>(
      std::min(std::bit_floor(cached), std::bit_ceil(static_cast<uint64_t>(packs))));
}

// Of an array (batch, positions, heads, width), whose boxes have so many heads and positions.
TensorMapParameter Map(size_t at,
                       Buffer buffer,
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

std::vector<TensorMapParameter> Maps(const Problem& problem,
                                     const Tiling& tiling,
                                     int32_t packed_heads) {
  using Parameters = ForwardParameters;
  const int32_t positions = tiling.box_rows / packed_heads, keys = tiling.block_keys;
  std::vector<TensorMapParameter> maps = {
      Map(offsetof(Parameters, query),
          kQuery,
          {problem.query_batch, problem.rows, problem.heads, problem.width},
          packed_heads,
          positions),
      Map(offsetof(Parameters, key),
          kKey,
          {problem.key_batch, problem.keys, problem.kv_heads, problem.width},
          1,
          keys),
      Map(offsetof(Parameters, value),
          kValue,
          {problem.value_batch, problem.keys, problem.kv_heads, problem.value_width},
          1,
          keys)};
  if (problem.out_dtype == problem.dtype) {
    maps.push_back(Map(offsetof(Parameters, out),
                       kOut,
                       {problem.batch, problem.rows, problem.heads, problem.value_width},
                       packed_heads,
                       positions));
  }
  return maps;
}

std::string WhyNot(const Family& family, const Problem& problem) {
  const std::string takes = "the " + family.name + " forward takes ";
  const Device& device = problem.device;
  if (!family.serves(device.major, device.minor)) {
    return "the " + family.name + " forward needs compute capability " + family.capabilities +
           ", and the GPU has " + std::to_string(device.major) + "." + std::to_string(device.minor);
  }
  if (problem.dtype == "float32") return takes + "float16 and bfloat16, and these are float32";
  const std::string widths =
      "D " + std::to_string(problem.width) + " and Dv " + std::to_string(problem.value_width);
  const Tiling* const tiling = family.For(problem);
  if (tiling == nullptr) {
    const Tiling& widest = family.tilings.back();
    return takes + "heads of D up to " + std::to_string(widest.width) + " and Dv up to " +
           std::to_string(widest.value_width) + ", and these have " + widths;
  }
  // Rows of the heads start at multiples of the copy engine's 16 bytes.
  if (problem.width % 8 != 0 || problem.value_width % 8 != 0) {
    return takes + "heads whose widths are multiples of 8, and these have " + widths;
  }
  const Tasks tasks(problem, *tiling);
  if (int64_t{problem.rows} * tasks.packed_heads > kMostRows) {
    return takes + "up to " + std::to_string(kMostRows) +
           " rows times packed heads, and these are " + std::to_string(problem.rows) + " times " +
           std::to_string(tasks.packed_heads);
  }
  if (problem.keys > kMostRows) {
    return takes + "up to " + std::to_string(kMostRows) + " keys, and these are " +
           std::to_string(problem.keys);
  }
  if (tasks.heads > kMostTasks / tasks.rows) {
    return takes + "up to " + std::to_string(kMostTasks) + " tasks of " +
           std::to_string(tiling->task_rows) + " packed rows, and these are " +
           std::to_string(tasks.rows) + " for each of " + std::to_string(tasks.heads) +
           " packs of heads";
  }
  for (const TensorMapParameter& one : Maps(problem, *tiling, tasks.packed_heads)) {
    const uint64_t bytes = one.map.strides[3];
    if (bytes >= kMapStrideLimit) {
      return takes + "less than 2^40 bytes in a batch element, and those of `" +
             (one.buffer == kOut ? "out" : kForwardOperands[static_cast<size_t>(one.buffer)]) +
             "` have " + std::to_string(bytes);
    }
  }
  return "";
}

std::vector<Launch> Launches(const Family& family, const Problem& problem) {
  using Parameters = ForwardParameters;
  const Tiling& tiling = *family.For(problem);
  const Tasks tasks(problem, tiling);
  const ForwardKind kind = KindOf(problem);
  const bool is_full = kind == ForwardKind::kFull,
             out_is_float = problem.out_dtype != problem.dtype;

  Parameters parameters = {};
  parameters.packed_heads = tasks.packed_heads;
  parameters.row_tasks = static_cast<int32_t>(tasks.rows);
  parameters.head_tasks = static_cast<int32_t>(tasks.heads);
  const int64_t count = tasks.rows * tasks.heads;
  int64_t ctas = count;
  if (is_full || family.deals_tasks) {
    // Where all tasks take the same time, a CTA on each multiprocessor goes from one to the next.
    ctas = std::min<int64_t>(count, problem.device.sm_count);
    parameters.section = 1;
  } else {
    // Each task is a CTA, and the longest come first: with a causal mask those of the last rows.
    parameters.section = static_cast<int32_t>(Section(problem, tasks.heads));
    parameters.last_first = 1;
  }

  std::string kernel = "forward_" + std::string(problem.dtype) + "_" + std::to_string(tiling.width);
  if (tiling.value_width != tiling.width) kernel += "_" + std::to_string(tiling.value_width);
  kernel += is_full ? "_full" : kind == ForwardKind::kBounds ? "_bounds" : "_softcap";

  Launch launch = NewLaunch(
      problem, family.module, kernel, ctas, tiling.threads, tiling.shared_bytes, parameters);
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
  launch.tensor_maps = Maps(problem, tiling, tasks.packed_heads);
  return {launch};
}

}  // namespace

namespace sm100 {
namespace {

constexpr Tiling TilingOf(const Widths& widths) {
  return {widths.query_key,
          widths.value,
          kTileRows,
          kQueryTiles * kTileRows,
          kTileKeys,
          kThreads,
          SharedBytes(widths)};
}
constexpr Tiling kTilings[] = {
    TilingOf(kWidths[0]), TilingOf(kWidths[1]), TilingOf(kWidths[2]), TilingOf(kWidths[3])};
static_assert(std::size(kTilings) == std::size(kWidths));

// Not every GPU of major version 10 has what the kernels use: 10.1 is of another family.
const Family kFamily = {
    "Blackwell",
    "sm100_forward",
    "10.0 or 10.3",
    [](int major, int minor) { return major == 10 && (minor == 0 || minor == 3); },
    kTilings,
    false};

}  // namespace

std::string WhyNot(const Problem& problem) { return jax_fa4::WhyNot(kFamily, problem); }
std::vector<Launch> ForwardLaunches(const Problem& problem) { return Launches(kFamily, problem); }

}  // namespace sm100

namespace sm90 {
namespace {

constexpr Tiling TilingOf(const Shape& shape) {
  return {shape.width,
          shape.value_width,
          kGroupRows,
          TileRows(shape),
          shape.keys,
          Threads(shape),
          SharedBytes(shape)};
}
constexpr Tiling kTilings[] = {TilingOf(kShapes[0]),
                               TilingOf(kShapes[1]),
                               TilingOf(kShapes[2]),
                               TilingOf(kShapes[3]),
                               TilingOf(kShapes[4])};
static_assert(std::size(kTilings) == std::size(kShapes));

// The kernels are for one architecture, sm_90a.
const Family kFamily = {"Hopper",
                        "sm90_forward",
                        "9.0",
                        [](int major, int minor) { return major == 9 && minor == 0; },
                        kTilings,
                        true};

}  // namespace

std::string WhyNot(const Problem& problem) { return jax_fa4::WhyNot(kFamily, problem); }
std::vector<Launch> ForwardLaunches(const Problem& problem) { return Launches(kFamily, problem); }

}  // namespace sm90
}  // namespace jax_fa4
