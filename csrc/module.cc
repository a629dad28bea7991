// The extension module jax_fa4._native: hands the XLA FFI handlers to Python, which registers them
// (jax_fa4/native.py). Everything else about a handler is beside its definition in csrc/host/.

#include <nanobind/nanobind.h>

#include "csrc/emulator/bindings.h"
#include "csrc/host/bindings.h"
#include "csrc/host/handlers.h"
#include "csrc/host/probe.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace jax_fa4 {
namespace {

// The form in which jax.ffi.register_ffi_target takes a handler. The parameter's type is the check
// that what is wrapped really has an FFI handler's signature; the capsule itself forgets it.
nb::capsule HandlerCapsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Handlers as jax.ffi.register_ffi_target takes them: one capsule, or one for each stage.
nb::dict Registrations() {
  nb::dict targets_by_platform;
  const auto add = [&](const char* platform, const char* name, nb::object handler) {
    if (!targets_by_platform.contains(platform)) targets_by_platform[platform] = nb::dict();
    targets_by_platform[platform][name] = handler;
  };
  add("cpu", "jax_fa4_probe_v1", HandlerCapsule(&ProbeHandler));
  for (const CallTarget& target : CallTargets()) {
    if (target.initialize == nullptr) {
      add(target.platform, target.name, HandlerCapsule(target.execute));
      continue;
    }
    nb::dict stages;
    stages["initialize"] = HandlerCapsule(target.initialize);
    stages["execute"] = HandlerCapsule(target.execute);
    add(target.platform, target.name, stages);
  }
  return targets_by_platform;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "XLA FFI handlers of jax_fa4; use jax_fa4.native, which registers them.";
  emulator::AddBindings(m);
  AddHostBindings(m);
  m.def(
      "emulator_runs_here",
      [] {
#if defined(__x86_64__)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
        return true;
#endif
      },
      "Whether this CPU has the instructions that the emulator was compiled for.");
  m.def("registrations",
        &Registrations,
        "Returns {platform: {target name: capsule that holds the FFI handler, or {stage: "
        "capsule}}}.");
  m.def(
      "ffi_api_version",
      [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "Returns the (major, minor) XLA FFI API version of the headers this module was compiled "
      "with.");
}

}  // namespace jax_fa4
