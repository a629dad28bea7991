"""The automatic choice between `cuda`, `pallas` and `tiled`, for each pass the one that is fastest.

CUDA kernels for tensor cores are taken wherever there are any for the call. A pass whose kernels fail their self-test
on the GPU at hand is given to the next best, with a warning.

A program may be lowered for a platform that is not the one it is traced on, so where kernels are preferred, the
lowering decides: they run on NVIDIA GPUs, and `tiled` elsewhere. Where the process has no GPU `pallas` is no choice,
since its lowering has to know for which GPU it is. Nor is it where products of float32 must not be those of TF32, or
on GPUs of compute capability 10.x: Triton keeps sums in their tensor memory, and which block sizes fit is not known.

The plain CUDA kernels multiply on the FMA units, `pallas` and `tiled` on tensor cores; but `tiled` goes through memory
with every logit, in large blocks whose hidden part is lost time, and each of its steps is a dozen launches. The
estimates below rest on what an H200 took for the calls of benchmarks/attention.py. For the backward of float32 of width
128, where `tiled` may be faster than `pallas`, twelve more calls were timed (jax 0.11.2, TF32, 512 to 8192 tokens; no
mask, causal, windows): `tiled` took from 0.67 to 8.4 times as long. The estimate takes the slower of the two in none.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_fa4 import cuda, pallas, selftest, tiled
from jax_fa4 import problem as spec


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The speed of kernels in one pass, in the units of an H200's second.

    Attributes:
      flops: by the widths that they compute with, counting the products of the algorithm (which those of a backward
        partly repeat).
      launch: seconds.
      tile: rows and keys that they take at a time.
    """

    flops: dict[int, float]
    launch: float
    tile: int

    def seconds(self, problem: spec.Problem, operands: spec.Operands, products: int, packs: bool) -> float:
        """What they take.

        Args:
          problem: the problem.
          operands: its operands.
          products: matrix products of the algorithm.
          packs: whether the query heads of a group share a tile.
        """
        (_, rows, heads, width), (_, keys, kv_heads, _) = operands.query.shape, operands.key.shape
        value_width = operands.value.shape[3]
        low, high = problem.band if operands.lower is None else (None, None)
        hidden = (0 if low is None else _sum_clipped(rows, low, keys)) + (
            0 if high is None else rows * keys - _sum_clipped(rows, high, keys)
        )
        group = heads // kv_heads if packs else 1
        seen = min(max(rows * keys - hidden, 0) / rows + self.tile, keys)  # by a row
        tiles = -(-rows * group // self.tile)
        pairs = operands.batch * (heads // group) * tiles * self.tile * seen
        flops = self.flops[min(x for x in self.flops if x >= max(width, value_width))]
        # Few tiles leave multiprocessors without work.
        idle = max(1.0, _MULTIPROCESSORS / (operands.batch * (heads // group) * tiles)) if packs else 1.0
        return self.launch + idle * pairs * products * (width + value_width) / flops


@dataclasses.dataclass(frozen=True)
class _Speed:
    """Of one pass, in the units of an H200's second.

    Attributes:
      products: matrix products of the algorithm.
      plain: the plain CUDA kernels.
      pallas: by the bytes of a number.
      step: of `tiled`, whatever the step's size.
      logits: of `tiled` in a second, whatever the head's width.
    """

    products: int
    plain: _Kernels
    pallas: dict[int, _Kernels]
    step: float
    logits: float


_MULTIPROCESSORS = 132
_SPEEDS: dict[cuda.Pass, _Speed] = {
    "forward": _Speed(
        2,
        _Kernels({64: 29e12, 128: 31e12, 256: 19e12}, 10e-6, 64),
        {
            2: _Kernels({64: 380e12, 128: 410e12, 256: 370e12}, 15e-6, 64),
            4: _Kernels({64: 140e12, 128: 93e12, 256: 30e12}, 15e-6, 64),
        },
        80e-6,
        1.5e11,
    ),
    "backward": _Speed(
        5,
        _Kernels({64: 18e12, 128: 17e12, 256: 11e12}, 20e-6, 64),
        {
            2: _Kernels({64: 310e12, 128: 340e12, 256: 190e12}, 40e-6, 64),
            4: _Kernels({64: 75e12, 128: 54e12, 256: 10e12}, 40e-6, 64),
        },
        200e-6,
        8.5e10,
    ),
}


def forward(problem: spec.Problem, operands: spec.Operands) -> tuple[Array, Array, Array]:
    """As every implementation's `forward`."""
    by_tiled = functools.partial(tiled.forward, problem)
    chosen = _chosen("forward", problem, operands, cuda.gpu_at_hand(), warn=True)
    if chosen is tiled:
        return by_tiled(operands)
    by_cuda = functools.partial(cuda.forward, problem, place=cuda.in_cuda_branch)
    by_kernels = by_cuda if chosen is cuda else functools.partial(pallas.forward, problem, in_cuda_branch=True)
    return lax.platform_dependent(operands, cuda=by_kernels, default=by_tiled)


def backward(problem: spec.Problem, operands: spec.Operands, *results: Any, with_bias: bool) -> spec.Gradients:
    """As every implementation's `backward`."""
    by_tiled = functools.partial(tiled.backward, problem, with_bias=with_bias)
    chosen = _chosen("backward", problem, operands, cuda.gpu_at_hand(), warn=True)
    if chosen is tiled:
        return by_tiled(operands, *results)
    by_cuda = functools.partial(cuda.backward, problem, with_bias=with_bias, place=cuda.in_cuda_branch)
    by_pallas = functools.partial(pallas.backward, problem, with_bias=with_bias, in_cuda_branch=True)
    by_kernels = by_cuda if chosen is cuda else by_pallas
    return lax.platform_dependent(operands, *results, cuda=by_kernels, default=by_tiled)


def on_gpus(problem: spec.Problem, operands: spec.Operands, device: jax.Device) -> tuple[ModuleType, ModuleType]:
    """What `forward` and `backward` run where this GPU is at hand."""
    forward, backward = (_chosen(name, problem, operands, device) for name in cuda.PASSES)
    return forward, backward


def why_not(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> str | None:
    """Why this is no choice: the device is no GPU that kernels run on, or no kernel can do it."""
    reason = cuda.unsupported_on(problem, operands, device)
    return reason if reason is None or _why_not_pallas(problem, operands, device) is not None else None


def _why_not_pallas(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> str | None:
    if device is None or device.platform != "gpu":
        return "Kernels of Pallas are only chosen for a GPU at hand."
    if str(getattr(device, "compute_capability", "")).startswith("10."):
        return "Kernels of Pallas are not chosen for GPUs of compute capability 10.x."
    if operands.query.dtype == np.float32 and pallas.precision() == "highest":
        return "Kernels of Pallas are only chosen for products of tensor cores."
    return pallas.unsupported_on(problem, operands, device)


def _chosen(
    name: cuda.Pass, problem: spec.Problem, operands: spec.Operands, device: jax.Device | None, *, warn: bool = False
) -> ModuleType:
    """What a pass runs on a GPU; without one, what it runs on GPUs elsewhere."""
    if operands.is_empty:
        return tiled  # nothing runs
    speed = _SPEEDS[name]
    steps, logits = tiled.work_on_accelerators(problem, operands)
    seconds: dict[ModuleType, float] = {tiled: steps * speed.step + logits / speed.logits}
    if _why_not_pallas(problem, operands, device) is None:
        kernels = speed.pallas[operands.query.dtype.itemsize]
        seconds[pallas] = kernels.seconds(problem, operands, speed.products, packs=True)
    files = _cuda_files(name, problem, operands, device)
    if files:
        tensor_cores = any(file not in cuda.KERNELS for file in files)
        plain = speed.plain.seconds(problem, operands, speed.products, packs=False)
        seconds[cuda] = 0.0 if tensor_cores else plain
    faults = []
    while (best := min(seconds, key=lambda one: seconds[one])) is not tiled and device is not None:
        if (fault := best.fault(name, problem, operands, device)) is None:
            break
        faults.append(fault)
        del seconds[best]
    for fault in faults if warn else []:
        selftest.warn(fault, best.__name__.rpartition(".")[2])
    return best


def _cuda_files(
    name: cuda.Pass, problem: spec.Problem, operands: spec.Operands, device: jax.Device | None
) -> list[str]:
    """The files of the CUDA kernels that a pass would launch on a GPU; without one, on one of any kind."""
    if cuda.unsupported_on(problem, operands, device) is not None:
        return []
    gpus = cuda.GPUS if device is None else [selftest.capability(device)]
    try:
        return [file for gpu in gpus for file, _ in cuda.kernels(name, problem, operands, gpu)]
    except ValueError:  # there are none for such sizes
        return []


def _sum_clipped(rows: int, distance: int, keys: int) -> int:
    """The sum of `i + distance` cut to [0, keys] over the rows `i`."""
    first, end = max(0, -distance), min(rows, keys - distance)  # the rows that are not cut
    between = (first + end - 1) * max(end - first, 0) // 2 + distance * max(end - first, 0)
    return between + keys * (rows - max(end, 0)) if end < rows else between
