"""The files for Kubernetes: valid by its own schemas, and one with another and with the rest of the project."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from e2e_world import ROOT

from search_r1.data.hub.artifacts import ARTIFACTS

FOLDER = ROOT / "scripts/cluster/kuberay"
KUBERNETES = "1.30"  # the oldest that has support somewhere
CHART = {  # values that KubeRay's chart ray-cluster reads and we set
    "": {"image", "common", "head", "worker"},
    "common": {"containerEnv"},
    "head": {"rayVersion", "rayStartParams", "resources", "volumes", "volumeMounts"},
    "worker": {"groupName", "replicas", "minReplicas", "maxReplicas", "resources", "volumes", "volumeMounts"},
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def as_pod(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def pods_of_the_job(job: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    job = job or documents("rayjob.yaml")[0]
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [as_pod(group["template"]["spec"]) for group in groups]


def pods_of_the_chart() -> list[dict[str, Any]]:
    """As the chart makes them of the values."""
    [values] = documents("values.yaml")
    image, env = values["image"], values["common"]["containerEnv"]
    pods = []
    for part in (values["head"], values["worker"]):
        container = {"name": "ray", "image": f"{image['repository']}:{image['tag']}", "env": env}
        container |= {name: part[name] for name in ("resources", "volumeMounts")}
        pods.append(as_pod({"containers": [container], "volumes": part["volumes"]}))
    return pods


def plain() -> list[dict[str, Any]]:
    return documents("workspace.yaml") + documents("retrieval_server.yaml")


def every_pod() -> list[dict[str, Any]]:
    made = [one["spec"]["template"] for one in plain() if one["kind"] == "Deployment"]
    return [one for one in plain() if one["kind"] == "Pod"] + made + pods_of_the_job() + pods_of_the_chart()


@pytest.mark.parametrize(
    "resource", plain() + pods_of_the_job() + pods_of_the_chart(), ids=lambda one: str(one["kind"])
)
def test_kubernetes_takes_it(resource: dict[str, Any]) -> None:
    """No field is unknown, or of another type."""
    kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_a_wrong_field_would_be_seen() -> None:
    [pod, *_] = pods_of_the_job()
    pod["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_all_pods_have_one_image_of_our_ray_and_see_the_volume() -> None:
    lock = (ROOT / "requirements/gpu.lock").read_text()
    [ray] = re.findall(r"^ray==(\S+)$", lock, re.MULTILINE)
    [volume] = [one for one in plain() if one["kind"] == "PersistentVolumeClaim"]
    images = set()
    for pod in every_pod():
        [container] = pod["spec"]["containers"]
        claims = {
            one["name"]: one["persistentVolumeClaim"]["claimName"]
            for one in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in one
        }
        assert set(claims.values()) == {volume["metadata"]["name"]}
        assert {one["name"]: one["mountPath"] for one in container["volumeMounts"]}.items() >= {
            (name, "/workspace") for name in claims
        }
        images.add(container["image"])
    [image] = images
    assert image.startswith(f"rayproject/ray:{ray}-py311")
    [job], [values] = documents("rayjob.yaml"), documents("values.yaml")
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == values["head"]["rayVersion"] == ray


def test_the_job_starts_a_script_on_all_of_its_nodes() -> None:
    [job] = documents("rayjob.yaml")
    words = shlex.split(job["spec"]["entrypoint"])
    [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    assert f"N_NODES={workers['replicas'] + 1}" in words, "the head trains, too"
    assert (ROOT / words[words.index("bash") + 1]).is_file() and "trainer.resume_mode=auto" in words
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_ray_is_that_of_the_environment_on_the_volume() -> None:
    """Where workspace.yaml's own commands put the repository."""
    folder = "/workspace/search-r1"
    text = (FOLDER / "workspace.yaml").read_text()
    assert f"kubectl cp . workspace:{folder}\n" in text and f"cd {folder} && bash scripts/setup.sh --gpu" in text
    for pod in pods_of_the_job() + pods_of_the_chart():
        path = {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"]}["PATH"]
        assert path.split(":")[0] == f"{folder}/.venv/bin"
    assert folder in documents("rayjob.yaml")[0]["spec"]["entrypoint"]


def test_a_pod_that_is_stopped_lets_the_run_save_its_step() -> None:
    """The hook is a program of ours, on the volume; the run and the wait for it end before the pod is killed."""
    [job] = documents("rayjob.yaml")
    [told] = [word for word in shlex.split(job["spec"]["entrypoint"]) if "sigterm_grace_s" in word]
    for pod in pods_of_the_job():
        [container] = pod["spec"]["containers"]
        python, script, option, wait_s = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (python, option) == ("python", "--wait_s") and told == f"trainer.sigterm_grace_s={wait_s}"
        assert (ROOT / script.removeprefix("/workspace/search-r1/")).is_file()
        assert int(wait_s) < pod["spec"]["terminationGracePeriodSeconds"]
        assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": wait_s} in container["env"]


def test_the_lines_for_infiniband_are_valid_without_their_marks() -> None:
    """Pods may then pin memory, and ask for a network card."""
    text = re.sub(r"# (securityContext:|  capabilities:|rdma/)", r"\1", (FOLDER / "rayjob.yaml").read_text())
    for pod in pods_of_the_job(yaml.safe_load(text)):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        [container] = pod["spec"]["containers"]
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert container["resources"]["limits"]["rdma/rdma_shared_device_a"] == "1"
    text = re.sub(r"# (securityContext:|  capabilities:|rdma/)", r"\1", (FOLDER / "values.yaml").read_text())
    values = yaml.safe_load(text)
    assert values["head"]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert values["worker"]["resources"]["limits"]["rdma/rdma_shared_device_a"] == "1"


def test_the_retriever_is_reached_by_the_name_that_is_documented() -> None:
    [server] = [one for one in plain() if one["kind"] == "Deployment"]
    [service] = [one for one in plain() if one["kind"] == "Service"]
    [container] = server["spec"]["template"]["spec"]["containers"]
    [port] = service["spec"]["ports"]
    assert container["ports"] == [{"containerPort": port["port"]}]
    assert service["spec"]["selector"].items() <= server["spec"]["template"]["metadata"]["labels"].items()
    url = f"retriever.url=http://{service['metadata']['name']}:{port['port']}/retrieve"
    assert url in (FOLDER / "retrieval_server.yaml").read_text() and url in Path(ROOT / "docs/multinode.md").read_text()


def test_the_retriever_serves_the_downloaded_corpus_with_the_cores_that_it_asks_for() -> None:
    [server] = [one for one in plain() if one["kind"] == "Deployment"]
    [container] = server["spec"]["template"]["spec"]["containers"]
    [corpus] = ARTIFACTS["corpus"]
    assert {"name": "CORPUS_PATH", "value": f"data/{corpus.unpacked}"} in container["env"]
    assert container["command"][-2:] == ["--num_threads", container["resources"]["requests"]["cpu"]]


def test_the_values_are_those_of_the_chart() -> None:
    [values] = documents("values.yaml")
    assert values.keys() == CHART[""]
    for part in ("common", "head", "worker"):
        assert values[part].keys() == CHART[part]
