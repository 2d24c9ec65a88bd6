"""Cascades on a real vLLM, cured by what the doctor proposes: `diag verify` is to say so.

The server may have an API key: then its relaunch line must not open it.
"""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from support import bad_servers
from support.live import cure, load, server
from support.live.on_call import DIAG, OnCall, Said, doctor
from support.live.stage import Outcome, Row, Stage, everywhere, look, outcome

KEY = "a-key-of-the-tests"
FIXED = everywhere("critical kv_eviction_cascade", "kv_eviction_cascade", "fixed")
FIXED_WITH_KEY = replace(FIXED, verify="refused without the variable, 401 without the key, fixed")
REFUSED = Row("exit 69, HTTP 401")


def more_capacity(stage: Stage) -> Iterator[Outcome]:
    with stage.serving(cure.TINY, cold=True) as (vllm, who):
        since = time.time()
        with load.running(vllm.port, *cure.CASCADE.clients):
            got, live = cascade(stage, vllm, who)
        vllm.stop()
        cured = time.time()
        with relaunched(stage, vllm, live, cure.CASCADE.clients) as said:
            yield outcome("cascade, cured by capacity", who, FIXED, replace(got, verify=said), since, cured)


def gateway_limit(stage: Stage) -> Iterator[Outcome]:
    everybody = sum(clients.count for clients in cure.CASCADE.clients)
    with stage.serving(cure.TINY) as (vllm, who):
        since = time.time()
        with load.running(vllm.port, *cure.CASCADE.clients, gateway=everybody) as clients:
            got, live = cascade(stage, vllm, who)
            for _ in range(everybody - concurrency(live)):
                clients.gateway.acquire()
            cured = time.time()
            time.sleep(cure.WARM_UP)
            said = verified(stage, vllm)
            yield outcome("cascade, cured by the gateway's limit", who, FIXED, replace(got, verify=said), since, cured)


def api_key(stage: Stage) -> Iterator[Outcome]:
    with bad_servers.serving(lambda _: bad_servers.Reply(b'{"error":"Unauthorized"}', 401)) as closed:
        yield Outcome("a page that needs a key", REFUSED, Row(doctor(closed.url).short))
    clients = [replace(group, key=KEY) for group in cure.CASCADE.clients]
    with stage.serving((*cure.TINY, "--api-key", KEY), cold=True) as (vllm, who):
        since = time.time()
        with load.running(vllm.port, *clients):
            got, live = cascade(stage, vllm, who)
        vllm.stop()
        refused = refusal(live)
        with relaunched(stage, vllm, live, clients, VLLM_API_KEY=KEY) as cured:
            got = replace(got, verify=f"{refused}, {cured}")
            yield outcome("cascade behind an API key", who, FIXED_WITH_KEY, got, since)


def cascade(stage: Stage, vllm: server.Server, who: OnCall) -> tuple[Row, Said]:
    """Look while one lasts, and keep a recording of it."""
    time.sleep(cure.WARM_UP)
    with ThreadPoolExecutor(1) as meanwhile:
        kept = meanwhile.submit(cure.recorded, vllm.url, stage.folder / "before", 30)
        looked = look(who, FIXED)
        kept.result()
    return looked


def concurrency(live: Said) -> int:
    """The limit that is proposed for the gateway; none where none is."""
    proposed = [fix["after"] for fix in live.primary.get("fixes", ()) if "gateway" in fix["change"]]
    return int(proposed[0]) if proposed else load.UNLIMITED


def refusal(live: Said) -> str:
    """Return the result of the relaunch line without the variable of the key."""
    line = live.primary.get("relaunch") or ""
    unset = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    try:
        ran = subprocess.run(
            ["bash", "-c", f"exec env {line}"], env=unset, capture_output=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return "runs without the variable"
    refused = ran.returncode and b"VLLM_API_KEY" in ran.stderr
    return "refused without the variable" if refused else f"exit {ran.returncode} without the variable"


@contextmanager
def relaunched(
    stage: Stage, vllm: server.Server, live: Said, clients: Sequence[load.Clients], **environment: str
) -> Iterator[str]:
    """Run the relaunch line, and keep the server under load, so that its alerts can end.

    Yield the verdict on what it cured; with a key, also whether the new server asks for it.
    """
    line = live.primary.get("relaunch")
    if not line:
        yield "no relaunch line"
        return
    with server.relaunched(line, vllm.port, stage.folder / "relaunched.log", **environment) as again:
        asks = [f"{status(f'{again.url}/v1/models')} without the key"] if environment else []
        with load.running(again.port, *clients):
            time.sleep(cure.WARM_UP)
            yield ", ".join([*asks, verified(stage, again)])


def status(url: str) -> int:
    """The HTTP status of a page."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def verified(stage: Stage, after: server.Server) -> str:
    """Return the verdict of `diag verify` on a server since the recording, with its reasons if it cannot compare."""
    command = [DIAG, "verify", str(stage.folder / "before"), after.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        return f"exit {done.returncode}"
    report = json.loads(done.stdout)
    reasons = [reason for compared in report["servers"] for reason in compared["reasons"]]
    return ": ".join(filter(None, (report["verdict"], "; ".join(reasons))))
