"""The order of the modules, and what may stand only in one place, read from the source."""

import ast
from pathlib import Path

import pytest

import pptrain

ROOT = Path(pptrain.__file__).parents[1]
ORDER = pptrain.__doc__.split("modules: ")[1].rstrip(".\n").replace("\n", " ").split(", ")
MODULES = sorted(path.stem for path in (ROOT / "pptrain").glob("*.py") if not path.stem.startswith("__"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> set[str]:
    """`pptrain.model` for both `from pptrain.model import x` and `from pptrain import model`."""
    found = set[str]()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_module_has_its_place_in_the_order():
    assert sorted(ORDER) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_is_to_its_left(module):
    left = set(ORDER[: ORDER.index(module)])
    used = {name.split(".")[1] for name in imported(ROOT / "pptrain" / f"{module}.py") if name.startswith("pptrain.")}
    assert used & set(MODULES) <= left


@pytest.mark.parametrize("path", sorted((ROOT / "transports").glob("*.py")), ids=lambda path: path.stem)
def test_transports_know_nothing_of_pptrain(path):
    assert not [name for name in imported(path) if name.split(".")[0] == "pptrain"]


@pytest.mark.parametrize("module", MODULES)
def test_arrays_are_evaluated_in_the_executor_and_the_reference_only(module):
    calls = [
        node.attr
        for node in ast.walk(tree(ROOT / "pptrain" / f"{module}.py"))
        if isinstance(node, ast.Attribute) and node.attr in ("eval", "async_eval") and ast.unparse(node.value) == "mx"
    ]
    assert bool(calls) == (module in ("executor", "reference"))


@pytest.mark.parametrize("module", MODULES)
def test_nobody_asks_which_transport_it_is_but_those_who_open_one(module):
    asked = [
        ast.unparse(node)
        for node in ast.walk(tree(ROOT / "pptrain" / f"{module}.py"))
        if isinstance(node, ast.Compare) and "loopback" in ast.unparse(node).lower()
    ]
    assert bool(asked) == (module in ("pipeline", "job", "demo_run"))
