"""The suite on `tiled`, and its loops in steps small enough that every kind of block occurs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from suite import SIZES, AttentionSuite, Sizes, label, masked, operands

from jax_fa4 import attention, tiled


class TestTiled(AttentionSuite):
    implementation = "tiled"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tiled._Steps], None]]:
    """Replaces the steps of a CPU for one test."""

    def replace(steps: tiled._Steps) -> None:
        monkeypatch.setattr(tiled, "_CPU", steps)
        jax.clear_caches()

    yield replace
    jax.clear_caches()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_steps_of_an_accelerator(steps: Callable[[tiled._Steps], None], dtype: str) -> None:
    """16-bit operands, weights and their gradients are multiplied as they are stored."""
    steps(tiled._ACCELERATOR)
    choice = {"left": 60, "right": 60, "key_value_seq_lengths": "some", "sinks": "some", "softcap": 3.0}
    rng = np.random.default_rng(2)
    TestTiled().check(operands(SIZES, dtype, rng) | masked(SIZES, choice, rng))


def test_the_share_of_sinks() -> None:
    """One key and a scale of 0, so that lse is exact: what a sink of any size leaves is as precise as a softmax."""
    rng = np.random.default_rng(3)
    arguments = operands(Sizes(1, 9, 1, 8, 1, 8, 8), "float32", rng) | {"scale": 0.0}
    TestTiled().check(arguments | {"sinks": np.array([-np.inf, -20, -5, 2, 5, 10, 16, 60], np.float32)})


@pytest.mark.parametrize("implementation", ["tiled", "reference"])
@pytest.mark.parametrize("scale", [1e10, -1e30])
def test_logits_that_exceed_all_precision(scale: float, implementation: str) -> None:
    """A row has the value of its greatest logit, and no gradient but that value's."""
    rng = np.random.default_rng(4)
    query, key, value = operands(Sizes(2, 5, 7, 4, 4, 8, 8), "float32", rng).values()
    call = functools.partial(attention, scale=np.float32(scale), implementation=implementation)
    out, pull = jax.vjp(jax.jit(call), query, key, value)
    best = (np.einsum("btnd,bsnd->bnts", query, key) * np.sign(scale)).argmax(-1)
    weights = np.eye(7, dtype=np.float32)[best]
    np.testing.assert_allclose(out, np.einsum("bnts,bsnd->btnd", weights, value), rtol=1e-6)
    dquery, _, dvalue = pull(out)
    assert np.isfinite(dquery).all()
    np.testing.assert_allclose(dvalue, np.einsum("bnts,btnd->bsnd", weights, out), rtol=1e-5)


class TestSmallSteps:
    """Eight query blocks by sixteen key blocks: some skipped, some masked in part, some whole."""

    @pytest.fixture(autouse=True)
    def _small_steps(self, steps: Callable[[tiled._Steps], None]) -> None:
        steps(dataclasses.replace(tiled._CPU, logits=1 << 10, rows=32, keys=8))

    @pytest.mark.parametrize(
        "choice",
        [
            {"left": 40, "right": 25},
            {"is_causal": True, "query_offset": "end", "bias": "some", "mask": "some"},
            {"left": 40, "right": None, "query_seq_lengths": "some", "key_value_seq_lengths": "some", "softcap": 2.0},
            {"row_bounds": "some", "query_offset": "array", "is_causal": True},
            {"segments": "shuffled", "left": 40, "right": 40, "sinks": "some"},
        ],
        ids=label,
    )
    def test_masks(self, choice: Mapping[str, Any]) -> None:
        sizes = Sizes(batch=2, rows=125, keys=126, heads=4, kv_heads=2, width=8, value_width=8)
        TestTiled().check_masks(choice, sizes, poison=np.nan)
