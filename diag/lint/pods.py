"""Rules about the container or the pod that runs vLLM: its cache, probes, shutdown, GPUs, memory and autoscaler."""

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from diag.core.formatting import gibibytes, plural
from diag.lint.memory import offloaded
from diag.lint.removed import V1
from diag.lint.rule import Example, LintTarget, Match, at_least, is_open, number, rule
from diag.vllm.flags.registry import release
from diag.vllm.metric_names import SUFFIX, known

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
    pod = target.command.pod
    if not pod or not pod.is_whole:
        return
    for name, probe in (("startup", pod.startup), ("liveness", None if pod.startup else pod.liveness)):
        if probe and probe.seconds < _SHORTEST_START:
            without = " without a startup probe" if name == "liveness" else ""
            yield Match(f"The {name} probe{without} kills the server {probe.seconds:g} s after its start")


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
    pod = target.command.pod
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
    pod = target.command.pod
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
    "The pod has no memory at /dev/shm for tensor parallelism",
    "--tensor-parallel-size above 1 in a pod without a volume at /dev/shm and without hostIPC.",
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
    pod, tensor = target.command.pod, target.ranks("--tensor-parallel-size")
    if pod and pod.is_whole and not pod.shared_memory and tensor > 1:
        yield Match(f"--tensor-parallel-size {tensor} in a pod without a volume at /dev/shm")


def _ranks_in_pod(target: LintTarget) -> int | None:
    """Return the ranks that one pod starts; None if they are not known, or several pods share them."""
    command = target.command
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
    "A limit of nvidia.com/gpu or amd.com/gpu below the number of ranks in the pod. More GPUs than ranks is a warning.",
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
    pod, needed = target.command.pod, _ranks_in_pod(target)
    if not pod or not pod.gpus or not needed or pod.gpus == needed:
        return
    message = f"The container has {plural(pod.gpus, 'GPU')}, and the server needs {needed}"
    if pod.gpus < needed:
        yield Match(message)
    else:
        yield Match(
            message,
            "A server uses as many GPUs as it has ranks: the others stay idle, and no other pod gets them",
            "Lower the limit, or raise --tensor-parallel-size or --data-parallel-size",
            severity="warning",
        )


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
    pod, (needed, names) = target.command.pod, offloaded(target)
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
    for query in target.command.pod.metrics if target.command.pod else ():
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


RULES = (
    probe_kills_the_start,
    liveness_without_engine,
    grace_period_too_short,
    no_shared_memory,
    gpu_limit_differs,
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
    command, environment = target.command, target.command.environment
    before = command.words[: command.arguments if command.entry is None else command.entry]
    compiles = target.since(V1) and not target.is_on("--enforce-eager")
    root = environment.get(_ROOT) or f"{environment.get('XDG_CACHE_HOME') or '/root/.cache'}/vllm"
    is_open_text = is_open(root) or any(map(is_open, before))
    if not _is_run(before) or not compiles or _DISABLED in environment or is_open_text:
        return
    places, cache = _mounted(before), PurePosixPath(root)
    # the home of another image is unknown
    is_known = "/vllm-openai" in command.image or _ROOT in environment or not places
    if is_known and not any(cache.is_relative_to(place) for place in places):
        yield Match(
            f"No volume covers {cache}: the compile cache is lost with the container",
            fix=f"Add -v vllm-cache:{cache}, or a folder of the host",
        )


def _is_run(words: Sequence[str]) -> bool:
    """Return True for `docker run` whose user and volumes are those that the words name."""
    names = [PurePosixPath(word).name for word in words]
    is_run = any(name in ("docker", "podman") for name in names) and "run" in words
    return is_run and not any(word.startswith(("--volumes-from", "--user", "-u")) for word in words)


def _mounted(words: Sequence[str]) -> list[str]:
    """Return the places in the container at which volumes or folders of the host are mounted."""
    found = []
    for word, following in zip(words, (*words[1:], ""), strict=True):
        option, joined, value = word.partition("=")
        text = value if joined else following
        if option in ("-v", "--volume"):
            found.append("".join(text.split(":")[1:2]))  # without a colon it is an anonymous volume
        elif option == "--mount":
            keys = dict(part.partition("=")[::2] for part in text.split(","))
            found.append(keys.get("target") or keys.get("destination") or keys.get("dst") or "")
        elif word.startswith("-v"):
            found.append("".join(word.split(":")[1:2]))
    return [place for place in found if place.startswith("/")]


CONTAINER_RULES = (compile_cache_is_lost,)
