"""Launches of a plan by hand, in the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_fa4.emulated import Kernel, Pointer, Run, TensorMap


def run(kernel: Kernel, launch: Mapping[str, Any], arrays: Mapping[str, np.ndarray], **options: Any) -> Run:
    """Runs a launch; `arrays` are the plan's buffers, of which the kernel may write those that are writeable."""
    fields: dict[int, tuple[Any, int]] = {}
    for at, (name, offset) in launch["addresses"].items():
        fields[at] = Pointer(arrays[name], offset), 8
    for at, one in launch["tensor_maps"].items():
        array = arrays[one["buffer"][0]].view(np.uint16)
        fields[at] = TensorMap(array, one["box"], one["dims"], one["strides"], swizzle=128), 128
    parameters, start = launch["parameters"], 0
    for at in (*sorted(fields), len(parameters)):
        if at > start:
            fields[start] = parameters[start:at], at - start
        start = at + (fields[at][1] if at in fields else 0)
    options = {
        "grid": launch["grid"],
        "block": launch["block"],
        "dynamic_shared_bytes": launch["dynamic_shared_bytes"],
    } | options
    return kernel.launch([fields], **options)
