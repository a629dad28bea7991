"""Block sizes of the kernels by GPU and width.

Measured figures are those that `python benchmarks/pallas_blocks.py` printed on the GPU that a row names; it prints the
rows anew. Where nothing could be measured, a row holds what such GPUs have the registers and the shared memory for.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

Kernel = Literal["forward", "key gradients", "query gradients"]
KERNELS: tuple[Kernel, ...] = ("forward", "key gradients", "query gradients")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel is cut.

    Attributes:
      rows: packed query rows of a block.
      keys: keys of a block.
      warps: of a thread block.
      stages: of the pipeline that loads what the loop walks over.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def padded(width: int) -> int:
    """The width that kernels compute with: a power of two, and enough for a tensor core."""
    return max(16, 1 << (width - 1).bit_length())


# Of compute capabilities, what a thread block may have of shared memory, in KiB (CUDA programming guide, "Technical
# specifications per compute capability").
_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}
_LEAST_SHARED_KIB = 99

# By the bytes of a number, and the width that is computed with.
_Table = dict[Kernel, dict[tuple[int, int], Blocks]]

# 9.0 and 10.x: measured on an H200 with jax 0.11.2, but for float32 of width 256.
_LARGE: _Table = {
    "forward": {
        (2, 64): Blocks(128, 128, 4, 3),
        (2, 128): Blocks(64, 64, 4, 3),
        (2, 256): Blocks(128, 32, 8, 3),
        (4, 64): Blocks(128, 64, 4, 3),
        (4, 128): Blocks(128, 64, 8, 2),
        (4, 256): Blocks(64, 32, 4, 2),
    },
    "key gradients": {
        (2, 64): Blocks(32, 128, 4, 3),
        (2, 128): Blocks(64, 128, 8, 3),
        (2, 256): Blocks(32, 64, 8, 3),
        (4, 64): Blocks(64, 64, 4, 2),
        (4, 128): Blocks(32, 32, 4, 2),
        (4, 256): Blocks(16, 32, 4, 2),
    },
    "query gradients": {
        (2, 64): Blocks(64, 64, 4, 3),
        (2, 128): Blocks(128, 64, 8, 3),
        (2, 256): Blocks(128, 32, 8, 2),
        (4, 64): Blocks(64, 64, 4, 2),
        (4, 128): Blocks(64, 32, 4, 2),
        (4, 256): Blocks(32, 16, 4, 2),
    },
}
# 8.0 and 8.7: not measured.
_MIDDLE: _Table = {
    "forward": {
        (2, 64): Blocks(128, 64, 4, 3),
        (2, 128): Blocks(128, 64, 8, 2),
        (2, 256): Blocks(64, 32, 4, 2),
        (4, 64): Blocks(64, 64, 4, 2),
        (4, 128): Blocks(64, 32, 4, 2),
        (4, 256): Blocks(32, 32, 4, 1),
    },
    "key gradients": {
        (2, 64): Blocks(64, 128, 8, 2),
        (2, 128): Blocks(64, 64, 8, 2),
        (2, 256): Blocks(32, 32, 4, 2),
        (4, 64): Blocks(64, 64, 8, 2),
        (4, 128): Blocks(32, 32, 4, 2),
        (4, 256): Blocks(16, 16, 4, 2),
    },
    "query gradients": {
        (2, 64): Blocks(128, 64, 8, 2),
        (2, 128): Blocks(64, 64, 8, 2),
        (2, 256): Blocks(32, 32, 4, 2),
        (4, 64): Blocks(64, 64, 8, 2),
        (4, 128): Blocks(32, 32, 4, 2),
        (4, 256): Blocks(16, 16, 4, 2),
    },
}
# 8.6, 8.9, 12.x, and what is not known: not measured.
_SMALL: _Table = {
    "forward": {
        (2, 64): Blocks(128, 64, 4, 2),
        (2, 128): Blocks(64, 64, 4, 2),
        (2, 256): Blocks(64, 16, 4, 2),
        (4, 64): Blocks(64, 32, 4, 2),
        (4, 128): Blocks(64, 16, 4, 2),
        (4, 256): Blocks(16, 16, 4, 1),
    },
    "key gradients": {
        (2, 64): Blocks(64, 64, 4, 2),
        (2, 128): Blocks(32, 64, 4, 2),
        (2, 256): Blocks(16, 32, 4, 2),
        (4, 64): Blocks(32, 64, 4, 2),
        (4, 128): Blocks(16, 32, 4, 2),
        (4, 256): Blocks(16, 16, 4, 1),
    },
    "query gradients": {
        (2, 64): Blocks(64, 64, 4, 2),
        (2, 128): Blocks(64, 32, 4, 2),
        (2, 256): Blocks(32, 16, 4, 2),
        (4, 64): Blocks(64, 32, 4, 2),
        (4, 128): Blocks(32, 16, 4, 2),
        (4, 256): Blocks(16, 16, 4, 1),
    },
}
_TABLES: dict[tuple[int, int], _Table] = {
    (8, 0): _MIDDLE,
    (8, 7): _MIDDLE,
    (9, 0): _LARGE,
    (10, 0): _LARGE,
    (10, 3): _LARGE,
}
# Where the kernels are interpreted, a step costs the same whatever its size.
_INTERPRETED = Blocks(128, 128, 4, 1)


def blocks(
    kernel: Kernel,
    capability: tuple[int, int] | None,
    widths: tuple[int, int],
    dtype: np.dtype,
    rows: int,
    keys: int,
) -> Blocks:
    """The block sizes of a kernel.

    Args:
      kernel: its name.
      capability: compute capability of the GPU; None where kernels are interpreted.
      widths: D and Dv.
      dtype: of the operands.
      rows: packed rows, T * G, of which a block has no more than their next power of two.
      keys: S, likewise.
    """
    if capability is None:
        found = _INTERPRETED
    else:
        found = _TABLES.get(capability, _SMALL)[kernel][dtype.itemsize, max(64, padded(max(widths)))]
    return dataclasses.replace(found, rows=min(found.rows, padded(rows)), keys=min(found.keys, padded(keys)))


def shared_bytes(kernel: Kernel, blocks: Blocks, widths: tuple[int, int], dtype: np.dtype) -> int:
    """The most shared memory that a kernel takes: what it holds, and every stage of what it walks over."""
    width, value_width = (padded(x) * dtype.itemsize for x in widths)
    key = width + value_width
    if kernel == "forward":
        return blocks.rows * width + blocks.stages * blocks.keys * key
    if kernel == "key gradients":
        statistics = 3 * 4
        return blocks.keys * key + blocks.stages * blocks.rows * (key + statistics)
    return blocks.rows * key + blocks.stages * blocks.keys * key


def shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a thread block may have."""
    return 1024 * _SHARED_KIB.get(capability, _LEAST_SHARED_KIB)
