"""The table of log lines: every text of every release is recognised, by one pattern, and by no look-alike."""

import re
import time
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import LOGS
from support.rows import each_row

from diag.core.log_events import LOG_EVENTS
from diag.log.patterns import EVENTS, PHASES, STAGES, Pattern, parse_amount, patterns, read_values, recognise
from diag.vllm.running_config import FLAGS

pytestmark = pytest.mark.fast
FIELDS = {event.name: set(event.fields) for event in LOG_EVENTS}


class Case(NamedTuple):
    """A text as a release writes it, with its level ("" without a head), and what it tells: "kind name"."""

    version: str
    level: str
    tells: str
    text: str


CASES = [Case(*line.split("\t")) for line in (LOGS / "texts.tsv").read_text(encoding="utf-8").splitlines()]


def told(case: Case) -> Pattern:
    pattern = recognise(case.text, case.level)
    assert pattern is not None
    return pattern


def number(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version.partition("post")[0]))


@each_row("case", CASES)
def test_log_line_of_a_release_has_its_meaning(case: Case) -> None:
    pattern = told(case)
    assert f"{pattern.kind} {pattern.name}".strip() == case.tells


@each_row("case", CASES)
def test_a_text_is_of_a_release_that_its_pattern_names(case: Case) -> None:
    pattern = told(case)
    assert number(pattern.first) <= number(case.version) <= number(pattern.last)


def test_no_text_fits_two_patterns_at_its_level() -> None:
    for case in CASES:
        pattern = told(case)
        rest = case.text[re.search(pattern.begins, case.text).start() :]  # type: ignore[union-attr]
        assert [each for each in patterns() if re.match(each.begins, rest) and case.level in each.levels] == [pattern]


def test_every_pattern_has_a_text() -> None:
    assert {each.begins for each in patterns()} == {told(case).begins for case in CASES}


def test_no_text_is_recognised_at_a_level_that_vllm_does_not_write_it_at() -> None:
    levels = {"", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}
    for case in CASES:
        for level in levels.difference(told(case).levels):
            assert recognise(case.text, level) is None


def test_a_text_inside_of_a_line_is_not_recognised() -> None:
    for case in CASES:
        assert recognise(f"Request cmpl-1 details: prompt: '{case.text}'", case.level) is None


def test_a_source_line_of_a_traceback_is_not_recognised() -> None:
    assert recognise('    raise ValueError("No available memory for the cache blocks. "', "ERROR") is None


def test_memory_line_that_begins_like_a_failure_is_no_failure() -> None:
    """An INFO of 0.10.2 and of 0.28 on."""
    text = "Free memory on device (78.5/79.25 GiB) on startup. Desired GPU memory utilization is (0.9, 71.33 GiB)."
    assert recognise(text, "INFO") is None
    assert recognise(text, "ERROR") is None


def test_the_table_names_stages_events_and_flags_that_there_are() -> None:
    names = {name for each in patterns() if each.kind == "stage" for name in [each.name]}
    assert names == set(STAGES) - {"process_start"}
    assert {each.name for each in patterns() if each.kind == "event"} == set(EVENTS) - {"shut_down"}  # kind "ends"
    for each in patterns():
        fields = set(re.compile(each.numbers).groupindex)
        assert fields <= (FIELDS[each.name] if each.kind == "event" else {*FLAGS, "version", "model", "platform"})


def test_pattern_of_a_logger_line_names_its_source_file() -> None:
    for each in patterns():
        by_uvicorn = "" in each.levels or each.levels == ("INFO",) or each.begins == "Exception in ASGI application"
        assert each.logger or each.kind in ("stage", "progress", "setting") or by_uvicorn, each.begins


def test_the_phases_are_the_stages_by_another_name() -> None:
    assert set(PHASES) == set(STAGES) - {"kernel_warm_up"}


def test_cpu_blocks_do_not_count_as_kv_cache() -> None:
    case = Case("0.6.6.post1", "INFO", "", "# CPU blocks: 2048")
    assert read_values(told(case), case.text) == {}


def numbers(beginning: str, version: str) -> dict[str, float]:
    case = next(each for each in CASES if beginning in each.text and each.version == version)
    return {name: parse_amount(value) for name, value in read_values(told(case), case.text).items()}


OOM = {"wanted_gibibytes": 136 / 1024, "free_gibibytes": 120.88 / 1024}


@pytest.mark.parametrize(
    ("beginning", "version", "expected"),
    [
        ("CUDA out of memory. Tried", "0.6.0", {**OOM, "total_gibibytes": 79.15}),
        ("torch.OutOfMemoryError: CUDA", "0.32.0", {**OOM, "total_gibibytes": 79.25}),
        ("HIP out", "0.6.0", {"wanted_gibibytes": 1.17, "total_gibibytes": 23.98, "free_gibibytes": 0.0}),
        ("warming up sampler", "0.32.0", {}),
        ("Worker failed", "0.32.0", {"wanted_gibibytes": 2.0, "total_gibibytes": 79.25, "free_gibibytes": 1.0}),
        (
            "To serve",
            "0.7.0",
            {"max_model_len": 1048576, "needed_gibibytes": 24.0, "available_gibibytes": 9.97},
        ),
        (
            "To serve",
            "0.33.0",
            {
                "max_model_len": 131072,
                "needed_gibibytes": 2.0,
                "available_gibibytes": 1.0,
                "estimated_max_model_len": 65408,
            },
        ),
        ("The model's max seq len", "0.6.0", {"max_model_len": 131072, "estimated_max_model_len": 65408}),
        (
            "Free memory on device (",
            "0.9.1",
            {"free_gibibytes": 67.24, "total_gibibytes": 79.25, "utilization": 0.9, "requested_gibibytes": 71.33},
        ),
        (
            "Free memory on device cuda:0",
            "0.33.0",
            {"free_gibibytes": 67.24, "total_gibibytes": 79.25, "utilization": 0.92, "requested_gibibytes": 72.91},
        ),
        (
            "engine's budget",
            "0.32.0",
            {"free_gibibytes": 67.24, "total_gibibytes": 79.25, "utilization": 0.92, "requested_gibibytes": 72.91},
        ),
        (
            "Externally held",
            "0.32.0",
            {"total_gibibytes": 79.25, "utilization": 0.92, "requested_gibibytes": 72.91},
        ),
        ("No available shared", "0.8.5", {"seconds": 60}),
        ("No available shared", "0.32.0", {"seconds": 60}),
        ("KV cache size", "0.27.1", {"kv_cache_size_tokens": 446704}),
        (
            "CPU KV cache size",
            "0.32.0",
            {"kv_cache_size_tokens": 16384, "max_model_len": 2048, "kv_cache_max_concurrency": 8.0},
        ),
        ("Maximum concurrency", "0.27.1", {"max_model_len": 4096, "kv_cache_max_concurrency": 109.06}),
        ("# GPU blocks", "0.6.6.post1", {"num_gpu_blocks": 27919}),
        ("# cuda blocks", "0.7.3", {"num_gpu_blocks": 27919}),
    ],
)
def test_the_numbers_of_a_line_are_read(beginning: str, version: str, expected: dict[str, float]) -> None:
    assert numbers(beginning, version) == pytest.approx(expected)


@pytest.mark.parametrize(("text", "gibibytes"), [("1,024 MiB", 1.0), ("512 bytes", 2**-21), ("2.5", 2.5)])
def test_an_amount_is_read_with_its_unit(text: str, gibibytes: float) -> None:
    assert parse_amount(text) == gibibytes


@given(st.text(), st.sampled_from(["", "INFO", "ERROR"]))
def test_any_text_is_parsed(text: str, level: str) -> None:
    recognise(text, level)


@pytest.mark.parametrize(
    "text",
    ["a" * 65536, "[Rank 0] " * 8000, "Loading " * 9000, " █▄▀" * 16000, "Capturing a" * 6000, "a.Error: " * 999],
)
def test_long_text_is_parsed_in_bounded_time(text: str) -> None:
    begun = time.process_time()
    recognise(text, "")
    assert time.process_time() - begun < 0.2
