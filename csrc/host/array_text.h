#pragma once

#include <string>
#include <string_view>

#include "csrc/host/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fa4 {

// An XLA dtype by JAX's name for it: "bfloat16".
std::string_view DtypeName(xla::ffi::DataType dtype);

// Dtype and shape of an array the way JAX prints an abstract value, "bfloat16[2,128,8,64]", so that
// an error from a handler reads like one from Python.
std::string ArrayText(const Array& array);
std::string ArrayText(const xla::ffi::AnyBuffer& buffer);

}  // namespace jax_fa4
