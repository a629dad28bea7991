"""The tensor copy's kernel, as it is compiled for each target, in the emulator."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from kernel_build import build_kernels

from jax_fa4.emulated import Kernel, Run, TensorMap

COPY = next(kernel for kernel in build_kernels.KERNELS if kernel.name == "sm90_copy")
# As in csrc/sm90/copy.h.
BOX_ROWS, BOX_ROW_BYTES, THREADS = 32, 128, 32


@functools.cache
def compiled(target: str) -> Kernel:
    _, ptx, _ = build_kernels.build(COPY, target)
    return Kernel(ptx.decode(), "copy")


def copy(source: np.ndarray, result: np.ndarray, target: str, seed: int, **options: Any) -> Run:
    columns = BOX_ROW_BYTES // source.itemsize
    column_boxes = math.ceil(source.shape[1] / columns)
    source_map, result_map = (TensorMap(x, box=(columns, BOX_ROWS)) for x in (source, result))
    parameters = {0: (source_map, 128), 128: (result_map, 128), 256: (columns, 4), 260: (column_boxes, 4)}
    grid = (column_boxes * math.ceil(source.shape[0] / BOX_ROWS), 1, 1)
    return compiled(target).launch([parameters], grid=grid, block=(THREADS, 1, 1), seed=seed, **options)


@pytest.mark.parametrize("target", COPY.targets)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((32, 64), np.float16),  # one box
        ((96, 128), np.uint32),
        ((1, 8), np.uint16),  # less than a box
        ((33, 72), np.float16),  # a row and a few columns more than a box
        ((77, 36), np.float32),
        ((31, 300), np.int32),
    ],
)
def test_copies_every_element_and_nothing_else(shape: tuple[int, int], dtype: Any, target: str) -> None:
    for seed in range(4):
        bits = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
        source = bits.view(dtype)[..., 0]
        # The emulator ends a run that writes outside of the array.
        result = np.zeros_like(source)
        copy(source, result, target, seed).check()
        np.testing.assert_array_equal(result.view(np.uint8), source.view(np.uint8))


def test_all_bytes_of_a_box_are_waited_for() -> None:
    """The copy is only right because the store is issued behind the load's last byte: without the wait it races."""
    _, ptx, _ = build_kernels.build(COPY, "sm_90a")
    text = ptx.decode()
    wait = "mbarrier.try_wait.parity.shared::cta.b64 p, ["
    start = text.index(wait)
    line = text[start : text.index(";", start) + 1]
    broken = Kernel(text.replace(line, "setp.eq.u32 p, 0, 0;"), "copy")
    source, result = np.ones((32, 64), np.float16), np.zeros((32, 64), np.float16)
    parameters = {k: (TensorMap(x, box=(64, 32)), 128) for k, x in ((0, source), (128, result))}
    run = broken.launch([parameters | {256: (64, 4), 260: (1, 4)}], grid=(1, 1, 1), block=(THREADS, 1, 1), seed=0)
    assert any("race" in str(report) for report in run.reports)
