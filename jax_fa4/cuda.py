"""`cuda`: the CUDA kernels, as XLA FFI custom calls.

A call is lowered to a custom call whose handler (csrc/host/) makes a plan and launches the kernels that this package
holds for the GPU at hand. Which ones these are is decided when the call runs: a program lowered away from a GPU runs
on every GPU that there is a kernel for, and fails on others with a sentence that names their compute capability.

Kernels that have not been seen on the GPU at hand are tested there before their first use: see `selftest`.

`emulated` makes the same calls to handlers for the CPU, which run the same plan in the emulator.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_fa4 import native, selftest
from jax_fa4 import problem as spec

CUSTOM_CALLS = ("jax_fa4_forward_v1", "jax_fa4_backward_v1")
"""Targets of the custom calls in programs for NVIDIA GPUs.

A target's operands and attributes never change; others would get another name. See `export_checks`.
"""

_DTYPES = ("float16", "bfloat16", "float32")
_MOST_WIDTH = 256
# D and Dv by which every kernel is reached: those that kernels are compiled for, and three that the copy engine does
# not take.
_WIDTHS = ((64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (60, 60), (124, 124), (252, 252))
_OLDEST = (8, 0)
KERNELS = ("sm80_forward", "sm80_backward")
"""The files of the plain kernels, which serve every call that any kernel serves."""
GPUS: tuple[selftest.Capability, ...] = ((8, 0), (9, 0), (10, 0), (10, 3), (12, 0))
"""Compute capabilities of GPUs, one of each kind for which other kernels may be chosen."""

PLATFORM = "implementation='{name}' needs {needs}, but this is for the platform '{platform}'."
"""What implementations say of a platform that they are not for."""
_NEEDS = "an NVIDIA GPU"
_PLATFORM = PLATFORM.format(name="cuda", needs=_NEEDS, platform="{platform}")


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What allows the custom calls of this package in an exported program.

    `jax.export.export(f, platforms=["cuda"], disabled_checks=jax_fa4.export_checks())` exports a program for NVIDIA
    GPUs, also on a machine without one. The process that runs it calls `register_custom_calls` first.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]


def register_custom_calls() -> None:
    """Makes the custom calls known to this process, for a program that was exported by another one.

    Calling `attention` does so too.

    Raises:
      ImportError: the package's compiled extension cannot be loaded.
    """
    native.register()


def why_not(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> str | None:
    """Why the kernels do not support a problem, or the device (None: whatever it is lowered for); None if they do."""
    reason = unsupported_on(problem, operands, device)
    if reason is None and device is not None:
        reason = fault("forward", problem, operands, device)
    return reason


def unsupported_on(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> str | None:
    """As `why_not`, apart from the self-test."""
    if device is None:
        return unsupported("cuda", operands)
    reason = why_not_gpu("cuda", device) or unsupported("cuda", operands)
    return reason or _without_kernels(problem, operands, selftest.capability(device))


def why_not_gpu(name: str, device: jax.Device, needs: str = _NEEDS) -> str | None:
    """Why implementation `name`, which needs such devices, has no kernels for one that is no CPU; None if it may."""
    if device.platform != "gpu":
        return PLATFORM.format(name=name, needs=needs, platform=device.platform)
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.replace(".", "").isdigit():  # another maker's GPU
        return f"implementation='{name}' needs {needs}, but this is {device.device_kind}."
    if selftest.capability(device) < _OLDEST:
        return f"implementation='{name}' needs a GPU of compute capability 8.0 or newer, but this has {capability}."
    return None


def _without_kernels(problem: spec.Problem, operands: spec.Operands, gpu: selftest.Capability) -> str | None:
    try:
        launched = [file for name in PASSES for file, _ in kernels(name, problem, operands, gpu)]
    except ValueError as error:
        return f"implementation='cuda' cannot do this: {error}"
    try:
        for file in dict.fromkeys([*KERNELS, *launched]):
            native.extension().kernel_file(file, *gpu)
    except RuntimeError as error:
        return f"implementation='cuda' needs what the package should hold: {error}"
    return None


def gpu_at_hand() -> jax.Device | None:
    """The GPU that stands for all GPUs while a call is traced: the default device, or another of this process."""
    default = default_device()
    if default.platform == "gpu":
        return default
    try:
        return jax.local_devices(backend="gpu")[0]
    except RuntimeError:  # there is none
        return None


def default_device() -> jax.Device:
    """The device that JAX would choose."""
    chosen = getattr(jax.config, "jax_default_device")  # noqa: B009  (of no type that mypy knows)
    return jax.devices(chosen)[0] if chosen is None or isinstance(chosen, str) else chosen


def kernels(name: Pass, problem: spec.Problem, operands: spec.Operands, gpu: selftest.Capability) -> selftest.Kernels:
    """What a pass launches on GPUs of a compute capability, of operands that `unsupported` has nothing against.

    Raises:
      ValueError: there is no kernel for such sizes.
    """
    if operands.is_empty:
        return ()  # no call is made
    (_, rows, heads, _), keys = operands.query.shape, operands.key.shape[1]
    dtype, float32 = operands.query.dtype.name, "float32"
    query, key, value = ([*x.shape[:3], x.shape[3] or 1] for x in operands[:3])
    lse = [operands.batch, rows, heads]
    out = spec.out_dtype(problem, operands).name, [*lse, value[3]]
    none = ("int32", [0])
    bounds = [none if x is None else ("int32", list(x.shape)) for x in (operands.lower, operands.upper)]
    arrays = [(dtype, query), (dtype, key), (dtype, value), (float32, list(operands.scale.shape)), *bounds]
    arrays += [out, (float32, lse), (float32, lse)]
    attributes = _attributes(problem, operands)
    multiprocessors, cache = 1, 0  # They decide about the grid, not about the kernels.
    if name == "forward":
        plan = native.extension().forward_plan(gpu, multiprocessors, cache, arrays, *attributes.values())
    else:
        gradients = [(dtype, [operands.batch, *x[1:]]) for x in (query, key, value)]
        workspace = native.extension().backward_workspace_bytes(
            *lse[:2], keys, heads, key[2], query[3], value[3], operands.query.dtype.itemsize
        )
        arrays += [out, (float32, [0]), *gradients, (float32, lse), ("uint8", [workspace])]
        plan = native.extension().backward_plan(
            gpu, multiprocessors, cache, arrays, *attributes.values(), problem.deterministic
        )
    return tuple((launch["module"], launch["kernel"]) for launch in plan)


def fault(name: Pass, problem: spec.Problem, operands: spec.Operands, device: jax.Device) -> str | None:
    """What the self-test finds wrong with a pass's kernels on a GPU that `unsupported_on` has nothing against."""
    return selftest.fault_of(PASSES[name], problem, operands, device)


def unsupported(name: str, operands: spec.Operands) -> str | None:
    """Why the kernels do not support a problem anywhere, as a sentence about implementation `name`; None if they do."""
    return unsupported_operands(name, operands) or native.why_not()


def unsupported_operands(name: str, operands: spec.Operands) -> str | None:
    """Why no kernels of this package support such operands, those of Pallas neither; None if some do."""
    dtype = operands.query.dtype.name
    widths = operands.query.shape[-1], operands.value.shape[-1]
    if dtype not in _DTYPES:
        return f"implementation='{name}' supports the dtypes {', '.join(_DTYPES)}, but got {dtype}."
    if max(widths) > _MOST_WIDTH:
        return (
            f"implementation='{name}' supports head widths up to {_MOST_WIDTH}, but got D={widths[0]}, Dv={widths[1]}."
        )
    for argument in ("bias", "mask"):
        if getattr(operands, argument) is not None:
            return (
                f"implementation='{name}' does not support {argument}; causality, windows, lengths, segment ids and "
                "row_bounds are supported without it."
            )
    return None


Pass = Literal["forward", "backward"]
Place = Callable[[Callable[..., Any], Any], Any]
"""Calls a function of arrays on the one platform that it is for, and refuses to be lowered for another."""


def _on_gpu(call: Callable[..., Any], arrays: Any) -> Any:
    return lax.platform_dependent(*arrays, cuda=call, default=refusal(call, _PLATFORM))


def in_cuda_branch(call: Callable[..., Any], arrays: Any) -> Any:
    """For a caller that stands in the `cuda` branch of a `lax.platform_dependent` already.

    A second one in there would be lowered for all platforms of a program for several, and refuse the others.
    """
    return call(*arrays)


def forward(problem: spec.Problem, operands: spec.Operands, *, place: Place = _on_gpu) -> tuple[Array, Array, Array]:
    """Attention of `operands`, sorted already: out (B, T, N, Dv) in query's dtype, lse and its rounding (B, T, N).

    Raises:
      NotImplementedError: the kernels fail their self-test on the GPU at hand.
    """
    selftest.refuse(PASSES["forward"], unsupported_on, problem, operands, gpu_at_hand())
    return call_forward(CUSTOM_CALLS[0], {}, place, problem, operands)


def backward(
    problem: spec.Problem, operands: spec.Operands, *results: Any, with_bias: bool, place: Place = _on_gpu
) -> spec.Gradients:
    """Gradients of `forward`; the arrays are those of `call_backward`. Raises as `forward`."""
    del with_bias  # there is none
    selftest.refuse(PASSES["backward"], unsupported_on, problem, operands, gpu_at_hand())
    return call_backward(CUSTOM_CALLS[1], {}, place, problem, operands, *results)


PASSES: dict[Pass, selftest.Pass] = {
    "forward": selftest.Pass("cuda", "forward", functools.partial(kernels, "forward"), forward),
    "backward": selftest.Pass("cuda", "backward", functools.partial(kernels, "backward"), backward, deterministic=True),
}


def unseen_kernels(device: jax.Device) -> list[tuple[selftest.Pass, selftest.Kernels, Any, tuple[int, int]]]:
    """`selftest.unseen` of all kernels, on a GPU that `why_not_gpu` has nothing against."""
    return selftest.unseen(PASSES.values(), itertools.product(map(jnp.dtype, _DTYPES), _WIDTHS), device)


def call_forward(
    target: str, attributes: Mapping[str, Any], place: Place, problem: spec.Problem, operands: spec.Operands
) -> tuple[Array, Array, Array]:
    """`forward` by the FFI handler `target`, with further attributes."""
    value_width = operands.value.shape[3]
    operands = _widened(operands)
    lse = jax.ShapeDtypeStruct((operands.batch, *operands.query.shape[1:3]), np.float32)
    out = jax.ShapeDtypeStruct((*lse.shape, operands.value.shape[3]), spec.out_dtype(problem, operands))
    call = _ffi_call(target, (out, lse, lse), {**_attributes(problem, operands), **attributes})
    found, *rest = place(call, _arrays(operands))
    return _narrowed(found, value_width), *rest


def call_backward(
    target: str,
    attributes: Mapping[str, Any],
    place: Place,
    problem: spec.Problem,
    operands: spec.Operands,
    out: Array,
    lse: Array,
    lse_rounding: Array | None,
    dout: Array,
    dlse: Array | None,
) -> spec.Gradients:
    """`backward` by the FFI handler `target`, with further attributes."""
    widths = [x.shape[3] for x in operands[:3]]
    operands, out, dout = _widened(operands), _at_least_one_wide(out), _at_least_one_wide(dout)
    query, key, value = operands[:3]
    batch, rows, heads = lse.shape
    results = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (query, key, value)]
    dscale = jax.ShapeDtypeStruct(lse.shape, np.float32)
    workspace = native.extension().backward_workspace_bytes(
        batch, rows, key.shape[1], heads, key.shape[2], query.shape[3], value.shape[3], query.dtype.itemsize
    )
    call = _ffi_call(
        target,
        (*results, dscale, jax.ShapeDtypeStruct((workspace,), np.uint8)),
        {**_attributes(problem, operands), "deterministic": problem.deterministic, **attributes},
    )
    rounding = jnp.zeros_like(lse) if lse_rounding is None else lse_rounding
    dlse = jnp.zeros(0, np.float32) if dlse is None else dlse.astype(np.float32)
    *found, dscale, _ = place(call, (*_arrays(operands), out, lse, rounding, dout, dlse))
    dquery, dkey, dvalue = map(_narrowed, found, widths)
    return spec.Gradients(dquery, dkey, dvalue, dscale.sum((1, 2)))


def _at_least_one_wide(x: Array) -> Array:
    """An array of heads for kernels, which take no empty arrays: to a width of 0, a column of zeros adds nothing."""
    return x if x.shape[3] else jnp.zeros((*x.shape[:3], 1), x.dtype)


def _widened(operands: spec.Operands) -> spec.Operands:
    query, key, value = map(_at_least_one_wide, operands[:3])
    return operands._replace(query=query, key=key, value=value)


def _narrowed(x: Array, width: int) -> Array:
    return x if width else x[..., :0]


def _arrays(operands: spec.Operands) -> tuple[Array, ...]:
    """The operands that every handler takes. Row bounds of no elements stand for the band's."""
    none = jnp.zeros(0, np.int32)
    bounds = (none if x is None else x for x in (operands.lower, operands.upper))
    return (*operands[:3], operands.scale, *bounds)


def _attributes(problem: spec.Problem, operands: spec.Operands) -> dict[str, Any]:
    """The attributes that every handler takes. A side of the band that hides nothing is -T or S."""
    low, high = problem.band if operands.lower is None else (None, None)
    return {
        "band_low": np.int32(-operands.query.shape[1] if low is None else low),
        "band_high": np.int32(operands.key.shape[1] if high is None else high),
        "softcap": np.float32(problem.softcap or 0),
    }


def _ffi_call(target: str, results: tuple[jax.ShapeDtypeStruct, ...], attributes: dict[str, Any]) -> Callable[..., Any]:
    native.register()

    def call(*arrays: Array) -> Any:
        arrays = spec.varied(arrays)
        of_type = jax.typeof(arrays[0])
        typed = results
        if spec.varying_axes(arrays[0]):
            here = NamedSharding(of_type.sharding.mesh, PartitionSpec())
            typed = tuple(
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here, manual_axis_type=of_type.mat) for x in results
            )
        return jax.ffi.ffi_call(target, typed)(*arrays, **attributes)

    return call


def refusal(call: Callable[..., Any], sentence: str) -> Callable[..., Any]:
    """A function of `call`'s arguments and results whose lowering raises NotImplementedError.

    Args:
      call: is only traced.
      sentence: of the error, with `{platform}` for what it is lowered for.
    """

    def refuse(*arrays: Array) -> Any:
        jaxpr, results = jax.make_jaxpr(call, return_shape=True)(*arrays)
        types = tuple(jaxpr.out_avals)
        return jax.tree.unflatten(jax.tree.structure(results), _refusal_p.bind(*arrays, types=types, sentence=sentence))

    return refuse


def _refuse(context: Any, *_: Any, sentence: str, **__: Any) -> Any:
    platforms = context.platforms or context.module_context.platforms
    raise NotImplementedError(sentence.format(platform=", ".join(platforms)))


_refusal_p = Primitive("jax_fa4_refusal")
_refusal_p.multiple_results = True
_refusal_p.def_abstract_eval(lambda *_, types, sentence: list(types))
mlir.register_lowering(_refusal_p, _refuse)
