"""What several replicas can be told: options of `minipaged serve`, beside those of the server and of the engine."""

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
    """How many engines share the work, each in a process of its own, started by Ray; if left open, one, without Ray."""
    max_replicas: int | None = setting(None, at_least=1)
    """Let Ray start more, up to so many, while each has more requests than max_num_seqs; and stop them later."""
    ray_address: str | None = None
    """A Ray cluster that runs already, as HOST:6379, or auto for this machine's; else one is started here."""
    routing: Routing = "prefix"
    """Who gets a request: prefix (who has computed the beginning of its prompt), least-loaded or round-robin."""
    cpus_per_replica: int | None = setting(None, at_least=1)
    """Cores that a replica takes; if left open, this machine's are shared out, and in a cluster it is one."""
    gpus_per_replica: int | None = setting(None, at_least=0)
    """GPUs that a replica takes; if left open, one for each of its ranks, where there are GPUs."""

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
        """Replicas there can be."""
        return self.max_replicas or self.replicas or 1
