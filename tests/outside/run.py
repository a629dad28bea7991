"""Run attention kernels by others in the emulator: the proof from outside.

    python tests/outside/run.py [--seeds 20] [--ptx FOLDER]

Installs FlashAttention-4 and Triton into an environment of their own, compiles their kernels to PTX (generate.py; no
GPU is needed), runs each in relaxed mode over many seeds, and compares with attention in float64. Exits with 1 unless
every result is right and no run has a report. With --ptx, kernels that were generated before are used.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from expressions import evaluate

from jax_fa4.emulated import Kernel, Pointer, TensorMap, mutation

HERE = Path(__file__).parent
REQUIREMENTS = ["flash-attn-4==4.0.0b36", "torch", "numpy", "triton"]
FORMATS = {"u8": "<B", "u32": "<I", "i32": "<i", "i64": "<q", "u64": "<Q", "f32": "<f"}
FLOATS = {"lse", "lse_log2", "dpsum", "dq_accum"}  # float32; the others are bfloat16, and semaphores int32

STAGES = ("preprocess", "backward", "postprocess")

# (B, H, Sq, Sk) and SMs: whole blocks; tails of both lengths; more tiles than SMs.
PROBLEMS = [((1, 2, 512, 640), 148), ((1, 2, 300, 500), 148), ((2, 3, 700, 260), 4)]


def generate() -> Path:
    """Installs the compilers and generates all kernels; returns the folder."""
    folder = Path(tempfile.mkdtemp(prefix="outside-"))
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--pre", *REQUIREMENTS], check=True)
    subprocess.run([python, HERE / "generate.py", folder / "ptx"], check=True)
    return folder / "ptx"


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Attention and its log-sum-exp in float64, of (B, S, H, D); causal masks are aligned at the end."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    logits = np.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if causal:
        rows, keys = logits.shape[-2:]
        logits = np.where(np.arange(keys) <= np.arange(rows)[:, None] + keys - rows, logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights / total, v), (top + np.log(total))[..., 0]


class Stage:
    """One kernel with the description of its launch."""

    def __init__(self, path: Path) -> None:
        self.description: dict[str, Any] = json.loads(path.read_text())
        self.kernel = Kernel(path.with_suffix(".ptx").read_text())
        self.variant: dict[str, Any] = self.description["variant"]

    def run(
        self,
        tensors: dict[str, np.ndarray],
        sizes: dict[str, Any],
        seed: int,
        sms: int,
        max_instructions: int = 1 << 28,
    ) -> tuple[Any, float]:
        """Launches the kernel; returns the run and its seconds."""
        description = self.description
        variables = {**sizes, "SMS": sms, "scale": sizes["D"] ** -0.5}
        value = lambda expression: evaluate(str(expression), variables)  # noqa: E731
        arguments = []
        for parameter, (_, _, size) in zip(description["parameters"], self.kernel.parameters, strict=True):
            if "map" in parameter:
                arguments.append(self._map(parameter["map"], tensors, value))
                continue
            fields: dict[int, tuple[Any, int]] = {}
            for field in parameter["fields"]:
                width = struct.calcsize(FORMATS[field["type"]])
                if found := re.fullmatch(r"address\['?(\w+)'?\]", str(field["value"])):
                    fields[field["offset"]] = Pointer(tensors[found[1]]), width
                else:
                    data = struct.pack(FORMATS[field["type"]], value(field["value"]))
                    fields[field["offset"]] = data, width
            arguments.append(fields if size else b"")
        launch = description["launch"]
        start = time.perf_counter()
        run = self.kernel.launch(
            arguments,
            grid=tuple(int(value(x)) for x in launch["grid"]),
            block=tuple(launch["block"]),
            cluster=tuple(launch["cluster"]),
            dynamic_shared_bytes=launch["dynamic_shared"],
            seed=seed,
            mode="relaxed",
            sm_count=sms,
            max_instructions=max_instructions,
        )
        return run, time.perf_counter() - start

    @staticmethod
    def _map(about: dict[str, Any], tensors: dict[str, np.ndarray], value: Any) -> TensorMap:
        return TensorMap(
            tensors[about["tensor"]],
            box=tuple(about["box"]),
            dims=tuple(map(value, about["dims"])),
            strides=tuple(map(value, about["strides_bytes"])),
            swizzle=int(about["swizzle"].removesuffix("B")) if about["swizzle"] != "none" else 0,
        )


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def passed(
    variant: dict[str, Any],
    problem: tuple[int, int, int, int],
    sms: int,
    errors: list[float],
    limit: float,
    seconds: list[float],
    reports: Counter[str],
) -> bool:
    """Prints a row for one problem; returns whether all errors are below the limit and no run had a report."""
    worst = np.max(errors)  # NaN if any is
    good = bool(worst < limit) and not reports
    print(
        f"{variant['name']:32} {'x'.join(map(str, problem)):14} {sms:4} SMs {len(seconds):3} seeds: largest error "
        f"{worst:.1e}, {sum(reports.values())} reports, {np.median(seconds) * 1e3:.0f} ms {'' if good else 'WRONG'}",
        flush=True,
    )
    for report in list(reports)[:3]:
        print(report)
    return good


def forward(stage: Stage, seeds: int) -> bool:
    """Runs a forward kernel on all problems; prints a row for each."""
    fine = True
    width = stage.variant["head_dim"]
    for (batch, heads, rows, keys), sms in PROBLEMS:
        rng = np.random.default_rng(0)
        draw = lambda length: rng.standard_normal((batch, length, heads, width)).astype(ml_dtypes.bfloat16)  # noqa: B023, E731
        tensors = {"q": draw(rows), "k": draw(keys), "v": draw(keys)}
        for x in tensors.values():
            x.flags.writeable = False
        sizes = {"B": batch, "H": heads, "Sq": rows, "Sk": keys, "D": width}
        if stage.variant["causal"] and rows > keys:
            continue  # rows that see nothing, which these kernels leave undefined
        want, want_lse = attention(*tensors.values(), stage.variant["causal"])
        errors, seconds, reports = [], [], Counter[str]()
        for seed in range(seeds):
            tensors["o"] = np.full((batch, rows, heads, width), np.nan, ml_dtypes.bfloat16)
            tensors["lse"] = np.full((batch, heads, rows), np.nan, np.float32)
            run, took = stage.run(tensors, sizes, seed, sms)
            errors.append(relative(tensors["o"], want))
            if stage.variant["lse"]:
                errors.append(float(np.abs(tensors["lse"] - want_lse).max()))
            seconds.append(took)
            reports.update(str(report) for report in run.reports)
        # bfloat16 probabilities and outputs each round by 2^-9 at most.
        fine &= passed(stage.variant, (batch, heads, rows, keys), sms, errors, 2 * 2**-9, seconds, reports)
    return fine


def gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, causal: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Out, its log-sum-exp, and dq, dk, dv in float64."""
    out, lse = attention(q, k, v, causal)
    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    logits = np.einsum("bthd,bshd->bhts", q, k) * scale
    probs = np.exp(logits - lse[..., None])
    if causal:
        rows, keys = logits.shape[-2:]
        probs = np.where(np.arange(keys) <= np.arange(rows)[:, None] + keys - rows, probs, 0)
    delta = np.einsum("bthd,bthd->bht", do, out)
    dlogits = probs * (np.einsum("bthd,bshd->bhts", do, v) - delta[..., None]) * scale
    return (
        out,
        lse,
        np.einsum("bhts,bshd->bthd", dlogits, k),
        np.einsum("bhts,bthd->bshd", dlogits, q),
        np.einsum("bhts,bthd->bshd", probs, do),
    )


def backward(stages: list[Stage], seeds: int) -> bool:
    """Runs the kernels of a backward one after the other on all problems; prints a row for each."""
    fine = True
    variant = stages[0].variant
    width = variant["head_dim"]
    for (batch, heads, rows, keys), sms in PROBLEMS:
        if variant["causal"] and rows > keys:
            continue
        sizes = {"B": batch, "H": heads, "Sq": rows, "Sk": keys, "D": width}
        rng = np.random.default_rng(0)
        draw = lambda length: rng.standard_normal((batch, length, heads, width)).astype(ml_dtypes.bfloat16)  # noqa: B023, E731
        given = {"q": draw(rows), "k": draw(keys), "v": draw(keys), "do": draw(rows)}
        out, lse, *want = gradients(*given.values(), variant["causal"])
        given |= {
            "o": np.ascontiguousarray(out.astype(ml_dtypes.bfloat16)),
            "lse": np.ascontiguousarray(lse.astype(np.float32)),
        }
        for x in given.values():
            x.flags.writeable = False
        errors, seconds, reports = [], [], Counter[str]()
        for seed in range(seeds):
            tensors = dict(given)
            for name, about in {n: a for stage in stages for n, a in stage.description["tensors"].items()}.items():
                if name not in tensors:
                    shape = [int(evaluate(str(axis), sizes)) for axis in about["axes"]]
                    dtype = np.int32 if name == "semaphore" else np.float32 if name in FLOATS else ml_dtypes.bfloat16
                    tensors[name] = np.zeros(shape, dtype) if name == "semaphore" else np.full(shape, np.nan, dtype)
            took = 0.0
            for stage in stages:
                run, more = stage.run(tensors, sizes, seed, sms)
                took += more
                reports.update(str(report) for report in run.reports)
            errors += [relative(tensors[name], x) for name, x in zip(("dq", "dk", "dv"), want, strict=True)]
            seconds.append(took)
        fine &= passed(variant, (batch, heads, rows, keys), sms, errors, 4 * 2**-9, seconds, reports)
    return fine


def mutate(path: Path, seeds: int) -> None:
    """Plants faults in a forward kernel, one at a time, and prints which are noticed how."""
    stage = Stage(path)
    batch, heads, rows, keys, sms = 1, 2, 512, 640, 1  # several tiles for one CTA, if it takes more than one
    width = stage.variant["head_dim"]
    rng = np.random.default_rng(0)
    draw = lambda length: rng.standard_normal((batch, length, heads, width)).astype(ml_dtypes.bfloat16)  # noqa: E731
    # Large logits, whose row maxima grow from block to block: otherwise out would never be rescaled.
    tensors = {"q": draw(rows) * ml_dtypes.bfloat16(6), "k": draw(keys), "v": draw(keys)}
    for x in tensors.values():
        x.flags.writeable = False
    sizes = {"B": batch, "H": heads, "Sq": rows, "Sk": keys, "D": width}
    want, _ = attention(*tensors.values(), stage.variant["causal"])

    def try_out(kernel: Kernel, seed: int) -> str | None:
        stage.kernel = kernel
        tensors["o"] = np.full((batch, rows, heads, width), np.nan, ml_dtypes.bfloat16)
        tensors["lse"] = np.full((batch, heads, rows), np.nan, np.float32)
        run, _ = stage.run(tensors, sizes, seed, sms, max_instructions=1 << 21)
        if run.reports:
            return run.reports[0].kind
        return None if relative(tensors["o"], want) < 2 * 2**-9 else "wrong result"

    ptx = path.with_suffix(".ptx").read_text()
    for seed in range(seeds):
        assert (how := try_out(Kernel(ptx), seed)) is None, f"without a fault, seed {seed}: {how}"
    start = time.perf_counter()
    verdicts = list(mutation.judge(ptx, mutation.mutants(ptx), try_out, seeds))
    print(mutation.table(verdicts))
    print(f"{len(verdicts)} mutants, {seeds} seeds each, in {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--ptx", type=Path, help="a folder that generate.py has filled")
    parser.add_argument("--mutate", metavar="NAME", help="plant faults in this forward kernel instead")
    options = parser.parse_args()
    folder = options.ptx or generate()
    if options.mutate:
        mutate(folder / f"{options.mutate}.forward.json", options.seeds)
        return
    fine = True
    for path in sorted(folder.glob("*.forward.json")):
        fine &= forward(Stage(path), options.seeds)
    for path in sorted(folder.glob("*.backward.json")):
        paths = [path.with_name(path.name.replace(".backward.", f".{name}.")) for name in STAGES]
        fine &= backward([Stage(path) for path in paths], options.seeds)
    print("every result is right and no run has a report" if fine else "FAILED")
    sys.exit(not fine)


if __name__ == "__main__":
    main()
