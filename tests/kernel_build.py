"""csrc/build_kernels.py as a module: it is a script of the build and no part of the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "csrc" / "build_kernels.py"

_spec = importlib.util.spec_from_file_location("build_kernels", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
build_kernels = importlib.util.module_from_spec(_spec)
# Dataclasses look their module up.
sys.modules["build_kernels"] = build_kernels
_spec.loader.exec_module(build_kernels)
