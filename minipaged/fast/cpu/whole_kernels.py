"""Compiles a kernel together with all functions that it calls, so that LLVM optimizes it once, as a whole.

numba makes a library of each function that a kernel calls. It optimizes the function and generates its machine code,
and does both again in every library that links it in: a function within a parallel loop passes through five libraries
on its way to the kernel. Only the kernel's own library runs. So here the other libraries get no machine code and,
except for a few loops (`Loop`), no optimization. That saves more than half of LLVM's time at a first start.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class Ingredient(JITCodeLibrary):
    """The library of a function that a kernel calls: not optimized, without machine code. Python cannot call it."""

    def _optimize_functions(self, ll_module) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._add_environments()
        self._finalized = True

    def _add_environments(self) -> None:
        """Define the environment variables of an ingredient's functions. numba gives each function such a variable in
        LLVM (`_ZN08NumbaEnv...`) and sets it once the function is compiled. An ingredient has no machine code to hold
        it, so it is defined here. Machine code that is made later, with a variable of the same name, uses this one."""
        engine = self._codegen._engine
        names = [variable.name for variable in self._final_module.global_variables]
        new = [name for name in names if name.startswith("_ZN08NumbaEnv") and not engine.is_symbol_defined(name)]
        if not new:
            return
        lines = [f'@"{name}" = common global i8* null' for name in new]
        self._codegen._add_module(
            binding.parse_assembly("\n".join([str(self._codegen._create_empty_module("")), *lines]))
        )
        engine.finalize_object()

    @classmethod
    def _unserialize(cls, codegen, state) -> JITCodeLibrary:
        """Loads a kernel from disk while another one is being compiled. It already has machine code, so it is no
        ingredient."""
        with _libraries(codegen, JITCodeLibrary):
            library: JITCodeLibrary = JITCodeLibrary._unserialize(codegen, state)
            return library


class Whole(JITCodeLibrary):
    """The library of a kernel."""

    def _optimize_functions(self, ll_module) -> None:
        ll_module.data_layout = self._codegen._data_layout


class Loop(Ingredient):
    """The library of a function that is optimized before its callers link it in, because LLVM then vectorizes its loops
    better."""

    _optimize_functions = JITCodeLibrary._optimize_functions
    _optimize_final_module = JITCodeLibrary._optimize_final_module


class KernelCompiler(Compiler):
    """numba's compiler, changed so that the libraries which it makes on the way to a kernel are ingredients."""

    library: type[JITCodeLibrary] = Whole

    def compile_extra(self, func) -> Any:
        codegen = self.state.targetctx.codegen()
        with _libraries(codegen, Ingredient):
            self.state.library = self.library(codegen, func.__qualname__)
            self.state.library.enable_object_caching()
            return super().compile_extra(func)


class LoopCompiler(KernelCompiler):
    library = Loop


@contextmanager
def _libraries(codegen, kind: type[JITCodeLibrary]) -> Iterator[None]:
    """A context in which numba makes its libraries of class `kind`. (numba compiles in one thread at a time.)"""
    before, codegen._library_class = codegen._library_class, kind
    try:
        yield
    finally:
        codegen._library_class = before
