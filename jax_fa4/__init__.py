"""jax_fa4: FlashAttention-4 for JAX.

`attention` is exact attention, a drop-in for `jax.nn.dot_product_attention`; `why_not` says why an implementation would
not run a call; `CHECKPOINT_NAMES` are the residuals' names for remat policies.
"""

from jax_fa4.attention import attention, why_not
from jax_fa4.autodiff import CHECKPOINT_NAMES

__all__ = ["CHECKPOINT_NAMES", "attention", "why_not"]
