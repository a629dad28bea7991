// Executes plans on a GPU with the CUDA driver, which is looked for when it is first needed: this
// library is not linked to it, and loads on machines that have none.

#ifndef JAX_FA4_CSRC_HOST_DRIVER_H_
#define JAX_FA4_CSRC_HOST_DRIVER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "csrc/host/plan.h"

// As in <cuda.h>, which only driver.cc needs.
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;

namespace jax_fa4 {

// A plan whose kernels are loaded in a context.
struct PreparedPlan;

// What tells the plans of an operation on one GPU apart, as numbers: equal keys mean equal plans.
using PlanKey = std::vector<int64_t>;

// The context of a stream, current for the calling thread as long as the object lives. Everything
// here throws std::runtime_error, with a sentence.
class StreamContext {
 public:
  explicit StreamContext(CUstream stream);
  ~StreamContext();
  StreamContext(const StreamContext&) = delete;
  StreamContext& operator=(const StreamContext&) = delete;

  const Device& device() const;
  // A plan of an earlier call with this key, ready to be executed in this context; null if there is
  // none any more.
  std::shared_ptr<PreparedPlan> Find(const PlanKey& key) const;
  // Loads the plan's kernels, and keeps it for later calls. The first time this reads files and
  // loads modules, which has to happen before a stream is captured.
  std::shared_ptr<PreparedPlan> Prepare(const PlanKey& key, Plan plan);
  // Launches the kernels of a plan of this context. It neither allocates memory on the device nor
  // waits for it.
  void Execute(PreparedPlan& plan, std::span<void* const> buffers);

 private:
  CUstream stream_;
  bool pushed_ = false;
  struct Kernels;
  Kernels* kernels_ = nullptr;
  static Kernels& KernelsOf(CUcontext context);
};

// How many plans this process has had executed. A captured plan is counted when it is captured, and
// not when it is replayed.
uint64_t PlansExecuted();

struct GpuInfo {
  std::string name;
  Device device;
  uint64_t memory_bytes = 0;
};

// What a machine has.
struct DriverInfo {
  std::string why_not;       // why GPUs cannot be used, as a sentence; "" if they can
  int major = 0, minor = 0;  // the newest CUDA version that the driver supports, if there is one
  std::vector<GpuInfo> gpus;
};
DriverInfo QueryDriver();

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_HOST_DRIVER_H_
