// Attention for Blackwell (sm_100a), small enough to be read at once: a kernel to plant faults in.
//
// A CTA takes tiles of 128 queries of a head, one after the other, and goes through the keys in
// blocks of 64.
//
//   copy warp      Q | K V | K V | ...      a ring of two stages, each a block of K and one of V
//   MMA warp       S(0) S(1) O(0) S(2) O(1) ...   S(n) = Q K(n)^T is issued before O += P(n-1)
//   V(n-1) softmax warps  P(0) P(1) P(2) ...       a thread has a row: rescales O, writes P, and at
//   last O / l and lse
//
// Blocks are counted through all tiles: a barrier's phase is known from the count alone.

typedef unsigned u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap {
  char bytes[128];
};

constexpr u32 kQueries = 128;  // of a tile: the lanes of tensor memory
constexpr u32 kKeys = 64;      // of a block
constexpr u32 kWidth = 64;     // of a head: 128 bytes, a row of the swizzle
constexpr u32 kRowBytes = 2 * kWidth;
constexpr u32 kStages = 2;
constexpr u32 kSoftmaxWarps = 4;
constexpr u32 kCopyWarp = 4, kMmaWarp = 5, kThreads = 192;

// Columns of tensor memory.
constexpr u32 kS = 0, kP = 64, kO = 192, kColumns = 256;

struct Shared {
  alignas(1024) char q[kQueries * kRowBytes];
  alignas(1024) char k[kStages][kKeys * kRowBytes];
  alignas(1024) char v[kStages][kKeys * kRowBytes];
  alignas(1024) char o[kQueries * kRowBytes];
  u64 q_loaded, q_free;                            // a tile's Q
  u64 stage_loaded[kStages], stage_free[kStages];  // K and V of a block
  u64 s_ready, s_read;                             // S is computed; in registers
  u64 p_ready;                                     // P is written, and O rescaled
  u64 o_ready;                                     // P V is added
  u32 tensor;                                      // start of the tensor memory
};

// ---- PTX

#define FN __device__ __forceinline__
FN u32 Address(const void* x) { return static_cast<u32>(__cvta_generic_to_shared(x)); }
FN bool Elected() {
  u32 elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected;
}
FN void Init(u64& barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(Address(&barrier)), "r"(arrivals)
               : "memory");
}
FN void FenceInit() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FN void Arrive(u64& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(Address(&barrier)) : "memory");
}
FN void ArriveExpecting(u64& barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Address(&barrier)),
               "r"(bytes)
               : "memory");
}
// Waits for the end of a phase: phases are counted from 0, and parity is the last bit of the count.
FN void Wait(u64& barrier, u32 phase) {
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p; }"
        : "=r"(done)
        : "r"(Address(&barrier)), "r"(phase & 1)
        : "memory");
  }
}
FN void Sync(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
FN void Load(void* to, const TensorMap& map, u32 row, u32 head, u64& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3, %4}], [%5];" ::"r"(Address(to)),
      "l"(&map),
      "r"(0),
      "r"(row),
      "r"(head),
      "r"(Address(&barrier))
      : "memory");
}
FN void Store(const TensorMap& map, u32 row, u32 head, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
          &map),
      "r"(0),
      "r"(row),
      "r"(head),
      "r"(Address(from))
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
FN void WaitForStores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
FN void FenceProxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
FN void FenceBefore() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
FN void FenceAfter() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
FN void Allocate(u32& to, u32 columns) {
  asm volatile(
      "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(Address(&to)),
      "r"(columns)
      : "memory");
}
FN void Deallocate(u32 tensor, u32 columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tensor), "r"(columns));
}
FN void Commit(u64& barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   Address(&barrier))
               : "memory");
}
FN void Multiply(u32 d, u64 a, u64 b, u32 kind, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %4, 0;\n tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, "
      "%3, p; }" ::"r"(d),
      "l"(a),
      "l"(b),
      "r"(kind),
      "r"(u32(add))
      : "memory");
}
FN void MultiplyTensor(u32 d, u32 a, u64 b, u32 kind, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %4, 0;\n tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, "
      "%3, p; }" ::"r"(d),
      "r"(a),
      "l"(b),
      "r"(kind),
      "r"(u32(add))
      : "memory");
}
// clang-format off
#define LIST32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
               "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define EACH8(c, x, i) c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3]), c(x[i + 4]), c(x[i + 5]), c(x[i + 6]), c(x[i + 7])
#define EACH32(c, x) EACH8(c, x, 0), EACH8(c, x, 8), EACH8(c, x, 16), EACH8(c, x, 24)
// clang-format on
FN void LoadTensor(u32 at, u32 (&x)[32]) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 " LIST32 ", [%32];"
               : EACH32("=r", x)
               : "r"(at));
}
FN void StoreTensor(u32 at, const u32 (&x)[32]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], " LIST32 ";" ::EACH32("r", x), "r"(at)
               : "memory");
}
FN void WaitLoads() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
FN void WaitStores() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
FN float Exp2(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
FN float Log2(float x) {
  asm("lg2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
FN u32 PackBf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// A matrix of rows of 128 bytes with the 128-byte swizzle (PTX ISA 9.7.16.4.1). Offsets are in
// units of 16 bytes: between groups of 8 rows 1024 bytes, between panels of 64 columns none is
// used, since there is only one.
FN u64 Descriptor(const void* start) {
  return Address(start) >> 4 | u64{1} << 16 | u64{1024 >> 4} << 32 | u64{1} << 46 | u64{2} << 61;
}
// f32 D, bf16 A and B (9.7.16.4.2); B has its rows along K if b_is_transposed.
FN constexpr u32 Kind(u32 m, u32 n, bool b_is_transposed) {
  return 1 << 4 | 1 << 7 | 1 << 10 | u32(b_is_transposed) << 16 | n >> 3 << 17 | m >> 4 << 24;
}

// ---- Roles

struct Problem {
  u32 tiles_of_head, tiles, blocks;
  float scale;  // of logits, times log2(e)
};

FN u32 TilesOfCta(const Problem& problem) {
  return (problem.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention(const __grid_constant__ TensorMap q,
              const __grid_constant__ TensorMap k,
              const __grid_constant__ TensorMap v,
              const __grid_constant__ TensorMap o,
              float* lse,
              Problem problem) {
  extern __shared__ char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const u32 warp = threadIdx.x / 32, tiles = TilesOfCta(problem), blocks = problem.blocks;

  if (warp == kCopyWarp && Elected()) {
#pragma unroll 1
    for (u32 stage = 0; stage < kStages; ++stage) {
      Init(s.stage_loaded[stage], 1);
      Init(s.stage_free[stage], 1);
    }
    Init(s.q_loaded, 1);
    Init(s.q_free, 1);
    Init(s.s_ready, 1);
    Init(s.s_read, kSoftmaxWarps);
    Init(s.p_ready, kSoftmaxWarps);
    Init(s.o_ready, 1);
    FenceInit();
  }
  if (warp == kMmaWarp) Allocate(s.tensor, kColumns);
  Sync(0, kThreads);  // set up
  const u32 tensor = s.tensor;

  if (warp == kCopyWarp && Elected()) {
#pragma unroll 1
    for (u32 i = 0; i < tiles; ++i) {
      const u32 tile = blockIdx.x + i * gridDim.x, head = tile / problem.tiles_of_head;
      Wait(s.q_free, i + 1);  // the phase before the first counts as complete
      ArriveExpecting(s.q_loaded, sizeof(s.q));
      Load(s.q, q, tile % problem.tiles_of_head * kQueries, head, s.q_loaded);
#pragma unroll 1
      for (u32 block = 0; block < blocks; ++block) {
        const u32 n = i * blocks + block, stage = n % kStages;
        Wait(s.stage_free[stage], n / kStages + 1);
        ArriveExpecting(s.stage_loaded[stage], sizeof(s.k[stage]) + sizeof(s.v[stage]));
        Load(s.k[stage], k, block * kKeys, head, s.stage_loaded[stage]);
        Load(s.v[stage], v, block * kKeys, head, s.stage_loaded[stage]);
      }
    }
  }

  if (warp == kMmaWarp && Elected()) {
    const u32 count = tiles * blocks;
#pragma unroll 1
    for (u32 n = 0; n <= count; ++n) {
      if (n < count) {  // S = Q K^T
        const u32 stage = n % kStages;
        Wait(s.q_loaded, n / blocks);
        Wait(s.stage_loaded[stage], n / kStages);
        Wait(s.s_read, n + 1);
        FenceAfter();
#pragma unroll 1
        for (u32 i = 0; i < kWidth / 16; ++i) {
          Multiply(tensor + kS,
                   Descriptor(s.q + 32 * i),
                   Descriptor(s.k[stage] + 32 * i),
                   Kind(kQueries, kKeys, false),
                   i > 0);
        }
        Commit(s.s_ready);
        if (n % blocks == blocks - 1) Commit(s.q_free);
      }
      if (n > 0) {  // O += P V, of the block before
        const u32 stage = (n - 1) % kStages;
        Wait(s.p_ready, n - 1);
        FenceAfter();
#pragma unroll 1
        for (u32 i = 0; i < kKeys / 16; ++i) {
          MultiplyTensor(tensor + kO,
                         tensor + kP + 8 * i,
                         Descriptor(s.v[stage] + 16 * kRowBytes * i),
                         Kind(kQueries, kWidth, true),
                         (n - 1) % blocks > 0 || i > 0);
        }
        Commit(s.stage_free[stage]);
        Commit(s.o_ready);
      }
    }
  }

  if (warp < kSoftmaxWarps) {
    const u32 lanes = tensor + (warp * 32 << 16);
#pragma unroll 1
    for (u32 i = 0; i < tiles; ++i) {
      const u32 tile = blockIdx.x + i * gridDim.x, head = tile / problem.tiles_of_head;
      float top = __int_as_float(0xff800000), sum = 0;
#pragma unroll 1
      for (u32 block = 0; block < blocks; ++block) {
        const u32 n = i * blocks + block;
        u32 x[2][32], p[32];
        Wait(s.s_ready, n);
        FenceAfter();
        LoadTensor(lanes + kS, x[0]);
        LoadTensor(lanes + kS + 32, x[1]);
        WaitLoads();
        FenceBefore();
        if (Elected()) Arrive(s.s_read);

        float highest = top;
        for (u32 j = 0; j < kKeys; ++j)
          highest = fmaxf(highest, __uint_as_float(x[j / 32][j % 32]));
        const float rescale = Exp2((top - highest) * problem.scale);
        top = highest;
        sum *= rescale;
        for (u32 j = 0; j < kKeys; j += 2) {
          float e[2];
          for (u32 h = 0; h < 2; ++h) {
            e[h] = Exp2((__uint_as_float(x[j / 32][j % 32 + h]) - top) * problem.scale);
            sum += e[h];
          }
          p[j / 2] = PackBf16(e[0], e[1]);
        }

        if (block > 0) {
          Wait(s.o_ready, n - 1);
          FenceAfter();
#pragma unroll 1
          for (u32 column = 0; column < kWidth; column += 32) {
            LoadTensor(lanes + kO + column, x[0]);
            WaitLoads();
            for (u32 j = 0; j < 32; ++j)
              x[0][j] = __float_as_uint(__uint_as_float(x[0][j]) * rescale);
            StoreTensor(lanes + kO + column, x[0]);
          }
        }
        StoreTensor(lanes + kP, p);
        WaitStores();
        FenceBefore();
        if (Elected()) Arrive(s.p_ready);
      }

      Wait(s.o_ready, (i + 1) * blocks - 1);
      FenceAfter();
      if (threadIdx.x == 0) WaitForStores();
      Sync(1, 32 * kSoftmaxWarps);
      const float inverse = 1 / sum;
#pragma unroll 1
      for (u32 half = 0; half < 2; ++half) {
        u32 x[32];
        LoadTensor(lanes + kO + 32 * half, x);
        WaitLoads();
        for (u32 j = 0; j < 4; ++j) {  // 16 bytes each, swizzled as the copy engine expects
          u32 y[4];
          for (u32 h = 0; h < 4; ++h) {
            y[h] = PackBf16(__uint_as_float(x[8 * j + 2 * h]) * inverse,
                            __uint_as_float(x[8 * j + 2 * h + 1]) * inverse);
          }
          const u32 chunk = (4 * half + j) ^ threadIdx.x % 8;
          *reinterpret_cast<uint4*>(s.o + threadIdx.x * kRowBytes + 16 * chunk) =
              make_uint4(y[0], y[1], y[2], y[3]);
        }
      }
      const u32 row = tile % problem.tiles_of_head * kQueries;
      lse[(head * problem.tiles_of_head * kQueries) + row + threadIdx.x] =
          (top * problem.scale + Log2(sum)) * 0.693147180559945f;
      FenceProxy();
      Sync(2, 32 * kSoftmaxWarps);
      if (threadIdx.x == 0) Store(o, row, head, s.o);
    }
    if (threadIdx.x == 0) WaitForStores();
  }

  Sync(0, kThreads);  // tensor memory is read
  if (warp == kMmaWarp) Deallocate(tensor, kColumns);
}
