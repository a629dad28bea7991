// Executes plans on a GPU with the CUDA driver, which is looked for when it is first needed: this
// library is not linked to it, and loads on machines that have none.

#ifndef JAX_FA4_CSRC_HOST_DRIVER_H_
#define JAX_FA4_CSRC_HOST_DRIVER_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "csrc/host/plan.h"

// As in <cuda.h>, which only driver.cc needs.
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;

namespace jax_fa4 {

// The context of a stream, current for the calling thread as long as the object lives. Everything
// here throws std::runtime_error, with a sentence.
class StreamContext {
 public:
  explicit StreamContext(CUstream stream);
  ~StreamContext();
  StreamContext(const StreamContext&) = delete;
  StreamContext& operator=(const StreamContext&) = delete;

  const Device& device() const;
  // Makes the plan's kernels ready to be launched. The first time this reads files and loads
  // modules, which has to happen before a stream is captured.
  void Load(const Plan& plan);
  // Launches them. It neither allocates memory on the device nor waits for it.
  void Execute(const Plan& plan, std::span<void* const> buffers);

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
