"""Every transformation of JAX, applied to `attention`, gives what un-transformed calls give.

On every implementation: of the CUDA kernels on `emulated`, and on `cuda` where there is a GPU. On `pallas` it is slow.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import draw
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa4 import CHECKPOINT_NAMES, CUSTOM_CALLS, attention

M, B, T, S, N, K, D, Dv = 3, 2, 4, 6, 4, 2, 4, 3
FLOATS = ("query", "key", "value", "bias", "scale", "sinks")
INTEGERS = ("query_seq_lengths", "key_value_seq_lengths", "query_offset", "query_segment_ids", "key_value_segment_ids")
OPERANDS = (*FLOATS, "mask", *INTEGERS, "lower", "upper")

KERNELS = ("emulated", "cuda", "pallas")
REFUSED = ("bias", "mask", "float64")  # by the kernels

Arrays = dict[str, Array]


def implementations(
    argument: str | None = None,
    values: Iterable[Any] = (None,),
    *,
    kernels: bool = True,
    reference: bool = True,
    quick_emulated: Collection[Any] | None = None,
) -> pytest.MarkDecorator:
    """Has a test run on every implementation.

    Args:
      argument: another argument of the test, if any.
      values: of that argument; the kernels are not tested with what they refuse. On `reference`, which most of the
        tests of the other implementations run as well, only the first makes a quick test.
      kernels: whether the test is for the kernels, too.
      reference: whether it is for `reference`, too, and not a comparison with it.
      quick_emulated: the values with which it is not a slow test on `emulated`; by default all.
    """
    names, values = ["tiled", *(["reference"] if reference else []), *(KERNELS if kernels else [])], [*values]
    parameters = []
    for name, value in itertools.product(names, values):
        if name in KERNELS and value in REFUSED:
            continue
        marks = [pytest.mark.gpu] if name == "cuda" else []
        repeats = name == "reference" and value is not values[0]
        slow_emulated = name == "emulated" and quick_emulated is not None and value not in quick_emulated
        if name == "pallas" or repeats or slow_emulated:
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(*((name,) if argument is None else (name, value)), marks=marks))
    return pytest.mark.parametrize("implementation" + (f",{argument}" if argument else ""), parameters)


@pytest.fixture(autouse=True)
def emulate_on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Also where there is a GPU."""
    emulated = "implementation" in request.fixturenames and request.getfixturevalue("implementation") == "emulated"
    with jax.default_device(jax.local_devices(backend="cpu")[0]) if emulated else contextlib.nullcontext():
        yield


def operands(implementation: str, *lead: int) -> Arrays:
    """Every array operand of a call, with leading axes to map over; some rows see nothing, few masks hide much."""
    rng = np.random.default_rng(len(lead))
    normal = lambda *shape: rng.standard_normal((*lead, *shape), np.float32)  # noqa: E731
    integers = lambda low, high, *shape: rng.integers(low, high, (*lead, *shape), np.int32)  # noqa: E731
    found = {
        "query": normal(B, T, N, D),
        "key": normal(B, S, K, D),
        "value": normal(B, S, K, Dv),
        "bias": normal(N, T, S),
        "scale": normal(),
        "sinks": normal(N),
        "mask": rng.random((*lead, B, 1, T, S)) < 0.8,
        "query_seq_lengths": integers(T - 1, T + 1, B),
        "key_value_seq_lengths": integers(S - 2, S + 1, B),
        "query_offset": integers(0, 3, B),
        "query_segment_ids": integers(0, 2, B, T),
        "key_value_segment_ids": integers(0, 2, B, S),
        "lower": integers(0, 2, B, T),
        "upper": integers(S - 1, S + 1, B, T),
    }
    refused = REFUSED if implementation in KERNELS else ()
    return {name: jnp.asarray(x) for name, x in found.items() if name not in refused}


COTANGENTS = jax.tree.map(jnp.asarray, (
    np.random.default_rng(5).standard_normal((B, T, N, Dv), np.float32),
    np.random.default_rng(6).standard_normal((B, T, N), np.float32),
    np.random.default_rng(7).standard_normal((B, T, N, D), np.float32),
))  # fmt: skip


def in_dtype(dtype: str, arrays: Arrays) -> Arrays:
    return {name: x.astype(dtype) if name in ("query", "key", "value") else x for name, x in arrays.items()}


def attend(implementation: str, arrays: Mapping[str, Array]) -> tuple[Array, Array]:
    arrays = dict(arrays)
    bounds = arrays.pop("lower"), arrays.pop("upper")
    return attention(
        **arrays, row_bounds=bounds, is_causal=True, softcap=3.0, implementation=implementation, return_residual=True
    )


def loss(implementation: str, arrays: Mapping[str, Array]) -> Array:
    """A scalar that depends on out and lse; -inf, the lse of rows that see nothing, is left out."""
    out, lse = attend(implementation, arrays)
    return (out * COTANGENTS[0]).sum() + (jnp.where(lse == -jnp.inf, 0, lse) * COTANGENTS[1]).sum()


def split(arrays: Mapping[str, Array], names: Iterable[str]) -> tuple[Arrays, Arrays]:
    """The arrays of these names, and the others."""
    return {n: arrays[n] for n in names if n in arrays}, {n: x for n, x in arrays.items() if n not in names}


def results(implementation: str, names: tuple[str, ...], arrays: Mapping[str, Array]) -> Arrays:
    """Out, lse and the gradients of the named operands, where they are there."""
    floats, rest = split(arrays, names)
    (out, lse), pull = jax.vjp(lambda floats: attend(implementation, floats | rest), floats)
    return {"out": out, "lse": lse} | pull((COTANGENTS[0].astype(out.dtype), COTANGENTS[1]))[0]


@functools.cache
def jitted(function: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, *static))


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


# vmap


def covering_array() -> list[frozenset[str]]:
    """Seven subsets of 14 operands such that any two occur in all four ways: both, either one, neither.

    Kleitman and Spencer, "Families of k-independent sets" (1973): operand i is in subset j + 1 if j is in the i-th
    four-element subset of six; subset 0 is empty and, as nothing is mapped there, gives way to the set of all.
    """
    members = list(itertools.combinations(range(6), 4))[: len(OPERANDS)]
    return [frozenset(name for name, m in zip(OPERANDS, members, strict=True) if j in m) for j in range(6)]


PATTERNS = {
    "everything": frozenset(OPERANDS),
    **{f"pairwise_{j}": names for j, names in enumerate(covering_array())},
    **{name: frozenset({name}) for name in OPERANDS},
}


def per_element(axes: Mapping[str, int | None], stacked: Arrays) -> Iterator[Arrays]:
    """The arguments of each element of a mapped axis."""
    for i in range(M):
        yield {n: x if axes[n] is None else jnp.take(x, i, axis=axes[n]) for n, x in stacked.items()}


def mapped(implementation: str, names: frozenset[str]) -> tuple[dict[str, int | None], Arrays]:
    """Axes to map, of every position and sign, and arrays that have them."""
    arrays, stacks = operands(implementation), operands(implementation, M)
    axes: dict[str, int | None] = dict.fromkeys(arrays)
    for i, name in enumerate(OPERANDS):
        if name in names & arrays.keys():
            ndim = stacks[name].ndim
            axes[name] = (0, -1, ndim // 2, -ndim)[i % 4]
            arrays[name] = jnp.moveaxis(stacks[name], 0, axes[name])
    return axes, arrays


@implementations("pattern", PATTERNS, quick_emulated=("everything", "pairwise_0"))
def test_vmap(implementation: str, pattern: str) -> None:
    """Forward and vmap(grad), the batch inside being 2; the bias's gradient has its own tests."""
    if implementation == "reference" and pattern in OPERANDS:
        pytest.skip("plain JAX: the pairwise patterns are enough")
    axes, arrays = mapped(implementation, PATTERNS[pattern])
    names = tuple(name for name in FLOATS if name != "bias")
    single = jitted(results, implementation, names)
    want = [single(one) for one in per_element(axes, arrays)]
    got = jax.jit(jax.vmap(functools.partial(results, implementation, names), (axes,)))(arrays)
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


@implementations(
    "pattern",
    ["everything", "pairwise_0", "bias", "query", "mask", "query_segment_ids"],
    kernels=False,
    reference=False,
)
def test_vmap_of_the_gradient_of_a_bias(implementation: str, pattern: str) -> None:
    axes, arrays = mapped(implementation, PATTERNS[pattern])
    single = jitted(results, implementation, ("query", "bias"))
    want = [single(one) for one in per_element(axes, arrays)]
    got = jax.jit(jax.vmap(functools.partial(results, implementation, ("query", "bias")), (axes,)))(arrays)
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


@implementations(
    "pattern", ["everything", "pairwise_1", "pairwise_4", "query"], reference=False, quick_emulated=("pairwise_1",)
)
def test_grad_of_vmap(implementation: str, pattern: str) -> None:
    """Operands that are not mapped get the sum of the elements' gradients."""
    axes, arrays = mapped(implementation, PATTERNS[pattern])

    def total(floats: Arrays, rest: Arrays) -> Array:
        return jax.vmap(functools.partial(loss, implementation), (axes,))(floats | rest).sum()

    floats, rest = split(arrays, FLOATS)
    got = jax.jit(jax.grad(total))(floats, rest)
    single = jitted(results, implementation, FLOATS)
    want = [single(one) for one in per_element(axes, arrays)]
    for name in floats:
        x = jnp.stack([one[name] for one in want])
        x = x.sum(0) if axes[name] is None else jnp.moveaxis(x, 0, axes[name])
        np.testing.assert_allclose(got[name], x, rtol=1e-4, atol=1e-4, err_msg=name)


@implementations()
def test_nested_vmap(implementation: str) -> None:
    """Different operands at each level, some at both."""
    outer = {"query", "bias", "scale", "query_segment_ids", "key_value_seq_lengths", "lower"}
    inner = {"query", "value", "mask", "scale", "query_offset", "sinks"}
    both, one, plain = operands(implementation, M, 2), operands(implementation, 2), operands(implementation)
    arrays, axes = {}, {}
    for name in plain:
        levels = (name in outer, name in inner)
        arrays[name] = {
            (True, True): both[name],
            (True, False): both[name][:, 0],
            (False, True): one[name],
            (False, False): plain[name],
        }[levels]
        axes[name] = levels
    names = ("query", "key", "value", "scale", "sinks")
    function = jax.vmap(
        functools.partial(results, implementation, names),
        ({n: 0 if inside else None for n, (_, inside) in axes.items()},),
    )
    got = jax.jit(jax.vmap(function, ({n: 0 if outside else None for n, (outside, _) in axes.items()},)))(arrays)
    single = jitted(results, implementation, names)
    for i, j in itertools.product(range(M), range(2)):
        pick = {n: x[(i,) * outside + (j,) * inside] for (n, x), (outside, inside) in zip(
            arrays.items(), axes.values(), strict=True)}  # fmt: skip
        assert_close(jax.tree.map(lambda x, i=i, j=j: x[i, j], got), single(pick))


@implementations()
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("names", [("query", "key", "value"), ("query", "bias")], ids="-".join)
def test_vmap_over_axes_of_length_0_and_1(implementation: str, size: int, names: tuple[str, ...]) -> None:
    plain = operands(implementation)
    axes = {name: 0 if name in names else None for name in plain}
    arrays = {n: x if axes[n] is None else jnp.stack([x] * size) if size else jnp.zeros((0, *x.shape)) for n, x in
              plain.items()}  # fmt: skip
    got = jax.jit(jax.vmap(functools.partial(results, implementation, names), (axes,)))(arrays)
    want = jitted(results, implementation, names)(plain)
    if size:
        assert_close(got, jax.tree.map(lambda x: x[None], want))
    else:
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(lambda x: (0, *x.shape), want)


@implementations()
def test_vmap_out_axes_and_axis_name(implementation: str) -> None:
    query = operands(implementation, M)["query"]
    rest = operands(implementation) | {"query": None}
    function = lambda query: attend(implementation, rest | {"query": query})  # noqa: E731
    out, lse = jax.vmap(function, out_axes=(-1, 1), spmd_axis_name="x")(query)
    want = [jitted(attend, implementation)(rest | {"query": one}) for one in query]
    assert_close(jnp.moveaxis(out, -1, 0), jnp.stack([one[0] for one in want]))
    assert_close(jnp.moveaxis(lse, 1, 0), jnp.stack([one[1] for one in want]))


@implementations()
def test_unbatched_calls_under_vmap_over_heads(implementation: str) -> None:
    """As Equinox calls attention: each head a call of its own, of (T, 1, D)."""
    query, key = operands(implementation)["query"][0], operands(implementation)["key"][0][:, :1]
    one_head = lambda q: attention(q[:, None], key, key, is_causal=True, implementation=implementation)[:, 0]  # noqa: E731
    want = attention(query, key, key, is_causal=True, implementation=implementation)
    assert_close(jax.vmap(one_head, 1, 1)(query), want)


class TestReverseMode:
    @implementations(reference=False)
    def test_value_and_grad(self, implementation: str) -> None:
        """All implementations agree, and value_and_grad's value is the function's."""
        arrays = operands(implementation)
        floats, rest = split(arrays, FLOATS)
        value, got = jax.jit(jax.value_and_grad(lambda floats: loss(implementation, floats | rest)))(floats)
        assert_close(value, loss("reference", arrays))
        want = jitted(results, "reference", FLOATS)(arrays)
        assert_close(got, {name: want[name] for name in floats})
        for name in floats:
            assert got[name].any(), f"{name} has no gradient, so that this test would prove nothing"

    @implementations(quick_emulated=())
    @pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
    def test_jacrev(self, implementation: str, jit: bool) -> None:
        """A vmap over the cotangent only."""
        query, key = operands(implementation)["query"][:, :2], operands(implementation)["key"][:, :3]
        function = jax.jacrev(lambda q: attention(q, key, key, implementation=implementation))
        got = (jax.jit(function) if jit else function)(query)
        _, pull = jax.vjp(lambda q: attention(q, key, key, implementation=implementation), query)
        rows = [pull(jnp.zeros(query.size).at[i].set(1).reshape(query.shape))[0] for i in range(query.size)]
        assert_close(got, jnp.stack(rows).reshape(query.shape * 2))

    @implementations(reference=False, quick_emulated=())
    def test_only_lse_or_only_out_is_used(self, implementation: str) -> None:
        arrays = operands(implementation)
        for i in range(2):

            def part(query: Array, implementation: str, i: int = i) -> Array:
                x = attend(implementation, arrays | {"query": query})[i]
                return (jnp.where(x == -jnp.inf, 0, x) * COTANGENTS[i]).sum()

            got, want = (jax.grad(part)(arrays["query"], name) for name in (implementation, "reference"))
            assert_close(got, want)
            assert got.any()

    @implementations(reference=False, quick_emulated=())
    @pytest.mark.parametrize("names", [FLOATS, pytest.param(("query",), marks=pytest.mark.slow)], ids="-".join)
    def test_reverse_over_reverse(self, implementation: str, names: tuple[str, ...]) -> None:
        arrays = operands(implementation)
        floats, rest = split(arrays, names)
        weights = operands(implementation, 2)

        def norm(floats: Arrays, implementation: str) -> Array:
            gradients = jax.grad(lambda floats: loss(implementation, floats | rest))(floats)
            return sum((gradients[name] * weights[name][0]).sum() for name in floats)

        got = jax.jit(jax.grad(norm), static_argnums=1)(floats, implementation)
        assert_close(got, jax.jit(jax.grad(norm), static_argnums=1)(floats, "reference"), 1e-4)
        assert all(x.any() for x in got.values())

    @implementations("name", ["key", "value", "bias", "scale", "sinks"], reference=False, quick_emulated=())
    def test_mixed_second_derivatives(self, implementation: str, name: str) -> None:
        """First with respect to query alone, then with respect to another operand alone."""
        arrays = operands(implementation)
        weights = operands(implementation, 2)["query"][0]

        def slope(x: Array, implementation: str) -> Array:
            first = jax.grad(lambda query: loss(implementation, arrays | {"query": query, name: x}))(arrays["query"])
            return (first * weights).sum()

        got, want = (jax.jit(jax.grad(slope), static_argnums=1)(arrays[name], i) for i in (implementation, "reference"))
        assert_close(got, want, 1e-4)
        assert got.any()

    @implementations(reference=False)
    @pytest.mark.slow
    def test_third_derivative(self, implementation: str) -> None:
        q, k = operands(implementation)["query"][:1, :2], operands(implementation)["key"][:1, :3]

        def along(t: Array, implementation: str) -> Array:
            return attention(q * t, k, k, implementation=implementation)[0, 0, 0, 0]

        derivative = lambda i: jax.grad(jax.grad(jax.grad(along)))(jnp.float32(0.7), i)  # noqa: E731
        assert_close(derivative(implementation), derivative("reference"), 1e-4)

    @implementations()
    def test_deterministic(self, implementation: str) -> None:
        """Equal calls give bitwise equal gradients, whether or not that is asked for."""
        floats, rest = split(operands(implementation), FLOATS)
        del rest["lower"], rest["upper"]

        def total(floats: Arrays, deterministic: bool) -> Array:
            out = attention(**floats, **rest, deterministic=deterministic, implementation=implementation)
            return (out * COTANGENTS[0]).sum()

        gradient = jax.jit(jax.grad(total), static_argnums=1)
        first = gradient(floats, True)
        for again in (gradient(floats, True), gradient(floats, False)):
            jax.tree.map(np.testing.assert_array_equal, again, first)

    @implementations(reference=False)
    def test_in_a_custom_vjp(self, implementation: str) -> None:
        """A rule of the caller's own that carries attention's pullback, inside of a scan inside of a vmap."""
        arrays = operands(implementation, M)
        q, k, weights = arrays["query"], arrays["key"], COTANGENTS[2]
        clip = lambda dout: jnp.clip(dout, -0.1, 0.1)  # noqa: E731
        attend = lambda implementation, q, k: attention(q, k, k, is_causal=True, implementation=implementation)  # noqa: E731

        @jax.custom_vjp
        def clipped(q: Array, k: Array) -> Array:
            return attend(implementation, q, k)

        clipped.defvjp(
            lambda q, k: jax.vjp(functools.partial(attend, implementation), q, k),
            lambda pull, dout: pull(clip(dout)),
        )

        @jax.custom_vjp
        def identity(x: Array) -> Array:
            return x

        identity.defvjp(lambda x: (x, None), lambda _, dout: (clip(dout),))

        def gradients(function: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
            def total(q: Array, k: Array) -> Array:
                return (lax.scan(lambda x, _: (x + function(x, k), None), q, length=2)[0] * weights).sum()

            return jax.jit(jax.vmap(jax.grad(total, (0, 1))))(q, k)

        got = gradients(clipped)
        assert_close(got, gradients(lambda q, k: identity(attend("reference", q, k))), 1e-4)
        unclipped = gradients(functools.partial(attend, "reference"))
        assert all(abs(x - y).max() > 0.1 for x, y in zip(got, unclipped, strict=True))

    @implementations()
    def test_pullback_is_linear(self, implementation: str) -> None:
        """One pullback, of the output's and of lse's cotangents apart and together."""
        q, k = operands(implementation)["query"], operands(implementation)["key"]
        (out, lse), pull = jax.vjp(lambda q: attention(q, k, k, implementation=implementation, return_residual=True), q)
        (first,), (second,) = pull((out, jnp.zeros_like(lse))), pull((jnp.zeros_like(out), lse))
        (both,) = pull((out, lse))
        assert_close(first + second, both)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mapped", [["sinks"], ["query"], ["dout", "dlse"], ["key", "value", "sinks", "dlse"]], ids=str)
def test_sinks_of_16_bit_operands(mapped: list[str], dtype: str) -> None:
    """Their gradients go another way than those in float32: under vmap, and under remat that saves the residuals."""
    rng = np.random.default_rng(1)
    shapes = {"query": (B, T, N, D), "key": (B, S, K, D), "value": (B, S, K, Dv), "dout": (B, T, N, Dv)}
    arrays = {name: draw("gaussian", shape, dtype, rng) for name, shape in shapes.items()}
    arrays |= {"dlse": rng.standard_normal((B, T, N), np.float32), "sinks": np.array([-3, 0, 2, 100], np.float32)}
    stacked = {name: np.stack([x, x / x.dtype.type(2)]) if name in mapped else x for name, x in arrays.items()}
    floats = ("query", "key", "value", "sinks")

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES))
    def call(floats: dict[str, Any]) -> Any:
        return attention(**floats, is_causal=True, return_residual=True)

    def pulled(arrays: dict[str, Any]) -> dict[str, Any]:
        (out, lse), pull = jax.vjp(call, {name: arrays[name] for name in floats})
        return {"out": out, "lse": lse, **pull((arrays["dout"], arrays["dlse"]))[0]}

    got = jax.jit(jax.vmap(pulled, in_axes=({name: 0 if name in mapped else None for name in arrays},)))(stacked)
    for i in range(2):
        one = {name: x[i] if name in mapped else x for name, x in stacked.items()}
        arguments = {name: one[name] for name in floats} | {"is_causal": True}
        oracle.check({name: x[i] for name, x in got.items()}, oracle.expect(arguments, one["dout"], one["dlse"]))


class TestControlFlow:
    """Layers under scan, map, while, cond and switch, with and without remat."""

    @staticmethod
    def layer(implementation: str, x: Array) -> Array:
        """Self-attention of (B, T, N, D), grouped."""
        return x + attention(x, x[:, :, :K], x[:, :, -K:], is_causal=True, implementation=implementation)

    @implementations(quick_emulated=())
    @pytest.mark.parametrize("remat", [None, "names", pytest.param("nothing", marks=pytest.mark.slow), "dots"])
    def test_scan_over_layers(self, implementation: str, remat: str | None) -> None:
        policies = {
            "names": jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES),
            "nothing": jax.checkpoint_policies.nothing_saveable,
            "dots": jax.checkpoint_policies.dots_saveable,
        }
        x, weights = operands(implementation)["query"], jnp.arange(1.0, 4.0)

        def body(x: Array, weight: Array) -> tuple[Array, None]:
            return self.layer(implementation, x * weight), None

        step = body if remat is None else jax.checkpoint(body, policy=policies[remat])

        def scanned(x: Array, weights: Array) -> Array:
            return (lax.scan(step, x, weights)[0] * x).sum()

        def looped(x: Array, weights: Array) -> Array:
            start = x
            for weight in weights:
                x = body(x, weight)[0]
            return (x * start).sum()

        got = jax.jit(jax.value_and_grad(scanned, (0, 1)))(x, weights)
        assert_close(got, jitted(jax.value_and_grad(looped, (0, 1)))(x, weights), 1e-4)

    @implementations(quick_emulated=())
    def test_checkpoint_without_scan(self, implementation: str) -> None:
        x = operands(implementation)["query"]
        total = lambda x: (self.layer(implementation, self.layer(implementation, x)) ** 2).sum()  # noqa: E731
        want = jax.jit(jax.grad(total))(x)
        named = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
        for policy in (None, named, jax.checkpoint_policies.everything_saveable):
            assert_close(jax.jit(jax.grad(jax.checkpoint(total, policy=policy)))(x), want)

    @implementations(quick_emulated=())
    def test_map_while_cond_and_switch(self, implementation: str) -> None:
        x = operands(implementation)["query"]
        layer = functools.partial(self.layer, implementation)
        want = layer(layer(x))
        assert_close(lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, layer(c[1])), (0, x))[1], want)
        assert_close(lax.fori_loop(0, 2, lambda _, x: layer(x), x), want)
        assert_close(lax.map(layer, jnp.stack([x, 2 * x])), jnp.stack([layer(x), layer(2 * x)]))
        branch = lambda p, x: lax.cond(p, layer, lambda x: 2 * x, x)  # noqa: E731
        gradient = jax.jit(jax.grad(lambda x, p: branch(p, x).sum()))
        assert_close(gradient(x, False), jnp.full_like(x, 2))
        assert_close(gradient(x, True), jax.grad(lambda x: layer(x).sum())(x))
        mapped = jax.vmap(branch)(jnp.array([True, False]), jnp.stack([x, x]))
        assert_close(mapped, jnp.stack([layer(x), 2 * x]))
        chosen = jax.jit(lambda i, x: lax.switch(i, [jnp.sin, layer, jnp.cos], x))(1, x)
        assert_close(chosen, layer(x))

    @implementations()
    def test_vmap_of_scan_of_remat_of_grad(self, implementation: str) -> None:
        x = operands(implementation, M)["query"]

        def total(x: Array) -> Array:
            body = jax.checkpoint(lambda x, _: (self.layer(implementation, x), None))
            return lax.scan(body, x, length=2)[0].sum()

        got = jax.jit(jax.vmap(jax.grad(total)))(x)
        single = jax.jit(jax.grad(total))
        assert_close(got, jnp.stack([single(one) for one in x]), 1e-4)


SENTENCE = (
    "jax_fa4 supports forward-mode differentiation (jvp, jacfwd, linearize, hessian) only with "
    "implementation='reference'; reverse mode (grad, vjp, jacrev) works with every implementation."
)


def pushforward(function: Callable[[Array], Array], x: Array) -> Array:
    return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


def scanned(function: Callable[[Array], Array], x: Array) -> Array:
    return lax.scan(lambda x, _: (x * function(x), None), x, length=2)[0]


FORWARD_MODE: dict[str, Callable[[Callable[[Array], Array], Array], Array]] = {
    "jvp": pushforward,
    "jvp_of_jit": lambda f, x: pushforward(jax.jit(f), x),
    "jit_of_jvp": lambda f, x: jax.jit(functools.partial(pushforward, f))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](jnp.ones_like(x)),
    "jvp_of_scan": lambda f, x: pushforward(functools.partial(scanned, f), x),
    "jvp_of_remat": lambda f, x: pushforward(jax.checkpoint(f), x),
    "jvp_of_vmap": lambda f, x: pushforward(jax.vmap(f), jnp.stack([x, x])),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "vmap_of_jvp": lambda f, x: jax.vmap(functools.partial(pushforward, f))(jnp.stack([x, x])),
    "vmap_of_jvp_and_tangent": lambda f, x: jax.vmap(lambda x, t: jax.jvp(f, (x,), (t,))[1])(
        jnp.stack([x, x]), jnp.ones(2)
    ),
    "jvp_of_grad": lambda f, x: pushforward(jax.grad(f), x),
    "hessian": lambda f, x: jax.hessian(f)(x),
}


class TestForwardMode:
    @implementations("mode", FORWARD_MODE)
    def test_reference_has_it_and_others_say_so(self, implementation: str, mode: str) -> None:
        q, k = operands(implementation)["query"][:1, :1, :2], operands(implementation)["key"][:1, :2]
        function = lambda t: attention(q * t, k, k, implementation=implementation).sum()  # noqa: E731
        at = jnp.float32(0.7)
        if implementation == "reference":
            got = FORWARD_MODE[mode](function, at)
            steps = jnp.array([0.99, 1.0, 1.01]) * at
            if mode in ("jvp_of_grad", "hessian"):
                low, _, high = (jax.grad(function)(x) for x in steps)
            elif mode == "jvp_of_scan":
                low, _, high = (scanned(function, x) for x in steps)
            else:
                low, _, high = (function(x) for x in steps)
            np.testing.assert_allclose(np.ravel(got)[0], (high - low) / (steps[2] - steps[0]), rtol=2e-2)
            return
        with pytest.raises(TypeError, match=f"^{re.escape(SENTENCE)}"):
            FORWARD_MODE[mode](function, at)

    @implementations()
    def test_of_arguments_that_attention_does_not_see(self, implementation: str) -> None:
        """Forward mode through a program that holds attention is fine where attention itself is constant."""
        q, k = operands(implementation)["query"], operands(implementation)["key"]
        function = lambda t: attention(q, k, k, implementation=implementation).sum() * t  # noqa: E731
        np.testing.assert_allclose(pushforward(function, jnp.float32(2)), function(1.0), rtol=1e-5)

    @implementations(quick_emulated=())
    def test_hessian_of_reference(self, implementation: str) -> None:
        """Forward over reverse is reverse over reverse."""
        q, k = operands(implementation)["query"][:1, :1, :2], operands(implementation)["key"][:1, :2, :1]
        reference = lambda q: (attention(q, k, k, implementation="reference") ** 2).sum()  # noqa: E731
        total = lambda q: (attention(q, k, k, implementation=implementation) ** 2).sum()  # noqa: E731
        direction = operands(implementation, 2)["query"][0, :1, :1, :2]
        got = jax.grad(lambda q: (jax.grad(total)(q) * direction).sum())(q)
        assert_close(got, jax.jvp(jax.grad(reference), (q,), (direction,))[1], 1e-4)


class TestStaging:
    @implementations()
    def test_make_jaxpr_eval_shape_and_ahead_of_time(self, implementation: str) -> None:
        arrays = operands(implementation)
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        function = functools.partial(results, implementation, FLOATS)
        want = jitted(results, implementation, FLOATS)(arrays)
        shapes = jax.eval_shape(function, structs)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), want)
        assert len(jax.make_jaxpr(function)(arrays).out_avals) == len(want)
        assert_close(jax.jit(function).lower(structs).compile()(arrays), want)

    @implementations(kernels=False)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
    def test_lowering_for_another_platform(self, implementation: str, platform: str, dtype: str) -> None:
        arrays = in_dtype(dtype, operands(implementation))
        traced = jax.jit(functools.partial(results, implementation, FLOATS)).trace(arrays)
        assert "stablehlo.dot_general" in traced.lower(lowering_platforms=(platform,)).as_text()

    @implementations()
    def test_donated_buffers(self, implementation: str) -> None:
        k = operands(implementation)["key"]
        function = functools.partial(attention, implementation=implementation)
        want = function(operands(implementation)["query"], k, k)
        query = operands(implementation)["query"]
        got = jax.jit(function, donate_argnums=0)(query, k, k)
        assert_close(got, want)
        assert query.is_deleted()

    @implementations()
    def test_export(self, implementation: str) -> None:
        """Kernels are custom calls, which have to be allowed by name; the others need none, and run everywhere."""
        platforms, calls = {
            "emulated": (["cpu"], ["jax_fa4_emulated_forward_v1", "jax_fa4_emulated_backward_v1"]),
            "cuda": (["cuda"], CUSTOM_CALLS),
            "pallas": ([jax.default_backend().replace("gpu", "cuda")], []),
        }.get(implementation, (["cpu", "cuda"], []))
        arrays = operands(implementation)
        function = jitted(results, implementation, ("query", "key"))
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
        exported = jax.export.export(function, platforms=platforms, disabled_checks=allowed)(arrays)
        again = jax.export.deserialize(exported.serialize())
        assert_close(again.call(arrays), function(arrays))
        for name in calls:
            others = [check for check in allowed if check != jax.export.DisabledSafetyCheck.custom_call(name)]
            with pytest.raises(ValueError, match=name):
                jax.export.export(function, platforms=platforms, disabled_checks=others)(arrays)


class TestDevices:
    @implementations("check_vma", [True, False])
    def test_shard_map_and_sharded_operands(self, implementation: str, check_vma: bool) -> None:
        """Batch and heads over four devices; the scale, which they share, gets the sum of their gradients."""
        devices = jax.devices("cpu" if implementation == "emulated" else None)[:4]
        if len(devices) < 4:
            pytest.skip("needs four devices; test_on_four_devices has them")
        mesh = jax.make_mesh((2, 2), ("b", "h"), (jax.sharding.AxisType.Auto,) * 2, devices=devices)
        arrays = operands(implementation)
        specs = {name: P("b") for name in arrays} | {name: P("b", None, "h") for name in ("query", "key", "value")}
        specs |= split({"scale": P(), "sinks": P("h"), "bias": P("h")}, arrays)[0]
        sharded = jax.shard_map(
            functools.partial(attend, implementation),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(P("b", None, "h"),) * 2,
            check_vma=check_vma,
        )

        def gradients(arrays: Arrays) -> Arrays:
            floats, rest = split(arrays, FLOATS)
            (out, lse), pull = jax.vjp(lambda floats: sharded(floats | rest), floats)
            return {"out": out, "lse": lse} | pull(COTANGENTS[:2])[0]

        want = jitted(results, implementation, FLOATS)(arrays)
        assert_close(jax.jit(gradients)(arrays), want)
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
        assert_close(jitted(results, implementation, FLOATS)(placed), want)

    @pytest.mark.slow
    def test_on_four_devices(self) -> None:
        """The test above in a process whose CPU is four devices; the kernels are emulated there."""
        name = f"{Path(__file__)}::{type(self).__name__}::test_shard_map_and_sharded_operands"
        command = [sys.executable, "-P", "-m", "pytest", "-n0", "-p", "no:cacheprovider", "-k", "not cuda", name]
        command += ["-m", "slow or not slow"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "8 passed" in run.stdout, run.stdout


class TestContexts:
    """Global switches of JAX under which programs run."""

    @implementations("dtype", ["float32", "float64", "bfloat16"], quick_emulated=())
    def test_x64(self, implementation: str, dtype: str) -> None:
        with jax.enable_x64(True):
            arrays = in_dtype(dtype, operands(implementation))
            got = jax.jit(functools.partial(results, implementation, FLOATS))(arrays)
        assert got["out"].dtype == dtype
        assert got["lse"].dtype == "float32"
        assert all(got[name].dtype == x.dtype for name, x in split(arrays, FLOATS)[0].items())
        want = jitted(results, implementation, FLOATS)(operands(implementation))
        for name, x in want.items():
            tolerance = 4e-2 if dtype == "bfloat16" else 2e-5
            np.testing.assert_allclose(
                np.asarray(got[name], np.float32), x, rtol=tolerance, atol=tolerance, err_msg=name
            )

    @implementations(kernels=False)
    def test_float64_is_computed_in_float64(self, implementation: str) -> None:
        with jax.enable_x64(True):
            rng = np.random.default_rng(0)
            q, k, v = (rng.standard_normal((1, length, 1, D)) for length in (T, S, S))
            out = attention(q, k, v, implementation=implementation)
            logits = q[0, :, 0] @ k[0, :, 0].T / np.sqrt(D)
            probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            np.testing.assert_allclose(out[0, :, 0], probs @ v[0, :, 0], rtol=1e-13, atol=1e-14)

    @implementations()
    def test_debug_nans(self, implementation: str) -> None:
        """Nothing on the way is NaN, also for rows that see nothing and sinks of -inf."""
        arrays = operands(implementation)
        hiding = {"sinks": jnp.full(N, -jnp.inf), "bias": jnp.full((N, T, S), -jnp.inf)}
        arrays |= split(hiding, arrays)[0] | {"key_value_seq_lengths": jnp.zeros(B, jnp.int32)}
        with jax.debug_nans(True):
            got = jax.jit(functools.partial(results, implementation, FLOATS))(arrays)
        assert all(not x.any() for name, x in got.items() if name != "lse")

    @implementations()
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_strict_promotion(self, implementation: str, dtype: str) -> None:
        """Of dtypes and of ranks."""
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            arrays = in_dtype(dtype, operands(implementation))
            if "bias" in arrays:
                arrays["bias"] = arrays["bias"].astype("float16")

            def total(floats: Arrays) -> Array:
                return loss_of(attend(implementation, arrays | floats))

            def loss_of(results: tuple[Array, Array]) -> Array:
                return sum(jnp.where(x == -jnp.inf, 0, x).astype(jnp.float32).sum() for x in results)

            jax.eval_shape(jax.grad(total), split(arrays, FLOATS)[0])

    @implementations()
    def test_transfer_guard(self, implementation: str) -> None:
        """A compiled program moves nothing between host and device."""
        arrays = operands(implementation)
        function = jitted(results, implementation, FLOATS)
        jax.block_until_ready(function(arrays))
        with jax.transfer_guard("disallow"):
            jax.block_until_ready(function(arrays))

    @implementations(quick_emulated=())
    def test_tracer_leaks_and_internal_checks(self, implementation: str) -> None:
        axes, arrays = mapped(implementation, PATTERNS["pairwise_0"])
        with jax.checking_leaks(), jax.enable_checks(True):
            jax.eval_shape(jax.vmap(functools.partial(results, implementation, FLOATS), (axes,)), arrays)

    @implementations()
    @pytest.mark.slow
    def test_disable_jit(self, implementation: str) -> None:
        q, k = operands(implementation)["query"][:1], operands(implementation)["key"][:1]
        function = jax.value_and_grad(lambda q: attention(q, k, k, is_causal=True, implementation=implementation).sum())
        want = function(q)
        with jax.disable_jit():
            assert_close(function(q), want)
