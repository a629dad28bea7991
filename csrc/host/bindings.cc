#include "csrc/host/bindings.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "csrc/host/driver.h"
#include "csrc/host/emulated.h"
#include "csrc/host/kernel_files.h"
#include "csrc/host/plan.h"

namespace jax_fa4 {

namespace nb = nanobind;

namespace {

nb::dict DeviceDict(const Device& device) {
  nb::dict dict;
  dict["compute_capability"] = nb::make_tuple(device.major, device.minor);
  dict["sm_count"] = device.sm_count;
  dict["l2_bytes"] = device.l2_bytes;
  return dict;
}

nb::dict DriverDict() {
  DriverInfo info;
  {
    nb::gil_scoped_release release;
    info = QueryDriver();
  }
  nb::list gpus;
  for (const GpuInfo& gpu : info.gpus) {
    nb::dict dict = DeviceDict(gpu.device);
    dict["name"] = gpu.name;
    dict["memory_bytes"] = gpu.memory_bytes;
    gpus.append(dict);
  }
  nb::dict dict;
  dict["why_not"] = info.why_not.empty() ? nb::none() : nb::cast(info.why_not);
  dict["cuda_version"] =
      info.major == 0 ? nb::none() : nb::object(nb::make_tuple(info.major, info.minor));
  dict["gpus"] = gpus;
  return dict;
}

template <typename Sizes>
nb::tuple Tuple(const Sizes& sizes, size_t count) {
  nb::list list;
  for (size_t i = 0; i < count; ++i) list.append(sizes[i]);
  return nb::tuple(list);
}

nb::list PlanList(const Plan& plan) {
  nb::list launches;
  for (const Launch& launch : plan.launches) {
    nb::dict addresses;
    for (const Address& one : launch.addresses) {
      addresses[nb::cast(one.at)] = nb::make_tuple(plan.buffers[one.buffer].name, one.offset);
    }
    nb::dict maps;
    for (const TensorMapParameter& one : launch.tensor_maps) {
      nb::dict map;
      map["buffer"] = nb::make_tuple(plan.buffers[one.buffer].name, one.offset);
      map["dims"] = Tuple(one.map.dims, one.map.rank);
      map["strides"] = Tuple(std::span(one.map.strides).subspan(1), one.map.rank - 1);
      map["box"] = Tuple(one.map.box, one.map.rank);
      maps[nb::cast(one.at)] = map;
    }
    nb::dict dict;
    dict["module"] = launch.module;
    dict["kernel"] = launch.kernel;
    dict["grid"] = Tuple(launch.grid, 3);
    dict["cluster"] = Tuple(launch.cluster, 3);
    dict["block"] = Tuple(launch.block, 3);
    dict["dynamic_shared_bytes"] = launch.dynamic_shared_bytes;
    dict["parameters"] = nb::bytes(reinterpret_cast<const char*>(launch.parameters.data()),
                                   launch.parameters.size());
    dict["addresses"] = addresses;
    dict["tensor_maps"] = maps;
    launches.append(dict);
  }
  return launches;
}

using ArrayList = std::vector<std::pair<std::string, std::vector<int64_t>>>;

// What a call for a GPU would launch; `make` makes the plan.
template <typename Make>
nb::list PlanFor(std::pair<int, int> compute_capability, const ArrayList& list, Make make) {
  std::vector<Array> arrays;
  for (const auto& [dtype, dims] : list) arrays.push_back({dtype, dims});
  Device device;
  device.major = compute_capability.first;
  device.minor = compute_capability.second;
  return PlanList(make(std::span<const Array>(arrays), device));
}

}  // namespace

void AddHostBindings(nb::module_& m) {
  m.def("set_kernel_directory",
        &SetKernelDirectory,
        nb::arg("path"),
        "Says where the kernel files are.");
  m.def(
      "set_unpacked",
      [](std::string path, const nb::bytes& contents) {
        SetUnpacked(std::move(path), std::string(contents.c_str(), contents.size()));
      },
      nb::arg("path"),
      nb::arg("contents"),
      "Brings what is in a kernel file.");
  m.def("kernel_builds", &KernelBuilds, "Returns [(module, target)] of all kernels in there.");
  m.def(
      "kernel_file",
      [](const std::string& module, int major, int minor) {
        return FileForGpu(module, major, minor).path;
      },
      nb::arg("module"),
      nb::arg("major"),
      nb::arg("minor"),
      "The kernel file that a GPU of that compute capability runs; RuntimeError where none does.");
  m.def("cuda_driver_info",
        &DriverDict,
        "Returns {why_not: str or None, cuda_version: (major, minor) or None, gpus: [{name, "
        "compute_capability, sm_count, l2_bytes, memory_bytes}]}.");
  m.def("backward_workspace_bytes",
        &BackwardWorkspaceBytes,
        nb::arg("batch"),
        nb::arg("rows"),
        nb::arg("keys"),
        nb::arg("heads"),
        nb::arg("kv_heads"),
        nb::arg("width"),
        nb::arg("value_width"),
        nb::arg("itemsize"),
        "Size of the backward's result `workspace`, which serves every GPU.");

  m.def(
      "forward_plan",
      [](std::pair<int, int> compute_capability,
         int sm_count,
         uint64_t l2_bytes,
         const ArrayList& arrays,
         int32_t band_low,
         int32_t band_high,
         float softcap) {
        return PlanFor(compute_capability, arrays, [&](auto all, Device device) {
          device.sm_count = sm_count;
          device.l2_bytes = l2_bytes;
          return ForwardPlan(all, {band_low, band_high, softcap}, device);
        });
      },
      nb::arg("compute_capability"),
      nb::arg("sm_count"),
      nb::arg("l2_bytes"),
      nb::arg("arrays"),
      nb::arg("band_low"),
      nb::arg("band_high"),
      nb::arg("softcap"),
      "What a forward would launch; `arrays` has dtype and shape of operands, then results.");
  m.def(
      "backward_plan",
      [](std::pair<int, int> compute_capability,
         int sm_count,
         uint64_t l2_bytes,
         const ArrayList& arrays,
         int32_t band_low,
         int32_t band_high,
         float softcap,
         bool deterministic) {
        return PlanFor(compute_capability, arrays, [&](auto all, Device device) {
          device.sm_count = sm_count;
          device.l2_bytes = l2_bytes;
          return BackwardPlan(all, {{band_low, band_high, softcap}, deterministic}, device);
        });
      },
      nb::arg("compute_capability"),
      nb::arg("sm_count"),
      nb::arg("l2_bytes"),
      nb::arg("arrays"),
      nb::arg("band_low"),
      nb::arg("band_high"),
      nb::arg("softcap"),
      nb::arg("deterministic"));
  m.def(
      "tensor_copy_plan",
      [](std::pair<int, int> compute_capability, const ArrayList& arrays) {
        return PlanFor(compute_capability, arrays, &TensorCopyPlan);
      },
      nb::arg("compute_capability"),
      nb::arg("arrays"));

  nb::class_<EmulatedLaunch>(m, "EmulatedLaunch")
      .def_ro("id", &EmulatedLaunch::id)
      .def_ro("module", &EmulatedLaunch::module)
      .def_ro("target", &EmulatedLaunch::target)
      .def_ro("kernel", &EmulatedLaunch::kernel)
      .def_ro("grid", &EmulatedLaunch::grid)
      .def_ro("cluster", &EmulatedLaunch::cluster)
      .def_ro("block", &EmulatedLaunch::block)
      .def_ro("dynamic_shared_bytes", &EmulatedLaunch::dynamic_shared_bytes)
      .def_ro("instructions", &EmulatedLaunch::instructions)
      .def_ro("reports", &EmulatedLaunch::reports)
      .def_prop_ro("trace", [](const EmulatedLaunch& self) { return self.trace; });
  m.def("plans_executed",
        &PlansExecuted,
        "How many plans the driver has executed in this process; replays of captured ones do not "
        "count.");
  m.def("next_emulated_launch",
        &NextEmulatedLaunch,
        "The id that the next emulated launch will get.");
  m.def("emulated_launches",
        &EmulatedLaunches,
        nb::arg("first") = 0,
        "The emulated launches of this process that have ended, from that id on.");
}

}  // namespace jax_fa4
