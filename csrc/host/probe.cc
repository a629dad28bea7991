#include "csrc/host/probe.h"

#include <cstdint>

#include "csrc/host/array_text.h"

namespace jax_fa4 {
namespace {

namespace ffi = xla::ffi;

// The result is bound as AnyBuffer and checked here, because the binding's own check of a typed
// buffer names neither the target nor the result.
ffi::Error Probe(ffi::Result<ffi::AnyBuffer> version) {
  const ffi::AnyBuffer::Dimensions shape = version->dimensions();
  if (version->element_type() != ffi::S32 || shape.size() != 1 || shape[0] != 2) {
    return ffi::Error::InvalidArgument(
        "jax_fa4_probe_v1: the result `version` must be int32[2], not " + ArrayText(*version));
  }
  int32_t* major_minor = version->typed_data<int32_t>();
  major_minor[0] = XLA_FFI_API_MAJOR;
  major_minor[1] = XLA_FFI_API_MINOR;
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kProbe, Probe, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

}  // namespace

XLA_FFI_Error* ProbeHandler(XLA_FFI_CallFrame* call_frame) { return kProbe(call_frame); }

}  // namespace jax_fa4
