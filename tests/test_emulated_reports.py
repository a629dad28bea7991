"""What the emulator reports: each kernel here is run with a fault and without, and only the faulty one is reported."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from ptx_kernels import HEADER, check_launch, cuda_kernel, launch, ptx_kernel
from test_emulated_tensor import TCGEN05

from jax_fa4.emulated import EmulationError, Kernel

SEEDS = range(20)


@dataclasses.dataclass(frozen=True)
class Planted:
    """A kernel whose text has FIX(...) around what the fault leaves out, and FAULT(...) around what it puts in.

    Attributes:
      kind: of the report, a pattern.
      message: a pattern in its text.
      opcodes: of the places it names, in their order.
      forgiven: by the relaxed mode.
    """

    name: str
    kind: str
    message: str
    opcodes: tuple[str, ...]
    body: str
    threads: int = 64
    cluster: int = 1
    forgiven: bool = False
    arch: str = "compute_100a"

    def kernel(self, faulty: bool) -> Any:
        fix, fault = ("", "__VA_ARGS__") if faulty else ("__VA_ARGS__", "")
        head = f"#define FIX(...) {fix}\n#define FAULT(...) {fault}\n"
        dims = f"__cluster_dims__({self.cluster}, 1, 1)" if self.cluster > 1 else ""
        return cuda_kernel(
            f"""{head}{TCGEN05}
        struct alignas(64) Box {{ char bytes[128]; }};
        extern "C" __global__ void {dims} k(u32* out, const u32* in) {{
          u32 t = threadIdx.x, w = t / 32, lane = t % 32;
          {self.body}
        }}""",
            self.arch,
        )

    def run(self, faulty: bool, seed: int, mode: Any = "strict") -> Any:
        out, values = np.zeros(1024, np.uint32), np.arange(1024, dtype=np.uint32)
        return launch(
            self.kernel(faulty),
            out,
            values,
            threads=self.threads,
            ctas=self.cluster,
            cluster=self.cluster,
            seed=seed,
            mode=mode,
        )


# A product whose operands' bytes do not matter: zeros of shared memory.
MMA = """
  alignas(1024) __shared__ char operands[8192];
  __shared__ u64 done; __shared__ u32 slot;
  for (u32 i = t; i < 2048; i += blockDim.x) reinterpret_cast<u32*>(operands)[i] = 0;
  ProxyFence();
  if (t == 0) { Init(&done, 1); InitFence(); }
  u32 d = Allocate(&slot, 64, 1), mine = d + (w * 32 << 16);
  u64 descriptor = 1ull << 46 | 8ull << 16 | 16ull << 32 | (Shared(operands) & 0x3ffff) >> 4;
  u32 idesc = 1 << 4 | 1 << 7 | 1 << 10 | 16 >> 3 << 17 | 128 >> 4 << 24;
  auto mma = [&] { asm volatile("{ .reg .pred p; setp.ne.u32 p, 0, 0;\\n"
                                "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %1, %2, p; }"
                                :: "r"(d), "l"(descriptor), "r"(idesc) : "memory"); };
  auto commit = [&] { asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
      :: "r"(Shared(&done)) : "memory"); };
"""

# A step of wgmma, for 128 threads, over operands of which the bytes do not matter.
WGMMA = """
  alignas(1024) __shared__ volatile u32 operands[2048];
  for (u32 i = t; i < 2048; i += 128) operands[i] = 0;
  ProxyFence();
  __syncthreads();
  u64 descriptor = 8ull << 16 | 16ull << 32 | (Shared((void*)operands) & 0x3ffff) >> 4;
  float d[4] = {};
  auto wgmma = [&] {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(descriptor));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  };
"""

PLANTED = [
    Planted(
        "relaxed cluster barrier",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        """
      __shared__ volatile u32 x[64];
      x[t] = t;
      FIX(asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");)
      FAULT(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");)
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      u32 y, at = Map(Shared((void*)&x[63 - t]), Special_rank() ^ 1);
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(y) : "r"(at));
      out[64 * blockIdx.x + t] = y;
      ClusterSync();""",
        cluster=2,
    ),
    Planted(
        "relaxed arrival",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        """
      __shared__ volatile u32 x[32]; __shared__ u64 b;
      if (t == 0) { Init(&b, 32); InitFence(); }
      __syncthreads();
      if (w == 0) {
        x[lane] = lane;
        FIX(asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(Shared(&b)) : "memory");)
        FAULT(asm volatile("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];" :: "r"(Shared(&b)) : "memory");)
      } else { Wait(&b, 0); out[lane] = x[31 - lane]; }""",
    ),
    Planted(
        "parity",
        "race|deadlock",  # the latter where the phase had ended before the wait
        "nothing orders two accesses of shared memory|1 phases are complete",
        (),
        """
      __shared__ volatile u32 x[32]; __shared__ u64 b;
      if (t == 0) { Init(&b, 32); InitFence(); }
      __syncthreads();
      if (w == 0) { x[lane] = lane; Arrive(&b); } else { Wait(&b, 0 FAULT(+ 1)); out[lane] = x[31 - lane]; }""",
    ),
    Planted(
        "bulk groups left",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        """
      alignas(16) __shared__ volatile u32 x[2][32];
      if (w) return;
      x[0][t] = x[1][t] = t; ProxyFence(); __syncwarp();
      if (t == 0) {
        for (int i = 0; i < 2; ++i) { Store(out + 32 * i, (void*)x[i], 128); Commit(); }
        FIX(asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");)
        FAULT(asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");)
        x[1][3] = 7;
        WaitAll();
      }""",
    ),
    Planted(
        "st.async",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        """
      __shared__ volatile u32 x[4]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 4); }
      ClusterSync();
      u32 other = Special_rank() ^ 1;
      if (t == 0) asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                               :: "r"(Map(Shared((void*)x), other)), "r"(5), "r"(Map(Shared(&b), other)) : "memory");
      FIX(Wait(&b, 0);)
      out[64 * blockIdx.x + t] = x[0];
      Wait(&b, 0);
      ClusterSync();""",
        cluster=2,
    ),
    Planted(
        "wgmma.wait_group",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        WGMMA
        + """
      wgmma();
      FIX(asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");)
      __syncthreads();
      operands[t] = 1;
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      out[t] = d[0];""",
        threads=128,
        arch="compute_90a",
    ),
    Planted(
        "proxy fence of wgmma",
        "race",
        r"without a fence\.proxy\.async by the writer",
        (),
        WGMMA
        + """
      operands[t] = 1;
      FIX(ProxyFence();)
      __syncthreads();
      wgmma();
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      out[t] = d[0];""",
        threads=128,
        arch="compute_90a",
    ),
    Planted(
        "too few bytes",
        "deadlock",
        r"still needs 0 arrivals and has got 64 bytes more than it expects",
        ("mbarrier.try_wait",),
        """
      alignas(16) __shared__ u32 x[64]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 128 FAULT(- 64)); Load(x, in, 128, &b); }
      __syncthreads();
      Wait(&b, 0);""",
    ),
    Planted(
        "shared memory",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        """
      __shared__ volatile u32 x[64];
      x[t] = t;
      FIX(__syncthreads();)
      out[t] = x[63 - t];""",
    ),
    Planted(
        "write after read",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        """
      __shared__ volatile u32 x[32]; __shared__ u64 full, empty;
      if (t == 0) { Init(&full, 32); Init(&empty, 32); InitFence(); }
      __syncthreads();
      if (w == 0) { x[lane] = 1; Arrive(&full); FIX(Wait(&empty, 0);) x[lane] = 2; }
      else { Wait(&full, 0); out[lane] = x[31 - lane]; Arrive(&empty); }""",
    ),
    Planted(
        "a copy and a store",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        """
      alignas(16) __shared__ volatile u32 x[32]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 128); Load((void*)x, in, 128, &b); }
      __syncthreads();
      FIX(Wait(&b, 0);)
      if (w == 0) out[t] = x[t];
      __syncthreads();
      Wait(&b, 0);""",
    ),
    Planted(
        "source of a copy",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        """
      alignas(16) __shared__ volatile u32 x[32];
      if (t < 32) { x[t] = t; ProxyFence(); }
      __syncthreads();
      if (t == 0) { Store(out, (void*)x, 128); Commit(); FIX(WaitRead();) x[3] = 5; WaitAll(); }""",
    ),
    Planted(
        "cp.async",
        "race",
        "nothing orders two accesses of shared memory",
        (),
        """
      __shared__ volatile u32 x[64];
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(Shared((void*)&x[t])), "l"(in + t) : "memory");
      FIX(asm volatile("cp.async.wait_all;" ::: "memory");)
      __syncthreads();
      out[t] = x[t ^ 33];""",
    ),
    Planted(
        "proxy fence",
        "race",
        r"without a fence\.proxy\.async by the writer",
        (),
        """
      alignas(16) __shared__ volatile u32 x[32];
      if (t < 32) { x[t] = t; FIX(ProxyFence();) }
      __syncthreads();
      if (t == 0) { Store(out, (void*)x, 128); Commit(); WaitAll(); }""",
    ),
    Planted(
        "proxy fence of operands",
        "race",
        r"without a fence\.proxy\.async by the writer",
        (),
        MMA
        + """
      if (t < 32) reinterpret_cast<u32*>(operands)[t] = 0x3f803f80;
      FIX(ProxyFence();)
      __syncthreads();
      if (t == 0) { mma(); commit(); }
      Wait(&done, 0); After();
      Free(d, 64, 1);""",
        threads=128,
    ),
    Planted(
        "result of a product",
        "race",
        "nothing orders two accesses of tensor memory",
        (),
        MMA
        + """
      if (t == 0) { mma(); commit(); }
      FIX(Wait(&done, 0);) After();
      u32 x[8]; Load8(mine, x); out[t] = x[3];
      Wait(&done, 0); Free(d, 64, 1);""",
        threads=128,
    ),
    Planted(
        "wait::st",
        "race",
        "of tensor memory",
        (),
        MMA
        + """
      asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" :: "r"(mine), "r"(t) : "memory");
      FIX(asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");)
      Before(); __syncthreads(); After();
      if (t == 0) { mma(); commit(); }
      Wait(&done, 0); Free(d, 64, 1);""",
        threads=128,
    ),
    Planted(
        "fence::before_thread_sync",
        "race",
        r"no tcgen05\.fence::before_thread_sync follows",
        (),
        MMA
        + """
      u32 x[8] = {}; Store8(mine, x);
      FIX(Before();) __syncthreads(); After();
      if (t == 0) { mma(); commit(); }
      Wait(&done, 0); Free(d, 64, 1);""",
        threads=128,
        forgiven=True,
    ),
    Planted(
        "fence::after_thread_sync",
        "race",
        r"no tcgen05\.fence::after_thread_sync stands",
        (),
        MMA
        + """
      if (t == 0) { mma(); commit(); }
      Wait(&done, 0); FIX(After();)
      u32 x[8]; Load8(mine, x); out[t] = x[3];
      Free(d, 64, 1);""",
        threads=128,
        forgiven=True,
    ),
    Planted(
        "wait::ld",
        "misuse",
        r"used before tcgen05\.wait::ld",
        (),
        MMA
        + """
      u32 x[8] = {}, y; Store8(mine, x);
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(y) : "r"(mine));
      FIX(asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");)
      asm volatile("add.u32 %0, %0, 1;" : "+r"(y));
      out[t] = y;
      FAULT(asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");)
      Free(d, 64, 1);""",
        threads=128,
        forgiven=True,
    ),
    Planted(
        "mbarrier_init of a copy",
        "misuse",
        r"no fence\.mbarrier_init has made visible",
        ("cp.async.bulk",),
        """
      alignas(16) __shared__ u32 x[32]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); FIX(InitFence();) Expect(&b, 128); Load(x, in, 128, &b); }
      __syncthreads();
      Wait(&b, 0);""",
        forgiven=True,
    ),
    Planted(
        "mbarrier_init of a commit",
        "misuse",
        r"no fence\.mbarrier_init has made visible",
        ("tcgen05.commit",),
        MMA
        + """
      __shared__ u64 other;
      if (t == 0) {
        Init(&other, 1); FIX(InitFence();)
        mma();
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(Shared(&other)) : "memory");
      }
      __syncthreads();
      Wait(&other, 0); Free(d, 64, 1);""",
        threads=128,
        forgiven=True,
    ),
    Planted(
        "bytes of an mbarrier",
        "deadlock",
        r"mbarrier at 0x[0-9a-f]+: 0 phases are complete; this one still needs 0 arrivals and 16 bytes",
        ("mbarrier.try_wait",),
        """
      alignas(16) __shared__ u32 x[64]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 128 FAULT(+ 16)); Load(x, in, 128, &b); }
      __syncthreads();
      Wait(&b, 0);""",
    ),
    Planted(
        "arrivals of an mbarrier",
        "deadlock",
        r"2 phases are complete; this one still needs 1 arrivals and 0 bytes",
        ("mbarrier.try_wait",),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 2); InitFence(); }
      __syncthreads();
      for (u32 i = 0; i < 4; ++i) {
        if (lane == 0 && (w == 0 FIX(|| true) FAULT(|| i < 2))) Arrive(&b);
        Wait(&b, i % 2);
      }""",
    ),
    Planted(
        "named barrier",
        "deadlock",
        r"barrier 3, where 32 of 64 threads have arrived",
        ("bar",),
        """
      if (w == 0 FIX(|| true)) asm volatile("bar.sync 3, 64;" ::: "memory");""",
    ),
    Planted(
        "lanes of a warp",
        "deadlock",
        r"wait for lanes ffff0000 of their warp",
        (),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); }
      __syncthreads();
      if (lane < 16) { __syncwarp(); if (t == 0) Arrive(&b); }
      else { FIX(__syncwarp();) Wait(&b, 0); FAULT(__syncwarp();) }""",
    ),
    Planted(
        "cluster barrier",
        "deadlock",
        r"barrier\.cluster, where 64 threads have arrived",
        (),
        """
      if (blockIdx.x == 0 FIX(|| true)) ClusterSync();
      else { __shared__ u64 b; if (t == 0) Init(&b, 1); __syncthreads(); Wait(&b, 0); }
      """,
        cluster=2,
    ),
    Planted(
        "columns of tensor memory",
        "deadlock",
        "wait for 512 columns of tensor memory",
        (),
        """
      __shared__ u32 slot;
      if (w == 0) {
        for (int i = 0; i < 2; ++i) {
          asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 512;" :: "r"(Shared(&slot))
              : "memory");
          FIX(__syncwarp(); asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 512;"
              :: "r"(slot));) __syncwarp();
        }
      }""",
    ),
    Planted("trap", "misuse", "executed a trap", ("trap",), 'FAULT(if (t == 40) asm volatile("trap;");) out[t] = t;'),
    Planted(
        "arrivals beyond the count",
        "misuse",
        "more arrivals at an mbarrier than the 64",
        ("mbarrier.arrive",),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 64); InitFence(); }
      __syncthreads();
      Arrive(&b); FAULT(if (t == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 65;" :: "r"(Shared(&b))
          : "memory");)""",
    ),
    Planted(
        "no mbarrier",
        "misuse",
        "no initialised mbarrier",
        ("mbarrier.arrive",),
        """
      __shared__ u64 b;
      FIX(if (t == 0) Init(&b, 64);)
      __syncthreads();
      Arrive(&b);""",
    ),
    Planted(
        "number of a barrier",
        "misuse",
        "barriers 0 to 15, not 16",
        ("barrier",),
        'asm volatile("barrier.sync %0;" :: "r"(15 FAULT(+ 1)) : "memory");',
    ),
    Planted(
        "counts of a barrier",
        "misuse",
        "expects (64|96) threads, but here (64|96)",
        ("bar",),
        """
      asm volatile("bar.sync 1, %0;" :: "r"(64 FAULT(+ 32 * w)) : "memory");""",
    ),
    Planted(
        "quadrant",
        "misuse",
        r"warp 1 reaches lanes 32 to 63 of tensor memory only, but its address names lane 0",
        ("tcgen05.ld",),
        MMA
        + """
      u32 x[8] = {}; Store8(mine, x);
      Load8(FIX(mine) FAULT(d + (w == 1 ? 0 : w * 32 << 16)), x);
      Free(d, 64, 1);""",
        threads=128,
    ),
    Planted(
        "columns not allocated",
        "misuse",
        "not all allocated",
        ("tcgen05.st",),
        MMA
        + """
      u32 x[8] = {}; Store8(mine + 56 FAULT(+ 8), x); Free(d, 64, 1);""",
        threads=128,
    ),
    Planted(
        "number of columns",
        "misuse",
        "32, 64, 128, 256 or 512 columns, not 96",
        ("tcgen05.alloc",),
        """
      __shared__ u32 slot; Free(Allocate(&slot, 64 FAULT(+ 32), 1), 64, 1);""",
    ),
    Planted(
        "dealloc",
        "misuse",
        "tensor memory that was not deallocated",
        (),
        """
      __shared__ u32 slot; u32 d = Allocate(&slot, 64, 1); FIX(Free(d, 64, 1);) out[t] = d;""",
        forgiven=True,
    ),
    Planted(
        "copy at the end",
        "misuse",
        "ended and has not waited until a bulk copy of its own has read shared memory",
        ("cp.async.bulk",),
        """
      alignas(16) __shared__ u32 x[32];
      if (t == 0) {
        for (int i = 0; i < 32; ++i) x[i] = i;
        ProxyFence();
        for (int i = 0; i < 8; ++i) Store(out + 32 * i, x, 128);
        Commit();
        FIX(WaitRead();)
      }
      """,
        threads=32,
        forgiven=True,
    ),
    Planted(
        "size of a copy",
        "misuse",
        "multiple of 16 bytes, not 120",
        ("cp.async.bulk",),
        """
      alignas(16) __shared__ u32 x[32]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 128); Load(x, in, 128 FAULT(- 8), &b); }
      __syncthreads(); Wait(&b, 0);""",
    ),
    Planted(
        "alignment of a copy",
        "memory",
        "not aligned to 16 bytes",
        ("cp.async.bulk",),
        """
      alignas(16) __shared__ u32 x[40]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 128); Load(x FAULT(+ 1), in, 128, &b); }
      __syncthreads(); Wait(&b, 0);""",
    ),
    Planted(
        "end of global memory",
        "memory",
        r"a store to global address 0x[0-9a-f]+ \(4 bytes\) is out of range",
        ("st.global.u32",),
        "if (t == 0) out[1023 FAULT(+ 1)] = t;",
    ),
    Planted(
        "end of shared memory",
        "memory",
        r"a load from shared address 0x[0-9a-f]+ \(4 bytes\) is out of range",
        ("ld.shared.u32",),
        """
      __shared__ volatile u32 x[64]; x[t] = t; __syncthreads();
      u32 y; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y)
          : "r"(Shared((void*)x) + 4 * t FAULT(+ 4096))); out[t] = y;""",
    ),
    Planted(
        "alignment of a load",
        "memory",
        "is not aligned to its 8 bytes",
        ("ld.global.u64",),
        """
      u64 y; asm volatile("ld.global.u64 %0, [%1];" : "=l"(y) : "l"(in + 2 * t FAULT(+ 1))); out[t] = u32(y);""",
    ),
    Planted(
        "mbarrier twice",
        "misuse",
        "where there is an mbarrier that no mbarrier.inval has ended",
        ("mbarrier.init",),
        """
      __shared__ u64 b;
      if (t == 0 FAULT(|| t == 1)) Init(&b, 1);
      __syncthreads();
      if (t == 0) {
        FIX(asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(Shared(&b)) : "memory");)
        Init(&b, 1); out[0] = 1;
      }""",
        forgiven=True,
    ),
    Planted(
        "arrival before the initialisation",
        "race|misuse",  # the latter where the initialisation comes later
        "nothing orders two accesses of the mbarrier|no initialised mbarrier",
        ("mbarrier.arrive",),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); }
      FIX(__syncthreads();)
      if (t == 32) Arrive(&b);""",
    ),
    Planted(
        "wait before the initialisation",
        "race|misuse",
        "nothing orders two accesses of the mbarrier|no initialised mbarrier",
        ("mbarrier.try_wait",),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); }
      FIX(__syncthreads();)
      if (t == 32) Wait(&b, 1);""",
    ),
    Planted(
        "bytes before the initialisation",
        "race|misuse",
        "nothing orders two accesses of the mbarrier|no initialised mbarrier",
        ("mbarrier.expect_tx",),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); }
      FIX(__syncthreads();)
      if (t == 32) {
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 16;" :: "r"(Shared(&b)) : "memory");
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" :: "r"(Shared(&b)) : "memory");
      }""",
    ),
    Planted(
        "copy before the initialisation",
        "race|misuse",
        "nothing orders two accesses of the mbarrier|no initialised mbarrier",
        ("cp.async.bulk",),
        """
      alignas(16) __shared__ u32 x[32]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 128); }
      FIX(__syncthreads();)
      if (t == 32) Load(x, in, 128, &b);
      FAULT(__syncthreads();)
      Wait(&b, 0);""",
    ),
    Planted(
        "commit before the initialisation",
        "race|misuse",
        "nothing orders two accesses of the mbarrier|where no mbarrier is initialised",
        ("tcgen05.commit",),
        MMA
        + """
      __shared__ u64 other;
      if (t == 32) { Init(&other, 1); InitFence(); }
      FIX(__syncthreads();)
      if (t == 0) {
        mma();
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(Shared(&other)) : "memory");
      }
      FAULT(__syncthreads();)
      Wait(&other, 0); Free(d, 64, 1);""",
        threads=128,
    ),
    Planted(
        "initialisation in another CTA",
        "race|misuse",
        "nothing orders two accesses of the mbarrier|no initialised mbarrier",
        ("mbarrier.arrive",),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); }
      FIX(asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
          asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");)
      if (t == 32) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                                :: "r"(Map(Shared(&b), Special_rank() ^ 1)) : "memory");
      __syncthreads();
      Wait(&b, 0);
      ClusterSync();""",
        cluster=2,
    ),
    Planted(
        "fence of an initialisation in another CTA",
        "race",
        "nothing orders two accesses of the mbarrier",
        ("mbarrier.arrive",),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 1); FIX(InitFence();) }
      asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      if (t == 32) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                                :: "r"(Map(Shared(&b), Special_rank() ^ 1)) : "memory");
      __syncthreads();
      Wait(&b, 0);
      ClusterSync();""",
        cluster=2,
    ),
    Planted(
        "use of an mbarrier that has ended",
        "race|misuse",
        "nothing orders two accesses of|no initialised mbarrier",
        (),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); }
      __syncthreads();
      if (t == 32) Arrive(&b);
      FIX(__syncthreads();)
      if (t == 0) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(Shared(&b)) : "memory");""",
    ),
    Planted(
        "tensor memory given back while warps read it",
        "race|misuse",  # the latter where they read it later
        "nothing orders two accesses of tensor memory|not all allocated",
        (),
        MMA
        + """
      u32 x[8] = {}; Store8(mine, x);
      if (w == 1) Load8(mine, x);
      FIX(__syncthreads();)
      if (w == 0) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(d), "r"(64));""",
        threads=128,
    ),
    Planted(
        "tensor memory given back while a warp writes it",
        "race|misuse",
        "nothing orders two accesses of tensor memory|not all allocated",
        (),
        MMA
        + """
      u32 x[8] = {};
      if (w == 1) Store8(mine, x);
      FIX(__syncthreads();)
      if (w == 0) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(d), "r"(64));""",
        threads=128,
    ),
    Planted(
        "tensor memory given back while the tensor core writes it",
        "race|misuse",
        "nothing orders two accesses of tensor memory|not all allocated",
        (),
        MMA
        + """
      if (t == 0) { mma(); commit(); }
      if (w == 1) Wait(&done, 0);
      FIX(__syncthreads();)
      if (w == 0) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(d), "r"(64));""",
        threads=128,
    ),
    Planted(
        "tensor memory before its allocation",
        "race|misuse",
        "nothing orders two accesses of tensor memory, columns|not all allocated",
        ("tcgen05.st",),
        """
      __shared__ u32 slot;
      if (w == 0) asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;"
          :: "r"(Shared(&slot)) : "memory");
      FIX(__syncthreads();)
      u32 x[8] = {};
      if (w == 1) Store8(32 << 16, x);  // the first allocation is at column 0
      __syncthreads();
      if (w == 0) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" :: "r"(slot));""",
    ),
    Planted(
        "product before the allocation",
        "race|misuse",
        "nothing orders two accesses of tensor memory, columns|not all allocated",
        ("tcgen05.mma",),
        MMA.replace("u32 d = Allocate(&slot, 64, 1), mine = d + (w * 32 << 16);", "u32 d = 0;")
        + """
      if (w == 1) asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;"
          :: "r"(Shared(&slot)) : "memory");
      FIX(__syncthreads();)
      if (t == 0) { mma(); commit(); }
      FAULT(__syncthreads();)
      Wait(&done, 0);
      __syncthreads();
      if (w == 1) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" :: "r"(slot));""",
    ),
    Planted(
        "copy that nobody waits for",
        "misuse",
        "none of its threads has waited until an asynchronous operation that uses its memory is complete",
        ("cp.async.bulk",),
        """
      alignas(16) __shared__ u32 x[32]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 128); Load(x, in, 128, &b); FIX(Wait(&b, 0);) }""",
        forgiven=True,
    ),
    Planted(
        "copy that only its source waits for",
        "misuse",
        "none of its threads has waited until an asynchronous operation that uses its memory is complete",
        ("cp.async.bulk",),
        """
      alignas(16) __shared__ u32 x[4], y[4]; __shared__ u64 b;
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 16); }
      if (t < 4) x[t] = t;
      ProxyFence();
      ClusterSync();
      u32 other = Special_rank() ^ 1;
      if (t == 0) asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
          "[%0], [%1], 16, [%2];"
          :: "r"(Map(Shared(y), other)), "r"(Shared(x)), "r"(Map(Shared(&b), other)) : "memory");
      FIX(Wait(&b, 0);) FAULT(if (other) Wait(&b, 0);)
      ClusterSync();""",
        cluster=2,
        forgiven=True,
    ),
    Planted(
        "commit that nobody waits for",
        "misuse",
        "none of its threads has waited until an asynchronous operation that uses its memory is complete",
        ("tcgen05.commit",),
        MMA
        + """
      if (t == 0) { mma(); commit(); }
      Wait(&done, 0);
      After(); Free(d, 64, 1);
      FAULT(if (t == 0) commit();)""",
        threads=128,
        forgiven=True,
    ),
    Planted(
        "product that nobody waits for",
        "misuse|race",
        "none of its threads has waited|tensor memory",
        (),
        MMA
        + """
      if (t == 0) { mma(); FIX(commit();) }
      FIX(Wait(&done, 0); After();)
      Free(d, 64, 1);""",
        threads=128,
    ),
    Planted(
        "arrivals of a phase at the end",
        "misuse",
        r"within a phase of the mbarrier at 0x[0-9a-f]+: 1 phases are complete; "
        r"this one still needs 32 of 64 arrivals and 0 bytes",
        ("mbarrier.init",),
        """
      __shared__ u64 b;
      if (t == 0) { Init(&b, 64); InitFence(); }
      __syncthreads();
      Arrive(&b); Wait(&b, 0); if (w == 1 FIX(|| true)) Arrive(&b);""",
        forgiven=True,
    ),
    Planted(
        "bytes of a phase at the end",
        "misuse",
        r"within a phase of the mbarrier at 0x[0-9a-f]+: 0 phases are complete; "
        r"this one still needs 0 of 1 arrivals and 16 bytes",
        ("mbarrier.init",),
        """
      __shared__ u64 b;
      if (t == 0) {
        Init(&b, 1); InitFence(); Expect(&b, 16);
        FIX(asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" :: "r"(Shared(&b)) : "memory");)
      }""",
        forgiven=True,
    ),
    Planted(
        "layout of A in tensor memory",
        "misuse",
        "A in tensor memory is K-major",
        ("tcgen05.mma",),
        MMA
        + """
      FAULT(idesc |= 1 << 15;)
      if (t == 0) {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, 0, 0;\\n"
                     "tcgen05.mma.cta_group::1.kind::f16 [%0], [%3], %1, %2, p; }"
                     :: "r"(d), "l"(descriptor), "r"(idesc), "r"(d + 32) : "memory");
        commit();
      }
      Wait(&done, 0); After(); Free(d, 64, 1);""",
        threads=128,
    ),
    Planted(
        "end of tensor operands",
        "misuse",
        "a matrix descriptor reaches address",
        ("tcgen05.mma",),
        MMA
        + """
      descriptor FAULT(|= 0x3fffull << 32);
      if (t == 0) { mma(); commit(); }
      Wait(&done, 0); After(); Free(d, 64, 1);""".replace(
            "descriptor FAULT(|= 0x3fffull << 32);", "FAULT(descriptor |= 0x3fffull << 32;)"
        ),
        threads=128,
    ),
]

BY_NAME = {planted.name: planted for planted in PLANTED}


def check_found(planted: Planted) -> None:
    """Every seed finds the fault, and nothing is wrong with the places that the report names."""
    for seed in SEEDS:
        reports = planted.run(True, seed).reports
        found = [r for r in reports if re.fullmatch(planted.kind, r.kind) and re.search(planted.message, str(r))]
        assert found, f"seed {seed}: {[str(r) for r in reports]}"
        for opcode, place in zip(planted.opcodes, found[0].places, strict=False):
            assert place.opcode.startswith(opcode), str(found[0])
        assert "kernel.cu:" in str(found[0]) or not found[0].places[0].opcode


def check_clean(planted: Planted) -> None:
    """Without the fault, no seed has a report."""
    for seed in SEEDS:
        planted.run(False, seed).check()
        planted.run(False, seed, "relaxed").check()


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.name)
def test_every_seed_finds_the_fault(planted: Planted) -> None:
    check_found(planted)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.name)
def test_the_corrected_kernel_is_clean(planted: Planted) -> None:
    check_clean(planted)


@pytest.mark.parametrize("planted", [p for p in PLANTED if p.forgiven], ids=lambda p: p.name)
def test_relaxed_mode_forgives(planted: Planted) -> None:
    for seed in SEEDS:
        planted.run(True, seed, "relaxed").check()


@pytest.mark.parametrize(
    "planted", [p for p in PLANTED if not p.forgiven and p.kind != "deadlock"], ids=lambda p: p.name
)
def test_relaxed_mode_does_not_forgive_the_rest(planted: Planted) -> None:
    assert any(re.search(planted.message, str(r)) for r in planted.run(True, 0, "relaxed").reports)


# ---- Reports and runs as such


def test_a_report_tells_where() -> None:
    kernel = ptx_kernel(
        """.loc 1 17 5
    setp.lt.u32 %p0, %r60, 70; @%p0 bra END; st.global.u32 [%rd0+4096], %r60; END:""",
        before="",
    )
    run = launch(kernel, np.zeros(4, np.uint32), threads=96)
    (report,) = run.reports
    (place,) = report.places
    assert (place.opcode, place.warp, place.lane, tuple(place.cta), report.fatal) == (
        "st.global.u32",
        2,
        6,
        (0, 0, 0),
        True,
    )
    assert place.ptx_line > 0
    with pytest.raises(EmulationError, match="memory: a store to global address"):
        run.check()


def test_a_race_tells_both_accesses() -> None:
    planted = BY_NAME["shared memory"]
    report = planted.run(True, 0).reports[0]
    assert {place.opcode for place in report.places} == {"ld.volatile.shared.u32", "st.volatile.shared.u32"}
    assert {place.warp for place in report.places} == {0, 1}
    assert report.places[0].role.startswith("this access")


def test_the_limit_of_instructions() -> None:
    kernel = ptx_kernel("LOOP: add.u32 %r1, %r1, 1; bra LOOP;")
    run = launch(kernel, np.zeros(1, np.uint32), max_instructions=1000)
    (report,) = run.reports
    assert report.kind == "limit"
    assert run.instructions >= 1000
    check_launch(ptx_kernel("add.u32 %r1, %r60, 1;"), np.zeros(1, np.uint32), max_instructions=1000)


def test_a_seed_determines_the_run() -> None:
    """The order in which warps take a ticket differs between seeds, and is the same for the same one."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* out, u32* next) {
      __shared__ u64 b;
      if (threadIdx.x == 0) { Init(&b, 8); InitFence(); }
      __syncthreads();
      if (threadIdx.x % 32 == 0) { out[atomicAdd(next, 1u)] = 100 * blockIdx.x + threadIdx.x / 32; Arrive(&b); }
      Wait(&b, 0);
    }""")

    def run(seed: int) -> tuple[Any, ...]:
        out, counter = np.zeros(24, np.uint32), np.zeros(1, np.uint32)
        result = launch(kernel, out, counter, threads=256, ctas=3, seed=seed)
        result.check()
        assert sorted(out) == sorted(100 * c + w for c in range(3) for w in range(8))
        return (*out, result.instructions)

    runs = [run(seed) for seed in SEEDS]
    assert runs == [run(seed) for seed in SEEDS]
    assert len(set(runs)) > 10
    faulty = BY_NAME["write after read"]
    assert [str(r) for r in faulty.run(True, 5).reports] == [str(r) for r in faulty.run(True, 5).reports]


def test_races_may_be_left_unchecked() -> None:
    kernel = BY_NAME["shared memory"].kernel(True)
    run = launch(kernel, np.zeros(1024, np.uint32), np.zeros(1024, np.uint32), threads=64, check_races=False)
    run.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arguments": []}, "1 parameters, but got 0"),
        ({"arguments": [1 << 70]}, "does not fit"),
        ({"arguments": ["x"]}, "must be an array"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "does not divide"),
        ({"block": (1025, 1, 1)}, "1 to 1024 threads"),
        ({"grid": (0, 1, 1)}, "three positive integers"),
        ({"cluster": (32, 1, 1), "grid": (32, 1, 1)}, "at most 16"),
        ({"mode": "lenient"}, "'strict' or 'relaxed'"),
        ({"arguments": [np.zeros((4, 4))[:, ::2]]}, "C-contiguous"),
    ],
)
def test_bad_launches_are_refused(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {
        "arguments": [np.zeros(1)],
        "grid": (1, 1, 1),
        "block": (1, 1, 1),
        "cluster": (1, 1, 1),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        ptx_kernel("").launch(options.pop("arguments"), **options)


@pytest.mark.parametrize(
    ("target", "instruction", "message"),
    [
        ("sm_100a", "wgmma.fence.sync.aligned", "sm_90a"),
        ("sm_90", "wgmma.fence.sync.aligned", "sm_90a"),
        ("sm_90a", "tcgen05.wait::ld.sync.aligned", "sm_100a, sm_101a, sm_103a, sm_110a"),
        ("sm_120a", "tcgen05.wait::ld.sync.aligned", "sm_100a, sm_101a, sm_103a, sm_110a"),
        ("sm_100", "tcgen05.wait::ld.sync.aligned", "sm_100a, sm_101a, sm_103a, sm_110a"),
        ("sm_90", "setmaxnreg.dec.sync.aligned.u32 24", "sm_90a, sm_100a"),
        ("sm_90a", "add.rn.f32x2 %rd1, %rd2, %rd3", "sm_100 or later"),
        ("sm_80", "cp.async.bulk.commit_group", "sm_90 or later"),
    ],
)
def test_instructions_that_the_target_has_not(target: str, instruction: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"line \d+: target {target} has no .*it takes {message}"):
        ptx_kernel(f"{instruction};", target=target)


@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        ("sm_90a", "wgmma.fence.sync.aligned"),
        ("sm_90a", "setmaxnreg.dec.sync.aligned.u32 24"),
        ("sm_100f", "tcgen05.wait::ld.sync.aligned"),
        ("sm_103a", "tcgen05.wait::ld.sync.aligned"),
        ("sm_110a", "tcgen05.wait::ld.sync.aligned"),
        ("sm_120a", "setmaxnreg.dec.sync.aligned.u32 24"),
        ("sm_120", "add.rn.f32x2 %rd1, %rd2, %rd3"),
        ("sm_90", "cp.async.bulk.commit_group"),
    ],
)
def test_instructions_that_the_target_has(target: str, instruction: str) -> None:
    ptx_kernel(f"{instruction};", target=target)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("", "the module has no kernels"),
        (".visible .entry a() { ret; } .visible .entry b() { ret; }", "several kernels, of which `name` .*: a, b"),
        (".func f() { ret; } .visible .entry k() { { .param .b32 q; call f, (); } ret; }", "calls are not supported"),
        (".func f() { ret; } .visible .entry k() { call f; ret; }", "calls are not supported"),
    ],
)
def test_modules_without_a_kernel_to_run(kernels: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Kernel(HEADER.format(target="sm_100a") + kernels)


def test_lanes_that_miss_at_an_aligned_barrier() -> None:
    kernel = ptx_kernel("setp.ge.u32 %p0, %r60, 16; @%p0 bra E; bar.sync 0; E: bar.sync 0;")
    (report,) = launch(kernel, np.zeros(1, np.uint32)).reports
    assert "wait for the other lanes of their warp to arrive here" in str(report)
    assert "0 of 0" not in str(report)


def test_what_reports_and_events_are_shown_as() -> None:
    run = launch(ptx_kernel("st.global.u32 [%rd0+64], %r1;"), np.zeros(1, np.uint32), trace=True)
    (report,) = run.reports
    assert repr(report) == f"<Report {report}>"
    assert run.trace is not None
    assert re.match(r'<TraceEvent 0: warp ".*", CTA \(0, 0, 0\), warp 0, \d+ to \d+', repr(run.trace.events[0]))
