"""The cluster that --k8s names, its credentials, and requests to its API server (the only importer of kubernetes).

The Kubernetes client's own loader reads kubeconfigs: several merged ones, tokens, certificates, credential plugins, and
the service account of a pod. Requests go through diag's client, which bounds them; a refusal names the missing right.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as StillRunning
from contextlib import contextmanager
from functools import partial
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from diag.core.errors import BadUsage, DiagError, Unreachable
from diag.core.files import exists, expanded, parse_json
from diag.core.formatting import listed, printable
from diag.http.address import Address, Credentials, parse
from diag.http.client import Client, Request, Response, run_in_thread
from diag.http.failure import Failure, Hints, WrongAnswer, sentence
from diag.sources.kubernetes.pod_object import EVENT, POD, conforming, part
from diag.vllm.command.free_text import hidden

FORM = "[CONTEXT/]NAMESPACE[/SELECTOR]"
MISSING = "--k8s needs the Kubernetes client: pip install 'diag[k8s]'"
PLUGIN_SECONDS = 60.0
"""Time limit for a credential plugin of a kubeconfig: some open a browser."""
ROLE = "docs/kubernetes.md has the Role"
HINTS = Hints("is this the address of a Kubernetes API server?", too_long="is the API server overloaded?")
PODS_AT_A_TIME, MOST_PODS = 250, 2_000
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SELECTS = re.compile(r"[=!]|\s(?:in|notin)\s*\(")
_POD_PROXY = re.compile(r"[^?#]*?/api/v1/namespaces/[^/?#]+/pods/[^/?#]+/proxy")
_UNREACHED = b"error trying to reach service"
"""The API server's message if it has no connection to a pod."""
_STATUS = re.compile(rb'"kind": ?"Status"')
"""Part of every error of the API server itself."""
_LOST = (429, *range(500, 505))


class Place(NamedTuple):
    """A namespace of the cluster of a context ("": the current one), and a label selector ("": every pod)."""

    context: str
    namespace: str
    selector: str


def place(text: str, contexts: Sequence[str]) -> Place:
    """Parse [CONTEXT/]NAMESPACE[/SELECTOR]; names of contexts and labels may contain slashes."""
    longest_first = sorted((context for context in contexts if text.startswith(f"{context}/")), key=len, reverse=True)
    readings = [(context, text.removeprefix(f"{context}/")) for context in longest_first]
    for context, rest in (*readings, ("", text)):
        namespace, slash, selector = rest.partition("/")
        if _NAMESPACE.fullmatch(namespace) and (_SELECTS.search(selector) or not slash):
            return Place(context, namespace, selector)
    first, slash, rest = text.partition("/")
    if slash and _NAMESPACE.fullmatch(rest.partition("/")[0]) and first not in contexts:
        names = listed([printable(context, 60) for context in contexts], most=5) or "none"
        raise BadUsage(
            f"the kubeconfig has no context {printable(first, 60)} (it has: {names}); a selector has an operator, as in"
            " app=vllm"
        )
    raise BadUsage(f"--k8s takes {FORM}, for example inference/app=vllm; {printable(text, 80)} is not of that form")


def cluster_of(text: str) -> tuple[Place, Address, Credentials]:
    """Return the place that the text names, and its API server; BadUsage if the kubeconfig cannot be used."""
    try:
        from kubernetes.client import Configuration
        from kubernetes.config import incluster_config, kube_config
    except ImportError as error:
        raise BadUsage(MISSING) from error
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    if any(exists(expanded(file)) for file in files.split(os.pathsep) if file):
        with _loader_errors(files):
            merged = kube_config.KubeConfigMerger(files).config
            contexts = [str(context.value["name"]) for context in merged.value["contexts"]] if merged else []
        meant = place(text, contexts)

        def load(into: Any) -> None:
            context = meant.context or None
            kube_config.load_kube_config(files, context, client_configuration=into, persist_config=False)

    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        meant, load = place(text, []), incluster_config.load_incluster_config
    else:
        raise BadUsage(f"there is no kubeconfig at {printable(files)}: set KUBECONFIG")
    with _loader_errors(files):
        configuration = Configuration()
        by_environment = configuration.proxy
        try:
            run_in_thread(partial(load, configuration)).result(PLUGIN_SECONDS)
        except StillRunning as error:
            raise Unreachable(f"the kubeconfig's credential plugin did not end within {PLUGIN_SECONDS:g} s") from error
        if configuration.proxy != by_environment:
            raise BadUsage("proxy-url of a kubeconfig is not supported: set https_proxy to it")
        token = configuration.auth_settings().get("BearerToken", {}).get("value")
        credentials = Credentials(
            headers={"Authorization": token.strip()} if token else {},
            ca_file=configuration.ssl_ca_cert or "",
            client_cert=configuration.cert_file or "",
            client_key=configuration.key_file or "",
            unverified=not configuration.verify_ssl,
            server_name=configuration.tls_server_name or "",
        )
        return meant, parse(configuration.host), credentials


@contextmanager
def _loader_errors(files: str) -> Iterator[None]:
    """Raise BadUsage for any error of the loader, which logs some errors and raises any exception for the others."""

    def unusable(why: str) -> BadUsage:
        """Report the first line, redacted: a plugin may print secrets, and the loader a whole entry of the file."""
        first = hidden(re.split(r"\{| in ", why.strip().split("\n")[0])[0].rstrip(" /")) or "it is not a kubeconfig"
        return BadUsage(f"the kubeconfig {printable(files)} cannot be used: {printable(first)}")

    logged: SimpleQueue[logging.LogRecord] = SimpleQueue()
    heard = QueueHandler(logged)
    heard.setLevel(logging.ERROR)
    root, propagated = logging.getLogger(), logging.getLogger().handlers[:]
    root.handlers[:] = [heard]
    try:
        yield
    except DiagError:
        raise
    except Exception as error:
        raise unusable(f"{error}") from error
    finally:
        root.handlers[:] = propagated
    if not logged.empty():
        raise unusable(logged.get().getMessage())


class ProxyClient(Client):
    """Sends requests to pods through the API server's proxy, and reports which of the two has failed.

    If the API server fails while pods are scraped, the servers behind it must not count as dead. The token of the
    kubeconfig opens every resource of the API server, so a pod's redirect is followed only to the same pod.
    """

    def __init__(self, address: Address, credentials: Credentials, wait: float) -> None:
        super().__init__(address, credentials, wait, HINTS, keep=True)
        self.shown = f"the Kubernetes API server {address.shown}"

    def send(self, request: Request) -> Response:
        """Send a request; Failure if the pod does not respond, Unreachable if the API server has failed."""
        try:
            response = super().send(request)
        except Failure:
            try:
                # any answer shows that the API server works
                super().send(Request(f"{self._address.path.rstrip('/')}/version"))
            except Failure as error:
                error.hint = "check the certificates of the kubeconfig" if "DIAG_C" in error.hint else error.hint
                raise Unreachable(sentence(self.shown, error)) from error
            raise
        if response.status not in _LOST:
            return response
        if _UNREACHED in response.body:
            why = _message(response.body).partition("error trying to reach service: ")[2].strip(" '")
            raise Failure(_short_reason(why), "does vLLM listen on this port?", reached=False)
        if _STATUS.search(response.body):
            raise Unreachable(f"{self.shown} answers HTTP {response.status}: {_short_reason(_message(response.body))}")
        return response

    def prefix(self, path: str) -> str:
        """Return the proxy of the pod that a request is for; for a request to the API server itself, its path."""
        pod = _POD_PROXY.match(path)
        return pod[0] if pod else path.partition("?")[0]

    def refusal(self, status: int) -> Failure:
        """Return the failure for a pod's response with an error status."""
        if status == 403:
            return WrongAnswer("is not proxied to (HTTP 403)", f"grant get on pods/proxy: {ROLE}")
        if status == 401:
            return WrongAnswer("cannot be asked: the API server rejects the credentials (HTTP 401)", "log in again")
        return super().refusal(status)


class Api:
    """One API server; every request is a GET and names the verb and resource that the account needs."""

    def __init__(self, address: Address, credentials: Credentials, timeout: float) -> None:
        self.address = address
        self.odd = set[str]()
        """The fields of objects that have other types than Kubernetes gives them, and count as missing."""
        self.client = ProxyClient(address, credentials, timeout)

    def pods(self, namespace: str, selector: str) -> list[Mapping[str, Any]]:
        """List the pods of a namespace that a selector matches; Unreachable if they cannot be listed."""
        pods: list[Mapping[str, Any]] = []
        query = {"limit": str(PODS_AT_A_TIME), "labelSelector": selector}
        try:
            while True:
                page = self._json(f"{namespaced(namespace)}/pods", "list pods", namespace, query, _PODS)
                pods += page.get("items", [])
                more = part(page, "metadata").get("continue")
                if not more or not page.get("items") or len(pods) >= MOST_PODS:
                    return pods[:MOST_PODS]
                query["continue"] = more
        except Failure as error:
            why = str(error) if isinstance(error, Denied) else sentence(self.client.shown, error)
            raise Unreachable(why) from error

    def pod(self, namespace: str, name: str) -> Mapping[str, Any]:
        """Read the current state of a pod; Failure if it is gone or cannot be read."""
        return self._json(f"{namespaced(namespace)}/pods/{quote(name)}", "get pods", namespace, {}, POD)

    def events(self, namespace: str, pod: str) -> list[Mapping[str, Any]]:
        """List the recent events of a pod; Failure if the account may not read them."""
        query = {"fieldSelector": f"involvedObject.name={pod}"}
        page = self._json(f"{namespaced(namespace)}/events", "list events", namespace, query, _EVENTS)
        return list(page.get("items", ()))

    def log(self, namespace: str, pod: str, query: Mapping[str, str]) -> bytes:
        """Read a part of a container's log, each line after its time; Failure if it cannot be read."""
        path = f"{namespaced(namespace)}/pods/{quote(pod)}/log"
        return self._get(path, "get pods/log", namespace, {"timestamps": "true", **query})

    def _json(
        self, path: str, needs: str, namespace: str, query: Mapping[str, str], shape: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        body = self._get(path, needs, namespace, query)
        try:
            document = parse_json(body)
        except ValueError as error:
            raise WrongAnswer("answered something other than JSON", HINTS.address) from error
        return conforming(document, shape, self.odd) or {}

    def _get(self, path: str, needs: str, namespace: str, query: Mapping[str, str]) -> bytes:
        form = urlencode({name: value for name, value in query.items() if value})
        response = self.client.get(self.address.path.rstrip("/") + path + (f"?{form}" if form else ""))
        if response.status == 200:
            return response.body
        verb, resource = needs.split()
        if response.status == 403:
            raise Denied(
                f"this account may not {verb} {resource} in namespace {namespace} (HTTP 403): grant the verb {verb} on"
                f" {resource}; {ROLE}"
            )
        if response.status == 401:
            raise WrongAnswer("rejects the credentials of the kubeconfig (HTTP 401)", "log in again")
        message = _short_reason(_message(response.body))
        raise WrongAnswer(f"answered HTTP {response.status}" + (f" ({message})" if message else ""), HINTS.address)


_PODS = {"items": [POD], "metadata": {"continue": str}}
_EVENTS = {"items": [EVENT]}


class Denied(WrongAnswer):
    """The account lacks a right; the message is a complete sentence."""


def namespaced(namespace: str) -> str:
    """Return the path of a namespace's resources."""
    return f"/api/v1/namespaces/{quote(namespace)}"


def _message(body: bytes) -> str:
    """Return the message of an API server's Status, or the body's text if it is not JSON."""
    text = body[:4096].decode("utf-8", "replace")
    try:
        document = parse_json(text)
    except ValueError:
        return text
    return str(document.get("message", "")) if isinstance(document, dict) else ""


def _short_reason(why: str) -> str:
    """Return the end of a Go error: "connection refused" of "dial tcp 10.0.0.1:8000: connect: connection refused"."""
    return printable(why.strip().rpartition("connect: ")[2], 100)
