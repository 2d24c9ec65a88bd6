"""A hostile label is only text, wherever it lands: no escape, no markup, no link, no mention, no second command."""

import csv
import io
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from support import rewriting, scenarios, top_views
from support.cli import diag
from support.paths import ROOT
from support.sampling import some

from diag.cli.app import app
from diag.commands import doctor, lint, observe, verify
from diag.commands.mcp import answers
from diag.commands.mcp.answers import COMPACT, DETAILED, quote_foreign, shorten, to_json
from diag.commands.mcp.targets import own_texts
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.formatting import MOST_SHOWN, pasted
from diag.diagnosis.diagnose import Quote
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report, Transitions
from diag.diagnosis.roll_call import roll_call
from diag.exporter.process.server import Owner
from diag.exporter.process.stacks import ProcessStack, StackFrame
from diag.exposition import render
from diag.knowledge.catalog import load
from diag.report import dataframe, gpus, html, markdown, terminal
from diag.report import json as as_json
from diag.report import verify as verify_text
from diag.report.layout import continued
from diag.sources.recording.bundle import unpacked
from diag.sources.recording.reader import read

EVIL = (
    "=1+1|0;touch /tmp/owned|sh #`id`$(id)'\"\\ {value} {launch}<script>alert(1)</script>"
    "[x](http://evil.example) ![y](//e) www.evil.example @someone #123 GH-7 $x$ ~~a~~ &lt;"
    "\x1b]0;title\x07\x1b[31m\r\n\u202e\u200b\u2066\u3164 --end"
)
UNSEEN = set("\x1b\x07\r\x00\u202e\u200b\u2066\u3164")
INSIDE = "the harm"
LOAD_TOOLS = ROOT / "tests" / "data" / "load_tools"
LAUNCH = "vllm serve m --max-num-seqs 64"


def sent(text: str) -> str:
    """Return the label as it is written between the quotes of a page."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def recorded(folder: Path, evil: str) -> Path:
    """A hot GPU and a stopped worker of a server, with the same harm in every label that diag reads."""
    hot = scenarios.gpu(
        throttle_seconds_total__sw_thermal=lambda t: 0.4 * t, clock_hertz__sm=1e9, temperature_margin_celsius=1
    )
    process = 'pid="4711",role="engine",rank="0"'
    stopped = f"diag_vllm_process_stopped{{{process}}} 1\ndiag_vllm_process_cpu_seconds_total{{{process}}} 9\n"
    stopped += f'diag_vllm_process_state{{{process},host="{INSIDE}",state="stopped"}} 1\n'

    def pages() -> Iterator[rewriting.Scrape]:
        scrapes = list(rewriting.scrapes("engine_stalled"))[12:28]  # while it is stalled
        for time, _, page in scrapes:
            said = scenarios.text(time - scrapes[0][0], page, (hot,)) + stopped
            said = said.replace('gpu="0"', f'gpu="{INSIDE}"').replace('uuid="GPU-0"', f'uuid="{INSIDE}"')
            named = re.sub(r'model_name="[^"]*"', f'model_name="{INSIDE}"', page)
            other = "\n".join(line for line in named.splitlines() if 'engine="0"' in line)
            both = named + other.replace('engine="0"', f'engine="{INSIDE}"') + "\n" + said
            yield time, "h:1/=|`x`@someone", both.replace(INSIDE, sent(evil))

    return rewriting.write(folder, pages())


@cache
def judged(folder: Path) -> Report:
    return doctor.run(ObserveOptions([str(folder)], launch=LAUNCH))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("evil"), EVIL)


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    found = judged(folder)
    assert {"gpu_thermal_throttling", "engine_stalled"} <= scenarios.present(found)
    return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """More servers than are told one by one, each with the harm in the name of its engine and its model."""
    name = "kv_cascade"
    pages = rewriting.side_by_side(*[list(rewriting.thinned(rewriting.scrapes(name), 5)) for _ in range(12)])
    harm = f'engine="{sent(EVIL)}",model_name="{sent(EVIL)}"'
    hostile = ((at, host, page.replace('engine="0",model_name="tiny"', harm)) for at, host, page in pages)
    return doctor.run(ObserveOptions([str(rewriting.write(tmp_path_factory.mktemp("fleet"), hostile))]))


def told(folder: Path) -> dict[str, str]:
    """Return the output of the other commands for the recording, and for a command with the harm in each word."""
    compared = verify.verify(str(folder), ObserveOptions([str(folder)]))
    evil = shlex.quote(EVIL)
    command = f"X={evil} vllm serve {evil} --served-model-name {evil} --max-num-seqs {evil} {shlex.quote('--' + EVIL)}"
    return {
        "verify": verify_text.render(compared),
        "verify in markdown": verify_text.render_markdown(compared),
        "config": observe.show_configuration(ObserveOptions([str(folder)]), as_json=False),
        "lint": lint.run(command, lint.LintOptions(vllm_version="0.32.0"), as_json=False)[0],
    }


def printed(report: Report) -> dict[str, str]:
    return {
        "short": terminal.render(report),
        "verbose": terminal.render(report, verbose=True),
        "quiet": terminal.render(report, quiet=True),
        "markdown": markdown.render(report, verbose=True),
        "issue": markdown.render_issue(report, {EVIL: EVIL}, EVIL),
        "html": html.render(report),
        "watch": terminal.watch_started(report) + "".join(map(terminal.watch_changed, Transitions().observe(report))),
    }


def test_outputs_have_no_escape_sequence_and_no_hidden_character(report: Report, fleet: Report, folder: Path) -> None:
    for name, text in [*printed(report).items(), *printed(fleet).items(), *told(folder).items()]:
        assert not UNSEEN & set(text), name
        assert text.isprintable() or set(filter(lambda char: not char.isprintable(), text)) == {"\n"}, name


def test_live_view_shows_label_markup_as_text(folder: Path, tmp_path: Path) -> None:
    markup = "[reverse]x[/reverse][@click=app.quit]y[/][/bold]"

    async def look() -> None:
        for recording, seen in ((folder, r"\x1b[31m"), (recorded(tmp_path, markup), markup)):
            async with top_views.shown(top_views.RecordedFeed(read(recording)), (240, 120)) as (app, pilot):
                screens = [top_views.screen(app), await top_views.press(pilot, "enter", shows=seen)]
                screens.append(await top_views.press(pilot, "o", shows="Meaning"))
                for line in [line for lines in screens for line in lines]:
                    assert line.isprintable()
                    assert not UNSEEN & set(line)

    top_views.run(look())


def test_json_has_labels_unchanged(report: Report) -> None:
    subjects = [each["subject"] for each in json.loads(as_json.render(report))["diagnoses"]]
    assert {each["engine"] for each in subjects if "engine" in each} >= {EVIL}


LIVE = (
    *(r"(?<!\\)\[x", r"(?<!\\)<(?!!-- -->)", r"[a-z]://(?!github\.com/vllm-project/)", r"www\."),
    *(r"@\w", r"#\d", r"GH-\d", r"(?<!\\)[`$~&]"),
)
"""Regular expressions of what does something in Markdown."""


def is_harmless_markdown(written: str) -> None:
    text = re.sub(r"(`+).*?\1", "", written, flags=re.DOTALL)
    for live in LIVE:
        assert not re.search(live, text), live
    for is_table, rows in groupby(text.splitlines(), lambda line: line.startswith("|")):
        assert not is_table or len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


@pytest.mark.parametrize("of", ["report", "fleet", "verify", "issue"])
def test_markdown_has_no_link_mention_or_markup_from_a_label(
    of: str, report: Report, fleet: Report, folder: Path
) -> None:
    written = (
        told(folder)["verify in markdown"]
        if of == "verify"
        else printed(fleet if of == "fleet" else report)["issue" if of == "issue" else "markdown"]
    )
    assert "someone" in written
    is_harmless_markdown(written)


@pytest.mark.parametrize("detail", [False, True])
def test_label_in_an_mcp_answer_is_enclosed_in_marks_that_it_cannot_close(
    detail: bool, report: Report, fleet: Report, folder: Path
) -> None:
    one, own = ObserveOptions([str(folder)]), own_texts(ObserveOptions([]))
    command = f"vllm serve {shlex.quote(EVIL)} {shlex.quote('--' + EVIL)} --max-num-seqs {shlex.quote(EVIL + '⟧')}"
    found = lint.run(command, lint.LintOptions(foreign=True), as_json=True)[0]
    quote = Quote(EVIL, file=EVIL, line=1, process=EVIL, cause=EVIL)
    logged = report._replace(findings=tuple(each._replace(quotes=(quote,)) for each in report.findings))
    documents = [
        answers.report(logged, detail),
        answers.report(fleet, detail),
        answers.findings(json.loads(found), detail),
    ]
    documents += [answers.configuration(json.loads(observe.show_configuration(one, as_json=True)), detail)]
    documents += [answers.comparison(verify.verify(str(folder), one), detail)]
    for document in documents:
        answer = to_json(shorten(quote_foreign(document, own), DETAILED if detail else COMPACT))
        assert not UNSEEN & set(answer)
        outside = re.sub("⟦[^⟦⟧]*⟧", "", answer)
        assert not {word for word in ("touch", "script", "evil.example", "someone", "⟦", "⟧") if word in outside}
    assert all(each["quotes"][0]["text"] == EVIL for each in documents[0]["diagnoses"] if each["primary"])


def test_html_has_no_element_from_a_label(report: Report, fleet: Report) -> None:
    for page in (report, fleet):
        root = ElementTree.fromstring(html.render(page))
        assert not list(root.iter("script"))
        assert "<script>alert(1)</script>" in "".join(root.itertext())


def test_exporter_page_has_labels_unchanged() -> None:
    samples = [("diag_gpu_up", (EVIL, EVIL), 1.0)]
    (family,) = text_string_to_metric_families(render(samples).decode())
    assert [sample.labels for sample in family.samples] == [{"gpu": EVIL, "uuid": EVIL}]


def commands(report: Report) -> Iterator[str]:
    for finding in report.present:
        yield from (proposal.name for proposal in finding.proposals if proposal.fix.command)
        yield from [finding.relaunch] if finding.relaunch else []


def test_implausible_label_in_a_command_is_one_word_that_the_shell_refuses(report: Report) -> None:
    found = list(commands(report))
    assert any(command.startswith('nvidia-smi -i "${GPU:?}" -pl ') for command in found)
    assert 'kill -CONT 4711   # on "${HOST:?}"' in found
    for command in found:
        assert "touch" not in command and "script" not in command
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0, command
        assert shlex.split(command)


def test_a_table_for_a_spreadsheet_has_no_formula(folder: Path) -> None:
    observation = read(folder)
    source = observation
    out = io.StringIO(newline="")
    dataframe.write(load(), QueryCache(source, Contract()), out)
    out.seek(0)
    rows = list(csv.DictReader(out))
    assert {row["engine"] for row in rows} >= {f"'{pasted(EVIL)}"}
    assert not [
        cell for row in rows for name, cell in row.items() if name in dataframe.SUBJECT and cell.startswith("=")
    ]


def test_a_long_label_is_cut(tmp_path: Path) -> None:
    for name, text in printed(judged(recorded(tmp_path, "A" * 6_000))).items():
        assert len(max(re.findall("A+", text), key=len)) <= MOST_SHOWN, name
        assert len(text) < 300_000, name


@pytest.mark.parametrize("open_quote", ['"', "'", '"\\'])
def test_label_with_an_unclosed_quote_does_not_split_a_command(open_quote: str) -> None:
    assert continued(f"vllm serve m {open_quote * 20_000}x", "", "") == []


# -- every surface of every command -----------------------------------------------------------------------------------


def is_harmless_text(written: str) -> None:
    assert not UNSEEN & set(written)
    assert set(filter(lambda char: not char.isprintable(), written)) <= {"\n"}


def is_harmless_json(written: str) -> None:
    json.loads(written)
    assert not set(written) & (UNSEEN - {"\u202e", "\u200b", "\u2066", "\u3164"})


def is_harmless_html(written: str) -> None:
    assert not list(ElementTree.fromstring(written).iter("script"))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\u2066]", written)


def is_harmless_junit(written: str) -> None:
    assert not list(ElementTree.fromstring(written).iter("script"))


def is_harmless_csv(written: str) -> None:
    is_harmless_text(written)
    assert not [cell for row in csv.reader(io.StringIO(written)) for cell in row if cell.startswith(("=", "@"))]


def is_harmless_workflow(written: str) -> None:
    """Accept GitHub's commands, of which a label makes none."""
    is_harmless_text(written)
    assert all(re.match(r"::(error|warning|notice) file=[^:]*::|\S", line) for line in written.splitlines())
    assert not re.search(r"(?m)^::(?!error |warning |notice )", written)


NAME = "=@someone #12 `id`$(id)|<b>[x](y)\x1b[31m\u202e\u200b www.evil.example"
"""The harm in the name of a file or folder."""
Rule = Callable[[str], None]
EVIL_COMMAND = (
    f"X={shlex.quote(EVIL)} vllm serve {shlex.quote(EVIL)} --served-model-name {shlex.quote(EVIL)}"
    f" --max-num-seqs {shlex.quote(EVIL)} {shlex.quote('--' + EVIL)}"
)
RUNS: Mapping[tuple[str, str], tuple[str, Rule]] = {
    ("doctor", ""): ("{recording}", is_harmless_text),
    ("doctor", "--verbose"): ("{recording}", is_harmless_text),
    ("doctor", "--quiet"): ("{recording}", is_harmless_text),
    ("doctor", "--why"): ("engine_stalled {recording}", is_harmless_text),
    ("doctor", "--json"): ("{recording}", is_harmless_json),
    ("doctor", "--markdown"): ("{recording}", is_harmless_markdown),
    ("doctor", "--html"): ("{file} {recording}", is_harmless_html),
    ("doctor", "--log-level"): ("debug {recording}", is_harmless_text),
    ("verify", ""): ("{recording} {recording}", is_harmless_text),
    ("verify", "--json"): ("{recording} {recording}", is_harmless_json),
    ("verify", "--markdown"): ("{recording} {recording}", is_harmless_markdown),
    ("config", ""): ("{recording}", is_harmless_text),
    ("config", "--json"): ("{recording}", is_harmless_json),
    ("export", ""): ("{recording}", is_harmless_csv),
    ("export", "--csv"): ("{file} {recording}", is_harmless_csv),
    ("baseline", ""): ("save {recording} --even-ill --file {file}", is_harmless_text),
    ("bundle", "--output"): ("{file} {recording}", is_harmless_html),
    ("bundle", "--issue"): ("{recording}", is_harmless_markdown),
    ("ramp", ""): ("--results {results}", is_harmless_text),
    ("ramp", "--json"): ("--results {results}", is_harmless_json),
    ("ramp", "--markdown"): ("--against {ramp} --results {results}", is_harmless_markdown),
    ("ramp", "--html"): ("{file} --results {results}", is_harmless_html),
    ("lint", ""): ("{launch}", is_harmless_text),
    ("lint", "--json"): ("{launch}", is_harmless_json),
    ("lint", "--format"): ("markdown {launch}", is_harmless_markdown),
    ("lint", "--format sarif"): ("{launch}", is_harmless_json),
    ("lint", "--format junit"): ("{launch}", is_harmless_junit),
    ("lint", "--format github"): ("{launch}", is_harmless_workflow),
    ("budget", ""): ("{model}", is_harmless_text),
    ("budget", "--json"): ("{model}", is_harmless_json),
    ("preflight", ""): ("{launch} --gpu h100", is_harmless_text),
    ("preflight", "--verbose"): ("{launch} --gpu h100", is_harmless_text),
    ("preflight", "--json"): ("{launch} --gpu h100", is_harmless_json),
    ("preflight", "--markdown"): ("{launch} --gpu h100", is_harmless_markdown),
    ("explain", ""): ("{evil}", is_harmless_text),
    ("explain", "--markdown"): ("{evil}", is_harmless_markdown),
}
"""Words of each command, behind the option that chooses the surface, and what its output must not have."""
WRITES_FILE = ("--html", "--csv")
SHOW_NO_NAME = ("lint", "budget", "preflight")
"""Commands that repeat no name of a launch that is unusual in names."""
ELSEWHERE = {
    ("doctor", "--stacks"): "test_names_of_frames_and_locks_are_text_in_the_report",
    ("doctor", "--watch"): "test_outputs_have_no_escape_sequence_and_no_hidden_character",
    ("gpus", ""): "test_names_of_gpus_and_processes_are_text_in_the_table",
    ("gpus", "--json"): "test_names_of_gpus_and_processes_are_text_in_the_table",
    ("top", ""): "test_live_view_shows_label_markup_as_text",
    ("mcp", ""): "test_label_in_an_mcp_answer_is_enclosed_in_marks_that_it_cannot_close",
    ("exporter", ""): "test_exporter_page_has_labels_unchanged",
}
NO_LABEL = {
    ("record", ""): "prints its own address and folder, and keeps the pages as they came",
    ("replay", ""): "serves the pages as they are, and prints its own address and folder",
    ("incidents", ""): "prints declarations, which are trusted",
    ("generate", ""): "writes declarations and the site's own settings, which are trusted",
}
SURFACES = ("--json", "--markdown", "--html", "--csv", "--format", "--output", "--issue")
SURFACES += ("--verbose", "--quiet", "--why", "--watch", "--stacks", "--log-level")
INPUTS = {
    option
    for line in (
        "--alertmanager --all --all-gpus --at --at-end --attach --against --baseline --bench --check",
        "--concurrency --config --context --contract --dashboards --deadline --even-ill --every --fail-on --file",
        "--for --from --gpu --gpu-memory --gpus --here --ignore --incidents --include-unhealthy --instance --job",
        "--k8s --launch --listen --log --log-timezone --match --model --most --nccl-ras --only --output-tokens",
        "--price --probe --prometheus --prompt-tokens --ramp --rates --recordings --results --set --speed",
        "--step-seconds --timeout --tls-cert --tls-client-ca --tls-key --to --tokenizer --until --utilisation",
        "--vllm --vllm-python --vllm-version --web.config.file --window --yes",
    )
    for option in line.split()
}
"""Options that choose what is read or judged, not in which form something is written."""


def test_each_surface_of_each_command_has_its_row() -> None:
    """New commands, and options that this file does not know, fail here until their output has been attacked."""
    commands: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    declared = ((name, each) for name, command in commands.items() for each in command.params)
    options = {(name, max(each.opts, key=len)) for name, each in declared if each.param_type_name == "option"}
    assert {option for _, option in options} - INPUTS - {*SURFACES} == set()
    surfaces = {(name, option) for name, option in options if option in SURFACES}
    surfaces |= {(name, "") for name in commands if name != "bundle"}  # which is asked for a file or an issue
    rows = {(name, option.partition(" ")[0]) for name, option in RUNS} | ELSEWHERE.keys() | NO_LABEL.keys()
    assert surfaces == rows
    for test in ELSEWHERE.values():
        file, _, function = test.rpartition("::")
        assert f"def {function}(" in Path(file or __file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def places(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Files and words with the harm in them, as the rows name them."""
    place = tmp_path_factory.mktemp("places")
    named = {key: str(place / f"{NAME}.{key}") for key in ("results", "launch.yaml", "model", "ramp")}
    result = json.loads((LOAD_TOOLS / "aiperf-0.13.0.json").read_text(encoding="utf-8"))
    Path(named["results"]).write_text(json.dumps(with_harm(result)), encoding="utf-8")
    command = shlex.split(EVIL_COMMAND)[2:]
    services = {f"{NAME} {at}": {"image": "vllm/vllm-openai:v0.32.0", "command": command} for at in range(2)}
    Path(named["launch.yaml"]).write_text(json.dumps({"services": services}), encoding="utf-8")
    Path(named["model"]).mkdir()
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 128}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = llama | sizes | {"torch_dtype": EVIL, "quantization_config": {"quant_method": EVIL}}
    Path(named["model"], "config.json").write_text(json.dumps(config), encoding="utf-8")
    Path(named["ramp"]).write_text(diag("ramp", "--results", named["results"], "--json").stdout, encoding="utf-8")
    return {**named, "launch": named["launch.yaml"], "recording": str(folder), "evil": NAME}


def with_harm(value: Any) -> Any:
    """The document with the harm in every text that is no number, no time and no name of a schema."""
    if isinstance(value, dict):
        return {key: with_harm(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_harm(each) for each in value]
    return EVIL if isinstance(value, str) and "-" not in value and not value[:1].isdigit() else value


@pytest.mark.parametrize(("command", "surface"), some(RUNS, 12))
def test_no_surface_of_a_command_has_the_harm_of_a_label(
    command: str, surface: str, places: Mapping[str, str], tmp_path: Path
) -> None:
    words, is_harmless = RUNS[command, surface]
    file = tmp_path / "written"
    ran = diag(command, *surface.split(), *(word.format(**places, file=file) for word in words.split()))
    assert "defect" not in ran.stderr and ran.returncode in (0, 1, 2, 3, 64, 65), ran.stderr
    is_harmless_text(ran.stderr)
    written = file.read_text(encoding="utf-8") if surface in WRITES_FILE else ran.stdout
    if surface == "--output":
        with unpacked(file) as kept:
            written = (kept / "report.html").read_text(encoding="utf-8")
    assert ("someone" in written + ran.stderr) == (command not in SHOW_NO_NAME)
    is_harmless(written)


def test_names_of_frames_and_locks_are_text_in_the_report(report: Report) -> None:
    stack = ProcessStack(1, Owner(EVIL, EVIL), "", (StackFrame(EVIL, EVIL, 1),), holder=EVIL, kernel=EVIL)
    failed = ProcessStack(2, Owner(EVIL, EVIL), problem=EVIL)
    shown = report._replace(roll_calls=(roll_call(EVIL, [[stack, failed]], works=False),))
    is_harmless_text(terminal.render(shown))
    is_harmless_markdown(markdown.render(shown, verbose=True))
    is_harmless_html(html.render(shown))
    is_harmless_json(as_json.render(shown))


def test_names_of_gpus_and_processes_are_text_in_the_table() -> None:
    finding, process = gpus.GpuFinding(EVIL, "critical", EVIL, EVIL), gpus.GpuProcess(1, EVIL, EVIL, 1e9)
    info = dict.fromkeys(("gpu", "uuid", "name", "driver_version", "pci_bus_id"), EVIL)
    judged_gpu = gpus.JudgedGpu(EVIL, info, (finding,), (process,), (EVIL,), True, {EVIL: 1.0})
    node = gpus.NodeGpus(EVIL, 30.0, (judged_gpu,))
    is_harmless_text(gpus.render(node))
    is_harmless_json(gpus.DOCUMENT.text(node))
