"""The Blackwell forward, as `implementation="emulated"` runs it: in strict mode, on every path that it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import forward_mutation
import numpy as np
import pytest
from cases import Sizes, operands
from forward_suite import SIZES, ForwardSuite
from suite import label

from jax_fa4.emulated import mutation


class TestBlackwellForward(ForwardSuite):
    module = "sm100_forward"
    compiled_widths = ((64, 64), (96, 96), (128, 128), (192, 128))
    targets = {"sm_100": "sm_100f", "sm_103": "sm_103a"}  # noqa: RUF012
    load_warp = 13
    # Each width, dtype and GPU.
    quick_builds = (
        ((64, 64), "bfloat16", "sm_100"),
        ((96, 96), "float16", "sm_103"),
        ((128, 128), "bfloat16", "sm_103"),
        ((192, 128), "float16", "sm_100"),
    )


@pytest.mark.parametrize("choice", [{}, {"is_causal": True}], ids=label)
def test_ctas(choice: Mapping[str, Any]) -> None:
    """Each multiprocessor has one that goes from task to task, or each task has one."""
    tasks = 2 * 2  # two of each batch element
    for sm_count in (1, 3):
        ran = TestBlackwellForward().check_masks(choice, SIZES, sm_count=sm_count)
        assert ran.launch.grid[0] == (tasks if choice else sm_count)


@pytest.mark.parametrize("kind", ["full", "bounds"])
@pytest.mark.parametrize("widths", TestBlackwellForward.compiled_widths, ids=str)
def test_columns_of_tensor_memory(widths: tuple[int, int], kind: str) -> None:
    """S0 [0, 128), P0 over its upper half, S1 and P1 the next, then O0 and O1: who reads and writes what."""
    arguments = operands(Sizes(1, 300, 300, 1, 1, *widths), "bfloat16", np.random.default_rng(15))
    # Logits so large that out is rescaled.
    arguments |= {"scale": 1.0} if kind == "full" else {"scale": 1.0, "is_causal": True}
    ran = TestBlackwellForward().check(arguments, sm_count=1, trace=True)
    assert ran.launch.kernel.endswith(kind)
    touched: dict[str, set[int]] = defaultdict(set)
    for event in ran.launch.trace.events:
        arguments = event.arguments
        if event.kind != "operation":
            continue
        if event.name == "tcgen05.mma":
            product = "PV" if "a column" in arguments else "QK"
            touched[f"{product} writes"] |= {*range(arguments["d column"], arguments["d column"] + arguments["n"])}
            if product == "PV":  # of 16 keys, two a column
                assert arguments["k"] == 16
                touched["PV reads"] |= {*range(arguments["a column"], arguments["a column"] + 8)}
        elif event.name in ("tcgen05.ld", "tcgen05.st"):
            role = ("softmax 0", "softmax 1", "correction")[event.warp // 4]
            assert arguments["lane"] == event.warp % 4 * 32
            columns = range(arguments["column"], arguments["column"] + arguments["columns"])
            touched[f"{role} {'reads' if event.name == 'tcgen05.ld' else 'writes'}"] |= {*columns}
    scores = [{*range(128)}, {*range(128, 256)}]
    probabilities = [{*range(64, 128)}, {*range(192, 256)}]
    outputs = [{*range(256 + i * widths[1], 256 + (i + 1) * widths[1])} for i in range(2)]
    in_softmax = [set(), set()] if kind == "full" else outputs  # whose warps end a task with bounds
    assert touched == {
        "QK writes": scores[0] | scores[1],
        "PV reads": probabilities[0] | probabilities[1],
        "PV writes": outputs[0] | outputs[1],
        "softmax 0 reads": scores[0] | in_softmax[0],
        "softmax 0 writes": probabilities[0],
        "softmax 1 reads": scores[1] | in_softmax[1],
        "softmax 1 writes": probabilities[1],
        "correction reads": outputs[0] | outputs[1],
        "correction writes": outputs[0] | outputs[1],
    }


# ---- Faults


def test_faults_are_noticed() -> None:
    """One of each kind; all of them are a command's: see forward_mutation.py."""
    case = forward_mutation.case("blackwell_128_bounds")
    chosen = forward_mutation.one_of_each_kind(case, forward_mutation.faults("blackwell_128_bounds"))
    for verdict in mutation.judge(case, [(mutant,) for mutant in chosen], 1):
        assert verdict.caught, verdict.mutants[0].name
    assert len(chosen) > 70
