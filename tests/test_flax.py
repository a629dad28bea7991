"""`jax_fa4.flax` in the layers of Flax, and beside Flax's own attention functions.

Tolerances are those of `oracle.Expected`, with Flax's own computation in place of jax.nn's: twice its error against
float64, its largest over a tensor because single elements have none by luck, and rounding.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen, nnx
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
import jax_fa4.flax
from jax_fa4.flax import AttentionFn, StructuredMask, attention_fn

B, T, F, N = 2, 12, 16, 4
"""Batch, length, features and query heads of the layers."""

Fn = Callable[..., Array]


def exact(
    query: Array, key: Array, value: Array, mask: Any = None, is_causal: bool = False, left: Any = None, **_: Any
) -> Array:
    """Attention in the operands' dtype, every mask spelled out; `left` is a window's."""
    key, value = (jnp.repeat(x, query.shape[-2] // x.shape[-2], -2) for x in (key, value))
    logits = jnp.einsum("...tnd,...snd->...nts", query, key, precision="highest") * query.shape[-1] ** -0.5
    distance = jnp.arange(query.shape[-3])[:, None] - jnp.arange(key.shape[-3])
    for hidden in (
        None if mask is None else jnp.asarray(mask) == 0,
        distance < 0 if is_causal else None,
        None if left is None else distance > left,
    ):
        logits = logits if hidden is None else jnp.where(hidden, -jnp.inf, logits)
    return jnp.einsum("...nts,...snd->...tnd", jax.nn.softmax(logits, -1), value, precision="highest")


def assert_as_good(got: Any, own: Any, want: Any, dtype: Any = np.float32) -> None:
    """Compares a tree with one in float64, by the error of Flax's own; `dtype` is that of the computation."""
    assert jax.tree.structure(got) == jax.tree.structure(own) == jax.tree.structure(want)
    for (path, x), y, z in zip(jax.tree.leaves_with_path(got), *map(jax.tree.leaves, (own, want)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        z, size = np.asarray(z, np.float64), float(np.abs(z).max(initial=0))
        assert size > 0, path
        unit, rounding = (float(jnp.finfo(of).eps) / 2 * size for of in (dtype, x.dtype))
        worst = float(np.abs(np.asarray(y, np.float64) - z).max())
        error = float(np.abs(np.asarray(x, np.float64) - z).max())
        assert worst < 64 * unit, (jax.tree_util.keystr(path), worst, size)  # else they compute other things
        assert error <= 2 * (worst + unit) + rounding, (jax.tree_util.keystr(path), error, worst, size)


def inputs(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(len(shape)), shape or (B, T, F))


def layer(api: str, dtype: Any = None, kv_heads: int = N) -> tuple[Any, Callable[..., Callable[..., Array]]]:
    """A layer's parameters, and what makes, from an attention function, the function (parameters, x, **arguments).

    It has no biases: that of the keys has no effect, and a gradient of nothing but rounding.
    """
    if api == "linen":

        def apply(fn: Fn | None, dtype: Any = dtype, **options: Any) -> Callable[..., Array]:
            options |= {"use_bias": False} | ({} if fn is None else {"attention_fn": fn})
            return linen.MultiHeadDotProductAttention(N, dtype=dtype, **options).apply

        return linen.MultiHeadDotProductAttention(N, use_bias=False).init(jax.random.key(1), inputs()), apply

    def make(fn: Fn | None, dtype: Any = dtype, **options: Any) -> nnx.MultiHeadAttention:
        options |= {"use_bias": False} | ({} if fn is None else {"attention_fn": fn})
        options |= {} if kv_heads == N else {"num_kv_heads": kv_heads}
        return nnx.MultiHeadAttention(N, F, dtype=dtype, decode=False, rngs=nnx.Rngs(1), **options)

    def call(fn: Fn | None, dtype: Any = dtype, **options: Any) -> Callable[..., Array]:
        graph, _ = nnx.split(make(fn, dtype, **options))
        return lambda parameters, x, **arguments: nnx.merge(graph, parameters)(x, **arguments)

    return nnx.split(make(None))[1], call


def results(
    call: Callable[..., Array], parameters: Any, x: Array, static: dict[str, Any], traced: dict[str, Any]
) -> Any:
    """A layer's output and its gradients, in one compilation with the traced arguments traced."""

    @jax.jit
    def run(parameters: Any, x: Array, traced: dict[str, Any]) -> Any:
        out, pull = jax.vjp(lambda parameters, x: call(parameters, x, **static, **traced), parameters, x)
        weights = (np.arange(out.size) * 7 % 5 - 2).reshape(out.shape)  # exact in every dtype
        return out, pull(weights.astype(out.dtype))

    return run(parameters, x, traced)


def widen(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


PADDING = linen.make_attention_mask(jnp.ones((B, T)), jnp.arange(T) < jnp.array([[T], [7]]))
CAUSAL = linen.make_causal_mask(jnp.ones((B, T)))
DOCUMENTS = jnp.array([[5] * 4 + [2] * 8, [0] * 11 + [1]], jnp.int32)
PACKED = linen.make_attention_mask(DOCUMENTS, DOCUMENTS, jnp.equal)
HOLES = jnp.ones((B, 1, T, T)).at[:, :, 3:, 1].set(0)


@dataclasses.dataclass(frozen=True)
class Use:
    """A way to call a layer: the options of ours, and arguments of ours and of Flax's own."""

    fn: AttentionFn
    ours: dict[str, Any]
    own: dict[str, Any]
    left: int | None = None  # of a window, which Flax's own arguments do not know


SEGMENTS = StructuredMask(query_segment_ids=DOCUMENTS, key_value_segment_ids=DOCUMENTS)
USES = {
    "nothing": Use(attention_fn, {}, {}),
    "causal mask": Use(attention_fn, {"mask": CAUSAL}, {"mask": CAUSAL}),
    "causal option": Use(AttentionFn(is_causal=True), {}, {"mask": CAUSAL}),
    "padding mask": Use(attention_fn, {"mask": PADDING}, {"mask": PADDING}),
    "padding, causal option": Use(AttentionFn(is_causal=True), {"mask": PADDING}, {"mask": CAUSAL * PADDING}),
    "packed mask": Use(attention_fn, {"mask": CAUSAL * PACKED}, {"mask": CAUSAL * PACKED}),
    "packed": Use(AttentionFn(is_causal=True), {"mask": SEGMENTS}, {"mask": CAUSAL * PACKED}),
    "holes": Use(attention_fn, {"mask": HOLES}, {"mask": HOLES}),
    "lengths": Use(
        attention_fn, {"mask": StructuredMask(key_value_seq_lengths=jnp.array([T, 7], jnp.int32))}, {"mask": PADDING}
    ),
}
QUICK = {("nnx", "causal mask"), ("nnx", "packed"), ("linen", "padding, causal option")}


@pytest.mark.parametrize(
    ("api", "use"),
    [
        pytest.param(api, use, marks=[] if (api, use) in QUICK else [pytest.mark.slow])
        for api, use in itertools.product(("nnx", "linen"), USES)
    ],
)
def test_training(api: str, use: str) -> None:
    check_layer(api, USES[use])


@pytest.mark.parametrize("api", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
def test_bfloat16(api: str) -> None:
    check_layer(api, USES["packed mask"], dtype=jnp.bfloat16)


def test_the_call_says_causal() -> None:
    check_layer("nnx", Use(attention_fn, {"is_causal": True}, {"is_causal": True}))


def test_fewer_key_value_heads() -> None:
    check_layer("nnx", USES["packed"], kv_heads=2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(T, F), (2, 3, T, F)], ids=["unbatched", "two batch axes"])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_batch_axes_of_layers(api: str, shape: tuple[int, ...]) -> None:
    mask = jnp.broadcast_to(CAUSAL[0], (*shape[:-2], 1, T, T))
    check_layer(api, Use(attention_fn, {"mask": mask}, {"mask": mask}), x=inputs(*shape))


def check_layer(api: str, use: Use, dtype: Any = None, kv_heads: int = N, x: Array | None = None) -> None:
    x = inputs() if x is None else x
    parameters, call = layer(api, dtype, kv_heads)

    def run(fn: Fn | None, arguments: dict[str, Any], wide: bool = False) -> Any:
        static = {name: y for name, y in arguments.items() if isinstance(y, bool)}
        traced = {name: y for name, y in arguments.items() if name not in static}
        operands = (widen(parameters), widen(x)) if wide else (parameters, x)
        return results(call(fn, None if wide else dtype), *operands, static, traced)

    with jax.enable_x64(True):
        want = run(exact, use.own, wide=True)
    assert_as_good(run(use.fn, use.ours), run(None, use.own), want, dtype or np.float32)


# Direct calls, as Flax makes them, against the oracle: it knows rows that see nothing, whose result is 0 here.

SHAPES = {"query": (2, 9, 4, 8), "key": (2, 11, 2, 8), "value": (2, 11, 2, 6)}


def operands(dtype: Any = np.float32, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def dense_masks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    column = np.arange(11)
    return {
        "causal": np.tri(9, 11, dtype=np.float32),
        "lengths": column < np.array([11, 4]).reshape(2, 1, 1, 1),
        "rows": np.arange(9)[:, None] < 5,
        "nothing": np.zeros((2, 1, 9, 11), np.int32),
        "intervals": (column >= 2) & (column < rng.integers(0, 12, (2, 1, 9, 1))),
        "holes": rng.random((1, 1, 9, 11)) < 0.6,
        "heads": column < rng.integers(1, 12, (1, 4, 9, 1)),
        "equal heads": np.broadcast_to(np.tri(9, 11, k=-1, dtype=bool), (2, 4, 9, 11)),
    }


KNOWN, TRACED = ("intervals",), ("lengths", "holes", "nothing")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        pytest.param(
            name, known, marks=[] if name in (KNOWN if known else TRACED) else [pytest.mark.slow], id=f"{name}-{known=}"
        )
        for name, known in itertools.product(dense_masks(), (True, False))
    ],
)
def test_masks(name: str, known: bool) -> None:
    check_direct({"mask": dense_masks()[name]}, known)


@pytest.mark.parametrize(
    "fn", [attention_fn, AttentionFn(is_causal=True, local_window_size=(3, 1), scale=0.3, softcap=2)]
)
def test_bias_and_options(fn: AttentionFn) -> None:
    bias = np.random.default_rng(2).standard_normal((4, 9, 11)).astype(np.float32)
    check_direct({"mask": dense_masks()["lengths"], "bias": bias}, known=False, fn=fn)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_dtypes(dtype: Any) -> None:
    check_direct({"mask": dense_masks()["intervals"]}, known=False, dtype=dtype)


def check_direct(
    arguments: dict[str, np.ndarray], known: bool, fn: AttentionFn = attention_fn, dtype: Any = np.float32
) -> None:
    floats = operands(dtype) | {name: x for name, x in arguments.items() if name == "bias"}
    mask = arguments["mask"]

    def call(floats: dict[str, Any], mask: Any) -> Array:
        return fn(**floats, mask=mask, dropout_rng=None, dropout_rate=0.0, deterministic=True)

    def run(floats: dict[str, Any], mask: Any, dout: Any) -> dict[str, Any]:
        out, pull = jax.vjp(lambda floats: call(floats, mask), floats)
        return {"out": out, **pull(dout)[0]}

    dout = np.asarray(np.random.default_rng(3).standard_normal((2, 9, 4, 6)), dtype)
    got = jax.jit(functools.partial(run, mask=mask))(floats, dout=dout) if known else jax.jit(run)(floats, mask, dout)
    options = {"is_causal": fn.is_causal, "local_window_size": fn.local_window_size, "softcap": fn.softcap}
    options |= {} if fn.scale is None else {"scale": np.float32(fn.scale)}
    want = oracle.expect(floats | {"mask": mask != 0} | options, dout, np.zeros((2, 9, 4), np.float32))
    oracle.check(got, {name: want[name] for name in got})


@pytest.mark.parametrize(
    "lead", [(), (2, 3), *(pytest.param(x, marks=pytest.mark.slow) for x in ((3,), (2, 1, 3), (0, 2)))], ids=str
)
def test_batch_axes(lead: tuple[int, ...]) -> None:
    """Of operands, of masks and biases that lack some of them, and of structured masks."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((*lead, *shape), np.float32) for shape in ((5, 4, 8), (6, 2, 8), (6, 2, 3)))
    ids = [rng.integers(0, 2, (*lead, length)).astype(np.int32) for length in (5, 6)]
    lengths = rng.integers(1, 7, lead).astype(np.int32)
    lower = np.zeros((*lead, 5), np.int32)
    some = lead[:1] + (1,) * len(lead[1:])
    masks: list[Any] = [
        (ids[0][..., None, :, None] == ids[1][..., None, None, :]),
        np.ones((*some, 1, 1, 6), np.float32) * (np.arange(6) < 4),
        np.tri(5, 6, dtype=bool),
        StructuredMask(query_segment_ids=ids[0], key_value_segment_ids=ids[1]),
        StructuredMask(key_value_seq_lengths=lengths, row_bounds=(lower, lower + 4)),
        StructuredMask(query_seq_lengths=lengths),
    ]
    dense = [
        *masks[:3],
        masks[0],
        np.arange(6) < np.minimum(lengths, 4)[..., None, None, None],
        (np.arange(5) < lengths[..., None])[..., None, :, None],
    ]
    bias = rng.standard_normal((*some, 1, 5, 6)).astype(np.float32)
    for mask, spelled in zip(masks, dense, strict=True):
        got = attention_fn(q, k, v, bias=bias, mask=mask)
        assert got.shape == (*lead, 5, 4, 3)
        flat = [np.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(-1, *x.shape[-3:]) for x in (q, k, v, bias)]
        many = np.broadcast_to(spelled, (*lead, 1, 5, 6)).reshape(-1, 1, 5, 6)
        want = jax_fa4.attention(*flat, many != 0, implementation="reference")
        np.testing.assert_allclose(got, want.reshape(got.shape), rtol=0, atol=1e-6)


# Decoding with a cache


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (attention_fn, None),
        (AttentionFn(is_causal=True), None),
        (AttentionFn(is_causal=True, local_window_size=(3, 0)), 3),
    ],
    ids=["plain", "causal", "window"],
)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_decode(api: str, fn: AttentionFn, left: int | None) -> None:
    """Step by step, with one compilation, as Flax's own; a window's steps equal whole rows with a window."""
    x = inputs()
    parameters, call = layer(api)

    def spelled_out(query: Array, key: Array, value: Array, **_: Any) -> Array:
        return exact(query, key, value, is_causal=True, left=left)

    with jax.enable_x64(True):
        want = call(spelled_out)(widen(parameters), widen(x))
    window = None if left is None else CAUSAL * (jnp.arange(T)[:, None] - jnp.arange(T) <= left)
    own = decode(api, None) if left is None else call(None)(parameters, x, mask=window)
    assert_as_good(decode(api, fn), own, want)


def decode(api: str, fn: Fn | None) -> Array:
    x, traces = inputs(), 0
    options = {} if fn is None else {"attention_fn": fn}
    if api == "nnx":
        module = nnx.MultiHeadAttention(N, F, use_bias=False, decode=True, rngs=nnx.Rngs(1), **options)
        module.init_cache(x.shape)

        @nnx.jit
        def step(module: nnx.MultiHeadAttention, token: Array) -> Array:
            nonlocal traces
            traces += 1
            return module(token)

        rows = [step(module, x[:, i : i + 1]) for i in range(T)]
    else:
        layer = linen.MultiHeadDotProductAttention(N, use_bias=False, decode=True, **options)
        variables = layer.init(jax.random.key(1), x)  # the parameters are those of a layer that does not decode

        @jax.jit
        def advance(variables: Any, token: Array) -> Any:
            nonlocal traces
            traces += 1
            return layer.apply(variables, token, mutable=["cache"])

        rows = []
        for i in range(T):
            out, new = advance(variables, x[:, i : i + 1])
            variables, rows = variables | new, [*rows, out]
    assert traces == 1
    return jnp.concatenate(rows, 1)


def test_decode_hides_what_the_user_hides() -> None:
    """A mask of the user's, which leaves a gap: the window still counts from the last key that is shown."""
    q, k, v = (jax.random.normal(jax.random.key(i), (B, n, N, 8)) for i, n in enumerate((1, T, T)))
    shown = np.arange(T) < np.array([5, 9]).reshape(B, 1, 1, 1)
    shown &= np.arange(T) != 3
    seen = shown & (np.arange(T) >= np.array([5, 9]).reshape(B, 1, 1, 1) - 4)
    fn = AttentionFn(local_window_size=(3, 0))
    for got in (fn(q, k, v, mask=shown), jax.jit(lambda mask: fn(q, k, v, mask=mask))(shown)):
        np.testing.assert_allclose(got, exact(q, k, v, mask=seen), rtol=0, atol=1e-6)


@pytest.mark.parametrize("lead", [(), (2,), (1, 2)], ids=["unbatched", "batch", "two batch axes"])
def test_a_step_of_a_cache_of_ones_own(lead: tuple[int, ...]) -> None:
    """One row is that of the last key which its mask shows, whatever says what is shown."""
    fn = AttentionFn(is_causal=True, local_window_size=(3, 0))
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((*lead, 11, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    ids = np.broadcast_to(np.arange(11, dtype=np.int32) // 6, (*lead, 11))
    lower, ends = (np.broadcast_to(x.astype(np.int32), (*lead, 11)) for x in (np.zeros(11), np.arange(1, 12)))
    same = ids[..., None, :, None] == ids[..., None, None, :]
    whole, packed = (exact(q, k, v, mask=mask, is_causal=True, left=3) for mask in (None, same))
    step = jax.jit(fn)
    for row in (0, 4, 6, 10):
        filled, documents = ends[..., row], {"query_segment_ids": ids[..., row, None], "key_value_segment_ids": ids}
        seen = np.arange(11) <= row
        masks = [
            (seen, whole),
            (seen & (np.arange(11) // 6 == row // 6), packed),
            (StructuredMask(key_value_seq_lengths=filled), whole),
            (StructuredMask(row_bounds=(lower[..., row, None], filled[..., None])), whole),
            (StructuredMask(key_value_seq_lengths=filled, **documents), packed),
        ]
        for mask, want in masks:
            got = step(q[..., row, None, :, :], k, v, mask=mask)
            np.testing.assert_allclose(got, want[..., row, None, :, :], rtol=0, atol=1e-6)


def test_a_step_that_sees_nothing() -> None:
    x = operands(shapes={"query": (2, 1, 4, 8), "key": (2, 11, 2, 8), "value": (2, 11, 2, 8)})
    out = AttentionFn(is_causal=True)(**x, mask=StructuredMask(key_value_seq_lengths=np.array([0, 3], np.int32)))
    assert not np.asarray(out[0]).any()
    assert np.asarray(out[1]).all()


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_decode_wants_arrays(api: str) -> None:
    x, mask = inputs(), StructuredMask(key_value_seq_lengths=np.array([1, 1], np.int32))
    if api == "nnx":
        step = nnx.MultiHeadAttention(N, F, attention_fn=attention_fn, decode=True, rngs=nnx.Rngs(1))
        step.init_cache(x.shape)
    else:
        layer = linen.MultiHeadDotProductAttention(N, attention_fn=attention_fn, decode=True)
        step = functools.partial(layer.apply, layer.init(jax.random.key(1), x), mutable=["cache"])
    with pytest.raises(TypeError, match="mask must be an array while a layer decodes with a cache"):
        step(x[:, :1], mask=mask)


# What is handed to `jax_fa4.attention`


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of calls of `jax_fa4.attention`, which here gives 1 for a dense mask and 0 without one."""
    calls: list[dict[str, Any]] = []

    def attention(**arguments: Any) -> Array:
        calls.append({name: x for name, x in arguments.items() if x is not None and x is not False})
        return jnp.full(arguments["query"].shape, "mask" in arguments, np.float32)

    monkeypatch.setattr(jax_fa4.flax, "attention", attention)
    return calls


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_known_masks_become_structured(handed: list[dict[str, Any]], make: Callable[..., Any]) -> None:
    q = np.zeros((B, T, N, 8), np.float32)
    for mask in (CAUSAL, CAUSAL[:1], np.tri(T, dtype=bool), np.broadcast_to(CAUSAL, (B, N, T, T))):
        attention_fn(q, q, q, mask=make(mask))
        call = handed.pop()
        assert call.keys() == {"query", "key", "value", "is_causal"}
    for mask, lower, upper in (
        (PADDING, 0, np.array([[T], [7]])),
        (PADDING[:, :, :1], 0, np.array([[T], [7]])),
        (CAUSAL * PACKED, None, np.arange(1, T + 1)),
        (CAUSAL * (1 - np.tri(T, k=-3)), np.maximum(np.arange(T) - 2, 0), np.arange(1, T + 1)),
        (np.arange(T) < 3, 0, 3),
    ):
        attention_fn(q, q, q, mask=make(mask))
        call = handed.pop()
        assert call.keys() == {"query", "key", "value", "row_bounds"}
        assert {x.dtype for x in call["row_bounds"]} == {np.dtype(np.int32)}
        for got, want in zip(call["row_bounds"], (lower, upper), strict=True):
            if want is not None:
                np.testing.assert_array_equal(got, np.broadcast_to(want, (B, T)))
    for mask in (HOLES, np.tri(T, dtype=bool)[None] ^ (np.arange(N) == 1)[:, None, None]):
        attention_fn(q, q, q, mask=make(mask))
        assert handed.pop().keys() == {"query", "key", "value", "mask"}


def test_traced_masks_run_structured_exactly_where_they_are_intervals(handed: list[dict[str, Any]]) -> None:
    """All masks of one row of 6 keys, and of two rows each with the row that sees all."""
    q, k = np.zeros((1, 2, 1, 8), np.float32), np.zeros((1, 6, 1, 8), np.float32)
    run = jax.jit(lambda mask: attention_fn(q, k, k, mask=mask).max())
    for row in itertools.product((False, True), repeat=6):
        shown = np.flatnonzero(row)
        interval = not len(shown) or len(shown) == shown[-1] - shown[0] + 1
        for other in (row, (True,) * 6):
            mask = np.array([other, row])[None, None]
            assert run(mask) == (not interval), mask
    structured, dense = handed
    assert structured.keys() == {"query", "key", "value", "row_bounds"}
    assert dense.keys() == {"query", "key", "value", "mask"}


def test_options_reach_attention(handed: list[dict[str, Any]]) -> None:
    options = {
        "is_causal": True,
        "local_window_size": (4, None),
        "scale": 0.5,
        "softcap": 3.0,
        "implementation": "tiled",
    }
    q = np.zeros((B, T, N, 8), np.float32)
    AttentionFn(**options, deterministic_gradients=True)(q, q, q)
    call = handed.pop()
    assert {name: x for name, x in call.items() if name not in SHAPES} == options | {"deterministic": True}


@pytest.mark.parametrize("mask", ["traced", "known", "structured", "option"])
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "gradient"])
def test_kernels_are_in_the_program_for_gpus(mask: str, grad: bool) -> None:
    fn = AttentionFn(is_causal=mask == "option")
    masks = {"traced": CAUSAL, "known": np.asarray(PACKED), "structured": SEGMENTS, "option": None}
    q = jnp.zeros((B, T, N, 64), jnp.bfloat16)

    def run(x: Array, traced: Any) -> Array:
        return fn(x, x, x, mask=masks[mask] if traced is None else traced).astype(np.float32).sum()

    function = jax.jit(jax.grad(run) if grad else run)
    traced = None if mask in ("known", "option") else masks[mask]
    text = function.trace(q, traced).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("forward", "backward")[: 1 + grad]:
        assert any(name in target and target in text for target in jax_fa4.CUSTOM_CALLS), name


def test_the_emulated_kernels_take_flax_masks() -> None:
    """They refuse dense masks, so what they compute came as row bounds."""
    shapes = {name: (*shape[:-1], 64) for name, shape in SHAPES.items()}
    x = operands(jnp.bfloat16, shapes)
    if (reason := jax_fa4.why_not("emulated", **x)) is not None:
        pytest.skip(reason)
    mask = dense_masks()["intervals"]
    got = {"out": AttentionFn(implementation="emulated")(**x, mask=mask)}
    want = oracle.expect(x | {"mask": mask}, np.zeros((2, 9, 4, 64), jnp.bfloat16), np.zeros((2, 9, 4), np.float32))
    oracle.check(got, {"out": want["out"]})


# Arguments

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, "dropout_rate must be 0 where deterministic"),
    "dropout of no flag": ({"dropout_rate": 0.1, "deterministic": "no"}, "deterministic must be True or False.* 'no'"),
    "causal of no flag": ({"is_causal": "no"}, "is_causal must be True or False.* 'no'"),
    "module": ({"module": nnx.Module()}, "module must be None, but got Module: .* sow_weights"),
    "precision": ({"precision": lax.Precision.HIGHEST}, "precision must be None or .* jax.default_matmul_precision"),
    "precision by name": ({"precision": "highest"}, "precision must be None .* but got 'highest'"),
    **{
        name: ({name: jnp.einsum}, f"{name} must be None")
        for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")
    },
    "causal step": (
        {"query": np.zeros((2, 1, 4, 8), np.float32), "mask": np.ones((1, 1, 1, 11)), "is_causal": True},
        "is_causal must be False in a call with a mask, one query row and 11 keys",
    ),
    "mask of text": ({"mask": "causal"}, "mask must be an array of bool or of numbers, or one StructuredMask, but got"),
    "mask of masks": (
        {"mask": (StructuredMask(), np.ones((9, 11), bool))},
        "mask must be an array of bool or of numbers, or one StructuredMask, but got an object of type tuple",
    ),
    "mask of the class": (
        {"mask": StructuredMask},
        "mask must be .* one StructuredMask, but got <class '.*StructuredM",
    ),
    "mask that is added": (
        {"mask": np.where(np.tri(9, 11), 0.0, -np.inf)},
        "mask must hide with 0 and show with 1, but got -inf: a mask that is added to the logits is a bias",
    ),
    "causal step, structured": (
        {"query": np.zeros((2, 1, 4, 8), np.float32), "mask": StructuredMask(), "is_causal": True},
        "is_causal must be False in a call with a mask, one query row and 11 keys",
    ),
    "lengths' shape in a step": (
        {"query": np.zeros((2, 1, 4, 8), np.float32), "mask": StructuredMask(key_value_seq_lengths=np.int32(3))},
        r"key_value_seq_lengths's shape must be \(B,\) = \(2,\), but got \(\)",
    ),
    "mask's shape": (
        {"mask": np.ones((9, 10))},
        r"mask's shape must be broadcastable to .* = \(2, 4, 9, 11\), but got",
    ),
    "mask's axes": ({"mask": np.ones((1, 2, 4, 9, 11))}, r"mask's shape must be .* but got \(1, 2, 4, 9, 11\)"),
    "bias's shape": ({"bias": np.ones((3, 4, 9, 11))}, "bias's shape must be broadcastable to"),
    "bias that is a mask": ({"bias": StructuredMask()}, "bias must be an array, but got StructuredMask"),
    "no query": ({"query": None}, "query must be an array, but got NoneType"),
    "dtype of integers": ({"dtype": np.int32}, "dtype must be that of floating point numbers, or None, but got int32"),
    "no dtype": ({"dtype": "bf16"}, "dtype must be that of floating point numbers, or None, but got 'bf16'"),
    "key's batch": ({"key": np.zeros((3, 11, 2, 8), np.float32)}, r"key's shape must be .* of query, \(2,\), but got"),
    "query's axes": ({"query": np.zeros((4, 8), np.float32)}, r"query's shape must be .* but got \(4, 8\)"),
    "ids alone": (
        {"mask": StructuredMask(query_segment_ids=np.zeros((2, 9), np.int32))},
        "query_segment_ids was given",
    ),
    "ids' shape": (
        {"mask": StructuredMask(query_seq_lengths=np.zeros((3,), np.int32))},
        r"query_seq_lengths's shape must be \(B,\) = \(2,\), but got \(3,\)",
    ),
    "ids' dtype": (
        {"mask": StructuredMask(row_bounds=(np.zeros((2, 9)), np.zeros((2, 9))))},
        "dtype must be int32, but got float32",
    ),
    "lengths of folded batch axes": (
        {name: x[None] for name, x in operands().items()}
        | {"mask": StructuredMask(key_value_seq_lengths=np.zeros((2,), np.int32))},
        r"key_value_seq_lengths's shape must be \(batch...\), .* \(1, 2\), but got \(2,\)",
    ),
    "bounds of folded batch axes": (
        {name: x[None] for name, x in operands().items()}
        | {"mask": StructuredMask(row_bounds=(np.zeros((2, 9), np.int32),) * 2)},
        r"row_bounds's shape must be \(batch..., length\), .* \(1, 2\), but got \(2, 9\)",
    ),
    "bounds alone": ({"mask": StructuredMask(row_bounds=np.zeros((2, 9)))}, "row_bounds must be a pair"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    arguments, sentence = REFUSED[name]
    arguments = operands() | arguments
    for fn in (attention_fn, AttentionFn(is_causal=True)) if "step" in name else (attention_fn,):
        check_refused(fn, arguments, sentence)


def check_refused(fn: AttentionFn, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=sentence) as caught:
        fn(**arguments)
    assert fn.why_not(None, **arguments) == str(caught.value)


def test_a_traced_dropout_rate_is_refused() -> None:
    with pytest.raises(TypeError, match="dropout_rate must be a number, known when tracing"):
        jax.jit(lambda rate: attention_fn(**operands(), dropout_rate=rate))(0.0)


def test_what_asks_for_nothing_is_taken() -> None:
    x = operands()
    want = attention_fn(**x)
    for arguments in (
        {"dropout_rate": 0.1, "deterministic": True},
        {"dropout_rng": jax.random.key(0), "broadcast_dropout": False},
        {"precision": lax.Precision.DEFAULT},
        {"precision": "default"},
        {"force_fp32_for_softmax": True},
        {"dtype": np.float32},
    ):
        assert attention_fn.why_not(None, **x, **arguments) is None
        np.testing.assert_array_equal(attention_fn(**x, **arguments), want)


@pytest.mark.parametrize(
    ("batch", "axes", "fits"),
    [
        ((4, 2), ("b", None), True),
        ((1, 4), (None, "b"), True),
        ((2, 4), ("b", "h"), True),  # of the first axis a device has one place
        ((4, 2), ("b", "h"), False),
        ((2, 4), (None, "b"), False),
    ],
)
def test_batch_axes_that_are_sharded(batch: tuple[int, ...], axes: tuple[str | None, ...], fits: bool) -> None:
    mesh = AbstractMesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)

    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*batch, *shape), np.int32, sharding=NamedSharding(mesh, P(*axes)))

    x = struct(4, 2, 8)
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    lengths = StructuredMask(key_value_seq_lengths=struct())
    calls = {"query": (x, None), "mask": (whole, struct(1, 1, 4)), "key_value_seq_lengths": (whole, lengths)}
    with jax.sharding.use_abstract_mesh(mesh):
        for name, (query, mask) in calls.items():
            attend = lambda query, mask: attention_fn(query, query, query, mask=mask)  # noqa: E731
            if fits:
                assert jax.eval_shape(attend, query, mask).shape == x.shape
                continue
            with pytest.raises(ValueError, match=f"{name}'s batch axes, {re.escape(str(batch))}.*sharding is P"):
                jax.eval_shape(attend, query, mask)


def test_dtypes_promote_as_in_flax() -> None:
    def halve(arrays: tuple[Array, ...], dtype: Any) -> list[Array]:
        return [x.astype(np.float16) for x in arrays]

    names = ("query", "key", "key")
    dtypes = itertools.product((np.float32, jnp.bfloat16, np.int32), (np.float32, np.int32), (None, jnp.bfloat16))
    for one, other, dtype in dtypes:
        q, k, v = (jax.ShapeDtypeStruct(SHAPES[name], y) for name, y in zip(names, (one, other, other), strict=True))
        want, got = (
            jax.eval_shape(functools.partial(f, dtype=dtype), q, k, v)
            for f in (nnx.dot_product_attention, attention_fn)
        )
        assert want.dtype == got.dtype
        halved = functools.partial(attention_fn, dtype=dtype, promote_dtype=halve)
        assert jax.eval_shape(halved, q, k, v).dtype == np.float16


@pytest.mark.parametrize("own", [nnx.dot_product_attention, linen.dot_product_attention])
def test_every_parameter_of_flax_is_here(own: Fn) -> None:
    """Linen hands over only what a signature names; what comes by position has Flax's place."""
    theirs, ours = (inspect.signature(fn).parameters for fn in (own, attention_fn))
    assert theirs.keys() <= ours.keys()
    assert not any(x.kind in (x.VAR_KEYWORD, x.VAR_POSITIONAL) for x in ours.values())
    places = [name for name, x in ours.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert places == list(theirs)[: len(places)]
    for name in theirs.keys() - {"promote_dtype"}:
        assert ours[name].default == theirs[name].default, name
    with pytest.raises(TypeError, match="unexpected keyword argument 'rope'"):
        attention_fn(**operands(), rope=None)


@pytest.mark.parametrize(
    ("api", "options", "arguments", "sentence"),
    [
        ("nnx", {"dropout_rate": 0.5}, {"deterministic": False}, "dropout_rate"),
        (
            "linen",
            {"dropout_rate": 0.5},
            {"deterministic": False, "rngs": {"dropout": jax.random.key(0)}},
            "dropout_rate",
        ),
        ("nnx", {}, {"sow_weights": True}, "sow_weights"),
        ("linen", {}, {"sow_weights": True}, "sow_weights"),
        ("nnx", {"precision": "highest"}, {}, "precision"),
        ("linen", {"precision": "highest"}, {}, "precision"),
        (
            "linen",
            {"qk_attn_weights_einsum_cls": lambda: jnp.einsum, "attn_weights_value_einsum_cls": lambda: jnp.einsum},
            {},
            "einsum",
        ),
    ],
)
def test_layers_that_ask_for_more_are_refused(
    api: str, options: dict[str, Any], arguments: dict[str, Any], sentence: str
) -> None:
    parameters, call = layer(api)
    if api == "nnx":
        module = nnx.MultiHeadAttention(N, F, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(1), **options)
        with pytest.raises(NotImplementedError, match=sentence):
            module(inputs(), **arguments)
    else:
        with pytest.raises(NotImplementedError, match=sentence):
            call(attention_fn, **options)(parameters, inputs(), **arguments)


def test_options() -> None:
    assert AttentionFn() == attention_fn
    assert hash(AttentionFn(is_causal=True)) == hash(AttentionFn(is_causal=True))
    graphs = [
        nnx.graphdef(nnx.MultiHeadAttention(N, F, attention_fn=AttentionFn(softcap=cap), rngs=nnx.Rngs(0)))
        for cap in (1.0, 1.0, 2.0)
    ]
    assert graphs[0] == graphs[1] != graphs[2]
    for options in ({"scale": np.ones(1)}, {"local_window_size": [1, 2]}):
        with pytest.raises(TypeError, match=f"{next(iter(options))} must be hashable, because layers keep it"):
            AttentionFn(**options)
    with pytest.raises(ValueError, match="softcap must be a positive normal number"):
        AttentionFn(softcap=-1)(**operands())
    for name, wrong in (("is_causal", None), ("deterministic_gradients", "no")):
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            AttentionFn(**{name: wrong})
    with pytest.raises(TypeError, match=r"AttentionFn has the options is_causal, .*, but got causal"):
        AttentionFn(causal=True)
    fn = AttentionFn(True, (3, 0), softcap=2.0)
    assert pickle.loads(pickle.dumps(fn)) == copy.deepcopy(fn) == dataclasses.replace(attention_fn, **vars(fn)) == fn


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_layer_of_the_class_is_refused(api: str) -> None:
    """The class and its instances are both callable, and a layer calls what it is given."""
    parameters, call = layer(api)
    with pytest.raises(TypeError, match=r"An attention_fn is an instance: give a layer .* rather than the class"):
        call(AttentionFn)(parameters, inputs())


# why_not


def test_why_not_says_what_made_a_call_fall_back() -> None:
    struct = jax.ShapeDtypeStruct((2, 9, 4, 64), jnp.bfloat16)
    if (reason := jax_fa4.why_not("emulated", struct, struct, struct)) is not None:
        pytest.skip(reason)
    why = functools.partial(attention_fn.why_not, "emulated", struct, struct, struct)
    holes = np.ones((2, 1, 9, 9), bool)
    holes[1, 0, 5, 3] = False
    dense = "implementation='emulated' does not support mask; "
    assert why() is None
    assert why(mask=np.tri(9)) is None
    assert why(mask=StructuredMask(key_value_seq_lengths=jax.ShapeDtypeStruct((2,), np.int32))) is None
    gap = "mask shows more than one interval of keys in row 5 of batch element 1."
    assert why(mask=holes).startswith(f"{gap} {dense}")
    traced = why(mask=jax.ShapeDtypeStruct((2, 1, 9, 9), np.float32))
    assert traced.startswith("mask's values are known only where the program runs, ")
    assert dense in traced
    heads = np.tri(9, dtype=bool)[None] ^ (np.arange(4) == 1)[:, None, None]
    assert why(mask=heads).startswith(f"mask differs from head to head. {dense}")
    heads_axis = "mask has an axis for heads, and its values are known only where the program runs."
    assert why(mask=jax.ShapeDtypeStruct((4, 9, 9), bool)).startswith(f"{heads_axis} {dense}")
    assert "does not support bias" in why(bias=jax.ShapeDtypeStruct((9, 9), np.float32))
    assert why(mask=np.ones(8)).startswith("mask's shape must be")
    fn, q = AttentionFn(implementation="emulated"), jnp.zeros(struct.shape, struct.dtype)
    with pytest.raises(NotImplementedError, match=re.escape(f"{gap} {dense}")):
        fn(q, q, q, mask=holes)
    with pytest.raises(NotImplementedError, match=re.escape(traced)):
        jax.jit(lambda mask: fn(q, q, q, mask=mask)).lower(np.ones((2, 1, 9, 9), np.float32))
    with pytest.raises(TypeError, match="unexpected keyword argument 'rope'"):
        why(rope=1)


def test_why_not_of_a_device() -> None:
    struct = jax.ShapeDtypeStruct((2, 9, 4, 64), jnp.bfloat16)
    cpu = jax.devices("cpu")[0]
    assert "needs an NVIDIA GPU" in attention_fn.why_not("cuda", struct, struct, struct, device=cpu)
    with pytest.raises(TypeError, match=r"device must be a jax\.Device.* got 'gpu'"):
        attention_fn.why_not("cuda", struct, struct, struct, device="gpu")


@pytest.mark.gpu
def test_cuda_takes_flax_masks() -> None:
    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 300, 4, 64)), jnp.bfloat16)
    mask = linen.make_causal_mask(jnp.ones((2, 300)))
    fn = AttentionFn(implementation="cuda")
    assert fn.why_not("cuda", x, x, x, mask=mask) is None
    known = fn(x, x, x, mask=mask)
    traced = jax.jit(lambda mask: attention_fn(x, x, x, mask=mask))(mask)
    with jax.enable_x64(True):
        want = exact(*[jnp.asarray(x, np.float64)] * 3, is_causal=True)
    own = nnx.dot_product_attention(x, x, x, mask=mask)
    assert_as_good(known, own, want, jnp.bfloat16)
    assert_as_good(traced, own, want, jnp.bfloat16)


# Transformations


class Block(linen.Module):
    """Attention with a residual, as `linen.scan` wants it."""

    fn: Fn

    @linen.compact
    def __call__(self, x: Array, mask: Array) -> tuple[Array, None]:
        return x + linen.MultiHeadDotProductAttention(N, use_bias=False, attention_fn=self.fn)(x, mask=mask), None


@pytest.mark.slow
def test_scan_of_remat_in_linen() -> None:
    scanned = linen.scan(
        linen.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=linen.broadcast, length=3
    )
    parameters, x = scanned(exact).init(jax.random.key(2), inputs(), CAUSAL), inputs()

    def run(fn: Fn, *operands: Any) -> Any:
        return results(lambda *pair, mask: scanned(fn).apply(*pair, mask)[0], *operands, {}, {"mask": CAUSAL})

    with jax.enable_x64(True):
        want = run(exact, widen(parameters), widen(x))
    assert_as_good(run(attention_fn, parameters, x), run(linen.dot_product_attention, parameters, x), want)


def test_vmap_scan_and_remat_in_nnx() -> None:
    """Layers made by `nnx.vmap`, run by `nnx.scan` of `nnx.remat`."""

    def stack(fn: Fn) -> nnx.MultiHeadAttention:
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
            return nnx.MultiHeadAttention(
                N, F, attention_fn=fn, use_bias=False, decode=False, keep_rngs=False, rngs=rngs
            )

        return make(nnx.Rngs(3))

    def call(fn: Fn) -> Callable[..., Array]:
        graph, _ = nnx.split(stack(fn))

        @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x: Array, layer: nnx.MultiHeadAttention, mask: Array) -> Array:
            return x + layer(x, mask=mask)

        return lambda parameters, x, mask: forward(x, nnx.merge(graph, parameters), mask)

    def run(fn: Fn, *operands: Any) -> Any:
        return results(call(fn), *operands, {}, {"mask": CAUSAL})

    parameters, x = nnx.split(stack(attention_fn))[1], inputs()
    with jax.enable_x64(True):
        want = run(exact, widen(parameters), widen(x))
    assert_as_good(run(attention_fn, parameters, x), run(nnx.dot_product_attention, parameters, x), want)


def test_vmap_over_masks() -> None:
    """Some are intervals and some are not."""
    q = inputs(B, T, N, 8)
    masks = jnp.stack([CAUSAL, HOLES, PADDING])
    got = jax.vmap(lambda mask: attention_fn(q, q, q, mask=mask))(masks)
    np.testing.assert_allclose(got, jnp.stack([exact(q, q, q, mask=mask) for mask in masks]), rtol=0, atol=2e-6)
