"""Small kernels for tests of the emulator: hand-written PTX with its frame, or CUDA C++ by way of NVRTC."""

from __future__ import annotations

from typing import Any

import numpy as np
from nvrtc import compile_ptx

from jax_fa4.emulated import Kernel, Run

HEADER = ".version 8.8\n.target {target}\n.address_size 64\n"


# What CUDA C++ kernels of the tests begin with: PTX as functions.
PRELUDE = r"""
typedef unsigned u32;
typedef unsigned long long u64;
#define FN static __device__ __forceinline__
FN u32 Shared(const void* x) { return static_cast<u32>(__cvta_generic_to_shared(x)); }
FN u32 Special_rank() { u32 x; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x)); return x; }
FN void Init(u64* b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(Shared(b)), "r"(n)
    : "memory"); }
FN void InitFence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FN void ProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
FN void Arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(Shared(b)) : "memory"); }
FN void Expect(u64* b, u32 n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(Shared(b)), "r"(n) : "memory");
}
FN bool TryWait(u64* b, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(Shared(b)), "r"(parity) : "memory");
  return done;
}
FN bool TestWait(u64* b, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(Shared(b)), "r"(parity) : "memory");
  return done;
}
FN void Wait(u64* b, u32 parity) { while (!TryWait(b, parity)) {} }
FN void Commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
FN void WaitRead() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
FN void WaitAll() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
FN void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
FN u32 Map(u32 at, u32 rank) { u32 x; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x)
    : "r"(at), "r"(rank)); return x; }
FN void Load(void* to, const void* from, u32 bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(Shared(to)), "l"(from), "r"(bytes), "r"(Shared(b)) : "memory");
}
FN void Store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
      :: "l"(to), "r"(Shared(from)), "r"(bytes) : "memory");
}
"""


def ptx_kernel(
    body: str,
    pointers: int = 1,
    *,
    before: str = "",
    module: str = "",
    parameters: str = "",
    target: str = "sm_100a",
) -> Kernel:
    """A kernel whose body finds its `pointers` parameters, addresses of global memory, in %rd0, %rd1 and so on.

    The body may use %r0-%r63, %rd0-%rd63, %h0-%h15, %f0-%f31 and %p0-%p15; %r60 is the thread in the CTA.
    Declarations stand in `before` (the kernel's own) and in `module`.
    """
    names = [f".param .u64 p{i}" for i in range(pointers)] + ([parameters] if parameters else [])
    loads = "\n".join(f"ld.param.u64 %rd{i}, [p{i}];\ncvta.to.global.u64 %rd{i}, %rd{i};" for i in range(pointers))
    return Kernel(
        f"""{HEADER.format(target=target)} {module}
        .visible .entry k({", ".join(names)})
        {{
        .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .f32 %f<32>; .reg .b64 %rd<64>; .reg .pred %p<16>;
        {before}
        {loads}
        mov.u32 %r60, %tid.x;
        {body}
        ret;
        }}"""
    )


def cuda_kernel(source: str, arch: str = "compute_100a") -> Kernel:
    """The one kernel of CUDA C++ text behind PRELUDE."""
    return Kernel(compile_ptx(PRELUDE + source, arch))


def launch(kernel: Kernel, *arguments: Any, threads: int = 32, ctas: int = 1, cluster: int = 1, **options: Any) -> Run:
    """Launches along x only."""
    return kernel.launch(list(arguments), grid=(ctas, 1, 1), block=(threads, 1, 1), cluster=(cluster, 1, 1), **options)


def check_launch(kernel: Kernel, *arguments: Any, **options: Any) -> None:
    """Launches, and fails if there are reports."""
    launch(kernel, *arguments, **options).check()


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)
