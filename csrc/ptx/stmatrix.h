// Matrices from registers to shared memory. Numbers are sections of the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_STMATRIX_H_
#define JAX_FA4_CSRC_PTX_STMATRIX_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.15.5.16 stmatrix: a warp stores four matrices of 8 x 8 elements of 16 bits. Of matrix i lane
// l holds columns 2 (l % 4) and the next of row l / 4, in x[i], and gives the address of row l % 8
// if l / 8 is i; with kTransposed, of column l % 8, whose elements are then neighbours in memory.
template <bool kTransposed>
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t* x) {
  if (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(x[0]),
        "r"(x[1]),
        "r"(x[2]),
        "r"(x[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(x[0]),
                 "r"(x[1]),
                 "r"(x[2]),
                 "r"(x[3])
                 : "memory");
  }
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_STMATRIX_H_
