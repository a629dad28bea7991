// What the tensor copy and its host code agree on.
//
// The kernel copies a matrix through shared memory, a box a CTA, with one tensor map to load and
// one to store. It computes nothing: it shows that tensor maps, kernels for one architecture and
// the copy engine work on the machine at hand.

#ifndef JAX_FA4_CSRC_SM90_COPY_H_
#define JAX_FA4_CSRC_SM90_COPY_H_

#include "csrc/common/integers.h"
#include "csrc/common/tensor_map.h"

namespace jax_fa4::sm90 {

// A box of both maps: without swizzle or interleave, elements of any type.
inline constexpr int32_t kCopyBoxRows = 32;
inline constexpr int32_t kCopyBoxRowBytes = 128;  // columns times the size of an element

inline constexpr int32_t kCopyThreads = 32;

struct CopyParameters {
  TensorMap source, target;
  int32_t columns;       // in a box
  int32_t column_boxes;  // in the matrix; there are as many CTAs as boxes, row by row
};

}  // namespace jax_fa4::sm90

#endif  // JAX_FA4_CSRC_SM90_COPY_H_
