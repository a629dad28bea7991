#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

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

// A launch of `kernel` of the forward or the backward.
Launch PlainLaunch(const Problem& problem,
                   bool is_backward,
                   std::string kernel,
                   int64_t ctas,
                   uint32_t dynamic_shared_bytes) {
  Parameters parameters = {};
  parameters.out_is_float = problem.out_dtype == "float32";
  Launch launch = NewLaunch(problem,
                            is_backward ? "sm80_backward" : "sm80_forward",
                            std::move(kernel),
                            ctas,
                            kThreads,
                            dynamic_shared_bytes,
                            parameters);
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

std::string WhyNot(const Problem& problem) {
  if (problem.device.major < 8) {
    return "the plain kernels need compute capability 8.0 or newer, and the GPU has " +
           std::to_string(problem.device.major) + "." + std::to_string(problem.device.minor);
  }
  if (CompiledWidth(problem) == 0) {
    return "the plain kernels take heads of width up to " +
           std::to_string(kWidths[std::size(kWidths) - 1]) + ", and these have D " +
           std::to_string(problem.width) + " and Dv " + std::to_string(problem.value_width);
  }
  const int64_t most = std::numeric_limits<uint32_t>::max();  // of a stride from row to row
  const int64_t width = std::max(problem.width, problem.value_width);
  if (problem.heads * width > most) {
    return "the plain kernels take up to " + std::to_string(most) +
           " elements in all heads of a row, and these have " + std::to_string(problem.heads) +
           " heads of width " + std::to_string(width);
  }
  return "";
}

std::vector<Launch> ForwardLaunches(const Problem& problem) {
  const int32_t width = CompiledWidth(problem);
  return {PlainLaunch(problem,
                      false,
                      "forward_" + std::string(problem.dtype) + "_" + std::to_string(width),
                      Tiles(problem.rows, ForwardTile(width).rows) * problem.heads * problem.batch,
                      ForwardSharedBytes(width))};
}

std::vector<Launch> BackwardLaunches(const Problem& problem) {
  const int32_t width = CompiledWidth(problem);
  const int64_t heads = int64_t{problem.heads} * problem.batch,
                kv_heads = int64_t{problem.kv_heads} * problem.batch;
  const std::string dtype(problem.dtype), suffix = dtype + "_" + std::to_string(width);
  const Tile tile = BackwardTile(width);
  const uint32_t bytes = BackwardSharedBytes(width);
  const auto launch = [&](const std::string& kernel, int64_t ctas, uint32_t shared_bytes) {
    return PlainLaunch(problem, true, "backward_" + kernel, ctas, shared_bytes);
  };
  return {launch("delta_" + dtype, Tiles(problem.rows * heads, kThreads / 32), 0),
          launch("query_" + suffix, Tiles(problem.rows, tile.rows) * heads, bytes),
          launch("key_" + suffix, Tiles(problem.keys, tile.keys) * kv_heads, bytes)};
}

// `delta`.
uint64_t WorkspaceBytes(const Problem& problem) {
  return sizeof(float) * static_cast<uint64_t>(problem.batch) *
         static_cast<uint64_t>(problem.rows) * static_cast<uint64_t>(problem.heads);
}

}  // namespace jax_fa4::sm80
