#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_fa4 {

// XLA FFI target "jax_fa4_probe_v1" (CPU): no operands; result `version`, int32[2], receives the
// major and minor FFI API version that this library was compiled against. It computes nothing else:
// a call through jax.jit shows that the installed jaxlib accepts this library's handlers.
XLA_FFI_Error* ProbeHandler(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_fa4
