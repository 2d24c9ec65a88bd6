"""A good declaration is found by its file; a bad one is refused in one sentence that names file and reason."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

import diag.signals
from diag.core.errors import BadDeclaration
from diag.core.incident import Condition, Signal, judged
from diag.knowledge import signals
from diag.knowledge.catalog import CatalogEntry, built_in, check, load
from diag.knowledge.incident_files import FOLDER, SHARED, shared
from diag.knowledge.signals import DECLARED
from diag.knowledge.signals.expressions import statements

GOOD = """
from diag.incident import Incident, LookAlike, Signal, judged

errors = Signal("errors", {promql!r}, "{{value}} errors", "errors")
incident = Incident(
    id={id!r}, title="Errors", severity={severity!r}, per=("instance", "engine"), cause="", impact="",
    symptoms=(errors.above({limit!r}, {why}),), looks_like=(), fixes=(), explains={explains!r}, window={window!r},
)
"""
FINE = {
    "promql": 'sum by ($by) (increase(vllm:request_success_total{finished_reason="error"}[$window]))',
    "id": "mine",
    "severity": "warning",
    "limit": 3,
    "why": 'judged("because")',
    "explains": (),
    "window": "5m",
}

BUILT_IN = {entry.incident.id: entry for entry in built_in()}


def write(folder: Path, name: str = "mine", **changes: object) -> Path:
    (folder / f"{name}.py").write_text(GOOD.format(**{**FINE, "id": name, **changes}), encoding="utf-8")
    return folder


def test_our_incidents_are_found_by_file() -> None:
    assert [incident.id for incident in load()] == sorted(file.stem for file in FOLDER.glob("*.incident"))


@pytest.mark.parametrize("entry", BUILT_IN.values(), ids=lambda entry: entry.incident.id)
def test_a_built_in_incident_is_a_valid_declaration(entry: CatalogEntry) -> None:
    check([entry], BUILT_IN)


def test_a_built_in_incident_is_held_to_the_same_rules_as_a_users() -> None:
    entry = BUILT_IN["engine_dead"]
    with pytest.raises(BadDeclaration, match="the incident has no symptoms"):
        check([entry._replace(incident=entry.incident._replace(symptoms=()))], BUILT_IN)


BY_CHANCE = {
    ("admission_deadlock", "0 % for 9 minutes, with 5 or 6 requests waiting"): "measured",
    ("gpu_thermal_throttling", "70 W T4 stopped throttling at 60 W and lost about 15 %"): "measured",
    ("kv_eviction_cascade", "64 -> 6: preemptions per finished request"): "measured",
    ("kv_eviction_cascade", "0.01-0.14 while preempted requests are recomputed"): "measured",
    ("output_corrupted", "1 of 5 clients gets NaN; 0 before"): "measured",
    ("prefill_decode_contention", "3.8 s -> 0.5 s"): "measured",
    ("requests_aborted", "25 % behind a time-out of 4 s"): "measured",
    ("startup_slow", "VLLM_ENGINE_READY_TIMEOUT_S is 600 s by default"): "a default of vLLM",
    ("startup_slow", "the default is 600 s"): "a default of vLLM",
}
"""Texts with a number that is a threshold too, and what the number is instead."""


def conditions(declared: object) -> Iterator[Condition]:
    if isinstance(declared, Condition):
        yield declared
    elif isinstance(declared, tuple):
        for inside in declared:
            yield from conditions(inside)


def repeated_thresholds(name: str, source: str, declared: Iterable[Condition]) -> list[str]:
    """Return the texts with the number of a condition; 0, 1, yes and no are words rather than thresholds."""
    numbers: set[str] = set()
    for condition in declared:
        if not isinstance(condition.limit, str) and condition.limit not in (0, 1) and condition.signal.unit != "bool":
            numbers |= {f"{condition.limit:g}", condition.limit_with_unit}
    number = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, sorted(numbers, key=len, reverse=True)))})(?![\w.]*\w)")
    written = (re.sub(r"^(\w+(: | = ))?([a-z][\w()]* [<>]=? \S+ )?", "", line) for _, line in statements(source))
    texts = [text for text in written if " " in text]  # no numbers and links
    excused = [phrase for incident, phrase in BY_CHANCE if incident == name]
    return [text for text in texts if numbers and number.search(text) and not any(phrase in text for phrase in excused)]


@pytest.mark.parametrize("entry", BUILT_IN.values(), ids=lambda entry: entry.incident.id)
def test_a_text_takes_the_number_of_a_threshold_from_its_condition(entry: CatalogEntry) -> None:
    source = entry.file.read_text(encoding="utf-8")
    assert repeated_thresholds(entry.incident.id, source, conditions(entry.incident)) == []


def test_a_text_of_a_shared_fix_takes_the_number_of_a_threshold_from_its_condition() -> None:
    source = SHARED.read_text(encoding="utf-8")
    assert repeated_thresholds("shared", source, conditions(tuple(shared().values()))) == []


def test_a_repeated_threshold_is_found() -> None:
    cascade = BUILT_IN["kv_eviction_cascade"]
    for text in ("preemptions fall below 0.2", "below 4, halving", "usage above 80 %; more"):
        assert repeated_thresholds("", f"effect: {text}", conditions(cascade.incident)) == [text]
    assert repeated_thresholds("", "effect: 0.21, 14 and 180 %", conditions(cascade.incident)) == []


def test_a_rationale_contains_the_threshold_of_its_condition() -> None:
    share = Signal("share", "", "{value}", "share")
    assert share.above(0.05, judged("{threshold} of the time")).why.says == "5 % of the time"


@pytest.mark.slow
def test_every_signal_is_used() -> None:
    declared = {name for name, value in vars(diag.signals).items() if isinstance(value, Signal)}
    folder = Path(signals.__path__[0])
    used: set[str] = set()
    for file in (*FOLDER.glob("*.incident"), SHARED):
        for _, line in statements(file.read_text(encoding="utf-8")):
            used |= {*sum(re.findall(r"^\w+(?:: | = )([a-z]\w+)(?:$| [<>])|\$(\w+)|\((\w+)\)", line), ())}
    for file in (ROOT / "diag").rglob("*.py"):
        tree = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        if folder in file.parents:  # within a signal that builds on it
            used |= {
                node.slice.value
                for node in tree
                if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
            }
        else:  # an import that is not used is found by the linter
            imports = (node for node in tree if isinstance(node, ast.ImportFrom) and "signals" in (node.module or ""))
            used |= {alias.name for node in imports for alias in node.names}
            attributes = (node for node in tree if isinstance(node, ast.Attribute))
            used |= {
                node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "signals"
            }
    named = {name for each in DECLARED.values() for name in re.findall(r"\$(\w+)", each.promql)}
    used |= {name for name in declared if getattr(diag.signals, name).id in named}
    assert sorted(declared - used) == []


def test_incidents_of_a_user_folder_are_added(tmp_path: Path) -> None:
    assert "mine" in [incident.id for incident in load(write(tmp_path))]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"promql": "sum by ($by) (increase(x[$window])"}, "signal 'errors'"),
        ({"promql": "sum by ($by) (info(x))"}, "info"),
        ({"promql": "sum by ($by) (sin(increase(x[$window])))"}, "sin"),
        ({"promql": "sum by ($by) (x)"}, "uses the instant selector x"),
        ({"promql": "increase(x[$window])"}, "aggregate it by ($by)"),
        ({"promql": "sum by (instance, pod) (increase(x[$window]))"}, "aggregate it by ($by)"),
        ({"promql": "sum(increase(x[$window]))"}, "aggregate it by ($by)"),
        ({"promql": "sum by ($by) (increase(x[$span]))"}, "unknown placeholder $span"),
        ({"limit": "no_such_entry"}, "not an entry of the measurement contract"),
        ({"why": 'judged(" ")'}, "has no rationale or no reference"),
        (
            {"why": '__import__("diag.incident").incident.Source("measured", "0.3", "")'},
            "has no rationale or no reference",
        ),
        ({"severity": "fatal"}, "severity must be info, warning or critical, not 'fatal'"),
        ({"explains": ("nothing_known",)}, "explains 'nothing_known', which is not an incident"),
        ({"explains": ("mine",)}, "explains itself: mine -> mine"),
        ({"explains": ("engine_dead",), "severity": "critical"}, "s later (window + hold)"),
        ({"window": "5 minutes"}, "'5 minutes' is not a duration"),
    ],
)
def test_a_bad_declaration_is_refused_in_one_sentence(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(BadDeclaration) as refused:
        load(write(tmp_path, **changes))
    sentence = str(refused.value)
    assert reason in sentence
    assert sentence.startswith(str(tmp_path / "mine.py"))
    assert "\n" not in sentence


def test_a_cycle_of_two_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "one", explains=("two",))
    write(tmp_path, "two", explains=("one",))
    with pytest.raises(BadDeclaration, match="explains itself: one -> two -> one"):
        load(tmp_path)


def test_an_id_that_is_not_the_files_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDeclaration, match="the id 'other' differs from the file name"):
        load(write(tmp_path, id="other"))


def test_an_id_that_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDeclaration, match=r"'engine_dead' already exists in .*engine_dead[.]incident"):
        load(write(tmp_path, "engine_dead"))


@pytest.mark.parametrize("text", ["1 / 0", "def (", "x = 1", "raise SystemExit(3)"])
def test_a_file_that_does_not_run_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(BadDeclaration, match=str(tmp_path / "mine.py")):
        load(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("severity=", "severty=", "Incident has no key 'severty'; its keys are id, title, sev"),
        ("severity='warning',", "", "Incident lacks the key 'severity'"),
        ("import Incident,", "import Incidnt,", "has no 'Incidnt' (did you mean Incident?)"),
        ("diag.incident import", "diag.incidnt import", "(did you mean diag.incident?)"),
        ("incident = Incident(", "incident = Incidnt(", "'Incidnt' is not defined (did you mean Incident?)"),
        ("incident = Incident(", "incidnt = Incident(", "must define a variable `incident`"),
        ("errors.above", "errors.abov", "has no 'abov' (did you mean above?)"),
        ("severity='warning'", "severity='warning', lints='yes'", "lints must be true or false, not 'yes'"),
        ("severity='warning'", "severity='warning', burns='log'", "burns must be a list of BurnRateWindows"),
        ("severity='warning'", "severity='warning', began='now'", "began must be a Signal or nothing, not 'now'"),
    ],
)
def test_a_mistake_in_python_is_named_with_the_nearest_name(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    file = write(tmp_path) / "mine.py"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(BadDeclaration) as refused:
        load(tmp_path)
    assert sentence in str(refused.value) and str(refused.value).startswith(str(tmp_path / "mine.py"))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDeclaration, match="not a folder of incident files"):
        load(tmp_path / "nowhere")


def test_no_fix_is_to_run_diag_again() -> None:
    assert [incident.id for incident in load() for fix in incident.fixes if "diag doctor http" in fix.command] == []
