"""Pages laid out in samples: what every source publishes, and the instants that are judged."""

import numpy as np
import pytest

from diag.exposition import scrapes
from diag.exposition.scrapes import Target
from diag.promql import evaluate, is_stale
from diag.sources.observation import Observation, Origin, observation
from diag.vllm.running_config import ServerFacts

ORIGIN = Origin("recording", "somewhere")
VLLM = b'vllm:num_requests_running{engine="0",model_name="tiny"} 3\n'
CACHE = (
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="1600",'
    b'kv_cache_max_concurrency="2.0",engine="0",sliding_window="None"} 1\n'
)


def target(*pages: bytes | str, instance: str = "h:1", start: int = 1_000_000, step: int = 2000) -> Target:
    """One scrape for each page; a text is the reason of a failed one."""
    made = Target(instance)
    for number, page in enumerate(pages):
        at = start + number * step
        made.fail(at, page) if isinstance(page, str) else made.add(at, page)
    return made


def seen(*targets: Target, **told: ServerFacts) -> Observation:
    return observation(ORIGIN, targets, {name.replace("_", ":"): each for name, each in told.items()})


def values(observed: Observation, query: str) -> dict[tuple[tuple[str, str], ...], list[float]]:
    """NaN where there is no sample at an instant."""
    vector = evaluate(query, observed.samples, observed.instants)
    rows = np.where(vector.present, vector.values, np.nan)
    return {tuple(sorted(labels.items())): row.tolist() for labels, row in zip(vector.labels, rows, strict=True)}


def value(observed: Observation, query: str) -> float:
    (row,) = values(observed, query).values()
    return row[-1]


def test_a_failed_scrape_is_a_hole() -> None:
    (block,) = target(b"x 1\n", "connection refused", b"x 3\n").table().values[None]
    assert is_stale(block).tolist() == [[False, True, False]]


def test_a_series_that_is_absent_from_a_page_is_a_hole() -> None:
    values = target(b"x 1\n", b"y 2\n").table().values
    assert is_stale(values).tolist() == [[False, True], [True, False]]


def test_a_series_of_several_parts_is_a_hole_also_where_their_values_are_equal_by_chance() -> None:
    values = target(b"y 9\nx 0\nx 0\n", b"y 9\nx 1\nx 2\n", b"y 9\nx 4\n").table().values
    assert is_stale(values).tolist() == [[False, False, False], [True, True, False]]


def test_repeated_series_of_a_metric_are_holes_if_one_of_them_has_several_values() -> None:
    page = b'x{engine="0"} 0\nx{engine="0"} 0\nx{engine="1"} 1\nx{engine="1"} 2\nx{engine="2"} 5\n'
    table = target(page).table()
    rows = {labels["engine"]: is_stale(row).tolist() for labels, row in zip(table.labels, table.values, strict=True)}
    assert rows == {"0": [True], "1": [True], "2": [False]}


def test_a_series_that_is_always_repeated_with_the_same_value_is_kept() -> None:
    values = target(b"x 0\nx 0\n", b"x 1\nx 1\n").table().values
    assert values.tolist() == [[0.0, 1.0]]


def test_series_that_are_left_over_stay_of_several_parts_when_old_scrapes_are_forgotten() -> None:
    made = target(*[b"".join(b"s%d 1\n" % (6_000 * number + each) for each in range(6_000)) for number in range(2)])
    made.add(1_010_000, b"y 1\nx 1\nx 2\n")
    made.add(1_012_000, b"y 1\nx 1\nx 1\n")
    made.forget(1_010_000)
    table = made.table()
    assert len(table.labels) == 2
    assert is_stale(table.values[[labels["__name__"] == "x" for labels in table.labels]]).all()


def test_a_nan_on_the_page_is_no_hole() -> None:
    values = target(b"x NaN\n").table().values
    assert np.isnan(values).all()
    assert not is_stale(values).any()


def test_a_series_beyond_the_limit_is_parsed_once_and_noted_at_each_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    sample = scrapes.sample
    monkeypatch.setattr(scrapes, "sample", lambda line: parsed.append(line) or sample(line))
    monkeypatch.setattr(scrapes, "MOST_SERIES", 4)
    pages = [b"".join(b'x{e="%d"} %d\n' % (e, e * number) for e in range(9)) for number in range(3)]
    parser = scrapes.Parser("h:1")
    read = [parser.parse(page) for page in (*pages, pages[0] + b"y 1\n", pages[1].replace(b" 8\n", b" ?\n"))]
    assert [list(page.faults) for page in read] == [["crowded"]] * 4 + [["crowded", "malformed"]]
    assert [page.values.tolist() for page in read[:3]] == [[0, number, 2 * number, 3 * number] for number in range(3)]
    assert len(parsed) == len(set(parsed)) == 10


def test_up_is_published_for_every_scrape() -> None:
    observed = seen(target(VLLM, "connection refused", VLLM))
    assert values(observed, "up") == {(("__name__", "up"), ("instance", "h:1")): [1, 0, 1]}


def test_vllm_up_needs_metrics_of_vllm() -> None:
    observed = seen(target(VLLM, b"x 1\n", "connection refused"))
    assert list(values(observed, "diag_vllm_up").values()) == [[1, 0, 0]]


def test_the_configuration_is_published_as_numbers() -> None:
    observed = seen(target(VLLM + CACHE, "connection refused"))
    assert value(observed, 'diag_vllm_config{flag="max_model_len"}') == 800


def test_version_and_model_are_published() -> None:
    observed = seen(target(VLLM), h_1=ServerFacts(version="0.32.0"))
    assert value(observed, 'diag_vllm_info{version="0.32.0",model="tiny",instance="h:1"}') == 1
    assert (observed.versions, observed.models) == ({"h:1": "0.32.0"}, {"h:1": "tiny"})


def test_exporter_page_keeps_its_own_samples() -> None:
    page = (
        b'diag_vllm_up 0\ndiag_vllm_info{version="0.9.1",model="big"} 1\n'
        b'diag_vllm_config{flag="max_num_seqs"} 7\n' + VLLM.replace(b"3", b"1")
    )
    observed = seen(
        target(page), h_1=ServerFacts(version="0.32.0", launch="vllm serve m --max-num-seqs 9 --block-size 8")
    )
    assert value(observed, "diag_vllm_up") == 0
    assert value(observed, 'diag_vllm_config{flag="max_num_seqs"}') == 7
    assert value(observed, 'diag_vllm_config{flag="block_size"}') == 8, "what it does not know is filled in"
    assert value(observed, "count(diag_vllm_info)") == 1


def test_the_version_is_read_off_an_exporters_page() -> None:
    observed = seen(target(b'diag_vllm_info{version="0.9.1",model="big"} 1\n'))
    assert (observed.versions, observed.models) == ({"h:1": "0.9.1"}, {"h:1": "big"})


def test_unknown_version_is_not_published() -> None:
    observed = seen(target(b"x 1\n"))
    assert (observed.versions, observed.models, values(observed, "diag_vllm_info")) == ({}, {}, {})


def test_the_launch_command_is_kept_without_its_secrets() -> None:
    observed = seen(target(VLLM), h_1=ServerFacts(launch="vllm serve m --api-key abc"))
    assert observed.launch == {"h:1": 'vllm serve m --api-key "${VLLM_API_KEY:?}"'}


def test_two_targets_are_distinguished_by_instance() -> None:
    observed = seen(target(VLLM), target(VLLM, instance="h:2"))
    assert value(observed, "count(vllm:num_requests_running)") == 2
    assert observed.instances == ("h:1", "h:2")


def test_scrapes_are_counted_over_all_targets() -> None:
    observed = seen(target(VLLM, "refused"), target(VLLM, VLLM, instance="h:2"))
    assert (observed.scrapes, observed.failed_scrapes) == (4, 1)


def test_the_interval_is_that_of_one_target() -> None:
    targets = [target(VLLM, VLLM, VLLM, instance=f"h:{n}", start=1_000_000 + 100 * n) for n in range(5)]
    assert seen(*targets).interval == 2.0


def test_many_targets_give_one_instant_a_round() -> None:
    targets = [target(VLLM, VLLM, VLLM, instance=f"h:{n}", start=1_000_000 + 100 * n) for n in range(5)]
    assert seen(*targets).instants.tolist() == [1_000_400, 1_002_400, 1_004_400]


def test_a_scrape_much_too_close_to_the_next_is_no_instant() -> None:
    made = target(VLLM, VLLM, VLLM, VLLM)
    made.add(1_003_000, VLLM)
    assert seen(made).instants.tolist() == [1_000_000, 1_002_000, 1_004_000, 1_006_000]


def test_one_scrape_is_one_instant() -> None:
    observed = observation(Origin("scrape", "x", every=2.0), [target(VLLM)], {})
    assert (observed.instants.tolist(), observed.interval) == ([1_000_000], 2.0)


def test_scrapes_that_went_back_in_time_are_sorted() -> None:
    made = target(b"x 1\n", b"x 2\n")
    made.add(999_000, b"x 0\n")
    observed = seen(made)
    assert made.table().values.tolist() == [[0, 1, 2]]
    assert "1 scrape of h:1 out of order: sorted by time" in observed.notes


def test_two_scrapes_at_one_time_are_one() -> None:
    made = target(b"x 1\n", b"x 2\n", step=0)
    assert made.table().values.tolist() == [[1]]
    assert "1 scrape of h:1 skipped: at the same time as another one" in seen(made).notes


@pytest.mark.parametrize("targets", [1, 100])
def test_samples_stay_as_they_are_with_many_targets(targets: int) -> None:
    observed = seen(*(target(VLLM, VLLM, instance=f"h:{n}") for n in range(targets)))
    assert value(observed, "sum(vllm:num_requests_running)") == 3 * targets
