"""The oracle: what `jax_fa4.attention` must return, how far it may be off, and a comparison that explains itself.

`expect` works from the public arguments alone. Values and gradients are naive float64 NumPy with every mask spelled out
key by key; nothing here imports the package. `expect` also derives a tolerance for each element, see `Expected`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Arguments = Mapping[str, Any]
"""Arguments of `attention` by name: `query`, `key`, `value` and any others that say what is computed."""

Results = dict[str, np.ndarray]
"""`out`, `lse`, and the gradient of every differentiable argument under that argument's name."""


class Expected(NamedTuple):
    """One expected result, element by element.

    The tolerance follows one rule: at most twice the error of a same-precision computation by `jax.nn`, plus rounding.

        tolerance = 2 * (worst + unit) * spread + rounding
        worst     = max((|error of jax.nn's computation| - rounding) / spread), over all elements of the result

    `jax.nn`'s computation is `jax_nn` below, in the operands' dtype, differentiated by JAX. Single elements of its
    error are zero by luck, so its error counts relative to `spread`, the error to expect of each element in unit
    roundoffs: independent roundings add as the root of their sum of squares, so `spread` carries the roundings of every
    exponent and partial sum (in the compute dtype) and of every probability, output and dlogit (in the operands' dtype,
    as a kernel may store them) to the element, by first-order error analysis in float64. It is zero where nothing is
    visible: there results must be exact. `unit` is one roundoff of the operands' dtype, for small problems where all of
    jax.nn's errors may be lucky. The gradients of `scale` and `sinks` have so few elements, each a sum over all rows,
    that the maximum over them says little: theirs is over the elements of all gradients. `rounding` is that of the
    result's own dtype at its expected value.

    Attributes:
      value, tolerance: float64, of the result's shape.
      dtype: of the result.
    """

    value: np.ndarray
    tolerance: np.ndarray
    dtype: np.dtype


def expect(arguments: Arguments, dout: np.ndarray, dlse: np.ndarray, *, truncates: bool = False) -> dict[str, Expected]:
    """Values and tolerances of out, lse and the gradients that pull back `dout` and `dlse`.

    Args:
      arguments: of the call.
      dout: the cotangent of out.
      dlse: that of lse.
      truncates: whether logits are products of a Hopper GPU's tensor cores, which truncate where others round to
        nearest. Such errors are all of one sign and do not cancel, and `jax.nn`'s products have them there too: its
        error of lse, measured on a CPU, is taken to be theirs at least.
    """
    call = _Call.of(arguments, dout, dlse)
    values, spreads = _values_and_spreads(call)
    measured = {}
    if call.visible.any():
        floats = {name: getattr(call, name) for name in _FLOATS if getattr(call, name) is not None}
        with _on_cpu():
            measured = _jax_nn_results(floats, call.visible, call.dout, call.dlse, call.softcap)
    dtypes, worst = {}, {}
    for name, value in values.items():
        if name not in ("out", "lse") and not _is_differentiable(arguments.get(name)):
            continue
        dtypes[name] = np.dtype({"out": call.query.dtype, "lse": np.float32}.get(name) or arguments[name].dtype)
        worst[name], some = 0.0, spreads[name] > 0
        if name in measured and some.any():
            error = np.abs(np.asarray(measured[name], np.float64) - value) - _rounding(dtypes[name], value)
            worst[name] = (np.maximum(error, 0)[some] / spreads[name][some]).max()
            assert np.isfinite(worst[name]), f"jax.nn's own {name} is not finite here: choose other data."
    if truncates and call.query.dtype.itemsize == 2 and (some := spreads["lse"] > 0).any():
        value = values["lse"][some]
        error = np.abs(_lse_of_truncated_products(call)[some] - value) - _rounding(dtypes["lse"], value)
        worst["lse"] = max(worst["lse"], (np.maximum(error, 0) / spreads["lse"][some]).max())
    for name in worst.keys() & {"scale", "sinks"}:
        worst[name] = max(number for other, number in worst.items() if other not in ("out", "lse"))
    expected = {}
    for name, dtype in dtypes.items():
        value = values[name]
        unit = _unit(compute_dtype(call.query.dtype) if name == "lse" else call.query.dtype)
        tolerance = 2 * (worst[name] + unit) * spreads[name] + _rounding(dtype, value)
        shape = np.shape(arguments[name]) if name in arguments else value.shape[np.ndim(arguments["query"]) == 3 :]
        expected[name] = Expected(value.reshape(shape), tolerance.reshape(shape), dtype)
    return expected


def check(got: Mapping[str, Any], expected: Mapping[str, Expected]) -> dict[str, float]:
    """Raises AssertionError with a full report unless `got` is as expected.

    Returns:
      For each result the largest share of its tolerance that an element used.
    """
    assert got.keys() == expected.keys(), f"got {sorted(got)}, expected {sorted(expected)}"
    reports, used = [], {}
    for name, want in expected.items():
        have = np.asarray(got[name])
        if have.dtype != want.dtype or have.shape != want.value.shape:
            reports.append(f"{name}: got {have.dtype}{have.shape}, expected {want.dtype}{want.value.shape}")
            continue
        have = have.astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.where(have == want.value, 0, np.abs(have - want.value))
        wrong = ~(error <= want.tolerance)
        if wrong.any():
            reports.append(_report(name, have, want, error, wrong))
        near = want.tolerance > 0
        used[name] = float((error[near] / want.tolerance[near]).max(initial=0))
    assert not reports, "\n".join(reports)
    return used


def _report(name: str, got: np.ndarray, want: Expected, error: np.ndarray, wrong: np.ndarray) -> str:
    excess = np.where(wrong, np.nan_to_num(error - want.tolerance, nan=np.inf), -np.inf)
    worst = np.unravel_index(excess.argmax(), excess.shape)
    lines = [
        f"{name}: {wrong.sum()} of {wrong.size} elements differ ({want.dtype}, shape {got.shape})",
        f"  worst at {tuple(map(int, worst))}: got {got[worst]:.9g}, expected {want.value[worst]:.9g}, "
        f"off by {error[worst]:.3g}, tolerance {want.tolerance[worst]:.3g}",
        "  wrong along each axis: " + "; ".join(_places(np.unique(axis)) for axis in np.nonzero(np.atleast_1d(wrong))),
    ]
    for label, test in (("NaN", np.isnan), ("inf", np.isinf)):
        odd = test(got) & ~test(want.value)
        if odd.any():
            lines.append(f"  unexpected {label}: {odd.sum()}, first at {tuple(map(int, np.argwhere(odd)[0]))}")
    both = np.isfinite(got) & np.isfinite(want.value)
    a, b = got[both], want.value[both]
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    lines.append(f"  cosine similarity of the finite elements: {a @ b / norms if norms else np.nan:.6f}")
    return "\n".join(lines)


def _places(indices: np.ndarray) -> str:
    return ", ".join(map(str, indices)) if len(indices) <= 6 else f"{len(indices)} of {indices[0]}..{indices[-1]}"


def visible(arguments: Arguments) -> np.ndarray:
    """Which keys each row sees, (B, N, T, S): the sentences of the specification, one line each."""
    get = arguments.get
    batched = np.ndim(arguments["query"]) == 4
    batch, rows, heads, _ = np.shape(arguments["query"])[-4:] if batched else (1, *np.shape(arguments["query"]))
    keys = np.shape(arguments["key"])[-3]
    i = np.arange(rows)[None, :, None]
    j = np.arange(keys)[None, None, :]
    per_batch = lambda x: np.asarray(x, np.int64).reshape(-1, 1, 1)  # noqa: E731
    offset = get("query_offset", 0)
    at = i + per_batch(keys - rows if isinstance(offset, str) else offset)  # the key position of row i

    seen = np.ones((batch, rows, keys), bool)
    if get("is_causal"):
        seen &= j <= at
    if (window := get("local_window_size")) is not None:
        left, right = (window, window) if np.ndim(window) == 0 else window
        seen &= True if left is None else j >= at - left
        seen &= True if right is None else j <= at + right
    if (lengths := get("query_seq_lengths")) is not None:
        seen &= i < per_batch(lengths)
    if (lengths := get("key_value_seq_lengths")) is not None:
        seen &= j < per_batch(lengths)
    if (ids := get("query_segment_ids")) is not None:
        key_ids = np.asarray(arguments["key_value_segment_ids"])
        seen &= np.reshape(ids, (batch, rows, 1)) == key_ids.reshape(batch, 1, keys)
    if (bounds := get("row_bounds")) is not None:
        lower, upper = (np.reshape(x, (batch, rows, 1)) for x in bounds)
        seen &= (lower <= j) & (j < upper)
    seen = np.broadcast_to(seen[:, None], (batch, heads, rows, keys))
    if (mask := get("mask")) is not None:
        seen = seen & np.asarray(mask)
    if (bias := get("bias")) is not None:
        seen = seen & (np.asarray(bias, np.float64) != -np.inf)
    return seen


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of softmax and accumulators."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


_FLOATS = ("query", "key", "value", "bias", "scale", "sinks")


class _Call(NamedTuple):
    """A call with a batch axis, one dense mask, and zeros in place of everything that must not matter."""

    query: np.ndarray  # (B, T, N, D), and so on: all in their own dtypes
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None  # with four axes
    scale: np.ndarray  # (), in the compute dtype
    sinks: np.ndarray | None
    visible: np.ndarray  # (B, N, T, S)
    dout: np.ndarray
    dlse: np.ndarray
    softcap: float | None

    @classmethod
    def of(cls, arguments: Arguments, dout: np.ndarray, dlse: np.ndarray) -> _Call:
        with_batch = (lambda x: x[None]) if np.ndim(arguments["query"]) == 3 else (lambda x: x)
        q, k, v, dout, dlse = map(with_batch, (*(arguments[name] for name in _FLOATS[:3]), dout, dlse))
        (batch, rows, heads, width), (keys, kv_heads) = q.shape, k.shape[1:3]
        seen = visible(arguments)
        rows_seen = seen.any(3).swapaxes(1, 2)
        by_group = seen.reshape(batch, kv_heads, heads // max(kv_heads, 1), rows, keys)
        keys_seen = by_group.any((2, 3)).swapaxes(1, 2)[..., None]
        keep = lambda where, x: np.where(where, x, np.zeros((), x.dtype))  # noqa: E731
        bias, scale = arguments.get("bias"), arguments.get("scale")
        if bias is not None:
            bias = keep(bias != np.asarray(-np.inf, bias.dtype), bias)
            bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        return cls(
            query=keep(rows_seen[..., None], q),
            key=keep(keys_seen, k),
            value=keep(keys_seen, v),
            bias=bias,
            scale=np.asarray(max(width, 1) ** -0.5 if scale is None else scale, compute_dtype(q.dtype)).reshape(()),
            sinks=arguments.get("sinks"),
            visible=seen,
            dout=keep(rows_seen[..., None], dout),
            dlse=keep(rows_seen, dlse),
            softcap=arguments.get("softcap"),
        )


def _values_and_spreads(call: _Call) -> tuple[Results, Results]:
    """Every result in float64, and its spread (see `Expected`).

    Arrays are (B, K, G, T or S, ...). `x2` is the square of the error to expect of x in unit roundoffs of the operands'
    dtype; `r2` is the square of the compute dtype's roundoff in that unit. Rounding a value x adds x**2; a sum has the
    errors of its terms and the roundings of its partial sums. Equal keys have equal logits, with equal errors: `m` such
    terms add to at most m times what they would if they were independent. So do equal queries.
    """
    batch, rows, heads, width = call.query.shape
    keys, kv_heads, value_width = call.value.shape[1:]
    split = (batch, kv_heads, heads // max(kv_heads, 1))
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    by_row = lambda x: np.moveaxis(wide(x), 1, 2).reshape(*split, rows, *x.shape[3:])  # noqa: E731
    by_key = lambda x: np.moveaxis(wide(x), 1, 2)[:, :, None]  # noqa: E731
    q, k, v, dout, dlse = by_row(call.query), by_key(call.key), by_key(call.value), by_row(call.dout), by_row(call.dlse)
    seen, scale = call.visible.reshape(*split, rows, keys), wide(call.scale)
    storage, compute = call.query.dtype, compute_dtype(call.query.dtype)
    r2 = (_unit(compute) / _unit(storage)) ** 2
    # Probabilities and dlogits below the least number that a kernel can hold become 0.
    flushed2 = seen * (max(_least(storage), _least(compute)) / _unit(storage)) ** 2

    def sums2(x: np.ndarray, squares: np.ndarray, count: Any) -> np.ndarray:
        """The roundings of the partial sums of `count` terms with the sum x and the sum of squares `squares`.

        In a random order the square of the sum of j terms is (j/n)**2 x**2 + (j/n)(1 - j/n) squares, on average. Equal
        terms are rounded alike: `count` is then that of the terms times how many of them are equal.
        """
        return r2 * count * (x**2 / 3 + squares / 6)

    many_keys, many_rows = _multiplicity(k), _multiplicity(q)
    if call.bias is not None:
        many_keys = many_keys if call.bias.shape[3] == 1 else np.ones_like(many_keys)
        many_rows = many_rows if call.bias.shape[2] == 1 else np.ones_like(many_rows)
    many_keys, many_rows = many_keys[..., None, :], many_rows[..., None]
    many_pairs = np.minimum(many_keys, _multiplicity(v)[..., None, :])
    keys_of_row = seen.sum(-1)
    rows_of_key = np.moveaxis(seen.sum((2, 3))[..., None], 1, 2)
    dots = q @ k.mT
    dots2 = sums2(dots, q**2 @ k.mT**2, width)
    logits = scale * dots
    logits2 = scale**2 * dots2 + r2 * logits**2
    slope, slope2 = np.ones_like(logits), np.zeros_like(logits)
    if call.softcap is not None:
        ratio = np.tanh(logits / call.softcap)
        slope, ratio2 = 1 - ratio**2, r2 * _tanh_roundoffs(compute) ** 2 * ratio**2
        slope2 = r2 + (2 * ratio) ** 2 * (ratio2 + (slope / call.softcap) ** 2 * logits2)
        logits, logits2 = call.softcap * ratio, slope**2 * logits2 + call.softcap**2 * (ratio2 + r2 * ratio**2)
    if call.bias is not None:
        logits = logits + np.broadcast_to(wide(call.bias), call.visible.shape).reshape(seen.shape)
        logits2 = logits2 + r2 * logits**2
    logits, logits2 = np.where(seen, logits, -np.inf), np.where(seen, logits2, 0)

    some = seen.any(-1)
    top = np.where(some, logits.max(-1, initial=-np.inf), 0)
    weights = np.exp(logits - top[..., None])
    total = np.where(some, weights.sum(-1), 1)
    lse = np.where(some, np.log(total) + top, -np.inf)
    probs = weights / total[..., None]
    # Terms of sums over keys, times how many are equal: by weight.
    weight = probs**2 / np.where(some, (probs**2).sum(-1), 1)[..., None]
    terms = keys_of_row * (weight * many_keys).sum(-1)
    lse2 = (probs**2 * logits2 * many_keys).sum(-1) + sums2(some, (probs**2).sum(-1), terms)
    lse2 = lse2 + r2 * np.where(some, lse, 0) ** 2
    exponents = np.where(seen, logits - np.where(some, lse, 0)[..., None], 0)
    probs2 = probs**2 * (1 + logits2 + r2 * exponents**2) + flushed2

    # `share` is what a sink leaves to the keys: probabilities in its presence are `heavy = share * probs`.
    # What the sink takes, `of_sink`, may be far below 1's last digit.
    share, of_sink = np.ones_like(lse), np.zeros_like(lse)
    if call.sinks is not None:
        less = np.logaddexp(0, wide(call.sinks).reshape(*split[1:], 1) - np.where(some, lse, 0))
        share, of_sink = np.where(some, np.exp(-less), 0), -np.expm1(-less)
    heavy, heavy2 = probs * share[..., None], probs2 * share[..., None] ** 2
    out = heavy @ v
    terms = keys_of_row * (weight * many_pairs).sum(-1)
    acc2 = sums2(out, heavy**2 @ v**2, terms[..., None])
    out2 = (heavy2 * many_keys) @ v**2 + lse2[..., None] * out**2 + acc2

    dheavy = dout @ v.mT
    dheavy2 = dheavy**2 + sums2(dheavy, dout**2 @ v.mT**2, value_width)
    delta = (dout * out).sum(-1)
    # The elements of out share the errors of probabilities and lse, but not the roundings of their own sums.
    delta2 = (heavy2 * dheavy**2 * many_keys).sum(-1) + lse2 * delta**2 + (dout**2 * (out**2 + acc2)).sum(-1)
    delta2 = delta2 + sums2(delta, (dout**2 * out**2).sum(-1), value_width)
    centred = dheavy - delta[..., None]
    dlogits = heavy * centred + probs * dlse[..., None]
    dlogits2 = heavy2 * centred**2 + heavy**2 * dheavy2 + probs2 * dlse[..., None] ** 2
    ddelta, dcapped = heavy * slope, dlogits * slope
    # A kernel stores one of them, so that either may flush, once.
    dcapped2 = dlogits2 * slope**2 + dlogits**2 * slope2 + flushed2
    dlogits2 = dlogits2 + flushed2
    dsinks, dsinks2 = -of_sink * delta, of_sink**2 * (delta2 + delta**2 * (r2 + share**2 * lse2))

    def with_row_errors(own2: np.ndarray, by_delta: np.ndarray, by_lse: np.ndarray) -> np.ndarray:
        """Adds the errors of delta and lse, which all of a row's dlogits share, to the sums over keys of theirs."""
        pad = (...,) + (None,) * (own2.ndim - lse.ndim)
        return own2 + delta2[pad] * by_delta**2 + lse2[pad] * by_lse**2

    def row_result(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x.reshape(batch, heads, *x.shape[3:]), 1, 2)

    def key_result(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x.sum(2), 1, 2)

    bias_shape = (1, 1, 1, 1) if call.bias is None else call.bias.shape

    def over_keys(x: np.ndarray) -> np.ndarray:
        return x.sum(-1, keepdims=True) if bias_shape[3] == 1 else x

    def bias_result(x: np.ndarray) -> np.ndarray:
        axes = tuple(axis for axis, length in enumerate(bias_shape) if length == 1)
        return x.reshape(*call.visible.shape[:3], x.shape[-1]).sum(axes, keepdims=True)

    dq, dk, dv = scale * (dcapped @ k), key_result(scale * (dcapped.mT @ q)), key_result(heavy.mT @ dout)
    dq2 = scale**2 * with_row_errors((dcapped2 * many_keys) @ k**2, ddelta @ k, dcapped @ k)
    dq2 = dq2 + sums2(dq, scale**2 * (dcapped**2 @ k**2), terms[..., None])
    dk2 = scale**2 * ((with_row_errors(dcapped2, ddelta, dcapped) * many_rows).mT @ q**2)
    dv2 = (with_row_errors(heavy2, np.zeros_like(heavy), heavy) * many_rows).mT @ dout**2
    dscale2 = with_row_errors(
        ((dcapped2 * dots**2 + dcapped**2 * dots2) * many_keys).sum(-1),
        (ddelta * dots).sum(-1),
        (dcapped * dots).sum(-1),
    )
    values = {
        "out": row_result(out),
        "lse": row_result(lse),
        "query": row_result(dq),
        "key": dk,
        "value": dv,
        "bias": bias_result(dlogits),
        "scale": (dcapped * dots).sum(),
        "sinks": dsinks.sum((0, 3)).reshape(heads),
    }
    squares = {
        "out": row_result(out2),
        "lse": row_result(lse2 / r2),
        "query": row_result(dq2),
        "key": key_result(dk2) + sums2(dk, key_result(scale**2 * (dcapped.mT**2 @ q**2)), rows_of_key),
        "value": key_result(dv2) + sums2(dv, key_result(heavy.mT**2 @ dout**2), rows_of_key),
        "bias": bias_result(with_row_errors(over_keys(dlogits2), over_keys(heavy), over_keys(dlogits))),
        "scale": dscale2.sum(),
        "sinks": dsinks2.sum((0, 3)).reshape(heads),
    }
    return values, {name: np.sqrt(x) for name, x in squares.items()}


def jax_nn(floats: Mapping[str, Any], visible: Any, softcap: float | None = None) -> tuple[Array, Array]:
    """`jax.nn.dot_product_attention`'s arithmetic, with what it lacks: a soft cap, sinks, and a differentiable lse.

    tests/test_oracle.py holds it against the original. It differs for float64, whose softmax the original computes in
    float32, and for float16, which the original refuses on a CPU under jit.
    """
    q, k, v = (jnp.asarray(floats[name]) for name in _FLOATS[:3])
    dtype = jnp.promote_types(q.dtype, np.float32)
    precision = lax.DotAlgorithmPreset.BF16_BF16_F32 if q.dtype == jnp.bfloat16 else None
    batch, rows, heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    grouped = q.reshape(batch, rows, kv_heads, heads // kv_heads, width)
    logits = jnp.einsum("btkgd,bskd->bkgts", grouped, k, precision=precision, preferred_element_type=dtype)
    logits = logits.reshape(batch, heads, rows, keys) * floats["scale"]
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if "bias" in floats:
        logits = (logits + floats["bias"]).astype(dtype)
    logits = jnp.where(visible, logits, -0.7 * jnp.finfo(dtype).max)
    columns = logits
    if "sinks" in floats:
        sink = jnp.asarray(floats["sinks"], dtype)[:, None, None]
        columns = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], -1)
    probs = jax.nn.softmax(columns, axis=-1)[..., :keys].astype(k.dtype)
    probs = probs.reshape(batch, kv_heads, heads // kv_heads, rows, keys)
    out = jnp.einsum("bkgts,bskd->btkgd", probs, v).reshape(batch, rows, heads, v.shape[3])
    return out, jnp.moveaxis(jax.nn.logsumexp(logits, axis=-1), 1, 2)


@functools.partial(jax.jit, static_argnames="softcap")
def _jax_nn_results(
    floats: dict[str, Any], visible: Any, dout: Any, dlse: Any, softcap: float | None
) -> dict[str, Array]:
    def call(floats: dict[str, Any]) -> tuple[Array, Array]:
        # JAX 0.10.0 compiles no products in bfloat16 of a single row or key: to those comes one that sees nothing, or
        # that nothing sees.
        rows, keys = visible.shape[2:]
        more_rows, more_keys = (0, int(rows == 1)), (0, int(keys == 1))
        more = {"query": more_rows, "key": more_keys, "value": more_keys}
        padded = {name: jnp.pad(floats[name], ((0, 0), some, (0, 0), (0, 0))) for name, some in more.items()}
        out, lse = jax_nn(floats | padded, jnp.pad(visible, ((0, 0), (0, 0), more_rows, more_keys)), softcap)
        return out[:, :rows], lse[:, :rows]

    (out, lse), pull = jax.vjp(call, floats)
    return {"out": out, "lse": lse, **pull((dout, dlse.astype(lse.dtype)))[0]}


def _lse_of_truncated_products(call: _Call) -> np.ndarray:
    """In float64, but for products of queries and keys as a Hopper GPU computes them: see docs/emulator.md."""
    heads = call.query.shape[2]
    q, k = (np.moveaxis(x.astype(np.float64), 2, 1) for x in (call.query, call.key))
    k = np.repeat(k, heads // k.shape[1], 1)

    def truncate(x: np.ndarray, largest: np.ndarray, bits: int) -> np.ndarray:
        """In place, as these arrays are large."""
        quantum = np.ldexp(1.0, np.frexp(largest)[1] - bits)
        x /= quantum
        np.trunc(x, out=x)
        x *= quantum
        return x

    total = np.zeros((*q.shape[:3], k.shape[2]))
    terms = np.empty((17, *total.shape))
    for step in range(0, q.shape[3], 16):
        terms[0], terms[1:] = total, 0
        for term, i in zip(terms[1:], range(step, q.shape[3]), strict=False):
            np.multiply(q[..., i, None], k[..., None, :, i], out=term)
        total = truncate(terms, np.maximum(terms.max(0), -terms.min(0)), 26).sum(0)
        total = truncate(total, total, 24)
    logits = total * np.float64(call.scale)
    if call.softcap is not None:
        logits = call.softcap * np.tanh(logits / call.softcap)
    logits = np.where(call.visible, logits, -np.inf)
    top = np.maximum(logits.max(-1, initial=-np.inf), np.finfo(np.float64).min)
    with np.errstate(divide="ignore"):
        return np.moveaxis(top + np.log(np.exp(logits - top[..., None]).sum(-1)), 1, 2)


def _is_differentiable(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _unit(dtype: np.dtype) -> float:
    """The unit roundoff: the largest relative error of rounding to nearest."""
    return float(jnp.finfo(dtype).eps) / 2


def _multiplicity(x: np.ndarray) -> np.ndarray:
    """How many rows of a (..., rows, width) array equal each of its rows."""
    lead, (rows, width) = x.shape[:-2], x.shape[-2:]
    counts = np.ones((int(np.prod(lead)), rows))
    for many, one in zip(counts, x.reshape(-1, rows, width), strict=True) if rows and width else ():
        _, inverse, count = np.unique(one, axis=0, return_inverse=True, return_counts=True)
        many[:] = count[inverse.reshape(-1)]
    return counts.reshape(*lead, rows)


@functools.cache
def _tanh_roundoffs(dtype: np.dtype) -> float:
    """The largest relative error of JAX's own tanh, in unit roundoffs.

    It is some roundoffs where tanh is almost 1, and its derivative, 1 - tanh**2, is all but lost in them. It jumps from
    one argument to the next, so that the error of one computation says little about that of another.
    """
    x = np.concatenate([np.logspace(-4, 1.3, 200_000), np.linspace(0.5, 12, 200_000)]).astype(dtype)
    exact = np.tanh(x.astype(np.longdouble))
    with _on_cpu():
        tanh = np.asarray(jnp.tanh(x))
    return float((np.abs(tanh - exact) / exact).max()) / _unit(dtype)


def _on_cpu() -> AbstractContextManager[Any]:
    """Where `jax.nn`'s errors are measured, so that the same bits are right on every machine."""
    return jax.default_device(jax.devices("cpu")[0])


def _least(dtype: np.dtype) -> float:
    """The least positive number that survives: XLA flushes subnormals to 0, except float16's, which it widens."""
    info = jnp.finfo(dtype)
    return float(info.smallest_subnormal if dtype == np.float16 else info.tiny)


def _rounding(dtype: np.dtype, x: np.ndarray) -> np.ndarray:
    """The error of rounding x to a dtype; 0 for 0 and infinities."""
    finite = np.where(np.isfinite(x), x, 0)
    return np.where(finite != 0, np.maximum(_unit(dtype) * np.abs(finite), _least(dtype)), 0)
