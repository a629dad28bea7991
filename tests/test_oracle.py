"""The oracle itself: against masks and values by hand, finite differences, and `jax.nn`; and that it can say no."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import KINDS, Sizes, draw, operands

# Row i of each picture shows with an x which keys query row i sees.
PICTURES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing hidden": ({}, "xxxxx xxxxx xxxxx"),
    "causal": ({"is_causal": True}, "x.... xx... xxx.."),
    "causal with an offset": ({"is_causal": True, "query_offset": 1}, "xx... xxx.. xxxx."),
    "causal with a negative offset": ({"is_causal": True, "query_offset": -2}, "..... ..... x...."),
    "causal from the end": ({"is_causal": True, "query_offset": "end"}, "xxx.. xxxx. xxxxx"),
    "causal with an offset array": ({"is_causal": True, "query_offset": np.array([3])}, "xxxx. xxxxx xxxxx"),
    "window to the left": ({"local_window_size": (1, None)}, "xxxxx xxxxx .xxxx"),
    "window to the right": ({"local_window_size": (None, 1)}, "xx... xxx.. xxxx."),
    "window on both sides": ({"local_window_size": (0, 1)}, "xx... .xx.. ..xx."),
    "window of one number": ({"local_window_size": 1}, "xx... xxx.. .xxx."),
    "causal window": ({"is_causal": True, "local_window_size": (1, 3)}, "x.... xx... .xx.."),
    "window with an offset": ({"local_window_size": (1, 0), "query_offset": 2}, ".xx.. ..xx. ...xx"),
    "query lengths": ({"query_seq_lengths": np.array([2])}, "xxxxx xxxxx ....."),
    "key lengths": ({"key_value_seq_lengths": np.array([2])}, "xx... xx... xx..."),
    "segment ids": (
        {"query_segment_ids": np.array([[7, 9, -1]]), "key_value_segment_ids": np.array([[-1, 7, -1, 7, 8]])},
        ".x.x. ..... x.x..",
    ),
    "row bounds": ({"row_bounds": (np.array([[1, -3, 4]]), np.array([[3, 9, 2]]))}, ".xx.. xxxxx ....."),
    "mask": ({"mask": np.array([True, False, True, True, False])}, "x.xx. x.xx. x.xx."),
    "mask of rows": ({"mask": np.array([[True], [False], [True]])}, "xxxxx ..... xxxxx"),
    "bias of -inf": ({"bias": np.array([0, -np.inf, -1e30, 0, 5], np.float32)}, "x.xxx x.xxx x.xxx"),
    "all together": (
        {"is_causal": True, "query_offset": 2, "local_window_size": (3, 0), "key_value_seq_lengths": np.array([4])}
        | {"mask": np.array([False, True, True, True, True])},
        ".xx.. .xxx. .xxx.",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("batched", [True, False])
def test_masks_look_right(name: str, batched: bool) -> None:
    arguments, picture = PICTURES[name]
    q, k = np.zeros((1, 3, 2, 4)), np.zeros((1, 5, 1, 4))
    seen = oracle.visible({"query": q, "key": k} | arguments if batched else {"query": q[0], "key": k[0]} | arguments)
    drawn = [" ".join("".join(".x"[int(x)] for x in row) for row in head) for head in seen[0]]
    assert drawn == [picture, picture]


def test_masks_are_per_batch_element_and_head() -> None:
    mask = np.array([True, False, False, True]).reshape(2, 2, 1, 1)
    shapes = {"query": np.zeros((2, 1, 2, 4)), "key": np.zeros((2, 3, 1, 4))}
    seen = oracle.visible({**shapes, "mask": mask, "key_value_seq_lengths": np.array([1, 2])})
    assert seen.tolist() == [[[[True, False, False]], [[False] * 3]], [[[False] * 3], [[True, True, False]]]]


def results(arguments: Mapping[str, Any], dout: np.ndarray, dlse: np.ndarray) -> dict[str, np.ndarray]:
    return {name: want.value for name, want in oracle.expect(arguments, dout, dlse).items()}


def test_values_by_hand() -> None:
    """Two of three keys visible with logits 0 and log 3: their probabilities are 1/4 and 3/4."""
    log3 = np.float32(np.log(3))
    call = {
        "query": np.array([1, 2], np.float32).reshape(1, 1, 2, 1),
        "key": np.array([0, log3, 9], np.float32).reshape(1, 3, 1, 1),
        "value": np.array([[4, 0], [0, 8], [9, 9]], np.float32).reshape(1, 3, 1, 2),
        "scale": np.float32(1),
        "key_value_seq_lengths": np.array([2]),
    }
    zeros = np.zeros((1, 1, 2, 2), np.float32), np.zeros((1, 1, 2), np.float32)
    plain = results(call, *zeros)
    np.testing.assert_allclose(plain["out"][0, 0], [[1, 6], [0.4, 7.2]], rtol=1e-6)
    np.testing.assert_allclose(plain["lse"][0, 0], np.log([4, 10]), rtol=1e-6)
    # A sink as heavy as all keys halves the output; lse does not count it.
    sunk = results(call | {"sinks": np.log(np.array([4, 30], np.float32))}, *zeros)
    np.testing.assert_allclose(sunk["out"][0, 0], [[0.5, 3], [0.1, 1.8]], rtol=1e-6)
    np.testing.assert_allclose(sunk["lse"], plain["lse"], rtol=1e-6)
    # The cap comes before the bias: tanh(0) + log 5 and tanh(log 3) + 0 (0.8 exactly).
    capped = results(call | {"softcap": 1.0, "bias": np.log(np.array([5, 1, 1], np.float32))}, *zeros)
    np.testing.assert_allclose(capped["lse"][0, 0, 0], np.log(5 + np.exp(0.8)), rtol=1e-6)


def test_gradients_by_hand() -> None:
    """One row with q = 2 and two keys of equal logit, values 1 and 3: p = 1/2, out = 2."""
    call = {
        "query": np.full((1, 1, 1, 1), 2.0, np.float32),
        "key": np.full((1, 2, 1, 1), 5.0, np.float32),
        "value": np.array([1, 3], np.float32).reshape(1, 2, 1, 1),
        "scale": np.float32(0.5),
        "bias": np.zeros((1, 1, 1, 2), np.float32),
        "sinks": np.array([-np.inf], np.float32),
    }
    found = results(call, np.full((1, 1, 1, 1), 4, np.float32), np.full((1, 1, 1), 6, np.float32))
    # dlogits = p * (dout * (v - out) + dlse) = [1/2 (-4 + 6), 1/2 (4 + 6)]
    assert found["bias"].ravel().tolist() == [1, 5]
    assert found["query"].item() == 0.5 * 5 * 6
    assert found["key"].ravel().tolist() == [0.5 * 2 * 1, 0.5 * 2 * 5]
    assert found["value"].ravel().tolist() == [2, 2]
    assert found["scale"].item() == 10 * 6
    assert found["sinks"].item() == 0


def rich_call(rng: np.random.Generator, dtype: str = "float64") -> dict[str, Any]:
    """A call with every differentiable argument, and rows that see nothing."""
    bias = rng.standard_normal((1, 4, 5, 7))
    return operands(Sizes(2, 5, 7, 4, 2, 3, 6), dtype, rng) | {
        "bias": np.where(rng.random(bias.shape) < 0.2, -np.inf, bias).astype(dtype),
        "scale": np.asarray(-0.8, dtype),
        "sinks": np.array([0.3, -1, -np.inf, 2], dtype),
        "softcap": 1.7,
        "is_causal": True,
        "query_offset": np.array([1, 2], np.int32),
        "key_value_seq_lengths": np.array([6, 5], np.int32),
        "query_seq_lengths": np.array([5, 3], np.int32),
    }


def test_gradients_are_finite_differences() -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        call = rich_call(rng)
        dout, dlse = rng.standard_normal((2, 5, 4, 6)), rng.standard_normal((2, 5, 4))
        found = results(call, dout, dlse)

        def loss(call: Mapping[str, Any]) -> float:
            now = results(call, dout, dlse)
            return (now["out"] * dout).sum() + (np.where(np.isfinite(now["lse"]), now["lse"], 0) * dlse).sum()

        for name in ("query", "key", "value", "bias", "scale", "sinks"):
            direction = np.asarray(rng.standard_normal(call[name].shape))
            step = 1e-5 * direction
            slope = (loss(call | {name: call[name] + step}) - loss(call | {name: call[name] - step})) / 2e-5
            np.testing.assert_allclose((found[name] * direction).sum(), slope, rtol=1e-7, err_msg=name)


JAX_NN_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 1)},
    "lengths": {"key_value_seq_lengths": np.array([7, 4], np.int32), "query_seq_lengths": np.array([9, 9], np.int32)},
    "mask and bias": {
        "mask": np.arange(9)[:, None] >= np.arange(9) - 2,
        "bias": np.sin(np.arange(4 * 9 * 9, dtype=np.float32)).reshape(1, 4, 9, 9),
    },
    "negative scale": {"scale": -0.7},
}


def jax_nn_results(call: Mapping[str, Any], dout: np.ndarray, function: Callable[..., Any]) -> dict[str, np.ndarray]:
    floats = {name: call[name] for name in ("query", "key", "value", "bias") if name in call}
    out, pull = jax.vjp(jax.jit(function), floats)
    return {"out": out, **pull(dout)[0]}


@pytest.mark.parametrize("name", JAX_NN_CALLS)
def test_jax_nn_agrees(name: str) -> None:
    """To the float32 in which jax.nn takes the softmax even of float64 logits.

    Rows that see nothing, which differ in jax.nn and are NaN there with JAX 0.10.0 and float64, are left out.
    """
    rng = np.random.default_rng(1)
    extras = JAX_NN_CALLS[name]
    with jax.enable_x64(True):
        call = operands(Sizes(2, 9, 9, 4, 2, 8, 8), "float64", rng) | extras
        dout = rng.standard_normal((2, 9, 4, 8))
        rest = {name: x for name, x in extras.items() if name != "bias"}
        theirs = jax_nn_results(call, dout, lambda floats: jax.nn.dot_product_attention(**floats, **rest))
        ours = results(call, dout, np.zeros((2, 9, 4)))
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_same_precision_computation_is_that_of_jax_nn(dtype: str) -> None:
    """Values and gradients, up to the order of float32 sums, which seldom turns a rounding of the result."""
    rng = np.random.default_rng(2)
    call = operands(Sizes(2, 33, 70, 6, 2, 16, 16), dtype, rng)
    call |= {"bias": rng.standard_normal((1, 6, 33, 70), np.float32)}
    mask = rng.random((2, 6, 33, 70)) < 0.7
    dout = draw("gaussian", (2, 33, 6, 16), dtype, rng)
    theirs = jax_nn_results(call, dout, lambda floats: jax.nn.dot_product_attention(**floats, mask=mask, scale=0.3))
    scale = np.float32(0.3)
    ours = jax_nn_results(call, dout, lambda floats: oracle.jax_nn({**floats, "scale": scale}, mask)[0])
    spacing = float(jnp.finfo(dtype).eps)
    for name in theirs:
        got, want = np.asarray(ours[name], np.float32), np.asarray(theirs[name], np.float32)
        np.testing.assert_allclose(got, want, rtol=max(1e-6, spacing), atol=1e-6, err_msg=name)
        same = np.isclose(got, want, rtol=1e-6, atol=1e-6)
        assert same.mean() > 0.999, name


@functools.cache
def judged(kind: str = "gaussian", dtype: str = "float32") -> tuple[dict[str, oracle.Expected], dict[str, np.ndarray]]:
    """What is expected of a call, and results within the tolerance: the exact ones, rounded."""
    rng = np.random.default_rng(3)
    call = operands(Sizes(2, 40, 50, 4, 2, 16, 16), dtype, rng, kind)
    call |= {"is_causal": True, "query_offset": -3, "scale": np.float32(0.25), "sinks": np.zeros(4, np.float32)}
    dout = draw("gaussian", (2, 40, 4, 16), dtype, rng)
    expected = oracle.expect(call, dout, rng.standard_normal((2, 40, 4), np.float32))
    return expected, {name: want.value.astype(want.dtype) for name, want in expected.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_results_pass(kind: str, dtype: str) -> None:
    oracle.check(judged(kind, dtype)[1], judged(kind, dtype)[0])


def one_nan(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[1, 7, 2, 3] = np.nan
    return x


FAULTS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], str]] = {
    "wrong sign": ("key", np.negative, "cosine similarity of the finite elements: -1.000000"),
    "heads swapped": ("value", lambda x: np.flip(x, 2), "wrong along each axis"),
    "one NaN": ("query", one_nan, "unexpected NaN: 1, first at (1, 7, 2, 3)"),
    "infinity": ("out", lambda x: np.where(np.arange(16) == 5, np.inf, x), "unexpected inf"),
    "lse of empty rows not -inf": ("lse", lambda x: np.where(np.isfinite(x), x, -1e30), "expected -inf"),
    "output of empty rows not 0": ("out", lambda x: np.where(x == 0, np.finfo(np.float32).tiny, x), "expected 0"),
    "one part in a thousand": ("scale", lambda x: x * np.float32(1.001), "1 of 1 elements"),
    "a sink off by one part in ten thousand": ("sinks", lambda x: x * [1, 1.0001, 1, 1], "worst at (1,)"),
    "wrong dtype": ("out", lambda x: x.astype(np.float16), "got float16(2, 40, 4, 16), expected float32"),
    "wrong shape": ("lse", lambda x: x[None], "got float32(1, 2, 40, 4), expected float32(2, 40, 4)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(fault: str) -> None:
    expected, right = judged()
    name, damage, message = FAULTS[fault]
    damaged = damage(right[name])
    damaged = damaged if fault == "wrong dtype" else damaged.astype(np.float32)
    with pytest.raises(AssertionError) as caught:
        oracle.check(right | {name: damaged}, expected)
    assert str(caught.value).startswith(f"{name}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ten_times_the_error_of_jax_nn_is_too_much(dtype: str) -> None:
    rng = np.random.default_rng(4)
    call = operands(Sizes(1, 60, 70, 2, 2, 16, 16), dtype, rng)
    dout, dlse = draw("gaussian", (1, 60, 2, 16), dtype, rng), np.zeros((1, 60, 2), np.float32)
    (out, lse), pull = jax.vjp(
        jax.jit(lambda floats: oracle.jax_nn({**floats, "scale": np.float32(0.25)}, np.ones((1, 1, 1, 1), bool))), call
    )
    theirs = {"out": out, "lse": lse, **pull((dout, dlse))[0]}
    expected = oracle.expect(call, dout, dlse)
    oracle.check(theirs, expected)
    for name, want in expected.items():
        error = np.asarray(theirs[name], np.float64) - want.value
        with pytest.raises(AssertionError):
            oracle.check({name: want.value + 10 * error}, {name: want._replace(dtype=np.dtype(np.float64))})
