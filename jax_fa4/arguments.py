"""Checks the arguments of `attention`: every error of bad input is raised here, before anything is compiled."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_fa4 import dispatch
from jax_fa4 import problem as spec

_INT32 = np.iinfo(np.int32)
_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Call:
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


def check(
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
) -> tuple[Call, dict[str, Any]]:
    """Checks the arguments of `attention`; returns the static part and the arrays, with the batch axis everywhere."""
    dispatch.find(implementation)
    q, batched = _with_batch("query", query, "T, N, D")
    k, _ = _with_batch("key", key, "S, K, D")
    v, _ = _with_batch("value", value, "S, K, Dv")
    if q.dtype.name not in _DTYPES:
        raise ValueError(f"query's dtype must be one of {', '.join(_DTYPES)}, but got {q.dtype}.")
    for name, x in (("query", q), ("key", k), ("value", v)):
        if implementation != "reference" and not all(isinstance(size, int) for size in x.shape):
            raise NotImplementedError(
                f"{name}'s shape must be of constants unless implementation='reference', but got {x.shape}: "
                "export a program for each shape."
            )
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
            f"query's number of heads must be a multiple of key's and value's, {kv_heads}, "
            f"but got shape {q.shape} for (B, T, N, D)."
        )
    if (query_segment_ids is None) != (key_value_segment_ids is None):
        given, missing = "query_segment_ids", "key_value_segment_ids"
        if query_segment_ids is None:
            given, missing = missing, given
        raise ValueError(f"{given} was given without {missing}: give both or neither.")

    left, right = _window(local_window_size)
    if flag("is_causal", is_causal):
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
        "query_seq_lengths": integers("query_seq_lengths", query_seq_lengths, "B", (batch,)),
        "key_value_seq_lengths": integers("key_value_seq_lengths", key_value_seq_lengths, "B", (batch,)),
        "query_segment_ids": integers("query_segment_ids", query_segment_ids, "B, T", (batch, rows)),
        "key_value_segment_ids": integers("key_value_segment_ids", key_value_segment_ids, "B, S", (batch, keys)),
        "row_bounds": _row_bounds(row_bounds, (batch, rows), batched),
        "sinks": _sinks(sinks, heads),
    }
    call = Call(
        batched=batched,
        left=left,
        right=right,
        offset=offset,
        default_scale=scale is None,
        softcap=_softcap(softcap, spec.compute_dtype(q.dtype)),
        deterministic=flag("deterministic", deterministic),
        implementation=implementation,
        return_residual=flag("return_residual", return_residual),
    )
    return call, arrays


def check_device(device: Any) -> None:
    """Raises TypeError unless `device` is None or looks like a `jax.Device`."""
    if device is not None and not hasattr(device, "platform"):
        raise TypeError(f"device must be a jax.Device, such as jax.devices()[0], or None, but got {_kind(device)}.")


def as_array(name: str, x: Any, allowed: str = "an array") -> Array:
    """`x` as a JAX array; raises TypeError for what is none, ValueError for integers that do not fit."""
    if not isinstance(x, jax.Array):
        _check_int32(name, x)
    try:
        array = jnp.asarray(x)
        if not hasattr(x, "dtype") and array.dtype == np.int64:  # numbers and lists of them have no width of their own
            array = jnp.asarray(x, np.int32)
    except OverflowError as error:
        raise ValueError(f"{name} must fit in its dtype, but got {x!r}.") from error
    except (TypeError, ValueError, SyntaxError) as error:  # the last where NumPy reads a string as a dtype
        raise TypeError(f"{name} must be {allowed}, but got {_kind(x)}.") from error
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
    """What `x` is, for an error."""
    if isinstance(x, str | bytes | int | float):
        return f"{x!r} of type {type(x).__name__}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of length {len(x)}"
    if isinstance(x, jax.core.Tracer):
        return f"a tracer of {x.aval.str_short()}"
    if isinstance(x, jax.Array):
        return f"a jax.Array of {x.dtype} of shape {x.shape}"
    return f"ndarray of dtype {x.dtype.str}" if isinstance(x, np.ndarray) else type(x).__name__


def _traced(name: str, x: Any) -> str:
    """What the first tracer in `x` is, for an error, and how it can be a constant; empty where there is none."""
    for part in x if isinstance(x, tuple | list) else [x]:
        if isinstance(part, jax.core.Tracer):
            return f"{_kind(part)}: under jax.jit, bind {name} with functools.partial or name it in static_argnames"
    return ""


def _with_batch(name: str, x: Any, axes: str) -> tuple[Array, bool]:
    """`x` with four axes, and whether it came with a batch axis."""
    array = as_array(name, x)
    if array.ndim not in (3, 4):
        raise ValueError(f"{name}'s shape must be (B, {axes}) or ({axes}), but got {array.shape}.")
    return (array, True) if array.ndim == 4 else (array[None], False)


def _integers(name: str, x: Any, axes: str, shape: tuple[int, ...], batched: bool) -> Array | None:
    """An int32 array of exactly `shape`, of `axes`; its batch axis of 1 may be missing when the query has none."""
    if x is None:
        return None
    array = as_array(name, x)
    if array.dtype != np.int32:
        raise ValueError(f"{name}'s dtype must be int32, but got {array.dtype}.")
    allowed = [shape] if batched else [shape, shape[1:]]
    if array.shape not in allowed:
        named = f"({axes}{',' * (len(shape) == 1)}) = {' or '.join(map(str, allowed))}"
        raise ValueError(f"{name}'s shape must be {named}, but got {array.shape}.")
    return array.reshape(shape)


def _dense(name: str, x: Any, shape: tuple[int, int, int, int]) -> Array | None:
    """A bias or mask with four axes, each 1 or that of `shape`."""
    if x is None:
        return None
    array = as_array(name, x)
    if name == "mask" and array.dtype != np.bool_:
        raise ValueError(
            f"mask's dtype must be bool, but got {array.dtype}: compare numbers with 0, and give what is added as bias."
        )
    if name == "bias" and not jnp.issubdtype(array.dtype, np.floating):
        if not (jnp.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_):
            raise ValueError(f"bias's dtype must be real, but got {array.dtype}.")
        array = array.astype(np.float32)
    if array.ndim > 4 or any(
        length not in (1, full) for length, full in zip(array.shape[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(f"{name}'s shape must be broadcastable to (B, N, T, S) = {shape}, but got {array.shape}.")
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def flag(name: str, x: Any) -> bool:
    """`x` as a bool; raises TypeError for what is no constant, or neither True nor False."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, bool | int | np.bool_ | np.integer) or int(x) not in (0, 1):
        given = _traced(name, x) or _kind(x)
        raise TypeError(f"{name} must be True or False, known when tracing, but got {given}.")
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
            f"but got {_traced('local_window_size', window) or repr(window)}."
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
    array = as_array("query_offset", offset, "an array of int32, an int or 'end'")
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
        _integers(f"row_bounds[{i}] ({side})", x, "B, T", shape, batched)
        for i, (side, x) in enumerate(zip(("lower", "upper"), bounds, strict=True))
    )
    if lower is None or upper is None:
        raise TypeError("row_bounds must hold two int32 arrays, but got None.")
    return lower, upper


def _scale(scale: Any) -> Array | None:
    if scale is None:
        return None
    allowed = "a real number or an array of one, of shape () or (1,)"
    array = as_array("scale", scale, allowed)
    real = jnp.issubdtype(array.dtype, np.floating) or jnp.issubdtype(array.dtype, np.integer)
    if array.size != 1 or array.ndim > 1 or not real:
        raise ValueError(f"scale must be {allowed}, but got {array.dtype} of shape {array.shape}.")
    return array.reshape(())


def _softcap(softcap: Any, dtype: np.dtype) -> float | None:
    if softcap is None:
        return None
    if not isinstance(softcap, int | float | np.integer | np.floating) or isinstance(softcap, bool):
        given = _traced("softcap", softcap) or _kind(softcap)
        raise TypeError(f"softcap must be a positive number, known when tracing, but got {given}.")
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
    array = as_array("sinks", sinks)
    if array.shape != (heads,) or not jnp.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"sinks must be floating point of shape (N,) = ({heads},), but got {array.dtype} of shape {array.shape}."
        )
    return array
