"""Hypothesis profiles (`HYPOTHESIS_PROFILE=thorough` for many examples), `gpu` and `more` tests, and XLA's flags."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

# The suite's random test is inherited, which hypothesis would refuse. Examples compile: time says nothing about them.
_common = settings(deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("quick", _common, max_examples=6, derandomize=True, database=None, phases=[Phase.generate])
settings.register_profile("thorough", _common, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Most of the quick set's time is LLVM's, in compiling programs that run once on a few numbers; without optimisation it
# is much less. Whoever asks for `slow` tests runs all of them, quick ones too, as JAX compiles by default.
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


def pytest_configure(config: pytest.Config) -> None:
    """Sets XLA's flags, before anything is compiled; a process that a test starts has those of its parent."""
    by_a_test = "PYTEST_CURRENT_TEST" in os.environ
    gpu = Path("/dev/nvidiactl").exists()  # a GPU's programs would not be optimised either
    if config.option.markexpr == "not slow" and not by_a_test and not gpu:
        os.environ["XLA_FLAGS"] = f"{FAST_COMPILATION} {os.environ.get('XLA_FLAGS', '')}"


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("more") and not item.cls.quick_has_more:
            item.add_marker(pytest.mark.slow)
    if any(device.platform == "gpu" for device in jax.devices()):
        # Products of float32 are float32's: the tolerances know nothing of TF32, GPUs' default for them.
        jax.config.update("jax_default_matmul_precision", "highest")
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU, but JAX sees only {jax.devices()[0].platform}"))
