#include "csrc/host/driver.h"

#include <cuda.h>
#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "csrc/host/kernel_files.h"

namespace jax_fa4 {
namespace {

// Cubins of a 12.9 compiler run on every driver of CUDA 12, which the first of them is
// (minor-version compatibility, CUDA Compatibility guide); it also has all functions below.
constexpr int kMinimumVersion = 12000;
constexpr char kMinimumDriver[] = "525.60.13";

#define JAX_FA4_DRIVER_FUNCTIONS(X) \
  X(cuInit)                         \
  X(cuGetErrorName)                 \
  X(cuGetErrorString)               \
  X(cuDeviceGetCount)               \
  X(cuDeviceGet)                    \
  X(cuDeviceGetName)                \
  X(cuDeviceGetAttribute)           \
  X(cuDeviceTotalMem)               \
  X(cuCtxGetCurrent)                \
  X(cuCtxGetDevice)                 \
  X(cuCtxGetId)                     \
  X(cuCtxPushCurrent)               \
  X(cuCtxPopCurrent)                \
  X(cuStreamGetCtx)                 \
  X(cuModuleLoadDataEx)             \
  X(cuModuleGetFunction)            \
  X(cuFuncSetAttribute)             \
  X(cuTensorMapEncodeTiled)         \
  X(cuLaunchKernelEx)

struct Driver {
  std::string why_not;  // why there is none, as a sentence
  int version = 0;      // of CUDA, as 1000 * major + 10 * minor
#define JAX_FA4_DECLARE(name) decltype(&::name) name = nullptr;
  JAX_FA4_DRIVER_FUNCTIONS(JAX_FA4_DECLARE)
#undef JAX_FA4_DECLARE
};

std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string ErrorText(const Driver& driver, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  if (name == nullptr || text == nullptr) return "CUDA error " + std::to_string(result);
  return std::string(name) + " (" + text + ")";
}

Driver LoadDriver() {
  Driver driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    driver.why_not = "the NVIDIA driver is not installed: " + std::string(reason) + ".";
    return driver;
  }
  const auto get_version =
      reinterpret_cast<decltype(&cuDriverGetVersion)>(dlsym(library, "cuDriverGetVersion"));
  if (get_version == nullptr || get_version(&driver.version) != CUDA_SUCCESS) {
    driver.why_not = "the NVIDIA driver does not tell its version.";
    return driver;
  }
  if (driver.version < kMinimumVersion) {
    driver.why_not = "the NVIDIA driver supports CUDA " + VersionText(driver.version) +
                     ", but these kernels need CUDA " + VersionText(kMinimumVersion) +
                     ": install driver " + kMinimumDriver + " or newer.";
    return driver;
  }
  const auto get_address =
      reinterpret_cast<decltype(&cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
  const auto find = [&](const char* name, auto* function) {
    void* address = nullptr;
    CUdriverProcAddressQueryResult status;
    if (get_address == nullptr ||
        get_address(name, &address, kMinimumVersion, CU_GET_PROC_ADDRESS_DEFAULT, &status) !=
            CUDA_SUCCESS ||
        address == nullptr) {
      driver.why_not =
          "the NVIDIA driver, of CUDA " + VersionText(driver.version) + ", has no " + name + ".";
      return;
    }
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(address);
  };
#define JAX_FA4_FIND(name) find(#name, &driver.name);
  JAX_FA4_DRIVER_FUNCTIONS(JAX_FA4_FIND)
#undef JAX_FA4_FIND
  if (!driver.why_not.empty()) return driver;
  if (const CUresult result = driver.cuInit(0); result != CUDA_SUCCESS) {
    driver.why_not = "the NVIDIA driver cannot start: " + ErrorText(driver, result) + ".";
  }
  return driver;
}

const Driver& TryDriver() {
  static const Driver& driver = *new Driver(LoadDriver());
  return driver;
}

const Driver& GetDriver() {
  const Driver& driver = TryDriver();
  if (!driver.why_not.empty()) throw std::runtime_error(driver.why_not);
  return driver;
}

void Check(CUresult result, std::string_view what) {
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(what) + " failed: " + ErrorText(GetDriver(), result) +
                             ".");
  }
}

Device Describe(CUdevice gpu) {
  const Driver& driver = GetDriver();
  const auto get = [&](CUdevice_attribute attribute) {
    int value = 0;
    Check(driver.cuDeviceGetAttribute(&value, attribute, gpu), "a query of the GPU");
    return value;
  };
  Device device;
  device.major = get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  device.minor = get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  device.sm_count = get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  device.l2_bytes = static_cast<uint64_t>(get(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
  return device;
}

CUmodule LoadModule(const KernelFile& file) {
  const std::string image = Read(file);
  char log[4096] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {log, reinterpret_cast<void*>(sizeof(log))};
  CUmodule module = nullptr;
  const CUresult result =
      GetDriver().cuModuleLoadDataEx(&module, image.c_str(), std::size(options), options, values);
  std::string what = "loading " + file.path;
  if (result != CUDA_SUCCESS && log[0] != 0) what += " (" + std::string(log) + ")";
  Check(result, what);
  return module;
}

std::string Sizes(const std::array<uint32_t, 3>& sizes) {
  return "(" + std::to_string(sizes[0]) + ", " + std::to_string(sizes[1]) + ", " +
         std::to_string(sizes[2]) + ")";
}

CUtensorMap Encode(const emulator::TensorMap& map, void* address) {
  CUtensorMap encoded;
  Check(GetDriver().cuTensorMapEncodeTiled(&encoded,
                                           static_cast<CUtensorMapDataType>(map.type),
                                           static_cast<cuuint32_t>(map.rank),
                                           address,
                                           map.dims.data(),
                                           map.strides.data() + 1,
                                           map.box.data(),
                                           map.element_strides.data(),
                                           static_cast<CUtensorMapInterleave>(map.interleave),
                                           static_cast<CUtensorMapSwizzle>(map.swizzle),
                                           static_cast<CUtensorMapL2promotion>(map.l2_promotion),
                                           map.fill_nan
                                               ? CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
                                               : CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "encoding a tensor map");
  return encoded;
}

struct HashKey {
  size_t operator()(const PlanKey& key) const {
    return std::hash<std::string_view>()(
        {reinterpret_cast<const char*>(key.data()), key.size() * sizeof(key[0])});
  }
};

// Calls mostly have the shapes, dtypes and attributes of earlier ones, and arrays at the same
// addresses. So the plans of a context are kept with their kernels, and the tensor maps of a plan
// by their addresses. What is full is emptied: programs mostly have fewer of them than these.
constexpr size_t kMostPlans = 512;
constexpr size_t kMostTensorMaps = 256;  // of each parameter

}  // namespace

struct PreparedPlan {
  Plan plan;
  std::vector<CUfunction> functions;  // of its launches
  std::mutex mutex;                   // of what follows
  // Of all launches' parameters, in their order.
  std::vector<std::unordered_map<void*, CUtensorMap>> tensor_maps;
};

// What is loaded in a context.
struct StreamContext::Kernels {
  struct Function {
    CUfunction handle = nullptr;
    uint32_t shared_bytes = 0;  // dynamic ones that a launch may ask for
  };
  struct Module {
    CUmodule handle = nullptr;
    std::map<std::string, Function> functions;
  };
  Device device;
  std::mutex mutex;  // of what follows
  std::map<std::string, Module> modules;
  std::unordered_map<PlanKey, std::shared_ptr<PreparedPlan>, HashKey> plans;

  // The kernel of a launch, loaded if it is not yet. The mutex is held.
  CUfunction Find(const Launch& launch) {
    const Driver& driver = GetDriver();
    Module& module = modules[launch.module];
    if (module.handle == nullptr) {
      module.handle = LoadModule(FileForGpu(launch.module, device.major, device.minor));
    }
    Function& function = module.functions[launch.kernel];
    if (function.handle == nullptr || function.shared_bytes < launch.dynamic_shared_bytes) {
      CUfunction handle = nullptr;
      Check(driver.cuModuleGetFunction(&handle, module.handle, launch.kernel.c_str()),
            "finding the kernel " + launch.kernel + " of " + launch.module);
      // This also makes the driver load the function, if it loads modules lazily.
      Check(driver.cuFuncSetAttribute(handle,
                                      CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                      static_cast<int>(launch.dynamic_shared_bytes)),
            "giving the kernel " + launch.kernel + " " +
                std::to_string(launch.dynamic_shared_bytes) + " bytes of shared memory");
      function = {handle, launch.dynamic_shared_bytes};
    }
    return function.handle;
  }
};

StreamContext::Kernels& StreamContext::KernelsOf(CUcontext context) {
  // By the number of the context, which another one at the same address does not share.
  static std::mutex mutex;
  static std::map<unsigned long long, std::unique_ptr<Kernels>>& all =
      *new std::map<unsigned long long, std::unique_ptr<Kernels>>;
  const Driver& driver = GetDriver();
  unsigned long long id = 0;
  Check(driver.cuCtxGetId(context, &id), "a query of the CUDA context");
  const std::lock_guard lock(mutex);
  std::unique_ptr<Kernels>& kernels = all[id];
  if (kernels == nullptr) {
    CUdevice gpu = 0;
    Check(driver.cuCtxGetDevice(&gpu), "a query of the CUDA context");
    const Device device = Describe(gpu);
    kernels = std::make_unique<Kernels>();
    kernels->device = device;
  }
  return *kernels;
}

StreamContext::StreamContext(CUstream stream) : stream_(stream) {
  const Driver& driver = GetDriver();
  CUcontext context = nullptr, current = nullptr;
  Check(driver.cuStreamGetCtx(stream, &context), "a query of the stream");
  Check(driver.cuCtxGetCurrent(&current), "a query of the current CUDA context");
  if (context != current) {
    Check(driver.cuCtxPushCurrent(context), "making the stream's CUDA context current");
    pushed_ = true;
  }
  try {
    kernels_ = &KernelsOf(context);
  } catch (...) {
    if (pushed_) driver.cuCtxPopCurrent(&context);
    throw;
  }
}

StreamContext::~StreamContext() {
  CUcontext context = nullptr;
  if (pushed_) GetDriver().cuCtxPopCurrent(&context);
}

const Device& StreamContext::device() const { return kernels_->device; }

std::shared_ptr<PreparedPlan> StreamContext::Find(const PlanKey& key) const {
  const std::lock_guard lock(kernels_->mutex);
  const auto found = kernels_->plans.find(key);
  return found == kernels_->plans.end() ? nullptr : found->second;
}

std::shared_ptr<PreparedPlan> StreamContext::Prepare(const PlanKey& key, Plan plan) {
  const auto prepared = std::make_shared<PreparedPlan>();
  prepared->plan = std::move(plan);
  size_t maps = 0;
  const std::lock_guard lock(kernels_->mutex);
  for (const Launch& launch : prepared->plan.launches) {
    prepared->functions.push_back(kernels_->Find(launch));
    maps += launch.tensor_maps.size();
  }
  prepared->tensor_maps.resize(maps);
  if (kernels_->plans.size() >= kMostPlans) kernels_->plans.clear();
  kernels_->plans[key] = prepared;
  return prepared;
}

namespace {
std::atomic<uint64_t> plans_executed = 0;
}  // namespace

uint64_t PlansExecuted() { return plans_executed; }

void StreamContext::Execute(PreparedPlan& prepared, std::span<void* const> buffers) {
  const Driver& driver = GetDriver();
  plans_executed.fetch_add(1, std::memory_order_relaxed);
  thread_local std::vector<std::byte> parameters;
  size_t map_index = 0;
  for (size_t i = 0; i < prepared.functions.size(); ++i) {
    const Launch& launch = prepared.plan.launches[i];
    parameters = launch.parameters;
    for (const Address& one : launch.addresses) {
      const void* address = static_cast<std::byte*>(buffers[one.buffer]) + one.offset;
      std::memcpy(parameters.data() + one.at, &address, sizeof(address));
    }
    for (const TensorMapParameter& one : launch.tensor_maps) {
      void* const address = static_cast<std::byte*>(buffers[one.buffer]) + one.offset;
      const std::lock_guard lock(prepared.mutex);
      auto& maps = prepared.tensor_maps[map_index++];
      auto found = maps.find(address);
      if (found == maps.end()) {
        const CUtensorMap map = Encode(one.map, address);
        if (maps.size() >= kMostTensorMaps) maps.clear();
        found = maps.emplace(address, map).first;
      }
      std::memcpy(parameters.data() + one.at, &found->second, sizeof(found->second));
    }
    // As one parameter, which the driver puts where the kernel has it. (As a whole parameter space
    // it would lie at its start, and a kernel with tensor maps has its parameter at a multiple
    // of 64.)
    void* arguments[] = {parameters.data()};
    CUlaunchAttribute cluster = {};
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim.x = launch.cluster[0];
    cluster.value.clusterDim.y = launch.cluster[1];
    cluster.value.clusterDim.z = launch.cluster[2];
    CUlaunchConfig config = {};
    config.gridDimX = launch.grid[0];
    config.gridDimY = launch.grid[1];
    config.gridDimZ = launch.grid[2];
    config.blockDimX = launch.block[0];
    config.blockDimY = launch.block[1];
    config.blockDimZ = launch.block[2];
    config.sharedMemBytes = launch.dynamic_shared_bytes;
    config.hStream = stream_;
    config.attrs = &cluster;
    // GPUs before sm_90 know no clusters, not even of one CTA.
    config.numAttrs = launch.cluster == std::array<uint32_t, 3>{1, 1, 1} ? 0 : 1;
    const CUresult result =
        driver.cuLaunchKernelEx(&config, prepared.functions[i], arguments, nullptr);
    if (result != CUDA_SUCCESS) {
      Check(result,
            "launching " + launch.kernel + " of " + launch.module + " with grid " +
                Sizes(launch.grid) + ", cluster " + Sizes(launch.cluster) + ", block " +
                Sizes(launch.block) + " and " + std::to_string(launch.dynamic_shared_bytes) +
                " bytes of shared memory");
    }
  }
}

DriverInfo QueryDriver() {
  const Driver& driver = TryDriver();
  DriverInfo info;
  info.why_not = driver.why_not;
  info.major = driver.version / 1000;
  info.minor = driver.version % 1000 / 10;
  if (!info.why_not.empty()) return info;
  int count = 0;
  Check(driver.cuDeviceGetCount(&count), "counting GPUs");
  for (int i = 0; i < count; ++i) {
    CUdevice gpu = 0;
    char name[256] = "";
    size_t bytes = 0;
    Check(driver.cuDeviceGet(&gpu, i), "a query of the GPU");
    Check(driver.cuDeviceGetName(name, sizeof(name), gpu), "a query of the GPU");
    Check(driver.cuDeviceTotalMem(&bytes, gpu), "a query of the GPU");
    info.gpus.push_back({name, Describe(gpu), bytes});
  }
  return info;
}

}  // namespace jax_fa4
