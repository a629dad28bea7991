"""The kernels behind the Hopper vectors: CUDA C++ around inline PTX, one kernel `k` to a text.

Arithmetic is spelt so that nothing is left for a compiler to fuse or reorder: intrinsics with a rounding, or PTX.
A kernel takes pointers, 32-bit integers and tensor maps; shared memory is all dynamic, its first KiB for barriers.
"""

from __future__ import annotations

PRELUDE = r"""
typedef unsigned u32;
typedef unsigned long long u64;
#define FN static __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1) k
#define SHARED extern __shared__ __attribute__((aligned(1024))) char shared[]; \
  u64* barriers = reinterpret_cast<u64*>(shared); char* x = shared + 1024; \
  if (Shared(shared) % 1024 != 0) asm volatile("trap;");
struct alignas(64) Map { char bytes[128]; };
FN u32 Shared(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
FN u32 Rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
FN void Init(u64* b, u32 n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(Shared(b)), "r"(n) : "memory");
}
FN void InitFence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FN void ProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
FN void Arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(Shared(b)) : "memory"); }
FN void Expect(u64* b, u32 n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(Shared(b)), "r"(n) : "memory");
}
FN u32 TestWait(u64* b, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(Shared(b)), "r"(parity) : "memory");
  return done;
}
FN void Wait(u64* b, u32 parity) {
  u32 done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(Shared(b)), "r"(parity) : "memory");
  }
}
FN void Commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
FN void WaitAll() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
FN void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
FN u32 Remote(const void* p, u32 rank) {
  u32 at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(Shared(p)), "r"(rank));
  return at;
}
FN void Load(void* to, const void* from, u32 bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(Shared(to)), "l"(from), "r"(bytes), "r"(Shared(b)) : "memory");
}
FN void LoadTile(void* to, const Map* map, int x, int y, u64* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(Shared(to)), "l"(map), "r"(x), "r"(y), "r"(Shared(b)) : "memory");
}
"""


def _listed(template: str, count: int) -> str:
    return ", ".join(template.format(i) for i in range(count))


def tensor_copy(rank: int, reduce: str = "") -> str:
    """Each CTA loads a box, writes it out raw, and stores (or reduces) it through another map at other coordinates."""
    coordinates = ", ".join(f"%{i + 2}" for i in range(rank))
    from_, to = (", ".join(f'"r"({x}[{rank} * blockIdx.x + {i}])' for i in range(rank)) for x in ("from", "to"))
    store = f"cp.{'reduce.' * bool(reduce)}async.bulk.tensor.{rank}d.global.shared::cta.{reduce}{'.' * bool(reduce)}"
    return f"""
    KERNEL(128)(u32* raw, const int* from, const int* to, u32 bytes, const __grid_constant__ Map map,
                const __grid_constant__ Map back) {{
      SHARED
      if (threadIdx.x == 0) {{
        Init(barriers, 1); InitFence(); Expect(barriers, bytes);
        asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {{{coordinates}}}], [%{rank + 2}];"
                     :: "r"(Shared(x)), "l"(&map), {from_}, "r"(Shared(barriers)) : "memory");
      }}
      __syncthreads();
      Wait(barriers, 0);
      for (u32 i = threadIdx.x; i < bytes / 4; i += 128) {{
        raw[blockIdx.x * (bytes / 4) + i] = reinterpret_cast<u32*>(x)[i];
      }}
      if (threadIdx.x == 0) {{
        asm volatile("{store}tile.bulk_group [%1, {{{coordinates}}}], [%0];"
                     :: "r"(Shared(x)), "l"(&back), {to} : "memory");
        Commit(); WaitAll();
      }}
    }}"""


# Each CTA loads a box of narrow rows over a pattern, writes out all the memory around it, and stores the box through
# another map at other coordinates.
NARROW_ROWS = """
KERNEL(128)(u32* raw, const int* from, const int* to, u32 bytes, u32 span, const __grid_constant__ Map map,
            const __grid_constant__ Map back) {
  SHARED
  u32 t = threadIdx.x, *words = reinterpret_cast<u32*>(x);
  for (u32 i = t; i < span / 4; i += 128) words[i] = 0xa5000000u + i;
  ProxyFence();
  if (t == 0) { Init(barriers, 1); InitFence(); }
  __syncthreads();
  if (t == 0) {
    Expect(barriers, bytes);
    LoadTile(x, &map, from[2 * blockIdx.x], from[2 * blockIdx.x + 1], barriers);
  }
  Wait(barriers, 0);
  for (u32 i = t; i < span / 4; i += 128) raw[blockIdx.x * (span / 4) + i] = words[i];
  if (t == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 :: "l"(&back), "r"(to[2 * blockIdx.x]), "r"(to[2 * blockIdx.x + 1]), "r"(Shared(x)) : "memory");
    Commit(); WaitAll();
  }
}"""


BULK_COPY = """
KERNEL(32)(char* out, const char* in, const u32* places, u32 copies) {
  SHARED   // places: from, shared, to, bytes of each copy
  if (threadIdx.x) return;
  Init(barriers, copies); InitFence();
  for (u32 i = 0; i < copies; ++i) {
    Expect(barriers, places[4 * i + 3]);
    Load(x + places[4 * i + 1], in + places[4 * i], places[4 * i + 3], barriers);
  }
  Wait(barriers, 0);
  for (u32 i = 0; i < copies; ++i) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
        :: "l"(out + places[4 * i + 2]), "r"(Shared(x + places[4 * i + 1])), "r"(places[4 * i + 3]) : "memory");
    Commit();
  }
  WaitAll();
}"""


def bulk_reduction(operation: str) -> str:
    return f"""
    KERNEL(32)(char* out, const char* in, u32 bytes) {{
      SHARED
      if (threadIdx.x) return;
      Init(barriers, 1); InitFence(); Expect(barriers, bytes); Load(x, in, bytes, barriers); Wait(barriers, 0);
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation} [%0], [%1], %2;"
          :: "l"(out), "r"(Shared(x)), "r"(bytes) : "memory");
      Commit(); WaitAll();
    }}"""


BARRIER_PHASES = r"""
KERNEL(32)(u32* out) {
  SHARED
  if (threadIdx.x) return;
  u64* b = barriers;
  u32 n = 0;
  #define LOG(value) out[n++] = (value)
  #define STATE() LOG(TestWait(b, 0) | TestWait(b, 1) << 1)
  #define DO(what) asm volatile("mbarrier." what ";" :: "r"(Shared(b)) : "memory"); STATE();
  Init(b, 3); InitFence(); STATE();                  // phase 0: parity 1 has passed
  Arrive(b); STATE(); Arrive(b); STATE();
  Arrive(b); STATE();                                // phase 1: parity 0 has passed
  DO("arrive.shared::cta.b64 _, [%0], 3")            // phase 2
  u64 state; u32 done;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(state) : "r"(Shared(b)) : "memory");
  #define TEST_STATE() asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2;\n" \
      "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(Shared(b)), "l"(state) : "memory"); LOG(done)
  TEST_STATE(); Arrive(b); TEST_STATE(); STATE();    // phase 3
  done = 0;
  while (!done) asm volatile("{ .reg .pred p; mbarrier.try_wait.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(Shared(b)), "l"(state) : "memory");
  LOG(done);
  // Neither arrivals alone nor bytes alone complete a phase.
  Expect(b, 64); Arrive(b); Arrive(b); STATE();
  DO("complete_tx.relaxed.cta.shared::cta.b64 [%0], 48")
  DO("complete_tx.relaxed.cta.shared::cta.b64 [%0], 16")     // phase 4
  DO("expect_tx.relaxed.cta.shared::cta.b64 [%0], 32")
  Arrive(b); Arrive(b); Arrive(b); STATE();
  DO("complete_tx.relaxed.cta.shared::cta.b64 [%0], 32")     // phase 5
  // Bytes that arrive before they are expected.
  DO("complete_tx.relaxed.cta.shared::cta.b64 [%0], 80")
  Arrive(b); Arrive(b); STATE();
  Expect(b, 80); STATE();                                    // phase 6
  // The largest count of bytes, and of arrivals that are missing.
  Expect(b, 1048575); Arrive(b); Arrive(b); STATE();
  DO("complete_tx.relaxed.cta.shared::cta.b64 [%0], 1048574")
  DO("complete_tx.relaxed.cta.shared::cta.b64 [%0], 1")      // phase 7
  DO("arrive_drop.shared::cta.b64 _, [%0]")
  Arrive(b); STATE(); Arrive(b); STATE();                    // phase 8, which expects 2
  Arrive(b); STATE(); Arrive(b); STATE();                    // phase 9
  DO("arrive.expect_tx.shared::cta.b64 _, [%0], 0")
  DO("arrive_drop.expect_tx.shared::cta.b64 _, [%0], 16")
  DO("complete_tx.relaxed.cta.shared::cta.b64 [%0], 16")     // phase 10, which expects 1
  for (int i = 0; i < 5; ++i) { Arrive(b); STATE(); }
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(Shared(b)) : "memory");
  Init(b, 1048575); InitFence(); STATE();
  DO("arrive.shared::cta.b64 _, [%0], 1048574")
  DO("arrive.shared::cta.b64 _, [%0], 1")
}"""

BARRIER_TRIES = r"""
KERNEL(32)(u32* out) {
  SHARED
  if (threadIdx.x) return;
  u64* b = barriers;
  u32 n = 0, done;
  #define LOG(value) out[n++] = (value)
  #define STATE() LOG(TestWait(b, 0) | TestWait(b, 1) << 1)
  #define TRY(parity) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n" \
      "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(Shared(b)), "r"(parity), "r"(1000) : "memory"); LOG(done);
  #define BYTES(what, count) asm volatile("mbarrier." what ".relaxed.cta.shared::cta.b64 [%0], %1;" \
      :: "r"(Shared(b)), "r"(count) : "memory"); STATE();
  Init(b, 1); InitFence();
  TRY(1) TRY(0)                       // phase 0: the phase before counts as complete, this one is not
  Arrive(b); TRY(0) TRY(1)            // phase 1
  Arrive(b); TRY(1) TRY(0)            // phase 2
  // More bytes than are expected so far, before the arrival and behind it.
  BYTES("complete_tx", 80) Arrive(b); STATE(); TRY(0)
  BYTES("expect_tx", 48) BYTES("expect_tx", 32) TRY(0)       // phase 3
  BYTES("expect_tx", 32) BYTES("complete_tx", 48) BYTES("expect_tx", 16) Arrive(b); STATE(); TRY(1)   // phase 4
  BYTES("expect_tx", 16) BYTES("complete_tx", 16) TRY(0) BYTES("complete_tx", 16) BYTES("expect_tx", 16)
  Arrive(b); STATE();                 // phase 5
  BYTES("expect_tx", 0) BYTES("complete_tx", 0) TRY(1)
  Expect(b, 0); STATE(); TRY(1)       // phase 6
}"""

RING = """
KERNEL(160)(u32* out, const u32* in, u32 rounds) {
  SHARED   // one warp fills three stages of 512 bytes, four warps read them
  u64 *full = barriers, *empty = barriers + 3;
  u32 t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < 3; ++i) { Init(full + i, 1); Init(empty + i, 128); }
    InitFence();
  }
  __syncthreads();
  if (t >= 128) {
    if (t != 128) return;
    for (u32 i = 0; i < rounds; ++i) {
      u32 stage = i % 3, phase = i / 3 % 2;
      Wait(empty + stage, phase ^ 1);
      Expect(full + stage, 512);
      Load(x + 512 * stage, in + 128 * i, 256, full + stage);
      Load(x + 512 * stage + 256, in + 128 * i + 64, 256, full + stage);
    }
  } else {
    u32 sum = 0;
    for (u32 i = 0; i < rounds; ++i) {
      u32 stage = i % 3, phase = i / 3 % 2;
      Wait(full + stage, phase);
      sum = 5 * sum + reinterpret_cast<u32*>(x + 512 * stage)[t ^ (i & 127)];
      Arrive(empty + stage);
    }
    out[t] = sum;
  }
}"""


def wgmma(
    n: int,
    kind: str,
    *,
    majors: str = "kk",
    a_in_registers: bool = False,
    signs: tuple[int, int] = (1, 1),
    steps: int = 4,
) -> str:
    """D += A B^T for one warpgroup, a chain of `steps` products. Bit i of scale_d: step i reads D."""
    count = n // 2
    flags = f"{signs[0]}, {signs[1]}, " + ("" if a_in_registers else f"{int(majors[0] == 'm')}, ")
    flags += str(int(majors[1] == "m"))
    if a_in_registers:
        a, used = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}", count + 4
        operand = _listed('"r"(r[i][{}])', 4)
        load_a = "for (int j = 0; j < 4; ++j) r[i][j] = registers[(i * 128 + t) * 4 + j];"
    else:
        a, used, operand = f"%{count}", count + 1, '"l"(at_a[i])'
        load_a = "at_a[i] = da[i] + (Shared(x) >> 4);"
    return f"""
    KERNEL(128)(float* out, const char* a, u32 a_bytes, const char* b, u32 b_bytes, const u64* da, const u64* db,
                const float* c, u32 scale_d, const u32* registers) {{
      SHARED
      u32 t = threadIdx.x;
      if (t == 0) {{
        Init(barriers, 1); InitFence(); Expect(barriers, a_bytes + b_bytes);
        Load(x, a, a_bytes, barriers); Load(x + a_bytes, b, b_bytes, barriers);
      }}
      __syncthreads();
      float d[{count}];
      u64 at_b[{steps}];
      {f"u32 r[{steps}][4];" if a_in_registers else f"u64 at_a[{steps}];"}
      for (int i = 0; i < {steps}; ++i) {{
        at_b[i] = db[i] + (Shared(x + a_bytes) >> 4);
        {load_a}
      }}
      #pragma unroll
      for (int i = 0; i < {count}; ++i) d[i] = c[t * {count} + i];
      Wait(barriers, 0);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int i = 0; i < {steps}; ++i) {{
        asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{used + 1}, 0;\\n"
                     "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
                     "{{{_listed("%{}", count)}}}, {a}, %{used}, p, {flags}; }}"
                     : {_listed('"+f"(d[{}])', count)} : {operand}, "l"(at_b[i]), "r"(scale_d >> i & 1) : "memory");
      }}
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" : {_listed('"+f"(d[{}])', count)} :: "memory");
      #pragma unroll
      for (int i = 0; i < {count}; ++i) out[t * {count} + i] = d[i];
    }}"""


def _product(n: int, kind: str, d: str, a: str, b: str, flags: str, scale: str = "1") -> str:
    """One wgmma with A from shared memory, D not read if the C++ expression `scale` is 0."""
    count = n // 2
    return (
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{_listed("%{}", count)}}}, %{count}, '
        f'%{count + 1}, p, {flags}; }}" : '
        + ", ".join(f'"+f"({d}[{i}])' for i in range(count))
        + f' : "l"({a}), "l"({b}), "r"({scale}) : "memory");'
    )


def _wait(groups: int, *arrays: tuple[str, int]) -> str:
    held = ", ".join(f'"+f"({name}[{i}])' for name, count in arrays for i in range(count))
    return f'asm volatile("wgmma.wait_group.sync.aligned {groups};" : {held} :: "memory");'


# Four accumulators and as many groups in flight; each group is read as soon as it is known to be complete.
WGMMA_IN_FLIGHT = f"""
KERNEL(128)(float* out, const char* a, const char* b) {{
  SHARED   // A: 64 x 64, B: 4 x 32 x 64, K-major with a 128-byte swizzle
  u32 t = threadIdx.x;
  if (t == 0) {{
    Init(barriers, 1); InitFence(); Expect(barriers, 8192 + 4 * 4096);
    Load(x, a, 8192, barriers); Load(x + 8192, b, 4 * 4096, barriers);
  }}
  __syncthreads();
  Wait(barriers, 0);
  u64 at_a = 0x4000004000010000ull + (Shared(x) >> 4), at_b = at_a + (8192 >> 4);
  float d0[16], d1[16], d2[16], d3[16];
  #pragma unroll
  for (int i = 0; i < 16; ++i) d0[i] = d1[i] = d2[i] = d3[i] = 0;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  #define GROUP(d, at, steps) _Pragma("unroll") for (int i = 0; i < steps; ++i) {{ \\
      {_product(32, "bf16", "d", "at_a + 2 * i", "at + 2 * i", "1, 1, 0, 0", "i").replace(chr(10), " ")} }} \\
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  GROUP(d0, at_b, 4) GROUP(d1, at_b + 256, 3) GROUP(d2, at_b + 512, 2) GROUP(d3, at_b + 768, 1)
  #define WRITE(d, at) _Pragma("unroll") for (int i = 0; i < 16; ++i) out[(at * 128 + t) * 16 + i] = d[i];
  {_wait(3, ("d0", 16), ("d1", 16), ("d2", 16), ("d3", 16))} WRITE(d0, 0)
  {_wait(2, ("d1", 16), ("d2", 16), ("d3", 16))} WRITE(d1, 1)
  {_wait(0, ("d2", 16), ("d3", 16))} WRITE(d2, 2) WRITE(d3, 3)
}}"""


def mma_sync(kind: str) -> str:
    """A tile to a warp: fragments as they lie in registers."""
    return f"""
    KERNEL(128)(float* out, const u32* a, const u32* b, const float* c) {{
      u32 t = blockIdx.x * 128 + threadIdx.x;
      float d[4];
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
                   "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%10, %11, %12, %13}};"
                   : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                   : "r"(a[4 * t]), "r"(a[4 * t + 1]), "r"(a[4 * t + 2]), "r"(a[4 * t + 3]),
                     "r"(b[2 * t]), "r"(b[2 * t + 1]),
                     "f"(c[4 * t]), "f"(c[4 * t + 1]), "f"(c[4 * t + 2]), "f"(c[4 * t + 3]));
      for (int i = 0; i < 4; ++i) out[4 * t + i] = d[i];
    }}"""


def matrix_moves(count: int, trans: bool) -> str:
    """Loads rows from places given by ldmatrix, and stores them to others by stmatrix."""
    form = f"m8n8.x{count}{'.trans' * trans}.shared.b16"
    return f"""
    KERNEL(32)(u32* loaded, uint4* stored, const uint4* in, const u32* from, const u32* to) {{
      SHARED
      u32 t = threadIdx.x, r[{count}];
      uint4 *source = reinterpret_cast<uint4*>(x), *target = source + 32;
      source[t] = in[t];
      target[t] = in[31 - t];
      __syncwarp();
      asm volatile("ldmatrix.sync.aligned.{form} {{{_listed("%{}", count)}}}, [%{count}];"
                   : {_listed('"=r"(r[{}])', count)} : "r"(Shared(source + from[t])) : "memory");
      for (int i = 0; i < {count}; ++i) loaded[{count} * t + i] = r[i];
      asm volatile("stmatrix.sync.aligned.{form} [%0], {{{", ".join(f"%{i + 1}" for i in range(count))}}};"
                   :: "r"(Shared(target + to[t])), {_listed('"r"(r[{}])', count)} : "memory");
      __syncwarp();
      stored[t] = target[t];
    }}"""


NAMED_BARRIERS = """
KERNEL(192)(u32* out, const u32* in, u32 rounds) {
  SHARED   // two warps write, two pairs of warps read: barrier 1 says written, barriers 2 and 3 say read
  u32 *data = reinterpret_cast<u32*>(x), t = threadIdx.x, sum = 0;
  for (u32 i = 0; i < rounds; ++i) {
    if (t < 64) {
      if (i) {
        asm volatile("bar.sync 2, 128;" ::: "memory");
        asm volatile("bar.sync %0, 128;" :: "r"(3) : "memory");
      }
      sum = 3 * sum + in[64 * i + t];
      data[t] = sum;
      asm volatile("bar.arrive 1, 192;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, %0;" :: "r"(192) : "memory");
      sum = 7 * sum + data[63 - t % 64];
      if (i + 1 < rounds) asm volatile("bar.arrive %0, %1;" :: "r"(1 + t / 64), "r"(128) : "memory");
    }
  }
  out[t] = sum;
}"""

REGISTERS = """
KERNEL(384)(float* out, const float* in, u32 rounds) {
  SHARED   // one warpgroup gives its registers to two others and loads for them
  u64 *full = barriers, *empty = barriers + 2;
  u32 t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < 2; ++i) { Init(full + i, 1); Init(empty + i, 256); }
    InitFence();
  }
  __syncthreads();
  if (t < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (t == 0) {
      for (u32 i = 0; i < rounds; ++i) {
        Wait(empty + i % 2, i / 2 % 2 ^ 1);
        Expect(full + i % 2, 1024);
        Load(x + 1024 * (i % 2), in + 256 * i, 1024, full + i % 2);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    float sums[64];
    #pragma unroll
    for (int j = 0; j < 64; ++j) sums[j] = 0;
    for (u32 i = 0; i < rounds; ++i) {
      Wait(full + i % 2, i / 2 % 2);
      const float* stage = reinterpret_cast<float*>(x + 1024 * (i % 2));
      float scale = stage[t - 128];
      #pragma unroll
      for (int j = 0; j < 64; ++j) sums[j] = __fmaf_rn(scale, stage[(t + 3 * j) & 255], sums[j]);
      Arrive(empty + i % 2);
    }
    float total = 0;
    #pragma unroll
    for (int j = 0; j < 64; ++j) total = __fadd_rn(__fmul_rn(total, 0.75f), sums[j]);
    out[t - 128] = total;
  }
}"""

CLUSTER_MEMORY = r"""
KERNEL(64)(u32* out, const u32* in, u32 size) {
  SHARED   // writes to the next CTA, reads of the one behind, atomics on the first
  u32 rank = Rank(), t = threadIdx.x, *mine = reinterpret_cast<u32*>(x), *theirs = mine + 64, *total = mine + 128;
  u32 next = (rank + 1) % size, value, owner, at, n;
  mine[t] = in[64 * blockIdx.x + t];
  if (t == 0) *total = 0;
  ClusterSync();
  asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(Remote(theirs + t, next)), "r"(mine[t] + t) : "memory");
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;"
               :: "r"(Remote(total, 0)), "r"(mine[t]) : "memory");
  ClusterSync();
  at = Remote(mine + (63 - t), (rank + size - 1) % size);
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  asm("getctarank.shared::cluster.u32 %0, %1;" : "=r"(owner) : "r"(at));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  u32* row = out + 64 * 5 * blockIdx.x + t;
  row[0] = value; row[64] = theirs[t]; row[128] = owner; row[192] = n; row[256] = rank == 0 ? *total : 0;
  ClusterSync();
}"""

CLUSTER_BARRIERS = r"""
KERNEL(32)(u32* out, const u32* in, u32 size) {
  SHARED   // every CTA of a cluster stores into the first and signals it: by an arrival, by st.async, by a bulk copy
  u64 *arrived = barriers, *bytes = barriers + 1, *copied = barriers + 2;
  u32 rank = Rank(), t = threadIdx.x, *direct = reinterpret_cast<u32*>(x), *async = direct + 128, *bulk = direct + 256;
  u32* source = direct + 384;
  if (t == 0) {
    Init(arrived, size); Init(bytes, 1); Init(copied, 1); InitFence();
    if (rank == 0) { Expect(bytes, 16 * size); Expect(copied, 32 * size); }
  }
  if (t < 8) source[t] = in[8 * rank + t];
  ProxyFence();
  ClusterSync();
  if (t == 0) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(Remote(direct + rank, 0)), "r"(source[0] + 1) : "memory");
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                 :: "r"(Remote(arrived, 0)) : "memory");
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %1, %3}, [%4];"
                 :: "r"(Remote(async + 4 * rank, 0)), "r"(source[1]), "r"(rank), "r"(source[2]),
                    "r"(Remote(bytes, 0)) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 32, [%2];"
                 :: "r"(Remote(bulk + 8 * rank, 0)), "r"(Shared(source)), "r"(Remote(copied, 0)) : "memory");
  }
  if (rank == 0) {
    u32 done = 0;
    while (!done) asm volatile("{ .reg .pred p;\n"
                               "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                               "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(Shared(arrived)) : "memory");
    for (u32 i = t; i < size; i += 32) out[i] = direct[i];
    Wait(bytes, 0);
    for (u32 i = t; i < 4 * size; i += 32) out[size + i] = async[i];
    Wait(copied, 0);
    for (u32 i = t; i < 8 * size; i += 32) out[5 * size + i] = bulk[i];
  }
  ClusterSync();
}"""


CLUSTER_COPIES = r"""
KERNEL(32)(u32* out, const u32* in, const u32* words, u32 size) {
  SHARED   // every CTA copies words[0] to the next CTA and words[1] to itself, and signals whom it copies to
  u32 rank = Rank(), t = threadIdx.x, *source = reinterpret_cast<u32*>(x), *target = source + 1024;
  u32 next = (rank + 1) % size;
  for (u32 i = t; i < 1024; i += 32) { source[i] = in[1024 * rank + i]; target[i] = target[i + 1024] = 0x5a5a5a5a; }
  if (t == 0) { Init(barriers, 1); InitFence(); Expect(barriers, 4 * (words[0] + words[1])); }
  ProxyFence();
  ClusterSync();
  if (t == 0) {
    for (u32 i = 0; i < 2; ++i) {
      u32 to = i ? rank : next;
      asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   :: "r"(Remote(target + 1024 * i, to)), "r"(Shared(source)), "r"(4 * words[i]),
                      "r"(Remote(barriers, to)) : "memory");
    }
  }
  Wait(barriers, 0);
  for (u32 i = t; i < 2048; i += 32) out[2048 * rank + i] = target[i];
  ClusterSync();
}"""


def multicast(tensor: bool) -> str:
    """CTA r of a cluster loads part r into all of masks[r]; expected[r] bytes come to CTA r."""
    how = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        '[%0], [%1, {%2, %3}], [%4], %5;" :: "r"(Shared(x + 1024 * rank)), "l"(&map), "r"(-8 * int(rank % 2)), '
        '"r"(8 * int(blockIdx.x)), "r"(Shared(barriers))'
        if tensor
        else "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        '[%0], [%1], 1024, [%2], %3;" :: "r"(Shared(x + 1024 * rank)), "l"(in + 256 * blockIdx.x), '
        '"r"(Shared(barriers))'
    )
    return f"""
    KERNEL(128)(u32* out, const u32* masks, const u32* expected, u32 size, {
        "const __grid_constant__ Map map" if tensor else "const u32* in"
    }) {{
      SHARED
      u32 rank = Rank(), t = threadIdx.x, *words = reinterpret_cast<u32*>(x);
      for (u32 i = t; i < 256 * size; i += 128) words[i] = 0xabcd0000u + 4096 * rank + i;
      ProxyFence();
      if (t == 0) {{ Init(barriers, 1); InitFence(); Expect(barriers, expected[rank]); }}
      ClusterSync();
      if (t == 0 && masks[rank]) asm volatile("{how}, "h"(static_cast<short>(masks[rank])) : "memory");
      Wait(barriers, 0);
      for (u32 i = t; i < 256 * size; i += 128) out[256 * size * blockIdx.x + i] = words[i];
      ClusterSync();
    }}"""


COPY_ASYNC = r"""
KERNEL(32)(u32* out, const char* in, const u32* valid) {
  SHARED   // copies of 4, 8 and 16 bytes, of which valid[t] come from global memory and the others are 0
  u32 t = threadIdx.x, *words = reinterpret_cast<u32*>(x);
  for (int i = t; i < 512; i += 32) words[i] = 0x5a5a5a5a;
  __syncwarp();
  #define COPY(cache, size, at) asm volatile("cp.async." cache ".shared.global [%0], [%1], " #size ", %2;" \
      :: "r"(Shared(x + at + 16 * t)), "l"(in + at + 16 * t), "r"(min(size, valid[t])) : "memory"); \
      asm volatile("cp.async.commit_group;" ::: "memory");
  COPY("ca", 4, 0) COPY("ca", 8, 512) COPY("ca", 16, 1024) COPY("cg", 16, 1536)
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
  for (int i = t; i < 512; i += 32) out[i] = words[i ^ 5];
}"""

HANDOVER = r"""
KERNEL(128)(u32* data, u32* flag, const u32* in) {
  u32 t = threadIdx.x, turn;   // CTA i waits for CTA i - 1, and changes what that one wrote
  if (t == 0) {
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(flag) : "memory");
    while (turn != blockIdx.x);
  }
  __syncthreads();
  data[t] = (blockIdx.x ? data[t ^ blockIdx.x] : 0) * 3 + in[128 * blockIdx.x + t];
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  __syncthreads();
  if (t == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(flag) : "memory");
}"""


def atomics(space: str) -> str:
    """Integers from 128 threads each, floats from one: nothing depends on an order."""
    pointer = "r" if space == "shared" else "l"
    where = "shared::cta" if space == "shared" else "global"
    address = "Shared(words + {})" if space == "shared" else "words + {}"
    many = ("add.u32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32", "inc.u32", "dec.u32")
    text = "\n".join(
        f'asm volatile("red.relaxed.gpu.{where}.{name} [%0], %1;" :: "{pointer}"({address.format(i)}), '
        f'"r"({"1000" if name[:3] in ("inc", "dec") else "in[t]"}) : "memory");'
        for i, name in enumerate(many)
    )
    own = ("exch.b32", "add.f32", "add.noftz.f16x2", "add.noftz.bf16x2", "max.s32", "xor.b32")
    text += "\n".join(
        f'asm volatile("atom.relaxed.gpu.{where}.{name} %0, [%1], %2;" : "=r"(old) : '
        f'"{pointer}"({address.format(f"{16 + 128 * i} + t")}), "r"(in[128 * {i + 1} + t]) : "memory");\n'
        f"returned[128 * {i} + t] = old;"
        for i, name in enumerate(own)
    )
    text = text.replace("add.f32 %0, [%1], %2", "add.f32 f, [%1], g").replace(
        f'"atom.relaxed.gpu.{where}.add.f32 f, [%1], g;"',
        f'"{{ .reg .f32 f, g; mov.b32 g, %2; atom.relaxed.gpu.{where}.add.f32 f, [%1], g; mov.b32 %0, f; }}"',
    )
    copy = "u32* words = reinterpret_cast<u32*>(x); for (u32 i = t; i < 912; i += 128) words[i] = memory[i];"
    return f"""
    KERNEL(128)(u32* memory, u32* returned, const u32* in) {{
      SHARED
      u32 t = threadIdx.x, old;
      {copy if space == "shared" else "u32* words = memory;"}
      __syncthreads();
      {text}
      asm volatile("atom.relaxed.gpu.{where}.cas.b32 %0, [%1], %2, %3;" : "=r"(old)
          : "{pointer}"({address.format("784 + t")}), "r"(in[128 * 7 + t]), "r"(t) : "memory");
      returned[128 * 6 + t] = old;
      __syncthreads();
      {"for (u32 i = t; i < 912; i += 128) memory[i] = words[i];" if space == "shared" else ""}
    }}"""


HALF_REDUCTIONS = ("add.noftz.f16x2", "add.noftz.bf16x2")


def half_reductions(space: str) -> str:
    """Packed halves, each of one thread only; in global memory also two and four words at once."""
    pointer = "r" if space == "shared" else "l"
    where = "shared::cta" if space == "shared" else "global"
    text, at = "", 0
    for name in HALF_REDUCTIONS:
        for count in (1,) if space == "shared" else (1, 2, 4):
            operation, kind = name.rsplit(".", 1)
            form = name if count == 1 else f"{operation}.v{count}.{kind}"
            values = _listed("%{}", count + 1).split(", ")[1:]
            operand = values[0] if count == 1 else "{" + ", ".join(values) + "}"
            place = f"words + {128 * at} + {count} * t"
            listed = ", ".join(f'"r"(in[{128 * at} + {count} * t + {i}])' for i in range(count))
            text += f"""asm volatile("red.relaxed.gpu.{where}.{form} [%0], {operand};"
                :: "{pointer}"({f"Shared({place})" if space == "shared" else place}), {listed} : "memory");\n"""
            at += count
    copy = "u32* words = reinterpret_cast<u32*>(x); for (u32 i = t; i < 256; i += 128) words[i] = memory[i];"
    return f"""
    KERNEL(128)(u32* memory, const u32* in) {{
      SHARED
      u32 t = threadIdx.x;
      {copy if space == "shared" else "u32* words = memory;"}
      __syncthreads();
      {text}
      __syncthreads();
      {"for (u32 i = t; i < 256; i += 128) memory[i] = words[i];" if space == "shared" else ""}
    }}"""


VECTOR_REDUCTIONS = """
KERNEL(128)(float* sums, const float* in) {
  u32 t = threadIdx.x;   // of two and of four floats, each of one thread only
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};"
               :: "l"(sums + 2 * t), "f"(in[2 * t]), "f"(in[2 * t + 1]) : "memory");
  const float* four = in + 256 + 4 * t;
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(sums + 256 + 4 * t), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]) : "memory");
}"""

_SHUFFLES = [(mode, clamp) for mode in ("up", "down", "bfly", "idx") for clamp in (0x1F, 0, 0x1807, 0x1018)]
_REDUCTIONS = ("add.s32", "min.s32", "max.s32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32")


def _warp_operations() -> list[str]:
    """Statements that set `r` from x, y and the lane's t."""
    statements = []
    for mode, clamp in _SHUFFLES:
        statements.append(
            f'asm volatile("{{ .reg .pred p; .reg .u32 d; shfl.sync.{mode}.b32 d|p, %1, %2, {clamp}, -1;\\n'
            'selp.u32 %0, d, 0xdead, p; }" : "=r"(r) : "r"(x), "r"(y & 31));'
        )
    statements += [f'asm volatile("redux.sync.{name} %0, %1, -1;" : "=r"(r) : "r"(x));' for name in _REDUCTIONS]
    statements += [
        "r = 77; if (0x00ff0010u >> t % 32 & 1) "
        f'asm volatile("redux.sync.{name} %0, %1, 0x00ff0010;" : "=r"(r) : "r"(x));'
        for name in _REDUCTIONS
    ]
    for name in ("all", "any", "uni"):
        statements.append(
            f'asm volatile("{{ .reg .pred p; setp.lt.u32 p, %1, %2; vote.sync.{name}.pred p, p, -1;\\n'
            'selp.u32 %0, 1, 0, p; }" : "=r"(r) : "r"(y), "r"(x >> 27));'
        )
    statements += [
        'asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, %2; vote.sync.ballot.b32 %0, p, -1; }" : "=r"(r) '
        ': "r"(y & 31), "r"(x >> 27));',
        'asm volatile("match.any.sync.b32 %0, %1, -1;" : "=r"(r) : "r"(y & 3));',
        'asm volatile("{ .reg .pred p; match.all.sync.b32 %0|p, %1, -1; }" : "=r"(r) : "r"(y & 3));',
        # Which lane is elected is the implementation's; that it is one, and the same each time, is not.
        'u32 first, again; asm volatile("{ .reg .pred p; elect.sync %0|p, -1; elect.sync %1|p, -1;\\n'
        'vote.sync.ballot.b32 %2, p, -1; }" : "=r"(first), "=r"(again), "=r"(r));\n'
        "r = __popc(r) + 100 * (first == again) + 1000 * (r == 1u << first);",
    ]
    return statements


def warp_operations() -> str:
    body = "".join(f"{{ u32 r; {one}\nout[n++ * 128 + t] = r; }}\n" for one in _warp_operations())
    return f"""
    KERNEL(128)(u32* out, const u32* in) {{
      u32 t = threadIdx.x, x = in[t], y = in[128 + t], n = 0;
      {body}
    }}"""


WARP_OPERATIONS = len(_warp_operations())


def unary(instruction: str) -> str:
    """A function of one float, of many."""
    return f"""
    KERNEL(256)(u32* out, const u32* in, u32 count) {{
      for (u32 i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {{
        asm volatile("{{ .reg .f32 f; mov.b32 f, %1; {instruction} f, f; mov.b32 %0, f; }}"
                     : "=r"(out[i]) : "r"(in[i]));
      }}
    }}"""


_ROUNDINGS = ("rn", "rz", "rm", "rp")
# Instructions by the types of their operands: what comes first is the destination.
FLOAT_OPERATIONS: list[tuple[str, str]] = [
    *((f"fma.{r}{ftz}.f32", "ffff") for r in _ROUNDINGS for ftz in ("", ".ftz")),
    ("fma.rn.sat.f32", "ffff"),
    *((f"{op}.{r}{ftz}.f32", "fff") for op in ("add", "sub", "mul") for r in _ROUNDINGS for ftz in ("", ".ftz")),
    *((f"{op}{flags}.f32", "fff") for op in ("min", "max") for flags in ("", ".ftz", ".NaN", ".xorsign.abs")),
    ("div.rn.f32", "fff"),
    ("sqrt.rn.f32", "ff"),
    ("rcp.rn.f32", "ff"),
    ("copysign.f32", "fff"),
    *((f"set.{compare}.u32.f32", "rff") for compare in ("lt", "le", "eq", "ne", "gtu", "geu", "num", "nan")),
]
CONVERSIONS: list[tuple[str, str]] = [
    *(
        (f"cvt.{r}{relu}.{kind}x2.f32", "rff")
        for kind in ("bf16", "f16")
        for r in ("rn", "rz")
        for relu in ("", ".relu")
    ),
    *((f"cvt.{r}.{kind}.f32", "hf") for kind in ("bf16", "f16") for r in ("rn", "rz")),
    ("cvt.f32.f16", "fh"),
    ("cvt.f32.bf16", "fh"),
    *((f"cvt.{r}.{kind}.f32", "rf") for kind in ("s32", "u32") for r in ("rni", "rzi", "rmi", "rpi")),
    *((f"cvt.{r}.f32.f32", "ff") for r in ("rni", "rzi", "rmi", "rpi")),
    *((f"cvt.{r}.f32.{kind}", "fr") for kind in ("s32", "u32") for r in _ROUNDINGS),
    ("cvt.rn.f16.s32", "hr"),
    ("cvt.rni.s32.f16", "rh"),
]
NARROW_CONVERSIONS: list[tuple[str, str]] = [
    *(
        (f"cvt.rn.satfinite{relu}.{kind}x2.{source}", "hff" if source == "f32" else "hr")
        for kind in ("e4m3", "e5m2")
        for relu in ("", ".relu")
        for source in ("f32", "f16x2")
    ),
    *((f"cvt.rn{relu}.f16x2.{kind}x2", "rh") for kind in ("e4m3", "e5m2") for relu in ("", ".relu")),
    *((f"cvt.{r}.relu.{kind}.f32", "hf") for kind in ("bf16", "f16") for r in ("rn", "rz")),
    *((f"cvt.{r}.sat.{kind}.f32", "hf") for kind in ("f16",) for r in ("rn", "rz")),
    ("cvt.sat.f32.f32", "ff"),
    ("cvt.rna.tf32.f32", "rf"),
    *((f"cvt.{r}{relu}.tf32.f32", "rf") for r in ("rn", "rz") for relu in ("", ".relu")),
]
HALF_OPERATIONS: list[tuple[str, str]] = [
    *((f"{op}{'.rn' * (op != 'fma')}.{kind}x2", "rrr") for kind in ("bf16", "f16") for op in ("add", "sub", "mul")),
    *((f"fma.rn{relu}.{kind}x2", "rrrr") for kind in ("bf16", "f16") for relu in ("", ".relu")),
    *((f"{op}{nan}.{kind}x2", "rrr") for kind in ("bf16", "f16") for op in ("min", "max") for nan in ("", ".NaN")),
]
INTEGER_OPERATIONS: list[tuple[str, str]] = [
    *((f"{op}.{kind}", "rrr") for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max") for kind in ("s32", "u32")),
    *((f"{op}.{kind}", "rrrr") for op in ("mad.lo", "mad.hi", "sad") for kind in ("s32", "u32")),
    ("add.sat.s32", "rrr"),
    ("sub.sat.s32", "rrr"),
    ("mul24.lo.u32", "rrr"),
    ("shl.b32", "rrr"),
    ("shr.u32", "rrr"),
    ("shr.s32", "rrr"),
    *((f"shf.{way}.{mode}.b32", "rrrr") for way in "lr" for mode in ("wrap", "clamp")),
    *((f"lop3.b32:{table}", "rrrr") for table in (0x96, 0xE8, 0xCA, 0x1B, 0x80, 0xFE)),
    *((f"prmt.b32{mode}", "rrrr") for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")),
    *((f"bfe.{kind}", "rrrr") for kind in ("s32", "u32")),
    ("bfi.b32", "rrrrr"),
    *((f"{op}.b32", "rr") for op in ("popc", "clz", "brev", "not", "cnot")),
    *((f"bfind{amount}.{kind}", "rr") for amount in ("", ".shiftamt") for kind in ("s32", "u32")),
    *((f"dp4a.{a}.{b}", "rrrr") for a in ("s32", "u32") for b in ("s32", "u32")),
    *((f"dp2a.{half}.s32.u32", "rrrr") for half in ("lo", "hi")),
    ("slct.b32.s32", "rrrr"),
    *((f"bmsk.{mode}.b32", "rrr") for mode in ("wrap", "clamp")),
    *((f"szext.{mode}.s32", "rrr") for mode in ("wrap", "clamp")),
]


def table(operations: list[tuple[str, str]]) -> str:
    """Row i of the output is operation i of the columns of the inputs a, b and c (a fourth operand is a again)."""
    types = {"f": "f32", "r": "b32", "h": "b16"}
    body = ""
    for i, (name, operands) in enumerate(operations):
        name, _, immediate = name.partition(":")
        declared = " ".join(f".reg .{types[kind]} v{j};" for j, kind in enumerate(operands))
        moves = "".join(
            f"cvt.u16.u32 v{j}, %{(j - 1) % 3 + 1};" if kind == "h" else f"mov.b32 v{j}, %{(j - 1) % 3 + 1};"
            for j, kind in enumerate(operands)
            if j
        )
        back = "cvt.u32.u16 %0, v0;" if operands[0] == "h" else "mov.b32 %0, v0;"
        listed = ", ".join(f"v{j}" for j in range(len(operands))) + (f", {immediate}" if immediate else "")
        body += (
            f'asm volatile("{{ {declared} {moves} {name} {listed}; {back} }}" : "=r"(r) : "r"(a), "r"(b), "r"(c));\n'
            f"out[{i} * count + i] = r;\n"
        )
    return f"""
    KERNEL(256)(u32* out, const u32* in, u32 count) {{
      u32 i = blockIdx.x * 256 + threadIdx.x, a = in[i], b = in[count + i], c = in[2 * count + i], r;
      {body}
    }}"""


WIDE_INTEGERS = r"""
KERNEL(256)(u64* out, const u64* in, u32 count) {
  u32 i = blockIdx.x * 256 + threadIdx.x;   // carries and products of 64 bits
  u64 a = in[i], b = in[count + i], r;
  u32 al = u32(a), ah = u32(a >> 32), bl = u32(b), bh = u32(b >> 32), lo, hi, over;
  asm volatile("add.cc.u32 %0, %3, %5; addc.cc.u32 %1, %4, %6; addc.u32 %2, 0, 0;"
               : "=r"(lo), "=r"(hi), "=r"(over) : "r"(al), "r"(ah), "r"(bl), "r"(bh));
  out[i] = lo | u64(hi) << 32; out[count + i] = over;
  asm volatile("sub.cc.u32 %0, %3, %5; subc.cc.u32 %1, %4, %6; subc.u32 %2, 0, 0;"
               : "=r"(lo), "=r"(hi), "=r"(over) : "r"(al), "r"(ah), "r"(bl), "r"(bh));
  out[2 * count + i] = lo | u64(hi) << 32; out[3 * count + i] = over;
  #define ROW(n, text) asm volatile(text : "=l"(r) : "l"(a), "l"(b), "r"(al), "r"(bl)); out[n * count + i] = r;
  ROW(4, "mul.wide.u32 %0, %3, %4;") ROW(5, "mul.wide.s32 %0, %3, %4;") ROW(6, "mul.lo.u64 %0, %1, %2;")
  ROW(7, "mul.hi.u64 %0, %1, %2;") ROW(8, "mul.hi.s64 %0, %1, %2;") ROW(9, "mad.wide.u32 %0, %3, %4, %1;")
  ROW(10, "shl.b64 %0, %1, %4;") ROW(11, "shr.s64 %0, %1, %4;") ROW(12, "shr.u64 %0, %1, %4;")
  ROW(13, "min.s64 %0, %1, %2;") ROW(14, "max.u64 %0, %1, %2;")
  asm volatile("bfe.s64 %0, %1, %2, %3;" : "=l"(r) : "l"(a), "r"(al & 255), "r"(bl & 255)); out[15 * count + i] = r;
}"""


def _p_registers(step: int) -> str:
    pairs = [(8 * step + 2 * i, 8 * step + 2 * i + 1) for i in range(4)]
    return "".join(
        f'asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p[{step}][{i}]) : "f"(s[{high}]), "f"(s[{low}]));\n'
        for i, (low, high) in enumerate(pairs)
    )


# Attention of 64 queries over blocks of 64 keys, head dimension 64: what a forward kernel does, in one warpgroup.
ATTENTION = f"""
FN float Exp2(float v) {{ asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(v)); return v; }}
KERNEL(128)(float* out, float* sums, u32 scale_bits, u32 blocks, const __grid_constant__ Map q,
            const __grid_constant__ Map keys, const __grid_constant__ Map values, const __grid_constant__ Map back) {{
  SHARED   // Q, then two stages of K and V, 8 KiB each
  u64 *loaded = barriers, *free = barriers + 2;
  u32 t = threadIdx.x, lane = t % 32, warp = t / 32;
  float scale = __uint_as_float(scale_bits);
  if (t == 0) {{
    for (int i = 0; i < 2; ++i) {{ Init(loaded + i, 1); Init(free + i, 128); }}
    InitFence();
  }}
  __syncthreads();
  u64 at_q = 0x4000004000010000ull + (Shared(x) >> 4);
  float o[32], s[32], most[2], sum[2];
  #pragma unroll
  for (int i = 0; i < 32; ++i) o[i] = 0;
  for (int i = 0; i < 2; ++i) {{ most[i] = -__int_as_float(0x7f800000); sum[i] = 0; }}
  if (t == 0) {{
    Expect(loaded, 3 * 8192);
    LoadTile(x, &q, 0, 0, loaded);
    LoadTile(x + 8192, &keys, 0, 0, loaded);
    LoadTile(x + 16384, &values, 0, 0, loaded);
  }}
  #pragma unroll 1
  for (u32 block = 0; block < blocks; ++block) {{
    if (t == 0 && block + 1 < blocks) {{
      u32 next = (block + 1) % 2;
      char* to = x + 8192 + 16384 * next;
      Wait(free + next, (block + 1) / 2 % 2 ^ 1);
      Expect(loaded + next, 2 * 8192);
      LoadTile(to, &keys, 0, 64 * (block + 1), loaded + next);
      LoadTile(to + 8192, &values, 0, 64 * (block + 1), loaded + next);
    }}
    __syncwarp();
    u64 at_k = at_q + (8192 >> 4) + (16384 >> 4) * (block % 2), at_v = at_k + (8192 >> 4);
    Wait(loaded + block % 2, block / 2 % 2);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < 4; ++i) {{ {_product(64, "bf16", "s", "at_q + 2 * i", "at_k + 2 * i", "1, 1, 0, 0", "i")} }}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    {_wait(0, ("s", 32))}
    #pragma unroll
    for (int row = 0; row < 2; ++row) {{
      float now = most[row];
      #pragma unroll
      for (int i = 0; i < 32; ++i) if (i / 2 % 2 == row) now = fmaxf(now, s[i]);
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
      float shift = __fmul_rn(now, scale), change = Exp2(__fmaf_rn(most[row], scale, -shift));
      most[row] = now;
      sum[row] = __fmul_rn(sum[row], change);
      #pragma unroll
      for (int i = 0; i < 32; ++i) {{
        if (i / 2 % 2 != row) continue;
        s[i] = Exp2(__fmaf_rn(s[i], scale, -shift));
        sum[row] = __fadd_rn(sum[row], s[i]);
        o[i] = __fmul_rn(o[i], change);
      }}
    }}
    u32 p[4][4];
    {"".join(_p_registers(step) for step in range(4))}
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < 4; ++i) {{
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{_listed("%{}", 32)}}}, "
                   "{{%32, %33, %34, %35}}, %36, 1, 1, 1, 1;"
                   : {_listed('"+f"(o[{}])', 32)} : {_listed('"r"(p[i][{}])', 4)}, "l"(at_v + 128 * i) : "memory");
    }}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    {_wait(0, ("o", 32))}
    Arrive(free + block % 2);
  }}
  u32 packed[16];
  #pragma unroll
  for (int row = 0; row < 2; ++row) {{
    sum[row] = __fadd_rn(sum[row], __shfl_xor_sync(0xffffffffu, sum[row], 1));
    sum[row] = __fadd_rn(sum[row], __shfl_xor_sync(0xffffffffu, sum[row], 2));
    float inverse;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum[row]));
    #pragma unroll
    for (int i = 0; i < 32; ++i) if (i / 2 % 2 == row) o[i] = __fmul_rn(o[i], inverse);
    sums[2 * t + row] = sum[row];
  }}
  #pragma unroll
  for (int i = 0; i < 32; ++i) out[32 * t + i] = o[i];
  #pragma unroll
  for (int i = 0; i < 16; ++i) {{
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[i]) : "f"(o[2 * i + 1]), "f"(o[2 * i]));
  }}
  __syncthreads();   // everyone has read Q
  u32 row = 16 * warp + lane % 16;
  #pragma unroll
  for (u32 i = 0; i < 4; ++i) {{
    u32 at = Shared(x) + 128 * row + ((2 * i + lane / 16) ^ row % 8) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {{%1, %2, %3, %4}};"
                 :: "r"(at), "r"(packed[4 * i]), "r"(packed[4 * i + 1]), "r"(packed[4 * i + 2]),
                    "r"(packed[4 * i + 3]) : "memory");
  }}
  ProxyFence();
  __syncthreads();
  if (t == 0) {{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {{%1, %2}}], [%3];"
                 :: "l"(&back), "r"(0), "r"(0), "r"(Shared(x)) : "memory");
    Commit(); WaitAll();
  }}
}}"""
