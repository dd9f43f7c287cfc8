"""What modules say they export is what they export."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ctrlcache

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(ctrlcache.__path__, "ctrlcache.")
    if ".commands" not in module.name and not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", ["ctrlcache", *MODULES])
def test_exports_exist(name: str) -> None:
    """Every name in `__all__` is there, and only once."""
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    assert [item for item in exported if not hasattr(module, item)] == []


def test_nothing_of_triton_or_a_model_is_needed() -> None:
    """The library is imported whole without Triton, torch or anything of the server."""
    code = (
        "import sys, importlib\n"
        f"for name in {['ctrlcache', *MODULES]!r}: importlib.import_module(name)\n"
        "found = {m.partition('.')[0] for m in sys.modules}\n"
        "print(sorted(found & {'torch', 'triton_python_backend_utils', 'worldserve', "
        "'worldcache', 'tritonclient', 'pytriton'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_dependencies_point_one_way() -> None:
    """No module of the library imports the server, not even inside a function."""
    root = Path(ctrlcache.__path__[0])
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            wrong = [
                n for n in names if n.partition(".")[0] in ("worldserve", "worldcache", "torch")
            ]
            assert not wrong, f"{path.name} imports {wrong}"
