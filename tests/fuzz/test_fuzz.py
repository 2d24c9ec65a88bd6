"""Each target over its corpus, which has what fuzzing found, and over a few mutations, the same ones at each run.

The long run is `python -m tests.fuzz` (CONTRIBUTING.md).
"""

from random import Random

import pytest
from fuzz.examine import examine
from fuzz.mutate import mutated
from fuzz.targets import TARGETS, saved, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sampling import THOROUGH

RUNS = {
    **{"page": 15, "log": 30, "secrets": 60, "command": 30, "yaml": 20, "toml": 40, "baseline": 20, "promql": 100},
    **{"recording": 2, "prometheus": 8, "labels": 4, "k8s": 8, "results": 20, "kernel": 30, "model": 10},
    **{"web_config": 20, "arguments": 8, "notation": 20, "bundle": 60, "ramp": 30, "nccl": 40},
    **{"alone": 8, "pages_gz": 20, "stacks": 4, "incident": 30, "kubeconfig": 20},
    **{"server": 20, "telemetry": 30, "explain": 10, "notebook": 6, "http": 20, "gpu_archive": 10},
}
assert RUNS.keys() == TARGETS.keys()


@pytest.mark.parametrize("name", TARGETS)
def test_every_find_of_the_corpus_passes_the_rules(name: str) -> None:
    for text in saved(name):
        examine(TARGETS[name], text)


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_passes_the_rules(name: str) -> None:
    texts = st.sampled_from(seeds(name))

    @settings(
        max_examples=RUNS[name] if THOROUGH else -(-RUNS[name] // 4),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(texts, texts, st.randoms(use_true_random=False))
    def check(text: bytes, other: bytes, random: Random) -> None:
        examine(TARGETS[name], mutated(random, text, other))

    check()
