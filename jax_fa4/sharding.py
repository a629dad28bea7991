"""Sharding over the devices of a mesh, written once above every implementation.

Attention is independent for each batch element and each key/value head, so these axes, and those that `jax.vmap` adds,
are split among devices without communication. The query heads of a group can be split further, once a device has a
single key/value head: the gradients of key and value are then sums over devices. All other axes are whole on every
device; where they are not, the partitioner gathers them first (Auto axes), or an error says so (Explicit axes).

Two mechanisms serve JAX's two kinds of mesh axes:

- Auto: `over_auto_axes` puts what an implementation computes into a `custom_partitioning`. XLA's partitioner, Shardy or
  GSPMD, decides about shardings by the rule or the callbacks given here, and has the implementation traced again for
  the shapes of one device. On one device, and in a `jax.shard_map` over all axes, nothing is added to the program.
- Explicit: `over_explicit_axes` finds the shardings in the arrays' types and puts the whole call into a `jax.shard_map`
  over these axes, whose transpose knows the sums in gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

_Axes = tuple[str, ...]
"""Mesh axes, major first."""

# The axes of arrays: b, the batch; n, query heads; k, key/value heads; all others are never split.
_OPERANDS = {
    "query": "btnd",
    "key": "bskd",
    "value": "bskv",
    "scale": "b",
    "lower": "bt",
    "upper": "bt",
    "bias": "bnts",
    "mask": "bnts",
}
RESULTS = ("btnv", "btn", "btn")  # out, lse, its rounding
GRADIENTS = ("btnd", "bskd", "bskv", "b", "bnts")
_ROWS = (*RESULTS, "btnv", "btn")  # what a backward takes beside the operands: the results, dout, dlse
_ARGUMENTS = _OPERANDS | {
    "scale": "",
    "sinks": "n",
    "query_offset": "b",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
    "query_segment_ids": "bt",
    "key_value_segment_ids": "bs",
    "row_bounds": "bt",
}


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of the axes that can be split.

    Attributes:
      lead: of the axes before the batch, outermost first.
      batch: B.
      heads: K.
      group: G.
      shorter: the lengths of operands' batch axes but 1 and B: batch element `b` uses row `b % length` of these.
    """

    lead: tuple[int, ...]
    batch: int
    heads: int
    group: int
    shorter: frozenset[int]

    @classmethod
    def of(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], lead: int) -> _Sizes:
        """From the letters and shapes of query, key and any other arrays, in this order."""
        lengths = {shape[lead] for letters, shape in shapes if letters.startswith("b")}
        heads = shapes[1][1][lead + 2]
        return cls(
            tuple(max(shape[i] for _, shape in shapes) for i in range(lead)),
            batch=max(lengths),
            heads=heads,
            group=shapes[0][1][lead + 2] // max(heads, 1),
            shorter=frozenset(lengths - {1, max(lengths)}),
        )


@dataclasses.dataclass(frozen=True)
class _Split:
    """The mesh axes over which the axes of `_Sizes` are split; `group` only where `heads` leaves one head a device."""

    lead: tuple[_Axes, ...]
    batch: _Axes = ()
    heads: _Axes = ()
    group: _Axes = ()

    @property
    def axes(self) -> _Axes:
        """All of them."""
        return (*itertools.chain(*self.lead), *self.batch, *self.heads, *self.group)

    @classmethod
    def fit(cls, sizes: _Sizes, ways: Mapping[str, int], lead: Sequence[_Axes], batch: _Axes, heads: _Axes) -> _Split:
        """What is possible of a wish: of the mesh axes (`ways` are their sizes) for each axis the first that fit."""

        def first(axes: _Axes, fits: Callable[[int], bool]) -> _Axes:
            fitting = (i for i in range(len(axes), 0, -1) if fits(math.prod(ways[axis] for axis in axes[:i])))
            return axes[: next(fitting, 0)]

        batch = first(
            batch, lambda n: sizes.batch % n == 0 and all(sizes.batch // n % length == 0 for length in sizes.shorter)
        )
        by_head = first(heads, lambda n: sizes.heads % n == 0)
        rest = heads[len(by_head) :]
        whole = math.prod(ways[axis] for axis in by_head) == sizes.heads
        return cls(
            tuple(first(axes, lambda n, size=size: size % n == 0) for axes, size in zip(lead, sizes.lead, strict=True)),  # type: ignore[misc]
            batch,
            by_head,
            first(rest, lambda n: sizes.group % n == 0) if whole else (),
        )

    def spec(self, sizes: _Sizes, letters: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The sharding of an array."""
        lead = len(sizes.lead)
        entries: list[_Axes] = [axes if length > 1 else () for axes, length in zip(self.lead, shape, strict=False)]
        for letter, length in zip(letters, shape[lead:], strict=True):
            match letter:
                case "b":
                    entries.append(self.batch if length == sizes.batch else ())
                case "n":
                    entries.append(self.heads + self.group if length == sizes.heads * sizes.group else ())
                case "k":
                    entries.append(self.heads)
                case _:
                    entries.append(())
        return PartitionSpec(*(axes or None for axes in entries))


def over_auto_axes(
    function: Callable[..., Any], implementation: ModuleType, arguments: tuple[Any, ...], letters: Any, lead: int
) -> Any:
    """`function(arguments)`, split over the Auto axes of whatever mesh the program is compiled for.

    Args:
      function: `functools.partial` of a function of a module and of modules, numbers and dataclasses of them, which say
        all that it computes.
      implementation: what it calls in the end.
      arguments: sorted `Operands`, then rows as `backward` takes them; all with `lead` axes before those that
        they have there, each of length 1 where the array is the same for all of the axis.
      letters: of the results, in a tuple like them.
      lead: the number of those axes, which results have in full.
    """
    operands, *rows = arguments
    named = [*((_OPERANDS[name], x) for name, x in operands._asdict().items() if x is not None)]
    named += [(axes, x) for axes, x in zip(_ROWS, rows, strict=False) if x is not None]
    mesh = jax.sharding.get_abstract_mesh()
    manual = [kind == AxisType.Manual for kind in mesh.axis_types]
    # In a region that is manual over some axes only, GSPMD has to gather: there it partitions no `custom_partitioning`.
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    if any(0 in x.shape for _, x in named):
        return function(arguments)
    arrays = [x for _, x in named]
    if any(manual) and (all(manual) or not shardy):
        return _bind(lambda *arrays: function(jax.tree.unflatten(jax.tree.structure(arguments), arrays)), arrays)
    again = getattr(implementation, "trace_context", lambda: contextlib.nullcontext)()
    plan = _Plan(
        function,
        tuple(axes for axes, _ in named),
        letters,
        lead,
        jax.tree.structure(arguments),
        tuple(zip(mesh.axis_sizes, manual, strict=True)),
        again,
        bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined, unused-ignore]
        jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined, unused-ignore]
    )
    return plan.named(*arrays)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A call that a partitioner may split, and the state of JAX in which it was traced first."""

    function: Callable[..., Any]
    arguments: tuple[str, ...]  # the letters of each
    results: tuple[str, ...]
    lead: int
    tree: Any
    mesh: tuple[tuple[int, bool], ...]  # of the axes of the mesh around, if known: their sizes, whether manual
    again: Callable[[], contextlib.AbstractContextManager[Any]]
    x64: bool
    precision: str | None

    def named(self, *arrays: Array) -> Any:
        """The call, in a function whose name tells it from all others.

        The name is in the program, and so in the keys of JAX's persistent cache. Without it they would not say what the
        partitioned program computes, once `jax_remove_custom_partitioning_ptr_from_cache_key` took a pointer out.
        """
        parts = [*_parts(self.function), self.tree]
        state = getattr(self.again, "args", ()), self.x64, self.precision, _code()
        text = repr([*parts, *state])

        def call(*arrays: Array) -> Any:
            split = custom_partitioning(self.run)
            split.def_partition(
                functools.partial(_partition, self),
                infer_sharding_from_operands=functools.partial(_infer_from_operands, self),
                sharding_rule=functools.partial(_rule, self),
                decode_shardings=False,  # JAX has no names for parts of mesh axes
            )
            return _bind(split, arrays)

        call.__name__ = "jax_fa4_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        return jax.jit(call)(*arrays)

    def run(self, *arrays: Array) -> Any:
        return self.function(jax.tree.unflatten(self.tree, arrays))

    @contextlib.contextmanager
    def traced_again(self) -> Iterator[None]:
        """Whatever holds around the compilation, tracing is what it was around the call."""
        with self.again(), jax.enable_x64(self.x64), jax.default_matmul_precision(self.precision), _without_mesh():
            yield

    def shapes(self, arguments: Sequence[Any], results: Any) -> list[tuple[str, Any]]:
        """The letters and shapes of arguments and results that are there."""
        return [
            *zip(self.arguments, arguments, strict=True),
            *((axes, x) for axes, x in zip(self.results, results, strict=True) if x is not None),
        ]


def _bind(call: Callable[..., Any], arrays: Sequence[Array]) -> Any:
    """`call(*arrays)`, which sees neither a mesh nor over which of its axes arrays vary.

    In a `jax.shard_map` these are parts of the types of arrays, with which an interpreted Pallas call, say, does not
    get along. All operands vary alike there, and so do all results.
    """
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with _without_mesh():
        jaxpr, results = jax.make_jaxpr(call, return_shape=True)(*structs)
    return jax.tree.unflatten(jax.tree.structure(results), _call_p.bind(*arrays, jaxpr=jaxpr))


def _without_mesh() -> Any:
    """A context without a mesh. If the present one names a device to lower for that is not here, so does it."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    mesh = AbstractMesh((), ()) if device is None else AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _types(first: Any, *_: Any, jaxpr: Any) -> list[Any]:
    def whole(x: Any) -> Any:
        here = NamedSharding(first.sharding.mesh, PartitionSpec(*(None,) * x.ndim))
        return first.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=here)

    return [whole(x) for x in jaxpr.out_avals]


def _lower(context: Any, *arrays: Any, jaxpr: Any) -> Any:
    """Lowers a call. If it is a `custom_partitioning`, that may not be possible: then it is what is in there.

    A program that is exported cannot hold it, since it is a pointer to this process. It also wants to know devices,
    which the context lacks in a `jax.shard_map` over some axes of the mesh of `jax.set_mesh`.
    """
    around = context.module_context.axis_context
    partitioned = jaxpr.eqns[0].params.get("call") if jaxpr.eqns[0].primitive.name == "custom_partitioning" else None
    if partitioned is not None and context.module_context.lowering_parameters.for_export:
        jaxpr = partitioned
    elif partitioned is not None and isinstance(getattr(around, "mesh", None), AbstractMesh):
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:  # lowered while something is traced
            mesh = Mesh(np.empty((), object), ())
        if mesh.shape == around.mesh.shape:
            around = dataclasses.replace(around, mesh=mesh)
            context = context.replace(module_context=context.module_context.replace(axis_context=around))
        else:
            jaxpr = partitioned
    context = context.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(context, *arrays)


_call_p = Primitive("jax_fa4_call")
_call_p.multiple_results = True
_call_p.def_impl(lambda *arrays, jaxpr: jaxpr_as_fun(jaxpr)(*arrays))
_call_p.def_abstract_eval(_types)
mlir.register_lowering(_call_p, _lower)


class _Devices:
    """The devices of a program as the finest mesh that its shardings speak of.

    A partitioner may split an array over a part of a mesh axis, as when 8 devices share 2 heads of a width that is
    split too. So the axes of this mesh are the prime factors of the given one's. Its devices are in the order in which
    the program numbers them.
    """

    def __init__(self, plan: _Plan, mesh: Mesh, shapes: Sequence[tuple[str, Any]]) -> None:
        known = [x for _, x in shapes if getattr(x, "sharding", None) is not None]
        tiled = [sharding for sharding in map(_tiles, known) if sharding is not None]
        count = math.prod(tiled[0].tile_assignment_dimensions()) if tiled else 1
        around = [*plan.mesh] if mesh.empty else [(size, False) for size in mesh.devices.shape]
        if math.prod(size for size, is_manual in around if not is_manual) != count:
            around = [(count, False)]
        numbered = itertools.count()
        axes = [([(f"devices{next(numbered)}", n) for n in _prime_factors(size)], manual) for size, manual in around]
        self.parts = [tuple(name for name, _ in parts) for parts, _ in axes]
        devices = list(known[0].sharding._device_assignment)

        def finest(axes: Iterable[list[tuple[str, int]]]) -> Mesh:
            sizes = dict(itertools.chain(*axes)) or {"devices": 1}
            few = devices[: math.prod(sizes.values())]
            return Mesh(np.array(few, object).reshape(tuple(sizes.values())), tuple(sizes))

        self.mesh = finest(parts for parts, is_manual in axes if not is_manual)
        self.all = finest(parts for parts, _ in axes)
        self.ways: dict[str, int] = dict(self.mesh.shape)

    def axes(self, x: Any) -> list[_Axes] | None:
        """The mesh axes of each axis of an array; None where it is not simply split."""
        sharding = _tiles(x)
        if sharding is None:
            return None
        numbers: np.ndarray[Any, Any] = np.array(sharding.tile_assignment_devices()).reshape(
            sharding.tile_assignment_dimensions()
        )
        if numbers.size != self.mesh.size:
            return None
        strides = dict(zip(self.ways, np.cumprod([1, *[*self.ways.values()][:0:-1]])[::-1].tolist(), strict=True))
        found: list[_Axes] = []
        first = (0,) * numbers.ndim
        for dimension in range(len(x.shape)):
            at: list[Any] = [*first]
            at[dimension] = slice(None)
            line: Any = numbers[tuple(at)] - numbers[first]
            axes: _Axes = ()
            while len(line) > 1:
                axis = next((a for a, n in strides.items() if n == line[1] and len(line) % self.ways[a] == 0), None)
                if axis is None:
                    return None
                axes = (axis, *axes)
                line = line[:: self.ways[axis]]
            found.append(axes)
        return found


def _tiles(x: Any) -> Any:
    """XLA's description of how an array is split; None where it is not, or nothing is known."""
    if getattr(x, "sharding", None) is None:
        return None
    sharding = x.sharding._to_xla_hlo_sharding(len(x.shape))
    return sharding if sharding.is_tiled() and not sharding.is_replicated() else None


def _choose(plan: _Plan, mesh: Mesh, arguments: Sequence[Any], results: Any) -> tuple[_Devices, _Sizes, _Split]:
    """How to split a call whose arrays have shardings: as the one whose sharding splits it most, and then as others."""
    shapes = plan.shapes(arguments, results)
    sizes = _Sizes.of([(axes, x.shape) for axes, x in shapes[: len(plan.arguments)]], plan.lead)
    devices = _Devices(plan, mesh, shapes)
    wishes = []
    for letters, x in shapes:
        if (axes := devices.axes(x)) is None:
            continue
        by_letter = dict(zip(letters, axes[plan.lead :], strict=True))
        batch = by_letter.get("b", ()) if x.shape[plan.lead] == sizes.batch else ()
        wishes.append((axes[: plan.lead], batch, by_letter.get("n", ()) or by_letter.get("k", ())))

    def ways(split: _Split) -> int:
        return math.prod(devices.ways[axis] for axis in split.axes)

    fit = functools.partial(_Split.fit, sizes, devices.ways)
    wishes.sort(key=lambda wish: -ways(fit(*wish)))
    split = _Split(((),) * plan.lead)
    for lead, batch, heads in wishes:

        def free(axes: _Axes, taken: _Axes = split.axes) -> _Axes:
            return tuple(itertools.takewhile(lambda axis: axis not in taken, axes))

        split = fit(
            [old or free(new) for old, new in zip(split.lead, lead, strict=True)],
            split.batch or free(batch),
            (split.heads + split.group) or free(heads),
        )
    return devices, sizes, split


def _shardings(plan: _Plan, mesh: Mesh, sizes: _Sizes, split: _Split, results: Any) -> Any:
    """Those of the results."""
    return _like(
        results,
        (
            None if x is None else NamedSharding(mesh, split.spec(sizes, letters, x.shape))
            for letters, x in zip(plan.results, results, strict=True)
        ),
    )


def _like(results: Any, values: Iterable[Any]) -> Any:
    """Values in the place of the results of a pass, a tuple or a named one."""
    return type(results)(*values) if hasattr(results, "_fields") else tuple(values)


def _partition(plan: _Plan, mesh: Mesh, arguments: Any, results: Any) -> tuple[Mesh, Callable[..., Any], Any, Any]:
    devices, sizes, split = _choose(plan, mesh, arguments, results)
    mesh = devices.mesh

    def on_one_device(*arrays: Array) -> Any:
        with plan.traced_again():
            found = plan.run(*arrays)
            # Each device has a term of what is summed over an axis that is split.
            return _like(
                found,
                (
                    None if x is None else _sum_over([a for a in split.axes if a not in _axes_of(sharding.spec)], x)
                    for x, sharding in zip(found, shardings, strict=True)
                ),
            )

    shardings = _shardings(plan, mesh, sizes, split, results)
    of_arguments = tuple(
        NamedSharding(mesh, split.spec(sizes, letters, x.shape))
        for letters, x in zip(plan.arguments, arguments, strict=True)
    )
    return devices.all, on_one_device, shardings, of_arguments


def _sum_over(axes: Sequence[str], x: Array) -> Array:
    return lax.psum(x, tuple(axes)) if axes else x


def _axes_of(spec: PartitionSpec) -> _Axes:
    return tuple(itertools.chain(*map(_entry, spec)))


def _entry(entry: Any) -> _Axes:
    """The mesh axes of one axis of an array."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _infer_from_operands(plan: _Plan, mesh: Mesh, arguments: Any, results: Any) -> Any:
    """GSPMD's question. JAX has no name for an array that is split over a part of a mesh axis: that is no answer."""
    devices, sizes, split = _choose(plan, mesh, arguments, (None,) * len(results))

    def whole(entry: _Axes) -> bool:
        return all(set(part) <= set(entry) or not set(part) & set(entry) for part in devices.parts)

    shardings = _shardings(plan, devices.mesh, sizes, split, results)
    return jax.tree.map(
        lambda x: x.update(spec=PartitionSpec(*(entry if whole(_entry(entry)) else None for entry in x.spec))),
        shardings,
    )


def _rule(plan: _Plan, mesh: Mesh, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Shardy's rule: which axes of the arrays are the same one. Every axis that is never split is one of its own."""
    del mesh
    shapes = [tuple(x.shape) for x in arguments]
    sizes = _Sizes.of([*zip(plan.arguments, shapes, strict=True)], plan.lead)
    whole: list[str] = []

    def factor(length: int, size: int, name: str) -> str:
        if length == size > 1:
            return name
        whole.append(f"whole{len(whole)}")
        return whole[-1]

    head_factors = [name for name, size in (("k", sizes.heads), ("g", sizes.group)) if size > 1]
    names = {
        "b": (sizes.batch, "b"),
        "k": (sizes.heads, "k"),
        "n": (
            sizes.heads * sizes.group,
            f"({' '.join(head_factors)})" if len(head_factors) > 1 else "".join(head_factors),
        ),
    }

    def mapping(letters: str, shape: tuple[int, ...]) -> str:
        lead = [
            factor(length, size, f"lead{i}") for i, (length, size) in enumerate(zip(shape, sizes.lead, strict=False))
        ]
        rest = zip(letters, shape[plan.lead :], strict=True)
        return " ".join([*lead, *(factor(length, *names.get(letter, (0, ""))) for letter, length in rest)])

    left = ", ".join(map(mapping, plan.arguments, shapes))
    # Results that are not there are the last ones.
    right = ", ".join(mapping(letters, tuple(x.shape)) for letters, x in zip(plan.results, results, strict=False))
    options: dict[str, Any] = {"need_replication_factors": tuple(whole)}
    if len(head_factors) > 1:
        options["g"] = sizes.group
    return f"{left} -> {right}", options


@functools.cache
def _code() -> str:
    """A hash of this package's Python code."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _parts(x: Any) -> Iterator[Any]:
    """What a partial function of modules, functions and other partial functions is made of, by name."""
    if isinstance(x, functools.partial):
        for part in (x.func, *x.args):
            yield from _parts(part)
    else:
        yield f"{x.__module__}.{x.__qualname__}" if callable(x) else x.__name__ if isinstance(x, ModuleType) else x


def _prime_factors(number: int) -> list[int]:
    """In ascending order."""
    for divisor in range(2, math.isqrt(number) + 1):
        if number % divisor == 0:
            return [divisor, *_prime_factors(number // divisor)]
    return [number] if number > 1 else []


def over_explicit_axes(function: Callable[[dict[str, Any]], Any], arrays: dict[str, Any]) -> Any:
    """`function(arrays)`, on each device with its part of what is split over Explicit axes of a mesh.

    Args:
      function: of arrays to out (B, T, N, Dv) and lse (B, T, N).
      arrays: arguments of `attention` by name, all with a batch axis but the scale, sinks and a scalar offset.

    Raises:
      ValueError: an array is split along an axis along which attention cannot be, or arrays do not fit together.
    """
    leaves, tree = jax.tree.flatten(arrays)
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in leaves)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {axis for axis, kind in kinds.items() if kind == AxisType.Explicit}
    if not explicit:
        return function(arrays)
    names = [name for name in sorted(arrays) for _ in jax.tree.leaves(arrays[name])]
    letters = [_ARGUMENTS[name][: x.ndim] for name, x in zip(names, leaves, strict=True)]
    shapes = [(_ARGUMENTS[name], arrays[name].shape) for name in ("query", "key")]
    shapes += [(axes, x.shape) for axes, x in zip(letters, leaves, strict=True) if axes.startswith("b")]
    sizes = _Sizes.of(shapes, 0)
    split = _explicit_split(sizes, dict(mesh.shape), [*zip(names, letters, leaves, strict=True)])
    specs = [split.spec(sizes, axes, x.shape) for axes, x in zip(letters, leaves, strict=True)]
    # What is whole where others are split is cut, which moves nothing.
    placed = [jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(leaves, specs, strict=True)]
    out = split.spec(sizes, "btnv", (sizes.batch, 0, sizes.heads * sizes.group, 0))
    results = out, PartitionSpec(*out[:3])

    def call(*leaves: Array) -> Any:
        return function(jax.tree.unflatten(tree, leaves))

    if AxisType.Manual in kinds.values() or _is_mapped(mesh):
        # The gradient of a `shard_map` in another one fails in JAX, and so does that of one over some axes in a vmap.
        shardings = tuple(NamedSharding(mesh, spec) for spec in results)
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.auto_axes(call, axes=tuple(explicit), out_sharding=shardings)(*placed)
    return jax.shard_map(call, mesh=mesh, in_specs=tuple(specs), out_specs=results, axis_names=explicit)(*placed)


def _is_mapped(mesh: AbstractMesh) -> bool:
    """Whether a `jax.vmap` around maps over an axis that is split over Explicit axes of a mesh."""
    inside: list[AbstractMesh] = []

    def look(x: Array) -> Array:
        inside.append(jax.sharding.get_abstract_mesh())
        return x

    # By default it is over all axes but those.
    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()), np.float32(0))
    return any(kind != AxisType.Manual for kind in inside[0].axis_types)


_AXIS_NAMES = {"t": "length", "s": "length", "d": "width", "v": "width"}


def _explicit_split(sizes: _Sizes, ways: dict[str, int], arrays: Sequence[tuple[str, str, Array]]) -> _Split:
    """The split that arrays (name, letters, array) have in their types; raises unless there is one."""
    wishes: dict[str, tuple[str, _Axes]] = {}
    for name, letters, x in arrays:
        spec = jax.typeof(x).sharding.spec
        if getattr(spec, "unreduced", None):
            raise ValueError(f"{name} must not be an unreduced sum, but its sharding is {spec}: reduce it first.")
        for letter, axes in zip(letters.ljust(x.ndim, "?"), map(_entry, spec), strict=False):
            if not axes:
                continue
            if letter not in ("b", "n", "k"):
                raise ValueError(
                    f"{name} must not be sharded along its {_AXIS_NAMES.get(letter, 'only axis')}, but its sharding is "
                    f"{spec}: attention splits the batch and the heads; jax.sharding.reshard it first."
                )
            other, known = wishes.setdefault(letter, (name, axes))
            if known != axes:
                raise ValueError(
                    f"{name} and {other} must be sharded alike along the {'batch' if letter == 'b' else 'heads'}, "
                    f"but got {axes} and {known}: jax.sharding.reshard one of them."
                )
    batch, heads, shared = (wishes.get(letter, ("", ()))[1] for letter in "bnk")
    split = _Split.fit(sizes, ways, (), batch, heads or shared)
    if heads and split.heads + split.group != heads:
        raise ValueError(
            f"query's {sizes.heads * sizes.group} heads must not be sharded over the mesh axes {heads} of sizes "
            f"{tuple(ways[axis] for axis in heads)}, which split the groups of {sizes.heads} key and value heads "
            "unevenly: repeat these heads, or jax.sharding.reshard query."
        )
    if shared and split.heads != shared:
        raise ValueError(
            f"{wishes['k'][0]}'s heads must be sharded over {split.heads} for query's {heads}, but are over {shared}: "
            "jax.sharding.reshard one of them."
        )
    if set(split.batch) & set(split.heads + split.group):
        raise ValueError(
            f"A mesh axis must not shard both batch and heads, but {wishes['b'][0]}'s batch is sharded over {batch} "
            f"and heads over {heads or shared}: jax.sharding.reshard one of them."
        )
    return split
