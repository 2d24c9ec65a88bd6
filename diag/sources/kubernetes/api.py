"""Requests to a Kubernetes API server: what they need of RBAC, and what a refusal means."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from diag.core.errors import Unreachable
from diag.core.formatting import printable
from diag.http.client import Client, Manner, Request, Response
from diag.http.failure import Failure, Hints, WrongAnswer, sentence
from diag.sources.kubernetes.cluster import Cluster
from diag.sources.kubernetes.discovery import part

ROLE = "docs/kubernetes.md has the Role"
HINTS = Hints("is this the address of a Kubernetes API server?", too_long="is the API server overloaded?")
PODS_AT_A_TIME, MOST_PODS = 250, 2_000
_UNREACHED = b"error trying to reach service"
"""With which the API server says that it has no connection to a pod."""
_STATUS = re.compile(rb'"kind": ?"Status"')
"""What stands in an error of the API server itself."""
_LOST = (429, *range(500, 505))


class ProxyClient(Client):
    """Requests to pods through the API server's proxy: says which of the two has failed.

    An API server that fails in the middle of a watch must not look like servers that have died.
    """

    def __init__(self, cluster: Cluster, manner: Manner) -> None:
        super().__init__(cluster.address, cluster.credentials, manner)
        self._shown = f"the Kubernetes API server {cluster.address.shown}"

    def send(self, request: Request) -> Response:
        """Send a request; Failure where the pod gave no response, Unreachable where the API server has failed."""
        try:
            response = super().send(request)
        except Failure:
            self._try_api_server()
            raise
        if response.status not in _LOST:
            return response
        if _UNREACHED in response.body:
            why = _message(response.body).partition("error trying to reach service: ")[2].strip(" '")
            raise Failure(_shortly(why), "does vLLM listen on this port?", reached=False)
        if _STATUS.search(response.body):
            raise Unreachable(f"{self._shown} answers HTTP {response.status}: {_shortly(_message(response.body))}")
        return response

    def _try_api_server(self) -> None:
        """Unreachable where it does not answer; which answer it is does not matter."""
        try:
            super().send(Request("/version"))
        except Failure as error:
            error.hint = "check the certificates of the kubeconfig" if "DIAG_C" in error.hint else error.hint
            raise Unreachable(sentence(self._shown, error)) from error

    def refusal(self, status: int) -> Failure:
        """What a response with an error status means."""
        if status == 403:
            return WrongAnswer("is not proxied to (HTTP 403)", f"grant get on pods/proxy: {ROLE}")
        if status == 401:
            return WrongAnswer("cannot be asked: the API server rejects the credentials (HTTP 401)", "log in again")
        return super().refusal(status)


class Api:
    """One API server; every request is a GET, and names the resource and verb that it needs."""

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self.cluster = cluster
        self.client = ProxyClient(cluster, Manner(timeout, HINTS, keep=True))

    def pods(self, namespace: str, selector: str) -> list[Mapping[str, Any]]:
        """The pods of a namespace with these labels; Unreachable where they cannot be listed."""
        try:
            return list(self._pods(namespace, selector))
        except Failure as error:
            shown = f"the Kubernetes API server {self.cluster.address.shown}"
            raise Unreachable(str(error) if isinstance(error, Denied) else sentence(shown, error)) from error

    def _pods(self, namespace: str, selector: str) -> Iterator[Mapping[str, Any]]:
        query, count = {"limit": str(PODS_AT_A_TIME), "labelSelector": selector}, 0
        while True:
            page = self._json(f"{namespaced(namespace)}/pods", "list pods", namespace, query)
            items = page.get("items") or []
            yield from items
            count, more = count + len(items), part(page, "metadata").get("continue")
            if not more or count >= MOST_PODS:
                return
            query["continue"] = more

    def pod(self, namespace: str, name: str) -> Mapping[str, Any]:
        """One pod as it is now; Failure where it is gone or cannot be read."""
        return self._json(f"{namespaced(namespace)}/pods/{quote(name)}", "get pods", namespace, {})

    def events(self, namespace: str, pod: str) -> list[Mapping[str, Any]]:
        """What the kubelet and others reported of a pod lately; none where that may not be read."""
        try:
            query = {"fieldSelector": f"involvedObject.name={pod}"}
            return self._json(f"{namespaced(namespace)}/events", "list events", namespace, query).get("items") or []
        except Failure:
            return []

    def log(self, namespace: str, pod: str, query: Mapping[str, str]) -> bytes:
        """A part of a container's log, each line with its time before it; Failure where it cannot be read."""
        path = f"{namespaced(namespace)}/pods/{quote(pod)}/log"
        return self._get(path, "get pods/log", namespace, {"timestamps": "true", **query})

    def _json(self, path: str, needs: str, namespace: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        body = self._get(path, needs, namespace, query)
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WrongAnswer("answered something other than JSON", HINTS.address) from error
        return found if isinstance(found, dict) else {}

    def _get(self, path: str, needs: str, namespace: str, query: Mapping[str, str]) -> bytes:
        given = urlencode({name: value for name, value in query.items() if value})
        response = self.client.get(self.cluster.address.path.rstrip("/") + path + (f"?{given}" if given else ""))
        if response.status == 200:
            return response.body
        raise self._refused(response, needs, namespace)

    def _refused(self, response: Response, needs: str, namespace: str) -> Failure:
        verb, resource = needs.split()
        if response.status == 403:
            return Denied(
                f"this account may not {verb} {resource} in namespace {namespace} (HTTP 403): grant the verb {verb} on"
                f" {resource}; {ROLE}"
            )
        if response.status == 401:
            return WrongAnswer("rejects the credentials of the kubeconfig (HTTP 401)", "log in again")
        message = _shortly(_message(response.body))
        return WrongAnswer(f"answered HTTP {response.status}" + (f" ({message})" if message else ""), HINTS.address)


class Denied(WrongAnswer):
    """The account lacks a right; the message is a whole sentence."""


def namespaced(namespace: str) -> str:
    """Where what is in a namespace is found."""
    return f"/api/v1/namespaces/{quote(namespace)}"


def _message(body: bytes) -> str:
    """What a Status of the API server says, or the text itself."""
    text = body[:4096].decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return str(found.get("message", "")) if isinstance(found, dict) else ""


def _shortly(why: str) -> str:
    """The end of a Go error: "connection refused" for "dial tcp 10.0.0.1:8000: connect: connection refused"."""
    return printable(why.strip().rpartition("connect: ")[2], 100)
