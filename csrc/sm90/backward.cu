// FlashAttention-3, backward: the gradients of attention for Hopper.
//
// A CTA has a block of keys of one key/value head, and goes through the blocks of rows that see
// some of them, for each query head that shares them. One warp finds these blocks, one loads them;
// two warpgroups compute, each for 64 keys; a warp for each of these adds its part of dQ to a sum
// in global memory, to which other CTAs add theirs:
//
//   load       K Q V dO |       Q dO      |       Q dO      |
//   products   S     dP    dV  dK  dQ  S  dP    dV  dK  dQ  S
//   weights             P   dS               P   dS
//   sums                                dQ                dQ
//
//   S = K Q^T, dP = V dO^T (both transposed), P = 2^(S - lse), dS = P (dP - delta)
//   dV += P dO, dK += dS Q, dQ = dS^T K
//
// P and dS are in registers as the tensor cores want them of the first factor of dV and dK, since
// keys are their rows. Only dS goes through shared memory: dQ sums over the keys of both
// warpgroups. The products of a warpgroup never run dry: P is computed beside dP, dS beside dV, and
// dQ leaves beside S of the next block.
//
// The widest heads leave no registers for dK and dV of 64 keys in one warpgroup. There a CTA has 64
// keys; one warpgroup computes P and dV, the other dS and dK, and each half of dQ, which it adds to
// the sum itself.
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
#include "csrc/ptx/thread.h"
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
  static constexpr MaskKind kKind = Variant::kKind;
  static constexpr bool kHasBounds = kKind != MaskKind::kFull;
  static constexpr int32_t kRows = Variant::kRows, kKeys = Variant::kKeys;
  static constexpr int32_t kWidth = Variant::kWidth, kValueWidth = Variant::kValueWidth;
  static constexpr int32_t kStages = Variant::kStages;
  using Element = typename Variant::Element;
  using Memory = BackwardMemory<Variant>;
  using Products = BackwardProducts<Variant>;
  using Note = BackwardNote;

  const BackwardParameters& p;
  Memory memory;
  typename Memory::Control& control;

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

  // Clears what rows of a tile hold that see nothing.
  template <int32_t kColumns>
  static __device__ __forceinline__ void ClearIdle(unsigned char* tile, const float* lse) {
#pragma unroll 1
    for (uint32_t begin = 0; begin < kRows; begin += 32) {
      const bool is_idle = lse[begin + threadIdx.x % 32] == Infinity();
#pragma unroll 1
      for (uint32_t idle = __ballot_sync(kAllLanes, is_idle); idle != 0; idle &= idle - 1) {
        const uint32_t row = begin + __ffs(idle) - 1;
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
                                control.task.kv_head,
                                control.task.first_key,
                                ElementOf(control.task.batch, length),
                                clears ? arrivals.barrier : full);
    }
    if (clears) {
      arrivals.Wait();
      ClearUnseen<kKeys, kColumns>(tile, block, hull);
      if (leads) full.Arrive();
    }
  }

  template <int32_t kColumns>
  __device__ __forceinline__ void LoadRows(unsigned char* tile,
                                           const TensorMap& map,
                                           uint32_t head,
                                           uint32_t first_row,
                                           uint32_t element,
                                           float* numbers,
                                           const float* from,
                                           const float* lse,
                                           bool idle,
                                           Arrivals& arrivals,
                                           bool leads,
                                           Barrier& full) const {
    if (leads) {
      LoadWithNumbers<kRows, kColumns>(
          tile, map, head, first_row, element, numbers, from, idle ? arrivals.barrier : full);
    }
    if (idle) {
      arrivals.Wait();
      ClearIdle<kColumns>(tile, lse);
      if (leads) full.Arrive();
    }
  }

  __device__ __forceinline__ const RowBlockHull* Hulls() const {
    return p.hulls + int64_t{control.task.hull_element} * p.row_blocks;
  }

  __device__ __forceinline__ RowBounds Bounds() const {
    const bool arrays = p.lower != nullptr;
    return {arrays ? p.lower + int64_t{control.task.lower_element} * p.rows : nullptr,
            arrays ? p.upper + int64_t{control.task.upper_element} * p.rows : nullptr,
            p.rows,
            p.keys,
            p.band_low,
            p.band_high};
  }

  // Finds the blocks of rows that see some of the keys.
  __device__ __forceinline__ void Scan() const {
    const bool leads = ptx::elect_sync();
    const uint32_t lane = threadIdx.x % 32, row_blocks = p.row_blocks;
    uint32_t count = 0;
    const auto write = [&](const Note& note) {
      const uint32_t stage = count % kStages;
      control.stage[stage].query_empty.Wait(count / kStages % 2 ^ 1);
      __syncwarp();  // else a lane may be left behind and miss a phase
      if (kHasBounds && note.kind == Note::kMasked) {
#pragma unroll 1
        for (uint32_t i = lane; i < kRows; i += 32) {
          const KeySpan span = Bounds().Of(note.row_block * kRows + i);
          memory.Spans(stage)[i] = make_uint2(span.begin, span.Empty() ? 0 : span.end - span.begin);
        }
        __syncwarp();
      }
      if (leads) {
        NoteOf(count) = note;
        control.stage[stage].noted.Arrive();
      }
      ++count;
    };
#pragma unroll 1
    for (uint32_t of_group = 0; of_group < control.task.group; ++of_group) {
#pragma unroll 1
      for (uint32_t base = 0; base < row_blocks; base += 32) {
        uint32_t visited = ~0u, idle = 0;
        if (row_blocks - base < 32) visited >>= 32 - (row_blocks - base);
        if (kHasBounds) {
          RowBlockHull one = {};
          if (base + lane < row_blocks) one = Hulls()[base + lane];
          visited = __ballot_sync(
              kAllLanes, BlockSpan().Meets(KeySpan{uint32_t(one.begin), uint32_t(one.end)}));
          idle = __ballot_sync(kAllLanes, one.idle != 0);
        }
#pragma unroll 1
        for (; visited != 0; visited &= visited - 1) {
          const uint32_t i = __ffs(visited) - 1, row_block = base + i;
          KeySpan all = {0, static_cast<uint32_t>(p.keys)};
          if (kHasBounds) {
#pragma unroll
            for (int32_t j = 0; j < kRows; j += 32) {
              const KeySpan span = Bounds().Of(row_block * kRows + lane + j);
              if (!span.Empty()) all = all.CommonWith(span);
            }
            all = CommonToLanes(all);
          }
          write({all.Holds(KeySpan{control.task.first_key, control.task.first_key + kKeys})
                     ? Note::kAllSee
                     : Note::kMasked,
                 control.task.kv_head * control.task.group + of_group,
                 row_block,
                 idle >> i & 1});
        }
      }
    }
    write({Note::kEnd});
  }

  // The keys of the block, of which the last may have fewer.
  __device__ __forceinline__ KeySpan BlockSpan() const {
    return {control.task.first_key,
            min(control.task.first_key + kKeys, static_cast<uint32_t>(p.keys))};
  }
  // From the first to the last of them that is in the hull of what the batch element's rows see.
  // Others may be NaN.
  __device__ __forceinline__ KeySpan SeenOfBlock() const {
    const KeySpan block = BlockSpan();
    if (!kHasBounds) return block;
    const RowBlockHull* const hulls = Hulls();
    KeySpan hull = {~0u, 0};
#pragma unroll 4
    for (uint32_t i = threadIdx.x % 32; i < static_cast<uint32_t>(p.row_blocks); i += 32) {
      const RowBlockHull one = hulls[i];
      if (one.begin < one.end) hull = hull.HullWith({uint32_t(one.begin), uint32_t(one.end)});
    }
    hull = HullOfLanes(hull);
    return !hull.Empty() && hull.Meets(block) ? hull : KeySpan{block.end, block.end};
  }

  __device__ __forceinline__ void Load() const {
    const bool leads = ptx::elect_sync();
    const KeySpan block = BlockSpan(), seen = SeenOfBlock();
    Arrivals arrivals = {control.arrived, 0};
    LoadKeys<kWidth>(
        memory.Key(), p.key, p.key_batch, block, seen, arrivals, leads, control.key_full);
    LoadKeys<kValueWidth>(
        memory.Value(), p.value, p.value_batch, block, seen, arrivals, leads, control.value_full);
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      const uint32_t stage = count % kStages, parity = count / kStages % 2;
      typename Memory::Control::Stage& barriers = control.stage[stage];
      barriers.noted.Wait(parity);
      const Note& note = NoteOf(count);
      if (note.kind == Note::kEnd) {
        if (leads) barriers.query_full.Arrive();
        break;
      }
      const auto is_idle = [&] { return kHasBounds && note.idle != 0; };
      const auto numbers_of = [&](const float* numbers) {
        const int64_t head = int64_t{control.task.batch} * p.heads + note.head;
        return numbers + (head * p.row_blocks + note.row_block) * kRows;
      };
      LoadRows<kWidth>(memory.Query(stage),
                       p.query,
                       note.head,
                       note.row_block * kRows,
                       control.task.query_element,
                       memory.Lse(stage),
                       numbers_of(p.lse_log2),
                       memory.Lse(stage),
                       is_idle(),
                       arrivals,
                       leads,
                       barriers.query_full);
      barriers.dout_empty.Wait(parity ^ 1);
      __syncwarp();
      LoadRows<kValueWidth>(memory.Dout(stage),
                            p.dout,
                            note.head,
                            note.row_block * kRows,
                            control.task.batch,
                            memory.Delta(stage),
                            numbers_of(p.delta),
                            memory.Lse(stage),
                            is_idle(),
                            arrivals,
                            leads,
                            barriers.dout_full);
    }
  }

  // ---- dQ

  __device__ __forceinline__ int64_t SumOffset(const Note& note) const {
    return ((int64_t{control.task.batch} * p.heads + note.head) * p.row_blocks + note.row_block) *
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

  // How many parts have been added to a block's dQ. Blocks of keys add theirs in turn, from the
  // first that some of the rows see.
  __device__ __forceinline__ uint32_t* TurnsOf(const Note& note) const {
    return p.turns + (int64_t{control.task.batch} * p.heads + note.head) * p.row_blocks +
           note.row_block;
  }
  __device__ __forceinline__ void WaitForTurn(const Note& note) const {
    uint32_t before = control.task.first_key / kKeys;
    if (kHasBounds) {
      before -= Hulls()[note.row_block].begin / kKeys;
    }
    while (ptx::ld_acquire_gpu_global(TurnsOf(note)) < before * Variant::kConsumers) {
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
        if (p.deterministic) {
          WaitForTurn(note);
          ptx::fence_proxy_async_all();
        }
        constexpr uint32_t kBytes = 64 * 64 * 4;
        ptx::cp_reduce_async_bulk_add_f32(sum + FirstPlace(consumer),
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
          ptx::red_release_gpu_global_add(TurnsOf(note), 1);
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
    const Products all_products(
        consumer, memory.Key(), memory.Value(), memory.Query(0), memory.Dout(0), memory.Weights(0));
    const BackwardScale scale(ScaleOf(p, control.task.batch),
                              kKind == MaskKind::kSoftcap ? p.softcap : 0);
    // A thread has two keys, 8 apart, and of each 8 rows two neighbours.
    const uint32_t key =
        control.task.first_key + consumer * Variant::kGroupKeys + warp * 16 + lane / 4;
    const uint32_t row = lane % 4 * 2;
    const uint32_t weights_place = WeightsPlace() + consumer * PanelBytes(kRows);

    typename Products::KeySum dkey;
    typename Products::ValueSum dvalue;
#pragma unroll
    for (int32_t i = 0; i < kWidth / 2; ++i) dkey[i] = 0;
#pragma unroll
    for (int32_t i = 0; i < kValueWidth / 2; ++i) dvalue[i] = 0;

    typename Products::Logits s;
    uint32_t kind;
    // Waits for a block of rows; whether there is one.
    const auto arrives = [&](uint32_t count) {
      control.stage[count % kStages].query_full.Wait(count / kStages % 2);
      kind = SameInAllLanes(NoteOf(count).kind);
      return kind != Note::kEnd;
    };
    control.key_full.Wait(0);
    control.value_full.Wait(0);
    if (arrives(0)) {
      ptx::wgmma_fence();
      all_products.KeyQuery(s, 0, 0);
#pragma unroll 1
      for (uint32_t count = 0;; ++count) {
        const Products products =
            Variant::kParts > 1 ? all_products.Anew(kind >> 31) : all_products;
        const uint32_t stage = count % kStages, parity = count / kStages % 2;
        const uint32_t weight_stage = count % kShape.weight_stages;
        typename Memory::Control::Stage& barriers = control.stage[stage];
        const Note& note = NoteOf(count);
        typename Products::Weights p_t, ds_t;
#pragma unroll
        for (int32_t part = 0; part < Variant::kParts; ++part) {
          typename Products::Logits dp;
          if (part > 0) {
            ptx::wgmma_fence();
            products.KeyQuery(s, stage, part);
          } else {
            barriers.dout_full.Wait(parity);
          }
          if (Variant::kDoutIsEarly) {
            ptx::wgmma_fence();
            products.ValueDout(dp, stage, part);
          }
          ptx::wgmma_wait_group<Variant::kDoutIsEarly ? 1 : 0>();
          ptx::Pin(s);
          const uint32_t first_row = part * Variant::kPartRows + row;
          const float* const lse = memory.Lse(stage) + first_row;
          if (kind == Note::kMasked) {
            Weigh<true>(s, p_t, part, scale, lse, memory.Spans(stage) + first_row, key);
          } else {
            Weigh<false>(s, p_t, part, scale, lse, nullptr, 0);
          }
          // The assembler would compute most of the weights only after the wait for the product
          // that they are computed beside, but for the branches of a wait.
          if (part == 0) {
            control.weights_empty[weight_stage].Wait(count / kShape.weight_stages % 2 ^ 1);
          }
          if (!Variant::kDoutIsEarly) {
            ptx::wgmma_fence();
            products.ValueDout(dp, stage, part);
          }
#pragma unroll
          for (int32_t i = 0; i < Variant::kPieces; ++i) {
            const int32_t piece = part * Variant::kPieces + i;
            float* const s_piece = s + i * (Variant::kPieceRows / 2);
            if (kKind != MaskKind::kSoftcap) PackPiece(p_t[piece], s_piece);
            ptx::wgmma_fence();
            products.WeightDout(dvalue, p_t, stage, piece);
            if (i == 0) {
              ptx::wgmma_wait_group<1>();
              ptx::Pin(dp);
            }
            const float* const delta = memory.Delta(stage) + piece * Variant::kPieceRows + row;
            Differentiate(s_piece, dp + i * (Variant::kPieceRows / 2), delta);
            PackPiece(ds_t[piece], s_piece);
#pragma unroll
            for (int32_t j = 0; j < Variant::kPieceRows / 16; ++j) {
              ptx::stmatrix_x4<true>(weights_place + weight_stage * TileBytes(kRows, kKeys) +
                                         (piece * Variant::kPieceRows + j * 16) * 128,
                                     ds_t[piece] + 4 * j);
            }
          }
        }
        ptx::fence_proxy_async();
        ptx::wgmma_fence();
        products.WeightQuery(dkey, ds_t, stage);
        const bool more = arrives(count + 1);
        SyncConsumers();

        // dQ, and the next S already, beside which dQ is stored.
        const Products new_products = products.WithNewKeys(kind >> 31);
        float sum[32], rest[Variant::kRestColumns > 0 ? Variant::kRestColumns / 2 : 1];
        ptx::wgmma_wait_group<1>();
        ptx::Pin(dvalue);
        if (more) {
          AddQuery(new_products, sum, weight_stage, consumer);
          Release(barriers.dout_empty);
          ptx::wgmma_wait_group<1>();
          ptx::Pin(dkey);
          if constexpr (Variant::kRestColumns > 0) {
            AddRest(new_products, rest, weight_stage, consumer);
            Release(barriers.query_empty);
            ptx::wgmma_wait_group<1>();
            ptx::Pin(sum);
            StoreSum(sum, note, consumer);
            ptx::wgmma_fence();
            products.KeyQuery(s, (count + 1) % kStages, 0);
            ptx::wgmma_wait_group<1>();
            ptx::Pin(rest);
            Release(control.weights_empty[weight_stage]);
            StoreRest(rest, note, consumer);
          } else {
            ptx::wgmma_fence();
            products.KeyQuery(s, (count + 1) % kStages, 0);
            Release(barriers.query_empty);
            ptx::wgmma_wait_group<1>();
            ptx::Pin(sum);
            Release(control.weights_empty[weight_stage]);
            StoreSum(sum, note, consumer);
          }
        } else {
          ptx::wgmma_wait_group<0>();
          ptx::Pin(dkey);
          AddQuery(new_products, sum, weight_stage, consumer);
          if constexpr (Variant::kRestColumns > 0)
            AddRest(new_products, rest, weight_stage, consumer);
          ptx::wgmma_wait_group<0>();
          ptx::Pin(sum);
          ptx::Pin(rest);
          StoreSum(sum, note, consumer);
          if constexpr (Variant::kRestColumns > 0) StoreRest(rest, note, consumer);
          break;
        }
      }
    }
    if (Variant::kAddsInBulk) {
      ptx::bar_sync(SumPlace::Empty(consumer), SumPlace::kThreads);
      ptx::bar_arrive(SumPlace::Full(consumer), SumPlace::kThreads);
    }
    const float of_products = ScaleOf(p, control.task.batch);
#pragma unroll
    for (int32_t i = 0; i < kWidth / 2; ++i) dkey[i] *= of_products;
    Store(dkey, dvalue);
  }

  // Where the consumers have the same keys: the first makes weights and dV, ...
  __device__ __forceinline__ void ConsumeForValue() const {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const Products products(
        0, memory.Key(), memory.Value(), memory.Query(0), memory.Dout(0), memory.Weights(0));
    const BackwardScale scale(ScaleOf(p, control.task.batch),
                              kKind == MaskKind::kSoftcap ? p.softcap : 0);
    const uint32_t key = control.task.first_key + warp * 16 + lane / 4, row = lane % 4 * 2;
    typename Products::ValueSum dvalue;
#pragma unroll
    for (int32_t i = 0; i < kValueWidth / 2; ++i) dvalue[i] = 0;
    control.key_full.Wait(0);
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      const uint32_t stage = count % kStages, parity = count / kStages % 2;
      typename Memory::Control::Stage& barriers = control.stage[stage];
      barriers.query_full.Wait(parity);
      const Note& note = NoteOf(count);
      const uint32_t kind = SameInAllLanes(note.kind);
      if (kind == Note::kEnd) break;
      const Products new_products = products.WithNewKeys(kind >> 31);
      typename Products::Logits s;
      typename Products::Weights p_t;
      ptx::wgmma_fence();
      products.KeyQuery(s, stage, 0);
      ptx::wgmma_wait_group<0>();
      ptx::Pin(s);
      const float* const lse = memory.Lse(stage) + row;
      if (kind == Note::kMasked) {
        Weigh<true>(s, p_t, 0, scale, lse, memory.Spans(stage) + row, key);
      } else {
        Weigh<false>(s, p_t, 0, scale, lse, nullptr, 0);
      }
      // The other has read those of the block before: it has stored dS since then.
      float4* const exchange = memory.Exchange() + threadIdx.x % kGroupThreads;
#pragma unroll
      for (int32_t i = 0; i < kRows / 8; ++i) {
        exchange[i * kGroupThreads] =
            make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
      }
      WeightsHandedOn::Arrive();
      if (kKind != MaskKind::kSoftcap) PackPiece(p_t[0], s);
      barriers.dout_full.Wait(parity);
      ptx::wgmma_fence();
      products.WeightDout(dvalue, p_t, stage, 0);
      SyncConsumers();

      float sum[kWidth / 4];
      ptx::wgmma_fence();
      new_products.WeightKey(sum, 0, 0);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      ptx::Pin(dvalue);
      Release(barriers.dout_empty);
      ptx::wgmma_wait_group<0>();
      ptx::Pin(sum);
      StorePiece<kWidth / 2, true, true>(sum, 0, 0, note, 0);
      Release(barriers.query_empty);
    }
    control.value_full.Wait(0);
    SyncConsumers();
    StageAndStore<kValueWidth>(p.dvalue, memory.Value(), dvalue, 0);
  }

  // ... and the second dS and dK. Each makes half of dQ.
  __device__ __forceinline__ void ConsumeForKey() const {
    const Products products(
        1, memory.Key(), memory.Value(), memory.Query(0), memory.Dout(0), memory.Weights(0));
    const uint32_t row = threadIdx.x % 4 * 2;
    typename Products::KeySum dkey;
#pragma unroll
    for (int32_t i = 0; i < kWidth / 2; ++i) dkey[i] = 0;
    control.key_full.Wait(0);
    control.value_full.Wait(0);
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      const uint32_t stage = count % kStages, parity = count / kStages % 2;
      typename Memory::Control::Stage& barriers = control.stage[stage];
      barriers.query_full.Wait(parity);
      const Note& note = NoteOf(count);
      const uint32_t kind = SameInAllLanes(note.kind);
      if (kind == Note::kEnd) break;
      const Products new_products = products.WithNewKeys(kind >> 31);
      typename Products::Logits dp, s;
      typename Products::Weights ds_t;
      barriers.dout_full.Wait(parity);
      ptx::wgmma_fence();
      products.ValueDout(dp, stage, 0);
      ptx::wgmma_wait_group<0>();
      ptx::Pin(dp);
      WeightsHandedOn::Wait();
      const float4* const exchange = memory.Exchange() + threadIdx.x % kGroupThreads;
#pragma unroll
      for (int32_t i = 0; i < kRows / 8; ++i) {
        const float4 weights = exchange[i * kGroupThreads];
        s[4 * i] = weights.x;
        s[4 * i + 1] = weights.y;
        s[4 * i + 2] = weights.z;
        s[4 * i + 3] = weights.w;
      }
      Differentiate(s, dp, memory.Delta(stage) + row);
      PackPiece(ds_t[0], s);
      // The other has read dS of the block before: it has handed on weights since then.
#pragma unroll
      for (int32_t i = 0; i < kRows / 16; ++i) {
        ptx::stmatrix_x4<true>(WeightsPlace() + i * 16 * 128, ds_t[0] + 4 * i);
      }
      ptx::fence_proxy_async();
      Release(barriers.dout_empty);
      ptx::wgmma_fence();
      products.WeightQuery(dkey, ds_t, stage);
      SyncConsumers();

      float sum[kWidth / 4];
      ptx::wgmma_fence();
      new_products.WeightKey(sum, 0, kWidth / 2);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      ptx::Pin(dkey);
      ptx::wgmma_wait_group<0>();
      ptx::Pin(sum);
      StorePiece<kWidth / 2, true, true>(sum, PlaceOfColumn(kWidth / 2), 0, note, 1);
      Release(barriers.query_empty);
    }
    const float of_products = ScaleOf(p, control.task.batch);
#pragma unroll
    for (int32_t i = 0; i < kWidth / 2; ++i) dkey[i] *= of_products;
    SyncConsumers();
    StageAndStore<kWidth>(p.dkey, memory.Key(), dkey, 1);
  }

  // Where the warp stores a matrix of 16 keys by 16 rows of dS, the rows from 0 on.
  __device__ __forceinline__ uint32_t WeightsPlace() const {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    return SharedAddress(memory.Weights(0)) + (lane / 16 * 8 + lane % 8) * 128 +
           PlaceOfPiece(lane, warp * 2 + lane / 8 % 2) * 16;
  }

  static __device__ __forceinline__ void PackPiece(uint32_t (&packed)[Variant::kPieceRows / 4],
                                                   const float* x) {
#pragma unroll
    for (int32_t i = 0; i < Variant::kPieceRows / 4; ++i) {
      packed[i] = Pack<Element>(x[2 * i], x[2 * i + 1]);
    }
  }

  // Turns products into weights. Under a cap these are packed, and what is left of them is
  // multiplied by the slope.
  template <bool kMasks>
  __device__ __forceinline__ void Weigh(typename Products::Logits& s,
                                        typename Products::Weights& packed,
                                        int32_t part,
                                        const BackwardScale& scale,
                                        const float* lse,
                                        const uint2* spans,
                                        uint32_t key) const {
#pragma unroll
    for (int32_t i = 0; i < Variant::kPartRows / 8; ++i) {
      const float2 of_rows = *reinterpret_cast<const float2*>(lse + i * 8);
      uint4 seen;  // of the two rows: the first key, and how many
      if (kMasks) {
        seen = kHasBounds ? *reinterpret_cast<const uint4*>(spans + i * 8)
                          : make_uint4(0, p.keys, 0, p.keys);
      }
#pragma unroll
      for (int32_t j = 0; j < 4; j += 2) {
        float* const x = s + 4 * i + j;
        float slope[2];
        if (kKind == MaskKind::kSoftcap) {
#pragma unroll
          for (int32_t k = 0; k < 2; ++k) {
            const CappedWithSlope capped = CapWithSlope(x[k] * scale.into_cap);
            x[k] = capped.capped;
            slope[k] = capped.slope;
          }
        }
        x[0] = ptx::ex2_approx_ftz_f32(fmaf(x[0], scale.scale_log2, -of_rows.x));
        x[1] = ptx::ex2_approx_ftz_f32(fmaf(x[1], scale.scale_log2, -of_rows.y));
        if (kMasks) {
          const uint32_t own = key + j * 4;
          if (own - seen.x >= seen.y) x[0] = 0;
          if (own - seen.z >= seen.w) x[1] = 0;
        }
        if (kKind == MaskKind::kSoftcap) {
          packed[part][2 * i + j / 2] = Pack<Element>(x[0], x[1]);
          x[0] *= slope[0];
          x[1] *= slope[1];
        }
      }
    }
  }

  // dS of weights and dP.
  static __device__ __forceinline__ void Differentiate(float* weights,
                                                       const float* dp,
                                                       const float* delta) {
#pragma unroll
    for (int32_t i = 0; i < Variant::kPieceRows / 2; i += 4) {
      const float2 of_rows = *reinterpret_cast<const float2*>(delta + i * 2);
      weights[i] *= dp[i] - of_rows.x;
      weights[i + 1] *= dp[i + 1] - of_rows.y;
      weights[i + 2] *= dp[i + 2] - of_rows.x;
      weights[i + 3] *= dp[i + 3] - of_rows.y;
    }
  }

  // The consumer's parts of dQ.
  static __device__ __forceinline__ void AddQuery(const Products& products,
                                                  float (&sum)[32],
                                                  uint32_t weight_stage,
                                                  uint32_t consumer) {
    ptx::wgmma_fence();
    if (Variant::kIsUneven && consumer == 1) {
      auto& fewer = reinterpret_cast<float (&)[Variant::kFewerColumns / 2]>(sum);
      products.WeightKey(fewer, weight_stage, 64);
    } else {
      products.WeightKey(sum, weight_stage, Variant::kSharesRows ? 0 : consumer * 64);
    }
    ptx::wgmma_commit_group();
  }
  template <int32_t kCount>
  static __device__ __forceinline__ void AddRest(const Products& products,
                                                 float (&rest)[kCount],
                                                 uint32_t weight_stage,
                                                 uint32_t consumer) {
    ptx::wgmma_fence();
    products.WeightKey(rest, weight_stage, 128 + consumer * Variant::kRestColumns);
    ptx::wgmma_commit_group();
  }

  // Adds them to the sums of the block.
  __device__ __forceinline__ void StoreSum(const float (&sum)[32],
                                           const Note& note,
                                           uint32_t consumer) const {
    constexpr bool kIsLast = Variant::kRestColumns == 0;
    if (Variant::kIsUneven && consumer == 1) {
      StorePiece<Variant::kFewerColumns, true, true>(sum, FirstPlace(consumer), 0, note, consumer);
    } else {
      StorePiece<64, true, kIsLast>(sum, FirstPlace(consumer), 0, note, consumer);
    }
  }
  __device__ __forceinline__ void StoreRest(const float* rest,
                                            const Note& note,
                                            uint32_t consumer) const {
    StorePiece<Variant::kRestColumns, false, true>(
        rest, RestPlace(consumer), 64 * 64, note, consumer);
  }
  template <int32_t kColumns, bool kIsFirst, bool kIsLast>
  __device__ __forceinline__ void StorePiece(const float* x,
                                             uint32_t place,
                                             uint32_t place_in_memory,
                                             const Note& note,
                                             uint32_t consumer) const {
    const uint32_t thread = threadIdx.x % kGroupThreads;
    if (Variant::kAddsInBulk) {
      auto* const to = reinterpret_cast<float4*>(memory.Sum(consumer)) + place_in_memory / 4;
      if (kIsFirst) ptx::bar_sync(SumPlace::Empty(consumer), SumPlace::kThreads);
#pragma unroll
      for (int32_t i = 0; i < kColumns / 8; ++i) {
        to[i * kGroupThreads + thread] =
            make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
      }
      if (kIsLast) {
        ptx::fence_proxy_async();
        ptx::bar_arrive(SumPlace::Full(consumer), SumPlace::kThreads);
      }
    } else {
      float* const sums = p.dquery_sum + SumOffset(note) + place + thread * 4;
      if (kIsFirst && p.deterministic) {
        if (thread == 0) WaitForTurn(note);
        SyncConsumer(consumer);
      }
#pragma unroll
      for (int32_t i = 0; i < kColumns / 8; ++i) {
        ptx::red_global_add_v4_f32(sums + i * kGroupThreads * 4, x + 4 * i);
      }
      if (kIsLast && p.deterministic) {
        SyncConsumer(consumer);
        if (thread == 0) ptx::red_release_gpu_global_add(TurnsOf(note), 1);
      }
    }
  }

  // ---- dK and dV

  // Of the tile of a whole block of keys.
  template <int32_t kCount>
  static __device__ __forceinline__ void Stage(unsigned char* tile,
                                               const float (&x)[kCount],
                                               uint32_t thread) {
    const uint32_t lane = thread % 32;
    const uint32_t row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
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
      ptx::cp_async_bulk_tensor_4d_store(&map,
                                         64 * panel,
                                         control.task.kv_head,
                                         control.task.first_key,
                                         control.task.batch,
                                         tile + panel * PanelBytes(kKeys));
    }
  }

  // A consumer alone.
  template <int32_t kColumns, int32_t kCount>
  __device__ __forceinline__ void StageAndStore(const TensorMap& map,
                                                unsigned char* tile,
                                                const float (&x)[kCount],
                                                uint32_t consumer) const {
    const uint32_t thread = ptx::tid_x() % kGroupThreads;
    Stage(tile, x, thread);
    ptx::fence_proxy_async();
    SyncConsumer(consumer);
    if (thread == 0) {
      StoreTile<kColumns>(map, tile);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();
    }
  }

  __device__ __forceinline__ void Store(const typename Products::KeySum& dkey,
                                        const typename Products::ValueSum& dvalue) const {
    // Asked for again, so that no register keeps it until here.
    const uint32_t thread = ptx::tid_x();
    // They take the places of K and V, which nobody reads any more.
    SyncConsumers();
    Stage(memory.Key(), dkey, thread);
    Stage(memory.Value(), dvalue, thread);
    ptx::fence_proxy_async();
    SyncConsumers();
    if (thread == 0) {
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
    const Backward self = {p, {shared}, control};
    if (threadIdx.x == 0) {
      const TileSchedule::Task task = schedule.At(blockIdx.x);
      const uint32_t kv_heads = p.kv_heads, batch = task.head / kv_heads, heads = p.heads;
      control.Init();
      control.task = {batch,
                      task.head % kv_heads,
                      heads / kv_heads,
                      task.row * kKeys,
                      ElementOf(batch, p.query_batch),
                      kHasBounds ? ElementOf(batch, p.lower_batch) : 0,
                      kHasBounds ? ElementOf(batch, p.upper_batch) : 0,
                      kHasBounds ? ElementOf(batch, p.hull_batch) : 0};
    }
    const uint32_t group = Uniform(threadIdx.x / kGroupThreads);
    __syncthreads();
    if (group == Variant::kConsumers) {
      ptx::setmaxnreg_dec<Variant::kProducerRegisters>();
      const uint32_t warp = Uniform(threadIdx.x / 32) % 4;
      if (warp == 0) {
        self.Load();
      } else if (warp == 1) {
        self.Scan();
      } else if (Variant::kAddsInBulk) {
        self.Add(warp - 2);
      }
    } else {
      ptx::setmaxnreg_inc<Variant::kConsumerRegisters>();
      // Where their parts of dQ are of different widths, each has code of its own.
      if constexpr (!Variant::kSharesKeys) {
        if (group == 0) {
          self.ConsumeForValue();
        } else {
          self.ConsumeForKey();
        }
      } else if (!Variant::kIsUneven) {
        self.Consume(group);
      } else if (group == 0) {
        self.Consume(0);
      } else {
        self.Consume(1);
      }
    }
  }
};

}  // namespace jax_fa4::sm90

using namespace jax_fa4;

#define BACKWARD(Element, shape, width_name, kind, Kind)                                         \
  extern "C" __global__ void __launch_bounds__(                                                  \
      sm90::BackwardThreads(sm90::kBackwardShapes[shape]), 1)                                    \
      backward_##Element##_##width_name##_##kind(const __grid_constant__ BackwardParameters p) { \
    sm90::Backward<sm90::BackwardVariant<ptx::Element, shape, MaskKind::Kind>>::Run(p);          \
  }
#define BACKWARD_KINDS(Element, shape, width_name)      \
  BACKWARD(Element, shape, width_name, full, kFull)     \
  BACKWARD(Element, shape, width_name, bounds, kBounds) \
  BACKWARD(Element, shape, width_name, softcap, kSoftcap)
#define BACKWARD_WIDTHS(Element)      \
  BACKWARD_KINDS(Element, 0, 64)      \
  BACKWARD_KINDS(Element, 1, 96)      \
  BACKWARD_KINDS(Element, 2, 128)     \
  BACKWARD_KINDS(Element, 3, 192_128) \
  BACKWARD_KINDS(Element, 4, 256)

BACKWARD_WIDTHS(float16)
BACKWARD_WIDTHS(bfloat16)
