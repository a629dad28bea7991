"""`emulated`: the CUDA kernels, executed on a CPU by the emulator.

The custom calls of `cuda` with handlers for the CPU: they make the same plan for the GPU that is emulated, and run it
with the PTX of the same kernels. It is slow; it is how the kernels are tested where there is no such GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax import Array, lax

from jax_fa4 import cuda, native
from jax_fa4 import problem as spec

Arch = Literal["sm_80", "sm_90", "sm_100", "sm_103", "sm_120"]
Mode = Literal["strict", "relaxed"]
_PLATFORM = "implementation='emulated' runs on the CPU, but this is for the platform '{platform}'."


@dataclasses.dataclass(frozen=True)
class _Options:
    arch: Arch = "sm_100"
    mode: Mode = "strict"
    seed: int = 0
    trace: bool = False
    sm_count: int | None = None


# Part of the key of jit's caches: what was traced under other options is traced again.
_options = jax.make_user_context(_Options())


class Emulation:
    """What was emulated inside of an `options` block."""

    def __init__(self) -> None:
        self._first = native.extension().next_emulated_launch()
        self._end: int | None = None

    def close(self) -> None:
        """Ends the list of launches."""
        self._end = native.extension().next_emulated_launch()

    @property
    def launches(self) -> list[Any]:
        """The launches of the whole process, whatever thread called, that have ended, in that order.

        Each has `kernel`, `module`, `target`, `grid`, `block`, `cluster`, `instructions`, `reports` and `trace`. JAX
        runs asynchronously: inside of the block, wait for results (`jax.block_until_ready`) before you look.

        A trace has `events`, the first 2^20 of its launch, `missing`, the number of later ones, and `chrome_json()`.
        All traces of the process share room for 2^21 events: the oldest give way, and are None for who asks again.
        """
        launches = native.extension().emulated_launches(self._first)
        return [launch for launch in launches if self._end is None or launch.id < self._end]


@contextlib.contextmanager
def options(
    *,
    arch: Arch = "sm_100",
    mode: Mode = "strict",
    seed: int = 0,
    trace: bool = False,
    sm_count: int | None = None,
) -> Iterator[Emulation]:
    """Within this block, `implementation="emulated"` runs so; yields what lists the launches.

    What counts is where a call is traced: one that is differentiated runs backward under the options around the
    `jax.grad`, or around the call of the pullback that `jax.vjp` returned.

    Args:
      arch: the GPU that is emulated: "sm_80" (A100), "sm_90" (H200), "sm_100" (B200), "sm_103" (B300) or "sm_120"
        (RTX PRO 6000).
      mode: "strict" also reports what hardware is known to forgive, and any report fails the call with an error that
        carries it; in "relaxed" only what hardware does not survive does.
      seed: of the scheduler that interleaves warps. The same seed gives the same run.
      trace: whether launches record what asynchronous operations and waits do, as docs/emulator.md tells.
      sm_count: how many multiprocessors the GPU has; by default as many as that GPU. With few, a kernel whose CTAs stay
        for several tasks has several for each in a small problem.

    Raises:
      ValueError: an option is not one of those.
    """
    for name, value, allowed in (("arch", arch, get_args(Arch)), ("mode", mode, get_args(Mode))):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, but got {value!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be an integer from 0 to 2^63 - 1, but got {seed!r}.")
    if not isinstance(trace, bool):
        raise ValueError(f"trace must be True or False, but got {trace!r}.")
    if sm_count is not None:
        if isinstance(sm_count, bool) or not isinstance(sm_count, int | np.integer) or not 1 <= sm_count <= 1 << 16:
            raise ValueError(f"sm_count must be an integer from 1 to 2^16, or None, but got {sm_count!r}.")
        sm_count = int(sm_count)
    run = Emulation()
    try:
        with _options(_Options(arch, mode, int(seed), trace, sm_count)):
            yield run
    finally:
        run.close()


def why_not(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> str | None:
    """As every implementation's `why_not`."""
    if device is not None and device.platform != "cpu":
        return _PLATFORM.format(platform=device.platform)
    return cuda.unsupported("emulated", operands) or _why_not_this_cpu()


def forward(problem: spec.Problem, operands: spec.Operands) -> tuple[Array, Array, Array]:
    """As every implementation's `forward`."""
    return cuda.call_forward("jax_fa4_emulated_forward_v1", _attributes(), _on_cpu, problem, operands)


def backward(problem: spec.Problem, *arrays: Any, with_bias: bool) -> spec.Gradients:
    """As every implementation's `backward`."""
    del with_bias
    return cuda.call_backward("jax_fa4_emulated_backward_v1", _attributes(), _on_cpu, problem, *arrays)


def trace_context() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Gives back the options under which a call is traced, where a part of it is traced again later."""
    return functools.partial(_options, _options.value)


def _attributes() -> dict[str, Any]:
    chosen = _options.value
    attributes: dict[str, Any] = {
        "target": chosen.arch,
        "strict": chosen.mode == "strict",
        "seed": np.int64(chosen.seed),
        "trace": chosen.trace,
    }
    if chosen.sm_count is not None:
        attributes["sm_count"] = np.int32(chosen.sm_count)
    return attributes


def _why_not_this_cpu() -> str | None:
    try:
        native.emulator()
    except RuntimeError as error:
        return str(error)
    return None


def _on_cpu(call: Callable[..., Any], arrays: Any) -> Any:
    return lax.platform_dependent(*arrays, cpu=call, default=cuda.refusal(call, _PLATFORM))
