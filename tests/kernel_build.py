"""csrc/build_kernels.py as a module, and sass.py beside it: scripts of the build, and no part of the package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "csrc"))
import build_kernels
import sass

SCRIPT = Path(build_kernels.__file__)
MODULES = (SCRIPT, Path(sass.__file__))
ROOT = SCRIPT.parent.parent
