"""`python -m jax_fa4` examines an installation: prints what there is and what would run, and tests what does.

It prints versions, devices, the CUDA driver, the kernels of this build and where they have been seen to run; on other
GPUs it runs self-tests. Then it prints which implementation calls of a few models would run on the default device,
and why not the others; and compares outputs, lse and gradients with naive attention in float64. The exit status is 0,
and the last line says so, only if nothing is missing and everything is right.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_fa4 import attention, cuda, dispatch, native, pallas, selftest, why_not
from jax_fa4.attention import passes

Results = dict[str, np.ndarray]
"""`out`, `lse`, and the gradients of query, key, value and sinks under those names."""


class Shape(NamedTuple):
    """Sizes in the vocabulary of `attention`."""

    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    value_width: int


@dataclasses.dataclass(frozen=True)
class Check:
    """One call of `attention` whose results are compared; `arguments` are those besides query, key and value."""

    name: str
    dtype: str
    shape: Shape
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


def _int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


_MODELS: tuple[tuple[str, Shape, dict[str, Any]], ...] = (
    ("Llama-3 8B, 8192 tokens", Shape(1, 8192, 8192, 32, 8, 128, 128), {"is_causal": True}),
    (
        "Gemma-2 9B, a local layer",
        Shape(1, 8192, 8192, 16, 8, 256, 256),
        {"is_causal": True, "local_window_size": (4095, 0), "softcap": 50.0},
    ),
    (
        "gpt-oss 20B, a local layer",
        Shape(1, 8192, 8192, 64, 8, 64, 64),
        {"is_causal": True, "local_window_size": (127, 0), "sinks": jax.ShapeDtypeStruct((64,), np.float32)},
    ),
    ("DeepSeek-V3, prefill", Shape(1, 4096, 4096, 128, 128, 192, 128), {"is_causal": True}),
    (
        "BERT, padded",
        Shape(32, 512, 512, 12, 12, 64, 64),
        {"key_value_seq_lengths": jax.ShapeDtypeStruct((32,), np.int32)},
    ),
    (
        "T5, with a bias",
        Shape(16, 512, 512, 12, 12, 64, 64),
        {"bias": jax.ShapeDtypeStruct((1, 12, 512, 512), np.float32), "scale": 1.0},
    ),
)

# Together: every dtype that kernels have, every kind of mask, lengths that divide no tile, and rows that see nothing.
_CHECKS = (
    Check("full", "bfloat16", Shape(1, 128, 128, 2, 2, 64, 64)),
    Check("causal, grouped heads", "bfloat16", Shape(2, 130, 130, 8, 2, 128, 128), {"is_causal": True}),
    Check("causal, one key head", "float16", Shape(1, 100, 100, 6, 1, 64, 64), {"is_causal": True}),
    Check("odd lengths and width", "float32", Shape(2, 67, 129, 2, 2, 40, 40)),
    Check("one row, one key", "bfloat16", Shape(1, 1, 1, 1, 1, 64, 64)),
    Check("window", "bfloat16", Shape(1, 200, 200, 4, 2, 64, 64), {"local_window_size": (40, 7)}),
    Check("causal window, width 256", "float16", Shape(1, 150, 150, 2, 1, 256, 256), {"local_window_size": (50, 0)}),
    Check(
        "lengths, one of them 0",
        "bfloat16",
        Shape(3, 90, 140, 2, 2, 64, 64),
        {"query_seq_lengths": _int32(90, 33, 5), "key_value_seq_lengths": _int32(100, 0, 140)},
    ),
    Check(
        "segments",
        "bfloat16",
        Shape(1, 150, 150, 2, 2, 64, 64),
        {
            "is_causal": True,
            "query_segment_ids": np.repeat(_int32(3, 0, 5), 50)[None],
            "key_value_segment_ids": np.repeat(_int32(3, 0, 5), 50)[None],
        },
    ),
    Check("soft cap", "float32", Shape(1, 70, 70, 2, 2, 64, 64), {"is_causal": True, "softcap": 2.0}),
    Check("sinks", "bfloat16", Shape(1, 80, 80, 4, 1, 64, 64), {"sinks": np.array([-1, 0, 2, 5], np.float32)}),
    Check(
        "few rows at the end",
        "bfloat16",
        Shape(2, 3, 150, 4, 1, 128, 128),
        {"is_causal": True, "query_offset": "end"},
    ),
    Check("keys wider than values", "bfloat16", Shape(1, 140, 140, 2, 2, 192, 128), {"is_causal": True}),
)
# An emulated GPU runs a hundred thousand times slower than a real one.
_EMULATED_CHECK = Check("emulated GPU", "bfloat16", Shape(1, 20, 20, 2, 1, 64, 64), {"is_causal": True})


def main() -> int:
    """Prints the whole examination; the exit status is 1 if anything is missing or wrong."""
    try:
        jax.devices()
    except Exception as error:  # JAX raises whatever a plugin does
        print(f"JAX has no device here (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}): {error}")
        return 1
    problems = [*_print_installation(), *_print_self_tests(), *_print_choices(), *_print_checks()]
    if not problems:
        print("\nAll is well: jax_fa4 gives right results on this machine.")
        return 0
    print("\nWhat is wrong:")
    for problem in problems:
        print(textwrap.fill(problem, 118, initial_indent="  - ", subsequent_indent="    "))
    print(f"jax_fa4 is NOT well on this machine: {len(problems)} problem{'s' if problems[1:] else ''}, listed above.")
    return 1


def _print_installation() -> Iterator[str]:
    """Prints versions, devices, extension, driver and kernels; yields problems."""
    versions = [f"{name} {_version(name)}" for name in ("jax_fa4", "jax", "jaxlib")]
    print(f"Python {platform.python_version()}, " + ", ".join(versions))
    print("devices:   " + "; ".join(map(_describe, jax.devices())))
    try:
        extension = native.extension()
    except ImportError as error:
        print("extension: missing")
        yield str(error)
        return
    major, minor = extension.ffi_api_version()
    print(f"extension: {extension.__file__}, XLA FFI {major}.{minor}")
    driver = extension.cuda_driver_info()
    on_gpu = any(device.platform == "gpu" for device in jax.devices())
    if driver["why_not"] is not None:
        print(f"driver:    {driver['why_not']}")
        if on_gpu:
            yield f"JAX has a GPU, but its driver cannot be used: {driver['why_not']}"
    else:
        gpus = ", ".join("{name} (compute capability {}.{})".format(*_pair(gpu), **gpu) for gpu in driver["gpus"])
        print("driver:    CUDA {}.{}, {}".format(*driver["cuda_version"], gpus or "no GPU"))
        if driver["gpus"] and not on_gpu:
            print("           JAX does not use these GPUs: for that, install jax[cuda13] or jax[cuda12].")
    builds: dict[str, list[str]] = {}
    for kernel, target in extension.kernel_builds():
        builds.setdefault(kernel, []).append(target)
    for i, (kernel, targets) in enumerate(sorted(builds.items())):
        print(f"{'' if i else 'kernels:':10} {kernel} for {', '.join(targets)}")
    if not builds:
        print("kernels:   none")
    tested = [*sorted(x for x in builds if x.endswith(("_forward", "_backward", "_rows"))), *pallas.FILES]
    for i, kernel in enumerate(tested):
        gpus = ", ".join("{}.{}".format(*gpu) for gpu in selftest.SEEN.get(kernel, ()))
        where = f"on GPUs of compute capability {gpus}" if gpus else "on no GPU yet"
        print(f"{'' if i else 'seen:':10} {kernel} {where}")
    missing = " and ".join(kernels for kernels in cuda.KERNELS if kernels not in builds)
    for fault in (*([f"the kernels {missing} are missing."] if missing else []), *native.kernel_faults()):
        yield f"Reinstall jax_fa4, from a wheel or with `pip install .` in its source tree: {fault}"


def _pair(gpu: dict[str, Any]) -> tuple[int, int]:
    major, minor = gpu["compute_capability"]
    return major, minor


def _print_self_tests() -> Iterator[str]:
    """Tests the kernels that have not been seen on GPUs like those here; yields problems."""
    try:
        is_off = selftest.is_off()
    except ValueError as error:
        yield str(error)
        return
    gpus = [device for device in jax.local_devices() if cuda.why_not_gpu("cuda", device) is None]
    for device in {selftest.capability(device): device for device in gpus}.values():
        unseen = [] if native.why_not() is not None else cuda.unseen_kernels(device)
        unseen += pallas.unseen_kernels(device)
        if not unseen:
            print(f"\nAll kernels have been seen on GPUs like {device.device_kind}.")
        elif is_off:
            print(
                f"\n{len(unseen)} kernels are neither seen on {device.device_kind} nor tested: {selftest.SWITCH} is 0."
            )
        else:
            print(f"\nSelf-tests of kernels that have not been seen on {device.device_kind} before:")
            for tested, kernels, dtype, widths in unseen:
                fault = selftest.fault(tested, kernels, dtype, widths, device)
                entries = ", ".join(entry for _, entry in kernels)
                print(f"  {entries:105} {'right' if fault is None else 'WRONG'}", flush=True)
                if fault is not None:
                    yield fault


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed, only imported)"


def _describe(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    return f"{device.platform} {device.id}: {device.device_kind}" + (f", sm {capability}" if capability else "")


def _print_choices() -> Iterator[str]:
    """Prints what would run calls of models in bfloat16, and why not the others; yields problems."""
    print("\nWhat implementation=None runs on the default device, in bfloat16:")
    reasons: dict[str, list[str]] = {}
    for name, shape, arguments in _MODELS:
        operands = _shapes(shape, "bfloat16")
        whys = {one: why_not(one, *operands, **arguments) for one in _names()}
        try:
            forward, backward = passes(None, *operands, **arguments)
        except NotImplementedError as error:
            print(f"  {name:28} nothing")
            yield f"Nothing can run {name}: {error}"
        else:
            print(f"  {name:28} {forward if forward == backward else f'{forward}, backward {backward}'}")
        for one, why in whys.items():
            if why is not None:
                reasons.setdefault(f"{one}: {why}", []).append(name)
    for why, names in reasons.items():
        where = "any of them" if len(names) == len(_MODELS) else "; ".join(names)
        text = f"not {where}, by {why}"
        print(textwrap.fill(text, 118, initial_indent="    ", subsequent_indent="      "))


def _names() -> list[str]:
    """Every implementation, by one name each."""
    names: dict[Any, str] = {}
    for name, module in dispatch.NAMES.items():
        names.setdefault(module, name)
    return list(names.values())


def _shapes(shape: Shape, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    batch, rows, keys, heads, kv_heads, width, value_width = shape
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    return (
        struct((batch, rows, heads, width)),
        struct((batch, keys, kv_heads, width)),
        struct((batch, keys, kv_heads, value_width)),
    )


def _print_checks() -> Iterator[str]:
    """Runs the checks and prints how far results are off; yields problems."""
    print("\nOutputs, lse and gradients, and the largest share of the allowed error that an element has:")
    for check in _CHECKS:
        yield from _print_check(check, _to_run(check))
    if jax.default_backend() != "gpu":
        operands = _shapes(_EMULATED_CHECK.shape, _EMULATED_CHECK.dtype)
        reason = why_not("emulated", *operands, **_EMULATED_CHECK.arguments)
        if reason is None:
            yield from _print_check(_EMULATED_CHECK, ["emulated"])
        else:
            print(textwrap.fill(f"not emulated: {reason}", 118, initial_indent="  ", subsequent_indent="    "))
            if native.why_not() is None and native.extension().emulator_runs_here():
                yield f"Something of the package is missing: {reason}"


def _to_run(check: Check) -> list[str]:
    """Whatever `implementation=None` chooses from: `pallas` only on GPUs."""
    operands = _shapes(check.shape, check.dtype)
    names = ("cuda", "pallas", "tiled") if jax.default_backend() == "gpu" else ("cuda", "tiled")
    return [one for one in names if why_not(one, *operands, **check.arguments) is None]


def _print_check(check: Check, implementations: list[str]) -> Iterator[str]:
    """Compares the results of one call by some implementations."""
    label = f"{check.name} ({check.dtype})"
    if not implementations:
        yield f"Nothing can run the check '{label}'."
        return
    rng = np.random.default_rng(len(label))
    operands = [rng.standard_normal(x.shape).astype(x.dtype) for x in _shapes(check.shape, check.dtype)]
    dout = rng.standard_normal((*operands[0].shape[:3], check.shape.value_width)).astype(operands[0].dtype)
    dlse = rng.standard_normal(operands[0].shape[:3], np.float32)
    seen = _visible(check)
    get = check.arguments.get
    exact = selftest.exact(operands[0], operands[1], operands[2], seen, (dout, dlse), get("softcap"), get("sinks"))
    rounded = _pull_back(functools.partial(_naive, check, seen), check, operands, dout, dlse)
    allowed = selftest.tolerances(check.dtype, exact, rounded)
    for name in implementations:
        try:
            got = _pull_back(functools.partial(_ours, check, name), check, operands, dout, dlse)
        except Exception as error:  # Whatever goes wrong is what the doctor is for.
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            print(f"  {label:40} {name:10} RAISED {reason[:60]}")
            yield f"'{name}' raised in the check '{label}': {reason}"
            continue
        used, wrong = selftest.compare(got, exact, allowed)
        print(f"  {label:40} {name:10} {'WRONG' if wrong else 'right'}  {used:.2f}")
        for sentence in wrong:
            yield f"'{name}' is wrong in the check '{label}': {sentence}"


def _ours(check: Check, implementation: str, query: Any, key: Any, value: Any, sinks: Any) -> tuple[Array, Array]:
    arguments = check.arguments if sinks is None else check.arguments | {"sinks": sinks}
    return attention(query, key, value, implementation=implementation, return_residual=True, **arguments)


def _pull_back(
    function: Callable[..., tuple[Array, Array]],
    check: Check,
    operands: list[np.ndarray],
    dout: np.ndarray,
    dlse: np.ndarray,
) -> Results:
    """Out, lse and gradients, compiled."""

    @jax.jit
    def run(*operands: Any) -> dict[str, Array]:
        (out, lse), pullback = jax.vjp(function, *operands)
        # A row without keys has an lse of -inf, which nothing depends on.
        return {"out": out, "lse": lse} | dict(zip(_INPUTS, pullback((dout, dlse)), strict=True))

    results = run(*operands, check.arguments.get("sinks"))
    return {name: np.asarray(x, np.float64) for name, x in results.items() if x is not None}


_INPUTS = ("query", "key", "value", "sinks")


def _visible(check: Check) -> np.ndarray:
    """Which keys each row sees, (B, T, S)."""
    batch, rows, keys = check.shape[:3]
    get = check.arguments.get
    i, j = np.arange(rows)[:, None], np.arange(keys)
    at = i + (keys - rows if get("query_offset") == "end" else 0)
    seen = np.ones((batch, rows, keys), bool)
    if get("is_causal"):
        seen &= j <= at
    if (window := get("local_window_size")) is not None:
        seen &= (at - window[0] <= j) & (j <= at + window[1])
    if (lengths := get("query_seq_lengths")) is not None:
        seen &= i < lengths[:, None, None]
    if (lengths := get("key_value_seq_lengths")) is not None:
        seen &= j < lengths[:, None, None]
    if (ids := get("query_segment_ids")) is not None:
        seen &= ids[:, :, None] == check.arguments["key_value_segment_ids"][:, None]
    return seen


def _naive(check: Check, seen: np.ndarray, query: Any, key: Any, value: Any, sinks: Any) -> tuple[Array, Array]:
    """Naive attention in the operands' dtype, softmax in float32, as jax.nn computes it."""
    batch, rows, _, heads, kv_heads, width, value_width = check.shape
    q = jnp.reshape(query, (batch, rows, kv_heads, heads // kv_heads, width))
    cap = check.arguments.get("softcap")
    logits = jnp.einsum("btkgd,bskd->bkgts", q, key, preferred_element_type=np.float32) * np.float32(width**-0.5)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    shown = seen[:, None, None]
    logits = jnp.where(shown, logits, np.finfo(np.float32).min)
    lse = jax.nn.logsumexp(logits, axis=-1)
    total = lse if sinks is None else jnp.logaddexp(lse, jnp.reshape(sinks, (kv_heads, -1, 1)))
    probs = jnp.where(shown, jnp.exp(logits - total[..., None]), 0).astype(value.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", probs, value).reshape(batch, rows, heads, value_width)
    some = shown.any(-1)
    lse = jnp.where(some, lse, -np.inf)
    return out, lax.collapse(jnp.moveaxis(lse, 3, 1), 2, 4)
