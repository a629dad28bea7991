// The last of a row: its sums become out.

#ifndef JAX_FA4_CSRC_SM100_OUT_TILE_H_
#define JAX_FA4_CSRC_SM100_OUT_TILE_H_

#include "csrc/common/element.h"
#include "csrc/common/panels.h"
#include "csrc/ptx/f32x2.h"
#include "csrc/ptx/tcgen05.h"
#include "csrc/sm100/variant.h"

namespace jax_fa4::sm100 {

template <int32_t kColumns>
__device__ __forceinline__ void Multiply(float (&x)[kColumns], float factor) {
#pragma unroll
  for (int32_t i = 0; i < kColumns; i += 2) {
    const float2 two = ptx::mul_rn_f32x2(make_float2(x[i], x[i + 1]), make_float2(factor, factor));
    x[i] = two.x;
    x[i + 1] = two.y;
  }
}

// A row of O in tensor memory. It is read and multiplied by `factor`; rows that are not kept become
// zeros, whatever they hold.
template <class Variant>
struct OutRow {
  static constexpr int32_t kWidth = Variant::kWidths.value, kPiece = 16;

  uint32_t tensor;  // its first column
  float factor;
  bool keep;

  // To row `row` of a tile that the copy engine stores.
  __device__ __forceinline__ void Stage(unsigned char* tile, uint32_t row) const {
    unsigned char* const staged = tile + row * 128;
#pragma unroll
    for (int32_t column = 0; column < kWidth; column += kPiece) {
      float x[kPiece];
      uint32_t packed[kPiece / 2];
      Load(column, x);
#pragma unroll
      for (int32_t i = 0; i < kPiece; i += 2) {
        packed[i / 2] = keep ? Pack<typename Variant::Element>(x[i], x[i + 1]) : 0;
      }
#pragma unroll
      for (int32_t i = 0; i < kPiece / 2; i += 4) {
        const uint32_t place = PlaceOfPiece(row, column % 64 / 8 + i / 4);
        *reinterpret_cast<uint4*>(staged + column / 64 * PanelBytes(kTileRows) + place * 16) =
            make_uint4(packed[i], packed[i + 1], packed[i + 2], packed[i + 3]);
      }
    }
  }

  // To the first `width` floats at `out`. All lanes of a warp call it, also those without `out`.
  __device__ __forceinline__ void Store(float* out, int32_t width) const {
#pragma unroll 1
    for (int32_t column = 0; column < kWidth; column += kPiece) {
      float x[kPiece];
      __syncwarp();
      Load(column, x);
#pragma unroll
      for (int32_t i = 0; i < kPiece; i += 4) {
        if (out == nullptr || column + i >= width) continue;
        *reinterpret_cast<float4*>(out + column + i) =
            keep ? make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]) : make_float4(0, 0, 0, 0);
      }
    }
  }

 private:
  __device__ __forceinline__ void Load(int32_t column, float (&x)[kPiece]) const {
    ptx::tcgen05_ld_32x32b(tensor + column, x);
    ptx::tcgen05_wait_ld();
    Multiply(x, factor);
  }
};

// Multiplies a row of O by `factor`.
template <class Variant>
__device__ __forceinline__ void RescaleRow(uint32_t tensor, float factor) {
  constexpr int32_t kPiece = 32;
#pragma unroll
  for (int32_t column = 0; column < Variant::kWidths.value; column += kPiece) {
    float x[kPiece];
    ptx::tcgen05_ld_32x32b(tensor + column, x);
    ptx::tcgen05_wait_ld();
    Multiply(x, factor);
    ptx::tcgen05_st_32x32b(tensor + column, x);
  }
  ptx::tcgen05_wait_st();
}

}  // namespace jax_fa4::sm100

#endif  // JAX_FA4_CSRC_SM100_OUT_TILE_H_
