// A tensor map as kernels get it: a place among the parameters that the host fills.

#ifndef JAX_FA4_CSRC_COMMON_TENSOR_MAP_H_
#define JAX_FA4_CSRC_COMMON_TENSOR_MAP_H_

namespace jax_fa4 {

// A CUtensorMap of the driver.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

}  // namespace jax_fa4

#endif  // JAX_FA4_CSRC_COMMON_TENSOR_MAP_H_
