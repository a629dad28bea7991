"""The suite on `cuda`: every test that needs a GPU skips without one; and what can be seen of it without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite import AttentionSuite

from jax_fa4 import attention, why_not


@pytest.mark.gpu
class TestCuda(AttentionSuite):
    implementation = "cuda"
    dtypes = ("float16", "bfloat16", "float32")
    dense = False


X = jax.ShapeDtypeStruct((2, 5, 4, 8), jnp.bfloat16)


def lowered(implementation: str | None, platform: str, x: jax.ShapeDtypeStruct = X) -> str:
    def loss(x: jax.Array) -> jax.Array:
        return attention(x, x, x, is_causal=True, implementation=implementation).astype(np.float32).sum()

    return jax.jit(jax.value_and_grad(loss)).trace(x).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_lowered_for_gpus_on_a_machine_without_one(implementation: str | None) -> None:
    text = lowered(implementation, "cuda")
    assert text.count("@jax_fa4_forward_v1") == 1
    assert text.count("@jax_fa4_backward_v1") == 1


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_automatic_choice_on_other_platforms(platform: str) -> None:
    assert "custom_call @jax_fa4" not in lowered(None, platform)


def test_automatic_choice_where_no_kernel_applies() -> None:
    assert "custom_call @jax_fa4" not in lowered(None, "cuda", jax.ShapeDtypeStruct((2, 5, 4, 264), jnp.bfloat16))


def test_lowered_for_a_platform_that_it_is_not_for() -> None:
    with pytest.raises(NotImplementedError, match="'cuda' needs an NVIDIA GPU, but this is for the platform 'cpu'"):
        lowered("cuda", "cpu")
    with pytest.raises(NotImplementedError, match="'emulated' runs on the CPU, but this is for the platform 'cuda'"):
        lowered("emulated", "cuda")


def test_why_not() -> None:
    cpu = jax.devices("cpu")[0]
    assert why_not("cuda", X, X, X, device=cpu) == (
        "implementation='cuda' needs an NVIDIA GPU, but this is for the platform 'cpu'."
    )
    wide = jax.ShapeDtypeStruct((2, 5, 4, 264), jnp.bfloat16)
    assert why_not("emulated", wide, wide, wide, device=cpu) == (
        "implementation='emulated' supports head widths up to 256, but got D=264, Dv=264."
    )
    mask = jax.ShapeDtypeStruct((5, 5), bool)
    assert "does not support mask" in str(why_not("emulated", X, X, X, mask=mask, device=cpu))
    assert why_not("emulated", X, X, X, device=cpu) is None


class FakeGpu:
    platform = "gpu"

    def __init__(self, capability: str, kind: str) -> None:
        self.compute_capability, self.device_kind = capability, kind


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (FakeGpu("8.0", "NVIDIA A100"), None),
        (FakeGpu("10.3", "NVIDIA B300"), None),
        (FakeGpu("7.5", "Tesla T4"), "compute capability 8.0 or newer, but this has 7.5"),
        (FakeGpu("gfx942", "AMD Instinct MI300X"), "needs an NVIDIA GPU, but this is AMD Instinct MI300X"),
    ],
    ids=["A100", "B300", "T4", "MI300X"],
)
def test_which_gpus(device: FakeGpu, reason: str | None) -> None:
    got = why_not("cuda", X, X, X, device=device)
    assert got is None if reason is None else reason in str(got)
