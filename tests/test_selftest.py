"""The self-test of kernels on GPUs on which they have not been seen.

Here the emulator stands for such a GPU, or Pallas' interpreter; or `tiled`, where what is tested is only what follows
from a result.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention, cuda, native, pallas, selftest, tiled, why_not
from jax_fa4.attention import passes
from jax_fa4.emulated import implementation as emulated
from jax_fa4.pallas import blocks
from jax_fa4.selftest import SelfTestWarning

EMULATED = {"forward": emulated.forward, "backward": emulated.backward}
INTERPRETED = {"forward": pallas.forward, "backward": pallas.backward}
BY_TILED = {"forward": tiled.forward, "backward": tiled.backward}


class Gpu:
    """A GPU that is not there."""

    platform = "gpu"

    def __init__(self, capability: str, kind: str) -> None:
        self.compute_capability, self.device_kind = capability, kind


B200 = Gpu("10.0", "NVIDIA B200")
H200 = Gpu("9.0", "NVIDIA H200")
RTX = Gpu("8.6", "NVIDIA GeForce RTX 3090")
GPU_SIZES = selftest._SIZES


class Runs:
    """The self-tests' runs of an implementation's kernels, which a CPU computes with the functions `by`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, by: Any) -> None:
        self.count = 0
        self._monkeypatch, self._passes, self._by = monkeypatch, module.PASSES, by
        for name in by:
            self.spoil(name)

    def spoil(self, name: str, change: Callable[[Any], Any] = lambda results: results) -> None:
        """From now on the results of a pass are changed so."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return change(self._by[name](*arguments, **options))

        for key, one in self._passes.items():
            if one.name == name:
                self._monkeypatch.setitem(self._passes, key, one._replace(run=run))


@pytest.fixture
def nothing_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake GPUs are of this process, which has tested nothing on them."""
    cpu = jax.devices("cpu")[0]
    monkeypatch.delenv(selftest.SWITCH, raising=False)
    monkeypatch.setattr(selftest, "_is_here", lambda device: True)
    monkeypatch.setattr(selftest, "_put", lambda arrays, device: jax.device_put(arrays, cpu))
    monkeypatch.setattr(selftest, "_SIZES", selftest._Sizes(5, 9, 1, 2))
    monkeypatch.setattr(selftest, "_faults", {})
    monkeypatch.setattr(selftest, "_warned", set())


@pytest.fixture
def runs(nothing_tested: None, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Of `cuda`, where a B200 is the GPU at hand."""
    native.emulator()
    monkeypatch.setattr(cuda, "gpu_at_hand", lambda: B200)
    return Runs(monkeypatch, cuda, EMULATED)


@pytest.fixture
def pallas_runs(nothing_tested: None, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Of `pallas`, where an RTX 3090 is the GPU at hand, on which the CUDA kernels have been seen."""
    monkeypatch.setattr(cuda, "gpu_at_hand", lambda: RTX)
    for file in cuda.KERNELS:
        monkeypatch.setitem(selftest.SEEN, file, ((8, 6),))
    return Runs(monkeypatch, pallas, BY_TILED)


@pytest.fixture
def forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward's kernels have been seen on a B200, say."""
    for file in ("sm80_backward", "sm100_backward", "backward_rows"):
        monkeypatch.setitem(selftest.SEEN, file, ((10, 0),))


lengths = itertools.count(20)


def struct() -> jax.ShapeDtypeStruct:
    """Of a query of a length that no call had before, since what jit has traced it does not trace again."""
    return jax.ShapeDtypeStruct((1, next(lengths), 2, 64), jnp.bfloat16)


def attend(x: Any, **arguments: Any) -> jax.Array:
    return attention(x, x, x, is_causal=True, **arguments)


def loss(x: Any, **arguments: Any) -> jax.Array:
    return attend(x, **arguments).astype(np.float32).sum()


def lowered(function: Callable[..., Any], x: jax.ShapeDtypeStruct | None = None) -> str:
    return jax.jit(function).trace(struct() if x is None else x).lower(lowering_platforms=("cuda",)).as_text()


def calls_in(text: str) -> tuple[int, int]:
    """How many calls of the forward's and the backward's kernels there are in a program."""
    return text.count("@jax_fa4_forward_v1"), text.count("@jax_fa4_backward_v1")


def off_by_a_tenth(results: Any) -> Any:
    out, *rest = results
    return out.at[-1, -1, -1, -1].add(0.1), *rest


def nan(results: Any) -> Any:
    out, *rest = results
    return out.at[0, 0, 0, 0].set(np.nan), *rest


def wrong_lse(results: Any) -> Any:
    out, lse, rounding = results
    return out, lse + 1e-3, rounding


def wrong_rounding(results: Any) -> Any:
    out, lse, rounding = results
    return out, lse, rounding + 1e-3


def no_launch(results: Any) -> Any:
    raise RuntimeError("the kernel cannot be launched: too many resources\nand a long story")


def wrong_gradient(results: Any) -> Any:
    return results._replace(key=results.key.at[0, 2].multiply(1.1))


def wrong_scale(results: Any) -> Any:
    return results._replace(scale=results.scale * 1.1)


def test_right_kernels_run_and_are_tested_once(runs: Runs) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calls_in(lowered(attend)) == (1, 0)
        first = runs.count
        assert first > 0
        assert calls_in(lowered(attend)) == (1, 0)
        assert calls_in(lowered(lambda x: attend(x, implementation="cuda"))) == (1, 0)
        assert why_not("cuda", *[struct()] * 3, is_causal=True, device=B200) is None
        assert runs.count == first
        assert calls_in(lowered(jax.grad(loss))) == (1, 1)
        assert runs.count > first  # the backward's


@pytest.mark.usefixtures("forward_alone")
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (off_by_a_tenth, r"out is off by 0\.1, more than 0\.0"),
        (nan, r"out is off by inf, more than 0\.0"),
        (wrong_lse, r"lse is off by 0\.001, more than \d\.\de-0[67]\."),
        (wrong_rounding, r"lse is off by 0\.001, more than \d\.\de-0[67]\."),
        (no_launch, r"RuntimeError: the kernel cannot be launched: too many resources\. They"),
    ],
)
def test_a_fault_of_the_forward(spoil: Callable[[Any], Any], says: str, runs: Runs) -> None:
    runs.spoil("forward", spoil)
    with pytest.warns(SelfTestWarning) as caught:
        assert calls_in(lowered(attend)) == (0, 0)
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith(
        "implementation='cuda' failed its self-test on NVIDIA B200 (compute capability 10.0), with the kernels forward_"
    )
    assert re.search(says, text)
    assert "please report this" in text
    assert text.endswith(" implementation='tiled' runs in its place.")
    sentence = text.removesuffix(" implementation='tiled' runs in its place.")

    count = runs.count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calls_in(lowered(jax.grad(loss))) == (0, 1)
        x = np.random.default_rng(0).standard_normal((1, next(lengths), 2, 64)).astype(jnp.bfloat16)
        np.testing.assert_array_equal(attend(x), attend(x, implementation="tiled"))
    with pytest.raises(NotImplementedError) as raised:
        lowered(lambda x: attend(x, implementation="cuda"))
    assert str(raised.value) == sentence
    assert why_not("cuda", *[struct()] * 3, is_causal=True, device=B200) == sentence
    assert why_not(None, *[struct()] * 3, is_causal=True, device=B200) is None
    assert passes(None, *[struct()] * 3, is_causal=True, device=B200) == ("tiled", "cuda")
    assert runs.count == count


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(wrong_gradient, "the gradient of key is off by"), (wrong_scale, "the gradient of scale is off by")],
)
def test_a_fault_of_the_backward(spoil: Callable[[Any], Any], says: str, runs: Runs) -> None:
    runs.spoil("backward", spoil)
    with pytest.warns(SelfTestWarning, match=f"with the kernels before_.*, backward_.*, after_.*: {says}"):
        assert calls_in(lowered(jax.grad(loss))) == (1, 0)
    assert calls_in(lowered(lambda x: attend(x, implementation="cuda"))) == (1, 0)
    with pytest.raises(NotImplementedError, match=says):
        lowered(jax.grad(lambda x: loss(x, implementation="cuda")))
    assert passes(None, *[struct()] * 3, is_causal=True, device=B200) == ("cuda", "tiled")


@pytest.mark.usefixtures("forward_alone")
def test_turned_off(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.spoil("forward", nan)
    monkeypatch.setenv(selftest.SWITCH, "0")
    assert calls_in(lowered(jax.grad(loss))) == (1, 1)
    assert calls_in(lowered(lambda x: attend(x, implementation="cuda"))) == (1, 0)
    assert runs.count == 0
    monkeypatch.setenv(selftest.SWITCH, "false")
    with pytest.raises(ValueError, match=r"JAX_FA4_SELF_TEST in the environment must be 0 or 1, but got 'false'\."):
        lowered(attend)
    monkeypatch.setenv(selftest.SWITCH, "1")
    with pytest.warns(SelfTestWarning):
        assert calls_in(lowered(attend)) == (0, 0)


def scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (attend(carry), None), x, length=3)[0]


TRANSFORMED = {
    "jit": jax.jit(attend),
    "grad": jax.grad(loss),
    "vmap": lambda x: jax.vmap(attend)(x[None]),
    "grad of vmap of jit": jax.grad(lambda x: jax.vmap(jax.jit(loss))(x[None]).sum()),
    "scan": scanned,
    "grad of scan": jax.grad(lambda x: scanned(x).astype(np.float32).sum()),
    "remat": jax.grad(jax.checkpoint(loss)),
    "second derivative": jax.grad(lambda x: jax.grad(loss)(x).astype(np.float32).sum()),
}


@pytest.mark.usefixtures("forward_alone")
@pytest.mark.parametrize(
    ("name", "faulty"),
    # Whoever looks for leaks traces everything anew.
    [
        pytest.param(*x, marks=[] if x in (("scan", False), ("vmap", True)) else [pytest.mark.slow])
        for x in itertools.product(TRANSFORMED, (False, True))
    ],
)
def test_inside_of_transformations(name: str, faulty: bool, runs: Runs) -> None:
    """The test computes with arrays of its own, whatever is being traced, and leaves no tracer behind."""
    if faulty:
        runs.spoil("forward", nan)
    with jax.checking_leaks(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forwards, _ = calls_in(lowered(TRANSFORMED[name]))
    assert (forwards == 0) == faulty
    assert [warning.category for warning in caught] == [SelfTestWarning] * faulty


def test_the_callers_settings_do_not_matter(runs: Runs) -> None:
    with jax.debug_nans(True), jax.debug_infs(True), jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert calls_in(lowered(attend)) == (1, 0)
    assert runs.count > 0


def test_threads_share_one_test(runs: Runs) -> None:
    start = threading.Barrier(6)

    def trace(x: jax.ShapeDtypeStruct) -> tuple[int, int]:
        start.wait()
        return calls_in(lowered(attend, x))

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(trace, [struct() for _ in range(6)])) == [(1, 0)] * 6
    several, runs.count = runs.count, 0
    selftest._faults.clear()
    runs.spoil("forward")  # what jit has traced it would not trace again
    lowered(attend)
    assert several == runs.count > 0


def test_gpus_of_a_kind_share_a_verdict(runs: Runs) -> None:
    x = [struct()] * 3
    runs.spoil("forward", nan)
    assert "NVIDIA B200 " in str(why_not("cuda", *x, device=B200))
    count = runs.count
    assert "NVIDIA B200 " in str(why_not("cuda", *x, device=Gpu("10.0", "NVIDIA GB200")))
    assert runs.count == count
    runs.spoil("forward")
    assert why_not("cuda", *x, device=Gpu("10.3", "NVIDIA B300")) is None
    assert runs.count > count
    assert why_not("cuda", *x, device=B200) is not None


def test_kernels_differ_by_dtype_width_and_mask(runs: Runs) -> None:
    """A fault of one kernel says nothing about another."""
    wide = jax.ShapeDtypeStruct((1, 20, 2, 128), jnp.bfloat16)
    half = jax.ShapeDtypeStruct((1, 20, 2, 64), jnp.float16)
    runs.spoil("forward", nan)
    assert why_not("cuda", *[struct()] * 3, is_causal=True, device=B200) is not None
    runs.spoil("forward")
    assert why_not("cuda", *[wide] * 3, is_causal=True, device=B200) is None
    assert why_not("cuda", *[half] * 3, is_causal=True, device=B200) is None
    assert why_not("cuda", *[struct()] * 3, is_causal=True, device=B200) is not None


def test_seen_kernels_are_not_tested(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "gpu_at_hand", lambda: H200)
    assert calls_in(lowered(jax.grad(loss))) == (1, 1)
    assert why_not("cuda", *[struct()] * 3, device=H200) is None
    assert passes(None, *[struct()] * 3, device=H200) == ("cuda", "cuda")
    assert runs.count == 0


def test_gpus_that_are_elsewhere_are_not_tested(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert why_not("cuda", *[struct()] * 3, device=Gpu("12.1", "NVIDIA GB10")) is None
    assert runs.count == 0


def test_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default device, or else a GPU that the process has beside it."""
    cpu = jax.devices("cpu")[0]

    def none(backend: str) -> list[Any]:
        raise RuntimeError(f"Unknown backend: {backend}")

    for default, gpus, expected in ((B200, none, B200), (cpu, lambda backend: [B200], B200), (cpu, none, None)):
        monkeypatch.setattr(cuda, "default_device", lambda default=default: default)
        monkeypatch.setattr(jax, "local_devices", gpus)
        assert cuda.gpu_at_hand() is expected


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0", "10.3", "12.0"])
def test_every_kernel_is_reached(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of the self-test launch every entry of the files that serve a GPU."""
    monkeypatch.setattr(selftest, "SEEN", {})
    directory = native.kernel_directory()
    gpu = Gpu(capability, "some")
    found: dict[str, set[str]] = {}
    for _, kernels, _, _ in cuda.unseen_kernels(gpu):
        for file, entry in kernels:
            found.setdefault(file, set()).add(entry)
    assert set(cuda.KERNELS) <= found.keys()
    for file, entries in found.items():
        text = native.ptx(next(directory.glob(f"{file}.*.ptx*")).name.partition(".ptx")[0])
        assert entries == set(re.findall(r"^\.visible \.entry (\w+)", text, re.MULTILINE))


def off_by_one_key(problem: Any, operands: Any) -> Any:
    low, high = problem.band
    if high is not None:
        problem = dataclasses.replace(problem, band=(low, high - 1))
    return tiled.forward(problem, operands)


def without_the_last_key(problem: Any, operands: Any) -> Any:
    key = operands.key.at[:, -1].set(0)
    return tiled.forward(problem, operands._replace(key=key))


@pytest.mark.parametrize("run", [tiled.forward, off_by_one_key, without_the_last_key])
def test_at_the_sizes_of_a_gpu(run: Callable[..., Any], runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key too few among hundreds is a fault, and roundings are none."""
    monkeypatch.setattr(selftest, "_SIZES", GPU_SIZES)
    monkeypatch.setitem(cuda.PASSES, "forward", cuda.PASSES["forward"]._replace(run=run))
    reason = why_not("cuda", *[struct()] * 3, is_causal=True, device=B200)
    assert (reason is None) == (run is tiled.forward), reason


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", cuda.PASSES)
@pytest.mark.parametrize(
    ("gpu", "widths"),
    [
        pytest.param(gpu, widths, id=f"{gpu.device_kind}-{widths}")
        for gpu in (H200, B200)
        for widths in ((64, 64), (96, 96), (128, 128), (192, 128), *([(256, 256)] if gpu is not B200 else []))
    ],
)
def test_kernels_for_tensor_cores_pass(
    gpu: Gpu, name: cuda.Pass, widths: tuple[int, int], dtype: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a pass, at the sizes of a GPU."""
    monkeypatch.setattr(selftest, "_SIZES", GPU_SIZES)
    for calls in ("_CALLS", "_DETERMINISTIC_CALLS"):
        cut = tuple(dataclasses.replace(call, copies=1) for call in getattr(selftest, calls))
        monkeypatch.setattr(selftest, calls, cut)
    tested, capability = cuda.PASSES[name], selftest.capability(gpu)
    module = f"sm{capability[0]}{capability[1]}_{name}"
    files = [module] if name == "forward" else ["backward_rows", module, "backward_rows"]
    found = [x for x in selftest.all_kernels(tested, dtype, widths, capability) if x[0][0] in files]
    assert [[file for file, _ in kernels] for kernels in found] == [files] * 3
    with emulated.options(arch="sm_90" if capability == (9, 0) else "sm_100"):
        for kernels in found:
            assert selftest.fault(tested, kernels, dtype, widths, gpu) is None


def long(dtype: Any = jnp.bfloat16, width: int = 64) -> jax.ShapeDtypeStruct:
    """Of a query of a length that no call had before, for which `pallas` is chosen where no CUDA kernel is fast."""
    return jax.ShapeDtypeStruct((1, 2000 + next(lengths), 4, width), dtype)


def traced(function: Callable[..., Any], x: jax.ShapeDtypeStruct | None = None) -> int:
    """How many passes by `pallas` there are in a program."""
    return str(jax.make_jaxpr(function)(long() if x is None else x)).count("jax_fa4_pallas[")


def triton_calls(function: Callable[..., Any], x: jax.ShapeDtypeStruct) -> int:
    """How many kernels of `pallas` there are in a program for GPUs."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    # From JAX 0.11 Triton's lowering asks for the GPU, and knows few by name.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), (), abstract_device=device)):
        return lowered(function, x).count("xla.gpu.triton")


@pytest.mark.parametrize("number_of_passes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pallas_is_tested_once(number_of_passes: int, pallas_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, while a call is lowered that names it; the automatic choice has no more to test then."""
    monkeypatch.setattr(pallas_runs, "_by", INTERPRETED)
    transform, function = ((lambda f: f, attend), (jax.grad, loss))[number_of_passes - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SelfTestWarning)
        kernels = triton_calls(transform(lambda x: function(x, implementation="pallas")), long())
        assert kernels == (1, 3)[number_of_passes - 1]
        assert pallas_runs.count == number_of_passes  # one problem has a band and no soft cap
        assert traced(transform(function)) == number_of_passes
        assert why_not("pallas", *[long()] * 3, is_causal=True, device=RTX) is None
    assert pallas_runs.count == number_of_passes
    assert set(selftest._faults.values()) == {None}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (nan, r"out is off by inf, more than 0\.0"),
        pytest.param(wrong_lse, r"lse is off by 0\.001, more than \d\.\de-0[67]\.", marks=pytest.mark.slow),
        (no_launch, r"RuntimeError: the kernel cannot be launched: too many resources\. They"),
    ],
)
def test_a_fault_of_the_forward_of_pallas(spoil: Callable[[Any], Any], says: str, pallas_runs: Runs) -> None:
    pallas_runs.spoil("forward", spoil)
    with pytest.warns(SelfTestWarning) as caught:
        assert [calls_in(lowered(attend, long())) for _ in range(2)] == [(1, 0)] * 2
    (warning,) = caught
    text = str(warning.message)
    sentence = text.removesuffix(" implementation='cuda' runs in its place.")
    assert sentence != text
    assert sentence.startswith(
        "implementation='pallas' failed its self-test on NVIDIA GeForce RTX 3090 (compute capability 8.6), with the "
        "kernels fa4_forward_bfloat16_64_64_band of pallas.forward_kernel: "
    )
    assert re.search(says, text)
    count = pallas_runs.count
    assert why_not("pallas", *[long()] * 3, is_causal=True, device=RTX) == sentence
    with pytest.raises(NotImplementedError) as raised:
        triton_calls(lambda x: attend(x, implementation="pallas"), long())
    assert str(raised.value) == sentence
    assert passes(None, *[long()] * 3, is_causal=True, device=RTX) == ("cuda", "pallas")
    assert why_not(None, *[long()] * 3, is_causal=True, device=RTX) is None
    assert pallas_runs.count == count + 1  # the backward's


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(wrong_gradient, "the gradient of key is off by"), (no_launch, "RuntimeError: the kernel cannot be launched")],
)
def test_a_fault_of_the_backward_of_pallas(spoil: Callable[[Any], Any], says: str, pallas_runs: Runs) -> None:
    pallas_runs.spoil("backward", spoil)
    kernels = (
        "fa4_key_gradients_bfloat16_64_64_band, fa4_query_gradients_bfloat16_64_64_band of pallas.backward_kernels"
    )
    with pytest.warns(SelfTestWarning, match=f"with the kernels {kernels}: {says}"):
        assert traced(jax.grad(loss)) == 1
    with pytest.raises(NotImplementedError, match=says):
        triton_calls(jax.grad(lambda x: loss(x, implementation="pallas")), long())
    assert passes(None, *[long()] * 3, is_causal=True, device=RTX) == ("pallas", "cuda")


def test_pallas_turned_off(pallas_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    pallas_runs.spoil("forward", nan)
    monkeypatch.setenv(selftest.SWITCH, "0")
    assert traced(jax.grad(loss)) == 2
    assert triton_calls(lambda x: attend(x, implementation="pallas"), long()) == 1
    assert pallas_runs.count == 0


def test_seen_pallas_is_not_tested(pallas_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "gpu_at_hand", lambda: H200)
    x = long(np.float32)
    assert traced(jax.grad(loss), x) == 2
    assert why_not("pallas", x, x, x, is_causal=True, device=H200) is None
    assert pallas_runs.count == 0


def test_interpreted_pallas_is_not_tested(pallas_runs: Runs) -> None:
    """A CPU beside a GPU on which the kernels are wrong."""
    pallas_runs.spoil("forward", nan)
    x = np.random.default_rng(0).standard_normal((1, next(lengths), 2, 64)).astype(jnp.bfloat16)
    assert why_not("pallas", x, x, x, device=jax.devices("cpu")[0]) is None
    got, want = (attend(x, implementation=name).astype(np.float32) for name in ("pallas", "tiled"))
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)
    assert pallas_runs.count == 0


@pytest.mark.parametrize(
    "name", [name if name in ("scan", "vmap") else pytest.param(name, marks=pytest.mark.slow) for name in TRANSFORMED]
)
def test_pallas_inside_of_transformations(name: str, pallas_runs: Runs) -> None:
    pallas_runs.spoil("forward", nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        passes_of_pallas = traced(TRANSFORMED[name])
    backwards = {"second derivative": 2}.get(name, int("grad" in name or name == "remat"))
    assert passes_of_pallas == backwards
    assert [warning.category for warning in caught] == [SelfTestWarning]


def test_what_is_tested_may_ask_for_its_faults(pallas_runs: Runs) -> None:
    """As implementations do that run on a GPU: inside of a test there are none, and nobody waits."""
    asked: list[str | None] = []

    def ask(results: Any) -> Any:
        asked.append(why_not("pallas", *[long()] * 3, is_causal=True, device=RTX))
        return off_by_a_tenth(results)

    pallas_runs.spoil("forward", ask)
    thread = threading.Thread(target=lambda: asked.append(why_not("pallas", *[long()] * 3, device=RTX)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    *inside, outside = asked
    assert inside == [None]  # the first problem was enough
    assert "out is off by 0.1" in str(outside)


def test_what_runs_in_the_place_of_what(pallas_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an H200's kernels for tensor cores `pallas`, and `tiled` of that; each warns by itself."""
    monkeypatch.setattr(cuda, "gpu_at_hand", lambda: H200)
    monkeypatch.setattr(selftest, "SEEN", {})
    Runs(monkeypatch, cuda, BY_TILED).spoil("forward", no_launch)
    with pytest.warns(SelfTestWarning, match=r"^implementation='cuda' .* implementation='pallas' runs in its place\.$"):
        assert traced(attend) == 1
    selftest._faults.clear()
    selftest._warned.clear()
    pallas_runs.spoil("forward", nan)
    with pytest.warns(SelfTestWarning) as caught:
        assert traced(attend) == 0
    texts = [str(warning.message) for warning in caught]
    assert [text.partition(" failed")[0] for text in texts] == ["implementation='cuda'", "implementation='pallas'"]
    assert all(text.endswith(" implementation='tiled' runs in its place.") for text in texts)
    x = np.random.default_rng(0).standard_normal((1, next(lengths), 2, 64)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(attend(x), attend(x, implementation="tiled"))


def rounded(x: Any) -> Any:
    """To TF32's 10 bits of mantissa, the operands of products."""
    return jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 10) if x.ndim == 4 else x, x)


def rounded_products(problem: Any, operands: Any) -> Any:
    return tiled.forward(problem, rounded(operands))


def one_key_less(problem: Any, operands: Any) -> Any:
    return without_the_last_key(problem, rounded(operands))


@pytest.mark.parametrize(
    ("run", "right"), [(rounded_products, {"tensorfloat32"}), (one_key_less, set())], ids=["right", "wrong"]
)
def test_products_of_tf32(run: Any, right: set[str], pallas_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TF32 is allowed for float32, it is no fault; where it is not, it is one. They are different kernels."""
    monkeypatch.setattr(pallas_runs, "_by", {"forward": run})
    monkeypatch.setattr(selftest, "_SIZES", GPU_SIZES._replace(rows=40, group=2))
    reasons = {}
    for precision in ("tensorfloat32", "highest"):
        with jax.default_matmul_precision(precision):
            reasons[precision] = why_not("pallas", *[long(np.float32)] * 3, is_causal=True, device=RTX)
    assert {name for name, reason in reasons.items() if reason is None} == right, reasons


def test_what_the_doctor_tests_of_pallas(pallas_runs: Runs) -> None:
    """Every row of the table of block sizes, every dtype, every kind of mask; not all of their combinations."""
    names = [entry for _, kernels, _, _ in pallas.unseen_kernels(RTX) for _, entry in kernels]
    assert len(names) == len(set(names))
    kinds = [f"{mask}{cap}" for mask in ("full", "band", "bounds") for cap in ("", "_softcap")]
    operands = [f"{dtype}_{width}_{width}" for dtype in ("bfloat16", "tf32") for width in (64, 128, 256)]
    tested = [*itertools.product(["bfloat16_128_128"], kinds)]
    tested += itertools.product([*operands, "float16_64_64"], ["bounds_softcap"])
    kernels = [f"fa4_{kernel.replace(' ', '_')}" for kernel in blocks.KERNELS]
    assert set(names) == {"_".join((kernel, *of)) for kernel in kernels for of in tested}
    assert pallas.unseen_kernels(H200) == []


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that nothing has been seen on any GPU."""
    monkeypatch.delenv(selftest.SWITCH, raising=False)
    for name, value in (("SEEN", {}), ("_faults", {}), ("_warned", set())):
        monkeypatch.setattr(selftest, name, value)


@pytest.mark.gpu
@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("implementation", ["cuda", "pallas"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, np.float32])
def test_on_a_gpu_that_is_said_to_be_unseen(dtype: Any, implementation: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, next(lengths), 2, 64)).astype(dtype)
    want = jax.grad(lambda x: loss(x, implementation="tiled"))(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SelfTestWarning)
        got = jax.jit(jax.grad(lambda x: loss(x, implementation=implementation)))(x)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.05, atol=0.05)
    fast = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}.get(selftest.capability(jax.devices()[0]))
    files = (
        ["pallas.forward_kernel", *["pallas.backward_kernels"] * 2]
        if implementation == "pallas"
        else ["sm80_forward", *["sm80_backward"] * 3]
        if fast is None or dtype == np.float32
        else [f"{fast}_forward", "backward_rows", f"{fast}_backward", "backward_rows"]
    )
    assert [file for kernels, _ in selftest._faults for file, _ in kernels] == files
    assert set(selftest._faults.values()) == {None}


@pytest.mark.gpu
@pytest.mark.usefixtures("unseen")
def test_pallas_with_tf32_on_a_gpu_that_is_said_to_be_unseen() -> None:
    """All of one width, whatever `jax.default_matmul_precision` the other tests have."""
    device, of = jax.devices()[0], (np.dtype(np.float32), (64, 64))
    passes = [one for one in pallas.PASSES.values() if one.precision == selftest.TF32]
    for tested, kernels, dtype, widths in selftest.unseen(passes, [of], device):
        assert selftest.fault(tested, kernels, dtype, widths, device) is None
    assert len(selftest._faults) == 12


@pytest.mark.gpu
@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize(("implementation", "module"), [("cuda", cuda), ("pallas", pallas)])
def test_a_planted_fault_on_a_gpu(implementation: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, right in module.PASSES.items():
        if right.name == "forward":
            run = lambda *x, right=right: off_by_a_tenth(right.run(*x))  # noqa: E731
            monkeypatch.setitem(module.PASSES, key, right._replace(run=run))
    x = np.random.default_rng(0).standard_normal((1, next(lengths), 2, 64)).astype(jnp.bfloat16)
    if implementation == "cuda":
        with pytest.warns(SelfTestWarning, match=r"out is off by 0\.1"):
            got = attend(x)
        want = attend(x, implementation=passes(None, x, x, x, is_causal=True)[0])
        np.testing.assert_array_equal(got, want)
    with pytest.raises(NotImplementedError, match=rf"'{implementation}' failed its self-test.*out is off by 0\.1"):
        attend(x, implementation=implementation)
