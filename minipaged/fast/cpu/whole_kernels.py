"""A numba compiler that optimises each kernel once, as a whole, with all functions that it calls.

numba makes a library of each function that a kernel calls. It optimises the function and generates machine code for it,
and does both again in every library that links it: a function in a parallel loop passes through five libraries on its
way to the kernel. Only the kernel's own library runs. So here the other libraries get no machine code and, apart from a
few loops (`Loop`), no optimisation. That saves more than half of LLVM's time at a first start.
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
    """The library of a function that a kernel calls: not optimised, without machine code, not callable from Python."""

    def _optimize_functions(self, ll_module) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._add_environments()
        self._finalized = True

    def _add_environments(self) -> None:
        """Define the variable (`_ZN08NumbaEnv...`) that numba adds to each function and sets after compiling it.

        An ingredient has no machine code to contain the variable. Machine code that is generated later, with a variable
        of the same name, uses this one."""
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
        """Load a saved kernel while another one is being compiled. It has its machine code already, so it is not an
        ingredient."""
        with _libraries(codegen, JITCodeLibrary):
            library: JITCodeLibrary = JITCodeLibrary._unserialize(codegen, state)
            return library


class Whole(JITCodeLibrary):
    """The library of a kernel."""

    def _optimize_functions(self, ll_module) -> None:
        ll_module.data_layout = self._codegen._data_layout


class Loop(Ingredient):
    """The library of a function that is optimised before its callers link it. LLVM then vectorises its loops better."""

    _optimize_functions = JITCodeLibrary._optimize_functions
    _optimize_final_module = JITCodeLibrary._optimize_final_module


class KernelCompiler(Compiler):
    """numba's compiler, except that the libraries it makes for the functions of a kernel are ingredients."""

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
    """A context in which numba's libraries are of class `kind`. (numba compiles in one thread at a time.)"""
    before, codegen._library_class = codegen._library_class, kind
    try:
        yield
    finally:
        codegen._library_class = before
