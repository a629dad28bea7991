"""The self-test of kernels: their first use on hardware on which they have not been seen to run.

Tests of the kernels of `cuda` and `pallas` run on CPUs, emulated and interpreted, and on the GPUs that the project has.
On any other GPU the first call of a process that a kernel would serve has it compute a few small problems first, and
compares the results with exact ones, as far as `tiled` is off. It happens while the call is traced or lowered, but in a
thread of its own, so that no transformation that the call stands in is seen there: the arrays are concrete, and on that
GPU.

On GPUs that `SEEN` lists nothing happens. With `JAX_FA4_SELF_TEST=0` in the environment nothing happens anywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import problem as spec
from jax_fa4 import tiled

Capability = tuple[int, int]
Kernels = tuple[tuple[str, str], ...]
"""What a call launches: the file and the entry of each kernel."""
Results = Mapping[str, np.ndarray]

SEEN: dict[str, tuple[Capability, ...]] = dict.fromkeys(
    (
        *("sm80_forward", "sm80_backward", "sm90_forward", "sm90_backward", "backward_rows"),
        *("pallas.forward_kernel", "pallas.backward_kernels"),
    ),
    ((9, 0),),
)
"""For the files of kernels, the compute capabilities of the GPUs on which their whole test suite has passed."""

SWITCH = "JAX_FA4_SELF_TEST"
"""The variable of the environment that is 0 where nothing is to be tested."""

TF32 = "tensorfloat32"
"""The precision of products that have float32 operands of which 10 bits of the mantissa count."""


class SelfTestWarning(RuntimeWarning):
    """A kernel failed its self-test, and something else runs in its place."""


class Pass(NamedTuple):
    """The forward or the backward of an implementation, to be tested.

    Attributes:
      implementation: its name.
      name: "forward" or "backward".
      kernels: what a problem launches on GPUs of a compute capability; operands may be `jax.ShapeDtypeStruct`s.
      run: the function of the implementation that has this name. It may call `fault`, which tests nothing in a test.
      precision: `jax.default_matmul_precision` for it, "highest" or `TF32`.
      deterministic: whether it launches others for problems that are to be deterministic.
    """

    implementation: str
    name: str
    kernels: Callable[[spec.Problem, spec.Operands, Capability], Kernels]
    run: Callable[..., Any]
    precision: str = "highest"
    deterministic: bool = False


def capability(device: jax.Device) -> Capability:
    """The compute capability of an NVIDIA GPU."""
    major, minor = map(int, str(getattr(device, "compute_capability")).split("."))  # noqa: B009  (mypy knows no GPUs)
    return major, minor


def is_seen(kernels: Kernels, device: jax.Device) -> bool:
    """Whether kernels have been seen to run on such a GPU."""
    return all(capability(device) in SEEN.get(file, ()) for file, _ in kernels)


def is_off() -> bool:
    """Whether the environment says that nothing is to be tested; raises ValueError if what it says is not clear."""
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} in the environment must be 0 or 1, but got {value!r}.")
    return value == "0"


def refuse(
    tested: Pass,
    unsupported_on: Callable[[spec.Problem, spec.Operands, jax.Device], str | None],
    problem: spec.Problem,
    operands: spec.Operands,
    device: jax.Device | None,
) -> None:
    """Raises NotImplementedError with what is wrong with a call's kernels on the GPU at hand, if anything is.

    Where there is none, or its implementation's `unsupported_on` has anything against it, the call may be lowered for
    another.
    """
    if device is None or unsupported_on(problem, operands, device) is not None:
        return
    if (sentence := fault_of(tested, problem, operands, device)) is not None:
        raise NotImplementedError(sentence)


def fault_of(tested: Pass, problem: spec.Problem, operands: spec.Operands, device: jax.Device) -> str | None:
    """What the self-test found wrong with a call's kernels on a device that supports them; or None.

    Unless they have been seen on such a GPU, or were tested in this process before, it runs now.
    """
    if device.platform != "gpu":
        return None
    launched = tested.kernels(problem, operands, capability(device))
    widths = operands.query.shape[3], operands.value.shape[3]
    return fault(tested, launched, operands.query.dtype, widths, device)


def fault(tested: Pass, kernels: Kernels, dtype: Any, widths: tuple[int, int], device: jax.Device) -> str | None:
    """What the self-test found wrong with kernels on a GPU, as a sentence about their implementation; or None.

    Kernels are tested once in a process, on the first GPU of a compute capability, whatever thread asks.

    Args:
      tested: the pass that the kernels are for.
      kernels: as `tested.kernels` tells them.
      dtype: of the operands to test with.
      widths: D and Dv of the operands to test with.
      device: on one that is not a GPU of this process nothing is tested.
    """
    if is_seen(kernels, device) or is_off() or _in_test.here:
        return None
    key = kernels, capability(device)
    with _lock:
        if key not in _faults:
            if not _is_here(device):
                return None
            _faults[key] = _tell(tested, kernels, dtype, widths, device)
        return _faults[key]


def warn(sentence: str, instead: str) -> None:
    """Warns once in a process that the implementation `instead` runs in the place of kernels with this fault."""
    with _lock:
        if sentence in _warned:
            return
        _warned.add(sentence)
    warnings.warn(f"{sentence} implementation='{instead}' runs in its place.", SelfTestWarning, stacklevel=2)


class _InTest(threading.local):
    """Whether this thread is that of a self-test."""

    here = False


_in_test = _InTest()
_lock = threading.Lock()
_faults: dict[tuple[Kernels, Capability], str | None] = {}
_warned: set[str] = set()


def _is_here(device: jax.Device) -> bool:
    try:
        return device in jax.local_devices(backend="gpu")
    except RuntimeError:  # there is no such backend
        return False


def _tell(tested: Pass, kernels: Kernels, dtype: Any, widths: tuple[int, int], device: jax.Device) -> str | None:
    with ThreadPoolExecutor(1, initializer=lambda: setattr(_in_test, "here", True)) as thread:
        try:
            wrong = thread.submit(_wrong, tested, kernels, dtype, widths, device).result()
        except Exception as error:  # Whatever goes wrong is what the test is for.
            lines = str(error).strip().splitlines()
            wrong = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if wrong is None:
        return None
    files = ", ".join(dict.fromkeys(file for file, _ in kernels))
    entries = ", ".join(entry for _, entry in kernels)
    return (
        f"implementation='{tested.implementation}' failed its self-test on {device.device_kind} (compute capability "
        f"{'.'.join(map(str, capability(device)))}), with the kernels {entries} of {files}: {wrong.rstrip('.')}. "
        "They have not been seen to run on such a GPU before: please report this to the maintainers of jax_fa4, "
        f"together with what `python -m jax_fa4` prints. ({SWITCH}=0 in the environment turns the test off.)"
    )


class _Sizes(NamedTuple):
    rows: int  # T
    keys: int  # S
    kv_heads: int  # K
    group: int  # N / K


# Several tiles of rows and keys, the last of each with a tail, and a group that no tile is a multiple of.
_SIZES = _Sizes(140, 300, 2, 6)
_BATCH = 4
_COPIES = 15  # of an element of the batch: more work items than a GPU has multiprocessors
_SOFTCAP = 5.0


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of kernels, on those elements of the batch of which `_bounds` says the same as the call's mask."""

    first: int
    end: int
    mask: str
    wide_out: bool = False
    softcap: float | None = None
    copies: int = 1
    deterministic: bool = False

    def problem(self) -> spec.Problem:
        band = spec.static_band(*_SIZES[:2], *(_band() if self.mask == "band" else (None, None)))
        return spec.Problem(band, self.softcap, deterministic=self.deterministic, wide_out=self.wide_out)

    def cut(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[self.first : self.end]] * self.copies)

    def cut_operands(self, operands: spec.Operands) -> spec.Operands:
        operands = jax.tree.map(self.cut, operands)._replace(scale=operands.scale)
        return operands if self.mask == "arrays" else operands._replace(lower=None, upper=None)


_CALLS = (
    _Call(0, 1, "full", copies=_COPIES),
    _Call(0, 1, "full", wide_out=True),
    _Call(1, 2, "band", copies=_COPIES),
    _Call(2, 4, "arrays", wide_out=True),
    _Call(0, 1, "full", softcap=_SOFTCAP),
    _Call(1, 2, "band", wide_out=True, softcap=_SOFTCAP),
    _Call(2, 4, "arrays", softcap=_SOFTCAP, copies=_COPIES),
)
_DETERMINISTIC_CALLS = (
    _Call(0, 1, "full", deterministic=True),
    _Call(2, 4, "arrays", deterministic=True, copies=_COPIES),
    _Call(1, 2, "band", softcap=_SOFTCAP, deterministic=True),
)


def _calls_of(tested: Pass) -> tuple[_Call, ...]:
    calls = (*_CALLS, *(_DETERMINISTIC_CALLS if tested.deterministic else ()))
    # Whoever goes on computing with a wide out rounds it in the end: cotangents are of what was rounded.
    return calls if tested.name == "forward" else tuple(dataclasses.replace(x, wide_out=False) for x in calls)


def _band() -> tuple[int, int]:
    """Hides keys on both sides of every row."""
    return _SIZES.keys // 7, _SIZES.keys - _SIZES.rows + 1


def _bounds(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The row bounds of the batch: all keys, the band, and any bounds, among which some are of rows without keys."""
    rows, keys = _SIZES[:2]
    lower, upper = np.zeros((_BATCH, rows), np.int32), np.full((_BATCH, rows), keys, np.int32)
    for bounds, distance in zip((lower, upper), _band(), strict=True):
        bounds[1] = np.clip(np.arange(rows) + distance, 0, keys)
    lower[2:], upper[2:] = rng.integers(0, keys + 1, (2, _BATCH - 2, rows))
    return lower, upper


def _operands(rng: np.random.Generator, dtype: Any, width: int, value_width: int) -> spec.Operands:
    rows, keys, kv_heads, group = _SIZES
    query, key, value = (
        rng.standard_normal((_BATCH, *shape), np.float32)
        for shape in ((rows, kv_heads * group, width), (keys, kv_heads, width), (keys, kv_heads, value_width))
    )
    query[:, ::4] *= 8  # Where logits are large, the maximum of a row grows from one tile of keys to the next.
    arrays: tuple[Any, ...] = tuple(x.astype(dtype) for x in (query, key, value))
    arrays += (np.full(1, max(width, 1) ** -0.5, np.float32), *_bounds(rng))
    return spec.Operands(*arrays)


def all_kernels(tested: Pass, dtype: Any, widths: tuple[int, int], gpu: Capability) -> list[Kernels]:
    """All kernels that a pass has for a dtype and widths."""
    operands = _operands(np.random.default_rng(0), dtype, *widths)
    calls = _calls_of(tested)
    return list(dict.fromkeys(tested.kernels(call.problem(), call.cut_operands(operands), gpu) for call in calls))


def unseen(
    passes: Iterable[Pass], operands: Iterable[tuple[Any, tuple[int, int]]], device: jax.Device
) -> list[tuple[Pass, Kernels, Any, tuple[int, int]]]:
    """All kernels of passes that have not been seen on a GPU: the arguments of `fault` that test each there.

    Args:
      passes: some.
      operands: dtypes, each with D and Dv.
      device: a GPU that they support.
    """
    found: dict[Kernels, Any] = {}
    for tested, (dtype, widths) in itertools.product(passes, operands):
        for launched in all_kernels(tested, dtype, widths, capability(device)):
            if not is_seen(launched, device):
                found.setdefault(launched, (tested, launched, dtype, widths))
    return list(found.values())


def _wrong(tested: Pass, kernels: Kernels, dtype: Any, widths: tuple[int, int], device: jax.Device) -> str | None:
    """Runs the calls that kernels serve; returns what is wrong with the results."""
    rng = np.random.default_rng(0)
    operands = _operands(rng, dtype, *widths)
    gpu = capability(device)
    calls = [x for x in _calls_of(tested) if tested.kernels(x.problem(), x.cut_operands(operands), gpu) == kernels]
    if not calls:
        raise LookupError("no call of the self-test launches them")
    query, key, value, _, lower, upper = map(np.asarray, operands[:6])
    rows, position = query.shape[:3], np.arange(_SIZES.keys)
    dout = rng.standard_normal((*rows, widths[1]), np.float32).astype(dtype)
    dlse = rng.standard_normal(rows, np.float32)
    seen = (lower[..., None] <= position) & (position < upper[..., None])

    def run(function: Any, precision: str, name: str, problem: spec.Problem, *arguments: Any) -> Any:
        static = {"with_bias": False} if name == "backward" else {}
        # Whatever the process's own settings are.
        with (
            jax.default_matmul_precision(precision),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.disable_jit(False),
            jax.transfer_guard("allow"),
        ):
            call = jax.jit(function, static_argnums=0, static_argnames=tuple(static))
            return jax.device_get(call(problem, *_put(arguments, device), **static))

    for softcap in dict.fromkeys(call.softcap for call in calls):
        problem = spec.Problem(softcap=softcap)
        arguments: tuple[Any, ...] = (operands,)
        if tested.name == "backward":
            arguments = operands, *run(tiled.forward, "highest", "forward", problem, operands), dout, dlse
        multiplied_as, inexact = _as_multiplied(dtype, tested.precision, arguments)
        found = run(getattr(tiled, tested.name), "highest", tested.name, problem, *inexact)
        want = exact(query, key, value, seen, (dout, dlse) if tested.name == "backward" else None, softcap)
        want["lse"] = np.stack([want["lse"]] * 2, -1)
        allowed = tolerances(multiplied_as, want, _named(tested.name, found))
        for call in calls:
            if call.softcap != softcap:
                continue
            part: list[Any] = [call.cut_operands(operands), *map(call.cut, arguments[1:])]
            got = _named(tested.name, run(tested.run, tested.precision, tested.name, call.problem(), *part))
            _, sentences = compare(got, *({name: call.cut(x) for name, x in y.items()} for y in (want, allowed)))
            if sentences:
                return " ".join(sentences)
    return None


def _as_multiplied(dtype: Any, precision: str, arrays: Any) -> tuple[Any, Any]:
    """A dtype with the mantissa of the numbers that are multiplied, and what products leave of arrays.

    Some tensor cores truncate float32 to TF32, and some libraries round it before. Truncation is the worse.
    """
    if precision != TF32 or dtype != np.float32:
        return dtype, arrays

    def truncated(x: np.ndarray) -> np.ndarray:
        return (x.view(np.uint32) & ~np.uint32(2**13 - 1)).view(np.float32) if np.ndim(x) == 4 else x

    return np.float16, jax.tree.map(truncated, arrays)  # TF32 has float16's mantissa


def _put(arrays: Any, device: jax.Device) -> Any:
    return jax.device_put(arrays, device)


def _named(name: str, found: Any) -> dict[str, np.ndarray]:
    """The results of a pass, by the names that `exact` gives them."""
    if name == "backward":
        found = found._asdict()
        return {name: np.asarray(found[name], np.float64) for name in ("query", "key", "value", "scale")}
    out, lse, rounding = (np.asarray(x, np.float64) for x in found)
    # It is what makes the backward's probabilities add to 1.
    return {"out": out, "lse": np.stack([lse, lse + rounding], -1)}


def exact(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    seen: np.ndarray,
    cotangents: tuple[np.ndarray, np.ndarray] | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Naive attention and its gradients in float64, under the default scale.

    Args:
      query: (B, T, N, D).
      key: (B, S, K, D).
      value: (B, S, K, Dv).
      seen: which keys each row sees, (B, T, S).
      cotangents: of out and lse; without them there are no gradients.
      softcap: as in `attention`.
      sinks: (N,), as in `attention`.

    Returns:
      `out`, `lse`, and the gradients of `query`, `key`, `value`, `scale` (B,) and `sinks` under those names.
    """
    batch, rows, heads, width = query.shape
    kv_heads = key.shape[2]

    def split(x: np.ndarray) -> np.ndarray:  # (B, T, N, ...) to (B, K, N / K, T, ...)
        return np.moveaxis(x.astype(np.float64).reshape(batch, rows, kv_heads, -1, *x.shape[3:]), 1, 3)

    def merge(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x, 3, 1).reshape(batch, rows, heads, *x.shape[4:])

    q = split(query)
    k, v = (np.moveaxis(x.astype(np.float64), 1, 2)[:, :, None] for x in (key, value))
    scale = float(np.float32(max(width, 1) ** -0.5))
    dots = q @ k.mT
    logits, slope = dots * scale, np.ones_like(dots)
    if softcap is not None:
        ratio = np.tanh(logits / softcap)
        logits, slope = softcap * ratio, 1 - ratio**2
    shown = seen[:, None, None]
    some = shown.any(-1)
    logits = np.where(shown, logits, -np.inf)
    top = np.where(some, logits.max(-1, initial=-np.inf), 0)
    weights = np.exp(logits - top[..., None])
    total = np.where(some, weights.sum(-1), 1)
    lse, probs = np.where(some, top + np.log(total), -np.inf), weights / total[..., None]
    share = np.ones_like(lse)  # of a row's softmax that a sink leaves
    if sinks is not None:
        share = 1 / (1 + np.exp(sinks.astype(np.float64).reshape(kv_heads, -1, 1) - np.where(some, lse, np.inf)))
    heavy = probs * share[..., None]
    results = {"out": merge(heavy @ v), "lse": merge(lse)}
    if cotangents is None:
        return results
    dout, dlse = map(split, cotangents)
    dheavy = dout @ v.mT
    delta = (heavy * dheavy).sum(-1)
    dlogits = (heavy * (dheavy - delta[..., None]) + probs * dlse[..., None]) * slope
    dkey, dvalue = (np.moveaxis((x.mT @ y).sum(2), 1, 2) for x, y in ((dlogits, q), (heavy, dout)))
    results |= {
        "query": merge(dlogits @ k) * scale,
        "key": dkey * scale,
        "value": dvalue,
        "scale": (dlogits * dots).sum((1, 2, 3, 4)),
    }
    if sinks is not None:
        results["sinks"] = -((1 - share) * delta).sum((0, 3)).reshape(heads)
    return results


def tolerances(dtype: Any, want: Results, rounded: Results) -> dict[str, np.ndarray]:
    """How far results may be off, element by element.

    That is twice what attention in the same dtype is off, plus 1.5 spacings of that dtype (for lse, of float32), for
    where that is little by luck. Both count in units of a size: in out and lse, of the largest number in an element's
    row, plus the average of all; in gradients, whose terms cancel, of the largest of all numbers.

    Args:
      dtype: of the operands.
      want: the exact results, as `exact` gives them.
      rounded: those of attention in the operands' dtype.
    """
    allowed = {}
    for name, x in rounded.items():
        finite = np.isfinite(want[name])
        sizes = np.where(finite, np.abs(want[name]), 0)
        unit = sizes.max(-1, keepdims=True) + sizes.mean() if name in ("out", "lse") else sizes.max()
        unit = np.broadcast_to(unit + np.finfo(np.float32).tiny, sizes.shape)
        with np.errstate(invalid="ignore"):
            error = np.where(finite, np.abs(x - want[name]), 0)
        spacing = float(jnp.finfo(np.float32 if name == "lse" else dtype).eps)
        allowed[name] = (2 * (error / unit).max(initial=0) + 1.5 * spacing) * unit
    return allowed


def compare(got: Results, want: Results, allowed: Results) -> tuple[float, list[str]]:
    """The largest share of what is allowed that an element is off, and a sentence for each result that is wrong."""
    used, wrong = 0.0, []
    for name, x in got.items():
        with np.errstate(invalid="ignore"):
            error = np.where(x == want[name], 0, np.abs(x - want[name]))
        error = np.nan_to_num(error, nan=np.inf)
        share = np.divide(error, allowed[name], out=np.zeros(error.shape), where=error > 0)
        worst = np.unravel_index(share.argmax(), share.shape)
        used = max(used, float(share[worst]))
        if not share[worst] <= 1:
            result = name if name in ("out", "lse") else f"the gradient of {name}"
            wrong.append(f"{result} is off by {error[worst]:.2g}, more than {allowed[name][worst]:.2g}.")
    return used, wrong
