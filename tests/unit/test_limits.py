"""docs/limits.md: the limits that it states are those of the code, and hold."""

import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT

from diag.cli import options
from diag.commands import doctor, explain, lint
from diag.commands.mcp.answers import CHARACTERS, COMPACT, DETAILED, LONGEST_COMMAND
from diag.commands.observe import ObserveOptions
from diag.commands.ramp import MOST_FILES
from diag.core import files
from diag.core.errors import BadUsage
from diag.diagnosis import decision_table, fleet
from diag.exporter import infiniband, nccl
from diag.exposition import LONGEST_LINE, MOST_BYTES, MOST_LINES, NotMetrics, scrapes
from diag.exposition.scrapes import Parser
from diag.http import address, client, prometheus_api, vllm_server
from diag.log import parse_line, tail
from diag.log.memory_sizes import read_memory_log
from diag.normal import baseline
from diag.promql import parser
from diag.ramp import results
from diag.sources import kept_ramp, observation
from diag.sources.kubernetes import cluster, servers
from diag.sources.prometheus import client as queries
from diag.sources.recording import bundle, reader
from diag.vllm.command import parse
from diag.vllm.memory import model

MIB = 2**20
SCRAPING = options.declared("shared")["Scraping"]
ROWS = {
    cells[1].strip(): cells[2]
    for cells in (row.split("|") for row in (ROOT / "docs/limits.md").read_text().splitlines())
    if len(cells) == 6
}
STATED = {
    "metrics page": f"{MOST_BYTES // MIB} MiB, {MOST_LINES:,} lines",
    "line of a page": f"{LONGEST_LINE // 1024} KiB",
    "series of one server": f"{scrapes.MOST_SERIES:,}",
    "line of a log": f"{parse_line.MOST_CHARACTERS // 1024} KiB",
    "text of `diag explain`": f"{explain.MOST_CHARACTERS // 1024} KiB",
    "log that is followed (`--log`)": f"first {tail.FIRST // MIB} MiB and last {tail.LAST // MIB} MiB",
    "log of a recording, a log as target, `diag budget --log`": f"first {parse_line.FIRST // MIB} MiB and "
    f"last {parse_line.LAST // MIB} MiB",
    "log on standard input of `diag budget`": f"{(parse_line.FIRST + parse_line.LAST) // MIB} MiB",
    "pages of a recording, unpacked": f"{reader.MOST_PAGES // MIB:,} MiB",
    "scrapes of a recording": f"{reader.MOST_SCRAPES:,} of {reader.MOST_TARGETS:,} servers",
    "values of a recording (scrapes times series)": f"{reader.MOST_VALUES:,}",
    "servers, engines and GPUs, times the evaluation times": f"{observation.MOST_JUDGED:,}",
    "bundle (`.tar.zst`)": f"{bundle.MOST_FILES} files and {bundle.MOST_UNPACKED // MIB:,} MiB, unpacked; a manifest "
    f"of {bundle.MOST_MANIFEST // MIB} MiB",
    "JSON": f"{files.MOST_JSON_LEVELS} levels",
    "`diag.toml`, `recording.toml`": f"{files.MOST_TOML_BYTES // MIB} MiB, {files.MOST_TOML_PARTS} levels",
    "baseline file (`--baseline`)": f"{baseline.MOST_BYTES // MIB} MiB; {baseline.MOST_KINDS} kinds of server, "
    f"{baseline.MOST_ROWS:,} windows of each",
    "command, script, manifest, `--config` file": f"{parse.MOST_BYTES // MIB} MiB; the first 100 servers of one text, "
    f"{parse.MOST_ARGUMENTS:,} words of each",
    "notebook": f"{parse.MOST_NOTEBOOK // MIB} MiB; {parse.MOST_BYTES // MIB} MiB without the outputs",
    "YAML in them": f"{files.MOST_YAML_VALUES:,} values with aliases written out, {files.MOST_YAML_LEVELS} levels",
    "`config.json` of a model": f"{model.MOST_BYTES // MIB} MiB",
    "PromQL of an incident file": f"{parser.MOST_DEEP} operators and parentheses",
    "answer of a Prometheus": f"{prometheus_api.MOST_BYTES // MIB} MiB",
    "servers, engines or GPUs of a Prometheus that its rules do not clear": f"{fleet.MOST_SUBJECTS:,}, "
    f"{fleet.MOST_PARTS} of one server",
    "answers of a Prometheus that are none": f"{queries.MOST_UNUSABLE}",
    "time-outs of queries": f"{queries.MOST_TIMEOUTS - 1}",
    "pods and servers of a namespace (`--k8s`)": f"{cluster.MOST_PODS:,} and {servers.MOST_SERVERS}",
    "log of a container (`--k8s`)": f"first {servers.FIRST_BYTES // 1024} KiB and last {servers.LAST_LINES:,} lines",
    "pods in a bundle (`diag bundle --k8s`)": f"{servers.MOST_PODS_KEPT} pods, {servers.MOST_EVENTS} events",
    "credential plugin of a kubeconfig": f"{cluster.PLUGIN_SECONDS:g} s",
    "results of a load tool (`diag ramp --results`)": f"{results.MOST_BYTES // MIB} MiB, {results.MOST_STEPS:,} steps",
    "finished ramps (`diag ramp RESULT...`, `--against`)": f"{kept_ramp.MOST_BYTES // MIB} MiB; {MOST_FILES} results",
    "file with a token or headers": f"{address.MOST_BYTES // MIB} MiB",
    "answer of `diag mcp`": f"{CHARACTERS * COMPACT:,} characters, with `detail` {CHARACTERS * DETAILED:,}",
    "launch command given to `diag mcp`": f"{LONGEST_COMMAND:,} characters",
    "`--every`, `--probe`": f"{SCRAPING['every']['max']:,.0f} s",
    "`--for`": f"{SCRAPING['duration']['max']:,.0f} s",
    "`--timeout`": f"{SCRAPING['timeout']['max']:,.0f} s",
    "status of NCCL's ranks (`--nccl-ras`)": f"{nccl.MOST_BYTES // MIB} MiB, {nccl.ANSWER_SECONDS:g} s; "
    f"{nccl.MOST_NAMED} ranks",
    "InfiniBand ports of a host": f"{infiniband.MOST_PORTS}",
    "`/version`, `/v1/models`, `/server_info`": f"{vllm_server.SMALL // MIB} MiB",
}


@pytest.mark.parametrize("name", STATED)
def test_the_documentation_states_the_limit_of_the_code(name: str) -> None:
    assert STATED[name] in ROWS[name]
    assert files.MOST_YAML_BYTES == parse.MOST_BYTES
    assert client.Request("/").most_bytes == MOST_BYTES


@pytest.mark.slow
def test_a_text_to_explain_is_refused_at_once_beyond_a_line() -> None:
    name = "KeyError: 'model.layers.0.self_attn.qkv_proj.weight_scale' "
    start = time.process_time()
    with pytest.raises(BadUsage, match=r"the text has 200,000 characters; of at most 65,536.*diag doctor LOG"):
        explain.run((name * 4000)[:200_000], None)
    assert time.process_time() - start < 1
    with pytest.raises(BadUsage, match="there is no incident"):
        explain.run("x" * explain.MOST_CHARACTERS, None)


def test_a_launch_of_too_many_words_is_refused() -> None:
    """Every rule of lint reads all of them: 150,000 took 20 s."""
    with pytest.raises(BadUsage, match="the command has more than 10,000 words"):
        lint.run("vllm serve m \\\n" * 4_000, lint.LintOptions("0.32.0"), as_json=False)
    assert "2997 words too many" in lint.run("vllm serve m \\\n" * 1_000, lint.LintOptions("0.32.0"), as_json=False)[0]


def series(count: int) -> bytes:
    return b"".join(b'vllm:x{engine="0",model_name="%d"} 1\n' % number for number in range(count))


def test_a_page_of_too_many_lines_is_a_failed_scrape_at_once() -> None:
    with pytest.raises(NotMetrics, match=f"sent more than {MOST_LINES:,} lines"):
        Parser("h:1").parse(b"\n" * (MOST_LINES + 1))


def test_too_long_line_is_skipped_alone() -> None:
    parsed = Parser("h:1").parse(b'vllm:x{a="%s"} 1\nvllm:y 2\n' % (b"z" * LONGEST_LINE))
    assert parsed.values.tolist() == [2]
    assert "line 1 is not a metric" in parsed.faults["malformed"]


def test_the_memory_of_a_page_is_that_of_the_documentation() -> None:
    """80 MiB for 50,000 series and 200,000 lines; a tenth of both takes no more than a tenth, and 1 MiB."""
    text = series(scrapes.MOST_SERIES // 10) + b"# HELP x y\n" * (3 * scrapes.MOST_SERIES // 10)
    tracemalloc.start()
    Parser("h:1").parse(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 9 * MIB


def test_the_memory_of_an_answer_is_that_of_the_documentation() -> None:
    """500 MiB for 32 MiB; here for a MiB of it."""
    pairs = [[1_795_230_000 + at, "1"] for at in range(54_000)]
    body = json.dumps({"data": {"result": [{"metric": {}, "values": pairs}]}}).encode()
    assert 0.9 * MIB < len(body) < 1.1 * MIB
    tracemalloc.start()
    kept = prometheus_api.decoded(client.Response(200, body))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept.document["data"]
    assert peak < 500 / 32 * MIB


BEGIN = "INFO 11-22 10:00:00 [gpu_model_runner.py:1] Model loading took {} GiB and 1.0 seconds\n"


def test_large_log_is_read_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_line, "FIRST", 2**10)
    monkeypatch.setattr(parse_line, "LAST", 2**10)
    file = tmp_path / "vllm.log"
    with file.open("wb") as log:
        log.write(b"the first line\n" + BEGIN.format("1.00").encode())
        log.truncate(2**40)  # sparse: a terabyte to whoever reads all of it
        log.seek(0, 2)
        log.write(b"\nthe last line\n")
    read = list(parse_line.read_lines(file))
    assert (read[0], read[-2]) == ((1, "the first line"), (0, "the last line"))
    assert read_memory_log(str(file)).sizes["weights"]
    assert "of vllm.log only the first" in read_memory_log(str(file)).skipped


@pytest.mark.parametrize(
    ("limit", "most", "name"), [("MOST_TARGETS", 2, "servers"), ("MOST_VALUES", 4, "values"), ("MOST_PAGES", 80, "MiB")]
)
def test_a_recording_beyond_a_limit_is_judged_by_its_beginning(
    limit: str, most: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, limit, most)
    text = "".join(f"# scrape {at} h:{at}\nvllm:x 1\nvllm:y 1\n" for at in range(1, 9))
    monkeypatch.setattr(reader, "STEP", 10)
    (tmp_path / "metrics.prom").write_text(text)
    observed = reader.read(tmp_path)
    assert observed.scrapes == 2
    assert any(
        note.startswith("the recording goes beyond") and f"{name}: its first 2" in note for note in observed.notes
    )


def test_many_engines_are_judged_at_the_last_moments_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "MOST_JUDGED", 12)
    scrapes = (f'# scrape {at} h:1\nvllm:x{{engine="{at % 3}"}} 1\n' for at in range(1, 9))
    (tmp_path / "metrics.prom").write_text("".join(scrapes))
    observed = reader.read(tmp_path)
    assert observed.instants.tolist() == [6000, 7000, 8000]
    assert "only the last 3 of 8 evaluation times were judged: too many servers, engines and GPUs" in observed.notes


@pytest.mark.slow
@pytest.mark.nightly
def test_the_cpu_of_a_million_scrape_lines_grows_with_the_scrapes_that_are_used(tmp_path: Path) -> None:
    """The first 200,000 are, at most twenty times the CPU of 20,000 in the same run: the lines behind them are read."""
    costs = []
    for name, lines in (("few", 20_000), ("many", 1_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.prom").write_text("".join(f"# scrape {at} h:1\n" for at in range(lines)))
        start = time.process_time()
        report = doctor.run(ObserveOptions([str(tmp_path / name)]))
        costs.append(time.process_time() - start)
    assert report.observed.scrapes == reader.MOST_SCRAPES
    assert any("its first 200,000 scrapes were used" in note for note in report.observed.notes)
    assert costs[1] < 20 * costs[0], costs


def test_a_history_of_a_reading_is_a_sequence_with_holes() -> None:
    history = decision_table.History(np.array([1.0, np.nan, 3.0]))
    assert (list(history), history[-1], history[1:], len(history)) == ([1.0, None, 3.0], 3.0, (None, 3.0), 3)
    assert history == (1.0, None, 3.0)
