// FlashAttention-3, backward: the gradients of attention for Hopper.
//
// A CTA has a block of keys of one key/value head, and goes through the blocks of rows that see
// some of them, for each query head that shares them. One warp loads; two warpgroups compute, each
// for 64 keys; a warp for each of these adds its part of dQ to a sum in global memory, which the
// parts of other CTAs are added to as well:
//
//   load        K Q | V dO |  Q dO  |  Q dO
//   products      S   dP dV   dQ dK   S ...     S = K Q^T, dP = V dO^T (both transposed),
//   weights           P  dS                     dV += P dO, dK += dS Q, dQ = dS^T K
//   sums                         dQ
//
// P = 2^(S - lse) and dS = P (dP - delta) are in registers as the tensor cores want them of the
// first factor of dV and dK, since keys are their rows. Only dS goes through shared memory: dQ sums
// over the keys of both warpgroups. P is computed beside the product dP, and dS beside dV.
//
// Source: Shah et al., "FlashAttention-3" (2024).

#include "csrc/common/lanes.h"
#include "csrc/common/operands.h"
#include "csrc/common/shared_memory.h"
#include "csrc/common/tile_schedule.h"
#include "csrc/ptx/accumulate.h"
#include "csrc/ptx/bulk.h"
#include "csrc/ptx/copy.h"
#include "csrc/ptx/stmatrix.h"
#include "csrc/ptx/turns.h"
#include "csrc/ptx/warp.h"
#include "csrc/ptx/wgmma.h"
#include "csrc/sm90/backward_config.h"
#include "csrc/sm90/backward_logits.h"
#include "csrc/sm90/backward_memory.h"
#include "csrc/sm90/backward_products.h"
#include "csrc/sm90/backward_variant.h"

namespace jax_fa4::sm90 {

// A number that all lanes have, in such a way that the assembler knows that they do.
__device__ __forceinline__ uint32_t SameInAllLanes(uint32_t x) {
  return __reduce_or_sync(kAllLanes, x);
}

template <class Variant>
struct Backward {
  static constexpr BackwardShape kShape = Variant::kShape;
  static constexpr BackwardKind kKind = Variant::kKind;
  static constexpr bool kHasBounds = kKind != BackwardKind::kFull;
  static constexpr int32_t kRows = Variant::kRows, kKeys = Variant::kKeys;
  static constexpr int32_t kWidth = Variant::kWidth, kValueWidth = Variant::kValueWidth;
  static constexpr int32_t kStages = Variant::kStages;
  using Element = typename Variant::Element;
  using Memory = BackwardMemory<Variant>;
  using Products = BackwardProducts<Variant>;
  using Place = RingPlace<kStages>;
  using Note = BackwardNote;

  const BackwardParameters& p;
  Memory memory;
  typename Memory::Control& control;
  uint32_t batch, kv_head;
  uint32_t first_key;

  __device__ __forceinline__ Note& NoteOf(uint32_t count) const {
    return control.notes[count % Memory::Control::kNotes];
  }

  // ---- Load

  // Loads a tile, and numbers of its rows.
  template <int32_t kTileRows, int32_t kColumns>
  static __device__ __forceinline__ void LoadWithNumbers(unsigned char* tile,
                                                         const TensorMap& map,
                                                         int32_t head,
                                                         int32_t position,
                                                         int32_t element,
                                                         float* numbers,
                                                         const float* from,
                                                         Barrier& full) {
    constexpr uint32_t kNumberBytes = kTileRows * sizeof(float);
    ptx::mbarrier_arrive_expect_tx(full.Get(), TileBytes(kTileRows, kColumns) + kNumberBytes);
#pragma unroll
    for (int32_t panel = 0; panel < Panels(kColumns); ++panel) {
      ptx::cp_async_bulk_tensor_4d_load(tile + panel * PanelBytes(kTileRows),
                                        &map,
                                        64 * panel,
                                        head,
                                        position,
                                        element,
                                        full.Get());
    }
    ptx::cp_async_bulk_load(numbers, from, kNumberBytes, full.Get());
  }

  // Clears what rows of a tile hold that see nothing: lane i knows of rows i + 32 j whether they
  // do.
  template <int32_t kColumns>
  static __device__ __forceinline__ void ClearIdle(unsigned char* tile,
                                                   const KeySpan (&spans)[kRows / 32]) {
#pragma unroll
    for (int32_t i = 0; i < kRows / 32; ++i) {
#pragma unroll 1
      for (uint32_t idle = __ballot_sync(kAllLanes, spans[i].Empty()); idle != 0;
           idle &= idle - 1) {
        const uint32_t row = 32 * i + __ffs(idle) - 1;
        ClearRows<kRows, kColumns>(tile, row, row + 1);
      }
    }
    ptx::fence_proxy_async();
    __syncwarp();
  }

  // What the load warp waits for itself, to clear some of it.
  struct Arrivals {
    Barrier& barrier;
    uint32_t parity;

    __device__ __forceinline__ void Wait() {
      barrier.Wait(parity);
      parity ^= 1;
      __syncwarp();
    }
  };

  template <int32_t kColumns>
  __device__ __forceinline__ void LoadKeys(unsigned char* tile,
                                           const TensorMap& map,
                                           uint32_t length,
                                           KeySpan block,
                                           KeySpan hull,
                                           Arrivals& arrivals,
                                           bool leads,
                                           Barrier& full) const {
    const bool clears = kHasBounds && HasUnseen(block, hull);
    if (leads) {
      LoadTile<kKeys, kColumns>(tile,
                                map,
                                kv_head,
                                first_key,
                                ElementOf(batch, length),
                                clears ? arrivals.barrier : full);
    }
    if (clears) {
      arrivals.Wait();
      ClearUnseen<kKeys, kColumns>(tile, block, hull);
      if (leads) full.Arrive();
    }
  }

  template <int32_t kColumns>
  static __device__ __forceinline__ void LoadRows(unsigned char* tile,
                                                  const TensorMap& map,
                                                  int32_t head,
                                                  int32_t position,
                                                  int32_t element,
                                                  float* numbers,
                                                  const float* from,
                                                  const KeySpan (&spans)[kRows / 32],
                                                  bool idle,
                                                  Arrivals& arrivals,
                                                  bool leads,
                                                  Barrier& full) {
    if (leads) {
      LoadWithNumbers<kRows, kColumns>(
          tile, map, head, position, element, numbers, from, idle ? arrivals.barrier : full);
    }
    if (idle) {
      arrivals.Wait();
      ClearIdle<kColumns>(tile, spans);
      if (leads) full.Arrive();
    }
  }

  __device__ __forceinline__ void Load() const {
    const bool leads = ptx::elect_sync();
    const uint32_t lane = threadIdx.x % 32, keys = p.keys;
    const KeySpan block = {first_key, min(first_key + kKeys, keys)};
    const RowBlockHull* const hulls =
        kHasBounds ? p.hulls + int64_t{ElementOf(batch, p.hull_batch)} * p.row_blocks : nullptr;
    const RowBounds bounds = BoundsOf(p, batch);
    Arrivals arrivals = {control.arrived, 0};

    // Keys outside of the hull of what the batch element's rows see may be NaN.
    KeySpan hull = {0, keys};
    if (kHasBounds) {
      hull = {~0u, 0};
#pragma unroll 4
      for (uint32_t i = lane; i < static_cast<uint32_t>(p.row_blocks); i += 32) {
        const RowBlockHull one = hulls[i];
        if (one.begin < one.end) hull = hull.HullWith({uint32_t(one.begin), uint32_t(one.end)});
      }
      hull = HullOfLanes(hull);
      if (hull.Empty() || !hull.Meets(block)) hull = {block.end, block.end};
    }
    LoadKeys<kWidth>(
        memory.Key(), p.key, p.key_batch, block, hull, arrivals, leads, control.key_full);
    LoadKeys<kValueWidth>(
        memory.Value(), p.value, p.value_batch, block, hull, arrivals, leads, control.value_full);

    Place place;
    uint32_t count = 0;
    const auto load_rows = [&](uint32_t head, uint32_t row_block, uint32_t first_seen, bool idle) {
      typename Memory::Control::Stage& stage = control.stage[place.stage];
      const uint32_t first_row = row_block * kRows;
      uint32_t kind = block.end < first_key + kKeys ? Note::kMasked : Note::kAllSee;
      KeySpan spans[kRows / 32];
      if (kHasBounds) {
        KeySpan all = {0, ~0u};
#pragma unroll
        for (int32_t i = 0; i < kRows / 32; ++i) {
          spans[i] = bounds.Of(first_row + lane + 32 * i);
          if (!spans[i].Empty()) all = all.CommonWith(spans[i]);
        }
        if (!CommonToLanes(all).Holds(KeySpan{first_key, first_key + kKeys})) kind = Note::kMasked;
      }

      stage.query_empty.Wait(place.parity ^ 1);
      __syncwarp();  // else a lane may be left behind and miss a phase
      if (leads) NoteOf(count) = {kind, head, row_block, (first_key - first_seen) / kKeys};
      if (kHasBounds && kind == Note::kMasked) {
#pragma unroll
        for (int32_t i = 0; i < kRows / 32; ++i) {
          const KeySpan span = spans[i];
          memory.Spans(place.stage)[lane + 32 * i] =
              make_uint2(span.begin, span.Empty() ? 0 : span.end - span.begin);
        }
      }
      __syncwarp();
      const int64_t row = (int64_t{batch} * p.heads + head) * p.row_blocks * kRows + first_row;
      LoadRows<kWidth>(memory.Query(place.stage),
                       p.query,
                       head,
                       first_row,
                       ElementOf(batch, p.query_batch),
                       memory.Lse(place.stage),
                       p.lse_log2 + row,
                       spans,
                       kHasBounds && idle,
                       arrivals,
                       leads,
                       stage.query_full);
      stage.dout_empty.Wait(place.parity ^ 1);
      __syncwarp();
      LoadRows<kValueWidth>(memory.Dout(place.stage),
                            p.dout,
                            head,
                            first_row,
                            batch,
                            memory.Delta(place.stage),
                            p.delta + row,
                            spans,
                            kHasBounds && idle,
                            arrivals,
                            leads,
                            stage.dout_full);
      place.Advance();
      ++count;
    };

    const uint32_t group = static_cast<uint32_t>(p.heads) / static_cast<uint32_t>(p.kv_heads);
    const uint32_t row_blocks = p.row_blocks;
#pragma unroll 1
    for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
#pragma unroll 1
      for (uint32_t base = 0; base < row_blocks; base += 32) {
        RowBlockHull one = {0, static_cast<int32_t>(keys), 0, 0};
        uint32_t visited = ~0u;
        if (row_blocks - base < 32) visited >>= 32 - (row_blocks - base);
        if (kHasBounds) {
          one.end = 0;
          if (base + lane < row_blocks) one = hulls[base + lane];
          visited = __ballot_sync(
              kAllLanes, block.Meets(KeySpan{uint32_t(one.begin), uint32_t(one.end)}));
        }
#pragma unroll 1
        for (; visited != 0; visited &= visited - 1) {
          const uint32_t i = __ffs(visited) - 1;
          const uint32_t begin = kHasBounds ? __shfl_sync(kAllLanes, one.begin, i) : 0;
          load_rows(head,
                    base + i,
                    begin / kKeys * kKeys,
                    kHasBounds && __shfl_sync(kAllLanes, one.idle, i) != 0);
        }
      }
    }
    typename Memory::Control::Stage& stage = control.stage[place.stage];
    stage.query_empty.Wait(place.parity ^ 1);
    __syncwarp();
    if (leads) {
      NoteOf(count).kind = Note::kEnd;
      stage.query_full.Arrive();
    }
  }

  // ---- dQ

  __device__ __forceinline__ int64_t SumOffset(const Note& note) const {
    return ((int64_t{batch} * p.heads + note.head) * p.row_blocks + note.row_block) *
           (kRows * kWidth);
  }
  // Of the pieces that a consumer has of dQ: where it begins in the order of the sums. See
  // csrc/common/dquery_sum.h.
  static __device__ __forceinline__ uint32_t PlaceOfColumn(uint32_t column) { return column * 64; }
  static __device__ __forceinline__ uint32_t FirstPlace(uint32_t consumer) {
    return Variant::kSharesRows ? consumer * 64 * kWidth : PlaceOfColumn(consumer * 64);
  }
  static __device__ __forceinline__ uint32_t RestPlace(uint32_t consumer) {
    return PlaceOfColumn(Variant::kConsumers * 64 + consumer * Variant::kRestColumns);
  }

  // Whose turn it is to add to a block's dQ: the consumers' parts are counted, each for itself.
  __device__ __forceinline__ uint32_t* TurnsOf(const Note& note) const {
    return p.turns + (int64_t{batch} * p.heads + note.head) * p.row_blocks + note.row_block;
  }
  static __device__ __forceinline__ void WaitForTurn(const uint32_t* turns, uint32_t turn) {
    while (ptx::ld_acquire_gpu_global(turns) < turn * Variant::kConsumers) {
    }
  }

  // A warp adds a consumer's parts.
  __device__ __forceinline__ void Add(uint32_t consumer) const {
    const bool leads = ptx::elect_sync();
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      ptx::bar_arrive(SumPlace::Empty(consumer), SumPlace::kThreads);
      ptx::bar_sync(SumPlace::Full(consumer), SumPlace::kThreads);
      const Note& note = NoteOf(count);
      if (note.kind == Note::kEnd) break;
      if (leads) {
        float* const sum = p.dquery_sum + SumOffset(note);
        uint32_t* const turns = TurnsOf(note);
        if (p.deterministic) {
          WaitForTurn(turns, note.turn);
          ptx::fence_proxy_async_all();
        }
        constexpr uint32_t kBytes = 64 * 64 * 4;
        ptx::cp_reduce_async_bulk_add_f32(
            sum + FirstPlace(consumer),
            memory.Sum(consumer),
            consumer == 1 ? 64 * 4 * Variant::kFewerColumns : kBytes);
        if (Variant::kRestColumns > 0) {
          ptx::cp_reduce_async_bulk_add_f32(sum + RestPlace(consumer),
                                            memory.Sum(consumer) + kBytes,
                                            64 * 4 * Variant::kRestColumns);
        }
        ptx::cp_async_bulk_commit_group();
        if (p.deterministic) {
          ptx::cp_async_bulk_wait_group_0();
          ptx::fence_proxy_async_all();
          ptx::red_release_gpu_global_add(turns, 1);
        } else {
          ptx::cp_async_bulk_wait_group_read<0>();
        }
      }
      __syncwarp();
    }
  }

  // ---- Products and weights

  static __device__ __forceinline__ void Release(Barrier& empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty.Arrive();
  }

  __device__ __forceinline__ void Consume(uint32_t consumer) const {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const Products products(consumer,
                            memory.Key(),
                            memory.Value(),
                            memory.Query(0),
                            memory.Dout(0),
                            memory.Weights(0));
    const float of_logits = ScaleOf(p, batch);
    const BackwardScale scale(of_logits, kKind == BackwardKind::kSoftcap ? p.softcap : 0);
    // A thread has two keys, 8 apart, and of each 8 rows two neighbours.
    const uint32_t key = consumer * Variant::kGroupKeys + warp * 16 + lane / 4;
    const uint32_t row = lane % 4 * 2;
    // Where the warp stores a matrix of 16 keys by 16 rows of dS, the rows from 0 on.
    const uint32_t weights_place = SharedAddress(memory.Weights(0)) +
                                   consumer * PanelBytes(kRows) +
                                   (lane / 16 * 8 + lane % 8) * 128 +
                                   PlaceOfPiece(lane, warp * 2 + lane / 8 % 2) * 16;

    typename Products::KeySum dkey;
    typename Products::ValueSum dvalue;
#pragma unroll
    for (float& x : dkey) x = 0;
#pragma unroll
    for (float& x : dvalue) x = 0;

    Place place;
    RingPlace<kShape.weight_stages> weight_place;
    control.key_full.Wait(0);
    control.value_full.Wait(0);
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      const uint32_t stage = SameInAllLanes(place.stage);
      const uint32_t weight_stage =
          kShape.weight_stages == 1 ? 0 : SameInAllLanes(weight_place.stage);
      typename Memory::Control::Stage& barriers = control.stage[stage];
      barriers.query_full.Wait(place.parity);
      const Note& note = NoteOf(count);
      const uint32_t kind = SameInAllLanes(note.kind);
      if (kind == Note::kEnd) break;

      typename Products::Weights p_t, ds_t;
#pragma unroll
      for (int32_t part = 0; part < Variant::kParts; ++part) {
        typename Products::Logits s, dp;
        constexpr int32_t kPartRows = Variant::kPartRows;
        const auto numbers = [&](const float* of_rows, int32_t i) {
          return *reinterpret_cast<const float2*>(of_rows + part * kPartRows + i * 8 + row);
        };
        ptx::wgmma_fence();
        products.KeyQuery(s, stage, part);
        if (part == 0) barriers.dout_full.Wait(place.parity);
        ptx::wgmma_fence();
        products.ValueDout(dp, stage, part);
        ptx::wgmma_wait_group<1>();
        ptx::Pin(s);
        Weigh(s, scale, kind == Note::kMasked, first_key + key, p.keys, [&](int32_t i) {
          return numbers(memory.Lse(stage), i);
        }, [&](int32_t i) {
          return *reinterpret_cast<const uint4*>(memory.Spans(stage) + part * kPartRows + i * 8 +
                                                 row);
        }, p_t[part]);
        // The assembler would compute most of the weights only after the wait for the product that
        // they are computed beside, but for the branches of a wait.
        if (part == 0) control.weights_empty[weight_stage].Wait(weight_place.parity ^ 1);
        ptx::wgmma_fence();
        products.WeightDout(dvalue, p_t, stage, part);
        ptx::wgmma_wait_group<1>();
        ptx::Pin(dp);
#pragma unroll
        for (int32_t i = 0; i < kPartRows / 8; ++i) {
          const float2 delta = numbers(memory.Delta(stage), i);
          float* const x = s + 4 * i;
          const float* const y = dp + 4 * i;
          ds_t[part][2 * i] = Pack<Element>(x[0] * (y[0] - delta.x), x[1] * (y[1] - delta.y));
          ds_t[part][2 * i + 1] = Pack<Element>(x[2] * (y[2] - delta.x), x[3] * (y[3] - delta.y));
        }
#pragma unroll
        for (int32_t i = 0; i < kPartRows / 16; ++i) {
          ptx::stmatrix_x4<true>(weights_place + weight_stage * TileBytes(kRows, kKeys) +
                                     (part * kPartRows + i * 16) * 128,
                                 ds_t[part] + 4 * i);
        }
      }
      ptx::fence_proxy_async();
      SyncConsumers();

      float sum[32], rest[Variant::kRestColumns > 0 ? Variant::kRestColumns / 2 : 1];
      ptx::wgmma_fence();
      if (Variant::kIsUneven && consumer == 1) {
        auto& fewer = reinterpret_cast<float(&)[Variant::kFewerColumns / 2]>(sum);
        products.WeightKey(fewer, weight_stage, 64);
      } else {
        products.WeightKey(sum, weight_stage, Variant::kSharesRows ? 0 : consumer * 64);
      }
      if constexpr (Variant::kRestColumns > 0) {
        products.WeightKey(rest, weight_stage, 128 + consumer * Variant::kRestColumns);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      ptx::Pin(dvalue);
      Release(barriers.dout_empty);
      products.WeightQuery(dkey, ds_t, stage);
      ptx::wgmma_wait_group<1>();
      ptx::Pin(sum);
      ptx::Pin(rest);
      Release(control.weights_empty[weight_stage]);
      weight_place.Advance();
      StoreSum(sum, rest, note, consumer);
      ptx::wgmma_wait_group<0>();
      ptx::Pin(dkey);
      Release(barriers.query_empty);
      place.Advance();
    }
    if (kBackwardAddsInBulk) {
      ptx::bar_sync(SumPlace::Empty(consumer), SumPlace::kThreads);
      ptx::bar_arrive(SumPlace::Full(consumer), SumPlace::kThreads);
    }
#pragma unroll
    for (float& x : dkey) x *= of_logits;
    Store(dkey, dvalue, consumer);
  }

  // Turns products into weights, and packs these. What is left in `s` are the weights times the
  // slope of the cap.
  template <class LseOf, class SpansOf>
  static __device__ __forceinline__ void Weigh(typename Products::Logits& s,
                                               const BackwardScale& scale,
                                               bool masked,
                                               uint32_t key,
                                               uint32_t keys,
                                               LseOf lse_of,
                                               SpansOf spans_of,
                                               uint32_t (&packed)[Variant::kPartRows / 4]) {
    typename Products::Logits slope;
#pragma unroll
    for (int32_t i = 0; i < Variant::kPartRows / 8; ++i) {
      const float2 lse = lse_of(i);
#pragma unroll
      for (int32_t j = 4 * i; j < 4 * i + 4; ++j) {
        if (kKind == BackwardKind::kSoftcap) {
          const CappedWithSlope capped = CapWithSlope(s[j] * scale.into_cap);
          s[j] = capped.capped;
          slope[j] = capped.slope;
        }
        s[j] = ptx::ex2_approx_ftz_f32(
            fmaf(s[j], scale.scale_log2, j % 2 == 0 ? -lse.x : -lse.y));
      }
    }
    if (masked) {
#pragma unroll
      for (int32_t i = 0; i < Variant::kPartRows / 8; ++i) {
        uint4 seen = make_uint4(0, keys, 0, keys);
        if (kHasBounds) seen = spans_of(i);
        const auto hide = [&](float& x, uint32_t key, uint32_t first, uint32_t number) {
          if (key - first >= number) x = 0;
        };
        hide(s[4 * i], key, seen.x, seen.y);
        hide(s[4 * i + 1], key, seen.z, seen.w);
        hide(s[4 * i + 2], key + 8, seen.x, seen.y);
        hide(s[4 * i + 3], key + 8, seen.z, seen.w);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < Variant::kPartRows / 4; ++i) {
      packed[i] = Pack<Element>(s[2 * i], s[2 * i + 1]);
    }
    if (kKind == BackwardKind::kSoftcap) {
#pragma unroll
      for (int32_t i = 0; i < Variant::kPartRows / 2; ++i) s[i] *= slope[i];
    }
  }

  // Calls store(place of the columns in dquery_sum, in shared memory, which eight of these, four
  // numbers of them).
  template <class Store>
  static __device__ __forceinline__ void EachPiece(const float (&sum)[32],
                                                   const float* rest,
                                                   uint32_t consumer,
                                                   Store store) {
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) {
      if (i < Variant::kFewerColumns / 8 || consumer == 0) {
        store(FirstPlace(consumer), 0, i, sum + 4 * i);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < Variant::kRestColumns / 8; ++i) {
      store(RestPlace(consumer), 64 * 64, i, rest + 4 * i);
    }
  }

  __device__ __forceinline__ void StoreSum(const float (&sum)[32],
                                           const float* rest,
                                           const Note& note,
                                           uint32_t consumer) const {
    const uint32_t thread = threadIdx.x % kGroupThreads;
    if (kBackwardAddsInBulk) {
      auto* const place = reinterpret_cast<float4*>(memory.Sum(consumer)) + thread;
      ptx::bar_sync(SumPlace::Empty(consumer), SumPlace::kThreads);
      EachPiece(sum, rest, consumer, [&](uint32_t, int32_t begin, int32_t i, const float* x) {
        place[begin / 4 + i * kGroupThreads] = make_float4(x[0], x[1], x[2], x[3]);
      });
      ptx::fence_proxy_async();
      ptx::bar_arrive(SumPlace::Full(consumer), SumPlace::kThreads);
    } else {
      float* const sums = p.dquery_sum + SumOffset(note) + thread * 4;
      uint32_t* const turns = TurnsOf(note);
      if (p.deterministic) {
        if (thread == 0) WaitForTurn(turns, note.turn);
        SyncConsumer(consumer);
      }
      EachPiece(sum, rest, consumer, [&](uint32_t begin, int32_t, int32_t i, const float* x) {
        ptx::red_global_add_v4_f32(sums + begin + i * kGroupThreads * 4, x);
      });
      if (p.deterministic) {
        SyncConsumer(consumer);
        if (thread == 0) ptx::red_release_gpu_global_add(turns, 1);
      }
    }
  }

  // ---- dK and dV

  // Of the tile of a whole block of keys.
  template <int32_t kCount>
  static __device__ __forceinline__ void Stage(unsigned char* tile,
                                               const float (&x)[kCount],
                                               uint32_t consumer) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row =
        consumer * Variant::kGroupKeys + threadIdx.x / 32 % 4 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int32_t i = 0; i < kCount / 8; ++i) {
      uint32_t packed[4];
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        packed[j] = Pack<Element>(x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
      }
      ptx::stmatrix_x4<false>(SharedAddress(tile) + i / 4 * PanelBytes(kKeys) + row * 128 +
                                  PlaceOfPiece(row, i % 4 * 2 + lane / 16) * 16,
                              packed);
    }
  }
  template <int32_t kColumns>
  __device__ __forceinline__ void StoreTile(const TensorMap& map, const unsigned char* tile) const {
#pragma unroll
    for (int32_t panel = 0; panel < Panels(kColumns); ++panel) {
      ptx::cp_async_bulk_tensor_4d_store(
          &map, 64 * panel, kv_head, first_key, batch, tile + panel * PanelBytes(kKeys));
    }
  }

  __device__ __forceinline__ void Store(const typename Products::KeySum& dkey,
                                        const typename Products::ValueSum& dvalue,
                                        uint32_t consumer) const {
    // They take the places of K and V, which nobody reads any more.
    SyncConsumers();
    Stage(memory.Key(), dkey, consumer);
    Stage(memory.Value(), dvalue, consumer);
    ptx::fence_proxy_async();
    SyncConsumers();
    if (consumer == 0 && threadIdx.x % kGroupThreads == 0) {
      StoreTile<kWidth>(p.dkey, memory.Key());
      StoreTile<kValueWidth>(p.dvalue, memory.Value());
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();
    }
  }

  // ---- All roles

  static __device__ __forceinline__ void Run(const BackwardParameters& p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    auto& control = *reinterpret_cast<typename Memory::Control*>(shared);
    const TileSchedule schedule = {static_cast<uint32_t>(p.key_blocks),
                                   static_cast<uint32_t>(p.head_tasks),
                                   static_cast<uint32_t>(p.section),
                                   false};
    const TileSchedule::Task task = schedule.At(blockIdx.x);
    const uint32_t kv_heads = p.kv_heads;
    const Backward self = {
        p, {shared}, control, task.head / kv_heads, task.head % kv_heads, task.row * kKeys};
    const uint32_t group = Uniform(threadIdx.x / kGroupThreads);
    if (threadIdx.x == 0) control.Init();
    __syncthreads();
    if (group == Variant::kConsumers) {
      ptx::setmaxnreg_dec<Variant::kProducerRegisters>();
      const uint32_t warp = Uniform(threadIdx.x / 32) % 4;
      if (warp == 0) {
        self.Load();
      } else if (kBackwardAddsInBulk && warp <= Variant::kConsumers) {
        self.Add(warp - 1);
      }
    } else {
      ptx::setmaxnreg_inc<Variant::kConsumerRegisters>();
      self.Consume(group);
    }
  }
};

}  // namespace jax_fa4::sm90

using namespace jax_fa4;

#define BACKWARD(Element, shape, width_name, kind, Kind)                                         \
  extern "C" __global__ void                                                                     \
      __launch_bounds__(sm90::BackwardThreads(sm90::kBackwardShapes[shape]), 1)                  \
          backward_##Element##_##width_name##_##kind(const __grid_constant__ BackwardParameters p) { \
    sm90::Backward<sm90::BackwardVariant<ptx::Element, shape, BackwardKind::Kind>>::Run(p);      \
  }
#define BACKWARD_KINDS(Element, shape, width_name)       \
  BACKWARD(Element, shape, width_name, full, kFull)     \
  BACKWARD(Element, shape, width_name, bounds, kBounds) \
  BACKWARD(Element, shape, width_name, softcap, kSoftcap)
#define BACKWARD_WIDTHS(Element)  \
  BACKWARD_KINDS(Element, 0, 64)  \
  BACKWARD_KINDS(Element, 1, 96)  \
  BACKWARD_KINDS(Element, 2, 128) \
  BACKWARD_KINDS(Element, 3, 192_128)

BACKWARD_WIDTHS(float16)
BACKWARD_WIDTHS(bfloat16)
