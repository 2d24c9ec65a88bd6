"""Rules about the container or the pod that runs vLLM: its cache, probes, shutdown, GPUs, memory and autoscaler."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from diag.core.formatting import gibibytes, plural
from diag.lint.flags import is_omni
from diag.lint.memory import offloaded
from diag.lint.removed import V1
from diag.lint.rule import Example, LintTarget, Match, at_least, is_open, number, rule
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import default, release
from diag.vllm.metric_names import SUFFIX, known

_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])")
_QUANTIZED = re.compile(r"(?i)awq|gptq|fp8|fp4|int[48]|w[48]a|4bit|8bit|gguf|mxfp4|nf4")
_SHORTEST_START = 60.0
"""Seconds: imports, weights, profiling and CUDA graphs take longer, also for models of a few billion parameters."""
_SLOW_PATHS = {
    "/v1/models": "the route answers as long as the API server lives, and asks no engine",
    "/metrics": "the page is large, and is served also if the engine is dead",
}
_DISTRIBUTED = re.compile(r"\bray\b|multi-node|LeaderWorkerSet|RayCluster|RayService")
_TOKEN = re.compile(r"(?<![\w:])(vllm:)?([a-z][a-z0-9_]*)(?=\s*[{\[)]|\s*$)")

_SCALED = "{kind: ScaledObject, spec: {triggers: [{type: prometheus, metadata: {query: 'sum(vllm:batch_size)'}}]}}"
_ROOT, _DISABLED = "VLLM_CACHE_ROOT", "VLLM_DISABLE_COMPILE_CACHE"


def _manifest(container: str, pod: str = "", more: str = "", args: str = "") -> str:
    """Return a Deployment in one line."""
    image = f"image: 'vllm/vllm-openai:v0.32.0', args: [--model, m{args}]{container}"
    deployment = f"kind: Deployment, spec: {{template: {{spec: {{containers: [{{{image}}}]{pod}}}}}}}"
    return f"{{kind: List, items: [{{{deployment}}}, {more}]}}" if more else f"{{{deployment}}}"


@rule(
    "warning",
    "A probe kills the server before it can have started",
    f"A startup probe, or a liveness probe without one, that fails for good within {_SHORTEST_START:g} s of the"
    " container's start.",
    "Loading weights, profiling and CUDA graphs take longer: the kubelet restarts the container again and again",
    "Add a startupProbe on /health with failureThreshold x periodSeconds above the time of the longest start",
    Example(
        _manifest(", livenessProbe: {httpGet: {path: /health}, initialDelaySeconds: 15}"),
        leaves=_manifest(
            ", livenessProbe: {httpGet: {path: /health}}"
            ", startupProbe: {httpGet: {path: /health}, failureThreshold: 90}"
        ),
    ),
)
def probe_kills_the_start(target: LintTarget) -> Iterator[Match]:
    container = target.command.container
    if not container or not container.is_whole:
        return
    names = ("startup probe",) if container.startup else ("liveness probe", "health check")
    shortest = _shortest_start(target)
    for name in names:
        probe = container.checks.get(name)
        if probe and probe.seconds < shortest:
            without = " without a startup probe" if name == "liveness probe" else ""
            kills = "fails for good" if name == "health check" else "kills the server"
            yield Match(
                f"The {name}{without} {kills} {probe.seconds:g} s after its start",
                "Loading weights, profiling and CUDA graphs take longer: Docker reports the container as unhealthy, and"
                " services that depend on it do not start"
                if name == "health check"
                else "",
                f"Raise start_period above the time of the longest start, at least {shortest:.0f} s"
                if name == "health check"
                else "",
            )


def _shortest_start(target: LintTarget) -> float:
    """Return the seconds that no start of this model is below; the weights are read at 2 GB/s at most."""
    size = _BILLIONS.search(target.command.model)
    halved = bool(_QUANTIZED.search(target.command.model)) or target.command.get("--quantization") is not None
    weights = float(size[1]) * (0.25 if halved else 1) if size and len(size[1]) < 6 else 0
    return _SHORTEST_START + weights


@rule(
    "info",
    "The liveness probe does not ask the engine",
    "A liveness probe on /v1/models or /metrics.",
    "Only /health fails when the engine is dead",
    "Use /health for the liveness probe",
    Example(
        _manifest(", livenessProbe: {httpGet: {path: /metrics}, initialDelaySeconds: 600}"),
        leaves=_manifest(", livenessProbe: {httpGet: {path: /health}, initialDelaySeconds: 600}"),
    ),
)
def liveness_without_engine(target: LintTarget) -> Iterator[Match]:
    pod = target.command.container
    path = pod.liveness.path if pod and pod.liveness else ""
    if path in _SLOW_PATHS:
        yield Match(
            f"The liveness probe reads {path}", f"Only /health fails when the engine is dead: {_SLOW_PATHS[path]}"
        )


@rule(
    "warning",
    "The pod is killed before --shutdown-timeout is over",
    "A terminationGracePeriodSeconds that is not longer than the sleep of the preStop hook and --shutdown-timeout"
    " together.",
    "The grace period includes the preStop hook: after it the kubelet kills the server with requests in flight",
    "Raise terminationGracePeriodSeconds",
    Example(
        _manifest("", args=", --shutdown-timeout, '60'"),
        leaves=_manifest("", pod=", terminationGracePeriodSeconds: 90", args=", --shutdown-timeout, '60'"),
    ),
)
def grace_period_too_short(target: LintTarget) -> Iterator[Match]:
    pod = target.command.container
    if not pod or pod.grace is None:
        return
    drain = target.number("--shutdown-timeout") if target.has("--shutdown-timeout") else None
    needed = pod.pre_stop + (drain or 0)
    if (drain or pod.pre_stop) and pod.grace <= needed:
        parts = [f"a preStop hook of {pod.pre_stop:g} s"] * bool(pod.pre_stop)
        parts += [f"--shutdown-timeout {drain:g}"] if drain else []
        yield Match(
            f"terminationGracePeriodSeconds {pod.grace:g} is too short for {' and '.join(parts)}",
            fix=f"Set terminationGracePeriodSeconds above {needed:g}",
        )


@rule(
    "warning",
    "The container has no memory at /dev/shm for tensor parallelism",
    "--tensor-parallel-size above 1 in a pod without a volume at /dev/shm and without hostIPC, or in a container of"
    " Docker or Compose without --ipc=host (ipc: host) and --shm-size (shm_size).",
    "The ranks exchange data in /dev/shm, of which a container has 64 MiB: NCCL fails to start, or a rank dies with a"
    " bus error",
    "Mount an emptyDir with medium: Memory at /dev/shm",
    Example(
        _manifest(", resources: {limits: {nvidia.com/gpu: 2}}", args=", -tp, '2'"),
        leaves=_manifest(
            ", resources: {limits: {nvidia.com/gpu: 2}}, volumeMounts: [{name: shm, mountPath: /dev/shm}]",
            pod=", volumes: [{name: shm, emptyDir: {medium: Memory}}]",
            args=", -tp, '2'",
        ),
    ),
)
def no_shared_memory(target: LintTarget) -> Iterator[Match]:
    pod, tensor = target.command.container, target.ranks("--tensor-parallel-size")
    if not pod or not pod.is_whole or pod.shared_memory is not False or tensor < 2:
        return
    if pod.is_pod:
        yield Match(f"--tensor-parallel-size {tensor} in a pod without a volume at /dev/shm")
    else:
        is_run = pod.kind == "docker run"
        more = "--ipc=host or --shm-size" if is_run else "ipc: host or shm_size"
        yield Match(
            f"--tensor-parallel-size {tensor} in a container with 64 MiB at /dev/shm: no {more}",
            fix="Add --ipc=host, or --shm-size 16g" if is_run else "Add ipc: host, or shm_size: 16gb",
        )


def _ranks_in_pod(target: LintTarget) -> int | None:
    """Return the ranks that one container starts; None if they are not known, or several containers share them."""
    command = target.command
    if command.container and command.container.nodes > 1:
        return None
    kinds = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "data-parallel-size-local")
    values = [value for given in command.given if given.name[2:] in kinds for value in given.values]
    around = " ".join([command.writing, *(word for words, _ in command.around for word in words), *command.words])
    apart = ("--nnodes", "--data-parallel-rank", "--data-parallel-address", "--data-parallel-start-rank", "--headless")
    is_shared = _DISTRIBUTED.search(around) or any(command.get(flag) is not None for flag in apart)
    strays = (command.words[at] for at in command.strays)
    if is_shared or command.config or any(map(is_open, (*values, *strays))):
        return None
    tensor, pipeline, data = (target.ranks(f"--{kind}-parallel-size") for kind in ("tensor", "pipeline", "data"))
    local = number(command.get("--data-parallel-size-local"))
    return tensor * pipeline * (data if local is None else int(local))


@rule(
    "error",
    "The container has fewer GPUs than the server needs",
    "Fewer GPUs than ranks: a limit of nvidia.com/gpu or amd.com/gpu, --gpus of Docker, devices of Compose,"
    " accelerators of SkyPilot, gpu= of Modal; vLLM's own image without any is an error too. In a pod more GPUs than"
    " ranks are a warning.",
    "vLLM refuses more ranks than it has GPUs",
    "Set the limit to the number of ranks",
    Example(
        _manifest(", resources: {limits: {nvidia.com/gpu: 1}}", args=", -tp, '2'"),
        leaves=_manifest(
            ", resources: {limits: {nvidia.com/gpu: 2}}, volumeMounts: [{name: shm, mountPath: /dev/shm}]",
            args=", -tp, '2'",
        ),
    ),
)
def gpu_limit_differs(target: LintTarget) -> Iterator[Match]:
    pod, needed = target.command.container, _ranks_in_pod(target)
    if not pod or pod.gpus is None or not needed or pod.gpus == needed:
        return
    if pod.gpus == 0:
        if not pod.is_pod and pod.is_whole and _is_for_cuda(target.command):
            by = "--gpus" if pod.kind == "docker run" else "gpus or devices in deploy.resources.reservations"
            yield Match(
                f"The container has no GPU: no {by}",
                "vLLM's image finds no GPU and exits, unless nvidia is the default runtime of Docker on that host",
                "Add --gpus all" if pod.kind == "docker run" else "Add gpus: all",
                severity="error" if pod.kind == "docker run" else "warning",
            )
        return
    by = f" ({pod.gpus_by})" if pod.gpus_by and not pod.gpus_by.endswith("com/gpu") else ""
    who = f"{pod.kind} has" if pod.kind not in ("pod", "docker run", "Compose service") else "container has"
    message = f"The {who} {plural(pod.gpus, 'GPU')}{by}, and the server needs {needed}"
    if pod.gpus < needed:
        yield Match(message)
    elif pod.is_pod and not target.shares_container and not is_omni(target.command):
        yield Match(
            message,
            "A server uses as many GPUs as it has ranks: the others stay idle, and no other pod gets them",
            "Lower the limit, or raise --tensor-parallel-size or --data-parallel-size",
            severity="warning",
        )


def _is_for_cuda(command: Command) -> bool:
    """Return True for vLLM's own image for CUDA, which is not told to use another device."""
    name = command.image.rpartition("/")[2].partition(":")[0]
    return name == "vllm-openai" and command.get("--device") is None and "VLLM_TARGET_DEVICE" not in command.environment


@rule(
    "error",
    "Fewer GPUs are visible than the server needs",
    "CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES names fewer GPUs than the server has ranks.",
    "vLLM refuses more ranks on one node than it has GPUs",
    "Name as many GPUs as there are ranks, or lower --tensor-parallel-size",
    Example("CUDA_VISIBLE_DEVICES=0,1 vllm serve m -tp 4", leaves="CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve m -tp 4"),
)
def fewer_visible_than_ranks(target: LintTarget) -> Iterator[Match]:
    needed = _ranks_in_pod(target)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        text = target.command.environment.get(name, "").strip("\"'")
        found = [part for part in text.split(",") if part.strip()]
        if found and not is_open(text) and needed and len(found) < needed:
            yield Match(f"{name} names {plural(len(found), 'GPU')}, and the server needs {needed}")


_PORT = 8000


def _port(target: LintTarget) -> int:
    """Return the port on which the server listens; 0 if the text does not show it."""
    command = target.command
    given = command.get("--port")
    if (given is None and not target.lacks("--port")) or command.get("--uds") is not None:
        return 0
    return int(number(given) or 0) if given is not None else _PORT


def _is_another(port: int, target: LintTarget) -> bool:
    """Return True if nothing in the container can listen on a port; another program of it may be told to."""
    container, own = target.command.container, _port(target)
    words = [
        *target.command.words[target.command.arguments :],
        *(word for words, _ in target.command.around for word in words),
    ]
    told = any(re.search(rf"(?<!\d){port}(?!\d)", word) for word in words if word != str(own))
    is_only = container is not None and container.is_alone and not target.shares_container and not told
    return bool(port and own) and port != own and is_only


@rule(
    "error",
    "A probe asks a port on which nothing listens",
    "A startup or liveness probe of a container on a port other than the server's. A readiness probe or a health check"
    " on such a port is a warning.",
    "The probe fails for ever: the kubelet restarts the container again and again",
    "Use the port of the server, 8000 unless --port is given",
    Example(
        _manifest(", livenessProbe: {httpGet: {path: /health, port: 9000}, initialDelaySeconds: 600}"),
        leaves=_manifest(", livenessProbe: {httpGet: {path: /health, port: 8000}, initialDelaySeconds: 600}"),
    ),
)
def probe_on_another_port(target: LintTarget) -> Iterator[Match]:
    container = target.command.container
    for name, probe in (container.checks if container and container.is_whole else {}).items():
        if _is_another(probe.port, target):
            is_fatal = name in ("startup probe", "liveness probe")
            yield Match(
                f"The {name} asks port {probe.port}, and the server listens on {_port(target)}",
                "" if is_fatal else "The check fails for ever: the container never becomes ready",
                f"Use port {_port(target)} in the {name}",
                severity=None if is_fatal else "warning",
            )


@rule(
    "warning",
    "The published port is not the server's",
    "`-p HOST:CONTAINER` of Docker or `ports` of Compose with container ports none of which is the server's.",
    "Requests to the published port reach nothing",
    "Publish the port of the server, 8000 unless --port is given",
    Example(
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.32.0 m --port 9000",
        leaves="docker run --gpus all -p 8000:9000 vllm/vllm-openai:v0.32.0 m --port 9000",
    ),
)
def published_port_differs(target: LintTarget) -> Iterator[Match]:
    container = target.command.container
    ports = container.published if container and container.is_whole else ()
    if ports and all(_is_another(port, target) for port in ports):
        own = _port(target)
        yield Match(f"Port {ports[0]} of the container is published, and the server listens on {own}")


@rule(
    "warning",
    "The memory limit is below what offloading needs",
    "A memory limit below what the ranks of the pod offload (--cpu-offload-gb, --kv-offloading-size or"
    " --kv-transfer-config, and --swap-space before 0.8.0). An info if the container has no memory limit.",
    "The container is killed as out of memory (OOMKilled) while the server starts",
    "Raise the memory limit",
    Example(
        _manifest(", resources: {limits: {memory: 16Gi}}", args=", --cpu-offload-gb, '32'"),
        leaves=_manifest(", resources: {limits: {memory: 64Gi}}", args=", --cpu-offload-gb, '32'"),
    ),
)
def memory_limit_too_low(target: LintTarget) -> Iterator[Match]:
    pod, (needed, names) = target.command.container, offloaded(target)
    if not pod or not needed or _ranks_in_pod(target) is None:
        return
    if pod.memory is not None and pod.memory < needed:
        yield Match(f"The memory limit is {gibibytes(pod.memory)}, and {names} takes {gibibytes(needed)}")
    elif pod.memory is None and pod.is_whole:
        yield Match(
            f"The container has no memory limit, and {names} takes {gibibytes(needed)}",
            "The scheduler may place the pod on a node without that memory",
            "Set a memory request and limit",
            severity="info",
        )


@rule(
    "warning",
    "The autoscaler reads a metric that vLLM does not export",
    "A HorizontalPodAutoscaler or a KEDA ScaledObject of the same text with a metric vllm:... that this release does"
    " not export, or a query with a metric of vLLM without its prefix vllm:.",
    "The autoscaler gets no value and does not scale",
    "Use vllm:num_requests_waiting, or another metric of vLLM's metrics page",
    Example(
        _manifest("", more=_SCALED), leaves=_manifest("", more=_SCALED.replace("batch_size", "num_requests_waiting"))
    ),
)
def autoscaler_metric_missing(target: LintTarget) -> Iterator[Match]:
    for query in target.command.container.metrics if target.command.container else ():
        for prefix, name in _TOKEN.findall(query):
            exported = known().get(f"vllm:{SUFFIX.sub('', name)}")
            if prefix and not exported:
                yield Match(f"No known vLLM release exports vllm:{name[:60]}")
            elif prefix and exported and not _is_exported(exported, target.version):
                first, last = exported
                yield Match(f"vLLM {target.version} does not export vllm:{name}: releases {first} to {last} do")
            elif exported and not prefix and name != query.strip():
                yield Match(f"vLLM exports vllm:{name}, not {name}", fix=f"Write vllm:{name}")


def _is_exported(releases: tuple[str, str], version: str) -> bool:
    newest = max((last for _, last in known().values()), key=release)
    return at_least(version, releases[0]) and (at_least(releases[1], version) or releases[1] == newest)


@rule(
    "error",
    "Servers on one GPU take more than its memory",
    "Servers of one text that run at the same time on the same GPU (services of Compose, `docker run`, background jobs"
    " of a script), whose --gpu-memory-utilization add up to more than 1.",
    "vLLM takes its share of the whole GPU: the server that starts last finds too little free memory",
    "Lower --gpu-memory-utilization so that the sum is below 1, or give each server its own GPU",
    Example(
        "CUDA_VISIBLE_DEVICES=0 vllm serve m --gpu-memory-utilization 0.6 &\n"
        "CUDA_VISIBLE_DEVICES=0 vllm serve n --gpu-memory-utilization 0.6 --port 8001 &",
        leaves="CUDA_VISIBLE_DEVICES=0 vllm serve m --gpu-memory-utilization 0.6 &\n"
        "CUDA_VISIBLE_DEVICES=0 vllm serve n --gpu-memory-utilization 0.3 --port 8001 &",
    ),
)
def gpu_taken_twice(target: LintTarget) -> Iterator[Match]:
    for gpu in sorted(_devices(target)):
        servers = [other for other in target.beside if gpu in _devices(other)] + [target]
        shares = [_share(server) for server in servers]
        if len(servers) > 1 and all(shares) and sum(shares) > 1.0001:
            names = ", ".join(filter(None, (server.command.place for server in servers)))
            yield Match(
                f"GPU {gpu} is shared by {len(servers)} servers{f' ({names})' if names else ''}, whose shares"
                f" {' + '.join(f'{share:g}' for share in shares)} are more than 1"
            )
            return


def _devices(target: LintTarget) -> set[str]:
    """Return the GPUs that a server is known to use."""
    command, container = target.command, target.command.container
    text = command.environment.get("CUDA_VISIBLE_DEVICES", "").strip("\"'")
    if text and not is_open(text):
        named = [part for part in text.split(",") if part]
        if container and container.devices and all(part.isdigit() for part in named):
            named = [container.devices[int(part)] for part in named if int(part) < len(container.devices)]
        return set(named)
    if container and not container.is_pod:
        if container.devices:
            return set(container.devices)
        if container.gpus and container.kind in ("docker run", "Compose service"):
            return {str(at) for at in range(min(container.gpus, 64))}  # Docker gives the first ones to each
    return set()


def _share(target: LintTarget) -> float:
    if target.command.get("--kv-cache-memory-bytes") is not None or not target.lacks("--kv-cache-memory-bytes"):
        return 0
    given = number(target.command.get("--gpu-memory-utilization"))
    return given if given is not None else default("--gpu-memory-utilization", target.version) or 0


@rule(
    "error",
    "Two servers listen on one port",
    "Servers of one text that run at the same time in one network (background jobs of a script) with the same port.",
    "The second one exits: the address is in use",
    "Give each server its own --port",
    Example(
        "vllm serve m --port 8000 &\nvllm serve n --port 8000 &",
        leaves="vllm serve m --port 8000 &\nvllm serve n --port 8001 &",
    ),
)
def port_taken_twice(target: LintTarget) -> Iterator[Match]:
    for other in target.beside:
        pair = (other.command, target.command)
        is_local = all(one.container is None and one.elsewhere != "on another host" for one in pair)
        if is_local and 0 < _port(other) == _port(target):
            line = f" (line {other.command.line})" if other.command.line else ""
            yield Match(f"Port {_port(target)} is that of an earlier server of the same text{line}")
            return


RULES = (
    probe_kills_the_start,
    liveness_without_engine,
    grace_period_too_short,
    no_shared_memory,
    gpu_limit_differs,
    fewer_visible_than_ranks,
    probe_on_another_port,
    published_port_differs,
    gpu_taken_twice,
    port_taken_twice,
    memory_limit_too_low,
    autoscaler_metric_missing,
)


@rule(
    "info",
    "The compile cache is lost with the container",
    f"`docker run` or `podman run` without a volume that covers {_ROOT}, /root/.cache/vllm in vLLM's own images. Not"
    " with --enforce-eager, which compiles nothing.",
    "torch.compile keeps its results there: a new container compiles again, which takes from seconds to a minute and"
    " more of each start",
    "Mount a volume at /root/.cache/vllm",
    Example(
        "docker run --gpus all -v ~/models:/models vllm/vllm-openai:v0.32.0 m",
        leaves="docker run --gpus all -v vllm-cache:/root/.cache/vllm vllm/vllm-openai:v0.32.0 m",
    ),
)
def compile_cache_is_lost(target: LintTarget) -> Iterator[Match]:
    container, environment = target.command.container, target.command.environment
    compiles = target.since(V1) and not target.is_on("--enforce-eager")
    root = environment.get(_ROOT) or f"{environment.get('XDG_CACHE_HOME') or '/root/.cache'}/vllm"
    if not container or container.is_pod or not compiles or _DISABLED in environment or is_open(root):
        return
    places, cache = container.mounts, PurePosixPath(root)
    # the home of another image is unknown
    is_known = "/vllm-openai" in target.command.image or _ROOT in environment or not places
    if container.is_whole and is_known and not any(cache.is_relative_to(place) for place in places):
        is_run = container.kind == "docker run"
        yield Match(
            f"No volume covers {cache}: the compile cache is lost with the container",
            fix=f"Add {f'-v vllm-cache:{cache}' if is_run else 'a volume at that path'}, or a folder of the host",
        )


CONTAINER_RULES = (compile_cache_is_lost,)
