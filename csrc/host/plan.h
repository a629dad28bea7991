// What a call launches, as data: computed from shapes, dtypes, attributes and the kind of GPU,
// before there are any addresses. The driver executes a plan on a GPU (driver.h), the emulator on
// the CPU (emulated.h).

#ifndef JAX_FA4_CSRC_HOST_PLAN_H_
#define JAX_FA4_CSRC_HOST_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/emulator/tensor_map.h"

namespace jax_fa4 {

// An operand or a result, as a call has it. Owns nothing.
struct Array {
  std::string_view dtype;  // as NumPy names it
  std::span<const int64_t> dims;
};

// The GPU that a plan is for.
struct Device {
  int major = 0, minor = 0;  // compute capability
  int sm_count = 0;          // multiprocessors
  uint64_t l2_bytes = 0;     // cache
};

// Bytes [at, at + 8) of the parameters hold the address of a byte of a buffer.
struct Address {
  uint32_t at = 0;
  int buffer = 0;  // index in Plan::buffers
  uint64_t offset = 0;
};

// Bytes [at, at + 128) of the parameters hold a tensor map, whose global address is that of a byte
// of a buffer.
struct TensorMapParameter {
  uint32_t at = 0;
  int buffer = 0;
  uint64_t offset = 0;
  emulator::TensorMap map;  // without its address
};

struct Launch {
  std::string module;  // the kernel file, "sm80_forward"
  std::string kernel;  // its entry
  std::array<uint32_t, 3> grid = {1, 1, 1};
  std::array<uint32_t, 3> cluster = {1, 1, 1};
  std::array<uint32_t, 3> block = {1, 1, 1};
  uint32_t dynamic_shared_bytes = 0;
  std::vector<std::byte> parameters;  // the entry's one parameter, with zeros where these go:
  std::vector<Address> addresses;
  std::vector<TensorMapParameter> tensor_maps;
};

struct Plan {
  struct Buffer {
    std::string name;
    uint64_t bytes = 0;
    bool is_result = false;  // else kernels only read it
  };
  std::vector<Buffer> buffers;   // of the call: its operands, then its results
  std::vector<Launch> launches;  // in this order
};

// The operands and results of the three calls, in order. Layouts are in csrc/sm80/config.h; bounds
// and dlse may be left out, as arrays of shape (0,).
inline constexpr std::array kForwardOperands = {"query", "key", "value", "scale", "lower", "upper"};
inline constexpr std::array kForwardResults = {"out", "lse", "lse_rounding"};
inline constexpr std::array kBackwardOperands = {"query",
                                                 "key",
                                                 "value",
                                                 "scale",
                                                 "lower",
                                                 "upper",
                                                 "out",
                                                 "lse",
                                                 "lse_rounding",
                                                 "dout",
                                                 "dlse"};
inline constexpr std::array kBackwardResults = {"dquery", "dkey", "dvalue", "dscale", "workspace"};
inline constexpr std::array kTensorCopyOperands = {"x"};
inline constexpr std::array kTensorCopyResults = {"copy"};

struct ForwardAttributes {
  // Row i sees keys [i + band_low, i + band_high): an unbounded side is -T or S.
  int32_t band_low = 0, band_high = 0;
  float softcap = 0;  // 0 is none
};

struct BackwardAttributes : ForwardAttributes {
  bool deterministic = false;  // the same bits in every run
};

// Plans of calls whose `arrays` are operands, then results, as listed above. They throw
// std::invalid_argument, with a sentence that names the operand or attribute, what it must be and
// what it is, and where no kernel serves the call, why none does.
Plan ForwardPlan(std::span<const Array> arrays,
                 const ForwardAttributes& attributes,
                 const Device& device);
Plan BackwardPlan(std::span<const Array> arrays,
                  const BackwardAttributes& attributes,
                  const Device& device);
// Copies a matrix of elements of 2 or 4 bytes through shared memory with tensor maps.
Plan TensorCopyPlan(std::span<const Array> arrays, const Device& device);

// Bytes of the backward's workspace, enough whatever GPU it will run on: shapes are fixed before
// that is known.
uint64_t BackwardWorkspaceBytes(int64_t batch,
                                int64_t rows,
                                int64_t keys,
                                int64_t heads,
                                int64_t kv_heads,
                                int64_t width,
                                int64_t value_width,
                                int64_t itemsize);

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_HOST_PLAN_H_
