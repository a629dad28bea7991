// Warpgroup products of Hopper's tensor cores. Numbers are sections of the PTX ISA 8.8.

#ifndef JAX_FA4_CSRC_PTX_WGMMA_H_
#define JAX_FA4_CSRC_PTX_WGMMA_H_

#include "csrc/common/element.h"
#include "csrc/common/integers.h"

namespace jax_fa4::ptx {

// 9.7.15.5.1 The matrix descriptor of a tile in panels of 128 bytes a row, with the copy engine's
// swizzle of 128 bytes. `panel_bytes` lie from one panel to the next; they matter only where the
// product's columns are along the rows of the tile, and not what it sums over.
__device__ __forceinline__ uint64_t wgmma_matrix_descriptor(uint32_t tile, uint32_t panel_bytes) {
  constexpr uint64_t kSwizzle128Bytes = uint64_t{1} << 62;
  constexpr uint64_t kBytesOf8Rows = 8 * 128;
  return kSwizzle128Bytes | kBytesOf8Rows >> 4 << 32 | uint64_t{panel_bytes >> 4} << 16 |
         (tile & 0x3ffff) >> 4;
}

// 9.7.15.7.1 wgmma.fence: other accesses of the registers of products come before these.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// 9.7.15.7.2 wgmma.commit_group: closes the group of the products since the last one.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// 9.7.15.7.3 wgmma.wait_group: waits until all but the latest kGroups groups are done.
template <int32_t kGroups>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// What is computed with these registers so far stays before this place in the code, and what is
// computed from them after it. (The compiler does not know when products write them.)
template <int32_t kCount>
__device__ __forceinline__ void Pin(float (&x)[kCount]) {
#pragma unroll
  for (int32_t i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// 9.7.15.5.2 wgmma.mma_async, .m64nNk16.f32, by the four warps of a warpgroup: D += A B, or D = A B
// without kAdd. D is in registers: d[i] of lane l of warp w is in row 16 w + l / 4, or 8 rows
// further if i / 2 is odd, and in column 8 (i / 4) + 2 (l % 4) + i % 2.
//
// _ss: A and B are tiles whose rows are summed over.
// _rs: A is in registers, laid out as D is for 16 of its columns, two in a register; B is a tile
// whose rows are columns of D.

#define JAX_FA4_D64                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_FA4_D64_OPERANDS                                                                      \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define JAX_FA4_D80                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define JAX_FA4_D80_OPERANDS                                                                      \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
      "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])

#define JAX_FA4_D96                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_FA4_D96_OPERANDS                                                                      \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
      "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),  \
      "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])

#define JAX_FA4_D112                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define JAX_FA4_D112_OPERANDS                                                                     \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
      "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),  \
      "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),  \
      "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])

#define JAX_FA4_D128                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_FA4_D128_OPERANDS                                                                     \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
      "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),  \
      "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),  \
      "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),  \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define JAX_FA4_D256                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_FA4_D256_OPERANDS                                                                     \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),  \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),  \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
      "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),  \
      "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),  \
      "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),  \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),  \
      "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),  \
      "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),  \
      "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),  \
      "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),  \
      "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]),  \
      "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),          \
      "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]),         \
      "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]),         \
      "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]),         \
      "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define JAX_FA4_SS(n, type, a, b, add)                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type " {" JAX_FA4_D##n \
               "}, %" #a ", %" #b ", %" #add ", 1, 1, 0, 0;"                            \
               : JAX_FA4_D##n##_OPERANDS                                                \
               : "l"(a_tile), "l"(b_tile), "n"(static_cast<int32_t>(kAdd)))
#define JAX_FA4_RS(n, type, a0, a1, a2, a3, b)                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type " {" JAX_FA4_D##n \
               "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", 1, 1, 1, 1;"      \
               : JAX_FA4_D##n##_OPERANDS                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile))

template <class Element, bool kAdd>
__device__ __forceinline__ void wgmma_m64k16_ss(float (&d)[40], uint64_t a_tile, uint64_t b_tile) {
  if constexpr (kIsBfloat16<Element>) {
    JAX_FA4_SS(80, "bf16.bf16", 40, 41, 42);
  } else {
    JAX_FA4_SS(80, "f16.f16", 40, 41, 42);
  }
}

template <class Element, bool kAdd>
__device__ __forceinline__ void wgmma_m64k16_ss(float (&d)[56], uint64_t a_tile, uint64_t b_tile) {
  if constexpr (kIsBfloat16<Element>) {
    JAX_FA4_SS(112, "bf16.bf16", 56, 57, 58);
  } else {
    JAX_FA4_SS(112, "f16.f16", 56, 57, 58);
  }
}

template <class Element, bool kAdd>
__device__ __forceinline__ void wgmma_m64k16_ss(float (&d)[64], uint64_t a_tile, uint64_t b_tile) {
  if constexpr (kIsBfloat16<Element>) {
    JAX_FA4_SS(128, "bf16.bf16", 64, 65, 66);
  } else {
    JAX_FA4_SS(128, "f16.f16", 64, 65, 66);
  }
}

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[32],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  if constexpr (kIsBfloat16<Element>) {
    JAX_FA4_RS(64, "bf16.bf16", 32, 33, 34, 35, 36);
  } else {
    JAX_FA4_RS(64, "f16.f16", 32, 33, 34, 35, 36);
  }
}

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[48],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  if constexpr (kIsBfloat16<Element>) {
    JAX_FA4_RS(96, "bf16.bf16", 48, 49, 50, 51, 52);
  } else {
    JAX_FA4_RS(96, "f16.f16", 48, 49, 50, 51, 52);
  }
}

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[64],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  if constexpr (kIsBfloat16<Element>) {
    JAX_FA4_RS(128, "bf16.bf16", 64, 65, 66, 67, 68);
  } else {
    JAX_FA4_RS(128, "f16.f16", 64, 65, 66, 67, 68);
  }
}

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[128],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  if constexpr (kIsBfloat16<Element>) {
    JAX_FA4_RS(256, "bf16.bf16", 128, 129, 130, 131, 132);
  } else {
    JAX_FA4_RS(256, "f16.f16", 128, 129, 130, 131, 132);
  }
}

#undef JAX_FA4_D64
#undef JAX_FA4_D64_OPERANDS
#undef JAX_FA4_D80
#undef JAX_FA4_D80_OPERANDS
#undef JAX_FA4_D96
#undef JAX_FA4_D96_OPERANDS
#undef JAX_FA4_D112
#undef JAX_FA4_D112_OPERANDS
#undef JAX_FA4_D128
#undef JAX_FA4_D128_OPERANDS
#undef JAX_FA4_D256
#undef JAX_FA4_D256_OPERANDS
#undef JAX_FA4_SS
#undef JAX_FA4_RS

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_WGMMA_H_
