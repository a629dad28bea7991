"""README.md and docs/*.md: their code runs and gives what it says, their links lead somewhere, their commands exist.

Of each document all blocks that are marked `python` are executed, one after the other in one namespace, in a process of
its own with 8 CPU devices and the repository as its working directory. A block of `>>>` lines is a doctest.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
import textwrap
import tomllib
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = ("bash", "python", "text")
LEFT_OUT = 77
"""Exit status of a document whose code is right, but for blocks that need a package which cannot be imported."""

DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])


class Block(NamedTuple):
    """The text between two fences; `line` is the number of its first line."""

    language: str
    line: int
    text: str


def blocks(document: Path) -> list[Block]:
    """A document's blocks of code; ValueError if one is of an unknown language, or has no end."""
    found = []
    lines = enumerate(document.read_text().splitlines(), 1)
    for number, line in lines:
        if (start := re.match(r" *(```+|~~~+)\s*(.*)", line)) is None:
            continue
        fence, language = start.groups()
        if language not in LANGUAGES:
            raise ValueError(f"{document.name}:{number}: a block of {language!r}, which is none of {LANGUAGES}")
        body = []
        for _, line in lines:
            if line.strip() == fence:
                break
            body.append(line + "\n")
        else:
            raise ValueError(f"{document.name}:{number}: a block without an end")
        found.append(Block(language, number + 1, textwrap.dedent("".join(body))))
    return found


def prose(document: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^ *(```+|~~~+).*?^ *\1$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """The inline code of some prose; one span may go over the end of a line, but not of a paragraph."""
    return [" ".join(code.split()) for _, code in re.findall(SPAN, text, re.DOTALL)]


SPAN = r"(?<!`)(`+)(?!`)((?:(?!\n\n).)+?)(?<!`)\1(?!`)"


# Code


def execute(document: Path) -> str | None:
    """Runs a document's Python here. Returns which blocks were left out and why, or None; raises what the code does."""
    module = types.ModuleType("document")
    sys.modules["document"] = module
    namespace = module.__dict__
    left_out = None
    for language, line, text in blocks(document):
        if language != "python":
            continue
        if re.search(r"^ *>>> ", text, re.MULTILINE):
            run_doctest(text, namespace, document, line)
            continue
        try:
            if "import equinox" in text:
                import equinox  # noqa: F401
        except ImportError as error:
            left_out = f"all ran but the block at line {line}: {error}"
            continue
        # As many lines before it as in the document, for tracebacks.
        exec(compile("\n" * (line - 1) + text, document, "exec", dont_inherit=True), namespace)
    return left_out


def run_doctest(text: str, namespace: dict[str, object], document: Path, line: int) -> None:
    """AssertionError if an example of a block does not give what stands below it."""
    if not text.startswith(">>> "):
        raise ValueError(f"{document.name}:{line}: a block of '>>>' lines begins with another line")
    test = doctest.DocTestParser().get_doctest(text, {}, document.name, str(document), line - 1)
    test.globs = namespace  # itself, not the copy that the parser makes
    report = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(test, out=report.write, clear_globs=False)
    assert not report.getvalue(), report.getvalue()


def run_here(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs this file as a script, in the repository's root, on the CPU, with the package that is being tested."""
    return subprocess.run(
        [sys.executable, "-P", __file__, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@DOCUMENT
def test_code(document: Path, tmp_path: Path) -> None:
    if any(block.language == "python" for block in blocks(document)):
        run = run_here("execute", document, TMPDIR=str(tmp_path))
        if run.returncode == LEFT_OUT:
            pytest.skip(run.stderr.splitlines()[-1])
        assert run.returncode == 0, run.stdout + run.stderr


def written(folder: Path, *parts: str, link: str = "") -> Path:
    document = folder / "document.md"
    document.write_text("# A heading\n\n" + "\n".join(f"```{part}\n```\n" for part in parts) + link)
    return document


BAD_CODE = {
    "a block fails": (["python\nx = 1", "python\nassert x == 2"], AssertionError),
    "a name of nowhere": (["python\njax"], NameError),
    "no Python": (["python\nx ="], SyntaxError),
    "another result": (["python\nx = 1", "python\n>>> x + 1\n3"], AssertionError),
    "a result of None": (["python\n>>> 3\n"], AssertionError),
    "an exception": (["python\n>>> {}['a']\n3"], AssertionError),
    "code before a doctest": (["python\nx = 1\n>>> x\n1"], ValueError),
    "an unknown language": (["pyhton\n1"], ValueError),
    "no language": (["\n1"], ValueError),
    "no end": (["python\n1\n```\n```python\n1\n```\n"], ValueError),
}


@pytest.mark.parametrize("name", BAD_CODE)
def test_bad_code_is_noticed(name: str, tmp_path: Path) -> None:
    parts, error = BAD_CODE[name]
    with pytest.raises(error):
        execute(written(tmp_path, *parts))


def test_blocks_share_a_namespace_that_is_theirs(tmp_path: Path) -> None:
    parts = ["python\nfrom dataclasses import dataclass\nx = 1", "text\n>>> x\n2", "python\n>>> x += 1\n>>> x\n2"]
    last = "python\nassert x == 2\n\n\n@dataclass\nclass A:\n    y: 'int' = x\n\n\nassert A().y == 2"
    assert execute(written(tmp_path, *parts, last)) is None
    assert "x" not in globals()


def test_a_process_fails_with_its_document(tmp_path: Path) -> None:
    run = run_here("execute", written(tmp_path, "python\n1 + 1", "python\nassert 1 + 1 == 3"))
    assert run.returncode == 1
    assert 'document.md", line 8, in <module>\n    assert 1 + 1 == 3\n' in run.stderr


# Links


def anchors(document: Path) -> set[str]:
    """The names that GitHub gives a document's headings."""
    names: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", prose(document), re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{name}-{names[name]}" if name in names else name)
        names[name] = names.get(name, 0) + 1
    return found


def dead_links(document: Path) -> list[str]:
    """Links of a document to files that are not there, or to headings that their document does not have."""
    text = re.sub(SPAN, "", prose(document), flags=re.DOTALL)
    targets = re.findall(r"\]\(\s*([^)\s]+)", text) + re.findall(r"^ *\[[^\]]+\]: *(\S+)", text, re.MULTILINE)
    dead = []
    for target in targets:
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue  # of another site, which a test must not depend on
        path, hash_, anchor = unquote(target).partition("#")
        file = document.parent / path if path else document
        if (
            path.startswith("/")
            or not file.exists()
            or (hash_ and (file.suffix != ".md" or anchor not in anchors(file)))
        ):
            dead.append(target)
    return dead


@DOCUMENT
def test_links(document: Path) -> None:
    assert not dead_links(document)


@pytest.mark.parametrize("target", ["other.md", "#another-heading", "document.md#b", "/document.md", "#A-heading", "#"])
def test_dead_links_are_noticed(target: str, tmp_path: Path) -> None:
    assert dead_links(written(tmp_path, link=f"See [this\n`code`]({target}).")) == [target]
    assert dead_links(written(tmp_path, link=f"[this]: {target}")) == [target]


def test_good_links_are_not(tmp_path: Path) -> None:
    headings = "## `a_b.c(d)`, e - f\n## [G](document.md)\n## G\n```text\n# [no](link.md)\n```\n`[no](link.md)`\n"
    links = ["document.md", "#a-heading", "#a_bcd-e---f", "document.md#g", "#g-1", "https://example.org/#a", "."]
    document = written(tmp_path, link=headings + "".join(f"[link]({target})\n" for target in links))
    assert not dead_links(document)


# Commands


class Command(NamedTuple):
    """A command that runs a script (a path) or a module (a name) with the flags that a document gives it."""

    target: str
    flags: frozenset[str]


def commands(document: Path) -> Iterator[Command]:
    """Every `python PATH` and `python -m MODULE` of a document's blocks of bash and of its inline code."""
    code = spans(prose(document))
    code += [line for block in blocks(document) if block.language == "bash" for line in block.text.splitlines()]
    for part in (part for line in code for part in line.split(" && ")):
        if match := re.match(r"\s*(?:[A-Z_]+=\S* )*python3? (?:-P )?(?:-m ([\w.]+)|(\S+))(.*)", part):
            module, path, rest = match.groups()
            yield Command(module or path, frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest.partition(" #")[0])))


def fault(command: Command) -> str | None:
    """What is wrong with a command, or None; the command itself is asked for help here, if it has any to give."""
    target, flags = command
    if target.endswith(".py"):
        path = ROOT / target
        if not path.is_file():
            return f"there is no {target}"
    else:
        try:
            spec = importlib.util.find_spec(target)
            spec = spec and (
                importlib.util.find_spec(f"{target}.__main__") if spec.submodule_search_locations else spec
            )
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            return f"there is no module {target} that runs"
        path = Path(spec.origin)
    known = path.read_text()
    compile(known, path, "exec", dont_inherit=True)
    if "ArgumentParser(" in known:
        known = help_of(path, target)
    unknown = [flag for flag in sorted(flags) if not re.search(rf"(?<![\w-]){flag}(?![\w-])", known)]
    return f"{target} has no {', '.join(unknown)}" if unknown else None


def help_of(path: Path, target: str) -> str:
    """What a script or module prints for `--help`; everything of the repository that it imports is forgotten again."""
    before = set(sys.modules)
    state = sys.argv, sys.path
    sys.argv, sys.path = [target, "--help"], [str(path.parent), *sys.path]
    status: object = "no exit"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if target.endswith(".py"):
                runpy.run_path(str(path), run_name="__main__")
            else:
                runpy.run_module(target, run_name="__main__")
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv, sys.path = state
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith((f"{path.parent}/", f"{ROOT}/tests/")):
                del sys.modules[name]
    assert not status, f"{target} --help ends with {status}"
    return printed.getvalue()


def test_commands() -> None:
    """In one process, which imports jax once; each document has the commands' targets and flags as they are."""
    run = run_here("commands", *DOCUMENTS)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.split()[0]) > 15  # they are found


BAD_COMMANDS = {
    "`python\nbenchmarks/none.py`": "there is no benchmarks/none.py",
    "`python -m jax_fa4.none`": "there is no module jax_fa4.none that runs",
    "`python -P -m xml`": "there is no module xml that runs",
    "`python csrc/build_kernels.py --target sm_90a --tar`": "csrc/build_kernels.py has no --tar",
    "```bash\npip install . && A=b python tests/sanitize.py --none # --limits\n```": "tests/sanitize.py has no --none",
}


@pytest.mark.parametrize("text", BAD_COMMANDS)
def test_bad_commands_are_noticed(text: str, tmp_path: Path) -> None:
    (command,) = commands(written(tmp_path, link=text))
    assert fault(command) == BAD_COMMANDS[text]


def test_extras_are_the_packages() -> None:
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for document in DOCUMENTS:
        for extras in re.findall(r"[\"'` ]\.\[([\w,-]+)\]", document.read_text()):
            assert set(extras.split(",")) <= known, f"{document.name}: {extras}"


def main(task: str, *paths: str) -> int:
    """What the tests do in a process of its own."""
    warnings.filterwarnings("error", module="jax_fa4")
    documents = list(map(Path, paths))
    if task == "execute":
        for document in documents:
            if left_out := execute(document):
                print(left_out, file=sys.stderr)
                return LEFT_OUT
        return 0
    named = {command for document in documents for command in commands(document)}
    print(len(named), "commands")
    faults = [fault(command) for command in sorted(named, key=lambda command: (command.target, *sorted(command.flags)))]
    print(*filter(None, faults), sep="\n")
    return 1 if any(faults) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
