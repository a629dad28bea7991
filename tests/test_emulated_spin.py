"""What ends a run: polls for what never comes are deadlocks; polls that may end, and lanes that run, are not."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ptx_kernels import cuda_kernel, launch

from jax_fa4.emulated import Kernel

POLL = r"""
  FN u32 Poll(const u32* at) { u32 x; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at)
      : "memory"); return x; }
  FN void Set(u32* at, u32 x) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(at), "r"(x) : "memory"); }
"""
BODY = {
    "test_wait": "while (!TestWait(&b, 0)) {}",
    "a flag in global memory": "while (Poll(flag) != 1) {}",
    "one thread polls, the others wait": "if (t == 0) while (Poll(flag) != 1) {} __syncthreads();",
    "a wait that may time out beside a poll": "if (w == 0) Wait(&b, 0); else while (Poll(flag) != 1) {}",
    "a flag in shared memory": 'while (word != 1) asm volatile("nanosleep.u32 20;");',
}
POLLED = {
    "test_wait": "wait for the mbarrier at 0x[0-9a-f]+: 0 phases are complete; this one still needs 1 arrivals",
    "a flag in global memory": "read address 0x[0-9a-f]+, which holds 0x0,",
    "one thread polls, the others wait": r"read address 0x[0-9a-f]+, which holds 0x0,[\s\S]*wait at barrier 0",
    "a wait that may time out beside a poll": "wait for the mbarrier[^$]*read address",
    "a flag in shared memory": "read address 0x[0-9a-f]+, which holds 0x7,",
}


def kernel(body: str) -> Kernel:
    return cuda_kernel(f"""{POLL}
    extern "C" __global__ void k(u32* out, u32* flag) {{
      __shared__ u64 b; __shared__ volatile u32 word;
      u32 t = threadIdx.x, w = t / 32;
      if (t == 0) {{ Init(&b, 1); InitFence(); word = 7; }}
      __syncthreads();
      {body}
      out[t] = t;
    }}""")


@pytest.mark.parametrize("name", BODY)
def test_a_poll_that_nothing_ends(name: str) -> None:
    for seed in range(5):
        run = launch(
            kernel(BODY[name]),
            np.zeros(64, np.uint32),
            np.zeros(1, np.uint32),
            threads=64,
            seed=seed,
            max_instructions=1 << 22,
        )
        (report,) = run.reports
        assert report.kind == "deadlock", str(report)

        assert re.search(POLLED[name], str(report)), str(report)


@pytest.mark.parametrize(
    "body",
    [
        # Another warp computes for long before it signals.
        """
      if (w == 0) { while (!TestWait(&b, 0)) {} } else {
        u32 x = t;
        #pragma unroll 1
        for (u32 i = 0; i < 600000; ++i) asm volatile("mad.lo.u32 %0, %0, 3, 1;" : "+r"(x));
        if (t == 32) Arrive(&b);
        if (x == 12345) out[t] = 1;
      }""",
        # A loop that gives up after many turns, and one that looks at the clock.
        "u32 n = 0; while (Poll(flag) != 1 && ++n < 600000) {}",
        """u64 now, start; asm volatile("mov.u64 %0, %%clock64;" : "=l"(start));
      do asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)); while (Poll(flag) != 1 && now - start < 3000000);""",
    ],
    ids=["computation", "turns", "clock"],
)
def test_a_poll_that_ends(body: str) -> None:
    for seed in range(2):
        out = np.zeros(64, np.uint32)
        launch(kernel(body), out, np.zeros(1, np.uint32), threads=64, seed=seed).check()
        np.testing.assert_array_equal(out, np.arange(64))


def test_lanes_of_a_warp_may_wait_for_each_other() -> None:
    """Every lane that can go on has a turn."""
    body = "if (t == 0) while (Poll(flag) != 1) {} else if (t == 1) Set(flag, 1);"
    for seed in range(5):
        run = launch(
            kernel(body),
            np.zeros(64, np.uint32),
            np.zeros(1, np.uint32),
            threads=64,
            seed=seed,
            max_instructions=1 << 22,
        )
        assert run.reports == []


@pytest.mark.parametrize("threads", [2, 32, 64])
def test_a_spin_lock_of_every_lane(threads: int) -> None:
    lock = cuda_kernel("""
    extern "C" __global__ void k(u32* out) {
      __shared__ u32 lock, count;
      if (threadIdx.x == 0) { lock = 0; count = 0; }
      __syncthreads();
      while (atomicCAS(&lock, 0, 1) != 0) {}
      __threadfence_block();
      count = count + 1;
      __threadfence_block();
      atomicExch(&lock, 0);
      __syncthreads();
      out[threadIdx.x] = count;
    }""")
    for seed in range(2):
        instructions = set()
        for _ in range(2):
            out = np.zeros(threads, np.uint32)
            run = launch(lock, out, threads=threads, seed=seed, max_instructions=3_000_000)
            run.check()
            assert (out == threads).all()
            instructions.add(run.instructions)
        assert len(instructions) == 1


def test_an_instruction_that_no_lane_executes_is_progress() -> None:
    """A warp whose time is up behind such an instruction is not one that waits, even if no other warp is left."""
    lines = '"@p st.global.u32 [%0], %1;\\n"' * 64
    quiet = cuda_kernel(f"""
    extern "C" __global__ void k(u32* out) {{
      asm volatile("{{ .reg .pred p; setp.eq.u32 p, %1, 99;\\n" {lines} "}}" :: "l"(out), "r"(threadIdx.x) : "memory");
    }}""")
    for seed in range(20):
        launch(quiet, np.zeros(1, np.uint32), threads=32, seed=seed).check()
