"""Ring attention against one device's exact attention: results, memory, work, and what travels.

The tests need several devices: GPUs, or a CPU that is eight devices, which `test_on_eight_devices` makes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes, draw, operands
from jax import Array
from jax.extend import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from suite import GPU_TRUNCATES, Levels, label, marked, masked, pairwise, planted, quick_first

from jax_fa4 import CHECKPOINT_NAMES, attention, dispatch, parallel, tiled
from jax_fa4 import problem as spec
from jax_fa4.parallel import from_layout, ring_attention, to_layout

LAYOUTS = ("contiguous", "zigzag", "striped")
BALANCED = ("zigzag", "striped")
DEVICES = min(8, len(jax.devices()))
has_devices = DEVICES == 8 or (DEVICES > 1 and jax.default_backend() != "cpu")
needs_devices = pytest.mark.skipif(not has_devices, reason="needs more devices; test_on_eight_devices has them")
layouts = pytest.mark.parametrize("layout", LAYOUTS)
implementations = pytest.mark.parametrize(
    "implementation",
    ["tiled", pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("emulated", marks=pytest.mark.slow)],
)

# On each of eight devices two blocks of rows and two of keys, as `small_blocks` makes them.
SIZES = Sizes(batch=2, rows=96, keys=128, heads=4, kv_heads=2, width=8, value_width=12)
MASKS: Levels = {
    "layout": LAYOUTS,
    "is_causal": (False, True),
    "left": (None, 40),
    "right": (None, 25),
    "query_seq_lengths": (None, "some"),
    "key_value_seq_lengths": (None, "some"),
    "segments": (None, "sorted", "shuffled"),
    "row_bounds": (None, "some"),
    "query_offset": (0, -20, "end", "array"),
    "softcap": (None, 2.0),
    "sinks": (None, "some"),
    "dtype": ("float32", "bfloat16", "float16"),
    "check_vma": (True, False),
}
FLOATS = ("query", "key", "value", "scale", "sinks")
BY_ROW = ("query", "key", "value", "query_segment_ids", "key_value_segment_ids", "row_bounds")
"""Arguments that are sharded along the sequence, which is their second axis."""

BY_SECOND_AXIS = P(None, "ring")

Arguments = Mapping[str, Any]


def test_on_eight_devices(request: pytest.FixtureRequest) -> None:
    """This file in a process whose CPU is eight devices."""
    if "JAX_FA4_EIGHT_DEVICES" in os.environ:
        pytest.skip("this is that process")
    command = [sys.executable, "-P", "-m", "pytest", "-n0", "-p", "no:cacheprovider", __file__]
    command += ["-m", f"({request.config.option.markexpr or 'not slow'}) and not gpu"]
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "JAX_FA4_EIGHT_DEVICES": "1"}
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d\d passed, [14] skipped", run.stdout), run.stdout


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Shards of few rows are still several blocks."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "_CPU", tiled._Steps(logits=1 << 10, rows=16, keys=8))
        yield
    jax.clear_caches()


def ring_of(devices: int = DEVICES) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("ring",), (AxisType.Auto,), devices=jax.devices()[:devices])


def specs_of(arguments: Arguments, batch: str | None = None, heads: str | None = None) -> dict[str, P]:
    """How the arrays of a call are sharded."""
    specs = {}
    for name, x in arguments.items():
        if name in FLOATS[:3]:
            specs[name] = P(batch, "ring", heads)
        elif name in BY_ROW:
            specs[name] = P(batch, "ring")
        else:
            specs[name] = P() if np.ndim(x) == 0 else P(heads if name == "sinks" else batch)
    return specs


def laid_out(layout: str, devices: int, arguments: Arguments) -> dict[str, Any]:
    lay = functools.partial(to_layout, layout=layout, devices=devices)
    return {name: jax.tree.map(lay, x) if name in BY_ROW else x for name, x in arguments.items()}


def on_shards(
    layout: str,
    arrays: Arguments,
    *,
    mesh: jax.sharding.Mesh,
    batch: str | None = None,
    heads: str | None = None,
    check_vma: bool = True,
    **static: Any,
) -> tuple[Array, Array]:
    """`ring_attention` of whole arrays in a layout's order, with lse."""
    return jax.shard_map(
        lambda arrays: ring_attention(**arrays, **static, axis_name="ring", layout=layout, return_residual=True),
        mesh=mesh,
        in_specs=(specs_of(arrays, batch, heads),),
        out_specs=(P(batch, "ring", heads),) * 2,
        check_vma=check_vma,
    )(arrays)


def sharded(layout: str, arrays: Arguments, *, mesh: jax.sharding.Mesh, **options: Any) -> tuple[Array, Array]:
    """As `on_shards`, of arrays in the order of positions."""
    devices = mesh.shape["ring"]
    restore = functools.partial(from_layout, layout=layout, devices=devices)
    return jax.tree.map(restore, on_shards(layout, laid_out(layout, devices, arrays), mesh=mesh, **options))


def split(arguments: Arguments) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Differentiable arrays, other arrays, and what is static."""
    arrays = {name: x for name, x in arguments.items() if hasattr(x, "dtype") or name == "row_bounds"}
    floats = {name: x for name, x in arrays.items() if name in FLOATS}
    return (
        floats,
        {name: x for name, x in arrays.items() if name not in floats},
        {name: x for name, x in arguments.items() if name not in arrays},
    )


def results(call: Callable[[Any], Any], arguments: Arguments, dout: Any, dlse: Any) -> dict[str, Any]:
    """Out, lse and gradients, as `oracle.expect` names them; `call` takes the arrays."""
    floats, others, _ = split(arguments)

    @jax.jit
    def run(floats: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        (out, lse), pull = jax.vjp(lambda floats: call(floats | others), floats)
        return {"out": out, "lse": lse, **pull((dout, dlse))[0]}

    return run(floats, others)


def cotangents(arguments: Arguments) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    query, value = arguments["query"], arguments["value"]
    dout = draw("gaussian", (*query.shape[:-1], value.shape[-1]), query.dtype.name, rng)
    return dout, rng.standard_normal(query.shape[:-1], np.float32)


def check(layout: str, arguments: Arguments, *, poison: float | None = None, **options: Any) -> None:
    """Compares results with the oracle's, which knows of no devices.

    Args:
      layout: of the ring.
      arguments: of `attention`.
      poison: see `AttentionSuite.check`.
      **options: of `sharded`.
    """
    dout, dlse = cotangents(arguments)
    if poison is not None:
        arguments, dout, dlse = planted(poison, arguments, dout, dlse)
    static = split(arguments)[2]
    options = {"mesh": ring_of(), "implementation": "tiled"} | options
    with jax.enable_x64(arguments["query"].dtype == np.float64):
        got = results(lambda arrays: sharded(layout, arrays, **static, **options), arguments, dout, dlse)
        truncates = GPU_TRUNCATES and options["implementation"] == "cuda"
        oracle.check(got, oracle.expect(arguments, dout, dlse, truncates=truncates))


def random_call(choice: Arguments = types.MappingProxyType({}), sizes: Sizes = SIZES, dtype: str = "float32") -> Any:
    rng = np.random.default_rng(1)
    return operands(sizes, dtype, rng) | masked(sizes, choice, rng) | {"scale": np.float32(0.4)}


# Where the positions are


@layouts
@pytest.mark.parametrize("axis", [1, -1])
def test_layouts_are_orders_and_their_inverses(layout: str, axis: int) -> None:
    @functools.partial(jax.jit, static_argnums=1)
    def there_and_back(x: Array, devices: int) -> tuple[Array, ...]:
        lay, restore = (
            functools.partial(order, layout=layout, devices=devices, axis=axis) for order in (to_layout, from_layout)
        )
        return lay(x), restore(lay(x)), lay(restore(x))

    for devices in (1, 3, 8):
        shape = (2, 6 * devices, 4 * devices)
        x = np.arange(math.prod(shape)).reshape(shape)
        laid, *restored = there_and_back(x, devices)
        np.testing.assert_array_equal(np.sort(laid, axis), x)
        for same in restored:
            np.testing.assert_array_equal(same, x)
        assert to_layout(np.zeros((3, 0)), layout, devices).shape == (3, 0)


def test_layouts_by_hand() -> None:
    order = functools.partial(to_layout, np.arange(12), devices=3, axis=0)
    np.testing.assert_array_equal(order("contiguous"), range(12))
    np.testing.assert_array_equal(order("zigzag"), [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
    np.testing.assert_array_equal(order("striped"), [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11])


@layouts
def test_positions_and_bounds_of_shards(layout: str) -> None:
    """What the ring takes for positions is what `to_layout` puts there, and bounds count them."""

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def found(devices: int, length: int, bounds: Array) -> tuple[Array, ...]:
        whole = to_layout(jnp.arange(devices * length), layout, devices, axis=0)
        positions = lambda device: parallel._positions(layout, devices, device, length)  # noqa: E731
        below = lambda device: parallel._count_below(layout, devices, device, length, bounds)  # noqa: E731
        every = jnp.arange(devices, dtype=np.int32)
        return whole, jax.vmap(positions)(every), jax.vmap(below)(every)

    for devices, length in itertools.product((1, 3, 8), (2, 6)):
        bounds = np.arange(devices * length + 1, dtype=np.int32)
        whole, positions, counts = map(np.asarray, found(devices, length, bounds))
        shards = whole.reshape(devices, length)
        np.testing.assert_array_equal(positions, shards)
        np.testing.assert_array_equal(counts, (shards[:, None] < bounds[:, None]).sum(2))


# Results


def _quick(choices: Levels) -> list[Any]:
    return quick_first(pairwise(choices), pytest.mark.slow)


@needs_devices
@pytest.mark.parametrize("choice", _quick(MASKS), ids=label)
def test_masks(choice: dict[str, Any]) -> None:
    options = {name: choice[name] for name in ("layout", "check_vma")}
    masks = {name: option for name, option in choice.items() if name not in ("layout", "check_vma", "dtype")}
    check(arguments=random_call(masks, dtype=choice["dtype"]), **options)


@needs_devices
@implementations
@pytest.mark.parametrize("layout", ["zigzag", *marked(pytest.mark.slow, "contiguous", "striped")])
def test_implementations(layout: str, implementation: str) -> None:
    """A full mask, which has no bounds, and causal inside of packed documents."""
    packed = {"is_causal": True, "segments": "sorted"}
    sizes = SIZES._replace(batch=1, width=64, value_width=64)
    for choice in ({},) if implementation == "tiled" else ({}, packed):  # test_masks has the latter
        check(layout, random_call(choice, sizes, "bfloat16"), implementation=implementation)


@needs_devices
@pytest.mark.slow
def test_float64() -> None:
    check("zigzag", random_call({"is_causal": True, "left": 60, "right": None}, dtype="float64"))


@needs_devices
@pytest.mark.parametrize("layout", ["zigzag", *marked(pytest.mark.slow, "contiguous", "striped")])
def test_rows_that_see_nothing_and_unseen_nans(layout: str) -> None:
    """Rows that see nothing at some steps, or at all; what nobody sees is NaN, also on devices where all is."""
    lengths = {"query_seq_lengths": [50, 17], "key_value_seq_lengths": [70, 0]}
    arguments = random_call() | {name: np.array(x, np.int32) for name, x in lengths.items()}
    check(layout, arguments | {"local_window_size": (25, 3), "query_offset": 10}, poison=np.nan)


@needs_devices
def test_rows_of_very_different_size() -> None:
    """Steps whose lse differ by hundreds, in either order."""
    rng = np.random.default_rng(3)
    arguments = random_call()
    arguments["key"] = draw("huge_logits", arguments["key"].shape, "float32", rng)
    check("contiguous", arguments)


@needs_devices
def test_logarithms_that_are_lost_in_lse() -> None:
    """All logits are 2^25, where lse has no room for the logarithm of how many they are: steps are weighed by it."""
    arguments = random_call({"is_causal": True})
    arguments |= {name: np.ones_like(arguments[name]) for name in ("query", "key")}
    arguments["scale"] = np.float32(2**25 / SIZES.width)
    dout, dlse = cotangents(arguments)
    static = {"is_causal": True, "return_residual": True, "implementation": "tiled"}
    want = results(lambda arrays: attention(**arrays, **static), arguments, dout, 0 * dlse)
    del static["return_residual"]
    got = results(lambda x: sharded("contiguous", x, mesh=ring_of(), **static), arguments, dout, 0 * dlse)
    for name in ("out", "value"):
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=2e-6)


# XLA of jaxlib 0.11.2 crashes in compiling the gradient of `attention` in a jax.shard_map over empty shards, without a
# ring too; 0.10 and 0.12 compile the same program.
@pytest.mark.skipif(jax.version.__version_info__[:2] == (0, 11), reason="XLA of jaxlib 0.11 crashes on empty shards")
@needs_devices
@pytest.mark.parametrize("zero", ["rows", "keys", "batch"])
def test_zero_size(zero: str) -> None:
    check("zigzag", random_call({"is_causal": True, "segments": "sorted"}, SIZES._replace(**{zero: 0})))


@needs_devices
def test_partial_outs_are_not_rounded() -> None:
    """Every key weighs the same, and the steps' means, near 1000 and -1000, cancel: bfloat16 would round them by 2."""
    arguments = random_call(dtype="bfloat16")
    arguments["query"] *= 0
    first = np.arange(SIZES.keys)[:, None, None] < SIZES.keys // 2
    arguments["value"] = (arguments["value"] + np.where(first, 1000, -1000)).astype("bfloat16")
    out, _ = jax.jit(functools.partial(sharded, "contiguous", mesh=ring_of()))(arguments)
    mean = np.repeat(arguments["value"].astype(np.float64).mean(1, keepdims=True), 2, 2)
    np.testing.assert_allclose(np.asarray(out, np.float64), np.broadcast_to(mean, out.shape), rtol=2**-8, atol=1e-3)


@needs_devices
def test_one_device() -> None:
    check("zigzag", random_call({"is_causal": True}), mesh=ring_of(1))


@needs_devices
@pytest.mark.slow
def test_unbatched() -> None:
    arguments = {name: x[0] if name != "scale" else x for name, x in random_call().items()}
    axis = {"axis": 0, "layout": "striped", "devices": DEVICES}

    ring = _on_ring(functools.partial(_causal, layout="striped"), P("ring"), P("ring"))
    out, lse = ring(*(to_layout(arguments[name], **axis) for name in FLOATS[:3]))
    got = {"out": from_layout(out, **axis), "lse": from_layout(lse, **axis)}
    del arguments["scale"]
    expected = oracle.expect(arguments | {"is_causal": True}, np.zeros(out.shape), np.zeros(lse.shape))
    oracle.check(got, {name: expected[name] for name in got})


@needs_devices
@pytest.mark.parametrize("axis_type", ["Explicit", *marked(pytest.mark.slow, "Auto")])
def test_beside_batch_and_heads_on_other_axes(axis_type: str) -> None:
    """Data x context x heads in one shard_map; the scale, which all share, gets the sum of its gradients."""
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh((2, 2, 2), ("data", "ring", "heads"), (AxisType[axis_type],) * 3, devices=jax.devices()[:8])
    arguments = random_call({"is_causal": True, "sinks": "some", "query_offset": "array", "query_seq_lengths": "some"})
    laid = laid_out("zigzag", 2, arguments)
    dout, dlse = cotangents(arguments)
    laid = {name: x for name, x in laid.items() if name != "is_causal"}
    specs = specs_of(laid, "data", "heads")
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    arrays = {name: place(x, specs[name]) for name, x in laid.items()}
    lay = functools.partial(to_layout, layout="zigzag", devices=2)
    by_row = [place(lay(x), specs["query"]) for x in (dout, dlse)]
    call = functools.partial(on_shards, "zigzag", mesh=mesh, batch="data", heads="heads", is_causal=True)
    got = results(call, arrays, *by_row)
    assert all(got[x].sharding.is_equivalent_to(arrays["query"].sharding, 4) for x in ("out", "query", "key", "value"))
    restored = {
        name: np.asarray(x) if name in ("scale", "sinks") else from_layout(np.asarray(x), "zigzag", 2)
        for name, x in got.items()
    }
    oracle.check(restored, oracle.expect(arguments, dout, dlse))


@needs_devices
@pytest.mark.slow
def test_ring_over_two_mesh_axes() -> None:
    mesh = jax.make_mesh((DEVICES // 2, 2), ("a", "b"), (AxisType.Auto,) * 2, devices=jax.devices()[:DEVICES])
    arguments = random_call({"is_causal": True})
    want = attention(**arguments)
    lay = functools.partial(to_layout, layout="zigzag", devices=DEVICES)
    ring = jax.shard_map(
        lambda q, k, v: ring_attention(q, k, v, scale=0.4, is_causal=True, axis_name=("a", "b"), layout="zigzag"),
        mesh=mesh,
        in_specs=(P(None, ("a", "b")),) * 3,
        out_specs=P(None, ("a", "b")),
    )
    out = from_layout(ring(*(lay(arguments[name]) for name in FLOATS[:3])), "zigzag", DEVICES)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)


# Transformations


def _loss(call: Callable[..., Any], *arrays: Array) -> Array:
    out, lse = call(*arrays)
    return jnp.sin(out).sum() + jnp.cos(lse).sum()


def _on_ring(function: Callable[..., Any], specs: Any = BY_SECOND_AXIS, out_specs: Any = BY_SECOND_AXIS) -> Any:
    return jax.shard_map(function, mesh=ring_of(), in_specs=specs, out_specs=out_specs)


def _causal(*arrays: Array, **options: Any) -> Any:
    options = {"layout": "zigzag", "is_causal": True, "return_residual": True} | options
    return ring_attention(*arrays, axis_name="ring", **options)


@needs_devices
@pytest.mark.slow
def test_vmap() -> None:
    """Over an axis of the queries, with keys that all share, and of a gradient."""
    q, k, v = (random_call(sizes=SIZES._replace(batch=1))[name] for name in FLOATS[:3])
    queries = np.stack([q, 2 * q, q - 1])
    spec = P(None, None, "ring")

    def gradients(q: Array, k: Array, v: Array) -> Any:
        return jax.grad(lambda *arrays: _loss(_causal, *arrays), argnums=(0, 1, 2))(q, k, v)

    mapped = jax.vmap(gradients, (0, None, None))
    got = jax.jit(_on_ring(mapped, (spec, BY_SECOND_AXIS, BY_SECOND_AXIS), spec))(queries, k, v)
    one = jax.jit(_on_ring(gradients))
    for i, q in enumerate(queries):
        for have, want in zip(got, one(q, k, v), strict=True):
            np.testing.assert_allclose(have[i], want, rtol=0, atol=1e-5)


def equations(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """All equations of a program, each with the program that it stands in."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield jaxpr, eqn
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
                yield from equations(x)


def rings(jaxpr: Any) -> list[Any]:
    """The bodies of the loops that send."""
    return [
        inside
        for _, eqn in equations(jaxpr)
        if eqn.primitive.name == "scan"
        for inside in [getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])]
        if any(inner.primitive.name == "ppermute" for inner in inside.eqns)
    ]


@needs_devices
@pytest.mark.parametrize(("names", "count"), [(CHECKPOINT_NAMES, 2), (CHECKPOINT_NAMES[:1], 3), ((), 3)])
def test_the_first_ring_runs_once_when_its_named_residuals_are_saved(names: tuple[str, ...], count: int) -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    layer = jax.checkpoint(lambda *arrays: _causal(*(jnp.sin(x) for x in arrays)), policy=policy)
    arrays = [random_call()[name] for name in FLOATS[:3]]
    gradient = jax.grad(lambda *arrays: _loss(_on_ring(layer), *arrays))
    assert len(rings(jax.make_jaxpr(gradient)(*arrays))) == count


@needs_devices
@pytest.mark.slow
def test_higher_derivatives_and_forward_mode() -> None:
    """`reference` has them; the others say so."""
    q, k, v = (jnp.asarray(random_call(sizes=Sizes(1, 32, 32, 2, 1, 4, 4))[name]) for name in FLOATS[:3])

    def second(call: Callable[..., Any]) -> Any:
        gradient = jax.grad(lambda q: _loss(lambda q: call(q, k, v), q))
        return jax.jit(jax.grad(lambda q: jnp.sin(gradient(q)).sum()))(q)

    def tangent(call: Callable[..., Any]) -> Any:
        return jax.jit(lambda q: jax.jvp(lambda q: call(q, k, v), (q,), (jnp.cos(q),))[1])(q)

    single = functools.partial(attention, is_causal=True, return_residual=True, implementation="reference")
    for mode in (second, tangent):
        got = mode(_on_ring(functools.partial(_causal, implementation="reference", layout="contiguous")))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4), got, mode(single))
        with pytest.raises(TypeError, match="only with implementation='reference'"):
            mode(_on_ring(functools.partial(_causal, layout="contiguous")))


# What it costs


def counting(rows: int, keys: int) -> types.ModuleType:
    """An implementation that counts its work on blocks of so many rows and keys instead of doing it.

    Its out, and its gradient of the queries, holds for each row the keys that the row sees, the blocks of keys that its
    block of rows visits, and 1.
    """

    def counts(problem: spec.Problem, operands: spec.Operands) -> Array:
        lower, upper = spec.row_bounds(problem, operands)
        seen = lower < upper
        blocks = lambda x: x.reshape(len(x), -1, rows)  # noqa: E731
        first = blocks(jnp.where(seen, lower, operands.key.shape[1])).min(2) // keys
        end = -(-blocks(jnp.where(seen, upper, 0)).max(2) // keys)
        visited = jnp.repeat(jnp.maximum(end - first, 0), rows, 1)
        found = jnp.stack([upper - lower, visited, jnp.ones_like(lower)], 2).astype(jnp.float32)
        return jnp.broadcast_to(found[:, :, None], (*operands.query.shape[:3], 3))

    def forward(problem: spec.Problem, operands: spec.Operands) -> tuple[Array, Array, None]:
        out = counts(problem, operands)
        return out, jnp.zeros_like(out[..., 0]), None

    def backward(problem: spec.Problem, operands: spec.Operands, *results: Any, with_bias: bool) -> spec.Gradients:
        query, key, value, scale = (jnp.zeros_like(x) for x in operands[:4])
        return spec.Gradients(query.at[...].set(counts(problem, operands)), key, value, scale)

    module = types.ModuleType("counting")
    vars(module).update(forward=forward, backward=backward, why_not=lambda *_: None)
    return module


def work(monkeypatch: pytest.MonkeyPatch, layout: str, length: int, masks: Arguments) -> np.ndarray:
    """What the devices of a ring really do: (passes, devices, 3), see `counting`; blocks times their rows."""
    monkeypatch.setitem(dispatch.NAMES, "counting", counting(16, 16))
    arrays = {name: to_layout(x, layout, DEVICES) for name, x in masks.items() if hasattr(x, "dtype")}
    static = {name: x for name, x in masks.items() if name not in arrays} | {"implementation": "counting"}

    def run(x: Array, arrays: Arguments) -> Any:
        def call(query: Array) -> tuple[Array, Array]:
            return on_shards(layout, {"query": query, "key": x, "value": x} | arrays, mesh=ring_of(), **static)

        (out, lse), pull = jax.vjp(call, x)
        # Each step's lse is 0, so that out is the mean of the steps that were not left out, and exp(lse) their number.
        return out * jnp.exp(lse)[..., None], *pull((out, lse))

    found = jax.jit(run)(jnp.zeros((1, length, 1, 3)), arrays)
    return np.stack([np.rint(x).reshape(DEVICES, -1, 3).sum(1) for x in found])


def unevenness(work: np.ndarray) -> float:
    """How much more than the mean the busiest device does."""
    return float((work.max(1) / work.mean(1)).max()) - 1


LENGTH = 128 * DEVICES


@needs_devices
@layouts
def test_causal_work_is_even_in_balanced_layouts(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of row bounds, and of blocks; nothing is visited twice, and steps that see nothing are left out."""
    seen, visited, steps = np.moveaxis(work(monkeypatch, layout, LENGTH, {"is_causal": True}), 2, 0)
    assert (seen.sum(1) == LENGTH * (LENGTH + 1) / 2).all()
    if layout in BALANCED:
        assert unevenness(seen) < 0.05
        assert unevenness(visited) < 0.05
        np.testing.assert_array_equal(steps, LENGTH // DEVICES * DEVICES)
    else:
        np.testing.assert_array_equal(steps, np.tile(LENGTH // DEVICES * np.arange(1, DEVICES + 1), (2, 1)))
        assert unevenness(seen) > 0.5  # which shows that the counts would tell
    blocks = (LENGTH // 16) * (LENGTH // 16 + 1) / 2 * 16
    most = {"contiguous": 1, "zigzag": 1, "striped": 1 + DEVICES / (LENGTH // 16)}[layout]
    assert blocks <= visited[0].sum() <= most * blocks


@needs_devices
def test_work_of_packed_documents_is_even_when_striped(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.repeat(np.arange(3, dtype=np.int32), np.array([5, 1, 2]) * LENGTH // 8)[None]
    masks = {"is_causal": True, "query_segment_ids": ids, "key_value_segment_ids": ids}
    assert unevenness(work(monkeypatch, "striped", LENGTH, masks)[..., 0]) < 0.05
    assert unevenness(work(monkeypatch, "zigzag", LENGTH, masks)[..., 0]) > 0.05


def _gradients(length: int, devices: int, dtype: str = "float32") -> Any:
    """A compiled gradient of ring attention, causal, of four heads that share two."""
    x = [jax.ShapeDtypeStruct((1, length, heads, 16), dtype) for heads in (4, 2, 2)]
    ring = jax.shard_map(_causal, mesh=ring_of(devices), in_specs=P(None, "ring"), out_specs=P(None, "ring"))
    return jax.jit(jax.grad(lambda *arrays: _loss(ring, *arrays), argnums=(0, 1, 2))).trace(*x)


@needs_devices
def test_memory_of_a_device_is_linear_in_its_shard() -> None:
    def peak(length: int, devices: int) -> int:
        memory = _gradients(length, devices).lower().compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes

    of_shard = peak(2048 * DEVICES, DEVICES)
    assert peak(4096 * DEVICES, DEVICES) < 2.05 * of_shard
    assert 0.95 < peak(1024 * DEVICES, DEVICES // 2) / of_shard < 1.05  # a longer ring does not need more


@needs_devices
def test_only_unrepeated_keys_and_values_travel() -> None:
    """No collective but permutations; those of keys and values in their dtype, of their gradients in float32."""
    lowered = _gradients(32 * DEVICES, DEVICES, "bfloat16").lower()
    sent = re.findall(r"collective_permute.*-> tensor<([\dx]+\w+)>", lowered.as_text())
    assert set(sent) == {"1x32x2x16xbf16", "1x32x2x16xf32"}
    compiled = lowered.compile().as_text()
    assert "collective-permute" in compiled
    assert not re.search("all-gather|all-to-all|all-reduce|reduce-scatter|collective-broadcast", compiled)


@needs_devices
def test_communication_overlaps_computation() -> None:
    """In the loops of both rings what is sent was there before the step, which computes without what arrives."""
    bodies = rings(_gradients(32 * DEVICES, DEVICES).jaxpr)
    assert len(bodies) == 2
    for body in bodies:
        arrived: set[Any] = set()
        sent = computed = 0
        for eqn in body.eqns:
            inputs = {x for x in eqn.invars if not isinstance(x, core.Literal)}
            if eqn.primitive.name == "ppermute":
                assert inputs <= set(body.invars)
                arrived |= set(eqn.outvars)
                sent += 1
            elif eqn.primitive.name == "cond":
                assert not inputs & arrived
                computed += 1
            elif inputs & arrived:
                arrived |= set(eqn.outvars)
        assert computed == 1
        assert sent in (2, 4)


@needs_devices
@pytest.mark.parametrize("implementation", ["cuda", None])
def test_lowered_for_gpus_on_a_machine_without_one(implementation: str | None) -> None:
    arrays = [jax.ShapeDtypeStruct((1, 64 * DEVICES, heads, 64), "bfloat16") for heads in (4, 2, 2)]
    ring = _on_ring(functools.partial(_causal, implementation=implementation))
    gradient = jax.jit(jax.grad(lambda *arrays: _loss(ring, *arrays).astype("float32")))
    text = gradient.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    for part in ("jax_fa4_forward_v1", "jax_fa4_backward_v1", "collective_permute"):
        assert part in text


# Bad input


GOOD = {name: np.zeros((2, 8, heads, 4), np.float32) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
BAD: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "bias": (NotImplementedError, {"bias": np.zeros((8, 8))}, "bias.*row_bounds"),
    "mask": (NotImplementedError, {"mask": np.ones((8, 8), bool)}, "mask.*row_bounds"),
    "layout": (ValueError, {"layout": "zig-zag"}, "'contiguous', 'zigzag', 'striped'.*'zig-zag'"),
    "axis": (
        ValueError,
        {"axis_name": "context"},
        r"axis_name.*'context', which is not bound here \(what is: 'ring'\)",
    ),
    "no axis": (ValueError, {"axis_name": None}, "axis_name.*None"),
    "list of axes": (TypeError, {"axis_name": ["ring"]}, r"axis_name.*tuple.*a list, \['ring'\]"),
    "axis twice": (ValueError, {"axis_name": ("ring", "ring")}, r"axis_name.*twice.*\('ring', 'ring'\)"),
    "no axes": (ValueError, {"axis_name": ()}, r"axis_name must name a mesh axis, but got \(\)"),
    "axis by number": (ValueError, {"axis_name": 0}, "axis_name.*got 0"),
    "length": (
        ValueError,
        {name: np.zeros((2, 7, 2, 4), np.float32) for name in GOOD} | {"layout": "zigzag"},
        f"'zigzag'.*{2 * DEVICES}.*{7 * DEVICES} for query",
    ),
    "keys": (
        ValueError,
        {name: np.zeros((2, 7, 2, 4), np.float32) for name in ("key", "value")} | {"layout": "zigzag"},
        f"'zigzag'.*{2 * DEVICES}.*{7 * DEVICES} for key",
    ),
    "ids": (ValueError, {"query_segment_ids": np.zeros((2, 8), np.int32)}, "without key_value_segment_ids"),
    "bounds": (ValueError, {"row_bounds": (np.zeros((2, 64), np.int32),) * 2}, r"row_bounds.*\(2, 8\)"),
    "window": (ValueError, {"local_window_size": (-1, 0)}, "local_window_size.*negative"),
    "implementation": (ValueError, {"implementation": "cudnn"}, "implementation.*cudnn"),
    "dtype": (NotImplementedError, {"implementation": "cuda", "value": np.zeros((2, 8, 2, 300), np.float32)}, "256"),
}


@needs_devices
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_before_compilation(name: str) -> None:
    error, change, words = BAD[name]
    arguments = {"axis_name": "ring"} | GOOD | change
    ring = jax.shard_map(lambda: ring_attention(**arguments), mesh=ring_of(), in_specs=(), out_specs=P(None, "ring"))
    with pytest.raises(error, match=words):
        jax.eval_shape(ring)


def test_outside_of_shard_map() -> None:
    with pytest.raises(ValueError, match=r"axis_name must be a mesh axis of a jax\.shard_map.*'ring'.*nothing is"):
        ring_attention(**GOOD, axis_name="ring")


@pytest.mark.parametrize("function", [to_layout, from_layout])
def test_bad_layouts(function: Callable[..., Array]) -> None:
    x = np.zeros((3, 12))
    for options, words in (
        ({"layout": "ring", "devices": 2}, "layout must be one of.*'ring'"),
        ({"layout": "striped", "devices": 5}, "multiples of 5.*12 for axis 1"),
        ({"layout": "zigzag", "devices": 4}, "multiples of 8.*12 for axis 1"),
        ({"layout": "zigzag", "devices": 0}, "devices.*0"),
        ({"layout": "zigzag", "devices": 2, "axis": 2}, "axis.*2"),
    ):
        with pytest.raises(ValueError, match=words):
            function(x, **options)
    for name, wrong in (("devices", 2.0), ("devices", True), ("devices", None), ("axis", None)):
        with pytest.raises(TypeError, match=f"{name} must be an int, but got {wrong}"):
            function(x, **{"layout": "striped", "devices": 2, name: wrong})
    with pytest.raises(
        ValueError, match=r"x must hold integers that fit in int32, but got some from 0 to 1099511627776"
    ):
        function(np.array([[0, 2**40]]), "striped", 2)
    with pytest.raises(TypeError, match="x must be an array, but got 'abc'"):
        function("abc", "striped", 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [None, "heads"])
def test_shards_that_are_sharded_over_explicit_axes(heads: str | None) -> None:
    mesh = jax.sharding.AbstractMesh((2, 2), ("ring", "heads"), axis_types=(AxisType.Explicit,) * 2)
    spec = P(None, "ring", heads)
    shards = jax.ShapeDtypeStruct((2, 8, 2, 4), np.float32, sharding=NamedSharding(mesh, spec))
    ring = jax.shard_map(
        lambda x: ring_attention(x, x, x, axis_name="ring", implementation="tiled"),
        mesh=mesh,
        in_specs=BY_SECOND_AXIS,
        out_specs=BY_SECOND_AXIS,
        axis_names={"ring"},
    )
    with jax.sharding.use_abstract_mesh(mesh):
        if heads is None:
            gradient = jax.eval_shape(jax.grad(lambda x: ring(x).sum()), shards)
            assert gradient.sharding.spec == P(None, "ring", None, None)
            return
        with pytest.raises(ValueError, match=r"query must not be sharded over Explicit .*None, 'heads', None"):
            jax.eval_shape(ring, shards)


# The example


@pytest.fixture(scope="module")
def examples() -> tuple[Any, Any]:
    """train_transformer and train_sharded, which share the former."""
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "examples")
        return importlib.import_module("train_transformer"), importlib.import_module("train_sharded")


def _small_training(example: Any) -> tuple[Any, Any]:
    """A config, and rows of packed documents."""
    sizes = {"width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "hidden_width": 64, "length": 64}
    lines = Path(__file__).read_bytes().splitlines(keepends=True)
    config = example.Config(**sizes, layers=1, batch=4, steps=5, learning_rate=0.03)
    return config, example.pack([line for line in lines if len(line) > 20], config.length)


@needs_devices
def test_sharded_model_has_the_loss_of_one_device(examples: tuple[Any, Any]) -> None:
    """The example transformer on data x context, with parameters that all matter."""
    example, train_sharded = examples
    config, rows = _small_training(example)
    rows, mesh = rows.take(slice(config.batch)), train_sharded.make_mesh(2, 4)
    nnx = pytest.importorskip("flax.nnx")

    def loss(attention_fn: Any, rows: Any, **options: Any) -> float:
        model, keys = example.Transformer(config, attention_fn, nnx.Rngs(0)), nnx.Rngs(1)
        nnx.update(model, jax.tree.map(lambda x: x + 0.3 * jax.random.normal(keys(), x.shape), nnx.state(model)))
        return example.evaluate(model, rows, config.batch, **options)

    one = loss(example.flash_attention, rows)
    many = loss(
        train_sharded.sharded_attention(mesh), train_sharded.lay_out(mesh, rows), place=train_sharded.place(mesh)
    )
    assert many == pytest.approx(one, rel=_order_of_a_sum(rows))
    assert many != pytest.approx(loss(example.flash_attention, train_sharded.lay_out(mesh, rows)), rel=1e-3)


@needs_devices
@pytest.mark.slow
def test_sharded_training_has_the_losses_of_one_device(examples: tuple[Any, Any]) -> None:
    example, train_sharded = examples
    config, rows = _small_training(example)
    held_out = rows.take(slice(2 * config.batch))
    _, one = example.train(config, example.flash_attention, rows, held_out)
    _, many = train_sharded.train(train_sharded.make_mesh(2, 4), config, rows, held_out)
    losses = ([*x.training, *x.held_out.values()] for x in (many, one))
    np.testing.assert_allclose(*losses, rtol=_order_of_a_sum(rows.take(slice(config.batch))), atol=0)
    assert one.training[-1] < one.training[0] - 0.5  # it learns


def _order_of_a_sum(rows: Any) -> float:
    """The relative error to expect of a float32 sum over all tokens of rows, which is in another order on a mesh."""
    return float(np.sqrt(rows.tokens.size) * np.finfo(np.float32).eps)
