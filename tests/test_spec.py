"""Every numbered sentence of docs/spec.md names tests, and every test that it names exists."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path

import pytest

SPEC = Path(__file__).parents[1] / "docs" / "spec.md"
SENTENCES = dict(re.findall(r"^- \*\*([\d.]+)\*\* (.*?)(?=^- |^#|\Z)", SPEC.read_text(), re.MULTILINE | re.DOTALL))
"""The text after each number, its links included."""


@functools.cache
def names_in(path: Path) -> set[str]:
    """Names of the tests in a file: functions, and methods after their class and a dot."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return {name for name in names if name.rpartition(".")[2].startswith("test_")}


def named(sentence: str) -> list[tuple[Path, str]]:
    """The tests that a sentence names, each with the file whose link stands before it."""
    found = []
    for path, names in re.findall(r"\[tests\]\(([^)]+)\)((?:\s+`[\w.]+`)+)", sentence):
        found += [((SPEC.parent / path).resolve(), name) for name in re.findall(r"`([\w.]+)`", names)]
    return found


@pytest.mark.parametrize("number", SENTENCES)
def test_sentence(number: str) -> None:
    tests = named(SENTENCES[number])
    assert tests, f"sentence {number} names no test"
    missing = [f"{path.name}: {name}" for path, name in tests if not path.exists() or name not in names_in(path)]
    assert not missing


def test_numbers_count_up_without_gaps() -> None:
    numbers = [tuple(map(int, number.split("."))) for number in SENTENCES]
    assert len(numbers) == SPEC.read_text().count("- **"), "a sentence has no number, or two have the same"
    for (section, item), (next_section, next_item) in itertools.pairwise(numbers):
        assert (next_section, next_item) in ((section, item + 1), (section + 1, 1))
