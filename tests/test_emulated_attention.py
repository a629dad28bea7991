"""The suite on `emulated`, in strict mode; and what can be asked of an emulated call."""

from __future__ import annotations

import functools
import lzma
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import attention_vectors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite
from cases import Sizes, operands
from nvrtc import compile_ptx
from suite import AttentionSuite, masked

from jax_fa4 import CHECKPOINT_NAMES, attention, emulated, native, why_not


class TestEmulated(AttentionSuite):
    implementation = "emulated"
    dtypes = ("float16", "bfloat16", "float32")
    sizes = suite.SIZES._replace(rows=135, keys=150)  # blocks of 64
    dense = False
    quick_has_more = False


SIZES = Sizes(batch=2, rows=70, keys=90, heads=4, kv_heads=2, width=8, value_width=12)
CHOICE = {"is_causal": True, "left": 50, "right": None, "key_value_seq_lengths": "some"}


@pytest.mark.parametrize("arch", get_args(emulated.implementation.Arch))
def test_every_gpu(arch: emulated.implementation.Arch) -> None:
    """The kernels that each GPU gets, each with its own scheduler seed."""
    sizes, rng = SIZES._replace(value_width=16), np.random.default_rng(0)
    with emulated.options(arch=arch, seed=int(arch[3:])) as run:
        TestEmulated().check(operands(sizes, "bfloat16", rng) | masked(sizes, CHOICE, rng))
        kernels = [(f"{launch.module}.{launch.target}", launch.kernel) for launch in run.launches]
        assert all(not launch.reports for launch in run.launches)
    # The forward, and what is before and after the backward; and its kernel.
    fast = {
        "sm_90": ("sm90_forward.sm_90a", "backward_rows.sm_90a", "sm90_backward.sm_90a"),
        "sm_100": ("sm100_forward.sm_100f", "backward_rows.sm_100f", "sm100_backward.sm_100f"),
        "sm_103": ("sm100_forward.sm_103a", "backward_rows.sm_100f", "sm100_backward.sm_100f"),
    }
    if arch in fast:
        forward, rows, backward = fast[arch]
        assert kernels == [
            (forward, "forward_bfloat16_64_bounds"),
            (rows, "before_bfloat16"),
            (backward, "backward_bfloat16_64_bounds"),
            (rows, "after_bfloat16"),
        ]
    else:
        assert [file for file, _ in kernels] == ["sm80_forward.sm_80", *3 * ["sm80_backward.sm_80"]]
        assert [name.split("_")[1] for _, name in kernels] == ["bfloat16", "delta", "query", "key"]


@pytest.mark.parametrize("widths", [(0, 4), (4, 0), (0, 0)])
def test_width_of_0(widths: tuple[int, int]) -> None:
    with emulated.options() as run:
        TestEmulated().check_masks({"is_causal": True}, Sizes(2, 3, 5, 4, 2, *widths))
        assert run.launches


def test_subnormal_numbers() -> None:
    """XLA's threads flush them, which is nothing that a GPU does."""
    arrays = {name: np.zeros((1, 1, 1, 8), np.float32) for name in ("query", "key")}
    value = np.full((1, 1, 1, 8), 1e-40, np.float32)
    out = jax.jit(functools.partial(attention, implementation="emulated"))(**arrays, value=value)
    np.testing.assert_array_equal(out, value)


def test_same_bits_as_an_h200() -> None:
    want = np.load(attention_vectors.FILE)
    with emulated.options(arch="sm_90"):
        got = attention_vectors.results("emulated")
    assert set(got) == set(want)
    for name, x in got.items():
        np.testing.assert_array_equal(x, want[name], err_msg=name)


def test_options_are_in_the_key_of_jit_caches() -> None:
    call = jax.jit(lambda query, key, value: attention(query, key, value, implementation="emulated"))
    arrays = operands(SIZES._replace(value_width=16), "bfloat16", np.random.default_rng(0))
    targets = []
    for arch in ("sm_80", "sm_100", "sm_80"):
        with emulated.options(arch=arch) as run:
            jax.block_until_ready(call(**arrays))
            targets += [launch.target for launch in run.launches]
    assert targets == ["sm_80", "sm_100f", "sm_80"]
    assert call._cache_size() == 2
    for others in ({"seed": 1}, {"mode": "relaxed"}, {"trace": True}, {"sm_count": 3}):
        before = call._cache_size()
        with emulated.options(**others):
            jax.block_until_ready(call(**arrays))
        assert call._cache_size() == before + 1, others


def test_launches_are_those_of_the_block() -> None:
    arrays = operands(SIZES, "float32", np.random.default_rng(0))
    with emulated.options() as outer:
        jax.block_until_ready(attention(**arrays, implementation="emulated"))
        with emulated.options(seed=3) as inner:
            jax.block_until_ready(attention(**arrays, implementation="emulated"))
    jax.block_until_ready(attention(**arrays, implementation="emulated"))
    assert len(inner.launches) == 1
    assert len(outer.launches) == 2


def test_launches_carry_a_trace_if_asked_to() -> None:
    """What is recorded changes nothing; another seed interleaves warps in another way."""
    arrays = operands(SIZES, "float32", np.random.default_rng(0))
    call = functools.partial(attention, **arrays, is_causal=True, implementation="emulated")
    found = []
    for options in ({"trace": False}, {"trace": True}, {"trace": True}, {"trace": True, "seed": 1}):
        with emulated.options(**options) as run:
            out = np.asarray(call())
            (launch,) = run.launches
        found.append((out, launch.instructions, launch.trace))
    plain, *traced = found
    assert plain[2] is None
    for out, _, trace in traced:
        np.testing.assert_array_equal(out, plain[0])
        assert trace.missing == 0
        lives = [event for event in trace.events if event.kind == "warp"]
        ctas, warps = np.prod(launch.grid), np.prod(launch.block) // 32
        assert len({event.cta for event in lives}) == ctas
        assert len(lives) == ctas * warps
        assert not any(event.open for event in trace.events)
        assert {"barrier"} <= {event.name for event in trace.events if event.kind == "wait"}
    first, again, other = (trace.chrome_json() for _, _, trace in traced)
    assert plain[1] == traced[0][1]
    assert first == again != other


def most_at_a_time(trace: Any) -> int:
    """The most CTAs that were there at one time."""
    lives: dict[Any, list[int]] = {}
    for event in trace.events:
        if event.kind == "warp":
            start, end = lives.get(event.cta, (event.start, event.end))
            lives[event.cta] = [min(start, event.start), max(end, event.end)]
    return max(sum(start <= at < end for start, end in lives.values()) for at, _ in lives.values())


@pytest.mark.parametrize("sm_count", [1, np.int32(3)])
def test_a_smaller_gpu_has_fewer_ctas_at_a_time(sm_count: int) -> None:
    arrays = operands(SIZES, "float32", np.random.default_rng(0))
    call = jax.jit(functools.partial(attention, is_causal=True, implementation="emulated"))
    want = call(**arrays)
    with emulated.options(sm_count=sm_count, trace=True) as run:
        np.testing.assert_array_equal(call(**arrays), want)
        (launch,) = run.launches
    assert np.prod(launch.grid) > 3
    assert most_at_a_time(launch.trace) == sm_count


@pytest.mark.parametrize("sm_count", [1, 2])
def test_ctas_of_a_smaller_gpu_take_several_tasks(sm_count: int) -> None:
    """Where every row sees every key, a Blackwell GPU has a CTA per multiprocessor, which go on from task to task."""
    sizes = Sizes(batch=1, rows=300, keys=200, heads=3, kv_heads=3, width=64, value_width=64)  # six tasks
    arrays = operands(sizes, "bfloat16", np.random.default_rng(0))
    call = jax.jit(functools.partial(attention, implementation="emulated"))
    results, grids = [], []
    for count in (None, sm_count):
        with emulated.options(arch="sm_100", sm_count=count) as run:
            results.append(np.asarray(call(**arrays)))
            grids += [launch.grid for launch in run.launches]
    assert grids == [[6, 1, 1], [sm_count, 1, 1]]
    np.testing.assert_array_equal(*results)


@pytest.mark.slow
def test_the_memory_of_traces_is_bounded(tmp_path: Path) -> None:
    """The traces of the record have room for 2^21 events, and each holds the first 2^20 of its launch."""
    source = """
      #include "csrc/sm80/config.h"
      extern "C" __global__ void forward_float32_64(const __grid_constant__ jax_fa4::sm80::Parameters) {
        if (blockIdx.x == 0) for (int i = 0; i < 1 << 17; ++i) __syncthreads();
      }"""
    include = f"-I{Path(__file__).parents[1]}"
    ptx = compile_ptx(source, "sm_80", (include, "--device-as-default-execution-space"))
    (tmp_path / "sm80_forward.sm_80.ptx.xz").write_bytes(lzma.compress(ptx.encode()))
    arrays = operands(SIZES, "float32", np.random.default_rng(0))
    call = functools.partial(attention, **arrays, implementation="emulated")
    try:
        native.extension().set_kernel_directory(str(tmp_path))
        native.unpack(tmp_path.glob("*.xz"))
        with emulated.options(arch="sm_80", trace=True) as run:
            jax.block_until_ready(call())
            (first,) = run.launches
            for _ in range(2):
                jax.block_until_ready(call())
            launches = run.launches
    finally:
        native.extension().set_kernel_directory(str(native.kernel_directory()))
    assert [launch.trace is None for launch in launches] == [True, False, False]
    assert all(launch.trace.missing > 0 for launch in launches[1:])
    # Who holds a launch holds its trace.
    assert (first.id, first.kernel, first.instructions) == (
        launches[0].id,
        launches[0].kernel,
        launches[0].instructions,
    )
    assert first.trace.missing == launches[1].trace.missing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "sm_70"}, "arch must be one of 'sm_80', 'sm_90', 'sm_100', 'sm_103', 'sm_120', but got 'sm_70'."),
        ({"mode": "lax"}, "mode must be one of 'strict', 'relaxed', but got 'lax'."),
        ({"seed": -1}, "seed must be an integer from 0 to 2^63 - 1, but got -1."),
        ({"seed": True}, "seed must be an integer from 0 to 2^63 - 1, but got True."),
        ({"trace": 1}, "trace must be True or False, but got 1."),
        ({"sm_count": 0}, "sm_count must be an integer from 1 to 2^16, or None, but got 0."),
        ({"sm_count": True}, "sm_count must be an integer from 1 to 2^16, or None, but got True."),
        ({"sm_count": 1.5}, "sm_count must be an integer from 1 to 2^16, or None, but got 1.5."),
        ({"sm_count": 65537}, "sm_count must be an integer from 1 to 2^16, or None, but got 65537."),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"), emulated.options(**options):
        pass


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"sm_count": np.int32(0)}, "the attribute `sm_count` must be from 1 to 65536, not 0."),
        ({"sm_count": np.int32(65537)}, "the attribute `sm_count` must be from 1 to 65536, not 65537."),
        ({"sm_count": np.int64(1)}, "the attribute `sm_count` must be an int32"),
        ({"trace": np.int32(1)}, "the attribute `trace` must be a bool"),
    ],
)
def test_wrong_attributes_of_a_call_are_refused(attributes: dict[str, Any], sentence: str) -> None:
    """A program may hold attributes that `options` would not have let through; those that may be left out, too."""
    native.emulator()
    x = np.arange(128, dtype=np.float32).reshape(4, 32)
    call = jax.ffi.ffi_call("jax_fa4_emulated_tensor_copy_v1", jax.ShapeDtypeStruct(x.shape, x.dtype))
    always = {"target": "sm_90", "strict": True, "seed": np.int64(0)}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        np.testing.assert_array_equal(call(x, **always), x)
        np.testing.assert_array_equal(call(x, **always, trace=True, sm_count=np.int32(7)), x)
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(sentence)):
            call(x, **always, **attributes)


def test_tables_that_are_missing_or_damaged_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = native.extension()
    stub = SimpleNamespace(
        __file__=str(tmp_path / "_native.so"),
        emulator_runs_here=extension.emulator_runs_here,
        emulator_load_tables=extension.emulator_load_tables,
    )
    monkeypatch.setattr(native, "extension", lambda: stub)
    native.emulator.cache_clear()
    arrays = operands(SIZES._replace(keys=91), "float32", np.random.default_rng(0))  # no call that jit has cached
    sentence = f"The emulator's tables in {tmp_path / 'emulator_tables'} cannot be used: "
    assert f"{sentence}[Errno 2]" in str(why_not("emulated", **arrays))
    with pytest.raises(NotImplementedError, match=re.escape(sentence)):
        attention(**arrays, implementation="emulated")
    (tmp_path / "emulator_tables").mkdir()
    for name in ("ex2.gz", "rcp.gz"):
        (tmp_path / "emulator_tables" / name).write_bytes(b"no table")
    assert f"{sentence}a table is not a gzip file" in str(why_not("emulated", **arrays))


def test_another_seed_gives_the_same_bits() -> None:
    arrays = operands(SIZES, "bfloat16", np.random.default_rng(0))

    def loss(arrays: dict[str, Any]) -> jax.Array:
        return (attention(**arrays, is_causal=True, implementation="emulated") ** 2).sum()

    found = []
    for seed in range(3):
        with emulated.options(seed=seed):
            found.append(jax.tree.map(np.asarray, jax.value_and_grad(loss)(arrays)))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)


MAPPED = [("query",), ("lower", "upper"), ("key", "scale")]
ALSO_MAPPED = [("key",), ("value",), ("scale",), ("lower",), ("query", "upper")]


@pytest.mark.parametrize(
    "names", [*MAPPED, *(pytest.param(names, marks=pytest.mark.slow) for names in ALSO_MAPPED)], ids="-".join
)
def test_vmap_of_operands_that_are_not_all_mapped(names: tuple[str, ...]) -> None:
    """The kernels index operands whose leading axis is shorter than the batch; nothing is copied for them."""
    rng = np.random.default_rng(0)
    arrays = operands(SIZES, "bfloat16", rng) | {"scale": np.float32(0.3)}
    arrays |= {"lower": rng.integers(0, 40, (2, 70), np.int32), "upper": rng.integers(30, 91, (2, 70), np.int32)}
    stacks = {name: np.stack([arrays[name], np.flip(arrays[name]), arrays[name] // 2]) for name in names}

    def gradient(arrays: dict[str, Any]) -> dict[str, jax.Array]:
        bounds = arrays["lower"], arrays["upper"]
        floats = {name: x for name, x in arrays.items() if name not in ("lower", "upper")}
        call = lambda floats: attention(**floats, row_bounds=bounds, implementation="emulated")  # noqa: E731
        out, pull = jax.vjp(call, floats)
        return {"out": out} | pull(jnp.ones_like(out))[0]

    got = jax.jit(jax.vmap(gradient, ({name: 0 if name in names else None for name in arrays},)))(arrays | stacks)
    for i in range(3):
        want = jax.jit(gradient)(arrays | {name: x[i] for name, x in stacks.items()})
        for name, x in want.items():
            # The scale's gradient is a sum that XLA makes, in an order that depends on its length.
            compare = (
                functools.partial(np.testing.assert_allclose, rtol=1e-5)
                if name == "scale"
                else np.testing.assert_array_equal
            )
            compare(np.asarray(got[name][i], np.float32), np.asarray(x, np.float32), err_msg=name)


def test_remat_runs_the_forward_once() -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    arrays = operands(SIZES, "float32", np.random.default_rng(0))

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(arrays: dict[str, Any]) -> jax.Array:
        return attention(**arrays, is_causal=True, implementation="emulated")

    with emulated.options() as run:
        jax.block_until_ready(jax.jit(jax.grad(lambda arrays: (layer(arrays) ** 2).sum()))(arrays))
        kernels = [launch.kernel.split("_")[:2] for launch in run.launches]
    assert kernels == [["forward", "float32"], ["backward", "delta"], ["backward", "query"], ["backward", "key"]]
