"""Rules of wgmma (PTX ISA 9.7.15.5, 9.7.15.7): kernels that break one, and the same without the fault."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import cuda_kernel, launch
from test_emulated_reports import SEEDS, Planted, check_clean, check_found

# D is 64 x 8 or, in 8 registers, 64 x 16. The operands are zeros.
WGMMA = r"""
  alignas(1024) __shared__ volatile u32 operands[2048];
  for (u32 i = t; i < 2048; i += blockDim.x) operands[i] = 0;
  ProxyFence();
  __syncthreads();
  u64 b = 8ull << 16 | 16ull << 32 | (Shared((void*)operands) & 0x3ffff) >> 4;
  float d[8];
  for (int i = 0; i < 8; ++i) d[i] = __uint_as_float(in[t + i]);
  #define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  #define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  #define WAIT(n) asm volatile("wgmma.wait_group.sync.aligned " #n ";" ::: "memory");
  #define N8 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, "
  #define N16 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
  #define D4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
  #define MMA(d, b) asm volatile(N8 "%4, %4, 1, 1, 1, 0, 0;" : D4(d) : "l"(b));
  #define NEGATED_MMA(d, b) asm volatile(N8 "%4, %4, 1, -1, 1, 0, 0;" : D4(d) : "l"(b));
  #define WIDE_MMA(d, b) asm volatile(N16 "%8, %8, 1, 1, 1, 0, 0;" \
      : D4(d), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) : "l"(b));
"""

END = "COMMIT WAIT(0) out[t] = __float_as_uint(d[0] + d[1] + d[2] + d[3] + d[4] + d[5] + d[6] + d[7]);"


def planted(name: str, kind: str, message: str, body: str, *, forgiven: bool = False) -> Planted:
    opcodes = () if kind == "deadlock" else ("",)
    return Planted(name, kind, message, opcodes, WGMMA + body, 128, forgiven=forgiven, arch="compute_90a")


PLANTED = [
    planted(
        "accumulator read",
        "misuse",
        r"an accumulator of a wgmma\.mma_async under way, is read without a wgmma\.wait_group of at most 0 before",
        "FENCE MMA(d, b) COMMIT FIX(WAIT(0)) out[t] = __float_as_uint(d[0]); WAIT(0)",
    ),
    planted(
        "accumulator written",
        "misuse",
        "an accumulator of a wgmma.mma_async under way, is written",
        """
      FENCE
      asm volatile(N8 "%4, %4, 1, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;\\n"
                   FIX("wgmma.wait_group.sync.aligned 0;") "add.f32 %0, %5, %5; wgmma.wait_group.sync.aligned 0;"
                   : D4(d) : "l"(b), "f"(d[4]));
      out[t] = __float_as_uint(d[0]);""",
    ),
    planted(
        "operand A written",
        "misuse",
        "operand A of a wgmma.mma_async under way, is written",
        """
      u32 a[4] = {in[t], in[t + 1], in[t + 2], in[t + 3]};
      FENCE
      asm volatile(N8 "{%4, %5, %6, %7}, %8, 1, 1, 1, 0; wgmma.commit_group.sync.aligned;\\n"
                   FIX("wgmma.wait_group.sync.aligned 0;") "add.u32 %4, %9, 1; wgmma.wait_group.sync.aligned 0;"
                   : D4(d), "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]) : "l"(b), "r"(t));
      out[t] = __float_as_uint(d[0]) + a[0];""",
    ),
    planted(
        "wait for too few groups",
        "misuse",
        "is read without a wgmma.wait_group of at most 0 before",
        """
      FENCE MMA(d, b) COMMIT MMA((d + 4), b) COMMIT
      FIX(WAIT(0)) FAULT(WAIT(1))
      out[t] = __float_as_uint(d[4]);
      WAIT(0)""",
    ),
    planted(
        "not committed",
        "misuse",
        "is read before a wgmma.commit_group and a wgmma.wait_group",
        "FENCE MMA(d, b) FIX(COMMIT) WAIT(0) out[t] = __float_as_uint(d[0]); COMMIT WAIT(0)",
    ),
    planted(
        "copy of an accumulator",
        "misuse",
        "a copy of an accumulator of a wgmma.mma_async under way, is read",
        """
      u32 copy;
      FENCE MMA(d, b) COMMIT
      asm volatile("mov.b32 %0, %1;" : "=r"(copy) : "r"(__float_as_uint(d[0])));
      FIX(WAIT(0)) out[t] = copy; WAIT(0)""",
    ),
    planted(
        "another shape under way",
        "misuse",
        "under way, is used by one of another shape",
        "FENCE MMA(d, b) FIX(COMMIT WAIT(0) FENCE) WIDE_MMA(d, b)" + END,
    ),
    planted(
        "another shape without a fence",
        "misuse",
        "has been an accumulator of a wgmma.mma_async of another shape since the last wgmma.fence",
        "FENCE MMA(d, b) COMMIT WAIT(0) FIX(FENCE) WIDE_MMA(d, b)" + END,
    ),
    planted(
        "no fence at all",
        "misuse",
        "no wgmma.fence stands before the first wgmma.mma_async",
        "FIX(FENCE) MMA(d, b)" + END,
    ),
    planted(
        "accumulator changed without a fence",
        "misuse",
        "has been accessed by another instruction since the last wgmma.fence",
        "FENCE MMA(d, b) COMMIT WAIT(0) d[2] *= 0.5f; FIX(FENCE) MMA(d, b)" + END,
    ),
    planted(
        "accumulator read without a fence",
        "misuse",
        "has been accessed by another instruction since the last wgmma.fence",
        "FENCE MMA(d, b) COMMIT WAIT(0) out[t] = __float_as_uint(d[1]); FIX(FENCE) MMA(d, b)" + END,
        forgiven=True,
    ),
    planted(
        "operand A changed without a fence",
        "misuse",
        "has been accessed by another instruction since the last wgmma.fence",
        """
      FENCE MMA(d, b) COMMIT WAIT(0)
      u32 a[4] = {in[t], in[t + 1], in[t + 2], in[t + 3]};
      FIX(FENCE)
      asm volatile(N8 "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
                   : D4(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));"""
        + END,
    ),
    planted(
        "missing warp",
        "deadlock",
        "wait for warps 3 of their warpgroup to execute this wgmma.mma_async",
        "FENCE FAULT(if (w != 3)) MMA(d, b)" + END,
    ),
    planted(
        "missing lane",
        "deadlock",
        "wait for all 32 lanes of their warp to arrive here",
        "FENCE FAULT(if (lane != 7)) MMA(d, b)" + END,
    ),
    planted(
        "different instructions",
        "misuse",
        "execute wgmma.mma_async with different instructions",
        "FENCE if (w FIX(< 4) FAULT(< 2)) { MMA(d, b) } else { NEGATED_MMA(d, b) }" + END,
    ),
    planted(
        "different descriptors of lanes",
        "misuse",
        "execute wgmma.mma_async with different values of the descriptor of A",
        "FENCE FAULT(b += lane == 9;) MMA(d, b)" + END,
    ),
    planted(
        "different descriptors of warps",
        "misuse",
        r"execute wgmma\.mma_async with different values of the descriptor of A: 0x\w+ in warp \d and 0x\w+\.",
        "FENCE FAULT(b += w == 2;) MMA(d, b)" + END,
    ),
    planted(
        "different scale-d",
        "misuse",
        r"different values of the predicate scale-d",
        """
      FENCE
      asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0;" N8 "%4, %4, p, 1, 1, 0, 0; }"
                   : D4(d) : "l"(b), "r"(t FIX(+ 1)));"""
        + END,
    ),
    planted(
        "end of a warp",
        "misuse",
        "a warp ended with a wgmma.mma_async under way, for which no wgmma.wait_group waits",
        "FENCE MMA(d, b) COMMIT FIX(WAIT(0))",
        forgiven=True,
    ),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.name)
def test_every_seed_finds_the_fault(planted: Planted) -> None:
    check_found(planted)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.name)
def test_the_corrected_kernel_is_clean(planted: Planted) -> None:
    check_clean(planted)


@pytest.mark.parametrize("planted", [p for p in PLANTED if p.kind != "deadlock"], ids=lambda p: p.name)
def test_relaxed_mode(planted: Planted) -> None:
    for seed in SEEDS:
        assert bool(planted.run(True, seed, "relaxed").reports) != planted.forgiven


def test_one_fault_makes_one_report() -> None:
    reports = next(p for p in PLANTED if p.name == "accumulator read").run(True, 0).reports
    assert len(reports) == 1
    access, issue = reports[0].places
    assert (access.opcode, access.role) == ("st.global.f32", "this access")
    assert (issue.opcode[:15], issue.role) == ("wgmma.mma_async", "wgmma.mma_async was issued here")


def test_a_warpgroup_has_four_warps() -> None:
    kernel = cuda_kernel(
        f"""
    extern "C" __global__ void k(u32* out, const u32* in) {{
      u32 t = threadIdx.x;
      {WGMMA} FENCE MMA(d, b) {END}
    }}""",
        "compute_90a",
    )
    values = np.arange(256, dtype=np.uint32)
    for threads, missing in [(32, "1, 2, 3"), (96, "3"), (160, "5, 6, 7")]:
        for seed in SEEDS:
            (report,) = launch(kernel, np.zeros(256, np.uint32), values, threads=threads, seed=seed).reports
            assert report.kind == "deadlock"
            assert f"wait for warps {missing} of their warpgroup" in str(report)
    launch(kernel, np.zeros(512, np.uint32), np.arange(512, dtype=np.uint32), threads=256).check()


def test_copies_that_compilers_make_are_no_access() -> None:
    """Accumulators may be renamed by movs between products under way, as NVVM does at the end of a loop."""
    kernel = cuda_kernel(
        f"""
    extern "C" __global__ void k(u32* out, const u32* in) {{
      u32 t = threadIdx.x;
      {WGMMA}
      FENCE
      MMA(d, b)
      asm volatile("{{ .reg .f32 a, c, e, f; mov.f32 a, %0; mov.f32 c, %1; mov.f32 e, %2; mov.f32 f, %3;\\n"
                   "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{a, c, e, f}}, %4, %4, 1, 1, 1, 0, 0;\\n"
                   "mov.f32 %0, a; mov.f32 %1, c; mov.f32 %2, e; mov.f32 %3, f; }}" : D4(d) : "l"(b));
      MMA(d, b)
      {END}
    }}""",
        "compute_90a",
    )
    for seed in SEEDS:
        launch(kernel, np.zeros(256, np.uint32), np.arange(256, dtype=np.uint32), threads=128, seed=seed).check()
