"""What machine code shows of a kernel: its warps' roles, and how many instructions a turn of its loops takes.

A kernel whose warps have roles starts with a branch on the warp's number; each role then takes or gives back registers
(setmaxnreg in PTX, USETMAXREG in machine code). `roles_of` tells which registers each role uses, `loops_of` which ways
lead once around each loop, and `key_blocks` which of these attention takes for a block of keys.

Everything here reads the text that nvdisasm prints, and none of it says anything of time.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction.

    Attributes:
      address: in bytes from the start of the entry.
      opcode: with its suffixes.
      guard: the predicate that it is executed under, `@P0` or `@!P0` say, or nothing.
      operands: as they are printed.
      targets: addresses that it may go on at, besides the next one.
    """

    address: int
    opcode: str
    guard: str
    operands: str
    targets: tuple[int, ...]

    @property
    def kind(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.partition(".")[0]


def parse(text: str) -> dict[str, tuple[Instruction, ...]]:
    """The instructions of each entry, with the functions that it calls, from what nvdisasm prints."""
    lines: list[tuple[int, str, str, str]] = []
    labels: dict[str, int] = {}
    code: dict[str, tuple[list[tuple[int, str, str, str]], dict[str, int]]] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        if section := re.match(r'\s*\.section\s+\.text\.([^,"]+)', line):
            lines, labels, waiting = [], {}, []
            code[section[1]] = lines, labels
        elif label := re.match(r"(\S+):\s*$", line):
            waiting.append(label[1])
        elif found := re.match(r"\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?\s*$", line):
            address = int(found[1], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting.clear()
            lines.append((address, found[3], (found[2] or "").strip(), found[4].rstrip(" ;")))
    return {
        name: tuple(
            Instruction(
                address,
                opcode,
                guard,
                operands,
                # `(.L_x_1) of a branch, and what nvdisasm says in a comment of a branch to a register.
                tuple(labels[x] for x in re.findall(r"(?:`\(|[ ,])(\.L_\w+|\$[\w$.]+)", operands) if x in labels),
            )
            for address, opcode, guard, operands in lines
        )
        for name, (lines, labels) in code.items()
    }


def _next(code: Sequence[Instruction], index: dict[int, int], i: int, divergent: bool) -> list[int]:
    """What may be executed after instruction i. A warp that has to be in step takes no branch for one that is not."""
    instruction = code[i]
    following = [i + 1] if i + 1 < len(code) else []
    targets = [index[target] for target in instruction.targets]
    match instruction.kind:
        case "EXIT" | "RET":
            return following if instruction.guard else []
        case "BRX" | "BRXU" | "JMX" | "JMXU":
            if not targets:
                raise ValueError(f"nvdisasm does not say where {instruction.opcode} at {instruction.address:#x} leads")
            return targets
        case "BRA" | "JMP":
            if instruction.opcode.startswith("BRA.DIV") and not divergent:
                return following
            # A condition is a guard or, of .U and of a pair of predicates, an operand.
            conditional = instruction.guard or re.match(r"!?U?P\w+\s*,", instruction.operands)
            return [*following, *targets] if conditional or instruction.opcode.startswith("BRA.DIV") else targets
        case "CALL" | "WARPSYNC":
            return [*following, *targets]
        case _:
            # BSSY names the place after its BSYNC, which the code comes to anyhow.
            return following


_WIDTHS = {"64": 2, "128": 4, "x2": 2, "x4": 4, "x8": 8, "x16": 16, "x32": 32, "x64": 64, "x128": 128}


def _registers(instruction: Instruction) -> int:
    """The registers that an instruction needs: one more than the highest that it reads or writes."""
    opcode = instruction.opcode.split(".")
    width = max(_WIDTHS.get(suffix, 1) for suffix in opcode)
    first = 2 if opcode[0] in ("FFMA2", "FADD2", "FMUL2", "CS2R", "BRX", "RET") or "WIDE" in opcode else width
    # What lies at an address is wide, the address is not.
    data = re.sub(r"\[[^\]]*\]", "", instruction.operands)
    addresses = "".join(re.findall(r"\[[^\]]*\]", instruction.operands))
    most = 0
    for text, wide in ((data, width), (data.split(",")[0], first), (addresses, 1)):
        for number, suffixes in re.findall(r"\bR(\d+)((?:\.\w+)*)", text):
            most = max(most, int(number) + (2 if re.search(r"\.(64|F32x2)\b", suffixes) else wide))
    return most


@dataclasses.dataclass(frozen=True)
class Role:
    """What is executed after a USETMAXREG, up to the next one; or before the first.

    Attributes:
      address: of the USETMAXREG, or 0.
      granted: the registers that a thread has.
      used: the registers that the code needs: one more than the highest.
    """

    address: int
    granted: int
    used: int


def roles_of(code: Sequence[Instruction], registers: int) -> list[Role]:
    """The roles of an entry that starts with so many registers a thread; by address, first what comes before all.

    Raises:
      ValueError: nvdisasm does not tell where a branch leads.
    """
    index = {instruction.address: i for i, instruction in enumerate(code)}

    def role(start: int, granted: int, following: Iterable[int]) -> Role:
        reached: set[int] = set()
        waiting = list(following)
        while waiting:
            i = waiting.pop()
            if i not in reached and code[i].kind != "USETMAXREG":
                reached.add(i)
                waiting += _next(code, index, i, divergent=True)
        return Role(start, granted, max((_registers(code[i]) for i in reached), default=0))

    roles = [role(0, registers, [0])]
    for i, instruction in enumerate(code):
        if instruction.kind == "USETMAXREG":
            granted = int(instruction.operands.split(",")[-1], 0)
            roles.append(role(instruction.address, granted, _next(code, index, i, divergent=True)))
    return roles


@dataclasses.dataclass(frozen=True)
class Path:
    """A way once around a loop, or a part of one.

    Attributes:
      addresses: of its basic blocks.
      opcodes: how many instructions of each there are, with their suffixes.
    """

    addresses: tuple[int, ...]
    opcodes: collections.Counter[str]

    @property
    def instructions(self) -> int:
        """The number of instructions."""
        return self.opcodes.total()

    @property
    def columns(self) -> int:
        """The columns of tensor memory that are read."""
        loads = {opcode: re.match(r"LDTM.*\.x(\d+)", opcode) for opcode in self.opcodes}
        return sum(int(load[1]) * self.opcodes[opcode] for opcode, load in loads.items() if load)

    def count(self, kind: str) -> int:
        """How many instructions there are of an opcode, whatever suffixes follow."""
        return sum(number for opcode, number in self.opcodes.items() if f"{opcode}.".startswith(f"{kind}."))


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that does more than wait.

    Attributes:
      address: of its first instruction.
      inner: addresses of the loops inside.
      blocks: its basic blocks by address, those that a turn comes to later behind.
      ahead: the blocks that follow each in the same turn.
      last: the blocks that a turn may end with.
    """

    address: int
    inner: frozenset[int]
    blocks: dict[int, Path]
    ahead: dict[int, list[int]]
    last: frozenset[int]

    def path(self, worth: Callable[[Path], tuple[int, ...]]) -> Path:
        """The way around the loop whose blocks' worth adds up to the most; numbers behind decide between equals.

        It passes the loops inside once, or not at all.
        """
        best: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for block in reversed(self.blocks):
            here = worth(self.blocks[block])
            ways = [best[x] for x in self.ahead[block] if x in best]
            if block in self.last:
                ways.append(((0,) * len(here), ()))
            if ways:
                value, way = max(ways, key=lambda x: x[0])
                best[block] = tuple(map(sum, zip(here, value, strict=True))), (block, *way)
        _, way = best[self.address]
        return Path(way, sum((self.blocks[block].opcodes for block in way), collections.Counter()))

    @property
    def shortest(self) -> Path:
        """The way with the fewest instructions."""
        return self.path(lambda x: (-x.instructions,))

    @property
    def longest(self) -> Path:
        """The way with the most instructions."""
        return self.path(lambda x: (x.instructions,))


# Loops that only wait try, sleep, and move what they need for it.
_TRIES = {"SYNCS", "UTCATOMSWS", "USETMAXREG"}
_FOR_TRIES = {"BRA", "BSSY", "BSYNC", "DEPBAR", "IMAD", "ISETP", "MOV", "NANOSLEEP", "NOP", "PLOP3", "R2UR", "SEL"}
_FOR_TRIES |= {"SHF", "UMOV", "USHF", "WARPSYNC", "YIELD"}
_MOST_WAITING = 16


class _Blocks:
    """The basic blocks of an entry, without those that cannot be reached; a block is its first instruction's index."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        index = {instruction.address: i for i, instruction in enumerate(code)}
        after = [_next(code, index, i, divergent=False) for i in range(len(code))]
        starts = {0} | {i for following in after if len(following) != 1 for i in following}
        starts |= {i for j, following in enumerate(after) for i in following if i != j + 1}
        self.code: dict[int, Sequence[Instruction]] = {}
        self.successors: dict[int, list[int]] = {}
        waiting = [0]
        while waiting:
            start = waiting.pop()
            if start in self.code:
                continue
            end = start
            while after[end] == [end + 1] and end + 1 not in starts:
                end += 1
            self.code[start] = code[start : end + 1]
            self.successors[start] = list(dict.fromkeys(after[end]))
            waiting += self.successors[start]
        self.predecessors: dict[int, list[int]] = {block: [] for block in self.code}
        for block, following in self.successors.items():
            for successor in following:
                self.predecessors[successor].append(block)
        self.order = self._reverse_postorder()
        self.dominator = self._dominators()

    def _reverse_postorder(self) -> dict[int, int]:
        order: list[int] = []
        seen = {0}
        stack = [(0, iter(self.successors[0]))]
        while stack:
            block, following = stack[-1]
            for successor in following:
                if successor not in seen:
                    seen.add(successor)
                    stack.append((successor, iter(self.successors[successor])))
                    break
            else:
                order.append(block)
                stack.pop()
        return {block: i for i, block in enumerate(reversed(order))}

    def _dominators(self) -> dict[int, int]:
        """The nearest block that every way to a block comes by (Cooper, Harvey and Kennedy's algorithm)."""
        dominator = {0: 0}
        changed = True
        while changed:
            changed = False
            for block in self.order:
                if block == 0:
                    continue
                known = [x for x in self.predecessors[block] if x in dominator]
                nearest = known[0]
                for other in known[1:]:
                    while nearest != other:
                        if self.order[nearest] > self.order[other]:
                            nearest = dominator[nearest]
                        else:
                            other = dominator[other]
                if dominator.get(block) != nearest:
                    dominator[block] = nearest
                    changed = True
        return dominator

    def dominates(self, block: int, other: int) -> bool:
        """Whether every way to the other block comes by the block."""
        while other not in (block, 0):
            other = self.dominator[other]
        return other == block

    def loops(self) -> dict[int, set[int]]:
        """The blocks of each natural loop, by the block that it starts with."""
        loops: dict[int, set[int]] = {}
        for block, following in self.successors.items():
            for start in following:
                if self.dominates(start, block):
                    inside = loops.setdefault(start, {start})
                    waiting = [block]
                    while waiting:
                        x = waiting.pop()
                        if x not in inside:
                            inside.add(x)
                            waiting += self.predecessors[x]
        return loops

    def waits(self, blocks: Iterable[int]) -> bool:
        """Whether blocks do nothing but wait."""
        kinds = [instruction.kind for block in blocks for instruction in self.code[block]]
        return len(kinds) <= _MOST_WAITING and _TRIES & set(kinds) != set() and set(kinds) <= _TRIES | _FOR_TRIES

    def detour(self, block: int, start: int) -> bool:
        """Whether a branch of the block to `start` only waits and comes back to where the block also leads."""
        others = [x for x in self.successors[block] if x != start]
        if len(others) != 1 or self.dominator[start] != block:
            return False
        inside = {x for x in self.code if self.dominates(start, x)}
        left = {x for y in inside for x in self.successors[y]} - inside
        return left == set(others) and self.waits(inside)


def loops_of(code: Sequence[Instruction]) -> list[Loop]:
    """The loops of an entry, by address, without those that only wait.

    A wait counts as if it found at once what it waits for: a loop that only waits is passed once where it lies on the
    way, and not at all where it lies aside.
    """
    blocks = _Blocks(code)
    loops = {start: inside for start, inside in blocks.loops().items() if not blocks.waits(inside)}
    return [_loop(blocks, start, loops) for start in sorted(loops)]


def _loop(blocks: _Blocks, start: int, loops: dict[int, set[int]]) -> Loop:
    # In reverse postorder a branch that does not lead ahead leads back.
    order = sorted(loops[start], key=blocks.order.__getitem__)
    address = {block: blocks.code[block][0].address for block in order}
    ahead = {
        block: [
            x
            for x in blocks.successors[block]
            if x in address and blocks.order[x] > blocks.order[block] and not blocks.detour(block, x)
        ]
        for block in order
    }
    return Loop(
        address[start],
        frozenset(address[x] for x in loops if x in address and x != start),
        {
            address[x]: Path((address[x],), collections.Counter(instruction.opcode for instruction in blocks.code[x]))
            for x in order
        },
        {address[x]: [address[y] for y in following] for x, following in ahead.items()},
        frozenset(address[x] for x in order if start in blocks.successors[x]),
    )


@dataclasses.dataclass(frozen=True)
class KeyBlock:
    """What a part of attention takes for a block of 128 keys.

    Attributes:
      instructions: of one warp; of the correction and of the MMA warp for the CTA's two tiles of queries.
      path: the path; it may be of several blocks, or of one tile.
      blocks: how many blocks the path is of.
    """

    instructions: Fraction
    path: Path
    blocks: Fraction

    def each(self, kind: str) -> Fraction:
        """The number of instructions of a kind for a block of keys."""
        return self.path.count(kind) / self.blocks


# Of the official kernels: flash-attn-4 4.0.0b36 (nvidia-cutlass-dsl 4.8.1, ptxas 12.9), forward for sm_100a, two tiles
# of queries a CTA, counted in the loops of the machine code. By D, Dv and our kind: full stands for theirs without a
# mask, whose masked block lies before the loop, and bounds for the causal one.
OFFICIAL: dict[tuple[int, int, str], dict[str, int]] = {
    (128, 128, "full"): {"softmax": 518, "correction": 183, "MMA": 234},
    (128, 128, "bounds"): {"softmax": 514, "softmax, masked": 689, "correction": 186, "MMA": 220},
    (64, 64, "full"): {"softmax": 508, "correction": 107, "MMA": 189},
    (64, 64, "bounds"): {"softmax": 514, "softmax, masked": 689, "correction": 105, "MMA": 190},
}
# Of a block of keys and a softmax warp, in all of these: the exponentials of 128 columns that are not emulated, and the
# factor of the rescale.
OFFICIAL_EX2 = 113

_KEYS = 128


def forward_of(entry: str) -> tuple[int, int, str] | None:
    """D, Dv and the kind of a Blackwell forward kernel, from its entry's name; None if it is none."""
    found = re.fullmatch(r"forward_\w+?_(\d+)(?:_(\d+))?_(full|bounds|softcap)", entry)
    return (int(found[1]), int(found[2] or found[1]), found[3]) if found else None


def key_blocks(loops: Sequence[Loop], width: int, value_width: int) -> dict[str, KeyBlock]:
    """What attention's parts take for a block of keys: "softmax", "softmax, masked", "correction", "MMA".

    Parts are known by what only they do: exponentials of what tensor memory holds, products with it, MMAs. Of the paths
    through a part's innermost loops that do all of its work, the shortest counts: others do what is seldom needed.

    Args:
      loops: of a forward kernel for Blackwell.
      width: D, that the kernel is compiled for.
      value_width: Dv.
    """

    def softmax(path: Path) -> Fraction:
        return Fraction(path.columns if path.count("MUFU.EX2") else 0, _KEYS)

    # Of two accumulators.
    def correction(path: Path) -> Fraction:
        works = path.count("FMUL2") and path.count("STTM") and not path.count("MUFU.EX2")
        return Fraction(path.columns if works else 0, 2 * value_width)

    # An MMA takes 16 of a product's inner dimension, which is D and then the keys.
    def mma(path: Path) -> Fraction:
        return Fraction(path.count("UTCHMMA") * 16, 2 * (width + _KEYS))

    # Every second logit, at least, is selected or not.
    def masked(path: Path) -> bool:
        return path.count("FSEL") >= _KEYS // 2

    result = {}

    def add(
        part: str,
        blocks: Callable[[Path], Fraction],
        worth: Callable[[Path], tuple[int, ...]],
        belongs: Callable[[Path], bool] = lambda _: True,
    ) -> None:
        paths = {loop.address: loop.path(lambda x: (*worth(x), -x.instructions)) for loop in loops}
        working = {address: path for address, path in paths.items() if blocks(path)}
        found = [working[x.address] for x in loops if x.address in working and x.inner.isdisjoint(working)]
        if found := [path for path in found if belongs(path)]:
            path = min(found, key=lambda path: path.instructions / blocks(path))
            result[part] = KeyBlock(path.instructions / blocks(path), path, blocks(path))

    # A few selections are no mask.
    def selections(path: Path) -> int:
        return path.count("FSEL") // (_KEYS // 16)

    add("softmax", softmax, lambda x: (x.columns, -selections(x)), lambda path: not masked(path))
    add("softmax, masked", softmax, lambda x: (x.columns, selections(x)), masked)
    add("correction", correction, lambda x: (x.columns,))
    add("MMA", mma, lambda x: (x.count("UTCHMMA"),))
    return result


_SHOWN = ["MUFU.EX2", "FFMA2", "FADD2", "FMUL2", "FMNMX3", "FMNMX", "F2FP", "FSEL", "R2P", "LDTM", "STTM", "SYNCS"]
_SHOWN += ["BAR", "LDL", "STL", "UTCHMMA", "UTCBAR", "UTMALDG", "UTMASTG", "R2UR", "UMOV"]


def table(entry: str, code: Sequence[Instruction], registers: int) -> str:
    """The roles of an entry, and its innermost loops, for people.

    Of a loop that is a part of attention there is a row for each part; of another, its shortest path and its longest.
    """
    roles = ", ".join(f"{x.used} of {x.granted} at {x.address:#x}" for x in roles_of(code, registers))
    loops = loops_of(code)
    forward = forward_of(entry)
    parts = key_blocks(loops, *forward[:2]) if forward else {}
    official = OFFICIAL.get(forward, {}) if forward else {}
    rows = []
    for loop in loops:
        paths = [
            (part, f"{x.blocks}", f"{official.get(part, '')}", x.path)
            for part, x in parts.items()
            if x.path.addresses[0] == loop.address
        ]
        if not paths and not loop.inner:
            paths = [("", "", "", path) for path in (loop.shortest, loop.longest)]
            paths = paths[: 1 if paths[0] == paths[1] else 2]
        for part, blocks, number, path in paths:
            counts = [str(path.count(kind) or "") for kind in _SHOWN]
            rows.append([f"{loop.address:#x}", part, blocks, str(path.instructions), number, *counts])
    header = ["loop", "part", "blocks of keys", "instructions", "official", *_SHOWN]
    return f"{entry}\n  registers: {roles}\n{_columns_of([header, *rows])}"


def _columns_of(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of columns, the first two flush left; columns without numbers are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    padded = []
    for i, column in enumerate(columns):
        width = max(map(len, column))
        padded.append([text.ljust(width) if i < 2 else text.rjust(width) for text in column])
    return "\n".join("  " + "  ".join(line).rstrip() for line in zip(*padded, strict=True))
