// Tensor memory and the tensor cores that work on it, of Blackwell's sm_100 family, for one CTA by
// itself (cta_group::1). Numbers are sections of the PTX ISA 8.8.
//
// Tensor memory is 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. Warp w
// accesses lanes 32 (w % 4) to 32 (w % 4) + 31, and in the shape 32x32b its lane i has lane i of
// these, and its register c column c.
//
// Loads, stores and products are asynchronous. Products of one thread are executed in their order;
// all else needs a wait, or a commit and an mbarrier, and between threads the fences.

#ifndef JAX_FA4_CSRC_PTX_TCGEN05_H_
#define JAX_FA4_CSRC_PTX_TCGEN05_H_

#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.16.7.1 tcgen05.alloc: writes the address of `columns` columns, a power of two from 32 on, to
// shared memory. A whole warp calls it.
__device__ __forceinline__ void tcgen05_alloc(uint32_t* address, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"l"(
                   __cvta_generic_to_shared(address)),
               "r"(columns)
               : "memory");
}

// 9.7.16.7.1 tcgen05.dealloc, before the CTA ends. A whole warp calls it.
__device__ __forceinline__ void tcgen05_dealloc(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns)
               : "memory");
}

// 9.7.16.11.1 tcgen05.fence: what this thread's tcgen05 instructions did so far is ordered before
// what other threads' do behind a synchronisation, and the other way round.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

#define JAX_FA4_LIST8(x, i) \
  x(i), x((i) + 1), x((i) + 2), x((i) + 3), x((i) + 4), x((i) + 5), x((i) + 6), x((i) + 7)
#define JAX_FA4_LIST16(x) JAX_FA4_LIST8(x, 0), JAX_FA4_LIST8(x, 8)
#define JAX_FA4_LIST32(x) JAX_FA4_LIST16(x), JAX_FA4_LIST8(x, 16), JAX_FA4_LIST8(x, 24)
#define JAX_FA4_NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_FA4_NAMES32                                                      \
  JAX_FA4_NAMES16                                                            \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31"

// 9.7.16.8.3 tcgen05.ld. The registers may be read behind tcgen05_wait_ld.
__device__ __forceinline__ void tcgen05_ld_32x32b(uint32_t address, float (&x)[16]) {
#define JAX_FA4_OUTPUT(i) "=f"(x[i])
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 {" JAX_FA4_NAMES16 "}, [%16];"
               : JAX_FA4_LIST16(JAX_FA4_OUTPUT)
               : "r"(address));
}
__device__ __forceinline__ void tcgen05_ld_32x32b(uint32_t address, float (&x)[32]) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {" JAX_FA4_NAMES32 "}, [%32];"
               : JAX_FA4_LIST32(JAX_FA4_OUTPUT)
               : "r"(address));
#undef JAX_FA4_OUTPUT
}

// 9.7.16.8.4 tcgen05.st. Others may read the columns behind tcgen05_wait_st.
__device__ __forceinline__ void tcgen05_st_32x32b(uint32_t address, const float (&x)[32]) {
#define JAX_FA4_INPUT(i) "f"(x[i])
  asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {" JAX_FA4_NAMES32
               "};" ::JAX_FA4_LIST32(JAX_FA4_INPUT),
               "r"(address)
               : "memory");
#undef JAX_FA4_INPUT
}
__device__ __forceinline__ void tcgen05_st_32x32b(uint32_t address, const uint32_t (&x)[16]) {
#define JAX_FA4_INPUT(i) "r"(x[i])
  asm volatile("tcgen05.st.sync.aligned.32x32b.x16.b32 [%16], {" JAX_FA4_NAMES16
               "};" ::JAX_FA4_LIST16(JAX_FA4_INPUT),
               "r"(address)
               : "memory");
#undef JAX_FA4_INPUT
}

#undef JAX_FA4_LIST8
#undef JAX_FA4_LIST16
#undef JAX_FA4_LIST32
#undef JAX_FA4_NAMES16
#undef JAX_FA4_NAMES32

// 9.7.16.8.5 tcgen05.wait: for all loads, or all stores, of this thread.
__device__ __forceinline__ void tcgen05_wait_ld() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_wait_st() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// 9.7.16.4.1: the matrix descriptor of an operand in shared memory, of 16-bit elements, in panels
// of 64 columns: rows of 128 bytes, swizzled as the copy engine does, the panel at a multiple of
// 1024 bytes. Rows are those of a matrix whose columns are summed over (K-major), or the other way
// round; then `panel_bytes` lie between panels. Starts may be advanced, in units of 16 bytes,
// by columns within a panel, and by multiples of 8 rows.
__device__ __forceinline__ uint64_t tcgen05_matrix_descriptor(uint32_t shared_address,
                                                              uint32_t panel_bytes) {
  constexpr uint32_t kEightRows = 8 * 128, kVersion = 1, kSwizzle128 = 2;
  const uint32_t low = shared_address >> 4 | panel_bytes >> 4 << 16;
  constexpr uint32_t kHigh = kEightRows >> 4 | kVersion << 14 | kSwizzle128 << 29;
  return uint64_t{kHigh} << 32 | low;
}

// 9.7.16.4.2: the instruction descriptor of a product, summed in float32.
struct tcgen05_instruction {
  bool is_bfloat16;                // else float16; of A and B
  int32_t columns;                 // of B and D
  bool b_is_column_major;          // B's rows in memory are of the dimension that is summed over
  bool a_is_column_major = false;  // likewise A's
  int32_t rows = 128;              // of A and D; or 64, which D has in 16 of each 32 lanes

  __device__ __forceinline__ constexpr uint32_t descriptor() const {
    constexpr uint32_t kFloat32 = 1;
    const uint32_t element = is_bfloat16 ? 1 : 0;
    return kFloat32 << 4 | element << 7 | element << 10 | uint32_t{a_is_column_major} << 15 |
           uint32_t{b_is_column_major} << 16 | uint32_t(columns) >> 3 << 17 |
           uint32_t(rows) >> 4 << 24;
  }
};
inline constexpr uint32_t kNegateA = 1 << 13;  // D += -A B

// 9.7.16.10.9.1 tcgen05.mma, .kind::f16: D, in tensor memory, is A B, or is increased by it, for 16
// columns of A and rows of B. A is in shared memory, or in tensor memory, two elements a column.
__device__ __forceinline__ void tcgen05_mma_f16(
    uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n"
      "}" ::"r"(d),
      "l"(a),
      "l"(b),
      "r"(instruction),
      "r"(uint32_t{add})
      : "memory");
}
__device__ __forceinline__ void tcgen05_mma_f16(
    uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n"
      "}" ::"r"(d),
      "r"(a),
      "l"(b),
      "r"(instruction),
      "r"(uint32_t{add})
      : "memory");
}

// 9.7.16.12.1 tcgen05.commit: arrives at the barrier when all products that this thread has issued
// are done. It is a tcgen05.fence::before_thread_sync, too.
__device__ __forceinline__ void tcgen05_commit(uint64_t* barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"l"(
                   __cvta_generic_to_shared(barrier))
               : "memory");
}

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_TCGEN05_H_
