"""One of several engines: an `AsyncLLM` in a process that Ray starts, and restarts when it dies."""

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
    """The properties of the engines that the endpoint needs. All replicas have the same."""

    folder: Path
    config: EngineConfig
    model_config: ModelConfig
    tier: str


@dataclass(frozen=True)
class Taken:
    """The first reply to a call of `generate`: this replica has accepted the requests."""

    replica: str


@dataclass(frozen=True)
class ReplicaRefused:
    """The only reply to a call of `generate` that the replica refuses. It has computed nothing."""

    replica: str
    error: MinipagedError


def sharers_here(most: int) -> int:
    """Return the number of replicas, `most` at most, that fit on this machine by the cores and GPUs of each."""
    node = ray.get_runtime_context().get_node_id()
    there = next(each["Resources"] for each in ray.nodes() if each["NodeID"] == node)
    takes = ray.get_runtime_context().get_assigned_resources()
    return sharers(most, there, takes)


def sharers(most: int, there: Mapping[str, float], takes: Mapping[str, float]) -> int:
    """Return the number of replicas, 1 to `most`, that fit on a machine. `there`: the machine's resources; `takes`: the
    resources of one replica."""
    return max(1, min([most, *(int(there.get(kind, 0) // takes[kind]) for kind in ("CPU", "GPU") if takes.get(kind))]))


class Replica:
    """The Ray deployment of one engine. The endpoint calls its methods, and Ray calls the last few."""

    async def __init__(  # type: ignore[misc]
        self, model: str, name: str, max_waiting: int, most: int, engine: dict[str, Any]
    ) -> None:
        """`most`: the largest number of replicas that may run."""
        use_one_heap()
        self.id = serve.get_replica_context().replica_id.unique_id
        self.news = CacheNews()
        self.allm = AsyncLLM(
            model, listeners=[self.news], max_waiting=max_waiting, host_sharers=sharers_here(most), **engine
        )
        self.metrics = Metrics(name, self.allm.llm.config, engine=self.id)
        self.allm.observers.append(self.metrics)
        self.allm.on_death = self._engine_died
        self.allm.start()  # now, so that a worker's death is noticed before the next request

    async def generate(
        self, asked: Sequence[AsyncRequest], finals_only: bool, avoid: Sequence[str]
    ) -> AsyncIterator[Taken | ReplicaRefused | RequestUpdate | MinipagedError]:
        """Yield Taken or ReplicaRefused, then the updates of the requests, and an error at the end if the engine dies.
        A caller that stops reading aborts the requests. `avoid` is only for the router."""
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
        """Return the properties that all replicas share."""
        llm = self.allm.llm
        return Facts(llm.folder, llm.config, llm.model_config, llm.description)

    async def alive(self) -> None:
        """Raise EngineDead or ShuttingDown if the engine accepts no requests."""
        self.allm.check_open()

    async def collect(self) -> list[Metric]:
        """Return the engine's metrics, with this replica's id in the label `engine`."""
        return self.metrics.collect()

    # --- Called by Ray ----------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise EngineDead if the engine is dead. Ray then replaces this replica, if its process has not exited."""
        self.allm.check_open()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the latest changes of the prefix cache. Ray passes them on to the routers."""
        number, changes = self.news.latest()
        return {"number": number, "changes": changes}

    def _engine_died(self, error: BaseException) -> None:
        """Exit when the readers have had time to receive the error. Ray then starts another process."""
        asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)

    def __del__(self) -> None:
        """Close the engine. Called by Ray when it stops a replica, before it kills the process."""
        if hasattr(self, "allm"):
            self.allm.llm.close()
