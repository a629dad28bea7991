"""The Hopper forward: emulated, in strict mode, on every path that it has; and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import forward_mutation
import pytest
from forward_suite import SIZES, ForwardSuite
from suite import GPU_TRUNCATES, label

from jax_fa4.emulated import mutation


class TestHopperForward(ForwardSuite):
    module = "sm90_forward"
    compiled_widths = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    targets = {"sm_90": "sm_90a"}  # noqa: RUF012
    load_warp = 12
    truncates = True
    quick_builds = (
        ((64, 64), "bfloat16", "sm_90"),
        ((96, 96), "float16", "sm_90"),
        ((128, 128), "bfloat16", "sm_90"),
        ((192, 128), "float16", "sm_90"),
        ((256, 256), "bfloat16", "sm_90"),
    )


@pytest.mark.gpu
class TestForwardOnGpu(TestHopperForward):
    """On a GPU of another architecture it is that one's kernels that are tested."""

    implementation = "cuda"
    truncates = GPU_TRUNCATES


@pytest.mark.parametrize("choice", [{}, {"is_causal": True}], ids=label)
def test_ctas(choice: Mapping[str, Any]) -> None:
    """Each multiprocessor has one, which goes from task to task."""
    for sm_count, tasks in ((1, 1), (3, 3), (100, 2 * 2)):  # two of each batch element
        ran = TestHopperForward().check_masks(choice, SIZES, sm_count=sm_count)
        assert ran.launch.grid[0] == tasks


# ---- Faults


def test_faults_are_noticed() -> None:
    """One of each kind; all of them are a command's: see forward_mutation.py."""
    case = forward_mutation.case("hopper_128_bounds")
    chosen = forward_mutation.one_of_each_kind(case, forward_mutation.faults("hopper_128_bounds"))
    for verdict in mutation.judge(case, [(mutant,) for mutant in chosen], 1):
        assert verdict.caught, verdict.mutants[0].name
    assert len(chosen) > 45
