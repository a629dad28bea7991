"""Mutation: what faults there are, what becomes of them, and which reasons for survivors hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_case
import numpy as np
import pytest
from ptx_kernels import HEADER

from jax_fa4.emulated import Kernel, mutation

# Thread 0 writes, thread 32 reads, and two barriers stand between them, either of which would do.
TWICE = f"""{HEADER.format(target="sm_100a")}
.visible .entry k(.param .u64 p0)
{{
    .reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .pred %p<4>; .shared .align 8 .b8 x[16];
    ld.param.u64 %rd0, [p0]; mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; setp.ne.u32 %p1, %r0, 32;
    @!%p0 st.shared.u32 [x], 7;
    .loc 1 10 1
    bar.sync 1, 64;
    .loc 1 20 1
    .loc 1 5 1, function_name $L__info, inlined_at 1 20 1
    bar.sync 2, 64;  // bar.sync in a comment; is none
    .loc 1 30 1
    ld.shared.u32 %r1, [x];
    @!%p1 st.global.u32 [%rd0], %r1;
    setp.gt.u32 %p2, %r0, 64;
    @%p2 st.shared.u32 [x+8], 7;
    ret;
}}
.file 1 "/somewhere/two.cu"
"""
FIRST, SECOND = "drop: bar.sync at two.cu:10", "drop: bar.sync at two.cu:20"
STORE = "drop: st.shared (1)"
NEVER = "drop: st.shared at two.cu:30"
KNOWN = {f"next barrier: bar.sync at two.cu:{line}": "equivalent: the same threads use both" for line in (10, 20)} | {
    NEVER: "equivalent: there are no such threads",
    "32 threads less: bar.sync at two.cu:10": f"redundant with {SECOND}",
    "32 threads less: bar.sync at two.cu:20": f"redundant with {FIRST}",
}


def try_twice(kernel: Kernel, seed: int) -> str | None:
    out = np.zeros(1, np.uint32)
    run = kernel.launch([out], grid=(1, 1, 1), block=(64, 1, 1), seed=seed)
    if run.reports:
        return run.reports[0].kind
    return None if out[0] == 7 else "wrong result"


def problems(reasons: dict[str, str]) -> list[str]:
    case = mutation.Case(TWICE, try_twice, KNOWN | reasons)
    verdicts = list(mutation.judge(case, [(one,) for one in mutation.mutants(TWICE)], seeds=3))
    return mutation.unexplained(case, verdicts, seeds=3)


def test_names_hold_places_and_lines() -> None:
    found = {mutant.name: mutant for mutant in mutation.mutants(TWICE)}
    assert {STORE, FIRST, SECOND, "32 threads less: bar.sync at two.cu:20"} < found.keys()
    assert found[SECOND].chain == "two.cu:5, called at two.cu:20"
    assert TWICE.split("\n")[found[SECOND].line - 1].strip().startswith("bar.sync 2, 64;  //")
    assert (found[FIRST].before, found[FIRST].after) == ("bar.sync 1, 64;", "")


def test_places_are_lines_of_the_file_that_is_named() -> None:
    names = [mutant.name for mutant in mutation.mutants(TWICE, "two.cu") if mutant.name.startswith("drop: bar")]
    assert names == [FIRST, "drop: bar.sync at two.cu:5"]
    assert mutation.mutants(TWICE, "another.cu") == mutation.mutants(TWICE)


def test_a_kernel_alone() -> None:
    """The others of its module are gone, and what all share is not."""
    entry = "// { is no brace\n.visible .entry other(.param .u64 p0)\n{ { ret; } }\n"
    start, end = TWICE.index(".visible"), TWICE.index(".file")
    module = TWICE[:start] + entry + TWICE[start:end] + entry.replace("other", "k2") + TWICE[end:]
    kernel = Kernel(mutation.alone(module, "k"))
    assert kernel.name == "k"
    assert try_twice(kernel, 0) is None
    assert [one.name for one in mutation.mutants(mutation.alone(module, "k"))] == [
        one.name for one in mutation.mutants(TWICE)
    ]
    assert Kernel(mutation.alone(module, "k2")).name == "k2"
    with pytest.raises(ValueError, match="there is no kernel 'k3', but other, k, k2"):
        mutation.alone(module, "k3")


def test_redundancy_is_verified() -> None:
    both = {FIRST: f"redundant with {SECOND}", SECOND: f"redundant with {FIRST}"}
    assert problems(both) == []
    assert problems({FIRST: f"redundant with {SECOND}"}) == [f"{SECOND}: not noticed with 1 of 1 seeds"]


@pytest.mark.parametrize(
    ("reasons", "message"),
    [
        ({STORE: "equivalent: so they say"}, "stale reason"),
        ({"drop: bar.sync at two.cu:11": "equivalent: so they say"}, "stale reason"),
        ({FIRST: f"redundant with {STORE}"}, "alone is noticed"),
        ({FIRST: "redundant with nothing known"}, "alone is noticed, or unknown"),
        ({FIRST: "redundant with next barrier: bar.sync at two.cu:20"}, "both together are not noticed"),
        ({FIRST: "redundant with next barrier: bar.sync at two.cu:10"}, "the same instruction"),
        ({FIRST: "unlikely"}, f"{FIRST}: not noticed with 1 of 1 seeds"),
        ({NEVER: "unlikely"}, f"{NEVER}: not noticed with 1 of 1 seeds; the case never executes it"),
        ({FIRST: "equivalent: "}, "not noticed with 1 of 1 seeds"),
    ],
)
def test_reasons_that_do_not_hold(reasons: dict[str, str], message: str) -> None:
    assert any(message in problem for problem in problems({SECOND: f"redundant with {FIRST}"} | reasons))


def test_two_faults_of_one_instruction_are_refused() -> None:
    drop, other = (one for one in mutation.mutants(TWICE) if one.name in (FIRST, "next barrier: bar.sync at two.cu:10"))
    with pytest.raises(ValueError, match="the same instruction"):
        mutation.mutated(TWICE, drop, other)


# Instructions, and what their faults turn them into: of each kind the one named.
CHANGES = [
    ("mbarrier.init.shared::cta.b64 [%r1], 4;", "count - 1", "mbarrier.init.shared::cta.b64 [%r1], 3;"),
    ("mbarrier.arrive.shared::cta.b64 _, [%r1];", "count + 1", "mbarrier.arrive.shared::cta.b64 _, [%r1], 2;"),
    (
        "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];",
        "relax",
        "@%p1 mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r1];",
    ),
    ("ld.acquire.gpu.global.s32 %r1, [%rd1];", "relax", "ld.relaxed.gpu.global.s32 %r1, [%rd1];"),
    ("red.release.gpu.global.add.s32 [%rd1], 1;", "relax", "red.relaxed.gpu.global.add.s32 [%rd1], 1;"),
    ("barrier.cluster.arrive.release.aligned;", "relax", "barrier.cluster.arrive.relaxed.aligned;"),
    ("setmaxnreg.dec.sync.aligned.u32 64;", "8 registers less", "setmaxnreg.dec.sync.aligned.u32 56;"),
    ("cp.async.bulk.wait_group 0;", "wait for reads only", "cp.async.bulk.wait_group.read 0;"),
    ("cp.async.bulk.wait_group.read 1;", "one group more in flight", "cp.async.bulk.wait_group.read 2;"),
    (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 64, [%r2];",
        "16 bytes less",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 48, [%r2];",
    ),
    (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%r1], [%rd1, {%r2, %r3}], [%r4], %h1, %rd2;",
        "multicast to one more or less",
        ".reg .b16 mutant; xor.b16 mutant, %h1, 1; cp.async.bulk.tensor.2d.shared::cluster.global.tile."
        "mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%r1], [%rd1, {%r2, %r3}], [%r4], mutant, %rd2;",
    ),
    (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r2, %r3}], [%r4];",
        "coordinate 1 + 8",
        ".reg .b32 mutant; add.s32 mutant, %r3, 8; "
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r2, mutant}], [%r4];",
    ),
    (
        "tcgen05.mma.cta_group::1.kind::f16 [%r1 + 8], [%r2], %rd1, %r3, 1;",
        "column of D + 8",
        "tcgen05.mma.cta_group::1.kind::f16 [%r1+16], [%r2], %rd1, %r3, 1;",
    ),
    (
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd2, %rd1, %r3, 1;",
        "swizzle of A",
        ".reg .b64 mutant; xor.b64 mutant, %rd2, 13835058055282163712; "
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], mutant, %rd1, %r3, 1;",
    ),
    (
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd2, %rd1, %r3, %p1;",
        "invert addition of D",
        ".reg .pred mutant; not.pred mutant, %p1; tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd2, %rd1, %r3, mutant;",
    ),
    (
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;",
        "half the columns",
        ".reg .b32 mutant; shr.u32 mutant, 64, 1; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, mutant;",
    ),
    ("elect.sync %r1|%p1, -1;", "invert", "elect.sync %r1|%p1, -1; } not.pred %p1, %p1;"),
]


@pytest.mark.parametrize(("before", "kind", "after"), CHANGES, ids=lambda x: x.split(" ")[0])
def test_faults_of_an_instruction(before: str, kind: str, after: str) -> None:
    (mutant,) = (one for one in mutation.mutants(f"    {before}\n") if one.kind == kind)
    assert mutant.before == before
    assert " ".join(mutant.after.strip("{} ").split()) == after


def test_kernels_of_others_have_faults_in_every_instruction_that_synchronises() -> None:
    """Several statements on a line, labels and guards hide nothing."""
    text = "{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 99; @P1 bra DONE; DONE: }\n"
    kinds = [one.kind for one in mutation.mutants(text + "@%p1 bar.arrive %r1, 64; // fence.proxy.async;\n")]
    assert kinds == [
        *("never wait", "flip parity", "relax"),
        *("drop", "next barrier", "32 threads more", "32 threads less"),
    ]


# ---- The small attention kernel


@pytest.mark.parametrize("shape", [(2, 2, 3), (1, 1, 1), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("ctas", [1, 2])
def test_attention_is_clean_and_right(shape: tuple[int, int, int], ctas: int) -> None:
    problem, kernel = attention_case.Problem.draw(*shape), Kernel(attention_case.ptx())
    for seed in range(20):
        run, fault = problem.run(kernel, seed, ctas)
        run.check()
        assert fault is None


def attention_verdicts(workers: int, choose: Callable[[int], bool]) -> list[mutation.Verdict]:
    case = attention_case.case()
    chosen = [(one,) for i, one in enumerate(mutation.mutants(case.ptx)) if choose(i)]
    return list(mutation.judge(case, chosen, 2, workers))


def test_attention_notices_some_faults_of_each_kind() -> None:
    """The whole run is a command: see the case."""
    case = attention_case.case()
    kinds: dict[str, int] = {}
    chosen = []
    for one in mutation.mutants(case.ptx):
        kinds[one.kind] = kinds.get(one.kind, 0) + 1
        if kinds[one.kind] <= 2 and one.name not in case.reasons:
            chosen.append((one,))
    for verdict in mutation.judge(case, chosen, 2):
        assert verdict.caught, verdict.mutants[0].name
    assert len(chosen) > 50


def test_verdicts_do_not_depend_on_workers() -> None:
    assert attention_verdicts(1, lambda i: i % 16 == 0) == attention_verdicts(2, lambda i: i % 16 == 0)


def command(*options: Any) -> subprocess.CompletedProcess[str]:
    tests = Path(attention_case.__file__).parent
    return subprocess.run(
        [sys.executable, "-P", "-m", "jax_fa4.emulated.mutation", tests / "attention_case.py", *options],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command() -> None:
    done = command("--seeds", "1", "--workers", "2", "--only", "next barrier|cp.async.bulk.wait_group")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"next barrier +1 +3\n", done.stdout)
    assert "called at kernel.cu:" in done.stdout
    assert "equivalent: nobody uses barrier 3" in done.stdout
    assert "8 of 8 mutants" in done.stderr
