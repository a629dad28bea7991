// What differs between kernels for tensor cores of the same pass, widths and dtype.

#ifndef JAX_FA4_CSRC_COMMON_MASK_KIND_H_
#define JAX_FA4_CSRC_COMMON_MASK_KIND_H_

namespace jax_fa4 {

enum class MaskKind {
  kFull,    // every row sees every key
  kBounds,  // rows see intervals, from the band or from arrays
  kSoftcap  // the same, and logits are capped
};

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_MASK_KIND_H_
