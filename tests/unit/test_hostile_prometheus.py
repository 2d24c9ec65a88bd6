"""`diag doctor --prometheus` of one that refuses, distorts or replaces its answers: what is not answered is unknown."""

import json
import re
import sys
from collections.abc import Callable, Iterator

import pytest
from support.bad_servers import Reply, Server, serving
from support.paths import RECORDINGS
from support.sampling import THOROUGH, some
from support.scripted_prometheus import ODD_DOCUMENTS, ODD_NUMBERS, Document, ScriptedPrometheus, hostile, refused

from diag.cli.app import main
from diag.http import prometheus_api

pytestmark = pytest.mark.slow

STARTS = ("", "vector(time())")
"""Without these there is nothing to judge: the series, the rules and the time."""


@pytest.fixture(scope="module")
def prometheus() -> Iterator[tuple[ScriptedPrometheus, Server]]:
    scripted = ScriptedPrometheus(RECORDINGS / "kv_cascade")
    with serving(scripted, keep=True) as server:
        yield scripted, server


@pytest.fixture
def diag(
    prometheus: tuple[ScriptedPrometheus, Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator["Diag"]:
    monkeypatch.setattr(prometheus_api, "_PAUSES", (0.0, 0.0))
    yield Diag(prometheus[0], prometheus[1].url, monkeypatch, capsys)


class Diag:
    def __init__(
        self, scripted: ScriptedPrometheus, url: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.scripted, self._url, self._patch, self._capsys = scripted, url, patch, capsys

    def doctor(self, *options: str) -> tuple[int, str, str]:
        self._patch.setattr(sys, "argv", ["diag", "doctor", "--prometheus", self._url, "--json", *options])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = self._capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, printed.out, printed.err


def test_unmodified_responses_are_judged(diag: Diag) -> None:
    diag.scripted.mutate = lambda _, answer: answer
    status, out, _ = diag.doctor()
    assert status == 2
    assert any(
        found["primary"] and found["incident"] == "kv_eviction_cascade" for found in json.loads(out)["diagnoses"]
    )


@pytest.mark.parametrize("seed", range(6 if THOROUGH else 3))
def test_random_refusals_and_distortions_are_no_crash(seed: int, diag: Diag) -> None:
    diag.scripted.mutate = hostile(seed)
    status, out, error = diag.doctor()
    assert status in (0, 1, 2, 3, 69)
    assert bool(out) != (status == 69 and error.count("\n") == 1)


@pytest.mark.parametrize("part", ["sum_over_time(up", "generation_tokens_total", "vllm:"])
def test_refused_queries_are_unknown_and_noted(part: str, diag: Diag) -> None:
    """Not what the servers are found by, without which there is nothing to judge."""
    diag.scripted.mutate = lambda query, answer: refused() if part in query else answer
    status, out, _ = diag.doctor()
    assert status == (2 if "up" in part else 3)
    assert any("Prometheus rejected" in note for note in json.loads(out)["observed"]["notes"])


@pytest.mark.parametrize("number", some(ODD_NUMBERS, 3))
def test_an_odd_number_everywhere_is_no_crash(number: str, diag: Diag) -> None:
    def odd(query: str, answer: Document) -> Document:
        if query not in STARTS and not query.startswith("up{"):
            for series in answer["data"]["result"]:
                for pair in series.get("values") or [series["value"]]:
                    pair[1] = number
        return answer

    diag.scripted.mutate = odd
    status, _, error = diag.doctor()
    assert status == 3 if number not in ("1e-320", "-1", "0") else status in (0, 3)
    assert error.count("\n") <= 1


def test_invalid_response_is_reported(diag: Diag) -> None:
    diag.scripted.mutate = lambda query, answer: Reply(b"<html>") if "sum_over_time(up" in query else answer
    status, out, _ = diag.doctor()
    assert status == 2
    assert any(
        re.search(r"\d quer(y|ies) got no usable answer: ", note) for note in json.loads(out)["observed"]["notes"]
    )


@pytest.mark.parametrize("document", some(ODD_DOCUMENTS, 3), ids=lambda document: json.dumps(document)[:40])
def test_response_of_another_shape_is_one_sentence(document: object, diag: Diag) -> None:
    """Once it is unknown, always it is unreachable; series without a value are no series."""
    reply = Reply(json.dumps(document).encode())
    diag.scripted.mutate = lambda query, answer: answer if query in STARTS else reply
    status, out, error = diag.doctor()
    assert (status, bool(out), error.count("\n")) in ((69, False, 1), (3, True, 0))
    diag.scripted.mutate = lambda query, answer: reply if "sum_over_time(up" in query else answer
    status, out, _ = diag.doctor()
    assert status == 2
    assert json.loads(out)["diagnoses"]


def of_another_server(answer: Document, name: str | None) -> Document:
    """Return the answer with a copy of its first series that has a label `instance`, as another server's."""
    data = answer["data"]
    series = data if isinstance(data, list) else data.get("result", [])
    for each in series:
        labels = each.get("metric", each)
        if "instance" in labels:
            other = {key: value for key, value in labels.items() if key != "instance"}
            other |= {} if name is None else {"instance": name}
            series.append({**each, "metric": other} if "metric" in each else other)
            break
    return answer


@pytest.mark.parametrize("name", some(["evil:8000", "127.0.0.1:8101.evil", "", None], 2))
@pytest.mark.parametrize("asked", some(["", "up{", "sum by (instance) (up", "num_requests_running"], 3))
def test_a_prometheus_that_answers_about_another_server_is_refused_by_name(
    asked: str, name: str | None, diag: Diag
) -> None:
    def foreign(query: str, answer: Document) -> Document:
        return of_another_server(answer, name) if (asked in query if asked else not query) else answer

    diag.scripted.mutate = foreign
    status, out, error = diag.doctor("--instance", "127.0.0.1:8101")
    if asked and not name:  # a row of a query that names no server is no server's
        assert status == 2
    else:
        assert (status, out) == (69, "")
        assert error.count("\n") == 1
        assert f"answers about {name or 'a server without a name'}, which the query excludes" in error


def without_rows(answer: Document) -> Document:
    return {**answer, "data": {**answer["data"], "result": []}}


def without_names(answer: Document) -> Document:
    for series in answer["data"]["result"]:
        del series["metric"]["instance"]
    return answer


@pytest.mark.parametrize("lose", [without_rows, without_names])
def test_zero_incidents_judged_is_never_healthy(lose: Callable[[Document], Document], diag: Diag) -> None:
    finds_servers = ("up{", "sum by (instance) (count_over_time(up", "sum by (instance) (up")

    def lost(query: str, answer: Document) -> Document:
        return answer if query in STARTS or query.startswith(finds_servers) else lose(answer)

    diag.scripted.mutate = lost
    for options in ((), ("--instance", "127.0.0.1:8101")):
        status, out, _ = diag.doctor(*options)
        document = json.loads(out)
        assert (status, document["verdict"]) == (3, "unknown")
        assert document["observed"]["judged"] == {"incidents": 0, "servers": 0}
        assert any("no incident could be judged" in why for why in document["observed"]["progress_unknown"])
