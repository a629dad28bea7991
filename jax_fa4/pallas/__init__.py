"""`pallas`: FlashAttention-4 in Pallas, for GPUs that have none of the fast CUDA kernels, and for readers.

`forward_kernel` is the algorithm in a page, `backward_kernels` its gradients; `tiling` is how a call is cut into
blocks, `blocks` how large these are. Nothing is shared with the CUDA kernels but the meaning of a call (docs/spec.md).

The kernels are lowered by Pallas' Triton backend. Pallas has two for GPUs, and the choice is by what each serves:

- Mosaic GPU is the one that JAX develops. Its kernels are written for the instructions of one kind of GPU: warpgroup
  products on compute capability 9.0, other products and another memory on 10.x. For 8.x JAX 0.12 has first primitives
  (asynchronous copies and products of a warp) and earlier releases none; for 12.x it has what it has for 8.x. No text
  of one page serves the Ampere, Ada and consumer Blackwell GPUs that this implementation is for.
- Triton serves every GPU from compute capability 8.0 by one text, in every release of JAX that this package supports.
  JAX has deprecated it since 0.11.0 and "will be removed in a future version". Where it is gone, `why_not` says so and
  the automatic choice goes on without it.

On a CPU the kernels are interpreted: right, and slow. On a GPU on which they have not been seen to run they are tested
before their first use: see `selftest`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_fa4 import cuda, selftest
from jax_fa4 import problem as spec
from jax_fa4.pallas import blocks

try:
    from jax_fa4.pallas import backward_kernels, forward_kernel
except ImportError as error:  # a release of JAX without the backend
    _missing: str | None = f"implementation='pallas' needs JAX's Triton backend of Pallas: {error}."
else:
    _missing = None

_LEAST = (8, 6)  # of those from there on, one with the least shared memory
_NEEDS = "an NVIDIA GPU or a CPU"
# By dtype, D and Dv: every row of the table of block sizes, and every dtype. One of them stands for all kinds of masks.
_OF_TABLE = tuple(itertools.product(map(jnp.dtype, ("bfloat16", "float32")), ((64, 64), (128, 128), (256, 256))))
_TESTED = (*_OF_TABLE, (jnp.dtype("float16"), (64, 64)))
_TESTED_WHOLE = (jnp.dtype("bfloat16"), (128, 128))
_FILES: dict[cuda.Pass, tuple[str, tuple[blocks.Kernel, ...]]] = {
    "forward": ("pallas.forward_kernel", ("forward",)),
    "backward": ("pallas.backward_kernels", ("key gradients", "query gradients")),
}
FILES = tuple(file for file, _ in _FILES.values())
"""The files of the kernels, as `selftest.SEEN` names them."""
# Of `jax.default_matmul_precision`, for products of float32 on the FMA units.
_EXACT = ("highest", "float32", "F32_F32_F32", "DotAlgorithmPreset.F32_F32_F32")


def precision() -> str:
    """How products of float32 are computed: "highest", or else `selftest.TF32`."""
    return "highest" if str(_default_precision()) in _EXACT else selftest.TF32


def _default_precision() -> Any:
    return getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009  (of no type that mypy knows)


def why_not(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> str | None:
    """Why the kernels do not support a problem, or the device (None: whatever it is lowered for); None if they do."""
    reason = unsupported_on(problem, operands, device)
    if reason is None and device is not None:
        reason = fault("forward", problem, operands, device)
    return reason


def unsupported_on(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> str | None:
    """As `why_not`, apart from the self-test."""
    del problem  # any will do
    if _missing is not None:
        return _missing
    if device is not None and device.platform != "cpu":
        reason = cuda.why_not_gpu("pallas", device, _NEEDS)
        if reason is not None:
            return reason
    return cuda.unsupported_operands("pallas", operands)


def kernels(
    name: cuda.Pass, precision: str, problem: spec.Problem, operands: spec.Operands, gpu: selftest.Capability
) -> selftest.Kernels:
    """What a pass launches. One text is many kernels: by dtype, widths, kind of mask, with and without a soft cap."""
    del gpu  # the same for all
    if operands.is_empty:
        return ()
    dtype = operands.query.dtype.name
    numbers = "tf32" if dtype == "float32" and precision == selftest.TF32 else dtype
    mask = "bounds" if operands.lower is not None else "full" if problem.band == (None, None) else "band"
    of = [numbers, *(str(blocks.padded(x.shape[3])) for x in (operands.query, operands.value)), mask]
    of += [] if problem.softcap is None else ["softcap"]
    file, names = _FILES[name]
    return tuple((file, "_".join(["fa4", kernel.replace(" ", "_"), *of])) for kernel in names)


def fault(name: cuda.Pass, problem: spec.Problem, operands: spec.Operands, device: jax.Device) -> str | None:
    """What the self-test finds wrong with a pass's kernels on a device that `unsupported_on` has nothing against."""
    return selftest.fault_of(PASSES[name, precision()], problem, operands, device)


def unseen_kernels(device: jax.Device) -> list[tuple[selftest.Pass, selftest.Kernels, Any, tuple[int, int]]]:
    """Of `selftest.unseen` a choice that takes minutes, on a GPU that `cuda.why_not_gpu` has nothing against.

    Of what the automatic choice takes these are all kernels of one dtype and width, and of the others the most general.
    """
    passes = [one for one in PASSES.values() if one.precision == selftest.TF32 and _missing is None]
    found = selftest.unseen(passes, _TESTED, device)
    return [x for x in found if x[2:] == _TESTED_WHOLE or x[1][0][1].endswith("_bounds_softcap")]


def forward(
    problem: spec.Problem, operands: spec.Operands, *, in_cuda_branch: bool = False
) -> tuple[Array, Array, Array]:
    """Attention of `operands`, sorted already: out (B, T, N, Dv) in query's dtype, lse and its rounding (B, T, N).

    Its lowering for GPUs raises NotImplementedError where the kernels fail their self-test on the GPU at hand.

    Args:
      problem: the problem.
      operands: its operands.
      in_cuda_branch: whether the caller stands in the `cuda` branch of a `lax.platform_dependent`: in a program for
        several platforms that branch is lowered for all of them, and must not refuse the others.
    """
    lse = jax.ShapeDtypeStruct((operands.batch, *operands.query.shape[1:3]), np.float32)
    out = jax.ShapeDtypeStruct((*lse.shape, operands.value.shape[3]), spec.out_dtype(problem, operands))
    return _by_platform(functools.partial(_run_forward, problem), (operands,), (out, lse, lse), in_cuda_branch)


def backward(
    problem: spec.Problem, operands: spec.Operands, *results: Any, with_bias: bool, in_cuda_branch: bool = False
) -> spec.Gradients:
    """Gradients of `forward` from out, lse, its rounding, dout and dlse; bitwise the same every time."""
    del with_bias  # there is none
    batch = len(results[0])
    like = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in operands[:3]]
    types: Any = spec.Gradients._make([*like, jax.ShapeDtypeStruct((batch,), np.float32), None])
    return _by_platform(functools.partial(_run_backward, problem), (operands, *results), types, in_cuda_branch)


_RUNS: dict[cuda.Pass, Callable[..., Any]] = {"forward": forward, "backward": backward}
PASSES: dict[tuple[cuda.Pass, str], selftest.Pass] = {
    (name, precision): selftest.Pass("pallas", name, functools.partial(kernels, name, precision), run, precision)
    for name, run in _RUNS.items()
    for precision in ("highest", selftest.TF32)
}
"""By the precision of products."""


def _by_platform(run: Callable[..., Any], arguments: Any, types: Any, in_cuda_branch: bool) -> Any:
    """Calls `run(interpret, *arguments)` with what the platform that is lowered for wants.

    It is one operation until then, so that nothing in it meets the transformations of the caller: Pallas' interpreter
    does not run where the types of a `jax.shard_map` say over which axes an array varies.
    """
    leaves, tree = jax.tree.flatten(spec.varied(arguments))
    wanted, tree_of_results = jax.tree.flatten(types)
    precision = _default_precision()

    def flat(interpret: bool, *leaves: Array) -> list[Array]:
        with jax.default_matmul_precision(precision):
            return jax.tree.leaves(run(interpret, *jax.tree.unflatten(tree, leaves)))

    def alike(*leaves: Array) -> Any:
        return spec.varied_like(leaves[0], [jnp.zeros(x.shape, x.dtype) for x in wanted])

    avals = tuple(jax.make_jaxpr(alike)(*leaves).out_avals)
    results = _pass_p.bind(*leaves, run=flat, types=avals, in_cuda_branch=in_cuda_branch)
    return jax.tree.unflatten(tree_of_results, results)


def _lower(interpret: bool | None, context: Any, *arrays: Any, run: Any, types: Any, in_cuda_branch: bool) -> Any:
    """Lowers a pass interpreted or compiled; where `interpret` is None, for a platform that it is not for."""

    def unused(*arrays: Array) -> list[Array]:
        return [jnp.zeros(x.shape, x.dtype) for x in types]

    if interpret is None and not in_cuda_branch:
        platforms = context.platforms or context.module_context.platforms
        raise NotImplementedError(cuda.PLATFORM.format(name="pallas", needs=_NEEDS, platform=", ".join(platforms)))
    local = [[jax.core.ShapedArray(x.shape, x.dtype) for x in avals] for avals in (context.avals_in, types)]
    context = context.replace(avals_in=local[0], avals_out=local[1])
    traced = unused if interpret is None else functools.partial(run, interpret)
    return mlir.lower_fun(traced, multiple_results=True)(context, *arrays)


def _run_at_once(*arrays: Array, **parameters: Any) -> list[Array]:
    """Runs a pass where jit is disabled: compiled all the same, as Pallas interprets nothing one by one."""
    with jax.disable_jit(False):
        results: list[Array] = jax.jit(functools.partial(_pass_p.bind, **parameters))(*arrays)
    return results


_pass_p = Primitive("jax_fa4_pallas")
_pass_p.multiple_results = True
_pass_p.def_abstract_eval(lambda *_, types, **__: list(types))
_pass_p.def_impl(_run_at_once)
for _platform, _interpret in (("cpu", True), ("cuda", False), (None, None)):
    mlir.register_lowering(_pass_p, functools.partial(_lower, _interpret), platform=_platform)


def _refuse_faulty(name: cuda.Pass, problem: spec.Problem, interpret: bool, operands: spec.Operands) -> None:
    if not interpret:
        selftest.refuse(PASSES[name, precision()], unsupported_on, problem, operands, cuda.gpu_at_hand())


def _run_forward(problem: spec.Problem, interpret: bool, operands: spec.Operands) -> tuple[Array, Array, Array]:
    _refuse_faulty("forward", problem, interpret, operands)
    width = operands.value.shape[3]
    operands = _at_least_one_wide(operands)
    found = _blocks(interpret, operands, "forward")
    out, lse, rounding = forward_kernel.forward(problem, found, interpret, operands)
    return out[..., :width], lse, rounding


def _run_backward(
    problem: spec.Problem,
    interpret: bool,
    operands: spec.Operands,
    out: Array,
    lse: Array,
    lse_rounding: Array | None,
    dout: Array,
    dlse: Array | None,
) -> spec.Gradients:
    _refuse_faulty("backward", problem, interpret, operands)
    widths = [x.shape[3] for x in operands[:3]]
    operands, out, dout = _at_least_one_wide((operands, out, dout))
    find = functools.partial(_blocks, interpret, operands)
    gradients = backward_kernels.backward(problem, find, interpret, operands, out, lse, lse_rounding, dout, dlse)
    query, key, value = (x[..., :width] for x, width in zip(gradients[:3], widths, strict=True))
    return spec.Gradients(query, key, value, gradients.scale)


def _blocks(interpret: bool, operands: spec.Operands, kernel: blocks.Kernel) -> blocks.Blocks:
    """For the GPU at hand, which stands for all; without one, for the GPUs that have least."""
    capability = None
    if not interpret:
        device = cuda.gpu_at_hand()
        capability = _LEAST if device is None else selftest.capability(device)
    (_, tokens, heads, width), (_, keys, kv_heads, _) = operands.query.shape, operands.key.shape
    widths = width, operands.value.shape[3]
    rows, dtype = tokens * heads // kv_heads, operands.query.dtype
    return blocks.blocks(kernel, capability, widths, dtype, rows, keys)


def _at_least_one_wide(arrays: Any) -> Any:
    """Arrays of heads for kernels, which take no empty ones: to a width of 0, a column of zeros adds nothing."""

    def widen(x: Any) -> Any:
        return jnp.zeros((*x.shape[:3], 1), x.dtype) if x.ndim == 4 and x.shape[3] == 0 else x

    return jax.tree.map(widen, arrays)
