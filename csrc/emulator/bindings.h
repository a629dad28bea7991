// The emulator's Python side: what jax_fa4/emulated.py builds on.

#ifndef JAX_FA4_CSRC_EMULATOR_BINDINGS_H_
#define JAX_FA4_CSRC_EMULATOR_BINDINGS_H_

#include <nanobind/nanobind.h>

namespace jax_fa4::emulator {

void AddBindings(nanobind::module_& module);

}  // namespace jax_fa4::emulator

#endif  // JAX_FA4_CSRC_EMULATOR_BINDINGS_H_
