"""What the lanes of a warp, and warps, do together: PTX ISA 9.7.9.6 (shfl), 9.7.12 and 9.7.13 by numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from ptx_kernels import HEADER, check_launch, cuda_kernel, launch, ptx_kernel, random

from jax_fa4.emulated import Kernel

LANES = np.arange(32)
ADDRESS = "mad.wide.u32 %rd30, %r60, 4, %rd0;"
STORE = "st.global.b32 [%rd30], %r0;"


def lanes_of(mask: int) -> np.ndarray:
    return LANES[(mask >> LANES) & 1 == 1]


def run(body: str, *inputs: np.ndarray, threads: int = 32, fill: int = 0, **options: Any) -> np.ndarray:
    """Runs `body` after %r1, %r2, ... have been loaded from inputs; what it leaves in %r0 of each thread."""
    output = np.full(threads, fill, np.uint32)
    loads = "".join(
        f"mad.wide.u32 %rd31, %r60, 4, %rd{i}; ld.global.b32 %r{i}, [%rd31];" for i in range(1, len(inputs) + 1)
    )
    kernel = ptx_kernel(f"{ADDRESS} {loads} {body} {STORE}", 1 + len(inputs))
    check_launch(kernel, output, *inputs, threads=threads, **options)
    return output


# ---- shfl


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("clamp", [31, 0, 5])
def test_shfl(mode: str, width: int, clamp: int) -> None:
    """The pseudocode of 9.7.9.6, for every lane with a distance of its own."""
    rng = random(width)
    value = rng.integers(0, 1 << 32, 32, np.uint32)
    distance = rng.integers(0, 32, 32, np.uint32)
    segment = 32 - width & 31
    c = segment << 8 | clamp
    actual = run(
        f"shfl.sync.{mode}.b32 %r0|%p0, %r1, %r2, {c}, -1; @%p0 xor.b32 %r0, %r0, 0x5a5a5a5a;", value, distance
    )
    most, least = (LANES & segment) | (clamp & ~segment & 31), LANES & segment
    by = distance.astype(int)
    source = {"up": LANES - by, "down": LANES + by, "bfly": LANES ^ by, "idx": least | (by & ~segment & 31)}[mode]
    valid = source >= most if mode == "up" else source <= most
    expected = value[np.where(valid, source, LANES)] ^ np.where(valid, 0x5A5A5A5A, 0).astype(np.uint32)
    np.testing.assert_array_equal(actual, expected)


def test_shfl_of_some_lanes() -> None:
    actual = run(
        "setp.lt.u32 %p1, %r60, 8; @!%p1 bra SKIP; shfl.sync.bfly.b32 %r1, %r60, 3, 31, 0xff; SKIP: mov.u32 %r0, %r1;",
        np.full(32, 77, np.uint32),
    )
    np.testing.assert_array_equal(actual, np.where(LANES < 8, LANES ^ 3, 77))


# ---- vote, elect, match, redux, activemask


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x0F0F00F1, 0x80000000])
@pytest.mark.parametrize("pattern", ["random", "none", "all"])
def test_vote(mask: int, pattern: str) -> None:
    rng = random(mask % 97)
    x = {"random": rng.integers(0, 2, 32), "none": np.zeros(32), "all": np.ones(32)}[pattern].astype(np.uint32)
    text = f"""mov.u32 %r0, 0; setp.ne.u32 %p0, %r1, 0; mov.u32 %r10, 1;
    shl.b32 %r10, %r10, %r60; and.b32 %r10, %r10, {mask};
    setp.eq.u32 %p1, %r10, 0; @%p1 bra END;
    vote.sync.all.pred %p2, %p0, {mask}; vote.sync.any.pred %p3, %p0, {mask}; vote.sync.uni.pred %p4, %p0, {mask};
    vote.sync.all.pred %p5, !%p0, {mask};
    @%p2 or.b32 %r0, %r0, 1; @%p3 or.b32 %r0, %r0, 2; @%p4 or.b32 %r0, %r0, 4; @%p5 or.b32 %r0, %r0, 8; END:"""
    inside = (mask >> LANES) & 1 == 1
    chosen = x[inside] != 0
    flags = chosen.all() * 1 | chosen.any() * 2 | (chosen.all() or not chosen.any()) * 4 | (~chosen).all() * 8
    np.testing.assert_array_equal(run(text, x), np.where(inside, flags, 0))
    ballot = f"@!%p1 vote.sync.ballot.b32 %r0, %p0, {mask};"
    text = text[: text.index("vote")].replace("@%p1 bra END;", "") + ballot
    np.testing.assert_array_equal(run(text, x), np.where(inside, np.sum((x != 0) * inside * (1 << LANES)), 0))


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0xF0, 0x80000001])
def test_elect(mask: int) -> None:
    """One lane of the mask, the same each time, and every lane learns which."""
    text = f"""mov.u32 %r0, 99; mov.u32 %r10, 1;
    shl.b32 %r10, %r10, %r60; and.b32 %r10, %r10, {mask}; setp.eq.u32 %p1, %r10, 0;
    @%p1 bra END; elect.sync %r0|%p0, {mask}; elect.sync _|%p2, {mask}; @%p0 add.u32 %r0, %r0, 1000;
        @%p2 add.u32 %r0, %r0, 1000; END:"""
    actual = run(text)
    lanes = lanes_of(mask)
    leader = actual[lanes].min()
    assert leader in lanes
    np.testing.assert_array_equal(actual[lanes], np.where(lanes == leader, leader + 2000, leader))
    assert (np.delete(actual, lanes) == 99).all()


@pytest.mark.parametrize("bits", [32, 64])
def test_match(bits: int) -> None:
    x = random().integers(0, 4, 32).astype(np.uint32)
    load = "mov.b64 %rd40, {0, %r1};" if bits == 64 else ""
    source = "%rd40" if bits == 64 else "%r1"
    expected = [np.sum((x == v) * (1 << LANES)) for v in x]
    np.testing.assert_array_equal(run(f"{load} match.any.sync.b{bits} %r0, {source}, -1;", x), expected)
    text = f"{load} match.all.sync.b{bits} %r0|%p0, {source}, -1; @%p0 add.u32 %r0, %r0, 1;"
    np.testing.assert_array_equal(run(text, x), 0)
    np.testing.assert_array_equal(run(text, np.full(32, 5, np.uint32)), 0)  # 0xffffffff + 1


REDUCTIONS: dict[str, Any] = {
    "add.s32": np.sum,
    "add.u32": np.sum,
    "min.s32": np.min,
    "max.s32": np.max,
    "min.u32": np.min,
    "max.u32": np.max,
    "and.b32": np.bitwise_and.reduce,
    "or.b32": np.bitwise_or.reduce,
    "xor.b32": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x00FF0010])
def test_redux(name: str, mask: int) -> None:
    x = random(3).integers(0, 1 << 32, 32, np.uint32)
    text = f"""mov.u32 %r0, 7; mov.u32 %r10, 1;
    shl.b32 %r10, %r10, %r60; and.b32 %r10, %r10, {mask}; setp.eq.u32 %p1, %r10, 0;
    @!%p1 redux.sync.{name} %r0, %r1, {mask};"""
    chosen = x[lanes_of(mask)]
    result = int(REDUCTIONS[name](chosen.view(np.int32) if "s32" in name else chosen))
    expected = np.where(np.isin(LANES, lanes_of(mask)), result % (1 << 32), 7)
    np.testing.assert_array_equal(run(text, x), expected)


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("holes", [0, 3, 32])
def test_redux_of_floats(name: str, absolute: bool, nan: bool, holes: int) -> None:
    x = random(5).standard_normal(32).astype(np.float32)
    x[:holes] = np.nan
    text = f"redux.sync.{name}{'.abs' * absolute}{'.NaN' * nan}.f32 %f0, %f1, -1;"
    actual = run(f"mov.b32 %f1, %r1; {text} mov.b32 %r0, %f0;", x.view(np.uint32))
    y = np.abs(x) if absolute else x
    if holes == 32 or (nan and holes):
        np.testing.assert_array_equal(actual, 0x7FFFFFFF)
    else:
        expected = (np.nanmin if name == "min" else np.nanmax)(y)
        np.testing.assert_array_equal(actual.view(np.float32), expected)


# Of lanes 0 to 15 the lower half of the warp, of the others the upper one.
HALF = "setp.lt.u32 %p0, %r60, 16; selp.b32 %r61, 0xffff, 0xffff0000, %p0;"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("shfl.sync.bfly.b32 %r0, %r60, 1, 0x101f, %r61;", LANES ^ 1),
        ("shfl.sync.idx.b32 %r0, %r60, 3, 0x101f, %r61;", LANES // 16 * 16 + 3),
        ("vote.sync.ballot.b32 %r0, %p2, %r61;", np.where(LANES < 16, 0xAAAA, 0xAAAA0000)),
        ("redux.sync.add.u32 %r0, %r60, %r61;", np.where(LANES < 16, 120, 376)),
        ("match.any.sync.b32 %r0, %r5, %r61;", np.where(LANES < 16, 0x5555, 0x55550000) << LANES % 2),
        ("elect.sync %r0|%p3, %r61;", LANES // 16 * 16),
        ("bar.warp.sync %r61; mov.u32 %r0, %r60;", LANES),
    ],
)
def test_sets_of_lanes_with_masks_of_their_own(body: str, expected: np.ndarray) -> None:
    """Lanes that execute an instruction together may be members of different sets."""
    setup = f"{HALF} and.b32 %r5, %r60, 1; setp.ne.u32 %p2, %r5, 0;"
    for seed in range(3):
        np.testing.assert_array_equal(run(f"{setup} {body}", seed=seed), expected.astype(np.uint32))


def test_a_set_of_lanes_does_not_wait_for_another() -> None:
    """The upper half comes to its first instruction only when the lower one has passed it."""
    body = f"""{HALF} mov.u32 %r0, 0;
    setp.ge.u32 %p1, %r60, 24; @%p1 bra LATE;
    M: shfl.sync.idx.b32 %r0, %r60, 5, 0x101f, %r61; bar.warp.sync %r61; bra END;
    LATE: ld.relaxed.gpu.global.u32 %r2, [%rd1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra LATE; bra M;
    END: setp.eq.u32 %p3, %r60, 0; @%p3 st.relaxed.gpu.global.u32 [%rd1], 1;"""
    for seed in range(5):
        output = np.zeros(32, np.uint32)
        check_launch(ptx_kernel(f"{ADDRESS} {body} {STORE}", 2), output, np.zeros(1, np.uint32), seed=seed)
        np.testing.assert_array_equal(output, LANES // 16 * 16 + 5)


def test_reduction_among_equal_lanes() -> None:
    actual = run("and.b32 %r3, %r60, 3; match.any.sync.b32 %r1, %r3, -1; redux.sync.add.u32 %r0, %r60, %r1;")
    np.testing.assert_array_equal(actual, 112 + 8 * (LANES % 4))


@pytest.mark.parametrize("ends", ["warp 0", "the last warp", "two warps", "half a warp"])
def test_threads_that_have_ended_do_not_keep_a_barrier_waiting(ends: str) -> None:
    """Whether they end before the others arrive or after. A barrier that names a count does wait."""
    condition = {
        "warp 0": "setp.lt.u32 %p0, %r60, 32;",
        "the last warp": "setp.ge.u32 %p0, %r60, 96;",
        "two warps": "setp.ge.u32 %p0, %r60, 64;",
        "half a warp": "setp.ge.u32 %p0, %r60, 112;",
    }[ends]
    body = f"{condition} @%p0 ret; bar.sync 0; barrier.sync 1; barrier.sync 0;"
    for seed in range(12):
        check_launch(ptx_kernel(body), np.zeros(1, np.uint32), threads=128, seed=seed)
    if ends == "half a warp":
        return
    for seed in range(5):
        (report,) = launch(
            ptx_kernel(f"{condition} @%p0 ret; bar.sync 0, 128;"), np.zeros(1, np.uint32), threads=128, seed=seed
        ).reports
        assert report.kind == "deadlock"


def test_barriers_that_reduce() -> None:
    """Ended threads do not vote; the second barrier comes right behind the first."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* x) {
      u32 t = threadIdx.x;
      if (t >= 96) return;
      u32 count = __syncthreads_count(x[t] & 1), none = __syncthreads_count(x[t] > 200);
      u32 some = __syncthreads_or(x[t] == 77), no = __syncthreads_or(x[t] == 200);
      u32 all = __syncthreads_and(x[t] < 96), not_all = __syncthreads_and(x[t] != 50);
      x[t] = count | none << 8 | (some != 0) << 16 | (no != 0) << 17 | (all != 0) << 18 | (not_all != 0) << 19;
    }""")
    for seed in range(5):
        x = np.arange(128, dtype=np.uint32)
        check_launch(kernel, x, threads=128, seed=seed)
        assert (x[:96] == (48 | 1 << 16 | 1 << 18)).all()


def test_barriers_that_reduce_apart() -> None:
    """Two pairs of warps may use one barrier, one after the other, without the others' votes."""
    body = f"""{ADDRESS} setp.lt.u32 %p0, %r60, 64; @%p0 bra GO; bar.sync 1, 128;
    GO: setp.ne.u32 %p1, %r60, 5; bar.red.popc.u32 %r0, 2, 64, %p1; @%p0 bar.arrive 1, 128; {STORE}"""
    for seed in range(12):
        output = np.zeros(128, np.uint32)
        check_launch(ptx_kernel(body), output, threads=128, seed=seed)
        np.testing.assert_array_equal(output, np.repeat([63, 64], 64))
    mixed = "setp.lt.u32 %p0, %r60, 32; @%p0 bra A; bar.sync 0; ret; A: bar.red.or.pred %p1, 0, %p0;"
    for seed in range(3):
        (report,) = launch(ptx_kernel(mixed), np.zeros(1, np.uint32), threads=64, seed=seed).reports
        assert "reduce differently" in report.message


def test_an_arrival_of_an_ended_warp_counts_once() -> None:
    body = "setp.lt.u32 %p0, %r60, 32; @%p0 bra A; bar.sync 0; bar.sync 0; ret; A: bar.arrive 0, 96;"
    for seed in range(12):
        check_launch(ptx_kernel(body), np.zeros(1, np.uint32), threads=96, seed=seed)


def test_activemask() -> None:
    actual = run("setp.ge.u32 %p1, %r60, 24; mov.u32 %r0, 0; @%p1 bra SKIP; activemask.b32 %r0; SKIP:")
    assert (actual[24:] == 0).all()
    for lane in range(24):  # each is within its own mask, and none that branched away is
        assert actual[lane] >> lane & 1
        assert not actual[lane] >> 24


# ---- Special registers


def test_special_registers() -> None:
    kernel = cuda_kernel(
        """
    #define S(name, at) { unsigned x; asm volatile("mov.u32 %0, %" name ";" : "=r"(x)); out[at] = x; }
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* to) {
      unsigned* out = to + 32 * (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * (threadIdx.z + blockDim.z *
          (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)))));
      S("%tid.x", 0) S("%tid.y", 1) S("%tid.z", 2) S("%ntid.x", 3) S("%ntid.y", 4) S("%ntid.z", 5)
      S("%ctaid.x", 6) S("%ctaid.y", 7)
      S("%ctaid.z", 8) S("%nctaid.x", 9) S("%nctaid.y", 10) S("%nctaid.z", 11) S("%laneid", 12) S("%lanemask_eq", 13)
      S("%lanemask_lt", 14) S("%lanemask_le", 15) S("%lanemask_gt", 16) S("%lanemask_ge", 17) S("%cluster_ctarank", 18)
      S("%cluster_nctarank", 19) S("%cluster_ctaid.x", 20) S("%clusterid.x", 21)
      S("%nclusterid.x", 22) S("%dynamic_smem_size", 23)
      S("%cluster_nctaid.x", 24) S("%nsmid", 25)
    }"""
    )
    block, grid = (8, 3, 2), (4, 2, 2)
    out = np.zeros((*grid[::-1], *block[::-1], 32), np.uint32)
    kernel.launch([out], grid=grid, block=block, cluster=(2, 1, 1), dynamic_shared_bytes=4096).check()
    cz, cy, cx, tz, ty, tx, _ = np.ogrid[tuple(slice(n) for n in out.shape)]
    lane = (tx + 8 * (ty + 3 * tz)) % 32
    one = 1 << lane.astype(np.int64)
    everything = (1 << 32) - 1
    values = [
        tx,
        ty,
        tz,
        *block,
        cx,
        cy,
        cz,
        *grid,
        lane,
        one,
        one - 1,
        2 * one - 1,
        everything ^ (2 * one - 1),
        everything ^ (one - 1),
        cx % 2,
        2,
        cx % 2,
        cx // 2,
        2,
        4096,
        2,
        148,
    ]
    for i, value in enumerate(values):
        np.testing.assert_array_equal(
            out[..., i : i + 1], np.broadcast_to(value, (*out.shape[:-1], 1)), err_msg=f"register {i}"
        )


# ---- Branches and divergence


def test_collatz() -> None:
    """Loops of as many rounds as each lane needs, with calls of what converges behind them."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(unsigned* out, const unsigned* in) {
      unsigned x = in[threadIdx.x], n = 0;
      while (x != 1) { x = x % 2 ? 3 * x + 1 : x / 2; ++n; if (n > 200) break; }
      unsigned most = __reduce_max_sync(0xffffffffu, n);
      out[threadIdx.x] = n + 1000 * most;
    }""")
    x = np.arange(1, 129, dtype=np.uint32)

    def rounds(v: int) -> int:
        n = 0
        while v != 1 and n <= 200:
            v, n = (3 * v + 1 if v % 2 else v // 2), n + 1
        return n

    n = np.array([rounds(int(v)) for v in x])
    for seed in range(5):
        out = np.zeros(128, np.uint32)
        check_launch(kernel, out, x, threads=128, seed=seed)
        np.testing.assert_array_equal(out, n + 1000 * np.repeat(n.reshape(4, 32).max(1), 32))


def test_brx() -> None:
    x = random(1).integers(0, 3, 64).astype(np.uint32)
    actual = run(
        """LIST: .branchtargets A, B, C; brx.idx %r1, LIST;
    A: mov.u32 %r0, 10; bra END; B: mov.u32 %r0, 20; bra.uni END; C: mov.u32 %r0, 30; END: bar.warp.sync -1;
        add.u32 %r0, %r0, 1;""",
        x,
        threads=64,
    )
    np.testing.assert_array_equal(actual, np.array([11, 21, 31])[x])


def test_predicated_branch_return_and_exit() -> None:
    text = """mov.u32 %r0, 5; setp.lt.u32 %p0, %r60, 4; @%p0 exit; setp.lt.u32 %p1, %r60, 9; @!%p1 bra OVER;
    add.u32 %r0, %r0, 1;
    { .reg .pred %p0; setp.eq.u32 %p0, %r60, 6; @%p0 bra INNER; add.u32 %r0, %r0, 10; INNER: }
    OVER:"""
    expected = np.where(LANES < 4, 0, np.where(LANES < 9, np.where(LANES == 6, 6, 16), 5))
    np.testing.assert_array_equal(run(text), expected)


# ---- Barriers


def test_syncthreads_orders_shared_memory() -> None:
    kernel = cuda_kernel("""
    extern "C" __global__ void k(unsigned* out) {
      __shared__ unsigned x[256];
      for (int round = 0; round < 4; ++round) {
        x[threadIdx.x] = threadIdx.x * (round + 1);
        __syncthreads();
        out[threadIdx.x] += x[255 - threadIdx.x];
        __syncthreads();
      }
    }""")
    for seed in range(10):
        out = np.zeros(256, np.uint32)
        check_launch(kernel, out, threads=256, seed=seed)
        np.testing.assert_array_equal(out, np.arange(256)[::-1] * 10)


@pytest.mark.parametrize("aligned", [True, False])
def test_named_barriers(aligned: bool) -> None:
    """Two producer warps arrive, two consumer warps wait; the way back is another barrier."""
    arrive, sync = ("bar.arrive", "bar.sync") if aligned else ("barrier.cta.arrive", "barrier.cta.sync")
    kernel = cuda_kernel(f"""
    extern "C" __global__ void k(unsigned* out) {{
      __shared__ unsigned x[64];
      unsigned t = threadIdx.x;
      for (unsigned round = 0; round < 5; ++round) {{
        if (t < 64) {{
          if (round) asm volatile("{sync} 2, 128;" ::: "memory");
          x[t] = t + 100 * round;
          asm volatile("{arrive} %0, 128;" :: "r"(1) : "memory");
        }} else {{
          asm volatile("{sync} 1, %0;" :: "r"(128) : "memory");
          out[(t - 64) + 64 * round] = x[127 - t];
          if (round < 4) asm volatile("{arrive} 2, 128;" ::: "memory");
        }}
      }}
    }}""")
    for seed in range(10):
        out = np.zeros((5, 64), np.uint32)
        check_launch(kernel, out, threads=128, seed=seed)
        np.testing.assert_array_equal(out, np.arange(64)[::-1] + 100 * np.arange(5)[:, None])


def test_warp_barrier_orders_lanes() -> None:
    kernel = cuda_kernel("""
    extern "C" __global__ void k(unsigned* out) {
      __shared__ unsigned x[32];
      unsigned t = threadIdx.x;
      if (t % 2) x[t] = t; else x[t] = 2 * t;
      __syncwarp();
      out[t] = x[t ^ 1];
    }""")
    out = np.zeros(32, np.uint32)
    check_launch(kernel, out)
    np.testing.assert_array_equal(out, np.where(LANES % 2, 2 * (LANES ^ 1), LANES ^ 1))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("split", [False, True])
def test_cluster_barrier(size: int, split: bool) -> None:
    """Shared memory of the next CTA, read between two barriers of the cluster."""
    wait = 'asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");'
    arrive = 'asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");'
    kernel = cuda_kernel(f"""
    extern "C" __global__ void k(unsigned* out) {{
      __shared__ unsigned x[64];
      unsigned rank, size, t = threadIdx.x;
      asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
      x[t] = t + 1000 * blockIdx.x;
      {arrive} {"unsigned other = (rank + 1) % size;" if split else ""} {wait}
      {"" if split else "unsigned other = (rank + 1) % size;"}
      unsigned mine = static_cast<unsigned>(__cvta_generic_to_shared(&x[63 - t])), at, value, owner;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(mine), "r"(other));
      asm("getctarank.shared::cluster.u32 %0, %1;" : "=r"(owner) : "r"(at));
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(at));
      out[t + 64 * blockIdx.x] = value + 100000 * owner;
      {arrive} {wait}
    }}""")
    for seed in range(5):
        out = np.zeros((2 * size, 64), np.uint32)
        check_launch(kernel, out, threads=64, ctas=2 * size, cluster=size, seed=seed)
        cta = np.arange(2 * size)[:, None]
        other = (cta % size + 1) % size
        np.testing.assert_array_equal(out, np.arange(64)[::-1] + 1000 * (cta // size * size + other) + 100000 * other)


def test_setmaxnreg_waits_for_registers() -> None:
    """A warpgroup's increase waits until another's decrease has freed enough."""
    body = """shr.u32 %r1, %r60, 7; setp.eq.u32 %p0, %r1, 0; @%p0 bra LESS;
    setmaxnreg.inc.sync.aligned.u32 232; mov.u32 %r0, 2; bra END; LESS: setmaxnreg.dec.sync.aligned.u32 24;
        mov.u32 %r0, 1; END:"""
    source = f"""{HEADER.format(target="sm_100a")} .visible .entry k(.param .u64 p0) .reqntid 384, 1, 1 .maxnreg 168 {{
    .reg .b32 %r<64>; .reg .b64 %rd<64>; .reg .pred %p<8>; ld.param.u64 %rd0, [p0]; mov.u32 %r60, %tid.x; {ADDRESS}
        {body} {STORE} ret; }}"""
    for seed in range(5):
        out = np.zeros(384, np.uint32)
        check_launch(Kernel(source), out, threads=384, seed=seed)
        np.testing.assert_array_equal(out, np.where(np.arange(384) < 128, 1, 2))
    # 384 threads begin with 168 registers each, all that 64 K allow in multiples of 8: 504 for one of each warpgroup.
    enough = source.replace("232", "240").replace("END:", "END: bar.sync 0;")
    assert not launch(Kernel(enough), np.zeros(384, np.uint32), threads=384).reports
    too_much = Kernel(enough.replace("dec.sync.aligned.u32 24", "dec.sync.aligned.u32 32"))
    (report,) = launch(too_much, np.zeros(384, np.uint32), threads=384).reports
    assert report.kind == "deadlock"
    assert "240 registers" in str(report)


def test_launch_orders_ctas_by_atomics() -> None:
    """CTAs that spin on each other's progress make it, as long as all are resident."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(unsigned* out, unsigned* turn) {
      unsigned value;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value)
          : "l"(turn)); while (value != gridDim.x - 1 - blockIdx.x);
      out[value] = blockIdx.x;
      asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(turn), "r"(value + 1) : "memory");
    }""")
    out, turn = np.zeros(6, np.uint32), np.zeros(1, np.uint32)
    check_launch(kernel, out, turn, threads=1, ctas=6)
    np.testing.assert_array_equal(out, np.arange(6)[::-1])


@pytest.mark.parametrize(
    "text",
    ["nanosleep.u32 20;", "griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "prefetch.global.L2 [%rd0];"],
)
def test_hints_do_nothing(text: str) -> None:
    np.testing.assert_array_equal(run(f"{text} mov.u32 %r0, 3;"), 3)


@pytest.mark.parametrize(("x", "y", "z"), list(itertools.product([1, 33], [1, 2], [1, 3])))
def test_partial_warps(x: int, y: int, z: int) -> None:
    """Threads that fill no whole warp take part in barriers all the same."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(unsigned* out) {
      __shared__ unsigned n[1];
      unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      if (t == 0) n[0] = 42;
      __syncthreads();
      out[t] = n[0] + t;
    }""")
    out = np.zeros(x * y * z, np.uint32)
    kernel.launch([out], grid=(1, 1, 1), block=(x, y, z)).check()
    np.testing.assert_array_equal(out, 42 + np.arange(x * y * z))
