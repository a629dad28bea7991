// FlashAttention-3, forward: attention for Hopper.
//
// A CTA takes a tile of query rows at a time and goes through the blocks of keys that they see,
// from the last to the first. One warp loads; two or three warpgroups compute, each for 64 rows:
//
//   load        K Q | K V | K V | K V | V
//   products        S     S O   S O   S O   O        S = Q K^T, O += P V
//   softmax           . P . . P . . P . . P          P = 2^(S - reference), O rescaled if need be
//   out                                         O
//
// The softmax of a block runs beside the product O of the block before, in the same warpgroup, and
// beside both products of the other warpgroups, which take turns to begin them. S, P and O are in
// registers.
//
// Sources: Shah et al., "FlashAttention-3" (2024); Zadouri et al., "FlashAttention-4" (2026), of
// which the rescaling and the schedule are.

#include "csrc/common/shared_memory.h"
#include "csrc/ptx/copy.h"
#include "csrc/ptx/warp.h"
#include "csrc/ptx/wgmma.h"
#include "csrc/sm90/barriers.h"
#include "csrc/sm90/config.h"
#include "csrc/sm90/products.h"
#include "csrc/sm90/softmax.h"
#include "csrc/sm90/task.h"
#include "csrc/sm90/variant.h"

namespace jax_fa4::sm90 {

template <class Variant>
struct Forward {
  static constexpr Shape kShape = Variant::kShape;
  static constexpr Kind kKind = Variant::kKind;
  static constexpr int32_t kKeys = Variant::kKeys;
  using Memory = SharedMemory<Variant>;
  using Task = sm90::Task<Variant>;
  using Place = RingPlace<Variant::kStages>;

  const Parameters& p;
  Memory memory;
  typename Memory::Control& control;

  // ---- Load

  __device__ __forceinline__ void Load() const {
    const bool leads = ptx::elect_sync();
    Place key_place, value_place;
    uint32_t clear_parity = 0;
    Deal deal(p);
    const auto note_of = [&](uint32_t task) -> TaskNote<Variant>& {
      return control.notes[task % Memory::Control::kNotes];
    };
    const auto write_note = [&](uint32_t count) {
      TaskNote<Variant>& note = note_of(count);
      if (deal.Done()) {
        if (leads) note = {};
      } else {
        const Task task = Task::At(p, deal.Row(), deal.Head());
        KeySpan hull = {~0u, 0};
#pragma unroll 1
        for (uint32_t consumer = 0; consumer < Variant::kConsumers; ++consumer) {
          const KeySpan own = task.Hull(p, consumer);
          if (leads) note.own[consumer] = own.Empty() ? KeyBlocks{0, 0} : KeyBlocks::Of<kKeys>(own);
          if (!own.Empty()) hull = hull.HullWith(own);
        }
        if (hull.Empty()) hull = {0, 0};
        if (leads) {
          note.task = task;
          note.hull = hull;
          note.blocks = KeyBlocks::Of<kKeys>(hull);
          note.scale = ScaleOf(p, task.batch);
        }
        deal.Advance();
      }
      __syncwarp();
    };

    // Q of a task, or word that there is none.
    const auto load_query = [&](uint32_t count) {
      const TaskNote<Variant>& note = note_of(count);
      const uint32_t stage = count % Variant::kQueryStages;
#pragma unroll 1
      for (uint32_t consumer = 0; consumer < Variant::kConsumers; ++consumer) {
        TileBarriers& barriers = control.query[stage][consumer];
        barriers.empty.Wait(count / Variant::kQueryStages % 2 ^ 1);
        __syncwarp();  // else a lane may be left behind and miss a phase
        if (!leads) continue;
        if (note.blocks.end == 0) {
          barriers.full.Arrive();
        } else {
          LoadTile<kGroupRows, kShape.width>(memory.Query(stage, consumer),
                                             p.query,
                                             note.task.head,
                                             note.task.PositionOf(p, consumer * kGroupRows),
                                             ElementOf(note.task.batch, p.query_batch),
                                             barriers.full);
        }
      }
    };

    write_note(0);
    if (Variant::kQueryStages > 1) load_query(0);
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      const TaskNote<Variant>& note = note_of(count);
      if (note.blocks.end == 0) {
        if (Variant::kQueryStages == 1) load_query(count);
        break;
      }
      const Task task = note.task;
      const KeySpan hull = note.hull;
      const KeyBlocks blocks = note.blocks;
      const uint32_t kv_head = task.KvHead(p);
      const auto load_key = [&](uint32_t block) {
        TileBarriers& barriers = control.key[key_place.stage];
        barriers.empty.Wait(key_place.parity ^ 1);
        __syncwarp();
        if (leads) {
          LoadTile<kKeys, kShape.width>(memory.Key(key_place.stage),
                                        p.key,
                                        kv_head,
                                        block * kKeys,
                                        ElementOf(task.batch, p.key_batch),
                                        barriers.full);
        }
        key_place.Advance();
      };
      const auto load_value = [&](uint32_t block) {
        TileBarriers& barriers = control.value[value_place.stage];
        unsigned char* const tile = memory.Value(value_place.stage);
        const KeySpan loaded = KeysOfBlock<kKeys>(p, block);
        const bool clears = kKind != Kind::kFull && HasUnseen(loaded, hull);
        barriers.empty.Wait(value_place.parity ^ 1);
        __syncwarp();
        if (leads) {
          LoadTile<kKeys, kShape.value_width>(tile,
                                              p.value,
                                              kv_head,
                                              block * kKeys,
                                              ElementOf(task.batch, p.value_batch),
                                              clears ? control.value_arrived : barriers.full);
        }
        if (clears) {
          control.value_arrived.Wait(clear_parity);
          clear_parity ^= 1;
          ClearUnseen<kKeys, kShape.value_width>(tile, loaded, hull);
          if (leads) barriers.full.Arrive();
        }
        value_place.Advance();
      };

      load_key(blocks.end - 1);
      if (Variant::kQueryStages == 1) load_query(count);
#pragma unroll 1
      for (uint32_t block = blocks.end - 1;; --block) {
        if (block > blocks.first) load_key(block - 1);
        load_value(block);
        if (block == blocks.end - 1) {
          write_note(count + 1);
          if (Variant::kQueryStages > 1) load_query(count + 1);
        }
        if (block == blocks.first) break;
      }
    }
  }

  // ---- Products and softmax

  static __device__ __forceinline__ void Release(TileBarriers& barriers) {
    if (threadIdx.x % 32 == 0) barriers.empty.Arrive();
  }

  // The logits of a negative scale are positive multiples of the products of -Q.
  __device__ __forceinline__ void NegateQuery(uint32_t stage, uint32_t consumer) const {
    auto* const query = reinterpret_cast<uint4*>(memory.Query(stage, consumer));
#pragma unroll 1
    for (uint32_t i = threadIdx.x % kGroupThreads; i < TileBytes(kGroupRows, kShape.width) / 16;
         i += kGroupThreads) {
      constexpr uint32_t kSigns = 0x80008000;
      const uint4 x = query[i];
      query[i] = make_uint4(x.x ^ kSigns, x.y ^ kSigns, x.z ^ kSigns, x.w ^ kSigns);
    }
    ptx::fence_proxy_async();
    SyncGroup(consumer);
  }

  // What the keys that a thread's rows see are, and where in a block it is its warp that has to
  // mask.
  struct Seen {
    KeySpan rows[kThreadRows];
    KeySpan all;  // the keys that all rows of the warp see which see any
  };
  __device__ __forceinline__ Seen SeenBy(const Task& task, uint32_t row) const {
    const uint32_t keys = p.keys;
    if (kKind == Kind::kFull) return {{{0, keys}, {0, keys}}, {0, keys}};
    const RowBounds bounds = BoundsOf(p, task.batch);
    Seen seen = {
        {bounds.Of(task.PositionOf(p, row)), bounds.Of(task.PositionOf(p, row + kRowsApart))},
        {0, ~0u}};
#pragma unroll
    for (const KeySpan& span : seen.rows) {
      if (!span.Empty()) seen.all = seen.all.CommonWith(span);
    }
    seen.all = CommonToLanes(seen.all);
    return seen;
  }

  __device__ __forceinline__ void Consume(uint32_t consumer) const {
    using Products = sm90::Products<Variant>;
    const Products products(memory.Query(0, consumer), memory.Key(0), memory.Value(0));
    // Of the tile: the thread's first row.
    const uint32_t row =
        threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / kQuad + consumer * kGroupRows;
    uint32_t count = 0;  // of tasks before
    Place place;         // of the next V
    if (Variant::kTakesTurns && consumer == Variant::kConsumers - 1) Turn::Give(0);
    // Blocks that only others' rows see. What one lane releases, others may still wait for: it
    // would be filled anew, and they would miss the phase.
    const auto pass = [&](uint32_t blocks) {
#pragma unroll 1
      for (; blocks > 0; --blocks) {
        control.key[place.stage].full.Wait(place.parity);
        __syncwarp();
        Release(control.key[place.stage]);
        if (Variant::kTakesTurns) {
          Turn::Wait(consumer);
          Turn::Give((consumer + 1) % Variant::kConsumers);
        }
        control.value[place.stage].full.Wait(place.parity);
        __syncwarp();
        Release(control.value[place.stage]);
        place.Advance();
      }
    };

#pragma unroll 1
    for (;; ++count) {
      TileBarriers& query = control.query[count % Variant::kQueryStages][consumer];
      query.full.Wait(count / Variant::kQueryStages % 2);
      const TaskNote<Variant>& note = control.notes[count % Memory::Control::kNotes];
      if (note.blocks.end == 0) break;
      if (note.scale < 0) NegateQuery(count % Variant::kQueryStages, consumer);
      const LogitScale scale(note.scale, kKind == Kind::kSoftcap ? p.softcap : 0);
      // The blocks that are the warpgroup's own: one where its rows see nothing.
      KeyBlocks blocks = note.own[consumer];
      if (blocks.end == 0) blocks = {note.blocks.end - 1, note.blocks.end};
      const Seen seen = SeenBy(note.task, row);
      SoftmaxRows softmax(scale.scale_log2);
      typename Products::S s;
      typename Products::P weights;
      typename Products::O o;
#pragma unroll
      for (float& x : o) x = 0;

      pass(note.blocks.end - blocks.end);
      uint32_t block = blocks.end - 1;
      Place next = place;  // of the next K
      const auto weigh = [&](bool may_mask) {
        ptx::Pin(s);
        Release(control.key[next.stage]);
        next.Advance();
        if (Variant::kOutIsApart && block == blocks.first) Release(query);
        const uint32_t first = block * kKeys;
        if (kKind == Kind::kSoftcap) Cap(s, scale.into_cap);
        if (may_mask && !seen.all.Holds(KeySpan{first, first + kKeys})) {
          Mask<0>(s, seen.rows[0], first);
          Mask<1>(s, seen.rows[1], first);
        }
        softmax.Weigh(s, scale.scale_log2);
        // The assembler would compute most of the weights only after the wait for the product that
        // they are computed beside. It does not move them across the branches of a wait for the
        // next keys that seems to depend on them. (Sums of weights are never negative.)
        if (block > blocks.first && !(softmax.row[0].sum + softmax.row[1].sum < 0)) {
          control.key[next.stage].full.Wait(next.parity);
        }
      };
      const auto pack = [&] {
#pragma unroll
        for (int32_t i = 0; i < kKeys / 4; ++i) {
          weights[i] = Pack<typename Variant::Element>(s[2 * i], s[2 * i + 1]);
        }
      };
      const auto begin_values = [&] {
        control.value[place.stage].full.Wait(place.parity);
        ptx::wgmma_fence();
        products.WeightValue(o, weights, place.stage);
      };
      const auto end_values = [&] {
        ptx::wgmma_wait_group<0>();
        ptx::Pin(o);
        Release(control.value[place.stage]);
        place.Advance();
      };

      control.key[next.stage].full.Wait(next.parity);
      ptx::wgmma_fence();
      products.QueryKey(s, count % Variant::kQueryStages, next.stage);
      ptx::wgmma_wait_group<0>();
      weigh(true);
      pack();
#pragma unroll 1
      while (block > blocks.first) {
        --block;
        if (Variant::kTakesTurns) Turn::Wait(consumer);
        ptx::wgmma_fence();
        products.QueryKey(s, count % Variant::kQueryStages, next.stage);
        begin_values();
        if (Variant::kTakesTurns) Turn::Give((consumer + 1) % Variant::kConsumers);
        ptx::wgmma_wait_group<1>();
        weigh(kKind != Kind::kFull);
        end_values();
        pack();
        if (softmax.AnyDecays()) {
#pragma unroll
          for (int32_t i = 0; i < kShape.value_width / 2; ++i) o[i] *= softmax.decay[RowOf(i)];
        }
      }
      begin_values();
      const RowFactors factors = Finish(note.task, row, seen, scale, softmax);
      end_values();
      Store(o, factors, note.task, consumer, row);
      if (!Variant::kOutIsApart) Release(query);
      pass(blocks.first - note.blocks.first);
    }
    if (threadIdx.x % kGroupThreads == 0) ptx::cp_async_bulk_wait_group_read<0>();
    if (Variant::kTakesTurns && consumer == 0) Turn::Wait(0);
  }

  // ---- Out

  // What the sums of a thread's rows are to be multiplied by; negative where they are to become 0.
  struct RowFactors {
    float of[kThreadRows];
  };
  // The rest of a row's results.
  __device__ __forceinline__ RowFactors Finish(const Task& task,
                                               uint32_t row,
                                               const Seen& seen,
                                               const LogitScale& scale,
                                               SoftmaxRows& softmax) const {
    softmax.Close(scale.scale_log2);
    RowFactors factors;
#pragma unroll
    for (int32_t i = 0; i < kThreadRows; ++i) {
      const bool keeps = !seen.rows[i].Empty() && softmax.row[i].sum != 0;
      factors.of[i] = keeps ? 1 / softmax.row[i].sum : -1;
      const int64_t index = task.IndexOf(p, row + i * kRowsApart);
      if (threadIdx.x % kQuad == 0 && index >= 0) {
        const LogSumExp finished = keeps ? softmax.row[i].Finish(scale) : LogSumExp{-Infinity(), 0};
        p.lse[index] = finished.lse;
        p.lse_rounding[index] = finished.rounding;
      }
    }
    return factors;
  }

  __device__ __forceinline__ void Store(typename Products<Variant>::O& o,
                                        const RowFactors& factors,
                                        const Task& task,
                                        uint32_t consumer,
                                        uint32_t row) const {
#pragma unroll
    for (int32_t i = 0; i < kShape.value_width / 2; ++i) {
      const float factor = factors.of[RowOf(i)];
      o[i] = factor < 0 ? 0 : o[i] * factor;
    }
    if (p.out_float != nullptr) {
      StoreFloat(o, task, row);
    } else {
      StageAndStore(o, task, consumer);
    }
  }

  __device__ __forceinline__ void StoreFloat(const typename Products<Variant>::O& o,
                                             const Task& task,
                                             uint32_t row) const {
#pragma unroll
    for (int32_t i = 0; i < kThreadRows; ++i) {
      const int64_t index = task.IndexOf(p, row + i * kRowsApart);
      if (index < 0) continue;
      float* const out = p.out_float + index * p.value_width;
#pragma unroll
      for (int32_t j = i * 2; j < kShape.value_width / 2; j += 4) {
        const int32_t column = j / 4 * 8 + threadIdx.x % kQuad * 2;
        if (column < p.value_width) {
          *reinterpret_cast<float2*>(out + column) = make_float2(o[j], o[j + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void StageAndStore(const typename Products<Variant>::O& o,
                                                const Task& task,
                                                uint32_t consumer) const {
    unsigned char* const tile = memory.Out(consumer);
    const uint32_t row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / kQuad;
    const bool leads = threadIdx.x % kGroupThreads == 0;
    // The tile before has left, and no warp of the group reads Q any more.
    if (Variant::kOutIsApart && leads) ptx::cp_async_bulk_wait_group_read<0>();
    SyncGroup(consumer);
#pragma unroll
    for (int32_t i = 0; i < kShape.value_width / 2; i += 2) {
      const uint32_t at = i / 4 / 8 * PanelBytes(kGroupRows) + (row + RowOf(i) * kRowsApart) * 128 +
                          PlaceOfPiece(row, i / 4 % 8) * 16 + threadIdx.x % kQuad * 4;
      *reinterpret_cast<uint32_t*>(tile + at) = Pack<typename Variant::Element>(o[i], o[i + 1]);
    }
    ptx::fence_proxy_async();
    SyncGroup(consumer);
    if (leads) {
#pragma unroll
      for (int32_t panel = 0; panel < Panels(kShape.value_width); ++panel) {
        ptx::cp_async_bulk_tensor_4d_store(&p.out,
                                           64 * panel,
                                           task.head,
                                           task.PositionOf(p, consumer * kGroupRows),
                                           task.batch,
                                           tile + panel * PanelBytes(kGroupRows));
      }
      ptx::cp_async_bulk_commit_group();
      if (!Variant::kOutIsApart) ptx::cp_async_bulk_wait_group_read<0>();
    }
    __syncwarp();
  }

  // ---- All roles

  __device__ __forceinline__ void Run() const {
    constexpr Registers kRegisters = Variant::kRegisters;
    const uint32_t group = Uniform(threadIdx.x / kGroupThreads);
    if (threadIdx.x == 0) control.Init();
    __syncthreads();
    if (group == Variant::kConsumers) {
      ptx::setmaxnreg_dec<kRegisters.producer>();
      if (Uniform(threadIdx.x / 32) % 4 == 0) Load();
    } else {
      ptx::setmaxnreg_inc<kRegisters.consumer>();
      Consume(group);
    }
  }
};

}  // namespace jax_fa4::sm90

using namespace jax_fa4;

#define FORWARD(Element, shape, width_name, kind, Kind)                                       \
  extern "C" __global__ void __launch_bounds__(sm90::Threads(sm90::kShapes[shape]), 1)        \
      forward_##Element##_##width_name##_##kind(const __grid_constant__ sm90::Parameters p) { \
    RunForward<sm90::Forward<sm90::Variant<ptx::Element, shape, sm90::Kind>>>(p);             \
  }
#define FORWARD_KINDS(Element, shape, width_name)            \
  FORWARD(Element, shape, width_name, full, Kind::kFull)     \
  FORWARD(Element, shape, width_name, bounds, Kind::kBounds) \
  FORWARD(Element, shape, width_name, softcap, Kind::kSoftcap)
#define FORWARD_WIDTHS(Element)      \
  FORWARD_KINDS(Element, 0, 64)      \
  FORWARD_KINDS(Element, 1, 96)      \
  FORWARD_KINDS(Element, 2, 128)     \
  FORWARD_KINDS(Element, 3, 192_128) \
  FORWARD_KINDS(Element, 4, 256)

FORWARD_WIDTHS(float16)
FORWARD_WIDTHS(bfloat16)
