// Warpgroup products that the backward needs besides those of wgmma.h: see there.

#ifndef JAX_FA4_CSRC_PTX_WGMMA_TILES_H_
#define JAX_FA4_CSRC_PTX_WGMMA_TILES_H_

#include "csrc/ptx/wgmma.h"

namespace jax_fa4::ptx {

// 9.7.15.5.2 wgmma.mma_async. _tiles: A and B are tiles, and A's rows are summed over. So are B's,
// or, with kBColumns, its columns: then the rows of the tile are those of D's columns that are
// summed over.

#define JAX_FA4_D32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_FA4_D64                                                        \
  JAX_FA4_D32                                                              \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29" \
  ", %30, %31"
#define JAX_FA4_D128                         \
  JAX_FA4_D64                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39" \
  ", %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_FA4_D192                         \
  JAX_FA4_D128                               \
  ", %64, %65, %66, %67, %68, %69, %70, %71" \
  ", %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87" \
  ", %88, %89, %90, %91, %92, %93, %94, %95"

#define JAX_FA4_8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAX_FA4_D32_OPERANDS JAX_FA4_8(0), JAX_FA4_8(8)
#define JAX_FA4_D64_OPERANDS JAX_FA4_D32_OPERANDS, JAX_FA4_8(16), JAX_FA4_8(24)
#define JAX_FA4_D128_OPERANDS \
  JAX_FA4_D64_OPERANDS, JAX_FA4_8(32), JAX_FA4_8(40), JAX_FA4_8(48), JAX_FA4_8(56)
#define JAX_FA4_D192_OPERANDS \
  JAX_FA4_D128_OPERANDS, JAX_FA4_8(64), JAX_FA4_8(72), JAX_FA4_8(80), JAX_FA4_8(88)

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

template <class Element>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[96],
                                                const uint32_t* a,
                                                uint64_t b_tile) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.%101.%101 {" JAX_FA4_D192
               "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 1;"
               : JAX_FA4_D192_OPERANDS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile), "C"(kTypeName<Element>));
}

#undef JAX_FA4_D32
#undef JAX_FA4_D64
#undef JAX_FA4_D128
#undef JAX_FA4_D192
#undef JAX_FA4_D32_OPERANDS
#undef JAX_FA4_D64_OPERANDS
#undef JAX_FA4_D128_OPERANDS
#undef JAX_FA4_D192_OPERANDS
#undef JAX_FA4_8

}  // namespace jax_fa4::ptx

#endif  // JAX_FA4_CSRC_PTX_WGMMA_TILES_H_
