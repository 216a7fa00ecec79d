"""The endpoint, a replica, and what is asked of Ray, each without the others. Thorough, as all that needs Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from minipaged import LLM, EngineConfig
from minipaged.async_llm import AsyncRequest
from minipaged.errors import EngineDead, ShuttingDown, WorkerFailed
from minipaged.events import BlockCached, BlockEvicted
from minipaged.handover.block_hashes import salt_number
from minipaged.outputs import RequestUpdate
from minipaged.params import SamplingParams
from minipaged.replicas.routing import CacheNews
from minipaged.replicas.settings import ReplicaSettings
from minipaged.serve.settings import ServeSettings
from tests.effort import thorough
from tests.serve.harness import PATIENCE_S
from tests.tiny_model import make_tiny_model

pytestmark = thorough
ASKED = [AsyncRequest("mine", [1, 2, 3], SamplingParams(max_tokens=4), None, 0)]


class Replies:
    """What a replica says, an error last; like Ray's, it raises where it was cancelled."""

    def __init__(self, *said: object) -> None:
        self.said = list(said)
        self.cancelled = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        from ray.exceptions import TaskCancelledError

        if not self.said:
            await self.cancelled.wait()
            raise TaskCancelledError
        one = self.said.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    def cancel(self) -> None:
        self.cancelled.set()


def engines(*replies: Replies) -> Any:
    """The endpoint's engines before replicas that answer one call after the other so, and then no more."""
    from minipaged.replicas.endpoint import Engines

    waiting = list(replies)
    generate = SimpleNamespace(remote=lambda *_: waiting.pop(0))
    facts = SimpleNamespace(folder=Path("nowhere"), config=None, model_config=None)
    return Engines(SimpleNamespace(options=lambda **_: generate), facts)  # type: ignore[arg-type]


def raised_there(cause: Exception) -> Exception:
    """As Ray hands on what a replica raises."""
    from ray.exceptions import RayTaskError

    error: Exception = RayTaskError("generate", "Traceback", cause).as_instanceof_cause()
    return error


def killed_by_ray(how: str) -> Exception:
    from ray.exceptions import RayActorError

    return RayActorError("00", f"The actor died unexpectedly before finishing this task.\n{how}")  # type: ignore[no-any-return]


def taken() -> Any:
    from minipaged.replicas.replica import Taken

    return Taken("a")


# --- The endpoint -----------------------------------------------------------------------------------


def test_what_a_replica_raises_is_told_at_once_and_nobody_else_is_asked() -> None:
    async def ask() -> None:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ZeroDivisionError, match="by nothing"):
                await engines(Replies(raised_there(ZeroDivisionError("by nothing")))).add(ASKED)
            stream = await engines(Replies(taken(), raised_there(ZeroDivisionError("later")))).add(ASKED)
            with pytest.raises(ZeroDivisionError, match="later"):
                await anext(stream)

    asyncio.run(ask())


def test_one_that_dies_before_it_has_taken_a_request_is_not_noticed() -> None:
    async def ask() -> None:
        died = Replies(killed_by_ray("The actor is dead because its worker process has died."))
        assert await engines(died, Replies(taken())).add(ASKED)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "The actor is dead because its worker process has died.",
            "the replica that had the request has died before",
        ),
        ("The actor is dead because it was killed by `ray.kill`.", "the replica that had the request was ended by Ray"),
    ],
)
def test_who_loses_a_replica_is_told_how(how: str, told: str) -> None:
    async def ask() -> None:
        stream = await engines(Replies(taken(), killed_by_ray(how))).add(ASKED)
        with pytest.raises(EngineDead, match=told):
            await anext(stream)

    asyncio.run(ask())


def test_whose_time_to_finish_is_over_is_told_so_wherever_he_is() -> None:
    """One reads, one does not just now; none is told that a replica has died, and none gets half an answer."""

    async def drain() -> None:
        replies = Replies(taken()), Replies(taken(), RequestUpdate("mine", (), None))
        both = engines(*replies)
        reads, sleeps = await both.add(ASKED), await both.add(ASKED)
        reading = asyncio.create_task(anext(reads))
        await anext(sleeps)
        await both.shutdown(0.05)
        for one in (reading, anext(sleeps), sleeps.outputs()):
            with pytest.raises(ShuttingDown, match="time to finish is over"):
                await asyncio.wait_for(one, PATIENCE_S)
        with pytest.raises(ShuttingDown, match="takes no more requests"):
            await both.add(ASKED)
        assert all(each.cancelled.is_set() for each in replies)
        assert both.num_open == 0

    asyncio.run(drain())


def test_draining_waits_for_what_goes_on_and_no_longer() -> None:
    async def drain() -> None:
        finished = RequestUpdate("mine", (), SimpleNamespace(request_id="mine"))  # type: ignore[arg-type]
        replies = Replies(taken(), finished)
        one = engines(replies)
        stream = await one.add(ASKED)
        ending = asyncio.create_task(one.shutdown(PATIENCE_S))
        await asyncio.sleep(0)
        assert not ending.done()
        assert [update async for update in stream] == [finished]
        async with asyncio.timeout(PATIENCE_S):
            await ending
        assert not replies.cancelled.is_set(), "nothing was left to cancel"

    asyncio.run(drain())


def test_who_leaves_a_stream_cancels_the_replica_s_replies() -> None:
    async def leave() -> None:
        replies = Replies(taken())
        one = engines(replies)
        (await one.add(ASKED)).close()
        assert replies.cancelled.is_set()
        assert one.num_open == 0

    asyncio.run(leave())


# --- A replica --------------------------------------------------------------------------------------


def test_a_replica_takes_its_part_of_the_machine_s_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minipaged.replicas import replica as module

    model = str(make_tiny_model(tmp_path))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 << 20))
    monkeypatch.setattr(module, "sharers_here", lambda most: most)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)

    async def config() -> EngineConfig:
        replica = module.Replica.__new__(module.Replica)
        await replica.__init__(model, "tiny", 9, 3, {"tier": "reference"})  # type: ignore[misc]
        return (await replica.facts()).config

    found = asyncio.run(config())
    assert found == LLM(model, tier="reference", host_sharers=3).config
    assert found.num_blocks < LLM(model, tier="reference").config.num_blocks


def test_a_replica_hears_of_a_worker_s_death_while_it_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then it refuses what comes, so that another is asked; says that it is not well; and ends."""
    from minipaged.reference.llama import Llama
    from minipaged.replicas import replica as module
    from minipaged.replicas.replica import Replica, ReplicaRefused

    fail: list[Callable[[Exception], None]] = []
    exits: list[int] = []
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module, "LAST_WORDS_S", 0)
    monkeypatch.setattr(module, "sharers_here", lambda most: 1)
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(Llama, "on_failure", lambda _, call: fail.append(call))

    async def die() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__(str(make_tiny_model(tmp_path)), "tiny", 9, 2, {"tier": "reference", "num_blocks": 8})  # type: ignore[misc]
        await replica.check_health()
        fail[0](WorkerFailed("worker 1 of 2 has died"))
        while not exits:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDead, match="worker 1 of 2 has died"):
            await replica.check_health()
        [refused] = [one async for one in replica.generate(ASKED, False, [])]
        assert isinstance(refused, ReplicaRefused)
        assert isinstance(refused.error, EngineDead)

    asyncio.run(die())
    assert exits == [1]


def test_what_a_replica_publishes_is_what_its_router_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.request_router import RequestRouter

    from minipaged.replicas.ray_router import RayRouter
    from minipaged.replicas.replica import Replica

    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    monkeypatch.setattr(RequestRouter, "curr_replicas", {})
    router, news = RayRouter.__new__(RayRouter), CacheNews()
    router.initialize_state("prefix", 16)
    for block in range(3):
        news(BlockCached(0, block, block, block_hash=70 + block))
    news(BlockEvicted(2))
    replica = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"), routing_stats={})
    router.update_replicas([replica])  # it has told nothing yet
    replica.routing_stats = asyncio.run(Replica.record_routing_stats(SimpleNamespace(news=news)))  # type: ignore[arg-type]
    router.update_replicas([replica])
    assert router._router.known("a") == {70, 71}


def test_the_router_of_ray_looks_at_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    from minipaged.replicas.ray_router import RayRouter

    router, seen = RayRouter.__new__(RayRouter), list[Any]()
    router.initialize_state("prefix", 2)
    monkeypatch.setattr(router._router, "choose", lambda tokens, loads: seen.append(list(tokens)) or "a")
    replica = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"), routing_stats={})
    for salt in (None, "mine"):
        metadata = SimpleNamespace(call_method="generate", internal_request_id="1")
        pending = SimpleNamespace(metadata=metadata, args=([ASKED[0]._replace(cache_salt=salt)], False, ()))
        assert asyncio.run(router.choose_replicas([replica], pending)) == [[replica]]
    tokens = [*ASKED[0].prompt_token_ids]
    assert seen == [tokens, [tokens[0] - salt_number("mine"), *tokens[1:]]]


# --- What is asked of Ray ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
        ({"tensor_parallel_size": 2, "device": "cpu"}, 0),
        ({"tensor_parallel_size": 2, "tier": "reference"}, 0),
    ],
)
def test_a_replica_takes_a_gpu_for_each_of_its_ranks(engine: dict[str, Any], gpus: int) -> None:
    from minipaged.replicas.server import gpus_needed

    assert gpus_needed({"CPU": 8.0, "GPU": 8.0}, **engine) == gpus
    assert gpus_needed({"CPU": 8.0}, **engine) == 0


def test_more_than_there_is_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from minipaged.errors import InvalidRequest
    from minipaged.replicas import server
    from minipaged.replicas.server import check_room

    monkeypatch.setattr(os, "cpu_count", lambda: 99)  # of which a container's quota allows fewer
    monkeypatch.setattr(server, "usable_cores", lambda: 4)
    here, elsewhere = ReplicaSettings(replicas=2), ReplicaSettings(replicas=2, ray_address="auto")
    check_room({"CPU": 4.0}, here, cpus=2, gpus=0)
    check_room({"CPU": 4.0}, elsewhere, cpus=99, gpus=1)
    with pytest.raises(InvalidRequest, match="cpus_per_replica is 3: 2 replicas take 6, and there are 4; take fewer"):
        check_room({"CPU": 4.0}, here, cpus=3, gpus=0)
    monkeypatch.setattr(server, "usable_cores", lambda: 2)
    with pytest.raises(InvalidRequest, match="4 replicas take 8, and there are 2"):  # though Ray was told of 4
        check_room({"CPU": 4.0}, ReplicaSettings(replicas=4), cpus=2, gpus=0)
    check_room({"CPU": 4.0}, ReplicaSettings(replicas=4), cpus=1, gpus=0)  # they take turns
    with pytest.raises(InvalidRequest, match="gpus_per_replica is 1: 2 replicas take 2, and there are 0"):
        check_room({"CPU": 4.0}, here, cpus=1, gpus=1)


def test_what_the_options_say_is_what_ray_is_told() -> None:
    from minipaged.replicas.server import LAST_MOMENT_S, application

    settings = ServeSettings(shutdown_timeout=20)
    scaled = application("m", settings, ReplicaSettings(replicas=2, max_replicas=6), cpus=3, gpus=4, max_num_seqs=32)
    endpoint = scaled._bound_deployment
    engines = endpoint.init_args[0]._bound_deployment
    limits = engines._deployment_config.autoscaling_config
    assert (limits.min_replicas, limits.max_replicas, limits.target_ongoing_requests) == (2, 6, 32)
    assert engines.ray_actor_options == {"num_cpus": 3, "num_gpus": 4}
    for one in (endpoint, engines):
        assert one._deployment_config.graceful_shutdown_timeout_s == 20 + LAST_MOMENT_S
    fixed = application("m", settings, ReplicaSettings(replicas=2), cpus=1, gpus=0)
    engines = fixed._bound_deployment.init_args[0]._bound_deployment
    assert engines.num_replicas == 2
    assert engines._deployment_config.autoscaling_config is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_on_a_cluster_no_signal_goes_past_the_clearing_up_but_the_last(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minipaged.replicas.server import Signals

    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        for started in (False, True):
            exits.clear()
            signals = Signals(has_to_clear_up=True)
            signals.started = started
            if started:
                signal.raise_signal(number)  # what goes on may finish
                assert signals.come.is_set()
            with pytest.raises(SystemExit) as end:
                signal.raise_signal(number)
            assert end.value.code == 128 + number
            assert not exits
            signal.raise_signal(number)
            assert exits == [128 + number]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@pytest.mark.parametrize("started", [False, True])
def test_a_signal_that_ends_it_at_once_kills_all_that_was_started(
    started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grandchildren, too, as Ray's agents are."""
    from minipaged.replicas.server import Signals

    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        grandchild = psutil.Process(int(child.stdout.readline()))
        try:
            signals = Signals(has_to_clear_up=False)
            signals.started = started
            if started:
                signal.raise_signal(signal.SIGTERM)
                assert child.poll() is None
            signal.raise_signal(signal.SIGTERM)
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
            gone, _ = psutil.wait_procs([grandchild], timeout=PATIENCE_S)
            child.kill()
    assert exits == [128 + signal.SIGTERM]
    assert gone


def test_what_becomes_of_replicas_is_said_in_a_line() -> None:
    from minipaged.replicas.server import told_pools, told_states

    died = told_states({"RUNNING": 2}, {"RUNNING": 1, "STARTING": 1}, False)
    assert died == "replicas: 1 running, 1 starting; 1 has died, and Ray starts others in their place"
    assert told_states({"RUNNING": 1, "STARTING": 1}, {"RUNNING": 2}, False) == "replicas: 2 running"
    assert told_states({"RUNNING": 3}, {"RUNNING": 2, "STOPPING": 1}, True) == "replicas: 2 running, 1 stopping"
    assert (told_pools([7, 7]), told_pools([7, 6, 9])) == ("7", "6 to 9")


@pytest.mark.parametrize(
    ("most", "takes", "sharing"),
    [
        (2, {"CPU": 1.0}, 2),
        (8, {"CPU": 2.0}, 4),  # as many as have room
        (8, {"CPU": 1.0, "GPU": 4.0}, 2),
        (8, {"CPU": 1.0, "GPU": 0.0}, 8),
        (1, {"CPU": 8.0}, 1),
    ],
)
def test_the_replicas_of_a_machine_share_its_memory(most: int, takes: dict[str, float], sharing: int) -> None:
    from minipaged.replicas.replica import sharers

    assert sharers(most, {"CPU": 8.0, "GPU": 8.0}, takes) == sharing


def test_what_the_model_cannot_have_is_refused_before_ray_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from minipaged.errors import InvalidRequest
    from minipaged.replicas.server import serve_replicas

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", start)
    model, two = str(make_tiny_model(tmp_path)), ReplicaSettings(replicas=2)
    with pytest.raises(InvalidRequest, match="tensor_parallel_size is 5"):
        serve_replicas(model, ServeSettings(port=0), two, tensor_parallel_size=5)
    with pytest.raises(InvalidRequest, match="max_model_len is 99999"):
        serve_replicas(model, ServeSettings(port=0), two, max_model_len=99_999)
    with pytest.raises(InvalidRequest, match=r"max_model_len is 100, .* lower max_model_len to 32"):
        serve_replicas(model, ServeSettings(port=0), two, max_model_len=100, num_blocks=2)


def test_of_what_vllm_does_not_tell_apart_by_engine_there_is_the_sum() -> None:
    """Two samples with the same labels would make a scrape fail."""
    from minipaged.replicas.endpoint import _exposition
    from minipaged.serve.metrics import Metrics

    config = EngineConfig(num_blocks=4, max_model_len=16, vocab_size=11)
    metrics = [Metrics("tiny", config, engine=name) for name in ("a", "b", "c")]
    for number, each in enumerate(metrics):
        each.refused(number)
    lines = _exposition("", [one for each in metrics for one in each.collect()])[0].decode().splitlines()
    rejected = 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"}'
    assert [line for line in lines if line.startswith(rejected)] == [f"{rejected} 3.0"]
    assert len([line for line in lines if line.startswith("vllm:num_requests_running{")]) == 3
    samples = [line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")]
    assert len(samples) == len(set(samples))
