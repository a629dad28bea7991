"""Train the transformer of train_transformer.py on a mesh of devices: rows over one axis, their tokens over another.

    python examples/train_sharded.py

A CPU is made eight devices for it; GPUs are taken as they are. It trains the same model on one device, too, and prints
both losses: they differ by rounding.

Two things are different from one device. Attention is `jax_fa4.parallel.ring_attention` in a `jax.shard_map`, since a
token sees tokens of other devices. And the tokens of a row are put in the order in which the devices have them, once,
when the data is made: everything else in the model treats tokens one by one, so that `jax.jit` shards it along.
"""

import argparse
import functools

import jax
import numpy as np
import train_transformer as example
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa4.parallel import ring_attention, to_layout

LAYOUT = "zigzag"  # under a causal mask all devices have the same work
BY_ROW_AND_TOKEN = P("data", "context")


def make_mesh(data: int, context: int) -> Mesh:
    """Rows are sharded over `data` groups of devices, the tokens of a row over the `context` devices of a group."""
    devices = jax.devices()[: data * context]
    return jax.make_mesh((data, context), ("data", "context"), (AxisType.Auto,) * 2, devices=devices)


def sharded_attention(mesh: Mesh) -> example.AttentionFn:
    """As `example.flash_attention`, of arrays in the layout's order that are sharded over the mesh."""

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(BY_ROW_AND_TOKEN,) * 4, out_specs=BY_ROW_AND_TOKEN)
    def attend(query: Array, key: Array, value: Array, segments: Array) -> Array:
        return ring_attention(
            query,
            key,
            value,
            axis_name="context",
            layout=LAYOUT,
            is_causal=True,
            query_segment_ids=segments,
            key_value_segment_ids=segments,
        )

    return attend


def lay_out(mesh: Mesh, rows: example.Rows) -> example.Rows:
    """Puts the tokens of every row in the layout's order, with all that belongs to them."""
    return example.Rows(*(np.asarray(to_layout(x, LAYOUT, mesh.shape["context"])) for x in rows))


def place(mesh: Mesh) -> example.Place:
    """Shards a batch, of rows in the layout's order, over the mesh."""
    return functools.partial(jax.device_put, device=NamedSharding(mesh, BY_ROW_AND_TOKEN))


def train(
    mesh: Mesh, config: example.Config, rows: example.Rows, held_out: example.Rows
) -> tuple[example.Transformer, example.History]:
    """As `example.train`, on a mesh: the batch and the length are multiples of its axes, the latter of twice that."""
    with jax.set_mesh(mesh):  # parameters are made on all its devices
        return example.train(config, sharded_attention(mesh), lay_out(mesh, rows), lay_out(mesh, held_out), place(mesh))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=2, help="devices along the axis of rows")
    parser.add_argument("--context", type=int, default=4, help="devices along the axis of tokens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=example.Config.seed)
    options = parser.parse_args()
    config, devices = example.Config(steps=options.steps, seed=options.seed), options.data * options.context
    if min(options.data, options.context, options.steps) < 1:
        parser.error("--data, --context and --steps must be positive")
    if config.batch % options.data or config.length % (2 * options.context):
        parser.error(f"--data must divide {config.batch} rows, and --context {config.length // 2} pairs of tokens")
    jax.config.update("jax_num_cpu_devices", devices)
    if (there := len(jax.devices())) < devices:
        parser.error(f"--data {options.data} --context {options.context} needs {devices} devices, but JAX has {there}")
    mesh = make_mesh(options.data, options.context)

    training, held_out = (example.pack(example.read_documents(x), config.length) for x in example.library_files())
    held_out = held_out.take(slice(8 * config.batch))
    _, one = example.train(config, example.flash_attention, training, held_out)
    _, many = train(mesh, config, training, held_out)
    print(f"{'step':>4}  one device  {mesh.size} devices  (bits per byte)")
    for step, losses in enumerate(zip(one.training, many.training, strict=True), 1):
        print(f"{step:4}  {losses[0]:10.4f}  {losses[1]:9.4f}")
    print(f"held-out loss {one.held_out[config.steps]:.4f} and {many.held_out[config.steps]:.4f}")
    largest = np.abs(np.subtract(one.training, many.training)).max()
    print(f"the losses differ by at most {largest:.1e} on {mesh.size} {jax.devices()[0].platform} devices")


if __name__ == "__main__":
    main()
