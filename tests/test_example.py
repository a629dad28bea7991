"""The examples.

Training: packing, no leakage between documents, the losses of jax.nn, checkpoint, plot, figures. Blackwell on a CPU:
the kernel's result, and the timeline that is drawn of it.
"""

import dataclasses
import itertools
import json
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matplotlib import image

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import blackwell_on_cpu
import train_sharded
import train_transformer as example

CONFIG = example.Config(
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_width=8,
    hidden_width=64,
    length=64,
    batch=8,
    steps=30,
    learning_rate=0.03,
)


def assert_drawn(picture: Path) -> None:
    pixels = image.imread(picture)
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 600
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 3


BOTH = pytest.mark.parametrize("attention_fn", [pytest.param(fn, id=name) for name, fn in example.ATTENTION.items()])


@pytest.fixture(scope="module")
def rows() -> tuple[example.Rows, example.Rows]:
    """Rows to train on, with two or three documents each, and held-out rows."""
    lines = Path(dataclasses.__file__).read_bytes().splitlines(keepends=True)
    documents = [line for line in lines if len(line) > 20]
    return example.pack(documents[::2], CONFIG.length), example.pack(documents[1:40:2], CONFIG.length)


def shaken(config: example.Config, attention_fn: example.AttentionFn) -> example.Transformer:
    """A model whose layers all matter: a new one's do not, because their last matrices are zero."""
    model = example.Transformer(config, attention_fn, nnx.Rngs(0))
    keys = nnx.Rngs(1)
    nnx.update(model, jax.tree.map(lambda x: x + 0.3 * jax.random.normal(keys(), x.shape), nnx.state(model)))
    return model


def test_training_has_the_losses_of_jax_nn(rows):
    def causal_only(query, key, value, segments):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    def losses(attention_fn):
        return np.array(example.train(CONFIG, attention_fn, *rows)[1].training)

    expected = losses(example.dense_attention)
    np.testing.assert_allclose(losses(example.flash_attention), expected, rtol=0, atol=1e-2)
    assert expected[-1] < expected[0] - 2  # it learns,
    assert np.abs(losses(causal_only) - expected).max() > 3e-2  # and segments matter


def test_pack_by_hand():
    # The third document ends where the first row does; the fourth is longer than a row; the second is empty.
    packed = example.pack([b"abc", b"", b"de", b"0123456789", b"fg"], 8)
    end = example.SEPARATOR
    tokens = [[end, *b"abc", end, end, *b"de"], [end, *b"0123456"], [*b"789", end, *b"fg", end, end]]
    targets = [[*b"abc", end, end, *b"de", end], [*b"01234567"], [*b"89", end, *b"fg", end, end, end]]
    np.testing.assert_array_equal(packed.tokens, tokens)
    np.testing.assert_array_equal(packed.targets, targets)
    np.testing.assert_array_equal(
        packed.segments, [[1, 1, 1, 1, 2, 3, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 2, 3]]
    )
    np.testing.assert_array_equal(
        packed.positions, [[0, 1, 2, 3, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 0, 0]]
    )
    np.testing.assert_array_equal(
        packed.weights, [[1, 1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0, 0, 0]]
    )
    assert [field.dtype for field in packed] == [np.int32, np.int32, np.int32, np.int32, np.float32]


@pytest.mark.parametrize(
    "documents",
    [
        pytest.param([b"1234567"], id="one document fills the row"),
        pytest.param([b"123", b"567"], id="the last document fills the row"),
        pytest.param([b"12345678"], id="one byte too many"),
        pytest.param([b""], id="nothing"),
        pytest.param([b"", b"x" * 40, b"", b"", bytes(range(256))], id="long and empty"),
    ],
)
def test_every_byte_is_a_target_once(documents):
    packed = example.pack(documents, 8)
    assert bytes(packed.targets[packed.weights > 0].astype(np.uint8)) == b"".join(documents)
    assert len(packed.tokens) == math.ceil(sum(len(document) + 1 for document in documents) / 8)


@BOTH
def test_documents_do_not_see_each_other(attention_fn):
    def logits(*documents: bytes):
        (tokens, _, segments, positions, _) = map(jnp.asarray, example.pack(documents, 24))
        return np.asarray(model(tokens, segments, positions)[0])

    model = shaken(CONFIG, attention_fn)
    before = logits(b"first doc", b"second", b"third")
    after = logits(b"first doc", b"sEcond", b"third")
    second = slice(10, 17)  # its separator and six bytes
    changed = np.abs(after - before).max(-1)
    assert changed[second.start + 2 : second.stop].min() > 1e-2  # the changed byte and those after it
    assert np.delete(changed, range(second.start + 2, second.stop)).max() < 1e-5


@BOTH
def test_a_document_has_the_same_logits_alone(attention_fn):
    model = shaken(CONFIG, attention_fn)

    def logits(*documents: bytes):
        (tokens, _, segments, positions, _) = map(jnp.asarray, example.pack(documents, 16))
        return np.asarray(model(tokens, segments, positions)[0])

    np.testing.assert_allclose(logits(b"before", b"abcdefg")[7:15], logits(b"abcdefg")[:8], atol=1e-4)


def test_unigram_bits_by_hand():
    training, held_out = example.pack([b"aa", b"b"], 8), example.pack([b"ab", b"a"], 8)
    # One is added to each count, so of 3 + 256: 3 for a and 2 for b.
    expected = -(2 * math.log2(3 / 259) + math.log2(2 / 259)) / 3
    assert example.unigram_bits(training, held_out) == pytest.approx(expected, rel=1e-12)


def test_evaluate_is_per_byte(rows):
    """A new model finds all tokens equally likely, whatever the batch and however many separators there are."""
    model = example.Transformer(CONFIG, example.dense_attention, nnx.Rngs(0))
    assert example.evaluate(model, rows[1], batch=3) == pytest.approx(math.log2(example.VOCABULARY), rel=1e-5)


def test_held_out_files_are_others():
    training, held_out = example.library_files()
    assert (training, held_out) == example.library_files()
    assert not set(training) & set(held_out)
    assert not {path.read_bytes() for path in training} & {path.read_bytes() for path in held_out} - {b""}
    assert 0.02 < len(held_out) / len(training + held_out) < 0.12
    assert len(training) > 200
    assert not any("site-packages" in path.parts or "test" in path.parts for path in training)


def test_documents_are_top_level_definitions(tmp_path):
    pieces = [
        b"import a\n\n",
        b"@a.b\ndef f():\n    pass\n\n\n",
        b"class C:\n\n    def g(self): ...\n\n",
        b"def h(): ...\n",
    ]
    (tmp_path / "a.py").write_bytes(b"".join(pieces))
    (tmp_path / "b.py").write_bytes(b"")
    assert list(example.read_documents([tmp_path / "a.py", tmp_path / "b.py"])) == [*pieces, b""]


def test_checkpoint_round_trip(tmp_path, rows):
    config = dataclasses.replace(CONFIG, learning_rate=0.123)
    model = shaken(config, example.flash_attention)
    example.save(tmp_path / "model.safetensors", config, model)
    loaded_config, loaded = example.load(tmp_path / "model.safetensors", example.flash_attention)

    assert loaded_config == config
    assert nnx.graphdef(loaded) == nnx.graphdef(model)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))
    assert example.evaluate(loaded, rows[1], 8) == example.evaluate(model, rows[1], 8)


def test_main_writes_figures_plot_and_checkpoint(tmp_path, monkeypatch, capsys):
    @dataclasses.dataclass(frozen=True)
    class Small(example.Config):
        layers: int = 1
        width: int = 32
        hidden_width: int = 64
        length: int = 64

    files = [some[:20] for some in example.library_files()]
    monkeypatch.setattr(example, "Config", Small)
    monkeypatch.setattr(example, "library_files", lambda: files)
    out = tmp_path / "new" / "run"
    monkeypatch.setattr(sys, "argv", ["train_transformer.py", "--steps", "2", "--seed", "3", "--out", str(out)])
    example.main()

    printed = capsys.readouterr().out
    for part in ("parameters", "tokens/s", "bits per byte", "unigram", "same held-out loss"):
        assert part in printed
    assert_drawn(out / "loss.png")
    config, _ = example.load(out / "model.safetensors", example.dense_attention)
    assert (config.steps, config.seed) == (2, 3)


@pytest.mark.parametrize(
    ("module", "flags", "sentence"),
    [
        (example, ["--steps", "0"], "--steps must be positive, but got 0"),
        (train_sharded, ["--context", "0"], "--data, --context and --steps must be positive"),
        (train_sharded, ["--data", "3"], "--data must divide 4 rows, and --context 256 pairs of tokens"),
        (train_sharded, ["--context", "3"], "--data must divide 4 rows, and --context 256 pairs of tokens"),
        (train_sharded, ["--data", "4", "--context", "256"], "--context 256 needs 1024 devices, but JAX has"),
    ],
)
def test_main_refuses(module, flags, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example.py", *flags])
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)  # this process has its devices
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "largest"), [("forward", 0.04), pytest.param("backward", 0.15, marks=pytest.mark.slow)]
)
def test_blackwell_main_is_right_and_draws(name, largest, tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "run"
    flags = ["--backward"] if name == "backward" else []
    monkeypatch.setattr(sys, "argv", ["blackwell_on_cpu.py", "--seed", "5", "--out", str(out), *flags])
    blackwell_on_cpu.main()

    printed = capsys.readouterr().out
    assert f"sm100_{name}.sm_100f, {name}_bfloat16_128_bounds: 8 CTAs of 512 threads" in printed
    kernel, dense = (float(x) for x in re.findall(r"against float32: ([\d.]+)", printed))
    assert 0 < kernel < 2 * dense < largest
    assert_drawn(out / "timeline.png")
    assert json.loads((out / "trace.json").read_text())["otherData"]["truncated"] is False


def test_blackwell_timeline():
    """The first CTA has the last rows, which see all four blocks of 128 keys."""
    with jax.default_device(jax.devices("cpu")[0]):
        _, launch = blackwell_on_cpu.run(*blackwell_on_cpu.inputs(0), seed=0)
    spans = blackwell_on_cpu.timeline(launch.trace)
    blocks, panels, steps = 4, 2, 128 // 16  # of 64 columns; of a product
    assert len(spans["load"]) == panels * (2 + 2 * blocks)
    assert len(spans["store"]) == panels * 2
    for role in ("QK MMA", "PV MMA"):
        assert [sum(span.tile == tile for span in spans[role]) for tile in range(2)] == [steps * blocks] * 2
    # There is one tensor core, and a tile's weights are multiplied only when they have been computed.
    products = sorted(spans["QK MMA"] + spans["PV MMA"])
    assert all(a.end <= b.start for a, b in itertools.pairwise(products))
    for tile in range(2):
        first, last = ([x for x in spans[role] if x.tile == tile] for role in ("QK MMA", "PV MMA"))
        assert first[steps - 1].end < last[0].start
        assert any(first[steps - 1].end <= x.start and x.end <= last[-1].start for x in spans[f"softmax {tile}"])

    # Whatever a warp of four does to tensor memory, it does while it is busy, and a wait that something ended is none.
    cta = [event for event in launch.trace.events if event.cta == launch.trace.events[0].cta]
    for warp in range(12):
        busy = list(blackwell_on_cpu.busy(cta, warp))
        assert all(a < b <= c < d for (a, b), (c, d) in itertools.pairwise(busy))
        own = [event for event in cta if event.warp == warp]
        accesses = [event.issue for event in own if event.kind == "operation"]
        assert len(accesses) >= 8 * blocks or warp in blackwell_on_cpu.CORRECTION_WARPS  # which may have little to do
        assert all(any(start <= at <= end for start, end in busy) for at in accesses)
        waits = [
            e
            for e in own
            if e.name in ("mbarrier", "barrier") and e.kind == "wait" and busy[0][0] < e.start < busy[-1][1]
        ]
        assert waits  # how often, depends on how far others are
        assert not any(start < wait.end and wait.start < end for wait in waits for start, end in busy)


@pytest.mark.slow
def test_blackwell_timeline_of_the_backward():
    """The first CTA has the first keys, which some row of all four blocks sees, for both heads of the group."""
    with jax.default_device(jax.devices("cpu")[0]):
        _, launch = blackwell_on_cpu.run(*blackwell_on_cpu.inputs(0), seed=0, backward=True)
    spans = blackwell_on_cpu.backward_timeline(launch.trace)
    blocks, panels, steps = 4 * 2, 2, 128 // 16
    assert all(spans.values())
    assert len(spans["load"]) == panels * (2 + 2 * blocks)
    assert len(spans["store"]) == panels * 2
    # What is done for a block of rows, in order; and S of the next before dK and dQ, dP of the next after them.
    products = [spans[f"{name} MMA"] for name in ("S", "dP", "dV", "dK", "dQ")]
    s, dp, dv, dk, dq = ([x[i : i + steps] for i in range(0, len(x), steps)] for x in products)
    assert {len(x) for x in (s, dp, dv, dk, dq)} == {blocks}
    order = [s[0], dp[0], dv[0]]
    for i in range(1, blocks):
        order += [s[i], dk[i - 1], dq[i - 1], dp[i], dv[i]]
    order += [dk[-1], dq[-1]]
    assert all(a.end <= b.start for a, b in itertools.pairwise(itertools.chain(*order)))
    add = [spans["add"][i : i + 4] for i in range(0, len(spans["add"]), 4)]
    assert len(add) == blocks
    for i in range(blocks):
        assert {x.tile for x in (*s[i], *dp[i], *dv[i], *dk[i], *dq[i], *add[i])} == {i % 2}
        assert dq[i][-1].end < add[i][0].start
        for name in ("compute 0", "compute 1"):
            assert any(s[i][-1].end <= x.end and x.start <= dv[i][0].start for x in spans[name])
        assert any(dq[i][-1].end <= x.start <= add[i][0].start for x in spans["reduce"])
