#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>

#include "csrc/common/forward_parameters.h"
#include "csrc/host/tensor_cores.h"
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
  const Architecture& architecture;
  std::string module;
  std::span<const Tiling> tilings;  // the first that fits is used
  // Whether a CTA on each multiprocessor goes from one task to the next even where some take longer
  // than others: the kernel deals them out evenly by itself.
  bool deals_tasks;
};

// What there is to do.
struct Tasks {
  int32_t packed_heads;
  int64_t rows, heads;  // of a pack of heads; packs of heads in all batch elements

  Tasks(const Problem& problem, const Tiling& tiling)
      : packed_heads(std::gcd(problem.heads / problem.kv_heads, tiling.box_rows)),
        rows(Tiles(int64_t{problem.rows} * packed_heads, tiling.task_rows)),
        heads(int64_t{problem.batch} * (problem.heads / packed_heads)) {}
};

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
  const Architecture& architecture = family.architecture;
  std::string reason = WhyNotGpu(architecture, "forward", problem.device);
  if (!reason.empty()) return reason;
  const std::string takes = "the " + std::string(architecture.name) + " forward takes ";
  const Tiling* const tiling = FirstThatFits(family.tilings, problem);
  const Tiling& widest = family.tilings.back();
  reason = WhyNotHeads(takes, problem, tiling != nullptr, widest.width, widest.value_width);
  if (!reason.empty()) return reason;
  const Tasks tasks(problem, *tiling);
  if (int64_t{problem.rows} * tasks.packed_heads > kMostRows) {
    return takes + "up to " + std::to_string(kMostRows) +
           " rows times packed heads, and these are " + std::to_string(problem.rows) + " times " +
           std::to_string(tasks.packed_heads);
  }
  reason = WhyNotKeys(takes, problem);
  if (!reason.empty()) return reason;
  if (tasks.heads > kMostTasks / tasks.rows) {
    return takes + "up to " + std::to_string(kMostTasks) + " tasks of " +
           std::to_string(tiling->task_rows) + " packed rows, and these are " +
           std::to_string(tasks.rows) + " for each of " + std::to_string(tasks.heads) +
           " packs of heads";
  }
  return WhyNotMaps(takes, Maps(problem, *tiling, tasks.packed_heads), [](int buffer) {
    return buffer == kOut ? "out" : kForwardOperands[static_cast<size_t>(buffer)];
  });
}

std::vector<Launch> Launches(const Family& family, const Problem& problem) {
  using Parameters = ForwardParameters;
  const Tiling& tiling = *FirstThatFits(family.tilings, problem);
  const Tasks tasks(problem, tiling);
  const bool is_full = MaskKindOf(problem) == MaskKind::kFull,
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
    const uint64_t bytes_of_head =
        uint64_t{2} * problem.keys * static_cast<uint64_t>(problem.width + problem.value_width);
    parameters.section = Section(problem.device, bytes_of_head, tasks.heads);
    parameters.last_first = 1;
  }

  Launch launch = NewLaunch(problem,
                            family.module,
                            KernelName("forward", problem, tiling.width, tiling.value_width),
                            ctas,
                            tiling.threads,
                            tiling.shared_bytes,
                            parameters);
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

const Family kFamily = {kBlackwell, "sm100_forward", kTilings, false};

}  // namespace

std::string WhyNotForward(const Problem& problem) { return WhyNot(kFamily, problem); }
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

const Family kFamily = {kHopper, "sm90_forward", kTilings, true};

}  // namespace

std::string WhyNotForward(const Problem& problem) { return WhyNot(kFamily, problem); }
std::vector<Launch> ForwardLaunches(const Problem& problem) { return Launches(kFamily, problem); }

}  // namespace sm90
}  // namespace jax_fa4
