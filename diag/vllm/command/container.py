"""The container or the job that a launch runs in, whatever starts it: GPUs, shared memory, ports, health checks."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from diag.vllm.command.shell import NOTATIONS, compiled, default, noted

_LOCAL = noted("container_local")
IS_ALONE = noted("container_is_alone")
_SHM = "/dev/shm"
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_OTHER_CHIPS = {"aws.amazon.com/neuroncore", "aws.amazon.com/neuron", "google.com/tpu"}
_GIVING_GPUS = {"runtimeClassName", "resourceClaims", "schedulerName", "accelerator"}
"""Keys of a pod's spec by which it may have a GPU that no container asks for."""
_GRACE_SECONDS = 30.0
"""The default of Kubernetes for terminationGracePeriodSeconds."""
_PERIOD, _FAILURES = 10.0, 3.0
"""The defaults of Kubernetes for a probe's periodSeconds and failureThreshold."""
_URL = compiled(r"https?://[^\s/\"':]{1,200}(?::(\d{1,5}))?((?:/\w{1,40})+)")
_QUANTITY = compiled(r"(\d{1,18}(?:\.\d{1,9})?)\s*([kKMGTP]i?|)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


class ContainerProbe(NamedTuple):
    """A probe or a health check: the HTTP path that it or its command reads, "" for none, and how long it may fail.

    `port` is 0 if it is unknown. The answer to a check `by_command` may be any.
    """

    path: str
    delay: float
    period: float
    failures: float
    port: int = 0
    by_command: bool = False

    @property
    def seconds(self) -> float:
        """Seconds from the start of the container until a server that does not answer is given up."""
        return self.delay + self.period * self.failures


class Container(NamedTuple):
    """A container or a job with vLLM: None for what the text does not show. `kind` names it in a sentence.

    `gpus` is the number of GPUs given to it by `gpus_by`, `devices` names them where they are named; `shared_memory` is
    True for a volume at /dev/shm or one larger than the default, or the host's IPC; `memory` (bytes) is its limit.
    `published` has the ports that others reach, `mounts` its volumes, `checks` what kills or reports a server that does
    not answer, by its name. `grace` is terminationGracePeriodSeconds, `pre_stop` the sleep of the preStop hook.
    `is_pod` is True in Kubernetes; `is_whole` is False if a chart or an operator adds to what the text shows,
    `is_alone` if others share its network. `nodes` is the number of such containers or jobs that share a server.
    `is_served` is True for a pod of a Deployment with ports or behind a Service, `is_public` if a LoadBalancer, a
    NodePort, the `network` of its host or a port published beyond it leads to it and the text shows no key;
    `is_linked` if a Service named vllm sets VLLM_PORT in the pod. `discarded` are ports published in vain, beside the
    host's network, `baked` secrets that a Dockerfile leaves in its image, `literal` variables that nothing expands
    in it, `build` names an image that the command does not. `fleeting` are volumes that end with the pod
    (emptyDir), `cpus` is its limit of cores. `metrics` are the names that an autoscaler of the same text reads,
    `product` has words that may name the GPUs, `profiles` are those of Compose that start it.
    """

    kind: str = "container"
    checks: Mapping[str, ContainerProbe] = {}
    grace: float | None = None
    pre_stop: float = 0
    shared_memory: bool | None = False
    gpus: int | None = None
    gpus_by: str = ""
    devices: tuple[str, ...] = ()
    memory: float | None = None
    published: tuple[int, ...] = ()
    mounts: tuple[str, ...] = ()
    is_pod: bool = False
    is_whole: bool = True
    is_alone: bool = True
    nodes: int = 1
    is_served: bool = False
    is_public: bool = False
    network: str = ""
    discarded: tuple[str, ...] = ()
    baked: tuple[str, ...] = ()
    literal: tuple[str, ...] = ()
    build: str = ""
    fleeting: tuple[str, ...] = ()
    cpus: float | None = None
    is_linked: bool = False
    metrics: tuple[str, ...] = ()
    product: str = ""
    profiles: tuple[str, ...] = ()

    @property
    def startup(self) -> ContainerProbe | None:
        return self.checks.get("startup probe")

    @property
    def live_path(self) -> str:
        return self.checks["liveness probe"].path if "liveness probe" in self.checks else ""


def read_pod(
    spec: Mapping[str, Any], container: Mapping[str, Any], metrics: Sequence[str], is_whole: bool
) -> Container:
    """Read a pod's spec and one of its containers."""
    asked = inner(container, "resources")
    limits, requests = inner(asked, "limits"), inner(asked, "requests")
    counts = ((name, _number(limits.get(name, requests.get(name)))) for name in _GPUS)
    by, gpus = next(((name, count) for name, count in counts if count is not None), ("", None))
    is_stated = (
        bool({**limits, **requests} or items(container, "ports"))
        and is_whole
        and not (spec.keys() & _GIVING_GPUS or "claims" in asked)
    )
    if gpus is None and is_stated and not any("/" in name for name in (*limits, *requests)):
        gpus = 0  # no device, and no other way to one
    grace = _number(spec.get("terminationGracePeriodSeconds"))
    hook = inner(container, "lifecycle", "preStop")
    command = inner(hook, "exec").get("command")
    slept = re.search(r"\bsleep (\d{1,6})\b", " ".join(map(str, command)) if isinstance(command, list) else "")
    # the name of a volume may be a template's, its size anything
    mounts = [str(mount.get("mountPath")).rstrip("/") for mount in items(container, "volumeMounts")]
    names = [mount.get("name") for mount in items(container, "volumeMounts")]
    ending = {volume.get("name") for volume in items(spec, "volumes") if "emptyDir" in volume}
    named = {str(port.get("name")): port.get("containerPort") for port in items(container, "ports")}
    probes = {name: _probe(container.get(f"{name}Probe"), named) for name in ("startup", "liveness", "readiness")}
    milli = re.fullmatch(r"(\d{1,7})m", str(limits.get("cpu")))  # 500m, or whole cores
    return Container(
        kind="pod",
        checks={f"{name} probe": probe for name, probe in probes.items() if probe},
        grace=grace if grace is not None else (_GRACE_SECONDS if is_whole else None),
        pre_stop=_number(inner(hook, "sleep").get("seconds")) or (float(slept[1]) if slept else 0),
        shared_memory=None if _OTHER_CHIPS & limits.keys() else bool(spec.get("hostIPC")) or _SHM in mounts,
        gpus=int(gpus) if gpus is not None else None,
        gpus_by=by,
        memory=quantity(limits.get("memory")),
        mounts=tuple(mounts),
        fleeting=tuple(place for place, name in zip(mounts, names, strict=True) if name in ending),
        cpus=int(milli[1]) / 1000 if milli else _number(limits.get("cpu")),
        is_pod=True,
        is_whole=is_whole,
        is_alone=len(items(spec, "containers")) == 1 and not items(spec, "initContainers"),
        metrics=tuple(metrics),
        product=" ".join(
            re.findall(r"[\w.-]+", f"{inner(spec, 'nodeSelector')} {inner(spec, 'affinity', 'nodeAffinity')}")
        ),
    )


EVERY_GPU = "--gpus all"
_RUNS = ("docker", "podman", "nerdctl")
_DURATION = compiled(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_INTERVAL, _RETRIES = 30.0, 3.0
"""The defaults of Docker for a health check's interval and retries."""


def run_place(words: Sequence[str], start: int = 0) -> int | None:
    """Return the place of `run`, or of `create` behind docker, from `start` on; None if there is neither."""
    creates = {
        at for at in range(1, len(words)) if words[at] == "create" and PurePosixPath(words[at - 1]).name in _RUNS
    }
    return next((at for at in range(start, len(words)) if words[at] == "run" or at in creates), None)


def read_run(words: Sequence[str], environment: Mapping[str, str], kind: str = "docker run") -> Container | None:
    """Read the options of `docker run` before the image; None for other commands.

    An option with a variable in it is unknown.
    """
    if not any(PurePosixPath(word).name in _RUNS for word in words) or run_place(words) is None:
        return None
    options: dict[str, list[str]] = {}
    for word, following in zip(words, (*words[1:], ""), strict=True):
        option, joined, value = word.partition("=")
        if re.match(r"-[vpe]\S", word) and not word.startswith("--"):
            option, joined, value = word[:2], "=", word[2:]
        if option.startswith("-"):
            options.setdefault(LONG.get(option, option), []).append(value if joined else following)
    is_open = any(_is_open_option(option, word) for option, word in zip(("", *words), words, strict=False))
    gpus, by, devices = _given_gpus(options, environment)
    mounts = [text.partition(":")[0] for text in options.get("--tmpfs", ())]
    for text in options.get("--volume", ()):  # without a colon it is an anonymous volume
        mounts += re.sub(r"\$\{[^}]*\}|^[A-Za-z]:(?=[\\/][^:]*:/)", "$X", text).split(":")[1:2]
    for text in options.get("--mount", ()):
        keys = dict(part.partition("=")[::2] for part in text.split(","))
        mounts.append(keys.get("target") or keys.get("destination") or keys.get("dst") or "")
    has_shm = bool({"--shm-size"} & options.keys()) or _SHM in mounts or "--privileged" in options
    ipc = options.get("--ipc", [""])[-1]
    probe = _health(options)
    is_host = any(value == "host" for value in (*options.get("--network", ()), *options.get("--net", ())))
    # [[ip:]host:]container; a range or a variable is unknown
    published = options.get("--publish", [])
    ports = [text.rpartition(":")[2].removesuffix("/tcp") for text in published if not is_host]
    numbers = [port for port in ports if port.isdigit() and len(port) < 6]
    is_local = all(map(_LOCAL.match, published))
    is_fragment = options.keys().isdisjoint(NOTATIONS["of_a_service"])
    return Container(
        kind=kind,
        checks={"health check": probe} if probe else {},
        shared_memory=True if has_shm or ipc not in ("", "private") else None if is_open else False,
        gpus=None if gpus == 0 and (is_open or is_fragment) else gpus,
        gpus_by=by,
        devices=devices,
        memory=quantity(re.sub(r"([kmgt])b?$", r"\1i", options.get("--memory", [""])[-1].lower())),
        published=() if any("$" in port for port in ports) else tuple(filter(None, map(int, numbers))),
        mounts=tuple(place for place in mounts if place.startswith("/")),
        is_whole=not is_open and "--volumes-from" not in options and "--user" not in options,
        is_public=(is_host or not is_local) and not (is_open or "--env-file" in options),
        network="host" if is_host else "",
        discarded=tuple(published) if is_host else (),
    )


def _is_open_option(before: str, word: str) -> bool:
    """Return True if a word may stand for options, or for a whole volume: no variable within the value of another."""
    if ("$" not in word and "`" not in word) or re.search(r"\$\{?\w*(?i:image|img)", word):
        return False
    is_value = before.startswith("-") and "=" not in before and before not in _SWITCHES
    is_volume = before in ("-v", "--volume", "--mount") and ":" not in re.sub(r"\$\{[^}]*\}", "", word)
    is_list = re.search(r"[@*]", word) or word.startswith(("-v$", "-v=$", "--volume=$", "--mount=$"))
    return bool(is_volume or is_list or (word.startswith(("$", "`")) and not is_value))


_SWITCHES = {"-d", "--detach", "--rm", "-i", "-t", "-it", "-ti", "-itd", "-dit", "--init", "--privileged"}


LONG = {"-v": "--volume", "-p": "--publish", "-m": "--memory", "-u": "--user", "-w": "--workdir", "-B": "--bind"}


def _given_gpus(
    options: Mapping[str, Sequence[str]], environment: Mapping[str, str]
) -> tuple[int | None, str, tuple[str, ...]]:
    """Return the number of GPUs that a container gets, the option that gives them, and their names; 0 for none."""
    devices = " ".join(options.get("--device", ()))
    text = options.get("--gpus", [""])[-1].strip("\"'")
    if "--gpus" in options:
        named = re.search(r"device=([\w,.:-]+)", text)
        if named:
            names = tuple(filter(None, named[1].split(",")))
            return len(names), f"--gpus device={named[1]}", names
        count = re.fullmatch(r"(?:count=)?(\d{1,3})", text)
        return (int(count[1]) if count else None), f"--gpus {text[:40]}", ()
    visible = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    if "--runtime" in options and visible and visible not in ("all", "void", "none") and "$" not in visible:
        names = tuple(visible.split(","))
        return len(names), f"NVIDIA_VISIBLE_DEVICES={visible}", names
    names = tuple(re.findall(r"nvidia\.com/gpu=(\w[\w:-]*)", devices))
    if names and "all" not in names:
        return len(names), "--device nvidia.com/gpu", names
    others = "--runtime" in options or "--privileged" in options or devices
    return (None if others else 0), "", ()


def _health(options: Mapping[str, Sequence[str]]) -> ContainerProbe | None:
    command = " ".join(options.get("--health-cmd", ()))
    timing = [options.get(f"--health-{name}", [""])[-1] for name in ("start-period", "interval", "retries")]
    if not command or any("$" in text for text in timing):
        return None
    url = _URL.search(command)
    start, interval = (
        sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text)) for text in timing[:2]
    )
    retries = _number(timing[2])
    # by the address of the host a check reaches the published port
    port = int(url[1] or 0) if url and re.match(r"https?://(?:localhost|127\.|0\.0\.0\.0)", url[0]) else 0
    return ContainerProbe(url[2] if url else "", start, interval or _INTERVAL, retries or _RETRIES, port)


def read_service(service: Mapping[str, Any], environment: Mapping[str, str]) -> Container | None:
    """Read a service of Compose by the options of `docker run` that do the same."""
    words = ["docker", "run"]
    pairs = {"shm_size": "--shm-size", "ipc": "--ipc", "network_mode": "--network", "runtime": "--runtime"}
    words += [word for key, option in pairs.items() if service.get(key) for word in (option, str(service[key]))]
    words += ["--privileged"] * bool(service.get("privileged"))
    gpus = service.get("gpus")
    reserved = items(inner(service, "deploy", "resources", "reservations"), "devices")
    for device in reserved if gpus is None else gpus if isinstance(gpus, list) else ({"count": gpus},):
        ids, count = device.get("device_ids"), device.get("count", "all")
        words += ["--gpus", f"device={','.join(map(str, ids))}" if isinstance(ids, list) else str(count)]
    words += [word for text in _texts(service, "devices") for word in ("--device", text)]
    for key, option in (("volumes", "--volume"), ("ports", "--publish"), ("tmpfs", "--tmpfs")):
        for text in _texts(service, key):
            words += [option, text]
    words += [word for item in items(service, "volumes") for word in ("--mount", f"target={item.get('target')}")]
    words += [
        word
        for item in items(service, "ports")
        for word in ("--publish", ":".join(str(item[key]) for key in ("host_ip", "target") if key in item))
    ]
    limit = inner(service, "deploy", "resources", "limits").get("memory", service.get("mem_limit"))
    words += ["--memory", str(limit)] if limit else []
    words += ["--user", str(service["user"])] if service.get("user") else []
    words += ["--env-file", ""] if service.get("env_file") else []
    check = inner(service, "healthcheck")
    test = check.get("test")
    if test and not check.get("disable"):
        words += ["--health-cmd", " ".join(map(str, test)) if isinstance(test, list) else str(test)]
        keys = {"start_period": "start-period", "interval": "interval", "retries": "retries"}
        words += [word for key, name in keys.items() if key in check for word in (f"--health-{name}", str(check[key]))]
    run = read_run([*map(default, words)], environment, "Compose service")
    if not run:
        return None
    profiles = tuple(_texts(service, "profiles"))
    count = "all" if run.gpus_by == EVERY_GPU else run.gpus
    by = f"device_ids: {', '.join(run.devices)}" if run.devices else f"count: {count}"
    return run._replace(is_whole=run.is_whole and "extends" not in service, gpus_by=by, profiles=profiles)


def _texts(node: Mapping[str, Any], key: str) -> list[str]:
    value = node.get(key)
    return [str(item) for item in (value if isinstance(value, list) else [value]) if isinstance(item, str | int)]


def accelerators(text: Any, kind: str, nodes: int = 1) -> Container | None:
    """Read `H100:2`, as SkyPilot and Modal write GPUs, or one of a list; None for another text."""
    if isinstance(text, list):  # whichever is free
        able = [accelerators(one, kind, nodes) for one in text]
        first = able[0] if able else None
        same = first and all(one and one.gpus == first.gpus for one in able)
        is_one_kind = {one.product for one in able if one} == {first.product if first else ""}
        return first._replace(product=first.product if is_one_kind else "") if first and same else None
    if isinstance(text, dict) and len(text) == 1:
        text = ":".join(str(part) for pair in text.items() for part in pair)
    kind_and_count = re.fullmatch(r"([A-Za-z][\w.-]*!?)(?::(\d{1,3}))?", text) if isinstance(text, str) else None
    if not kind_and_count or re.match(r"tpu|v\d+[a-z]*pod|v\d+[a-z]-", kind_and_count[1].lower()):
        return None
    name, count = kind_and_count.groups()
    around = Container(kind, shared_memory=None, gpus=int(count or 1), gpus_by=text, is_whole=False, nodes=nodes)
    return around._replace(product=name.rstrip("!"))


def inner(node: Any, *keys: str) -> Mapping[str, Any]:
    """Return the mapping under nested keys; {} if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def items(node: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list under a key."""
    return [item for item in listed(inner(node).get(key)) if isinstance(item, dict)]


def quantity(value: Any) -> float | None:
    """Read a quantity of Kubernetes, such as 64Gi, in bytes."""
    written = _QUANTITY.fullmatch(str(value).strip()) if isinstance(value, str | int | float) else None
    if not written:
        return None
    number, unit = written.groups()
    return float(number) * (1024.0 if unit.endswith("i") else 1000.0) ** _POWERS[unit[:1].lower()]


def _number(value: Any) -> float | None:
    written = _QUANTITY.fullmatch(str(value).strip()) if value is not None and not isinstance(value, bool) else None
    return float(written[1]) if written and not written[2] else None


def _probe(probe: Any, named: Mapping[str, Any]) -> ContainerProbe | None:
    if not isinstance(probe, dict):
        return None
    command, asked = inner(probe, "exec").get("command"), inner(probe, "httpGet") or inner(probe, "tcpSocket")
    url = _URL.search(" ".join(map(str, command))) if isinstance(command, list) else None  # sh -c 'curl http://...'
    path, port = (url[2], url[1]) if url else (asked.get("path"), asked.get("port"))
    delay, period, failures = map(_number, map(probe.get, ("initialDelaySeconds", "periodSeconds", "failureThreshold")))
    number = _number(named.get(str(port), port)) or 0
    return ContainerProbe(str(path or ""), delay or 0, period or _PERIOD, failures or _FAILURES, int(number), bool(url))


def scaled_on(documents: Sequence[Any]) -> list[str]:
    """Return the metrics and queries that the autoscalers in these documents read."""
    names: list[str] = []
    for document in documents:
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind == "HorizontalPodAutoscaler":
            for metric in items(inner(document, "spec"), "metrics"):
                by_type = (inner(metric, type_, "metric").get("name") for type_ in ("pods", "object", "external"))
                names += [name for name in by_type if isinstance(name, str)]
        elif kind == "ScaledObject":
            for trigger in items(inner(document, "spec"), "triggers"):
                if trigger.get("type") == "prometheus":
                    query = inner(trigger, "metadata").get("query")
                    names += [query] if isinstance(query, str) else []
    return names
