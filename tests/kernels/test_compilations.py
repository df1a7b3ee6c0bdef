"""Every kernel that is launched is among those that tests compile for a GPU."""

import ast
import importlib
from pathlib import Path

import chairlift.kernels
from tests import kernels


def launched_by(path: Path) -> set[str]:
    """Names the module's own functions that it calls with a grid."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    indexed = {
        node.func.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    return {each.id for each in indexed if isinstance(each, ast.Name)} & functions


def test_each_launched_kernel_is_compiled_by_a_test() -> None:
    launched = {
        (f"chairlift.kernels.{path.stem}", name)
        for path in Path(chairlift.kernels.__path__[0]).glob("*.py")
        for name in launched_by(path)
    }
    modules = [
        importlib.import_module(f"tests.kernels.{path.stem}") for path in Path(kernels.__path__[0]).glob("test_*.py")
    ]
    compiled = {(case.module, case.kernel) for module in modules for case in getattr(module, "COMPILATIONS", ())}
    assert len(launched) > 15
    assert launched == compiled
