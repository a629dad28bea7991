"""The contract of `jax.nn.dot_product_attention`, call for call, and the differences that are deliberate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention

B, T, S, N, K, D = 2, 5, 7, 4, 2, 8
Arguments = dict[str, Any]


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def some(*shape: int) -> np.ndarray:
    """A random mask that shows every row its first key."""
    mask = normal(*shape, seed=9) < 0.5
    mask[..., 0] = True
    return mask


def int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def qkv(*, dtype: Any = np.float32, batch: int | None = B) -> Arguments:
    lead = () if batch is None else (batch,)
    shapes = {"query": (*lead, T, N, D), "key": (*lead, S, K, D), "value": (*lead, S, K, D)}
    return {name: normal(*shape, dtype=dtype, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def call(function: Callable[..., Any], arguments: Mapping[str, Any], **static: Any) -> list[jax.Array]:
    """Out and lse; arrays are traced, as in most programs, and everything else is static."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray | jax.Array)}
    rest = {name: x for name, x in arguments.items() if name not in arrays} | static
    return list(jax.jit(lambda arrays: function(**arrays, **rest, return_residual=True))(arrays))


def assert_same(arguments: Mapping[str, Any], *, tolerance: float = 2e-5, **static: Any) -> None:
    """Out and lse have jax.nn's shapes and types, and jax.nn's values in rows that see something."""
    ours, theirs = call(attention, arguments, **static), call(jax.nn.dot_product_attention, arguments, **static)
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    assert ours[0].dtype == theirs[0].dtype
    assert ours[0].weak_type == theirs[0].weak_type
    seen = np.asarray(ours[1]) > -np.inf
    assert seen.any()
    for x, y in zip(ours, theirs, strict=True):
        x, y = np.asarray(x, np.float64)[seen], np.asarray(y, np.float64)[seen]
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


CALLS: dict[str, Arguments] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "window_of_one_int": {"local_window_size": 1},
    "window_as_a_list": {"local_window_size": [1, 3]},
    "window_of_0": {"local_window_size": (0, 0)},
    "window_wider_than_everything": {"local_window_size": (1000, 1000)},
    "window_left_and_causal": {"local_window_size": (2, 3), "is_causal": True},
    "window_left_without_causal": {"local_window_size": (3, 0)},
    "key_lengths": {"key_value_seq_lengths": int32(3, 7)},
    "key_lengths_beyond_the_end": {"key_value_seq_lengths": int32(100, 1)},
    "query_lengths": {"query_seq_lengths": int32(2, 5)},
    "both_lengths_causal": {
        "query_seq_lengths": int32(4, 5),
        "key_value_seq_lengths": int32(3, 6),
        "is_causal": True,
    },
    "every_structured_mask": {
        "query_seq_lengths": int32(5, 3),
        "key_value_seq_lengths": int32(6, 2),
        "local_window_size": (3, 1),
        "is_causal": True,
        "mask": some(B, N, T, S),
    },
    "mask_T_S": {"mask": some(T, S)},
    "mask_N_T_S": {"mask": some(N, T, S)},
    "mask_B_1_1_S": {"mask": some(B, 1, 1, S)},
    "mask_1_1_T_1": {"mask": np.ones((1, 1, T, 1), bool)},
    "mask_S": {"mask": some(S)},
    "mask_of_no_axes": {"mask": np.array(True)},
    "mask_and_causal": {"mask": some(B, 1, T, S), "is_causal": True},
    "bias_T_S": {"bias": normal(T, S)},
    "bias_N_1_1": {"bias": normal(N, 1, 1)},
    "bias_N_T_S": {"bias": normal(N, T, S)},
    "bias_B_1_1_S": {"bias": normal(B, 1, 1, S)},
    "bias_B_N_T_S": {"bias": normal(B, N, T, S), "is_causal": True},
    "bias_of_no_axes": {"bias": normal()[()]},
    "bias_hides_with_-inf": {"bias": np.where(some(T, S), normal(T, S), -np.inf).astype(np.float32)},
    "bias_bfloat16": {"bias": normal(T, S, dtype=jnp.bfloat16)},
    "bias_float16": {"bias": normal(T, S, dtype=np.float16)},
    "bias_int": {"bias": np.arange(T * S, dtype=np.int32).reshape(T, S) % 5},
    "bias_uint8": {"bias": np.arange(S, dtype=np.uint8)},
    "bias_bool": {"bias": some(T, S)},
    "scale": {"scale": 0.3},
    "scale_int": {"scale": 2},
    "scale_0": {"scale": 0.0},
    "scale_negative": {"scale": -0.7},
    "scale_numpy_scalar": {"scale": np.float64(0.3)},
    "scale_numpy_int": {"scale": np.int64(2)},
    "scale_traced": {"scale": np.array(0.3, np.float32)},
    "scale_of_one_element": {"scale": np.array([0.3], np.float32)},
    "scale_bfloat16": {"scale": jnp.bfloat16(0.3)},
    "is_causal_numpy": {"is_causal": np.True_},
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    assert_same(qkv() | CALLS[name])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float64], ids=lambda dtype: np.dtype(dtype).name)
def test_dtype(dtype: Any) -> None:
    """Without x64 mode, numpy's float64 is float32 to jax, here as in jax.nn."""
    tolerance = 2e-5 if dtype == np.float64 else 2e-2
    assert_same(qkv(dtype=dtype) | {"is_causal": True, "bias": normal(T, S)}, tolerance=tolerance)


def test_float16() -> None:
    """jax.nn's float16 cannot be compiled for CPUs, so its float32 is the reference."""
    arguments = qkv(dtype=np.float16)
    out = attention(**arguments, is_causal=True)
    assert out.dtype == np.float16
    want = jax.nn.dot_product_attention(**{name: x.astype(np.float32) for name, x in arguments.items()}, is_causal=True)
    np.testing.assert_allclose(out, want, rtol=2e-3, atol=2e-3)


def test_x64() -> None:
    """jax.nn computes a float64 softmax in float32; ours is float64, and lse float32 all the same."""
    with jax.enable_x64(True):
        assert_same(qkv(dtype=np.float64) | {"bias": normal(T, S, dtype=np.float64)})
        assert_same(qkv() | {"bias": normal(T, S, dtype=np.float64), "scale": 0.3})
        assert_same(qkv() | {"query_seq_lengths": int32(2, 5), "local_window_size": 2, "is_causal": True})
        assert attention(**qkv(dtype=np.float64), return_residual=True)[1].dtype == np.float32


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_implementation(implementation: str | None) -> None:
    assert_same(qkv() | {"is_causal": True}, implementation=implementation)


@pytest.mark.parametrize("extra", ["plain", "mask_N_T_S", "bias_T_S", "window_left_and_causal"])
def test_unbatched(extra: str) -> None:
    assert_same(qkv(batch=None) | CALLS[extra])


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_batched_and_unbatched_mix_when_B_is_1(name: str) -> None:
    arguments = qkv(batch=None)
    assert_same(arguments | {name: arguments[name][None]})
    assert_same(qkv(batch=1) | {name: arguments[name]})


def test_lengths_of_an_unbatched_call() -> None:
    lengths = {"query_seq_lengths": int32(3), "key_value_seq_lengths": int32(4)}
    assert_same(qkv(batch=None) | lengths)


@pytest.mark.parametrize("kv_heads", [1, N])
def test_multi_query_and_multi_head(kv_heads: int) -> None:
    key, value = normal(B, S, kv_heads, D), normal(B, S, kv_heads, D, seed=1)
    assert_same(qkv() | {"key": key, "value": value, "mask": some(B, N, T, S)})


def test_lists_and_eager_numpy() -> None:
    arguments = qkv() | {"mask": some(T, S), "key_value_seq_lengths": int32(3, 7)}
    want = jax.nn.dot_product_attention(**arguments)
    lists = {name: x.tolist() for name, x in arguments.items()}
    lists["key_value_seq_lengths"] = arguments["key_value_seq_lengths"]  # jax.nn would also take a list, as we do
    np.testing.assert_allclose(attention(**lists), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(attention(**lists | {"key_value_seq_lengths": [3, 7]}), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(attention(**arguments), want, rtol=2e-5, atol=2e-5)


def test_weak_types() -> None:
    weak = jnp.broadcast_to(jnp.asarray(0.5), (B, S, N, D))
    assert weak.weak_type
    assert_same({"query": weak, "key": weak, "value": weak})
    assert_same({"query": weak, "key": normal(B, S, K, D), "value": normal(B, S, K, D), "bias": jnp.asarray(1.0)})


@pytest.mark.parametrize("empty", ["batch", "rows"])
def test_zero_sizes(empty: str) -> None:
    size = {"batch": (0, T), "rows": (B, 0)}[empty]
    kv = normal(size[0], S, K, D)
    arguments = {"query": normal(*size, N, D), "key": kv, "value": kv, "return_residual": True}
    for x, y in zip(attention(**arguments), jax.nn.dot_product_attention(**arguments), strict=True):
        assert x.shape == y.shape


def test_positional_bias_and_mask() -> None:
    arguments = [*qkv().values(), normal(T, S), some(T, S)]
    ours, theirs = (jax.jit(f)(*arguments) for f in (attention, jax.nn.dot_product_attention))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["plain", "both_lengths_causal", "bias_N_1_1", "bias_int", "scale_negative"])
def test_gradients(name: str) -> None:
    arguments = qkv() | {"scale": np.float32(0.3)} | CALLS[name]
    scale = np.asarray(arguments.pop("scale"), np.float32)
    floats = {n: x for n, x in arguments.items() if isinstance(x, np.ndarray) and x.dtype == np.float32}
    floats["scale"] = scale
    rest = {n: x for n, x in arguments.items() if n not in floats}
    weights = normal(B, T, N, D, seed=5)

    def gradients(function: Callable[..., Any]) -> dict[str, jax.Array]:
        return jax.jit(jax.grad(lambda floats: (function(**floats, **rest) * weights).sum()))(floats)

    ours, theirs = gradients(attention), gradients(jax.nn.dot_product_attention)
    for name in floats:
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].shape == theirs[name].shape
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=2e-5, err_msg=name)


class TestSignature:
    def test_every_parameter_of_jax_nn_is_here(self) -> None:
        theirs = inspect.signature(jax.nn.dot_product_attention).parameters
        ours = inspect.signature(attention).parameters
        assert [name for name in ours if name in theirs] == list(theirs)
        for name, parameter in theirs.items():
            assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name

    def test_every_addition_is_a_keyword_with_a_default(self) -> None:
        theirs = inspect.signature(jax.nn.dot_product_attention).parameters
        added = [p for name, p in inspect.signature(attention).parameters.items() if name not in theirs]
        assert [p.name for p in added] == [
            "query_offset",
            "query_segment_ids",
            "key_value_segment_ids",
            "row_bounds",
            "softcap",
            "sinks",
            "deterministic",
        ]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added)


class TestDocumentedDifferences:
    """Where `attention` deliberately gives another answer than jax.nn."""

    @pytest.mark.parametrize(
        "hide",
        [
            {"mask": np.zeros((T, S), bool)},
            {"bias": np.full((T, S), -np.inf, np.float32)},
            {"key_value_seq_lengths": int32(0, 0)},
            {"query_seq_lengths": int32(0, 0)},
            {"key_value_seq_lengths": int32(-3, -1)},
        ],
        ids=["mask", "bias", "key_lengths", "query_lengths", "negative_lengths"],
    )
    def test_rows_that_see_nothing_are_0_and_have_lse_minus_infinity(self, hide: Arguments) -> None:
        """jax.nn gives the mean of all values, or NaN."""
        out, lse = attention(**qkv(), **hide, return_residual=True)
        assert (np.asarray(out) == 0).all()
        assert (np.asarray(lse) == -np.inf).all()

    def test_no_keys_at_all(self) -> None:
        """jax.nn fails to reduce an axis of length 0."""
        out, lse = attention(**qkv() | {"key": normal(B, 0, K, D), "value": normal(B, 0, K, D)}, return_residual=True)
        assert (np.asarray(out) == 0).all()
        assert (np.asarray(lse) == -np.inf).all()

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32], ids=lambda dtype: np.dtype(dtype).name)
    def test_lse_is_float32(self, dtype: Any) -> None:
        """jax.nn rounds it to key's dtype."""
        arguments = qkv(dtype=dtype)
        lse = attention(**arguments, return_residual=True)[1]
        exact = attention(**{name: x.astype(np.float32) for name, x in arguments.items()}, return_residual=True)[1]
        assert lse.dtype == np.float32
        np.testing.assert_allclose(lse, exact, atol=1e-5)

    def test_lse_is_differentiable(self) -> None:
        """jax.nn stops its gradient; ours is that of a logsumexp, here checked against finite differences."""
        arguments = qkv()
        step = 1e-2 * normal(B, T, N, D, seed=7)

        def total(query: Any) -> jax.Array:
            return attention(**arguments | {"query": query}, return_residual=True)[1].sum()

        slope = (jax.grad(total)(arguments["query"]) * step).sum()
        difference = (total(arguments["query"] + step) - total(arguments["query"] - step)) / 2
        np.testing.assert_allclose(slope, difference, rtol=1e-2)
        assert abs(slope) > 1e-3


class TestMoreThanJaxNn:
    """What jax.nn refuses and `attention` takes."""

    @pytest.mark.parametrize("window", [(2, None), (None, 1), (None, None)])
    def test_a_window_may_be_open_on_a_side(self, window: tuple[int | None, int | None]) -> None:
        wide = tuple(S if side is None else side for side in window)
        np.testing.assert_array_equal(
            attention(**qkv(), local_window_size=window), attention(**qkv(), local_window_size=wide)
        )

    @pytest.mark.parametrize("window", [np.int64(2), (np.int32(2), np.uint8(2)), np.array(2)], ids=repr)
    def test_a_window_may_be_of_numpy_integers(self, window: Any) -> None:
        np.testing.assert_array_equal(
            attention(**qkv(), local_window_size=window), attention(**qkv(), local_window_size=2)
        )

    def test_unbatched_integers_may_lack_the_batch_axis(self) -> None:
        without = {
            "query_seq_lengths": np.int32(4),
            "key_value_seq_lengths": np.int32(6),
            "query_segment_ids": int32(0, 0, 1, 1, 1),
            "key_value_segment_ids": int32(0, 1, 0, 1, 0, 1, 0),
            "row_bounds": (int32(0, 1, 0, 1, 0), int32(5, 6, 7, 4, 3)),
        }
        within = {name: jax.tree.map(lambda x: x[None], x) for name, x in without.items()}
        want = attention(**qkv(batch=None), **within, query_offset=int32(1))
        np.testing.assert_array_equal(attention(**qkv(batch=None), **without, query_offset=np.int32(1)), want)

    def test_values_may_have_their_own_width(self) -> None:
        narrow = attention(**qkv() | {"value": qkv()["value"][..., :3]})
        np.testing.assert_allclose(narrow, attention(**qkv())[..., :3], rtol=2e-5, atol=2e-5)


ROW, COL = np.arange(T)[:, None], np.arange(S)
ROW_IDS, KEY_IDS = (np.random.default_rng(i).integers(0, 2, (B, length), np.int32) for i, length in ((0, T), (1, S)))
BOUNDS = int32(0, 3, 1, 4, 2) + np.zeros((B, 1), np.int32), int32(7, 4, 6, 5, 3) + int32(0, 1)[:, None]

STRUCTURED: dict[str, tuple[Arguments, np.ndarray]] = {
    "offset": ({"query_offset": 2, "is_causal": True}, COL <= ROW + 2),
    "offset_end": ({"query_offset": "end", "is_causal": True}, COL <= ROW + S - T),
    "offset_end_and_lengths": (
        {"query_offset": "end", "is_causal": True, "key_value_seq_lengths": int32(4, 7)},
        (COL <= ROW + S - T) & (int32(4, 7)[:, None, None] > COL),
    ),
    "offset_per_batch": ({"query_offset": int32(0, 2), "is_causal": True}, ROW + int32(0, 2)[:, None, None] >= COL),
    "offset_of_a_window": (
        {"query_offset": np.int32(1), "local_window_size": (1, 2)},
        (COL >= ROW) & (COL <= ROW + 3),
    ),
    "offset_negative": ({"query_offset": -2, "local_window_size": (None, 2)}, COL <= ROW),
    "offset_before_the_keys": ({"query_offset": -2, "is_causal": True}, COL <= ROW - 2),
    "segments": (
        {"query_segment_ids": ROW_IDS, "key_value_segment_ids": KEY_IDS},
        ROW_IDS[:, :, None] == KEY_IDS[:, None],
    ),
    "segments_and_window": (
        {"query_segment_ids": ROW_IDS, "key_value_segment_ids": KEY_IDS, "local_window_size": (3, 4)},
        (ROW_IDS[:, :, None] == KEY_IDS[:, None]) & (COL >= ROW - 3) & (COL <= ROW + 4),
    ),
    "row_bounds": ({"row_bounds": BOUNDS}, (BOUNDS[0][:, :, None] <= COL) & (BOUNDS[1][:, :, None] > COL)),
    "row_bounds_beyond_the_keys": (
        {"row_bounds": (BOUNDS[0] - 100, BOUNDS[1] + (1 << 30))},
        np.ones((T, S), bool),
    ),
    "row_bounds_and_causal": (
        {"row_bounds": BOUNDS, "is_causal": True, "query_offset": 3},
        (BOUNDS[0][:, :, None] <= COL) & (BOUNDS[1][:, :, None] > COL) & (COL <= ROW + 3),
    ),
}


class TestAdditions:
    """The meaning of what jax.nn does not have, in terms of what it has."""

    @pytest.mark.parametrize("name", STRUCTURED)
    def test_structured_mask(self, name: str) -> None:
        structured, dense = STRUCTURED[name]
        dense = np.broadcast_to(dense, (B, T, S))[:, None]
        some = dense.any(-1).reshape(B, T)
        assert some.any()
        assert not (name != "row_bounds_beyond_the_keys" and dense.all())
        out, lse = call(attention, qkv() | structured)
        want = jax.nn.dot_product_attention(**qkv(), mask=dense)
        np.testing.assert_allclose(np.asarray(out)[some], np.asarray(want)[some], rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(np.asarray(lse) > -np.inf, np.broadcast_to(some[..., None], lse.shape))

    def test_softcap(self) -> None:
        """The cap applies after the scale and before the bias."""
        q, k, v, bias = normal(1, T, 1, D), normal(1, S, 1, D), normal(1, S, 1, D, seed=1), normal(T, S)
        out = attention(q, k, v, bias, scale=0.7, softcap=1.5)
        logits = 1.5 * np.tanh(0.7 * q[0, :, 0] @ k[0, :, 0].T / 1.5) + bias
        np.testing.assert_allclose(out[0, :, 0], jax.nn.softmax(logits) @ v[0, :, 0], rtol=2e-5, atol=2e-5)

    def test_sinks(self) -> None:
        """A sink is one more key of that logit and of value 0, which lse leaves out."""
        q, k, v, sinks = normal(1, T, 2, D), normal(1, S, 2, D), normal(1, S, 2, D, seed=1), normal(2)
        out, lse = attention(q, k, v, sinks=sinks, return_residual=True)
        one_more = np.concatenate([np.zeros((2, T, S), np.float32), np.tile(sinks[:, None, None], (1, T, 1))], -1)
        pad = lambda x: np.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)])  # noqa: E731
        want = jax.nn.dot_product_attention(q, pad(k), pad(v), one_more)
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(lse, attention(q, k, v, return_residual=True)[1])


class TestRefusedOnPurpose:
    """What jax.nn takes and `attention` refuses, because it is a mistake more often than not."""

    @pytest.mark.parametrize(
        "change",
        [
            {"local_window_size": (-1, 3)},
            {"local_window_size": True},
            {"local_window_size": (1.5, 2.5)},
            {"local_window_size": np.array([2, 1])},
            {"is_causal": "no"},
            {"is_causal": 2},
            {"is_causal": jnp.bool_(True)},
            {"return_residual": "no"},
            {"bias": np.ones((T, S), np.complex64)},
            {"scale": True},
            {"scale": np.ones((1, 1), np.float32)},
            {name: normal(1, D) for name in ("query", "key", "value")},
            {name: np.ones((B, S, K, D), np.int32) for name in ("query", "key", "value")},
        ],
        ids=lambda change: "-".join(change),
    )
    @pytest.mark.filterwarnings("ignore:Casting from complex:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
    def test_is_an_error(self, change: Arguments) -> None:
        assert jax.eval_shape(lambda: jax.nn.dot_product_attention(**qkv() | change)) is not None
        with pytest.raises((ValueError, TypeError), match=next(iter(change))):
            attention(**qkv() | change)

    def test_cudnn_points_to_jax_nn(self) -> None:
        with pytest.raises(ValueError, match=r"'cudnn' is jax\.nn's: call jax\.nn\.dot_product_attention"):
            attention(**qkv(), implementation="cudnn")
