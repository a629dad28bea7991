"""The public function: turns masks into row bounds, and hands over to an implementation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_fa4 import autodiff, cuda, dispatch, sharding
from jax_fa4 import problem as spec
from jax_fa4.arguments import Call, check, check_device


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: ArrayLike | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    query_offset: ArrayLike | Literal["end"] = ...,
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    row_bounds: tuple[ArrayLike, ArrayLike] | None = ...,
    softcap: float | None = ...,
    sinks: ArrayLike | None = ...,
    deterministic: bool = ...,
    implementation: str | None = ...,
    return_residual: Literal[False] = ...,
) -> Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: ArrayLike | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    query_offset: ArrayLike | Literal["end"] = ...,
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    row_bounds: tuple[ArrayLike, ArrayLike] | None = ...,
    softcap: float | None = ...,
    sinks: ArrayLike | None = ...,
    deterministic: bool = ...,
    implementation: str | None = ...,
    return_residual: Literal[True],
) -> tuple[Array, Array]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_offset: ArrayLike | Literal["end"] = 0,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    row_bounds: tuple[ArrayLike, ArrayLike] | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic: bool = False,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """Exact attention: a drop-in for `jax.nn.dot_product_attention`, with more masks and a differentiable lse.

    For each head: `logits = scale * q.k`; with `softcap` c, `c * tanh(logits / c)`; plus `bias`; hidden keys removed;
    softmax over keys in float32 (float64 for float64 inputs); times the values. All masks intersect. Query row `i` sits
    at key position `i + query_offset`. docs/spec.md has the whole meaning.

    Two results differ from `jax.nn`'s: a row that sees no key gives 0 (not the mean of the values), and lse is float32
    and differentiable. Sizes: batch B; query and key length T and S; query and key/value heads N and K, with N a
    multiple of K; head widths D and Dv. A missing batch axis is that of B = 1, of every argument.

    Args:
      query: (B, T, N, D) or (T, N, D); float16, bfloat16, float32 or float64.
      key: (B, S, K, D) or (S, K, D), of query's dtype. Query head `n` uses key/value head `n // (N / K)`.
      value: (B, S, K, Dv) or (S, K, Dv), of query's dtype.
      bias: added to the logits; up to 4 axes, broadcastable to (B, N, T, S). A bias of -inf hides. Differentiable.
      mask: bool, shaped like `bias`; False hides.
      scale: number, or array of shape () or (1,), by default `1 / sqrt(D)`; any sign; may be traced. Differentiable.
      is_causal: row `i` sees keys up to position `i + query_offset`.
      query_seq_lengths: int32 (B,); rows from there on see nothing.
      key_value_seq_lengths: int32 (B,); keys from there on are hidden.
      local_window_size: (left, right), inclusive: row `i` sees keys from `i + query_offset - left` to
        `i + query_offset + right`. None on a side is unbounded, one int means both sides.
      query_offset: int, int32 scalar or (B,); or "end", which is S - T. Ints are static: where the offset changes from
        call to call, as in decoding, an int32 array saves a compilation per value.
      query_segment_ids: int32 (B, T); a row sees the keys of equal id. Both ids are given, or none.
      key_value_segment_ids: int32 (B, S).
      row_bounds: (lower, upper), each int32 (B, T): row `i` sees key positions in `[lower, upper)`.
      softcap: positive number, static.
      sinks: float (N,): a logit per head that takes part in the softmax with no value. Differentiable.
      deterministic: whether gradients must be bitwise repeatable. Else those of query and scale may change in their
        rounding from call to call, where the backward runs on tensor cores, which add up in any order.
      implementation: None chooses; "cuda" is kernels for NVIDIA GPUs, "pallas" such kernels in Python (interpreted on a
        CPU); "tiled" (or "xla") is pure JAX; "reference" is naive and differentiable in every mode; "emulated" runs the
        CUDA kernels on a CPU. See `why_not`.
      return_residual: whether to return lse too.

    Returns:
      The output, (B, T, N, Dv) or (T, N, Dv) in query's dtype. With `return_residual`, also lse, the natural-log
      log-sum-exp of each row's visible logits without sinks: float32 (B, T, N) or (T, N), -inf where there are none.

    Raises:
      ValueError, TypeError: an argument has a wrong shape, dtype, value or type; raised before compilation.
      NotImplementedError: the implementation does not support the call, with the reason that `why_not` gives; or
        shapes are symbolic, as `jax.export` has them, which only "reference" takes.
    """
    arguments = dict(locals())
    call, arrays = check(**arguments)
    return _run(call, arrays)


def why_not(
    implementation: str | None,
    query: ArrayLike | jax.ShapeDtypeStruct,
    key: ArrayLike | jax.ShapeDtypeStruct,
    value: ArrayLike | jax.ShapeDtypeStruct,
    *,
    device: jax.Device | None = None,
    **arguments: Any,
) -> str | None:
    """Why an implementation would not run this call: the sentence of the error that `attention` would raise, or None.

    Args:
      implementation: a name, or None for the automatic choice.
      query: as in `attention`; here every array may be a `jax.ShapeDtypeStruct`.
      key: likewise.
      value: likewise.
      device: the device to run on; by default the one that JAX would choose.
      **arguments: the other arguments of `attention`.

    Raises:
      TypeError: `attention` has no argument of that name, or `device` is none.
    """
    check_device(device)
    try:
        passes(implementation, query, key, value, device=device, **arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, _BadSignature):
            raise TypeError(*error.args) from None
        return str(error)
    return None


class _BadSignature(TypeError):
    """An argument that `attention` does not have."""


def passes(
    implementation: str | None,
    query: ArrayLike | jax.ShapeDtypeStruct,
    key: ArrayLike | jax.ShapeDtypeStruct,
    value: ArrayLike | jax.ShapeDtypeStruct,
    *,
    device: jax.Device | None = None,
    **arguments: Any,
) -> tuple[str, str]:
    """The names of the implementations that would run a call forward and backward; arguments as in `why_not`."""
    try:
        bound = inspect.signature(attention).bind(query, key, value, implementation=implementation, **arguments)
    except TypeError as error:
        raise _BadSignature(f"attention() {error}") from error
    bound.apply_defaults()
    structs: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, x in bound.arguments.items():
        parts = x if isinstance(x, tuple | list) else [x]
        (structs if any(isinstance(part, jax.ShapeDtypeStruct) for part in parts) else rest)[name] = x
    modules: list[Any] = []

    def choose(structs: dict[str, Any]) -> None:
        call, arrays = check(**structs, **rest)
        modules[:] = dispatch.passes(call.implementation, *_pose(call, arrays), device or cuda.default_device())

    jax.eval_shape(choose, structs)
    forward, backward = (next(name for name, one in dispatch.NAMES.items() if one is module) for module in modules)
    return forward, backward


@functools.partial(jax.jit, static_argnums=0)
def _run(call: Call, arrays: dict[str, Any]) -> Array | tuple[Array, Array]:
    out, lse = sharding.over_explicit_axes(functools.partial(_attend, call), arrays)
    if not call.batched:
        out, lse = out[0], lse[0]
    return (out, lse) if call.return_residual else out


def _attend(call: Call, arrays: dict[str, Any]) -> tuple[Array, Array]:
    """Out (B, T, N, Dv) in query's dtype, and lse (B, T, N) in float32."""
    arrays = spec.varied(arrays)
    problem, operands = _pose(call, arrays)
    implementation = dispatch.choose(call.implementation, problem, operands)
    sinks = arrays.get("sinks")
    sinks = None if sinks is None else sinks.astype(spec.compute_dtype(operands.query.dtype))
    out, lse = autodiff.attend(implementation, problem, operands, sinks)
    return out, lse.astype(np.float32)


def _pose(call: Call, arrays: dict[str, Any]) -> tuple[spec.Problem, spec.Operands]:
    """Turns a checked call into a problem and its operands: every structured mask becomes row bounds."""
    get = arrays.get
    batch, rows = arrays["query"].shape[:2]
    keys = arrays["key"].shape[1]
    problem = spec.Problem(softcap=call.softcap, deterministic=call.deterministic)
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    # With a width of 0 every logit is 0, whatever the scale.
    scale = 1 / math.sqrt(query.shape[3] or 1) if call.default_scale else arrays["scale"]
    scale = jnp.asarray(scale, spec.compute_dtype(query.dtype)).reshape(1)
    operands = spec.Operands(query, key, value, scale, bias=get("bias"), mask=get("mask"))
    query_ids, key_ids = get("query_segment_ids"), get("key_value_segment_ids")
    dynamic = ("query_offset", "query_seq_lengths", "key_value_seq_lengths", "row_bounds")
    if query_ids is None and call.offset is not None and all(get(name) is None for name in dynamic):
        low = None if call.left is None else call.offset - call.left
        high = None if call.right is None else call.offset + call.right + 1
        return dataclasses.replace(problem, band=spec.static_band(rows, keys, low, high)), operands
    lower, upper = spec.dynamic_bounds(
        (batch, rows, keys),
        arrays["query_offset"] if call.offset is None else call.offset,
        call.left,
        call.right,
        get("query_seq_lengths"),
        get("key_value_seq_lengths"),
        get("row_bounds"),
    )
    if query_ids is not None and key_ids is not None:
        lower, upper, query_order, key_order = spec.segment_bounds(query_ids, key_ids, lower, upper)
        operands = operands._replace(query_order=query_order, key_order=key_order)
    return problem, operands._replace(lower=lower, upper=upper)
