"""Order in global memory, between CTAs and within one, and of atomics in shared memory.

Each kernel here is run with a fault and without, and only the faulty one is reported, whatever the scheduler does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from ptx_kernels import check_launch, cuda_kernel, launch

from jax_fa4.emulated import Kernel, Run, TensorMap

SEEDS = range(20)

# Accesses as PTX has them, where CUDA C++ has no words for them, and what the kernels share.
GLOBAL = r"""
FN u32 LoadAcquire(const u32* p) { u32 x; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p)
    : "memory"); return x; }
FN u32 LoadAcquireCta(const u32* p) { u32 x; asm volatile("ld.acquire.cta.global.u32 %0, [%1];" : "=r"(x) : "l"(p)
    : "memory"); return x; }
FN u32 LoadAcquireCluster(const u32* p) { u32 x; asm volatile("ld.acquire.cluster.global.u32 %0, [%1];" : "=r"(x)
    : "l"(p) : "memory"); return x; }
FN u32 LoadRelaxed(const u32* p) { u32 x; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p)
    : "memory"); return x; }
FN u32 LoadWeak(const u32* p) { u32 x; asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x; }
FN void StoreRelease(u32* p, u32 x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(x)
    : "memory"); }
FN void StoreReleaseCta(u32* p, u32 x) { asm volatile("st.release.cta.global.u32 [%0], %1;" :: "l"(p), "r"(x)
    : "memory"); }
FN void StoreReleaseCluster(u32* p, u32 x) { asm volatile("st.release.cluster.global.u32 [%0], %1;" :: "l"(p), "r"(x)
    : "memory"); }
FN void StoreRelaxed(u32* p, u32 x) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(x)
    : "memory"); }
FN void StoreWeak(u32* p, u32 x) { asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(x) : "memory"); }
FN void AddRelease(u32* p, u32 x) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(p), "r"(x)
    : "memory"); }
FN u32 AddBoth(u32* p, u32 x) { u32 y; asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(y)
    : "l"(p), "r"(x) : "memory"); return y; }
FN void GlobalProxyFence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
FN void AnyProxyFence() { asm volatile("fence.proxy.async;" ::: "memory"); }
FN void ReduceAdd(float* to, const void* from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(to), "r"(Shared(from)), "r"(bytes) : "memory");
}
FN void CopyAsync(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(Shared(to)), "l"(from) : "memory");
}
FN void WaitCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
struct alignas(64) Box { char bytes[128]; };
FN void StoreTile(const Box* map, u32 x, u32 y, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(x), "r"(y), "r"(Shared(from)) : "memory");
}
FN void ReduceTile(const Box* map, u32 x, u32 y, const void* from) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(x), "r"(y), "r"(Shared(from)) : "memory");
}
FN void LoadTile(void* to, const Box* map, u32 x, u32 y, u64* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];" :: "r"(Shared(to)), "l"(map), "r"(x), "r"(y), "r"(Shared(b)) : "memory");
}
"""

# A CTA's 64 threads write; what they say by `flag` another CTA's read.
WRITES, READS = "work[t] = 100 + t;", "out[t] = work[63 - t];"


def flag(signal: str, wait: str, write: str = WRITES, read: str = READS) -> str:
    """CTA 0 writes and signals, CTA 1 waits and reads."""
    return f"""
      u32* flag = work + 1024;
      if (b == 0) {{ {write} {signal} }}
      if (b == 1) {{ {wait} {read} }}"""


RELEASED = "__syncthreads(); if (t == 0) StoreRelease(flag, 1);"
ACQUIRED = "if (t == 0) while (LoadAcquire(flag) == 0) {} __syncthreads();"

# Every CTA writes its part; the last one that is done adds them up.
LAST_BLOCK = """
  __shared__ u32 last;
  u32* counter = work + 1024;
  work[64 * b + t] = 100 * b + t;
  %s
  if (t == 0) last = %s == gridDim.x - 1;
  __syncthreads();
  if (last) {
    %s
    u32 sum = 0;
    for (u32 i = 0; i < gridDim.x; ++i) sum += work[64 * i + t];
    out[t] = sum;
  }"""

# Every CTA adds to the same place, one after the other.
ORDERED = """
  u32* turn = work + 1024;
  if (t == 0) { %s }
  %s
  out[t] = out[t] * 3 + b + t;
  %s"""
VOLATILE_TURN = "while (*(volatile u32*)turn != b) {}"
NEXT_TURN = "__syncthreads(); if (t == 0) { __threadfence(); *(volatile u32*)turn = b + 1; }"

# Every CTA adds 64 floats of shared memory to the same 64 of global memory; the last one reads the sums.
REDUCE = """
  alignas(128) __shared__ float values[64];
  __shared__ u32 last;
  float* sums = (float*)work;
  values[t] = t + b;
  ProxyFence();
  __syncthreads();
  if (t == 0) {
    %s
    __threadfence();
    last = atomicAdd(work + 1024, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) { __threadfence(); out[t] = (u32)sums[t]; }"""
REDUCED = "ReduceAdd(sums, values, 256); Commit(); WaitAll();"

HISTOGRAM = """
  __shared__ u32 bins[64];
  bins[t] = 0;
  %s
  for (u32 i = t; i < 256; i += blockDim.x) atomicAdd(bins + in[i] / 4, 1);
  %s
  %s"""

TILES = """
  __shared__ u32 next;
  u32* counter = work + 1024;
  for (;;) {
    __syncthreads();
    if (t == 0) next = %s;
    __syncthreads();
    u32 tile = next;
    if (tile >= 16) break;
    out[64 * tile + t] = tile * 1000 + t;
  }"""

# CTA 0 writes with the generic proxy, CTA 1 reads with the copy engine.
PROXY_READ = """
  alignas(128) __shared__ u32 got[64]; __shared__ u64 full;
  if (t == 0) { Init(&full, 1); InitFence(); %s Expect(&full, 256); %s }
  __syncthreads();
  Wait(&full, 0);
  out[t] = got[63 - t];"""
PROXY_WAIT = "while (LoadAcquire(flag) == 0) {}"

# CTA 0 stores from shared memory with the copy engine, and says so; CTA 1 reads.
STORED = """
  alignas(128) __shared__ u32 values[64];
  values[t] = 100 + t;
  ProxyFence();
  __syncthreads();
  if (t == 0) { %s StoreRelease(flag, 1); }"""


def expect_sums(ctas: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda t: sum(100 * b + t for b in range(ctas))


def expect_ordered(t: np.ndarray) -> np.ndarray:
    value = np.zeros_like(t)
    for b in range(4):
        value = value * 3 + b + t
    return value


@dataclasses.dataclass(frozen=True)
class Case:
    """A right kernel, and what to put in the place of what to make it wrong.

    Attributes:
      faults: by name: text of the body, what stands there instead, and a pattern in the report.
      expect: the first 64 results of the right kernel, of the thread's index.
    """

    name: str
    body: str
    faults: dict[str, tuple[str, str, str]]
    expect: Callable[[np.ndarray], Any] = lambda t: 163 - t
    ctas: int = 4
    cluster: int = 1
    mode: Literal["strict", "relaxed"] | None = None

    def kernel(self, fault: str = "") -> Kernel:
        body = self.body
        if fault:
            right, wrong, _ = self.faults[fault]
            assert body.count(right) == 1, f"{fault}: {right!r} stands {body.count(right)} times in the kernel"
            body = body.replace(right, wrong)
        dims = f"__cluster_dims__({self.cluster}, 1, 1)" if self.cluster > 1 else ""
        return cuda_kernel(f"""{GLOBAL}
          __device__ u32 variable;
          extern "C" __global__ void {dims} k(u32* out, u32* work, const u32* in, const __grid_constant__ Box map) {{
            u32 t = threadIdx.x, b = blockIdx.x;
            {body}
          }}""")

    def run(self, kernel: Kernel, seed: int, mode: Literal["strict", "relaxed"]) -> tuple[Run, np.ndarray]:
        out, work = np.zeros(1024, np.uint32), np.zeros(2048, np.uint32)
        given = np.arange(1024, dtype=np.uint32)
        tile = TensorMap(work.view(np.float32).reshape(32, 64), box=(32, 2))
        run = launch(
            kernel,
            out,
            work,
            given,
            tile,
            threads=64,
            ctas=self.ctas,
            cluster=self.cluster,
            seed=seed,
            mode=mode,
            max_instructions=1_000_000,
        )
        return run, out


ORDER = "nothing orders two accesses of global memory"
SCOPE = "the scope of one does not contain the other's thread"
FENCE = "fence.proxy.async between"

CASES = [
    Case(
        "flag by release and acquire",
        flag(RELEASED, ACQUIRED),
        {
            "relaxed store": ("StoreRelease(", "StoreRelaxed(", ORDER),
            "release of the CTA": ("StoreRelease(", "StoreReleaseCta(", SCOPE),
            "release of the cluster": ("StoreRelease(", "StoreReleaseCluster(", SCOPE),
            "weak store": ("StoreRelease(", "StoreWeak(", ORDER),
            "relaxed load": ("LoadAcquire(", "LoadRelaxed(", ORDER),
            "acquire of the CTA": ("LoadAcquire(", "LoadAcquireCta(", SCOPE),
            "weak load": ("LoadAcquire(", "LoadWeak(", ORDER),
            "no barrier before the release": (
                "__syncthreads(); if (t == 0) StoreRelease",
                "if (t == 0) StoreRelease",
                ORDER,
            ),
            "no barrier after the acquire": ("{} __syncthreads();", "{}", ORDER),
        },
        ctas=2,
    ),
    Case(
        "volatile flag between fences",
        flag(
            "__threadfence(); __syncthreads(); if (t == 0) *(volatile u32*)flag = 1;",
            "if (t == 0) { while (*(volatile u32*)flag == 0) {} __threadfence(); } __syncthreads();",
        ),
        {},
        ctas=2,
    ),
    Case(
        "volatile flag behind a barrier and a fence",
        flag(
            "__syncthreads(); if (t == 0) { __threadfence(); *(volatile u32*)flag = 1; }",
            "if (t == 0) { while (*(volatile u32*)flag == 0) {} __threadfence_system(); } __syncthreads();",
        ),
        {
            "no fence before": ("__threadfence(); *", "*", ORDER),
            "fence of the block before": ("__threadfence(); *", "__threadfence_block(); *", ORDER),
            "no fence after": ("__threadfence_system(); ", "", ORDER),
            "fence of the block after": ("__threadfence_system(); ", "__threadfence_block(); ", ORDER),
            "fence after the flag": (
                "{ __threadfence(); *(volatile u32*)flag = 1; }",
                "{ *(volatile u32*)flag = 1; __threadfence(); }",
                ORDER,
            ),
            "plain flag": ("*(volatile u32*)flag = 1;", "*flag = 1;", ORDER),
            "no barrier": ("__syncthreads(); if (t == 0) { __threadfence", "if (t == 0) { __threadfence", ORDER),
        },
        ctas=2,
    ),
    Case(
        "release sequence",
        """
        u32* flag = work + 1024;
        if (b == 0) { work[t] = 100 + t; __syncthreads(); if (t == 0) AddRelease(flag, 1); }
        if (b == 1 && t == 0) { while (LoadRelaxed(flag) != 1) {} atomicAdd(flag, 1); }
        if (b == 2) { if (t == 0) { while (LoadRelaxed(flag) != 2) {} LoadAcquire(flag); } __syncthreads();
                      out[t] = work[63 - t]; }
        """,
        {"a store ends it": ("atomicAdd(flag, 1)", "StoreRelaxed(flag, 2)", ORDER)},
        ctas=3,
    ),
    Case(
        "cumulative by three CTAs",
        """
        u32* flag = work + 1024;
        if (b == 0) { work[t] = 100 + t; __syncthreads(); if (t == 0) StoreRelease(flag, 1); }
        if (b == 1 && t == 0) { while (LoadAcquire(flag) == 0) {} AddRelease(flag + 1, 1); }
        if (b == 2) { if (t == 0) while (LoadAcquire(flag + 1) == 0) {} __syncthreads(); out[t] = work[63 - t]; }
        """,
        {
            "the one between only reads": (
                "while (LoadAcquire(flag) == 0) {} AddRelease",
                "while (LoadRelaxed(flag) == 0) {} AddRelease",
                ORDER,
            )
        },
        ctas=3,
    ),
    Case(
        "last block is done",
        LAST_BLOCK % ("__syncthreads(); if (t == 0) __threadfence();", "atomicAdd(counter, 1)", "__threadfence();"),
        {
            "no fence before": ("if (t == 0) __threadfence();", "", ORDER),
            "fence of the block before": ("if (t == 0) __threadfence();", "if (t == 0) __threadfence_block();", ORDER),
            "no barrier before": (
                "__syncthreads(); if (t == 0) __threadfence();",
                "if (t == 0) __threadfence();",
                ORDER,
            ),
            "fence of another thread": ("if (t == 0) __threadfence();", "if (t == 32) __threadfence();", ORDER),
            "no fence after": ("if (last) {\n    __threadfence();", "if (last) {", ORDER),
            "atomic of the block": ("atomicAdd(", "atomicAdd_block(", SCOPE),
            "plain counter": ("atomicAdd(counter, 1)", "(*counter)++", ORDER),
        },
        expect_sums(4),
    ),
    Case(
        "last block is done, by acq_rel",
        LAST_BLOCK % ("__syncthreads();", "AddBoth(counter, 1)", ""),
        {"relaxed": ("AddBoth(", "atomicAdd(", ORDER)},
        expect_sums(4),
    ),
    Case(
        "last block is done, by a variable of the module",
        LAST_BLOCK % ("__threadfence(); __syncthreads();", "atomicAdd(&variable, 1)", "__threadfence();"),
        {
            "no fence": ("__threadfence(); __syncthreads();", "__syncthreads();", ORDER),
            "plain counter": ("atomicAdd(&variable, 1)", "variable++", "module's global variables"),
        },
        expect_sums(4),
    ),
    Case(
        "ordered accumulation",
        ORDERED % (VOLATILE_TURN + " __threadfence();", "__syncthreads();", NEXT_TURN),
        {
            "no wait": (VOLATILE_TURN, "", ORDER),
            "no fence after the wait": ("{} __threadfence();", "{}", ORDER),
            "no barrier after the wait": ("}\n  __syncthreads();", "}", ORDER),
            "no fence before the next": ("{ __threadfence(); *", "{ *", ORDER),
            "no barrier before the next": (
                "__syncthreads(); if (t == 0) { __threadfence",
                "if (t == 0) { __threadfence",
                ORDER,
            ),
        },
        expect_ordered,
    ),
    Case(
        "ordered accumulation by release and acquire",
        ORDERED
        % (
            "while (LoadAcquire(turn) != b) {}",
            "__syncthreads();",
            "__syncthreads(); if (t == 0) AddRelease(turn, 1);",
        ),
        {
            "no order": ("while (LoadAcquire(turn) != b) {}", "", ORDER),
            "relaxed": ("AddRelease(", "atomicAdd(", ORDER),
        },
        expect_ordered,
    ),
    Case(
        "tiles by a counter",
        TILES % "atomicAdd(counter, 1)",
        {"plain counter": ("atomicAdd(counter, 1)", "(*counter)++", ORDER)},
        lambda t: t,
    ),
    Case(
        "histogram",
        HISTOGRAM % ("__syncthreads();", "__syncthreads();", "atomicAdd(out + t, bins[t]);"),
        {
            "no barrier behind the zeros": (
                "__syncthreads();\n  for",
                "for",
                "nothing orders two accesses of shared memory",
            ),
            "no barrier before the sums": (
                "__syncthreads();\n  atomicAdd(out",
                "atomicAdd(out",
                "nothing orders two accesses of shared memory",
            ),
            "plain sums": ("atomicAdd(out + t, bins[t])", "out[t] += bins[t]", ORDER),
        },
        lambda t: 4 * 4 + 0 * t,
    ),
    Case(
        "zeros of another CTA",
        """
        u32* flag = work + 1024;
        if (b == 0) { work[t] = 100; __syncthreads(); if (t == 0) StoreRelease(flag, 1); }
        if (t == 0) while (LoadAcquire(flag) == 0) {}
        __syncthreads();
        atomicAdd(work + t, 1);
        out[64 * b + t] = 1;""",
        {"unordered": ("if (t == 0) while (LoadAcquire(flag) == 0) {}", "", ORDER)},
        lambda t: 1 + 0 * t,
    ),
    Case(
        "sums by the copy engine",
        REDUCE % REDUCED,
        {
            "no wait": (" WaitAll();", "", ORDER),
            "wait for the reads only": ("WaitAll();", "WaitRead();", ORDER),
            "no fence": ("__threadfence();\n    last", "last", ORDER),
            "a store": ("ReduceAdd(", "Store(", ORDER),
            "a plain addition": (REDUCED, REDUCED + " if (b == 1) sums[7] += 1;", ORDER),
        },
        lambda t: 4 * t + 6,
    ),
    Case(
        "sums by the copy engine and by atomics",
        REDUCE % f"if (b % 2) {{ {REDUCED} }} else for (u32 i = 0; i < 64; ++i) atomicAdd(sums + i, values[i]);",
        {"plain additions": ("atomicAdd(sums + i, values[i])", "sums[i] += values[i]", ORDER)},
        lambda t: 4 * t + 6,
    ),
    Case(
        "tiles added by the copy engine",
        REDUCE % "ReduceTile(&map, 0, 0, values); Commit(); WaitAll();",
        {
            "wait for the reads only": ("WaitAll();", "WaitRead();", ORDER),
            "a store": ("ReduceTile(", "StoreTile(", ORDER),
        },
        # Two rows of 32, of a tensor that is 64 wide.
        lambda t: np.where(t < 32, 4 * t + 6, 0),
    ),
    Case(
        "bulk store read by another CTA",
        flag(STORED % "Store(work, values, 256); Commit(); WaitAll();", ACQUIRED, write=""),
        {
            "no wait": ("Commit(); WaitAll();", "Commit();", ORDER),
            "wait for the reads only": ("WaitAll();", "WaitRead();", ORDER),
            "proxy fence too early": (
                "values[t] = 100 + t;\n  ProxyFence();",
                "ProxyFence();\n  values[t] = 100 + t;",
                "shared memory .* without a fence.proxy.async by the writer",
            ),
            "proxy fence of global memory": (
                "ProxyFence();",
                "GlobalProxyFence();",
                "shared memory .* without a fence.proxy.async by the writer",
            ),
        },
        ctas=2,
    ),
    Case(
        "tile store read by another CTA",
        flag(
            STORED % "StoreTile(&map, 0, 0, values); Commit(); WaitAll();",
            ACQUIRED,
            write="",
            read="out[t] = t < 32 ? work[31 - t] : work[64 + 63 - t];",
        ),
        {
            "no wait": ("Commit(); WaitAll();", "Commit();", ORDER),
            "wait for the reads only": ("WaitAll();", "WaitRead();", ORDER),
            "no acquire": ("LoadAcquire(", "LoadRelaxed(", ORDER),
        },
        lambda t: np.where(t < 32, 131 - t, 132 + 63 - t),
        ctas=2,
    ),
    Case(
        "bulk load of what threads wrote",
        flag(
            "GlobalProxyFence(); __syncthreads(); if (t == 0) StoreRelease(flag, 1);",
            PROXY_READ % (PROXY_WAIT, "Load(got, work, 256, &full);"),
            read="",
        ),
        {
            "no proxy fence": ("GlobalProxyFence(); ", "", FENCE),
            "proxy fence of shared memory": ("GlobalProxyFence(); ", "ProxyFence(); ", FENCE),
            "proxy fence too early": (WRITES + " GlobalProxyFence();", "GlobalProxyFence(); " + WRITES, FENCE),
            "no acquire": ("LoadAcquire(", "LoadRelaxed(", ORDER),
        },
        ctas=2,
    ),
    Case(
        "tile load of what threads wrote, with the fence by the reader",
        flag(
            RELEASED,
            PROXY_READ % (PROXY_WAIT + " AnyProxyFence();", "LoadTile(got, &map, 0, 0, &full);"),
            write="work[t < 32 ? t : t + 32] = 100 + t;",
            read="",
        ),
        {
            "no proxy fence": (" AnyProxyFence();", "", FENCE),
            "no acquire": ("LoadAcquire(", "LoadRelaxed(", ORDER),
        },
        ctas=2,
    ),
    Case(
        "bulk load of what the copy engine stored",
        flag(
            STORED % "Store(work, values, 256); Commit(); WaitAll();",
            PROXY_READ % (PROXY_WAIT, "Load(got, work, 256, &full);"),
            write="",
            read="",
        ),
        {"wait for the reads only": ("WaitAll();", "WaitRead();", ORDER)},
        ctas=2,
    ),
    Case(
        "overwritten behind a bulk load",
        """
        alignas(128) __shared__ u32 got[64]; __shared__ u64 full;
        if (t == 0) { Init(&full, 1); InitFence(); Expect(&full, 256); Load(got, work, 256, &full); }
        __syncthreads();
        Wait(&full, 0);
        work[t] = 1 + t;
        out[t] = got[t] + 163 - t;""",
        {"no wait": ("Wait(&full, 0);\n        work[t] = 1 + t;", "work[t] = 1 + t; Wait(&full, 0);", ORDER)},
        ctas=1,
    ),
    Case(
        "overwritten behind cp.async",
        """
        __shared__ u32 got[64];
        CopyAsync(got + t, work + t);
        WaitCopies();
        work[t] = 1 + t;
        out[t] = got[t] + 163 - t;""",
        {"no wait": ("WaitCopies();\n        work[t] = 1 + t;", "work[t] = 1 + t; WaitCopies();", ORDER)},
        ctas=1,
    ),
    Case(
        "between warps of a CTA",
        "work[t] = 100 + t; __syncthreads(); out[t] = work[63 - t];",
        {"no barrier": ("__syncthreads();", "", ORDER)},
        ctas=1,
    ),
    Case(
        "neighbours in one word",
        """
        u32 at = 64 * b + t;
        ((unsigned short*)work)[at * 3 + 1] = t;
        ((unsigned char*)work)[2048 + at] = t;
        out[t + 64 * b] = 163 - t;""",
        {
            "halves": ("[at * 3 + 1] = t;", "[at * 3 + 1] = t; ((unsigned short*)work)[at * 3 + 4] = t;", ORDER),
            "bytes": ("[2048 + at] = t;", "[2048 + at] = t; ((unsigned char*)work)[2049 + at] = t;", ORDER),
        },
        ctas=2,
    ),
    Case(
        "rows that end inside of 16 bytes",
        # 61 floats of each CTA.
        "if (t < 61) work[61 * b + t] = b; out[64 * b + t] = 163 - t;",
        {"a float too many": ("if (t < 61)", "if (t < 62)", ORDER)},
    ),
    Case(
        "one place written by all",
        "work[64 * b + t] = b + 1; out[64 * b + t] = 163 - t;",
        {"unordered": ("work[64 * b + t] = b + 1;", "work[t] = b + 1;", ORDER)},
        ctas=2,
    ),
    Case(
        "flag within a CTA",
        """
        u32* flag = work + 1024;
        if (t == 0) { work[0] = 100; StoreReleaseCta(flag, 1); }
        if (t == 32) { while (LoadAcquireCta(flag) == 0) {} out[0] = work[0] + 63; }
        if (t != 0) out[t == 32 ? 32 : t] = 163 - t;""",
        {
            "relaxed store": ("StoreReleaseCta(", "StoreRelaxed(", ORDER),
            "relaxed load": ("LoadAcquireCta(", "LoadRelaxed(", ORDER),
        },
        ctas=1,
    ),
    Case(
        "release to the GPU, acquired within the CTA",
        """
        u32* flag = work + 1024;
        if (t == 0) { work[0] = 100; StoreRelease(flag, 1); }
        if (t == 32) { while (LoadAcquireCta(flag) == 0) {} out[0] = work[0] + 63; }
        if (t != 0) out[t == 32 ? 32 : t] = 163 - t;""",
        {"relaxed store": ("StoreRelease(", "StoreRelaxed(", ORDER)},
        ctas=1,
    ),
    Case(
        "flag within a cluster",
        """
        u32* flag = work + 1024 + blockIdx.x / 2;
        if (Special_rank() == 0) {
          work[64 * b + t] = 100 + t;
          __syncthreads();
          if (t == 0) StoreReleaseCluster(flag, 1);
        } else {
          if (t == 0) while (LoadAcquireCluster(flag) == 0) {}
          __syncthreads();
          out[32 * b - 32 + t] = work[64 * b - 1 - t];
        }
        """,
        {
            "release of the CTA": ("StoreReleaseCluster(", "StoreReleaseCta(", SCOPE),
            "acquire of the CTA": ("LoadAcquireCluster(", "LoadAcquireCta(", SCOPE),
        },
        lambda t: np.where(t < 64, 163 - t, 0),
        ctas=2,
        cluster=2,
    ),
    Case(
        "cluster barrier, then a flag to another cluster",
        """
        u32* flag = work + 1024;
        if (b < 2) {
          if (b == 0) work[t] = 100 + t;
          ClusterSync();
          if (b == 1 && t == 0) StoreRelease(flag, 1);
        } else if (b == 3) {
          if (t == 0) while (LoadAcquire(flag) == 0) {}
          __syncthreads();
          out[t] = work[63 - t];
        }""",
        {
            "no barrier": ("ClusterSync();", "", ORDER),
            "release of the cluster": ("StoreRelease(", "StoreReleaseCluster(", SCOPE),
            "acquire of the cluster": ("LoadAcquire(", "LoadAcquireCluster(", SCOPE),
        },
        cluster=2,
    ),
    Case(
        "atomics in shared memory of a cluster",
        """
        __shared__ u32 sum;
        if (t == 0) sum = 0;
        ClusterSync();
        u32 at = Map(Shared(&sum), 0);
        asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" :: "r"(at), "r"(t) : "memory");
        ClusterSync();
        out[64 * b + t] = sum - sum + 163 - t;""",
        {
            "scope of the CTA": (".cluster.shared::cluster", ".cta.shared::cluster", SCOPE),
            "no barrier before": (
                "sum = 0;\n        ClusterSync();",
                "sum = 0;",
                "nothing orders two accesses of shared memory",
            ),
        },
        ctas=2,
        cluster=2,
    ),
    Case(
        "flag in shared memory",
        """
        __shared__ u32 flag, data;
        if (t == 0) flag = 0;
        __syncthreads();
        if (t == 0) { data = in[7]; __threadfence_block(); atomicExch(&flag, 1); }
        if (t == 32) { while (atomicAdd(&flag, 0) == 0) {} __threadfence_block(); out[0] = data + 156; }
        if (t != 0) out[t] = 163 - t;""",
        {
            "no fence before": (
                "data = in[7]; __threadfence_block();",
                "data = in[7];",
                "two accesses of shared memory",
            ),
            "no fence after": ("{} __threadfence_block();", "{}", "two accesses of shared memory"),
            "plain flag": ("atomicExch(&flag, 1);", "flag = 1;", "two accesses of shared memory"),
        },
        ctas=1,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_kernels_are_clean(case: Case) -> None:
    kernel = case.kernel()
    for seed in SEEDS:
        for mode in ("strict", "relaxed"):
            run, out = case.run(kernel, seed, mode)
            run.check()
            np.testing.assert_array_equal(out[:64], case.expect(np.arange(64, dtype=np.uint32)))


@pytest.mark.parametrize(("case", "fault"), [pytest.param(c, f, id=f"{c.name}: {f}") for c in CASES for f in c.faults])
def test_faults_are_reported(case: Case, fault: str) -> None:
    """In every order in which the scheduler may run them."""
    kernel = case.kernel(fault)
    for seed in SEEDS:
        for mode in ("strict", "relaxed"):
            run, _ = case.run(kernel, seed, mode)
            texts = [str(report) for report in run.reports]
            assert any(re.search(case.faults[fault][2], text) for text in texts), (seed, mode, texts)


def test_report_names_both_places() -> None:
    case = next(case for case in CASES if case.name == "one place written by all")
    run, _ = case.run(case.kernel("unordered"), 0, "strict")
    report = run.reports[0]
    assert report.kind == "race"
    assert re.search(r'global memory, "k_param_1" bytes \[\d+, \d+\)', report.message)
    assert {place.cta[0] for place in report.places} == {0, 1}
    assert all(place.warp in (0, 1) and 0 <= place.lane < 32 and place.ptx_line > 0 for place in report.places)
    assert all(place.opcode.startswith("st.global") and "kernel.cu" in place.source for place in report.places)


def test_copy_is_reported_with_its_issuer() -> None:
    case = next(case for case in CASES if case.name == "bulk store read by another CTA")
    run, _ = case.run(case.kernel("no wait"), 0, "strict")
    race = next(report for report in run.reports if report.kind == "race")
    copy = next(place for place in race.places if place.opcode.startswith("cp.async.bulk.global"))
    assert (copy.cta[0], copy.warp, copy.lane) == (0, 0, 0)


def test_same_seed_same_reports() -> None:
    case = next(case for case in CASES if case.name == "last block is done")
    kernel = case.kernel("no barrier before")
    for seed in range(3):
        texts = [[str(report) for report in case.run(kernel, seed, "strict")[0].reports] for _ in range(2)]
        assert texts[0] == texts[1]


def test_grids_of_thousands_of_ctas() -> None:
    """What is known of CTAs that have ended does not add up: neither memory nor time is for their square."""
    kernel = cuda_kernel(f"""{GLOBAL}
      extern "C" __global__ void k(u32* out, u32* work) {{
        u32 t = threadIdx.x, b = blockIdx.x;
        u32* counter = work + 64 * gridDim.x;
        {LAST_BLOCK.split("u32* counter")[0]}
        {
        LAST_BLOCK.split("work + 1024;")[1]
        % ("__threadfence(); __syncthreads();", "atomicAdd(counter, 1)", "__threadfence();")
    }
      }}""")
    ctas = 3000
    out, work = np.zeros(64, np.uint32), np.zeros(64 * ctas + 1, np.uint32)
    check_launch(kernel, out, work, threads=64, ctas=ctas, sm_count=16)
    np.testing.assert_array_equal(out, sum(100 * b + np.arange(64) for b in range(ctas)))


def test_no_races_without_the_check() -> None:
    case = next(case for case in CASES if case.name == "one place written by all")
    out, work, given = np.zeros(1024, np.uint32), np.zeros(2048, np.uint32), np.zeros(1024, np.uint32)
    tile = TensorMap(work.view(np.float32).reshape(32, 64), box=(32, 2))
    run = launch(case.kernel("unordered"), out, work, given, tile, threads=64, ctas=2, check_races=False)
    assert not run.reports
