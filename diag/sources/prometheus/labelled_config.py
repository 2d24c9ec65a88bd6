"""`diag_vllm_config` for servers that are scraped without an exporter of ours, out of the labels of their own page.

PromQL reads no numbers out of labels; but a series of value 1, times the number that stands in its label, has it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from diag.sources.prometheus.scope import any_of
from diag.vllm.server import config

INFO = "vllm:cache_config_info"
MOST_VALUES = 20
"""Different values of one flag: of a fleet with more, the rest stays unknown."""
_CONFIG_SELECTOR = re.compile(r'last_over_time\(diag_vllm_config\{flag="(\w+)"\}\[(\w+)\]\)')
Flags = Mapping[str, Mapping[float, list[str]]]
"""By flag, by value: the instances that run with it."""


def flags(infos: Iterable[Mapping[str, str]]) -> Flags:
    """The flags in the series of INFO, one for each engine of an instance."""
    pages: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for info in infos:
        pages[info.get("instance", "")].append(info)
    found: dict[str, dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    for instance, page in sorted(pages.items()):
        for flag, value in config.from_page(page, len({info.get("engine") for info in page})).items():
            found[flag][value].append(instance)
    return found


def completed(promql: str, known: Flags) -> str:
    """The expression, with the known values wherever it selects a flag that only an exporter publishes."""
    return _CONFIG_SELECTOR.sub(_with(known), promql)


def _with(known: Flags) -> Callable[[re.Match[str]], str]:
    def put(found: re.Match[str]) -> str:
        values = list(known.get(found[1], {}).items())[:MOST_VALUES]
        parts = [f"{value!r} * {_selected(instances, found[2])}" for value, instances in values]
        return f"({' or '.join([found[0], *parts])})" if parts else found[0]

    return put


def _selected(instances: list[str], window: str) -> str:
    these = any_of("instance", [re.escape(instance) for instance in instances])
    return f"max by (instance) (last_over_time({INFO}{{{these}}}[{window}]))"
