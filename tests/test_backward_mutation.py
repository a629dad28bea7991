"""Faults planted in the backwards for tensor cores, one of each kind; all are a command's: see backward_mutation.py."""

from __future__ import annotations

import backward_mutation
import pytest
from forward_mutation import one_of_each_kind

from jax_fa4.emulated import mutation


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("blackwell_128_bounds", 70),
        ("blackwell_128_bounds_in_order", 6),
        ("hopper_128_bounds", 50),
        ("hopper_128_bounds_in_order", 6),
    ],
)
def test_faults_are_noticed(name: str, least: int) -> None:
    case = backward_mutation.case(name)
    chosen = one_of_each_kind(case, backward_mutation.faults(name))
    for verdict in mutation.judge(case, [(mutant,) for mutant in chosen], 1):
        assert verdict.caught, verdict.mutants[0].name
    assert len(chosen) >= least
