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

// The type of A and B, as the instruction names it.
template <class Element>
inline constexpr char kTypeName[] = "f16";
template <>
inline constexpr char kTypeName<bfloat16>[] = "bf16";

// 9.7.15.5.2 wgmma.mma_async, .m64nNk16.f32, by the four warps of a warpgroup: D += A B, or D = A B
// without kAdd. D is in registers: d[i] of lane l of warp w is in row 16 w + l / 4, or 8 rows
// further if i / 2 is odd, and in column 8 (i / 4) + 2 (l % 4) + i % 2.
//
// _ss: A and B are tiles whose rows are summed over.
// _rs: A is in registers, laid out as D is for 16 of its columns, two in a register; B is a tile
// whose rows are columns of D.

// D of N columns is N / 2 operands, the first of their statement: how its text names them, and what
// they are. Each list begins as the one before it.
#define JAX_FA4_D32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_FA4_D64                                                        \
  JAX_FA4_D32                                                              \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29" \
  ", %30, %31"
#define JAX_FA4_D80 JAX_FA4_D64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JAX_FA4_D96 JAX_FA4_D80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_FA4_D112 JAX_FA4_D96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define JAX_FA4_D128 JAX_FA4_D112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_FA4_D192                         \
  JAX_FA4_D128                               \
  ", %64, %65, %66, %67, %68, %69, %70, %71" \
  ", %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87" \
  ", %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_FA4_D256                                 \
  JAX_FA4_D192                                       \
  ", %96, %97, %98, %99, %100, %101, %102, %103"     \
  ", %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"

#define JAX_FA4_8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAX_FA4_D32_OPERANDS JAX_FA4_8(0), JAX_FA4_8(8)
#define JAX_FA4_D64_OPERANDS JAX_FA4_D32_OPERANDS, JAX_FA4_8(16), JAX_FA4_8(24)
#define JAX_FA4_D80_OPERANDS JAX_FA4_D64_OPERANDS, JAX_FA4_8(32)
#define JAX_FA4_D96_OPERANDS JAX_FA4_D80_OPERANDS, JAX_FA4_8(40)
#define JAX_FA4_D112_OPERANDS JAX_FA4_D96_OPERANDS, JAX_FA4_8(48)
#define JAX_FA4_D128_OPERANDS JAX_FA4_D112_OPERANDS, JAX_FA4_8(56)
#define JAX_FA4_D192_OPERANDS \
  JAX_FA4_D128_OPERANDS, JAX_FA4_8(64), JAX_FA4_8(72), JAX_FA4_8(80), JAX_FA4_8(88)
#define JAX_FA4_D256_OPERANDS \
  JAX_FA4_D192_OPERANDS, JAX_FA4_8(96), JAX_FA4_8(104), JAX_FA4_8(112), JAX_FA4_8(120)

template <class Element, bool kAdd>
__device__ __forceinline__ void wgmma_m64k16_ss(float (&d)[40], uint64_t a_tile, uint64_t b_tile) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.%43.%43 {" JAX_FA4_D80
      "}, %40, %41, %42, 1, 1, 0, 0;"
      : JAX_FA4_D80_OPERANDS
      : "l"(a_tile), "l"(b_tile), "n"(static_cast<int32_t>(kAdd)), "C"(kTypeName<Element>));
}

template <class Element, bool kAdd>
__device__ __forceinline__ void wgmma_m64k16_ss(float (&d)[56], uint64_t a_tile, uint64_t b_tile) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n112k16.f32.%59.%59 {" JAX_FA4_D112
      "}, %56, %57, %58, 1, 1, 0, 0;"
      : JAX_FA4_D112_OPERANDS
      : "l"(a_tile), "l"(b_tile), "n"(static_cast<int32_t>(kAdd)), "C"(kTypeName<Element>));
}

template <class Element, bool kAdd>
__device__ __forceinline__ void wgmma_m64k16_ss(float (&d)[64], uint64_t a_tile, uint64_t b_tile) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.%67.%67 {" JAX_FA4_D128
      "}, %64, %65, %66, 1, 1, 0, 0;"
      : JAX_FA4_D128_OPERANDS
      : "l"(a_tile), "l"(b_tile), "n"(static_cast<int32_t>(kAdd)), "C"(kTypeName<Element>));
}

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[32],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.%37.%37 {" JAX_FA4_D64
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : JAX_FA4_D64_OPERANDS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "C"(kTypeName<Element>));
}

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[48],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32.%53.%53 {" JAX_FA4_D96
               "}, {%48, %49, %50, %51}, %52, 1, 1, 1, 1;"
               : JAX_FA4_D96_OPERANDS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "C"(kTypeName<Element>));
}

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[64],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.%69.%69 {" JAX_FA4_D128
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : JAX_FA4_D128_OPERANDS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "C"(kTypeName<Element>));
}

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[96],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.%101.%101 {" JAX_FA4_D192
               "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 1;"
               : JAX_FA4_D192_OPERANDS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "C"(kTypeName<Element>));
}

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[128],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.%133.%133 {" JAX_FA4_D256
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
               : JAX_FA4_D256_OPERANDS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "C"(kTypeName<Element>));
}

// _tiles: A and B are tiles, and A's rows are summed over. So are B's, or, with kBColumns, its
// columns: then the rows of the tile are those of D's columns that are summed over.
#define JAX_FA4_TILES(n, half, a, b, add, columns, type)                                           \
  template <class Element, bool kAdd, bool kBColumns>                                              \
  __device__ __forceinline__ void wgmma_m64k16_tiles(                                              \
      float (&d)[half], uint64_t a_tile, uint64_t b_tile) {                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" JAX_FA4_D##n \
                 "}, " a ", " b ", " add ", 1, 1, 0, " columns ";"                                 \
                 : JAX_FA4_D##n##_OPERANDS                                                         \
                 : "l"(a_tile),                                                                    \
                   "l"(b_tile),                                                                    \
                   "n"(static_cast<int32_t>(kAdd)),                                                \
                   "n"(static_cast<int32_t>(kBColumns)),                                           \
                   "C"(kTypeName<Element>));                                                       \
  }
JAX_FA4_TILES(32, 16, "%16", "%17", "%18", "%19", "%20")
JAX_FA4_TILES(64, 32, "%32", "%33", "%34", "%35", "%36")
JAX_FA4_TILES(128, 64, "%64", "%65", "%66", "%67", "%68")
#undef JAX_FA4_TILES

#undef JAX_FA4_D32
#undef JAX_FA4_D32_OPERANDS
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
#undef JAX_FA4_D192
#undef JAX_FA4_D192_OPERANDS
#undef JAX_FA4_D256
#undef JAX_FA4_D256_OPERANDS
#undef JAX_FA4_8

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_WGMMA_H_
