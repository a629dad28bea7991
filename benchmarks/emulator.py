"""Times the emulator on attention kernels by others, and weighs it.

    python benchmarks/emulator.py [--ptx FOLDER] [--runs 9]

A row is one forward kernel. A block is 128 keys for 256 query rows of one head, those that a causal mask hides not
counted. Figures are medians of processor time over runs of different seeds: with races checked, without, and with a
trace recorded besides; then loading (parsing and decoding), and the peak resident memory of a process of its own that
runs the kernel once, races checked, with what it was before in brackets. Without --ptx, the kernels are generated
first, as tests/outside/run.py does it.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from jax_fa4.emulated import Kernel

KERNELS = {
    "official, 1 CTA": "fwd_sm100_d128_1cta",
    "official, causal": "fwd_sm100_d128_causal",
    "official, 2 CTAs": "fwd_sm100_d128_2cta",
    "official, Hopper": "fwd_sm90_d128",
    "Triton": "triton_sm100_d128",
}
HEADS, ROWS, KEYS, WIDTH = 2, 512, 1024, 128
BLOCK_ROWS, BLOCK_KEYS = 256, 128
SMS = 148


def outside() -> ModuleType:
    """tests/outside/run.py, which knows how such kernels are launched."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/outside"))
    import run

    return run


def blocks(causal: bool) -> int:
    """How many blocks the problem has, masks aligned at the end."""
    visible = [KEYS - ROWS + end if causal else KEYS for end in range(BLOCK_ROWS, ROWS + 1, BLOCK_ROWS)]
    return HEADS * sum(-(-keys // BLOCK_KEYS) for keys in visible)


def execute(stage: Any, seed: int, **options: bool) -> float:
    """Runs the kernel; returns its seconds of processor time."""
    rng = np.random.default_rng(0)
    draw = lambda length: rng.standard_normal((1, length, HEADS, WIDTH)).astype(ml_dtypes.bfloat16)  # noqa: E731
    tensors = {"q": draw(ROWS), "k": draw(KEYS), "v": draw(KEYS)}
    for x in tensors.values():
        x.flags.writeable = False
    tensors["o"] = np.zeros((1, ROWS, HEADS, WIDTH), ml_dtypes.bfloat16)
    tensors["lse"] = np.zeros((1, HEADS, ROWS), np.float32)
    sizes = {"B": 1, "H": HEADS, "Sq": ROWS, "Sk": KEYS, "D": WIDTH}
    launch = stage.kernel.launch
    stage.kernel.launch = functools.partial(launch, **options)
    run, seconds = stage.run(tensors, sizes, seed, SMS)
    stage.kernel.launch = launch
    run.check()
    return seconds


def peak_memory() -> float:
    """Of this process, in MiB."""
    # Not getrusage, whose maximum counts the parent's memory from before this program was loaded.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def weigh(path: Path) -> None:
    """Prints the peak memory before and after one run."""
    module = outside()
    before = peak_memory()
    execute(module.Stage(path), 0)
    print(f"{peak_memory():.0f} ({before:.0f})")


def measure(name: str, path: Path, runs: int) -> None:
    """Prints a row."""
    text = path.with_suffix(".ptx").read_text()
    stage = outside().Stage(path)
    count = blocks(stage.variant["causal"])
    loads: list[float] = []
    times: dict[str, list[float]] = {"checked": [], "unchecked": [], "traced": []}
    for seed in range(runs):
        start = time.process_time()
        Kernel(text)
        loads.append(time.process_time() - start)
        times["checked"].append(execute(stage, seed))
        times["unchecked"].append(execute(stage, seed, check_races=False))
        times["traced"].append(execute(stage, seed, trace=True))
    each = [statistics.median(seconds) * 1e3 / count for seconds in times.values()]
    memory = subprocess.run([sys.executable, __file__, "--weigh", path], check=True, capture_output=True, text=True)
    print(
        f"{name:17} {each[0]:9.2f} {each[1]:9.2f} {each[2]:9.2f} {statistics.median(loads) * 1e3:8.1f} "
        f"{memory.stdout.strip():>15}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptx", type=Path, help="a folder that tests/outside/generate.py has filled")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--weigh", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.weigh:
        weigh(options.weigh)
        return
    folder = options.ptx
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="outside-"))
        outside().generate(folder, 1)
    print(f"{platform.processor() or platform.machine()}; B=1, H={HEADS}, Sq={ROWS}, Sk={KEYS}, D={WIDTH}")
    print(f"{'':17} {'ms per block of 256 x 128':>29}")
    print(f"{'kernel':17} {'checked':>9} {'unchecked':>9} {'traced':>9} {'load ms':>8} {'peak MiB':>15}")
    for name, kernel in KERNELS.items():
        measure(name, folder / f"{kernel}.forward.json", options.runs)


if __name__ == "__main__":
    main()
