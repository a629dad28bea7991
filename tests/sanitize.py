"""Runs small calls of `cuda` under NVIDIA's compute-sanitizer: `python tests/sanitize.py [TOOL ...]`, on a GPU.

Memcheck, racecheck, synccheck and initcheck by default. Exits with 1 if a tool reports anything.
"""

from __future__ import annotations

import os
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def calls() -> None:
    """Every kernel once or more: each dtype and width, tails, static and dynamic bounds, rows that see nothing."""
    import numpy as np
    from cases import Sizes, draw, operands
    from suite import masked, run

    none = {"left": None, "right": None}
    some = none | {"query_seq_lengths": "some", "key_value_seq_lengths": "some", "row_bounds": "some"}
    for i, (width, value_width) in enumerate([(40, 24), (7, 5), (128, 128), (192, 128), (256, 256)]):
        for dtype in ("float32", "float16", "bfloat16"):
            rng = np.random.default_rng(i)
            sizes = Sizes(2, 70, 90, 4, 2, width, value_width)
            choice = (none, {"left": 30, "right": 0, "softcap": 3.0}, some)[i % 3]
            arguments = operands(sizes, dtype, rng) | masked(sizes, choice, rng)
            dout = draw("gaussian", (2, 70, 4, value_width), dtype, rng)
            results = run("cuda", arguments, dout, rng.standard_normal(dout.shape[:3], np.float32))
            assert all(np.isfinite(np.asarray(x, np.float32)).all() for name, x in results.items() if name != "lse")


def main(tools: list[str]) -> int:
    # One allocation a buffer: what lies beyond a buffer is then nobody's.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    failed = []
    for tool in tools:
        # Initcheck has to see XLA's kernels too, which write what ours read.
        ours = [] if tool == "initcheck" else ["--kernel-name", "kernel_substring=ward_"]
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *ours]
        result = subprocess.run([*command, sys.executable, "-P", __file__, "--calls"], env=environment, check=False)
        print(f"{tool}: {'reports' if result.returncode else 'nothing to report'}", flush=True)
        failed += [tool] if result.returncode else []
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--calls"]:
        sys.path.insert(0, os.path.dirname(__file__))
        calls()
    else:
        sys.exit(main(sys.argv[1:] or list(TOOLS)))
