"""The manifests of examples/kubernetes agree with themselves, the flags, the API and its drain."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.configs.load import add_flags, load_config
from slipstream.configs.schema import Config
from slipstream.server.engine.engine_client import STOP_SECONDS
from slipstream.server.http.middleware import OPEN_PATHS
from slipstream.server.startup.launch import _CLOSE_SECONDS

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = ["deployment.yaml", "leaderworkerset.yaml", "raycluster.yaml"]
# What the controller of LeaderWorkerSets and the API server put into the environment.
GIVEN = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "slipstream-0.slipstream.default"}
WRITABLE = {"/tmp", "/data"}  # by the image's user, see docs/deployment.md
_KINDS = {
    "Service": "v1", "PersistentVolumeClaim": "v1", "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "RayCluster": "ray.io/v1",
}  # fmt: skip


def documents(file: str) -> dict[str, Any]:
    """The objects of a file, by kind."""
    found = list(yaml.safe_load_all((FOLDER / file).read_text()))
    assert len({item["kind"] for item in found}) == len(found)
    return {item["kind"]: item for item in found}


def templates(file: str) -> list[dict[str, Any]]:
    """The pod templates: the server's, then the others'."""
    found = documents(file)
    if file == "deployment.yaml":
        return [found["Deployment"]["spec"]["template"]]
    if file == "raycluster.yaml":
        spec = found["RayCluster"]["spec"]
        return [spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]]
    group = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


PODS = [
    pytest.param(template["spec"], index, id=f"{file}-{index}")
    for file in FILES
    for index, template in enumerate(templates(file))
]
# The other pods of a RayCluster run Ray alone.
SLIPSTREAMS = [each for each in PODS if each.id != "raycluster.yaml-1"]
SERVERS = [pytest.param(templates(file)[0]["spec"], id=file) for file in FILES]


def configured(pod: dict[str, Any], index: int, tmp_path: Path) -> Config:
    """What `slipstream serve` makes of the arguments of a pod."""
    (container,) = pod["containers"]
    environment = {**GIVEN, "LWS_WORKER_INDEX": str(index)}
    for variable in container.get("env", []):
        if "value" not in variable:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        environment[variable["name"]] = variable.get("value", "10.0.0.1")
    command, *arguments = container["args"]
    assert command == "serve"
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    arguments = [re.sub(r"^(--[a-z-]+-file)=.*", rf"\1={key}", each) for each in arguments]
    if arguments[0].startswith("/"):  # a model on a volume
        (tmp_path / "config.json").write_text("{}")
        arguments[0] = str(tmp_path)
    arguments = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], a) for a in arguments]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return load_config(parser.parse_args(arguments), {})


@pytest.mark.parametrize("file", FILES)
def test_objects_have_the_versions_of_their_kinds(file: str) -> None:
    for kind, item in documents(file).items():
        assert item["apiVersion"] == _KINDS[kind] and item["metadata"]["name"]


@pytest.mark.parametrize(("pod", "index"), SLIPSTREAMS)
def test_flags_exist_and_agree_with_the_pod(
    pod: dict[str, Any], index: int, tmp_path: Path
) -> None:
    config = configured(pod, index, tmp_path)  # raises for an unknown flag or a value out of range
    (container,) = pod["containers"]
    hosts = config.hosts
    assert hosts.node_rank == index
    total = config.parallel.tensor_parallel_size * config.parallel.data_parallel_size
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    is_ray = hosts.distributed_executor_backend == "ray"
    assert total == gpus * (2 if is_ray else hosts.nnodes)
    if index == 0:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert config.server.host == "0.0.0.0" and ports["http"] == config.server.port
        assert config.server.api_key
        assert hosts.nnodes == 1 or ports["join"] == hosts.master_port
    if hosts.nnodes > 1:
        assert hosts.group_key
    # Services' links begin as the settings do: SLIPSTREAM_PORT=tcp://10.0.0.5:8000.
    assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize("pod", SERVERS)
def test_probes_ask_paths_that_exist_and_wait_for_the_model(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    names = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] == "/ready" and asked["path"] in OPEN_PATHS  # without a key
        assert asked["port"] in names
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    # /ready is 503 while the server restarts its worker, which must not restart the pod.
    assert set(container["livenessProbe"]) - {"periodSeconds", "failureThreshold"} == {"tcpSocket"}
    assert container["livenessProbe"]["tcpSocket"]["port"] in names


@pytest.mark.parametrize(("pod", "index"), SLIPSTREAMS)
def test_the_grace_period_holds_the_drain(pod: dict[str, Any], index: int, tmp_path: Path) -> None:
    config = configured(pod, index, tmp_path)
    (container,) = pod["containers"]
    before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    sleeps = float(before[1]) if before else 0.0
    assert before is None or before[0] == "sleep"
    needed = sleeps + config.server.drain_timeout + STOP_SECONDS + _CLOSE_SECONDS
    assert pod["terminationGracePeriodSeconds"] > needed


def test_nodes_stop_as_late_as_their_server() -> None:
    leader, worker = (template["spec"] for template in templates("leaderworkerset.yaml"))
    name = "terminationGracePeriodSeconds"
    assert worker[name] >= leader[name]
    shared = ("--tensor-parallel-size", "--nnodes", "--master-port", "--group-key-file")
    arguments = [pod["containers"][0]["args"] for pod in (leader, worker)]
    assert arguments[0][1] == arguments[1][1]  # the model
    for flag in shared:
        values = [[a for a in each if a.startswith(f"{flag}=")] for each in arguments]
        assert len(values[0]) == 1 and values[0] == values[1]
    assert "readinessProbe" not in worker["containers"][0]


@pytest.mark.parametrize(("pod", "index"), PODS)
def test_pods_are_restricted_and_can_write_where_they_must(pod: dict[str, Any], index: int) -> None:
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == {v["name"] for v in pod["volumes"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert all(not mounts[path].get("readOnly") for path in WRITABLE)
    assert pod["securityContext"]["runAsUser"] == 10001
    arguments = container.get("args", [])
    files = [a.partition("=")[2] for a in arguments if re.match(r"--[a-z-]+-file=", a)]
    assert all(str(Path(file).parent) in mounts for file in files)
    assert files or not arguments


def test_services_and_policies_select_the_pods_of_the_server() -> None:
    one = documents("deployment.yaml")
    labels = templates("deployment.yaml")[0]["metadata"]["labels"]
    assert one["Service"]["spec"]["selector"].items() <= labels.items()
    assert one["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    many = documents("leaderworkerset.yaml")
    name = many["LeaderWorkerSet"]["metadata"]["name"]
    group = {"leaderworkerset.sigs.k8s.io/name": name}  # labels that the controller sets
    leader = {**group, "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert many["Service"]["spec"]["selector"] == leader
    policy = many["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == group
    among, public = policy["ingress"]
    assert among == {"from": [{"podSelector": {"matchLabels": group}}]}
    (service,) = many["Service"]["spec"]["ports"]
    assert public == {"ports": [{"protocol": "TCP", "port": service["port"]}]}
    ray = documents("raycluster.yaml")
    cluster = {"ray.io/cluster": ray["RayCluster"]["metadata"]["name"]}  # set by KubeRay
    assert ray["Service"]["spec"]["selector"] == {**cluster, "ray.io/node-type": "head"}
    policy = ray["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == cluster
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": cluster}}]}, public]
    for found in (one, many, ray):
        (port,) = found["Service"]["spec"]["ports"]
        assert port["targetPort"] == "http"


def test_a_ray_cluster_has_the_gpus_of_the_engines_and_the_version_of_ray(tmp_path: Path) -> None:
    cluster = documents("raycluster.yaml")["RayCluster"]
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    parallel = configured(head["template"]["spec"], 0, tmp_path).parallel
    assert parallel.shares_experts and workers["replicas"] == workers["maxReplicas"] == 1
    for group in (head, workers):  # an engine on each host
        (container,) = group["template"]["spec"]["containers"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus == parallel.tensor_parallel_size
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert group["rayStartParams"]["node-manager-port"] == str(ports["raylet"])
    pinned = (FOLDER.parents[1] / "constraints.txt").read_text()
    assert f"\nray=={cluster['spec']['rayVersion']}\n" in pinned


def test_pods_of_a_ray_cluster_start_ray_and_outlive_the_drain(tmp_path: Path) -> None:
    """KubeRay leaves commands alone and puts its `ray start` into a variable."""
    cluster = documents("raycluster.yaml")["RayCluster"]
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    head, workers = (template["spec"] for template in templates("raycluster.yaml"))
    (server,), (ray,) = head["containers"], workers["containers"]
    bin_, log = tmp_path / "bin", tmp_path / "log"
    bin_.mkdir()
    for name in ("ray", "slipstream"):
        (bin_ / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n')
        (bin_ / name).chmod(0o755)
    variables = {
        "PATH": f"{bin_}:/usr/bin:/bin",
        "POD_IP": "10.0.0.1",
        "KUBERAY_GEN_RAY_START_CMD": "ray start --block --num-gpus=8",
    }
    for container in (server, ray):
        command = [*container["command"], *container.get("args", [])]
        subprocess.run(command, env=variables, check=True, capture_output=True, timeout=20)
    said = log.read_text().splitlines()
    assert said.count("ray start --block --num-gpus=8") == 2
    assert "ray health-check --address 10.0.0.1:6379" in said
    assert f"slipstream {' '.join(server['args'])}" in said
    # With probes of its own a container gets none of KubeRay's, which need Ray's dashboard.
    names = {port["name"] for port in ray["ports"]}
    for probe in ("readinessProbe", "livenessProbe"):
        assert ray[probe]["tcpSocket"]["port"] in names
    # Ray ends at once, so it gets SIGTERM when the server has drained.
    sleeps = float(ray["lifecycle"]["preStop"]["exec"]["command"][1])
    assert workers["terminationGracePeriodSeconds"] > sleeps
    assert sleeps >= head["terminationGracePeriodSeconds"]
