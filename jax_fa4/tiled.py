"""`tiled`: FlashAttention in pure JAX, the default wherever no kernel applies.

Both passes walk over chunks of (batch, key/value head), inside them over blocks of query rows, and inside those over
the key blocks that some row of the block can see: an online softmax forward, and a backward that recomputes
probabilities from lse. Memory is linear in T + S. Key blocks that every row of a query block sees whole run without
mask code.

Sizes: one step works on logits of shape (b, k, g, q, s): the chunk's batch elements and key/value heads, the query
heads of a group, the rows of a block, and the keys of a block. No matrix product of a step takes a transposed copy of
anything of that shape: those over rows multiply queries and cotangents that were transposed once, before the loops.

Source: Dao, "FlashAttention-2" (2023), sections 3.1 and 3.2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_fa4 import problem as spec


@dataclasses.dataclass(frozen=True)
class _Steps:
    """How large the steps of the loops are: what a platform does best.

    Attributes:
      logits: of one step, at most about. Enough work to hide what a step costs anyway; not more, since this many
        compute-dtype numbers are held a few times over.
      rows: query positions times the heads of a group, under row bounds. Enough for efficient matrix products; not
        more, since what a step computes outside of the bounds is wasted. Without bounds as many as `logits` allows.
      keys: likewise, with and without bounds.
    """

    logits: int
    rows: int
    keys: int


# A CPU pays tens of microseconds for a step, and holds 4 MiB in cache between the two products. An accelerator pays a
# dozen kernel launches for a step, and a synchronisation with its host.
_CPU = _Steps(logits=1 << 20, rows=512, keys=256)
_ACCELERATOR = _Steps(logits=1 << 25, rows=2048, keys=2048)


def why_not(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> None:
    """None: this implementation supports every problem on every device."""


def forward(problem: spec.Problem, operands: spec.Operands) -> tuple[Array, Array, Array]:
    """Attention of `operands`, sorted already: out (B, T, N, Dv) in query's dtype, lse and its rounding (B, T, N)."""
    return _on_platform(functools.partial(_forward, problem), operands)


def backward(
    problem: spec.Problem,
    operands: spec.Operands,
    out: Array,
    lse: Array,
    lse_rounding: Array | None,
    dout: Array,
    dlse: Array | None,
    *,
    with_bias: bool,
) -> spec.Gradients:
    """Gradients of `forward` from its results and their cotangents; that of the bias only when asked."""
    return _on_platform(functools.partial(_backward, problem, with_bias), operands, out, lse, lse_rounding, dout, dlse)


def work_on_accelerators(problem: spec.Problem, operands: spec.Operands) -> tuple[int, int]:
    """How many steps the loops of a pass take, and how many logits they compute; at most, where bounds are arrays."""
    tiling = _Tiling.of(_ACCELERATOR, problem, operands, operands.batch)
    first = np.arange(tiling.row_blocks) * tiling.block_rows
    last = np.minimum(first + tiling.block_rows, tiling.rows)
    low, high = problem.band if operands.lower is None else (None, None)
    lower = np.zeros_like(first) if low is None else np.clip(first + low, 0, tiling.keys)
    upper = np.full_like(first, tiling.keys) if high is None else np.clip(last - 1 + high, 0, tiling.keys)
    visited = np.maximum(_ceil_div(upper, tiling.block_keys) - lower // tiling.block_keys, 0)
    steps = tiling.chunks * int(visited.sum())
    in_step = tiling.chunk_batch * tiling.chunk_heads * tiling.group * tiling.block_rows * tiling.block_keys
    return steps, steps * in_step


def _on_platform(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function(steps, ...)` with the steps for the platform that is lowered for."""
    return lax.platform_dependent(
        *arguments, cpu=functools.partial(function, _CPU), default=functools.partial(function, _ACCELERATOR)
    )


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """The block sizes of one call, and the loops over them."""

    batch: int  # B
    heads: int  # K
    group: int  # G
    rows: int  # T
    keys: int  # S
    chunk_batch: int
    chunk_heads: int
    block_rows: int
    block_keys: int

    @classmethod
    def of(cls, steps: _Steps, problem: spec.Problem, operands: spec.Operands, batch: int) -> _Tiling:
        (rows, all_heads), (keys, heads) = operands.query.shape[1:3], operands.key.shape[1:3]
        group = all_heads // heads
        bounded = operands.lower is not None or problem.band != (None, None)
        most_rows = steps.rows if bounded else steps.logits // steps.keys
        block_rows = _even_block(rows, max(most_rows // group, 8))
        spare = max(1, steps.rows // (block_rows * group))
        block_keys = _even_block(keys, steps.keys * min(spare, 8))
        room = max(1, steps.logits // (group * block_rows * block_keys))
        chunk_heads = _largest_divisor(heads, room)
        # A chunk of batch elements must be a contiguous piece of every operand that is indexed by `b % length`.
        common = math.gcd(batch, *(x.shape[0] for x in operands if x is not None and x.shape[0] > 1))
        chunk_batch = _largest_divisor(common, room // heads) if chunk_heads == heads else 1
        return cls(batch, heads, group, rows, keys, chunk_batch, chunk_heads, block_rows, block_keys)

    @property
    def row_blocks(self) -> int:
        return _ceil_div(self.rows, self.block_rows)

    @property
    def key_blocks(self) -> int:
        return _ceil_div(self.keys, self.block_keys)

    @property
    def chunks(self) -> int:
        return self.batch * self.heads // (self.chunk_batch * self.chunk_heads)

    def chunk(self, x: Array, index: Array) -> Array:
        """Chunk `index` of x (B or a divisor of it, 1 or K, ...)."""
        in_heads = self.heads // self.chunk_heads
        x = _slice(x, 0, (index // in_heads * self.chunk_batch) % x.shape[0], self.chunk_batch)
        return _slice(x, 1, index % in_heads * self.chunk_heads, self.chunk_heads)

    def block(self, x: Array, row_block: Array, key_block: Array) -> Array:
        """The block of a chunk of `split_dense`."""
        x = _slice(x, 3, row_block * self.block_rows, self.block_rows)
        return _slice(x, 4, key_block * self.block_keys, self.block_keys)

    def add_block(self, total: Array, x: Array, chunk: Array, row_block: Array, key_block: Array) -> Array:
        """Adds x (b, k, g, q, s), summed over the axes that `total` broadcasts, to that block of `split_dense`."""
        x = x.sum([axis for axis in range(5) if total.shape[axis] == 1], keepdims=True)
        in_heads = self.heads // self.chunk_heads
        starts: list[Any] = [
            (chunk // in_heads * self.chunk_batch) % total.shape[0],
            chunk % in_heads * self.chunk_heads,
            np.int32(0),
            row_block * self.block_rows,
            key_block * self.block_keys,
        ]
        starts = [np.int32(0) if length == 1 else start for start, length in zip(starts, total.shape, strict=True)]
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, x.shape) + x, starts)

    def split_rows(self, x: Array, fill: float = 0) -> Array:
        """(B, T, N, ...) -> (B, K, G, padded T, ...)."""
        x = _pad(x, 1, self.row_blocks * self.block_rows, fill)
        x = x.reshape(*x.shape[:2], self.heads, self.group, *x.shape[3:])
        return jnp.moveaxis(x, 1, 3)

    def split_keys(self, x: Array) -> Array:
        """(B, S, K, ...) -> (B, K, padded S, ...)."""
        return jnp.moveaxis(_pad(x, 1, self.key_blocks * self.block_keys), 1, 2)

    def split_dense(self, x: Array) -> Array:
        """(B, 1 or N, 1 or T, 1 or S) -> (B, 1 or K, 1 or G, 1 or padded T, 1 or padded S)."""
        if x.shape[2] > 1:
            x = _pad(x, 2, self.row_blocks * self.block_rows)
        if x.shape[3] > 1:
            x = _pad(x, 3, self.key_blocks * self.block_keys)
        heads, group = (1, 1) if x.shape[1] == 1 else (self.heads, self.group)
        return x.reshape(x.shape[0], heads, group, *x.shape[2:])

    def join_rows(self, x: Array) -> Array:
        """(chunk, row block, b, k, g, q, ...) -> (B, T, N, ...)."""
        rest = x.shape[6:]
        x = x.reshape(self.batch // self.chunk_batch, self.heads // self.chunk_heads, *x.shape[1:])
        x = x.transpose(0, 3, 2, 6, 1, 4, 5, *range(7, x.ndim))
        return x.reshape(self.batch, self.row_blocks * self.block_rows, self.heads * self.group, *rest)[:, : self.rows]

    def join_keys(self, x: Array) -> Array:
        """(chunk, b, k, padded S, D) -> (B, S, K, D)."""
        x = x.reshape(self.batch // self.chunk_batch, self.heads // self.chunk_heads, *x.shape[1:])
        x = x.transpose(0, 2, 4, 1, 3, 5)
        return x.reshape(self.batch, self.key_blocks * self.block_keys, self.heads, x.shape[-1])[:, : self.keys]


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """Row bounds by block: which key blocks a query block visits, and which of these need no mask."""

    tiling: _Tiling
    masked: tuple[bool, bool]  # whether a row's lower, upper bound can hide keys (padded keys included)
    lower: Array  # (1 or B, 1, 1, padded T)
    upper: Array

    @classmethod
    def of(cls, problem: spec.Problem, operands: spec.Operands, tiling: _Tiling) -> _Bounds:
        dynamic = operands.lower is not None
        low, high = problem.band
        padded = tiling.key_blocks * tiling.block_keys > tiling.keys
        masked = (dynamic or low is not None, dynamic or high is not None or padded)
        lower, upper = (
            _pad(x, 1, tiling.row_blocks * tiling.block_rows)[:, None, None] for x in spec.row_bounds(problem, operands)
        )
        return cls(tiling, masked, lower, upper)

    def rows(self, chunk: Array, row_block: Array) -> tuple[Array, Array]:
        """`lower` and `upper` (b, 1, 1, q) of one query block."""
        start, size = row_block * self.tiling.block_rows, self.tiling.block_rows
        return (
            _slice(self.tiling.chunk(self.lower, chunk), 3, start, size),
            _slice(self.tiling.chunk(self.upper, chunk), 3, start, size),
        )

    def walk(self, lower: Array, upper: Array, step: Callable[..., Any], carry: Any) -> Any:
        """Folds `step(masked, key_block, carry)` over the key blocks that rows with these bounds can see."""
        if self.tiling.key_blocks == 1:
            return step(any(self.masked), np.int32(0), carry)
        size = self.tiling.block_keys
        seen = lower < upper
        last_key = np.int32(self.tiling.key_blocks * size)
        first = jnp.where(seen, lower, last_key).min() // size
        last = _ceil_div(jnp.where(seen, upper, 0).max(), size)
        whole_first = jnp.clip(_ceil_div(jnp.where(seen, lower, 0).max(), size), first, jnp.maximum(first, last))
        whole_last = jnp.clip(
            jnp.where(seen, upper, last_key).min() // size, whole_first, jnp.maximum(whole_first, last)
        )
        # Of a batch element whose rows see nothing here, no key is seen: it needs masks that keep its keys out.
        whole_last = jnp.where(seen.any(3).all(), whole_last, whole_first)
        unmasked, masked = functools.partial(step, False), functools.partial(step, True)
        if self.masked == (False, False):
            return lax.fori_loop(first, last, unmasked, carry)
        if self.masked[0]:
            carry = lax.fori_loop(first, whole_first, masked, carry)
        carry = lax.fori_loop(whole_first, whole_last, unmasked, carry)
        return lax.fori_loop(whole_last, last, masked, carry)


class _Piece(NamedTuple):
    """Operands split into heads and rows (`_Tiling.split_*`), whole or one chunk of them."""

    query: Array  # (b, k, g, padded T, D)
    key: Array  # (b, k, padded S, D)
    value: Array  # (b, k, padded S, Dv)
    scale: Array  # (b, 1, 1, 1, 1)
    bias: Array | None  # (b, 1 or k, 1 or g, 1 or padded T, 1 or padded S)
    mask: Array | None

    @classmethod
    def of(cls, operands: spec.Operands, tiling: _Tiling) -> _Piece:
        return cls(
            tiling.split_rows(operands.query),
            tiling.split_keys(operands.key),
            tiling.split_keys(operands.value),
            operands.scale.reshape(-1, 1, 1, 1, 1),
            None if operands.bias is None else tiling.split_dense(operands.bias),
            None if operands.mask is None else tiling.split_dense(operands.mask),
        )

    def chunk(self, tiling: _Tiling, index: Array) -> _Piece:
        return jax.tree.map(lambda x: tiling.chunk(x, index), self)


def _forward(problem: spec.Problem, steps: _Steps, operands: spec.Operands) -> tuple[Array, Array, Array]:
    dtype = spec.compute_dtype(operands.query.dtype)
    tiling = _Tiling.of(steps, problem, operands, operands.batch)
    bounds = _Bounds.of(problem, operands, tiling)
    whole = _Piece.of(operands, tiling)

    def over_chunks(chunk: Array) -> tuple[Array, Array, Array]:
        piece = whole.chunk(tiling, chunk)

        def over_rows(row_block: Array) -> tuple[Array, Array, Array]:
            lower, upper = bounds.rows(chunk, row_block)
            q = _slice(piece.query, 3, row_block * tiling.block_rows, tiling.block_rows)

            def step(masked: bool, key_block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                top, total, acc = carry
                k = _slice(piece.key, 2, key_block * tiling.block_keys, tiling.block_keys)
                v = _slice(piece.value, 2, key_block * tiling.block_keys, tiling.block_keys)
                bias, visible = _masks(tiling, piece, (lower, upper) if masked else None, row_block, key_block)
                logits, _ = _logits(problem, piece.scale, q, k, bias)
                if visible is not None:
                    logits = jnp.where(visible, logits, -jnp.inf)
                    v = _hide_unseen(visible, v)
                new_top = jnp.maximum(top, logits.max(-1))
                weights = jnp.exp(logits - new_top[..., None])
                decay = jnp.exp(top - new_top)
                total = total * decay + weights.sum(-1)
                acc = acc * decay[..., None] + _einsum("bkgqs,bksd->bkgqd", weights.astype(v.dtype), v)
                return new_top, total, acc

            rows = q.shape[:-1]
            # The least finite maximum: exp(-inf - top) is then 0 and never NaN, also before any key was seen.
            top, total = jnp.full(rows, jnp.finfo(dtype).min, dtype), jnp.zeros(rows, dtype)
            acc = jnp.zeros((*rows, piece.value.shape[-1]), dtype)
            carry = spec.varied_like(q, (top, total, acc))
            top, total, acc = bounds.walk(lower, upper, step, carry)

            some = (lower < upper) & (total != 0)
            total = jnp.where(some, total, 1)
            out = jnp.where(some[..., None], acc / total[..., None], 0).astype(spec.out_dtype(problem, operands))
            lse = top + jnp.log(total)
            rounding = jnp.log(total) - (lse - top)
            return out, jnp.where(some, lse, -jnp.inf), jnp.where(some, rounding, 0)

        return lax.map(over_rows, lax.iota(np.int32, tiling.row_blocks))

    out, lse, rounding = lax.map(over_chunks, lax.iota(np.int32, tiling.chunks))
    return tiling.join_rows(out), tiling.join_rows(lse), tiling.join_rows(rounding)


def _backward(
    problem: spec.Problem,
    with_bias: bool,
    steps: _Steps,
    operands: spec.Operands,
    out: Array,
    lse: Array,
    lse_rounding: Array | None,
    dout: Array,
    dlse: Array | None,
) -> spec.Gradients:
    dtype = spec.compute_dtype(operands.query.dtype)
    tiling = _Tiling.of(steps, problem, operands, len(dout))
    bounds = _Bounds.of(problem, operands, tiling)
    whole = _Piece.of(operands, tiling)

    some = lse != -jnp.inf
    dout = jnp.where(some[..., None], dout, 0)
    # The difference between delta and dout value^T is small, so both take dout as it is.
    delta = (spec.as_stored(dout) * out.astype(dtype)).sum(-1)
    if dlse is not None:
        delta -= jnp.where(some, dlse, 0).astype(dtype)
    rows = (
        tiling.split_rows(dout),
        tiling.split_rows(delta),
        # exp(logits - inf) = 0: rows that see nothing, and padding, give nothing.
        tiling.split_rows(jnp.where(some, lse, jnp.inf), fill=jnp.inf),
        tiling.split_rows(jnp.ones_like(lse) if lse_rounding is None else jnp.exp(-lse_rounding)),
    )
    dbias = jnp.zeros(whole.bias.shape, dtype) if with_bias and whole.bias is not None else None

    def over_chunks(dbias: Array | None, chunk: Array) -> tuple[Array | None, tuple[Array, ...]]:
        piece = whole.chunk(tiling, chunk)
        rows_piece = tuple(tiling.chunk(x, chunk) for x in rows)
        # What rows that see nothing hold, even NaN, must not matter.
        query = jnp.where((rows_piece[2] != jnp.inf)[..., None], piece.query, 0)
        transposed = jnp.moveaxis(query, 4, 2), jnp.moveaxis(rows_piece[0], 4, 2)

        def over_rows(carry: Any, row_block: Array) -> tuple[Any, tuple[Array, Array]]:
            lower, upper = bounds.rows(chunk, row_block)
            start = row_block * tiling.block_rows
            q, do, d, e, r = (_slice(x, 3, start, tiling.block_rows) for x in (query, *rows_piece))
            qt, dot = (_slice(x, 4, start, tiling.block_rows) for x in transposed)

            def step(masked: bool, key_block: Array, carry: Any) -> Any:
                dq, dk, dv, dbias = carry
                at = key_block * tiling.block_keys
                k = _slice(piece.key, 2, at, tiling.block_keys)
                v = _slice(piece.value, 2, at, tiling.block_keys)
                bias, visible = _masks(tiling, piece, (lower, upper) if masked else None, row_block, key_block)
                if visible is not None:
                    k, v = _hide_unseen(visible, k), _hide_unseen(visible, v)
                logits, slope = _logits(problem, piece.scale, q, k, bias)
                weights = jnp.exp(logits - e[..., None]) * r[..., None]
                dlogits = weights * (_einsum("bkgqd,bksd->bkgqs", do, v) - d[..., None])
                if visible is not None:
                    weights = jnp.where(visible, weights, 0)
                    dlogits = jnp.where(visible, dlogits, 0)
                if dbias is not None:
                    dbias = tiling.add_block(dbias, dlogits, chunk, row_block, key_block)
                if slope is not None:
                    dlogits = dlogits * slope
                dlogits = dlogits.astype(k.dtype)
                dq += _einsum("bkgqs,bksd->bkgqd", dlogits, k)
                dk = _add(dk, _einsum("bkdgq,bkgqs->bkds", qt, dlogits), 3, at)
                dv = _add(dv, _einsum("bkdgq,bkgqs->bkds", dot, weights.astype(v.dtype)), 3, at)
                return dq, dk, dv, dbias

            dq = spec.varied_like(q, jnp.zeros(q.shape, dtype))
            dq, *carry = bounds.walk(lower, upper, step, (dq, *carry))
            dscale = (dq * q.astype(dtype)).sum((1, 2, 3, 4))
            return tuple(carry), ((dq * piece.scale).astype(operands.query.dtype), dscale)

        dk, dv = (jnp.zeros((*query.shape[:2], x.shape[3], x.shape[2]), dtype) for x in (piece.key, piece.value))
        blocks = lax.iota(np.int32, tiling.row_blocks)
        carry = spec.varied_like(query, (dk, dv, dbias))
        (dk, dv, dbias), (dq, dscale) = lax.scan(over_rows, carry, blocks)
        dk, dv = jnp.swapaxes(dk * jnp.squeeze(piece.scale, 2), 2, 3), jnp.swapaxes(dv, 2, 3)
        return dbias, (dq, dk.astype(operands.key.dtype), dv.astype(operands.value.dtype), dscale.sum(0))

    dbias = spec.varied_like(operands.query, dbias)
    dbias, (dq, dk, dv, dscale) = lax.scan(over_chunks, dbias, lax.iota(np.int32, tiling.chunks))
    dscale = dscale.reshape(-1, tiling.heads // tiling.chunk_heads, tiling.chunk_batch).sum(1).reshape(-1)
    if dbias is not None and operands.bias is not None:
        shape = operands.bias.shape
        dbias = dbias.reshape(shape[0], shape[1], *dbias.shape[3:])[:, :, : shape[2], : shape[3]]
        dbias = dbias.astype(operands.bias.dtype)
    return spec.Gradients(tiling.join_rows(dq), tiling.join_keys(dk), tiling.join_keys(dv), dscale, dbias)


def _masks(
    tiling: _Tiling, piece: _Piece, bounds: tuple[Array, Array] | None, row_block: Array, key_block: Array
) -> tuple[Array | None, Array | None]:
    """The bias of one block in the compute dtype, and which of its logits are visible; None where there is nothing."""
    bias = visible = None
    if bounds is not None:
        size = tiling.block_keys
        position = (key_block * size + lax.iota(np.int32, size))[None, None, None, None]
        visible = (position >= bounds[0][..., None]) & (position < bounds[1][..., None])
    if piece.mask is not None:
        mask = tiling.block(piece.mask, row_block, key_block)
        visible = mask if visible is None else visible & mask
    if piece.bias is not None:
        bias = tiling.block(piece.bias, row_block, key_block).astype(piece.scale.dtype)
        finite = bias != -jnp.inf
        visible = finite if visible is None else visible & finite
    return bias, visible


def _logits(
    problem: spec.Problem, scale: Array, query: Array, key: Array, bias: Array | None
) -> tuple[Array, Array | None]:
    """Scaled, capped and biased logits (b, k, g, q, s), and the slope of the cap (None without one)."""
    slope = None
    logits = _einsum("bkgqd,bksd->bkgqs", query, key) * scale
    if problem.softcap is not None:
        ratio = jnp.tanh(logits / problem.softcap)
        logits, slope = problem.softcap * ratio, 1 - ratio * ratio
    logits = logits if bias is None else logits + bias
    # Keeps a compiler from fusing the product with what is subtracted from it later: beyond 2^30, say, what rounding
    # took from a row's maximum is an exponent that overflows, or hides the row.
    return jnp.maximum(logits, jnp.finfo(logits.dtype).min), slope


def _hide_unseen(visible: Array, x: Array) -> Array:
    """Zeroes the keys of x (b, k, s, d) that no row of the block sees: what they hold, even NaN, must not matter."""
    return jnp.where(visible.any((2, 3))[..., None], x, 0)


def _einsum(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=spec.compute_dtype(x.dtype))


def _slice(x: Array, axis: int, start: Array, size: int) -> Array:
    """`size` places of an axis; all of an axis that has no more (one that broadcasts among them)."""
    return x if x.shape[axis] <= size else lax.dynamic_slice_in_dim(x, start, size, axis)


def _add(total: Array, x: Array, axis: int, start: Array) -> Array:
    here = lax.dynamic_slice_in_dim(total, start, x.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, here + x, start, axis)


def _pad(x: Array, axis: int, length: int, fill: float = 0) -> Array:
    """Pads an axis up to `length`."""
    if x.shape[axis] == length:
        return x
    widths = [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=np.asarray(fill, x.dtype))


def _ceil_div(x: Any, y: int) -> Any:
    return -(-x // y)


def _even_block(length: int, target: int) -> int:
    """A block size of at most about `target` that divides `length` almost evenly; a multiple of 8 if less than it."""
    if length <= target:
        return length
    return _ceil_div(_ceil_div(length, _ceil_div(length, target)), 8) * 8


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, max(1, min(number, limit)) + 1) if number % divisor == 0)
