// FlashAttention-4, forward: attention for Blackwell, on tensor cores that work by themselves.
//
// A CTA takes two tiles of 128 query rows at a time and goes through the blocks of 128 keys that
// they see, from the last to the first. Its warps have roles:
//
//   load        Q0 K | Q1 V |    K     V    |    K     V    |
//   MMA               S0 S1 . . . O0 S0 O1 S1 . . . O0 S0 O1 S1 . . .     S = Q K^T, O += P V
//   softmax 0            P0 . . . . . P0 . . . . . . P0                   P = 2^(S - reference)
//   softmax 1               P1 . . . . . . P1 . . . . . . P1
//   correction                    .  .   O0  O1     O0  O1       out      rescales O, if need be
//   store                                                        out
//
// S, P and O are in tensor memory. Whoever hands on a part of it, or of shared memory, arrives at
// one of the barriers of barriers.h.
//
// Source: Zadouri et al., "FlashAttention-4" (2026).

#include "csrc/common/shared_memory.h"
#include "csrc/ptx/copy.h"
#include "csrc/ptx/tcgen05.h"
#include "csrc/ptx/warp.h"
#include "csrc/sm100/barriers.h"
#include "csrc/sm100/config.h"
#include "csrc/sm100/out_tile.h"
#include "csrc/sm100/products.h"
#include "csrc/sm100/softmax.h"
#include "csrc/sm100/task.h"
#include "csrc/sm100/variant.h"

namespace jax_fa4::sm100 {

// Warps of a CTA: three warpgroups, a thread of each for a row of a tile, and single warps.
inline constexpr uint32_t kGroupThreads = kTileRows;
inline constexpr uint32_t kCorrectionGroup = kQueryTiles, kOtherGroup = kCorrectionGroup + 1;
inline constexpr uint32_t kMmaWarp = kOtherGroup * (kGroupThreads / 32), kLoadWarp = kMmaWarp + 1,
                          kStoreWarp = kMmaWarp + 2;
static_assert((kOtherGroup + 1) * kGroupThreads == kThreads);

// Who a thread is. Read anew wherever it is needed, and not kept in a register through all that
// lies between.
__device__ __forceinline__ uint32_t Thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ uint32_t TileRow() { return Thread() % kTileRows; }
__device__ __forceinline__ uint32_t Warp() { return Uniform(Thread() / 32); }
__device__ __forceinline__ uint32_t Group() { return Uniform(Thread() / kGroupThreads); }
__device__ __forceinline__ uint32_t GroupWarp() { return Warp() % (kGroupThreads / 32); }

template <class Variant>
struct Forward {
  static constexpr Widths kWidths = Variant::kWidths;
  using Memory = SharedMemory<Variant>;
  using Task = sm100::Task<Variant::kKind>;
  using KvPlace = RingPlace<Memory::kKvStages>;

  const Parameters& p;
  Memory memory;
  typename Memory::Control& control;

  // The address of tensor memory in the lanes that this warp accesses.
  __device__ __forceinline__ uint32_t OwnLanes() const {
    return Uniform(control.tensor_memory + (GroupWarp() * kWarpRows << 16));
  }

  // ---- Load

  // The next tile of the ring: a block of keys, or of their values.
  template <int32_t kWidth>
  __device__ __forceinline__ void LoadKeys(KvPlace& place,
                                           bool leads,
                                           const TensorMap& map,
                                           const Task& task,
                                           uint32_t block,
                                           uint32_t batch) const {
    KvControl& stage = control.ring[place.stage];
    stage.kv_load_empty.Wait(place.parity ^ 1);
    __syncwarp();  // else a lane may be left behind and miss a phase
    if (leads) {
      LoadTile<kTileKeys, kWidth>(memory.KeyValue(place.stage),
                                  map,
                                  task.kv_head,
                                  block * kTileKeys,
                                  ElementOf(task.batch, batch),
                                  stage.kv_load_full);
    }
    place.Advance();
  }

  __device__ __forceinline__ void Load() const {
    const bool leads = ptx::elect_sync();
    KvPlace place;
    Phases phases;
    Task::ForEach(p, [&](const Task& task) {
      const TaskBlocks blocks = task.Blocks(p);
      const auto load_query = [&](uint32_t stage) {
        control.tiles[stage].q_load_empty.Wait(phases.OfTask() ^ 1);
        __syncwarp();
        if (leads) {
          LoadTile<kTileRows, kWidths.query_key>(memory.Query(stage),
                                                 p.query,
                                                 task.head,
                                                 task.position + stage * task.positions_of_tile,
                                                 ElementOf(task.batch, p.query_batch),
                                                 control.tiles[stage].q_load_full);
        }
      };
      load_query(0);
#pragma unroll 1
      for (uint32_t block = blocks.end; block-- > blocks.first;) {
        LoadKeys<kWidths.query_key>(place, leads, p.key, task, block, p.key_batch);
        if (block + 1 == blocks.end) load_query(1);
        LoadKeys<kWidths.value>(place, leads, p.value, task, block, p.value_batch);
      }
      phases.NextTask();
    });
    // Shared memory has to outlive the products that read it. Those of keys come before the last
    // of values.
#pragma unroll 1
    for (int32_t i = 0; i < Memory::kKvStages; ++i) {
      control.ring[place.stage].kv_load_empty.Wait(place.parity ^ 1);
      place.Advance();
    }
  }

  // ---- MMA

  __device__ __forceinline__ void Multiply() const {
    const Products<Variant> products(control.tensor_memory, memory.Query(0), memory.KeyValue(0));
    const bool leads = ptx::elect_sync();
    KvPlace place;
    Phases phases;

    Task::ForEach(p, [&](const Task& task) {
      const TaskBlocks blocks = task.Blocks(p);
      const bool negate = ScaleOf(p, task.batch) < 0;
      const auto query_key = [&](int32_t stage, int32_t key, uint32_t block) {
        // Products lead to the next phases of what all lanes have waited for until here.
        __syncwarp();
        if (leads) {
          products.QueryKey(stage, key, negate);
          ptx::tcgen05_commit(control.tiles[stage].s_ready.Get());
          if (block == blocks.first) ptx::tcgen05_commit(control.tiles[stage].q_load_empty.Get());
        }
      };
      const auto clear_unseen = [&](unsigned char* values, uint32_t block) {
        const KeySpan loaded = KeysOfBlock<kTileKeys>(p, block);
        if (Variant::kKind != Kind::kFull && HasUnseen(loaded, blocks.hull)) {
          ClearUnseen<kTileKeys, kWidths.value>(values, loaded, blocks.hull);
        }
      };
      const auto weight_value = [&](int32_t stage, int32_t value, bool add) {
        control.tiles[stage].p_o_rescale.Wait(phases.OfBlock());
        ptx::tcgen05_fence_after_thread_sync();
        if (leads) products.template WeightValue<0, Variant::kFirstPart>(stage, value, add);
        control.tiles[stage].p_ready_2.Wait(phases.OfBlock());
        ptx::tcgen05_fence_after_thread_sync();
        if (leads) {
          products.template WeightValue<Variant::kFirstPart, kTileKeys>(stage, value, true);
        }
      };

      control.tiles[0].q_load_full.Wait(phases.OfTask());
      control.ring[place.stage].kv_load_full.Wait(place.parity);
      query_key(0, place.stage, blocks.end - 1);
      control.tiles[1].q_load_full.Wait(phases.OfTask());
      query_key(1, place.stage, blocks.end - 1);
      if (leads) ptx::tcgen05_commit(control.ring[place.stage].kv_load_empty.Get());
      place.Advance();

      bool add = false;
#pragma unroll 1
      for (uint32_t block = blocks.end - 1; block > blocks.first; --block) {
        const KvPlace of_value = place;
        place.Advance();
        control.ring[of_value.stage].kv_load_full.Wait(of_value.parity);
        clear_unseen(memory.KeyValue(of_value.stage), block);
        weight_value(0, of_value.stage, add);
        control.ring[place.stage].kv_load_full.Wait(place.parity);
        query_key(0, place.stage, block - 1);
        weight_value(1, of_value.stage, add);
        if (leads) ptx::tcgen05_commit(control.ring[of_value.stage].kv_load_empty.Get());
        query_key(1, place.stage, block - 1);
        if (leads) ptx::tcgen05_commit(control.ring[place.stage].kv_load_empty.Get());
        place.Advance();
        phases.NextBlock();
        add = true;
      }

      control.ring[place.stage].kv_load_full.Wait(place.parity);
      clear_unseen(memory.KeyValue(place.stage), blocks.first);
      for (int32_t stage = 0; stage < kQueryTiles; ++stage) {
        weight_value(stage, place.stage, add);
        if (leads) ptx::tcgen05_commit(control.tiles[stage].o_ready.Get());
      }
      if (leads) ptx::tcgen05_commit(control.ring[place.stage].kv_load_empty.Get());
      place.Advance();
      phases.NextBlock();
      phases.NextTask();
    });
  }

  // ---- Softmax

  // The warpgroup's number is the stage of its query tile.
  __device__ __forceinline__ void Softmax() const {
    const StatisticsBarrier statistics(Group(), GroupWarp());
    TileControl& tile = UniformReference(control.tiles[Group()]);
    float& row_scale = tile.row_scale[TileRow()];
    const uint32_t tensor_s = OwnLanes() + ColumnOfS(Group());
    Phases phases;

    Task::ForEach(p, [&](const Task& task) {
      const TaskBlocks blocks = task.Blocks(p);
      const LogitScale scale(ScaleOf(p, task.batch), p.softcap);
      const int64_t index = task.IndexOf(p, Group(), TileRow());
      // The keys that this row sees, and those that all rows of the warp see.
      KeySpan seen = blocks.hull, all = blocks.hull;
      if (Variant::kKind != Kind::kFull) {
        seen = BoundsOf(p, task.batch).Of(task.PositionOf(Group(), TileRow()));
        all = seen.Empty() ? KeySpan{0, ~0u} : seen;
        all = CommonToLanes(all);
      }

      // Of the rows of all tasks before, each sum has been handed on too.
      const uint32_t handed_on = Variant::kCorrectionWritesOut ? phases.OfTask() : 0;

      // Blocks of which all rows of the warp see every key.
      const uint32_t whole = (all.begin + kTileKeys - 1) / kTileKeys;
      const uint32_t whole_count = max(all.end / kTileKeys, whole) - whole;

      SoftmaxRow softmax;
#pragma unroll 1
      for (uint32_t block = blocks.end; block-- > blocks.first;) {
        float s[kTileKeys];
        tile.s_ready.Wait(phases.OfBlock());
        ptx::tcgen05_fence_after_thread_sync();
        if (Variant::kKind == Kind::kSoftcap) CapRow(tensor_s, scale.into_cap);
#pragma unroll
        for (int32_t k = 0; k < kTileKeys; k += 32) {
          ptx::tcgen05_ld_32x32b(tensor_s + k, reinterpret_cast<float (&)[32]>(s[k]));
        }
        ptx::tcgen05_wait_ld();

        if (block - whole >= whole_count) Mask(s, seen, block * kTileKeys);
        auto step = softmax.Raise(Maximum(s, softmax.maximum), scale.scale_log2);
        if (__any_sync(kAllLanes, SoftmaxRow::IsHuge(step.reference))) {
          Subtract(s, softmax.SubtractFirst(step));
        }
        row_scale = step.decay;
        statistics.Arrive();

        WeighAndStore<0>(
            s, tensor_s + ColumnOfP(0) - ColumnOfS(0), scale.scale_log2, step.reference, tile);
        tile.softmax_corr_empty.Wait(phases.OfBlock() ^ handed_on);
        softmax.sum = fmaf(softmax.sum, step.decay, Sum(s));
        phases.NextBlock();
      }

      softmax.Close(scale.scale_log2);
      const bool keep = !seen.Empty() && softmax.sum != 0;
      if (Variant::kCorrectionWritesOut) {
        row_scale = softmax.sum;
        statistics.Arrive();
      } else {
        WriteOut(index, phases.OfTask(), Group(), keep, softmax.sum);
      }
      if (index >= 0) {
        const LogSumExp finished = keep ? softmax.Finish(scale) : LogSumExp{-Infinity(), 0};
        p.lse[index] = finished.lse;
        p.lse_rounding[index] = finished.rounding;
      }
      __syncwarp();
      if (Variant::kCorrectionWritesOut) tile.softmax_corr_empty.Wait(phases.OfBlock() ^ handed_on);
      phases.NextTask();
    });
  }

  // Caps a row of S where it is: there is no room for what that takes beside a whole row.
  static __device__ __forceinline__ void CapRow(uint32_t tensor_s, float into_cap) {
#pragma unroll 1
    for (int32_t k = 0; k < kTileKeys; k += 32) {
      float s[32];
      ptx::tcgen05_ld_32x32b(tensor_s + k, s);
      ptx::tcgen05_wait_ld();
      Cap(s, into_cap);
      ptx::tcgen05_st_32x32b(tensor_s + k, s);
    }
    ptx::tcgen05_wait_st();
  }

  // Computes and stores the weights of fragments from kFirst on.
  template <int32_t kFirst>
  __device__ __forceinline__ void WeighAndStore(float (&s)[kTileKeys],
                                                uint32_t tensor_p,
                                                float scale_log2,
                                                float reference,
                                                TileControl& tile) const {
    uint32_t packed[16];
    Weigh<Variant, kFirst>(s, packed, scale_log2, reference);
    ptx::tcgen05_st_32x32b(tensor_p + kFirst / 2, packed);
    if constexpr (kFirst + 32 == Variant::kFirstPart || kFirst + 32 == kTileKeys) {
      ptx::tcgen05_wait_st();
      ptx::tcgen05_fence_before_thread_sync();
      (kFirst + 32 == kTileKeys ? tile.p_ready_2 : tile.p_o_rescale).Arrive();
    }
    if constexpr (kFirst + 32 < kTileKeys) {
      WeighAndStore<kFirst + 32>(s, tensor_p, scale_log2, reference, tile);
    }
  }

  // ---- Correction

  __device__ __forceinline__ void Correct() const {
    const uint32_t row = TileRow(), warp = GroupWarp(), lanes = OwnLanes();
    const auto wait_for_row = [&](uint32_t stage) {
      StatisticsBarrier(stage, warp).Wait();
      return control.tiles[stage].row_scale[row];
    };
    Phases phases;

    Task::ForEach(p, [&](const Task& task) {
      const uint32_t count = task.Blocks(p).Count();
      // The first product of a task does not add to O, but overwrites what was read for the one
      // before.
      if (Variant::kCorrectionWritesOut) ptx::tcgen05_fence_before_thread_sync();
      wait_for_row(0);
      control.tiles[0].p_o_rescale.Arrive();
      control.tiles[0].softmax_corr_empty.Arrive();
      wait_for_row(1);
      control.tiles[1].p_o_rescale.Arrive();
#pragma unroll 1
      for (uint32_t i = 1; i < count; ++i) {
#pragma unroll
        for (uint32_t stage = 0; stage < kQueryTiles; ++stage) {
          const float decay = wait_for_row(stage);
          // Behind S, of which the softmax warp tells, are all products before it.
          ptx::tcgen05_fence_after_thread_sync();
          if (__any_sync(kAllLanes, decay < 1)) {
            RescaleRow<Variant>(lanes + ColumnOfO(stage, kWidths), decay);
          }
          ptx::tcgen05_fence_before_thread_sync();
          control.tiles[stage].p_o_rescale.Arrive();
          // The other stage's, so that the two take turns.
          control.tiles[1 - stage].softmax_corr_empty.Arrive();
        }
      }
      control.tiles[1].softmax_corr_empty.Arrive();

      if (Variant::kCorrectionWritesOut) {
        for (uint32_t stage = 0; stage < kQueryTiles; ++stage) {
          const float sum = wait_for_row(stage);
          control.tiles[stage].softmax_corr_empty.Arrive();
          WriteOut(task.IndexOf(p, stage, row), phases.OfTask(), stage, sum != 0, sum);
        }
      }
      phases.NextTask();
    });
  }

  // ---- Out

  // Whose tile is staged next where that of this stage was.
  static __device__ __forceinline__ uint32_t NextInBuffer(uint32_t stage) {
    return Memory::kOutStages == 1 ? 1 - stage : stage;
  }
  // The parity of the phase that makes room for a tile: of the tile before it in its buffer, which
  // is one of the same task for the second tile in a buffer for both.
  static __device__ __forceinline__ uint32_t RoomParity(uint32_t task_parity, uint32_t stage) {
    return Memory::kOutStages == 1 && stage == 1 ? task_parity : task_parity ^ 1;
  }

  // A row of out, by the thread that has it in tensor memory.
  __device__ __forceinline__ void WriteOut(
      int64_t index, uint32_t task_parity, uint32_t stage, bool keep, float sum) const {
    const OutRow<Variant> out = {OwnLanes() + ColumnOfO(stage, kWidths), 1 / sum, keep};
    control.tiles[stage].o_ready.Wait(task_parity);
    ptx::tcgen05_fence_after_thread_sync();
    if (p.out_float != nullptr) {
      out.Store(index >= 0 ? p.out_float + index * p.value_width : nullptr, p.value_width);
    } else {
      control.tiles[stage].corr_epi_empty.Wait(RoomParity(task_parity, stage));
      out.Stage(memory.Out(stage), TileRow());
      ptx::fence_proxy_async();
      control.tiles[stage].corr_epi_full.Arrive();
    }
  }

  __device__ __forceinline__ void Store() const {
    if (p.out_float != nullptr) return;
    const bool leads = ptx::elect_sync();
    Phases phases;
    Task::ForEach(p, [&](const Task& task) {
      for (uint32_t stage = 0; stage < kQueryTiles; ++stage) {
        control.tiles[stage].corr_epi_full.Wait(phases.OfTask());
        if (leads) {
#pragma unroll
          for (int32_t panel = 0; panel < Panels(kWidths.value); ++panel) {
            ptx::cp_async_bulk_tensor_4d_store(&p.out,
                                               64 * panel,
                                               task.head,
                                               task.position + stage * task.positions_of_tile,
                                               task.batch,
                                               memory.Out(stage) + panel * PanelBytes(kTileRows));
          }
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read<0>();
        }
        __syncwarp();
        control.tiles[NextInBuffer(stage)].corr_epi_empty.Arrive();
      }
      phases.NextTask();
    });
  }

  // ---- All roles

  __device__ __forceinline__ void Run() const {
    const uint32_t warp = Warp(), group = Group();
    constexpr Registers kRegisters = Variant::kRegisters;
    if (warp == kLoadWarp && ptx::elect_sync()) control.Init();
    if (warp == kMmaWarp) ptx::tcgen05_alloc(&control.tensor_memory, kTensorColumns);
    __syncthreads();

    if (group < kCorrectionGroup) {
      ptx::setmaxnreg_inc<kRegisters.softmax>();
      Softmax();
    } else if (group == kCorrectionGroup) {
      ptx::setmaxnreg_dec<kRegisters.correction>();
      Correct();
    } else {
      ptx::setmaxnreg_dec<kRegisters.other>();
      if (warp == kMmaWarp) Multiply();
      if (warp == kLoadWarp) Load();
      if (warp == kStoreWarp) Store();
    }

    __syncthreads();  // tensor memory has been read
    if (Warp() == kMmaWarp) ptx::tcgen05_dealloc(control.tensor_memory, kTensorColumns);
  }
};

}  // namespace jax_fa4::sm100

using namespace jax_fa4;

#define FORWARD(Element, query_key, value, width_name, kind, Kind)                              \
  extern "C" __global__ void __launch_bounds__(sm100::kThreads, 1)                              \
      forward_##Element##_##width_name##_##kind(const __grid_constant__ sm100::Parameters p) {  \
    RunForward<sm100::Forward<sm100::Variant<ptx::Element, query_key, value, sm100::Kind>>>(p); \
  }
#define FORWARD_KINDS(Element, query_key, value, width_name)            \
  FORWARD(Element, query_key, value, width_name, full, Kind::kFull)     \
  FORWARD(Element, query_key, value, width_name, bounds, Kind::kBounds) \
  FORWARD(Element, query_key, value, width_name, softcap, Kind::kSoftcap)
#define FORWARD_WIDTHS(Element)         \
  FORWARD_KINDS(Element, 64, 64, 64)    \
  FORWARD_KINDS(Element, 96, 96, 96)    \
  FORWARD_KINDS(Element, 128, 128, 128) \
  FORWARD_KINDS(Element, 192, 128, 192_128)

FORWARD_WIDTHS(float16)
FORWARD_WIDTHS(bfloat16)
