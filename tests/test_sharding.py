"""Attention over the devices of a mesh: nothing is gathered, results are the oracle's and are sharded as the operands.

JAX's CPU is eight devices in a process of its own, so `test_on_eight_devices` runs the other tests there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa4 import CHECKPOINT_NAMES, CUSTOM_CALLS, attention, autodiff, dispatch, emulated, problem, tiled

B, T, S, D, Dv = 8, 6, 7, 8, 4
HEADS = ("query", "key", "value")

COUNT = len(jax.devices("cpu"))
sharded = pytest.mark.skipif(COUNT != 8, reason="needs eight devices; test_on_eight_devices has them")
# Two partitioners of Auto axes, and Explicit axes. GSPMD is the older one, which later releases of JAX will not have.
KINDS = ("shardy", pytest.param("gspmd", marks=pytest.mark.slow), "explicit")
ALL_IMPLEMENTATIONS = [name for name in ("tiled", "emulated", "pallas") if name in dispatch.NAMES]


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_devices(which: str) -> None:
    if COUNT == 8:
        pytest.skip("runs the other tests of this file, which run here")
    command = [sys.executable, "-P", "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-m", which, __file__]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) >= 10, run.stdout


@pytest.fixture(autouse=True)
def partitioner(request: pytest.FixtureRequest) -> Iterator[None]:
    kind = request.getfixturevalue("kind") if "kind" in request.fixturenames else None
    before = getattr(jax.config, "jax_use_shardy_partitioner", None)
    if before is None:
        if kind == "gspmd":
            pytest.skip("this JAX has Shardy only")
        yield
        return
    jax.config.update("jax_use_shardy_partitioner", kind != "gspmd")
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


class Call(NamedTuple):
    """A call, and how its arguments are split over a mesh.

    Attributes:
      axes: names and sizes of the mesh's axes.
      heads: N and K.
      specs: of arguments by name; "out" is that of the output, and "lse" lacks its last entry.
      extras: the other arguments, from a generator of random numbers.
      summed: the arguments whose gradients are sums over devices.
    """

    axes: dict[str, int]
    heads: tuple[int, int]
    specs: dict[str, P]
    extras: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {}
    summed: tuple[str, ...] = ()


def everywhere(*axes: Any) -> dict[str, P]:
    return dict.fromkeys((*HEADS, "out"), P(*axes))


def every_mask(rng: np.random.Generator) -> dict[str, Any]:
    integers = functools.partial(rng.integers, dtype=np.int32)
    return {
        "is_causal": True,
        "softcap": 3.0,
        "scale": np.float32(0.4),
        "query_offset": integers(0, 3, B),
        "query_seq_lengths": integers(T - 1, T + 1, B),
        "key_value_seq_lengths": integers(S - 2, S + 1, B),
        "query_segment_ids": integers(0, 2, (B, T)),
        "key_value_segment_ids": integers(0, 2, (B, S)),
        "row_bounds": (integers(0, 2, (B, T)), integers(S - 1, S + 1, (B, T))),
        "sinks": rng.standard_normal(8, np.float32),
    }


def dense(rng: np.random.Generator) -> dict[str, Any]:
    bias = rng.standard_normal((8, T, S), np.float32)
    return {"bias": bias, "mask": rng.random((B, 1, T, S)) < 0.8, "scale": np.float32(0.4)}


def dense_for_all_heads(rng: np.random.Generator) -> dict[str, Any]:
    return {"bias": rng.standard_normal((B, 1, 1, S), np.float32), "mask": rng.random((1, 8, T, S)) < 0.8}


def scale(rng: np.random.Generator) -> dict[str, Any]:
    return {"scale": np.float32(0.4)}


BATCHED = ("query_offset", "query_seq_lengths", "key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids")
GRID = {"b": 2, "h": 4}
CALLS = {
    "batch": Call({"b": 8}, (4, 2), everywhere("b"), lambda rng: {"is_causal": True}),
    "heads": Call({"h": 8}, (16, 8), everywhere(None, None, "h"), scale, ("scale",)),
    "masks": Call(
        GRID,
        (8, 4),
        everywhere("b", None, "h") | dict.fromkeys((*BATCHED, "row_bounds"), P("b")) | {"sinks": P("h")},
        every_mask,
        ("scale", "sinks"),
    ),
    "fsdp": Call(GRID, (4, 2), everywhere(("b", "h")), scale, ("scale",)),
    "dense": Call(
        GRID, (8, 4), everywhere("b", None, "h") | {"bias": P("h"), "mask": P("b")}, dense, ("scale", "bias")
    ),
    "dense_for_all_heads": Call(
        GRID,
        (8, 4),
        everywhere("b", None, "h") | {"bias": P("b"), "mask": P(None, "h")},
        dense_for_all_heads,
        ("bias",),
    ),
    "one_kv_head": Call(
        GRID, (8, 1), everywhere("b") | dict.fromkeys(("query", "out"), P("b", None, "h")), scale, HEADS[1:]
    ),
    "inside_groups": Call(
        {"b": 2, "h": 2, "g": 2},
        (8, 2),
        everywhere("b", None, "h") | dict.fromkeys(("query", "out"), P("b", None, ("h", "g"))),
        scale,
        HEADS[1:],
    ),
}  # fmt: skip


QUICK_GSPMD = ("masks", "inside_groups")


def draw(call: Call) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """The arguments of `attention` and the cotangents of out and lse."""
    rng = np.random.default_rng(0)
    heads, kv_heads = call.heads
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    arguments = {"query": normal((B, T, heads, D)), "key": normal((B, S, kv_heads, D))}
    arguments |= {"value": normal((B, S, kv_heads, Dv))} | call.extras(rng)
    return arguments, normal((B, T, heads, Dv)), normal((B, T, heads))


def mesh_of(kind: str, axes: Mapping[str, int]) -> Mesh:
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (axis_type,) * len(axes), devices=jax.devices("cpu"))


def results(
    implementation: str | None, static: Mapping[str, Any], arrays: Any, dout: Any, dlse: Any
) -> dict[str, Array]:
    floats = {name: x for name, x in arrays.items() if name != "row_bounds" and jnp.issubdtype(x.dtype, jnp.floating)}

    def run(floats: dict[str, Array]) -> tuple[Array, Array]:
        return attention(**{**arrays, **floats}, **static, implementation=implementation, return_residual=True)

    (out, lse), pull = jax.vjp(run, floats)
    return {"out": out, "lse": lse, **pull((dout, dlse))[0]}


def collectives(compiled: Any) -> set[str]:
    """The kinds of communication in a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    return set(re.findall(rf"\b({kinds})(?:-start)?\(", compiled.as_text()))


def place(kind: str, call: Call) -> tuple[Mesh, Any, Any, Any, Any]:
    """The mesh, the arguments that are static, the arrays on it, and the cotangents."""
    arguments, dout, dlse = draw(call)
    mesh = mesh_of(kind, call.axes)
    static = {name: x for name, x in arguments.items() if not hasattr(x, "dtype") and name != "row_bounds"}
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    arrays = {
        name: jax.tree.map(lambda x, name=name: put(x, call.specs.get(name, P())), x)
        for name, x in arguments.items()
        if name not in static
    }
    out = call.specs["out"]
    return mesh, static, arrays, put(dout, out), put(dlse, P(*out[:3]))


@functools.cache
def expected(name: str) -> dict[str, oracle.Expected]:
    """Of one of `CALLS`."""
    return oracle.expect(*draw(CALLS[name]))


def check(implementation: str | None, kind: str, of: str) -> None:
    call = CALLS[of]
    mesh, static, *arrays = place(kind, call)
    function = jax.jit(functools.partial(results, implementation, static))
    compiled = function.lower(*arrays).compile()
    assert collectives(compiled) == ({"all-reduce"} if call.summed else set())
    got = compiled(*arrays)
    oracle.check(got, expected(of))
    for name, x in got.items():
        spec = P(*call.specs["out"][:3]) if name == "lse" else call.specs.get(name, P())
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), f"{name} is sharded {x.sharding}"
    if kind == "explicit":
        for name, x in jax.eval_shape(function, *arrays).items():
            in_type, on_devices = ((*y.sharding.spec, *(None,) * x.ndim)[: x.ndim] for y in (x, got[name]))
            assert in_type == on_devices, f"{name} is of the type {x}"


@sharded
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] if kind == "gspmd" and name not in QUICK_GSPMD else [])
        for name in CALLS
        for kind in ("shardy", "gspmd", "explicit")
    ],
)
def test_nothing_is_gathered(name: str, kind: str) -> None:
    check("tiled", kind, name)


@sharded
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", [*ALL_IMPLEMENTATIONS[1:], None])
def test_every_implementation(implementation: str | None, kind: str) -> None:
    check(implementation, kind, "masks")


@sharded
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", [*ALL_IMPLEMENTATIONS[1:], None])
@pytest.mark.parametrize("name", [name for name in CALLS if "dense" not in name and name != "masks"])
def test_every_implementation_in_every_call(name: str, implementation: str | None, kind: str) -> None:
    check(implementation, kind, name)


# What cannot be split

RESOLVED = {
    "length": (everywhere("b", "h"), (8, 4), 8, "key must not be sharded along its length"),
    "width": (everywhere("b", None, None, "h"), (8, 4), S, "key must not be sharded along its width"),
    "uneven_heads": (
        everywhere("b") | dict.fromkeys(("query", "out"), P("b", None, "h")),
        (8, 2),
        S,
        "query's 8 heads must not be sharded over",
    ),
}


@sharded
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RESOLVED)
def test_what_cannot_be_split_is_resolved_or_refused(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, heads, length, sentence = RESOLVED[name]
    for size in ("T", "S"):
        monkeypatch.setitem(globals(), size, length if length == 8 else globals()[size])
    call = Call(GRID, heads, specs, scale)
    _, static, *arrays = (
        place(kind, call) if name != "width" else place(kind, call._replace(specs=specs | {"out": P("b")}))
    )
    function = jax.jit(functools.partial(results, "tiled", static))
    if kind == "explicit":
        with pytest.raises(ValueError, match=sentence):
            function.lower(*arrays)
        return
    oracle.check(function(*arrays), oracle.expect(*draw(call)))


@sharded
@pytest.mark.parametrize(
    ("specs", "sentence"),
    [
        (everywhere("b", None, "h") | {"key": P("h")}, "must be sharded alike along the batch"),
        (everywhere("b", None, "h") | {"key": P("b", None, "b")}, "must be sharded alike along the heads"),
        ({"query": P("b"), "key": P(None, None, "b"), "value": P()}, "must not shard both batch and heads"),
    ],
)
def test_explicit_shardings_that_contradict_each_other(specs: dict[str, P], sentence: str) -> None:
    if specs["key"] == P("b", None, "b"):
        specs = specs | {"key": P(None, None, "b"), "value": P(None, None, "h")}
    mesh = mesh_of("explicit", GRID)
    arguments, *_ = draw(CALLS["masks"])
    q, k, v = (jax.device_put(arguments[name], NamedSharding(mesh, specs[name])) for name in HEADS)
    with pytest.raises(ValueError, match=sentence):
        attention(q, k, v)


def test_scale_of_one_element_over_explicit_axes() -> None:
    mesh = AbstractMesh((2,), ("b",), axis_types=(AxisType.Explicit,))
    whole, cut = (NamedSharding(mesh, spec) for spec in (P(), P("b")))
    x = jax.ShapeDtypeStruct((B, T, 2, D), np.float32, sharding=cut)
    scale = jax.ShapeDtypeStruct((1,), np.float32, sharding=whole)
    with jax.sharding.use_abstract_mesh(mesh):
        gradient = jax.grad(lambda x, scale: attention(x, x, x, scale=scale, implementation="tiled").sum(), (0, 1))
        found = jax.eval_shape(gradient, x, scale)
    assert [(y.shape, y.sharding.spec) for y in found] == [(x.shape, P("b", None, None, None)), ((1,), P(None))]


@pytest.mark.parametrize("implementation", ["tiled", "pallas", "reference"])
@pytest.mark.parametrize("zero", ["batch", "rows", "keys", "width"])
def test_nothing_to_compute_in_shard_map(zero: str, implementation: str) -> None:
    """Results and gradients of empty calls vary over the axes of the mesh, as others do."""
    mesh = AbstractMesh((2,), ("b",), axis_types=(AxisType.Auto,))
    batch, rows, keys, width = (0 if name == zero else 2 for name in ("batch", "rows", "keys", "width"))
    query, key, value = (
        jax.ShapeDtypeStruct((batch, *shape), np.float32)
        for shape in ((rows, 2, width), (keys, 1, width), (keys, 1, D))
    )

    def region(*arrays: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(lambda *x: attention(*x, is_causal=True, implementation=implementation), *arrays)
        found = out, *pull(out)
        assert all(jax.typeof(x).mat.varying == {"b"} for x in found)
        return found

    results = jax.eval_shape(jax.shard_map(region, mesh=mesh, in_specs=P("b"), out_specs=P("b")), query, key, value)
    assert [x.shape for x in results] == [(batch, rows, 2, D), query.shape, key.shape, value.shape]


@sharded
@pytest.mark.parametrize("kind", KINDS)
def test_projections_to_fewer_heads_than_devices(kind: str) -> None:
    """Reshaping the projections leaves keys whose heads and width are each split over a part of one mesh axis."""
    if kind == "explicit":
        pytest.skip("explicit axes have no parts")
    call = Call(GRID, (8, 2), everywhere("b"))
    mesh = mesh_of(kind, GRID)
    arguments, dout, dlse = draw(call)
    flat = {name: arguments[name].reshape(*arguments[name].shape[:2], -1) for name in HEADS}
    flat = {name: jax.device_put(x, NamedSharding(mesh, P("b", None, "h"))) for name, x in flat.items()}

    @jax.jit
    def run(flat: dict[str, Array], dout: Array, dlse: Array) -> dict[str, Array]:
        arrays = {name: x.reshape(arguments[name].shape) for name, x in flat.items()}
        return results("tiled", {"is_causal": True}, arrays, dout, dlse)

    oracle.check(run(flat, dout, dlse), oracle.expect(arguments | {"is_causal": True}, dout, dlse))


# Transformations


@sharded
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("spec", "mapped"),
    [
        (P(None, "b", None, "h"), HEADS),  # the batch under the mapped axis
        (P("b", None, None, "h"), HEADS),  # the mapped axis
        (P(None, "b", None, "h"), HEADS[:1]),  # keys and values for all
    ],
)
def test_vmap_of_the_gradient(spec: P, mapped: tuple[str, ...], kind: str) -> None:
    mesh, count = mesh_of(kind, GRID), 4
    rng = np.random.default_rng(0)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    shapes = {"query": (B, T, 8, D), "key": (B, S, 4, D), "value": (B, S, 4, Dv)}
    arguments = {name: normal((count if name in mapped else 1, *shape)) for name, shape in shapes.items()}
    dout = normal((count, B, T, 8, Dv))

    def gradients(floats: dict[str, Array], dout: Array) -> dict[str, Array]:
        out, pull = jax.vjp(lambda floats: attention(**floats, is_causal=True, implementation="tiled"), floats)
        return {"out": out, **pull(dout)[0]}

    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    arrays = {n: put(x, spec) if n in mapped else put(x[0], P(*spec[1:])) for n, x in arguments.items()}
    function = jax.jit(jax.vmap(gradients, ({n: 0 if n in mapped else None for n in arrays}, 0)))
    placed = arrays, put(dout, spec)
    compiled = function.lower(*placed).compile()
    assert not collectives(compiled)
    got = compiled(*placed)
    for i in range(count):
        call = {name: x[i if name in mapped else 0] for name, x in arguments.items()} | {"is_causal": True}
        want = oracle.expect(call, dout[i], np.zeros(dout.shape[1:-1], np.float32))
        del want["lse"]
        oracle.check({name: np.asarray(x)[i] for name, x in got.items()}, want)
    assert all(x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim) for x in got.values())


REGIONS: dict[str, tuple[set[str], bool]] = {
    "manual": ({"b", "h"}, True),
    "manual_unchecked": ({"b", "h"}, False),
    "partly_manual": ({"b"}, True),
    "partly_manual_unchecked": ({"b"}, False),
}


@sharded
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("call", [pytest.param("masks", marks=pytest.mark.slow), "one_kv_head"])
def test_in_shard_map(call: str, name: str, kind: str) -> None:
    """Over all mesh axes, or over one, where the other is left to what serves the mesh outside of it."""
    manual, checked = REGIONS[name]
    one = CALLS[call]
    mesh, static, arrays, dout, dlse = place(kind, one)
    cut = lambda spec: P(*(axis if axis in manual else None for axis in spec))  # noqa: E731
    specs = {n: jax.tree.map(lambda _, n=n: cut(one.specs.get(n, P())), x) for n, x in arrays.items()}
    out = cut(one.specs["out"])

    def attend(arrays: Any) -> tuple[Array, Array]:
        return attention(**arrays, **static, implementation="tiled", return_residual=True)

    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(specs,), out_specs=(out, P(*out[:3])), axis_names=manual, check_vma=checked
    )
    integers = {n: x for n, x in arrays.items() if n == "row_bounds" or not jnp.issubdtype(x.dtype, jnp.floating)}
    differentiable = kind != "explicit" or "partly" not in name  # JAX cannot, whatever is in the region

    @jax.jit
    def run(floats: dict[str, Array], dout: Array, dlse: Array) -> dict[str, Array]:
        if not differentiable:
            return dict(zip(("out", "lse"), mapped(floats | integers), strict=True))
        (out, lse), pull = jax.vjp(lambda floats: mapped(floats | integers), floats)
        return {"out": out, "lse": lse, **pull((dout, dlse))[0]}

    floats = {n: x for n, x in arrays.items() if n not in integers}
    with jax.set_mesh(mesh) if "unchecked" in name else contextlib.nullcontext():
        compiled = run.lower(floats, dout, dlse).compile()
        if kind != "gspmd" and manual != {"b"}:
            assert collectives(compiled) <= {"all-reduce"}
        got = compiled(floats, dout, dlse)
        oracle.check(got, {name: want for name, want in expected(call).items() if name in got or differentiable})


@sharded
@pytest.mark.parametrize("kind", KINDS[:2])
def test_scan_over_rematerialized_layers(kind: str) -> None:
    """Its loss and gradients are one device's; only gradients of weights are summed, and nothing is gathered."""
    mesh = mesh_of(kind, {"b": 8})
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2, 16, 8, D), np.float32) / 4
    x = rng.standard_normal((B, T, 16), np.float32)

    def layer(x: Array, weights: Array) -> tuple[Array, None]:
        heads = jnp.einsum("btc,cnd->btnd", x, weights)
        out = attention(heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:], is_causal=True, implementation="tiled")
        return x + out.reshape(B, T, 2, 16).sum(2), None

    def loss(weights: Array, x: Array) -> Array:
        policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
        return (lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0] ** 2).mean()

    function = jax.jit(jax.value_and_grad(loss))
    want = function(weights, x)
    placed = jax.device_put(weights, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("b")))
    compiled = function.lower(*placed).compile()
    assert collectives(compiled) == {"all-reduce"}
    for got, exact in zip(compiled(*placed), want, strict=True):
        # Both are rounded alike but for the order of sums over the batch.
        np.testing.assert_allclose(got, exact, rtol=0, atol=16 * np.finfo(np.float32).eps * np.abs(exact).max())


@sharded
@pytest.mark.parametrize("kind", [pytest.param("shardy", marks=pytest.mark.slow), KINDS[1], "explicit"])
def test_second_derivatives(kind: str) -> None:
    mesh = mesh_of(kind, GRID)
    arguments, *_ = draw(CALLS["masks"])
    arrays = [jax.device_put(arguments[name], NamedSharding(mesh, P("b", None, "h"))) for name in HEADS]

    def size(*arrays: Array) -> Array:
        gradient = jax.grad(lambda *x: (attention(*x, implementation="tiled") ** 2).sum(), (0, 1, 2))
        return sum((x**2).sum() for x in gradient(*arrays))

    function = jax.jit(jax.grad(size, (0, 1, 2)))
    want = function(*(arguments[name] for name in HEADS))
    got = function(*arrays)
    for x, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(x, exact, rtol=0, atol=16 * np.finfo(np.float32).eps * np.abs(exact).max())
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("b", None, "h")), 4)


@sharded
def test_a_mesh_with_axes_of_both_types() -> None:
    mesh = jax.make_mesh((2, 4), ("b", "h"), (AxisType.Explicit, AxisType.Auto), devices=jax.devices("cpu"))
    call = CALLS["masks"]
    arguments, dout, dlse = draw(call)
    static = {"is_causal": True, "softcap": 3.0}
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        arrays = {
            name: jax.tree.map(lambda x, name=name: put(x, call.specs.get(name, P())), x)
            for name, x in arguments.items()
            if name not in static
        }
        function = jax.jit(functools.partial(results, "tiled", static))
        compiled = function.lower(arrays, put(dout, P("b", None, "h")), put(dlse, P("b", None, "h"))).compile()
        assert collectives(compiled) == {"all-reduce"}
        oracle.check(compiled(arrays, put(dout, P("b", None, "h")), put(dlse, P("b", None, "h"))), expected("masks"))


@sharded
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("heads", [None, "h"])
def test_operands_of_which_several_batch_elements_share_a_row(heads: str | None, kind: str) -> None:
    """An implementation takes them, batch element `b` row `b % length`, so a device's part must be a multiple."""
    mesh = mesh_of(kind, {"b": 4, "h": 2})
    arguments, *_ = draw(CALLS["masks"])
    few = {name: x if name == "query" else x[:2] for name, x in arguments.items() if name in HEADS}
    spec = P("b", None, heads) if heads else P(("b", "h"))
    query = jax.device_put(few.pop("query"), NamedSharding(mesh, spec))

    @jax.jit
    def run(query: Array, few: dict[str, Array]) -> Array:
        operands = problem.Operands(query, scale=jnp.full(1, D**-0.5), **few)
        return autodiff.attend(tiled, problem.Problem(), operands)[0]

    whole = {name: np.tile(x, (B // 2, 1, 1, 1)) for name, x in few.items()} | {"query": np.asarray(query)}
    want = oracle.expect(whole, np.zeros((B, T, 8, Dv), np.float32), np.zeros((B, T, 8), np.float32))["out"]
    oracle.check({"out": run(query, few)}, {"out": want})


# What a program is traced with


@sharded
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_outside_of_the_contexts_that_it_was_traced_in(kind: str) -> None:
    """What one device computes is traced when the program is compiled: in float64, for the GPU that was emulated."""
    mesh = mesh_of(kind, {"b": 8})
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((B, T, 1, D)) for _ in range(3)]
    function = jax.jit(functools.partial(attention, implementation="tiled"))
    with jax.enable_x64(True):
        placed = [jax.device_put(x, NamedSharding(mesh, P("b"))) for x in arrays]
        lowered = function.lower(*placed)
    got = lowered.compile()(*placed)
    want = oracle.expect(dict(zip(HEADS, arrays, strict=True)), np.zeros((B, T, 1, D)), np.zeros((B, T, 1)))["out"]
    oracle.check({"out": got}, {"out": want})

    placed = [jax.device_put(x.astype(jnp.bfloat16), NamedSharding(mesh, P("b"))) for x in arrays]
    with emulated.options(arch="sm_90"):
        lowered = jax.jit(functools.partial(attention, implementation="emulated")).lower(*placed)
    with emulated.options(arch="sm_80") as run:
        jax.block_until_ready(lowered.compile()(*placed))
    assert [launch.module for launch in run.launches] == ["sm90_forward"] * 8


@sharded
@pytest.mark.parametrize("kind", ["shardy", "explicit"])
def test_lowered_for_gpus(kind: str) -> None:
    """Explicit axes: each GPU's call has its part. Auto axes: the partitioner is told which axes are the same."""
    _, static, *arrays = place(kind, CALLS["masks"])
    traced = jax.jit(functools.partial(results, "cuda", static)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    if kind == "explicit":
        for name in CUSTOM_CALLS:
            calls = re.findall(rf"custom_call @{name}\((?:.*?)\) .*? : \((tensor<\w+>), (tensor<\w+>)", text)
            assert calls == [(f"tensor<{B // 2}x{T}x2x{D}xf32>", f"tensor<{B // 2}x{S}x1x{D}xf32>")], text
        assert "CustomSPMDPartitioning" not in text
    else:
        assert text.count("custom_call @CustomSPMDPartitioning") == 2
        assert len(re.findall(r"sdy.sharding_rule = #sdy.op_sharding_rule", text)) == 2


@sharded
@pytest.mark.parametrize("kind", ["shardy", "explicit"])
def test_export(kind: str) -> None:
    mesh, static, *arrays = place(kind, CALLS["masks"])
    function = jax.jit(functools.partial(results, None, static))
    exported = jax.export.export(function, platforms=["cpu"])(*arrays)
    got = jax.export.deserialize(exported.serialize()).call(*arrays)
    oracle.check(got, expected("masks"))
    assert got["out"].sharding.is_equivalent_to(NamedSharding(mesh, P("b", None, "h")), 4)
