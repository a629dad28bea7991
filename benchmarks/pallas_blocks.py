"""Measures block sizes of the `pallas` kernels on this machine's GPU and prints them as rows of their table.

    python benchmarks/pallas_blocks.py [--kernels REGEX] [--widths D...] [--dtype DTYPE]

Every kernel is compiled with every block size that the GPU has the shared memory for, at 16384 tokens of S = 4096 and a
hidden size of 2048, and timed with and without causality. The best has the least product of both times. Each line says
how much faster it is than what jax_fa4/pallas/blocks.py holds for such a GPU, where the row belongs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_fa4 import selftest
from jax_fa4.pallas import backward_kernels, forward_kernel
from jax_fa4.pallas.blocks import KERNELS, Blocks, Kernel, blocks, padded, shared_bytes, shared_limit
from jax_fa4.problem import Operands, Problem

_TOKENS, _LENGTH, _HIDDEN = 16384, 4096, 2048
_BURST = 0.02  # seconds of calls between two readings of the clock
_MASKS = {"full": (None, None), "causal": (None, 1)}


@dataclasses.dataclass
class Trial:
    """One kernel with one choice of blocks under one mask; `seconds` is None where it did not compile or run."""

    kernel: Kernel
    blocks: Blocks
    mask: str
    program: Callable[..., Any] | None = None
    seconds: float | None = None
    reason: str | None = None


def candidates(kernel: Kernel, width: int, dtype: np.dtype, limit: int) -> Iterator[Blocks]:
    """Block sizes that are worth a trial: those whose accumulators and logits about fill the registers."""
    for rows, keys, warps, stages in itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
        found = Blocks(rows, keys, warps, stages)
        held = {"forward": rows * padded(width), "query gradients": rows * padded(width)}.get(
            kernel, 2 * keys * padded(width)
        )
        logits = rows * keys * (1 if kernel == "forward" else 2)
        registers = (held + logits) / (32 * warps)  # of a thread, float32
        if 40 <= registers <= 260 and shared_bytes(kernel, found, (width, width), dtype) <= limit:
            yield found


def operands(width: int, dtype: np.dtype) -> tuple[Operands, tuple[Array, Array, None, Array, None]]:
    """Random operands, and what the backward takes besides; its speed does not depend on the latter's values."""
    shape = (_TOKENS // _LENGTH, _LENGTH, _HIDDEN // width, width)
    q, k, v, out, dout = (jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 5))
    lse = jnp.full(shape[:3], np.log(_LENGTH), np.float32)
    return Operands(q, k, v, jnp.full(1, width**-0.5, np.float32)), (out, lse, None, dout, None)


def run(trial: Trial, problem: Problem, operands: Operands, results: Any) -> Any:
    """The results of one kernel."""
    if trial.kernel == "forward":
        return forward_kernel.forward(problem, trial.blocks, False, operands)
    # What is not returned is not computed: one kernel runs, and what both need.
    gradients = backward_kernels.backward(problem, lambda *_: trial.blocks, False, operands, *results)
    return (gradients.key, gradients.value) if trial.kernel == "key gradients" else (gradients.query, gradients.scale)


def compiled(trial: Trial, arguments: Sequence[Any]) -> None:
    """Compiles a trial, or notes why it does not."""
    problem = Problem(band=_MASKS[trial.mask])
    try:
        trial.program = jax.jit(functools.partial(run, trial, problem)).lower(*arguments).compile()
    except Exception as error:  # whatever a compiler finds wrong
        trial.reason = f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"


def timed(trial: Trial, arguments: Sequence[Any]) -> None:
    """Median seconds of a call."""
    if trial.program is None:
        return
    try:
        jax.block_until_ready(trial.program(*arguments))
        start = time.perf_counter()
        jax.block_until_ready(trial.program(*arguments))
        calls = max(1, math.ceil(_BURST / (time.perf_counter() - start)))
        readings = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready([trial.program(*arguments) for _ in range(calls)])
            readings.append((time.perf_counter() - start) / calls)
        trial.seconds = statistics.median(readings)
    except Exception as error:
        trial.reason = f"{type(error).__name__}: {str(error)[:150]}"
    trial.program = None


def measure(trials: list[Trial], arguments: Sequence[Any]) -> None:
    """Compiles side by side, then times one after the other."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(functools.partial(compiled, arguments=arguments), trials))
    for trial in trials:
        timed(trial, arguments)


def score(trials: list[Trial]) -> dict[Blocks, float]:
    """The geometric mean of the times under both masks, for each choice of blocks that has both."""
    times: dict[Blocks, list[float]] = {}
    for trial in trials:
        if trial.seconds is not None:
            times.setdefault(trial.blocks, []).append(trial.seconds)
    return {one: statistics.geometric_mean(found) for one, found in times.items() if len(found) == len(_MASKS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=".", help="regular expression of kernels' names")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"needs a GPU, but JAX's default device is of platform {device.platform}")
    capability, dtype = selftest.capability(device), jnp.dtype(options.dtype)
    print(f"{device.device_kind}, compute capability {capability}, jax {jax.__version__}, {dtype}")
    for width in options.widths:
        arguments = operands(width, dtype)
        for kernel in (one for one in KERNELS if re.search(options.kernels, one)):
            tried = list(candidates(kernel, width, dtype, shared_limit(capability)))
            held = blocks(kernel, capability, (width, width), dtype, _LENGTH, _LENGTH)
            trials = [Trial(kernel, one, mask) for one in dict.fromkeys([held, *tried]) for mask in _MASKS]
            measure(trials, arguments)
            scores = score(trials)
            best = min(scores, key=lambda one: scores[one])
            gain = f"{scores[held] / scores[best]:.2f} times as fast as the table's" if held in scores else "new"
            print(
                f"{kernel:16} {(dtype.itemsize, padded(width))}: Blocks({best.rows}, {best.keys}, {best.warps}, "
                f"{best.stages}),  # {scores[best] * 1e3:.3f} ms, {gain}, of {len(scores)} that ran"
            )


if __name__ == "__main__":
    main()
