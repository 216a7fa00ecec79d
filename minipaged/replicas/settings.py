"""The settings of replicas, which are options of `minipaged serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minipaged.errors import InvalidRequest
from minipaged.params import check, setting

Routing = Literal["prefix", "least-loaded", "round-robin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Settings of replicas. Raises InvalidRequest (a ValueError) for a value out of range."""

    replicas: int | None = setting(None, at_least=1)
    """Engines that share the work, each in its own process, which Ray starts; by default one engine, without Ray."""
    max_replicas: int | None = setting(None, at_least=1)
    """Replicas at most: Ray adds some while each has more than max_num_seqs requests, and removes them later."""
    ray_address: str | None = None
    """Address of a running Ray cluster, as HOST:6379, or auto for this machine's; by default Ray is started here."""
    routing: Routing = "prefix"
    """How to choose a replica: prefix (the longest cached beginning of the prompt), least-loaded or round-robin."""
    cpus_per_replica: int | None = setting(None, at_least=1)
    """Cores per replica; by default an equal share of this machine's, or 1 in a cluster."""
    gpus_per_replica: int | None = setting(None, at_least=0)
    """GPUs per replica; by default one per rank, if there are GPUs."""

    def __post_init__(self) -> None:
        check(self)
        if self.replicas is None:
            for name in ("max_replicas", "ray_address", "routing", "cpus_per_replica", "gpus_per_replica"):
                if getattr(self, name) not in (None, "prefix"):
                    raise InvalidRequest(f"{name} is given, but there are no replicas; say how many with replicas")
        elif self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidRequest(
                f"max_replicas is {self.max_replicas}, fewer than the {self.replicas} replicas there are; raise it, or "
                "leave it out"
            )

    @property
    def most(self) -> int:
        """The largest number of replicas that may run."""
        return self.max_replicas or self.replicas or 1
