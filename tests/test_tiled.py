"""The suite on `tiled`, and its loops in steps small enough that every kind of block occurs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from suite import AttentionSuite, Sizes, label

from jax_fa4 import tiled


class TestTiled(AttentionSuite):
    implementation = "tiled"


class TestSmallSteps:
    """Eight query blocks by sixteen key blocks: some skipped, some masked in part, some whole."""

    @pytest.fixture(autouse=True)
    def _small_steps(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(tiled, "_CPU", dataclasses.replace(tiled._CPU, logits=1 << 10, rows=32, keys=8))
        jax.clear_caches()
        yield
        jax.clear_caches()

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
