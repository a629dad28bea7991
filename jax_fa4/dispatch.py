"""The implementations by name, and the choice among them."""

from __future__ import annotations

from types import ModuleType

import jax

from jax_fa4 import automatic, cuda, pallas, reference, tiled
from jax_fa4 import problem as spec
from jax_fa4.emulated import implementation as emulated

# In the order of preference of `implementation=None`; the others are only run when named.
_AUTOMATIC: tuple[ModuleType, ...] = (automatic, tiled)
NAMES: dict[str, ModuleType] = {
    "cuda": cuda,
    "pallas": pallas,
    "tiled": tiled,
    "xla": tiled,  # jax.nn's name for what runs everywhere
    "emulated": emulated,
    "reference": reference,
}


def find(name: str | None) -> list[ModuleType]:
    """The implementations that `implementation=name` allows, best first; raises ValueError for an unknown name."""
    if name is None:
        return list(_AUTOMATIC)
    if isinstance(name, str) and name == "cudnn":
        raise ValueError(
            "implementation='cudnn' is jax.nn's: call jax.nn.dot_product_attention for it, "
            f"or choose one of {_allowed()}."
        )
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f"implementation must be one of {_allowed()}, but got {name!r}.")
    return [NAMES[name]]


def choose(
    name: str | None, problem: spec.Problem, operands: spec.Operands, device: jax.Device | None = None
) -> ModuleType:
    """The first allowed implementation that supports the problem; raises NotImplementedError with every reason.

    Without a device the choice is made for whatever the call is lowered for; the GPU at hand stands for all GPUs.
    """
    if name is None and device is None:
        device = cuda.gpu_at_hand()
    reasons = []
    for implementation in find(name):
        reason = implementation.why_not(problem, operands, device)
        if reason is None:
            return implementation
        reasons.append(reason)
    raise NotImplementedError(" ".join(reasons))


def passes(
    name: str | None, problem: spec.Problem, operands: spec.Operands, device: jax.Device
) -> tuple[ModuleType, ModuleType]:
    """What runs forward and backward on a device; raises as `choose`."""
    chosen = choose(name, problem, operands, device)
    return automatic.on_gpus(problem, operands, device) if chosen is automatic else (chosen, chosen)


def _allowed() -> str:
    return ", ".join(["None", *map(repr, NAMES)])
