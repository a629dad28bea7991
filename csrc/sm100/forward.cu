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

__device__ __forceinline__ uint32_t TileRow() { return threadIdx.x % kTileRows; }
// Taken from one lane, a number is known to the compiler to be the same in all.
__device__ __forceinline__ uint32_t Warp() { return __shfl_sync(kAllLanes, threadIdx.x / 32, 0); }
__device__ __forceinline__ uint32_t GroupWarp() { return Warp() % (kTileRows / kWarpRows); }
// An address of tensor memory, in the lanes that this warp accesses.
__device__ __forceinline__ uint32_t InOwnLanes(uint32_t column) {
  return GroupWarp() * kWarpRows << 16 | column;
}

template <class Variant>
struct Forward {
  static constexpr Widths kWidths = Variant::kWidths;
  using Memory = SharedMemory<Variant>;
  using Task = sm100::Task<Variant::kKind>;
  using KvPlace = RingPlace<Memory::kKvStages>;

  const Parameters& p;
  Memory memory;
  typename Memory::Barriers& barriers;

  // ---- Load

  // Boxes of 64 columns, of a tile of so many.
  template <int32_t kWidth>
  static __device__ __forceinline__ void LoadTile(unsigned char* tile,
                                                  const TensorMap& map,
                                                  int32_t head,
                                                  int32_t position,
                                                  int32_t batch,
                                                  Barrier& full) {
    ptx::mbarrier_arrive_expect_tx(full.Get(), TileBytes(kWidth));
#pragma unroll
    for (int32_t panel = 0; panel < Panels(kWidth); ++panel) {
      ptx::cp_async_bulk_tensor_4d_load(
          tile + panel * kPanelBytes, &map, 64 * panel, head, position, batch, full.Get());
    }
  }

  __device__ __forceinline__ void Load() const {
    const bool leads = ptx::elect_sync();
    KvPlace place;
    uint32_t task_parity = 0;
    Task::ForEach(p, [&](const Task& task) {
      const KeyBlocks blocks = task.Blocks(p);
      const auto load_query = [&](uint32_t stage) {
        barriers.q_load_empty[stage].Wait(task_parity ^ 1);
        if (leads) {
          LoadTile<kWidths.query_key>(memory.Query(stage),
                                      p.query,
                                      task.head,
                                      task.position + stage * task.positions_of_tile,
                                      task.batch % p.query_batch,
                                      barriers.q_load_full[stage]);
        }
      };
      load_query(0);
#pragma unroll 1
      for (uint32_t block = blocks.end; block-- > blocks.first;) {
        barriers.kv_load_empty[place.stage].Wait(place.parity ^ 1);
        if (leads) {
          LoadTile<kWidths.query_key>(memory.KeyValue(place.stage),
                                      p.key,
                                      task.kv_head,
                                      block * kTileKeys,
                                      task.batch % p.key_batch,
                                      barriers.kv_load_full[place.stage]);
        }
        place.Advance();
        if (block + 1 == blocks.end) load_query(1);
        barriers.kv_load_empty[place.stage].Wait(place.parity ^ 1);
        if (leads) {
          LoadTile<kWidths.value>(memory.KeyValue(place.stage),
                                  p.value,
                                  task.kv_head,
                                  block * kTileKeys,
                                  task.batch % p.value_batch,
                                  barriers.kv_load_full[place.stage]);
        }
        place.Advance();
      }
      task_parity ^= 1;
    });
    // Shared memory has to outlive the products that read it.
#pragma unroll 1
    for (int32_t i = 0; i < Memory::kKvStages; ++i) {
      barriers.kv_load_empty[place.stage].Wait(place.parity ^ 1);
      place.Advance();
    }
    for (int32_t i = 0; i < kQueryTiles; ++i) barriers.q_load_empty[i].Wait(task_parity ^ 1);
  }

  // ---- MMA

  // Keys that no row of the task sees have weights of 0, but their values may be NaN. The copy
  // engine has zeros for keys from S on.
  __device__ __forceinline__ void ClearUnseen(unsigned char* value,
                                              KeySpan hull,
                                              uint32_t block) const {
    if (Variant::kKind == Kind::kFull) return;
    const uint32_t first = block * kTileKeys, keys = p.keys;
    const auto clear = [&](uint32_t begin, uint32_t end) {
#pragma unroll 1
      for (int32_t panel = 0; panel < Panels(kWidths.value); ++panel) {
#pragma unroll 1
        for (uint32_t at = begin * 128 + threadIdx.x % 32 * 16; at < end * 128; at += 32 * 16) {
          *reinterpret_cast<uint4*>(value + panel * kPanelBytes + at) = make_uint4(0, 0, 0, 0);
        }
      }
    };
    const uint32_t behind = min(first + kTileKeys, keys);
    if (hull.begin <= first && hull.end >= behind) return;
    if (hull.begin > first) clear(0, hull.begin - first);
    if (hull.end < behind) clear(hull.end - first, behind - first);
    ptx::fence_proxy_async();
    __syncwarp();
  }

  __device__ __forceinline__ void Multiply() const {
    using P = Products<Variant>;
    const bool leads = ptx::elect_sync();
    KvPlace place;
    uint32_t task_parity = 0, block_parity = 0;

    Task::ForEach(p, [&](const Task& task) {
      const KeyBlocks blocks = task.Blocks(p);
      const bool negate = ScaleOf(p, task.batch) < 0;
      const auto query_key = [&](int32_t stage, const unsigned char* key) {
        if (leads) {
          P::QueryKey(stage, memory.Query(stage), key, negate);
          ptx::tcgen05_commit(barriers.s_ready[stage].Get());
        }
      };
      const auto weight_value = [&](int32_t stage, const unsigned char* value, bool add) {
        barriers.p_o_rescale[stage].Wait(block_parity);
        ptx::tcgen05_fence_after_thread_sync();
        if (leads) P::template WeightValue<0, Variant::kFirstPart>(stage, value, add);
        barriers.p_ready_2[stage].Wait(block_parity);
        ptx::tcgen05_fence_after_thread_sync();
        if (leads) P::template WeightValue<Variant::kFirstPart, kTileKeys>(stage, value, true);
      };

      barriers.q_load_full[0].Wait(task_parity);
      barriers.kv_load_full[place.stage].Wait(place.parity);
      query_key(0, memory.KeyValue(place.stage));
      barriers.q_load_full[1].Wait(task_parity);
      query_key(1, memory.KeyValue(place.stage));
      if (leads) ptx::tcgen05_commit(barriers.kv_load_empty[place.stage].Get());
      place.Advance();

      bool add = false;
#pragma unroll 1
      for (uint32_t block = blocks.end - 1; block > blocks.first; --block) {
        const KvPlace of_value = place;
        place.Advance();
        unsigned char* const value = memory.KeyValue(of_value.stage);
        const unsigned char* const key = memory.KeyValue(place.stage);
        barriers.kv_load_full[of_value.stage].Wait(of_value.parity);
        ClearUnseen(value, blocks.hull, block);
        weight_value(0, value, add);
        barriers.kv_load_full[place.stage].Wait(place.parity);
        query_key(0, key);
        weight_value(1, value, add);
        if (leads) ptx::tcgen05_commit(barriers.kv_load_empty[of_value.stage].Get());
        query_key(1, key);
        if (leads) ptx::tcgen05_commit(barriers.kv_load_empty[place.stage].Get());
        place.Advance();
        block_parity ^= 1;
        add = true;
      }

      if (leads) {
        for (int32_t i = 0; i < kQueryTiles; ++i) {
          ptx::tcgen05_commit(barriers.q_load_empty[i].Get());
        }
      }
      unsigned char* const value = memory.KeyValue(place.stage);
      barriers.kv_load_full[place.stage].Wait(place.parity);
      ClearUnseen(value, blocks.hull, blocks.first);
      for (int32_t stage = 0; stage < kQueryTiles; ++stage) {
        weight_value(stage, value, add);
        if (leads) ptx::tcgen05_commit(barriers.o_ready[stage].Get());
      }
      if (leads) ptx::tcgen05_commit(barriers.kv_load_empty[place.stage].Get());
      place.Advance();
      block_parity ^= 1;
      task_parity ^= 1;
    });
  }

  // ---- Softmax

  __device__ __forceinline__ void Softmax(uint32_t stage) const {
    const uint32_t row = TileRow();
    const StatisticsBarrier statistics(stage, GroupWarp());
    const uint32_t s_column = InOwnLanes(ColumnOfS(stage)), p_column = InOwnLanes(ColumnOfP(stage));
    uint32_t task_index = 0, block_parity = 0, corr_parity = 0;

    Task::ForEach(p, [&](const Task& task) {
      const KeyBlocks blocks = task.Blocks(p);
      const LogitScale scale(ScaleOf(p, task.batch), p.softcap);
      const bool exists = task.PositionOf(stage, row) < p.rows;
      // The keys that this row sees, and those that all rows of the warp see.
      KeySpan seen = blocks.hull, all = blocks.hull;
      if (Variant::kKind != Kind::kFull) {
        seen = task.Bounds(p).Of(task.PositionOf(stage, row));
        all = seen.Empty() ? KeySpan{0, ~0u} : seen;
        all = {__reduce_max_sync(kAllLanes, all.begin), __reduce_min_sync(kAllLanes, all.end)};
      }

      SoftmaxRow softmax;
#pragma unroll 1
      for (uint32_t block = blocks.end; block-- > blocks.first;) {
        const uint32_t first = block * kTileKeys;
        float s[kTileKeys];
        barriers.s_ready[stage].Wait(block_parity);
        ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
        for (int32_t k = 0; k < kTileKeys; k += 32) {
          ptx::tcgen05_ld_32x32b(s_column + k, reinterpret_cast<float (&)[32]>(s[k]));
        }
        ptx::tcgen05_wait_ld();

        if (Variant::kKind == Kind::kSoftcap) Cap(s, scale.into_cap);
        if (!all.Holds(KeySpan{first, first + kTileKeys})) Mask(s, seen, first);
        const auto step = softmax.Raise(Maximum(s, softmax.maximum), scale.scale_log2);
        barriers.row_scale[stage][row] = step.decay;
        ptx::tcgen05_fence_before_thread_sync();
        statistics.Arrive();

        WeighAndStore<0>(s, p_column, scale.scale_log2, step.reference, stage);
        barriers.softmax_corr_empty[stage].Wait(corr_parity);
        softmax.sum = fmaf(softmax.sum, step.decay, Sum(s));
        block_parity ^= 1;
        corr_parity ^= 1;
      }

      softmax.Close();
      const bool keep = !seen.Empty() && softmax.sum != 0;
      if (Variant::kCorrectionWritesOut) {
        barriers.row_scale[stage][row] = softmax.sum;
        statistics.Arrive();
      } else {
        WriteOut(task, task_index, stage, keep, softmax.sum);
      }
      if (exists) {
        const LogSumExp finished = keep ? softmax.Finish(scale) : LogSumExp{-Infinity(), 0};
        const int64_t index = task.IndexOf(p, stage, row);
        p.lse[index] = finished.lse;
        p.lse_rounding[index] = finished.rounding;
      }
      if (Variant::kCorrectionWritesOut) {
        barriers.softmax_corr_empty[stage].Wait(corr_parity);
        corr_parity ^= 1;
      }
      ++task_index;
    });
  }

  // Computes and stores the weights of fragments from kFirst on.
  template <int32_t kFirst>
  __device__ __forceinline__ void WeighAndStore(float (&s)[kTileKeys],
                                                uint32_t p_column,
                                                float scale_log2,
                                                float reference,
                                                uint32_t stage) const {
    uint32_t packed[16];
    Weigh<Variant, kFirst>(s, packed, scale_log2, reference);
    ptx::tcgen05_st_32x32b(p_column + kFirst / 2, packed);
    if constexpr (kFirst + 32 == Variant::kFirstPart || kFirst + 32 == kTileKeys) {
      ptx::tcgen05_wait_st();
      ptx::tcgen05_fence_before_thread_sync();
      (kFirst + 32 == kTileKeys ? barriers.p_ready_2 : barriers.p_o_rescale)[stage].Arrive();
    }
    if constexpr (kFirst + 32 < kTileKeys) {
      WeighAndStore<kFirst + 32>(s, p_column, scale_log2, reference, stage);
    }
  }

  // ---- Correction

  __device__ __forceinline__ void Correct() const {
    const uint32_t row = TileRow();
    uint32_t task_index = 0;

    Task::ForEach(p, [&](const Task& task) {
      const uint32_t count = task.Blocks(p).Count();
      const auto wait_for_row = [&](uint32_t stage) {
        StatisticsBarrier(stage, GroupWarp()).Wait();
        return barriers.row_scale[stage][row];
      };
      // The first product of a task does not add to O.
      wait_for_row(0);
      barriers.p_o_rescale[0].Arrive();
      barriers.softmax_corr_empty[0].Arrive();
      wait_for_row(1);
      barriers.p_o_rescale[1].Arrive();
#pragma unroll 1
      for (uint32_t i = 1; i < count; ++i) {
#pragma unroll
        for (uint32_t stage = 0; stage < kQueryTiles; ++stage) {
          const float decay = wait_for_row(stage);
          // Behind S, of which the softmax warp tells, are all products before it.
          ptx::tcgen05_fence_after_thread_sync();
          if (__any_sync(kAllLanes, decay < 1)) {
            RescaleRow<Variant>(InOwnLanes(ColumnOfO(stage, kWidths)), decay);
          }
          ptx::tcgen05_fence_before_thread_sync();
          barriers.p_o_rescale[stage].Arrive();
          // The other stage's, so that the two take turns.
          barriers.softmax_corr_empty[1 - stage].Arrive();
        }
      }
      barriers.softmax_corr_empty[1].Arrive();

      if (Variant::kCorrectionWritesOut) {
        for (uint32_t stage = 0; stage < kQueryTiles; ++stage) {
          const float sum = wait_for_row(stage);
          barriers.softmax_corr_empty[stage].Arrive();
          WriteOut(task, task_index, stage, sum != 0, sum);
        }
      }
      ++task_index;
    });
  }

  // ---- Out

  // A row of out, by the thread that has it in tensor memory.
  __device__ __forceinline__ void WriteOut(
      const Task& task, uint32_t task_index, uint32_t stage, bool keep, float sum) const {
    const uint32_t row = TileRow();
    const OutRow<Variant> out = {InOwnLanes(ColumnOfO(stage, kWidths)), 1 / sum, keep};
    barriers.o_ready[stage].Wait(task_index & 1);
    ptx::tcgen05_fence_after_thread_sync();
    if (p.out_float != nullptr) {
      const bool exists = task.PositionOf(stage, row) < p.rows;
      out.Store(exists ? p.out_float + task.IndexOf(p, stage, row) * p.value_width : nullptr,
                p.value_width);
      ptx::tcgen05_fence_before_thread_sync();
    } else {
      const auto place = Memory::OutPlaceOf(task_index, stage);
      // Where both stages share a buffer, who fills it has to see each of its phases end: parities
      // tell only neighbouring phases apart.
      if (Memory::kOutStages == 1 && place.use > 0) {
        barriers.corr_epi_empty[place.buffer].Wait(place.use & 1);
      }
      barriers.corr_epi_empty[place.buffer].Wait(place.use & 1 ^ 1);
      out.Stage(memory.Out(place.buffer), row);
      ptx::tcgen05_fence_before_thread_sync();
      ptx::fence_proxy_async();
      barriers.corr_epi_full[place.buffer].Arrive();
    }
  }

  __device__ __forceinline__ void Store() const {
    if (p.out_float != nullptr) return;
    const bool leads = ptx::elect_sync();
    uint32_t task_index = 0;
    Task::ForEach(p, [&](const Task& task) {
      for (uint32_t stage = 0; stage < kQueryTiles; ++stage) {
        const auto place = Memory::OutPlaceOf(task_index, stage);
        barriers.corr_epi_full[place.buffer].Wait(place.use & 1);
        if (leads) {
#pragma unroll
          for (int32_t panel = 0; panel < Panels(kWidths.value); ++panel) {
            ptx::cp_async_bulk_tensor_4d_store(&p.out,
                                               64 * panel,
                                               task.head,
                                               task.position + stage * task.positions_of_tile,
                                               task.batch,
                                               memory.Out(place.buffer) + panel * kPanelBytes);
          }
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read<0>();
        }
        __syncwarp();
        barriers.corr_epi_empty[place.buffer].Arrive();
      }
      ++task_index;
    });
  }

  // ---- All roles

  __device__ __forceinline__ void Run() const {
    const uint32_t warp = Warp(), group = warp / (kGroupThreads / 32);
    constexpr Registers kRegisters = Variant::kRegisters;
    if (warp == kLoadWarp && ptx::elect_sync()) barriers.Init();
    // All of tensor memory: it starts at address 0.
    if (warp == kMmaWarp) ptx::tcgen05_alloc(&barriers.tensor_memory, kTensorColumns);
    __syncthreads();

    if (group < kCorrectionGroup) {
      ptx::setmaxnreg_inc<kRegisters.softmax>();
      Softmax(group);
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
    if (warp == kMmaWarp) ptx::tcgen05_dealloc(0, kTensorColumns);
  }
};

template <class Variant>
__device__ __forceinline__ void RunForward(const Parameters& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const SharedMemory<Variant> memory = {shared};
  Forward<Variant>{p, memory, memory.Control()}.Run();
}

}  // namespace jax_fa4::sm100

using namespace jax_fa4;

#define FORWARD(Element, query_key, value, width_name, kind, Kind)                             \
  extern "C" __global__ void __launch_bounds__(sm100::kThreads, 1)                             \
      forward_##Element##_##width_name##_##kind(const __grid_constant__ sm100::Parameters p) { \
    sm100::RunForward<sm100::Variant<ptx::Element, query_key, value, sm100::Kind>>(p);         \
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
