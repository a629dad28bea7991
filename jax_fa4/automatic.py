"""The automatic choice between `cuda` and `tiled`, for each pass the one that is faster.

Kernels for tensor cores are taken wherever there are any for the call. A pass whose kernels fail their self-test on the
GPU at hand is given to `tiled`, with a warning.

A program may be lowered for a platform that is not the one it is traced on, so where the kernels are preferred, the
lowering decides: they run on NVIDIA GPUs, and `tiled` elsewhere.

The plain kernels multiply on the FMA units, `tiled` on tensor cores; but `tiled` goes through memory with every logit,
in large blocks whose hidden part is lost time, and each of its steps is a dozen launches. So the kernels are faster
for short calls and narrow windows, and `tiled` for long rows. The estimates below rest on what an H200 took for the
calls of benchmarks/attention.py.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
from jax import Array, lax

from jax_fa4 import cuda, selftest, tiled
from jax_fa4 import problem as spec


@dataclasses.dataclass(frozen=True)
class _Speed:
    """Of one pass, in the units of an H200's second.

    Attributes:
      products: matrix products of the algorithm (the kernels of the backward repeat two of them).
      flops: of the kernels, by the width that they are compiled for.
      launch: of the kernels.
      step: of `tiled`, whatever the step's size.
      logits: of `tiled` in a second, whatever the head's width.
    """

    products: int
    flops: dict[int, float]
    launch: float
    step: float
    logits: float


_SPEEDS: dict[cuda.Pass, _Speed] = {
    "forward": _Speed(2, {64: 29e12, 128: 31e12, 256: 19e12}, 10e-6, 80e-6, 1.5e11),
    "backward": _Speed(5, {64: 18e12, 128: 17e12, 256: 11e12}, 20e-6, 200e-6, 8.5e10),
}
_TILE = 64  # rows and keys that the kernels take at a time


def forward(problem: spec.Problem, operands: spec.Operands) -> tuple[Array, Array, Array]:
    """As every implementation's `forward`."""
    by_tiled = functools.partial(tiled.forward, problem)
    if not _takes_kernels("forward", problem, operands):
        return by_tiled(operands)
    by_cuda = functools.partial(cuda.forward, problem, place=cuda.in_cuda_branch)
    return lax.platform_dependent(operands, cuda=by_cuda, default=by_tiled)


def backward(problem: spec.Problem, operands: spec.Operands, *results: Any, with_bias: bool) -> spec.Gradients:
    """As every implementation's `backward`."""
    by_tiled = functools.partial(tiled.backward, problem, with_bias=with_bias)
    if not _takes_kernels("backward", problem, operands):
        return by_tiled(operands, *results)
    by_cuda = functools.partial(cuda.backward, problem, with_bias=with_bias, place=cuda.in_cuda_branch)
    return lax.platform_dependent(operands, *results, cuda=by_cuda, default=by_tiled)


def on_gpus(problem: spec.Problem, operands: spec.Operands, device: jax.Device) -> tuple[ModuleType, ModuleType]:
    """What `forward` and `backward` run where this GPU is at hand."""
    forward, backward = (
        cuda
        if _prefers_kernels(name, problem, operands, device) and cuda.fault(name, problem, operands, device) is None
        else tiled
        for name in cuda.PASSES
    )
    return forward, backward


def why_not(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> str | None:
    """Why this is no choice: `cuda` cannot do it."""
    return cuda.unsupported_on(problem, operands, device)


def _takes_kernels(name: cuda.Pass, problem: spec.Problem, operands: spec.Operands) -> bool:
    device = cuda.gpu_at_hand()
    if not _prefers_kernels(name, problem, operands, device):
        return False
    fault = None if device is None else cuda.fault(name, problem, operands, device)
    if fault is not None:
        selftest.warn(fault)
    return fault is None


def _prefers_kernels(
    name: cuda.Pass, problem: spec.Problem, operands: spec.Operands, device: jax.Device | None
) -> bool:
    """Whether kernels are faster on a GPU; without one, whether they are on any."""
    if 0 in (operands.batch, *operands.query.shape[1:3], operands.key.shape[1]):
        return False  # nothing runs
    gpus = cuda.GPUS if device is None else [selftest.capability(device)]
    try:
        files = [file for gpu in gpus for file, _ in cuda.kernels(name, problem, operands, gpu)]
    except ValueError:  # there are none for such sizes
        return False
    return any(file not in cuda.KERNELS for file in files) or _plain_kernels_are_faster(name, problem, operands)


def _plain_kernels_are_faster(name: cuda.Pass, problem: spec.Problem, operands: spec.Operands) -> bool:
    speed = _SPEEDS[name]
    (_, rows, heads, width), keys = operands.query.shape, operands.key.shape[1]
    value_width = operands.value.shape[3]
    low, high = problem.band if operands.lower is None else (None, None)
    hidden = (0 if low is None else _sum_clipped(rows, low, keys)) + (
        0 if high is None else rows * keys - _sum_clipped(rows, high, keys)
    )
    seen = min(max(rows * keys - hidden, 0) / rows + _TILE, keys)  # by a row
    rows_computed = -(-rows // _TILE) * _TILE
    pairs = operands.batch * heads * rows_computed * seen
    flops = speed.flops[min(x for x in speed.flops if x >= max(width, value_width))]
    by_cuda = speed.launch + pairs * speed.products * (width + value_width) / flops
    steps, logits = tiled.work_on_accelerators(problem, operands)
    return by_cuda < steps * speed.step + logits / speed.logits


def _sum_clipped(rows: int, distance: int, keys: int) -> int:
    """The sum of `i + distance` cut to [0, keys] over the rows `i`."""
    first, end = max(0, -distance), min(rows, keys - distance)  # the rows that are not cut
    between = (first + end - 1) * max(end - first, 0) // 2 + distance * max(end - first, 0)
    return between + keys * (rows - max(end, 0)) if end < rows else between
