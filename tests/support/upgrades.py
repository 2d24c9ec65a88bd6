"""Pages of an exporter beside a server that was upgraded: a real healthy server's load before and after.

Its counters go on at their recorded rates, so that an hour and a half can be had of one minute.
"""

import re
from collections.abc import Iterator
from functools import cache, lru_cache

import numpy as np
from support import rewriting, timelines
from support.timelines import Key

EVERY, MINUTES, UPGRADE = 60, 95, 45
"""Seconds between two scrapes, length, and the minute in which the server was down."""
START = 1_795_230_000.0
_LINE = re.compile(r"^(vllm:[\w:]+)\{(.*)\} \S+$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
SLO_EDGES = ("1.0", "2.5", "40.0", "1920.0", "+Inf")
LATENCY = "_seconds_sum"


@lru_cache(maxsize=2)  # several tests change the same pages
def scrapes(
    slower: float = 1.0, load: float = 1.0, open_loop: bool = False, **after: float
) -> tuple[rewriting.Scrape, ...]:
    """An exporter's pages. After the upgrade all takes `slower` times as long, with `load` times as many clients.

    Closed-loop clients of a slower server send less often; of an open loop, more requests run at a time. `after` are
    factors of metrics by the end of their names, the first that fits: `prompt_tokens_total=3`.
    """
    return tuple(_scrapes(slower, load, open_loop, after))


def _scrapes(slower: float, load: float, open_loop: bool, after: dict[str, float]) -> Iterator[rewriting.Scrape]:
    for minute in range(MINUTES):
        at = START + EVERY * minute
        if minute == UPGRADE:
            yield at, "vllm-0:9400", exporter("", 0)
        elif minute < UPGRADE:
            yield at, "vllm-0:9400", page(EVERY * minute, 1.0, {}) + exporter("0.31.0", 0)
        else:
            seconds = EVERY * (minute - UPGRADE) * (load if open_loop else load / slower)
            running = load * (slower if open_loop else 1.0)
            changes = {**after, LATENCY: slower, "num_requests_running": running}
            yield at, "vllm-0:9400", page(seconds, START + EVERY * UPGRADE, changes) + exporter("0.32.0", 1)


def page(seconds: float, started: float, changes: dict[str, float]) -> str:
    """VLLM's page after so many seconds of the load, with factors by the ends of names."""
    recorded = timelines.recording("healthy")
    now = recorded.looped(np.array([float(seconds)]), recorded.whole)
    lines = []
    for line, key in _template():
        name = dict(key)["__name__"]
        factor = next((by for end, by in changes.items() if name.endswith(end)), 1.0)
        if key in now:
            value = max(started, 1.0) if name.endswith(timelines.START_TIME) else float(now[key][0]) * factor
            lines.append(f"{line} {value:.6g}" if timelines.is_counter(key) else f"{line} {value!r}")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def exporter(version: str, enforce_eager: float) -> str:
    """Return the samples that the exporter adds."""
    own = [f"diag_vllm_up {float(bool(version))}", 'diag_scrape_success{collector="vllm"} 1']
    if version:
        own.append(f'diag_vllm_info{{version="{version}",model="tiny",device="cuda"}} 1')
        own += [f'diag_vllm_config{{flag="{flag}"}} {value}' for flag, value in CONFIG.items()]
        own.append(f'diag_vllm_config{{flag="enforce_eager"}} {enforce_eager}')
    return "\n".join(own) + "\n"


CONFIG = {"max_num_seqs": 256.0, "max_model_len": 4096.0, "max_num_batched_tokens": 2048.0}


@cache
def _template() -> list[tuple[str, Key]]:
    """The lines of a real page without their values, and the key of each; without most buckets."""
    *_, (_, _, text) = rewriting.scrapes("healthy")
    return list(_lines(text))


def _lines(text: str) -> Iterator[tuple[str, Key]]:
    for line in text.splitlines():
        found = _LINE.match(line)
        if line.startswith("#") and "vllm:" in line:
            yield line, frozenset({("__name__", "")})
        elif found:
            labels = dict(_LABEL.findall(found[2]))
            if labels.get("le", "+Inf") in SLO_EDGES:
                yield line.rpartition(" ")[0], frozenset({("__name__", found[1]), *labels.items()})
