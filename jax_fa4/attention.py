"""The public function: checks its arguments, turns masks into row bounds, and hands over to an implementation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_fa4 import autodiff, cuda, dispatch, sharding
from jax_fa4 import problem as spec

_INT32 = np.iinfo(np.int32)
_DTYPES = ("float16", "bfloat16", "float32", "float64")


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
      scale: scalar, by default `1 / sqrt(D)`; any sign; may be traced. Differentiable.
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
      NotImplementedError: the implementation does not support the call, with the reason that `why_not` gives.
    """
    arguments = dict(locals())
    call, arrays = _check(**arguments)
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
      TypeError: `attention` has no argument of that name.
    """
    try:
        passes(implementation, query, key, value, device=device, **arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, _BadSignature):
            raise
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
        raise _BadSignature(*error.args) from error
    bound.apply_defaults()
    structs: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, x in bound.arguments.items():
        parts = x if isinstance(x, tuple | list) else [x]
        (structs if any(isinstance(part, jax.ShapeDtypeStruct) for part in parts) else rest)[name] = x
    modules: list[Any] = []

    def choose(structs: dict[str, Any]) -> None:
        call, arrays = _check(**structs, **rest)
        modules[:] = dispatch.passes(call.implementation, *_pose(call, arrays), device or cuda.default_device())

    jax.eval_shape(choose, structs)
    forward, backward = (next(name for name, one in dispatch.NAMES.items() if one is module) for module in modules)
    return forward, backward


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a checked call."""

    batched: bool
    left: int | None  # row i sees keys from i + offset - left
    right: int | None  # to i + offset + right, inclusive
    offset: int | None  # None when it is an array
    default_scale: bool
    softcap: float | None
    deterministic: bool
    implementation: str | None
    return_residual: bool


@functools.partial(jax.jit, static_argnums=0)
def _run(call: _Call, arrays: dict[str, Any]) -> Array | tuple[Array, Array]:
    out, lse = sharding.over_explicit_axes(functools.partial(_attend, call), arrays)
    if not call.batched:
        out, lse = out[0], lse[0]
    return (out, lse) if call.return_residual else out


def _attend(call: _Call, arrays: dict[str, Any]) -> tuple[Array, Array]:
    """Out (B, T, N, Dv) in query's dtype, and lse (B, T, N) in float32."""
    arrays = spec.varied(arrays)
    problem, operands = _pose(call, arrays)
    implementation = dispatch.choose(call.implementation, problem, operands)
    out, lse = autodiff.attend(implementation, problem, operands)
    if (sinks := arrays.get("sinks")) is not None:
        out = _apply_sinks(out, lse, sinks).astype(operands.query.dtype)
    return out, lse.astype(np.float32)


def _apply_sinks(out: Array, lse: Array, sinks: Array) -> Array:
    """The share of a softmax that a sink leaves to the keys: exp(lse) / (exp(lse) + exp(sink)); 0 for empty rows."""
    empty = lse == -jnp.inf
    # Not sigmoid, whose derivative s * (1 - s) has lost most digits of the sink's own share where that is small.
    share = jnp.exp(jax.nn.log_sigmoid(jnp.where(empty, 0, lse) - sinks.astype(lse.dtype)[None, None]))
    return out * jnp.where(empty, 0, share)[..., None]


def _pose(call: _Call, arrays: dict[str, Any]) -> tuple[spec.Problem, spec.Operands]:
    """Turns a checked call into a problem and its operands: every structured mask becomes row bounds."""
    get = arrays.get
    batch, rows = arrays["query"].shape[:2]
    keys = arrays["key"].shape[1]
    problem = spec.Problem(softcap=call.softcap, deterministic=call.deterministic, wide_out=get("sinks") is not None)
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


def _check(
    *,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    scale: Any,
    is_causal: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
    query_offset: Any,
    query_segment_ids: Any,
    key_value_segment_ids: Any,
    row_bounds: Any,
    softcap: Any,
    sinks: Any,
    deterministic: Any,
    implementation: Any,
    return_residual: Any,
) -> tuple[_Call, dict[str, Any]]:
    """Checks the arguments of `attention`; returns the static part and the arrays, with the batch axis everywhere."""
    dispatch.find(implementation)
    q, batched = _with_batch("query", query, "T, N, D")
    k, _ = _with_batch("key", key, "S, K, D")
    v, _ = _with_batch("value", value, "S, K, Dv")
    if q.dtype.name not in _DTYPES:
        raise ValueError(f"query's dtype must be one of {', '.join(_DTYPES)}, but got {q.dtype}.")
    batch, rows, heads, width = q.shape
    _, keys, kv_heads, _ = k.shape
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name}'s dtype must be query's, {q.dtype}, but got {x.dtype}.")
        if x.shape[0] != batch:
            raise ValueError(f"{name}'s batch size must be query's, {batch}, but got shape {x.shape}.")
    if k.shape[3] != width:
        raise ValueError(f"key's head width must be query's, {width}, but got shape {k.shape}.")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(
            f"value's length and heads must be key's, {k.shape[1:3]}, but got shape {v.shape}: only widths may differ."
        )
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"query's number of heads must be a multiple of key's and value's, {kv_heads}, but got shape {q.shape}."
        )
    if (query_segment_ids is None) != (key_value_segment_ids is None):
        given, missing = "query_segment_ids", "key_value_segment_ids"
        if query_segment_ids is None:
            given, missing = missing, given
        raise ValueError(f"{given} was given without {missing}: give both or neither.")

    left, right = _window(local_window_size)
    if _flag("is_causal", is_causal):
        right = 0 if right is None else min(right, 0)
    offset, offsets = _offset(query_offset, batch, keys - rows)
    integers = functools.partial(_integers, batched=batched)
    arrays = {
        "query": q,
        "key": k,
        "value": v,
        "scale": _scale(scale),
        "bias": _dense("bias", bias, (batch, heads, rows, keys)),
        "mask": _dense("mask", mask, (batch, heads, rows, keys)),
        "query_offset": offsets,
        "query_seq_lengths": integers("query_seq_lengths", query_seq_lengths, (batch,)),
        "key_value_seq_lengths": integers("key_value_seq_lengths", key_value_seq_lengths, (batch,)),
        "query_segment_ids": integers("query_segment_ids", query_segment_ids, (batch, rows)),
        "key_value_segment_ids": integers("key_value_segment_ids", key_value_segment_ids, (batch, keys)),
        "row_bounds": _row_bounds(row_bounds, (batch, rows), batched),
        "sinks": _sinks(sinks, heads),
    }
    call = _Call(
        batched=batched,
        left=left,
        right=right,
        offset=offset,
        default_scale=scale is None,
        softcap=_softcap(softcap, spec.compute_dtype(q.dtype)),
        deterministic=_flag("deterministic", deterministic),
        implementation=implementation,
        return_residual=_flag("return_residual", return_residual),
    )
    return call, arrays


def _as_array(name: str, x: Any) -> Array:
    if not isinstance(x, jax.Array):
        _check_int32(name, x)
    try:
        array = jnp.asarray(x)
        if not hasattr(x, "dtype") and array.dtype == np.int64:  # numbers and lists of them have no width of their own
            array = jnp.asarray(x, np.int32)
    except OverflowError as error:
        raise ValueError(f"{name} must fit in its dtype, but got {x!r}.") from error
    except (TypeError, ValueError, SyntaxError) as error:  # the last where NumPy reads a string as a dtype
        raise TypeError(f"{name} must be an array, but got {_kind(x)}.") from error
    return array


def _check_int32(name: str, x: Any) -> None:
    """Raises ValueError for integers of the host that JAX would cut down to 32 bits."""
    try:
        host = np.asarray(x)
    except (TypeError, ValueError, OverflowError):  # a list with tracers, or no array at all
        return
    if host.dtype.kind in "iu" and host.size and (host.max() > _INT32.max or host.min() < _INT32.min):
        raise ValueError(
            f"{name} must hold integers that fit in int32, but got some from {host.min()} to {host.max()}."
        )


def _kind(x: Any) -> str:
    if isinstance(x, str | bytes | int | float):
        return f"{x!r} of type {type(x).__name__}"
    return f"ndarray of dtype {x.dtype.str}" if isinstance(x, np.ndarray) else type(x).__name__


def _with_batch(name: str, x: Any, axes: str) -> tuple[Array, bool]:
    """`x` with four axes, and whether it came with a batch axis."""
    array = _as_array(name, x)
    if array.ndim not in (3, 4):
        raise ValueError(f"{name}'s shape must be (B, {axes}) or ({axes}), but got {array.shape}.")
    return (array, True) if array.ndim == 4 else (array[None], False)


def _integers(name: str, x: Any, shape: tuple[int, ...], batched: bool) -> Array | None:
    """An int32 array of exactly `shape`; its batch axis of 1 may be missing when the query has none."""
    if x is None:
        return None
    array = _as_array(name, x)
    if array.dtype != np.int32:
        raise ValueError(f"{name}'s dtype must be int32, but got {array.dtype}.")
    allowed = [shape] if batched else [shape, shape[1:]]
    if array.shape not in allowed:
        raise ValueError(f"{name}'s shape must be {' or '.join(map(str, allowed))}, but got {array.shape}.")
    return array.reshape(shape)


def _dense(name: str, x: Any, shape: tuple[int, int, int, int]) -> Array | None:
    """A bias or mask with four axes, each 1 or that of `shape`."""
    if x is None:
        return None
    array = _as_array(name, x)
    if name == "mask" and array.dtype != np.bool_:
        raise ValueError(f"mask's dtype must be bool, but got {array.dtype}: give additive masks as bias.")
    if name == "bias" and not jnp.issubdtype(array.dtype, np.floating):
        if not (jnp.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_):
            raise ValueError(f"bias's dtype must be real, but got {array.dtype}.")
        array = array.astype(np.float32)
    if array.ndim > 4 or any(
        length not in (1, full) for length, full in zip(array.shape[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(f"{name}'s shape must be broadcastable to (B, N, T, S) = {shape}, but got {array.shape}.")
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _flag(name: str, x: Any) -> bool:
    if isinstance(x, jax.core.Tracer) or not isinstance(x, bool | int | np.bool_ | np.integer) or int(x) not in (0, 1):
        raise TypeError(f"{name} must be True or False, known when tracing, but got {_kind(x)}.")
    return bool(x)


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    sides = list(window) if isinstance(window, tuple | list) else [window, window]
    try:
        if any(isinstance(side, bool | np.bool_) for side in sides):
            raise TypeError
        sides = [None if side is None else operator.index(side) for side in sides]
    except TypeError:
        sides = []
    if len(sides) != 2:
        raise TypeError(
            "local_window_size must be an int or a pair (left, right) of ints or None, known when tracing, "
            f"but got {window!r}."
        )
    if any(side is not None and side < 0 for side in sides):
        raise ValueError(f"local_window_size must not be negative (None is unbounded), but got {window!r}.")
    return sides[0], sides[1]


def _offset(offset: Any, batch: int, end: int) -> tuple[int | None, Array | None]:
    """A static offset, or one in an array."""
    if isinstance(offset, str):
        if offset != "end":
            raise ValueError(f"query_offset must be an int, an int32 array or 'end', but got {offset!r}.")
        return end, None
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        return int(offset), None
    array = _as_array("query_offset", offset)
    if array.dtype != np.int32 or array.shape not in ((), (batch,)):
        raise ValueError(
            f"query_offset must be an int, an int32 array of shape () or (B,) = ({batch},), or 'end', "
            f"but got {array.dtype} of shape {array.shape}."
        )
    return None, array


def _row_bounds(bounds: Any, shape: tuple[int, int], batched: bool) -> tuple[Array, Array] | None:
    if bounds is None:
        return None
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise TypeError(f"row_bounds must be a pair (lower, upper) of int32 arrays, but got {_kind(bounds)}.")
    lower, upper = (
        _integers(f"row_bounds[{i}] ({side})", x, shape, batched)
        for i, (side, x) in enumerate(zip(("lower", "upper"), bounds, strict=True))
    )
    if lower is None or upper is None:
        raise TypeError("row_bounds must hold two int32 arrays, but got None.")
    return lower, upper


def _scale(scale: Any) -> Array | None:
    if scale is None:
        return None
    array = _as_array("scale", scale)
    real = jnp.issubdtype(array.dtype, np.floating) or jnp.issubdtype(array.dtype, np.integer)
    if array.size != 1 or array.ndim > 1 or not real:
        raise ValueError(f"scale must be a real number or scalar array, but got {array.dtype} of shape {array.shape}.")
    return array.reshape(())


def _softcap(softcap: Any, dtype: np.dtype) -> float | None:
    if softcap is None:
        return None
    if not isinstance(softcap, int | float | np.integer | np.floating) or isinstance(softcap, bool):
        raise TypeError(f"softcap must be a positive number, known when tracing, but got {_kind(softcap)}.")
    try:
        cap = float(softcap)
    except OverflowError:
        cap = math.inf
    if not float(np.finfo(dtype).tiny) <= cap <= float(np.finfo(dtype).max):
        raise ValueError(f"softcap must be a positive normal number of {dtype} (None is no cap), but got {softcap!r}.")
    return cap


def _sinks(sinks: Any, heads: int) -> Array | None:
    if sinks is None:
        return None
    array = _as_array("sinks", sinks)
    if array.shape != (heads,) or not jnp.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"sinks must be floating point of shape (N,) = ({heads},), but got {array.dtype} of shape {array.shape}."
        )
    return array
