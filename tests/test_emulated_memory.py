"""Memory: loads, stores, atomics, mbarriers and the copy engine, against numpy's indexing (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import check_launch, cuda_kernel, launch, ptx_kernel, random

from jax_fa4.emulated import Pointer, TensorMap

BF16 = ml_dtypes.bfloat16

# ---- ld and st


@pytest.mark.parametrize(
    "kind", ["u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32", "f32", "u64", "s64", "b64", "f64"]
)
@pytest.mark.parametrize("space", ["global", "shared", "local", "generic"])
def test_load_and_store(kind: str, space: str) -> None:
    """A load extends by its type to the register; a store takes the register's lower bits."""
    size = int(kind[1:]) // 8
    at = {"global": "%rd30", "shared": "%rd31", "local": "%rd32", "generic": "%rd33"}[space]
    dot = "" if space == "generic" else "." + space
    kernel = ptx_kernel(
        f"""mad.wide.u32 %rd30, %r60, {size}, %rd1; ld.global.b{8 * size} %rd40, [%rd30];
        mov.u64 %rd31, mine; mad.wide.u32 %rd31, %r60, 8, %rd31; mov.u64 %rd32, own; add.u64 %rd32, %rd32, 8;
        cvta.shared.u64 %rd33, %rd31;
        st{dot}.{kind} [{at}], {"%rd40" if size != 4 or kind != "f32" else "%f1"}; ld{dot}.{kind}
            {"%rd41" if kind != "f32" else "%f0"}, [{at}];
        {"mov.b32 %r0, %f0; cvt.u64.u32 %rd41, %r0;" if kind == "f32" else ""}
        mad.wide.u32 %rd0, %r60, 8, %rd0; st.global.b64 [%rd0], %rd41;""".replace(
            "st" + dot, ("cvt.u32.u64 %r1, %rd40; mov.b32 %f1, %r1; " if kind == "f32" else "") + "st" + dot, 1
        ),
        2,
        before=".shared .align 8 .b8 mine[256]; .local .align 8 .b8 own[16];",
    )
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{size}")
    values = random(size).integers(0, 256, 32 * size).astype(np.uint8).view(dtype)
    out = np.zeros(32, np.uint64)
    check_launch(kernel, out, values.copy())
    np.testing.assert_array_equal(
        out, values.astype(np.int64).view(np.uint64) if kind[0] == "s" else values.astype(np.uint64)
    )


@pytest.mark.parametrize(
    ("count", "kind", "register"),
    [
        (2, "u8", "h"),
        (4, "u8", "h"),
        (2, "u16", "h"),
        (4, "b16", "h"),
        (2, "b32", "r"),
        (4, "b32", "r"),
        (2, "f32", "f"),
        (4, "f32", "f"),
        (8, "b32", "r"),
        (2, "b64", "rd"),
        (4, "b64", "rd"),
        (2, "s16", "r"),
    ],
)
def test_vectors(count: int, kind: str, register: str) -> None:
    size = int(kind[1:]) // 8
    first = 20 if register == "rd" else 4
    list_ = ", ".join(f"%{register}{first + i}" for i in range(count))
    other = ", ".join(f"%{register}{first + count - 1 - i}" for i in range(count))
    step = size * count
    kernel = ptx_kernel(
        f"""mad.wide.u32 %rd0, %r60, {step}, %rd0; mad.wide.u32 %rd1, %r60, {step}, %rd1;
    ld.global.nc.L1::no_allocate.v{count}.{kind} {{{list_}}}, [%rd1]; st.global.v{count}.{kind} [%rd0], {{{other}}};""",
        2,
    )
    x = random(count).integers(0, 256, (32, count, size)).astype(np.uint8)
    out = np.zeros_like(x)
    check_launch(kernel, out, x)
    np.testing.assert_array_equal(out, x[:, ::-1])


def test_loads_that_ignore_elements_and_offsets() -> None:
    kernel = ptx_kernel(
        """mad.wide.u32 %rd1, %r60, 16, %rd1; ld.global.v4.b32 {_, %r1, _, %r2}, [%rd1+16];
    ld.volatile.global.u32 %r3, [%rd1+-16];
    add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; mad.wide.u32 %rd0, %r60, 4, %rd0;
    st.relaxed.gpu.global.u32 [%rd0+4], %r1;""",
        2,
    )
    x = np.arange(4 * 40, dtype=np.uint32)
    out = np.zeros(34, np.uint32)
    check_launch(kernel, out, Pointer(x, 16))
    lane = np.arange(32)
    np.testing.assert_array_equal(out[1:33], x[4 * lane + 9] + x[4 * lane + 11] + x[4 * lane])


def test_parameters_constants_and_globals() -> None:
    kernel = cuda_kernel("""
    struct S { char a; short b; u32 c[3]; double d; };
    __constant__ u32 table[4] = {5, 6, 7, 8};
    __device__ u32 kept[2] = {100, 200};
    extern "C" __global__ void k(double* out, S s, signed char x, float y) {
      if (threadIdx.x == 0) atomicAdd(&kept[1], 1u);
      __syncthreads();
      const u32* c = s.c;
      out[threadIdx.x] = s.a + s.b + c[threadIdx.x % 3] + s.d + x + y + table[threadIdx.x % 4] + kept[threadIdx.x % 2];
    }""")
    out = np.zeros(32)
    c = [1000, 2000, 3000]
    s = {0: (-3, 1), 2: (-300, 2), **{4 + 4 * i: (c[i], 4) for i in range(3)}, 16: (0.25, 8)}
    check_launch(kernel, out, s, -7, 0.5)
    t = np.arange(32)
    np.testing.assert_array_equal(
        out,
        -3 - 300 + np.array(c)[t % 3] + 0.25 - 7 + 0.5 + np.array([5, 6, 7, 8])[t % 4] + np.array([100, 201])[t % 2],
    )


# ---- Atomics


def wrapping_inc(old: int, x: int) -> int:
    return 0 if old >= x else old + 1


def wrapping_dec(old: int, x: int) -> int:
    return x if old == 0 or old > x else old - 1


ATOMICS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    **{f"add.{t}": (d, operator.add) for t, d in {"u32": np.uint32, "s32": np.int32, "u64": np.uint64}.items()},
    **{
        f"{n}.{t}": (d, f)
        for n, f in {"min": min, "max": max}.items()
        for t, d in {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}.items()
    },
    **{
        f"{n}.{t}": (d, f)
        for n, f in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items()
        for t, d in {"b32": np.uint32, "b64": np.uint64}.items()
    },
    "inc.u32": (np.uint32, wrapping_inc),
    "dec.u32": (np.uint32, wrapping_dec),
    "exch.b32": (np.uint32, lambda old, x: x),
    "exch.b64": (np.uint64, lambda old, x: x),
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("space", ["global", "shared", ""])
def test_atomics(name: str, space: str) -> None:
    """Each lane's atomic on one of 4 places: the old values and the last are those of some order."""
    dtype, function = ATOMICS[name]
    size = np.dtype(dtype).itemsize
    bits, register = 8 * size, "rd4" if size == 8 else "r"
    base = "%rd0" if space != "shared" else "%rd50"
    dot = f".{space}" if space else ""
    first = f"ld.global.b{bits} %{register}5, [%rd11]; @%p0 st.shared.b{bits} [%rd12], %{register}5; bar.sync 0;"
    last = f"bar.sync 0; ld.shared.b{bits} %{register}5, [%rd12]; @%p0 st.global.b{bits} [%rd11], %{register}5;"
    kernel = ptx_kernel(
        f"""and.b32 %r1, %r60, 3; mul.wide.u32 %rd10, %r1, {size}; add.u64 %rd11, %rd10, %rd0; mov.u64 %rd50, mine;
        add.u64 %rd12, %rd10, {base};
        setp.lt.u32 %p0, %r60, 4; {first if space == "shared" else ""}
        mad.wide.u32 %rd13, %r60, {size}, %rd1; ld.global.b{bits} %{register}3, [%rd13];
        atom{dot}.relaxed.gpu.{name} %{register}2, [%rd12], %{register}3;
        mad.wide.u32 %rd14, %r60, {size}, %rd2; st.global.b{bits} [%rd14], %{register}2;
        {last if space == "shared" else ""}""".replace(f"atom{dot}.relaxed.gpu", f"atom.relaxed.gpu{dot}"),
        3,
        before=".shared .align 8 .b8 mine[64];",
    )
    rng = random(size)
    start = rng.integers(0, 50, 4).astype(dtype)
    x = rng.integers(0, 60, 32).astype(dtype) * (
        1 if np.dtype(dtype).kind == "u" else rng.choice([-1, 1], 32).astype(dtype)
    )
    memory, old = start.copy(), np.zeros(32, dtype)
    check_launch(kernel, memory, x, old)
    for place in range(4):
        lanes = list(range(place, 32, 4))
        value = int(start[place])
        while lanes:  # replays the order that the old values tell
            lane = next(i for i in lanes if int(old[i]) == value)
            value = int(
                dtype(
                    function(value, int(x[lane])) % (1 << bits)
                    if np.dtype(dtype).kind == "u"
                    else function(value, int(x[lane]))
                )
            )
            lanes.remove(lane)
        assert int(memory[place]) == value


@pytest.mark.parametrize(
    "name", [n for n in ATOMICS if n.split(".")[0] in ("add", "min", "max", "and", "or", "xor", "inc", "dec")]
)
def test_reductions(name: str) -> None:
    """red: an atomic whose old value nobody asks for; the order of these does not matter to the result."""
    dtype, function = ATOMICS[name]
    if name.startswith(("inc", "dec")):
        operand, start = np.full(32, 6, dtype), np.array([3], dtype)
    else:
        operand, start = random(3).integers(0, 100, 32).astype(dtype), np.array([50], dtype)
    size = operand.itemsize
    register = "rd4" if size == 8 else "r"
    kernel = ptx_kernel(
        f"""mad.wide.u32 %rd1, %r60, {size}, %rd1; ld.global.b{8 * size} %{register}1, [%rd1];
    red.relaxed.gpu.global.{name} [%rd0], %{register}1;""",
        2,
    )
    expected = int(start[0])
    for x in operand.tolist():
        expected = function(expected, x)
    check_launch(kernel, start, operand)
    assert int(start[0]) == expected


def test_generic_addresses_of_another_cta() -> None:
    """mapa.u64 of a generic address: loads, stores and atomics reach the other CTA's shared memory."""
    kernel = cuda_kernel("""
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
      __shared__ u32 x[32], sum;
      u32 rank = Special_rank(), t = threadIdx.x, owner;
      u64 at, total;
      if (t == 0) sum = 0;
      asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(&x[31 - t]), "r"(rank ^ 1));
      asm("mapa.u64 %0, %1, %2;" : "=l"(total) : "l"(&sum), "r"(rank ^ 1));
      asm("getctarank.u64 %0, %1;" : "=r"(owner) : "l"(at));
      ClusterSync();
      asm volatile("st.u32 [%0], %1;" :: "l"(at), "r"(100 * rank + t + 1000 * owner) : "memory");
      asm volatile("red.relaxed.cluster.add.u32 [%0], %1;" :: "l"(total), "r"(t) : "memory");
      ClusterSync();
      out[33 * rank + t] = x[t];
      if (t == 0) out[33 * rank + 32] = sum;
    }""")
    out = np.zeros((2, 33), np.uint32)
    check_launch(kernel, out, ctas=2, cluster=2)
    for rank in range(2):
        np.testing.assert_array_equal(out[rank, :32], 100 * (rank ^ 1) + np.arange(32)[::-1] + 1000 * rank)
        assert out[rank, 32] == 31 * 16


def test_compare_and_swap() -> None:
    kernel = ptx_kernel(
        """atom.global.cas.b32 %r1, [%rd0], 7, %r60; mad.wide.u32 %rd1, %r60, 4, %rd1; st.global.u32 [%rd1], %r1;
    cvt.u64.u32 %rd5, %r60; atom.acq_rel.gpu.global.cas.b64 %rd6, [%rd0+8], 9, %rd5;""",
        2,
    )
    memory, old = np.array([7, 0, 9, 0], np.uint32), np.zeros(32, np.uint32)
    check_launch(kernel, memory, old)
    winner = int(memory[0])
    assert old[winner] == 7
    assert (np.delete(old, winner) == np.where(np.delete(np.arange(32), winner) == 7, old[7], winner)).all()
    assert memory[2] < 32
    assert memory[3] == 0


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_float_reductions(kind: str) -> None:
    dtype = {"f32": np.float32, "f64": np.float64}[kind]
    size = np.dtype(dtype).itemsize
    register = "rd4" if size == 8 else "r"
    kernel = ptx_kernel(
        f"""mad.wide.u32 %rd1, %r60, {size}, %rd1; ld.global.b{8 * size} %{register}1, [%rd1];
    red.relaxed.gpu.global.add.{kind} [%rd0], %{register}1; atom.global.add.{kind} %{register}2, [%rd0+8],
        %{register}1;""",
        2,
    )
    x = random(1).integers(-100, 100, 96).astype(dtype)
    out = np.array([1, 0, 2, 0] if size == 4 else [1, 2], dtype)
    check_launch(kernel, out, x, threads=96)
    assert out[0] == 1 + x.sum()
    assert out[2 if size == 4 else 1] == 2 + x.sum()


@pytest.mark.parametrize("count", [2, 4])
def test_vector_reductions(count: int) -> None:
    list_ = ", ".join(f"%f{i}" for i in range(count))
    kernel = ptx_kernel(
        f"""mad.wide.u32 %rd1, %r60, {4 * count}, %rd1; ld.global.v{count}.f32 {{{list_}}}, [%rd1];
    red.global.add.v{count}.f32 [%rd0], {{{list_}}};""",
        2,
    )
    x = random(1).integers(-100, 100, (64, count)).astype(np.float32)
    out = np.arange(count).astype(np.float32)
    check_launch(kernel, out, x, threads=64)
    np.testing.assert_array_equal(out, np.arange(count) + x.sum(0))


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("instruction", ["atom", "red"])
def test_packed_atomics(kind: str, instruction: str) -> None:
    """Two sums of 16 bits side by side."""
    dtype = np.float16 if kind == "f16x2" else BF16
    result = "%r2, " if instruction == "atom" else ""
    kernel = ptx_kernel(
        f"""mad.wide.u32 %rd1, %r60, 4, %rd1; ld.global.b32 %r1, [%rd1];
    {instruction}.relaxed.gpu.global.add.noftz.{kind} {result}[%rd0], %r1;""",
        2,
    )
    x = random(1).integers(-2, 3, (32, 2)).astype(dtype)  # sums that both types hold exactly
    out = np.array([1, 2], dtype)
    check_launch(kernel, out, x)
    np.testing.assert_array_equal(out.astype(np.float32), np.array([1, 2]) + x.astype(np.float32).sum(0))


# ---- mbarriers


def test_phases_and_counts() -> None:
    """Pending counts, phases and parities of one barrier, step by step."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* out) {
      __shared__ u64 b;
      if (threadIdx.x) return;
      u32 n = 0;
      #define LOG(x) out[n++] = (x)
      #define STATE() LOG(TestWait(&b, 0) | TestWait(&b, 1) << 1)
      Init(&b, 3); InitFence();
      STATE();                                    // phase 0: 1 has passed
      Arrive(&b); Arrive(&b); STATE();
      Arrive(&b); STATE();                        // phase 1: 0 has passed
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 3;" :: "r"(Shared(&b)) : "memory"); STATE();  // phase 2
      u64 state; u32 done;
      asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(state) : "r"(Shared(&b)) : "memory");
      #define WITH_STATE(what) asm volatile("{ .reg .pred p; mbarrier." what ".shared::cta.b64 p, [%1], %2;\\n" \\
                                            "selp.u32 %0, 1, 0, p; }" \\
                                      : "=r"(done) : "r"(Shared(&b)), "l"(state) : "memory"); LOG(done)
      WITH_STATE("test_wait"); WITH_STATE("try_wait");
      Arrive(&b);
      WITH_STATE("test_wait"); WITH_STATE("try_wait"); STATE();  // phase 3
      // Bytes: neither arrivals alone nor bytes alone complete a phase.
      Expect(&b, 64); Arrive(&b); Arrive(&b); STATE();
      asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 48;" :: "r"(Shared(&b)) : "memory"); STATE();
      asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" :: "r"(Shared(&b))
          : "memory"); STATE();  // phase 4
      asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 32;" :: "r"(Shared(&b)) : "memory");
      asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 32;" :: "r"(Shared(&b)) : "memory"); STATE();
      asm volatile("mbarrier.arrive_drop.shared::cta.b64 _, [%0];" :: "r"(Shared(&b)) : "memory"); Arrive(&b); STATE();
      Arrive(&b); STATE();                        // phase 5, which expects 2
      Arrive(&b); Arrive(&b); STATE();            // phase 6
      asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(Shared(&b)) : "memory");
      Init(&b, 1); InitFence(); STATE();
    }""")
    out = np.full(24, 99, np.uint32)
    check_launch(kernel, out)
    even, odd = 2, 1  # parity 1 passes in even phases, 0 in odd ones
    np.testing.assert_array_equal(
        out[:18], [even, even, odd, even, 0, 0, 1, 1, odd, odd, odd, even, even, even, odd, even, even, 99]
    )


def test_ring_of_barriers() -> None:
    """A producer and consumers that hand over shared memory through full and empty barriers."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* out) {
      __shared__ u64 full[3], empty[3];
      __shared__ u32 x[3][32];
      u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      if (threadIdx.x == 0) { for (int i = 0; i < 3; ++i) { Init(&full[i], 32); Init(&empty[i], 2); } InitFence(); }
      __syncthreads();
      for (u32 i = 0; i < 20; ++i) {
        u32 s = i % 3, phase = i / 3 % 2;
        if (warp == 0) {
          Wait(&empty[s], phase ^ 1);
          x[s][lane] = i * 100 + lane;
          Arrive(&full[s]);
        } else {
          Wait(&full[s], phase);
          u32 value = x[s][31 - lane];
          out[(i * 2 + warp - 1) * 32 + lane] = value;
          __syncwarp();
          if (lane == 0) Arrive(&empty[s]);
        }
      }
    }""")
    for seed in range(20):
        out = np.zeros((20, 2, 32), np.uint32)
        check_launch(kernel, out, threads=96, seed=seed)
        np.testing.assert_array_equal(
            out, np.broadcast_to(np.arange(20)[:, None, None] * 100 + np.arange(32)[::-1], out.shape)
        )


def test_remote_arrival() -> None:
    """Every CTA of a cluster writes into CTA 0 and arrives there; st.async signals by bytes."""
    kernel = cuda_kernel("""
    extern "C" __global__ void __cluster_dims__(4, 1, 1) k(u32* out) {
      __shared__ u64 b, bytes;
      __shared__ alignas(16) u32 x[4], y[16];
      u32 rank = Special_rank();
      if (threadIdx.x == 0) { Init(&b, 4); Init(&bytes, 1); InitFence(); if (rank == 0) Expect(&bytes, 64); }
      ClusterSync();
      if (threadIdx.x == 0) {
        u32 at = Map(Shared(&x[rank]), 0), remote = Map(Shared(&b), 0);
        asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(at), "r"(rank + 10) : "memory");
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %1, %1, %2}, [%3];"
                     :: "r"(Map(Shared(&y[4 * rank]), 0)), "r"(rank), "r"(7), "r"(Map(Shared(&bytes), 0)) : "memory");
        if (rank == 0) {
          u32 done = 0;
          while (!done) asm volatile("{ .reg .pred p;\\n"
                                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\\n"
                                     "selp.u32 %0, 1, 0, p; }"
                                     : "=r"(done) : "r"(Shared(&b)) : "memory");
          for (int i = 0; i < 4; ++i) out[i] = x[i];
          Wait(&bytes, 0);
          for (int i = 0; i < 16; ++i) out[4 + i] = y[i];
        }
      }
      ClusterSync();
    }""")
    for seed in range(10):
        out = np.zeros(20, np.uint32)
        check_launch(kernel, out, ctas=4, cluster=4, seed=seed)
        np.testing.assert_array_equal(out, [10, 11, 12, 13, *(x for r in range(4) for x in (r, r, r, 7))])


# ---- cp.async


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("how", ["wait_all", "wait_group", "mbarrier", "mbarrier.noinc"])
def test_copy_async(size: int, how: str) -> None:
    """Copies of some bytes, and zeros behind them."""
    cache = "cg" if size == 16 else "ca"
    noinc = ".noinc" if how.endswith("noinc") else ""
    end = {
        "wait_all": 'asm volatile("cp.async.wait_all;" ::: "memory"); __syncthreads();',
        "wait_group": 'asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory"); __syncthreads();',
    }.get(
        how,
        f'asm volatile("cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%0];" :: "r"(Shared(&b)) : "memory"); '
        f"{'' if noinc else 'Arrive(&b);'} Wait(&b, 0);",
    )
    kernel = cuda_kernel(f"""
    extern "C" __global__ void k(unsigned char* out, const unsigned char* in) {{
      __shared__ alignas(16) unsigned char x[64 * {size}];
      __shared__ u64 b;
      u32 t = threadIdx.x;
      if (t == 0) {{ Init(&b, 64); InitFence(); }}
      __syncthreads();
      u32 take = t % 3 == 0 ? {size} : t % {size + 1};
      asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;"
          :: "r"(Shared(x + t * {size})), "l"(in + t * {size}), "r"(take) : "memory");
      {end}
      for (int i = 0; i < {size}; ++i) out[(63 - t) * {size} + i] = x[(63 - t) * {size} + i];
    }}""")
    x = random(size).integers(1, 256, (64, size)).astype(np.uint8)
    t = np.arange(64)
    expected = np.where(np.arange(size) < np.where(t % 3 == 0, size, t % (size + 1))[:, None], x, 0)
    for seed in range(5):
        out = np.zeros((64, size), np.uint8)
        check_launch(kernel, out, x, threads=64, seed=seed)
        np.testing.assert_array_equal(out, expected)


def test_copy_async_groups() -> None:
    """wait_group N leaves the newest N groups."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* out, const u32* in) {
      __shared__ u32 x[3][32];
      u32 t = threadIdx.x;
      for (int i = 0; i < 3; ++i) {
        asm volatile("cp.async.ca.shared::cta.global.L2::128B [%0], [%1], 4;"
            :: "r"(Shared(&x[i][t])), "l"(in + 32 * i + t) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
      }
      asm volatile("cp.async.wait_group 2;" ::: "memory"); out[t] = x[0][t];
      asm volatile("cp.async.wait_group 0;" ::: "memory"); out[32 + t] = x[1][t]; out[64 + t] = x[2][t];
    }""")
    x = np.arange(96, dtype=np.uint32)
    out = np.zeros(96, np.uint32)
    check_launch(kernel, out, x)
    np.testing.assert_array_equal(out, x)


# ---- Bulk copies


def test_bulk_copies() -> None:
    kernel = cuda_kernel("""
    extern "C" __global__ void k(char* out, const char* in, u32 bytes) {
      extern __shared__ __attribute__((aligned(128))) char x[];
      __shared__ u64 b;
      if (threadIdx.x) return;
      Init(&b, 1); InitFence();
      Expect(&b, bytes); Load(x, in, bytes - 16, &b); Load(x + bytes - 16, in + bytes - 16, 16, &b); Wait(&b, 0);
      Store(out, x, bytes); Commit(); WaitRead();
      x[0] = 1;  // its source may be written again
      WaitAll();
    }""")
    for seed, size in enumerate([32, 48, 4096, 65520]):
        x = random(size).integers(0, 256, size).astype(np.uint8)
        out = np.zeros_like(x)
        check_launch(kernel, out, x, size, dynamic_shared_bytes=size, seed=seed)
        np.testing.assert_array_equal(out, x)


def test_bulk_groups() -> None:
    """wait_group N waits for all but the newest N groups."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* out) {
      __shared__ alignas(128) u32 x[4][4];
      if (threadIdx.x) return;
      for (int i = 0; i < 12; ++i) {
        if (i >= 4) asm volatile("cp.async.bulk.wait_group.read 3;" ::: "memory");
        for (int j = 0; j < 4; ++j) x[i % 4][j] = 10 * i + j;
        ProxyFence();
        Store(out + 4 * i, x[i % 4], 16); Commit();
      }
      WaitRead();
    }""")
    for seed in range(20):
        out = np.zeros((12, 4), np.uint32)
        check_launch(kernel, out, seed=seed)
        np.testing.assert_array_equal(out, 10 * np.arange(12)[:, None] + np.arange(4))


@pytest.mark.parametrize("read_first", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_bulk_groups_are_waited_for_in_two_steps(read_first: bool, waits: bool) -> None:
    """Who has waited until sources are read can wait for the writes after that, as it has to."""
    kernel = cuda_kernel(
        """
    extern "C" __global__ void k(u32* out, u32* seen) {
      __shared__ alignas(128) u32 x[4];
      if (threadIdx.x == 0) {
        for (int j = 0; j < 4; ++j) x[j] = 10 + j;
        ProxyFence();
        Store(out, x, 16); Commit();
        READ_FIRST
        WAITS
      }
      __syncthreads();
      if (threadIdx.x >= 32 && threadIdx.x < 36) seen[threadIdx.x - 32] = out[threadIdx.x - 32];
    }""".replace("READ_FIRST", "WaitRead();" if read_first else "").replace("WAITS", "WaitAll();" if waits else "")
    )
    reports = []
    for seed in range(10):
        out, seen = np.zeros((2, 4), np.uint32)
        reports += launch(kernel, out, seen, threads=64, seed=seed).reports
        assert not waits or (seen == 10 + np.arange(4)).all()
    assert bool(reports) == (not waits)


BULK_REDUCTIONS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "add.f32": (np.float32, np.add),
    "add.f64": (np.float64, np.add),
    "add.u32": (np.uint32, np.add),
    "add.s32": (np.int32, np.add),
    "add.u64": (np.uint64, np.add),
    "min.s32": (np.int32, np.minimum),
    "max.u32": (np.uint32, np.maximum),
    "min.u64": (np.uint64, np.minimum),
    "max.s64": (np.int64, np.maximum),
    "and.b32": (np.uint32, np.bitwise_and),
    "or.b32": (np.uint32, np.bitwise_or),
    "xor.b64": (np.uint64, np.bitwise_xor),
    "add.noftz.f16": (np.float16, np.add),
    "add.noftz.bf16": (BF16, np.add),
    "min.f16": (np.float16, np.minimum),
    "max.bf16": (BF16, np.maximum),
}


@pytest.mark.parametrize("name", BULK_REDUCTIONS)
def test_bulk_reductions(name: str) -> None:
    dtype, function = BULK_REDUCTIONS[name]
    kernel = cuda_kernel(f"""
    extern "C" __global__ void k(char* out, const char* in, u32 bytes) {{
      __shared__ alignas(128) char x[1024];
      __shared__ u64 b;
      if (threadIdx.x) return;
      Init(&b, 1); InitFence(); Expect(&b, bytes); Load(x, in, bytes, &b); Wait(&b, 0);
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.{name} [%0], [%1], %2;"
          :: "l"(out), "r"(Shared(x)), "r"(bytes) : "memory");
      Commit(); WaitAll();
    }}""")
    x, out = (random(s).integers(0 if np.dtype(dtype).kind == "u" else -100, 100, 64).astype(dtype) for s in (1, 2))
    expected = function(out, x)
    check_launch(kernel, out, x, x.nbytes)
    np.testing.assert_array_equal(out, expected)


def test_bulk_copies_within_a_cluster() -> None:
    """shared::cta to shared::cluster, which signals the barrier beside its destination."""
    kernel = cuda_kernel("""
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
      __shared__ alignas(128) u32 x[32], y[32];
      __shared__ u64 b;
      u32 rank = Special_rank(), t = threadIdx.x;
      x[t] = t + 100 * rank;
      ProxyFence();
      if (t == 0) { Init(&b, 1); InitFence(); Expect(&b, 128); }
      ClusterSync();
      if (t == 0) asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                               "[%0], [%1], 128, [%2];"
                               :: "r"(Map(Shared(y), rank ^ 1)), "r"(Shared(x)), "r"(Map(Shared(&b), rank ^ 1))
                               : "memory");
      Wait(&b, 0);
      out[32 * rank + t] = y[t];
      ClusterSync();
    }""")
    for seed in range(10):
        out = np.zeros((2, 32), np.uint32)
        check_launch(kernel, out, ctas=2, cluster=2, seed=seed)
        np.testing.assert_array_equal(out, np.arange(32) + np.array([[100], [0]]))


def test_multicast() -> None:
    """One CTA loads into those of a mask, at the same offset, and signals the barrier of each."""
    kernel = cuda_kernel(
        """
    extern "C" __global__ void __cluster_dims__(4, 1, 1) k(u32* out, const u32* in,
        const __grid_constant__ Map128 map) {
      __shared__ alignas(128) u32 x[32], y[32];
      __shared__ u64 b;
      u32 rank = Special_rank(), t = threadIdx.x;
      x[t] = y[t] = 5000 + t;
      ProxyFence();
      if (t == 0) { Init(&b, 1); InitFence(); }
      ClusterSync();
      if (t == 0 && rank != 1) Expect(&b, rank == 0 ? 128 : 256);
      ClusterSync();
      if (t == 0 && rank == 2) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1], 128, [%2], %3;"
                     :: "r"(Shared(x)), "l"(in), "r"(Shared(&b)), "h"((short)0b1101) : "memory");
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2}], [%3], %4;"
                     :: "r"(Shared(y)), "l"(&map), "r"(32), "r"(Shared(&b)), "h"((short)0b1100) : "memory");
      }
      if (rank != 1) Wait(&b, 0);
      out[64 * rank + t] = x[t]; out[64 * rank + 32 + t] = y[t];
      ClusterSync();
    }""".replace("Map128", "Box").replace("extern", "struct alignas(64) Box { char bytes[128]; };\n    extern", 1)
    )
    x = np.arange(64, dtype=np.uint32)
    for seed in range(10):
        out = np.zeros((4, 2, 32), np.uint32)
        check_launch(kernel, out, x, TensorMap(x, (32,)), ctas=4, cluster=4, seed=seed)
        old = 5000 + np.arange(32)
        np.testing.assert_array_equal(out, [[x[:32], old], [old, old], [x[:32], x[32:]], [x[:32], x[32:]]])


# ---- Tensor copies


def swizzled(byte: np.ndarray, width: int) -> np.ndarray:
    """Where TMA puts a byte of a tile: 16-byte chunks, exchanged by the number of the 128-byte line (PTX ISA 5.5.6).

    128: the pattern repeats after 8 lines and exchanges 8 chunks; 64: after 4, and 4; 32: after 2, and 2.
    """
    line, chunk = byte // 128, byte % 128 // 16
    exchanged = chunk ^ line % max(width // 16, 1)
    return line * 128 + exchanged * 16 + byte % 16


def tile_of(tensor: np.ndarray, box: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """The box at coordinates (innermost first), with zeros out of bounds."""
    tile = np.zeros(box[::-1], tensor.dtype)
    for index in itertools.product(*(range(n) for n in box[::-1])):
        place = tuple(i + c for i, c in zip(index, at[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, tensor.shape, strict=True)):
            tile[index] = tensor[place]
    return tile


SHAPES = [
    ((70,), (32,), [(0,), (48,), (-8,), (200,)]),
    ((5, 40), (16, 3), [(0, 0), (32, 3), (-8, -1), (8, 9)]),
    ((3, 4, 24), (8, 2, 2), [(0, 0, 0), (16, 3, 2), (20, -1, 1)]),
    ((2, 3, 4, 16), (16, 2, 2, 2), [(0, 0, 0, 0), (8, 3, 1, 1), (-4, 1, 2, -1)]),
    ((2, 2, 3, 3, 16), (8, 2, 2, 1, 2), [(0, 0, 0, 0, 0), (12, 2, 2, 1, 1), (0, -1, 0, 0, 1)]),
]


def tensor_kernel(rank: int, bytes_: int, reduce: str = "") -> Any:
    """Loads a tile from coordinates at[:rank], writes its bytes out, and stores it through another map at at[rank:]."""
    coordinates = ", ".join(f"%{i + 2}" for i in range(rank))
    source, target = (", ".join(f'"r"(at[{start + i}])' for i in range(rank)) for start in (0, rank))
    store = (
        f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{reduce}.tile.bulk_group"
        if reduce
        else (f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group")
    )
    return cuda_kernel(f"""
    struct alignas(64) Box {{ char bytes[128]; }};
    extern "C" __global__ void k(unsigned char* raw, const int* at, const __grid_constant__ Box map,
        const __grid_constant__ Box back) {{
      __shared__ alignas(1024) unsigned char x[{bytes_}];
      __shared__ u64 b;
      if (threadIdx.x) return;
      Init(&b, 1); InitFence(); Expect(&b, {bytes_});
      asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                   "[%0], [%1, {{{coordinates}}}], [%{rank + 2}];"
                   :: "r"(Shared(x)), "l"(&map), {source}, "r"(Shared(&b)) : "memory");
      Wait(&b, 0);
      for (int i = 0; i < {bytes_}; ++i) raw[i] = x[i];
      asm volatile("{store} [%1, {{{coordinates}}}], [%0];"
                   :: "r"(Shared(x)), "l"(&back), {target} : "memory");
      Commit(); WaitAll();
    }}""")


def stored(tile: np.ndarray, to: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of zeros with the tile at coordinates, clipped."""
    back = np.zeros(shape, tile.dtype)
    window = back[tuple(slice(c, c + n) for c, n in zip(to[::-1], tile.shape, strict=True))]
    window[...] = tile[tuple(map(slice, window.shape))]
    return back


@pytest.mark.parametrize(("shape", "box", "places"), SHAPES, ids=[f"{len(s[0])}d" for s in SHAPES])
@pytest.mark.parametrize("dtype", [np.uint8, BF16, np.float32, np.float64], ids=["u8", "bf16", "f32", "f64"])
def test_tensor_copies(shape: tuple[int, ...], box: tuple[int, ...], places: list[tuple[int, ...]], dtype: Any) -> None:
    size = np.dtype(dtype).itemsize
    inner = 16 // size if size >= 2 else 16
    box = (max(box[0], inner) if box[0] * size % 16 == 0 else inner, *box[1:])
    shape = (*shape[:-1], -(-shape[-1] * size // 16) * 16 // size if len(shape) > 1 else shape[-1])
    tensor = random(1).integers(1, 100, shape).astype(dtype)
    bytes_ = int(np.prod(box)) * size
    kernel = tensor_kernel(len(shape), bytes_)
    for first, *others in places:
        at = (first * size // 16 * inner, *others)  # a multiple of 16 bytes
        to = tuple(max(x, 0) for x in at)
        raw, back = np.zeros(bytes_, np.uint8), np.zeros(shape, dtype)
        check_launch(kernel, raw, np.array(at + to, np.int32), TensorMap(tensor, box), TensorMap(back, box))
        tile = tile_of(tensor, box, at)
        np.testing.assert_array_equal(raw, tile.reshape(-1).view(np.uint8))
        np.testing.assert_array_equal(back, stored(tile, to, shape))


@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("at", [(0, 0), (8, 5), (-8, -3), (56, 20)])
def test_swizzles(width: int, at: tuple[int, int]) -> None:
    tensor = random(2).integers(1, 1000, (24, 64)).astype(BF16)
    box = ((width or 64) // 2, 20)
    kernel = tensor_kernel(2, box[0] * box[1] * 2)
    raw, back = np.zeros(box[0] * box[1] * 2, np.uint8), np.zeros_like(tensor)
    maps = TensorMap(tensor, box, swizzle=width), TensorMap(back, box, swizzle=width)
    to = max(at[0], 0), max(at[1], 0)
    check_launch(kernel, raw, np.array(at + to, np.int32), *maps)
    tile = tile_of(tensor, box, at)
    expected = np.zeros_like(raw)
    expected[swizzled(np.arange(len(raw)), width)] = tile.reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(raw, expected)
    np.testing.assert_array_equal(back.astype(np.float32), stored(tile, to, tensor.shape).astype(np.float32))


NARROW = [(width, inner) for width in (32, 64, 128) for inner in range(16, width, 16)]


def narrow_image(tile: np.ndarray, width: int, rest: int) -> np.ndarray:
    """The bytes of shared memory where a tile of narrow rows is: each takes the swizzle's width, the rest stays."""
    rows = tile.reshape(-1, tile.shape[-1]).view(np.uint8)
    padded = np.full((len(rows), width), rest, np.uint8)
    padded[:, : rows.shape[1]] = rows
    image = np.empty(padded.size, np.uint8)
    image[swizzled(np.arange(padded.size), width)] = padded.reshape(-1)
    return image


def narrow_kernel(bytes_: int, span: int, padding: str = "", store: str = "") -> Any:
    """Loads a box of `bytes_` in `span` bytes of shared memory that hold 0xa5, writes them out, and stores the box.

    What thread 32 does while the copy engine loads, and while it stores: nothing orders it behind them.
    """
    return cuda_kernel(f"""
    struct alignas(64) Box {{ char bytes[128]; }};
    extern "C" __global__ void k(u32* raw, const int* at, const __grid_constant__ Box map,
        const __grid_constant__ Box back) {{
      __shared__ alignas(1024) unsigned char x[{span}];
      __shared__ u64 b;
      u32 t = threadIdx.x;
      for (u32 i = t; i < {span}; i += 64) x[i] = 0xa5;
      ProxyFence();
      if (t == 0) {{ Init(&b, 1); InitFence(); }}
      __syncthreads();
      if (t == 0) {{
        Expect(&b, {bytes_});
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {{%2, %3, %4}}], [%5];"
                     :: "r"(Shared(x)), "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(Shared(&b)) : "memory");
      }}
      if (t == 32) {{ {padding} }}
      Wait(&b, 0);
      for (u32 i = t; i < {span} / 4; i += 64) raw[i] = reinterpret_cast<u32*>(x)[i];
      __syncthreads();
      if (t == 0) {{
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%1, {{%2, %3, %4}}], [%0];"
                     :: "r"(Shared(x)), "l"(&back), "r"(at[3]), "r"(at[4]), "r"(at[5]) : "memory");
        Commit();
      }}
      if (t == 32) {{ {store} }}
      if (t == 0) WaitAll();
    }}""")


def launch_narrow(kernel: Any, width: int, inner: int, at: tuple[int, ...], seed: int = 0) -> tuple[Any, ...]:
    tensor = random(3).integers(1, 1000, (3, 9, 72)).astype(BF16)
    box = (inner // 2, 5, 2)
    raw, back = np.zeros(width * 10, np.uint8).view(np.uint32), np.zeros_like(tensor)
    to = tuple(max(x, 0) for x in at)
    maps = TensorMap(tensor, box, swizzle=width), TensorMap(back, box, swizzle=width)
    run = launch(kernel, raw, np.array(at + to, np.int32), *maps, threads=64, seed=seed)
    return run, tile_of(tensor, box, at), raw.view(np.uint8), back, stored(tile_of(tensor, box, at), to, back.shape)


# An H200 places such boxes so, and leaves the rest of a row alone.
@pytest.mark.parametrize("at", [(0, 0, 0), (8, 6, 2), (-8, -2, -1), (56, 0, 1)])
@pytest.mark.parametrize(("width", "inner"), NARROW)
def test_rows_narrower_than_the_swizzle(width: int, inner: int, at: tuple[int, ...]) -> None:
    run, tile, raw, back, expected = launch_narrow(narrow_kernel(inner * 10, width * 10), width, inner, at)
    run.check()
    np.testing.assert_array_equal(raw, narrow_image(tile, width, 0xA5))
    np.testing.assert_array_equal(back.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(("width", "inner"), NARROW)
def test_copies_of_narrow_rows_use_no_more(width: int, inner: int) -> None:
    """The chunks of row 5 are exchanged with each swizzle; its first is used, its last is not."""
    place = lambda chunk: int(swizzled(np.array(5 * width + 16 * chunk), width))  # noqa: E731
    used, rest = place(0), place(width // 16 - 1)
    read = 'u32 y; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"(Shared(x + {})));'
    write = "*reinterpret_cast<volatile u32*>(x + {}) = 1;"
    cases = [
        ({"padding": read.format(used)}, True),
        ({"padding": write.format(used)}, True),
        ({"padding": read.format(rest)}, False),
        ({"store": write.format(used)}, True),
        ({"store": write.format(rest)}, False),
    ]
    for arguments, races in cases:
        kernel = narrow_kernel(inner * 10, width * 10, **arguments)
        for seed in range(20):
            reports = launch_narrow(kernel, width, inner, (0, 0, 0), seed)[0].reports
            assert [r.kind for r in reports][:1] == ["race"] * races, [str(r) for r in reports]


# An H200 ends such kernels with an illegal instruction.
@pytest.mark.parametrize(
    ("at", "message"),
    [
        ((4, 0, 0, 0), "innermost coordinate of a tile is 4, which is no multiple of 16 bytes \\(8 elements\\)"),
        ((0, 0, 12, 0), "innermost coordinate of a tile is 12"),
        ((-3, 0, 0, 0), "innermost coordinate of a tile is -3"),
        ((0, 0, -8, 0), "a tile is stored at coordinate -8"),
        ((0, 0, 0, -1), "a tile is stored at coordinate -1"),
    ],
)
def test_coordinates_that_the_copy_engine_refuses(at: tuple[int, ...], message: str) -> None:
    tensor = np.zeros((24, 64), BF16)
    maps = TensorMap(tensor, (64, 4), swizzle=128), TensorMap(np.zeros_like(tensor), (64, 4), swizzle=128)
    run = launch(tensor_kernel(2, 512), np.zeros(512, np.uint8), np.array(at, np.int32), *maps)
    assert [report.kind for report in run.reports] == ["misuse"]
    assert re.search(message, str(run.reports[0]))


@pytest.mark.parametrize(
    ("dtype", "operation", "function"),
    [
        (np.float32, "add", np.add),
        (np.int32, "add", np.add),
        (np.int32, "min", np.minimum),
        (np.uint32, "max", np.maximum),
        (np.uint32, "and", np.bitwise_and),
        (np.uint32, "or", np.bitwise_or),
        (np.uint32, "xor", np.bitwise_xor),
        (np.float16, "add", np.add),
        (BF16, "add", np.add),
        (np.uint64, "add", np.add),
        (np.int64, "max", np.maximum),
        (np.float64, "add", np.add),
    ],
)
def test_tensor_reductions(dtype: Any, operation: str, function: Any) -> None:
    """The map's type says how to combine; elements out of bounds are left out."""
    tensor, back = (random(s).integers(0, 100, (6, 24)).astype(dtype) for s in (1, 2))
    box = (16, 4)
    kernel = tensor_kernel(2, 64 * tensor.itemsize, operation)
    expected = back.copy()
    expected[3:, 16:] = function(back[3:, 16:], tensor[3:, 16:])
    check_launch(
        kernel,
        np.zeros(64 * tensor.itemsize, np.uint8),
        np.array([16, 3, 16, 3], np.int32),
        TensorMap(tensor, box),
        TensorMap(back, box),
    )
    np.testing.assert_array_equal(back, expected)


def test_prefetches_do_nothing() -> None:
    kernel = cuda_kernel("""
    struct alignas(64) Box { char bytes[128]; };
    extern "C" __global__ void k(u32* out, const __grid_constant__ Box map) {
      asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], 64;" :: "l"(out) : "memory");
      asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" :: "l"(&map), "r"(0), "r"(1)
          : "memory");
      out[threadIdx.x] = 3;
    }""")
    out = np.zeros(32, np.uint32)
    check_launch(kernel, out, TensorMap(np.zeros((4, 16), np.float32), (16, 2)))
    np.testing.assert_array_equal(out, 3)


@pytest.mark.parametrize(
    "text",
    [
        "membar.cta;",
        "membar.gl;",
        "membar.sys;",
        "fence.sc.gpu;",
        "fence.acq_rel.cluster;",
        "fence.proxy.alias;",
        "fence.proxy.async;",
        "fence.proxy.async.global;",
        "fence.proxy.tensormap::generic.release.gpu;",
        "fence.proxy.async.shared::cluster;",
    ],
)
def test_fences_change_no_values(text: str) -> None:
    out = np.zeros(32, np.uint32)
    check_launch(ptx_kernel(f"{text} mad.wide.u32 %rd0, %r60, 4, %rd0; st.global.u32 [%rd0], %r60; {text}"), out)
    np.testing.assert_array_equal(out, np.arange(32))


@pytest.mark.parametrize(
    "text",
    [
        "ld.weak.global.u32 %r1, [%rd1];",
        "ld.volatile.global.u32 %r1, [%rd1];",
        "ld.relaxed.sys.global.u32 %r1, [%rd1];",
        "ld.acquire.gpu.global.L1::evict_last.u32 %r1, [%rd1];",
        "ld.mmio.relaxed.sys.global.u32 %r1, [%rd1];",
        "ld.global.nc.L1::no_allocate.L2::128B.u32 %r1, [%rd1];",
        "ld.global.ca.u32 %r1, [%rd1];",
        "ld.global.L2::256B.u32 %r1, [%rd1];",
        "ldu.global.u32 %r1, [%rd1];",
        "createpolicy.fractional.L2::evict_last.b64 %rd9, 0f3F800000; ld.global.L2::cache_hint.u32 %r1, [%rd1], %rd9;",
        "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %rd9; ld.global.u32 %r1, [%rd1];",
        "ld.global.u32 %r1, [%rd1]; st.volatile.shared.u32 [%rd50], %r1; ld.shared::cta.u32 %r1, [%rd50];",
        "ld.global.u32 %r1, [%rd1]; st.relaxed.cta.shared::cta.u32 [%rd50], %r1; ld.shared::cluster.u32 %r1, [%rd50];",
        "ld.global.u32 %r1, [%rd1]; st.release.gpu.global.u32 [%rd1], %r1; ld.acquire.sys.global.u32 %r1, [%rd1];",
        "ld.global.u32 %r1, [%rd1]; st.global.wb.L1::no_allocate.u32 [%rd1], %r1;",
    ],
)
def test_spellings_of_loads_and_stores(text: str) -> None:
    """Ordering, scopes and cache hints change no value."""
    kernel = ptx_kernel(
        f"""mad.wide.u32 %rd0, %r60, 4, %rd0; mad.wide.u32 %rd1, %r60, 4, %rd1;
        mov.u64 %rd50, mine; mad.wide.u32 %rd50, %r60, 4, %rd50; {text} st.global.u32 [%rd0], %r1;""",
        2,
        before=".shared .align 8 .b8 mine[128];",
    )
    x = random().integers(0, 1 << 32, 32, np.uint32)
    out = np.zeros_like(x)
    check_launch(kernel, out, x)
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize(
    "text",
    [
        "ld.global.u32.v2 {%r1, %r2}, [%rd1];",
        "ld.global.v2.u32 %r1, [%rd1];",
        "ld.global.v3.u32 {%r1, %r2, %r3}, [%rd1];",
        "ld.nowhere.u32 %r1, [%rd1];",
        "ld.global.u32 %h1, [%rd1];",
        "atom.global.add.u16 %h1, [%rd1], %h2;",
        "red.global.add.f16x2 [%rd1], %r2;",
        "red.global.and.f32 [%rd1], %f2;",
        "mbarrier.arrive.noComplete.shared.b64 %rd9, [%r1], 1;",
        "mbarrier.try_wait.parity.shared.b32 %p0, [%r1], 0;",
        "fence.proxy.nothing;",
        "cp.async.ca.shared.global [%r1], [%rd1], 5;",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%rd1], [%r2], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd1], [%r2], 16;",
        "cp.async.bulk.wait_group -1;",
        "mapa.shared::cluster.u16 %h1, %h2, 0;",
    ],
)
def test_what_is_unknown_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PTX line"):
        ptx_kernel(text, 2)


def test_generic_loads_of_every_space() -> None:
    """One load, whose address says where: shared, local, constant, parameter or global memory."""
    kernel = ptx_kernel(
        """mov.u32 %r1, 11; st.shared.u32 [mine], %r1; mov.u32 %r1, 22; st.local.u32 [own+4], %r1;
        cvta.shared.u64 %rd10, mine; mov.u64 %rd11, own; cvta.local.u64 %rd11, %rd11; add.u64 %rd11, %rd11, 4;
        mov.u64 %rd12, table; cvta.const.u64 %rd12, %rd12; mov.u64 %rd13, number; cvta.param.u64 %rd13, %rd13;
        ld.u32 %r2, [%rd10]; ld.u32 %r3, [%rd11]; ld.u32 %r4, [%rd12+4]; ld.u32 %r5, [%rd13]; ld.u32 %r6, [%rd1];
        st.global.v4.u32 [%rd0], {%r2, %r3, %r4, %r5}; st.global.u32 [%rd0+16], %r6;""",
        2,
        before=".shared .align 4 .b32 mine; .local .align 4 .b8 own[8];",
        module=".const .align 4 .b32 table[2] = {7, 33};",
        parameters=".param .u32 number",
    )
    out = np.zeros(5, np.uint32)
    check_launch(kernel, out, np.array([55], np.uint32), 44, threads=1)
    np.testing.assert_array_equal(out, [11, 22, 33, 44, 55])


def test_moves_of_128_bits() -> None:
    kernel = ptx_kernel(
        """mad.wide.u32 %rd0, %r60, 16, %rd0; mad.wide.u32 %rd1, %r60, 16, %rd1;
        ld.global.b128 %q0, [%rd1]; st.shared.b128 [mine], %q0; mov.b128 %q1, %q0; st.global.b128 [%rd0], %q1;""",
        2,
        before=".reg .b128 %q<2>; .shared .align 16 .b8 mine[16];",
    )
    x = random().integers(0, 1 << 32, 4, np.uint32)
    out = np.zeros_like(x)
    check_launch(kernel, out, x, threads=1)
    np.testing.assert_array_equal(out, x)


def test_a_store_of_a_whole_warp_is_one() -> None:
    """All lanes that issue the same tensor store have it in a group of their own."""
    kernel = cuda_kernel("""
    struct alignas(64) Box { char bytes[128]; };
    extern "C" __global__ void k(const __grid_constant__ Box map) {
      __shared__ alignas(128) u32 x[32];
      x[threadIdx.x] = threadIdx.x;
      ProxyFence();
      __syncwarp();
      asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%1}], [%2];"
                   :: "l"(&map), "r"(8), "r"(Shared(x)) : "memory");
      Commit(); WaitRead();
      __syncwarp();
      x[threadIdx.x ^ 1] = 77;
      WaitAll();
    }""")
    out = np.zeros(48, np.uint32)
    for seed in range(5):
        check_launch(kernel, TensorMap(out, (32,)), seed=seed)
        np.testing.assert_array_equal(out, np.pad(np.arange(32), (8, 8)))


def test_many_bulk_groups() -> None:
    """A kernel may commit groups for ever and wait once."""
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* out) {
      __shared__ alignas(16) u32 x[4];
      x[threadIdx.x] = threadIdx.x + 1;
      ProxyFence();
      __syncwarp();
      if (threadIdx.x) return;
      for (int i = 0; i < 2000; ++i) { Store(out + 4 * i, x, 16); Commit(); }
      WaitAll();
    }""")
    out = np.zeros((2000, 4), np.uint32)
    check_launch(kernel, out, threads=4)
    np.testing.assert_array_equal(out, np.broadcast_to([1, 2, 3, 4], out.shape))


def test_input_is_read_only() -> None:
    frozen = np.zeros(32, np.uint32)
    frozen.flags.writeable = False
    (report,) = launch(ptx_kernel("st.global.u32 [%rd0], %r60;"), frozen).reports
    assert report.kind == "memory"
