"""The Blackwell backward, as `implementation="emulated"` runs it: in strict mode, on every path that it has."""

from __future__ import annotations

import pytest
import test_blackwell_forward
from backward_suite import BackwardSuite, GradientSuite


class TestBlackwellBackward(BackwardSuite):
    forward = test_blackwell_forward.TestBlackwellForward()
    module = "sm100_backward"
    compiled_widths = ((64, 64), (96, 96), (128, 128), (192, 128))
    # Each width, dtype and GPU.
    quick_builds = (
        ((64, 64), "float16", "sm_103"),
        ((96, 96), "bfloat16", "sm_100"),
        ((128, 128), "float16", "sm_100"),
        ((192, 128), "bfloat16", "sm_103"),
    )


@pytest.mark.slow
class TestSuiteInBfloat16(GradientSuite):
    dtype = "bfloat16"
    backward = TestBlackwellBackward()
    arch = "sm_100"


@pytest.mark.slow
class TestSuiteInFloat16(GradientSuite):
    dtype = "float16"
    backward = TestBlackwellBackward()
    arch = "sm_103"
