"""The suite on `pallas`, interpreted on a CPU and compiled on an NVIDIA GPU; its loops in small blocks; its table."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, Case, Sizes, draw, operands
from suite import GPU_TRUNCATES, MASKS, AttentionSuite, label, marked, pairwise, run

from jax_fa4 import attention, cuda, why_not
from jax_fa4.attention import passes
from jax_fa4.pallas import blocks, forward_kernel
from jax_fa4.pallas.blocks import KERNELS, Blocks, Kernel, shared_bytes, shared_limit

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import pallas_blocks


class TestPallas(AttentionSuite):
    implementation = "pallas"
    dtypes = ("float16", "bfloat16", "float32")
    dense = False
    truncates = GPU_TRUNCATES
    quick_has_more = False

    # Interpreted they take long, and `TestSmallBlocks` has quick ones of their kind.

    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_case(self, case: Case) -> None:
        super().test_case(case)

    @pytest.mark.slow
    @pytest.mark.parametrize("choice", list(pairwise(MASKS)), ids=label)
    def test_masks(self, choice: Mapping[str, Any]) -> None:
        super().test_masks(choice)

    @pytest.mark.slow
    def test_positions_beyond_int32(self) -> None:
        super().test_positions_beyond_int32()

    @pytest.mark.slow
    def test_row_bounds_in_any_order(self) -> None:
        super().test_row_bounds_in_any_order()

    @pytest.mark.slow
    def test_unbatched(self) -> None:
        super().test_unbatched()

    @pytest.mark.parametrize("dtype", ["float16", *marked(pytest.mark.slow, "bfloat16", "float32", "float64")])
    def test_dtype(self, dtype: str) -> None:
        super().test_dtype(dtype)


def test_the_worked_exercise() -> None:
    """A reference that lags by three powers of two stays, and one that lags by nine is replaced."""
    before = forward_kernel.Softmax(
        jnp.full(1, 2, np.float32), jnp.full(1, 3, np.float32), jnp.asarray([[4, 6]], np.float32)
    )
    value = jnp.eye(2, dtype=np.float32)

    near = before.add(jnp.asarray([[5, 4]], np.float32), value, 1.0)
    # candidate 5, delta -3: the weights are 2^(5 - 2) and 2^(4 - 2), and nothing is rescaled.
    assert near.reference.tolist() == [2]
    assert near.total.tolist() == [3 + 8 + 4]
    assert near.out.tolist() == [[4 + 8, 6 + 4]]

    far = before.add(jnp.asarray([[11, 10]], np.float32), value, 1.0)
    # candidate 11, delta -9: what was summed is worth 2^-9 of what it was, and the weights are 1 and 1/2.
    assert far.reference.tolist() == [11]
    assert far.total.tolist() == [3 / 512 + 1.5]
    assert far.out.tolist() == [[4 / 512 + 1, 6 / 512 + 0.5]]


@pytest.mark.parametrize("lag", [8, np.nextafter(np.float32(8), np.float32(9))], ids=["8", "more"])
def test_the_threshold(lag: float) -> None:
    before = forward_kernel.Softmax(jnp.zeros(1), jnp.ones(1), jnp.ones((1, 1)))
    after = before.add(jnp.full((1, 1), lag, np.float32), jnp.ones((1, 1)), 1.0)
    assert after.reference.tolist() == ([0] if lag == 8 else [lag])
    np.testing.assert_allclose(after.out[0, 0] / after.total[0], 1)


def test_rows_that_have_seen_nothing() -> None:
    """Hidden scores leave nothing behind, not even NaN."""
    softmax = forward_kernel.Softmax.empty(1, 1).add(jnp.full((1, 2), -np.inf), jnp.ones((2, 1)), 1.0)
    assert softmax.total.tolist() == [0]
    softmax = softmax.add(jnp.asarray([[-np.inf, 3]], np.float32), jnp.asarray([[5], [7]], np.float32), 1.0)
    assert (softmax.reference.tolist(), softmax.total.tolist(), softmax.out.tolist()) == ([3], [1], [[7]])


def test_weights_of_a_large_lse() -> None:
    """Logits of a million, whose lse has lost the logarithm of the row's sum: the backward's weights have it."""
    keys = 70
    query, key = np.full((1, 3, 1, 8), 100, np.float32), np.full((1, keys, 1, 8), 100, np.float32)
    value = np.random.default_rng(8).standard_normal(key.shape, np.float32)
    call = functools.partial(attention, scale=12.5, implementation="pallas")
    _, pull = jax.vjp(lambda value: call(query, key, value), value)
    (dvalue,) = pull(jnp.ones(query.shape))
    np.testing.assert_allclose(dvalue, 3 / keys, rtol=1e-5)


class TestSmallBlocks:
    """Nine row blocks by eight key blocks: some skipped, some masked in part, some whole."""

    sizes = Sizes(batch=2, rows=69, keys=125, heads=4, kv_heads=2, width=8, value_width=8)

    @pytest.fixture(autouse=True)
    def _small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(blocks, "blocks", lambda *_: Blocks(16, 16, 4, 1))
        jax.clear_caches()
        yield
        jax.clear_caches()

    @pytest.mark.parametrize(
        "choice",
        [
            {"left": 40, "right": 25},
            {"is_causal": True, "query_offset": "end", "softcap": 2.0},
            {"left": None, "right": 30, "query_seq_lengths": "some", "key_value_seq_lengths": "some"},
            {"left": 40, "right": None, "sinks": "some"},
            {"row_bounds": "some", "query_offset": "array", "is_causal": True},
        ],
        ids=label,
    )
    def test_masks(self, choice: Mapping[str, Any]) -> None:
        TestPallas().check_masks(choice, self.sizes, poison=np.nan)

    def test_whole_rows(self) -> None:
        """Nothing is hidden but what does not exist: the last blocks of rows and keys are partial."""
        TestPallas().check_masks({"left": None, "right": None}, self.sizes)

    def test_groups_that_share_a_block(self) -> None:
        """Three heads a group: a block of rows ends inside of a query position."""
        TestPallas().check_masks({"left": 30, "right": 10}, self.sizes._replace(heads=6), poison=np.nan)

    def test_bounds_that_go_back_and_forth(self) -> None:
        """Keys in order 0, 1, 2 and rows in order 2, 0, 1: the row blocks that see a key block do not follow on."""
        rng = np.random.default_rng(0)
        rows, keys = self.sizes.rows // 3, self.sizes.keys // 3
        lower = np.repeat(np.array([[2, 0, 1], [1, 2, 0]], np.int32) * keys, rows, 1)
        bounds = lower, lower + keys
        TestPallas().check(operands(self.sizes, "float32", rng) | {"row_bounds": bounds}, poison=np.nan)

    def test_rows_that_see_one_key_or_none(self) -> None:
        """In turn, in any order: the rows that see nothing do not widen what is loaded."""
        row = np.arange(self.sizes.rows, dtype=np.int32)[None].repeat(2, 0)
        lower = np.where(row % 2, 80 + row * 37 % 40, 0)
        arguments = operands(self.sizes, "float32", np.random.default_rng(9))
        TestPallas().check(arguments | {"row_bounds": (lower, lower + row % 2)}, poison=np.nan)

    @pytest.mark.parametrize("length", [16, 17, 31])
    def test_query_lengths_that_end_inside_of_a_block(self, length: int) -> None:
        sizes = self.sizes._replace(batch=1, heads=2)
        lengths = {"query_seq_lengths": np.array([length], np.int32)}
        TestPallas().check(operands(sizes, "float32", np.random.default_rng(1)) | lengths, poison=np.nan)

    def test_what_no_row_sees_is_not_visited(self) -> None:
        """The first keys are only loaded by row blocks that see them: NaN elsewhere in the hull stays there."""
        sizes = self.sizes._replace(batch=1, rows=64, keys=64, heads=2)
        arguments = operands(sizes, "float32", np.random.default_rng(2))
        row = np.arange(64, dtype=np.int32)[None]
        bounds = row // 16 * 16, row // 16 * 16 + 16  # each block of rows its own block of keys
        for name in ("key", "value"):
            arguments[name][:, 16:32] = np.nan
        floats = [arguments[name] for name in ("query", "key", "value")]
        call = lambda *x: attention(*x, row_bounds=bounds, implementation="pallas")  # noqa: E731
        out, pull = jax.vjp(call, *floats)
        gradients = pull(jnp.ones_like(out))
        for x in (out, *gradients):
            finite = np.isfinite(np.asarray(x)).all((0, 2, 3))
            np.testing.assert_array_equal(finite, (row[0] < 16) | (row[0] >= 32))


def test_vmap_of_the_gradient() -> None:
    """Over the query alone, with an inner batch: the others are shared."""
    sizes = Sizes(2, 20, 24, 4, 2, 8, 8)
    x = operands(sizes, "float32", np.random.default_rng(3))
    queries = np.stack([x["query"], -2 * x["query"], x["query"][::-1]])

    def gradient(implementation: str, query: Any) -> Any:
        def loss(query: Any, key: Any, value: Any) -> Any:
            return (attention(query, key, value, is_causal=True, implementation=implementation) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(query, x["key"], x["value"])

    got = jax.vmap(functools.partial(gradient, "pallas"))(queries)
    want = jax.vmap(functools.partial(gradient, "reference"))(queries)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def test_under_remat_and_the_same_every_time() -> None:
    sizes = Sizes(1, 40, 40, 2, 1, 16, 16)
    x = operands(sizes, "bfloat16", np.random.default_rng(4))

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(remat: bool) -> Any:
        call = functools.partial(attention, local_window_size=9, implementation="pallas")
        call = jax.checkpoint(call) if remat else call
        return jax.grad(lambda *x: call(*x).astype(np.float32).sum(), (0, 1, 2))(x["query"], x["key"], x["value"])

    first = gradient(False)
    for again in (gradient(False), gradient(True)):
        jax.tree.map(np.testing.assert_array_equal, again, first)


def test_where_jit_is_disabled() -> None:
    rng = np.random.default_rng(7)
    arguments = operands(Sizes(batch=1, rows=3, keys=5, heads=2, kv_heads=1, width=8, value_width=16), "float32", rng)
    dout, dlse = (rng.standard_normal(shape, np.float32) for shape in ((1, 3, 2, 16), (1, 3, 2)))
    with jax.disable_jit():
        got = run("pallas", arguments, dout, dlse)
    oracle.check(got, oracle.expect(arguments, dout, dlse))


def test_second_derivative() -> None:
    x = jnp.asarray(operands(Sizes(1, 6, 6, 1, 1, 4, 4), "float32", np.random.default_rng(5))["query"])

    def gradient(implementation: str, x: Any) -> Any:
        return jax.grad(lambda x: (attention(x, x, x, implementation=implementation) ** 2).sum())(x)

    def second(implementation: str) -> Any:
        return jax.grad(lambda x: (gradient(implementation, x) * jnp.cos(x)).sum())(x)

    np.testing.assert_allclose(second("pallas"), second("reference"), rtol=1e-4, atol=1e-4)


class FakeDevice:
    def __init__(self, platform: str, kind: str, capability: str | None = None) -> None:
        self.platform, self.device_kind = platform, kind
        if capability is not None:
            self.compute_capability = capability


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (FakeDevice("gpu", "NVIDIA GeForce RTX 3090", "8.6"), None),
        (FakeDevice("gpu", "NVIDIA RTX PRO 6000", "12.0"), None),
        (FakeDevice("cpu", "cpu"), None),
        (FakeDevice("gpu", "Tesla T4", "7.5"), "compute capability 8.0 or newer, but this has 7.5"),
        (FakeDevice("gpu", "AMD Instinct MI300X", "gfx942"), "but this is AMD Instinct MI300X"),
        (FakeDevice("tpu", "TPU v5"), "but this is for the platform 'tpu'"),
    ],
    ids=lambda x: getattr(x, "device_kind", None),
)
def test_which_devices(device: Any, reason: str | None) -> None:
    x = shaped(2, 5, 4, 8)
    got = why_not("pallas", x, x, x, device=device)
    assert got is None if reason is None else reason in str(got)


def test_what_it_refuses() -> None:
    x, wide = shaped(2, 5, 4, 8), shaped(2, 5, 4, 264)
    refusal = functools.partial(why_not, "pallas", device=jax.devices("cpu")[0])
    assert "does not support mask" in str(refusal(x, x, x, mask=shaped(5, 5, dtype=bool)))
    assert "does not support bias" in str(refusal(x, x, x, bias=shaped(5, 5)))
    assert "head widths up to 256, but got D=264, Dv=264" in str(refusal(wide, wide, wide))


def test_without_the_triton_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of JAX that has removed it."""
    monkeypatch.setattr("jax_fa4.pallas._missing", "implementation='pallas' needs what is gone.")
    x = shaped(1, 4096, 8, 128)
    gpu = FakeDevice("gpu", "NVIDIA GeForce RTX 3090", "8.6")
    assert why_not("pallas", x, x, x, device=gpu) == "implementation='pallas' needs what is gone."
    assert "pallas" not in passes(None, x, x, x, device=gpu)


@pytest.mark.parametrize(
    "gpu",
    [
        FakeDevice("gpu", "NVIDIA A100", "8.0"),
        FakeDevice("gpu", "NVIDIA L4", "8.9"),
        FakeDevice("gpu", "NVIDIA GeForce RTX 5090", "12.0"),
    ],
    ids=lambda gpu: gpu.device_kind,
)
def test_chosen_where_no_cuda_kernel_uses_tensor_cores(gpu: Any) -> None:
    x = shaped(4, 4096, 16, 128)
    assert passes(None, x, x, x, device=gpu, is_causal=True) == ("pallas", "pallas")
    assert passes(None, x, x, x, device=gpu, bias=shaped(4096, 4096)) == ("tiled", "tiled")
    wide = shaped(4, 4096, 8, 264)
    assert passes(None, wide, wide, wide, device=gpu) == ("tiled", "tiled")


def test_not_chosen_where_a_cuda_kernel_uses_tensor_cores() -> None:
    x = shaped(4, 4096, 16, 128)
    for gpu in (FakeDevice("gpu", "NVIDIA H200", "9.0"), FakeDevice("gpu", "NVIDIA B200", "10.0")):
        assert passes(None, x, x, x, device=gpu) == ("cuda", "cuda")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_block_sizes_fit(capability: tuple[int, int]) -> None:
    """Into shared memory and what Triton takes, for every width and dtype."""
    for kernel, dtype in itertools.product(KERNELS, map(jnp.dtype, ("bfloat16", "float32"))):
        for widths in itertools.product((1, 16, 40, 64, 96, 128, 192, 256), repeat=2):
            found = blocks.blocks(kernel, capability, widths, dtype, 10**6, 10**6)
            for size in (found.rows, found.keys):
                assert size >= 16
                assert size & (size - 1) == 0
            assert found.warps in (4, 8)
            assert shared_bytes(kernel, found, widths, dtype) <= shared_limit(capability)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_candidates_of_the_measurement(kernel: Kernel, width: int) -> None:
    """They fit, and what the table has for an H200 is among them."""
    widths, dtype, limit = (width, width), jnp.dtype("bfloat16"), shared_limit((9, 0))
    found = list(pallas_blocks.candidates(kernel, width, dtype, limit))
    assert all(shared_bytes(kernel, one, widths, dtype) <= limit for one in found)
    assert blocks.blocks(kernel, (9, 0), widths, dtype, 4096, 4096) in found


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="would measure for minutes")
def test_the_measurement_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pallas_blocks.py"])
    with pytest.raises(SystemExit, match="needs a GPU, but JAX's default device is of platform cpu"):
        pallas_blocks.main()


def test_blocks_are_no_longer_than_the_call() -> None:
    found = blocks.blocks("forward", (9, 0), (64, 64), jnp.dtype("bfloat16"), 8, 33)
    assert (found.rows, found.keys) == (16, 64)


@pytest.mark.parametrize(
    ("sizes", "dtype", "arguments"),
    [
        (Sizes(1, 256, 256, 2, 2, 64, 64), "bfloat16", {}),
        (Sizes(2, 300, 200, 6, 2, 80, 40), "float32", {"is_causal": True, "softcap": 3.0}),
        (Sizes(2, 300, 200, 8, 1, 128, 128), "float16", {"lengths": True, "local_window_size": (100, 0)}),
        (Sizes(1, 1, 500, 8, 1, 256, 256), "bfloat16", {"sinks": np.zeros(8, np.float32)}),
    ],
    ids=["plain", "causal", "lengths", "decoding"],
)
def test_lowered_for_gpus(sizes: Sizes, dtype: str, arguments: dict[str, Any]) -> None:
    """Triton's operations are enough: three kernels, forward and backward."""
    arguments = dict(arguments)
    arrays = {"query_seq_lengths": np.zeros(sizes.batch, np.int32)} if arguments.pop("lengths", False) else {}
    x = operands(sizes, dtype, np.random.default_rng(6))

    def loss(query: Any, key: Any, value: Any) -> Any:
        out = attention(query, key, value, **arguments, **arrays, implementation="pallas")
        return out.astype(np.float32).sum()

    with h200():
        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*x.values()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 3


def h200() -> Any:
    """A context in which JAX lowers for an H200: from JAX 0.11 Triton's lowering asks for the GPU."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), (), abstract_device=device))


def test_one_program_for_several_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic choice, where the GPU at hand has no fast CUDA kernel: kernels on GPUs, `tiled` elsewhere."""
    monkeypatch.setattr(cuda, "gpu_at_hand", lambda: FakeDevice("gpu", "NVIDIA GeForce RTX 3090", "8.6"))
    x = shaped(1, 2048, 4, 64)
    with h200():
        gradient = jax.jit(jax.grad(lambda x: attention(x, x, x, is_causal=True).astype(np.float32).sum()))
        text = gradient.trace(x).lower(lowering_platforms=("cpu", "cuda", "tpu")).as_text()
    assert text.count("xla.gpu.triton") == 3
    assert "dot_general" in text
    jax.clear_caches()


def test_lowered_for_a_platform_that_it_is_not_for() -> None:
    x = shaped(2, 5, 4, 8)
    call = jax.jit(lambda x: attention(x, x, x, implementation="pallas")).trace(x)
    with pytest.raises(NotImplementedError, match="'pallas' needs an NVIDIA GPU or a CPU"):
        call.lower(lowering_platforms=("tpu",))


def test_sizes_of_results_whatever_the_widths() -> None:
    """Widths of 0 and between powers of two."""
    rng = np.random.default_rng(7)
    for width, value_width in ((3, 0), (17, 33)):
        x = operands(Sizes(1, 5, 7, 2, 1, width, value_width), "float32", rng)
        dout, dlse = (
            draw("gaussian", (1, 5, 2, value_width), "float32", rng),
            rng.standard_normal((1, 5, 2), np.float32),
        )
        oracle.check(run("pallas", x, dout, dlse), oracle.expect(x, dout, dlse))
