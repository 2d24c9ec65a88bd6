"""Recordings made of real ones: renamed as an older vLLM, thinned to another cadence, two engines on one page."""

import gzip
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from support.paths import RECORDINGS

Scrape = tuple[float, str, str]
"""Unix seconds, instance, page ("" where the scrape failed)."""
OLD_NAMES = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_": "vllm:gpu_prefix_cache_",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
}


def scrapes(name: str, beside: bool = False) -> Iterator[Scrape]:
    """The scrapes of a recording that ships with the repository; of a failed one, `beside` keeps what its host said."""
    return iter(_scrapes(RECORDINGS / name / "metrics.prom.gz", beside))


@lru_cache(maxsize=16)  # tests of a file change the same few recordings again and again
def _scrapes(pages: Path, beside: bool) -> tuple[Scrape, ...]:
    text = gzip.decompress(pages.read_bytes()).decode()
    found = []
    for part in f"\n{text}".split("\n# scrape")[1:]:
        header, _, page = part.partition("\n")
        failed, _, rest = header.partition(" ")
        time, instance, *_ = rest.split(" ")
        kept = "" if failed and not (beside and page.strip()) else page.rstrip("\n") + "\n"
        found.append((float(time), instance, kept))
    return tuple(found)


def pages_alone(folder: Path, name: str) -> Path:
    """Return the recording without its log."""
    for file in ("metrics.prom.gz", "recording.toml"):
        shutil.copy(RECORDINGS / name / file, folder)
    return folder


OWN_CPU = re.compile(r"process_cpu_seconds_total (?<![\w:]process_cpu_seconds_total )(\d\S*)")
"""The sample of a page; a pattern that begins with a word is found ten times as fast as one that begins with `^`."""


def answered(all_scrapes: Iterable[Scrape]) -> Iterator[Scrape]:
    """Pages as a server answers them: a scripted page that repeats one counts the CPU time of its answer, too."""
    last: dict[str, tuple[float, float, float]] = {}  # time, CPU time as scripted, as answered
    for time, instance, page in all_scrapes:
        if match := OWN_CPU.search(page):
            scripted = float(match[1])
            before, was, cpu = last.get(instance, (time, -1.0, 0.0))
            cpu = cpu + 0.007 * (time - before) if scripted == was else scripted
            last[instance] = time, scripted, cpu
            shown = f"{page[: match.start(1)]}{cpu:.4f}{page[match.end(1) :]}" if cpu != scripted else page
            yield time, instance, shown
        else:
            yield time, instance, page


def write(folder: Path, all_scrapes: Iterable[Scrape], *, copied: bool = False) -> Path:
    """A recording without recording.toml, stored rather than compressed, as it is read once.

    `copied`: a page that repeats one is the copy of a cache, not a server's answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = (
        f"# scrape {time} {instance}\n{page}" if page else f"# scrape-failed {time} {instance} refused\n"
        for time, instance, page in (all_scrapes if copied else answered(all_scrapes))
    )
    (folder / "metrics.prom.gz").write_bytes(gzip.compress("".join(parts).encode(), compresslevel=0))
    return folder


def changed(all_scrapes: Iterable[Scrape], change: Callable[[str], str]) -> Iterator[Scrape]:
    """Every page changed in the same way."""
    return ((time, instance, change(page)) for time, instance, page in all_scrapes)


def before_0_9_2(page: str) -> str:
    """Names as vLLM 0.8.5 - 0.9.1 had them."""
    for new, old in OLD_NAMES.items():
        page = page.replace(new, old)
    return page


def before_0_8_3(page: str) -> str:
    """Return the pages without the label `engine`, and with a cache_config_info without the number of blocks."""
    page = re.sub(r'engine="0",?', "", before_0_9_2(page))
    return re.sub(r'(num_gpu_blocks|kv_cache_size_tokens|kv_cache_max_concurrency)="[^"]*"', r'\1="None"', page)


def both_names(page: str) -> str:
    """Both names at once, as vLLM 0.9.2 - 0.10.2 had them."""
    lines = page.splitlines(keepends=True)
    return "".join(lines + [before_0_9_2(line) for line in lines if any(name in line for name in OLD_NAMES)])


def as_engine(page: str, engine: int) -> str:
    """The page's vLLM series as those of another engine."""
    lines = (line for line in page.splitlines(keepends=True) if line.startswith("vllm:"))
    return "".join(line.replace('engine="0"', f'engine="{engine}"') for line in lines)


def of_model(page: str, name: str) -> str:
    """The page of a server that serves its model under another name."""
    return re.sub(r'model_name="[^"]*"', f'model_name="{name}"', page)


def side_by_side(*servers: Iterable[Scrape]) -> list[Scrape]:
    """Servers that run at the same time, from their first scrapes on: instances r0:8000, r1:8000, ..."""
    moved = []
    for number, server in enumerate(servers):
        own = list(server)
        moved += [(1_700_000_000 + time - own[0][0], f"r{number}:8000", page) for time, _, page in own]
    return sorted(moved)


def as_ranks(*servers: Iterable[Scrape]) -> Iterator[Scrape]:
    """Servers as the data-parallel ranks of the first one, scrape by scrape."""
    for (time, instance, page), *others in zip(*servers, strict=False):
        yield time, instance, page + "".join(as_engine(each[2], rank) for rank, each in enumerate(others, 1))


def thinned(all_scrapes: Iterable[Scrape], every: float) -> Iterator[Scrape]:
    """At most one scrape in so many seconds."""
    last = float("-inf")
    for scrape in all_scrapes:
        if scrape[0] - last >= every - 0.25:
            last = scrape[0]
            yield scrape


def with_value(page: str, series: str, value: str) -> str:
    """The page with another value for every series whose line begins so; waiting requests then wait for capacity."""
    if series.startswith("vllm:num_requests_waiting{"):
        page = _replaced(page, r"vllm:num_requests_waiting_by_reason\{[^\n]*capacity", value)
    return _replaced(page, re.escape(series), value)


def _replaced(page: str, begin: str, value: str) -> str:
    """The page with this value on the lines that begin so: a search for words is ten times as fast as `^`."""
    return re.sub(rf"(\n{begin}[^\n]*) \S+(?=\n|\Z)", rf"\1 {value}", f"\n{page}")[1:]


def label_names(page: str) -> list[str]:
    """The names of all labels of a page, sorted, without those of vLLM's configuration, which are one series."""
    lines = (line for line in page.splitlines() if line[:1] != "#" and "cache_config_info" not in line)
    return sorted({name for line in lines for name in re.findall(r'[{,](\w+)="', line)})


def relabelled(page: str, label: str, value: str | None) -> str:
    """The page with this value for every label of that name; None: without the label."""
    new = "" if value is None else f'{label}="{value}"'
    pattern = rf'(?<=[{{,]){label}="(?:\\.|[^"\\])*"(,?)'
    return re.sub(pattern, lambda found: new and new + found[1], page)
