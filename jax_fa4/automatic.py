"""The automatic choice where it depends on the platform: the CUDA kernels on NVIDIA GPUs, `tiled` elsewhere.

A program may be lowered for a platform that is not the one it is traced on, so the choice is made in the lowering.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, lax

from jax_fa4 import cuda, tiled
from jax_fa4 import problem as spec


def forward(problem: spec.Problem, operands: spec.Operands) -> tuple[Array, Array, Array]:
    """As every implementation's `forward`."""
    return lax.platform_dependent(
        operands, cuda=functools.partial(cuda.forward, problem), default=functools.partial(tiled.forward, problem)
    )


def backward(problem: spec.Problem, *arrays: Any, with_bias: bool) -> spec.Gradients:
    """As every implementation's `backward`."""
    by_cuda, by_tiled = (functools.partial(module.backward, problem, with_bias=with_bias) for module in (cuda, tiled))
    return lax.platform_dependent(*arrays, cuda=by_cuda, default=by_tiled)
