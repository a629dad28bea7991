"""Run attention kernels by others in the emulator: the proof from outside.

    python tests/outside/run.py [--seeds 20] [--workers N] [--ptx FOLDER]

Installs FlashAttention-4 and Triton into a temporary environment, compiles their kernels to PTX (generate.py; no GPU is
needed), runs each in relaxed mode over many seeds, and compares with attention in float64. Needs jax_fa4 installed, a C
compiler, about 3 GB of downloads and 10 GB of disk. Exits with 1 unless every result is right and no run has a report,
and with 2 if there are no kernels to run.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from expressions import evaluate

from jax_fa4.emulated import Kernel, Pointer, TensorMap, mutation

HERE = Path(__file__).parent
DISK_BYTES = 10 << 30
FORMATS = {"u8": "<B", "u32": "<I", "i32": "<i", "i64": "<q", "u64": "<Q", "f32": "<f"}
FLOATS = {"lse", "lse_log2", "dpsum", "dq_accum"}  # float32; the others are bfloat16, and semaphores int32

STAGES = ("preprocess", "backward", "postprocess")
# Of a result. bfloat16 probabilities and outputs each round by 2^-9 at most, and a gradient passes twice as many.
LIMITS = {"forward": 2 * 2**-9, "backward": 4 * 2**-9}


@dataclass(frozen=True)
class Problem:
    """Sizes of attention (batch, heads, queries, keys), and the GPU that it runs on."""

    batch: int
    heads: int
    rows: int
    keys: int
    sms: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads}x{self.rows}x{self.keys}"

    def blocks(self, causal: bool) -> int:
        """Blocks of 256 queries by 128 keys that have a score."""
        per_head = 0
        for start in range(0, self.rows, 256):
            seen = self.keys - self.rows + min(start + 256, self.rows) if causal else self.keys
            per_head += math.ceil(seen / 128)
        return self.batch * self.heads * per_head


# The largest kernels take 512 queries and two SMs a tile: three problems have more tiles than SMs for all of them.
PROBLEMS = (
    Problem(1, 2, 512, 640, sms=148),  # whole blocks
    Problem(1, 2, 300, 500, sms=148),  # tails of both lengths
    Problem(2, 3, 700, 260, sms=4),  # more queries than keys
    Problem(2, 3, 260, 700, sms=4),
    Problem(3, 2, 390, 390, sms=4),  # the whole triangle, if causal
)


def give_up(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def generate(folder: Path, workers: int) -> None:
    """Installs the compilers into a temporary environment and generates all kernels into the folder."""
    compiler = shlex.split(os.environ.get("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        give_up(f"FlashAttention-4 needs a C compiler, but there is no '{compiler}' on PATH: install one, or set CC.")
    with tempfile.TemporaryDirectory(prefix="outside-") as name:
        scratch = Path(name)
        if shutil.disk_usage(scratch).free < DISK_BYTES:
            give_up(f"The compilers need {DISK_BYTES >> 30} GiB in {scratch.parent}: make room, or set TMPDIR.")
        # All that the compilers keep goes where it is removed, and nothing of this environment reaches theirs.
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        variables |= {"TMPDIR": name, "XDG_CACHE_HOME": f"{name}/cache"}
        python = scratch / "venv/bin/python"

        def call(doing: str, failed: str, *arguments: str | Path) -> None:
            print(doing, file=sys.stderr, flush=True)
            if subprocess.run([python, *arguments], env=variables, stdout=sys.stderr, check=False).returncode:
                give_up(failed)

        try:
            venv.create(scratch / "venv", with_pip=True, symlinks=True)
        except subprocess.CalledProcessError:
            give_up("No virtual environment could be made: install Python's venv and ensurepip modules.")
        call(
            "Installing FlashAttention-4 and Triton: about 3 GB to download.",
            "pip could not install tests/outside/requirements.txt. That takes a package index within reach, x86-64 "
            "Linux, and a Python from 3.11 to 3.13. Or generate the kernels elsewhere, and name their folder with "
            "--ptx.",
            *("-m", "pip", "install", "--no-compile", "--progress-bar=off", "-r", HERE / "requirements.txt"),
        )
        call(
            "Compiling their kernels to PTX: about 20 seconds each.",
            "The kernels could not be generated.",
            *(HERE / "generate.py", scratch / "ptx", "--workers", str(workers)),
        )
        shutil.copytree(scratch / "ptx", folder)


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
        """Launches the kernel; returns the run and its seconds of processor time."""
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
        start = time.process_time()
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
        return run, time.process_time() - start

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


Tensors = dict[str, np.ndarray]


@functools.lru_cache(maxsize=2)
def data(problem: Problem, width: int, causal: bool, stage: str) -> tuple[Tensors, Tensors]:
    """What a kernel is given, and what it is to compute, by the names of the tensors."""
    rng = np.random.default_rng(0)

    def draw(length: int) -> np.ndarray:
        return rng.standard_normal((problem.batch, length, problem.heads, width)).astype(ml_dtypes.bfloat16)

    given = {"q": draw(problem.rows), "k": draw(problem.keys), "v": draw(problem.keys)}
    if stage == "forward":
        want = dict(zip(("o", "lse"), attention(*given.values(), causal), strict=True))
    else:
        given["do"] = draw(problem.rows)
        out, lse, *computed = gradients(*given.values(), causal)
        want = dict(zip(("dq", "dk", "dv"), computed, strict=True))
        given["o"] = np.ascontiguousarray(out.astype(ml_dtypes.bfloat16))
        given["lse"] = np.ascontiguousarray(lse.astype(np.float32))
    for x in given.values():
        x.flags.writeable = False
    return given, want


@functools.lru_cache(maxsize=2)
def kernels(path: Path) -> tuple[Stage, ...]:
    """The stages to run, from the description of the forward, or of the main kernel of the backward."""
    if path.name.endswith(".forward.json"):
        return (Stage(path),)
    return tuple(Stage(path.with_name(path.name.replace(".backward.", f".{name}."))) for name in STAGES)


@dataclass(frozen=True)
class Job:
    """One run: a kernel (its description), a problem and a seed."""

    path: Path
    problem: Problem
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The largest error (NaN if any is), reports, and processor time per block of scores."""

    error: float
    reports: list[str]
    milliseconds: float


def run(job: Job) -> Outcome:
    """Runs the kernels of a job one after the other."""
    stages = kernels(job.path)
    variant, problem = stages[0].variant, job.problem
    sizes = {"B": problem.batch, "H": problem.heads, "Sq": problem.rows, "Sk": problem.keys, "D": variant["head_dim"]}
    given, want = data(
        problem, variant["head_dim"], variant["causal"], "backward" if variant["backward"] else "forward"
    )
    tensors = dict(given)
    for name, about in {n: a for stage in stages for n, a in stage.description["tensors"].items()}.items():
        if name not in tensors:
            shape = [int(evaluate(str(axis), sizes)) for axis in about["axes"]]
            dtype = np.int32 if name == "semaphore" else np.float32 if name in FLOATS else ml_dtypes.bfloat16
            tensors[name] = np.zeros(shape, dtype) if name == "semaphore" else np.full(shape, np.nan, dtype)
    reports, seconds = [], 0.0
    for stage in stages:
        result, took = stage.run(tensors, sizes, job.seed, problem.sms)
        reports += [str(report) for report in result.reports]
        seconds += took
    errors = []
    for name, x in want.items():
        if name != "lse":
            errors.append(relative(tensors[name], x))
        elif variant["lse"]:
            errors.append(float(np.abs(tensors[name] - x).max()))
    return Outcome(float(np.max(errors)), reports, seconds * 1e3 / problem.blocks(variant["causal"]))


def jobs(folder: Path, seeds: int) -> Iterator[Job]:
    """All runs, in the order of the rows that are printed."""
    for path in sorted(folder.glob("*.forward.json")) + sorted(folder.glob("*.backward.json")):
        causal = json.loads(path.read_text())["variant"]["causal"]
        for problem in PROBLEMS:
            # Rows that see nothing are left undefined by these kernels.
            if not (causal and problem.rows > problem.keys):
                yield from (Job(path, problem, seed) for seed in range(seeds))


class Figures:
    """What several runs amount to."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.error = float(np.max([outcome.error for outcome in outcomes]))  # NaN if any is
        self.reports = Counter(report for outcome in outcomes for report in outcome.reports)
        self.milliseconds = float(np.median([outcome.milliseconds for outcome in outcomes]))


def prove(folder: Path, seeds: int, workers: int) -> bool:
    """Runs everything; prints a line for each kernel and problem, then a table of the kernels."""
    todo = list(jobs(folder, seeds))
    if not todo:
        give_up(f"{folder} has no kernels: generate.py fills such a folder.")
    fine = True
    by_kernel: dict[Path, list[Outcome]] = {}
    # Workers start afresh, since a fork copies the locks of other libraries' threads as they are.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = zip(todo, pool.map(run, todo), strict=True)
        for (path, problem), group in itertools.groupby(done, key=lambda pair: (pair[0].path, pair[0].problem)):
            outcomes = [outcome for _, outcome in group]
            by_kernel.setdefault(path, []).extend(outcomes)
            figures = Figures(outcomes)
            name, stage, _ = path.name.split(".")
            good = figures.error < LIMITS[stage] and not figures.reports
            fine &= good
            print(
                f"{name:33} {problem!s:13} {problem.sms:3} SMs: {len(outcomes)} seeds, largest error "
                f"{figures.error:.1e}, {figures.reports.total()} reports, {figures.milliseconds:.1f} ms per block"
                f"{'' if good else ', WRONG'}",
                flush=True,
            )
            for report in list(figures.reports)[:3]:
                print(report)
    print("\n| kernel | made with | runs | largest error | reports | ms per block |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for path, outcomes in by_kernel.items():
        figures = Figures(outcomes)
        package, version = next(iter(json.loads(path.read_text())["packages"].items()))
        print(
            f"| {path.name.split('.')[0]} | {package} {version} | {len(outcomes)} | {figures.error:.1e} "
            f"| {figures.reports.total()} | {figures.milliseconds:.1f} |"
        )
    print()
    return fine


def mutate(path: Path, seeds: int, workers: int, reasons: dict[str, str], only: re.Pattern[str]) -> int:
    """Plants faults in a forward kernel, one at a time, and prints which are noticed how; 1 if any is unexplained."""
    reasons = {name: why for name, why in reasons.items() if only.search(name)}
    batch, heads, rows, keys, sms = 1, 2, 512, 640, 1  # several tiles for one CTA, if it takes more than one
    stage = Stage(path)
    variant = stage.variant
    width = variant["head_dim"]
    rng = np.random.default_rng(0)
    draw = lambda length: rng.standard_normal((batch, length, heads, width)).astype(ml_dtypes.bfloat16)  # noqa: E731
    # Large logits, so that row maxima grow from block to block by enough to rescale out; but evenly, so that every
    # block still counts, in whatever order a kernel takes them.
    inputs = {"q": draw(rows) * ml_dtypes.bfloat16(6), "k": draw(keys), "v": draw(keys)}
    for x in inputs.values():
        x.flags.writeable = False
    sizes = {"B": batch, "H": heads, "Sq": rows, "Sk": keys, "D": width}
    want, want_lse = attention(*inputs.values(), variant["causal"])

    def try_out(kernel: Kernel, seed: int) -> str | None:
        tensors = {
            **inputs,
            "o": np.full((batch, rows, heads, width), np.nan, ml_dtypes.bfloat16),
            "lse": np.full((batch, heads, rows), np.nan, np.float32),
        }
        faulty = copy.copy(stage)  # one for each thread that runs kernels
        faulty.kernel = kernel
        run, _ = faulty.run(tensors, sizes, seed, sms, max_instructions=1 << 21)
        if run.reports:
            return run.reports[0].kind
        right = relative(tensors["o"], want) < 2 * 2**-9
        if variant["lse"]:
            right = right and bool(np.abs(tensors["lse"] - want_lse).max() < 2 * 2**-9)
        return None if right else "wrong result"

    case = mutation.Case(path.with_suffix(".ptx").read_text(), try_out, reasons)
    return mutation.study(case, seeds, workers, only.search)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=20)
    parser.add_argument("--workers", type=positive, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--ptx", type=Path, help="the folder of the kernels: they are made there if it does not exist")
    parser.add_argument("--mutate", metavar="NAME", help="plant faults in this forward kernel instead")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="of faults' names")
    parser.add_argument("--reasons", type=Path, help="JSON: why faults are not noticed, by name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outside-ptx-") as name:
        folder = options.ptx or Path(name) / "ptx"
        if not folder.exists():
            generate(folder, options.workers)
        if options.mutate:
            reasons = json.loads(options.reasons.read_text()) if options.reasons else {}
            path = folder / f"{options.mutate}.forward.json"
            sys.exit(mutate(path, options.seeds, options.workers, reasons, options.only))
        fine = prove(folder, options.seeds, options.workers)
    print("every result is right and no run has a report" if fine else "FAILED")
    sys.exit(not fine)


if __name__ == "__main__":
    main()
