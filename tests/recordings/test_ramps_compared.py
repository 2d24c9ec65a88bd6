"""Finished ramps of simulated servers compared: over months, across releases, and between two runs of one server."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import cli, simulated_vllm
from support.offered_load import offered
from support.paths import RECORDINGS, ROOT
from support.schemas import validator

from diag.core.contract import Contract
from diag.core.errors import BadUsage
from diag.ramp.analysis import Circumstances, MeasuredOn, conclude
from diag.ramp.comparison import RampComparison, compare
from diag.ramp.plan import Limits, RequestLengths
from diag.ramp.results import ClientResult, Latency, Offer
from diag.ramp.step import Step, measure
from diag.report import ramp as text
from diag.report import ramps
from diag.sources import kept_ramp

LIMITS = Limits(Contract(ttft_seconds=10.0), seconds=10.0)
ON = MeasuredOn(
    launch="vllm serve m --max-num-seqs 8 --api-key ${KEY:?}",
    gpus=("NVIDIA H100 80GB HBM3",),
    at=1.79e9,
    power_limits=(700.0,),
    load_by="vllm bench serve 0.32.0",
)
LENGTHS = RequestLengths(128, 55, "as given")
RAMP = validator(ROOT / "diag/report/diag.ramp.schema.json")
RAMPS = validator(ROOT / "diag/report/diag.ramps.schema.json")
Document = dict[str, Any]
Write = Callable[..., str]


def steps(folder: Path, seed: int, slower: float) -> list[Step]:
    """Return the steps of a ramp up to twice the cap of the server; prompts and answers vary with the seed."""
    server = simulated_vllm.Limits(max_num_seqs=8, step=0.018 * slower)
    drawn, found = random.Random(seed), []
    for concurrency in (1, 2, 4, 8, 16):
        answers = [drawn.randint(30, 80) for _ in range(14 * min(concurrency, 8) + 8)]
        itl = server.step + min(concurrency, 8) * server.each

        def latency(p50: float, count: int = len(answers)) -> Latency:
            return Latency(p50, 1.02 * p50, drawn.uniform(1.05, 1.06) * p50, count)

        client = ClientResult(len(answers), 0, 12.0, 1.0, 1.0, ttft=latency(2 * itl), itl=latency(itl))
        seen = offered(folder / f"{concurrency}", server, concurrency, answers)
        step = measure(Offer(concurrency=concurrency), seen, LIMITS.contract, client)
        assert step
        found.append(step)
    return found


def document(measured: list[Step], version: str = "0.32.0", on: MeasuredOn = ON) -> Document:
    known = Circumstances("sim:8000", "m", version, lengths=LENGTHS, measured_on=on)
    found = text.DOCUMENT.of(conclude(measured, LIMITS, known))
    RAMP.validate(found)
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Step]]:
    """Two runs of one server, and one of a release whose steps take 1.3 times as long."""
    runs = {"old": (1, 1.0), "again": (2, 1.0), "slow": (3, 1.3)}
    return {name: steps(tmp_path_factory.mktemp(name), *run) for name, run in runs.items()}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to(name: str, content: Document) -> str:
        (tmp_path / name).write_text(json.dumps(content))
        return str(tmp_path / name)

    return to


def compared(before: Document, after: Document) -> RampComparison:
    return compare(kept_ramp.parse(before, "old.json", 0.0), kept_ramp.parse(after, "new.json", 0.0))


def test_two_runs_of_one_server_show_no_change(measured: Mapping[str, list[Step]], write: Write) -> None:
    old, again = (write(f"{name}.json", document(measured[name])) for name in ("old", "again"))
    done = cli.diag("ramp", again, "--against", old)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("NO CHANGE")
    assert "Bound by   sequence cap, as before" in done.stdout
    assert "Cause" not in done.stdout


def test_a_slower_release_is_named(measured: Mapping[str, list[Step]], write: Write) -> None:
    old, new = write("old.json", document(measured["old"])), write("new.json", document(measured["slow"], "0.33.0"))
    done = cli.diag("ramp", new, "--against", old, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    RAMPS.validate(found)
    comparison = found["comparison"]
    assert (comparison["verdict"], comparison["cause"]) == ("worse", "release")
    assert comparison["rates"][0]["change"] == pytest.approx(-0.2, abs=0.07)
    assert {figure["name"] for figure in comparison["latencies"] if figure["verdict"] == "worse"} == {"ITL", "TTFT"}
    shown = " ".join(cli.diag("ramp", new, "--against", old).stdout.split())
    assert "Cause release: vLLM 0.32.0 -> 0.33.0, the only known difference" in shown
    assert "**WORSE: ceiling" in cli.diag("ramp", new, "--against", old, "--markdown").stdout


def test_of_two_changes_together_neither_is_blamed(measured: Mapping[str, list[Step]]) -> None:
    on = ON._replace(launch="vllm serve m --max-num-seqs 8 --enforce-eager", power_limits=(500.0,))
    found = compared(document(measured["old"]), document(measured["slow"], on=on))
    assert [difference.category for difference in found.differences] == ["hardware", "flags"]
    assert ramps.cause(found) == "several"
    both = "changed together, cannot tell which: power limits 700 W -> 500 W; --enforce-eager not set -> set"
    assert ramps.cause_sentence(found) == both
    unchanged = compared(document(measured["old"]), document(measured["slow"]))
    assert ramps.cause(unchanged) == "none known"


def older(content: Document) -> Document:
    """Return a result as diag wrote it before it kept launch, GPUs, time and the scatter of its steps."""
    new = ("launch", "gpus", "gpu_power_limits", "measured_at", "load_by", "prefix_tokens", "length_spread")
    old = {name: value for name, value in json.loads(json.dumps(content)).items() if name not in new}
    for step in [*old["steps"], old["ceiling"]]:
        for name in ("holds", "quarters", "cpu_wait"):
            del step[name]
        for name in ("itl", "ttft", "e2e"):
            del step[name]["bucket"], step["client"][name]["bucket"]
    return old


def test_a_result_of_an_older_diag_is_compared_as_far_as_it_tells(measured: Mapping[str, list[Step]]) -> None:
    found = compared(older(document(measured["old"])), document(measured["slow"], "0.33.0"))
    assert found.verdict == "worse"
    assert found.unknown == ("flags", "GPUs", "GPU power limits", "load generator")
    assert "not known for both: flags" in ramps.cause_sentence(found)
    assert compared(older(document(measured["old"])), document(measured["again"])).verdict == "no change"
    assert "not known" in ramps.render(found)


def test_a_trend_has_one_line_for_each_ramp_by_time(measured: Mapping[str, list[Step]], write: Write) -> None:
    runs = [
        ("c.json", "slow", "0.33.0", ON._replace(at=1.792e9, gpus=("NVIDIA H100 80GB HBM3",) * 8)),
        ("b.json", "again", "0.32.0", ON._replace(at=1.791e9)),
        ("a.json", "old", "0.32.0", ON),
    ]
    files = [write(name, document(measured[run], version, on)) for name, run, version, on in runs]
    lines = cli.diag("ramp", *files).stdout.splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines[-3:]]
    assert [row[0] for row in rows] == ["2026-09-21", "2026-10-03", "2026-10-14"]
    assert lines[-1].endswith("worse: release, hardware")
    found = json.loads(cli.diag("ramp", *files, "--json").stdout)
    RAMPS.validate(found)
    assert [line["verdict"] for line in found["results"]] == [None, "no change", "worse"]
    itls = [line["itl_p99"] for line in found["results"]]
    assert itls[2] / itls[0] == pytest.approx(1.3, abs=0.05)
    assert "--max-num-seqs" not in cli.diag("ramp", *files, "--markdown").stdout


def test_a_ramp_that_is_compared_at_once_keeps_the_comparison(tmp_path: Path) -> None:
    recording = str(RECORDINGS / "queue_saturation")
    first = cli.diag("ramp", recording, "--attach", "--json")
    old = tmp_path / "old.json"
    old.write_text(first.stdout)
    page = tmp_path / "page.html"
    done = cli.diag("ramp", recording, "--attach", "--against", str(old), "--json", "--html", str(page))
    found = json.loads(done.stdout)
    RAMP.validate(found)
    assert (done.returncode, found["against"]["verdict"]) == (0, "no change")
    assert kept_ramp.parse(found, "new", 0.0).ceiling == kept_ramp.read(old).ceiling
    assert "<dt>Against</dt><dd>NO CHANGE: " in page.read_text()


def test_recorded_servers_that_serve_less_are_worse() -> None:
    """One server: clients of as many LoRA adapters as it has slots for, and of three times as many."""
    fits, thrash = (
        kept_ramp.parse(json.loads(cli.diag("ramp", str(RECORDINGS / name), "--attach", "--json").stdout), name, 0.0)
        for name in ("lora_fits", "lora_thrash")
    )
    assert (compare(fits, thrash).verdict, compare(thrash, fits).verdict) == ("worse", "better")


# -- what counts as a difference ---------------------------------------------------------------------------------------


def ramp_of(rates: Mapping[int, float], **changes: object) -> kept_ramp.RampResult:
    """Return a bounded ramp that served so many requests/s at each concurrency; ITL p99 is 20 ms + 1 ms a request."""
    content = {"schema": "diag.ramp/1", "model": "m", "vllm": "0.32.0", "binds": {"id": "compute", "name": "compute"}}
    listed = []
    for concurrency, rate in rates.items():
        itl = {"p50": 0.02, "p90": 0.0199 + concurrency / 1000, "p99": 0.02 + concurrency / 1000, "observed": 400}
        quarters = [100.0 * rate] * 4
        step = {"concurrency": concurrency, "counts": True, "within_slo": True, "requests_per_second": rate}
        step |= {"requests": 30 * rate, "seconds": 30.0, "output_tokens_per_second": 100 * rate, "quarters": quarters}
        listed.append(step | {"itl": itl, "ttft": {}, "client": {"itl": itl}} | changes)
    return kept_ramp.parse(content | {"ceiling": listed[-1], "steps": listed}, "ramp.json", 0.0)


BASE = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 10.0}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "worse"),
        ({"quarters": [600.0, 1500.0, 700.0, 1200.0]}, "no change"),  # the server itself swings by 50 %
        ({"quarters": []}, "worse"),  # 300 requests: chance explains 12 % of each
        ({"quarters": [], "requests": 40.0}, "no change"),
        ({"cpu_wait": 0.3}, "no change"),  # 30 % of its time went to neighbours
    ],
)
def test_a_ceiling_is_worse_only_beyond_its_scatter(changes: dict[str, object], verdict: str) -> None:
    after = ramp_of({load: 0.7 * rate if load == 16 else rate for load, rate in BASE.items()}, **changes)
    assert compare(ramp_of(BASE), after).rates[0].verdict == verdict


def test_a_ceiling_that_was_not_reached_is_not_worse() -> None:
    """A ramp that was cut short at 4 requests at a time, or whose client was the limit."""
    short = ramp_of({1: 1.0, 2: 2.0, 4: 4.0})
    for after in (short._replace(binds=""), short._replace(binds="client")):
        found = compare(ramp_of(BASE), after)
        assert found.rates[0].verdict == "not comparable"
        assert found.verdict == "no change", "the latencies are as before"
    assert compare(ramp_of(BASE), short).rates[0].verdict == "worse"


def test_a_step_that_misses_the_slo_only_now_bounds_the_ceiling() -> None:
    """Steps double the load: eight at a time served as much as before, and missed the SLO by a little."""
    after = ramp_of({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})
    missed = after._replace(steps=(*after.steps[:3], after.steps[3]._replace(holds=False)), ceiling=after.steps[2])
    before = ramp_of({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})
    assert compare(before, missed).rates[0].verdict == "no change"
    assert compare(before, missed._replace(steps=missed.steps[:3])).rates[0].verdict == "worse"


def test_a_ramp_without_any_load_inside_the_slo_is_worse() -> None:
    after = ramp_of(BASE)
    lost = after._replace(steps=tuple(step._replace(holds=False) for step in after.steps), ceiling=None)
    found = compare(ramp_of(BASE), lost)
    assert (found.verdict, ramps.headline(found)) == ("worse", "WORSE: no load is served inside the SLO any more")
    assert compare(ramp_of({1: 1.0}), lost._replace(steps=lost.steps[2:])).verdict != "worse", "it began above it"


def test_latency_between_two_steps_is_no_evidence_of_a_slower_server() -> None:
    """At 4 requests/s: 24 ms before; between 22 ms at 2 and 60 ms at 8 requests/s the line has 35 ms."""
    after = ramp_of({2: 2.0, 40: 8.0, 80: 10.0})
    found = {figure.rate: figure for figure in compare(ramp_of(BASE), after).latencies}
    assert (found[4.0].is_interpolated, found[4.0].verdict) == (True, "no change")
    assert found[1.0].why == "not measured at this rate"
    assert found[10.0].why == "near the limit"
    assert found[8.0].verdict == "worse", "60 ms, where it was 28 ms"


def test_a_p99_within_a_bucket_or_its_neighbour_is_no_change() -> None:
    def by_histogram(p99: float, bucket: tuple[float, float] | None) -> kept_ramp.RampResult:
        found = ramp_of(BASE)
        itl = kept_ramp.Latency(0.02, 0.02, p99, 400.0, bucket=bucket)
        return found._replace(steps=tuple(step._replace(itl=itl, client_itl=None) for step in found.steps))

    before = by_histogram(0.0249, (0.01, 0.025))
    for p99, bucket, verdict in (
        (0.0498, (0.025, 0.05), "no change"),
        (0.0740, (0.05, 0.075), "worse"),
        (0.0740, None, "not comparable"),
    ):
        figures = compare(before, by_histogram(p99, bucket)).latencies
        assert figures[0].verdict == verdict


NO_STEPS: Document = {"schema": "diag.ramp/1", "model": "m", "vllm": "1", "ceiling": None, "steps": []}


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"schema": "diag.ramp/1"}', '{"schema": "diag.doctor/1"}', "[" * 10_000),
        json.dumps(NO_STEPS | {"steps": [{"counts": True, "concurrency": 1}]}),
        json.dumps(NO_STEPS | {"launch": "x" * 100_000}),
        json.dumps(NO_STEPS | {"gpu_power_limits": [float("nan")]}),
        json.dumps(NO_STEPS | {"measured_at": "soon"}),
    ],
)
def test_a_file_that_is_no_ramp_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "ramp.json"
    file.write_text(content)
    with pytest.raises(BadUsage, match=r"is no result of diag ramp --json"):
        kept_ramp.read(file)


def test_wrong_usage_is_one_sentence(write: Write, tmp_path: Path) -> None:
    file = write("ramp.json", NO_STEPS)
    for words in (
        ("ramp", file, file, "--against", file),
        ("ramp", file, "--against", str(tmp_path / "missing")),
        ("ramp", file, "http://127.0.0.1:9"),
    ):
        done = cli.diag(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1), done.stderr
    assert cli.diag("ramp", file, "--against", file).returncode == 3, "neither has a step"
