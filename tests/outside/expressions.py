"""The expressions that describe how a kernel is launched, over the sizes of a problem."""

from __future__ import annotations

import math
from typing import Any


def evaluate(expression: str, variables: dict[str, Any]) -> Any:
    """The value of an expression of the JSON."""

    def ceil_div(a: int, b: int) -> int:
        return -(-a // b)

    def divmod_log(d: int) -> int:
        return (d - 1).bit_length()

    functions: dict[str, Any] = {
        "ceil_div": ceil_div,
        "round_up": lambda a, b: ceil_div(a, b) * b,
        "min": min,
        "max": max,
        "log2e": math.log2(math.e),
        "floor_pow2": lambda n: 1 << (n.bit_length() - 1),
        # n // d == (t + ((n - t) >> shift1)) >> shift2 with t = (n * multiplier) >> 32
        "divmod_multiplier": lambda d: ((1 << 32) * ((1 << divmod_log(d)) - d)) // d + 1,
        "divmod_shift1": lambda d: min(divmod_log(d), 1),
        "divmod_shift2": lambda d: max(divmod_log(d) - 1, 0),
    }
    return eval(expression, {"__builtins__": {}}, {**functions, **variables})  # only rules of this file
