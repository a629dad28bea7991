#include <array>
#include <cstddef>
#include <numeric>
#include <span>

#include "csrc/common/backward_parameters.h"
#include "csrc/common/backward_rows.h"
#include "csrc/host/tensor_cores.h"
#include "csrc/sm100/backward_config.h"
#include "csrc/sm90/backward_config.h"

namespace jax_fa4 {
namespace {

using Parameters = BackwardParameters;

// The buffers of a backward's plan, as plan.h lists them.
enum Buffer {
  kQuery,
  kKey,
  kValue,
  kScale,
  kLower,
  kUpper,
  kOut,
  kLse,
  kLseRounding,
  kDout,
  kDlse,
  kDquery,
  kDkey,
  kDvalue,
  kDscale,
  kWorkspace
};

// A kernel's tiles, by the widths that it is compiled for.
struct Tiling {
  int32_t width, value_width;    // of D and Dv that are at most so wide
  int32_t row_block, key_block;  // rows and keys of a block
  int32_t threads;
  uint32_t shared_bytes;
};

// The kernels of one architecture.
struct Family {
  const Architecture& architecture;
  std::string module;
  std::span<const Tiling> tilings;  // the first that fits is used
};

// What there is to do.
struct Tasks {
  int64_t row_blocks, key_blocks;
  int64_t kv_heads;   // in all batch elements
  int64_t row_tiles;  // of each head, of the kernels before and after the backward
  int64_t heads;      // in all batch elements, those included that fill the last tile of `before`

  Tasks(const Problem& problem, const Tiling& tiling)
      : row_blocks(Tiles(problem.rows, tiling.row_block)),
        key_blocks(Tiles(problem.keys, tiling.key_block)),
        kv_heads(int64_t{problem.batch} * problem.kv_heads),
        row_tiles(row_blocks * tiling.row_block / backward_rows::kTileRows) {
    const int32_t together = backward_rows::HeadsOfTile(problem.heads);
    heads = problem.batch * (Tiles(problem.heads, together) * together);
  }
};

// Where the arrays of the workspace begin, each at a multiple of 256 bytes.
struct Workspace {
  uint64_t lse_log2, delta, hulls, turns, dquery_sum;
  uint64_t bytes = 0;

  Workspace(const Problem& problem, const Tiling& tiling) {
    const Tasks tasks(problem, tiling);
    const uint64_t row_blocks = static_cast<uint64_t>(tasks.row_blocks),
                   batch = static_cast<uint64_t>(problem.batch),
                   blocks = batch * static_cast<uint64_t>(problem.heads) * row_blocks,
                   rows = blocks * static_cast<uint64_t>(tiling.row_block);
    lse_log2 = Add(rows * sizeof(float));
    delta = Add(rows * sizeof(float));
    hulls = Add(batch * row_blocks * sizeof(RowBlockHull));
    turns = Add(blocks * sizeof(uint32_t));
    dquery_sum = Add(rows * static_cast<uint64_t>(tiling.width) * sizeof(float));
  }

 private:
  uint64_t Add(uint64_t more) {
    const uint64_t begin = bytes;
    bytes += (more + 255) / 256 * 256;
    return begin;
  }
};

std::vector<TensorMapParameter> Maps(const Problem& problem, const Tiling& tiling) {
  const auto of_rows = [&](size_t at, Buffer buffer, int32_t batch, int32_t width) {
    return Map(at, buffer, {batch, problem.rows, problem.heads, width}, 1, tiling.row_block);
  };
  const auto of_keys = [&](size_t at, Buffer buffer, int32_t batch, int32_t width) {
    return Map(at, buffer, {batch, problem.keys, problem.kv_heads, width}, 1, tiling.key_block);
  };
  const int32_t width = problem.width, value_width = problem.value_width;
  return {of_rows(offsetof(Parameters, query), kQuery, problem.query_batch, width),
          of_rows(offsetof(Parameters, dout), kDout, problem.batch, value_width),
          of_keys(offsetof(Parameters, key), kKey, problem.key_batch, width),
          of_keys(offsetof(Parameters, value), kValue, problem.value_batch, value_width),
          of_keys(offsetof(Parameters, dkey), kDkey, problem.batch, width),
          of_keys(offsetof(Parameters, dvalue), kDvalue, problem.batch, value_width)};
}

const char* NameOf(int buffer) {
  const size_t index = static_cast<size_t>(buffer);
  return index < kBackwardOperands.size() ? kBackwardOperands[index]
                                          : kBackwardResults[index - kBackwardOperands.size()];
}

// Whatever the GPU.
std::string WhyNotAnywhere(const Family& family, const Problem& problem) {
  const std::string takes = "the " + std::string(family.architecture.name) + " backward takes ";
  const Tiling* const tiling = FirstThatFits(family.tilings, problem);
  const Tiling& widest = family.tilings.back();
  std::string reason =
      WhyNotHeads(takes, problem, tiling != nullptr, widest.width, widest.value_width);
  if (!reason.empty()) return reason;
  if (problem.rows > kMostRows) {
    return takes + "up to " + std::to_string(kMostRows) + " rows, and these are " +
           std::to_string(problem.rows);
  }
  reason = WhyNotKeys(takes, problem);
  if (!reason.empty()) return reason;
  const Tasks tasks(problem, *tiling);
  if (tasks.kv_heads > kMostTasks / tasks.key_blocks) {
    return takes + "up to " + std::to_string(kMostTasks) + " tasks of " +
           std::to_string(tiling->key_block) + " keys, and these are " +
           std::to_string(tasks.key_blocks) + " for each of " + std::to_string(tasks.kv_heads) +
           " key heads";
  }
  if (tasks.heads > kMostTasks / tasks.row_tiles) {
    return takes + "up to " + std::to_string(kMostTasks) + " tiles of " +
           std::to_string(backward_rows::kTileRows) + " rows, and these are " +
           std::to_string(tasks.row_tiles) + " for each of " + std::to_string(tasks.heads) +
           " heads";
  }
  return WhyNotMaps(takes, Maps(problem, *tiling), &NameOf);
}

std::string WhyNot(const Family& family, const Problem& problem) {
  std::string reason = WhyNotGpu(family.architecture, "backward", problem.device);
  if (!reason.empty()) return reason;
  if (problem.dtype != problem.out_dtype) {
    return "the " + std::string(family.architecture.name) +
           " backward takes an out of query's dtype, and this is " + std::string(problem.out_dtype);
  }
  return WhyNotAnywhere(family, problem);
}

// Zero where the family's kernels serve no such call.
uint64_t WorkspaceBytes(const Family& family, const Problem& problem) {
  if (!WhyNotAnywhere(family, problem).empty()) return 0;
  return Workspace(problem, *FirstThatFits(family.tilings, problem)).bytes;
}

std::vector<Launch> Launches(const Family& family, const Problem& problem) {
  const Tiling& tiling = *FirstThatFits(family.tilings, problem);
  const Tasks tasks(problem, tiling);
  const Workspace workspace(problem, tiling);

  Parameters parameters = {};
  parameters.compiled_width = tiling.width;
  parameters.hull_batch =
      problem.lower_batch == 0 ? 1 : std::lcm(problem.lower_batch, problem.upper_batch);
  parameters.row_block = tiling.row_block;
  parameters.row_blocks = static_cast<int32_t>(tasks.row_blocks);
  parameters.key_blocks = static_cast<int32_t>(tasks.key_blocks);
  parameters.head_tasks = static_cast<int32_t>(tasks.kv_heads);
  // What a key/value head's blocks of keys all go through: query, dout, and what `before` made.
  const uint64_t bytes_of_row = 2 * static_cast<uint64_t>(problem.width + problem.value_width) +
                                sizeof(float) * static_cast<uint64_t>(tiling.width + 2);
  const uint64_t rows_of_head = static_cast<uint64_t>(tasks.row_blocks * tiling.row_block) *
                                static_cast<uint64_t>(problem.heads / problem.kv_heads);
  parameters.section = Section(problem.device, rows_of_head * bytes_of_row, tasks.kv_heads);
  parameters.deterministic = problem.attributes.deterministic;

  const auto launch = [&](const std::string& module,
                          std::string kernel,
                          int64_t ctas,
                          int32_t threads,
                          uint32_t shared_bytes) {
    Launch made =
        NewLaunch(problem, module, std::move(kernel), ctas, threads, shared_bytes, parameters);
    const auto add = [&](size_t at, Buffer buffer, uint64_t offset = 0) {
      made.addresses.push_back({static_cast<uint32_t>(at), buffer, offset});
    };
    add(offsetof(Parameters, query_rows), kQuery);
    add(offsetof(Parameters, out_rows), kOut);
    add(offsetof(Parameters, dout_rows), kDout);
    add(offsetof(Parameters, dquery_rows), kDquery);
    add(offsetof(Parameters, dscale), kDscale);
    add(offsetof(Parameters, lse), kLse);
    add(offsetof(Parameters, lse_rounding), kLseRounding);
    if (problem.has_dlse) add(offsetof(Parameters, dlse), kDlse);
    add(offsetof(Parameters, scale), kScale);
    if (problem.lower_batch > 0) {
      add(offsetof(Parameters, lower), kLower);
      add(offsetof(Parameters, upper), kUpper);
    }
    add(offsetof(Parameters, lse_log2), kWorkspace, workspace.lse_log2);
    add(offsetof(Parameters, delta), kWorkspace, workspace.delta);
    add(offsetof(Parameters, hulls), kWorkspace, workspace.hulls);
    add(offsetof(Parameters, dquery_sum), kWorkspace, workspace.dquery_sum);
    add(offsetof(Parameters, turns), kWorkspace, workspace.turns);
    return made;
  };
  const std::string rows = "backward_rows", dtype(problem.dtype);
  Launch backward = launch(family.module,
                           KernelName("backward", problem, tiling.width, tiling.value_width),
                           tasks.key_blocks * tasks.kv_heads,
                           tiling.threads,
                           tiling.shared_bytes);
  backward.tensor_maps = Maps(problem, tiling);
  return {
      launch(
          rows, "before_" + dtype, tasks.row_tiles * tasks.heads, backward_rows::kBeforeThreads, 0),
      backward,
      launch(rows,
             "after_" + dtype,
             tasks.row_tiles * problem.batch * problem.heads,
             backward_rows::kAfterThreads,
             0)};
}

// Of the shapes that kernels are compiled for.
template <typename Shape>
constexpr Tiling TilingOf(const Shape& shape) {
  return {shape.width,
          shape.value_width,
          shape.row_block,
          shape.key_block,
          BackwardThreads(shape),
          BackwardSharedBytes(shape)};
}
template <typename Shape, size_t kCount>
constexpr std::array<Tiling, kCount> TilingsOf(const Shape (&shapes)[kCount]) {
  std::array<Tiling, kCount> tilings{};
  for (size_t i = 0; i < kCount; ++i) tilings[i] = TilingOf(shapes[i]);
  return tilings;
}
constexpr auto kBlackwellTilings = TilingsOf(sm100::kBackwardShapes);
constexpr auto kHopperTilings = TilingsOf(sm90::kBackwardShapes);

const Family kBlackwellFamily = {kBlackwell, "sm100_backward", kBlackwellTilings};
const Family kHopperFamily = {kHopper, "sm90_backward", kHopperTilings};

}  // namespace

namespace sm100 {
std::string WhyNotBackward(const Problem& problem) { return WhyNot(kBlackwellFamily, problem); }
std::vector<Launch> BackwardLaunches(const Problem& problem) {
  return Launches(kBlackwellFamily, problem);
}
uint64_t WorkspaceBytes(const Problem& problem) {
  return jax_fa4::WorkspaceBytes(kBlackwellFamily, problem);
}
}  // namespace sm100

namespace sm90 {
std::string WhyNotBackward(const Problem& problem) { return WhyNot(kHopperFamily, problem); }
std::vector<Launch> BackwardLaunches(const Problem& problem) {
  return Launches(kHopperFamily, problem);
}
uint64_t WorkspaceBytes(const Problem& problem) {
  return jax_fa4::WorkspaceBytes(kHopperFamily, problem);
}
}  // namespace sm90

}  // namespace jax_fa4
