"""`diag doctor --k8s` against a real API server with RBAC; the kubelet is played, the pages are replayed recordings."""

import gzip
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.bad_servers import PAGE, Reply, Request, serving
from support.bundles import members
from support.cli import diag, installed
from support.kubernetes import cluster
from support.kubernetes.cluster import Cluster, PlayedPod, iso, restamped, role, token
from support.paths import RECORDINGS

from diag.commands import doctor

PY_SPY = Path(sys.executable).parent / "py-spy"
FLAGS = ["--model", "tiny", "--num-gpu-blocks-override", "128", "--api-key", "sekret-api-key"]
VLLM = {"image": "vllm/vllm-openai:v0.32.0", "args": FLAGS}
SECRETS = ("sekret", token("reader"))
SHORTLY = ("--for", "3", "--every", "1", "--json")


def log_of(recording: str, lines: int | None = None) -> str:
    return "\n".join((RECORDINGS / recording / "server.log").read_text().splitlines()[:lines])


def restarted(reason: str, status: int, now: float, message: str) -> dict[str, Any]:
    over = {"exitCode": status, "reason": reason, "startedAt": iso(now - 80)[:19] + "Z", "finishedAt": iso(now - 20)}
    waits = {"reason": "CrashLoopBackOff", "message": f"{message} restarting failed container=vllm pod=p"}
    over["finishedAt"] = iso(now - 20)[:19] + "Z"
    return {"restartCount": 5, "ready": False, "state": {"waiting": waits}, "lastState": {"terminated": over}}


def pods(now: float) -> Iterator[PlayedPod]:
    secret = {**VLLM, "env": [{"name": "HF_TOKEN", "value": "sekret-hf-token"}]}
    yield PlayedPod(
        "inference", "vllm-0", secret, recording="kv_cascade", log=restamped(log_of("kv_cascade"), now - 60)
    )
    runtime = {"name": "kserve-container", "image": "own/runtime", "ports": [{"containerPort": 8080}]}
    labels = {"serving.kserve.io/inferenceservice": "qwen"}
    yield PlayedPod("inference", "qwen-predictor", runtime, labels, recording="healthy", port=8080)
    yield PlayedPod("inference", "router", {"image": "lmcache/lmstack-router"}, {"app": "vllm-router"})
    yield PlayedPod("inference", "vllm-1", VLLM, phase="Pending")
    env = [{"name": "HF_TOKEN", "value": "sekret-hf-token"}, {"name": "NCCL_DEBUG", "value": "INFO"}]
    limits = {"resources": {"limits": {"memory": "64Gi"}}}
    yield PlayedPod(
        "crashing",
        "killed",
        {**VLLM, **limits, "env": env, "startupProbe": {"httpGet": {"path": "/health", "port": 8000}}},
        {"app": "killed"},
        restarted("OOMKilled", 137, now, "back-off 40s"),
        log=restamped(log_of("kv_cascade", 12), now - 25),
        previous=restamped(f"{log_of('kv_cascade', 12)}\nINFO token=sekret-in-the-log", now - 160),
        annotations={"example.com/key": "sekret-annotation"},
        events=["Startup probe failed: Get http://10.0.0.1:8000/health?token=sekret-in-an-event: refused"],
    )
    yield PlayedPod(
        "crashing",
        "failed",
        VLLM,
        {"app": "failed"},
        {**restarted("Error", 1, now, "back-off 10s"), "restartCount": 1},
        log=restamped(log_of("startup_crash_blocksize16"), now - 21),
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    users = {"reader": "inference", "crasher": "crashing"}
    with cluster.running(tmp_path_factory.mktemp("lab"), [*pods(time.time())], users) as running:
        yield running


@pytest.fixture(scope="module")
def inference(lab: Cluster) -> subprocess.CompletedProcess[str]:
    return lab.diag("doctor", "--k8s", "arn:aws:eks/lab/inference", "--for", "8", *SHORTLY[2:])


@pytest.fixture(scope="module")
def killed(lab: Cluster) -> subprocess.CompletedProcess[str]:
    return lab.diag("doctor", "--k8s", "crashing/app=killed", *SHORTLY, user="crasher")


def present(done: subprocess.CompletedProcess[str]) -> dict[str, set[str]]:
    """The incidents that are present, by server."""
    assert done.stdout, done.stderr
    found: dict[str, set[str]] = {}
    for each in json.loads(done.stdout)["diagnoses"]:
        if each["state"] == "present":
            found.setdefault(each["subject"]["instance"], set()).add(each["incident"])
    return found


@cluster.needed
def test_each_server_of_a_namespace_is_found_and_judged(inference: subprocess.CompletedProcess[str]) -> None:
    report = json.loads(inference.stdout)
    assert {server.partition(": ")[0] for server in report["observed"]["servers"]} == {
        "vllm-0:8000",
        "qwen-predictor:8080",
    }
    assert "kv_eviction_cascade" in present(inference)["vllm-0:8000"]
    assert "qwen-predictor:8080" not in present(inference)
    assert any(note.startswith("pod vllm-1 is pending") for note in report["observed"]["notes"])
    assert "log" not in report["observed"]["not_collected"]


@cluster.needed
def test_no_secret_of_a_kubeconfig_or_a_pod_is_shown(
    lab: Cluster, inference: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    alone = "inference/app!=vllm-router,!serving.kserve.io/inferenceservice"  # beside a peer, balancing is what mends
    whole = lab.diag("doctor", "--k8s", alone, "--for", "3", "--every", "1", "--verbose", "--html", str(page))
    outputs = inference.stdout + inference.stderr + whole.stdout + whole.stderr + page.read_text()
    assert "${VLLM_API_KEY:?}" in whole.stdout  # in the command that is proposed
    assert [secret for secret in SECRETS if secret in outputs] == []


@cluster.needed
def test_repeatedly_oom_killed_container_is_reported(
    killed: subprocess.CompletedProcess[str],
) -> None:
    assert killed.returncode == 2
    assert {"host_memory_exhausted", "crash_loop"} <= present(killed)["killed:8000"]
    assert "OOMKilled, exit status 137" in killed.stdout


@pytest.fixture(scope="module")
def kept(lab: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bundle") / "killed.tar.zst"
    words = ("--for", "3", "--every", "1", "-o", str(file))
    done = lab.diag("bundle", "--k8s", "crashing/app=killed", *words, user="crasher")
    assert done.returncode == 0 and "left out: annotations and labels of the pods" in done.stdout, done
    return file


@cluster.needed
def test_bundle_of_a_pod_is_judged_elsewhere_as_the_pod_was(
    killed: subprocess.CompletedProcess[str], kept: Path
) -> None:
    elsewhere = diag("doctor", str(kept), "--json", KUBECONFIG="/none")
    there, here = (json.loads(done.stdout) for done in (killed, elsewhere))
    assert (elsewhere.returncode, here["verdict"]) == (killed.returncode, there["verdict"])
    assert present(elsewhere) == present(killed)
    (note,) = (note for note in there["observed"]["notes"] if "5 restarts" in note)
    assert "its startupProbe failed 3 times" in note and note in here["observed"]["notes"]


@cluster.needed
def test_bundle_has_status_events_and_logs_of_the_pod_and_no_secret(kept: Path) -> None:
    files = members(kept)
    pod = json.loads(files["pod-killed_8000.json"])
    (container,), (status,) = pod["containers"], pod["status"]["containerStatuses"]
    assert "--num-gpu-blocks-override 128" in container["launch"]
    assert container["resources"]["limits"]["memory"] == "64Gi"
    assert container["env"] == {"HF_TOKEN": "REDACTED", "NCCL_DEBUG": "INFO"}
    assert (status["restartCount"], status["lastState"]["terminated"]["exitCode"]) == (5, 137)
    assert pod["events"][0]["message"].startswith("Startup probe failed") and pod["node"] == "node"
    assert b"INFO token=" in files["pod-killed_8000.previous.log"] and files["pod-killed_8000.log"]
    assert files.keys() - {"manifest.json"} == json.loads(files["manifest.json"])["files"].keys()
    texts = {name: gzip.decompress(text) if name.endswith(".gz") else text for name, text in files.items()}
    assert [name for name, text in texts.items() if b"sekret" in text] == []


@cluster.needed
def test_failed_start_of_a_container_is_explained_by_its_log(lab: Cluster) -> None:
    done = lab.diag("doctor", "--k8s", "crashing/app=failed", *SHORTLY, user="crasher")
    assert "startup_failed" in present(done)["failed:8000"]
    assert "crash_loop" not in present(done)["failed:8000"]


@cluster.needed
def test_documented_role_has_exactly_the_used_rights(
    lab: Cluster, inference: subprocess.CompletedProcess[str], killed: subprocess.CompletedProcess[str]
) -> None:
    assert inference.returncode == killed.returncode == 2
    rules = role()["rules"]
    assert lab.requests("reader") | lab.requests("crasher") == {
        (verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]
    }


@cluster.needed
@pytest.mark.parametrize(
    ("place", "user", "status", "reason"),
    [
        ("crashing", "reader", 69, "grant the verb list on pods; docs/kubernetes.md has the Role"),
        ("inference/app=none", "reader", 69, "there is no pod in namespace inference with app=none"),
        ("inference/app=vllm-router", "reader", 69, "none of 1 pod is a vLLM server in namespace inference"),
        ("staging/inference", "reader", 64, "the kubeconfig has no context staging (it has: lab, arn:aws:eks/lab)"),
        ("inference", "nobody", 69, "rejects the credentials of the kubeconfig (HTTP 401)"),
    ],
)
def test_unusable_namespace_is_one_sentence(lab: Cluster, place: str, user: str, status: int, reason: str) -> None:
    done = lab.diag("doctor", "--k8s", place, user=user)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    assert reason in done.stderr


def kubeconfig(folder: Path, server: str, **user: Any) -> str:
    content = {
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(content))
    return str(file)


def test_an_api_server_that_hangs_or_is_not_there_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = kubeconfig(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}", token="sekret")
        hangs = diag("doctor", "--k8s", "inference", "--timeout", "0.3", KUBECONFIG=config)
    gone = diag("doctor", "--k8s", "inference", KUBECONFIG=config)
    assert (hangs.returncode, gone.returncode) == (69, 69)
    assert "accepted the connection but sent nothing for 0.3 s" in hangs.stderr
    assert "cannot connect to the Kubernetes API server http://127.0.0.1" in gone.stderr


def test_a_kubeconfig_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", "echo no >&2; exit 1"]}
    broken = tmp_path / "broken"
    broken.write_text("- a list\n")
    for config, reason in (
        (str(tmp_path / "none"), "there is no kubeconfig at"),
        (str(broken), "cannot be used"),
        (kubeconfig(tmp_path, "https://127.0.0.1:1", exec=plugin), "exec: process returned 1. no"),
    ):
        done = diag("doctor", "--k8s", "inference", KUBECONFIG=config)
        assert (done.returncode, done.stderr.count("\n")) == (64, 1)
        assert reason in done.stderr


def test_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "kubernetes.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = installed("doctor", "--k8s", "inference", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (
        64,
        "diag: --k8s needs the Kubernetes client: pip install 'diag[k8s]'\n",
    )


def test_only_the_given_namespace_is_queried() -> None:
    for words in (("http://127.0.0.1:1",), ("--log", "x"), ("--prometheus", "http://127.0.0.1:1")):
        done = diag("doctor", "--k8s", "inference", *words)
        assert (done.returncode, done.stderr.count("\n")) == (64, 1)
        assert "--k8s finds servers and their logs itself" in done.stderr


def api_server(known: dict[str, Any]) -> Callable[[Request], Reply]:
    """Answer for paths of an API server, by their ends."""

    def answer(request: Request) -> Reply:
        path = request.path.partition("?")[0]
        found = next((content for end, content in known.items() if path.endswith(end)), None)
        if isinstance(found, bytes):
            return Reply(found)
        status = 404 if found is None else 200
        return Reply(json.dumps(found or {"kind": "Status"}).encode(), status, {"Content-Type": "application/json"})

    return answer


RUNS = {"name": "vllm", "ready": True, "state": {"running": {"startedAt": "2026-11-01T00:00:00Z"}}}
DEAD = {"name": "vllm", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 1}
DEAD |= {"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-01T00:00:00Z"}}}


def played(name: str, status: dict[str, Any]) -> dict[str, Any]:
    spec = {"containers": [{"name": "vllm", **VLLM}]}
    return {
        **{"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "namespace": "inference"}},
        **{"spec": spec, "status": {"phase": "Running", "containerStatuses": [status]}},
    }


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
def test_kubectl_accepts_the_command_that_reads_the_stacks_in_a_pod(tmp_path: Path) -> None:
    resources = [{"name": name, "namespaced": True, "kind": "Pod"} for name in ("pods", "pods/ephemeralcontainers")]
    pods = {"vllm-0": played("vllm-0", RUNS), "vllm-1": played("vllm-1", DEAD)}
    known = {
        **{f"/pods/{name}": pod for name, pod in pods.items()},
        **{"/inference/pods": {"items": [*pods.values()]}, "/pods/vllm-0:8000/proxy/metrics": PAGE, "/log": b""},
        **{"/api": {"versions": ["v1"]}, "/apis": {"groups": []}, "/version": {}},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": resources},
    }
    with serving(api_server(known)) as server:
        environment = {"KUBECONFIG": kubeconfig(tmp_path, server.url, token="sekret"), "HOME": str(tmp_path)}
        words = ("--k8s", "lab/inference", "--stacks", "--json", "--every", "0.2", "--for", "0.2")
        runs, dead = json.loads(diag("doctor", *words, **environment).stdout)["stacks"]
        command = shlex.split(runs["command"])
        subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=60, check=False)
    assert (dead["command"], dead["conclusion"]) == ("", "Its container does not run: it has no stacks.")
    assert command[:5] == ["kubectl", "--context", "lab", "-n", "inference"]
    (patch,) = (each for each in server.requests if each.method == "PATCH")
    (container,) = json.loads(patch.body)["spec"]["ephemeralContainers"]
    assert patch.path == "/api/v1/namespaces/inference/pods/vllm-0/ephemeralcontainers"
    assert (container["targetContainerName"], container["image"]) == ("vllm", "python:3.12-slim")
    assert container["securityContext"] == {"capabilities": {"add": ["SYS_PTRACE"]}}
    assert container["command"] == ["sh", "-c", doctor.IN_A_POD]


@pytest.mark.skipif(not PY_SPY.exists(), reason="no py-spy")
def test_the_command_finds_the_processes_of_vllm_by_title_or_program(tmp_path: Path) -> None:
    (tmp_path / "pip").write_text("#!/bin/sh\n")  # py-spy is installed
    (tmp_path / "pip").chmod(0o755)
    (tmp_path / "vllm").write_text("print(flush=True); input()")
    code = ("-c", "print(flush=True); input()")
    kinds = (["VLLM::Worker_TP0", *code], ["python", str(tmp_path / "vllm"), "serve", "m"], ["python", *code])
    with ExitStack() as until_the_end:
        found = []
        for words in kinds:
            process = subprocess.Popen(words, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            until_the_end.enter_context(process)
            until_the_end.callback(process.kill)
            assert process.stdout and process.stdout.readline()
            found.append(process.pid)
        environment = {**os.environ, "PATH": f"{tmp_path}:{PY_SPY.parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["sh", "-c", doctor.IN_A_POD], env=environment, capture_output=True, text=True, check=False
        )
    assert [f"Process {pid}: " in done.stdout for pid in found] == [True, True, False], done
