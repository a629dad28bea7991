"""`reference`: naive attention, the oracle inside the package.

Plain JAX without custom rules, quadratic in memory, differentiable in every mode and to any order; it computes in
float64 when `jax_enable_x64` is set and in float32 otherwise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_fa4 import problem as spec


def why_not(problem: spec.Problem, operands: spec.Operands, device: jax.Device | None) -> None:
    """None: this implementation supports every problem on every device."""


def forward(problem: spec.Problem, operands: spec.Operands) -> tuple[Array, Array, None]:
    """Attention of `operands`: out (B, T, N, Dv) in query's dtype, lse (B, T, N), and None: no rule needs more."""
    batch = operands.batch
    dtype = jnp.promote_types(np.float32, jnp.asarray(0.0).dtype)
    if operands.bias is not None:
        operands = operands._replace(bias=operands.bias.astype(dtype))
    operands = jax.tree.map(lambda x: jnp.tile(x, (batch // x.shape[0],) + (1,) * (x.ndim - 1)), operands)
    q, k, v, scale, _, _, bias, mask, _, _ = operands
    _, rows, heads, width = q.shape
    _, keys, kv_heads, _ = k.shape
    group = heads // kv_heads

    lower, upper = spec.row_bounds(problem, operands)
    position = jnp.arange(keys)[None, None]
    visible = ((position >= lower[..., None]) & (position < upper[..., None]))[:, None]
    if mask is not None:
        visible &= mask
    if bias is not None:
        visible &= bias != -jnp.inf
        bias = jnp.where(bias == -jnp.inf, 0, bias)
    visible = jnp.broadcast_to(visible, (batch, heads, rows, keys))

    # What nobody sees may be NaN: it is removed before arithmetic, so that no gradient meets it either.
    grouped = visible.reshape(batch, kv_heads, group, rows, keys)
    seen_keys = jnp.moveaxis(grouped.any((2, 3)), 1, 2)[..., None]
    seen_rows = jnp.moveaxis(visible.any(3), 1, 2)[..., None]
    q = jnp.where(seen_rows, q, 0).astype(dtype).reshape(batch, rows, kv_heads, group, width)
    k = jnp.where(seen_keys, k, 0).astype(dtype)
    v = jnp.where(seen_keys, v, 0).astype(dtype)

    logits = jnp.einsum("btkgd,bskd->bkgts", q, k, precision="highest").reshape(batch, heads, rows, keys)
    logits *= scale.astype(dtype)[:, None, None, None]
    if problem.softcap is not None:
        logits = problem.softcap * jnp.tanh(logits / problem.softcap)
    if bias is not None:
        logits += bias
    logits = jnp.maximum(logits, jnp.finfo(dtype).min)  # no compiler fuses the product and the difference: see `tiled`

    some = visible.any(-1, keepdims=True)
    top = jnp.where(visible, logits, -jnp.inf).max(-1, keepdims=True, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(some, top, 0))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - top, 0)), 0)
    total = jnp.where(some, weights.sum(-1, keepdims=True), 1)
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)[..., 0]
    probs = (weights / total).reshape(batch, kv_heads, group, rows, keys)
    out = jnp.einsum("bkgts,bskd->btkgd", probs, v, precision="highest").reshape(batch, rows, heads, v.shape[-1])
    out = jnp.where(seen_rows, out, 0)  # so that no cotangent of a row that sees nothing meets a value
    return out.astype(spec.out_dtype(problem, operands)), jnp.moveaxis(lse, 1, 2), None
