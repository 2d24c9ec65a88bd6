"""Rules about the container or the pod that runs vLLM: its cache, probes, shutdown, GPUs, memory and autoscaler."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from diag.core.formatting import gibibytes, plural
from diag.core.metric_prefix import OWN
from diag.lint.flags import other_program
from diag.lint.host import memory_ledger, offloaded, utilization
from diag.lint.removed import V1
from diag.lint.rule import LintTarget, Match, at_least, is_open, number, rule
from diag.vllm.command.container import EVERY_GPU
from diag.vllm.flags.registry import release
from diag.vllm.metric_names import SUFFIX, known

_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])")
_QUANTIZED = re.compile(r"(?i)awq|gptq|fp8|fp4|int[48]|w[48]a|4bit|8bit|gguf|mxfp4|nf4")
_SHORTEST_START = 60.0
"""Seconds: imports, weights, profiling and CUDA graphs take longer, also for models of a few billion parameters."""
_READ = 2e9
_DISTRIBUTED = re.compile(r"\bray\b|multi-node|LeaderWorkerSet|RayCluster|RayService")
_TOKEN = re.compile(rf"(?<![\w:])({OWN})?([a-z][a-z0-9_]*)" r"(?=\s*[{\[)]|\s*$)")

_ROOT, _DISABLED = "VLLM_CACHE_ROOT", "VLLM_DISABLE_COMPILE_CACHE"


def _limits_of_the_start(target: LintTarget) -> Iterator[tuple[str, float, float]]:
    """Yield each probe that may end a start: its name, its seconds, and those that no start of the model is below."""
    container = target.command.container
    if not container or not container.is_whole:
        return
    names = ("startup probe",) if container.startup else ("liveness probe", "health check")
    # the weights are read at 2 GB/s at most
    size = _BILLIONS.search(target.command.model)
    halved = bool(_QUANTIZED.search(target.command.model)) or target.command.get("--quantization") is not None
    weights = float(size[1]) * (0.25 if halved else 1) if size and len(size[1]) < 6 else 0
    if not size and (judged := memory_ledger(target)):  # a name without its size, such as DeepSeek-V3
        loaded = [row.computed.low for row in judged.rows if row.name == "weights" and row.computed]
        weights = (
            sum(loaded) * target.ranks("--tensor-parallel-size") * target.ranks("--pipeline-parallel-size") / _READ
        )
    for name in names:
        if probe := container.checks.get(name):
            by = f"{name} without a startup probe" if name == "liveness probe" else name
            yield by, probe.seconds, _SHORTEST_START + weights


@rule(shortest=f"{_SHORTEST_START:g}")
def probe_kills_the_start(target: LintTarget) -> Iterator[Match]:
    for name, seconds, shortest in _limits_of_the_start(target):
        if seconds < shortest and name == "health check":
            yield Match(
                f"The health check fails for good {seconds:g} s after its start",
                "Loading weights, profiling and CUDA graphs take longer: Docker reports the container as unhealthy,"
                " and services that depend on it do not start",
                f"Raise start_period above the time of the longest start, at least {shortest:.0f} s",
            )
        elif seconds < shortest:
            yield Match(f"The {name} kills the server {seconds:g} s after its start")


@rule()
def probe_may_kill_the_start(target: LintTarget) -> Iterator[Match]:
    for name, seconds, shortest in _limits_of_the_start(target):
        if shortest <= seconds < 2 * shortest and name != "health check":
            yield Match(f"The {name} leaves {seconds:g} s for the start")


@rule()
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


@rule()
def no_shared_memory(target: LintTarget) -> Iterator[Match]:
    pod, tensor = target.command.container, target.ranks("--tensor-parallel-size")
    is_added = "Ray" in target.command.writing  # by KubeRay
    if not pod or not pod.is_whole or pod.shared_memory is not False or tensor < 2 or is_added:
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
    values = [value for mention in command.given if mention.name[2:] in kinds for value in mention.values]
    around = " ".join([command.writing, *(word for words, _ in command.around for word in words), *command.words])
    apart = ("--nnodes", "--data-parallel-rank", "--data-parallel-address", "--data-parallel-start-rank", "--headless")
    is_shared = _DISTRIBUTED.search(around) or any(command.get(flag) is not None for flag in apart)
    is_shared = is_shared or "ray start" in target.text
    strays = [command.words[at] for at in command.strays]
    is_shared = is_shared or any("parallel-size" in word for word in strays)  # and its value, in one word
    if is_shared or command.config or any(map(is_open, (*values, *strays))):
        return None
    return target.local_ranks()


_WITHOUT_GPUS = {
    "docker run": ("--gpus", "Add --gpus all"),
    "pod": (
        "nvidia.com/gpu in its resources",
        "Add a limit of nvidia.com/gpu, which also keeps other pods off the GPU",
    ),
}


@rule()
def gpu_limit_differs(target: LintTarget) -> Iterator[Match]:
    pod, needed = target.command.container, _ranks_in_pod(target)
    if not pod or pod.gpus is None or not needed or pod.gpus == needed:
        return
    if pod.gpus == 0:
        command = target.command
        is_vllms = command.image.rpartition("/")[2].partition(":")[0] == "vllm-openai"
        is_for_cuda = is_vllms and command.get("--device") is None and "VLLM_TARGET_DEVICE" not in command.environment
        if pod.is_whole and is_for_cuda:
            by, fix = _WITHOUT_GPUS.get(pod.kind, ("gpus or devices in deploy.resources.reservations", "Add gpus: all"))
            yield Match(
                f"The container has no GPU: no {by}",
                "vLLM's image finds no GPU and exits, unless nvidia is the default runtime of containers on that host",
                fix,
                severity="error" if pod.kind == "docker run" else "warning",
            )
        return
    by = f" ({pod.gpus_by})" if pod.gpus_by and not pod.gpus_by.endswith("com/gpu") else ""
    who = f"{pod.kind} has" if pod.kind not in ("pod", "docker run", "Compose service") else "container has"
    message = f"The {who} {plural(pod.gpus, 'GPU')}{by}, and the server needs {needed}"
    is_only = not target.shares_container and not other_program(target.command)
    if pod.gpus < needed:
        yield Match(message)
    elif (pod.is_pod or (pod.devices and len(_devices(target)) > needed)) and is_only:
        yield Match(
            message,
            "A server uses as many GPUs as it has ranks: the others stay idle",
            "Lower the limit, or raise --tensor-parallel-size or --data-parallel-size",
            severity="warning",
        )


@rule()
def fewer_visible_than_ranks(target: LintTarget) -> Iterator[Match]:
    needed = _ranks_in_pod(target)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        text = target.command.environment.get(name, "").strip("\"'")
        visible = [part for part in text.split(",") if part.strip()]
        if visible and not is_open(text) and needed and len(visible) < needed:
            yield Match(f"{name} names {plural(len(visible), 'GPU')}, and the server needs {needed}")


@rule()
def visible_gpu_not_given(target: LintTarget) -> Iterator[Match]:
    """CUDA counts the GPUs of a container from 0, whichever they are on the host."""
    container, text = target.command.container, target.command.environment.get("CUDA_VISIBLE_DEVICES", "").strip("\"'")
    given = container.gpus if container and container.is_whole else None
    beyond = [part for part in text.split(",") if part.strip().isdigit() and given and int(part) >= given]
    if beyond and not is_open(text) and container and container.kind in ("pod", "docker run", "Compose service"):
        by = f" ({container.gpus_by})" if container.gpus_by else ""
        yield Match(
            f"CUDA_VISIBLE_DEVICES names GPU {beyond[0]}, and the container has {plural(given or 0, 'GPU')}{by}"
        )


_PORT = 8000


def _port(target: LintTarget) -> int:
    """Return the port on which the server listens; 0 if the text does not show it."""
    command = target.command
    port = command.get("--port")
    if other_program(command) == "Dynamo" or (port is None and target.build and command.entry is not None):
        return 0  # its frontend listens, or the entry point of another image gives a port
    if (port is None and not target.lacks("--port")) or command.get("--uds") is not None:
        return 0
    return int(number(port) or 0) if port is not None else _PORT


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


def _failing(probe: str, message: str, fix: str) -> Match:
    """Return the finding of a probe that fails for ever, which is fatal unless it asks for readiness alone."""
    is_fatal = probe in ("startup probe", "liveness probe")
    why = "" if is_fatal else "The check fails for ever: the container never becomes ready"
    return Match(message, why, f"{fix} in the {probe}", severity=None if is_fatal else "warning")


@rule()
def probe_on_another_port(target: LintTarget) -> Iterator[Match]:
    container = target.command.container
    for name, probe in (container.checks if container and container.is_whole else {}).items():
        if _is_another(probe.port, target):
            message = f"The {name} asks port {probe.port}, and the server listens on {_port(target)}"
            yield _failing(name, message, f"Use port {_port(target)}")


@rule()
def published_port_differs(target: LintTarget) -> Iterator[Match]:
    container = target.command.container
    ports = container.published if container and container.is_whole else ()
    if ports and all(_is_another(port, target) for port in ports):
        own = _port(target)
        yield Match(f"Port {ports[0]} of the container is published, and the server listens on {own}")


_ANSWERED = re.compile(
    r"/(?:health|ping|ready|readyz|load|version|metrics|server_info|docs|openapi\.json|is_(?:sleeping|paused)|v1/\S*)?/?"
)
"""Paths that some release answers, and the root, which a check by a command may ask for the connection alone."""


@rule()
def probe_of_another_path(target: LintTarget) -> Iterator[Match]:
    container, own = target.command.container, _port(target)
    is_vllms = container and container.is_pod and container.is_whole and not target.build and own
    for name, probe in container.checks.items() if container and is_vllms else ():
        path = probe.path.partition("?")[0]
        is_answered = _ANSWERED.fullmatch(path) and (path != "/" or probe.by_command)
        if path and not is_open(path) and not is_answered and probe.port in (0, own):
            yield _failing(name, f"The {name} reads {path}, which vLLM answers with 404", "Use /health")


@rule()
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


@rule()
def autoscaler_metric_missing(target: LintTarget) -> Iterator[Match]:
    for query in target.command.container.metrics if target.command.container else ():
        for prefix, name in _TOKEN.findall(query):
            first, last = known().get(f"{OWN}{SUFFIX.sub('', name)}", ("", ""))
            newest = max((last for _, last in known().values()), key=release)
            if prefix and not first:
                yield Match(f"No known vLLM release exports {OWN}{name[:60]}")
            elif prefix and not (target.since(first) and (last == newest or at_least(last, target.version))):
                yield Match(f"vLLM {target.version} does not export {OWN}{name}: releases {first} to {last} do")
            elif first and not prefix and name != query.strip():
                yield Match(f"vLLM exports {OWN}{name}, not {name}", fix=f"Write {OWN}{name}")


@rule()
def gpu_taken_twice(target: LintTarget) -> Iterator[Match]:
    for gpu in sorted(_devices(target)):
        servers = [other for other in target.beside if gpu in _devices(other)] + [target]
        # a size in bytes overrides the share
        shares = [(utilization(one) or 0) if one.lacks("--kv-cache-memory-bytes") else 0 for one in servers]
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
    if is_open(text) or command.get("--device-ids") is not None:
        return set()
    if text:
        named = [part for part in text.split(",") if part]
        if container and container.devices and all(part.isdigit() for part in named):
            named = [container.devices[int(part)] for part in named if int(part) < len(container.devices)]
        return set(named)
    if container and not container.is_pod:
        if container.devices:
            return set(container.devices)
        if container.kind in ("docker run", "Compose service") and container.gpus != 0:
            # a server takes the first of all GPUs; a guide has commands to choose from
            is_all = container.gpus_by in (EVERY_GPU, "count: all") and "```" not in target.text
            is_all = is_all and "NVIDIA_VISIBLE_DEVICES" not in command.environment
            given = (_ranks_in_pod(target) or 0) if is_all else container.gpus or 0
            return {str(at) for at in range(min(given, 64))}  # Docker gives the first ones to each
    return set()


@rule()
def port_taken_twice(target: LintTarget) -> Iterator[Match]:
    for other in target.beside:
        pair = (other.command, target.command)
        is_local = all(one.container is None and one.elsewhere != "on another host" for one in pair)
        if is_local and 0 < _port(other) == _port(target):
            line = f" (line {other.command.line})" if other.command.line else ""
            yield Match(f"Port {_port(target)} is that of an earlier server of the same text{line}")
            return


_HUB = re.compile(r"vllm|/ray-llm")
"""Images that download a model at their start, wherever their home is."""
_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME")


@rule()
def weights_are_downloaded_again(target: LintTarget) -> Iterator[Match]:
    container, command, variables = target.command.container, target.command, target.command.environment
    is_of_the_hub = re.fullmatch(r"(?!models?/)[\w.-]+/[\w.-]+", command.model)
    if not container or not container.is_whole or not is_of_the_hub or variables.get("HF_HUB_OFFLINE", "0") != "0":
        return
    named = command.get("--download-dir") or next((variables[name] for name in _CACHES if name in variables), "")
    cache = named if "HOME" not in variables or named != variables["HOME"] else f"{named}/.cache/huggingface"
    place = PurePosixPath(cache or "/root/.cache/huggingface")
    # variables that the text does not show may name any volume
    is_hidden = "--env-file" in command.words[: command.arguments]
    volumes = [PurePosixPath(volume) for volume in container.mounts if volume and not volume.startswith("/dev/")]
    covering = [one for one in volumes if place.is_relative_to(one) or one.is_relative_to(place)]
    is_fleeting = bool(covering) and {str(one) for one in covering} <= {*container.fleeting}
    if is_open(cache) or any(map(is_open, container.mounts)) or (is_hidden and volumes):
        return
    image = command.image or container.build
    is_known = re.search(r"(?:^|/)vllm-openai", image) or (not volumes and _HUB.search(image))
    if is_fleeting:
        yield Match(f"The volume at {covering[0]}, with the model's weights, is an emptyDir: it ends with the pod")
    elif not covering and is_known and not re.search(r"(?i)hugging|\bhf\b", str(volumes)):
        yield Match(fix=f"Mount a volume at {place}")


@rule()
def model_not_in_a_volume(target: LintTarget) -> Iterator[Match]:
    container, command = target.command.container, target.command
    path = command.model.rstrip("/")
    # an operator of Kubernetes mounts its models there
    is_known = path.startswith("/") and not path.startswith("/mnt/models") and not is_open(path)
    if not container or not container.is_whole or not is_known or any(map(is_open, container.mounts)):
        return
    is_upstream = re.fullmatch(r"(?:docker\.io/)?vllm/vllm-openai[\w.-]*(?:[:@].*)?", command.image)
    if is_upstream and not any(PurePosixPath(path).is_relative_to(place) for place in container.mounts if place):
        yield Match(f"No volume covers the model's folder {path}")


@rule()
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
