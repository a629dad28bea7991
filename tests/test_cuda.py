"""The suite on `cuda`: every test that needs a GPU skips without one; and what can be seen of it without one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from suite import GPU_TRUNCATES, AttentionSuite

from jax_fa4 import CUSTOM_CALLS, attention, cuda, native, why_not
from jax_fa4.attention import passes


@pytest.mark.gpu
class TestCuda(AttentionSuite):
    implementation = "cuda"
    dtypes = ("float16", "bfloat16", "float32")
    dense = False
    truncates = GPU_TRUNCATES


X = jax.ShapeDtypeStruct((2, 5, 4, 8), jnp.bfloat16)
ALLOWED = [jax.export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]


def lowered(implementation: str | None, *platforms: str, x: jax.ShapeDtypeStruct = X) -> str:
    def loss(x: jax.Array) -> jax.Array:
        return attention(x, x, x, is_causal=True, implementation=implementation).astype(np.float32).sum()

    return jax.jit(jax.value_and_grad(loss)).trace(x).lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_lowered_for_gpus_on_a_machine_without_one(implementation: str | None) -> None:
    text = lowered(implementation, "cuda")
    assert text.count("@jax_fa4_forward_v1") == 1
    assert text.count("@jax_fa4_backward_v1") == 1


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_automatic_choice_on_other_platforms(platform: str) -> None:
    assert "custom_call @jax_fa4" not in lowered(None, platform)


def test_one_program_for_several_platforms() -> None:
    text = lowered(None, "cpu", "cuda", "tpu")
    assert text.count("@jax_fa4_forward_v1") == 1
    assert text.count("@jax_fa4_backward_v1") == 1
    assert "dot_general" in text
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, but this is for the platform 'cpu, cuda'"):
        lowered("cuda", "cpu", "cuda")


def test_program_for_several_platforms_runs_on_one() -> None:
    x = np.random.default_rng(0).standard_normal(X.shape, np.float32)
    call = jax.jit(lambda x: attention(x, x, x, is_causal=True))
    exported = jax.export.export(call, platforms=("cpu", "cuda"), disabled_checks=ALLOWED)(x)
    np.testing.assert_array_equal(exported.call(x), call(x))


def test_export_for_gpus() -> None:
    gradient = jax.jit(jax.grad(lambda x: attention(x, x, x, implementation="cuda").astype(np.float32).sum()))
    with pytest.raises(ValueError, match="jax_fa4_forward_v1"):
        jax.export.export(gradient, platforms=("cuda",))(X)
    exported = jax.export.export(gradient, platforms=("cuda",), disabled_checks=ALLOWED)(X)
    again = jax.export.deserialize(exported.serialize())
    assert all(f"@{name}" in again.mlir_module() for name in CUSTOM_CALLS)
    assert again.out_avals[0].shape == X.shape


def test_automatic_choice_where_no_kernel_applies() -> None:
    assert "custom_call @jax_fa4" not in lowered(None, "cuda", x=jax.ShapeDtypeStruct((2, 5, 4, 264), jnp.bfloat16))


def test_lowered_for_a_platform_that_it_is_not_for() -> None:
    with pytest.raises(NotImplementedError, match="'cuda' needs an NVIDIA GPU, but this is for the platform 'cpu'"):
        lowered("cuda", "cpu")
    with pytest.raises(NotImplementedError, match="'emulated' runs on the CPU, but this is for the platform 'cuda'"):
        lowered("emulated", "cuda")


def test_why_not() -> None:
    cpu = jax.devices("cpu")[0]
    assert why_not("cuda", X, X, X, device=cpu) == (
        "implementation='cuda' needs an NVIDIA GPU, but this is for the platform 'cpu'."
    )
    wide = jax.ShapeDtypeStruct((2, 5, 4, 264), jnp.bfloat16)
    assert why_not("emulated", wide, wide, wide, device=cpu) == (
        "implementation='emulated' supports head widths up to 256, but got D=264, Dv=264."
    )
    mask = jax.ShapeDtypeStruct((5, 5), bool)
    assert "does not support mask" in str(why_not("emulated", X, X, X, mask=mask, device=cpu))
    assert why_not("emulated", X, X, X, device=cpu) is None


class FakeGpu:
    platform = "gpu"

    def __init__(self, capability: str, kind: str) -> None:
        self.compute_capability, self.device_kind = capability, kind


@pytest.mark.parametrize(
    ("sizes", "arguments", "expected"),
    [
        ((1, 100, 8, 8, 64), {}, ("cuda", "cuda")),
        ((8, 1024, 64, 8, 64), {"local_window_size": (127, 0)}, ("pallas", "pallas")),  # gpt-oss
        ((1, 8192, 64, 8, 64), {"local_window_size": (127, 0)}, ("pallas", "pallas")),
        ((8, 2048, 32, 16, 128), {"local_window_size": (1023, 0)}, ("pallas", "pallas")),  # Gemma-3
        ((4, 4096, 32, 32, 64), {"is_causal": True}, ("pallas", "pallas")),
        ((4, 4096, 16, 16, 128), {}, ("pallas", "tiled")),
        ((1, 8192, 32, 8, 128), {"is_causal": True}, ("pallas", "tiled")),  # Llama-3
        ((1, 8192, 16, 8, 256), {"is_causal": True, "softcap": 50.0}, ("tiled", "tiled")),  # Gemma-2
        ((1, 100, 8, 8, 264), {}, ("tiled", "tiled")),  # no kernel
        ((16, (1, 8192), 64, 8, 128), {}, ("tiled", "tiled")),  # decoding: the kernels take 64 rows at least
    ],
)
def test_automatic_choice_takes_what_an_h200_was_faster_with(
    sizes: tuple[Any, ...], arguments: dict[str, Any], expected: tuple[str, str]
) -> None:
    """Of the plain CUDA kernels, which alone serve float32, `pallas` and `tiled`."""
    batch, lengths, heads, kv_heads, width = sizes
    rows, keys = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    query = jax.ShapeDtypeStruct((batch, rows, heads, width), np.float32)
    key = jax.ShapeDtypeStruct((batch, keys, kv_heads, width), np.float32)
    h200 = FakeGpu("9.0", "NVIDIA H200")
    with jax.default_matmul_precision("tensorfloat32"):
        assert passes(None, query, key, key, device=h200, **arguments) == expected
    with jax.default_matmul_precision("highest"):
        assert "pallas" not in passes(None, query, key, key, device=h200, **arguments)
    assert passes(None, query, key, key, device=jax.devices("cpu")[0], **arguments) == ("tiled", "tiled")


@pytest.mark.parametrize(
    "gpu",
    [FakeGpu("9.0", "NVIDIA H200"), FakeGpu("10.0", "NVIDIA B200"), FakeGpu("10.3", "NVIDIA B300")],
    ids=lambda gpu: gpu.device_kind,
)
@pytest.mark.parametrize(
    ("widths", "arguments", "expected"),
    [
        ((128, 128), {"is_causal": True}, ("cuda", "cuda")),
        ((128, 128), {}, ("cuda", "cuda")),
        ((64, 64), {"local_window_size": (127, 0)}, ("cuda", "cuda")),
        ((80, 80), {"key_value_seq_lengths": jax.ShapeDtypeStruct((1,), np.int32)}, ("cuda", "cuda")),
        ((192, 128), {"softcap": 30.0, "query_offset": "end"}, ("cuda", "cuda")),
        ((192, 128), {"deterministic": True}, ("cuda", "cuda")),
        ((128, 128), {"sinks": jax.ShapeDtypeStruct((32,), np.float32)}, ("cuda", "cuda")),
        ((192, 192), {"is_causal": True}, ("cuda on Hopper", "cuda on Hopper")),
        ((256, 256), {"is_causal": True}, ("cuda on Hopper", "cuda on Hopper")),
        ((124, 124), {"is_causal": True}, ("pallas on Hopper", "pallas on Hopper")),
        ((128, 128), {"mask": jax.ShapeDtypeStruct((8192, 8192), bool)}, ("tiled", "tiled")),
    ],
)
def test_tensor_cores_are_taken_wherever_there_are_kernels_for_them(
    widths: tuple[int, int], arguments: dict[str, Any], expected: tuple[str, str], gpu: FakeGpu
) -> None:
    name = lambda one: one.split()[0] if gpu.compute_capability == "9.0" or " on " not in one else "tiled"  # noqa: E731
    want = tuple(map(name, expected))
    for dtype in (jnp.bfloat16, jnp.float16):
        query, key = (jax.ShapeDtypeStruct((1, 8192, heads, widths[0]), dtype) for heads in (32, 8))
        value = jax.ShapeDtypeStruct((1, 8192, 8, widths[1]), dtype)
        assert passes(None, query, key, value, device=gpu, **arguments) == want


def test_lowered_without_a_gpu_for_any_that_has_a_kernel_for_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long causal call, for which `tiled` is faster than the plain kernels."""
    monkeypatch.setattr(cuda, "gpu_at_hand", lambda: None)
    long = jax.ShapeDtypeStruct((1, 8192, 32, 128), jnp.bfloat16)
    text = lowered(None, "cuda", x=long)
    assert text.count("@jax_fa4_forward_v1") == 1
    assert text.count("@jax_fa4_backward_v1") == 1
    assert "custom_call @jax_fa4" not in lowered(None, "cuda", x=jax.ShapeDtypeStruct(long.shape, np.float32))
    assert "custom_call @jax_fa4" not in lowered(None, "cpu", x=long)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (FakeGpu("8.0", "NVIDIA A100"), None),
        (FakeGpu("10.3", "NVIDIA B300"), None),
        (FakeGpu("7.5", "Tesla T4"), "compute capability 8.0 or newer, but this has 7.5"),
        (FakeGpu("gfx942", "AMD Instinct MI300X"), "needs an NVIDIA GPU, but this is AMD Instinct MI300X"),
    ],
    ids=["A100", "B300", "T4", "MI300X"],
)
def test_which_gpus(device: FakeGpu, reason: str | None) -> None:
    got = why_not("cuda", X, X, X, device=device)
    assert got is None if reason is None else reason in str(got)


def test_sizes_that_no_kernel_takes() -> None:
    """More elements in a row's heads than the plain kernels count."""
    huge = jax.ShapeDtypeStruct((1, 1, 1 << 24, 256), np.float32)
    for gpu in (FakeGpu("9.0", "NVIDIA H200"), FakeGpu("10.0", "NVIDIA B200")):
        assert "implementation='cuda' cannot do this: no kernel can" in str(
            why_not("cuda", huge, huge, huge, device=gpu)
        )
        assert passes(None, huge, huge, huge, device=gpu) == ("tiled", "tiled")
    assert "custom_call @jax_fa4" not in lowered(None, "cuda", x=huge)


def test_without_kernels_gpus_run_others(tmp_path: Path) -> None:
    gpu = FakeGpu("9.0", "NVIDIA H200")
    assert passes(None, X, X, X, device=gpu) == ("cuda", "cuda")
    extension = native.extension()
    extension.set_kernel_directory(str(tmp_path))
    try:
        assert f"the kernels sm80_forward were not built: there are none in {tmp_path}" in str(
            why_not("cuda", X, X, X, device=gpu)
        )
        assert passes(None, X, X, X, device=gpu) == ("pallas", "pallas")
        mask = jax.ShapeDtypeStruct((5, 5), bool)
        assert passes(None, X, X, X, mask=mask, device=gpu) == ("tiled", "tiled")
    finally:
        extension.set_kernel_directory(str(native.kernel_directory()))


def run_program(text: str, **environment: str) -> str:
    """Runs a Python program in a process of its own; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(text)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


CAPTURE = """
    import jax, jax.numpy as jnp, numpy as np
    from jax_fa4 import attention, native

    def results(implementation, x):
        def loss(x):
            out = attention(x, x[:, :, :2], x[:, :, 2:], is_causal=True, implementation=implementation)
            return (out.astype(np.float32) ** 2).sum()
        return x + 0.01 * jax.grad(loss)(x)

    # The result takes the place of the argument, so that the addresses of a call are those of the call before.
    call = jax.jit(lambda x: results("cuda", x), donate_argnums=0)
    check = jax.jit(lambda x: results("reference", x))
    draw = jax.random.normal(jax.random.key(0), (2, 200, 4, 64))
    got, want, executed = jnp.copy(draw), draw, []
    for _ in range(12):
        got, want = jax.block_until_ready(call(got)), check(want)
        executed.append(native.extension().plans_executed())
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    print(executed)
"""


@pytest.mark.gpu
def test_captured_in_a_cuda_graph() -> None:
    """XLA captures both calls, with no run before, and replays them: results change, and no plan is executed."""
    captured, plain = (
        ast.literal_eval(
            run_program(
                CAPTURE,
                XLA_FLAGS=f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1",
                JAX_DEFAULT_MATMUL_PRECISION="highest",
            )
        )
        for kinds in ("FUSION,CUSTOM_CALL", "")
    )
    assert plain == [2 * (i + 1) for i in range(12)]
    assert captured[-1] == captured[3], captured


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
@pytest.mark.parametrize("shape", [(32, 64), (33, 8), (100, 200)])
def test_copy_through_tensor_maps(shape: tuple[int, int], dtype: type) -> None:
    """The driver's tensor maps: the copy engine loads and stores boxes that reach beyond the matrix."""
    native.register()
    x = jnp.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(dtype)
    copy = jax.jit(jax.ffi.ffi_call("jax_fa4_tensor_copy_v1", jax.ShapeDtypeStruct(x.shape, x.dtype)))
    np.testing.assert_array_equal(copy(x), x)


@pytest.mark.gpu
def test_threads_and_devices() -> None:
    """Several threads call at the same time, on every GPU there is, with kernels that are not loaded yet."""

    def call(i: int) -> None:
        keys = jax.random.split(jax.random.key(i), 3)
        with jax.default_device(jax.devices("gpu")[i % len(jax.devices("gpu"))]):
            width = 16 * (1 + i % 12)
            dtype = (jnp.float16, jnp.bfloat16, jnp.float32)[i % 3]
            q, k, v = (jax.random.normal(key, (1, 100 + i, 2, width), dtype) for key in keys)
            got = attention(q, k, v, implementation="cuda").astype(np.float32)
            want = attention(q, k, v, implementation="tiled").astype(np.float32)
        np.testing.assert_allclose(got, want, atol=0.02)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(48)))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("long", ["queries", "keys"])
def test_more_elements_than_int32_counts(long: str) -> None:
    """2^31 + 2^13 elements: the last rows, and the gradients of the last keys, are what they are in a short call."""
    length, short, width, last = (1 << 25) + 128, 16, 64, 256
    rows, keys = (length, short) if long == "queries" else (short, length)
    query, key, value, dout = (
        jax.random.normal(jax.random.key(i), (1, n, 1, width), jnp.bfloat16)
        for i, n in enumerate((rows, keys, keys, rows))
    )
    # The rows see the last keys only, so that a short call sees the same.
    bounds = {"key_value_seq_lengths": None, "row_bounds": None}
    if long == "keys":
        # The rows see the last keys only, so that a short call sees the same.
        lower = jnp.full((1, rows), keys - last, np.int32)
        bounds["row_bounds"] = (lower, jnp.full((1, rows), keys, np.int32))

    def results(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, **arguments: Any) -> Any:
        call = lambda q, k, v: attention(q, k, v, **arguments, implementation="cuda")  # noqa: E731
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(do)

    out, dq, dk, dv = jax.jit(results)(query, key, value, dout, **bounds)
    if long == "queries":
        cut = lambda x: x[:, -last:]  # noqa: E731
        want = results(cut(query), key, value, cut(dout))
        got = cut(out), cut(dq)
        assert bool(jnp.isfinite(dk).all())
        assert bool(jnp.isfinite(dv).all())
        want = want[:2]
    else:
        cut = lambda x: x[:, -last:]  # noqa: E731
        want = results(query, cut(key), cut(value), dout)
        got = out, dq, cut(dk), cut(dv)
        assert not bool(jnp.any(dk[:, :-last]))
        assert not bool(jnp.any(dv[:, :-last]))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
