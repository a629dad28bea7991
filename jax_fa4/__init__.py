"""jax_fa4: FlashAttention-4 for JAX.

`attention` is exact attention, a drop-in for `jax.nn.dot_product_attention`; `why_not` says why an implementation would
not run a call; `parallel` is attention of sequences that are sharded over devices; `CHECKPOINT_NAMES` are the
residuals' names for remat policies; `CUSTOM_CALLS` are the targets that `jax.export` is to allow in programs for NVIDIA
GPUs.
"""

from jax_fa4 import parallel
from jax_fa4.attention import attention, why_not
from jax_fa4.autodiff import CHECKPOINT_NAMES
from jax_fa4.cuda import CUSTOM_CALLS

__all__ = ["CHECKPOINT_NAMES", "CUSTOM_CALLS", "attention", "parallel", "why_not"]
