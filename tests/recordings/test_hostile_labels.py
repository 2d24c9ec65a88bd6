"""A hostile label is only text, wherever it lands: no escape, no markup, no link, no mention, no second command."""

import csv
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import rewriting, scenarios, top_views

from diag.commands import doctor, lint, observe, verify
from diag.commands.mcp import answers
from diag.commands.mcp.answers import COMPACT, DETAILED, quote_foreign, shorten, to_json
from diag.commands.mcp.targets import own_texts
from diag.commands.observe import ObserveOptions
from diag.core.contract import Contract
from diag.core.formatting import MOST_SHOWN
from diag.diagnosis.diagnose import Quote
from diag.diagnosis.query_cache import QueryCache
from diag.diagnosis.report import Report, Transitions
from diag.exposition import render
from diag.knowledge.catalog import load
from diag.report import dataframe, html, markdown, terminal
from diag.report import json as as_json
from diag.report import verify as verify_text
from diag.report.layout import continued
from diag.sources.recording.reader import read

EVIL = (
    "=1+1|0;touch /tmp/owned|sh #`id`$(id)'\"\\ {value} {launch}<script>alert(1)</script>"
    "[x](http://evil.example) ![y](//e) www.evil.example @someone #123 GH-7 $x$ ~~a~~ &lt;"
    "\x1b]0;title\x07\x1b[31m\r\n\u202e\u200b\u2066\u3164 --end"
)
UNSEEN = set("\x1b\x07\r\x00\u202e\u200b\u2066\u3164")
INSIDE = "the harm"
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


@pytest.mark.parametrize("of", ["report", "fleet", "verify", "issue"])
def test_markdown_has_no_link_mention_or_markup_from_a_label(
    of: str, report: Report, fleet: Report, folder: Path
) -> None:
    written = (
        told(folder)["verify in markdown"]
        if of == "verify"
        else printed(fleet if of == "fleet" else report)["issue" if of == "issue" else "markdown"]
    )
    text = re.sub(r"(`+).*?\1", "", written, flags=re.DOTALL)
    assert "someone" in written
    for live in (
        r"(?<!\\)\[x",
        r"(?<!\\)<(?!!-- -->)",
        r"[a-z]://(?!github\.com/vllm-project/)",
        r"www\.",
        r"@\w",
        r"#\d",
        r"GH-\d",
        r"(?<!\\)[`$~&]",
    ):
        assert not re.search(live, text), live
    for is_table, rows in groupby(text.splitlines(), lambda line: line.startswith("|")):
        assert not is_table or len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


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
    assert {row["engine"] for row in rows} >= {f"'{EVIL}"}
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
