"""The terminal report: a short form of at most 20 lines, 12 for a healthy server, and a verbose one."""

import html as web
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support import rewriting
from support.paths import ALL_RECORDINGS, RECORDINGS
from support.reports import judged, uncounted
from support.sampling import some
from support.surfaces import false_sentences

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.progress import NotJudged
from diag.diagnosis.report import ObservedServer, Report
from diag.report import html, layout, markdown, terminal
from diag.report import sentences as words

ALL = sorted(path.name for path in ALL_RECORDINGS)
LONG_NAME = "vllm-llama-3-3-70b-instruct-decode-7f9c8d6b5c-abcde.inference-production.svc.eu-west-1.example:8000"
LONG_MODEL = "/mnt/models/registry/" + "a-model-of-many-words-" * 8 + "fp8"
LONG_LAUNCH = " ".join(f"--override-number-{number} {number:040}" for number in range(30))
IN_ORDER = [
    "Where",
    "When",
    "Evidence",
    "Log",
    "Means",
    "Do now",
    "Next time",
    "Fix",
    "Relaunch",
    "Sure",
    "GPU limits",
    "Also",
    "Ruled out",
    "Possible",
    "Unknown",
    "Note",
    "Not seen",
    "More",
]


@cache
def printed(name: str, verbose: bool = False) -> str:
    return terminal.render(judged(name), verbose=verbose)


def fits(report: Report) -> bool:
    lines = terminal.render(report).splitlines()
    return len(lines) <= (12 if report.verdict == "healthy" else 20) and max(map(len, lines)) <= layout.WIDTH


@pytest.mark.parametrize("name", ALL)
def test_short_and_verbose_terminal_reports(name: str, golden: Callable[[str, str], None]) -> None:
    forms = [f"$ diag doctor tests/recordings/{name}{option}\n" for option in ("", " --verbose")]
    texts = (forms[0], printed(name), "\n", forms[1], printed(name, verbose=True))
    golden(f"doctor/{name}.txt", uncounted("".join(texts)))


@pytest.mark.parametrize("name", ALL)
def test_the_short_form_fits(name: str) -> None:
    assert fits(judged(name))


def stretched(folder: Path, name: str) -> Path:
    """Return the recording of a server with a long name, a long model name and a long launch command."""
    scrapes = ((time, LONG_NAME, rewriting.of_model(page, LONG_MODEL)) for time, _, page in rewriting.scrapes(name))
    about = (RECORDINGS / name / "recording.toml").read_text(encoding="utf-8")
    rewriting.write(folder, scrapes)
    about = re.sub(r'(?m)^(launch = ".*)"$', lambda found: f'{found[1]} {LONG_LAUNCH}"', about)
    (folder / "recording.toml").write_text(about, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", some(ALL, 8))
def test_the_short_form_fits_with_long_names_and_a_long_launch_command(tmp_path: Path, name: str) -> None:
    assert fits(doctor.run(ObserveOptions([str(stretched(tmp_path, name))])))


SEVERAL = (
    "contention_long_steps",
    "kv_cascade",
    "tp2_long_stall",
    "host_memory_killed",
    "admission_deadlock",
    "healthy",
)


def test_the_short_form_fits_whatever_is_found_at_once() -> None:
    reports = [judged(name) for name in SEVERAL]
    findings = tuple(finding for report in reports for finding in report.findings)
    few = tuple(finding for report in reports[-4:] for finding in report.findings)
    healthy = tuple(finding for finding in findings if finding.diagnosis.severity == "info")
    notes = tuple(f"note {number}: {LONG_NAME} {LONG_MODEL}" for number in range(30))
    servers = tuple(ObservedServer(f"{LONG_NAME}{number}", "0.32.0", LONG_MODEL) for number in range(30))
    unknown = tuple(NotJudged(f"why {LONG_MODEL}", (("instance", f"{LONG_NAME}{number}"),)) for number in range(30))
    for verdict, found in (("critical", findings), ("critical", few), ("unknown", ()), ("healthy", healthy)):
        observed = reports[0].observed._replace(
            notes=notes, servers=servers, not_measured=("gpu", "log", "process"), target=LONG_MODEL
        )
        state = {"verdict": verdict, "findings": found, "not_judged": unknown if verdict != "healthy" else ()}
        progress = tuple(progress for report in reports for progress in report.progress)
        assert fits(reports[0]._replace(observed=observed, progress=progress, **state)), verdict


def labels(text: str) -> list[str]:
    return re.findall(r"(?m)^  ([A-Z][a-z]+(?: [a-z]+)?)(?= )", text)


@pytest.mark.parametrize("name", ALL)
def test_parts_of_the_terminal_report_have_a_fixed_order(name: str) -> None:
    if printed(name).startswith(("CRITICAL", "WARNING")):
        found = labels(printed(name))
        ongoing = words.alike(judged(name))[0][0].diagnosis.ongoing
        assert {"Evidence", "More"} <= set(found)
        assert {"Do now", "Fix"} & set(found) if ongoing else "Next time" in found
        assert ongoing != ("Next time" in found)
        assert found == sorted(found, key=IN_ORDER.index)


@pytest.mark.parametrize("name", ALL)
def test_sentences_are_true_and_can_be_read(name: str) -> None:
    report = judged(name)
    first = printed(name).partition("\n")[0]
    words_of_exit = {"CRITICAL": 2, "WARNING": 1, "HEALTHY": 0, "NO INCIDENT FOUND": 0, "CANNOT TELL": 3}
    assert words_of_exit[first.partition("  ")[0]] == doctor.EXIT[report.verdict]
    for group in words.alike(report)[:1]:
        lead = group[0].diagnosis
        assert lead.ongoing or re.search(r"ended [\d.]+ \w+ before the recording ends", first)
        assert lead.since is not None or not lead.ongoing or " for at least " in first or words.death(group[0], report)
        over = not lead.ongoing or words.death(group[0], report)
        assert not over or "while there is time" not in printed(name) + printed(name, verbose=True)
    with layout.columns(80):
        narrow = terminal.render(report).partition("\n")[2]
    assert not re.findall(r"\w…\w", narrow)


def without_quotes(text: str) -> str:
    """Return a report without its first line, and without log lines, commands and launches, which are not its own."""
    text = re.sub(r"<pre.*?</pre>|<code>.*?</code>|<svg.*?</svg>|```.*?```|`[^`]*`", "x", text, flags=re.DOTALL)
    text = re.sub(r"<h3>Log</h3>.*?</ul>|(?m:^Log:.*(?:\n\n?- .*)*)", "", text, flags=re.DOTALL)
    return re.sub(r"(?m)^  (?:Log|Relaunch) .*(?:\n {4,}\S.*)*", "", text.partition("\n")[2])


@pytest.mark.parametrize("name", some(ALL, 32))
def test_no_surface_has_a_sentence_that_cannot_be_true_or_read(name: str) -> None:
    report = judged(name)
    forms = {
        "terminal": printed(name),
        "verbose": printed(name, verbose=True),
        "Markdown": re.sub(r"\\(?=[\W_])|<!-- -->", "", markdown.render(report, verbose=True)),
        "HTML": html.render(report).partition("</style>")[2],
    }
    for surface, text in forms.items():
        prose = web.unescape(re.sub(r"<[^>]*>", "", re.sub(r"</\w+>", "\n", without_quotes(text))))
        assert not false_sentences(prose, name), surface


@pytest.mark.parametrize("name", ALL)
def test_quiet_is_the_first_line_of_both_forms(name: str) -> None:
    quiet = terminal.render(judged(name), quiet=True)
    assert printed(name).startswith(quiet) and printed(name, verbose=True).startswith(quiet)


def pasted(text: str) -> list[str]:
    """Return the words that a shell reads in the relaunch lines of a short report."""
    lines = text[text.index("  Relaunch ") + len("  Relaunch ") :].splitlines()
    end = next(at for at, line in enumerate(lines) if not line.endswith("\\"))
    script = f"printf '%s\\n' {chr(10).join(lines[: end + 1])}\n"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_relaunch_lines_can_be_pasted_as_they_are() -> None:
    finding = judged("kv_cascade").present[0]
    assert "--max-num-batched-tokens" in printed("kv_cascade")
    assert pasted(printed("kv_cascade")) == shlex.split(finding.relaunch or "")


def test_a_launch_command_that_does_not_fit_is_left_to_the_verbose_form(tmp_path: Path) -> None:
    report = doctor.run(ObserveOptions([str(stretched(tmp_path, "kv_cascade"))]))
    assert "Relaunch    in the launch command: remove --num-gpu-blocks-override (now 128)" in terminal.render(report)
    assert f"{report.present[0].relaunch}\n" in terminal.render(report, verbose=True)


@pytest.mark.parametrize("name", ALL)
def test_no_line_of_the_verbose_form_is_wider_than_100_columns_but_one_to_paste(name: str) -> None:
    lines = printed(name, verbose=True).splitlines()
    long = [line for line in lines if len(line) > layout.WIDTH and not line.startswith("  Relaunch ")]
    assert [line for line in long if not re.fullmatch(r" *https?://\S+", line)] == []  # an address is not broken


def test_columns_of_the_environment_count_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    terminal.write(judged("kv_cascade"))
    assert 60 < max(map(len, capsys.readouterr().out.splitlines())) <= 72


def test_a_long_cell_wraps_between_words() -> None:
    rows = [("time without a CPU (engine 0 PID 31259)", "93.6 %"), ("a-name-of-one-very-long-word", "1")]
    with layout.columns(36):
        assert layout.aligned(rows, 0, right=(1,)) == [
            "  time without a CPU (engine  93.6 %",
            "  0 PID 31259)",
            "  a-name-of-…-long-word            1",
        ]


def test_dates_are_written_where_the_day_is_not_today() -> None:
    live = judged("kv_cascade").observed._replace(source="scrape")
    today = judged("kv_cascade")._replace(observed=live)
    assert not words.time_format(today).dated
    assert words.time_format(judged("kv_cascade")).dated
    midnight = live._replace(start=live.end - 86_400)
    assert words.time_format(today._replace(observed=midnight)).dated


def test_an_ended_incident_of_a_live_server_ended_some_time_ago() -> None:
    report = judged("tp2_long_stall")
    live = report._replace(observed=report.observed._replace(source="scrape"))
    assert terminal.render(live, quiet=True).strip().endswith("   ended 21 s ago")
    assert "  When        ended 21 s ago: 02:29:22 - 02:30:34 UTC (for 72 s)\n" in terminal.render(live)
