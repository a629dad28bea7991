#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_fa4 {

// Dtype and shape of a buffer the way JAX prints an abstract value, "bfloat16[2,128,8,64]", so that
// an error from a handler reads like one from Python.
std::string ArrayText(const xla::ffi::AnyBuffer& buffer);

}  // namespace jax_fa4
