#pragma once

#include <nanobind/nanobind.h>

namespace jax_fa4 {

// Adds to the module what Python needs of the host path: where kernels are, what the machine has,
// plans as dicts, and the record of emulated launches. The handlers are in handlers.h.
void AddHostBindings(nanobind::module_& m);

}  // namespace jax_fa4
