"""Translate YAML that starts vLLM: Compose, Kubernetes, KServe, Ray Serve, and the values of Helm charts."""

import re
import shlex
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage, NoLaunch
from diag.core.files import parse_yaml, read_bytes
from diag.vllm.command import charts
from diag.vllm.command.command import NOTATIONS, command_line, flag, from_variables, serve, split, unread
from diag.vllm.command.container import Container, accelerators, inner, items, listed, read_pod, read_service, scaled_on
from diag.vllm.command.dockerfile import BUILT
from diag.vllm.command.shell import filled_templates
from diag.vllm.flags.registry import known, understood

_KEYS = frozenset[str](NOTATIONS["keys"])
_KEY = re.compile(rf"^[ ]*(?:- |\{{)?[\"']?(?:{'|'.join(sorted(_KEYS))})[\"']?:(?:\s|$)", re.MULTILINE)
WORKER = re.compile(NOTATIONS["patterns"]["manifests_worker"])
_KINDS = re.compile(r"^an? (?:Pod|Deployment|StatefulSet|DaemonSet|ReplicaSet|Job|List|container of Helm values)\b")
_SERVES = re.compile(r"vllm[\w.-]*\S?\s+serve\s|vllm\.entrypoints\.|dynamo\.vllm\b")
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_HELM = re.compile(r"\{\{-?\s*(?:\.Values|\.Release|\.Chart|\$|include|if|range|with|toYaml|template|define)\b")
_ADDING = re.compile(NOTATIONS["patterns"]["manifests_adding"])
_REDIRECTED = re.compile(NOTATIONS["patterns"]["manifests_redirected"])
_SCALAR = re.compile(NOTATIONS["patterns"]["manifests_scalar"])
_CHAT_TEMPLATE = re.compile(NOTATIONS["patterns"]["manifests_chat_template"])
_CALLED, _ENVIRONMENTS = frozenset[str](NOTATIONS["called"]), NOTATIONS["environments"]
_RECIPE = re.compile(NOTATIONS["patterns"]["manifests_recipe"])
_SERVICE, SCRIPT = "a Compose service", "a script in YAML"
_STARTS = re.compile(NOTATIONS["patterns"]["manifests_starts"])
_PYTHON = re.compile(r"^[ \t]*(?:from|import) vllm\b|\bV1Container\(", re.MULTILINE)
_BESIDE = re.compile(NOTATIONS["patterns"]["manifests_beside"])
_SESSIONS = {"postCreateCommand", "postStartCommand", "postAttachCommand"}
_HOST_SCRIPTS = frozenset[str](NOTATIONS["host_scripts"])
_NAMES_MODEL = re.compile(r"--model[= ]\S")
_DOCUMENT = re.compile(r"^---(?:[ \t].*)?$", re.MULTILINE)
_MOST_DOCUMENTS = 100
_MOST_BYTES = 2**22
_RELEASES = {"HelmRelease", "Application", "HelmChart"}
_COMPOSE = {"container_name", "restart", "shm_size", "profiles", "network_mode", "runtime", "ipc"}
_LONG = 3
"""Hyphens of a flag such as --max-model-len, which names vLLM: others have a --port, too."""
_READY = re.compile(r"readinessProbe|(?:include|template) \"[\w.-]*[pP]robe")
_LONGEST_BESIDE = 2**18
_NAMING = re.compile(
    r"(?m)\b(?:envFrom|configMapKeyRef|configMap|runtime|containers):"
    r"|type: configMap|^kind: (?:ConfigMap|\w*ServingRuntime)"
)
"""What may name an object of another file, or be named by one."""
_NAMED = re.compile(r"(?m)^kind: [\"']?(?:ConfigMap|Service|InferenceService|(?:Cluster)?ServingRuntime)\b|configMap:")
_NAMESPACE = re.compile(r"\bnamespace: *[\"']?([\w-]+)")
_CONFIG_MAP = re.compile(r"(?:configMap(?:Ref|KeyRef)?):\s*\{?\s*(?:\w+:[^\n]*\n\s*)?name: *[\"']?([\w.-]+)")
_UNSET = re.compile(r"'(\$\{\w+:-\})'")
"""A word that is left out by default."""
_CONFIG = re.compile(r"\s--config[= ]([\w./-]+)(?=\s|$)")
_MOUNTED = "/mnt/models"
"""The folder into which KServe puts a model."""
_KSERVE: Mapping[str, str] = NOTATIONS["kserve"]
_RAY: Mapping[str, str] = NOTATIONS["ray"]
_OF_KSERVE = frozenset[str](NOTATIONS["kserve_own"])


_OPERATORS: Sequence[Mapping[str, Any]] = NOTATIONS["operators"]
_NAMES: Mapping[str, Callable[[str], object]] = {
    "image": re.compile(r"(?:\w+_)?image_?(?:uri|url|name)", re.IGNORECASE).fullmatch,
    "args": re.compile(
        r"(?:\w+_)?(?:(?:command|container)_args|args|arguments|docker_?(?:args|start_?cmd))", re.IGNORECASE
    ).fullmatch,
    "env": re.compile(r"(?:\w+_)?env(?:ironment)?(?:_?var(?:iable)?s)?", re.IGNORECASE).fullmatch,
}
"""How services call the parts of a container: imageUri and args, recipe_image_uri and recipe_container_command_args."""


class Writing(NamedTuple):
    """A launch in some notation: `name` names the notation, `command` is the shell command of the same launch.

    `is_here` is True if its folders are those of this host; `place` is the service, the container or the function. With
    a `suffix`, `command` is the text of such a file. `dockerfile` is the text of which the image is built.
    """

    name: str
    command: str
    container: Container | None = None
    is_here: bool = False
    place: str = ""
    line: int = 0
    suffix: str = ""
    dockerfile: str = ""


def is_yaml(text: str) -> bool:
    """Return True if a text has a key of the YAML documents that start servers at the beginning of a line."""
    return bool(_KEY.search(text)) and not is_makefile(text)


def is_makefile(text: str) -> bool:
    """Return True for a Makefile or a justfile."""
    return bool(_RECIPE.search(text))


def is_manifest(documents: Sequence[Any]) -> bool:
    """Return True if a document is a manifest, and no file for --config."""
    return any(isinstance(document, dict) and not _KEYS.isdisjoint(document) for document in documents)


@lru_cache(maxsize=256)
def _objects(file: Path, _changed: int) -> list[Any]:
    """Return the objects of a file if others may name one of them; [] if it cannot be read."""
    with suppress(OSError, BadUsage):
        content = read_bytes(file, _LONGEST_BESIDE).decode("utf-8", "replace")
        return parse(charts.filled(content, file), file.name) if _NAMED.search(content) else []
    return []


def beside(file: Path, text: str) -> list[Any]:
    """Return the objects in the other files of a manifest's folder that its own may name; no name stands for two."""
    documents: list[Any] = []
    if not _NAMING.search(text):
        return documents
    folder = file.absolute().parent
    files = (folder / "templates" if charts.chart_of(file) else folder).glob("*.y*ml")
    for other in islice(sorted(files), _MOST_DOCUMENTS):
        with suppress(OSError):
            documents += _objects(other, other.stat().st_mtime_ns) if other.name != file.name else []
    able = Counter(map(_key, documents))
    return [part for part in documents if able[_key(part)] == 1]


def above(file: Path, text: str) -> list[Any]:
    """Return the ConfigMaps that a manifest names, from the folder above it and the overlays of its Kustomize base."""
    wanted, spaces, maps = {*_CONFIG_MAP.findall(text)}, {"None", *_NAMESPACE.findall(text)}, list[Any]()
    folder = file.absolute().parent.parent
    files = sorted([*folder.glob("*.y*ml"), *folder.glob("overlays/*/*.y*ml")]) if wanted else []
    for other in files[:_MOST_DOCUMENTS]:
        with suppress(OSError):
            maps += [one for one in _objects(other, other.stat().st_mtime_ns) if kind(one) == "ConfigMap"]
    named = [(one, *(str(inner(one, "metadata").get(key)) for key in ("name", "namespace"))) for one in maps]
    able = Counter(name for _, name, _ in named)
    return [one for one, name, space in named if able[name] == 1 and name in wanted and space in spaces]


def containers(documents: Sequence[Any], version: str, others: Sequence[Any] = ()) -> Iterator[Writing]:
    """Yield the launch of every container or engine that may start vLLM; `others` are objects beside the documents."""
    objects = list[Any]()
    for document in documents:  # a List, a Template of OpenShift, and a graph of kro hold several
        templates = [inner(one, "template") for one in items(inner(document, "spec"), "resources")]
        listing = items(document, "items") or items(document, "objects") or [one for one in templates if one]
        objects += listing or [document]
    parts = _joined(objects, others)
    around = [*others, *parts]
    maps = {_key(part)[1]: inner(part, "data") for part in around if kind(part) == "ConfigMap"}
    reader, length, is_read = _Reader(scaled_on(parts), version, maps=maps), 0, False
    able = (part for part in parts if not inner(part, "processes"))  # whose commands are scripts
    read = (_with_service(writing, part, around) for part in able for writing in reader.document(part))
    for writing in chain(read, _scripts(parts, around)):
        if writing.name == SCRIPT and is_read and writing.place not in _HOST_SCRIPTS:
            continue
        is_read = is_read or writing.name != SCRIPT
        length += len(writing.command)
        if length > _MOST_BYTES:  # aliases may stand for any number of words
            raise BadUsage("the containers of the YAML have too many words")
        yield writing


def kind(part: Any) -> str:
    return str(inner(part).get("kind"))


def _key(part: Any) -> tuple[str, str]:
    """Return the kind and the name by which other objects name this one."""
    return kind(part), str(inner(part, "metadata").get("name"))


def _configured(node: Mapping[str, Any], maps: Mapping[Any, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Fill in the variables of a container that ConfigMaps of the same text set."""
    named = [(entry, str(inner(entry, "configMapRef").get("name"))) for entry in items(node, "envFrom")]
    if not maps or not isinstance(node.get("env", []), list):
        return node
    entries = [{"name": key, "value": value} for _, name in named for key, value in maps.get(name, {}).items()]
    for entry in listed(node.get("env")):
        source = inner(entry, "valueFrom", "configMapKeyRef")
        value = maps.get(str(source.get("name")), {}).get(str(source.get("key")))
        entries.append(entry if value is None else {"name": entry.get("name"), "value": value})
    rest = [entry for entry, name in named if name not in maps]
    return {**node, "env": entries, "envFrom": rest} if entries else node


def _with_service(writing: Writing, part: Any, parts: Sequence[Any]) -> Writing:
    """Tell a pod whether it serves others, and whether a Service of the same text leads to it from elsewhere."""
    is_pod, is_served = kind(part) == "Pod", kind(part) in ("Deployment", "StatefulSet", "Pod")
    if not writing.container or not writing.container.is_whole or not is_served:
        return writing
    pod = part if is_pod else inner(part, "spec", "template")
    labels = inner(pod, "metadata", "labels").items()
    named = [(inner(one, "metadata"), inner(one, "spec")) for one in parts if kind(one) == "Service"]
    services, place = [service for _, service in named], ("vllm", inner(part, "metadata").get("namespace"))
    linking = [names for names, service in named if service.get("clusterIP") != "None"]
    is_linked = inner(pod, "spec").get("enableServiceLinks") is not False
    is_linked = is_linked and place in [(names.get("name"), names.get("namespace")) for names in linking]
    annotated = any("internal" in str(inner(other, "metadata", "annotations")).lower() for other in parts)
    by_labels = [one for one in services if one.get("selector") and inner(one, "selector").items() <= labels]
    # a chart's own helper writes the selector
    leading = by_labels or [one for one in services if len(services) == 1 and one.get("selector", "") is None]
    is_public = any(one.get("type") in ("LoadBalancer", "NodePort") for one in leading)
    has_ports = any(items(container, "ports") for container in items(inner(pod, "spec"), "containers"))
    is_served = bool(leading) or (has_ports and not is_pod)
    has_key = any(word in str(pod) for word in ("VLLM_API_KEY", "--api-key"))
    has_key = has_key or any(inner(one).get("envFrom") for one in items(inner(pod, "spec"), "containers"))
    is_public = bool(is_public and not annotated and not has_key)
    box = writing.container._replace(is_served=is_served, is_public=is_public, is_linked=is_linked)
    return writing._replace(container=box)


def _joined(parts: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Join each InferenceService to the ServingRuntime that it names, and to its Model of LLMKube: one server each."""
    naming = [inner(part, "spec", "predictor", "model").get("runtime") or () for part in others]
    for part in parts:
        if "ServingRuntime" in kind(part) and inner(part, "metadata").get("name") in naming:
            raise NoLaunch(
                "an InferenceService in a file beside makes the server of this ServingRuntime: lint that file"
            )
    able = {_key(part): part for part in (*others, *parts)}
    joined, used = list[Any](), list[Any]()
    for part in parts:
        spec = inner(part, "spec") if kind(part) == "InferenceService" else {}
        model = inner(spec, "predictor", "model")
        kinds = ("ServingRuntime", "ClusterServingRuntime")
        named = [(kind, str(model.get("runtime"))) for kind in kinds if model.get("runtime")]
        runtime: Any = next((able[key] for key in named if key in able), {})
        if containers := items(inner(runtime, "spec"), "containers"):
            first, *others = containers
            lists = {key: [*listed(first.get(key)), *listed(model.get(key))] for key in ("args", "env")}
            lists |= {key: model[key] for key in ("resources", "image") if key in model}
            spec = {**runtime["spec"], "containers": [{**first, **lists}, *others]}
            joined.append({**runtime, "metadata": inner(part, "metadata"), "spec": spec})
            used.append(runtime)
        elif spec.get("modelRef") and (named_model := ("Model", str(spec["modelRef"]))) in able:
            source = inner(able[named_model], "spec").get("source")
            joined.append({**part, "spec": {**spec, "modelRef": source}})
        else:
            joined.append(part)
    return [part for part in joined if not any(part is runtime for runtime in used)]


def _of_a_job(writing: Writing, job: Mapping[str, Any]) -> Writing:
    """Tell a service that it is a task of a scheduler: of its container nothing is known but the GPUs."""
    if not job:
        return writing
    count = str(job.get("gpus") or "")
    around = Container(job["kind"], shared_memory=None, is_whole=False, gpus_by=job.get("by", "device"))
    around = around._replace(gpus=int(count) if count.isdigit() else None)
    return writing._replace(name=article(job["kind"]), container=around, line=job.get("line", 0))


def _task(task: Mapping[str, Any], gpu: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a container of an ECS task, or with its `gpu` a service of Akash, as a service of Compose."""
    asked = {str(one.get("type")): one.get("value") for one in items(task, "resourceRequirements")}
    service = {"image": task.get("image"), "entrypoint": task.get("entryPoint"), "command": task.get("command")}
    job = {"kind": "ECS task", "gpus": asked.get("GPU"), "by": "resourceRequirements"}
    if gpu is not None:
        service |= {"entrypoint": task.get("command"), "command": task.get("args")}
        job = {"kind": "Akash service", "gpus": gpu.get("units"), "by": "units"}
    return {**service, "environment": task.get("environment", task.get("env")), "job": job}


def _unredirected(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node without what a shell does with the output of its command."""
    line = node.get("command")
    return {**node, "command": _REDIRECTED.split(line)[0]} if isinstance(line, str) else {**node}


def _scripts(parts: Sequence[Any], around: Sequence[Any]) -> Iterator[Writing]:
    """Yield the scripts in any text of the YAML: steps of a pipeline, a ConfigMap, a recipe."""
    nodes = deque[tuple[str, Any, str, Mapping[str, str]]]()
    for part in parts:
        mounted, images = str(inner(part, "metadata").get("name")), set[str]()
        pods: list[Any] = [*around] if kind(part) == "ConfigMap" else []
        while pods:  # the image of the containers whose pod mounts the ConfigMap
            pod = pods.pop()
            if any(inner(volume, "configMap").get("name") == mounted for volume in items(pod, "volumes")):
                images |= {str(one["image"]) for one in items(pod, "containers") if "vllm" in str(one.get("image"))}
            pods += [*pod.values()] if isinstance(pod, dict) else pod if isinstance(pod, list) else []
        if kind(part) != "CustomResourceDefinition":  # which has descriptions alone
            nodes.append(("", part, images.pop() if len(images) == 1 else "", {}))
    while nodes:
        key, node, image, variables = nodes.popleft()
        if isinstance(node, dict):
            named = next((node[name] for name in ("image", "container") if isinstance(node.get(name), str)), image)
            own = dict(pair for name in _ENVIRONMENTS for pair in _variables({"env": node.get(name)})[1].items())
            usual = {name: inner(one).get("default") for name, one in inner(node, "inputs").items()}  # of an action
            own |= {f"INPUTS_{name}".upper(): f"${{X:-{value}}}" for name, value in _plain(usual) if value}
            own |= {f"{{{name}}}": str(value) for name, value in _plain(inner(node, "defaults"))}  # of a recipe
            variables = {**variables, **own} if own else variables
            place = next((str(node[name]) for name in ("name", "label") if isinstance(node.get(name), str)), key)
            called = (place if str(name) in _CALLED and place else str(name) for name in node)
            nodes += [(name, child, named, variables) for name, child in zip(called, node.values(), strict=True)]
        elif isinstance(node, list):
            nodes += [(key, child, image, variables) for child in node]
        elif isinstance(node, str) and ("vllm" in node or "LLMConfig(" in node):
            if suffix := ".py" if key.endswith(".py") or _PYTHON.search(node) else ".md" if "```" in node else "":
                yield Writing(SCRIPT, node, place=key, suffix=suffix)
            elif _STARTS.search(node):
                box = Container("script", shared_memory=None, is_whole=False, build=image)
                yield Writing(SCRIPT, _exported(node, variables), box, place=key)


def _plain(node: Mapping[Any, Any]) -> list[tuple[str, str | int | float]]:
    return [(str(name), value) for name, value in node.items() if isinstance(value, str | int | float)][
        :_MOST_DOCUMENTS
    ]


def _exported(script: str, variables: Mapping[str, str]) -> str:
    """Write the variables around a script, such as a workflow's, before it, as far as it or vLLM reads them."""
    script = re.sub(r"\$ENV_(\w+)", lambda name: variables.get(name[1], name[0]), script)  # ${{ env.NAME }}
    script = re.sub(r"(?<![${])\{\w+\}(?!\})", lambda hole: variables.get(hole[0], hole[0]), script)
    used = {*re.findall(r"\$\{?(\w+)", script)}
    able = {name: value for name, value in variables.items() if name in used or name.startswith(("VLLM_", "CUDA_"))}
    pairs = (f"export {name}={shlex.quote(value)}; " for name, value in able.items() if "{{" not in value)
    return "".join(pairs) + script


def article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOULaeiou' and not name.startswith('Lead') else 'a'} {name}"


class _Reader(NamedTuple):
    """`image` is that of the chart around containers which name none, `maps` has the texts of ConfigMaps by name."""

    metrics: Sequence[str]
    version: str
    image: str = ""
    maps: Mapping[Any, Mapping[str, Any]] = {}

    def document(self, document: Any) -> Iterator[Writing]:
        if not isinstance(document, dict):
            engines = [engine for engine in items({"": document}, "") if {"modelURL", "repository"} <= engine.keys()]
            for engine in engines:  # a file of the engines alone
                yield from self.production_stack({}, engine)
            if not engines:
                yield from self.nested(document, "", "a container", {})
            return
        kind, spec = str(document.get("kind") or ""), inner(document, "spec")
        is_part = isinstance(document.get("image"), str) and " #" not in str(document.get("command"))
        if is_part and re.match(r"\W*--\w", str(document.get("command"))):
            document = {"services": {"": document}}  # a part of a Compose file
        named = str(inner(document, "metadata").get("name") or "")
        for form in _OPERATORS:
            if form.get("kind", "") == kind and charts.looked_up(form.get("key", "spec"), document) is not None:
                yield from (one._replace(place=one.place or named) for one in _operator(form, document, self.version))
                return
        if kind == "InferenceService":
            yield from self.inference_service(inner(spec, "predictor"))
        elif kind == "BackendRuntime":
            yield from self.llmaz(spec, named)
        elif kind == "LLMInferenceService":
            yield from self.llm_inference_service(document)
        elif "serveConfigV2" in spec or "applications" in document:
            yield from self.ray_serve(spec.get("serveConfigV2") or document, spec)
        elif "servingEngineSpec" in document:
            for model in items(inner(document, "servingEngineSpec"), "modelSpec"):
                yield from self.production_stack(inner(document, "servingEngineSpec"), model)
        elif embedded := _embedded(document, kind):
            for child in embedded:
                yield from self.document(child)
        elif "modelArtifacts" in document:
            for role in ("decode", "prefill"):
                yield from self.llm_d(document, role)
        else:
            if any(map(inner, inner(document, "services").values())):
                for service, node in document["services"].items():
                    for writing in self.nested(node, str(service), _SERVICE, {}):
                        yield _of_a_job(writing, inner(node, "job"))._replace(place=str(service))
                return
            name = f"{article(kind)}'s container" if kind else "a container of Helm values"
            if not kind and "image" not in document and isinstance(document.get("args"), list):
                able = [key for key, child in document.items() if "vllm" in str(inner(child).get("image"))]
                for key in able[:1]:  # the values of a chart with the image elsewhere
                    app = dict(document[key])
                    document = {**document, "image": app.pop("image"), key: app}
            chart = {} if kind else inner(document, "image")
            reader = self._replace(image=charts.image_of(chart)) if chart.get("tag") else self
            is_read = False
            for writing in reader.nested(document, "", name, {}):
                is_read = True
                yield writing
            if not kind and not is_read:
                for one in charts.engines(document, self.version):
                    options, environment = _variables({"env": one.environment})
                    words = _referenced(one.words, environment)
                    command = serve(words[words[0] == "serve" :], environment, one.image)
                    if words[0] == "serve" and "vllm-openai" in one.image:
                        command = shlex.join(["docker", "run", *options, one.image, *words])
                    yield Writing(name, command, one.container, place=one.name)

    def llmaz(self, spec: Mapping[str, Any], named: str) -> Iterator[Writing]:
        """Yield the server of each recommended configuration of a BackendRuntime, whose flavors give the GPUs."""
        image = f"{spec.get('image')}:{spec['version']}" if spec.get("version") else spec.get("image")
        for setup in items(spec, "recommendedConfigs"):
            node = {**spec, "image": image, "args": setup.get("args"), "name": setup.get("name") or named}
            yield from self.container(node, "a BackendRuntime", {}, is_pod=True, is_whole=False)

    def nested(self, node: Any, under: str, name: str, spec: Mapping[str, Any]) -> Iterator[Writing]:
        """Yield the containers under a node: `under` is its key, `spec` the pod's spec around it."""
        if isinstance(node, list):
            for child in node:
                yield from self.nested(child, under, name, spec)
        if isinstance(node, dict):
            is_sidecar = under == "initContainers" and node.get("restartPolicy") == "Always"
            if is_sidecar or under not in ("initContainers", "exec", "image"):
                is_dynamo = under == "mainContainer" or "Dynamo" in name  # whose operator adds to the pod
                is_listed = under in ("containers", "mainContainer", "initContainers")
                is_named = isinstance(node.get("image"), str) and "entrypoint" not in node
                is_pod = is_listed or (name != _SERVICE and is_named)  # or a custom resource's
                is_whole = is_listed and not is_dynamo
                yield from self.container(node, name, spec, is_pod=is_pod, is_whole=is_whole)
            name += ", multi-node" * ("Dynamo" in name and "multinode" in node)
            for key, child in node.items():
                if str(key).lower().replace("_", "") == "vllmargs" and _NAMES_MODEL.search(" ".join(split(child))):
                    arguments = ["-m", "vllm.entrypoints.openai.api_server", *split(child)]
                    yield Writing("a list of vLLM's arguments", shlex.join(["python3", *arguments]), place=under)
                is_module = str(key).endswith(("docker_container", "podman_container"))  # of Ansible
                if is_module and isinstance(child, dict):
                    service = {**child, "gpus": child.get("device_requests")}
                    yield from self.nested(service, str(key), _SERVICE, spec)
                    continue
                yield from self.nested(child, str(key), name, node if key == "containers" else spec)

    def container(
        self, node: Mapping[str, Any], name: str, spec: Mapping[str, Any], *, is_pod: bool, is_whole: bool = True
    ) -> Iterator[Writing]:
        """Yield a `docker run` of a container that mentions vLLM."""
        node = _configured(node, self.maps)
        called = {name: key for key in node for name, able in _NAMES.items() if isinstance(key, str) and able(key)}
        if _SESSIONS & node.keys():
            return  # a container of a developer, in which a command starts the server
        if "args" in called and ("image" in called or "arguments" in node):  # of a service's API
            node = {**node, **{name: node[key] for name, key in called.items()}}
            is_pod, is_whole = True, False
        is_open = not is_pod and name != _SERVICE and node.keys().isdisjoint(("image", "repository", "container"))
        if is_open and _SERVES.search(" ".join([*split(node.get("command")), *split(node.get("args"))])):
            node, is_pod, is_whole = {**_unredirected(node), "image": self.image}, True, False  # of a chart
        if isinstance(settings := node.get("args"), dict):  # {--max-model-len: 8192}
            flags = {str(key).lstrip("-"): value for key, value in settings.items()}
            node, is_pod, is_whole = {**node, "args": command_line(flags, self.version)}, True, False
        image = node.get("image")
        if isinstance(image, dict):  # of Helm values
            node = {**node, **{key: image[key] for key in ("command", "args", "env") if key in image}}
            image, is_pod = charts.image_of(image), True
        # Kubernetes overrides the image's entry point by `command`, Compose by `entrypoint`
        program, *words = split(node.get("command" if is_pod else "entrypoint")) or [""]
        words += split(node.get("args" if is_pod else "command"))
        vllm_image = image if isinstance(image, str) else ""
        called_by = f"{vllm_image} {node.get('name') if vllm_image[:1] in ('', '$', '{') else ''}"  # a template's image
        is_chart = name == "a container of Helm values" and not {"ports", "env"} & node.keys()
        is_patch = is_pod and is_whole and not {"ports", "resources"} & node.keys()  # of a pod
        if not (program or words) and (is_chart or is_patch or vllm_image != node.get("image")):
            return
        is_patch = is_pod and not vllm_image  # another file has the image, and may have volumes and probes
        if not vllm_image and "build" not in node and not (is_patch and (program or words)):
            return
        options, environment = _variables(node)
        place, is_whole = str(node.get("name") or ""), is_whole and not is_patch
        if WORKER.search(vllm_image) and not program and not words:
            if arguments := from_variables(environment, self.version):
                yield Writing(f"{name}, by its variables", serve(arguments, unread(environment)))
        elif not program and not words and ("vllm/vllm-openai" not in vllm_image or not (is_pod or name == _SERVICE)):
            pod = read_pod(spec, node, self.metrics, is_whole)
            is_shown = is_pod and is_whole and pod.gpus and "vllm" in called_by.lower()
            if is_shown and not _BESIDE.search(called_by):  # its arguments are not shown
                command = ["docker", "run", *options, vllm_image if "vllm" in vllm_image else "vllm", "$ARGS"]
                yield Writing(name, shlex.join(command), pod, place=place)
        elif not program and (words[:1] == ["-m"] or (not words and is_pod and not _KINDS.search(name))):
            return  # the operator of a custom resource says it, or Python is the image's entry point
        elif "vllm" in called_by.lower() or _starts(program, words):
            is_reset = node.get("entrypoint", "x") in ("", []) and words[:1] and not words[0].startswith("-")
            options += ["--entrypoint", program] if program or is_reset else []
            words = _with_config(_referenced(words, environment), node, spec, self)
            around = read_pod(spec, node, self.metrics, is_whole) if is_pod else None
            around = read_service(node, environment) if name == _SERVICE else around
            around = around._replace(shared_memory=None) if around and is_patch else around
            is_named = "vllm" in vllm_image and "$(" not in vllm_image
            words = ["docker", "run", *options, vllm_image if is_named else "vllm", *words]
            build = "" if is_named or "build" in node else vllm_image
            is_public = charts.is_published(node, words) or bool(around and around.is_public)
            dockerfile, baked, literal = dict[Any, Any](node).get(BUILT, ("", (), ()))
            around = around and around._replace(build=build, is_public=is_public, baked=baked, literal=literal)
            yield Writing(name, _UNSET.sub(r"\1", shlex.join(words)), around, place=place, dockerfile=dockerfile)

    # -- KServe

    def inference_service(self, predictor: Mapping[str, Any]) -> Iterator[Writing]:
        model, name = inner(predictor, "model"), "an InferenceService's model"
        if "container" in predictor and not model:
            raise NoLaunch("KServe has no key predictor.container: it is called predictor.containers, and is a list")
        yield from self.nested(predictor.get("containers"), "containers", "an InferenceService's container", predictor)
        if model.get("command"):
            yield from self.container(model, name, predictor, is_pod=True)
            return
        words = split(model.get("args"))
        kind = str(inner(model, "modelFormat").get("name") or "").lower()
        mentions = (kind, str(model.get("runtime") or ""), str(model.get("image") or ""), *words)
        is_named = kind == "huggingface" or any("vllm" in text.lower() for text in mentions)
        if not model or not (is_named or _is_vllms(words, "--")):
            return
        if re.search(r"--backend[ =]huggingface(?!\S)", " ".join(words)):
            return  # that server runs the model without vLLM
        named, words = _from_kserve(words)
        stored = str(model.get("storageUri") or "")
        folder = stored.removeprefix("hf://") if stored.startswith("hf://") else _MOUNTED
        parallel = inner(predictor, "workerSpec")
        sizes = {
            "tensor_parallel_size": parallel.get("tensorParallelSize"),
            "pipeline_parallel_size": parallel.get("pipelineParallelSize"),
        }
        words = [named or (folder if stored or "storage" in model else "$MODEL"), *words]
        writing = self.engine(name, [*words, *command_line(sizes, self.version)], model, predictor)
        box = writing.container if is_named or not writing.container else writing.container._replace(shared_memory=None)
        yield writing._replace(container=box)  # what is named elsewhere may have a volume there

    def llm_inference_service(self, document: Mapping[str, Any]) -> Iterator[Writing]:
        spec = inner(document, "spec")
        model = inner(spec, "model")
        served = model.get("name") or inner(document, "metadata").get("name")
        for part in (spec, inner(spec, "prefill")):
            template = inner(part, "template")
            able = items(template, "containers")
            container = next((item for item in able if item.get("name") == "main"), able[0] if able else {})
            if not part or not model:
                continue
            name = "an LLMInferenceService" if part is spec else "an LLMInferenceService's prefill"
            if container.get("command"):
                yield from self.container(container, name, template, is_pod=True, is_whole=False)
                continue
            _, environment = _variables(container)
            arguments = {"model": _fetched(model.get("uri"), _MOUNTED), "served_model_name": served}
            words = command_line({**arguments, **_parallel(inner(part, "parallelism"))}, self.version)
            words += [*split(container.get("args")), *split(environment.pop("VLLM_ADDITIONAL_ARGS", ""))]
            container = {**container, "env": environment}
            yield self.engine(name, words, _without_limits(container) if "worker" in part else container, template)

    # -- Ray Serve

    def ray_serve(self, config: Any, spec: Mapping[str, Any]) -> Iterator[Writing]:
        group = next(iter(items(inner(spec, "rayClusterConfig"), "workerGroupSpecs")), {})
        pod = inner(group, "template", "spec")
        worker = next(iter(items(pod, "containers")), {})
        # KubeRay adds the probes and /dev/shm, and several pods may share a server
        around = read_pod(pod, worker, (), is_whole=True)._replace(checks={}, grace=None, shared_memory=None, gpus=None)
        around = around._replace(build=str(worker.get("image") or ""))
        documents = parse_yaml(config, "serveConfigV2") if isinstance(config, str) else [config]
        for application in (part for document in documents for part in items(document, "applications")):
            arguments, around_it = inner(application, "args"), inner(application, "runtime_env")
            told = {_RAY[name]: value for name, value in inner(around_it, "env_vars").items() if name in _RAY}
            if "model" in told and "vllm" in f"{application.get('import_path')} {around_it.get('pip')}":
                command = serve([*command_line(told, self.version), "$ARGS"], _variables(worker)[1])
                yield Writing("Ray Serve's variables", command, around if worker else None)
            named = [(str(application.get("name") or ""), engine) for engine in items(arguments, "llm_configs")]
            named += [(str(key), child) for key, child in arguments.items() if "model_loading_config" in inner(child)]
            for place, engine in named:
                if "server_cls" in engine:
                    continue  # an engine of another kind
                loaded = inner(engine, "model_loading_config")
                variables = inner(engine, "runtime_env", "env_vars") or inner(around_it, "env_vars")
                words = ray_arguments(loaded, inner(engine, "engine_kwargs"))
                environment = _variables(worker)[1] | {str(key): str(value) for key, value in variables.items()}
                command = serve(command_line(words, self.version), environment)
                yield Writing("Ray Serve's engine_kwargs", command, around if worker else None, place=place)

    # -- Helm values

    def production_stack(self, whole: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[Writing]:
        """Yield an engine of the production stack's chart, as its template deployment-vllm-multi.yaml starts it."""
        settings = dict(inner(model, "vllmConfig"))
        extra, is_v0 = split(settings.pop("extraArgs", None)), str(settings.pop("v0", "")) == "1"
        for key in ("v1", "prometheusMultiprocDir"):
            settings.pop(key, None)
        if "vllmConfig" in model:
            settings.setdefault("enablePrefixCaching", False)
        switches = {"enableLoRA": "enable_lora", "enableTool": "enable_auto_tool_choice"}
        named = {"toolCallParser": "tool_call_parser", "modelRevision": "revision", "chatTemplate": "chat_template"}
        arguments = {
            "model": model.get("modelURL"),
            **{flag: True for key, flag in switches.items() if model.get(key)},
            **settings,
            **{flag: model[key] for key, flag in named.items() if model.get(key)},
        }
        connector = inner(model, "lmcacheConfig")
        if connector.get("enabled") and "enablePD" not in connector:
            config = {"kv_connector": "LMCacheConnector" if is_v0 else "LMCacheConnectorV1", "kv_role": "kv_both"}
            arguments["kv_transfer_config"] = config
        words = command_line(arguments, self.version)
        _, environment = _variables({"env": [*items(whole, "env"), *items(model, "env")]})
        environment |= {"VLLM_USE_V1": "0"} if is_v0 else {}
        count = None if "raySpec" in model else model.get("requestGPU")
        gpus = {"limits": {"nvidia.com/gpu": count}}
        container = {"image": charts.image_of(model), "name": model.get("name"), "env": environment, "resources": gpus}
        yield self.engine("production-stack values", [*words, *extra], container, {})

    def llm_d(self, document: Mapping[str, Any], role: str) -> Iterator[Writing]:
        """Yield an engine of the chart llm-d-modelservice, as its _helpers.tpl starts it."""
        part, artifacts = inner(document, role), inner(document, "modelArtifacts")
        sizes = inner(part, "parallelism")
        if part.get("create") is False:
            return
        for container in items(part, "containers"):
            _, environment = _variables(container)
            environment |= {"TP_SIZE": str(sizes.get("tensor") or 1), "DP_SIZE": str(sizes.get("data") or 1)}
            environment |= {"DP_SIZE_LOCAL": str(sizes.get("dataLocal") or sizes.get("data") or 1)}
            name, own = f"llm-d-modelservice values, {role}", {**container, "env": environment}
            own = _without_limits(own) if document.get("multinode") or sizes.get("workers") else own
            if container.get("modelCommand") not in ("vllmServe", "imageDefault"):
                yield from self.container(own, name, part, is_pod=True, is_whole=False)
                continue
            arguments = {"model": _fetched(artifacts.get("uri"), "/model-cache"), **_parallel(sizes, least=2)}
            arguments["served_model_name"] = artifacts.get("name")
            words = [*command_line(arguments, self.version), *split(container.get("args"))]
            yield self.engine(name, words, own, part)

    def engine(self, name: str, words: list[str], node: Mapping[str, Any], spec: Mapping[str, Any]) -> Writing:
        """Return a launch to which a chart or an operator adds a pod of its own."""
        _, environment = _variables(node)
        command = serve(_referenced(words, environment), environment, node.get("image"))
        around = read_pod(spec, node, self.metrics, is_whole=False)
        return Writing(name, command, around, place=str(node.get("name") or ""))


# -- other operators and services


def _operator(form: Mapping[str, Any], document: Mapping[str, Any], version: str) -> Iterator[Writing]:
    """Yield the servers of an operator or a service; `form` has the paths of what it says about them."""
    paths, made = form["paths"], charts.looked_up(form.get("each", "-"), document)
    roles = made if isinstance(made, dict) else dict(enumerate(listed(made))) if "each" in form else {"": None}
    for role, item in roles.items():
        whole = {**document, "item": item}
        able = {key: [charts.looked_up(path.replace("ROLE", str(role)), whole) for path in paths[key]] for key in paths}
        part = {key: next((value for value in values if value is not None), None) for key, values in able.items()}
        is_other = str(part.get("engine") or form.get("engine")) != str(form.get("engine"))
        if is_other or part.get("model", part.get("script")) is None:
            continue
        _, environment = _variables({"env": part.get("env")})
        place = str(part.get("place") or (role if isinstance(role, str) else ""))
        if "script" in paths:
            steps = part["script"] if isinstance(part["script"], list) else [part["script"]]
            text = "\n".join(str(inner(step).get("command", step)) for step in steps)
            nodes = asked if isinstance(asked := part.get("nodes"), int) else 1
            box = accelerators(part.get("gpus"), form["kind_of"], nodes)
            box = box or Container(form["kind_of"], shared_memory=None, is_whole=False, nodes=nodes)
            exports = [f"{form['sets']}{name}={shlex.quote(value)}" for name, value in environment.items() if value]
            exports += [f"{form['counted']}={box.gpus}"] if box.gpus and "counted" in form else []
            box = box._replace(build=str(part.get("image") or "").removeprefix("docker:"))
            yield Writing(form["name"], "\n".join([*exports, text]), box, place=place)
            continue
        address, size = str(part["model"]), part.get("tensor")
        model = _fetched(re.sub(r"[?#].*", "", address), form["folder"]) if "folder" in form else address
        arguments: dict[str, Any] = {"tensor_parallel_size": size} if isinstance(size, int) and size > 1 else {}
        left_out, renamed = re.compile(form.get("left_out", "-")), form.get("renamed", {})
        for key, value in [*inner(part, "flags").items(), *inner(part, "more_flags").items()]:
            name = renamed.get(key, key)
            if not left_out.match(str(key)) and (flag(name) in known() or form.get("passes_all")):
                arguments[name] = True if value == "" else None if value is False and key in renamed else value
        named, words = _from_kserve(split(part.get("args")), {}, frozenset())  # its own --model= comes first
        line = [*command_line({"model": named or model, **arguments}, version), *words]
        box = Container(form["kind_of"], shared_memory=None, is_whole=False, is_pod=form["kind_of"] == "pod")
        if isinstance(pod := part.get("pod"), dict):
            box = read_pod({}, pod, (), is_whole=False)
            box = box if part.get("pods") in (None, 1) else box._replace(gpus=None)
        profile = re.fullmatch(r"(?:(?=.*gpu)(?:nvidia-gpu-)?(.*):)?(\d{1,4})", str(part.get("gpus") or ""))
        if profile:
            box = box._replace(gpus=int(profile[2]), product=profile[1] or "", gpus_by=form["by"])
        yield Writing(form["name"], serve(line, environment, part.get("image")), box, place=place)


def _with_config(words: list[str], node: Mapping[str, Any], spec: Mapping[str, Any], reader: _Reader) -> list[str]:
    """Write the keys of a --config file, which is in a ConfigMap of the pod, as flags."""
    line = " ".join(words)
    if not (named := _CONFIG.search(line)) or not reader.maps:
        return words
    folder, _, file = named[1].rpartition("/")
    mounted = (mount for mount in items(node, "volumeMounts") if mount.get("mountPath") in (folder, named[1]))
    mounts = {mount.get("name") for mount in mounted}
    volumes = [inner(one, "configMap") for one in items(spec, "volumes") if one.get("name") in mounts]
    named_maps = [reader.maps.get(str(one.get("name")), {}) for one in volumes]
    if not items(spec, "volumes") and not items(node, "volumeMounts"):  # a chart mounts it
        named_maps = [texts for texts in reader.maps.values() if file in texts]
    texts = {str(text) for one in named_maps for key, text in one.items() if key == file}
    with suppress(BadUsage):
        keys = next(iter(parse_yaml(texts.pop(), file)), None) if len(texts) == 1 else None
        is_named = not re.search(r"\bserve\s+--config", line)  # the line has a model, or its options come first
        if (
            not isinstance(keys, dict)
            or ("model" in keys and is_named)
            or not all(understood(flag(str(key))) for key in keys)
        ):
            return words
        rest = {key: value for key, value in keys.items() if flag(str(key)) not in line}  # the command line counts more
        flags = f" {shlex.join(command_line(rest, reader.version))}"
        is_script = any(_CONFIG.search(word) and " " in word for word in words)
        filled = words if is_script else [shlex.join(words)]
        filled = [_CONFIG.sub(lambda _: flags, word) for word in filled]
        return filled if is_script else split(filled[0])
    return words


def _starts(program: str, words: Sequence[str]) -> bool:
    """Return True for a command that starts vLLM, and for arguments of its entry point."""
    return bool(_SERVES.search(" ".join([program, *words]))) or (not program and _is_vllms(words, "--model"))


def _is_vllms(words: Sequence[str], needed: str) -> bool:
    """Return True for arguments that no other program takes: all are flags of vLLM, and `needed` begins one."""
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    is_whole = all(name.replace("_", "-") in known() for name in names)
    return (
        is_whole and any(name.count("-") > _LONG for name in names) and any(name.startswith(needed) for name in names)
    )


def _embedded(document: Mapping[str, Any], kind: str) -> list[Any]:
    """Return the documents that a document has within it, as a form that is read by itself."""
    if kind in _RELEASES:
        spec, helm = inner(document, "spec"), inner(document, "spec", "source", "helm")
        values = spec.get("values") or helm.get("valuesObject") or helm.get("values")
        with suppress(BadUsage):
            values = next(iter(parse_yaml(values, "values")), None) if isinstance(values, str) else values
            return [values] if "servingEngineSpec" in str(values)[:_MOST_BYTES] and isinstance(values, dict) else []
        return []
    if kind in ("Kustomization", "Component"):
        patches = list[Any]()  # a single operation is no manifest
        texts = [one.get("patch") for one in items(document, "patches")]
        for text in (*texts, *listed(document.get("patchesStrategicMerge"))):
            with suppress(BadUsage):
                able = parse_yaml(text, "patch") if isinstance(text, str) and "\n" in text else []
                patches += [one for one in able if inner(one).get("kind")]
        return patches
    if stacks := [child for child in document.values() if "servingEngineSpec" in inner(child)]:
        return stacks  # a chart depends on the production stack
    if "services" in document and "deployment" in document:  # Akash
        sizes, services = inner(document, "profiles", "compute"), dict[str, Any]()
        for name, service in inner(document, "services").items():
            placed = [*inner(document, "deployment", name).values(), None][0]
            gpu = inner(sizes, str(inner(placed).get("profile")), "resources", "gpu")
            services[name] = _task(inner(service), gpu)
        return [{"services": services}]
    if "containerDefinitions" in document:
        tasks = items(document, "containerDefinitions")
        return [{"services": {str(task.get("name")): _task(task) for task in tasks}}]
    served = inner(document, "inferenceService")
    if not kind and _is_vllms(split(served.get("args")), "--"):
        stored = inner(served, "storage").get("storageUri") or inner(served, "model").get("storageUri")
        model = {"runtime": "vllm", "storageUri": stored, **served}
        return [{"kind": "InferenceService", "spec": {"predictor": {"model": model}}}]
    parts = () if kind or "services" in document else document.values()
    if any(_COMPOSE & inner(child).keys() and "image" in child and "vllm" in str(child) for child in parts):
        return [{"services": document}]  # a part of Compose that another file includes
    return []


def ray_arguments(loaded: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an LLMConfig of Ray, whose model is `model_source` or `model_id`."""
    served, source = loaded.get("model_id"), loaded.get("model_source")
    source = source.get("bucket_uri") if isinstance(source, dict) else source
    return {"model": source or served, "served_model_name": served if source else None, **arguments}


def _fetched(address: Any, folder: str) -> str:
    """Return the model of an address: its id for hf://, else the folder into which it is put."""
    scheme, _, path = str(address or "").partition("://")
    if scheme == "hf":
        return path
    if scheme == "pvc+hf":
        return "/".join(path.split("/")[-2:])
    if scheme == "pvc" and folder != _MOUNTED:
        return f"{folder}/{path.partition('/')[2]}"
    return folder if path else scheme or "$MODEL"


def _without_limits(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container of several pods that share a server: its limits are a part of what the server has."""
    return {key: value for key, value in container.items() if key != "resources"}


def _parallel(sizes: Mapping[str, Any], least: int = 1) -> dict[str, Any]:
    """Return the arguments of a parallelism in KServe's or llm-d's keys; sizes below `least` are not passed on."""
    names = {
        "tensor": "tensor_parallel_size",
        "pipeline": "pipeline_parallel_size",
        "data": "data_parallel_size",
        "dataLocal": "data_parallel_size_local",
    }
    arguments = {flag: sizes.get(key) for key, flag in names.items()}
    numbers: dict[str, Any] = {
        flag: size for flag, size in arguments.items() if isinstance(size, int) and size >= least
    }
    return numbers | ({"enable_expert_parallel": True} if sizes.get("expert") is True else {})


def _variables(node: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return the options of `docker run` that set a container's variables, and the variables that are written out."""
    entries = node.get("env", node.get("environment"))
    if isinstance(entries, dict):
        entries = [{"name": name, **({} if value is None else {"value": value})} for name, value in entries.items()]
    options, environment = list[str](), dict[str, str]()
    for entry in entries if isinstance(entries, list) else ():
        name = entry.get("name", entry.get("key")) if isinstance(entry, dict) else entry
        pair = f"{name}={entry['value']}" if isinstance(entry, dict) and "value" in entry else name
        if isinstance(pair, str):  # without a value: of a secret, or of the host
            options += ["-e", pair]
            key, is_set, value = pair.partition("=")
            if is_set:
                environment[key] = value
    files = node.get("env_file")
    unseen = [str(file) for file in (files if isinstance(files, list) else [files] if files else [])]
    unseen += [str(inner(entry, kind).get("name")) for entry in items(node, "envFrom") for kind in entry]
    return [*options, *(word for name in unseen for word in ("--env-file", name))], environment


def _referenced(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Write the variables of a container, $(NAME), as a shell's."""
    return [
        _REFERENCE.sub(lambda name: f"${{{name[1]}}}" if name[1] in environment else name[0], word) for word in words
    ]


def _from_kserve(
    words: Sequence[str], renamed: Mapping[str, str] = _KSERVE, own: frozenset[str] = _OF_KSERVE
) -> tuple[str, list[str]]:
    """Return the model that arguments of KServe's server name, and the arguments that vLLM gets.

    `renamed` are the flags that the server calls otherwise, `own` those that vLLM does not get.
    """
    model, kept, at = "", list[str](), 0
    while at < len(words):
        name, joined, value = words[at].partition("=")
        dashed = name.replace("_", "-")
        has_word = not joined and at + 1 < len(words) and not words[at + 1].startswith("-")
        named = renamed.get(dashed, dashed)
        if named == "--model" and (joined or has_word):
            model, at = (value, at + 1) if joined else (words[at + 1], at + 2)
        elif dashed in own:
            at += 1 + has_word
        else:
            kept.append(f"{named}{joined}{value}" if dashed in renamed else words[at])
            at += 1
    return model, kept


def parse(text: str | bytes, name: str) -> list[Any]:
    """Load the documents of a text; BadUsage if it is a Helm template, or no YAML.

    A document that cannot be read is left out if others can; a template's expression becomes a variable.
    """
    whole = text if isinstance(text, str) else text.decode("utf-8", "replace")
    try:
        documents = parse_yaml(text, name)
        is_template = re.search(r"\{[{%]", _CHAT_TEMPLATE.sub("", whole))
        with suppress(BadUsage):
            documents = parse_yaml(filled_templates(whole), name) if is_template else documents
        return documents
    except BadUsage as failure:
        error = failure
    if why := template(whole):
        error = BadUsage(f"{name}: {why}")
    documents = []
    for part in _DOCUMENT.split(whole)[:_MOST_DOCUMENTS]:
        with suppress(BadUsage):
            documents += parse_yaml(filled_templates(part), name)
    if not any(isinstance(document, dict | list) for document in documents):
        raise error
    return documents


def templated(launches: Iterable[Writing], text: str) -> tuple[Writing, ...]:
    """Mark launches of a template: its values may add keys to the container."""
    if not _ADDING.search(_SCALAR.sub("", _CHAT_TEMPLATE.sub("", text))):
        return tuple(launches)
    boxes = (
        (one, one.container and one.container._replace(is_whole=False, shared_memory=None, is_served=is_served))
        for one in launches
        for is_served in [bool(one.container and one.container.is_served) and not _READY.search(text)]
    )
    return tuple(one._replace(container=box) for one, box in boxes)


def is_hidden(documents: Sequence[Any]) -> bool:
    """Return True if documents have containers, or a container's image, that only the values of a template name."""
    nodes: list[Any] = [*documents]
    while nodes:
        node = nodes.pop()
        able = inner(node).get("containers", [])
        if any("$" in str(inner(one).get("image", "$")) for one in (able if isinstance(able, list) else [able])):
            return True
        nodes += [*node.values()] if isinstance(node, dict) else listed(node)
    return False


def template(text: str) -> str:
    """Return the reason why a Helm template cannot be read, "" for a text without placeholders of Helm."""
    return "this is a Helm template: render it first with `helm template`" if _HELM.search(text) else ""
