// Before and after the backward on tensor cores: what is done once for each row. Both kernels take
// as long as their memory accesses.
//
//   before   lse_log2 and delta of each row, of dout, out, lse and dlse; what each block of rows
//            sees; zeros to add to
//   after    dquery = scale * dquery_sum, rounded, and dscale = query . dquery_sum
//
// A row that sees nothing has an lse of -inf. What query, dout and dlse hold there reaches no
// result, nor do the products of its weights of 0 with keys that are not finite.
//
// Grids: heads' tiles, fastest, times tiles of positions times batch; heads, fastest, times tiles
// of positions times batch.

#include "csrc/common/backward_parameters.h"
#include "csrc/common/backward_rows.h"
#include "csrc/common/dquery_sum.h"
#include "csrc/common/element.h"
#include "csrc/common/lanes.h"
#include "csrc/common/online_softmax.h"
#include "csrc/common/operands.h"

namespace jax_fa4::backward_rows {

using Parameters = BackwardParameters;

// Columns of a row that a thread has at a time, 16 bytes of elements; and four threads.
constexpr int32_t kPiece = 8, kStep = 4 * kPiece;

struct Piece {
  float x[kPiece];

  template <class Element>
  __device__ __forceinline__ static Piece Of(uint4 bits) {
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
    Piece piece;
#pragma unroll
    for (int32_t i = 0; i < kPiece; ++i) {
      piece.x[i] = ptx::ToFloat(Element{static_cast<uint16_t>(words[i / 2] >> i % 2 * 16)});
    }
    return piece;
  }
};
__device__ __forceinline__ uint4 LoadPiece(const void* at) {
  return __ldg(static_cast<const uint4*>(at));
}

__device__ __forceinline__ int64_t PaddedRows(const Parameters& p) {
  return int64_t{p.row_blocks} * p.row_block;
}

// ---- before

__device__ __forceinline__ void WriteZeros(const Parameters& p) {
  const int64_t heads = int64_t{p.batch} * p.heads,
                thread = int64_t{blockIdx.x} * kBeforeThreads + threadIdx.x,
                threads = int64_t{gridDim.x} * kBeforeThreads;
  float4* const sums = reinterpret_cast<float4*>(p.dquery_sum);
  const int64_t pieces = heads * PaddedRows(p) * (p.compiled_width / 4);
#pragma unroll 4
  for (int64_t i = thread; i < pieces; i += threads) sums[i] = make_float4(0, 0, 0, 0);
  if (thread < heads * p.row_blocks) p.turns[thread] = 0;
}

// One warp of each of the first CTAs, of which there are enough.
__device__ __forceinline__ void WriteHull(const Parameters& p) {
  const uint32_t row_blocks = p.row_blocks;
  if (blockIdx.x >= p.hull_batch * row_blocks) return;
  const RowBounds bounds = BoundsOf(p, blockIdx.x / row_blocks);
  const uint32_t first = blockIdx.x % row_blocks * p.row_block;
  const uint32_t end = min(first + p.row_block, static_cast<uint32_t>(p.rows));
  KeySpan some = {~0u, 0};
  bool idle = false;
#pragma unroll 1
  for (uint32_t row = first + threadIdx.x % 32; row < end; row += 32) {
    const KeySpan span = bounds.Of(row);
    if (span.Empty()) {
      idle = true;
    } else {
      some = some.HullWith(span);
    }
  }
  some = HullOfLanes(some);
  if (some.Empty()) some = {0, 0};
  idle = __any_sync(kAllLanes, idle);
  if (threadIdx.x % 32 == 0) {
    const int4 hull = {static_cast<int32_t>(some.begin), static_cast<int32_t>(some.end), idle, 0};
    reinterpret_cast<int4*>(p.hulls)[blockIdx.x] = hull;
  }
}

// The four threads of a row call it together, and get the same.
template <class Element>
__device__ __forceinline__ float RowDot(const Element* a, const Element* b, int32_t width) {
  constexpr int32_t kAtOnce = 4;  // pieces that are on their way at a time
  float sum = 0;
#pragma unroll 1
  for (int32_t first = threadIdx.x % 4 * kPiece; first < width; first += kAtOnce * kStep) {
    uint4 of_a[kAtOnce], of_b[kAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      const int32_t column = first + i * kStep;
      const uint4 zeros = {0, 0, 0, 0};
      of_a[i] = column < width ? LoadPiece(a + column) : zeros;
      of_b[i] = column < width ? LoadPiece(b + column) : zeros;
    }
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      const Piece x = Piece::Of<Element>(of_a[i]), y = Piece::Of<Element>(of_b[i]);
#pragma unroll
      for (int32_t c = 0; c < kPiece; ++c) sum = fmaf(x.x[c], y.x[c], sum);
    }
  }
  return LaneSum<4>(sum);
}

template <class Element>
__device__ __forceinline__ void Before(const Parameters& p) {
  struct Row {
    float lse_log2, delta;
  };
  __shared__ Row rows[kTileRows];

  const uint32_t heads = p.heads, heads_of_tile = HeadsOfTile(heads);
  const uint32_t positions_of_tile = kTileRows / heads_of_tile;
  const uint32_t padded_rows = p.row_blocks * p.row_block;
  const uint32_t head_tiles = (heads + heads_of_tile - 1) / heads_of_tile;
  const uint32_t position_tiles = padded_rows / positions_of_tile;
  const uint32_t first_head = blockIdx.x % head_tiles * heads_of_tile;
  const uint32_t first = blockIdx.x / head_tiles % position_tiles * positions_of_tile;
  const uint32_t batch = blockIdx.x / head_tiles / position_tiles;

  WriteZeros(p);
  {
    const uint32_t in_tile = threadIdx.x / 4;
    const uint32_t head = first_head + in_tile % heads_of_tile;
    const uint32_t position = first + in_tile / heads_of_tile;
    const bool is_row = head < heads && position < p.rows;
    const int64_t at = is_row ? (int64_t{batch} * p.rows + position) * heads + head : 0;
    const float lse = p.lse[at], rounding = p.lse_rounding[at];
    const float dlse = p.dlse != nullptr ? p.dlse[at] : 0;
    const bool sees = is_row && lse != -Infinity() && !BoundsOf(p, batch).Of(position).Empty();
    const float dot = RowDot(static_cast<const Element*>(p.dout_rows) + at * p.value_width,
                             static_cast<const Element*>(p.out_rows) + at * p.value_width,
                             is_row ? p.value_width : 0);
    // Infinity is kept for rows that see nothing: where logits are infinite, results are NaN.
    const float lse_log2 = fmaf(lse, kLog2E, rounding * kLog2E);
    const float told = lse_log2 == Infinity() ? lse_log2 - lse_log2 : lse_log2;
    if (threadIdx.x % 4 == 0) rows[in_tile] = sees ? Row{told, dot - dlse} : Row{Infinity(), 0};
  }
  if (threadIdx.x < 32) WriteHull(p);
  __syncthreads();

  // Positions of a head are neighbours in the results.
  if (threadIdx.x < kTileRows) {
    const uint32_t head = threadIdx.x / positions_of_tile;
    const uint32_t position = threadIdx.x % positions_of_tile;
    if (first_head + head < heads) {
      const Row row = rows[position * heads_of_tile + head];
      const int64_t at =
          (int64_t{batch} * heads + first_head + head) * padded_rows + first + position;
      p.lse_log2[at] = row.lse_log2;
      p.delta[at] = row.delta;
    }
  }
}

// ---- after

// What the four threads of a row of a block and of the one eight below load of dquery_sum together,
// kStep columns of each, and a piece of each of both rows that a thread gets in the end.
struct Sums {
  float4 loaded[4];

  __device__ __forceinline__ void Load(const Parameters& p,
                                       const float* block,
                                       int32_t row,
                                       int32_t first_column) {
    const int32_t lane = threadIdx.x % 4;
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
      // Two columns of each row, of piece i.
      const int32_t column = first_column + i * kPiece + lane * 2;
      const int32_t place = sm90::PlaceInDquerySum(p.compiled_width, row, column);
#else
      // Half a piece of a row.
      const int32_t column = first_column + lane * kPiece + i % 2 * 4;
      const int32_t place = sm100::PlaceInDquerySum(p.row_block, row + i / 2 * 8, column);
#endif
      loaded[i] = __ldg(reinterpret_cast<const float4*>(block + place));
    }
  }

  // All lanes of a warp call it together.
  __device__ __forceinline__ void Arrange(Piece (&pieces)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
    Swap<1>(loaded[0], loaded[1]);
    Swap<1>(loaded[2], loaded[3]);
    Swap<2>(loaded[0], loaded[2]);
    Swap<2>(loaded[1], loaded[3]);
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      pieces[0].x[2 * i] = loaded[i].x;
      pieces[0].x[2 * i + 1] = loaded[i].y;
      pieces[1].x[2 * i] = loaded[i].z;
      pieces[1].x[2 * i + 1] = loaded[i].w;
    }
#else
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      float* const half = pieces[i / 2].x + i % 2 * 4;
      half[0] = loaded[i].x;
      half[1] = loaded[i].y;
      half[2] = loaded[i].z;
      half[3] = loaded[i].w;
    }
#endif
  }

 private:
  // Threads `kApart` apart swap: who is the higher gives `low` for the other's `high`. In the end
  // thread i of four has the elements i of all.
  template <int32_t kApart>
  static __device__ __forceinline__ void Swap(float& low, float& high) {
    const bool is_high = threadIdx.x & kApart;
    const float received = __shfl_xor_sync(kAllLanes, is_high ? low : high, kApart);
    low = is_high ? received : low;
    high = is_high ? high : received;
  }
  template <int32_t kApart>
  static __device__ __forceinline__ void Swap(float4& low, float4& high) {
    Swap<kApart>(low.x, high.x);
    Swap<kApart>(low.y, high.y);
    Swap<kApart>(low.z, high.z);
    Swap<kApart>(low.w, high.w);
  }
};

template <class Element>
__device__ __forceinline__ void After(const Parameters& p) {
  const uint32_t heads = p.heads, head = blockIdx.x % heads;
  const uint32_t tiles = p.row_blocks * p.row_block / kTileRows;
  const uint32_t first = blockIdx.x / heads % tiles * kTileRows;
  const uint32_t batch = blockIdx.x / heads / tiles;
  // A warp has 16 rows, four threads the rows `row` and eight below.
  const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int64_t padded = (int64_t{batch} * heads + head) * PaddedRows(p);
  const float* const block =
      p.dquery_sum + (padded + first / p.row_block * p.row_block) * p.compiled_width;
  const float scale = ScaleOf(p, batch);

  bool is_row[2], sees[2];
  const Element* query[2];
  Element* dquery[2];
  float dot[2] = {0, 0};
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const uint32_t position = first + row + 8 * i;
    is_row[i] = position < p.rows;
    sees[i] = p.lse_log2[padded + position] != Infinity();
    query[i] =
        static_cast<const Element*>(p.query_rows) +
        ((int64_t{ElementOf(batch, p.query_batch)} * p.rows + position) * heads + head) * p.width;
    dquery[i] = static_cast<Element*>(p.dquery_rows) +
                ((int64_t{batch} * p.rows + position) * heads + head) * p.width;
  }
  constexpr int32_t kAtOnce = 2;  // steps whose loads are on their way at a time
#pragma unroll 1
  for (int32_t first_column = 0; first_column < p.width; first_column += kAtOnce * kStep) {
    Sums sums[kAtOnce];
    uint4 of_query[kAtOnce][2];
#pragma unroll
    for (int32_t step = 0; step < kAtOnce; ++step) {
      const int32_t of_step = first_column + step * kStep;
      const int32_t column = of_step + threadIdx.x % 4 * kPiece;
      if (of_step < p.width) sums[step].Load(p, block, first % p.row_block + row, of_step);
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        const uint4 zeros = {0, 0, 0, 0};
        of_query[step][i] = is_row[i] && column < p.width ? LoadPiece(query[i] + column) : zeros;
      }
    }
#pragma unroll
    for (int32_t step = 0; step < kAtOnce; ++step) {
      const int32_t column = first_column + step * kStep + threadIdx.x % 4 * kPiece;
      Piece pieces[2];
      sums[step].Arrange(pieces);
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        if (!is_row[i] || column >= p.width) continue;
        const Piece query_piece = Piece::Of<Element>(of_query[step][i]);
        uint32_t packed[kPiece / 2];
#pragma unroll
        for (int32_t c = 0; c < kPiece; c += 2) {
          const float x = pieces[i].x[c], y = pieces[i].x[c + 1];
          dot[i] = fmaf(query_piece.x[c], x, dot[i]);
          dot[i] = fmaf(query_piece.x[c + 1], y, dot[i]);
          packed[c / 2] = sees[i] ? Pack<Element>(scale * x, scale * y) : 0;
        }
        *reinterpret_cast<uint4*>(dquery[i] + column) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const float sum = LaneSum<4>(dot[i]);
    if (threadIdx.x % 4 == 0 && is_row[i]) {
      p.dscale[(int64_t{batch} * p.rows + first + row + 8 * i) * heads + head] = sees[i] ? sum : 0;
    }
  }
}

}  // namespace jax_fa4::backward_rows

#define JAX_FA4_ENTRIES(dtype)                                                         \
  extern "C" __global__ void __launch_bounds__(jax_fa4::backward_rows::kBeforeThreads) \
      before_##dtype(const __grid_constant__ jax_fa4::BackwardParameters p) {          \
    jax_fa4::backward_rows::Before<jax_fa4::ptx::dtype>(p);                            \
  }                                                                                    \
  extern "C" __global__ void __launch_bounds__(jax_fa4::backward_rows::kAfterThreads)  \
      after_##dtype(const __grid_constant__ jax_fa4::BackwardParameters p) {           \
    jax_fa4::backward_rows::After<jax_fa4::ptx::dtype>(p);                             \
  }

JAX_FA4_ENTRIES(float16)
JAX_FA4_ENTRIES(bfloat16)
