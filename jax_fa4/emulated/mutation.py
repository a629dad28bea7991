"""Mutation of PTX: plant one fault at a time and see whether running the kernel notices.

    python -m jax_fa4.emulated.mutation CASE.py [--seeds N] [--workers N] [--only REGEX]

What is not noticed shows what a kernel's tests miss, what the emulator misses, or what the kernel does not need.
CASE.py has a function `case` that returns a `Case`. Exits with 1 unless every mutant is noticed with every seed or has
a reason that holds; docs/emulator.md describes the faults and the reasons.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jax_fa4.emulated import Kernel


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: text that replaces an instruction.

    Attributes:
      kind: what was done, such as "drop" or "flip parity".
      opcode: of the instruction, without what follows its name.
      place: the source line that stands for the instruction, or "" if the PTX has none: see `mutants`.
      ordinal: which one it is, from 1, of several mutants of the same kind, opcode and place.
      chain: the source line of the instruction and of the calls by which the kernel reaches it.
      line: of the PTX, from 1.
      span: of the instruction in the PTX, as offsets.
      before: the instruction.
      after: what stands in its place.
    """

    kind: str
    opcode: str
    place: str
    ordinal: int
    chain: str
    line: int
    span: tuple[int, int]
    before: str
    after: str

    @property
    def name(self) -> str:
        """What identifies the mutant however the kernel is compiled, as in "drop bar.sync at kernel.cu:7 (2)"."""
        at = f" at {self.place}" if self.place else ""
        return f"{self.kind}: {self.opcode}{at}" + (f" ({self.ordinal})" if self.ordinal > 1 or not self.place else "")


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and how to notice that it is wrong.

    Attributes:
      ptx: the text of a module with one kernel: see `alone`.
      try_out: runs a kernel with a seed and says how a fault shows ("race", "wrong result"), or None. Several threads
        call it at a time.
      reasons: why mutants are not noticed, by name: "equivalent: WHY", or "redundant with NAME" of another mutant.
      file: whose lines are places: see `mutants`.
    """

    ptx: str
    try_out: Callable[[Kernel, int], str | None]
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of faults that were planted together.

    Attributes:
      mutants: the faults.
      noticed: how they were noticed, by seed, up to the first that did not notice them: None.
    """

    mutants: tuple[Mutant, ...]
    noticed: tuple[str | None, ...]

    @property
    def survived(self) -> bool:
        """Whether no seed noticed it."""
        return not any(self.noticed)

    @property
    def caught(self) -> bool:
        """Whether every seed noticed it."""
        return all(self.noticed)

    def tell(self) -> str:
        """How many seeds noticed it how."""
        counts = Counter(how or "not noticed" for how in self.noticed)
        return ", ".join(f"{how} with {count} of {len(self.noticed)} seeds" for how, count in counts.items())


_REFUSED = "refused"  # when the kernel is loaded

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"^[ \t]*(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$%]+)", re.MULTILINE)
_STATEMENT = re.compile(
    r"^[ \t]*\.loc[ \t]+(?P<loc>\d+ \d+ \d+)[^\n]*?(?:inlined_at[ \t]+(?P<caller>\d+ \d+ \d+))?[ \t]*$"
    r"|(?:^|(?<=[;{}:]))[ \t]*(?P<guard>@!?[%$\w]+\s+)?(?P<opcode>[a-z]\w*(?:(?:\.|::)\w+)+)\s*(?P<operands>[^;]*);",
    re.MULTILINE,
)
_FILE = re.compile(r"^\s*\.file\s+(\d+)\s+\"(?:[^\"]*/)?([^\"]+)\"", re.MULTILINE)

# What an instruction's name has behind it: memory, formats, how it signals.
_MODIFIER = re.compile(
    r"\.(?!wait::|fence::)(?:\w+::\w+|(?<!\bbar\.)(?<!\bbarrier\.)sync|aligned|(?<!\bst\.)shared|global|tile|"
    r"[bfsu]\d+|v\d|\d+x\d+\w|x\d+)\b.*"
)

# Instructions that a mutant leaves out. Without loads their registers would be undefined.
_DROPPED = re.compile(
    r"mbarrier\.(init|inval|arrive|expect_tx|complete_tx)|bar\.|barrier\.|fence\.|setmaxnreg|griddepcontrol|"
    r"cp\.(reduce\.)?async(?!\.bulk\.prefetch)|tcgen05\.(?!ld)|wgmma\.|stmatrix|st\.shared|st\.async|red\.|atom\."
)

# Fields of descriptors, and what is exclusive-ored to them. The modes of the swizzle are 0, 6, 4 and 2 in a matrix
# descriptor of Blackwell (PTX ISA 9.7.16.4.1), and 0 to 3 in one of Hopper (9.7.15.5.1.2.2).
_MATRIX_FIELDS = {"leading offset": 1 << 16, "stride": 1 << 32, "base offset": 1 << 49}
_SWIZZLE_FIELD = {"tcgen05": 6 << 61, "wgmma": 3 << 62}
_INSTRUCTION_FIELDS = {  # 9.7.16.4.2
    "format of D": 1 << 4,
    "format of A": 1 << 7,
    "format of B": 1 << 10,
    "sign of A": 1 << 13,
    "sign of B": 1 << 14,
    "layout of A": 1 << 15,
    "layout of B": 1 << 16,
    "M": 12 << 24,  # 64 is 128 and the other way
}
_N_STEP = 16 >> 3 << 17


def alone(ptx: str, kernel: str) -> str:
    """A module without its other kernels.

    Raises:
      ValueError: it has no such kernel.
    """
    text = _without_comments(ptx)
    spans = {}
    for found in _ENTRY.finditer(text):
        depth = 0
        for brace in re.compile(r"[{}]").finditer(text, found.end()):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                spans[found[1]] = found.start(), brace.end()
                break
    if kernel not in spans:
        raise ValueError(f"there is no kernel {kernel!r}, but {', '.join(spans)}")
    for name, (start, end) in reversed(spans.items()):
        if name != kernel:
            ptx = ptx[:start] + ptx[end:]
    return ptx


def mutants(ptx: str, file: str = "") -> list[Mutant]:
    """All mutants of a module: of synchronisation, waits, parities, counts, sizes, coordinates and descriptors.

    Args:
      ptx: the module's text.
      file: the name of the source file whose lines are places: of those by which the kernel reaches an instruction, the
        one next to it. Without it, places are the lines by which kernels leave their own code.
    """
    files = dict(_FILE.findall(ptx))
    text = _without_comments(ptx)
    chains: dict[str, tuple[str, ...]] = {}  # of source lines, the innermost first, by the place of the latest
    chain: tuple[str, ...] = ()
    seen = Counter[tuple[str, str, str]]()
    result = []
    for found in _STATEMENT.finditer(text):
        if found["loc"]:
            number, line, _ = found["loc"].split()
            # The caller's own .loc came before: through it the chain goes on outward.
            chain = (f"{files.get(number, '?')}:{line}", *chains.get(found["caller"], ()))
            chains[found["loc"]] = chain
            continue
        opcode, place = _MODIFIER.sub("", found["opcode"]), chain[-1] if chain else ""
        place = next((line for line in chain if file and line.startswith(f"{file}:")), place)
        span = found.start("guard") if found["guard"] else found.start("opcode"), found.end()
        for kind, after in _changes(found["opcode"], found["guard"] or "", _split(found["operands"])):
            seen[kind, opcode, place] += 1
            result.append(
                Mutant(
                    kind,
                    opcode,
                    place,
                    seen[kind, opcode, place],
                    ", called at ".join(chain),
                    ptx.count("\n", 0, span[0]) + 1,
                    span,
                    " ".join(ptx[slice(*span)].split()),
                    after,
                )
            )
    return result


def mutated(ptx: str, *faults: Mutant) -> str:
    """The text with the faults of some mutants of it; ValueError if two of them change the same instruction."""
    end = len(ptx)
    for mutant in sorted(faults, key=lambda one: one.span, reverse=True):
        if mutant.span[1] > end:
            raise ValueError(f"two mutants change the same instruction: {mutant.before}")
        end = mutant.span[0]
        ptx = ptx[:end] + mutant.after + ptx[mutant.span[1] :]
    return ptx


def judge(
    case: Case, chosen: Sequence[tuple[Mutant, ...]], seeds: int, workers: int | None = None
) -> Iterator[Verdict]:
    """Runs kernels with faults, those of a tuple together; yields what became of them, in their order.

    Args:
      case: whose mutants they are.
      chosen: the faults.
      seeds: how many seeds each gets, unless one does not notice it.
      workers: how many threads run kernels; by default as many as there are CPUs. Verdicts do not depend on it.
    """

    def run(faults: tuple[Mutant, ...]) -> Verdict:
        ptx = mutated(case.ptx, *faults)
        try:
            kernel = Kernel(ptx)
        except ValueError:
            return Verdict(faults, (_REFUSED,) * seeds)
        noticed: list[str | None] = []
        for seed in range(seeds):
            noticed.append(case.try_out(kernel, seed))
            if faults and noticed[-1] is None:
                break  # it needs a reason, whatever the other seeds notice
        return Verdict(faults, tuple(noticed))

    # The emulator runs without Python's lock.
    executor = ThreadPoolExecutor(workers or os.cpu_count())
    try:
        yield from executor.map(run, chosen)
    finally:
        executor.shutdown(cancel_futures=True)


def unexplained(case: Case, verdicts: Sequence[Verdict], seeds: int, workers: int | None = None) -> list[str]:
    """What is left to explain of the verdicts of single mutants, a sentence each.

    A mutant that some seed does not notice needs a reason. "redundant with X" is one only if X alone is not noticed
    either, but both together are, with every seed: this is run.
    """
    known = {verdict.mutants[0].name: verdict for verdict in verdicts}
    escaped = {name for name, verdict in known.items() if not verdict.caught}
    problems = [f"stale reason, every seed notices it or it is unknown: {x}" for x in case.reasons if x not in escaped]
    traps: dict[str, tuple[Mutant, ...]] = {}
    doubles: dict[str, tuple[Mutant, ...]] = {}
    for name in (name for name in known if name in escaped):
        what, _, why = re.sub("^redundant with ", "redundant: ", case.reasons.get(name, "")).partition(": ")
        if what == "redundant" and why not in escaped:
            problems.append(f"{name}: nothing shows a redundancy, since {why} alone is noticed, or unknown")
        elif what == "redundant" and known[name].mutants[0].span == known[why].mutants[0].span:
            problems.append(f"{name}: not redundant with another fault of the same instruction")
        elif what == "redundant":
            doubles[name] = known[name].mutants + known[why].mutants
        elif what != "equivalent" or not why:
            mutant = known[name].mutants[0]
            guard = re.match(r"@\S+\s", mutant.before)
            traps[name] = (dataclasses.replace(mutant, after=f"{guard[0] if guard else ''}trap;"),)
    for name, verdict in zip(traps, judge(case, list(traps.values()), 1, workers), strict=True):
        problems.append(f"{name}: {known[name].tell()}" + ("" if verdict.caught else "; the case never executes it"))
    for name, verdict in zip(doubles, judge(case, list(doubles.values()), seeds, workers), strict=True):
        if not verdict.caught:
            problems.append(f"{name}: not redundant, since both together are not noticed by every seed either")
    return problems


def table(case: Case, verdicts: Iterable[Verdict]) -> str:
    """How the mutants of each kind were noticed by their first noticing seed; then those that some seed missed."""
    counts: dict[str, Counter[str]] = {}
    missed = []
    for verdict in verdicts:
        mutant = verdict.mutants[0]
        how = next((reason for reason in verdict.noticed if reason), "survived")
        counts.setdefault(mutant.kind, Counter())[how] += 1
        if not verdict.caught:
            missed += [
                f"  {mutant.name}: {verdict.tell()}",
                f"    PTX line {mutant.line}: {mutant.before[:100]}",
                *([f"    {mutant.chain}"] if mutant.chain else []),
                *([f"    {case.reasons[mutant.name]}"] if mutant.name in case.reasons else []),
            ]
    counts["all"] = sum(counts.values(), Counter())
    columns = sorted(counts["all"], key=lambda how: (how == "survived", how == _REFUSED, how))
    rows = [["mutation", *columns]]
    rows += [[kind, *(str(row[how] or "") for how in columns)] for kind, row in counts.items()]
    lines = [f"{row[0]:30}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows]
    return "\n".join([*lines, *(["not noticed by every seed:"] if missed else []), *missed])


def _without_comments(ptx: str) -> str:
    """The text with spaces in place of comments."""
    return _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), ptx)


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
    """Kinds of faults of an instruction, and what stands in its place then."""

    def put(new: dict[int, str], before: str = "", name: str = opcode) -> str:
        changed = [new.get(at, operand) for at, operand in enumerate(operands)]
        changed += [new[at] for at in sorted(new) if at >= len(operands)]
        return f"{{ {before} {guard}{name} {', '.join(changed)}; }}"

    def computed(at: int, operation: str, number: int, bits: int) -> str:
        """The instruction with an operand, a register or a constant, replaced by what an operation makes of it."""
        return put({at: "mutant"}, f".reg .b{bits} mutant; {operation} mutant, {operands[at]}, {number};")

    def add(at: int, number: int, bits: int = 32) -> str:
        if re.fullmatch(r"-?\d+", operands[at]):  # which some instructions insist on
            return put({at: str(int(operands[at]) + number)})
        return computed(at, f"add.s{bits}", number, bits)

    def flip(at: int, mask: int, bits: int) -> str:
        return computed(at, f"xor.b{bits}", mask, bits)

    def move(at: int, number: int) -> str:
        """The instruction with an address of tensor memory moved."""
        base, _, offset = operands[at].strip("[]").partition("+")
        return put({at: f"[{base.strip()}+{int(offset.strip() or '0', 0) + number}]"})

    def relaxed() -> str:
        """The instruction without the order that it makes."""
        if re.search(r"\.(release|acquire|acq_rel)\b", opcode):
            return put({}, name=re.sub(r"\.(release|acquire|acq_rel)\b", ".relaxed", opcode))
        scope = "cluster" if "::cluster" in opcode else "cta"
        return put({}, name=re.sub(r"(?=\.shared|\.b64)", f".relaxed.{scope}", opcode, count=1))

    def invert(at: int) -> str:
        if operands[at] in ("0", "1"):
            return put({at: str(1 - int(operands[at]))})
        return put({at: "mutant"}, f".reg .pred mutant; not.pred mutant, {operands[at]};")

    def matrix(at: int, operand: str) -> Iterator[tuple[str, str]]:
        yield f"start of {operand} + 16 bytes", add(at, 1, 64)
        for field, mask in {**_MATRIX_FIELDS, "swizzle": _SWIZZLE_FIELD[opcode.partition(".")[0]]}.items():
            yield f"{field} of {operand}", flip(at, mask, 64)

    if opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        yield "never wait", f"{guard}setp.eq.b32 {operands[0]}, 0, 0;"
        if ".parity" in opcode:
            yield "flip parity", flip(2, 1, 32)
        if ".relaxed" not in opcode:
            yield "relax", relaxed()
    elif opcode.startswith("elect.sync"):
        elected = operands[0].partition("|")[2]
        yield "invert", f"{put({})} {guard}not.pred {elected}, {elected};"
    elif opcode.startswith(("ld.acquire", "st.release")):
        yield "relax", relaxed()

    if _DROPPED.match(opcode):
        yield "drop", ""

    if opcode.startswith("mbarrier.init"):
        yield "count + 1", add(1, 1)
        yield "count - 1", add(1, -1)
    elif opcode.startswith(("mbarrier.arrive", "mbarrier.expect_tx")):
        if "expect_tx" in opcode:
            yield "expect 16 bytes more", add(len(operands) - 1, 16)
            yield "expect 16 bytes less", add(len(operands) - 1, -16)
        elif operands[-1].endswith("]"):
            yield "count + 1", put({len(operands): "2"})
        else:
            yield "count + 1", add(len(operands) - 1, 1)
        if "arrive" in opcode and ".relaxed" not in opcode:
            yield "relax", relaxed()
    elif opcode.startswith(("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive")):
        yield "next barrier", add(0, 1)
        if len(operands) == 2:
            yield "32 threads more", add(1, 32)
            yield "32 threads less", add(1, -32)
    elif opcode.startswith("barrier.cluster.arrive") and ".relaxed" not in opcode:
        yield "relax", f"{guard}{opcode.replace('.release', '').replace('arrive', 'arrive.relaxed')};"
    elif opcode.startswith("setmaxnreg"):
        yield "8 registers more", add(0, 8)
        yield "8 registers less", add(0, -8)
    elif opcode.startswith(("red.", "atom.")) and re.search(r"\.(release|acquire|acq_rel)\b", opcode):
        yield "relax", relaxed()
    elif ".bulk.wait_group" in opcode or opcode.startswith(("cp.async.wait_group", "wgmma.wait_group")):
        yield "one group more in flight", add(0, 1)
        if ".bulk" in opcode and ".read" not in opcode:
            yield "wait for reads only", put({}, name=opcode + ".read")
    elif re.match(r"cp\.(reduce\.)?async\.bulk\.(tensor|shared|global)", opcode):
        yield from _copy_changes(opcode, operands, put, add, flip)
    elif opcode.startswith("tcgen05.mma"):
        yield "column of D + 8", move(0, 8)
        yield "lane of D + 16", move(0, 16 << 16)
        if operands[1].startswith("["):
            yield "column of A + 8", move(1, 8)
            yield "lane of A + 16", move(1, 16 << 16)
        else:
            yield from matrix(1, "A")
        yield from matrix(2, "B")
        for field, mask in _INSTRUCTION_FIELDS.items():
            yield field, flip(3, mask, 32)
        yield "N + 16", add(3, _N_STEP)
        yield "N - 16", add(3, -_N_STEP)
        yield "invert addition of D", invert(len(operands) - 1)
    elif opcode.startswith("tcgen05.commit") and len(operands) == 2:
        yield "multicast to one more or less", flip(1, 1, 16)
    elif opcode.startswith(("tcgen05.ld", "tcgen05.st")):
        at = 1 if opcode.startswith("tcgen05.ld") else 0
        yield "column + 1", move(at, 1)
        yield "lane + 16", move(at, 16 << 16)
    elif opcode.startswith(("tcgen05.alloc", "tcgen05.dealloc")):
        yield "twice the columns", computed(1, "shl.b32", 1, 32)
        yield "half the columns", computed(1, "shr.u32", 1, 32)
    elif opcode.startswith("wgmma.mma_async"):
        if not operands[1].startswith("{"):
            yield from matrix(1, "A")
        yield from matrix(2, "B")
        yield "invert addition of D", invert(3)
        yield "layout of B", invert(len(operands) - 1)


def _copy_changes(
    opcode: str,
    operands: list[str],
    put: Callable[..., str],
    add: Callable[[int, int], str],
    flip: Callable[[int, int, int], str],
) -> Iterator[tuple[str, str]]:
    """Faults of a copy: each of its coordinates, or its size; and the CTAs that it goes to."""
    if ".tensor" in opcode:
        at = next(i for i, operand in enumerate(operands) if "{" in operand)
        coordinates = _split(operands[at][operands[at].index("{") + 1 : operands[at].rindex("}")])
        for i, coordinate in enumerate(coordinates):
            changed = ", ".join([*coordinates[:i], "mutant", *coordinates[i + 1 :]])
            operand = f"{operands[at].partition('{')[0]}{{{changed}}}]"
            before = f".reg .b32 mutant; add.s32 mutant, {coordinate}, 8;"
            yield f"coordinate {i} + 8", put({at: operand}, before)
    else:
        yield "16 bytes more", add(2, 16)
        yield "16 bytes less", add(2, -16)
    if ".multicast" in opcode:
        yield "multicast to one more or less", flip(len(operands) - 1 - ("cache_hint" in opcode), 1, 16)


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=Path, metavar="CASE.py")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="of mutants' names")
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location(options.case.stem, options.case)
    if spec is None or spec.loader is None:
        parser.error(f"{options.case} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(options.case.parent))  # what it imports from beside it
    spec.loader.exec_module(module)
    case = module.case()
    reasons = {name: why for name, why in case.reasons.items() if options.only.search(name)}
    return study(dataclasses.replace(case, reasons=reasons), options.seeds, options.workers, options.only.search)


def study(
    case: Case, seeds: int, workers: int | None = None, chosen: Callable[[str], object] = lambda name: True
) -> int:
    """Runs the mutants whose names are chosen and prints what became of them; returns 1 if any is unexplained."""
    for verdict in judge(case, [()], seeds, workers):
        if not verdict.survived:
            print(f"the kernel is not clean without a fault: {verdict.noticed}")
            return 1
    faults = [(mutant,) for mutant in mutants(case.ptx, case.file) if chosen(mutant.name)]
    start = time.perf_counter()
    verdicts = []
    for verdict in judge(case, faults, seeds, workers):
        verdicts.append(verdict)
        print(f"\r{len(verdicts)} of {len(faults)} mutants", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(case, verdicts))
    problems = unexplained(case, verdicts, seeds, workers)
    caught = sum(verdict.caught for verdict in verdicts)
    print(
        f"{len(verdicts)} mutants, {seeds} seeds each, in {time.perf_counter() - start:.0f} s: "
        f"{caught} noticed by every seed, {len(case.reasons)} with a reason"
    )
    print("\n".join(["unexplained:", *problems]) if problems else "nothing is unexplained")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
