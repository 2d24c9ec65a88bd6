"""etcd, kube-apiserver and a played kubelet, until standard input ends: `stage.py FOLDER BINARIES`.

FOLDER/stage.json says what there is: `addresses` of pods, `pages` (address, port and recording of each server),
`objects` (method, path and body of each request by the administrator), `tokens` by user. The kubelet's logs are files
FOLDER/logs/NAMESPACE_POD_CONTAINER[_previous]; each line begins with its time.
"""

import json
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NODE = "192.0.2.1"
"""An address for documentation, which nothing routes."""
API_PORT, KUBELET_PORT, ETCD_PORT = 6443, 10250, 2379
SERVICE_ACCOUNTS = ("--service-account-issuer=https://diag.test", "--service-account-signing-key-file=sa.key")
AUDIT = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]}


class Kubelet(BaseHTTPRequestHandler):
    """Answers for the containers' logs as the kubelet does."""

    logs = Path()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        _, kind, *of = url.path.split("/")
        file = self.logs / ("_".join(of) + ("_previous" if asked.get("previous") == "true" else ""))
        found = kind == "containerLogs" and file.is_file()
        body = _chosen(file.read_text(), asked).encode() if found else b"previous terminated container not found"
        self.send_response(200 if found else 400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _chosen(text: str, asked: dict[str, str]) -> str:
    lines = [line for line in text.splitlines(keepends=True) if line[:19] >= asked.get("sinceTime", "")[:19]]
    lines = lines[-int(asked["tailLines"]) :] if "tailLines" in asked else lines
    lines = lines if asked.get("timestamps") == "true" else [line.partition(" ")[2] for line in lines]
    return "".join(lines)[: int(asked.get("limitBytes", 2**40))]


def main(folder: Path) -> None:
    stage = json.loads((folder / "stage.json").read_text())
    for address in (NODE, *stage["addresses"]):
        _run("ip", "address", "add", f"{address}/32", "dev", "lo")
    _run("ip", "link", "set", "lo", "up")
    _files(folder, stage["tokens"])
    with ExitStack() as until_the_end:
        for command in (_etcd(), _apiserver(), *map(_replay, stage["pages"])):
            with (folder / f"{Path(command[0]).name}.log").open("a") as log:
                process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
            until_the_end.callback(process.wait)
            until_the_end.callback(process.kill)
        _kubelet(folder)
        _until_ready(folder, stage["tokens"]["admin"])
        for method, path, body in stage["objects"]:
            _ask(folder, stage["tokens"]["admin"], method, path, body)
        print("ready", flush=True)
        sys.stdin.read()


def _files(folder: Path, tokens: dict[str, str]) -> None:
    """Keys and certificates, who has which token, and what is audited."""
    subject = ("-subj", f"/CN={NODE}", "-addext", f"subjectAltName=IP:{NODE}")
    pair = ("-newkey", "rsa:2048", "-nodes", "-keyout", "tls.key", "-out", "tls.crt")
    _run("openssl", "req", "-x509", *pair, *subject, cwd=folder)
    _run("openssl", "genrsa", "-out", "sa.key", "2048", cwd=folder)
    groups = {"admin": '"system:masters"'}
    lines = [f"{token},{user},{user},{groups.get(user, '')}".rstrip(",") for user, token in tokens.items()]
    (folder / "tokens.csv").write_text("\n".join(lines) + "\n")
    (folder / "audit.json").write_text(json.dumps(AUDIT))


def _etcd() -> list[str]:
    url, peers = f"http://127.0.0.1:{ETCD_PORT}", "http://127.0.0.1:2380"
    addresses = (f"--listen-client-urls={url}", f"--advertise-client-urls={url}", f"--listen-peer-urls={peers}")
    return [f"{sys.argv[2]}/etcd", "--data-dir=etcd", "--unsafe-no-fsync", *addresses]


def _apiserver() -> list[str]:
    return [
        f"{sys.argv[2]}/kube-apiserver",
        *(f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}", f"--bind-address={NODE}", f"--secure-port={API_PORT}"),
        *("--tls-cert-file=tls.crt", "--tls-private-key-file=tls.key", "--token-auth-file=tokens.csv"),
        *("--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount"),
        *("--service-account-key-file=sa.key", *SERVICE_ACCOUNTS, "--service-cluster-ip-range=198.51.100.0/24"),
        *("--kubelet-preferred-address-types=InternalIP", f"--advertise-address={NODE}"),
        *("--audit-policy-file=audit.json", "--audit-log-path=audit.log"),
    ]


def _replay(page: tuple[str, int, str]) -> list[str]:
    address, port, recording = page
    return [sys.executable, "-m", "diag", "replay", recording, "--listen", f"{address}:{port}", "--speed", "4"]


def _kubelet(folder: Path) -> None:
    Kubelet.logs = folder / "logs"
    server = ThreadingHTTPServer((NODE, KUBELET_PORT), Kubelet)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _until_ready(folder: Path, token: str) -> None:
    for _ in range(600):
        try:
            _ask(folder, token, "GET", "/readyz", None)
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError((folder / "kube-apiserver.log").read_text()[-4000:])


def _ask(folder: Path, token: str, method: str, path: str, body: Any) -> None:
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"https://{NODE}:{API_PORT}{path}", data, headers, method=method)
    try:
        urllib.request.urlopen(request, context=ssl.create_default_context(cafile=str(folder / "tls.crt"))).read()
    except urllib.error.HTTPError as error:
        raise OSError(f"{method} {path}: {error.code} {error.read().decode()[:2000]}") from error


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd, capture_output=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
