"""How the kernels cut a call into blocks: packed rows, the bounds of a block's rows, and the blocks that it visits.

The G query heads of a group read the same keys, so they are packed into the rows of one block: packed row `r` is query
position `r // G` of head `r % G` of the group. K and V are never repeated, one load of them serves the group, and the
backward sums over the group by walking over rows.

Everything here runs inside the kernels, whose arrays are the registers of one thread block. Sizes of a block: R packed
rows, C keys. An index is an int32 scalar, a Python number where it is static.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_fa4 import problem as spec
from jax_fa4.pallas.blocks import Blocks, padded

Index = Any


class Rows(NamedTuple):
    """The packed rows of one block, int32 (R,); those past the last one repeat it."""

    token: Array  # query position
    head: Array  # query head in the group
    lower: Array | None  # the first key that the row sees; None is 0
    upper: Array | None  # the end of the keys that it sees; None is S

    def down(self) -> Rows:
        """As (R, 1)."""
        return Rows(*(None if x is None else x[:, None] for x in self))  # type: ignore[arg-type]

    def across(self) -> Rows:
        """As (1, R)."""
        return Rows(*(None if x is None else x[None] for x in self))  # type: ignore[arg-type]


class Hull(NamedTuple):
    """The least and the greatest of the bounds of a block's rows.

    A row that sees nothing does not widen the range from the least lower to the greatest upper bound.
    """

    least_lower: Index
    greatest_lower: Index
    least_upper: Index
    greatest_upper: Index


class Visit(NamedTuple):
    """What one block visits: blocks `[first, last)`, of which `[whole_first, whole_last)` need no mask."""

    first: Index
    whole_first: Index
    whole_last: Index
    last: Index


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The static sizes of one kernel, and the geometry that follows from them.

    Attributes:
      batch, kv_heads, group: B, K, G.
      tokens, keys: T, S.
      width, value_width: D, Dv.
      band: `Problem.band`; (None, None) where bounds are arrays.
      bounded: whether row bounds are arrays.
      blocks: block sizes.
      interpret: whether the kernel is interpreted, on a CPU.
    """

    batch: int
    kv_heads: int
    group: int
    tokens: int
    keys: int
    width: int
    value_width: int
    band: tuple[int | None, int | None]
    bounded: bool
    blocks: Blocks
    interpret: bool

    @classmethod
    def of(
        cls, problem: spec.Problem, operands: spec.Operands, batch: int, blocks: Blocks, *, interpret: bool
    ) -> Tiling:
        """Of a kernel that works on `batch` elements."""
        (_, tokens, heads, width), (_, keys, kv_heads, _) = operands.query.shape, operands.key.shape
        bounded = operands.lower is not None
        group, value_width = heads // kv_heads, operands.value.shape[3]
        band = (None, None) if bounded else problem.band
        return cls(batch, kv_heads, group, tokens, keys, width, value_width, band, bounded, blocks, interpret)

    @property
    def rows(self) -> int:
        """Packed rows of one key/value head."""
        return self.tokens * self.group

    @property
    def row_blocks(self) -> int:
        """Blocks of the packed rows."""
        return -(-self.rows // self.blocks.rows)

    @property
    def key_blocks(self) -> int:
        """Blocks of the keys."""
        return -(-self.keys // self.blocks.keys)

    @property
    def exp2(self) -> Callable[[Array], Array]:
        """Two to the power of float32 numbers; results that are no normal numbers are 0."""
        return jnp.exp2 if self.interpret else _hardware_exp2

    # Rows and keys of a block.

    def block_of_rows(self, block: Index, bounds: Sequence[Any]) -> Rows:
        """A block's rows; `bounds` is empty, or holds the references of lower and upper (T,)."""
        row = jnp.minimum(block * self.blocks.rows + lax.iota(np.int32, self.blocks.rows), self.rows - 1)
        token, head = self._unpack(row)
        if bounds:
            lower, upper = (ref[token] for ref in bounds)
        else:
            lower, upper = (None if side is None else self._diagonal(token, side) for side in self.band)
        return Rows(token, head, lower, upper)

    def key_positions(self, block: Index) -> Array:
        """int32 (C,)."""
        return block * self.blocks.keys + lax.iota(np.int32, self.blocks.keys)

    def sees(self, row: Rows, key: Array) -> Array:
        """Which keys each row sees, bool: of rows (R, 1) and keys (1, C), or of rows (1, R) and keys (C, 1)."""
        seen = key < (self.keys if row.upper is None else row.upper)
        return seen if row.lower is None else seen & (key >= row.lower)

    def some_sees(self, rows: Rows, key_block: Index) -> Array:
        """Whether one of the rows, whose bounds are arrays, sees a key of a block."""
        assert rows.lower is not None
        assert rows.upper is not None
        start = key_block * self.blocks.keys
        seen = jnp.minimum(rows.upper, start + self.blocks.keys) - jnp.maximum(rows.lower, start)  # keys of the block
        return jnp.max(seen) > 0

    # What a block visits.

    def hull(self, block: Index, rows: Rows) -> Hull:
        """The hull of a block's rows."""
        if self.bounded:
            assert rows.lower is not None
            assert rows.upper is not None
            sees_some = rows.lower < rows.upper
            least = jnp.where(sees_some, rows.lower, self.keys).min()
            greatest = jnp.where(sees_some, rows.upper, 0).max()
            return Hull(least, rows.lower.max(), rows.upper.min(), greatest)
        # The bounds of a band grow with the row: those of the block's first and last row are all that is needed.
        first = block * self.blocks.rows
        last = jnp.minimum(first + self.blocks.rows, self.rows) - 1
        ends = [self._unpack(row)[0] for row in (first, last)]
        low, high = self.band
        lower = (0, 0) if low is None else (self._diagonal(token, low) for token in ends)
        upper = (self.keys, self.keys) if high is None else (self._diagonal(token, high) for token in ends)
        return Hull(*lower, *upper)

    def visited_keys(self, hull: Hull) -> Visit:
        """The key blocks that rows of this hull visit.

        A row that sees nothing has a lower bound that is not below its upper one, which leaves no block whole.
        """
        size = self.blocks.keys
        return _ordered(
            hull.least_lower // size,
            _ceil_div(hull.greatest_lower, size),
            hull.least_upper // size,
            _ceil_div(hull.greatest_upper, size),
        )

    def visited_rows(self, key_block: Index, visits: Sequence[Any]) -> Visit:
        """The row blocks that visit a key block; `visits` is empty, or holds the reference of `row_visits`."""
        for ref in visits:
            return Visit(*(ref[key_block, i] for i in range(len(Visit._fields))))
        low, high = self.band  # row i sees keys [i + low, i + high)
        start = key_block * self.blocks.keys
        end = jnp.minimum(start + self.blocks.keys, self.keys)
        first: Index = 0
        whole_first: Index = 0
        whole_last: Index = self.row_blocks
        last: Index = self.row_blocks
        size = self.blocks.rows
        if high is not None:  # The first rows see no key, or not the last keys, of the block.
            first = jnp.clip(start - high + 1, 0, self.tokens) * self.group // size
            whole_first = _ceil_div(jnp.clip(end - high, 0, self.tokens) * self.group, size)
        if low is not None:  # Nor do the last rows see the first keys.
            whole = jnp.clip(start - low + 1, 0, self.tokens)
            # A block that the end of the rows cuts is whole when all of its rows that exist are.
            whole_last = jnp.where(whole == self.tokens, self.row_blocks, whole * self.group // size)
            last = _ceil_div(jnp.clip(end - low, 0, self.tokens) * self.group, size)
        return _ordered(first, whole_first, whole_last, last)

    def row_visits(self, lower: Array, upper: Array) -> Array:
        """`visited_rows` of row bounds (b, T), computed outside of the kernel: int32 (b', key blocks, 4).

        Bounds may come in any order: the blocks without a mask are the first run of such.
        """
        batch = max(len(lower), len(upper))

        def by_block(x: Array) -> Array:
            """(b', row blocks, R)."""
            x = jnp.repeat(jnp.tile(x, (batch // len(x), 1)), self.group, axis=1)
            x = jnp.pad(x, ((0, 0), (0, self.row_blocks * self.blocks.rows - self.rows)), mode="edge")
            return x.reshape(batch, self.row_blocks, self.blocks.rows)

        lower, upper = by_block(lower), by_block(upper)
        some = lower < upper
        start = self.blocks.keys * lax.iota(np.int32, self.key_blocks)[None, :, None]
        end = jnp.minimum(start + self.blocks.keys, self.keys)
        least, greatest = jnp.where(some, lower, self.keys).min(2), jnp.where(some, upper, 0).max(2)
        visits = (least[:, None] < end) & (greatest[:, None] > start)  # (b', key blocks, row blocks)
        whole = (lower.max(2)[:, None] <= start) & (upper.min(2)[:, None] >= end)
        number = jnp.broadcast_to(lax.iota(np.int32, self.row_blocks), visits.shape)
        none = np.int32(self.row_blocks)
        first = jnp.where(visits, number, none).min(2)
        last = jnp.where(visits, number + 1, 0).max(2)
        whole_first = jnp.where(whole, number, none).min(2)
        whole_last = jnp.where(~whole & (number > whole_first[..., None]), number, none).min(2)
        return jnp.stack(_ordered(first, whole_first, whole_last, last), 2)

    def walk_keys(self, visit: Visit, step: Callable[[bool, Index, Any], Any], carry: Any) -> Any:
        """Folds `step(masked, key_block, carry)` over a visit."""
        low, high = self.band
        partial = self.keys % self.blocks.keys > 0
        return _walk(visit, step, carry, self.bounded or low is not None, self.bounded or high is not None or partial)

    def walk_rows(self, visit: Visit, step: Callable[[bool, Index, Any], Any], carry: Any) -> Any:
        """Folds `step(masked, row_block, carry)` over a visit.

        Neither rows nor keys that do not exist need a mask here: the backward gives such rows no weight, and does not
        store the gradients of such keys.
        """
        low, high = self.band
        return _walk(visit, step, carry, self.bounded or high is not None, self.bounded or low is not None)

    # Memory.

    def part(self, x: Any, *block: int | None, head_axis: int | None = None) -> pl.BlockSpec:
        """The part of x (B or a divisor of it, ...) that one element of the grid (blocks, K, B) works on.

        Args:
          x: an array or its type; batch element `b` has the row `b % length` of its leading axis.
          *block: the size of the part on the other axes; None drops an axis of which it has one place.
          head_axis: the axis that is cut by key/value heads; of all others the part has the beginning.
        """

        def place(_: Index, head: Index, batch: Index) -> tuple[Index, ...]:
            at = batch if x.shape[0] == self.batch else lax.rem(batch, np.int32(x.shape[0]))
            return at, *(head if axis == head_axis else np.int32(0) for axis in range(1, len(x.shape)))

        return pl.BlockSpec((None, *block), place)

    def part_of_rows(self, x: Any) -> pl.BlockSpec:
        """Of x (B, T, N, width) or (B, T, N): the rows of a group, at a width that is a power of two."""
        return self.part(x, self.tokens, self.group, *(padded(width) for width in x.shape[3:]), head_axis=2)

    def part_of_keys(self, x: Any) -> pl.BlockSpec:
        """Of x (B, S, K, width): the keys of one head, at a width that is a power of two."""
        return self.part(x, self.keys, None, padded(x.shape[3]), head_axis=2)

    def load_rows(self, ref: Any, rows: Rows, width: int, keep: Array | None = None) -> Array:
        """The rows (R, padded width) of a reference (T, G, padded width): zeros where `keep` (R,) is False."""
        column, exists = _columns(width)
        return _load(ref.at[rows.token[:, None], rows.head[:, None], column], _both(_each(keep), exists))

    def store_rows(self, ref: Any, block: Index, x: Array, width: int | None = None) -> None:
        """Stores x (R, padded width), or (R,) where there is no width, to the rows of a block that exist."""
        row = block * self.blocks.rows + lax.iota(np.int32, self.blocks.rows)
        (token, head), keep = self._unpack(row), row < self.rows
        if width is None:
            plgpu.store(ref.at[token, head], x.astype(ref.dtype), mask=keep)
            return
        column, exists = _columns(width)
        keep = jnp.broadcast_to(_both(keep[:, None], exists), x.shape)
        plgpu.store(ref.at[token[:, None], head[:, None], column], x.astype(ref.dtype), mask=keep)

    def load_keys(self, ref: Any, block: Index, width: int, hull: tuple[Index, Index] | None) -> Array:
        """The keys of a block (C, padded width), zeros for those outside of `[hull[0], hull[1])`, if it is given."""
        key = self.key_positions(block)[:, None]
        inside = None if hull is None else (key >= hull[0]) & (key < hull[1])
        at = pl.ds(block * self.blocks.keys, self.blocks.keys)
        return _load(ref.at[at, :], _both(inside, _columns(width)[1]))

    def store_keys(self, ref: Any, block: Index, x: Array, width: int) -> None:
        """Stores x (C, padded width) to the keys of a block that exist."""
        key, (column, exists) = self.key_positions(block)[:, None], _columns(width)
        keep = jnp.broadcast_to(_both(key < self.keys, exists), x.shape)
        plgpu.store(ref.at[key, column], x.astype(ref.dtype), mask=keep)

    def load_numbers(self, ref: Any, block: Index) -> Array:
        """The numbers (R,) of the rows of a block, from a reference (padded rows,)."""
        return plgpu.load(ref.at[pl.ds(block * self.blocks.rows, self.blocks.rows)])

    def one_of_blocks(self) -> pl.BlockSpec:
        """Of an array (B, K, row blocks): one number, for the element of the grid that owns the block of rows."""
        return pl.BlockSpec((None, None, None), lambda i, head, batch: (batch, head, self.row_blocks - 1 - i))

    def _unpack(self, row: Array) -> tuple[Array, Array]:
        """Token and head of packed rows."""
        if self.group == 1:
            return row, jnp.zeros_like(row)
        group = np.int32(self.group)
        return lax.div(row, group), lax.rem(row, group)

    def _diagonal(self, token: Array, distance: int) -> Array:
        return jnp.clip(token + distance, 0, self.keys)


def call(
    kernel: Callable[..., None],
    tiling: Tiling,
    *,
    grid_blocks: int,
    operands: Sequence[Array],
    in_specs: Sequence[pl.BlockSpec],
    results: Sequence[jax.ShapeDtypeStruct],
    out_specs: Sequence[pl.BlockSpec],
    name: str,
) -> Any:
    """Runs a kernel for every block of every key/value head of every batch element.

    Blocks are the fastest axis of the grid: those that run together read the same keys.
    """
    blocks, manual = tiling.blocks, jax.typeof(operands[0]).mat
    typed = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=manual) for x in results]
    return pl.pallas_call(
        kernel,
        grid=(grid_blocks, tiling.kv_heads, tiling.batch),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=typed,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=tiling.interpret,
        name=name,
    )(*operands)


def _hardware_exp2(x: Array) -> Array:
    """The GPU's instruction as it is: `jnp.exp2` spends three more on results that are no normal numbers."""
    (result,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, np.float32)],
    )
    return result


def _walk(visit: Visit, step: Callable[[bool, Index, Any], Any], carry: Any, begins: bool, ends: bool) -> Any:
    """Up to three loops; the first and the last, of blocks that need a mask, only where there can be such blocks."""
    if begins:
        carry = lax.fori_loop(visit.first, visit.whole_first, lambda i, c: step(True, i, c), carry)
    carry = lax.fori_loop(visit.whole_first, visit.whole_last, lambda i, c: step(False, i, c), carry)
    if ends:
        carry = lax.fori_loop(visit.whole_last, visit.last, lambda i, c: step(True, i, c), carry)
    return carry


def _ordered(first: Index, whole_first: Index, whole_last: Index, last: Index) -> Visit:
    """A visit that goes forward."""
    if all(isinstance(x, int) for x in (first, whole_first, whole_last, last)):
        return Visit(*(np.int32(x) for x in (first, whole_first, whole_last, last)))
    last = jnp.maximum(first, last)
    whole_first = jnp.clip(whole_first, first, last)
    return Visit(first, whole_first, jnp.clip(whole_last, whole_first, last), last)


def _ceil_div(x: Index, y: int) -> Index:
    return -(-x // y)


def _columns(width: int) -> tuple[Array, Array | None]:
    """The columns (1, padded width), and which of them exist; None where all do."""
    column = lax.broadcasted_iota(np.int32, (1, padded(width)), 1)
    return column, None if padded(width) == width else column < width


def _each(keep: Array | None) -> Array | None:
    return None if keep is None else keep[:, None]


def _both(one: Array | None, other: Array | None) -> Any:
    return other if one is None else one if other is None else one & other


def _load(ref: Any, keep: Array | None) -> Array:
    if keep is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=jnp.broadcast_to(keep, ref.shape), other=jnp.zeros((), ref.dtype))
