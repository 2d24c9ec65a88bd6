"""Which cluster and namespace are meant, and how to reach its API server (the only importer of kubernetes).

The client's own loader reads kubeconfigs: several of them merged, tokens, certificates, credential plugins, and the
service account of a pod. Requests go through diag's client, which bounds them.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as StillRunning
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage, DiagError, Unreachable
from diag.core.formatting import listed, printable
from diag.http.address import Address, parse
from diag.http.credentials import Credentials
from diag.http.deadline import run_in_thread
from diag.vllm.command.secrets import hidden

FORM = "[CONTEXT/]NAMESPACE[/SELECTOR]"
MISSING = "--k8s needs the Kubernetes client: pip install 'diag[k8s]'"
PLUGIN_SECONDS = 60.0
"""How long a credential plugin of a kubeconfig may take: some open a browser."""
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SELECTS = re.compile(r"[=!]|\s(?:in|notin)\s*\(")


class Place(NamedTuple):
    """A namespace of the cluster of a context ("": the current one), and a label selector ("": every pod)."""

    context: str
    namespace: str
    selector: str


class Cluster(NamedTuple):
    """An API server and the credentials for it."""

    address: Address
    credentials: Credentials


def place(text: str, contexts: Sequence[str]) -> Place:
    """Read [CONTEXT/]NAMESPACE[/SELECTOR]; names of contexts and labels may have slashes themselves."""
    found = [_rest(context, text[len(context) + 1 :]) for context in contexts if text.startswith(f"{context}/")]
    readings = [reading for reading in (*found, _rest("", text)) if reading]
    if readings:
        return max(readings, key=lambda reading: len(reading.context))
    first, slash, rest = text.partition("/")
    if slash and _NAMESPACE.fullmatch(rest.partition("/")[0]) and first not in contexts:
        known = listed([printable(context, 60) for context in contexts], most=5) or "none"
        raise BadUsage(
            f"the kubeconfig has no context {printable(first, 60)} (it has: {known}); a selector has an operator, as in"
            " app=vllm"
        )
    raise BadUsage(f"--k8s takes {FORM}, for example inference/app=vllm; {printable(text, 80)} is not of that form")


def _rest(context: str, text: str) -> Place | None:
    """The reading with that context; None where what follows cannot be a namespace and a selector."""
    namespace, slash, selector = text.partition("/")
    is_selector = bool(_SELECTS.search(selector)) or not slash
    return Place(context, namespace, selector) if _NAMESPACE.fullmatch(namespace) and is_selector else None


def cluster_of(text: str) -> tuple[Place, Cluster]:
    """The place that is meant, and its cluster; BadUsage where the kubeconfig cannot be used."""
    try:
        from kubernetes.config import incluster_config, kube_config
    except ImportError as error:
        raise BadUsage(MISSING) from error
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    if any(Path(file).expanduser().is_file() for file in files.split(os.pathsep) if file):
        with _in_words(files):
            contexts = _contexts(kube_config.KubeConfigMerger(files).config)
        meant = place(text, contexts)

        def load(into: Any) -> None:
            context = meant.context or None
            kube_config.load_kube_config(files, context, client_configuration=into, persist_config=False)

    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        meant, load = place(text, []), incluster_config.load_incluster_config
    else:
        raise BadUsage(f"there is no kubeconfig at {printable(files)}: set KUBECONFIG")
    with _in_words(files):
        return meant, _loaded(load)


def _contexts(merged: Any) -> list[str]:
    """The names of the contexts of a kubeconfig, or of several merged."""
    return [str(context.value["name"]) for context in merged.value["contexts"]] if merged else []


def _loaded(load: Callable[[Any], None]) -> Cluster:
    """What the loader fills in; a credential plugin is given up after a minute."""
    from kubernetes.client import Configuration

    configuration = Configuration()
    by_environment = configuration.proxy
    try:
        run_in_thread(partial(load, configuration)).result(PLUGIN_SECONDS)
    except StillRunning as error:
        raise Unreachable(f"the kubeconfig's credential plugin did not end within {PLUGIN_SECONDS:g} s") from error
    if configuration.proxy != by_environment:
        raise BadUsage("proxy-url of a kubeconfig is not supported: set https_proxy to it")
    token = configuration.auth_settings().get("BearerToken", {}).get("value")
    return Cluster(
        parse(configuration.host),
        Credentials(
            headers={"Authorization": token.strip()} if token else {},
            ca_file=configuration.ssl_ca_cert or "",
            client_cert=configuration.cert_file or "",
            client_key=configuration.key_file or "",
            unverified=not configuration.verify_ssl,
            server_name=configuration.tls_server_name or "",
        ),
    )


@contextmanager
def _in_words(files: str) -> Iterator[None]:
    """What is wrong with a kubeconfig as one sentence: the loader logs some of it, and raises anything for the rest."""
    heard = _Heard()
    root, propagated = logging.getLogger(), logging.getLogger().handlers[:]
    root.handlers[:] = [heard]
    try:
        yield
    except DiagError:
        raise
    except Exception as error:
        raise BadUsage(_unusable(files, f"{error}")) from error
    finally:
        root.handlers[:] = propagated
    if heard.errors:
        raise BadUsage(_unusable(files, heard.errors[0]))


def _unusable(files: str, why: str) -> str:
    """Without what a plugin printed of its own beyond its first line, and without secrets."""
    first = hidden(why.strip().split("\n")[0]) or "it is not a kubeconfig"
    return f"the kubeconfig {printable(files)} cannot be used: {printable(first)}"


class _Heard(logging.Handler):
    """Keeps what the loader logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.errors.append(record.getMessage())
