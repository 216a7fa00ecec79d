"""The server of `minipaged serve --replicas N`: starts the replicas and their endpoint, and runs until a signal.

Ray starts the processes, restarts processes that die, and adds and removes replicas with the load. Without the address
of a running cluster (`ray_address`), this command starts Ray, and ends it when it exits.
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
from minipaged.tiers.devices import usable_cores

NAME = "minipaged"
"""The name of the application in Ray."""
NEWS_S = 1.0
"""Seconds between two reports of a replica about the changes of its cache."""
NO_LIMIT = 1 << 20
"""The number of requests that Ray may send one replica at a time. The replica's engine has its own queue, and refuses
requests when that is full. Ray's default of 5 would leave a batch nearly empty."""
OF_THE_CLUSTER = {"host", "port", "ray_address"}
"""Options of `minipaged serve` that are not allowed in `args` of a Serve config file. It has `http_options` instead."""
ATTEMPTS = 2
"""The number of attempts to start a replica before the error is reported."""

LAST_WORDS = re.compile(
    r"^(?![\w.]*DeploymentUnavailableError)[\w.]*(?:Error|Exception|errors\.\w+): (?!Traceback)(.+)$", re.MULTILINE
)
"""Matches the message of an error in a traceback. It skips DeploymentUnavailableError, by which the endpoint reports
that there are no replicas, because that is not the cause."""


def application(
    model: str, settings: ServeSettings, replicas: ReplicaSettings, *, cpus: float, gpus: float, **engine: Any
) -> serve.Application:
    """Return the application for Ray to run: replicas of an engine, and the endpoint in front of them. `cpus`, `gpus`:
    the number that each replica takes."""
    names, asked = settings.served_model_name or (model,), Settings(**engine)
    for part in (asked.allocator, asked.scheduling_policy):
        if is_users(part):  # only this process can import its module
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
    """Return the application for the `args` of a Serve config file, as a RayService of KubeRay has it. They are options
    of `minipaged serve`, with `_` for `-` in names. Raises InvalidRequest for an unknown name."""
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
                f"args: {name} is {text!r}; write it as text, as after --{name.replace('_', '-')}, or leave it out"
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
    """Serve a model with several replicas until a signal comes, and return the exit status.

    Before anything is started, raises InvalidRequest for an address that cannot be listened on and for invalid
    settings. Raises ModelError if no replica can be started.
    """
    check_before_serving(**engine)
    raise_file_limit()  # Ray's processes inherit it
    config = load_config(hub.resolve(model))  # fetched once here, and not by each replica
    check_before_loading(config, **engine)
    with listen(settings.host, settings.port) as listening:  # a check: Ray would retry forever
        port = listening.getsockname()[1]
    cores = usable_cores()
    print(f"starting Ray and {replicas.replicas} x {model} ...", file=sys.stderr, flush=True)
    # Ray reports processes that die on stdout.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return _run(model, settings, replicas, port, cores, **engine)


def _run(model: str, settings: ServeSettings, replicas: ReplicaSettings, port: int, cores: int, **engine: Any) -> int:
    signals = Signals(has_to_clear_up=replicas.ray_address is not None)
    _start_ray(replicas, max(cores, replicas.most))
    signals.listen()  # again, because Ray has replaced a handler
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
        with contextlib.suppress(RayError, RayServeException):  # the endpoint has died, and no request runs
            _end(endpoint, settings)
    finally:
        with contextlib.suppress(Exception):
            if serve.status().applications.keys() - {NAME}:  # a cluster may run other applications
                serve.delete(NAME)
            else:
                serve.shutdown()  # frees the port too
        ray.shutdown()
    return 0


def check_room(there: Mapping[str, float], replicas: ReplicaSettings, *, cpus: int, gpus: int) -> None:
    """Raise InvalidRequest if this machine has no room for the replicas, for which Ray would wait forever. A cluster
    (`ray_address`) is not checked, because it may grow."""
    for what, each in (("cpus", cpus), ("gpus", gpus)):
        has, number = int(there.get(what[:-1].upper(), 0)), replicas.replicas or 0
        if what == "cpus" and each > 1:  # the number in Ray may be higher: it is at least the number of replicas
            has = min(has, usable_cores())
        if not replicas.ray_address and each * number > has:
            raise InvalidRequest(
                f"{what}_per_replica is {each}: {number} replicas take {each * number}, and there are {has}; take fewer"
            )


def gpus_needed(there: Mapping[str, float], **engine: Any) -> int:
    """Return the default number of GPUs per replica: one per rank, or 0 if the engine uses no GPU. `there`: the
    cluster's resources."""
    if not there.get("GPU") or engine.get("device") == "cpu" or engine.get("tier") == "reference":
        return 0
    asked = Settings(**engine)
    return asked.tensor_parallel_size * asked.pipeline_parallel_size


class Signals:
    """Handles SIGTERM and Ctrl-C. The first signal sets `come`, and a second one ends the process immediately. Until
    `started` is set, the first one ends it too.

    Ray's processes are killed with it. A cluster that ran before (`has_to_clear_up`) would keep the application. There
    the signal raises an exception in the main thread, which removes the application on its way out. Another signal ends
    the process without waiting for that.
    """

    def __init__(self, *, has_to_clear_up: bool) -> None:
        self.come = threading.Event()
        self.started = False
        self._clears_up = has_to_clear_up
        self.listen()

    def listen(self) -> None:
        """Install the handler for both signals."""
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
    """Kill all descendants of this process. Ray's agents would otherwise outlive it by half a minute."""
    for each in psutil.Process().children(recursive=True):  # parents come before their children
        with contextlib.suppress(psutil.Error):
            each.kill()


def _tell_changes(end: threading.Event) -> None:
    """Report on stderr when replicas die or their number changes, until `end` is set."""
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
    """Return a line about the replicas. `before`, `now`: the number of them in each state (RUNNING, STARTING, ...)."""
    there = ", ".join(f"{number} {state.lower()}" for state, number in now.items())
    lost = 0 if fewer_wanted else before.get("RUNNING", 0) - now.get("RUNNING", 0)
    why = f"; {lost} {'have' if lost > 1 else 'has'} died, and Ray starts others in their place" if lost > 0 else ""
    return f"replicas: {there or 'none'}{why}"


def _start_ray(replicas: ReplicaSettings, num_cpus: int) -> None:
    """Start Ray, or join its cluster, without output. Ray writes its logs below /tmp/ray."""
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    # A replica that takes no GPU can still see all of them, so several may share one. Without this, Ray warns that it
    # will change that.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if replicas.ray_address:
        try:
            ray.init(address=replicas.ray_address, namespace=NAME, **quiet)
        except ConnectionError as error:
            raise ModelError(
                f"the Ray cluster at {replicas.ray_address} cannot be joined: {error}; check that it runs. If it asks "
                "for an authentication token, set RAY_AUTH_MODE=token"
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
    """Return the number of blocks of the replicas as text: "96", or "90 to 96" if they differ."""
    least, most = min(pools), max(pools)
    return f"{least}" if least == most else f"{least} to {most}"


def _reason(error: Exception) -> str:
    """Return the last error that a replica raised, from Ray's status. Ray may need a moment to report it. If it reports
    none, return `error` as text."""
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
