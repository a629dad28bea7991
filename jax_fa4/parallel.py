"""Ring attention: sequences that are sharded over the devices of a mesh axis.

Every device has a shard of the queries, which stays, and a shard of the keys and values, which travels round the ring
of devices. At each step a device attends to the keys that have come by and merges the result with what it has, by lse,
in the compute dtype. The next keys are on their way meanwhile.

The backward is a second ring: at each step an implementation's `backward` takes the keys that have come by, with the
out and lse of the whole row, and adds to the gradients of these keys, which travel behind them in the compute dtype. So
nothing of the forward's steps is kept.

Masks count positions of the whole sequence. In every layout the positions of a device's keys ascend, so that what a row
sees of them is an interval again: a step is a call with row bounds. A step in which no row sees anything is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_fa4 import autodiff, dispatch, reference
from jax_fa4 import problem as spec
from jax_fa4.arguments import Call, as_array, check

Layout = Literal["contiguous", "zigzag", "striped"]
"""Which positions of a sequence of length L a device has, of P devices in their order along the axis.

- "contiguous": device `d` has the `d`-th of P equal pieces.
- "zigzag": of 2P equal pieces device `d` has the `d`-th and the `d`-th from the end. Under a causal mask all devices
  have the same work.
- "striped": device `d` has the positions `d`, `d + P`, `d + 2P`, ... Every part of the sequence is spread over all
  devices, so that packed documents are shared evenly, too. But every step is cut by the diagonal of a causal mask, and
  a block that it cuts costs a whole one: in "zigzag" only the first step is.
"""

_LAYOUTS = ("contiguous", "zigzag", "striped")


def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: None = None,
    mask: None = None,
    *,
    axis_name: Hashable,
    layout: Layout = "contiguous",
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
    """Exact attention of a sequence that is sharded over a mesh axis; `jax_fa4.attention` says what it computes.

    It is called inside of `jax.shard_map`, on each device's shards. Batch and heads may be sharded over other axes of
    the same mesh. Masks mean what they mean for the whole sequence: positions, offsets and lengths are global.

    A device's memory is linear in its shards, forward and backward. Sizes: T and S are the lengths of a device's shards
    and P is the number of devices of the axis, so that the whole lengths are P * T and P * S; the others are those of
    `jax_fa4.attention`.

    Args:
      query: (B, T, N, D) or (T, N, D), in the layout's order: see `to_layout`.
      key: (B, S, K, D) or (S, K, D), likewise.
      value: (B, S, K, Dv) or (S, K, Dv), likewise.
      bias: not supported.
      mask: not supported.
      axis_name: the mesh axis over which the sequence is sharded, or a tuple of several.
      layout: which positions a device has: see `Layout`. "zigzag" and "striped" share the work of a causal mask evenly.
      scale: as in `jax_fa4.attention`.
      is_causal: likewise.
      query_seq_lengths: int32 (B,), of the whole sequence: rows at positions from there on see nothing.
      key_value_seq_lengths: int32 (B,), of the whole sequence.
      local_window_size: likewise.
      query_offset: likewise; "end" is P * S - P * T.
      query_segment_ids: int32 (B, T), those of the device's rows.
      key_value_segment_ids: int32 (B, S), those of the device's keys.
      row_bounds: (lower, upper), each int32 (B, T), of the device's rows; they count positions of the whole sequence.
      softcap: as in `jax_fa4.attention`.
      sinks: likewise.
      deterministic: likewise.
      implementation: likewise, of each step. "reference" is differentiable in every mode and to any order; the others
        once, in reverse mode.
      return_residual: likewise.

    Returns:
      The output of the device's rows, (B, T, N, Dv) or (T, N, Dv) in query's dtype; with `return_residual` also their
      lse, float32 (B, T, N) or (T, N).

    Raises:
      ValueError, TypeError: an argument has a wrong shape, dtype, value or type, `axis_name` is not bound here, or an
        array is sharded over Explicit mesh axes that the `jax.shard_map` leaves out.
      NotImplementedError: a bias or mask is given, or the implementation does not support the call.
    """
    arguments = dict(locals())
    for name in ("bias", "mask"):
        if arguments[name] is not None:
            raise NotImplementedError(
                f"ring_attention does not support {name}; causality, windows, lengths, segment ids and row_bounds are "
                "supported."
            )
    layout, axis_name = arguments.pop("layout"), arguments.pop("axis_name")
    devices = _devices(axis_name)
    call, arrays = check(**arguments)
    _check_shardings(arrays)
    _check_layout(layout, devices, {name: arrays[name].shape[1] * devices for name in ("query", "key")})
    if isinstance(query_offset, str):  # it is "end", and what was checked are shards
        call = dataclasses.replace(call, offset=(call.offset or 0) * devices)
    return _run(call, axis_name, devices, layout, arrays)


def to_layout(x: ArrayLike, layout: Layout, devices: int, *, axis: int = 1) -> Array:
    """Reorders an axis of a whole array so that, cut into `devices` equal pieces, each piece is one device's shard.

    `to_layout(jnp.arange(length), layout, devices, axis=0)` are the positions, for rotary embeddings for instance.

    Args:
      x: of any shape and dtype.
      layout: see `Layout`; "contiguous" leaves the order as it is.
      devices: P, the size of the mesh axis.
      axis: that of the sequence. Its length is a multiple of P, and of 2P in "zigzag".

    Raises:
      ValueError: there is no such layout or axis, or the length cannot be cut so.
      TypeError: `axis` or `devices` is no int.
    """
    x, axis = _checked_axis(x, layout, devices, axis)
    if layout == "striped":
        x = _reshaped(x, axis, (-1, devices), swap=True)
    if layout == "zigzag":
        first, last = jnp.split(_reshaped(x, axis, (2 * devices, -1)), 2, axis)
        x = jnp.stack([first, jnp.flip(last, axis)], axis + 1).reshape(x.shape)
    return x


def from_layout(x: ArrayLike, layout: Layout, devices: int, *, axis: int = 1) -> Array:
    """Undoes `to_layout`: gives an axis the order of positions again.

    Args:
      x: what `to_layout` gave.
      layout: as it was given to `to_layout`.
      devices: likewise.
      axis: likewise.

    Raises:
      ValueError, TypeError: as `to_layout`.
    """
    x, axis = _checked_axis(x, layout, devices, axis)
    if layout == "striped":
        x = _reshaped(x, axis, (devices, -1), swap=True)
    if layout == "zigzag":
        pieces = _reshaped(x, axis, (2 * devices, -1))
        first, last = (lax.slice_in_dim(pieces, i, None, 2, axis) for i in range(2))
        x = jnp.concatenate([first, jnp.flip(last, axis)], axis).reshape(x.shape)
    return x


def _reshaped(x: Array, axis: int, sizes: tuple[int, int], *, swap: bool = False) -> Array:
    """Cuts an axis in two, one of which may be -1; with `swap` joins them again in the other order."""
    length, known = x.shape[axis], max(sizes)
    sizes = (known, length // known) if sizes[1] < 0 else (length // known, known)
    cut = x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
    return jnp.swapaxes(cut, axis, axis + 1).reshape(x.shape) if swap else cut


def _checked_axis(x: ArrayLike, layout: Layout, devices: int, axis: int) -> tuple[Array, int]:
    x = jnp.asarray(x) if jax.config.jax_enable_x64 else as_array("x", x)  # type: ignore[attr-defined, unused-ignore]
    for name, number in (("axis", axis), ("devices", devices)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool):
            raise TypeError(f"{name} must be an int, but got {number!r}.")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be one of the {x.ndim} axes of x, but got {axis} for shape {x.shape}.")
    if devices < 1:
        raise ValueError(f"devices must be the positive size of a mesh axis, but got {devices}.")
    axis %= x.ndim
    _check_layout(layout, devices, {f"axis {axis} of x": x.shape[axis]})
    return x, axis


def _check_layout(layout: Any, devices: int, lengths: dict[str, int]) -> None:
    """Raises ValueError unless whole sequences of these lengths can be laid out over devices."""
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, _LAYOUTS))}, but got {layout!r}.")
    pieces = 2 * devices if layout == "zigzag" else devices
    for name, length in lengths.items():
        if length % pieces:
            raise ValueError(
                f"layout={layout!r} on {devices} devices needs lengths that are multiples of {pieces}, but got "
                f"{length} for {name}."
            )


def _devices(axis_name: Any) -> int:
    """The number of devices along a mesh axis, or along several."""
    if isinstance(axis_name, list):
        raise TypeError(f"axis_name must be a mesh axis or a tuple of several, but got a list, {axis_name!r}.")
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        repeated = len(set(names)) < len(names)
        devices = int(lax.axis_size(axis_name))
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(
            "axis_name must be a mesh axis of a jax.shard_map around the call, or a tuple of several, but got "
            f"{axis_name!r}, which is not bound here ({_bound()})."
        ) from error
    if repeated:
        raise ValueError(f"axis_name must not name a mesh axis twice, but got {axis_name!r}.")
    if not names:
        raise ValueError("axis_name must name a mesh axis, but got ().")
    return devices


def _bound() -> str:
    """Which mesh axes are bound here."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return f"what is: {', '.join(map(repr, axes))}" if axes else "nothing is"


def _check_shardings(arrays: dict[str, Any]) -> None:
    """Raises ValueError where a shard is sharded once more, over Explicit axes that the `jax.shard_map` leaves out."""
    for name, array in arrays.items():
        for x in jax.tree.leaves(array):
            sharding = jax.typeof(x).sharding.spec
            if any(axes is not None for axes in sharding):
                raise ValueError(
                    f"{name} must not be sharded over Explicit mesh axes inside of the jax.shard_map, but its sharding "
                    f"there is {sharding}: let the jax.shard_map be over these axes, too."
                )


def _positions(layout: Layout, devices: int, index: Array, length: int) -> Array:
    """The positions, int32 (length,), of the shard of device `index`: ascending."""
    place = lax.iota(np.int32, length)
    if layout == "contiguous":
        return index * length + place
    if layout == "striped":
        return place * devices + index
    half = length // 2
    return jnp.where(place < half, index, 2 * devices - 2 - index) * half + place


def _count_below(layout: Layout, devices: int, index: Array, length: int, position: Array) -> Array:
    """How many positions of the shard of device `index`, `length` in number, are below `position` (any shape)."""
    if layout == "contiguous":
        return jnp.clip(position - index * length, 0, length)
    if layout == "striped":
        return jnp.clip((position - index + devices - 1) // devices, 0, length)
    half = length // 2
    first, last = (jnp.clip(position - i * half, 0, half) for i in (index, 2 * devices - 1 - index))
    return first + last


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The static part of a ring.

    Attributes:
      implementation: of each step; chosen for `problem` and the shards.
      problem: that of the whole sequence, but for masks.
      axis_name: of the mesh.
      devices: P, how many it has.
      layout: of queries and keys.
    """

    implementation: ModuleType
    problem: spec.Problem
    axis_name: Hashable
    devices: int
    layout: Layout

    def send(self, tree: Any) -> Any:
        """Hands arrays to the next device; returns those of the one before."""
        turn = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, turn), tree)


class _Keys(NamedTuple):
    """What travels."""

    key: Array  # (B, S, K, D)
    value: Array  # (B, S, K, Dv)
    ids: Array | None  # segment ids, (B, S)


class _Rows(NamedTuple):
    """What stays."""

    query: Array  # (B, T, N, D)
    scale: Array  # (1,), in the compute dtype
    sinks: Array | None  # (N,), likewise
    device: Array  # (), int32: which one of the axis this is
    lower: Array | None  # (1 or B, T), int32: row bounds that count positions of the whole sequence
    upper: Array | None
    ids: Array | None  # segment ids, (B, T)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(
    call: Call, axis_name: Hashable, devices: int, layout: Layout, arrays: dict[str, Any]
) -> Array | tuple[Array, Array]:
    # With a width of 0 every logit is 0, whatever the scale.
    width, dtype = arrays["query"].shape[3], spec.compute_dtype(arrays["query"].dtype)
    scale = 1 / math.sqrt(width or 1) if call.default_scale else arrays["scale"]
    # Before they vary over devices, so that the sum of the devices' gradients is rounded once.
    wide = {"scale": scale, "sinks": arrays["sinks"]}
    arrays |= {name: None if x is None else jnp.asarray(x, dtype) for name, x in wide.items()}
    arrays, device = spec.varied((arrays, lax.axis_index(axis_name)))
    get, query = arrays.get, arrays["query"]
    lower, upper = _bounds(call, devices, layout, device, arrays)
    keys = _Keys(arrays["key"], arrays["value"], get("key_value_segment_ids"))
    ids = get("query_segment_ids")
    rows = _Rows(query, arrays["scale"].reshape(1), arrays["sinks"], device, lower, upper, ids)
    problem = spec.Problem(softcap=call.softcap, deterministic=call.deterministic)
    like_a_step = spec.Operands(query, keys.key, keys.value, rows.scale, lower, upper)
    implementation = dispatch.choose(call.implementation, problem, like_a_step)
    ring = _Ring(implementation, problem, axis_name, devices, layout)
    if implementation is reference:
        out, lse, *_ = _forward(ring, rows, keys)  # is differentiated by JAX itself
    else:
        out, lse, *_ = _attend(ring, *autodiff.reverse_mode_only((rows, keys)))
    lse = lse.astype(np.float32)
    if not call.batched:
        out, lse = out[0], lse[0]
    return (out, lse) if call.return_residual else out


def _bounds(
    call: Call, devices: int, layout: Layout, device: Array, arrays: dict[str, Any]
) -> tuple[Array, Array] | tuple[None, None]:
    """Row bounds of a device's rows, of all masks but segment ids; they count positions of the whole sequence.

    None if no row's keys are hidden.
    """
    get = arrays.get
    batch, length = arrays["query"].shape[:2]
    rows, keys = length * devices, arrays["key"].shape[1] * devices
    dynamic = ("query_seq_lengths", "key_value_seq_lengths", "row_bounds", "query_segment_ids")
    if call.offset is not None and all(get(name) is None for name in dynamic):
        low = None if call.left is None else call.offset - call.left
        high = None if call.right is None else call.offset + call.right + 1
        if spec.static_band(rows, keys, low, high) == (None, None):
            return None, None
    return spec.dynamic_bounds(
        (batch, rows, keys),
        arrays["query_offset"] if call.offset is None else call.offset,
        call.left,
        call.right,
        get("query_seq_lengths"),
        get("key_value_seq_lengths"),
        get("row_bounds"),
        position=_positions(layout, devices, device, length)[None],
    )


def _step(ring: _Ring, rows: _Rows, keys: _Keys, source: Any) -> tuple[spec.Operands, Array | None]:
    """The call of one step, on the keys of device `source`; and which rows see any, (1 or B, T), None if all do."""
    operands = spec.Operands(rows.query, keys.key, keys.value, rows.scale)
    if rows.lower is None or rows.upper is None:
        return operands, None
    length = keys.key.shape[1]
    count = functools.partial(_count_below, ring.layout, ring.devices, source, length)
    lower, upper = count(rows.lower), count(rows.upper)
    if rows.ids is None or keys.ids is None:
        return operands._replace(lower=lower, upper=upper), lower < upper
    lower, upper, row_order, key_order = spec.segment_bounds(rows.ids, keys.ids, lower, upper)
    seen = spec.permute(lower < upper, jnp.argsort(row_order, axis=1), 1)
    return operands._replace(lower=lower, upper=upper, query_order=row_order, key_order=key_order), seen


def _unless_unseen(seen: Array | None, compute: Callable[[Any], Any], otherwise: Any) -> Any:
    """`compute(otherwise)`, of the type of `otherwise`, if any row sees anything; else `otherwise` itself."""

    def varied(x: Any) -> Any:  # what empty operands give is a constant
        return spec.varied_like(x, compute(x))

    return varied(otherwise) if seen is None else lax.cond(seen.any(), varied, lambda x: x, otherwise)


class _Sum(NamedTuple):
    """The softmax over the keys that have come by, in the compute dtype: as an online softmax keeps it."""

    top: Array  # (B, T, N): the largest lse of a step, or the least finite number
    total: Array  # (B, T, N): the sum of exp(lse - top)
    acc: Array  # (B, T, N, Dv): the sum of exp(lse - top) * out


def _forward(ring: _Ring, rows: _Rows, keys: _Keys) -> tuple[Array, Array, Array | None, Array | None]:
    """Out (B, T, N, Dv) in query's dtype, lse (B, T, N), its rounding, and what `autodiff.apply_sinks` gives beside."""
    problem = dataclasses.replace(ring.problem, wide_out=True)
    dtype = spec.compute_dtype(rows.query.dtype)

    def attend(i: int | Array, keys: _Keys, found: _Sum) -> _Sum:
        operands, seen = _step(ring, rows, keys, (rows.device - i) % ring.devices)

        def merge(found: _Sum) -> _Sum:
            out, lse, rounding, _ = autodiff.forward(ring.implementation, problem, operands)
            # What lse lost when it was rounded is as much a part of the weight.
            lse, rounding = (x.astype(dtype) for x in (lse, jnp.zeros_like(lse) if rounding is None else rounding))
            top = lax.stop_gradient(jnp.maximum(found.top, lse))
            before, now = jnp.exp(found.top - top), jnp.exp(lse - top + rounding)
            return _Sum(
                top,
                found.total * before + now,
                found.acc * before[..., None] + out.astype(dtype) * now[..., None],
            )

        return _unless_unseen(seen, merge, found)

    shape = rows.query.shape[:3]
    nothing = _Sum(
        jnp.full(shape, jnp.finfo(dtype).min, dtype),
        jnp.zeros(shape, dtype),
        jnp.zeros((*shape, keys.value.shape[3]), dtype),
    )
    found = spec.varied_like(rows.query, nothing)

    def turn(carry: tuple[_Keys, _Sum], i: Array) -> tuple[tuple[_Keys, _Sum], None]:
        keys, found = carry
        arriving = ring.send(keys)  # meanwhile
        return (arriving, attend(i, keys, found)), None

    (keys, found), _ = lax.scan(turn, (keys, found), jnp.arange(ring.devices - 1, dtype=np.int32))
    top, total, acc = attend(ring.devices - 1, keys, found)
    some = total != 0
    total = jnp.where(some, total, 1)
    lse = top + jnp.log(total)
    rounding = jnp.where(some, jnp.log(total) - (lse - top), 0)
    lse = jnp.where(some, lse, -jnp.inf)
    out = acc / total[..., None]
    return autodiff.apply_sinks(rows.sinks, (out, lse, rounding), rows.query.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, rows: _Rows, keys: _Keys) -> tuple[Array, Array, Array | None, Array | None]:
    return _forward(ring, rows, keys)


def _attend_fwd(ring: _Ring, rows: _Rows, keys: _Keys) -> tuple[Any, Any]:
    results = out, lse, rounding, unscaled = autodiff.named(_attend(ring, rows, keys))
    return results, (rows, keys, unscaled, out, lse, rounding)


def _attend_bwd(ring: _Ring, residuals: Any, cotangents: Any) -> tuple[_Rows, _Keys]:
    (query, scale, key, value), sinks = _backward(ring, *residuals, *cotangents[:2])
    none: Any = None
    return _Rows(query, scale, sinks, none, None, None, None), _Keys(key, value, None)


_attend.defvjp(_attend_fwd, _attend_bwd)


class _Gradients(NamedTuple):
    """In the compute dtype while they are summed."""

    query: Array
    scale: Array
    key: Array
    value: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(
    ring: _Ring,
    rows: _Rows,
    keys: _Keys,
    unscaled: Array | None,
    out: Array,
    lse: Array,
    rounding: Array,
    dout: Array,
    dlse: Array,
) -> tuple[_Gradients, Array | None]:
    """The gradients of a device's queries, scale, keys and values, in their dtypes; and of sinks."""
    dtype = spec.compute_dtype(rows.query.dtype)
    arrays, dsinks = autodiff.under_sinks(rows.sinks, unscaled, (out, lse, rounding, dout, dlse))

    def gradients(i: int | Array, keys: _Keys) -> _Gradients:
        operands, seen = _step(ring, rows, keys, (rows.device - i) % ring.devices)
        out, lse, *rest = arrays
        # Rows that see nothing at this step: an implementation knows such rows by their lse.
        visible = lse if seen is None else jnp.where(seen[..., None], lse, -jnp.inf)

        def compute(_: _Gradients) -> _Gradients:
            results = (out, visible, *rest)
            found = autodiff.backward(ring.implementation, ring.problem, False, operands, None, None, *results)[0]
            return _Gradients(*(x.astype(dtype) for x in (found.query, found.scale, found.key, found.value)))

        nothing = _Gradients(*(jnp.zeros(x.shape, dtype) for x in (rows.query, rows.scale, keys.key, keys.value)))
        return _unless_unseen(seen, compute, spec.varied_like(rows.query, nothing))

    add = functools.partial(jax.tree.map, jnp.add)

    def turn(carry: tuple[_Keys, _Gradients], i: Array) -> tuple[tuple[_Keys, _Gradients], None]:
        keys, total = carry
        # Meanwhile the next keys are on their way, and so are the sums that belong to the present ones.
        arriving, (dkey, dvalue) = ring.send((keys, total[2:]))
        return (arriving, add(_Gradients(*total[:2], dkey, dvalue), gradients(i, keys))), None

    carry = ring.send(keys) if ring.devices > 1 else keys, gradients(0, keys)
    (_, total), _ = lax.scan(turn, carry, jnp.arange(1, ring.devices, dtype=np.int32))
    home = _Gradients(*total[:2], *ring.send(total[2:])) if ring.devices > 1 else total
    given = (rows.query, rows.scale, keys.key, keys.value)
    return _Gradients(*(x.astype(like.dtype) for x, like in zip(home, given, strict=True))), dsinks


def _refuse(*_: Any) -> NoReturn:
    raise TypeError(
        "ring_attention supports second and higher derivatives only with implementation='reference'; first ones, in "
        "reverse mode, work with every implementation."
    )


_backward.defvjp(_refuse, _refuse)
