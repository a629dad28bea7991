"""What one attention call computes: the static problem, its array operands, and the row bounds that every mask becomes.

Every structured mask lets a query row see ONE interval of keys, its row bounds `[lower, upper)`. Causality, sliding
windows, lengths and user-given bounds are intervals of key positions. Segment ids become intervals once rows and keys
are stably sorted by id, because positions stay monotone inside a segment. So an implementation knows a single idea.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything static about a call that its operands' shapes and dtypes do not say.

    Attributes:
      band: static row bounds: row `i` sees keys `[i + band[0], i + band[1])` cut to `[0, S)`; None on a side is
        unbounded. Meaningless when `Operands.lower` is given, which then holds the whole truth.
      softcap: positive cap `c` of `c * tanh(logits / c)`, or None.
      deterministic: whether gradients must be bitwise repeatable.
      wide_out: whether out is in the compute dtype, for a caller that goes on computing with it.
    """

    band: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    deterministic: bool = False
    wide_out: bool = False


class Operands(NamedTuple):
    """The arrays of a call.

    The leading axis of every operand may be shorter than the batch size B, of which it then is a divisor: batch
    element `b` uses row `b % length`. Length 1 is ordinary broadcasting; longer ones come from vmap over some operands
    only, and spare their copies.

    Attributes:
      query: (B, T, N, D).
      key: (B, S, K, D), with N = K * G; query head `n` uses key/value head `n // G`.
      value: (B, S, K, Dv).
      scale: (B,), float32 or the float64 of float64 inputs.
      lower, upper: (B, T) int32, within [0, S]; both or neither; a row with `lower >= upper` sees nothing.
      bias: (B, 1 or N, 1 or T, 1 or S), any float dtype.
      mask: like `bias`, bool; False hides.
      query_order: (B, T) int32, the permutation that sorts query rows; `lower`, `upper` are in sorted order.
      key_order: (B, S) int32, the permutation that sorts keys; `lower` and `upper` count sorted keys.
    """

    query: Array
    key: Array
    value: Array
    scale: Array
    lower: Array | None = None
    upper: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    query_order: Array | None = None
    key_order: Array | None = None

    @property
    def batch(self) -> int:
        """B, the longest leading axis (0 when any is 0)."""
        lengths = [x.shape[0] for x in self if x is not None]
        return 0 if 0 in lengths else max(lengths)

    @property
    def is_empty(self) -> bool:
        """Whether no query row or no key exists, so that there is nothing to launch."""
        return 0 in (self.batch, *self.query.shape[1:3], self.key.shape[1])


class Gradients(NamedTuple):
    """What `backward` returns: float arrays with the full batch axis, but for `bias`, which has its operand's shape.

    `scale` is (B,), one partial sum a batch element; `bias` is None unless it was asked for.
    """

    query: Array
    key: Array
    value: Array
    scale: Array
    bias: Array | None = None


def compute_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """The dtype of softmax, accumulators and the internal lse: float64 for float64, float32 for all else."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def as_stored(x: Array) -> Array:
    """An array in the compute dtype, with the numbers that a kernel reads from it.

    Where an array was rounded to 16 bits, XLA may go back to what it was before (`xla_allow_excess_precision`): of two
    readers, one would see other numbers. The exponent keeps its range: where float16 is subnormal, it is less precise
    than what comes out here.
    """
    wide = x.astype(compute_dtype(x.dtype))
    return wide if x.dtype.itemsize > 2 else lax.reduce_precision(wide, 8, jnp.finfo(x.dtype).nmant)


def out_dtype(problem: Problem, operands: Operands) -> np.dtype:
    """The dtype of out: query's, unless it is asked for in the compute dtype."""
    dtype = operands.query.dtype
    return compute_dtype(dtype) if problem.wide_out else dtype


def row_bounds(problem: Problem, operands: Operands) -> tuple[Array, Array]:
    """The int32 row bounds of a call as arrays, (B, T) or (1, T), whether they are static or operands.

    Rows that see nothing are (0, 0), so that they widen no range but one that starts from 0.
    """
    rows, keys = operands.query.shape[1], operands.key.shape[1]
    if operands.lower is None or operands.upper is None:
        position = lax.iota(np.int32, rows)[None]
        low, high = problem.band
        lower = jnp.zeros_like(position) if low is None else jnp.clip(position + low, 0, keys)
        upper = jnp.full_like(position, keys) if high is None else jnp.clip(position + high, 0, keys)
    else:
        bounds = operands.lower, operands.upper
        batch = max(map(len, bounds))
        lower, upper = (jnp.tile(x, (batch // len(x), 1)) for x in bounds)
    seen = lower < upper
    return jnp.where(seen, lower, 0), jnp.where(seen, upper, 0)


def seen_keys(lower: Array, upper: Array, keys: int) -> Array:
    """Which keys some row sees, bool (B, S), from row bounds (B, T)."""
    seen = lower < upper

    def count(bounds: Array) -> Array:
        """How many rows' bounds lie at each key."""
        row = jnp.where(seen, bounds, keys)
        return jax.vmap(lambda x: jnp.zeros(keys + 1, np.int32).at[x].add(1))(row)

    return jnp.cumsum(count(lower) - count(upper), axis=1)[:, :keys] > 0


def static_band(rows: int, keys: int, low: int | None, high: int | None) -> tuple[int | None, int | None]:
    """Puts a static band into its one canonical form: a side that hides nothing is None, the others fit in int32."""
    if low is not None:
        low = None if rows - 1 + low <= 0 else min(low, keys)
    if high is not None:
        high = None if high >= keys else max(high, -rows)
    return low, high


def dynamic_bounds(
    shape: tuple[int, int, int],
    offset: int | Array,
    left: int | None,
    right: int | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    user: tuple[Array, Array] | None,
    position: Array | None = None,
) -> tuple[Array, Array]:
    """Intersects all interval masks.

    Args:
      shape: (B, T, S).
      offset: key position of query row 0, an int or int32 of shape () or (B,).
      left: row `i` sees keys from `i + offset - left`; None is unbounded.
      right: to `i + offset + right`, inclusive; None is unbounded.
      query_lengths: int32 (B,) or None; rows from there on see nothing.
      key_lengths: int32 (B,) or None; keys from there on are hidden.
      user: lower and upper, int32 (B, T), or None.
      position: int32 (1, R), which rows are asked for; by default all T. `user` has just these.

    Returns:
      lower and upper, int32 (B, T) or (1, T), within [0, S], of rows and keys in the order given.
    """
    _, rows, keys = shape
    position = lax.iota(np.int32, rows)[None] if position is None else position

    def diagonal(distance: int) -> Array:
        """The position `i + offset + distance`, cut to [0, S], computed without wrapping around."""
        if isinstance(offset, int):
            return jnp.clip(position + min(max(offset + distance, -rows), keys), 0, keys)
        start = _saturating_add(offset.reshape(-1, 1), distance)
        return jnp.clip(position + jnp.clip(start, -rows, keys), 0, keys)

    lower = jnp.zeros_like(position) if left is None else diagonal(-left)
    upper = jnp.full_like(position, keys) if right is None else diagonal(right + 1)
    if key_lengths is not None:
        upper = jnp.minimum(upper, jnp.clip(key_lengths, 0, keys)[:, None])
    if query_lengths is not None:
        upper = jnp.where(position < query_lengths[:, None], upper, 0)
    if user is not None:
        lower = jnp.maximum(lower, jnp.clip(user[0], 0, keys))
        upper = jnp.minimum(upper, jnp.clip(user[1], 0, keys))
    lower, upper = jnp.broadcast_arrays(lower, upper)
    return lower, upper


def segment_bounds(query_ids: Array, key_ids: Array, lower: Array, upper: Array) -> tuple[Array, Array, Array, Array]:
    """Turns equality of segment ids, intersected with row bounds, into row bounds of sorted rows and sorted keys.

    Inside a segment the stable sort keeps keys in order of position, so a row's keys below a position are a prefix of
    its segment: their number is found by binary search for the pair (id, position) among the sorted keys.

    Args:
      query_ids: int32 (B, T), any ids in any order.
      key_ids: int32 (B, S), likewise.
      lower: int32 (B, T) or (1, T), the first key position that a row may see.
      upper: like `lower`, the key position at which it ends.

    Returns:
      `lower` and `upper` in sorted order and `query_order`, `key_order`, the sorting permutations (all int32).
    """
    batch, rows = query_ids.shape
    keys = key_ids.shape[1]

    def sort(ids: Array) -> tuple[Array, Array]:
        places = lax.broadcasted_iota(np.int32, ids.shape, 1)
        ids, order = lax.sort((ids, places), dimension=1, is_stable=True, num_keys=1)
        return ids, order

    ids, query_order = sort(query_ids)
    sorted_key_ids, key_order = sort(key_ids)
    lower = jnp.broadcast_to(lower, (batch, rows))
    upper = jnp.maximum(jnp.broadcast_to(upper, (batch, rows)), lower)

    def rank(bound: Array) -> Array:
        """The number of sorted keys whose (id, position) is below (row's id, bound)."""
        bound = jnp.take_along_axis(bound, query_order, axis=1)

        def halve(_: int, span: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = span
            middle = (low + high) // 2
            at = jnp.minimum(middle, keys - 1)
            key_id = jnp.take_along_axis(sorted_key_ids, at, axis=1)
            place = jnp.take_along_axis(key_order, at, axis=1)
            below = (key_id < ids) | ((key_id == ids) & (place < bound))
            open_ = low < high
            return jnp.where(open_ & below, middle + 1, low), jnp.where(open_ & ~below, middle, high)

        span = (jnp.zeros_like(bound), jnp.full_like(bound, keys))
        _, _, span = varied((ids, bound, span))
        return lax.fori_loop(0, keys.bit_length(), halve, span)[0]

    if keys == 0:
        zeros = jnp.zeros_like(ids)
        return zeros, zeros, query_order, key_order
    return rank(lower), rank(upper), query_order, key_order


def varied(tree: Any) -> Any:
    """The arrays of a tree, made to vary over all axes of a `jax.shard_map` over which one of them varies.

    Under `check_vma=True` its axes are part of an array's type. What is replicated over an axis becomes an operand for
    each device, whose cotangents are then summed over the axis.
    """
    axes: frozenset[str] = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(tree)))

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def varied_like(x: Array, tree: Any) -> Any:
    """The arrays of a tree, made to vary over the axes of a `jax.shard_map` over which `x` or one of them varies.

    So constants get the type of what is computed from `x`: as the first values of a loop, or in place of a result.
    """
    return varied((x, tree))[1]


def varying_axes(x: Array) -> frozenset[str]:
    """The axes of a `jax.shard_map` over which an array varies, as far as its type says."""
    axes: frozenset[str] = jax.typeof(x).mat.varying
    return axes


def permute(x: Array, order: Array, axis: int) -> Array:
    """Applies a permutation per batch element, `order` (B, length), along `axis` of x (1 or B, ...).

    An axis of length 1 is broadcast and stays as it is.
    """
    if x.shape[axis] == 1:
        return x
    batch = order.shape[0]
    x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
    return jax.vmap(lambda row, places: jnp.take(row, places, axis=axis - 1, mode="clip"))(x, order)


def _saturating_add(x: Array, number: int) -> Array:
    """`x + number` in int32, at its ends where the sum lies beyond them."""
    least, most = int(_INT32.min), int(_INT32.max)
    number = min(max(number, 4 * least), 4 * most)  # every sum beyond is at an end too
    while number:
        part = min(max(number, least), most)
        x = (jnp.minimum(x, most - part) if part > 0 else jnp.maximum(x, least - part)) + np.int32(part)
        number -= part
    return x
