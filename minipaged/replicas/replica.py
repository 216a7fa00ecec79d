"""One of several engines: an `AsyncLLM` in a process that Ray has started, and starts again when it dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from prometheus_client import Metric
from ray import serve

from minipaged.async_llm import AsyncLLM, AsyncRequest
from minipaged.errors import MinipagedError
from minipaged.models.config import ModelConfig
from minipaged.outputs import RequestUpdate
from minipaged.params import EngineConfig
from minipaged.replicas.routing import CacheNews
from minipaged.serve.metrics import Metrics
from minipaged.serve.server import LAST_WORDS_S, use_one_heap


@dataclass(frozen=True)
class Facts:
    """What the endpoint has to know of the engines, which are all alike."""

    folder: Path
    config: EngineConfig
    model_config: ModelConfig
    tier: str


@dataclass(frozen=True)
class Taken:
    """The first thing said of requests: this replica has them."""

    replica: str


@dataclass(frozen=True)
class ReplicaRefused:
    """Or it has not; nothing was begun."""

    replica: str
    error: MinipagedError


def sharers_here(most: int) -> int:
    """How many of at most so many replicas this one's machine can have, by the cores and GPUs that each takes."""
    node = ray.get_runtime_context().get_node_id()
    there = next(each["Resources"] for each in ray.nodes() if each["NodeID"] == node)
    takes = ray.get_runtime_context().get_assigned_resources()
    return sharers(most, there, takes)


def sharers(most: int, there: Mapping[str, float], takes: Mapping[str, float]) -> int:
    """The same of a machine that has these resources, where each takes those."""
    return max(1, min([most, *(int(there.get(kind, 0) // takes[kind]) for kind in ("CPU", "GPU") if takes.get(kind))]))


class Replica:
    """What Ray makes so many of. Its methods are called by the endpoint, and some by Ray."""

    async def __init__(  # type: ignore[misc]
        self, model: str, name: str, max_waiting: int, most: int, engine: dict[str, Any]
    ) -> None:
        """`most`: how many of them there may be."""
        use_one_heap()
        self.id = serve.get_replica_context().replica_id.unique_id
        self.news = CacheNews()
        self.allm = AsyncLLM(
            model, listeners=[self.news], max_waiting=max_waiting, host_sharers=sharers_here(most), **engine
        )
        self.metrics = Metrics(name, self.allm.llm.config, engine=self.id)
        self.allm.observers.append(self.metrics)
        self.allm.on_death = self._engine_died
        self.allm.start()  # so that a worker's death is heard of before the next request

    async def generate(
        self, asked: Sequence[AsyncRequest], finals_only: bool, avoid: Sequence[str]
    ) -> AsyncIterator[Taken | ReplicaRefused | RequestUpdate | MinipagedError]:
        """Whether the requests are taken, then what is new of them, and at the end the error, if the engine dies of
        one. `avoid` is for the router. Whoever leaves early ends them."""
        try:
            stream = await self.allm.add(asked, finals_only=finals_only)
        except MinipagedError as error:
            yield ReplicaRefused(self.id, error)
            return
        try:
            yield Taken(self.id)
            async for update in stream:
                yield update
        except MinipagedError as error:
            yield error
        finally:
            stream.close()

    async def facts(self) -> Facts:
        """What all of them have in common."""
        llm = self.allm.llm
        return Facts(llm.folder, llm.config, llm.model_config, llm.description)

    async def alive(self) -> None:
        """Raises EngineDead, ShuttingDown."""
        self.allm.check_open()

    async def collect(self) -> list[Metric]:
        """Its metrics, labelled as this replica's."""
        return self.metrics.collect()

    # --- Called by Ray ----------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises EngineDead: of such a one Ray makes another, should it not end by itself."""
        self.allm.check_open()

    async def record_routing_stats(self) -> dict[str, Any]:
        """What has changed in its prefix cache: for the routers, to which Ray brings the latest of what it is told."""
        number, changes = self.news.latest()
        return {"number": number, "changes": changes}

    def _engine_died(self, error: BaseException) -> None:
        """All readers are told; let them hear it, and have Ray start another process."""
        asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)

    def __del__(self) -> None:
        """Called by Ray when it ends a replica in order; what is left of the process is killed."""
        if hasattr(self, "allm"):
            self.allm.llm.close()
