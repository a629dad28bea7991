// Plain attention, backward: float32 on the FMA units, for any GPU since sm_80 and any shape.
//
// With S = scale * Q K^T (then capped, of slope s), P = e^(S - lse) and dP = dO V^T:
//
//   dS = P * (dP - delta) * s      delta = rowsum(dO * O) - dlse
//   dQ = scale * dS K      dK = scale * dS^T Q      dV = P^T dO      dscale = sum(dS * Q K^T)
//
// P is computed again from lse, so that nothing of size T x S was kept. Three kernels, one after
// the other:
//
//   backward_delta   a warp for each row: delta
//   backward_query   a CTA keeps a tile of rows, as the forward does, and goes through their keys:
//     Q, dO                          loaded once
//     for each step of keys, from the first to the last that some row sees:
//       V  -> dP = dO V^T            in registers
//       K  -> S = Q K^T, P, dS       K takes the place of V; dS goes through shared memory
//             dQ += dS K
//   backward_key     a CTA keeps a tile of keys, and goes through the rows that see some of it, of
//                    all query heads that use it; transposed, so that keys are the tile's rows:
//     K, V                           loaded once
//     for each step of rows that sees the tile, for each query head:
//       Q  -> S^T = K Q^T, P^T       P^T goes through shared memory
//       dO -> dV += P^T dO           dO takes the place of Q
//             dP^T = V dO^T, dS^T    dS^T goes through shared memory
//       Q  -> dK += dS^T Q           loaded again: there is no room to keep it
//
// Nothing is summed across CTAs, so that equal calls give equal bits. It costs seven matrix
// products where five would do.
//
// Source: Dao, "FlashAttention-2" (2023), section 3.2.
//
// Grids: rows in eights; row tiles, fastest, times heads times batch; key tiles times key heads
// times batch.

#include "csrc/common/lanes.h"
#include "csrc/common/online_softmax.h"
#include "csrc/common/row_bounds.h"
#include "csrc/sm80/config.h"
#include "csrc/sm80/problem.h"
#include "csrc/sm80/tile.h"

namespace jax_fa4::sm80 {

// What the forward left of a row. Positions from T on are like rows that see nothing.
__device__ __forceinline__ RowWeights LoadWeights(const Parameters& p,
                                                  const Head& of_row,
                                                  uint32_t position) {
  if (position >= p.rows) return RowWeights::Of({-Infinity(), 0});
  return RowWeights::Of({p.lse[of_row.At(position)], p.lse_rounding[of_row.At(position)]});
}
__device__ __forceinline__ float LoadDelta(const Parameters& p,
                                           const Head& of_row,
                                           uint32_t position) {
  return position < p.rows ? p.delta[of_row.At(position)] : 0;
}

// Loads a tile of an array (B, T, N, ...). What rows that see nothing hold, even NaN, must not
// matter: in sums over rows it would.
template <int32_t kRows, int32_t kWidth, class Element>
__device__ __forceinline__ void LoadRows(float* tile,
                                         const Parameters& p,
                                         const Element* array,
                                         const Head& head,
                                         const Head& of_row,
                                         uint32_t first) {
  LoadTile<kRows, kWidth>(tile, array, head, first, [&](uint32_t row) {
    return first + row < p.rows && p.lse[of_row.At(first + row)] != -Infinity();
  });
}

// dO, whose type is that of the output.
template <int32_t kRows, int32_t kWidth, class Element>
__device__ __forceinline__ void LoadDout(float* tile,
                                         const Parameters& p,
                                         const Heads<Element>& heads,
                                         uint32_t first) {
  if (sizeof(Element) == sizeof(float) || p.out_is_float) {
    LoadRows<kRows, kWidth>(
        tile, p, static_cast<const float*>(p.dout), heads.of_out, heads.of_row, first);
  } else {
    LoadRows<kRows, kWidth>(
        tile, p, static_cast<const Element*>(p.dout), heads.of_out, heads.of_row, first);
  }
}

template <class Element>
__device__ __forceinline__ float RowDot(const Element* a, const Element* b, int32_t width) {
  float sum = 0;
#pragma unroll 1
  for (int32_t i = threadIdx.x % 32; i < width; i += 32) {
    sum = fmaf(ptx::ToFloat(a[i]), ptx::ToFloat(b[i]), sum);
  }
  return LaneSum<32>(sum);
}

template <class Element>
__device__ __forceinline__ void BackwardDelta(const Parameters& p) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (row >= int64_t{p.batch} * p.rows * p.heads) return;
  float delta = 0;
  if (p.lse[row] != -Infinity()) {
    const int64_t at = row * p.value_width;
    if (sizeof(Element) == sizeof(float) || p.out_is_float) {
      delta = RowDot(static_cast<const float*>(p.dout) + at,
                     static_cast<const float*>(p.out) + at,
                     p.value_width);
    } else {
      delta = RowDot(static_cast<const Element*>(p.dout) + at,
                     static_cast<const Element*>(p.out) + at,
                     p.value_width);
    }
    if (p.dlse != nullptr) delta -= p.dlse[row];
  }
  if (threadIdx.x % 32 == 0) p.delta[row] = delta;
}

template <class Element, int32_t kWidth>
__device__ __forceinline__ void BackwardQuery(const Parameters& p) {
  constexpr int32_t kTile = BackwardTile(kWidth).rows, kStep = BackwardStep(kWidth);
  constexpr int32_t kRows = kTile / 16, kKeys = kStep / 16, kGroups = kWidth / 64;
  extern __shared__ float4 shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);
  float* const dout_tile = q_tile + kTile * Pitch(kWidth);
  float* const kv_tile = dout_tile + kTile * Pitch(kWidth);
  float* const ds_tile = kv_tile + kStep * Pitch(kWidth);

  const Place place(p.rows, kTile, p.heads);
  const Heads<Element> heads(p, place.batch, place.head);
  const float scale = ScaleOf(p, place.batch);
  const auto bounds = BoundsOf(p, place.batch).template OfTile<kTile>(place.first);
  KeySpan seen[kRows];
  RowWeights row_weights[kRows];
  float delta[kRows];
  float4 dquery[kRows][kGroups] = {};
#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
    seen[i] = bounds.Of(ThreadY(), i);
    row_weights[i] = LoadWeights(p, heads.of_row, place.first + ThreadY() + 16 * i);
    delta[i] = LoadDelta(p, heads.of_row, place.first + ThreadY() + 16 * i);
  }
  LoadRows<kTile, kWidth>(q_tile, p, heads.query, heads.of_query, heads.of_row, place.first);
  LoadDout<kTile, kWidth>(dout_tile, p, heads, place.first);

#pragma unroll 1
  for (uint32_t key = bounds.some.begin; key < bounds.some.end; key += kStep) {
    // Keys that no row sees may hold NaN, and would reach rows as 0 * NaN.
    const uint32_t count = min(static_cast<uint32_t>(kStep), bounds.some.end - key);
    const auto counts = [&](uint32_t step_row) { return step_row < count; };
    float logits[kRows][kKeys], dlogits[kRows][kKeys];

    __syncthreads();  // K was read
    LoadTile<kStep, kWidth>(kv_tile, heads.value, heads.of_value, key, counts);
    __syncthreads();
    RowDots<kWidth>(dlogits, dout_tile, kv_tile, p.value_width);
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
#pragma unroll
      for (int32_t j = 0; j < kKeys; ++j) dlogits[i][j] -= delta[i];
    }

    __syncthreads();  // V was read
    LoadTile<kStep, kWidth>(kv_tile, heads.key, heads.of_key, key, counts);
    __syncthreads();
    RowDots<kWidth>(logits, q_tile, kv_tile, p.width);
    ScaleAndCap(logits, scale, p.softcap, [&](int32_t i, int32_t j, float slope) {
      dlogits[i][j] *= slope;
    });
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
#pragma unroll
      for (int32_t j = 0; j < kKeys; ++j) dlogits[i][j] *= row_weights[i].Weigh(logits[i][j]);
    }
    if (!bounds.all.Holds(KeySpan{key, key + kStep})) {
      Fill(dlogits, 0, [&](int32_t i, int32_t j) {
        return !seen[i].Holds(key + ThreadX() + 16 * j);
      });
    }
    PutFactor(ds_tile, dlogits);
    __syncwarp();
    AddProduct<kStep, kWidth>(dquery, ds_tile, kv_tile, count, p.width);
  }

#pragma unroll
  for (int32_t i = 0; i < kRows; ++i) {
    float dscale = 0;
#pragma unroll
    for (int32_t g = 0; g < kGroups; ++g) {
      if (g > 0 && 64 * g >= p.width) break;
      const float4 q = *reinterpret_cast<const float4*>(
          q_tile + (ThreadY() + 16 * i) * Pitch(kWidth) + 4 * ThreadX() + 64 * g);
      dscale = fmaf(dquery[i][g].x, q.x, dscale);
      dscale = fmaf(dquery[i][g].y, q.y, dscale);
      dscale = fmaf(dquery[i][g].z, q.z, dscale);
      dscale = fmaf(dquery[i][g].w, q.w, dscale);
    }
    dscale = LaneSum<16>(dscale);
    const uint32_t position = place.first + ThreadY() + 16 * i;
    if (ThreadX() == 0 && position < p.rows) p.dscale[heads.of_row.At(position)] = dscale;
  }
  __syncwarp();  // Q was read
  PutSums<kWidth>(q_tile, dquery, scale);
  const Head result(place.batch, p.rows, p.heads, place.head, p.width);
  StoreTile<kTile, kWidth>(static_cast<Element*>(p.dquery), result, place.first, p.rows, q_tile);
}

template <class Element, int32_t kWidth>
__device__ __forceinline__ void BackwardKey(const Parameters& p) {
  constexpr int32_t kTile = BackwardTile(kWidth).keys, kStep = BackwardStep(kWidth);
  constexpr int32_t kKeys = kTile / 16, kRows = kStep / 16, kGroups = kWidth / 64;
  extern __shared__ float4 shared[];
  float* const k_tile = reinterpret_cast<float*>(shared);
  float* const v_tile = k_tile + kTile * Pitch(kWidth);
  float* const row_tile = v_tile + kTile * Pitch(kWidth);
  float* const p_tile = row_tile + kStep * Pitch(kWidth);

  const Place place(p.keys, kTile, p.kv_heads);
  const uint32_t group = p.heads / p.kv_heads, first_head = place.head * group;
  const KeySpan tile = {place.first, place.first + kTile};
  {
    // Keys that no row sees may hold NaN: it stays in their rows of S^T and dP^T, and is hidden.
    const Heads<Element> heads(p, place.batch, first_head);
    const auto exists = [&](uint32_t key) { return place.first + key < p.keys; };
    LoadTile<kTile, kWidth>(k_tile, heads.key, heads.of_key, place.first, exists);
    LoadTile<kTile, kWidth>(v_tile, heads.value, heads.of_value, place.first, exists);
  }
  float4 dkey[kKeys][kGroups] = {}, dvalue[kKeys][kGroups] = {};

#pragma unroll 1
  for (uint32_t first = 0; first < p.rows; first += kStep) {
    const auto bounds = BoundsOf(p, Opaque(place.batch)).template OfTile<kStep>(first);
    if (!bounds.some.Meets(tile)) continue;
    const uint32_t count = min(static_cast<uint32_t>(kStep), p.rows - first);
    const bool masked = !bounds.all.Holds(tile);
    const auto hide = [&](float (&x)[kKeys][kRows]) {
      KeySpan seen[kRows];
#pragma unroll
      for (int32_t j = 0; j < kRows; ++j) seen[j] = bounds.Of(ThreadX(), j);
      Fill(x, 0, [&](int32_t i, int32_t j) {
        return !seen[j].Holds(place.first + ThreadY() + 16 * i);
      });
    };

#pragma unroll 1
    for (uint32_t head = first_head; head < first_head + group; ++head) {
      const uint32_t batch = Opaque(place.batch);
      const Heads<Element> heads(p, batch, head);
      RowWeights row_weights[kRows];
#pragma unroll
      for (int32_t j = 0; j < kRows; ++j) {
        row_weights[j] = LoadWeights(p, heads.of_row, first + ThreadX() + 16 * j);
      }
      float weights[kKeys][kRows], dlogits[kKeys][kRows];

      __syncthreads();  // Q was read
      LoadRows<kStep, kWidth>(row_tile, p, heads.query, heads.of_query, heads.of_row, first);
      __syncthreads();
      RowDots<kWidth>(weights, k_tile, row_tile, p.width);
      Fill(dlogits, 1, [](int32_t, int32_t) { return true; });
      ScaleAndCap(weights, ScaleOf(p, batch), p.softcap, [&](int32_t i, int32_t j, float slope) {
        dlogits[i][j] = slope;
      });
#pragma unroll
      for (int32_t i = 0; i < kKeys; ++i) {
#pragma unroll
        for (int32_t j = 0; j < kRows; ++j) {
          weights[i][j] = row_weights[j].Weigh(weights[i][j]);
          dlogits[i][j] *= weights[i][j];
        }
      }
      if (masked) hide(weights);
      PutFactor(p_tile, weights);

      __syncthreads();  // Q was read
      LoadDout<kStep, kWidth>(row_tile, p, heads, first);
      __syncthreads();
      AddProduct<kStep, kWidth>(dvalue, p_tile, row_tile, count, p.value_width);
      RowDots<kWidth>(weights, v_tile, row_tile, p.value_width);  // now dP^T
#pragma unroll
      for (int32_t j = 0; j < kRows; ++j) {
        const float delta = LoadDelta(p, heads.of_row, first + ThreadX() + 16 * j);
#pragma unroll
        for (int32_t i = 0; i < kKeys; ++i) dlogits[i][j] *= weights[i][j] - delta;
      }
      if (masked) hide(dlogits);

      __syncthreads();  // dO was read
      PutFactor(p_tile, dlogits);
      LoadRows<kStep, kWidth>(row_tile, p, heads.query, heads.of_query, heads.of_row, first);
      __syncthreads();
      AddProduct<kStep, kWidth>(dkey, p_tile, row_tile, count, p.width);
    }
  }

  __syncwarp();  // K and V were read
  PutSums<kWidth>(k_tile, dkey, ScaleOf(p, Opaque(place.batch)));
  PutSums<kWidth>(v_tile, dvalue, 1);
  const uint32_t head = Opaque(first_head) / group;
  const Head of_dkey(place.batch, p.keys, p.kv_heads, head, p.width);
  const Head of_dvalue(place.batch, p.keys, p.kv_heads, head, p.value_width);
  StoreTile<kTile, kWidth>(static_cast<Element*>(p.dkey), of_dkey, place.first, p.keys, k_tile);
  StoreTile<kTile, kWidth>(static_cast<Element*>(p.dvalue), of_dvalue, place.first, p.keys, v_tile);
}

// CTAs on an SM that registers are to allow. Where a thread has 64 sums and 16 factors, which is at
// 128, backward_key does not do with the 128 registers of two CTAs.
constexpr int32_t kQueryCtas = 2;
template <int32_t kWidth>
constexpr int32_t kKeyCtas = kWidth == 128 ? 1 : 2;

}  // namespace jax_fa4::sm80

using namespace jax_fa4::sm80;

#define BACKWARD_DELTA(name, Element)                               \
  extern "C" __global__ void __launch_bounds__(kThreads)            \
      backward_delta_##name(const __grid_constant__ Parameters p) { \
    BackwardDelta<Element>(p);                                      \
  }
#define BACKWARD(name, Element, width)                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, kQueryCtas)          \
      backward_query_##name##_##width(const __grid_constant__ Parameters p) { \
    BackwardQuery<Element, width>(p);                                         \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, kKeyCtas<width>)     \
      backward_key_##name##_##width(const __grid_constant__ Parameters p) {   \
    BackwardKey<Element, width>(p);                                           \
  }

BACKWARD_DELTA(float32, float)
BACKWARD_DELTA(float16, float16)
BACKWARD_DELTA(bfloat16, bfloat16)
BACKWARD(float32, float, 64)
BACKWARD(float32, float, 128)
BACKWARD(float32, float, 256)
BACKWARD(float16, float16, 64)
BACKWARD(float16, float16, 128)
BACKWARD(float16, float16, 256)
BACKWARD(bfloat16, bfloat16, 64)
BACKWARD(bfloat16, bfloat16, 128)
BACKWARD(bfloat16, bfloat16, 256)
