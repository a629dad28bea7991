"""Continue a text with the model that train_transformer.py has trained.

    python examples/train_transformer.py
    python examples/generate.py "def read_config(path):"

A cache keeps the keys and values of the tokens so far, so that each token costs one row of attention. The whole prompt
is read in one call, and every token after it in one more, all by the same function, `read`: `jax_fa4.attention` takes
how many tokens the cache holds as traced arrays, so that `read` is compiled twice, for all prompts and for all tokens.
Prompts of a batch may differ in length.

Sizes in the shapes below: B prompts, S tokens that the cache has room for, T tokens in a call, K key/value heads, D
head width, V vocabulary.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from train_transformer import SEPARATOR, Config, Transformer, flash_attention, load

import jax_fa4


class Cache(NamedTuple):
    """Keys and values of the tokens that a model has read."""

    keys: tuple[Array, ...]  # one a layer, (B, S, K, D)
    values: tuple[Array, ...]
    lengths: Array  # int32 (B,): the tokens read; what stands behind them is not valid

    @classmethod
    def empty(cls, config: Config, batch: int) -> "Cache":
        """A cache with room for as many tokens as the model was trained with."""
        shape = (batch, config.length, config.kv_heads, config.head_width)
        keys, values = (tuple(jnp.zeros(shape) for _ in range(config.layers)) for _ in range(2))
        return cls(keys, values, jnp.zeros(batch, jnp.int32))


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def read(
    graph: nnx.GraphDef[Transformer], parameters: nnx.State, cache: Cache, tokens: Array, counts: Array
) -> tuple[Array, Cache]:
    """Reads the first `counts` (B,) of each row of tokens (B, T), at least one.

    Returns the logits of what follows the last of them, (B, V), and the cache with all of them.
    """
    model = nnx.merge(graph, parameters)
    start, end = cache.lengths, cache.lengths + counts
    write = jax.vmap(lambda old, new, place: lax.dynamic_update_slice_in_dim(old, new, place, axis=0))
    keys, values = list(cache.keys), list(cache.values)

    def attend(layer: int, query: Array, key: Array, value: Array, segments: Array) -> Array:
        keys[layer] = write(keys[layer], key, start)
        values[layer] = write(values[layer], value, start)
        return jax_fa4.attention(
            query, keys[layer], values[layer], is_causal=True, query_offset=start, key_value_seq_lengths=end
        )

    for layer, block in enumerate(model.blocks):
        block.attention.attention_fn = functools.partial(attend, layer)
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    logits = model(tokens, jnp.zeros_like(tokens), positions)
    return logits[jnp.arange(len(tokens)), counts - 1], Cache(tuple(keys), tuple(values), end)


# Maps the tokens so far, int32 (B, S), of which the first `lengths` (B,) count, to the logits of the next, (B, V).
Next = Callable[[np.ndarray, np.ndarray], Array]


def with_cache(config: Config, model: Transformer, batch: int) -> Next:
    """Reads only what it has not read before: the prompts at first, then one token a call."""
    graph, parameters = nnx.split(model)
    cache = Cache.empty(config, batch)

    def following(tokens: np.ndarray, lengths: np.ndarray) -> Array:
        nonlocal cache
        new = lengths - np.asarray(cache.lengths)
        if (new > 1).any():
            logits, cache = read(graph, parameters, cache, tokens, new)
        else:
            logits, cache = read(graph, parameters, cache, tokens[np.arange(batch), lengths - 1, None], new)
        return logits

    return following


def without_cache(config: Config, model: Transformer, batch: int) -> Next:
    """Reads everything anew each time."""
    positions = jnp.broadcast_to(jnp.arange(config.length), (batch, config.length))
    forward = nnx.jit(lambda model, tokens: model(tokens, jnp.zeros_like(tokens), positions))
    return lambda tokens, lengths: forward(model, tokens)[np.arange(batch), lengths - 1]


def generate(
    config: Config, following: Next, prompts: list[bytes], count: int, temperature: float = 0.0, seed: int = 0
) -> Iterator[np.ndarray]:
    """Yields `count` times the next byte of each text, uint8 (B,): at temperature 0 the likeliest, else at random."""
    lengths = np.array([1 + len(prompt) for prompt in prompts], np.int32)
    if lengths.max() + count > config.length:
        raise SystemExit(
            f"{lengths.max() - 1} bytes and {count} more are too many: the model knows {config.length - 1}"
        )
    tokens = np.full((len(prompts), config.length), SEPARATOR, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[1 : 1 + len(prompt)] = list(prompt)
    for step in range(count):
        logits = following(tokens, lengths)[:, :SEPARATOR]  # texts of the standard library have bytes to the end
        if temperature:
            key = jax.random.fold_in(jax.random.key(seed), step)
            chosen = jax.random.categorical(key, logits / temperature)
        else:
            chosen = logits.argmax(-1)
        tokens[np.arange(len(prompts)), lengths] = chosen
        lengths += 1
        yield np.asarray(chosen, np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/train_transformer/model.safetensors"))
    parser.add_argument("--count", type=int, default=200, help="bytes to add to each prompt")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 for the likeliest byte, 1 for the model's odds"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="whether to generate the same again without a cache")
    options = parser.parse_args()
    if options.count < 1 or options.temperature < 0:
        parser.error("--count must be positive and --temperature must not be negative")
    if not options.checkpoint.is_file():
        parser.error(f"there is no checkpoint {options.checkpoint}: python examples/train_transformer.py writes it")
    config, model = load(options.checkpoint, flash_attention)
    prompts = [prompt.encode() for prompt in options.prompts]

    def run(make: Callable[[Config, Transformer, int], Next]) -> tuple[list[bytes], float]:
        """The texts after the prompts, and how many bytes a second come once all is compiled."""
        columns, seconds, start = [], [], time.perf_counter()
        following = make(config, model, len(prompts))
        for column in generate(config, following, prompts, options.count, options.temperature, options.seed):
            columns.append(column)
            seconds.append(time.perf_counter() - start - sum(seconds))
        return [bytes(row) for row in np.stack(columns, 1)], len(prompts) / float(np.median(seconds))

    texts, speed = run(with_cache)
    for prompt, text in zip(prompts, texts, strict=True):
        print((prompt + text).decode(errors="replace"), end="\n\n")
    print(f"{speed:,.0f} bytes/s")
    if options.check:
        again, slower = run(without_cache)
        if again != texts:
            raise SystemExit("without a cache the texts differ")
        print(f"without a cache the texts are the same, at {slower:,.0f} bytes/s")


if __name__ == "__main__":
    main()
