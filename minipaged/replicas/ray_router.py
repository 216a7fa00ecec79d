"""Our routers (`routing.py`) where Ray asks one: in the process that calls the replicas."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from minipaged.errors import NoReplica
from minipaged.replicas.routing import LeastLoaded, PrefixAware, RoundRobin
from minipaged.replicas.settings import Routing

PLACED_S = 10.0
"""Seconds after which a request that was never sent where it was to go does not count there any more."""


class RayRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Ray keeps the list of replicas, sends requests, and asks again where one was refused or died before it took it;
    here is who gets which. Ray's own count of requests is not used: it is forgotten after some seconds."""

    def initialize_state(self, routing: Routing, block_size: int) -> None:
        """Called by Ray, with what the deployment says."""
        self._router = PrefixAware(block_size) if routing == "prefix" else _without_prefixes(routing)
        self._sent: dict[str, str] = {}  # Ray's id of a request -> replica
        self._placed: dict[str, tuple[str, float]] = {}  # and when, of those that are about to be sent

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are there now, and that is what they have cached. Called by Ray when any of it changes."""
        before, now = {one.unique_id for one in self.curr_replicas}, {one.replica_id.unique_id for one in replicas}
        for replica in before - now:
            self._forget(replica)
        for one in replicas:
            self._router.added(one.replica_id.unique_id)
            if isinstance(self._router, PrefixAware) and one.routing_stats:
                self._router.told(one.replica_id.unique_id, **one.routing_stats)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Known sooner than from `update_replicas`."""
        self._forget(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica, or none if there is none."""
        there = {one.replica_id.unique_id: one for one in candidate_replicas}
        if not there:
            return []
        name: str | None = None
        tokens: Sequence[int] = ()
        avoid: Sequence[str] = ()
        if pending_request is not None and pending_request.metadata.call_method == "generate":
            name = pending_request.metadata.internal_request_id
            asked, _, avoid = pending_request.args
            tokens = asked[0].prompt_token_ids
        counted = self._loads()
        loads = {one: counted[one] for one in there}
        try:
            chosen = self._router.choose(tokens, {one: loads[one] for one in loads if one not in avoid} or loads)
        except NoReplica:  # they have just died
            return []
        if name is not None:
            self._placed[name] = chosen, time.monotonic()
        return [[there[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica has it."""
        name = pending_request.metadata.internal_request_id
        if self._placed.pop(name, None):
            self._sent[name] = replica_id.unique_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended, or was not taken."""
        self._placed.pop(internal_request_id, None)
        self._sent.pop(internal_request_id, None)

    def _loads(self) -> Counter[str]:
        since = time.monotonic() - PLACED_S
        self._placed = {name: placed for name, placed in self._placed.items() if placed[1] > since}
        return Counter([*self._sent.values(), *(replica for replica, _ in self._placed.values())])

    def _forget(self, replica: str) -> None:
        self._router.removed(replica)
        self._sent = {name: there for name, there in self._sent.items() if there != replica}
        self._placed = {name: placed for name, placed in self._placed.items() if placed[0] != replica}


def _without_prefixes(routing: Routing) -> RoundRobin:
    return LeastLoaded() if routing == "least-loaded" else RoundRobin()
