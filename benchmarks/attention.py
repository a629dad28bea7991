"""Times attention on this machine: every implementation of jax_fa4 beside jax.nn's and others', in one run.

    python benchmarks/attention.py [--cases REGEX] [--implementations REGEX] [--budget SECONDS]
                                   [--plot FILE.png] [--json FILE]

On a CPU: jax_fa4 and jax.nn over a grid of lengths, dtypes and masks, in milliseconds; then the peak resident memory of
a process of its own that computes a gradient at S = 32768 with a window of 1024 keys. On a GPU: a grid of 16384 tokens
and calls of models, in TFLOP/s beside cuDNN, XLA, Pallas, FlashAttention-3 and tokamax; then the cost of launching a
tiny call. `--cases` chooses among all of these and every call of tests/cases.py instead.

"ratio" is the time of the base (cuDNN on a GPU, jax.nn's XLA on a CPU) over that of the column: above 1 is faster.
"backward" is the difference of the medians of forward+backward, which computes out and the gradients of query, key and
value, and forward. Operations are those of the visible pairs of a row and a key, so that causality halves them. Every
column is checked against naive float32 attention before it is timed; a dash is explained below the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contenders import Attention, Call, Contender, ours, peers
from jax import Array, lax
from workload import Inputs, Reference, Workload, cpu_grid, flops, gpu_grid, models, tiny, visible_pairs

import jax_fa4

FORWARD, BOTH, BACKWARD = "forward", "forward+backward", "backward"
Program = Callable[[Sequence[Inputs], Mapping[str, Any]], list[tuple[Array, ...]]]
"""A compiled program: one call for each of the inputs, one after the other."""

# More than twice the last-level cache of any GPU, so that no call finds its inputs there.
_ROTATED_BYTES = 256 * 2**20
# A call that cannot take less than this hides the cost of dispatching the next one; shorter ones share a program.
_HIDES_DISPATCH = 100e-6
# Floors for that purpose alone: no GPU of today is faster.
_MOST_FLOPS_A_SECOND, _MOST_BYTES_A_SECOND = 2.5e15, 8e12
_BURST = 0.02  # seconds of calls between two readings of the clock on a GPU
_MOST_ROUNDS = 30
# What is one kernel or little more: a chain of so many calls of the others would take minutes to compile.
_CHAIN = 100
_LAUNCHED = ("fa4 cuda", "fa4 pallas", "cudnn", "FA3")
# Compilers run side by side, but not what comes before them: others' Python may not be made for threads.
_TRACING = threading.Lock()
_SLOW = 1.0  # seconds of a program whose first run is a reading


@dataclasses.dataclass
class Column:
    """What became of one contender in one pass of one workload.

    Attributes:
      contender: its name.
      work: forward, or forward+backward.
      program: None when there is nothing to run, with the reason.
      reason: why not, or None.
      error: the share of the allowed error that its results have.
      temporary_bytes: memory that one call holds besides operands and results.
      seconds: times of one call.
      spent: seconds that timing took.
    """

    contender: str
    work: str
    program: Program | None = None
    reason: str | None = None
    error: float | None = None
    temporary_bytes: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    spent: float = 0.0

    def fail(self, error: Exception) -> None:
        """Notes why there is no result: the first line of the error."""
        text = str(error).strip().split("\n")[0]
        kind = "" if isinstance(error, NotImplementedError | ArithmeticError) else f"{type(error).__name__}: "
        self.program, self.reason = None, (kind + text)[:300]


@dataclasses.dataclass
class Report:
    """The columns of every workload that was measured, and what their names and operations are."""

    base: str
    in_tflops: bool
    contenders: list[str]
    rows: list[tuple[Workload, dict[str, int], list[Column]]] = dataclasses.field(default_factory=list)

    def seconds(self, columns: Iterable[Column]) -> dict[str, dict[str, float]]:
        """Median seconds of a call by pass and contender; the backward pass is a difference."""
        medians: dict[str, dict[str, float]] = {FORWARD: {}, BOTH: {}, BACKWARD: {}}
        for column in columns:
            if column.seconds:
                medians[column.work][column.contender] = statistics.median(column.seconds)
        for name, both in medians[BOTH].items():
            difference = both - medians[FORWARD].get(name, math.inf)
            if difference > 0:
                medians[BACKWARD][name] = difference
        return medians

    def head(self) -> str:
        """The line above the table."""
        unit = "TFLOP/s" if self.in_tflops else "ms"
        cells = [f"{name:>14}" for name in self.contenders]
        return f"{'(' + unit + ', ratio to ' + self.base + ')':34} {'pass':16} " + " ".join(cells)

    def lines(self, workload: Workload, operations: Mapping[str, int], columns: Iterable[Column]) -> list[str]:
        """A line of the table for each pass."""
        lines = []
        for work, seconds in self.seconds(columns).items():
            cells = []
            for name in self.contenders:
                if name not in seconds:
                    cells.append(f"{'-':>14}")
                    continue
                number = operations[work] / seconds[name] / 1e12 if self.in_tflops else seconds[name] * 1e3
                cells.append(f"{number:8.{0 if self.in_tflops else 2}f} {ratio(seconds, self.base, name):>5}")
            lines.append(f"{workload.name:34} {work:16} " + " ".join(cells))
        return lines

    def means(self) -> list[str]:
        """Geometric means of the ratios, a line for each pass, and of how many workloads."""
        lines = []
        for work in (FORWARD, BOTH, BACKWARD):
            cells = []
            for name in self.contenders:
                logs = []
                for _, _, columns in self.rows:
                    seconds = self.seconds(columns)[work]
                    if name in seconds and self.base in seconds:
                        logs.append(math.log(seconds[self.base] / seconds[name]))
                cells.append(f"{geometric_mean(logs):>8} {f'({len(logs)})':>5}")
            lines.append(f"{'geometric mean of ratios (of rows)':34} {work:16} " + " ".join(cells))
        return lines

    def memory(self) -> list[str]:
        """MiB that forward+backward holds besides operands and results, a line for each workload."""
        lines = []
        for workload, _, columns in self.rows:
            found = {one.contender: one.temporary_bytes for one in columns if one.work == BOTH and one.seconds}
            cells = [
                f"{(found[name] or 0) / 2**20:14.0f}" if name in found else f"{'-':>14}" for name in self.contenders
            ]
            lines.append(f"{workload.name:34} {'temporaries, MiB':16} " + " ".join(cells))
        return lines

    def reasons(self) -> list[str]:
        """Every dash, explained: the rows by contender, pass and reason."""
        where: dict[tuple[str, str], dict[str, list[str]]] = {}
        for workload, _, columns in self.rows:
            for column in columns:
                if column.reason is not None:
                    works = where.setdefault((column.contender, column.reason), {})
                    works.setdefault(workload.name, []).append(column.work)
        lines = []
        for (contender, reason), works in where.items():
            names = [name + ("" if len(passes) == 2 else f" ({passes[0]})") for name, passes in works.items()]
            rows = (
                "everywhere" if len(names) == len(self.rows) and all(map(_both, works.values())) else "; ".join(names)
            )
            lines.append(f"  {contender}: {reason} [{rows}]")
        return lines

    def raw(self) -> list[dict[str, Any]]:
        """Everything, as JSON has it."""
        return [
            {"case": workload.name, "sizes": workload.sizes._asdict(), "dtype": workload.dtype, "flops": operations}
            | {"columns": [{k: v for k, v in vars(column).items() if k != "program"} for column in columns]}
            for workload, operations, columns in self.rows
        ]


def _both(passes: Sequence[str]) -> bool:
    return len(passes) == 2


def ratio(seconds: Mapping[str, float], base: str, name: str) -> str:
    """The base's time over another's, or nothing where the base has none."""
    return f"{seconds[base] / seconds[name]:.2f}" if base in seconds else ""


def geometric_mean(logs: Sequence[float]) -> str:
    return f"{math.exp(statistics.fmean(logs)):.3f}" if logs else "-"


def with_gradient(function: Attention) -> Callable[..., tuple[Array, ...]]:
    """The output and the gradients of the three operands, all of which are computed."""

    def run(query: Array, key: Array, value: Array, dout: Array, arrays: Mapping[str, Any]) -> tuple[Array, ...]:
        out, pullback = jax.vjp(lambda q, k, v: function(q, k, v, arrays), query, key, value)
        return out, *pullback(dout)

    return run


def without_gradient(function: Attention) -> Callable[..., tuple[Array, ...]]:
    """The output alone, from the same operands."""
    return lambda query, key, value, dout, arrays: (function(query, key, value, arrays),)


def in_order(function: Callable[..., tuple[Array, ...]]) -> Program:
    """A program of one call for each input; barriers keep the compiler from mixing or merging the calls."""

    def run(inputs: Sequence[Inputs], arrays: Mapping[str, Any]) -> list[tuple[Array, ...]]:
        results: list[tuple[Array, ...]] = []
        for operands in inputs:
            if results:
                operands, results[-1] = lax.optimization_barrier((operands, results[-1]))
            results.append(function(*operands, arrays))
        return results

    return run


def build(contender: Contender, work: str, call: Call, inputs: Sequence[Inputs]) -> Column:
    """Compiles one pass of one contender, or says why that cannot be."""
    column = Column(contender.name, work)
    try:
        with _TRACING:
            function = contender.bind(call)
            program = in_order((without_gradient if work == FORWARD else with_gradient)(function))
            lowered = jax.jit(program).lower(inputs, call.arrays)
        compiled = lowered.compile()
        column.program = compiled
        memory = compiled.memory_analysis()
        column.temporary_bytes = None if memory is None else memory.temp_size_in_bytes
    except Exception as error:  # Whatever another library raises is the reason of a dash.
        column.fail(error)
    return column


def batches(workload: Workload, operations: int) -> list[list[Inputs]]:
    """Inputs to rotate, by program call: one a program where that takes long enough to hide the next dispatch."""
    on_gpu = jax.default_backend() == "gpu"
    count = min(8, max(2, -(-_ROTATED_BYTES // workload.input_bytes()))) if on_gpu else 2
    inputs = [workload.inputs(seed) for seed in range(count)]
    floor = max(operations / _MOST_FLOPS_A_SECOND, workload.input_bytes() / _MOST_BYTES_A_SECOND)
    if on_gpu and floor < _HIDES_DISPATCH:
        return [inputs]
    return [[one] for one in inputs]


def check(column: Column, batch: list[Inputs], call: Call, reference: Reference) -> None:
    """Runs a program for the first time and checks what it returns."""
    assert column.program is not None
    start = time.perf_counter()
    results = jax.block_until_ready(column.program(batch, call.arrays))
    seconds = time.perf_counter() - start
    column.error = reference.check(results[0])
    if seconds > _SLOW:
        # Loading the program is nothing beside it, and a second run would cost too much.
        column.seconds.append(seconds / len(batch))
        column.spent = seconds


def burst(column: Column, rotated: list[list[Inputs]], call: Call) -> None:
    """Takes times of one contender's calls, behind a program that pays for the memory that others gave back.

    On a GPU calls are dispatched ahead of the device, and one reading covers about `_BURST` seconds of them; on a CPU,
    where calls could overlap, each of three is timed alone.
    """
    assert column.program is not None
    began = start = time.perf_counter()
    jax.block_until_ready(column.program(rotated[-1], call.arrays))
    on_gpu, calls = jax.default_backend() == "gpu", len(rotated[0])
    programs = max(1, round(_BURST / (time.perf_counter() - start))) if on_gpu else 3
    start = time.perf_counter()
    for i in range(programs):
        results = column.program(rotated[i % len(rotated)], call.arrays)
        if not on_gpu:
            jax.block_until_ready(results)
            column.seconds.append((time.perf_counter() - start) / calls)
            start = time.perf_counter()
    if on_gpu:
        jax.block_until_ready(results)
        column.seconds.append((time.perf_counter() - start) / programs / calls)
    column.spent += time.perf_counter() - began


def prepare(
    contenders: Sequence[Contender], call: Call, inputs: Sequence[Inputs], reference: Reference
) -> list[Column]:
    """Compiles both passes of all contenders side by side, and makes the reference ready.

    Nothing runs on the device while others compile, because compilers choose among kernels by their times.
    """
    tasks = [(contender, work) for contender in contenders for work in (FORWARD, BOTH)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        compiled = pool.map(reference.compile, (True, False))
        columns = list(pool.map(lambda task: build(task[0], task[1], call, inputs), tasks))
        list(compiled)
    reference.compute()
    return columns


def measure(
    workload: Workload, contenders: Sequence[Contender], deadline: float
) -> tuple[dict[str, int], list[Column]]:
    """Compiles, checks and times all contenders, who take turns until the deadline; all are timed at least once."""
    call = Call.of(workload)
    operations = flops(workload.sizes, visible_pairs(workload.arguments(), workload.sizes))
    rotated = batches(workload, operations[FORWARD])
    reference = Reference(workload, rotated[0][0])
    columns = prepare(contenders, call, rotated[0], reference)
    for column in columns:
        attempt(column, lambda column: check(column, rotated[0], call, reference))
    running = sum(column.program is not None for column in columns)
    share = max(0.0, deadline - time.perf_counter()) / max(1, running)
    for _ in range(_MOST_ROUNDS):
        for column in columns:
            if not column.seconds or column.spent < share:
                attempt(column, lambda column: burst(column, rotated, call))
    for column in columns:
        column.program = None
    return operations, columns


def attempt(column: Column, action: Callable[[Column], None]) -> None:
    """Does something with a column that still has a program; an error, such as too little memory, makes it a dash."""
    if column.program is not None:
        try:
            action(column)
        except Exception as error:  # Another library may raise anything.
            column.seconds.clear()
            column.fail(error)


def compare(workloads: Sequence[Workload], contenders: Sequence[Contender], end: float) -> Report:
    """Measures every workload before `end` (of time.perf_counter), printing each as it is done."""
    on_gpu = jax.default_backend() == "gpu"
    report = Report("cudnn" if on_gpu else "xla", on_gpu, [contender.name for contender in contenders])
    print(report.head(), flush=True)
    for i, workload in enumerate(workloads):
        now = time.perf_counter()
        operations, columns = measure(workload, contenders, now + (end - now) / (len(workloads) - i))
        report.rows.append((workload, operations, columns))
        print("\n".join(report.lines(workload, operations, columns)), flush=True)
    print("\n".join([*report.means(), *report.memory()]), flush=True)
    if reasons := report.reasons():
        print("\n".join(["dashes:", *reasons]), flush=True)
    return report


def launch_overhead(contenders: Sequence[Contender]) -> dict[str, dict[str, float]]:
    """Seconds of a tiny forward call by contender: inside a program of 100 dependent ones, and called from Python.

    Each call's query is the output before it, so that the device cannot run two at a time. From Python, "dispatch" is
    the time until the call returns and "latency" until its result is there.
    """
    call, (query, key, value, _) = Call.of(tiny()), tiny().inputs(0)
    found = {}
    for contender in contenders:
        try:
            function = contender.bind(call)

            def chained(q: Array, k: Array, v: Array, function: Attention = function) -> Array:
                for _ in range(_CHAIN):
                    q = function(q, k, v, {})
                return q

            def once(q: Array, k: Array, v: Array, function: Attention = function) -> Array:
                return function(q, k, v, {})

            in_program = statistics.median(_readings(jax.jit(chained), (query, key, value), 30)) / _CHAIN
            single = jax.jit(once)
            latency = statistics.median(_readings(single, (query, key, value), 300))
            found[contender.name] = {"in a program": in_program, "dispatch": _dispatch(single, (query, key, value))}
            found[contender.name]["latency"] = latency
        except Exception as error:
            print(f"  {contender.name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    return found


def _readings(program: Callable[..., Array], arguments: tuple[Array, ...], count: int) -> list[float]:
    for _ in range(3):
        jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(count):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - start)
    return times


def _dispatch(program: Callable[..., Array], arguments: tuple[Array, ...]) -> float:
    """Median seconds until a call returns, in bursts that the device finishes before the next begins."""
    times = []
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(10):
            result = program(*arguments)
        times.append((time.perf_counter() - start) / 10)
        jax.block_until_ready(result)
    return statistics.median(times)


def print_launches(launches: Mapping[str, Mapping[str, float]], base: str) -> None:
    print("a tiny call, B=1 T=S=16 N=8 D=64 bfloat16, forward: microseconds, and their ratio to the base's (1 or less)")
    kinds = ("in a program", "dispatch", "latency")
    print(f"  {'':16}" + "".join(f"{kind:>20}" for kind in kinds))
    for name, numbers in launches.items():
        cells = [
            f"{numbers[kind] * 1e6:11.2f} "
            + (f"{numbers[kind] / launches[base][kind]:8.2f}" if base in launches else "")
            for kind in kinds
        ]
        print(f"  {name:16}" + "".join(cells))


def plot(report: Report, path: Path) -> None:
    """Draws each contender's speed by workload, forward and backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [workload.name for workload, _, _ in report.rows]
    figure, axes = plt.subplots(1, 2, figsize=(14, 2 + 0.3 * len(names)), sharey=True, layout="constrained")
    for axis, work in zip(axes, (FORWARD, BACKWARD), strict=True):
        for marker, name in zip("os^vDPX*dph<>"[: len(report.contenders)], report.contenders, strict=True):
            points = [
                (operations[work] / seconds[name] / 1e12, i)
                for i, (_, operations, columns) in enumerate(report.rows)
                if name in (seconds := report.seconds(columns)[work])
            ]
            axis.plot(*zip(*points, strict=True) if points else ([], []), marker, label=name, alpha=0.8)
        axis.set(title=work, xlabel="TFLOP/s", xlim=(0, None), yticks=range(len(names)), yticklabels=names)
        axis.grid(alpha=0.3)
    axes[0].invert_yaxis()
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"Attention on {jax.devices()[0].device_kind}, JAX {jax.__version__}")
    figure.savefig(path, dpi=120)


def long_gradient(length: int, window: int) -> None:
    """Computes one gradient and prints the peak resident memory of this process in MiB."""
    heads, width = 8, 64
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.standard_normal((1, length, heads, width)), np.float32) for _ in range(3)]

    def loss(query: Array, key: Array, value: Array) -> Array:
        return jax_fa4.attention(query, key, value, local_window_size=(window, 0)).sum()

    jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(*operands))
    # Not getrusage, whose maximum counts the parent's memory from before this program was loaded.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1024
    print(f"gradient at S={length}, N={heads}, D={width}, float32, window {window}: peak resident {peak:.0f} MiB")


def versions() -> str:
    """This machine, and the versions of what is measured on it."""
    found = [
        f"jax {jax.__version__}",
        f"jax_fa4 {importlib.metadata.version('jax_fa4')}" if _installed("jax_fa4") else "",
    ]
    found += [f"{name} {importlib.metadata.version(name)}" for name in _PEER_PACKAGES if _installed(name)]
    device = f"{jax.devices()[0].device_kind} ({platform.processor() or platform.machine()})"
    return ", ".join([device, *filter(None, found)])


_PEER_PACKAGES = ("dew-flash-attn-cu13", "tokamax", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def choose_workloads(pattern: str | None) -> list[Workload]:
    """Those of this kind of device, or all whose name matches."""
    if pattern is None:
        return [*gpu_grid(), *models()] if jax.default_backend() == "gpu" else list(cpu_grid())
    everything = [*cpu_grid(), *gpu_grid(), *models(all_of_them=True)]
    return [workload for workload in everything if re.search(pattern, workload.name)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", metavar="REGEX", help="the rows: those whose name it is found in")
    parser.add_argument("--implementations", metavar="REGEX", default="", help="the columns, likewise")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for the table; it costs repetitions, not rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the speeds (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every single reading")
    parser.add_argument("--long-gradient", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.long_gradient:
        long_gradient(32768, 1024)
        return
    on_gpu = jax.default_backend() == "gpu"
    budget = options.budget if options.budget is not None else 400 if on_gpu else 120
    end = time.perf_counter() + budget
    contenders = [one for one in [*ours(), *peers()] if re.search(options.implementations, one.name)]
    workloads = choose_workloads(options.cases)
    if not contenders or not workloads:
        parser.error("no implementation or no case has such a name")
    print(versions(), flush=True)
    launches: dict[str, dict[str, float]] = {}
    if on_gpu:
        launches = launch_overhead([one for one in contenders if one.name in _LAUNCHED])
        print_launches(launches, "cudnn")
    report = compare(workloads, contenders, end)
    if options.json is not None:
        document = {"machine": versions(), "launch seconds": launches, "rows": report.raw()}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot is not None:
        plot(report, options.plot)
    if not on_gpu and options.cases is None:
        subprocess.run([sys.executable, __file__, "--long-gradient"], check=True)


if __name__ == "__main__":
    main()
