"""Records a real vLLM that is healthy all the time, under load that changes: a doctor may find nothing in it."""

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from support.live import load, server
from support.live.load import Clients

HOUR = 3600
EVERY = 5
FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "32")
CHAT = Clients(3, (30, 300), (20, 120), pause=2.0, stream=True)
LONG_CHAT = Clients(4, (30, 300), (60, 200), pause=2.0, stream=True)
PHASES: Sequence[tuple[str, int, tuple[Clients, ...]]] = (
    ("idle", 180, ()),
    ("few chat clients", 480, (CHAT,)),
    ("burst", 40, (CHAT, Clients(24, (30, 100), (16, 48), pause=60.0))),
    ("few chat clients again", 300, (CHAT,)),
    (
        "long prompts",
        420,
        (Clients(2, (900, 1500), (30, 80), pause=6.0, stream=True), Clients(2, (30, 200), (60, 150), 2.0)),
    ),
    ("pause", 240, ()),
    ("batch below the cap", 420, (Clients(8, (50, 400), (100, 300), pause=0.5),)),
    ("single requests now and then", 360, (Clients(1, (20, 200), (20, 60), pause=25.0),)),
    ("short answers", 360, (Clients(4, (100, 500), (1, 4), pause=1.0),)),
    ("chat with a few users who stop", 420, (LONG_CHAT,)),
    ("burst again", 40, (LONG_CHAT, Clients(32, (30, 100), (16, 48), pause=60.0))),
    ("few chat clients at the end", 340, (CHAT,)),
)
"""Load by load of an hour: its name, seconds, clients."""


def record(folder: Path, seconds: float) -> Path:
    """Serve, drive and record for so long; return the recording. A shorter one has shorter phases."""
    folder.mkdir(parents=True, exist_ok=True)
    diag = str(Path(sys.executable).with_name("diag"))
    with server.running(folder, "tiny", FLAGS) as vllm:
        words = [diag, "record", vllm.url, str(folder / "recording"), "--every", str(EVERY), "--for", f"{seconds:.0f}"]
        with subprocess.Popen([*words, "--log", str(vllm.log)], stdin=subprocess.DEVNULL) as recorder:
            for name, lasts, clients in PHASES:
                stop = threading.Event()
                if "stop" in name:
                    threading.Thread(target=_stop_now_and_then, args=(vllm.port, stop), daemon=True).start()
                with load.running(vllm.port, *clients):
                    time.sleep(lasts * seconds / HOUR)
                stop.set()
        assert recorder.returncode == 0
    return folder / "recording"


def _stop_now_and_then(port: int, stop: threading.Event) -> None:
    """A user who reads a little of a long answer, and hangs up."""
    chance = random.Random(7)
    body = {"model": "tiny", "prompt": "x" * 80, "max_tokens": 400, "ignore_eos": True, "stream": True}
    while not stop.wait(chance.uniform(15, 40)):
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse()
            time.sleep(chance.uniform(0.3, 2))
            connection.close()
