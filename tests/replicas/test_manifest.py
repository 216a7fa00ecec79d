"""docs/assets/rayservice.yaml: what can be said of it without Kubernetes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from minipaged.errors import InvalidRequest
from minipaged.replicas.settings import ReplicaSettings
from minipaged.serve.settings import ServeSettings
from minipaged.setup.settings import Settings
from tests.effort import thorough

MANIFEST = Path(__file__).parents[2] / "docs" / "assets" / "rayservice.yaml"


def read() -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest, and what it has Ray serve."""
    [manifest] = yaml.safe_load_all(MANIFEST.read_text())
    return manifest, yaml.safe_load(manifest["spec"]["serveConfigV2"])


def test_the_manifest_has_what_a_ray_service_needs():
    manifest, _ = read()
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert manifest["metadata"]["name"]
    cluster = manifest["spec"]["rayClusterConfig"]
    pinned = (MANIFEST.parents[2] / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pinned
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # as KubeRay has them
        for container in group["template"]["spec"]["containers"]:
            assert {"name", "image", "resources"} <= container.keys()
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    [engines] = cluster["workerGroupSpecs"]
    assert engines["minReplicas"] <= engines["replicas"] <= engines["maxReplicas"]


def test_the_manifest_gives_options_that_there_are():
    manifest, config = read()
    [application] = config["applications"]
    assert application["import_path"] == "minipaged.replicas.server:from_arguments"
    given = dict(application["args"])
    assert given.pop("model")
    for kind in (ReplicaSettings, ServeSettings, Settings):
        kind(**{name: given.pop(name) for name in list(given) if name in kind.__dataclass_fields__})
    assert not given
    [head] = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"containerPort": config["http_options"]["port"], "name": "serve"} in head["ports"]


@thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_ray_understands_what_the_manifest_has_it_serve():
    from ray.serve.schema import ServeDeploySchema

    from minipaged.replicas.server import from_arguments

    _, config = read()
    [application] = ServeDeploySchema.model_validate(config).applications
    assert application.route_prefix == "/"
    assert from_arguments(application.args)


def built(**arguments: Any) -> Any:
    """What Ray is told of the replicas."""
    from minipaged.replicas.server import from_arguments

    return from_arguments(arguments)._bound_deployment.init_args[0]._bound_deployment


@thorough  # by Ray
@pytest.mark.parametrize("wrong", ["kv_conector", "routeing", "port"])
def test_an_argument_that_there_is_not_is_named_with_those_there_are(wrong: str) -> None:
    with pytest.raises(InvalidRequest, match=f"there is no '{wrong}'; known are .*kv_connector.*routing"):
        built(**{wrong: "x"})


@thorough  # by Ray
def test_arguments_are_written_as_options_are(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self, num_blocks): self.num_blocks = num_blocks\n")
    given = {"allocator": f"{tmp_path / 'mine.py'}:Mine", "kv_connector": str(tmp_path), "served_model_name": "llama"}
    replica = built(model="m", num_blocks=32, **given)
    model, name, _, _, engine = replica.init_args
    assert (model, name, engine["num_blocks"]) == ("m", "llama", 32)
    assert (engine["allocator"].__name__, engine["kv_connector"].folder) == ("Mine", tmp_path)
    assert engine.keys() == {"num_blocks", "allocator", "kv_connector"}
    with pytest.raises(InvalidRequest, match=r"there is no file .*none\.py"):
        built(allocator="none.py:Mine")
    with pytest.raises(
        InvalidRequest, match="kv_connector is 5; write it as text, as after --kv-connector, or leave it out"
    ):
        built(kv_connector=5)


@thorough  # by Ray
def test_a_class_of_ones_own_reaches_a_replica(tmp_path: Path) -> None:
    """Which is a process that knows nothing of its file."""
    from ray import cloudpickle

    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self, num_blocks): self.num_blocks = num_blocks\n")
    replica = built(allocator=f"{tmp_path / 'mine.py'}:Mine")
    sent = cloudpickle.dumps(replica.init_args[4])
    program = (
        "import sys; from ray import cloudpickle; print(cloudpickle.load(sys.stdin.buffer)['allocator'](5).num_blocks)"
    )
    found = subprocess.run([sys.executable, "-c", program], input=sent, stdout=subprocess.PIPE, check=True)
    assert found.stdout == b"5\n"


@thorough  # by Ray
def test_a_replica_of_a_cluster_reserves_a_gpu_for_each_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 8.0})
    assert built(tensor_parallel_size=2).ray_actor_options["num_gpus"] == 2
    assert built(tensor_parallel_size=2, gpus_per_replica=1).ray_actor_options["num_gpus"] == 1
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    assert built(tensor_parallel_size=2).ray_actor_options["num_gpus"] == 0
