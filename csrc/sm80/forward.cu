// Plain attention, forward: float32 on the FMA units, for any GPU since sm_80 and any shape.
//
// A CTA has a tile of query rows of one head, and goes once through the keys that these rows see:
//
//   Q                 loaded once, converted to float32 as all tiles are
//   for each tile of keys, from the first to the last that some row sees:
//     K -> S = Q K^T  in registers; then scaled, capped, and hidden where a row does not see a key
//     P = e^(S - top) in registers, then in shared memory; top is the row's maximum so far, and
//                     total and O, which are sums of such weights, are rescaled when it rises
//     V -> O += P V   in the place of K
//   out = O / total, lse = top + log(total)
//
// A call with few rows has the same steps, but its loads overlap with them. No row of S is ever
// whole: a maximum that rises later only scales what was summed before.
//
// Source: Dao, "FlashAttention-2" (2023), section 3.1.
//
// Grid: row tiles, fastest, times heads times batch.

#include "csrc/common/lanes.h"
#include "csrc/common/online_softmax.h"
#include "csrc/common/row_bounds.h"
#include "csrc/common/softcap.h"
#include "csrc/sm80/config.h"
#include "csrc/sm80/problem.h"
#include "csrc/sm80/tile.h"

namespace jax_fa4::sm80 {

// With a tile of 16 rows: for calls that have no more, where latency is most of the time. What
// comes next of K and V is then on its way while what is there is worked on.
template <class Element, int32_t kWidth, int32_t kTileRows, int32_t kTileKeys>
__device__ __forceinline__ void Attend(const Parameters& p) {
  constexpr bool kFew = kTileRows == 16;
  constexpr int32_t kRows = kTileRows / 16, kKeys = kTileKeys / 16, kGroups = kWidth / 64;
  extern __shared__ float4 shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);
  float* const kv_tile = q_tile + kTileRows * Pitch(kWidth);
  float* const p_tile = kv_tile + kTileKeys * Pitch(kWidth);

  const Place place(kFew ? 1 : p.rows, kTileRows, p.heads);
  const Heads<Element> heads(p, place.batch, place.head);
  const float scale = ScaleOf(p, place.batch);
  const auto bounds = BoundsOf(p, place.batch).template OfTile<kTileRows>(place.first);
  KeySpan seen[kRows];
  OnlineSoftmax softmax[kRows];
  float4 out[kRows][kGroups] = {};
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) seen[i] = bounds.Of(ThreadY(), i);

  // Keys that no row sees may hold NaN, and would reach rows as 0 * NaN.
  const auto count_from = [&](uint32_t key) {
    return min(static_cast<uint32_t>(kTileKeys), bounds.some.end - min(key, bounds.some.end));
  };
  Fetched<kTileKeys, kWidth, Element> next;
  const auto fetch = [&](const Element* array, const Head& head, uint32_t key) {
    if constexpr (kFew) {
      const uint32_t count = count_from(key);
      next.Fetch(array, head, key, 0, [&](uint32_t row) { return row < count; });
    }
  };
  const auto load = [&](const Element* array, const Head& head, uint32_t key) {
    if constexpr (kFew) {
      next.template Put<Pitch(kWidth)>(kv_tile);
    } else {
      const uint32_t count = count_from(key);
      LoadTile<kTileKeys, kWidth>(
          kv_tile, array, head, key, [&](uint32_t row) { return row < count; });
    }
  };

  fetch(heads.key, heads.of_key, bounds.some.begin);
  // What rows that see nothing hold, even NaN, stays in their row, and is not stored.
  const auto exists = [&](uint32_t row) { return place.first + row < p.rows; };
  if constexpr (kFew) {
    Fetched<kTileRows, kWidth, Element> queries;
    queries.Fetch(heads.query, heads.of_query, place.first, 0, exists);
    queries.template Put<Pitch(kWidth)>(q_tile);
  } else {
    LoadTile<kTileRows, kWidth>(q_tile, heads.query, heads.of_query, place.first, exists);
  }
  // Of few rows not every warp has some: the others only load.
  const bool has_rows = !kFew || exists(threadIdx.x / 32 * 2);

#pragma unroll 1
  for (uint32_t key = bounds.some.begin; key < bounds.some.end; key += kTileKeys) {
    __syncthreads();  // V was read
    load(heads.key, heads.of_key, key);
    __syncthreads();
    fetch(heads.value, heads.of_value, key);
    if (has_rows) {
      float logits[kRows][kKeys];
      RowDots<kWidth>(logits, q_tile, kv_tile, p.width);
      ScaleAndCap(logits, scale, p.softcap, [](int32_t, int32_t, float) {});
      if (!bounds.all.Holds(KeySpan{key, key + kTileKeys})) {
        Fill(logits, -Infinity(), [&](int32_t i, int32_t j) {
          return !seen[i].Holds(key + ThreadX() + 16 * j);
        });
      }
#pragma unroll
      for (int32_t i = 0; i < kRows; ++i) {
        float highest = logits[i][0];
#pragma unroll
        for (int32_t j = 1; j < kKeys; ++j) highest = fmaxf(highest, logits[i][j]);
        const float decay = softmax[i].Raise(LaneMax<16>(highest));
#pragma unroll
        for (int32_t j = 0; j < kKeys; ++j) logits[i][j] = softmax[i].Weigh(logits[i][j]);
        ScaleRow(out[i], decay);
      }
      PutFactor(p_tile, logits);
    }

    __syncthreads();  // K was read
    load(heads.value, heads.of_value, key);
    __syncthreads();
    fetch(heads.key, heads.of_key, key + kTileKeys);
    if (has_rows)
      AddProduct<kTileKeys, kWidth>(out, p_tile, kv_tile, count_from(key), p.value_width);
  }
  if (!has_rows) return;

#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
    softmax[i].total = LaneSum<16>(softmax[i].total);  // each lane had the sum over its own keys
    const bool sees_some = !seen[i].Empty() && softmax[i].total != 0;
    ScaleRow(out[i], 1 / softmax[i].total);
    if (!sees_some) {
#pragma unroll
      for (int32_t g = 0; g < kGroups; ++g) out[i][g] = make_float4(0, 0, 0, 0);
    }
    const uint32_t row = place.first + ThreadY() + 16 * i;
    if (ThreadX() == 0 && row < p.rows) {
      const LogSumExp finished = sees_some ? softmax[i].Finish() : LogSumExp{-Infinity(), 0};
      p.lse[heads.of_row.At(row)] = finished.lse;
      p.lse_rounding[heads.of_row.At(row)] = finished.rounding;
    }
  }
  __syncwarp();  // Q was read
  PutSums<kWidth>(q_tile, out, 1);
  if (sizeof(Element) == sizeof(float) || p.out_is_float) {
    StoreTile<kTileRows, kWidth>(
        static_cast<float*>(p.out), heads.of_out, place.first, p.rows, q_tile);
  } else {
    StoreTile<kTileRows, kWidth>(
        static_cast<Element*>(p.out), heads.of_out, place.first, p.rows, q_tile);
  }
}

template <class Element, int32_t kWidth>
__device__ __forceinline__ void Forward(const Parameters& p) {
  constexpr Tile kTile = ForwardTile(kWidth);
  const bool in_fours = InFours(static_cast<const Element*>(p.query), p.width) &&
                        InFours(static_cast<const Element*>(p.key), p.width) &&
                        InFours(static_cast<const Element*>(p.value), p.value_width);
  if (p.rows > 16 || !in_fours) {
    Attend<Element, kWidth, kTile.rows, kTile.keys>(p);
  } else if (p.keys > 16) {
    Attend<Element, kWidth, 16, kTile.keys>(p);
  } else {
    Attend<Element, kWidth, 16, 16>(p);
  }
}

}  // namespace jax_fa4::sm80

using namespace jax_fa4::sm80;

#define FORWARD(name, Element, width)                                  \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)            \
      forward_##name##_##width(const __grid_constant__ Parameters p) { \
    Forward<Element, width>(p);                                        \
  }

FORWARD(float32, float, 64)
FORWARD(float32, float, 128)
FORWARD(float32, float, 256)
FORWARD(float16, float16, 64)
FORWARD(float16, float16, 128)
FORWARD(float16, float16, 256)
FORWARD(bfloat16, bfloat16, 64)
FORWARD(bfloat16, bfloat16, 128)
FORWARD(bfloat16, bfloat16, 256)
