"""minipaged: PagedAttention and the serving system around it, written twice: once to be read, once to be fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minipaged.api.prompts import TextPrompt, TokensPrompt
from minipaged.errors import (
    BlockNotAllocated,
    InvalidRequest,
    InvariantViolation,
    MinipagedError,
    ModelError,
    OutOfBlocks,
)
from minipaged.outputs import CompletionOutput, CompletionUpdate, RequestMetrics, RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from minipaged.async_llm import AsyncLLM
    from minipaged.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "BlockNotAllocated",
    "CompletionOutput",
    "CompletionUpdate",
    "EngineConfig",
    "InvalidRequest",
    "InvariantViolation",
    "MinipagedError",
    "ModelError",
    "OutOfBlocks",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestUpdate",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import LLM and AsyncLLM when they are first used, so that the engine and the allocators run without NumPy."""
    if name == "LLM":
        from minipaged.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from minipaged.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'minipaged' has no attribute {name!r}")
