"""Train a small decoder-only transformer on the sources of Python's standard library.

    python examples/train_transformer.py

It takes two minutes on two CPU cores and downloads nothing: the text is in every Python installation. Tokens are bytes.
Documents are packed into rows of one length, and segment ids keep attention inside each document: `jax_fa4.attention`
takes the ids as they are, and never builds the (T, T) mask.

Sizes in the shapes below: B rows, T tokens in a row, N query heads, K key/value heads, D head width, V vocabulary.
"""

import argparse
import dataclasses
import functools
import json
import math
import re
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.flax import save_file
from tqdm import tqdm

import jax_fa4

SEPARATOR = 256  # the token before each document; tokens 0 to 255 are bytes
VOCABULARY = SEPARATOR + 1
BITS = 1 / math.log(2)  # in a nat


@dataclasses.dataclass(frozen=True)
class Config:
    """A model and its training; the defaults make the most of two minutes on two CPU cores."""

    layers: int = 4
    width: int = 192
    heads: int = 6  # N
    kv_heads: int = 2  # K
    head_width: int = 32  # D
    hidden_width: int = 512
    length: int = 512  # T
    batch: int = 4  # B
    steps: int = 400
    learning_rate: float = 1e-2
    seed: int = 0


# Maps query (B, T, N, D), key and value (B, T, K, D) and segments (B, T) to (B, T, N, D): causal, inside each segment.
AttentionFn = Callable[[Array, Array, Array, Array], Array]


def flash_attention(query: Array, key: Array, value: Array, segments: Array) -> Array:
    return jax_fa4.attention(
        query, key, value, is_causal=True, query_segment_ids=segments, key_value_segment_ids=segments
    )


def dense_attention(query: Array, key: Array, value: Array, segments: Array) -> Array:
    mask = segments[:, None, :, None] == segments[:, None, None, :]  # (B, 1, T, T)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)


ATTENTION: dict[str, AttentionFn] = {"jax_fa4": flash_attention, "jax_nn": dense_attention}


def rotate(x: Array, positions: Array) -> Array:
    """Rotary position embedding: turns x (B, T, heads, D) by angles proportional to positions (B, T)."""
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Config, attention_fn: AttentionFn, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.query = linear(config.width, config.heads * config.head_width)
        self.key = linear(config.width, config.kv_heads * config.head_width)
        self.value = linear(config.width, config.kv_heads * config.head_width)
        self.out = linear(config.heads * config.head_width, config.width, kernel_init=nnx.initializers.zeros)
        self.head_width = config.head_width
        self.attention_fn = attention_fn

    def __call__(self, x: Array, segments: Array, positions: Array) -> Array:
        """Maps x (B, T, width) to (B, T, width)."""
        heads = (*x.shape[:2], -1, self.head_width)
        query = rotate(self.query(x).reshape(heads), positions)
        key = rotate(self.key(x).reshape(heads), positions)
        value = self.value(x).reshape(heads)
        return self.out(self.attention_fn(query, key, value, segments).reshape(*x.shape[:2], -1))


class FeedForward(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate = linear(config.width, config.hidden_width)
        self.up = linear(config.width, config.hidden_width)
        self.down = linear(config.hidden_width, config.width, kernel_init=nnx.initializers.zeros)

    def __call__(self, x: Array) -> Array:
        """Maps x (B, T, width) to (B, T, width)."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and feed-forward, each on normalised input. A new block is the identity: both end in zeros."""

    def __init__(self, config: Config, attention_fn: AttentionFn, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, attention_fn, rngs)
        self.feed_forward_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs)

    def __call__(self, x: Array, segments: Array, positions: Array) -> Array:
        """Maps x (B, T, width) to (B, T, width)."""
        x = x + self.attention(self.attention_norm(x), segments, positions)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nnx.Module):
    """A decoder-only transformer over packed rows. A new one finds all tokens equally likely."""

    def __init__(self, config: Config, attention_fn: AttentionFn, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, attention_fn, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCABULARY, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, tokens: Array, segments: Array, positions: Array) -> Array:
        """Maps tokens, segments and positions, int32 (B, T), to the logits of the next tokens, (B, T, V)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, segments, positions)
        return self.head(self.norm(x))


class Rows(NamedTuple):
    """Packed documents; every field is (rows, T)."""

    tokens: np.ndarray  # int32
    targets: np.ndarray  # int32: the token after each token
    segments: np.ndarray  # int32: equal inside a document
    positions: np.ndarray  # int32: restart with each document
    weights: np.ndarray  # float32: 0 where the target begins another document, else 1

    def take(self, index: np.ndarray | slice) -> "Rows":
        return Rows(*(field[index] for field in self))


def pack(documents: Iterable[bytes], length: int) -> Rows:
    """Lays documents end to end, a separator before each, and cuts the line into rows of `length` tokens.

    Every byte is a target of weight 1 exactly once. A document cut by the end of a row goes on in the next row as a
    segment of its own. Separators, which are empty documents, fill up the last row.
    """
    pieces = [np.array([SEPARATOR, *document], np.int32) for document in documents]
    stream = np.concatenate(pieces)
    rows = math.ceil(len(stream) / length)
    stream = np.pad(stream, (0, rows * length + 1 - len(stream)), constant_values=SEPARATOR)
    tokens, targets = stream[:-1].reshape(rows, length), stream[1:].reshape(rows, length)
    starts, column = tokens == SEPARATOR, np.arange(length, dtype=np.int32)
    return Rows(
        tokens,
        targets,
        segments=np.cumsum(starts, axis=1, dtype=np.int32),
        positions=column - np.maximum.accumulate(np.where(starts, column, 0), axis=1),
        weights=(targets != SEPARATOR).astype(np.float32),
    )


def batches(rows: Rows, size: int, seed: int) -> Iterator[Rows]:
    """Yields batches of `size` rows without end, every epoch in a new order."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(rows.tokens))
        for start in range(0, len(order) - size + 1, size):
            yield rows.take(order[start : start + size])


def library_files() -> tuple[list[Path], list[Path]]:
    """Lists the standard library's files: those to train on, and the held-out ones, one in 16 chosen by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "site-packages", "dist-packages", "encodings", "pydoc_data"}  # last: tables
    files: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped.isdisjoint(name.parts):
            files[zlib.crc32(name.as_posix().encode()) % 16 == 0].append(path)
    return files


def read_documents(files: Iterable[Path]) -> Iterator[bytes]:
    """Yields each top-level definition, and what stands before a file's first: rows hold parts of several of them."""
    for path in files:
        yield from re.split(rb"(?<=\n\n)(?=@|class |def |async def )", path.read_bytes())


def unigram_bits(training: Rows, held_out: Rows) -> float:
    """Bits per byte on `held_out` of the model that knows only how frequent each byte is in `training`."""
    counts = np.bincount(training.targets[training.weights > 0], minlength=256) + 1  # no byte is impossible
    return -np.log2(counts / counts.sum())[held_out.targets[held_out.weights > 0]].mean()


class History(NamedTuple):
    """What `train` measured; losses are in bits per byte."""

    training: list[float]  # of each step
    held_out: dict[int, float]  # after some of the steps, the last one included
    tokens_per_second: float


def total_loss(model: Transformer, rows: Rows) -> Array:
    """Sums the loss over all bytes of `rows`, in nats."""
    tokens, targets, segments, positions, weights = map(jnp.asarray, rows)
    logits = model(tokens, segments, positions)
    return (optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights).sum()


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: Transformer, optimizer: nnx.Optimizer, rows: Rows) -> Array:
    """Updates model and optimizer in place; returns the loss per byte before that, in nats."""
    loss, gradients = nnx.value_and_grad(lambda model: total_loss(model, rows) / rows.weights.sum())(model)
    optimizer.update(model, gradients)
    return loss


evaluation_step = nnx.jit(total_loss)


# Puts a batch where it is to be computed; by default it is left to JAX.
Place = Callable[[Rows], Rows]


def evaluate(model: Transformer, rows: Rows, batch: int, place: Place = lambda rows: rows) -> float:
    """Bits per byte of `model` on `rows`, `batch` rows at a time."""
    starts = range(0, len(rows.tokens), batch)
    nats = sum(float(evaluation_step(model, place(rows.take(slice(start, start + batch))))) for start in starts)
    return nats * BITS / float(rows.weights.sum())


def train(
    config: Config, attention_fn: AttentionFn, rows: Rows, held_out: Rows, place: Place = lambda rows: rows
) -> tuple[Transformer, History]:
    """Trains a new model on `rows`; on the way measures its loss on `held_out` five times."""
    model = Transformer(config, attention_fn, nnx.Rngs(config.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.steps // 10, config.steps)
    # Muon for matrices, scaled to want the learning rates of Adam, which the norms get: needs half of Adam's steps.
    optimizer = nnx.Optimizer(model, optax.contrib.muon(schedule, consistent_rms=0.2), wrt=nnx.Param)

    losses: list[float] = []
    seconds: list[float] = []
    held_out_losses: dict[int, float] = {}
    bar = tqdm(range(1, config.steps + 1), unit="step")
    for step, batch in zip(bar, batches(rows, config.batch, config.seed), strict=False):
        start = time.perf_counter()
        losses.append(float(train_step(model, optimizer, place(batch))) * BITS)
        seconds.append(time.perf_counter() - start)
        if step % max(1, config.steps // 5) == 0 or step == config.steps:
            held_out_losses[step] = evaluate(model, held_out, config.batch, place)
        bar.set_postfix(bits=f"{losses[-1]:.3f}")
    return model, History(losses, held_out_losses, config.batch * config.length / float(np.median(seconds)))


# safetensors rather than orbax-checkpoint: a stable format that needs no other package, and one file for all.
def save(path: Path, config: Config, model: Transformer) -> None:
    """Writes config and parameters."""
    tensors = {".".join(map(str, name)): variable[...] for name, variable in nnx.to_flat_state(nnx.state(model))}
    save_file(tensors, path, metadata={"config": json.dumps(dataclasses.asdict(config))})


def load(path: Path, attention_fn: AttentionFn) -> tuple[Config, Transformer]:
    """Reads what `save` wrote."""
    with safe_open(path, framework="flax") as file:
        config = Config(**json.loads(file.metadata()["config"]))
        graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, attention_fn, nnx.Rngs(0))))
        for name, variable in nnx.to_flat_state(state):
            variable.set_value(file.get_tensor(".".join(map(str, name))))
    return config, nnx.merge(graph, state)


def plot(path: Path, history: History, unigram: float) -> None:
    """Draws the losses of training, of the held-out files, and of the unigram model there."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(history.training) + 1), history.training, linewidth=0.8, alpha=0.6, label="training")
    axes.plot(list(history.held_out), list(history.held_out.values()), "o-", label="held-out files")
    axes.axhline(unigram, color="gray", linestyle="--", label="held-out files, unigram model")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--attention", choices=ATTENTION, default="jax_fa4")
    parser.add_argument("--out", type=Path, default=Path("runs/train_transformer"))
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be positive, but got {options.steps}")
    config, attention_fn = Config(steps=options.steps, seed=options.seed), ATTENTION[options.attention]
    options.out.mkdir(parents=True, exist_ok=True)

    training, held_out = (pack(read_documents(files), config.length) for files in library_files())
    held_out = held_out.take(np.random.default_rng(0).permutation(len(held_out.tokens))[:128])  # two seconds' worth
    print(f"{training.weights.sum():,.0f} training bytes, {held_out.weights.sum():,.0f} held-out bytes")

    model, history = train(config, attention_fn, training, held_out)
    bits, unigram = history.held_out[config.steps], unigram_bits(training, held_out)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    print(f"{parameters:,} parameters, {history.tokens_per_second:,.0f} tokens/s")
    print(f"held-out loss {bits:.3f} bits per byte, {bits / unigram:.0%} of a unigram byte model's {unigram:.3f}")

    plot(options.out / "loss.png", history, unigram)
    checkpoint = options.out / "model.safetensors"
    save(checkpoint, config, model)
    _, reloaded = load(checkpoint, attention_fn)
    if (again := evaluate(reloaded, held_out, config.batch)) != bits:
        raise SystemExit(f"{checkpoint} gives {again} bits per byte when loaded, but {bits} before it was saved")
    print(f"wrote loss.png and model.safetensors to {options.out}; loaded again, the model has the same held-out loss")


if __name__ == "__main__":
    main()
