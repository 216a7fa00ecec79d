"""docs/assets/rayservice.yaml: what can be said of it without Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from minipaged.replicas.settings import ReplicaSettings
from minipaged.serve.settings import ServeSettings
from minipaged.settings import Settings
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
