// Tiles in shared memory: from and to global memory, and the two matrix products that attention is
// made of.
//
// The 256 threads of a CTA are 16 x 16. Thread (y, x) owns rows y + 16 i of a tile; and of these
// - columns x + 16 j where columns are the rows of another tile (logits): the 16-byte loads of
//   neighbouring lanes are then of neighbouring rows, a Pitch apart, and hit all banks once;
// - columns 4 x + 64 g + {0, 1, 2, 3} where they run along a head's width (outputs, gradients).
// The 16 lanes that share a row are half a warp: what they exchange needs no barrier of the CTA.

#ifndef JAX_FA4_CSRC_SM80_TILE_H_
#define JAX_FA4_CSRC_SM80_TILE_H_

#include "csrc/common/integers.h"
#include "csrc/ptx/convert.h"
#include "csrc/sm80/config.h"

namespace jax_fa4::sm80 {

using ptx::bfloat16;
using ptx::float16;

__device__ __forceinline__ uint32_t ThreadY() { return threadIdx.x / 16; }
__device__ __forceinline__ uint32_t ThreadX() { return threadIdx.x % 16; }

// The same number, of which the compiler knows nothing: what follows from it is computed where it
// is needed. Before a loop it would be computed whether it is needed or not, and kept across the
// loop, it would push other numbers out of the registers.
__device__ __forceinline__ uint32_t Opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float Opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// The tile of rows, or of keys, that a CTA works on.
struct Place {
  uint32_t first;  // position in the array
  uint32_t head, batch;

  __device__ __forceinline__ Place(int32_t length, int32_t tile, int32_t heads) {
    const uint32_t tiles = (length - 1u) / tile + 1, head_of_batch = blockIdx.x / tiles;
    first = blockIdx.x % tiles * tile;
    head = head_of_batch % heads;
    batch = head_of_batch / heads;
  }
};

// One head of one element of an array (batch, length, heads, width), in elements: offsets have 64
// bits, since arrays may have more than 2^31; what one position has is far less.
struct Head {
  int64_t start;    // of position 0
  uint32_t stride;  // from one position to the next
  uint32_t width;

  __device__ __forceinline__
  Head(uint32_t batch, uint32_t length, uint32_t heads, uint32_t head, uint32_t of_width)
      : start((int64_t{batch} * length * heads + head) * of_width),
        stride(heads * of_width),
        width(of_width) {}
  __device__ __forceinline__ int64_t At(uint32_t position) const {
    return start + static_cast<int64_t>(uint64_t{position} * stride);
  }
};

// Four neighbouring elements, for one access of memory.
template <class Element>
struct alignas(4 * sizeof(Element)) Four {
  Element x[4];
};

// Whether all fours of an array's rows are aligned.
template <class Element>
__device__ __forceinline__ bool InFours(const Element* array, uint32_t width) {
  return width % 4 == 0 && reinterpret_cast<uint64_t>(array) % sizeof(Four<Element>) == 0;
}

// Puts four elements in a tile.
template <class Element>
__device__ __forceinline__ void PutFour(float* to, const Element (&x)[4]) {
  *reinterpret_cast<float4*>(to) =
      make_float4(ptx::ToFloat(x[0]), ptx::ToFloat(x[1]), ptx::ToFloat(x[2]), ptx::ToFloat(x[3]));
}

// Rows of an array that is InFours on their way to a tile, kColumns of each. Their loads are in
// flight from Fetch to Put, and what is between them is done meanwhile.
template <int32_t kRows, int32_t kColumns, class Element>
struct Fetched {
  Four<Element> fours[kRows / 16][kColumns / 64];

  // From position `first` and column `begin` on, the rows that keep(row of the tile) tells to. The
  // others, and columns beyond the width, are zeros.
  template <class Keep>
  __device__ __forceinline__ void Fetch(
      const Element* array, const Head& head, uint32_t first, uint32_t begin, const Keep& keep) {
#pragma unroll
    for (int32_t i = 0; i < kRows / 16; ++i) {
      const uint32_t row = ThreadY() + 16 * i;
#pragma unroll
      for (int32_t g = 0; g < kColumns / 64; ++g) {
        const uint32_t column = begin + 4 * ThreadX() + 64 * g;
        fours[i][g] = {};
        if (keep(row) && column < head.width) {
          fours[i][g] =
              *reinterpret_cast<const Four<Element>*>(array + head.At(first + row) + column);
        }
      }
    }
  }

  // As float32, to a tile that has kPitch floats from row to row.
  template <int32_t kPitch>
  __device__ __forceinline__ void Put(float* tile) const {
#pragma unroll
    for (int32_t i = 0; i < kRows / 16; ++i) {
#pragma unroll
      for (int32_t g = 0; g < kColumns / 64; ++g) {
        PutFour(tile + (ThreadY() + 16 * i) * kPitch + 4 * ThreadX() + 64 * g, fours[i][g].x);
      }
    }
  }
};

// Loads the rows of a tile, from position `first` on, as float32: those that keep(row of the tile)
// tells to. The others, and columns beyond the width up to the next multiple of 64, are zeros.
template <int32_t kRows, int32_t kWidth, class Element, class Keep>
__device__ __forceinline__ void LoadTile(
    float* tile, const Element* array, const Head& head, uint32_t first, const Keep& keep) {
  const bool in_fours = InFours(array, head.width);
#pragma unroll 1
  for (uint32_t begin = 0; begin < head.width; begin += 64) {
    if (in_fours) {
      Fetched<kRows, 64, Element> rows;
      rows.Fetch(array, head, first, begin, keep);
      rows.template Put<Pitch(kWidth)>(tile + begin);
    } else {
      const uint32_t column = begin + 4 * ThreadX();
#pragma unroll 1
      for (uint32_t row = ThreadY(); row < kRows; row += 16) {
        const bool kept = keep(row);
        Element x[4] = {};
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c) {
          if (kept && column + c < head.width) x[c] = array[head.At(first + row) + column + c];
        }
        PutFour(tile + row * Pitch(kWidth) + column, x);
      }
    }
  }
}

// Stores what PutSums left in a tile to the positions from `first` to `end`.
template <int32_t kRows, int32_t kWidth, class Element>
__device__ __forceinline__ void StoreTile(
    Element* array, const Head& head, uint32_t first, uint32_t end, const float* tile) {
  const bool in_fours = InFours(array, head.width);
#pragma unroll 1
  for (uint32_t row = ThreadY(); row < kRows && first + row < end; row += 16) {
#pragma unroll 1
    for (uint32_t column = 4 * ThreadX(); column < head.width; column += 64) {
      const float4 x = *reinterpret_cast<const float4*>(tile + row * Pitch(kWidth) + column);
      Four<Element> four;
      ptx::FromFloat(x.x, four.x[0]);
      ptx::FromFloat(x.y, four.x[1]);
      ptx::FromFloat(x.z, four.x[2]);
      ptx::FromFloat(x.w, four.x[3]);
      Element* const to = array + head.At(first + row) + column;
      if (in_fours) {
        *reinterpret_cast<Four<Element>*>(to) = four;
      } else {
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c) {
          if (column + c < head.width) to[c] = four.x[c];
        }
      }
    }
  }
}

// Puts row y + 16 i of what AddProduct summed, times `factor`, where StoreTile reads it: each
// thread what it will store itself. The tile may be one whose rows y + 16 i only the same 16 lanes
// have read, the `a` of RowDots, after __syncwarp().
template <int32_t kWidth, int32_t kRows, int32_t kGroups>
__device__ __forceinline__ void PutSums(float* tile,
                                        const float4 (&sums)[kRows][kGroups],
                                        float factor) {
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
#pragma unroll
    for (int32_t g = 0; g < kGroups; ++g) {
      const float4 x = sums[i][g];
      const uint32_t at = (ThreadY() + 16 * i) * Pitch(kWidth) + 4 * ThreadX() + 64 * g;
      *reinterpret_cast<float4*>(tile + at) =
          make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
    }
  }
}

// Multiplies a row of what AddProduct summed.
template <int32_t kGroups>
__device__ __forceinline__ void ScaleRow(float4 (&row)[kGroups], float factor) {
#pragma unroll
  for (int32_t g = 0; g < kGroups; ++g) {
    row[g].x *= factor;
    row[g].y *= factor;
    row[g].z *= factor;
    row[g].w *= factor;
  }
}

// Steps of a product's sums that are taken at once: the fewer sums a thread has to work on while it
// waits for shared memory, the more. What there is to sum ends in zeros up to a multiple of 16.
template <int32_t kSums>
constexpr int32_t kAtOnce = kSums == 1   ? 16
                            : kSums <= 4 ? 8
                                         : 4;

// The dot products of rows y + 16 i of tile `a` and rows x + 16 j of tile `b`.
template <int32_t kWidth, int32_t kRows, int32_t kColumns>
__device__ __forceinline__ void RowDots(float (&dots)[kRows][kColumns],
                                        const float* a,
                                        const float* b,
                                        uint32_t width) {
  constexpr int32_t kStep = kAtOnce<kRows * kColumns>;
  a += ThreadY() * Pitch(kWidth);
  b += ThreadX() * Pitch(kWidth);
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
#pragma unroll
    for (int32_t j = 0; j < kColumns; ++j) dots[i][j] = 0;
  }
#pragma unroll 1
  for (uint32_t d = 0; d < width; d += kStep) {
#pragma unroll
    for (int32_t c = 0; c < kStep; c += 4) {
      float4 x[kRows], y[kColumns];
#pragma unroll
      for (int32_t i = 0; i < kRows; ++i) {
        x[i] = *reinterpret_cast<const float4*>(a + 16 * i * Pitch(kWidth) + d + c);
      }
#pragma unroll
      for (int32_t j = 0; j < kColumns; ++j) {
        y[j] = *reinterpret_cast<const float4*>(b + 16 * j * Pitch(kWidth) + d + c);
      }
#pragma unroll
      for (int32_t i = 0; i < kRows; ++i) {
#pragma unroll
        for (int32_t j = 0; j < kColumns; ++j) {
          dots[i][j] = fmaf(x[i].x, y[j].x, dots[i][j]);
          dots[i][j] = fmaf(x[i].y, y[j].y, dots[i][j]);
          dots[i][j] = fmaf(x[i].z, y[j].z, dots[i][j]);
          dots[i][j] = fmaf(x[i].w, y[j].w, dots[i][j]);
        }
      }
    }
  }
}

// Replaces what RowDots computed where `condition(i, j)`.
template <int32_t kRows, int32_t kColumns, class Condition>
__device__ __forceinline__ void Fill(float (&x)[kRows][kColumns],
                                     float value,
                                     const Condition& condition) {
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
#pragma unroll
    for (int32_t j = 0; j < kColumns; ++j) {
      if (condition(i, j)) x[i][j] = value;
    }
  }
}

// Puts what RowDots computed where AddProduct reads it. Both are of the same 16 lanes for each row:
// between them is no more than __syncwarp().
template <int32_t kRows, int32_t kColumns>
__device__ __forceinline__ void PutFactor(float* factor, const float (&values)[kRows][kColumns]) {
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
#pragma unroll
    for (int32_t j = 0; j < kColumns; ++j) {
      factor[(ThreadY() + 16 * i) * Pitch(16 * kColumns) + ThreadX() + 16 * j] = values[i][j];
    }
  }
}

// sums += factor * tile, over the first `count` rows of the tile; of the tile's columns only groups
// of 64 that begin within `width`.
template <int32_t kColumns, int32_t kWidth, int32_t kRows, int32_t kGroups>
__device__ __forceinline__ void AddProduct(float4 (&sums)[kRows][kGroups],
                                           const float* factor,
                                           const float* tile,
                                           uint32_t count,
                                           uint32_t width) {
  constexpr int32_t kStep = kAtOnce<4 * kRows * kGroups>;
  factor += ThreadY() * Pitch(kColumns);
  tile += 4 * ThreadX();
#pragma unroll 1
  for (uint32_t s = 0; s < count; s += kStep) {
    float4 f[kStep / 4][kRows];
#pragma unroll
    for (int32_t c = 0; c < kStep / 4; ++c) {
#pragma unroll
      for (int32_t i = 0; i < kRows; ++i) {
        f[c][i] = *reinterpret_cast<const float4*>(factor + 16 * i * Pitch(kColumns) + s + 4 * c);
      }
    }
#pragma unroll
    for (int32_t g = 0; g < kGroups; ++g) {
      if (g > 0 && 64 * g >= width) break;
#pragma unroll
      for (int32_t r = 0; r < kStep; ++r) {
        const float4 t = *reinterpret_cast<const float4*>(tile + (s + r) * Pitch(kWidth) + 64 * g);
#pragma unroll
        for (int32_t i = 0; i < kRows; ++i) {
          const float4 four = f[r / 4][i];
          const float x = r % 4 == 0 ? four.x : r % 4 == 1 ? four.y : r % 4 == 2 ? four.z : four.w;
          sums[i][g].x = fmaf(x, t.x, sums[i][g].x);
          sums[i][g].y = fmaf(x, t.y, sums[i][g].y);
          sums[i][g].z = fmaf(x, t.z, sums[i][g].z);
          sums[i][g].w = fmaf(x, t.w, sums[i][g].w);
        }
      }
    }
  }
}

}  // namespace jax_fa4::sm80

#endif  // JAX_FA4_CSRC_SM80_TILE_H_
