"""Starts the stage, and runs diag beside it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cli import DIAG
from support.kubernetes.stage import API_PORT, KUBELET_PORT, NODE
from support.paths import RECORDINGS, ROOT

BINARIES = os.environ.get("DIAG_KUBERNETES", "")
"""The folder with kube-apiserver and etcd, as .ci/kube-apiserver makes it."""
needed = pytest.mark.skipif(
    not BINARIES, reason="no Kubernetes API server: .ci/kube-apiserver builds one, DIAG_KUBERNETES names its folder"
)
STARTED = "2026-11-01T00:00:00Z"


@dataclass(frozen=True)
class PlayedPod:
    """A pod with one container: what it is asked to be, what became of it, and the page and logs that it has.

    `recording` is replayed at `port`; `log` and `previous` are lines, each with its time before it. `events` are texts.
    """

    namespace: str
    name: str
    spec: Mapping[str, Any]
    labels: Mapping[str, str] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    phase: str = "Running"
    recording: str = ""
    port: int = 8000
    log: str = ""
    previous: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[str] = ()

    @property
    def container(self) -> Mapping[str, Any]:
        return {"name": "vllm", **self.spec}

    def objects(self, address: str) -> list[tuple[str, str, Any]]:
        """The requests that make it."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        pod = {
            "metadata": {"name": self.name, "labels": self.labels, "annotations": self.annotations},
            "spec": {"nodeName": "node", "containers": [self.container]},
        }
        running = {"state": {"running": {"startedAt": STARTED}}, "ready": True, "restartCount": 0}
        container = {"name": self.container["name"], "image": "", "imageID": "", **running, **self.status}
        status = {"phase": self.phase, "podIP": address, "podIPs": [{"ip": address}]}
        status |= {"containerStatuses": [container]} if self.phase == "Running" else {}
        requests = [("POST", path, pod), ("PATCH", f"{path}/{self.name}/status", {"status": status})]
        field = f"spec.containers{{{self.container['name']}}}"
        about = {"kind": "Pod", "namespace": self.namespace, "name": self.name, "fieldPath": field}
        for number, text in enumerate(self.events):
            event = {"metadata": {"name": f"{self.name}.{number}"}, "involvedObject": about, "type": "Warning"}
            event |= {"reason": "Unhealthy", "message": text, "count": 3, "lastTimestamp": STARTED}
            requests.append(("POST", f"/api/v1/namespaces/{self.namespace}/events", event))
        return requests


def restamped(text: str, last: float) -> str:
    """Lines of a log as `kubectl logs --timestamps` has them, a tenth of a second apart, the last one then."""
    lines = text.splitlines()
    times = (last - (len(lines) - 1 - number) / 10 for number in range(len(lines)))
    return "".join(f"{iso(at)} {line}\n" for at, line in zip(times, lines, strict=True))


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs; `pid` is of a process in its network namespace."""

    folder: Path
    pid: int

    def kubeconfig(self, user: str) -> Path:
        """A kubeconfig with two contexts, of which the first one is the current one."""
        file = self.folder / f"kubeconfig-{user}"
        server = {"server": f"https://{NODE}:{API_PORT}", "certificate-authority": str(self.folder / "tls.crt")}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "clusters": [{"name": "lab", "cluster": server}],
            "users": [{"name": user, "user": {"token": token(user)}}],
            "contexts": [
                {"name": name, "context": {"cluster": "lab", "user": user}} for name in ("lab", "arn:aws:eks/lab")
            ],
        }
        file.write_text(json.dumps(content))
        return file

    def diag(self, *words: str, user: str = "reader", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run diag where the cluster can be reached."""
        return self._run([str(DIAG), *words], user, environment)

    def kubectl(self, *words: str, given: str | None = None) -> str:
        """Run kubectl as the administrator; `given` is its standard input."""
        done = self._run(["kubectl", *words], "admin", {"HOME": str(self.folder)}, given)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def _run(
        self, command: list[str], user: str, environment: Mapping[str, str], given: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "KUBECONFIG": str(self.kubeconfig(user)), **environment}
        enter = ["nsenter", f"--target={self.pid}", "--net", *command]
        return subprocess.run(enter, capture_output=True, text=True, cwd=ROOT, env=env, input=given, check=False)

    def requests(self, user: str) -> set[tuple[str, str]]:
        """Verb and resource of every request that this user has made, by the API server's audit log."""
        events = map(json.loads, (self.folder / "audit.log").read_text().splitlines())
        found = (event for event in events if event["user"]["username"] == user)
        return {
            (event["verb"], "/".join(filter(None, map(event["objectRef"].get, ("resource", "subresource")))))
            for event in found
            if "objectRef" in event
        }


def token(user: str) -> str:
    return f"sekret-token-of-{user}"


@contextmanager
def running(folder: Path, pods: Sequence[PlayedPod], users: Mapping[str, str]) -> Iterator[Cluster]:
    """Run a cluster with these pods; `users` have the rights of the Role in docs/kubernetes.md, each in a namespace."""
    addresses = {pod.name: f"192.0.2.{number}" for number, pod in enumerate(pods, 10)}
    (folder / "logs").mkdir()
    for pod in pods:
        for suffix, text in (("", pod.log), ("_previous", pod.previous)):
            if text:
                (folder / "logs" / f"{pod.namespace}_{pod.name}_{pod.container['name']}{suffix}").write_text(text)
    stage = {
        "addresses": list(addresses.values()),
        "pages": [(addresses[pod.name], pod.port, str(RECORDINGS / pod.recording)) for pod in pods if pod.recording],
        "tokens": {user: token(user) for user in ("admin", "stranger", *users)},
        "objects": [*_node(), *_namespaces(pods), *_rights(users)]
        + [each for pod in pods for each in pod.objects(addresses[pod.name])],
    }
    (folder / "stage.json").write_text(json.dumps(stage))
    command = ["unshare", "--net", sys.executable, "-m", "support.kubernetes.stage", str(folder), BINARIES]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield Cluster(folder, process.pid)
        finally:
            process.stdin.close()


def _node() -> Iterator[tuple[str, str, Any]]:
    yield "POST", "/api/v1/nodes", {"metadata": {"name": "node"}}
    addresses = {"addresses": [{"type": "InternalIP", "address": NODE}]}
    status = {**addresses, "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}}}
    yield "PATCH", "/api/v1/nodes/node/status", {"status": status}


def _namespaces(pods: Sequence[PlayedPod]) -> Iterator[tuple[str, str, Any]]:
    for name in dict.fromkeys(pod.namespace for pod in pods):
        yield "POST", "/api/v1/namespaces", {"metadata": {"name": name}}


def role() -> Mapping[str, Any]:
    """The Role that docs/kubernetes.md gives."""
    manifests = (ROOT / "docs" / "kubernetes.md").read_text().split("```yaml\n")[1:]
    found = (document for text in manifests for document in yaml.safe_load_all(text.partition("```")[0]))
    return next(document for document in found if document.get("kind") == "Role")


def _rights(users: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    rbac = "rbac.authorization.k8s.io"
    for user, namespace in users.items():
        path = f"/apis/{rbac}/v1/namespaces/{namespace}"
        own = {**role(), "metadata": {"name": user, "namespace": namespace}}
        yield "POST", f"{path}/roles", own
        subject = {"kind": "User", "name": user, "apiGroup": rbac}
        reference = {"kind": "Role", "name": user, "apiGroup": rbac}
        yield "POST", f"{path}/rolebindings", {"metadata": {"name": user}, "subjects": [subject], "roleRef": reference}
