"""What a source file defines, read without importing it."""

from __future__ import annotations

import ast
from pathlib import Path


def definitions(path: Path) -> set[str]:
    """The names of its classes, functions and methods, as in `BlockTable.append`."""

    def inside(node: ast.AST, prefix: str) -> set[str]:
        found = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found |= {f"{prefix}{child.name}", *inside(child, f"{prefix}{child.name}.")}
        return found

    return inside(ast.parse(path.read_text()), "")
