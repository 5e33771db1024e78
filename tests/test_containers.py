"""The container, compose and Kubernetes files agree with the package and with each other. Nothing is built or started.

`make lint` checks them with hadolint and with the schemas of compose and Kubernetes.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.cli import make_parser
from dflash_trt.decoding.metrics import Metrics
from dflash_trt.engines.registry import DEFAULT, NAMES
from dflash_trt.serving.openai.gate import is_open
from dflash_trt.serving.openai.server import _END_SECONDS
from dflash_trt.version import __version__

ROOT = Path(__file__).parent.parent
DOCKERFILE = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LABELS = {"app.kubernetes.io/name": "dflash-trt"}
IGNORED = (ROOT / ".dockerignore").read_text().split()
both = pytest.mark.parametrize("name", ["openai", "triton"])


def stage(name: str) -> str:
    """The stages that all images share, and that of an image."""
    shared, *stages = re.split(r"\n(?=FROM base AS )", DOCKERFILE)
    (own,) = (each for each in stages if each.startswith(f"FROM base AS {name}"))
    return f"{shared}\n{own}"


def instruction(name: str, kind: str) -> str:
    return re.findall(rf"^{kind} (.*)$", stage(name), re.M)[-1]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / "kubernetes" / "base" / name).read_text())


def served(name: str, words: list[str]) -> dict[str, Any]:
    """The arguments of the command that a container runs."""
    program, *entry = json.loads(instruction(name, "ENTRYPOINT"))
    assert program == "dflash-trt"
    plain = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in words]
    return vars(make_parser().parse_args([*entry, *plain]))


def test_tags_of_containers_stand_in_one_place() -> None:
    files = [
        *(ROOT / "dflash_trt").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.*"),
        ROOT / "Dockerfile",
    ]
    files += [*(ROOT / "kubernetes").rglob("*"), *(ROOT / "tests").rglob("*.py")]
    tagged = [
        file for file in files if file.is_file() and re.search(rb"\b\d\d\.\d\d-(\w+-)*py3", file.read_bytes())
    ]
    assert tagged == [ROOT / "dflash_trt" / "engines" / "packages.py"]


@both
def test_an_image_has_its_extra_and_shows_the_ports_of_its_command(name: str) -> None:
    arguments = served(name, COMPOSE[name]["command"])
    ports = {"openai": ["port"], "triton": ["port", "grpc_port", "metrics_port"]}[name]
    assert set(instruction(name, "EXPOSE").split()) == {str(arguments[port]) for port in ports}
    (extras,) = re.findall(r"RUN (extra=.*?) && .*whl\)\[(.*)\]", stage(name))
    extra = PROJECT["project"]["optional-dependencies"]
    default = instruction(name, "ARG").removeprefix("ENGINE=")
    for engine in (None, "onnxruntime", "torch", "tensorrt-rtx", "tensorrt"):
        script = f'ENGINE={engine or default}; {extras[0]}; echo "{extras[1]}"'
        found = subprocess.run(
            ["sh", "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert found == ("serve" if engine in (None, DEFAULT) else f"serve,{engine}")
        assert set(found.split(",")) <= set(extra)
    assert not instruction(name, "USER").startswith(("0", "root"))


def test_the_image_is_probed_where_no_key_is_needed() -> None:
    (path,) = re.findall(r"127\.0\.0\.1:8000(/\w+)", stage("openai"))
    assert is_open(path)


def test_all_that_the_images_are_built_from_reaches_docker() -> None:
    assert IGNORED[0] == "**"  # excludes everything that is not named
    named = [line[1:] for line in IGNORED if line.startswith("!")]
    assert [name for name in named if not (ROOT / name).exists()] == []
    copied = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M)
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {word for line in copied for word in line.split()[:-1]} - {"."}
    needed |= {"README.md", "LICENSE", "pyproject.toml", *wheel["packages"], *wheel["force-include"]}
    known = [f"{name}/*" for name in named]
    assert [each for each in needed if not any(fnmatch.fnmatch(f"{each}/", name) for name in known)] == []


@both
def test_compose_mounts_the_bundle_read_only_and_lets_requests_finish(name: str) -> None:
    service = COMPOSE[name]
    arguments = served(name, service["command"])
    assert service["volumes"][0].endswith(f":{arguments['bundle']}:ro")
    assert int(service["stop_grace_period"].removesuffix("s")) > arguments["grace"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_compose_starts_it_with_prometheus_and_grafana() -> None:
    arguments = served("openai", COMPOSE["openai"]["command"])
    assert COMPOSE["openai"]["build"] == "."  # the last stage
    for name in ("prometheus", "grafana"):
        for volume in COMPOSE[name]["volumes"]:
            assert (ROOT / volume.split(":")[0]).is_file(), volume
    prometheus = yaml.safe_load((ROOT / "monitoring/prometheus.yaml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == [f"openai:{arguments['port']}"]
    assert arguments["hosts"] == ["openai"]
    inside = {volume.split(":")[1] for volume in COMPOSE["prometheus"]["volumes"]}
    assert set(prometheus["rule_files"]) <= inside
    source = yaml.safe_load((ROOT / "monitoring/grafana/datasource.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    folder = yaml.safe_load((ROOT / "monitoring/grafana/provider.yaml").read_text())["providers"][0][
        "options"
    ]["path"]
    assert any(volume.split(":")[1].startswith(f"{folder}/") for volume in COMPOSE["grafana"]["volumes"])


def test_the_pod_runs_the_image_and_is_probed_where_no_key_is_needed() -> None:
    pod = read("deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = served("openai", container["args"])
    assert container["ports"] == [{"name": "http", "containerPort": arguments["port"]}]
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness", "startup")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "liveness": "/health", "readiness": "/ready", "startup": "/ready",
    }  # fmt: skip
    assert all(is_open(probe["path"]) for probe in probes.values())
    assert pod["terminationGracePeriodSeconds"] > arguments["drain"] + arguments["grace"] + _END_SECONDS
    # Requests come until the pod has been found unready, and its endpoints are gone.
    assert arguments["drain"] >= 2 * container["readinessProbe"]["periodSeconds"]
    assert (
        instruction("openai", "USER")
        == f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    )
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts[str(arguments["bundle"])]["readOnly"]
    assert re.search(r"^ENV HOME=(.*)$", stage("openai"), re.M)[1] in mounts
    assert {mount["name"] for mount in mounts.values()} == {volume["name"] for volume in pod["volumes"]}
    assert [each["name"] for each in container["env"]] == ["NAMESPACE", "DFLASH_TRT_API_KEY"]
    service = read("service.yaml")["metadata"]["name"]
    longest = f"{service}.$(NAMESPACE).svc.cluster.local"
    assert arguments["hosts"] == [
        service, *(longest.removesuffix(end) for end in (".svc.cluster.local", ".cluster.local", ""))
    ]  # fmt: skip


def test_a_gpu_is_reserved_for_the_image_of_its_engine() -> None:
    """Compose and Kubernetes start the same image, with one GPU, and otherwise as without."""
    service, plain = COMPOSE["gpu"], COMPOSE["openai"]
    own = {"profiles", "build", "image", "deploy"}
    assert {key: value for key, value in service.items() if key not in own} == {
        key: value for key, value in plain.items() if key not in own
    }
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    (engine,) = re.findall(r":-([\w-]+)}$", service["build"]["args"]["ENGINE"])
    assert engine in NAMES
    overlay = yaml.safe_load((ROOT / "kubernetes" / "gpu" / "kustomization.yaml").read_text())
    (image,) = overlay["images"]
    assert f"{image['name']}:{image['newTag']}" == re.sub(r"\$\{\w+:-(.*)\}", r"\1", service["image"])
    assert image["newTag"] == f"{read('kustomization.yaml')['images'][0]['newTag']}-{engine}"
    (patch,) = (yaml.safe_load(each["patch"]) for each in overlay["patches"])
    deployment = read("deployment.yaml")
    assert (patch["kind"], patch["metadata"]) == (deployment["kind"], deployment["metadata"])
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == deployment["spec"]["template"]["spec"]["containers"][0]["name"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_objects_belong_together() -> None:
    deployment, service = read("deployment.yaml"), read("service.yaml")
    labels = [
        deployment["spec"]["selector"]["matchLabels"],
        deployment["spec"]["template"]["metadata"]["labels"],
        service["spec"]["selector"],
        read("disruption.yaml")["spec"]["selector"]["matchLabels"],
    ]
    assert labels == [LABELS] * 4
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    target = read("autoscaler.yaml")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    kustomization = read("kustomization.yaml")
    files = {path.name for path in (ROOT / "kubernetes" / "base").glob("*.yaml")}
    assert set(kustomization["resources"]) == files - {"kustomization.yaml"}
    (image,) = kustomization["images"]
    assert image["name"] == deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert COMPOSE["openai"]["image"] == f"{image['name']}:{image['newTag']}"
    assert image["newTag"] == __version__
    assert f"docker build -t {image['name']}:{image['newTag']} ." in (ROOT / "docs" / "openai.md").read_text()


def test_no_overlay_lies_in_what_it_builds_on() -> None:
    """Kustomize refuses a base that contains the overlay, as a cycle."""
    overlays = list((ROOT / "kubernetes").rglob("kustomization.yaml"))
    assert len(overlays) == 3
    for overlay in overlays:
        for name in yaml.safe_load(overlay.read_text())["resources"]:
            place = (overlay.parent / name).resolve()
            assert place.exists()
            assert place not in overlay.parents


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", [".", "gpu"])
def test_kustomize_builds_these_objects_with_the_tag(overlay: str) -> None:
    command = ["kubectl", "kustomize", str(ROOT / "kubernetes" / overlay)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kustomization = read("kustomization.yaml")
    expected = {(found := read(name))["kind"]: found for name in kustomization["resources"]}
    (image,) = kustomization["images"]
    (container,) = expected["Deployment"]["spec"]["template"]["spec"]["containers"]
    container["image"] = f"{image['name']}:{image['newTag']}"
    if overlay == "gpu":
        changes = yaml.safe_load((ROOT / "kubernetes" / "gpu" / "kustomization.yaml").read_text())
        container["image"] = f"{image['name']}:{changes['images'][0]['newTag']}"
        (patch,) = (yaml.safe_load(patch["patch"]) for patch in changes["patches"])
        (patched,) = patch["spec"]["template"]["spec"]["containers"]
        container["resources"]["limits"] |= patched["resources"]["limits"]
    assert {found["kind"]: found for found in yaml.safe_load_all(built)} == expected


def test_the_autoscaler_reads_a_metric_that_the_server_and_the_adapter_have() -> None:
    (metric,) = read("autoscaler.yaml")["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f"\n{name} 0.0\n" in Metrics().prometheus()
    values = yaml.safe_load((ROOT / "kubernetes" / "adapter-values.yaml").read_text())
    (rule,) = values["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(f"{name}{{")
