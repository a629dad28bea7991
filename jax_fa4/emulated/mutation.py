"""Mutation of PTX: plant one fault at a time and see whether running the kernel notices.

What is not noticed shows what a kernel's tests miss, what the emulator misses, or what the kernel does not need.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from jax_fa4.emulated import Kernel


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A kernel with one fault.

    Attributes:
      line: of the PTX, from 1.
      kind: what was done, such as "drop" or "flip parity".
      before: the instruction.
      after: what stands in its place.
    """

    line: int
    kind: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a mutant: for each seed how it was noticed, or None where it was not."""

    mutant: Mutant
    noticed: tuple[str | None, ...]

    @property
    def survived(self) -> bool:
        """Whether no seed noticed it."""
        return not any(self.noticed)


_INSTRUCTION = re.compile(r"^\s*(?:\$?\w+:\s*)?(?P<guard>@!?[%\w]+\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>[^;]*);")
_DROPPED = re.compile(
    r"mbarrier\.(init|inval|arrive|expect_tx|complete_tx)|bar\.|barrier\.|fence\.|setmaxnreg|cp\.(reduce\.)?async|"
    r"tcgen05\.(mma|commit|ld|st|wait|fence|alloc|dealloc)|wgmma\.|stmatrix|ldmatrix|st\.shared|red\.|atom\."
)


def mutants(ptx: str) -> Iterator[Mutant]:
    """All mutants of a module: of synchronisation, waits, parities, counts, sizes, coordinates and descriptors."""
    for number, text in enumerate(ptx.split("\n"), 1):
        if found := _INSTRUCTION.match(text):
            opcode, guard = found["opcode"], found["guard"] or ""
            for kind, after in _changes(opcode, guard, _split(found["operands"])):
                yield Mutant(number, kind, text.strip(), after)


def mutated(ptx: str, *changes: Mutant) -> str:
    """The text with the faults of some mutants of it."""
    lines = ptx.split("\n")
    for mutant in changes:
        lines[mutant.line - 1] = mutant.after
    return "\n".join(lines)


def judge(
    ptx: str, chosen: Iterable[Mutant], try_out: Callable[[Kernel, int], str | None], seeds: int, name: str = ""
) -> Iterator[Verdict]:
    """Runs mutants.

    Args:
      ptx: of the kernel without a fault.
      chosen: mutants of it.
      try_out: runs a kernel with a seed and says how a fault shows ("race", "wrong result"), or None.
      seeds: how many seeds each mutant gets.
      name: of the kernel, in a module of several.
    """
    for mutant in chosen:
        try:
            kernel = Kernel(mutated(ptx, mutant), name)
        except ValueError:
            yield Verdict(mutant, ("refused",) * seeds)
            continue
        yield Verdict(mutant, tuple(try_out(kernel, seed) for seed in range(seeds)))


def table(verdicts: Iterable[Verdict]) -> str:
    """How the mutants of each kind were noticed by their first noticing seed, and the survivors."""
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for verdict in verdicts:
        how = next((reason for reason in verdict.noticed if reason), "survived")
        counts.setdefault(verdict.mutant.kind, Counter())[how] += 1
        if verdict.survived:
            survivors.append(f"  line {verdict.mutant.line}: {verdict.mutant.kind}: {verdict.mutant.before}")
    columns = sorted({how for row in counts.values() for how in row})
    lines = ["  ".join([f"{'mutation':24}", *(f"{how:>12}" for how in columns)])]
    lines += ["  ".join([f"{kind:24}", *(f"{row[how]:12}" for how in columns)]) for kind, row in sorted(counts.items())]
    return "\n".join([*lines, f"{len(survivors)} survived", *survivors])


def _split(operands: str) -> list[str]:
    """Operands at the top level, without spaces around them."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(operands):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            parts.append(operands[start:i].strip())
            start = i + 1
    return [*parts, operands[start:].strip()] if operands.strip() else []


def _changes(opcode: str, guard: str, operands: list[str]) -> Iterator[tuple[str, str]]:
    def with_operand(at: int, new: str, before: str = "") -> str:
        changed = [*operands[:at], new, *operands[at + 1 :]]
        return f"{{ {before} {guard}{opcode} {', '.join(changed)}; }}"

    def add(at: int, number: int, bits: int = 32) -> str:
        """The instruction with `number` added to an operand, a register or a constant."""
        operand = operands[at]
        if re.fullmatch(r"-?\d+", operand):
            return with_operand(at, str(int(operand) + number))
        type_ = f"s{bits}" if bits == 32 else f"u{bits}"
        return with_operand(at, "mutant", f".reg .b{bits} mutant; add.{type_} mutant, {operand}, {number};")

    def flip(at: int, mask: int, bits: int) -> str:
        return with_operand(at, "mutant", f".reg .b{bits} mutant; xor.b{bits} mutant, {operands[at]}, {mask};")

    if opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        yield "never wait", f"{guard}setp.eq.b32 {operands[0]}, 0, 0;"
        if ".parity" in opcode:
            yield "flip parity", flip(2, 1, 32)
        return
    if not _DROPPED.match(opcode):
        return
    if not opcode.startswith("tcgen05.ld"):  # without which registers would be undefined
        yield "drop", f"// {opcode}"
    if opcode.startswith("mbarrier.init"):
        yield "count + 1", add(1, 1)
    elif opcode.startswith("mbarrier.arrive.expect_tx"):
        yield "expect 16 bytes more", add(len(operands) - 1, 16)
        yield "expect 16 bytes less", add(len(operands) - 1, -16)
    elif opcode.startswith(("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive")):
        if len(operands) == 2:
            yield "32 threads more", add(1, 32)
    elif opcode.startswith("tcgen05.mma"):
        yield "columns of D + 8", with_operand(0, re.sub(r"\]$", "+8]", operands[0]))
        if not operands[1].startswith("["):
            yield "start of A + 16 bytes", add(1, 1, 64)
            yield "stride of A", flip(1, 1 << 32, 64)
        yield "start of B + 16 bytes", add(2, 1, 64)
        yield "stride of B", flip(2, 1 << 32, 64)
        yield "layout of B", flip(3, 1 << 16, 32)
    elif opcode.startswith(("tcgen05.ld", "tcgen05.st")) and ".32x32b" in opcode:
        at = 1 if opcode.startswith("tcgen05.ld") else 0
        if re.fullmatch(r"\[%?\w+\]", operands[at]):
            yield "column + 1", with_operand(at, operands[at][:-1] + "+1]")
    elif ".bulk.tensor" in opcode:
        at = 1 if "shared::c" in opcode.split("tensor")[1].split("global")[0] else 0
        if found := re.search(r"\{([^},]+)((?:,[^}]*)?)\}", operands[at]):
            yield (
                "coordinate + 8",
                with_operand(
                    at,
                    operands[at].replace(found[0], "{mutant" + found[2] + "}"),
                    f".reg .b32 mutant; add.s32 mutant, {found[1].strip()}, 8;",
                ),
            )
    elif re.match(r"cp\.async\.bulk\.wait_group", opcode) and operands:
        yield "one group more in flight", add(0, 1)
