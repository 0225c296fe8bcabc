"""Imports point one way: a new upward edge fails here and names the file, the line and the rule.

Read from the source by `ast`, so imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "k3fuse"

BASE = {"options", "tensor_type", "errors", "target", "parameter", "functional", "expected"}
PLAN = {"runtime.plan", "runtime.selection"}
MIDDLE = {"ir", "schedule", "kernels", "models", "checkpoint"} | PLAN
STAGES = {"trace", "passes", "lowering", "runtime"}

# Component -> the components it may import besides itself. Rows stand from the top down.
MAY_IMPORT: dict[str, set[str]] = {
    "__main__": {"cli"},
    "cli": {"alone", "compiler", "report", "roofline", "__version__"} | STAGES | MIDDLE | BASE,
    "compiler": {"report", "roofline", "__version__"} | STAGES | MIDDLE | BASE,
    "report": {"ir", "passes", "schedule", "runtime"} | PLAN | BASE,
    "testing": {"ir", "schedule", "passes"} | BASE,
    "trace": {"ir"} | BASE,
    "passes": {"ir", "schedule"} | BASE,
    "lowering": {"ir", "schedule", "kernels"} | PLAN | BASE,
    # Single launches are checked where there is no compiler, so nothing above `kernels` and `ir`.
    "alone": {"ir", "kernels"} | BASE,
    # A bundle runs where there is neither the compiler nor cutlass, so no kernels either.
    "runtime": {"ir", "schedule", "models", "checkpoint", "__version__"} | PLAN | BASE,
    "roofline": {"models"} | BASE,
    "schedule": {"ir"} | PLAN | BASE,
    "ir": BASE,
    "kernels": BASE,
    "runtime.plan": {"__version__"} | BASE,
    "runtime.selection": {"runtime.plan"} | BASE,
    "checkpoint": BASE,
    "models": {"functional", "errors", "parameter"},
    "options": BASE,
    "tensor_type": BASE,
    "errors": set(),
    "target": {"errors"},
    "parameter": {"errors"},
    "functional": {"errors"},
    "expected": set(),
    "__version__": set(),
}

# Third-party packages that only these components may import.
ONLY_IN: dict[str, set[str]] = {
    "cutlass": {"kernels"},
    "cuda": {"cli", "kernels", "runtime"},
    "safetensors": {"checkpoint"},
    "typer": {"cli"},
    "transformers": set(),
}

# Components that import nothing from outside but these and the standard library.
ONLY_FROM: dict[str, set[str]] = {
    "models": {"torch"},
    "functional": {"torch"},
    "errors": set(),
    "target": set(),
}


def component(module: str) -> str:
    """The row a name inside the package belongs to: "runtime.plan", else its first part."""
    parts = module.split(".")[1:] or ["__version__"]
    two = ".".join(parts[:2])
    return two if two in MAY_IMPORT else parts[0]


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import; relative ones keep their leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def allowed(own: str, name: str) -> bool:
    """Whether a module of component `own` may import the dotted `name`."""
    root = name.split(".")[0]
    if root == "k3fuse":
        return component(name) in MAY_IMPORT[own] | {own}
    if root in sys.stdlib_module_names:
        return True
    return own in ONLY_IN.get(root, {own}) and root in ONLY_FROM.get(own, {root})


def violations(module: str, source: str) -> list[str]:
    """Every import of `source` that its component's row does not allow."""
    own = component(module)
    if own not in MAY_IMPORT:
        return [f"{module}: no row for {own!r} in MAY_IMPORT; say what it may import"]
    return [
        f"{module}:{line}: {own} may not import {name}"
        for line, name in imported_names(ast.parse(source))
        if name.startswith(".") or not allowed(own, name)
    ]


def source_files() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_imports_point_one_way() -> None:
    files = list(source_files())
    assert files
    assert [v for module, path in files for v in violations(module, path.read_text())] == []


def test_rows_name_known_components_and_have_no_cycle() -> None:
    # Base modules may use one another as they are needed; everything above is ordered.
    upper = {name: row - BASE for name, row in MAY_IMPORT.items() if name not in BASE}
    assert set().union(*MAY_IMPORT.values()) <= set(MAY_IMPORT)
    while upper:
        leaves = {name for name, row in upper.items() if not row & set(upper)}
        assert leaves, f"cycle among {sorted(upper)}"
        upper = {name: row for name, row in upper.items() if name not in leaves}


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("ir.graph", "from k3fuse.passes.dce import Dce", "ir may not import k3fuse.passes"),
        ("ir.graph", "from k3fuse import passes", "ir may not import k3fuse.passes"),
        ("ir.graph", "from . import op", "may not import ..op"),
        ("runtime.engine", "import k3fuse.compiler", "may not import k3fuse.compiler"),
        ("runtime.engine", "import k3fuse.lowering", "may not import k3fuse.lowering"),
        ("runtime.engine", "import k3fuse.kernels.kda", "may not import k3fuse.kernels"),
        ("runtime.engine", "def f():\n    import cutlass", ":2: runtime may not import cutlass"),
        ("runtime.plan", "import k3fuse.runtime.engine", "may not import k3fuse.runtime.engine"),
        ("lowering.plan", "import k3fuse.runtime.engine", "may not import k3fuse.runtime.engine"),
        ("trace.fx", "from k3fuse.models.kimi import KimiModel", "may not import k3fuse.models"),
        ("models.kimi", "from k3fuse.ir.graph import Graph", "may not import k3fuse.ir"),
        ("models.kimi", "import numpy", "models may not import numpy"),
        ("compiler", "from k3fuse.cli import main", "compiler may not import k3fuse.cli"),
        ("kernels.kda", "from k3fuse.ir.graph import Graph", "may not import k3fuse.ir"),
        ("helpers", "import os", "no row for 'helpers'"),
    ],
)
def test_a_bad_edge_is_found(module: str, source: str, complaint: str) -> None:
    (found,) = violations(f"k3fuse.{module}", source)
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("k3fuse.cli", "import typer\nfrom k3fuse.compiler import compile_model"),
        ("k3fuse.lowering.lower", "from k3fuse.runtime.plan import Plan"),
        ("k3fuse.lowering.lower", "from k3fuse.runtime import plan"),
        ("k3fuse.runtime.engine", "from k3fuse.ir.interpreter import run\nimport cuda.bindings"),
        ("k3fuse.roofline", "from k3fuse.models.kimi_config import KimiConfig"),
        ("k3fuse.kernels.kda", "import cutlass.cute as cute"),
        ("k3fuse.runtime.bundle", "from k3fuse import __version__"),
    ],
)
def test_a_good_edge_passes(module: str, source: str) -> None:
    assert violations(module, source) == []
