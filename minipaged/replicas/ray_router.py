"""Adapts our routers (`routing.py`) to Ray's interface. Runs in the process that calls the replicas."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from minipaged.errors import NoReplica
from minipaged.handover.block_hashes import salt_number, salted
from minipaged.replicas.routing import LeastLoaded, PrefixAware, RoundRobin
from minipaged.replicas.settings import Routing

PLACED_S = 10.0
"""Seconds for which a request counts as load of its chosen replica, if Ray does not send it there."""


class RayRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Chooses a replica for each request. Ray keeps the list of replicas, sends the requests, and calls again if a
    replica refuses a request or dies before it accepts it. Requests are counted here, because Ray forgets its own count
    after some seconds."""

    def initialize_state(self, routing: Routing, block_size: int) -> None:
        """Make the router. Called by Ray, with `request_router_kwargs` of the deployment."""
        self._router = PrefixAware(block_size) if routing == "prefix" else _without_prefixes(routing)
        self._sent: dict[str, str] = {}  # Ray's id of a request -> replica
        self._placed: dict[str, tuple[str, float]] = {}  # id -> (replica, time of choice), of requests not yet sent

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the set of replicas and the content of their caches. Called by Ray when either changes."""
        before, now = {one.unique_id for one in self.curr_replicas}, {one.replica_id.unique_id for one in replicas}
        for replica in before - now:
            self._forget(replica)
        for one in replicas:
            self._router.added(one.replica_id.unique_id)
            if isinstance(self._router, PrefixAware) and one.routing_stats:
                self._router.told(one.replica_id.unique_id, **one.routing_stats)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that died. Ray calls this earlier than `update_replicas`."""
        self._forget(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return [[replica]], or [] if no replica is there."""
        there = {one.replica_id.unique_id: one for one in candidate_replicas}
        if not there:
            return []
        name: str | None = None
        tokens: Sequence[int] = ()
        avoid: Sequence[str] = ()
        if pending_request is not None and pending_request.metadata.call_method == "generate":
            name = pending_request.metadata.internal_request_id
            asked, _, avoid = pending_request.args
            tokens = salted(asked[0].prompt_token_ids, salt_number(asked[0].cache_salt))
        counted = self._loads()
        loads = {one: counted[one] for one in there}
        try:
            chosen = self._router.choose(tokens, {one: loads[one] for one in loads if one not in avoid} or loads)
        except NoReplica:  # all replicas have just died
            return []
        if name is not None:
            self._placed[name] = chosen, time.monotonic()
        return [[there[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request as load of the replica that it was sent to. Called by Ray."""
        name = pending_request.metadata.internal_request_id
        if self._placed.pop(name, None):
            self._sent[name] = replica_id.unique_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request, which has ended or was refused. Called by Ray."""
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
