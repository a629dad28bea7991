#include <algorithm>
#include <cstring>
#include <limits>

#include "csrc/host/problem.h"
#include "csrc/sm80/config.h"

namespace jax_fa4::sm80 {
namespace {

// Where each array of the parameters is among a call's buffers (plan.h lists them); -1 is nowhere.
struct Field {
  size_t at;
  int forward, backward;
};
constexpr Field kFields[] = {{offsetof(Parameters, query), 0, 0},
                             {offsetof(Parameters, key), 1, 1},
                             {offsetof(Parameters, value), 2, 2},
                             {offsetof(Parameters, scale), 3, 3},
                             {offsetof(Parameters, out), 6, 6},
                             {offsetof(Parameters, lse), 7, 7},
                             {offsetof(Parameters, lse_rounding), 8, 8},
                             {offsetof(Parameters, dout), -1, 9},
                             {offsetof(Parameters, dquery), -1, 11},
                             {offsetof(Parameters, dkey), -1, 12},
                             {offsetof(Parameters, dvalue), -1, 13},
                             {offsetof(Parameters, dscale), -1, 14},
                             {offsetof(Parameters, delta), -1, 15}};
constexpr int kLower = 4, kUpper = 5, kDlse = 10;

int32_t CompiledWidth(const Problem& problem) {
  for (const int32_t width : kWidths) {
    if (problem.width <= width && problem.value_width <= width) return width;
  }
  return 0;
}

Launch NewLaunch(const Problem& problem, bool is_backward) {
  Parameters parameters = {};
  parameters.batch = problem.batch;
  parameters.rows = problem.rows;
  parameters.keys = problem.keys;
  parameters.heads = problem.heads;
  parameters.kv_heads = problem.kv_heads;
  parameters.width = problem.width;
  parameters.value_width = problem.value_width;
  parameters.query_batch = problem.query_batch;
  parameters.key_batch = problem.key_batch;
  parameters.value_batch = problem.value_batch;
  parameters.scale_batch = problem.scale_batch;
  parameters.lower_batch = problem.lower_batch;
  parameters.upper_batch = problem.upper_batch;
  parameters.band_low = problem.attributes.band_low;
  parameters.band_high = problem.attributes.band_high;
  parameters.softcap = problem.attributes.softcap;
  parameters.out_is_float = problem.out_dtype == "float32";

  Launch launch;
  launch.module = is_backward ? "sm80_backward" : "sm80_forward";
  launch.block = {kThreads, 1, 1};
  launch.parameters.resize(sizeof(parameters));
  std::memcpy(launch.parameters.data(), &parameters, sizeof(parameters));
  const auto add = [&](size_t at, int buffer) {
    launch.addresses.push_back({static_cast<uint32_t>(at), buffer, 0});
  };
  for (const Field& field : kFields) {
    const int buffer = is_backward ? field.backward : field.forward;
    if (buffer >= 0) add(field.at, buffer);
  }
  if (problem.lower_batch > 0) {
    add(offsetof(Parameters, lower), kLower);
    add(offsetof(Parameters, upper), kUpper);
  }
  if (problem.has_dlse) add(offsetof(Parameters, dlse), kDlse);
  return launch;
}

}  // namespace

std::string WhyNot(const Problem& problem, const Device& device) {
  if (device.major < 8) {
    return "the plain kernels need compute capability 8.0 or newer, and the GPU has " +
           std::to_string(device.major) + "." + std::to_string(device.minor) + ".";
  }
  if (CompiledWidth(problem) == 0) {
    return "the plain kernels take heads of width up to " +
           std::to_string(kWidths[std::size(kWidths) - 1]) + ", and these have D " +
           std::to_string(problem.width) + " and Dv " + std::to_string(problem.value_width) + ".";
  }
  const int64_t most = std::numeric_limits<uint32_t>::max();  // of a stride from row to row
  const int64_t width = std::max(problem.width, problem.value_width);
  if (problem.heads * width > most) {
    return "the plain kernels take up to " + std::to_string(most) +
           " elements in all heads of a row, and these have " + std::to_string(problem.heads) +
           " heads of width " + std::to_string(width) + ".";
  }
  return "";
}

std::vector<Launch> ForwardLaunches(const Problem& problem) {
  const int32_t width = CompiledWidth(problem);
  Launch launch = NewLaunch(problem, false);
  launch.kernel = "forward_" + std::string(problem.dtype) + "_" + std::to_string(width);
  launch.grid = Grid(Tiles(problem.rows, ForwardTile(width).rows) * problem.heads * problem.batch);
  launch.dynamic_shared_bytes = ForwardSharedBytes(width);
  return {launch};
}

std::vector<Launch> BackwardLaunches(const Problem& problem) {
  const int32_t width = CompiledWidth(problem);
  const std::string dtype(problem.dtype);
  const std::string suffix = dtype + "_" + std::to_string(width);
  const Tile tile = BackwardTile(width);

  Launch delta = NewLaunch(problem, true);
  delta.kernel = "backward_delta_" + dtype;
  delta.grid = Grid(Tiles(int64_t{problem.rows} * problem.heads * problem.batch, kThreads / 32));

  Launch query = NewLaunch(problem, true);
  query.kernel = "backward_query_" + suffix;
  query.grid = Grid(Tiles(problem.rows, tile.rows) * problem.heads * problem.batch);
  query.dynamic_shared_bytes = BackwardSharedBytes(width);

  Launch key = NewLaunch(problem, true);
  key.kernel = "backward_key_" + suffix;
  key.grid = Grid(Tiles(problem.keys, tile.keys) * problem.kv_heads * problem.batch);
  key.dynamic_shared_bytes = BackwardSharedBytes(width);
  return {delta, query, key};
}

// `delta`.
uint64_t WorkspaceBytes(int64_t batch, int64_t rows, int64_t heads) {
  return sizeof(float) * static_cast<uint64_t>(batch) * static_cast<uint64_t>(rows) *
         static_cast<uint64_t>(heads);
}

}  // namespace jax_fa4::sm80
