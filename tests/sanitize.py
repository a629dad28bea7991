"""Runs small calls of `cuda` under NVIDIA's compute-sanitizer: `python tests/sanitize.py [TOOL ...]`, on a GPU.

Memcheck, racecheck, synccheck and initcheck by default. Exits with 1 if a tool reports anything.

With `--limits` it runs the small kernels of sanitizer_limits.cu instead (which needs nvcc), and exits with 1 unless the
tools report of them what `LIMITS` says. None of them has a fault: so where a kernel of `cuda` is built as they are, a
report shows nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
DTYPES = ("bfloat16", "float16", "float32")
# The kernels of sanitizer_limits.cu of which a tool reports something.
LIMITS = {
    # It does not see that __syncwarp orders the reads of a warp before the arrival of one of its lanes at an mbarrier,
    # nor that a named barrier orders those of one warp before the arrival of another.
    "racecheck": ("lane_arrives", "named_barrier_then_mbarrier"),
    # It takes warps that reach a barrier at different places of the code, or through different calls, for divergent.
    "synccheck": ("two_places", "two_calls"),
}


def calls(dtype: str) -> None:
    """Every kernel of a dtype once or more: each width, tails, static and dynamic bounds, rows that see nothing.

    Says what it is about to call, for the case that a tool takes the process down.
    """
    import itertools

    import numpy as np
    from cases import Sizes, draw, operands
    from suite import masked, run

    none = {"left": None, "right": None}
    some = none | {"query_seq_lengths": "some", "key_value_seq_lengths": "some", "row_bounds": "some"}
    # Of the widths that the kernels for tensor cores are compiled for, and others.
    widths = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 24), (7, 5)]
    choices = [none, {"left": 30, "right": 0, "softcap": 3.0}, some]
    for (width, value_width), choice in itertools.product(widths, choices):
        rng = np.random.default_rng(0)
        sizes = Sizes(2, 200, 290, 4, 2, width, value_width)
        print(sizes, dtype, choice, flush=True)
        arguments = operands(sizes, dtype, rng) | masked(sizes, choice, rng)
        dout = draw("gaussian", (*arguments["query"].shape[:3], value_width), dtype, rng)
        results = run("cuda", arguments, dout, rng.standard_normal(dout.shape[:3], np.float32))
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for name, x in results.items() if name != "lse")


def main(tools: list[str]) -> int:
    # One allocation a buffer: what lies beyond a buffer is then nobody's.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    failed = False
    for tool in tools:
        # Initcheck has to see XLA's kernels too, which write what ours read. It does not see what the copy engine
        # writes, and so takes the outputs of the forwards for tensor cores, which are for 16-bit types, for unwritten.
        ours = [] if tool == "initcheck" else ["--kernel-name", "kernel_substring=ward_"]
        for dtype in DTYPES[-1:] if tool == "initcheck" else DTYPES:
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *ours]
            command += [sys.executable, "-P", __file__, "--calls", dtype]
            status = subprocess.run(command, env=environment, check=False).returncode
            found = {0: "nothing to report", 1: "reports"}.get(status, f"ended by itself, with status {status}")
            print(f"{tool}, {dtype}: {found}", flush=True)
            failed |= status != 0
    return int(failed)


def limits() -> int:
    """The command with `--limits`; returns its exit status."""
    source = Path(__file__).with_name("sanitizer_limits.cu")
    kernels = re.findall(r"__global__ void (\w+)\(", source.read_text())
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "limits")
        subprocess.run(["nvcc", "-arch=sm_90a", "-o", program, source], check=True)
        for tool, expected in LIMITS.items():
            reported = []
            for kernel in kernels:
                command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--kernel-name"]
                status = subprocess.run([*command, f"kernel_name={kernel}", program], check=False).returncode
                if status:
                    reported.append(kernel)
            right = tuple(reported) == expected
            print(f"{tool}: reports of {', '.join(reported) or 'none'}{'' if right else ', which is not as expected'}")
            failed |= not right
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:] == ["--limits"]:
        sys.exit(limits())
    if sys.argv[1:2] == ["--calls"]:
        sys.path.insert(0, os.path.dirname(__file__))
        calls(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:] or list(TOOLS)))
