"""The emulator against vectors that were recorded on an H200 (hopper/record.py): bit for bit.

The exceptions are functions whose bits the emulator does not model: of those, both keep what PTX promises.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hopper import cases, kernels
from nvrtc import compile_ptx

from jax_fa4.emulated import Kernel, TensorMap


@functools.cache
def recorded() -> dict[str, dict[str, np.ndarray]]:
    """Of each case, entries by name."""
    vectors: dict[str, dict[str, np.ndarray]] = {}
    with np.load(cases.VECTORS) as stored:
        for key in stored.files:
            name, entry = key.split("|")
            vectors.setdefault(name, {})[entry] = stored[key]
    return vectors


def emulate(case: cases.Case, seed: int, poison: int) -> list[np.ndarray]:
    """The outputs of a case, which has to be clean in strict mode."""
    buffers = {id(output): output.buffer(poison) for output in case.outputs()}

    def argument(x: Any) -> Any:
        if isinstance(x, cases.Map):
            return TensorMap(argument(x.of), x.box, swizzle=x.swizzle)
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
        return buffers.get(id(x), x)

    kernel = Kernel(compile_ptx(kernels.PRELUDE + case.source, "compute_90a"))
    kernel.launch(
        [argument(x) for x in case.arguments],
        grid=(case.grid, 1, 1),
        block=(case.block, 1, 1),
        cluster=(case.cluster, 1, 1),
        dynamic_shared_bytes=cases.BARRIERS + case.shared,
        seed=seed,
        sm_count=132,
    ).check()
    return list(buffers.values())


def check_approximation(name: str, case: cases.Case, actual: np.ndarray, hardware: np.ndarray) -> None:
    assert case.error is not None
    with np.errstate(invalid="ignore"):  # from NaNs that signal
        x = np.asarray(case.arguments[1]).view(np.float32).astype(np.float64)
    x = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)
    function = {
        "lg2": np.log2,
        "tanh": np.tanh,
        "sqrt": np.sqrt,
        "rsqrt": lambda v: 1 / np.sqrt(v),
        "sin": np.sin,
        "cos": np.cos,
    }[name.split("/")[1].split(".")[0]]
    with np.errstate(all="ignore"):
        exact = function(x)
        regular = np.isfinite(exact) & np.isfinite(x) & (x != 0) & (np.abs(exact) >= 2.0**-126)
        error = np.where(regular, case.error(x, exact), 0)
        for who, values in (("hardware", hardware), ("emulator", actual)):
            beyond = regular & ~(np.abs(values.view(np.float32) - exact) <= error)
            assert not beyond.any(), f"{who}: {x[beyond][:4]} gives {values.view(np.float32)[beyond][:4]}"
    np.testing.assert_array_equal(actual[~regular], hardware[~regular])


def differing_blocks(actual: dict[str, np.ndarray], hardware: dict[str, np.ndarray]) -> dict[str, Any]:
    """Where entries differ: elements of what is stored whole, numbers of blocks for digests."""
    assert actual.keys() == hardware.keys() - {"inputs"}
    different: dict[str, Any] = {}
    for key, mine in actual.items():
        theirs = hardware[key]
        assert mine.shape == theirs.shape
        if not np.array_equal(mine, theirs):
            places = np.unique(np.argwhere(mine != theirs)[:, 0])
            different[key] = {"count": len(places), "first": places[:8].tolist()}
            if key.endswith("sample"):
                different[key]["values"] = [(hex(mine[i]), hex(theirs[i])) for i in places[:4]]
    return different


@pytest.mark.parametrize("name", cases.CASES)
def test_vector(name: str) -> None:
    case, hardware = cases.CASES[name](), recorded()[name]
    np.testing.assert_array_equal(case.inputs_digest(), hardware["inputs"], "the inputs are not those recorded")
    outputs = emulate(case, 0, 0xCB)
    for mine, other in zip(outputs, emulate(case, 1, 0x34), strict=True):
        np.testing.assert_array_equal(mine.view(np.uint8), other.view(np.uint8), "depends on the schedule")
    for mine, expected in zip(outputs, case.expected or [], strict=case.expected is not None):
        if expected is not None:
            np.testing.assert_array_equal(mine.view(np.uint8), expected.astype(mine.dtype).view(np.uint8))
    if case.error:
        check_approximation(name, case, outputs[0], hardware["0"].view(np.uint32))
    else:
        assert not differing_blocks(cases.condense(outputs), hardware)
