"""Hypothesis profiles (`HYPOTHESIS_PROFILE=thorough` for many examples), and what becomes of `gpu` and `more` tests."""

from __future__ import annotations

import os

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

# The suite's random test is inherited, which hypothesis would refuse. Examples compile: time says nothing about them.
_common = settings(deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("quick", _common, max_examples=6, derandomize=True, database=None, phases=[Phase.generate])
settings.register_profile("thorough", _common, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


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
