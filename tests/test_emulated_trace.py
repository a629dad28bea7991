"""The event trace: what it says of small kernels, and that the JSON is one that Perfetto reads."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_kernels import cuda_kernel, launch, ptx_kernel
from test_emulated_reports import MMA, WGMMA
from test_emulated_tensor import TCGEN05

from jax_fa4.emulated import Kernel, Run, TensorMap

SEEDS = range(12)


def check_json(trace: dict[str, Any]) -> None:
    """Structure: named tracks whose slices nest and begin in order, and arrows that lead from slice to slice."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    processes, threads = set(), set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    last: dict[tuple[int, int], float] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            if event["name"] == "process_name":
                processes.add(event["pid"])
            if event["name"] == "thread_name":
                threads.add((event["pid"], event["tid"]))
            continue
        assert event["pid"] in processes
        if event["ph"] == "C" or event.get("s") == "g":
            continue
        track = event["pid"], event["tid"]
        assert track in threads
        assert event["ts"] >= last.get(track, 0)
        last[track] = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[track].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
        else:
            assert event["ph"] == "i"
    for track in slices.values():
        open_ends: list[float] = []
        for start, end in track:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    for ends in arrows.values():
        assert set(ends) == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        for end in ends.values():
            assert any(a <= end["ts"] <= b for a, b in slices[end["pid"], end["tid"]])


def traced(kernel: Kernel, *arguments: Any, **options: Any) -> Run:
    """Launches with a trace, and checks what is true of every trace."""
    run = launch(kernel, *arguments, trace=True, **options)
    for event in run.trace.events:
        assert event.start <= event.end
        if event.kind == "operation":
            assert event.issue <= event.start
        if event.kind == "wait":
            assert (event.ended_by == "nothing") == event.open
            assert event.cause is None or event.ended_by == "signal"
    check_json(json.loads(run.trace.chrome_json()))
    return run


def only(run: Run, kind: str, name: str | None = None) -> list[Any]:
    return [e for e in run.trace.events if e.kind == kind and name in (None, e.name)]


def test_a_wait_is_ended_by_the_copy_that_completes_its_phase() -> None:
    kernel = cuda_kernel("""
    struct alignas(64) Box { char bytes[128]; };
    extern "C" __global__ void k(u32* out, const __grid_constant__ Box map) {
      alignas(128) __shared__ u32 x[2][64];
      __shared__ u64 full[2];
      if (threadIdx.x == 0) { Init(&full[0], 1); Init(&full[1], 1); InitFence(); }
      __syncthreads();
      if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2; ++i) {
          Expect(&full[i], 256);
          asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3}], [%4];"
            :: "r"(Shared(x[i])), "l"(&map), "r"(32), "r"(2 * i), "r"(Shared(&full[i])) : "memory");
        }
      }
      if (threadIdx.x >= 32) {
        for (u32 i = 0; i < 2; ++i) { Wait(&full[i], 0); out[64 * i + threadIdx.x] = x[i][threadIdx.x]; }
      }
    }""")
    blocked = 0
    for seed in SEEDS:
        x, out = np.arange(256, dtype=np.uint32).reshape(4, 64), np.zeros(128, np.uint32)
        run = traced(kernel, out, TensorMap(x, (32, 2)), threads=64, seed=seed)
        run.check()
        copies = only(run, "operation", "tensor load")
        assert [c.arguments["coordinate 1"] for c in copies] == [0, 2]
        phases = only(run, "phase")
        assert {p.cause.index for p in phases} == {c.index for c in copies}
        for copy in copies:
            assert (copy.unit, copy.warp, copy.lane) == ("copy engine", 0, 0)
            assert (copy.arguments["bytes"], copy.arguments["coordinate 0"]) == (256, 32)
            assert copy.opcode.startswith("cp.async.bulk.tensor.2d")
            assert copy.ptx_line > 0
            assert copy.source.startswith("kernel.cu:")
            (phase,) = (p for p in phases if p.cause == copy)
            assert phase.start == copy.end
            assert phase.arguments["mbarrier"] == copy.arguments["mbarrier"]
        for wait in only(run, "wait", "mbarrier"):
            assert wait.warp == 1
            if wait.ended_by == "signal":
                blocked += 1
                assert wait.cause in copies
                assert wait.arguments["mbarrier"] == wait.cause.arguments["mbarrier"]
                assert wait.arguments["pending bytes"] == 256 or wait.start < wait.cause.issue
                assert wait.start < wait.cause.end <= wait.end
            else:
                assert wait.ended_by == "no reason"
    assert blocked >= len(SEEDS)


def test_products_and_the_commit_that_ends_a_wait() -> None:
    kernel = cuda_kernel(
        TCGEN05
        + f"""extern "C" __global__ void k(u32* out) {{
      u32 t = threadIdx.x, w = t / 32;
      {MMA}
      Before(); __syncthreads(); After();
      if (t == 0) {{ mma(); mma(); mma(); commit(); }}
      Wait(&done, 0);
      After();
      u32 r[8];
      Load8(mine, r);
      out[t] = r[0];
      Free(d, 64, 1);
    }}"""
    )
    blocked = 0
    for seed in SEEDS:
        run = traced(kernel, np.zeros(128, np.uint32), threads=128, seed=seed)
        run.check()
        *products, commit = pipe = [e for e in only(run, "operation") if e.unit == "tensor pipe"]
        assert [e.name for e in products] == ["tcgen05.mma"] * 3
        assert commit.name == "tcgen05.commit"
        assert all(a.end <= b.start for a, b in itertools.pairwise(pipe))
        assert {tuple(p.arguments[x] for x in ("m", "n", "k", "accumulate", "d column")) for p in products} == {
            (128, 16, 16, 0, 0)
        }
        (phase,) = only(run, "phase")
        assert phase.cause == commit
        assert phase.arguments["mbarrier"] == commit.arguments["mbarrier"]
        ended = [w for w in only(run, "wait", "mbarrier") if w.ended_by == "signal"]
        assert all(wait.cause == commit for wait in ended)
        blocked += len(ended)
        # Loads from tensor memory are over when they are waited for.
        loads = only(run, "operation", "tcgen05.ld")
        assert len(loads) == 4
        for load in loads:
            (wait,) = (w for w in only(run, "wait", "tcgen05.ld") if w.warp == load.warp)
            assert (wait.cause, load.end) == (load, wait.end)
            assert wait.opcode.startswith("tcgen05.wait::ld")
    assert blocked >= len(SEEDS)


@pytest.mark.parametrize(("suffix", "allowed"), [("", 1), ("", 0), (".read", 0)])
def test_bulk_groups(suffix: str, allowed: int) -> None:
    kernel = cuda_kernel(f"""
    extern "C" __global__ void k(u32* out) {{
      alignas(16) __shared__ u32 x[64];
      x[threadIdx.x] = threadIdx.x; x[threadIdx.x + 32] = 7;
      ProxyFence();
      __syncwarp();
      if (threadIdx.x != 0) return;
      Store(out, x, 128); Commit();
      Store(out + 32, x + 32, 128); Commit();
      asm volatile("cp.async.bulk.wait_group{suffix} {allowed};" ::: "memory");
      WaitAll();
    }}""")
    ended, early = 0, 0
    for seed in SEEDS:
        run = traced(kernel, np.zeros(64, np.uint32), seed=seed)
        run.check()
        first, second = only(run, "operation", "cp.async.bulk")
        for wait in only(run, "wait", "bulk group"):
            assert wait.ended_by == "signal"
            if (wait.opcode, wait.arguments["allowed groups"]) != (f"cp.async.bulk.wait_group{suffix}", allowed):
                continue  # the last wait, for what the one before has left
            ended += 1
            early += wait.end < wait.cause.end
            assert wait.cause in ([first] if allowed else [first, second])
    assert ended > 0
    # A wait for the read alone may end before the copy does.
    assert (early > 0) == (suffix == ".read")


def test_named_barriers() -> None:
    kernel = ptx_kernel("""
    setp.lt.u32 %p0, %r60, 64;
    @%p0 bra PRODUCER;
    barrier.sync 3, 96;
    bra END;
    PRODUCER: barrier.arrive 3, 96;
    END:""")
    ended = 0
    for seed in SEEDS:
        run = traced(kernel, np.zeros(1, np.uint32), threads=96, seed=seed)
        run.check()
        signals = only(run, "signal", "barrier")
        assert [s.arguments["arrived"] for s in signals] == [32, 64, 96]
        assert {s.warp for s in signals} == {0, 1, 2}
        for wait in only(run, "wait"):
            ended += 1
            assert (wait.warp, wait.ended_by, wait.cause) == (2, "signal", signals[-1])
            assert wait.cause.opcode == "barrier.arrive"
            assert wait.arguments["barrier"] == 3
    assert ended > 0


def test_a_cluster() -> None:
    """An arrival at another CTA's mbarrier, and barrier.cluster."""
    kernel = cuda_kernel("""
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
      __shared__ u64 b;
      if (threadIdx.x == 0) { Init(&b, 1); InitFence(); }
      ClusterSync();
      if (threadIdx.x == 0) {
        if (Special_rank() == 0) {
          asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
              :: "r"(Map(Shared(&b), 1)) : "memory");
        } else {
          Wait(&b, 0);
        }
      }
      ClusterSync();
    }""")
    names = set()
    for seed in SEEDS:
        run = traced(kernel, np.zeros(1, np.uint32), ctas=2, cluster=2, seed=seed)
        run.check()
        (arrival,) = only(run, "signal", "mbarrier")
        (phase,) = only(run, "phase")
        assert (arrival.cta, phase.cta, phase.cause) == ((0, 0, 0), (1, 0, 0), arrival)
        assert phase.arguments["rank"] == arrival.arguments["rank"] == 1
        for wait in only(run, "wait"):
            if wait.ended_by != "signal":
                continue
            names.add(wait.name)
            if wait.name == "mbarrier":
                assert (wait.cta, wait.cause) == ((1, 0, 0), arrival)
            else:
                assert wait.name == "cluster barrier"
                assert wait.cause.opcode.startswith("barrier.cluster.arrive")
                assert wait.cause.cta != wait.cta
    assert names == {"mbarrier", "cluster barrier"}


@pytest.mark.parametrize(
    "instruction", ["bar.warp.sync 0xffffffff", "vote.sync.ballot.b32 %r2, %p0, 0xffffffff", "barrier.sync.aligned 0"]
)
def test_lanes_wait_for_lanes(instruction: str) -> None:
    kernel = ptx_kernel(f"""
    mov.u32 %r1, 0;
    setp.ge.u32 %p0, %r60, 4;
    bra START;
    MEET: {instruction};
    bra END;
    START: @%p0 bra MEET;
    LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 50; @%p1 bra LOOP;
    bra MEET;
    END:
    """)
    run = traced(kernel, np.zeros(1, np.uint32))
    run.check()
    (wait,) = only(run, "wait")
    assert (wait.name, wait.ended_by, wait.lanes, wait.lane) == ("lanes", "lanes", 0xFFFFFFF0, 4)
    assert wait.opcode == instruction.split()[0]
    assert wait.end - wait.start > 100
    assert "the arrival of lanes 0xf" in run.trace.chrome_json()


def test_registers() -> None:
    kernel = Kernel(
        """.version 8.8
        .target sm_100a
        .address_size 64
        .visible .entry k() .maxntid 512 .maxnreg 128
        {
        .reg .b32 %r<4>; .reg .pred %p<2>;
        mov.u32 %r0, %tid.x;
        setp.lt.u32 %p0, %r0, 256;
        @%p0 bra LESS;
        setmaxnreg.inc.sync.aligned.u32 232;
        bra END;
        LESS: setmaxnreg.dec.sync.aligned.u32 24;
        END: ret;
        }"""
    )
    ended = 0
    for seed in SEEDS:
        run = traced(kernel, threads=512, seed=seed)
        run.check()
        counts = [(e.warp, e.arguments["registers"]) for e in only(run, "registers")]
        assert sorted(counts) == [(w, 24 if w < 8 else 232) for w in range(16)]
        assert {e.arguments["registers"] for e in only(run, "warp")} == {128}
        for wait in only(run, "wait", "registers"):
            ended += 1
            assert wait.ended_by == "signal"
            assert wait.warp >= 8
            assert wait.cause.opcode.startswith("setmaxnreg.dec")
    assert ended > 0


def test_tensor_memory_is_waited_for() -> None:
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* out) {
      __shared__ u32 slot[2];
      u32* mine = &slot[threadIdx.x / 32];
      asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 512;"
          :: "r"(Shared(mine)) : "memory");
      __syncwarp();
      u32 at;
      for (int i = 0; i < 64; ++i) at = *(volatile u32*)mine;
      asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 512;" :: "r"(at));
    }""")
    ended = 0
    for seed in SEEDS:
        run = traced(kernel, np.zeros(1, np.uint32), threads=64, seed=seed)
        run.check()
        for wait in only(run, "wait", "tensor memory"):
            ended += 1
            assert (wait.ended_by, wait.arguments) == ("signal", {"columns": 512})
            assert wait.cause.opcode.startswith("tcgen05.dealloc")
            assert wait.cause.warp == 1 - wait.warp
    assert ended > 0


def test_units_that_are_full_are_waited_for() -> None:
    copies = cuda_kernel("""
    extern "C" __global__ void k(u32* out, const u32* in) {
      alignas(16) __shared__ u32 x[8][128];
      __shared__ u64 b;
      if (threadIdx.x == 0) { Init(&b, 1); InitFence(); Expect(&b, 8 * 512); }
      __syncwarp();
      for (u32 i = 0; i < 8; ++i) Load(&x[i][4 * threadIdx.x], in + 4 * threadIdx.x, 16, &b);
      Wait(&b, 0);
    }""")
    run = traced(copies, np.zeros(1, np.uint32), np.zeros(128, np.uint32))
    run.check()
    assert len(only(run, "operation", "cp.async.bulk")) == 256
    waits = only(run, "wait", "copies in flight")
    assert waits
    assert {(w.ended_by, w.cause.name) for w in waits} == {("signal", "cp.async.bulk")}

    products = cuda_kernel(
        TCGEN05
        + f"""extern "C" __global__ void k(u32* out) {{
      u32 t = threadIdx.x, w = t / 32;
      {MMA}
      Before(); __syncthreads(); After();
      if (t == 0) {{ for (u32 i = 0; i < 1500; ++i) mma(); commit(); }}
      Wait(&done, 0);
      Free(d, 64, 1);
    }}"""
    )
    waits = []
    for seed in range(3):
        run = traced(products, np.zeros(1, np.uint32), threads=32, seed=seed)
        run.check()
        waits += only(run, "wait", "tensor pipe")
    assert {(w.ended_by, w.cause.name) for w in waits} == {("signal", "tcgen05.mma")}


def test_lanes_may_wait_for_several_barriers() -> None:
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* out) {
      __shared__ u64 b[4];
      if (threadIdx.x == 0) { for (int i = 0; i < 4; ++i) Init(&b[i], 1); InitFence(); }
      __syncthreads();
      if (threadIdx.x == 0) for (int i = 0; i < 4; ++i) Arrive(&b[3 - i]);
      if (threadIdx.x >= 32) Wait(&b[threadIdx.x % 4], 0);
    }""")
    ended = 0
    for seed in SEEDS:
        run = traced(kernel, np.zeros(1, np.uint32), threads=64, seed=seed)
        run.check()
        arrivals = only(run, "signal", "mbarrier")
        assert len(arrivals) == 4
        first = min(a.arguments["mbarrier"] for a in arrivals)
        for wait in only(run, "wait", "mbarrier"):
            if wait.ended_by == "signal":
                ended += 1
                awaited = {first + 8 * (lane % 4) for lane in range(32) if wait.lanes >> lane & 1}
                assert wait.cause in arrivals
                assert wait.cause.arguments["mbarrier"] in awaited
                assert wait.start < wait.cause.end <= wait.end
    assert ended > 0


def test_operations_that_are_over_when_they_are_waited_for() -> None:
    """Products of wgmma and cp.async, whose groups are waited for."""
    kernel = cuda_kernel(
        f"""extern "C" __global__ void k(u32* out, const u32* in) {{
      u32 t = threadIdx.x;
      {WGMMA}
      wgmma();
      wgmma();
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      out[t] = __float_as_uint(d[0]);
      __shared__ u32 x[128];
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(Shared(x + t)), "l"(in + t) : "memory");
      asm volatile("cp.async.commit_group;" ::: "memory");
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      out[t] += x[t];
    }}""",
        "compute_90a",
    )
    run = traced(kernel, np.zeros(128, np.uint32), np.zeros(128, np.uint32), threads=128)
    run.check()
    for warp in range(4):
        mine = [e for e in run.trace.events if e.warp == warp]
        first, second = (e for e in mine if e.kind == "operation" and e.name == "wgmma")
        assert (first.unit, first.arguments["n"]) == ("wgmma", 8)
        waits = [e for e in mine if e.kind == "wait" and e.name == "wgmma"]
        assert [w.cause for w in waits] == [first, second]
        assert [w.end for w in waits] == [first.end, second.end]
        (copy,) = (e for e in mine if e.kind == "operation" and e.name == "cp.async")
        assert copy.arguments["bytes"] == 128
        (wait,) = (e for e in mine if e.kind == "wait" and e.name == "cp.async")
        assert wait.cause == copy


def test_kinds_of_copies() -> None:
    kernel = cuda_kernel("""
    struct alignas(64) Box { char bytes[128]; };
    extern "C" __global__ void k(const __grid_constant__ Box map) {
      alignas(128) __shared__ u32 x[32];
      x[threadIdx.x] = 1;
      ProxyFence();
      __syncwarp();
      if (threadIdx.x != 0) return;
      asm volatile("cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%0, {%1}];" :: "l"(&map), "r"(0));
      asm volatile("cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%0, {%1}], [%2];"
          :: "l"(&map), "r"(32), "r"(Shared(x)) : "memory");
      asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%1}], [%2];"
          :: "l"(&map), "r"(0), "r"(Shared(x)) : "memory");
      Commit();
      WaitAll();
    }""")
    run = traced(kernel, TensorMap(np.zeros(64, np.uint32), (32,)))
    run.check()
    copies = only(run, "operation")
    assert [c.name for c in copies] == ["prefetch", "tensor reduction", "tensor store"]
    assert {c.unit for c in copies} == {"copy engine"}
    assert [c.arguments.get("coordinate 0") for c in copies] == [None, 32, 0]


def test_a_deadlock_leaves_open_waits() -> None:
    kernel = cuda_kernel("""
    extern "C" __global__ void k(u32* out) {
      __shared__ u64 b;
      if (threadIdx.x == 0) { Init(&b, 2); InitFence(); }
      __syncthreads();
      if (threadIdx.x == 0) Arrive(&b);
      if (threadIdx.x < 32) { Wait(&b, 0); } else { asm volatile("barrier.sync 5, 64;" ::: "memory"); }
    }""")
    run = traced(kernel, np.zeros(1, np.uint32), threads=64)
    assert [r.kind for r in run.reports] == ["deadlock"]
    waits = {w.name: w for w in only(run, "wait") if w.open}
    assert set(waits) == {"mbarrier", "barrier"}
    assert waits["mbarrier"].arguments["pending arrivals"] == 1
    assert waits["barrier"].arguments == {"barrier": 5, "arrived": 32, "expected": 64}
    assert waits["mbarrier"].end == waits["barrier"].end == max(e.end for e in run.trace.events)
    assert all(life.open for life in only(run, "warp"))
    assert "time limit" in {w.ended_by for w in only(run, "wait", "mbarrier")}
    titles = [e["name"] for e in json.loads(run.trace.chrome_json())["traceEvents"]]
    assert "wait: barrier 5 (open)" in titles


RING = """
extern "C" __global__ void k(u32* out, const u32* in) {
  alignas(16) __shared__ u32 x[2][32];
  __shared__ u64 full[2], empty[2];
  if (threadIdx.x == 0) { for (int i = 0; i < 2; ++i) { Init(&full[i], 1); Init(&empty[i], 1); } InitFence(); }
  __syncthreads();
  for (u32 i = 0; i < 10; ++i) {
    u32 at = i % 2, parity = i / 2 % 2;
    if (threadIdx.x == 0) {
      Wait(&empty[at], parity ^ 1);
      Expect(&full[at], 128);
      Load(x[at], in + 32 * i, 128, &full[at]);
    }
    if (threadIdx.x >= 32) {
      Wait(&full[at], parity);
      out[32 * i + threadIdx.x - 32] = x[at][threadIdx.x - 32];
      __syncwarp();
      if (threadIdx.x == 32) Arrive(&empty[at]);
    }
  }
}"""


def run_ring(seed: int, **options: Any) -> Run:
    values, out = np.arange(320, dtype=np.uint32), np.zeros(320, np.uint32)
    run = (traced if options.get("trace", True) else launch)(
        cuda_kernel(RING), out, values, threads=64, seed=seed, **{k: v for k, v in options.items() if k != "trace"}
    )
    run.check()
    np.testing.assert_array_equal(out, values)
    return run


def test_a_seed_determines_the_trace() -> None:
    traces = [run_ring(seed).trace.chrome_json() for seed in SEEDS]
    assert traces == [run_ring(seed).trace.chrome_json() for seed in SEEDS]
    assert len(set(traces)) == len(SEEDS)


def test_a_trace_changes_nothing() -> None:
    for seed in SEEDS:
        plain = run_ring(seed, trace=False)
        assert plain.trace is None
        assert plain.instructions == run_ring(seed).instructions
    with pytest.raises(ValueError, match="trace=True"):
        plain.save_trace("unused")


def test_a_ring_of_buffers() -> None:
    """Every phase of a full barrier is completed by its copy, every one of an empty barrier by an arrival."""
    for seed in SEEDS:
        run = run_ring(seed)
        copies = only(run, "operation", "cp.async.bulk")
        assert len(copies) == 10
        phases: dict[int, list[Any]] = defaultdict(list)
        for phase in only(run, "phase"):
            phases[phase.arguments["mbarrier"]].append(phase)
        assert len(phases) == 4
        for barrier, each in phases.items():
            assert [p.arguments["phase"] for p in each] == list(range(5))
            if barrier in {c.arguments["mbarrier"] for c in copies}:
                assert {p.cause.index for p in each} <= {c.index for c in copies}
            else:
                assert {(p.cause.kind, p.cause.warp) for p in each} == {("signal", 1)}


def test_the_limit_of_events(tmp_path: Path) -> None:
    whole = run_ring(3)
    assert whole.trace.missing == 0
    count = len(whole.trace.events)
    assert json.loads(whole.trace.chrome_json())["otherData"]["truncated"] is False
    facts = [(e.kind, e.name, e.warp, e.start, e.arguments) for e in whole.trace.events]
    for limit in (0, 1, 10, count // 2, count):
        run = run_ring(3, max_trace_events=limit)
        assert [(e.kind, e.name, e.warp, e.start, e.arguments) for e in run.trace.events] == facts[:limit]
        assert run.trace.missing == count - limit
        run.save_trace(tmp_path / "trace.json")
        saved = json.loads((tmp_path / "trace.json").read_text())
        assert saved["otherData"]["truncated"] is (limit < count)
        assert saved["otherData"]["missing events"] == count - limit
        cut = [e for e in saved["traceEvents"] if e["name"].startswith("the trace was cut")]
        assert len(cut) == (limit < count)
