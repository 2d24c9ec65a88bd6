"""A fleet is told in one table, the worst first, and one of each kind in detail; a few servers one by one."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import pytest
from support import rewriting
from support.sampling import some

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.report import Report
from diag.knowledge.catalog import load
from diag.report import html, layout, markdown, plain_text, terminal
from diag.report import json as as_json
from diag.report import sentences as words

CASCADE, WELL, CROWDED, DOWN = "kv_cascade", "healthy", "queue_saturation", "startup_hang"
FLEET = (WELL, CASCADE, WELL, CASCADE, WELL, CASCADE, WELL, CASCADE, WELL, WELL, CROWDED, DOWN)
"""What the servers r0:8000 to r11:8000 do."""
TITLES = {incident.id: incident.title for incident in load()}
NAMES = tuple(f"r{number}:8000" for number in range(len(FLEET)))
LONG = "vllm-llama-3-3-70b-instruct-decode-7f9c8d6b5c-abcde.inference-production.svc.eu-west-1.example:8000"


def server(recording: str) -> Iterator[rewriting.Scrape]:
    pages = rewriting.thinned(rewriting.scrapes(recording), 2)
    return rewriting.changed(
        pages, lambda page: rewriting.of_model(page, f"of {recording}" if recording == CASCADE else "m")
    )


@cache
def judged(servers: tuple[str, ...], name: str = "") -> Report:
    """So many recordings as servers that run side by side, scraped every 2 s; each called by its number and `name`.

    Those in a cascade serve a model of their own: no peer of theirs has room.
    """
    moved = rewriting.side_by_side(*map(server, servers))
    scrapes = ((time, instance.replace(":8000", name or ":8000"), page) for time, instance, page in moved)
    with TemporaryDirectory() as folder:
        return doctor.run(ObserveOptions([str(rewriting.write(Path(folder) / "fleet", scrapes))]))


def lines(servers: tuple[str, ...] = FLEET) -> list[str]:
    """The whole report, line by line."""
    return terminal.render(judged(servers), verbose=True).splitlines()


def page(report: Report) -> ElementTree.Element:
    return ElementTree.fromstring(html.render(report))


def text(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def rows(root: ElementTree.Element, table: str) -> list[list[str]]:
    (found,) = (each for each in root.iter("table") if each.get("class") == table)
    return [[text(cell).strip() for cell in row] for row in found][1:]


def table(printed: Sequence[str]) -> list[tuple[str, ...]]:
    """Verdict, server and incident of each row of the terminal's table; a row that is folded goes on further right."""
    start = next(at for at, line in enumerate(printed) if line.startswith(f"{len(FLEET)} servers: "))
    end = printed.index("", start)
    unfolded = (line.strip() for line in printed[start + 1 : end] if not line.startswith(" " * 3))
    return [tuple(re.split(r" {2,}", row)[:3]) for row in unfolded]


def titled(incident: str) -> str:
    return f"{TITLES[incident]} ({incident})"


ILL = [
    *(("critical", f"r{number}:8000", titled("kv_eviction_cascade")) for number in (1, 3, 5, 7)),
    ("warning", "r10:8000", titled("replicas_unbalanced")),
    ("unknown", "r11:8000"),
]


def test_common_property_of_servers_is_one_line_with_their_count() -> None:
    assert lines()[0].startswith("CRITICAL  kv_eviction_cascade   4 of 12 servers   since 2023-11-14 22:13:24 UTC ")
    assert not [line for line in lines()[1:] if line.startswith("CRITICAL")]


def test_fleet_table_counts_verdicts_and_lists_unhealthy_servers_worst_first() -> None:
    assert "12 servers: 4 critical, 1 warning, 1 unknown, 6 healthy" in lines()
    assert table(lines()) == ILL


def test_one_server_of_each_incident_is_reported_in_detail() -> None:
    details = [line.partition(": ")[0] for line in lines() if re.match(r"\S.* on r\d+:8000 engine 0", line)]
    assert details == [
        f"{titled('kv_eviction_cascade')} on r1:8000 engine 0, as on 3 more",
        f"{titled('replicas_unbalanced')} on r10:8000 engine 0",
    ]


def row(label: str) -> str:
    """All the text beside a label of the terminal's whole report."""
    printed = lines()
    at = next(at for at, line in enumerate(printed) if line.startswith(f"  {label:<{layout.LABEL}}"))
    rest = takewhile(lambda line: line.startswith(" " * (layout.LABEL + 2)), printed[at + 1 :])
    return " ".join(line[layout.LABEL + 2 :] for line in (printed[at], *rest))


def test_a_server_that_cannot_be_judged_is_named_with_the_reason() -> None:
    assert row("Unknown").startswith("r11:8000: /metrics never answered")
    assert row("Not judged") == "nearly all incidents on r11:8000"


def short(servers: tuple[str, ...], name: str = ":8000") -> list[str]:
    return terminal.render(judged(servers, name)).splitlines()


@pytest.mark.parametrize("name", some([":8000", LONG], 1))
@pytest.mark.parametrize("servers", [FLEET, FLEET[:5], (DOWN,) * 8, (WELL,) * 8, (CASCADE, CROWDED, DOWN)])
def test_the_short_form_of_many_servers_fits(servers: tuple[str, ...], name: str) -> None:
    report = judged(servers, name)
    assert len(short(servers, name)) <= (12 if report.verdict == "healthy" else 20)
    assert max(map(len, (*short(servers, name), *terminal.render(report, verbose=True).splitlines()))) <= layout.WIDTH


def test_the_short_form_has_a_line_for_what_several_servers_have() -> None:
    start = short(FLEET).index("12 servers: 4 critical, 1 warning, 1 unknown, 6 healthy")
    rows = [re.split(r" {2,}", line.strip()) for line in short(FLEET)[start + 1 : start + 4]]
    assert rows == [
        ["critical", titled("kv_eviction_cascade"), "r1:8000, r3:8000, r5:8000,"],
        ["r7:8000"],
        ["warning", titled("replicas_unbalanced"), "r10:8000"],
    ]


def test_the_short_form_has_a_line_for_each_further_incident_of_a_few_servers() -> None:
    printed = short((CASCADE, CASCADE, WELL, CROWDED, DOWN))
    also = printed[next(at for at, line in enumerate(printed) if line.startswith("  Also")) :][:3]
    told = " ".join(" ".join(also).split())
    assert f"critical {titled('kv_eviction_cascade')}, r1:8000 engine 0" in told


def test_very_large_fleet_lists_only_the_worst_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "SERVERS", 2)
    assert table(lines()) == [*ILL[:2], ("and 4 more that are not healthy",)]


def test_markdown_has_the_same_table() -> None:
    parts = markdown.render(judged(FLEET)).split("\n\n")
    assert parts[0].startswith(r"**CRITICAL KV-cache preemption cascade (kv\_eviction\_cascade) on 4 of 12 servers (")
    assert "12 servers: 4 critical, 1 warning, 1 unknown, 6 healthy" in parts
    head, rule, *body = next(part for part in parts if part.startswith("| verdict |")).splitlines()
    assert rule == "|---|---|---|---|"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *body)]
    assert {len(each) for each in cells} == {4}
    assert [tuple(filter(None, each[:3])) for each in cells[1:]] == ILL
    assert [part for part in parts if part.startswith("## ")] == [
        f"## {TITLES['kv_eviction_cascade']}",
        f"## {TITLES['replicas_unbalanced']}",
    ]


def test_the_page_has_the_same_table() -> None:
    root = page(judged(FLEET))
    assert [tuple(filter(None, (row[0], row[1], row[3]))) for row in rows(root, "fleet")] == ILL
    assert len(list(root.iter("section"))) == 2


@pytest.mark.parametrize("servers", [FLEET, (CASCADE, CROWDED, WELL)])
def test_internal_links_of_the_page_have_targets(servers: tuple[str, ...]) -> None:
    root = page(judged(servers))
    targets = {each.get("id") for each in root.iter()}
    links = [link for each in root.iter("a") if (link := each.get("href", "")).startswith("#")]
    assert links and {link.removeprefix("#") for link in links} <= targets


def test_timeline_includes_servers_without_details() -> None:
    told = [row[:2] for row in rows(page(judged(FLEET)), "timeline")]
    cascades = [where for incident, where in told if incident == titled("kv_eviction_cascade")]
    assert sorted(cascades) == [f"r{number}:8000 engine 0" for number in (1, 3, 5, 7)]


def test_json_has_every_incident_on_every_server() -> None:
    document = json.loads(as_json.render(judged(FLEET)))
    seen = {(each["incident"], each["subject"]["instance"]) for each in document["diagnoses"]}
    assert seen == {(incident, name) for incident, _ in seen for name in NAMES}
    present = [each["subject"]["instance"] for each in document["diagnoses"] if each["primary"]]
    assert sorted(present) == sorted(name for _, name, *_ in ILL[:-1])


def test_healthy_fleet_is_one_line_and_a_count() -> None:
    printed = lines((WELL,) * 8)
    assert printed[0].startswith("HEALTHY  8 servers   8 engines busy   ")
    assert "8 servers: 8 healthy" in printed


def test_five_servers_are_reported_individually() -> None:
    five = (CASCADE, CASCADE, WELL, WELL, WELL)
    report, printed = judged(five), lines(five)
    assert not words.is_fleet(report)
    heads = [line.partition("   since ")[0] for line in printed if line.startswith("CRITICAL")]
    assert heads == [f"CRITICAL  kv_eviction_cascade   r{number}:8000 engine 0" for number in range(2)]
    cascade = titled("kv_eviction_cascade")
    titles = [line.partition(": ")[0] for line in printed if line.startswith(f"{cascade} on")]
    assert titles == [f"{cascade} on r{number}:8000 engine 0" for number in range(2)]
    assert not [line for line in printed if " servers: " in line]
    assert "| verdict |" not in markdown.render(report)
    assert not [each for each in page(report).iter("table") if each.get("class") == "fleet"]
