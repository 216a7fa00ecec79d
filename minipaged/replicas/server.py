"""From the command line to several replicas: what `minipaged serve --replicas N` runs, until a signal ends it.

Ray starts the processes, starts those again that die, and adds and ends some with the load. Where it is not told of a
cluster (`ray_address`), it starts with this command and ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import psutil
import ray
from ray import cloudpickle, serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from minipaged.async_llm import check_before_serving
from minipaged.errors import InvalidRequest, ModelError
from minipaged.models import hub
from minipaged.models.loading import load_config
from minipaged.replicas.endpoint import Endpoint
from minipaged.replicas.ray_router import RayRouter
from minipaged.replicas.replica import Facts, Replica
from minipaged.replicas.settings import ReplicaSettings
from minipaged.serve.connections import raise_file_limit
from minipaged.serve.server import LAST_MOMENT_S, listen
from minipaged.serve.settings import ServeSettings
from minipaged.setup.loaded_model import check_before_loading
from minipaged.setup.own_parts import FROM_TEXT, is_users
from minipaged.setup.settings import Settings

NAME = "minipaged"
"""Of the application, to Ray."""
NEWS_S = 1.0
"""Seconds after which a replica tells again what it has cached."""
NO_LIMIT = 1 << 20
"""Requests that Ray may send one replica: its engine has a queue, and says when that is full. Ray's own 5 would leave
a batch all but empty."""
OF_THE_CLUSTER = {"host", "port", "ray_address"}
"""What `minipaged serve` is told, and a Serve config file has elsewhere (`http_options`)."""
ATTEMPTS = 2
"""To start a replica, before it is said what is wrong."""

LAST_WORDS = re.compile(
    r"^(?![\w.]*DeploymentUnavailableError)[\w.]*(?:Error|Exception|errors\.\w+): (?!Traceback)(.+)$", re.MULTILINE
)
"""Of a traceback: what was wrong. (That there are no replicas, the endpoint says, is none of the reasons why.)"""


def application(
    model: str, settings: ServeSettings, replicas: ReplicaSettings, *, cpus: float, gpus: float, **engine: Any
) -> serve.Application:
    """What Ray is to run: replicas of an engine, and the endpoint before them. `cpus`, `gpus`: of each replica."""
    names, asked = settings.served_model_name or (model,), Settings(**engine)
    for part in (asked.allocator, asked.scheduling_policy):
        if is_users(part):  # its module is known in this process alone
            cloudpickle.register_pickle_by_value(sys.modules[part.__module__])
    common = {
        "max_ongoing_requests": NO_LIMIT,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout + LAST_MOMENT_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 1.0,
        "max_constructor_retry_count": ATTEMPTS,
        "logging_config": LoggingConfig(log_level=_log_level(settings), enable_access_log=False),
    }
    router = RequestRouterConfig(
        request_router_class=RayRouter,
        request_router_kwargs={
            "routing": replicas.routing,
            "block_size": asked.block_size,
        },
        request_routing_stats_period_s=NEWS_S,
    )
    scaled: dict[str, Any] = {"num_replicas": replicas.replicas}
    if replicas.max_replicas is not None:
        scaled = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas.replicas,
                max_replicas=replicas.max_replicas,
                target_ongoing_requests=asked.max_num_seqs,
                upscale_delay_s=10.0,
                downscale_delay_s=300.0,
            )
        }
    engines = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        request_router_config=router,
        **scaled,
        **common,
    ).bind(model, names[0], settings.max_waiting, replicas.most, engine)
    endpoint = serve.deployment(Endpoint, name="endpoint", ray_actor_options={"num_cpus": 0}, **common)
    return endpoint.bind(engines, names, settings)


def from_arguments(arguments: Mapping[str, Any]) -> serve.Application:
    """The same from the `args` of a Serve config file, as a RayService of KubeRay has one: the options of
    `minipaged serve` by name, with `_` for `-`, written as there. Raises InvalidRequest for one that there is not."""
    kinds = (ReplicaSettings, ServeSettings, Settings)
    known = {"model", *(each.name for kind in kinds for each in fields(kind))} - OF_THE_CLUSTER
    if unknown := sorted(arguments.keys() - known):
        raise InvalidRequest(f"args: there is no {', '.join(map(repr, unknown))}; known are {', '.join(sorted(known))}")
    own, of_server, engine = (
        {each.name: arguments[each.name] for each in fields(kind) if each.name in arguments} for kind in kinds
    )
    for name in FROM_TEXT.keys() & engine.keys():
        if not isinstance(text := engine[name], str):
            raise InvalidRequest(
                f"args: {name} is {text!r}; write it as after --{name.replace('_', '-')}, or leave it out"
            )
        engine[name] = FROM_TEXT[name](text)
    check_before_serving(**engine)
    replicas = ReplicaSettings(**({"replicas": 1} | own))
    gpus = replicas.gpus_per_replica
    if gpus is None:
        gpus = gpus_needed(ray.cluster_resources() if ray.is_initialized() else {}, **engine)
    model, cpus = str(arguments.get("model", "smollm2-135m-instruct")), replicas.cpus_per_replica or 1
    return application(model, ServeSettings(**of_server), replicas, cpus=cpus, gpus=gpus, **engine)


def serve_replicas(model: str, settings: ServeSettings, replicas: ReplicaSettings, **engine: Any) -> int:
    """Serve a model by several replicas until a signal comes; returns the exit status.

    Raises InvalidRequest for an address that cannot be had and for settings that suit no model, before anything is
    started, and ModelError where no replica can be.
    """
    check_before_serving(**engine)
    raise_file_limit()  # Ray's processes have it from this one
    config = load_config(hub.resolve(model))  # fetched once, and not by each of them
    check_before_loading(config, **engine)
    with listen(settings.host, settings.port) as listening:  # Ray would try for ever
        port = listening.getsockname()[1]
    cores = os.cpu_count() or 1
    print(f"starting Ray and {replicas.replicas} x {model} ...", file=sys.stderr, flush=True)
    # What Ray has to say of processes that die, it says on stdout.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return _run(model, settings, replicas, port, cores, **engine)


def _run(model: str, settings: ServeSettings, replicas: ReplicaSettings, port: int, cores: int, **engine: Any) -> int:
    signals = Signals(has_to_clear_up=replicas.ray_address is not None)
    _start_ray(replicas, max(cores, replicas.most))
    signals.listen()  # Ray has taken one of them
    try:
        gpus, cpus = replicas.gpus_per_replica, replicas.cpus_per_replica
        if gpus is None:
            gpus = gpus_needed(ray.cluster_resources(), **engine)
        if cpus is None:
            cpus = 1 if replicas.ray_address else max(1, cores // replicas.most)
        check_room(ray.cluster_resources(), replicas, cpus=cpus, gpus=gpus)
        serve.start(
            proxy_location=ProxyLocation.EveryNode if replicas.ray_address else ProxyLocation.HeadOnly,
            http_options=HTTPOptions(host=settings.host, port=port, keep_alive_timeout_s=5),
            logging_config=LoggingConfig(log_level=_log_level(settings), enable_access_log=False),
        )
        built = application(model, settings, replicas, cpus=cpus, gpus=gpus, **engine)
        try:
            endpoint = serve.run(built, name=NAME, route_prefix="/", blocking=False)
        except RuntimeError as error:
            raise ModelError(f"no replica could be started: {_reason(error)}") from None
        pools = endpoint.pools.remote().result()
        _introduce(endpoint.facts.remote().result(), pools, settings, replicas, port)
        signals.started = True
        _tell_changes(signals.come)
        with contextlib.suppress(RayError, RayServeException):  # the endpoint has died: nothing goes on
            _end(endpoint, settings)
    finally:
        with contextlib.suppress(Exception):
            if serve.status().applications.keys() - {NAME}:  # those of others, on a cluster
                serve.delete(NAME)
            else:
                serve.shutdown()  # and so the port is free again
        ray.shutdown()
    return 0


def check_room(there: Mapping[str, float], replicas: ReplicaSettings, *, cpus: int, gpus: int) -> None:
    """Raise InvalidRequest for replicas that Ray would wait for for ever. (A cluster elsewhere may grow.)"""
    for what, each in (("cpus", cpus), ("gpus", gpus)):
        has, number = int(there.get(what[:-1].upper(), 0)), replicas.replicas or 0
        if what == "cpus" and each > 1:  # Ray is told of as many as there are replicas, where that is more
            has = min(has, os.cpu_count() or 1)
        if not replicas.ray_address and each * number > has:
            raise InvalidRequest(
                f"{what}_per_replica is {each}: {number} replicas take {each * number}, and there are {has}; take fewer"
            )


def gpus_needed(there: Mapping[str, float], **engine: Any) -> int:
    """GPUs that a replica takes where nobody says how many, of what a cluster has: one for each of its ranks."""
    if not there.get("GPU") or engine.get("device") == "cpu" or engine.get("tier") == "reference":
        return 0
    asked = Settings(**engine)
    return asked.tensor_parallel_size * asked.pipeline_parallel_size


class Signals:
    """SIGTERM and Ctrl-C: the first is noted, a second ends the process at once, as any does before it has `started`.

    Ray's processes are killed with it. A cluster of others is not, and would keep the application: there
    (`has_to_clear_up`) the end is an exception in the main thread, which takes the application away on its way out; one
    signal more does not wait for that.
    """

    def __init__(self, *, has_to_clear_up: bool) -> None:
        self.come = threading.Event()
        self.started = False
        self._clears_up = has_to_clear_up
        self.listen()

    def listen(self) -> None:
        """Be the one who is told of them."""
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if self.started and not self.come.is_set():
            self.come.set()
        elif self._clears_up:
            self._clears_up = False
            raise SystemExit(128 + number)
        else:
            kill_children()
            os._exit(128 + number)


def kill_children() -> None:
    """All processes that this one has started, itself or by others; Ray's agents would outlive it by half a minute."""
    for each in psutil.Process().children(recursive=True):  # those that start others come first
        with contextlib.suppress(psutil.Error):
            each.kill()


def _tell_changes(end: threading.Event) -> None:
    """Say on stderr when replicas die, and when there are more or fewer, until the end."""
    before: Mapping[str, int] = {}
    while not end.wait(NEWS_S):
        with contextlib.suppress(RayError, RayServeException):
            applications = serve.status().applications
            engines = applications[NAME].deployments.get("replica") if NAME in applications else None
            if engines is None:
                continue
            now = {str(state): number for state, number in engines.replica_states.items() if number}
            if before and now != before:
                print(told_states(before, now, engines.status == "DOWNSCALING"), file=sys.stderr, flush=True)
            before = now


def told_states(before: Mapping[str, int], now: Mapping[str, int], fewer_wanted: bool) -> str:
    """What has become of the replicas, of which so many were and are RUNNING, STARTING, ...: in a line."""
    there = ", ".join(f"{number} {state.lower()}" for state, number in now.items())
    lost = 0 if fewer_wanted else before.get("RUNNING", 0) - now.get("RUNNING", 0)
    why = f"; {lost} {'have' if lost > 1 else 'has'} died, and Ray starts others in their place" if lost > 0 else ""
    return f"replicas: {there or 'none'}{why}"


def _start_ray(replicas: ReplicaSettings, num_cpus: int) -> None:
    """Ray, silent: what it has to say is in its own logs, under /tmp/ray."""
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    # A replica that takes no GPU sees them all the same: several may share one. (Else Ray says that this will change.)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if replicas.ray_address:
        try:
            ray.init(address=replicas.ray_address, namespace=NAME, **quiet)
        except ConnectionError as error:
            raise ModelError(
                f"the Ray cluster at {replicas.ray_address} cannot be joined: {error}; is it there? If it asks for a "
                "token, as Ray's do where one was made, set RAY_AUTH_MODE=token"
            ) from None
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, namespace=NAME, **quiet)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def _end(endpoint: Any, settings: ServeSettings) -> None:
    num_open = endpoint.num_open.remote().result()
    if num_open:
        print(
            f"{num_open} request{'s have' if num_open > 1 else ' has'} {settings.shutdown_timeout:g} s to finish; "
            "a second signal ends it at once",
            file=sys.stderr,
        )
    endpoint.end.remote(settings.shutdown_timeout).result()


def _introduce(facts: Facts, pools: list[int], settings: ServeSettings, replicas: ReplicaSettings, port: int) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    up_to = f" to {replicas.max_replicas}" if replicas.max_replicas else ""
    lines = [
        f"{replicas.replicas}{up_to} replicas of {facts.folder.name} on the {facts.tier}, by {replicas.routing}",
        f"each: {told_pools(pools)} blocks of {facts.config.block_size} tokens; at most "
        f"{facts.config.max_model_len} tokens a sequence",
        f"listening on http://{host}:{port} (OpenAI's API is at /v1)",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def told_pools(pools: Sequence[int]) -> str:
    """How many blocks replicas have that have so many."""
    least, most = min(pools), max(pools)
    return f"{least}" if least == most else f"{least} to {most}"


def _reason(error: Exception) -> str:
    """What a replica said last, in Ray's account of it, which may take a moment to be there."""
    for _ in range(20):
        applications = serve.status().applications
        deployments = applications[NAME].deployments.values() if NAME in applications else ()
        told: list[str] = [words for each in deployments for words in LAST_WORDS.findall(each.message)]
        if told:
            return told[-1]
        time.sleep(0.25)
    return str(error)


def _log_level(settings: ServeSettings) -> str:
    return {"trace": "DEBUG"}.get(settings.log_level, settings.log_level.upper())
