"""Images are built from Dockerfiles without a registry, once per content, and run on the node."""

import subprocess
from pathlib import Path

import pytest

from testbed.images import base_image, build_image, known_images
from testbed.node import NodeCluster

pytestmark = pytest.mark.cluster

DOCKERFILE = """
ARG BASE=docker.io/library/python:3.13-slim
FROM ${BASE} AS build
RUN python3 -m venv /venv && /venv/bin/pip install --quiet six==1.17.0
FROM ${BASE} AS final
COPY --from=build /venv /venv
COPY greeting.txt /greeting.txt
CMD ["/venv/bin/python", "-c", "import six; print(six.__version__, open('/greeting.txt').read())"]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "greeting.txt").write_text("hello")
    (tmp_path / ".gitignore").write_text("leftover.txt\n")
    return tmp_path


def test_an_image_is_built_once_per_content_and_runs(node_cluster: NodeCluster, repository: Path) -> None:
    def build() -> str:
        return build_image("testbed/greeter", repository, target="final", arguments={"BASE": base_image()})

    first = build()
    (repository / "leftover.txt").write_text("git ignores this")
    assert build() == first
    (repository / "greeting.txt").write_text("good evening")
    second = build()
    assert second != first
    assert {first, second} <= set(known_images("localhost/testbed/greeter"))

    node_cluster.import_image(second)
    with node_cluster.namespace() as namespace:
        container = {"name": "greeter", "image": second, "imagePullPolicy": "Never"}
        pod = {"metadata": {"name": "greeter", "namespace": namespace}}
        spec = {"restartPolicy": "Never", "containers": [container]}
        node_cluster.apply({"apiVersion": "v1", "kind": "Pod", **pod, "spec": spec})
        ended = "--for=jsonpath={.status.phase}=Succeeded"
        node_cluster.kubectl("wait", "pod/greeter", "-n", namespace, ended, "--timeout=60s")
        assert node_cluster.kubectl("logs", "greeter", "-n", namespace) == "1.17.0 good evening\n"
