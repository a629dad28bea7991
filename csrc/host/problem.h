// What the kernels of attention are asked for, once a call has been checked: between the checks and
// the choice of a kernel (plan.cc), and the code that knows one family of kernels
// (plain_kernels.cc, tensor_core_forward.cc, tensor_core_backward.cc).

#ifndef JAX_FA4_CSRC_HOST_PROBLEM_H_
#define JAX_FA4_CSRC_HOST_PROBLEM_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/host/plan.h"

namespace jax_fa4 {

// Sizes are positive and below 2^31, and those of a leading axis divide `batch`.
struct Problem {
  Device device;
  std::string_view dtype;      // of query: float16, bfloat16 or float32
  std::string_view out_dtype;  // the same or float32
  int32_t batch = 0, rows = 0, keys = 0, heads = 0, kv_heads = 0;  // B, T, S, N, K
  int32_t width = 0, value_width = 0;                              // D, Dv
  int32_t query_batch = 0, key_batch = 0, value_batch = 0, scale_batch = 0;
  int32_t lower_batch = 0, upper_batch = 0;  // 0: the band tells the bounds
  bool has_dlse = false;
  BackwardAttributes attributes;
};

// Number of tiles of `tile` in `size`.
constexpr int64_t Tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// A one-dimensional grid. Throws std::invalid_argument where it has more CTAs than a grid can have.
std::array<uint32_t, 3> Grid(int64_t ctas);

// A launch of a kernel. All kernels' parameters have fields of these names for what is in a
// Problem; `others` brings the rest.
template <typename Parameters>
Launch NewLaunch(const Problem& problem,
                 std::string module,
                 std::string kernel,
                 int64_t ctas,
                 int32_t threads,
                 uint32_t dynamic_shared_bytes,
                 const Parameters& others) {
  Parameters parameters = others;
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

  Launch launch;
  launch.module = std::move(module);
  launch.kernel = std::move(kernel);
  launch.grid = Grid(ctas);
  launch.block = {static_cast<uint32_t>(threads), 1, 1};
  launch.dynamic_shared_bytes = dynamic_shared_bytes;
  launch.parameters.resize(sizeof(parameters));
  std::memcpy(launch.parameters.data(), &parameters, sizeof(parameters));
  return launch;
}

// Of each family of kernels, WhyNot... says why they cannot do it, as a sentence without its full
// stop; "" if they can. WorkspaceBytes are those of the backward's workspace, whatever the GPU.

// The kernels for Blackwell (csrc/sm100).
namespace sm100 {
std::string WhyNotForward(const Problem& problem);
std::vector<Launch> ForwardLaunches(const Problem& problem);
std::string WhyNotBackward(const Problem& problem);
std::vector<Launch> BackwardLaunches(const Problem& problem);
uint64_t WorkspaceBytes(const Problem& problem);
}  // namespace sm100

// The kernels for Hopper (csrc/sm90).
namespace sm90 {
std::string WhyNotForward(const Problem& problem);
std::vector<Launch> ForwardLaunches(const Problem& problem);
std::string WhyNotBackward(const Problem& problem);
std::vector<Launch> BackwardLaunches(const Problem& problem);
uint64_t WorkspaceBytes(const Problem& problem);
}  // namespace sm90

// The plain kernels (csrc/sm80), which run on every GPU since sm_80.
namespace sm80 {
std::string WhyNot(const Problem& problem);
std::vector<Launch> ForwardLaunches(const Problem& problem);
std::vector<Launch> BackwardLaunches(const Problem& problem);
uint64_t WorkspaceBytes(const Problem& problem);
}  // namespace sm80

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_HOST_PROBLEM_H_
