#include "csrc/host/emulated.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "csrc/emulator/machine.h"
#include "csrc/emulator/numerics.h"
#include "csrc/emulator/tensor_map.h"
#include "csrc/host/kernel_files.h"

namespace jax_fa4 {
namespace {

struct EmulatedGpu {
  std::string_view target;
  Device device;
};
// Multiprocessors and caches of an A100, an H200, a B200, a B300 and an RTX 5090.
constexpr EmulatedGpu kGpus[] = {{"sm_80", {8, 0, 108, 40 << 20}},
                                 {"sm_90", {9, 0, 132, 50 << 20}},
                                 {"sm_100", {10, 0, 148, 126 << 20}},
                                 {"sm_103", {10, 3, 148, 126 << 20}},
                                 {"sm_120", {12, 0, 170, 96 << 20}}};

// Where buffers lie for kernels: far from null, and with a gap behind each, so that an index that
// is a little off hits nothing.
constexpr uint64_t kFirstAddress = UINT64_C(0x7F00'0000'0000);
constexpr uint64_t kGap = 1 << 20, kPage = 4096;

// A kernel of a file, decoded once.
std::shared_ptr<const emulator::Program> Load(const KernelFile& file, const std::string& name) {
  // Never destroyed, like the record below: calls may still run when the process ends.
  struct Loaded {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<const emulator::ptx::Module>> modules;
    std::map<std::pair<std::string, std::string>, std::shared_ptr<const emulator::Program>>
        programs;
  };
  static Loaded& loaded = *new Loaded;
  const std::lock_guard lock(loaded.mutex);
  std::shared_ptr<const emulator::Program>& program = loaded.programs[{file.path, name}];
  if (program != nullptr) return program;
  std::shared_ptr<const emulator::ptx::Module>& module = loaded.modules[file.path];
  try {
    if (module == nullptr) module = emulator::ptx::Parse(Read(file));
    for (const auto& kernel : module->kernels) {
      if (kernel->name == name) return program = emulator::Decode(module, *kernel);
    }
  } catch (const emulator::ptx::Error& error) {
    std::string text = error.what();
    // It quotes the file, which may hold anything, and XLA's errors are UTF-8.
    std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    throw std::runtime_error("the kernel file " + file.path + " cannot be run: " + text);
  }
  throw std::runtime_error("the kernel file " + file.path + " has no kernel " + name + ".");
}

constexpr size_t kRemembered = 100'000;
constexpr size_t kTraceEvents = 1 << 20;  // of a launch, later ones are only counted
constexpr size_t kRememberedEvents = 2 * kTraceEvents;

std::mutex record_mutex;
uint64_t next_launch = 0;
std::deque<std::shared_ptr<const EmulatedLaunch>>& record =
    *new std::deque<std::shared_ptr<const EmulatedLaunch>>;

// Launches of the record that have a trace, from the oldest on, and the events of all.
std::deque<uint64_t>& traced = *new std::deque<uint64_t>;
size_t remembered_events = 0;

// The oldest trace makes room. Whoever holds the launch keeps it: the record gets a copy without.
void ForgetTrace() {
  auto& launch = record[traced.front() - record.front()->id];
  remembered_events -= launch->trace->events().size();
  EmulatedLaunch copy = *launch;
  copy.trace = nullptr;
  launch = std::make_shared<const EmulatedLaunch>(std::move(copy));
  traced.pop_front();
}

void Record(EmulatedLaunch launch) {
  const std::lock_guard lock(record_mutex);
  launch.id = next_launch++;
  if (launch.trace != nullptr) {
    traced.push_back(launch.id);
    remembered_events += launch.trace->events().size();
  }
  record.push_back(std::make_shared<const EmulatedLaunch>(std::move(launch)));
  while (remembered_events > kRememberedEvents) ForgetTrace();
  if (record.size() <= kRemembered) return;
  if (record.front()->trace != nullptr) ForgetTrace();
  record.pop_front();
}

}  // namespace

const Device& EmulatedDevice(std::string_view target) {
  std::string names;
  for (const EmulatedGpu& gpu : kGpus) {
    if (gpu.target == target) return gpu.device;
    names += (names.empty() ? "" : ", ") + std::string(gpu.target);
  }
  throw std::invalid_argument("the attribute `target` must be one of " + names + ", not " +
                              std::string(target) + ".");
}

void ExecuteEmulated(const Plan& plan,
                     const Device& device,
                     std::span<void* const> buffers,
                     const EmulationOptions& options) {
  if (!emulator::TablesAreLoaded()) {
    throw std::runtime_error("the tables of approximate functions are not loaded.");
  }
  std::vector<emulator::Buffer> memory;
  std::vector<uint64_t> addresses;
  uint64_t address = kFirstAddress;
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    const Plan::Buffer& buffer = plan.buffers[i];
    addresses.push_back(address);
    if (buffer.bytes == 0) continue;
    if (buffer.is_result) std::memset(buffers[i], 0xFF, buffer.bytes);
    memory.push_back(
        {buffer.name, static_cast<uint8_t*>(buffers[i]), buffer.bytes, buffer.is_result, address});
    address += (buffer.bytes + kPage - 1) / kPage * kPage + kGap;
  }

  for (const Launch& launch : plan.launches) {
    const KernelFile file = FileForEmulator(launch.module, device.major, device.minor);
    emulator::Launch emulated;
    emulated.program = Load(file, launch.kernel);
    emulated.grid = launch.grid;
    emulated.block = launch.block;
    emulated.cluster = launch.cluster;
    emulated.dynamic_shared_bytes = launch.dynamic_shared_bytes;
    emulated.parameters.resize(launch.parameters.size());
    std::memcpy(emulated.parameters.data(), launch.parameters.data(), launch.parameters.size());
    for (const Address& one : launch.addresses) {
      const uint64_t value = addresses[one.buffer] + one.offset;
      std::memcpy(emulated.parameters.data() + one.at, &value, sizeof(value));
    }
    for (const TensorMapParameter& one : launch.tensor_maps) {
      emulator::TensorMap map = one.map;
      map.global_address = addresses[one.buffer] + one.offset;
      const std::string fault = emulator::Validate(map);
      if (!fault.empty())
        throw std::runtime_error("a tensor map of " + launch.kernel + ": " + fault);
      const auto bytes = emulator::EncodeTensorMap(map);
      std::memcpy(emulated.parameters.data() + one.at, bytes.data(), bytes.size());
    }
    emulated.buffers = memory;
    emulator::Options how;
    how.seed = options.seed;
    how.strict = options.strict;
    how.sm_count = static_cast<uint32_t>(device.sm_count);
    how.trace = options.trace;
    how.max_trace_events = kTraceEvents;
    emulator::Machine machine(std::move(emulated), std::move(how));
    const std::vector<emulator::Report>& reports = machine.Run();
    Record({0,
            launch.module,
            file.target,
            launch.kernel,
            launch.grid,
            launch.cluster,
            launch.block,
            launch.dynamic_shared_bytes,
            machine.instructions_executed(),
            reports,
            machine.trace()});
    bool failed = false;
    std::string texts;
    for (const emulator::Report& report : reports) {
      failed = failed || options.strict || report.fatal;
      texts += "\n\n" + report.Text();
    }
    if (failed) {
      throw std::runtime_error("the emulator reports about the kernel " + launch.kernel + " of " +
                               launch.module + "." + file.target + ":" + texts);
    }
  }
}

uint64_t NextEmulatedLaunch() {
  const std::lock_guard lock(record_mutex);
  return next_launch;
}

std::vector<std::shared_ptr<const EmulatedLaunch>> EmulatedLaunches(uint64_t first) {
  const std::lock_guard lock(record_mutex);
  std::vector<std::shared_ptr<const EmulatedLaunch>> launches;
  for (const auto& launch : record) {
    if (launch->id >= first) launches.push_back(launch);
  }
  return launches;
}

}  // namespace jax_fa4
