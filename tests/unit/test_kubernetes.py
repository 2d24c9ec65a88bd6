"""Reading the pods of a cluster, without a cluster: the vLLM servers among them, and the meaning of their status."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.bad_servers import Reply, Request, serving
from support.secrets import corpus, is_shown

from diag.core.errors import BadUsage, Unreachable
from diag.http.address import Credentials, parse
from diag.http.failure import Failure
from diag.sources.kubernetes.cluster import Api, Place, place
from diag.sources.kubernetes.pod_object import candidates, container_status, failed_probes, not_started, note
from diag.sources.kubernetes.servers import MOST_EVENTS, ContainerLog, PodEvidence, find_with, gather

CONTEXTS = ["prod", "arn:aws:eks:eu-west-1:1:cluster/prod", "inference/api:6443/admin"]
NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("inference", Place("", "inference", "")),
        ("prod", Place("", "prod", "")),
        ("prod/inference", Place("prod", "inference", "")),
        ("prod/inference/app=vllm", Place("prod", "inference", "app=vllm")),
        ("prod/app=vllm", Place("", "prod", "app=vllm")),
        ("inference/app.kubernetes.io/name=vllm", Place("", "inference", "app.kubernetes.io/name=vllm")),
        ("inference/app in (a, b)", Place("", "inference", "app in (a, b)")),
        ("arn:aws:eks:eu-west-1:1:cluster/prod/inference", Place(CONTEXTS[1], "inference", "")),
        ("inference/api:6443/admin/serving/app=x", Place(CONTEXTS[2], "serving", "app=x")),
    ],
)
def test_k8s_option_is_context_namespace_selector(text: str, meant: Place) -> None:
    assert place(text, CONTEXTS) == meant


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("staging/inference", "the kubeconfig has no context staging (it has: prod, "),
        ("Inference", "takes [CONTEXT/]NAMESPACE[/SELECTOR]"),
        ("", "takes [CONTEXT/]NAMESPACE[/SELECTOR]"),
        ("prod/\x1b[31m/x", "\\x1b[31m/x is not of that form"),
    ],
)
def test_invalid_k8s_option_is_refused(text: str, reason: str) -> None:
    with pytest.raises(BadUsage) as refused:
        place(text, CONTEXTS)
    assert reason in str(refused.value)


def pod(labels: dict[str, str] | None = None, status: Any = None, **container: Any) -> dict[str, Any]:
    """A pod with one container."""
    return {
        "metadata": {"name": "p", "labels": labels or {}},
        "spec": {"containers": [{"name": "main", **container}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "main", **(status or {})}]},
    }


ISVC = {"serving.kserve.io/inferenceservice": "qwen"}
LEADER = {"leaderworkerset.sigs.k8s.io/name": "big", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
RAY = [{"containerPort": 8265, "name": "dashboard"}, {"containerPort": 8085, "name": "metrics"}]
SCRIPT = ["sh", "-c", "vllm serve qwen --port 8090 --tensor-parallel-size 8"]


@pytest.mark.parametrize(
    ("found", "ports", "is_certain"),
    [
        pytest.param(pod(image="vllm/vllm-openai:v0.32.0", args=["--model", "q"]), (8000, 8080), True, id="vllm"),
        pytest.param(pod(image="reg:5000/x/own@sha256:1", command=SCRIPT), (8090, 8000, 8080), True, id="own image"),
        pytest.param(pod(LEADER, image="own", command=SCRIPT), (8090, 8000, 8080), True, id="LeaderWorkerSet"),
        pytest.param(
            pod(ISVC, image="own", ports=[{"containerPort": 8080}]), (8080, 8000), False, id="KServe, own runtime"
        ),
        pytest.param(
            pod(image="lmcache/vllm-openai", command=["vllm", "serve", "q"], ports=[{"containerPort": 8000}]),
            (8000, 8080),
            True,
            id="production-stack",
        ),
        pytest.param(
            pod({"llm-d.ai/role": "decode"}, image="ghcr.io/llm-d/llm-d-cuda:v0.3", command=["vllm", "serve", "q"]),
            (8000, 8080),
            True,
            id="llm-d",
        ),
        pytest.param(
            pod({"ray.io/cluster": "r"}, image="rayproject/ray-llm", ports=RAY),
            (8085, 8265, 8000, 8080),
            False,
            id="Ray",
        ),
    ],
)
def test_servers_are_found_by_image_command_and_labels(found: Any, ports: tuple[int, ...], is_certain: bool) -> None:
    (candidate,) = candidates(found)
    assert (candidate.ports, candidate.certain) == (ports, is_certain)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(pod(image="postgres:17"), id="database"),
        pytest.param(pod({"app": "vllm-router"}, image="lmcache/lmstack-router"), id="production-stack's router"),
        pytest.param(pod({"llm-d.ai/x": "y"}, image="ghcr.io/llm-d/llm-d-routing-sidecar"), id="llm-d's sidecar"),
        pytest.param(
            pod({**LEADER, "leaderworkerset.sigs.k8s.io/worker-index": "1"}, image="own", command=SCRIPT),
            id="rank that follows a leader",
        ),
    ],
)
def test_routers_and_helpers_beside_vllm_are_no_servers(other: Any) -> None:
    assert not list(candidates(other))


@pytest.mark.parametrize(
    "exporter",
    [
        {"image": "own/tools", "args": ["diag", "exporter", "--listen", "0.0.0.0:9400"]},
        {"image": "reg:5000/own/diag:1", "args": ["exporter", "--vllm", "http://127.0.0.1:8000"]},
        {"image": "own/diag"},
    ],
    ids=["command", "arguments", "default"],
)
def test_exporter_in_the_same_pod_is_read_first(exporter: dict[str, Any]) -> None:
    both = pod(image="vllm/vllm-openai")
    both["spec"]["containers"].append({"name": "diag", **exporter})
    (candidate,) = candidates(both)
    assert (candidate.container, candidate.ports[0]) == ("main", 9400)


def at(seconds_ago: float) -> str:
    return datetime.fromtimestamp(NOW - seconds_ago, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ended(reason: str, status: int, ago: float = 60.0, lasted: float = 40.0) -> dict[str, Any]:
    over = {"reason": reason, "exitCode": status, "startedAt": at(ago + lasted), "finishedAt": at(ago)}
    return {"terminated": over}


def waiting(message: str) -> dict[str, Any]:
    return {"waiting": {"reason": "CrashLoopBackOff", "message": f"{message} restarting failed container=main pod=p"}}


@pytest.mark.parametrize(
    ("status", "crashes"),
    [
        pytest.param({"state": {"running": {"startedAt": at(50)}}}, 0, id="first run"),
        pytest.param(
            {"restartCount": 1, "state": {"running": {"startedAt": at(59)}}, "lastState": ended("Error", 1)},
            1,
            id="restarted at once",
        ),
        pytest.param(
            {"restartCount": 9, "state": {"running": {"startedAt": at(20)}}, "lastState": ended("Error", 1)},
            4,
            id="restarted after 40 s",
        ),
        pytest.param(
            {"restartCount": 9, "state": waiting("back-off 10s"), "lastState": ended("Error", 1)}, 2, id="second crash"
        ),
        pytest.param(
            {"restartCount": 9, "state": waiting("back-off 5m0s"), "lastState": ended("Error", 1)}, 7, id="longest wait"
        ),
        pytest.param(
            {"restartCount": 2, "state": waiting("back-off 5m0s"), "lastState": ended("Error", 1)}, 3, id="no more than"
        ),
        pytest.param(
            {"restartCount": 9, "state": {"running": {"startedAt": at(700)}}, "lastState": ended("Error", 1, 1000)},
            0,
            id="steady for ten minutes",
        ),
        pytest.param(
            {"restartCount": 1, "state": {"running": {"startedAt": at(59)}}, "lastState": ended("Completed", 0)},
            0,
            id="ended in order",
        ),
    ],
)
def test_consecutive_crashes_are_derived_from_the_kubelet_back_off(status: Any, crashes: int) -> None:
    assert container_status(pod(status=status), "main").crashes_in_a_row(NOW) == crashes


def test_the_status_of_a_container_is_what_a_host_would_show() -> None:
    limits = {"limits": {"memory": "1536Mi", "cpu": "500m"}}
    status = {"restartCount": 2, "state": waiting("back-off 20s"), "lastState": ended("OOMKilled", 137)}
    killed = pod(status=status, resources=limits)
    assert {name: value for name, _, value in container_status(killed, "main").samples()} == {
        "diag_host_last_oom_kill_timestamp_seconds": NOW - 60,
        "diag_host_memory_limit_bytes": 1536 * 2**20,
        "diag_host_cpu_limit_cores": 0.5,
    }
    assert list(note("container main", container_status(killed, "main"))) == [
        "container main: 2 restarts (the last at 2027-01-15 07:59:00 UTC, OOMKilled, exit status 137),"
        " CrashLoopBackOff (back-off 20s)"
    ]


def test_failed_probe_is_noted_with_its_time_limit() -> None:
    probe = {"startupProbe": {"periodSeconds": 10, "failureThreshold": 30}}
    message = "Startup probe failed: Get http://10.0.0.1:8000/health: connect: connection refused"
    events = [
        {"message": message, "count": 31, "involvedObject": {"fieldPath": "spec.containers{main}"}},
        {"message": message, "count": 9, "involvedObject": {"fieldPath": "spec.containers{another}"}},
    ]
    assert list(failed_probes(pod(**probe), "main", events)) == [
        "its startupProbe failed 31 times: the kubelet restarts it after 300 s of that"
    ]


def test_pod_that_has_not_started_is_reported_with_its_reason() -> None:
    lacking = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no nvidia.com/gpu"}
    pending = {**pod(), "status": {"phase": "Pending", "conditions": [lacking]}}
    assert not_started(pending) == "pod p is pending: Unschedulable, no nvidia.com/gpu"
    pull = {"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    pending["status"]["containerStatuses"] = [pull]
    assert not_started(pending) == "pod p is pending: ImagePullBackOff, no such image"
    assert not not_started(pod())


def lines(*texts: str, ago: float) -> str:
    """A log as the API server gives it: each line a second after the one before."""
    return "".join(f"{at(ago - number)[:-1]}.000000000Z {text}\n" for number, text in enumerate(texts))


CRASHED, KILLED = "diag_vllm_log_consecutive_crashes", "diag_host_last_oom_kill_timestamp_seconds"
FAILED, WAITED = (f"diag_vllm_log_events_total {event}" for event in ("engine_start_failed", "shm_broadcast_wait"))
STARTS = (
    "(EngineCore pid=7) INFO 01-15 08:00:00 [core.py:93] Initializing a V1 LLM engine (v0.32.0) with config: model=q"
)


WAITS = (
    "(EngineCore pid=7) INFO 01-15 08:00:00 [shm_broadcast.py:681] No available shared memory broadcast block found in"
    " 60 seconds."
)


def test_a_restart_in_the_middle_of_a_watch_is_noticed_and_no_line_of_the_log_is_lost_or_read_twice() -> None:
    status: dict[str, Any] = {"state": {"running": {"startedAt": at(300)}}}
    logs, now = {"": lines(STARTS, WAITS, ago=300)}, [NOW - 100]

    def answer(request: Request) -> Reply:
        asked = parse_qs(urlsplit(request.path).query)
        if urlsplit(request.path).path.endswith("/log"):
            return Reply(logs.get(asked.get("previous", [""])[0], "").encode())
        return Reply(json.dumps(pod(status=status)).encode())

    with serving(answer) as server:
        api = Api(parse(server.url), Credentials(), 5.0)
        (candidate,) = candidates(pod(image="vllm/vllm-openai"))
        log = ContainerLog(api, "n", candidate, container_status(pod(status=status), "main"), lambda: now[0])
        log.begin()
        before = values(log)
        logs |= {"true": lines(STARTS, WAITS, WAITS, ago=300), "": lines(STARTS, ago=50)}
        status |= {
            "restartCount": 1,
            "state": {"running": {"startedAt": at(55)}},
            "lastState": ended("OOMKilled", 137),
        }
        now[0] = NOW
        after = values(log)
    assert [before[name] for name in (CRASHED, FAILED, WAITED, KILLED)] == [0, 0, 1, 0]
    assert [after[name] for name in (CRASHED, FAILED, WAITED, KILLED)] == [1, 1, 2, NOW - 60]


def values(log: ContainerLog) -> dict[str, float]:
    return {" ".join((name, *labels)): value for name, labels, value in log.collect().samples}


def status(message: str) -> bytes:
    return json.dumps({"kind": "Status", "code": 503, "message": message}).encode()


POD = "error trying to reach service: dial tcp 10.0.0.1:8000: connect: connection refused"


@pytest.mark.parametrize(
    ("of_pod", "of_api_server", "kind", "reason"),
    [
        (Reply(status(POD), 503), Reply(b"{}"), Failure, "^connection refused$"),
        (Reply(POD.encode(), 503), Reply(b"{}"), Failure, "^connection refused$"),
        (None, Reply(b"{}"), Failure, "closed the connection"),
        (None, None, Unreachable, "the Kubernetes API server http.* closed the connection"),
        (Reply(status("etcdserver: request timed out"), 500), None, Unreachable, "HTTP 500: etcdserver"),
    ],
    ids=["pod refuses", "pod refuses, as text", "pod closes", "API server closes", "API server fails"],
)
def test_failing_api_server_is_distinguished_from_a_failing_pod(
    of_pod: Reply | None, of_api_server: Reply | None, kind: type[Exception], reason: str
) -> None:
    with serving(lambda request: of_api_server if request.path == "/version" else of_pod) as server:
        client = Api(parse(server.url), Credentials(), 5.0).client
        with pytest.raises(kind, match=reason):
            client.get("/api/v1/namespaces/n/pods/p:8000/proxy/metrics")


POD_PROXY = "/api/v1/namespaces/n/pods/p:8000/proxy"
OTHER_RESOURCES = (
    "/api/v1/namespaces/kube-system/secrets", "/api/v1/namespaces/n/secrets", "/version",
    "/api/v1/namespaces/n/pods/p2:8000/proxy/metrics", "/api/v1/namespaces/n/pods/p:8000/log",
    "/api/v1/namespaces/n/pods/p:80/proxy/metrics", "/api/v1/namespaces/n/pods/p:8000/proxyx",
    f"{POD_PROXY}/../../../secrets", f"{POD_PROXY}/%2e%2e/%2e%2e/secrets", f"{POD_PROXY}/%252e%252e/log",
    f"{POD_PROXY}/..%2f..%2fsecrets", f"{POD_PROXY}/..%5c..%5csecrets", f"{POD_PROXY}/..;/log", f"{POD_PROXY}//../../x",
    "//api/v1/namespaces/n/secrets",
)  # fmt: skip


@pytest.mark.parametrize("base", ["", "/k8s/clusters/c-1"])
@pytest.mark.parametrize("path", OTHER_RESOURCES)
def test_token_does_not_follow_a_redirect_of_a_pod_to_another_resource_of_the_api_server(path: str, base: str) -> None:
    asked = f"{base}{POD_PROXY}/metrics"

    def answer(request: Request) -> Reply:  # a pod that names the API server's host: the proxy leaves it as it is
        away = {"Location": f"http://{request.headers['Host']}{base}{path}"}
        return Reply(b"", 302, away) if request.path == asked else Reply(b"{}")

    with serving(answer) as server:
        token = Credentials({"Authorization": "Bearer sekret"})
        api = Api(parse(server.url + base), token, 5.0)
        with pytest.raises(Failure, match=r"redirects to another path \(http://127.*\), which is not followed"):
            api.client.get(asked)
    assert [request.path for request in server.requests] == [asked, f"{base}/version"]


@pytest.mark.parametrize("location", [f"{POD_PROXY}/real/metrics", "metrics/", f"{POD_PROXY}/a/../b"])
def test_a_redirect_of_a_pod_to_itself_is_followed(location: str) -> None:
    def answer(request: Request) -> Reply:
        is_first = request.path == f"{POD_PROXY}/metrics"
        return Reply(b"", 307, {"Location": location}) if is_first else Reply(b"there")

    with serving(answer) as server:
        client = Api(parse(server.url), Credentials(), 5.0).client
        assert client.get(f"{POD_PROXY}/metrics").body == b"there"


def test_the_api_server_itself_cannot_redirect_to_another_resource() -> None:
    secrets = Reply(b"", 302, {"Location": "/api/v1/namespaces/kube-system/secrets"})
    with serving(lambda _: secrets) as server:
        api = Api(parse(server.url), Credentials(), 5.0)
        with pytest.raises(Unreachable, match="redirects to another path"):
            api.pods("n", "")
    assert {urlsplit(request.path).path for request in server.requests} == {"/api/v1/namespaces/n/pods", "/version"}


def odd_pods() -> list[dict[str, Any]]:
    """Pods with other types than Kubernetes gives them, and a sound one beside them."""
    image = "vllm/vllm-openai:v0.32.0"
    return [
        pod(image=image, ports=[{"containerPort": "abc"}, {"containerPort": 9e9}, 7, {"containerPort": 10**400}]),
        pod(image=image, args="--port 8001", env={"name": "VLLM_X"}, livenessProbe=[], resources="64Gi"),
        pod({"a": 1}, {"restartCount": "3", "lastState": {"terminated": {"exitCode": "1"}}, "state": []}, image=image),
        {"metadata": [], "spec": {"containers": "vllm serve m"}, "status": {"containerStatuses": ["main"]}},
        {"spec": {"containers": ["vllm", {"name": 7, "image": image}]}, "status": {"phase": 1, "conditions": [1]}},
        pod({}, {"state": {"running": {"startedAt": "0001-01-01T00:00:00+14:00"}}, "restartCount": 2**63}, image=image),
        pod({}, {"state": {"waiting": {"reason": "x", "message": f"back-off {'9' * 400}s restarting"}}}, image=image),
        pod(image=image) | {"metadata": {"name": "../../x", "annotations": {"prometheus.io/port": "9" * 5000}}},
        pod(image=image, command=["vllm", "serve", "q", "--port", "8090"]) | {"metadata": {"name": "sound"}},
    ]


def test_odd_pods_are_noted_in_one_sentence_and_the_others_are_judged() -> None:
    def answer(request: Request) -> Reply:
        body = {"items": [{"message": 1, "count": "3", "involvedObject": "x"}]} if "/events" in request.path else {}
        if urlsplit(request.path).path.endswith("/pods"):
            body = {"items": [*odd_pods(), "vllm", None, 7]}
        is_page = "/sound:8090/proxy" in request.path
        return Reply() if is_page else Reply(json.dumps(body).encode())

    with serving(answer) as server:
        api = Api(parse(server.url), Credentials(), 5.0)
        found = find_with(api, Place("", "inference", ""))
        asked = [each.path for each in server.requests]
    assert "sound:8090" in found.servers
    assert [note for note in found.notes if "other types than in Kubernetes, and count as missing" in note]
    assert not any("/../" in path for path in asked)


def test_a_list_of_pods_that_never_ends_is_given_up() -> None:
    endless = Reply(json.dumps({"items": [], "metadata": {"continue": "again"}}).encode())
    with serving(lambda request: endless) as server:
        assert Api(parse(server.url), Credentials(), 5.0).pods("inference", "") == []
        assert len(server.requests) == 1


def stamped(number: int) -> bytes:
    return b"2027-01-15T08:00:%02d.000000000Z line %02d\n" % (number, number)


def gathered(known: dict[str, Any], log: bytes, first_bytes: int) -> PodEvidence:
    """The evidence about the only server of an API server, whose log is `log`."""

    def answer(request: Request) -> Reply:
        url = urlsplit(request.path)
        asked = parse_qs(url.query)
        if url.path.endswith("/log"):
            return Reply(log[: int(asked["limitBytes"][0])] if "limitBytes" in asked else log[-5 * len(stamped(0)) :])
        found = next((content for end, content in known.items() if url.path.endswith(end)), None)
        return Reply(json.dumps(found or {}).encode(), 403 if found is None else 200)

    with serving(answer) as server:
        found = find_with(Api(parse(server.url), Credentials(), 5.0), Place("", "n", ""))
        (evidence,) = gather(found, first_bytes)
    return evidence


def test_evidence_about_a_pod_has_no_secret() -> None:
    secrets = list(corpus())
    values = [each.secret for each in secrets]
    probe = {"httpGet": {"port": 1, "httpHeaders": [{"name": "Authorization", "value": values[0]}]}}
    over = {"terminated": {"exitCode": 1, "message": "\n".join(each.text for each in secrets[:20])}}
    image, digest = "vllm/vllm-openai:v0.32.0", f"sha256:{'0af1' * 16}"
    found = pod(
        {},
        {"restartCount": 1, "lastState": over, "image": image, "imageID": f"vllm@{digest}"},
        image=image,
        args=["--model", "q", *(f"--api-key={value}" for value in values)],
        env=[{"name": f"TOKEN_{number}", "value": value} for number, value in enumerate(values)],
        readinessProbe=probe,
    )
    found["metadata"]["annotations"] = {f"a/{number}": value for number, value in enumerate(values)}
    events = [{"message": each.text, "reason": "Failed"} for each in secrets]
    kept = gathered({"/pods": {"items": [found]}, "/pods/p": found, "/events": {"items": events}}, b"", 100)
    text = json.dumps([kept.facts, kept.summary], ensure_ascii=False)
    assert [each for each in secrets if is_shown(each.secret, text)] == []
    assert len(kept.facts["events"]) == MOST_EVENTS and kept.facts["containers"][0]["env"]["TOKEN_0"] == "REDACTED"
    assert kept.facts["containers"][0].keys().isdisjoint({"args", "command"})
    assert kept.summary == f"{image} ({digest})"


@pytest.mark.parametrize(("lines", "kept"), [(3, [0, 1, 2]), (9, range(9)), (40, [*range(7), *range(35, 40)])])
def test_both_ends_of_a_log_are_kept_and_no_line_twice(lines: int, kept: Iterable[int]) -> None:
    crashed = pod({}, {"restartCount": 1, "lastState": ended("Error", 1)}, image="vllm/vllm-openai")
    log = b"".join(map(stamped, range(lines)))
    found = gathered({"/pods": {"items": [crashed]}, "/pods/p": crashed}, log, 7 * len(stamped(0)) + 4)
    assert found.logs.keys() == {"log", "previous.log"}
    for first, last in found.logs.values():
        assert first + last == b"".join(map(stamped, kept)) and bool(last) == (lines == 40)
    (missing,) = found.missing
    assert missing.startswith("events of container main of pod p: this account may not list events")
