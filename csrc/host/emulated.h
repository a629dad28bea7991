// Executes plans on the CPU: the emulator runs the PTX of the kernels that a GPU would run.

#ifndef JAX_FA4_CSRC_HOST_EMULATED_H_
#define JAX_FA4_CSRC_HOST_EMULATED_H_

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/emulator/report.h"
#include "csrc/emulator/trace.h"
#include "csrc/host/plan.h"

namespace jax_fa4 {

// The GPU to emulate: "sm_80", "sm_90", "sm_100" or "sm_120". Throws std::invalid_argument for
// others.
const Device& EmulatedDevice(std::string_view target);

struct EmulationOptions {
  bool strict = true;
  uint64_t seed = 0;   // of the scheduler
  bool trace = false;  // whether launches record what happens in them
};

// Runs the launches of a plan for `device`, whose buffers lie at `buffers`. Results hold NaNs
// first, so that what a kernel leaves unwritten shows, and operands are not to be written. In
// strict mode any report ends the call, else a fatal one: with std::runtime_error, which holds the
// text of all. May be called by several threads at a time.
void ExecuteEmulated(const Plan& plan,
                     const Device& device,
                     std::span<void* const> buffers,
                     const EmulationOptions& options);

// A launch that has ended.
struct EmulatedLaunch {
  uint64_t id = 0;  // numbers the launches of the process from 0 on, in the order of their ends
  std::string module, target, kernel;
  std::array<uint32_t, 3> grid, cluster, block;
  uint32_t dynamic_shared_bytes = 0;
  uint64_t instructions = 0;
  std::vector<emulator::Report> reports;
  std::shared_ptr<const emulator::Trace> trace;  // null where none was recorded
};

// The id that the next launch will get.
uint64_t NextEmulatedLaunch();
// Launches from that id on. Only the last hundred thousand of the process are remembered, and their
// traces only as long as those of later launches leave room: all together hold two million events
// (some 400 MB) at most, and one that is older has lost its trace.
std::vector<std::shared_ptr<const EmulatedLaunch>> EmulatedLaunches(uint64_t first);

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_HOST_EMULATED_H_
