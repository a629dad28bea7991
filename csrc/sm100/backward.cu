// FlashAttention-4, backward: attention's gradients for Blackwell, on tensor cores that work by
// themselves.
//
// A CTA keeps a block of 128 keys and goes through the blocks of rows that see some of it, of all
// query heads that share it. Products are transposed, a key to a lane. Its warps have roles:
//
//   load      K Q V dO   |   Q      dO   |   Q      dO   |
//   MMA       S . dP . dV S dK dQ dP . dV S dK dQ dP . dV . dK dQ     S^T = K Q^T, dP^T = V dO^T
//   compute     P . . dS  . P  . . . dS   . P . . . dS     dV dK      P^T = 2^(S^T - lse)
//   reduce                       dQ            dQ            dQ       dS^T = P^T (dP^T - delta)
//   add                           dQ            dQ            dQ
//
// with dV += P^T dO, dK += dS^T Q and dQ = dS K, which is added to the sums of all blocks of keys
// in global memory. S, P, dP, dS, dQ, dV and dK are in tensor memory; dS is in shared memory too.
// Whoever hands on a part of it, or of shared memory, arrives at one of the barriers of
// backward_barriers.h.
//
// Source: Zadouri et al., "FlashAttention-4" (2026), section 3.2.

#include "csrc/common/shared_memory.h"
#include "csrc/ptx/bulk.h"
#include "csrc/ptx/copy.h"
#include "csrc/ptx/tcgen05.h"
#include "csrc/ptx/turns.h"
#include "csrc/ptx/warp.h"
#include "csrc/sm100/backward_barriers.h"
#include "csrc/sm100/backward_config.h"
#include "csrc/sm100/backward_products.h"
#include "csrc/sm100/backward_task.h"
#include "csrc/sm100/backward_variant.h"
#include "csrc/sm100/backward_weights.h"

namespace jax_fa4::sm100 {

using Kind = MaskKind;

// Warps of a CTA: three warpgroups, a thread of each for a lane of tensor memory, and single warps.
inline constexpr uint32_t kReduceGroup = 0, kComputeGroup = 1, kOtherGroup = 3;
inline constexpr uint32_t kMmaWarp = kOtherGroup * 4, kLoadWarp = kMmaWarp + 1,
                          kAddWarp = kMmaWarp + 2;

// Who a thread is. Read anew wherever it is needed, and not kept in a register through all that
// lies between.
__device__ __forceinline__ uint32_t Thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ uint32_t Lane() { return Thread() % 32; }
__device__ __forceinline__ uint32_t TensorLane() { return Thread() % 128; }
__device__ __forceinline__ uint32_t Warp() { return Uniform(Thread() / 32); }
__device__ __forceinline__ uint32_t Group() { return Uniform(Thread() / 128); }

// For all lanes of a warp, behind what they have done.
__device__ __forceinline__ void ArriveOnce(Barrier& barrier) {
  __syncwarp();
  if (Lane() == 0) barrier.Arrive();
}

template <class Variant>
struct Backward {
  static constexpr BackwardShape kShape = Variant::kShape;
  static constexpr BackwardColumns kColumns = Variant::kColumns;
  static constexpr int32_t kRows = Variant::kRows, kKeys = Variant::kKeys;
  static constexpr int32_t kShare = Variant::kShare;
  using Memory = BackwardMemory<Variant>;
  using Control = BackwardControl<Variant>;
  using Task = BackwardTask<Variant>;
  using Blocks = RowBlocks<Variant>;
  using QueryPlace = RingPlace<kBackwardQueryStages>;
  using DoutPlace = RingPlace<Memory::kDoutStages>;

  const BackwardParameters& p;
  Memory memory;
  Control& control;

  // The address of tensor memory in the lanes that this warp accesses.
  __device__ __forceinline__ uint32_t OwnLanes() const {
    return Uniform(control.tensor_memory + (Warp() % 4 * 32 << 16));
  }
  // Of arrays (B, N, row_blocks). What it counts is large.
  __device__ __forceinline__ uint32_t BlockIndex(const Task& task, const Blocks& blocks) const {
    return (task.batch * p.heads + task.head + blocks.InGroup()) * p.row_blocks + blocks.Block();
  }

  // ---- Load

  __device__ __forceinline__ void Load() const {
    const bool leads = ptx::elect_sync();
    const Task task(p);
    Blocks blocks(p, task);
    QueryPlace query;
    DoutPlace dout;
    bool first = true;
#pragma unroll 1
    while (blocks.Next()) {
      const uint32_t head = task.head + blocks.InGroup(), row = blocks.Block() * kRows;
      if (first && ptx::elect_sync()) {
        LoadTile<kKeys, kShape.width>(memory.Key(),
                                      p.key,
                                      task.kv_head,
                                      task.keys.begin,
                                      ElementOf(task.batch, p.key_batch),
                                      control.k_full);
      }
      control.q_empty[query.stage].Wait(query.parity ^ 1);
      __syncwarp();  // else a lane may be left behind and miss a phase
      if (leads) LoadQuery(task, head, row, BlockIndex(task, blocks), query.stage);
      if (first && ptx::elect_sync()) {
        LoadTile<kKeys, kShape.value_width>(memory.Value(),
                                            p.value,
                                            task.kv_head,
                                            task.keys.begin,
                                            ElementOf(task.batch, p.value_batch),
                                            control.v_full);
      }
      control.do_empty[dout.stage].Wait(dout.parity ^ 1);
      __syncwarp();
      if (leads) {
        LoadTile<kRows, kShape.value_width>(
            memory.Dout(dout.stage), p.dout, head, row, task.batch, control.do_full[dout.stage]);
      }
      first = false;
      query.Advance();
      dout.Advance();
    }
    // Shared memory has to outlive the products that read it, and barriers the arrivals at them.
    for (int32_t i = 0; i < kBackwardQueryStages; ++i, query.Advance()) {
      control.q_empty[query.stage].Wait(query.parity ^ 1);
    }
    for (int32_t i = 0; i < Memory::kDoutStages; ++i, dout.Advance()) {
      control.do_empty[dout.stage].Wait(dout.parity ^ 1);
    }
  }

  // Q, and what else rows need.
  __device__ __forceinline__ void LoadQuery(
      const Task& task, uint32_t head, uint32_t row, uint32_t block, int32_t stage) const {
    constexpr uint32_t kBytes = kRows * sizeof(float);
    Barrier& full = control.q_full[stage];
    ptx::mbarrier_arrive_expect_tx(full.Get(), BackwardQueryBytes(kShape) + 2 * kBytes);
#pragma unroll
    for (int32_t panel = 0; panel < Panels(kShape.width); ++panel) {
      ptx::cp_async_bulk_tensor_4d_load(memory.Query(stage) + panel * PanelBytes(kRows),
                                        &p.query,
                                        64 * panel,
                                        head,
                                        row,
                                        ElementOf(task.batch, p.query_batch),
                                        full.Get());
    }
    auto& numbers = control.row_numbers[stage];
    ptx::cp_async_bulk_load(
        numbers.lse_log2, p.lse_log2 + int64_t{block} * kRows, kBytes, full.Get());
    ptx::cp_async_bulk_load(numbers.delta, p.delta + int64_t{block} * kRows, kBytes, full.Get());
  }

  // ---- MMA

  __device__ __forceinline__ void Multiply() const {
    const BackwardProducts<Variant> products(control.tensor_memory, memory);
    const bool leads = ptx::elect_sync();
    const Task task(p);
    Blocks blocks(p, task);
    if (!blocks.Next()) return;
    QueryPlace query, next_query;
    DoutPlace dout;
    uint32_t phase = 0;  // of s_ready and the others: the number of the block
    bool add = false;

    // S^T, of the block that comes next.
    const auto key_query = [&] {
      control.q_full[next_query.stage].Wait(next_query.parity);
      if (blocks.Idle()) {
        ClearIdle<kShape.width>(memory.Query(next_query.stage), next_query.stage);
      }
      __syncwarp();
      if (leads) {
        products.KeyQuery(next_query.stage);
        ptx::tcgen05_commit(control.s_ready.Get());
      }
    };
    // dP^T of the same, then dV.
    const auto value_dout = [&] {
      control.do_full[dout.stage].Wait(dout.parity);
      if (blocks.Idle()) {
        ClearIdle<kShape.value_width>(memory.Dout(dout.stage), next_query.stage);
      }
      if (kColumns.dq == kColumns.dp) {
        control.dq_empty.Wait(phase ^ 1);
        ptx::tcgen05_fence_after_thread_sync();
      }
      __syncwarp();
      if (leads) {
        products.ValueDout(dout.stage);
        ptx::tcgen05_commit(control.dp_ready.Get());
      }
    };
    const auto weight_dout = [&] {
      control.p_ready.Wait(phase);
      ptx::tcgen05_fence_after_thread_sync();
      if (leads) {
        products.WeightDout(dout.stage, add);
        ptx::tcgen05_commit(control.do_empty[dout.stage].Get());
      }
      dout.Advance();
    };
    // dK and dQ.
    const auto dlogits = [&](bool add_to_dk) {
      control.ds_ready.Wait(phase);
      if (kColumns.dq != kColumns.dp) control.dq_empty.Wait(phase ^ 1);
      ptx::tcgen05_fence_after_thread_sync();
      if (leads) {
        products.DlogitsQuery(query.stage, add_to_dk);
        ptx::tcgen05_commit(control.q_empty[query.stage].Get());
        products.DlogitsKey();
        ptx::tcgen05_commit(control.dq_ready.Get());
      }
    };

    const KeySpan hull = Variant::kKind == Kind::kFull ? task.keys : HullOfElement(task);
    const bool has_unseen = HasUnseen(task.keys, hull);
    control.k_full.Wait(0);
    if (has_unseen) ClearUnseen<kKeys, kShape.width>(memory.Key(), task.keys, hull);
    key_query();
    control.v_full.Wait(0);
    if (has_unseen) ClearUnseen<kKeys, kShape.value_width>(memory.Value(), task.keys, hull);
    value_dout();
    weight_dout();
#pragma unroll 1
    while (blocks.Next()) {
      next_query.Advance();
      key_query();
      dlogits(add);
      add = true;
      phase ^= 1;
      value_dout();
      weight_dout();
      query = next_query;
    }
    if (leads) ptx::tcgen05_commit(control.dv_ready.Get());
    dlogits(add);
    if (leads) ptx::tcgen05_commit(control.dk_ready.Get());
  }

  // From the first to the last key that some row of the batch element sees; all keys of the others
  // may hold NaN.
  __device__ __forceinline__ KeySpan HullOfElement(const Task& task) const {
    const RowBlockHull* const hulls = task.Hulls(p);
    KeySpan hull = {~0u, 0};
#pragma unroll 1
    for (uint32_t block = Lane(); block < static_cast<uint32_t>(p.row_blocks); block += 32) {
      const KeySpan span = {static_cast<uint32_t>(hulls[block].begin),
                            static_cast<uint32_t>(hulls[block].end)};
      if (!span.Empty()) hull = hull.HullWith(span);
    }
    return HullOfLanes(hull);
  }

  // Makes rows that see nothing zeros: their weights are 0, but what they hold may be NaN.
  template <int32_t kWidth>
  __device__ __forceinline__ void ClearIdle(unsigned char* tile, int32_t stage) const {
#pragma unroll 1
    for (uint32_t row = Lane(); row < kRows; row += 32) {
      if (control.row_numbers[stage].lse_log2[row] != Infinity()) continue;
#pragma unroll 1
      for (uint32_t piece = 0; piece < 8 * Panels(kWidth); ++piece) {
        // Lanes begin at different pieces, which lie in different banks.
        unsigned char* const start = tile + piece / 8 * PanelBytes(kRows) + row * 128;
        *reinterpret_cast<uint4*>(start + (piece + row) % 8 * 16) = make_uint4(0, 0, 0, 0);
      }
    }
    ptx::fence_proxy_async();
    __syncwarp();
  }

  // ---- Compute

  // A warpgroup has half of the rows.
  __device__ __forceinline__ void Compute() const {
    constexpr int32_t kWords = kShare / 32;
    const uint32_t half = Group() - kComputeGroup, lanes = OwnLanes();
    const uint32_t tensor_s = lanes + kColumns.s + half * kShare;
    const uint32_t tensor_dp = lanes + kColumns.dp + half * kShare;
    const Task task(p);
    const float of_logits = ScaleOf(p, task.batch);
    const BackwardScale scale(of_logits, p.softcap);
    SeenRows<Variant> seen(p, task, task.keys.begin + Warp() % 4 * 32);
    Blocks blocks(p, task);
    QueryPlace query;
    uint32_t phase = 0;
    const bool some = blocks.Next();
    bool more = some;
    if (more) seen.Prefetch(blocks.Block() * kRows + half * kShare);
#pragma unroll 1
    while (more) {
      const bool masked = seen.Find(blocks.Block() * kRows + half * kShare);
      more = blocks.Next();
      if (more) seen.Prefetch(blocks.Block() * kRows + half * kShare);

      const auto& numbers = control.row_numbers[query.stage];
      control.q_full[query.stage].Wait(query.parity);
      control.s_ready.Wait(phase);
      ptx::tcgen05_fence_after_thread_sync();
      float weights[kWords][32];
      if (masked) {
        ComputeWeights<true>(weights, tensor_s, numbers.lse_log2 + half * kShare, scale, seen);
      } else {
        ComputeWeights<false>(weights, tensor_s, numbers.lse_log2 + half * kShare, scale, seen);
      }
      ptx::tcgen05_wait_st();
      ptx::tcgen05_fence_before_thread_sync();
      ArriveOnce(control.p_ready);

      control.dp_ready.Wait(phase);
      ptx::tcgen05_fence_after_thread_sync();
      ComputeDlogits(weights, tensor_dp, numbers.delta + half * kShare, half);
      ptx::tcgen05_wait_st();
      ptx::tcgen05_fence_before_thread_sync();
      ptx::fence_proxy_async();
      ArriveOnce(control.ds_ready);
      query.Advance();
      phase ^= 1;
    }

    if (some) {
      control.dv_ready.Wait(0);
      ptx::tcgen05_fence_after_thread_sync();
    }
    Stage<kShape.value_width>(memory.Value(), lanes + kColumns.dv, half, 1, some);
    Store<kShape.value_width>(p.dvalue, memory.Value(), task, kComputeGroup * 4);
    if (some) {
      control.dk_ready.Wait(0);
      ptx::tcgen05_fence_after_thread_sync();
    }
    Stage<kShape.width>(memory.Key(), lanes + kColumns.dk, half, of_logits, some);
    Store<kShape.width>(p.dkey, memory.Key(), task, kComputeGroup * 4 + 1);
  }

  // P takes the place of S.
  template <bool kMasked>
  static __device__ __forceinline__ void ComputeWeights(float (&weights)[kShare / 32][32],
                                                        uint32_t tensor_s,
                                                        const float* lse_log2,
                                                        const BackwardScale& scale,
                                                        const SeenRows<Variant>& seen) {
    // What a cap takes leaves no room for all rows at once.
    constexpr bool kAtOnce = Variant::kKind != Kind::kSoftcap;
    const auto load = [&](int32_t i) { ptx::tcgen05_ld_32x32b(tensor_s + 32 * i, weights[i]); };
    if (kAtOnce) {
#pragma unroll
      for (int32_t i = 0; i < kShare / 32; ++i) load(i);
      ptx::tcgen05_wait_ld();
    }
#pragma unroll
    for (int32_t i = 0; i < kShare / 32; ++i) {
      if (!kAtOnce) {
        load(i);
        ptx::tcgen05_wait_ld();
      }
      uint32_t packed[16];
      Weigh<Variant, kMasked>(weights[i], packed, lse_log2 + 32 * i, scale, seen.words[i]);
      ptx::tcgen05_st_32x32b(tensor_s + 16 * i, packed);
    }
  }

  // dS takes the place of dP, and is a key's row of the tile in shared memory.
  __device__ __forceinline__ void ComputeDlogits(const float (&weights)[kShare / 32][32],
                                                 uint32_t tensor_dp,
                                                 const float* deltas,
                                                 uint32_t half) const {
    const uint32_t key = TensorLane(), column = half * kShare;
    unsigned char* const tile = memory.Dlogits() + column / 64 * PanelBytes(kKeys) + key * 128;
#pragma unroll
    for (int32_t i = 0; i < kShare / 32; ++i) {
      float dp[32];
      uint32_t packed[16];
      ptx::tcgen05_ld_32x32b(tensor_dp + 32 * i, dp);
      ptx::tcgen05_wait_ld();
      Differentiate<Variant>(weights[i], dp, packed, deltas + 32 * i);
      ptx::tcgen05_st_32x32b(tensor_dp + 16 * i, packed);
#pragma unroll
      for (int32_t piece = 0; piece < 4; ++piece) {
        const uint32_t place = PlaceOfPiece(key, column % 64 / 8 + 4 * i + piece);
        *reinterpret_cast<uint4*>(tile + place * 16) = make_uint4(
            packed[4 * piece], packed[4 * piece + 1], packed[4 * piece + 2], packed[4 * piece + 3]);
      }
    }
  }

  // Half of the columns of a key of dK or dV, times `factor`; zeros if nothing was added.
  template <int32_t kWidth>
  static __device__ __forceinline__ void Stage(
      unsigned char* tile, uint32_t tensor, uint32_t half, float factor, bool some) {
    constexpr int32_t kPiece = 16;
    static_assert(kWidth % (2 * kPiece) == 0);
    const uint32_t key = TensorLane(), first = half * (kWidth / 2);
#pragma unroll 1
    for (uint32_t column = first; column < first + kWidth / 2; column += kPiece) {
      float x[kPiece];
      uint32_t packed[kPiece / 2] = {};
      if (some) {
        ptx::tcgen05_ld_32x32b(tensor + column, x);
        ptx::tcgen05_wait_ld();
#pragma unroll
        for (int32_t i = 0; i < kPiece; i += 2) {
          packed[i / 2] = Pack<typename Variant::Element>(x[i] * factor, x[i + 1] * factor);
        }
      }
#pragma unroll
      for (int32_t i = 0; i < kPiece / 2; i += 4) {
        const uint32_t place = PlaceOfPiece(key, column % 64 / 8 + i / 4);
        *reinterpret_cast<uint4*>(tile + column / 64 * PanelBytes(kKeys) + key * 128 + place * 16) =
            make_uint4(packed[i], packed[i + 1], packed[i + 2], packed[i + 3]);
      }
    }
  }

  // By one lane of this warp.
  template <int32_t kWidth>
  static __device__ __forceinline__ void Store(const TensorMap& map,
                                               const unsigned char* tile,
                                               const Task& task,
                                               uint32_t warp) {
    ptx::fence_proxy_async();
    StoreBarrier::Wait();
    if (Warp() == warp && ptx::elect_sync()) {
#pragma unroll
      for (int32_t panel = 0; panel < Panels(kWidth); ++panel) {
        ptx::cp_async_bulk_tensor_4d_store(&map,
                                           64 * panel,
                                           task.kv_head,
                                           task.keys.begin,
                                           task.batch,
                                           tile + panel * PanelBytes(kKeys));
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();
    }
    __syncwarp();
  }

  // ---- Reduce

  // A thread has a row of dQ. Of 64 rows, lanes from 16 on have the columns from 128 on.
  static constexpr int32_t kOwnColumns = kRows == 64 ? 128 : kShape.width;
  static constexpr int32_t kPieceColumns = BackwardPieceColumns(kShape);
  static constexpr int32_t kPieces = kOwnColumns / kPieceColumns;
  static constexpr uint32_t kPieceBytes = BackwardPieceBytes(kShape);
  static_assert(kPieces % 2 == 0);

  // Stages dQ. Four columns of all rows lie together, here and in global memory.
  __device__ __forceinline__ void Reduce() const {
    const uint32_t tensor_dq = OwnLanes() + kColumns.dq;
    const bool has_upper = kRows == 64 && Lane() >= 16;
    const uint32_t row = kRows == 64 ? TensorLane() / 32 * 16 + Lane() % 16 : TensorLane();
    unsigned char* const staged =
        memory.Dquery() + row * 16 + (has_upper ? 128 / kPieceColumns * kPieceBytes : 0);
    const Task task(p);
    Blocks blocks(p, task);
    uint32_t phase = 0;
#pragma unroll 1
    while (blocks.Next()) {
      float x[kOwnColumns / 32][32];
      control.dq_ready.Wait(phase);
      ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
      for (int32_t i = 0; i < kOwnColumns / 32; ++i) {
        ptx::tcgen05_ld_32x32b(tensor_dq + 32 * i, x[i]);
      }
      ptx::tcgen05_wait_ld();
      ptx::tcgen05_fence_before_thread_sync();
      ArriveOnce(control.dq_empty);

#pragma unroll
      for (int32_t piece = 0; piece < kPieces; ++piece) {
        PieceBarrier::Empty(piece).Wait();
        if (!has_upper || 128 + piece * kPieceColumns < kShape.width) {
#pragma unroll
          for (int32_t column = 0; column < kPieceColumns; column += 4) {
            const int32_t first = piece * kPieceColumns + column;
            const float* const four = &x[first / 32][first % 32];
            *reinterpret_cast<float4*>(staged + OffsetOf(piece) + column / 4 * kRows * 16) =
                make_float4(four[0], four[1], four[2], four[3]);
          }
        }
        ptx::fence_proxy_async();
        PieceBarrier::Full(piece).Arrive();
      }
      phase ^= 1;
    }
    PieceBarrier::Empty(0).Wait();
  }

  // Of a piece in the stages.
  static __device__ __forceinline__ constexpr uint32_t OffsetOf(int32_t piece) {
    return piece % BackwardPieceStages(kShape) * kPieceBytes;
  }

  // ---- Add

  // Adds what is staged to the sums.
  __device__ __forceinline__ void Add() const {
    const Task task(p);
    Blocks blocks(p, task);
    PieceBarrier::Empty(0).Arrive();
#pragma unroll 1
    while (blocks.Next()) {
      const uint32_t block = BlockIndex(task, blocks);
      float* const sum = p.dquery_sum + uint64_t{block} * (kRows * kShape.width);
      const auto add = [&](int32_t piece) {
        ptx::cp_reduce_async_bulk_add_f32(
            sum + piece * (kPieceBytes / 4), memory.Dquery() + OffsetOf(piece), kPieceBytes);
      };
      if (p.deterministic && ptx::elect_sync()) AwaitTurn(task, blocks, block);
      __syncwarp();
#pragma unroll
      for (int32_t piece = 0; piece < kPieces; ++piece) {
        PieceBarrier::Full(piece).Wait();
        if (ptx::elect_sync()) {
          add(piece);
          if (kRows == 64 && piece == 0) add(128 / kPieceColumns);
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read<1>();  // for the piece before, where the next one goes
        }
        __syncwarp();
        PieceBarrier::Empty(piece + 1).Arrive();
      }
      if (p.deterministic && ptx::elect_sync()) EndTurn(block);
      __syncwarp();
    }
    if (ptx::elect_sync()) ptx::cp_async_bulk_wait_group_read<0>();
    __syncwarp();
  }

  // Where the order of additions is fixed, blocks of keys add in their order, from the first that
  // some row of the block sees.
  __device__ __forceinline__ void AwaitTurn(const Task& task,
                                            const Blocks& blocks,
                                            uint32_t block) const {
    uint32_t turn = task.block;
    if (Variant::kKind != Kind::kFull) {
      turn -= static_cast<uint32_t>(task.Hulls(p)[blocks.Block()].begin) / kKeys;
    }
    while (ptx::ld_acquire_gpu_global(&p.turns[block]) != turn) {
    }
    ptx::fence_proxy_async_all();
  }
  __device__ __forceinline__ void EndTurn(uint32_t block) const {
    ptx::cp_async_bulk_wait_group_0();
    ptx::fence_proxy_async_all();
    ptx::red_release_gpu_global_add(&p.turns[block], 1);
  }

  // ---- All roles

  __device__ __forceinline__ void Run() const {
    const uint32_t warp = Warp(), group = Group();
    constexpr BackwardRegisters kRegisters = Variant::kRegisters;
    constexpr uint32_t kLaunched = (64 << 10) / BackwardThreads(kShape);  // registers of a thread
    if (warp == kLoadWarp && ptx::elect_sync()) control.Init();
    if (warp == kMmaWarp) ptx::tcgen05_alloc(&control.tensor_memory, kBackwardTensorColumns);
    __syncthreads();

    if (group == kReduceGroup) {
      if constexpr (kRegisters.reduce > kLaunched) {
        ptx::setmaxnreg_inc<kRegisters.reduce>();
      } else {
        ptx::setmaxnreg_dec<kRegisters.reduce>();
      }
      Reduce();
    } else if (group < kOtherGroup) {
      ptx::setmaxnreg_inc<kRegisters.compute>();
      Compute();
    } else {
      ptx::setmaxnreg_dec<kRegisters.other>();
      if (warp == kMmaWarp) Multiply();
      if (warp == kLoadWarp) Load();
      if (warp == kAddWarp) Add();
    }

    __syncthreads();  // tensor memory has been read
    if (Warp() == kMmaWarp) {
      ptx::tcgen05_dealloc(control.tensor_memory, kBackwardTensorColumns);
    }
  }
};

template <class Variant>
__device__ __forceinline__ void RunBackward(const BackwardParameters& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& control = *reinterpret_cast<BackwardControl<Variant>*>(shared);
  Backward<Variant>{p, {shared}, control}.Run();
}

}  // namespace jax_fa4::sm100

using namespace jax_fa4;

#define BACKWARD(Element, shape, width_name, kind, Kind)                                         \
  extern "C" __global__ void __launch_bounds__(sm100::BackwardThreads({}), 1)                    \
      backward_##Element##_##width_name##_##kind(const __grid_constant__ BackwardParameters p) { \
    sm100::RunBackward<sm100::BackwardVariant<ptx::Element, shape, sm100::Kind>>(p);             \
  }
#define BACKWARD_KINDS(Element, shape, width_name)            \
  BACKWARD(Element, shape, width_name, full, Kind::kFull)     \
  BACKWARD(Element, shape, width_name, bounds, Kind::kBounds) \
  BACKWARD(Element, shape, width_name, softcap, Kind::kSoftcap)
#define BACKWARD_WIDTHS(Element)  \
  BACKWARD_KINDS(Element, 0, 64)  \
  BACKWARD_KINDS(Element, 1, 96)  \
  BACKWARD_KINDS(Element, 2, 128) \
  BACKWARD_KINDS(Element, 3, 192_128)

BACKWARD_WIDTHS(float16)
BACKWARD_WIDTHS(bfloat16)
