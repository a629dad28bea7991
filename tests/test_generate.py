"""examples/generate.py: what it generates with a cache is what it generates without one."""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import generate as example
import train_transformer

CONFIG = train_transformer.Config(
    layers=2, width=32, heads=4, kv_heads=2, head_width=8, hidden_width=64, length=64, batch=8, steps=30
)
PROMPTS = [b"class Cache(NamedTuple):", b"d", b"for layer, "]


@pytest.fixture(scope="module")
def model() -> train_transformer.Transformer:
    """All of its layers matter: those of a new one do not, because their last matrices are zero."""
    model = train_transformer.Transformer(CONFIG, train_transformer.flash_attention, nnx.Rngs(0))
    keys = nnx.Rngs(1)
    nnx.update(model, jax.tree.map(lambda x: x + 0.3 * jax.random.normal(keys(), x.shape), nnx.state(model)))
    return model


def test_as_without_a_cache(model):
    """Token for token, in three batches of prompts; `read` is compiled once for prompts and once for tokens."""

    def run(make, prompts, **options):
        following = make(CONFIG, model, len(prompts))
        return np.stack(list(example.generate(CONFIG, following, prompts, 39, **options)))

    example.read.clear_cache()
    texts = []
    for prompts, options in ((PROMPTS, {}), (PROMPTS[::-1], {"temperature": 0.7, "seed": 5}), ([b"", b"x", b"yz"], {})):
        texts.append(run(example.with_cache, prompts, **options))
        assert example.read._cache_size() == 2
        np.testing.assert_array_equal(texts[-1], run(example.without_cache, prompts, **options))
    assert all(len(np.unique(column)) > 5 for text in texts for column in text.T)  # and not the same byte over and over
    another = run(example.with_cache, PROMPTS[::-1], temperature=0.7, seed=6)
    assert (another != texts[1]).mean() > 0.5


def test_logits_with_a_cache_are_as_good_as_those_of_jax_nn(model):
    """Against one call with the whole text in float64: at most twice the error of one in float32, and rounding."""
    text = np.random.default_rng(0).integers(0, 256, (3, CONFIG.length), np.int32)
    parameters = nnx.state(model)

    def whole(attention_fn, parameters):
        graph = nnx.graphdef(train_transformer.Transformer(CONFIG, attention_fn, nnx.Rngs(0)))
        positions = np.broadcast_to(np.arange(CONFIG.length, dtype=np.int32), text.shape)
        return np.asarray(jax.jit(nnx.merge(graph, parameters))(text, np.zeros_like(text), positions))

    own = whole(train_transformer.dense_attention, parameters)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)
        exact = whole(train_transformer.flash_attention, wide)  # jax.nn's softmax would be float32
    assert (own.dtype, exact.dtype) == (np.float32, np.float64)
    rounding = np.finfo(np.float32).eps / 2 * np.abs(exact).max()
    tolerance = 2 * (np.abs(own - exact).max() + rounding) + rounding
    assert tolerance < 1e-3

    following = example.with_cache(CONFIG, model, 3)
    lengths = np.array([25, 2, 12], np.int32)
    for _ in range(39):
        assert np.abs(following(text, lengths) - exact[np.arange(3), lengths - 1]).max() <= tolerance
        lengths += 1


def test_too_long(model):
    with pytest.raises(SystemExit, match="40 bytes and 24 more are too many: the model knows 63"):
        next(example.generate(CONFIG, example.with_cache(CONFIG, model, 1), [b"x" * 40], 24))


def test_main_says_where_a_checkpoint_comes_from(tmp_path, monkeypatch, capsys):
    path = tmp_path / "model.safetensors"
    monkeypatch.setattr(sys, "argv", ["generate.py", "x", "--checkpoint", str(path)])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert f"there is no checkpoint {path}: python examples/train_transformer.py writes it" in capsys.readouterr().err


def test_main_continues_from_a_checkpoint(model, tmp_path, monkeypatch, capsysbinary):
    path = tmp_path / "model.safetensors"
    train_transformer.save(path, dataclasses.replace(CONFIG), model)
    flags = ["--checkpoint", str(path), "--count", "20", "--temperature", "0.5", "--check"]
    monkeypatch.setattr(sys, "argv", ["generate.py", "import ", "x", *flags])
    example.main()
    printed = capsysbinary.readouterr().out.decode()
    assert printed.startswith("import ")
    assert "\n\nx" in printed
    assert re.search(r"\n\n[\d,]+ bytes/s\nwithout a cache the texts are the same, at [\d,]+ bytes/s\n$", printed)
