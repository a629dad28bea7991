"""jax_fa4: FlashAttention-4 for JAX.

`attention` is exact attention, a drop-in for `jax.nn.dot_product_attention`; `why_not` says why an implementation would
not run a call; `flax` has what layers take as their `attention_fn`; `parallel` is attention of sequences that are
sharded over devices; `emulated` runs kernels on a CPU; `CHECKPOINT_NAMES` are the residuals' names for remat policies.
For `jax.export`: `export_checks` allows the custom calls of programs for NVIDIA GPUs, whose targets are `CUSTOM_CALLS`,
and `register_custom_calls` makes them known to the process that runs such a program.
"""

from jax_fa4 import emulated, flax, parallel
from jax_fa4.attention import attention, why_not
from jax_fa4.autodiff import CHECKPOINT_NAMES
from jax_fa4.cuda import CUSTOM_CALLS, export_checks, register_custom_calls

__all__ = [
    "CHECKPOINT_NAMES",
    "CUSTOM_CALLS",
    "attention",
    "emulated",
    "export_checks",
    "flax",
    "parallel",
    "register_custom_calls",
    "why_not",
]
