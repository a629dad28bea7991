// What the kernels of attention are asked for, once a call has been checked: between the checks and
// the choice of a kernel (plan.cc), and the code that knows one family of kernels
// (plain_kernels.cc).

#ifndef JAX_FA4_CSRC_HOST_PROBLEM_H_
#define JAX_FA4_CSRC_HOST_PROBLEM_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/host/plan.h"

namespace jax_fa4 {

// Sizes are positive and below 2^31, and those of a leading axis divide `batch`.
struct Problem {
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

// The plain kernels (csrc/sm80), which run on every GPU since sm_80.
namespace sm80 {
// Why they cannot do it, as a sentence; "" if they can.
std::string WhyNot(const Problem& problem, const Device& device);
std::vector<Launch> ForwardLaunches(const Problem& problem);
std::vector<Launch> BackwardLaunches(const Problem& problem);
uint64_t WorkspaceBytes(int64_t batch, int64_t rows, int64_t heads);
}  // namespace sm80

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_HOST_PROBLEM_H_
