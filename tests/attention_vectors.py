"""Calls whose results on an H200 `attention_vectors.npz` keeps, bit for bit, for test_emulated_attention.py.

`python tests/attention_vectors.py [FILE.npz]` records them anew, on an NVIDIA H200.

Only what the kernels write is kept. The scale's gradient is a sum of theirs that XLA makes, in an order of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from cases import Sizes, draw, operands
from suite import masked, run

FILE = Path(__file__).with_name("attention_vectors.npz")


def results(implementation: str) -> dict[str, np.ndarray]:
    """What every call gives, by `case/result`; 16-bit floats as the integers of their bits."""
    found = {}
    for case, (sizes, dtype, kind, choice) in _CASES.items():
        rng = np.random.default_rng(7)
        arguments = operands(sizes, dtype, rng, kind) | masked(sizes, {"left": None, "right": None} | choice, rng)
        arguments["deterministic"] = True
        dout = draw("gaussian", (*arguments["query"].shape[:3], sizes.value_width), dtype, rng)
        dlse = rng.standard_normal(dout.shape[:3], np.float32)
        for name, x in run(implementation, arguments, dout, dlse).items():
            bits = np.asarray(x)
            found[f"{case}/{name}"] = bits if bits.itemsize == 4 else bits.view(np.uint16)
    return found


_CASES: dict[str, tuple[Sizes, str, str, dict[str, Any]]] = {
    "full_float32": (Sizes(1, 70, 90, 2, 1, 32, 32), "float32", "gaussian", {}),
    "full_float16": (Sizes(1, 70, 90, 2, 1, 32, 32), "float16", "outliers", {}),
    "full_bfloat16": (Sizes(1, 70, 90, 2, 1, 32, 32), "bfloat16", "huge_logits", {}),
    "causal": (Sizes(2, 65, 70, 2, 2, 16, 16), "bfloat16", "gaussian", {"is_causal": True, "query_offset": "end"}),
    "window": (
        Sizes(1, 130, 130, 2, 1, 20, 12),
        "float32",
        "near_constant",
        {"left": 40, "right": 3, "softcap": 2.0},
    ),
    "softcap": (Sizes(1, 66, 40, 1, 1, 64, 64), "float16", "huge_logits", {"softcap": 30.0}),
    "lengths": (
        Sizes(2, 60, 80, 2, 1, 24, 40),
        "float16",
        "runs",
        {"query_seq_lengths": "some", "key_value_seq_lengths": "some"},
    ),
    "segments": (
        Sizes(2, 70, 70, 2, 2, 8, 8),
        "float32",
        "gaussian",
        {"segments": "shuffled", "is_causal": True},
    ),
    "row_bounds": (Sizes(2, 70, 70, 1, 1, 7, 5), "bfloat16", "gaussian", {"row_bounds": "some"}),
    "width_128": (Sizes(1, 40, 70, 1, 1, 128, 128), "bfloat16", "gaussian", {"is_causal": True}),
    "width_192_128": (Sizes(1, 35, 40, 1, 1, 192, 128), "bfloat16", "gaussian", {}),
    "width_256": (Sizes(1, 35, 40, 2, 1, 256, 256), "float32", "gaussian", {"is_causal": True}),
    "odd_float16": (Sizes(1, 70, 90, 2, 1, 31, 31), "float16", "outliers", {}),
    # Several blocks of keys, by each kernel for tensor cores.
    "tensor_64": (Sizes(1, 200, 300, 2, 1, 64, 64), "bfloat16", "outliers", {}),
    "tensor_96": (Sizes(1, 130, 270, 2, 2, 96, 96), "float16", "gaussian", {"is_causal": True, "softcap": 5.0}),
    "tensor_128": (
        Sizes(2, 150, 300, 4, 1, 128, 128),
        "bfloat16",
        "gaussian",
        {"is_causal": True, "query_offset": "end"},
    ),
    "tensor_192_128": (Sizes(1, 150, 250, 2, 1, 192, 128), "float16", "huge_logits", {"left": 60, "right": 10}),
    "tensor_256": (Sizes(2, 130, 170, 1, 1, 256, 256), "bfloat16", "runs", {"key_value_seq_lengths": "some"}),
}

if __name__ == "__main__":
    device = jax.devices()[0]
    if "H200" not in device.device_kind:
        sys.exit(f"The vectors are those of an NVIDIA H200, but this is {device.device_kind}.")
    np.savez_compressed(sys.argv[1] if len(sys.argv) > 1 else FILE, **results("cuda"))
