"""docs/api.md names every public name, every parameter with its default, and every error; so do docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_spec import SENTENCES

import jax_fa4
from jax_fa4 import emulated, flax, parallel

API = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
PAGE = {
    module: dict(re.findall(r"^(?:### |- )`([\w.]+)(.*?)(?=^##|^- `|\Z)", text, re.MULTILINE | re.DOTALL))
    for module, text in re.findall(r"^## (jax_fa4[\w.]*)\n(.*?)(?=^## |\Z)", API, re.MULTILINE | re.DOTALL)
}
"""What follows each name, by the module whose heading it stands under."""
MODULES = {module.__name__: module for module in (jax_fa4, parallel, flax, emulated)}
ENTRIES = [(module, name) for module, names in PAGE.items() for name in names]


def public_names(module: ModuleType) -> set[str]:
    """The names that a module lists as public, or else those that it defines without an underscore."""
    if hasattr(module, "__all__"):
        return {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}
    assert module.__file__ is not None
    names = set()
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def found(module: str, name: str) -> Any:
    value: Any = MODULES[module]
    for part in name.split("."):
        value = getattr(value, part)
    return value


def is_documented_by_arguments(value: Any) -> bool:
    return inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, BaseException))


CALLABLES = [entry for entry in ENTRIES if is_documented_by_arguments(found(*entry))]


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    return {
        ("**" if parameter.kind is parameter.VAR_KEYWORD else "") + name: parameter
        for name, parameter in inspect.signature(value).parameters.items()
        if name != "self"
    }


def evaluated(text: str) -> Any:
    """A default as the page writes it; parameters without one are `required`, and `**arguments` say nothing."""
    if text in ("required", ""):
        return inspect.Parameter.empty
    return eval(text.strip("`"), {"__builtins__": {}})


def by_page(text: str) -> tuple[list[str], dict[str, Any]]:
    """The parameters of an entry's headline, and the defaults in it and in the rows of its table."""
    inside = re.match(r"\((.*)\)`", text)
    headline = inside[1].split(", ") if inside and inside[1] else []
    named = [part.partition("=") for part in headline if part not in ("*", "...")]
    defaults = {name: evaluated(default) for name, _, default in named}
    for names, default in re.findall(r"^\| (`[^|]+`) \| ([^|]*?) ?\|", text, re.MULTILINE):
        for name in re.findall(r"`([\w*]+)`", names):
            assert defaults.get(name, inspect.Parameter.empty) is inspect.Parameter.empty, f"{name} stands there twice"
            defaults[name] = evaluated(default)
    return [part.partition("=")[0] for part in headline], defaults


def by_docstring(docstring: str, *sections: str) -> list[str]:
    """What the sections of a Google-style docstring describe, in its order."""
    lines = {
        section: re.findall(r"^  ((?:[\w*]+, )*[\w*]+): ", body, re.MULTILINE)
        for section, body in re.findall(r"^(\w+):\n((?:  .*\n|\n)+)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    }
    return [one for section in sections for names in lines.get(section, []) for one in names.split(", ")]


@pytest.mark.parametrize("module", MODULES)
def test_public_names(module: str) -> None:
    assert {name for name in PAGE[module] if "." not in name} == public_names(MODULES[module])


def test_public_methods() -> None:
    """Methods and `__call__` of classes have entries too; dataclasses and functions have none."""
    classes = [(module, name) for module, name in ENTRIES if inspect.isclass(found(module, name))]
    methods = {
        (module, f"{name}.{method}")
        for module, name in classes
        for method, value in vars(found(module, name)).items()
        if inspect.isfunction(value) and (method == "__call__" or not method.startswith("_"))
    }
    assert methods == {(module, name) for module, name in ENTRIES if "." in name}


@pytest.mark.parametrize(("module", "name"), CALLABLES)
def test_parameters(module: str, name: str) -> None:
    expected = parameters(found(module, name))
    headline, defaults = by_page(PAGE[module][name])
    positional = [x for x, parameter in expected.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    keywords = [x for x, parameter in expected.items() if parameter.kind is parameter.KEYWORD_ONLY]
    others = [x for x in expected if x.startswith("**")]
    assert headline in [[*positional, *(["*", *rest] if keywords else []), *others] for rest in (keywords, ["..."])]
    assert {x: (type(default), default) for x, default in defaults.items()} == {
        x: (type(parameter.default), parameter.default) for x, parameter in expected.items()
    }
    assert not [x for x in expected if f"`{x}`" not in PAGE[module][name]], "each needs a row, or its name in the text"


@pytest.mark.parametrize(("module", "name"), CALLABLES)
def test_docstrings_describe_every_parameter_and_the_same_errors(module: str, name: str) -> None:
    value = found(module, name)
    assert value.__doc__
    assert by_docstring(value.__doc__, "Args", "Attributes") == list(parameters(value))
    _, *raises = re.split(r"\b[Rr]aises ", PAGE[module][name])
    assert set(re.findall(r"`(\w+Error)`", " ".join(raises))) == set(by_docstring(value.__doc__, "Raises"))


def test_numbers_are_those_of_the_specification() -> None:
    text = re.sub(r"```.*?```", "", API, flags=re.DOTALL)
    numbers = set(re.findall(r"(?<![\w.])(\d+\.\d+)(?![\w.]*\d)", text)) - {"0.0"}
    assert numbers
    assert numbers <= set(SENTENCES)
