"""The Hopper backward: emulated, in strict mode, on every path that it has; and on a GPU."""

from __future__ import annotations

import pytest
import test_hopper_forward
from backward_suite import BackwardSuite, GradientSuite


class TestHopperBackward(BackwardSuite):
    forward = test_hopper_forward.TestHopperForward()
    module = "sm90_backward"
    compiled_widths = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    quick_builds = (
        ((64, 64), "float16", "sm_90"),
        ((96, 96), "bfloat16", "sm_90"),
        ((128, 128), "float16", "sm_90"),
        ((192, 128), "bfloat16", "sm_90"),
        ((256, 256), "float16", "sm_90"),
    )


@pytest.mark.gpu
class TestBackwardOnGpu(TestHopperBackward):
    """On a GPU of another architecture it is that one's kernels that are tested."""

    forward = test_hopper_forward.TestForwardOnGpu()


@pytest.mark.slow
class TestSuiteInBfloat16(GradientSuite):
    dtype = "bfloat16"
    backward = TestHopperBackward()
    arch = "sm_90"


@pytest.mark.slow
class TestSuiteInFloat16(TestSuiteInBfloat16):
    dtype = "float16"


@pytest.mark.gpu
class TestSuiteInBfloat16OnGpu(TestSuiteInBfloat16):
    backward = TestBackwardOnGpu()


@pytest.mark.gpu
class TestSuiteInFloat16OnGpu(TestSuiteInFloat16):
    backward = TestBackwardOnGpu()
