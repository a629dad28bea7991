// The XLA FFI handlers: they decode a call, plan it for the GPU it runs on (plan.h) and hand the
// plan to the driver, or for the emulated targets, which run on the CPU, to the emulator.

#ifndef JAX_FA4_CSRC_HOST_HANDLERS_H_
#define JAX_FA4_CSRC_HOST_HANDLERS_H_

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_fa4 {

// A call target as jax.ffi.register_ffi_target takes it. A target's name ends in the version of its
// operands and attributes: an exported program names the target it calls, so a change to either
// gets a new name and leaves the old one working.
//
// Operands and results are listed in plan.h. Attributes: band_low, band_high (int32) and softcap
// (float32) of the forward; of the backward also deterministic (bool); of emulated targets also
// target (string: the GPU), strict (bool) and seed (int64), and two that may be left out: sm_count
// (int32: the GPU's multiprocessors, if it is to have others than its target) and trace (bool:
// whether launches record one).
struct CallTarget {
  const char* platform;
  const char* name;
  XLA_FFI_Handler* initialize;  // null if there is nothing to do in that stage
  XLA_FFI_Handler* execute;
};

std::vector<CallTarget> CallTargets();

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_HOST_HANDLERS_H_
