"""A mistake in a declaration is one sentence with file, line, key and the nearest name, never an internal error."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from support.paths import ROOT
from support.sampling import some

PARTS, LOG_SIGNALS = "knowledge/signals/load.promql", "knowledge/signals/log.promql"
INCIDENT, SHARED = "knowledge/incidents/engine_dead.incident", "knowledge/shared.incident"
SIGNALS, LINT = "knowledge/signals/load.py", "lint/rules.toml"
FAILURES, WAITS, GPUS = "knowledge/failures/memory.toml", "knowledge/waits.toml", "vllm/gpus.toml"
FAMILIES, ALIASES = "vllm/memory/architectures.toml", "vllm/memory/aliases.toml"
ENCODERS, METRICS = "vllm/memory/encoders.toml", "core/metric_families.toml"
DEFECTS = "report/defects.toml"
SETTINGS, DEFAULTS, CHECKS = "vllm/settings.toml", "vllm/flags/defaults.toml", "preflight/checks.toml"
ADVICE, ROCM, LOG = "knowledge/advice.toml", "knowledge/rocm.toml", "log/patterns.toml"
MISTAKES = [
    (INCIDENT, "severity: critical", "severity: major", ":4: severity must be info, warning or critical, not 'major'"),
    (INCIDENT, "severity: critical", "severty: critical", ":4: has no key 'severty'; its keys are title, severity"),
    (INCIDENT, "severity: critical\n", "", "Incident lacks the key 'severity'"),
    (INCIDENT, "severity: critical", "severity critical", "'severity critical' must be `key: value`"),
    (INCIDENT, "severity: critical", "severity: critical\nseverity: info", ":5: severity stands twice"),
    (INCIDENT, "severity: critical", "severity: critical\nhold: a while", "'a while' is not a duration such as 30s"),
    (INCIDENT, "severity: critical", "severity: critical\nlints: yes", ":5: lints must be true or false, not 'yes'"),
    (
        INCIDENT,
        "severity: critical",
        "severity: critical\nburns: FAST_BRN",
        "no signal, condition or constant 'FAST_BRN'",
    ),
    (INCIDENT, "severity: critical", "severity: critical\nbegan: severity", "is no signal, condition or constant 'sev"),
    (
        INCIDENT,
        "severity: critical",
        "severity: critical\nended_by: queue_time",
        "must be the signal of one of the incident's",
    ),
    (INCIDENT, "sign: sign_of_death", "sign: sign_of_death\nended: crash_tim", "'crash_tim' (did you mean crash_time"),
    (INCIDENT, "sign: sign_of_death", "mild: signs_of_life <= 0 (judged: a)", ":26: `serious` must be one of the supp"),
    (INCIDENT, "sign: sign_of_death", "serious: engines_lost >= 1 (judged: a)", ":26: `serious` must be one of the su"),
    (
        INCIDENT,
        "sign: sign_of_death",
        "serious: engines_lost >= 1 (judged: a server that has lost one fails)\nmild: signs_of_life <= 0",
        "'signs_of_life <= 0' must be `signal >= number (judged: text)`",
    ),
    (INCIDENT, "\nimpact: every", "\nimpact: {EVRY} every", "'EVRY' is not defined"),
    (INCIDENT, "sign: sign_of_death", "sign: sign_of_deth", "'sign_of_deth' (did you mean sign_of_death?)"),
    (INCIDENT, "evidence_of_death >= 1", "evidence_of_death = 1", "must be `signal >= number (judged: text)`"),
    (INCIDENT, "operations: log, drain", "operations: log, drian", "not 'drian' (did you mean drain?)"),
    (INCIDENT, "(judged: a server without", "(jugded: a server without", "must be `judged: text`"),
    (
        INCIDENT,
        "[looks_like]",
        "[look_like]",
        "no section [look_like], only looks_like, fixes, may_explain, signals (did",
    ),
    (INCIDENT, "incident: startup_slow", "incident: startup_slo", "not an incident (did you mean startup_slow?)"),
    (INCIDENT, "incident: startup_slow", "name: startup_slow", "an incident: write `incident: startup_slow`"),
    (INCIDENT, "like: READ_LOG", "like: NOT_ASLEEP", "[fixes] is like something else than Fix"),
    (INCIDENT, "evidence_of_death >=", "opposite(impact) >=", ":14: 'str' object has no attribute 'opposite'"),
    (INCIDENT, "like: READ_LOG", "like: READ_LOGS", "'READ_LOGS' (did you mean READ_LOG?)"),
    (INCIDENT, "\ndistinguish: ", "\ndistinguished: ", "has no key 'distinguished'; its keys are name, distinguish"),
    (SHARED, "\nleast: 0.05", "\nleast: small", "'small' must be a number or $signal"),
    (SHARED, "\neffect: tokens are", "\n# effect: tokens are", "Fix lacks the key 'effect'"),
    (SIGNALS, "\nPARTS", "\nx = judgd('x')\nPARTS", "'judgd' is not defined (did you mean judged?)"),
    (SIGNALS, "].at_most(FORE", "].at_mot(FORE", "has no 'at_mot' (did you mean at_most?)"),
    (
        PARTS,
        "\ncontext: true",
        "\ncontxt: true",
        "has no key 'contxt'; its keys are name, promql, sentence, unit, window_sc",
    ),
    (PARTS, "\ncontext: true", "\ncontext: yes", ":{line}: context must be true or false, not 'yes'"),
    (
        PARTS,
        "\nwindow_scaling: peak",
        "\nwindow_scaling: peek",
        "must be rate or peak, not 'peek' (did you mean peak?)",
    ),
    (PARTS, "\nsentence: mean number", "\n# mean number", "the signal 'requests_running' lacks the key 'sentence'"),
    (PARTS, "(mean): requests =", "(mean); requests =", "must be `words: unit = PromQL`"),
    (PARTS, "[requests_running_median]", "[requests_running]", ":{line}: the signal 'requests_running' exists twice"),
    (LOG_SIGNALS, "{events.FAULT_OVER}", "{events.FAULT_OVR}", "events has no 'FAULT_OVR' (did you mean FAULT_OVER?)"),
    (PARTS, "needs: {ENOUGH}", "needs: {ENUOGH}", "'ENUOGH' is not defined (did you mean ENOUGH?)"),
    (
        PARTS,
        "$window]) and $requests_running_s",
        "$window]) and $requests_runing_s",
        "unknown placeholder $requests_runing_sampled (did",
    ),
    (
        PARTS,
        "\nttft_count: requests =",
        "\nttft_count; requests =",
        ":38: 'ttft_count; requests = $first_tokens' must be",
    ),
    (PARTS, "{within ", "{wthin ", ":37: 'wthin' is not defined (did you mean within?)"),
    (LINT, 'severity = "error"', 'severity = "eror"', "severity must be error, warning or info, not 'eror'"),
    (LINT, '\nid = "ambiguous_flag"', '\nid = "unknown_flag"', "'unknown_flag' exists twice"),
    (LINT, '\nid = "ambiguous_flag"', '\nid = "ambiguous_flags"', "the rule ambiguous_flag has no [[rule]] in"),
    (FAILURES, "\nmeans =", "\nmeens =", ":10: failure has no key 'meens'"),
    (FAILURES, "{share}", "{shore}", "names 'shore', which is no group of `pattern` (did you mean share?)"),
    (FAILURES, "{share(", "{shore(", "uses 'shore', which is no function (did you mean share?)"),
    (FAILURES, '\nid = "gpu_memory_below_engine_budget"', '\nid = "gpu_memory_occupied"', "' exists twice"),
    (FAILURES, "[[failure]]", "[[failur]]", "has no key 'failur'; its keys are failure (did you mean failure?)"),
    (FAILURES, 'id = "', "id = ", ":6: is not valid TOML"),
    (WAITS, 'waited_for = "engine"', 'waited_for = "engin"', "not 'engin' (did you mean engine?)"),
    (WAITS, "stack = ['", "stack = ['(", "wait.stack must be a regular expression"),
    (WAITS, 'id = "next_step"', "", ":11: wait lacks the key 'id'"),
    (GPUS, "\nbandwidth =", "\nbandwith =", "has no key 'bandwith'; its keys are name, nvml, memory, bandwidth"),
    (GPUS, "\nmemory = 15.77", "\nmemory = '16'", "v100-16.memory must be a number, not '16'"),
    (SETTINGS, "\nword = [", "\nwrd = [", "has no key 'wrd'; its keys are kinds, word, own, sections, names"),
    (DEFAULTS, "\nunset = ", "\nunst = ", "has no key 'unst'; its keys are unset, numbers, words"),
    (CHECKS, 'group = "memory"', 'group = "memry"', "not 'memry' (did you mean memory?)"),
    (ADVICE, '\ntruth = "', '\ntruht = "', "advice has no key 'truht'"),
    (ADVICE, '\nnames = ["', '\nnames = [3, "', "advice.names must be a text, not 3"),
    (ROCM, "[words]", "[wordes]", "has no key 'wordes'; its keys are commands, words (did you mean words?)"),
    (
        LOG,
        'name = "load_weights"',
        'name = "load_weight"',
        "'load_weight' is no stage (did you mean load_weights?)",
    ),
    (LOG, "'{cuda}", "'{cude}", "begins names 'cude', which is no part (did you mean cuda?)"),
    (LOG, "begins = 'Watchdog", "begins = '(Watchdog", "pattern.begins must be a regular expression, not '(Watch"),
    (LOG, "begins = 'Watchdog caught", "begins = 'Watchdog (caught)", "pattern.begins must be without groups, (?:...)"),
    (FAMILIES, '"qwen2moe"', '"qwen2_moe"', "family.names has 'qwen2_moe', which is written as 'qwen2moe'"),
    (FAMILIES, "\nqk_norm =", "\nqk_norms =", "family has no key 'qk_norms'"),
    (ENCODERS, '"merge and project"', '"merge and projekt"', "(did you mean merge and project?)"),
    (ALIASES, '["n_embd", "d_model"]', '"n_embd"', "hidden_size must be a list of texts, not 'n_embd'"),
    (METRICS, 'labels = ["collector"]', 'labels = ["colector"]', "[labels] lacks (did you mean collector?)"),
    (
        METRICS,
        'kind = "counter"',
        'kind = "count"',
        "kind must be gauge or counter, not 'count' (did you mean counter?)",
    ),
    (DEFECTS, "\nended =", "\nendet =", ":4: endet must be ended, gone, gaps or slow, r"),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the package by links."""
    for source in (ROOT / "diag").rglob("*"):
        target = tmp_path / source.relative_to(ROOT)
        if source.is_file() and "__pycache__" not in source.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    return tmp_path


@contextmanager
def mistaken(file: Path, old: str, new: str) -> Iterator[None]:
    """Make one mistake in one file of the copy."""
    source = file.readlink()
    text = source.read_text(encoding="utf-8")
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    bytecode = Path(cache_from_source(str(file)))
    bytecode.unlink(missing_ok=True)  # files of one second and one size look the same to Python
    yield
    file.unlink()
    file.symlink_to(source)
    bytecode.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_mistake_in_a_file_of_diag_is_one_sentence(copy: Path) -> None:
    """`diag incidents` reads every declaration; each mistake in turn is made in a copy of the package."""
    wrong = []
    for name, old, new, expected in some(MISTAKES, 4):
        before = (copy / "diag" / name).read_text(encoding="utf-8").partition(old)[0]
        sentence = expected.replace("{line}", str(before.count("\n") + 1 + new.startswith("\n")))
        with mistaken(copy / "diag" / name, old, new):
            done = subprocess.run(
                [sys.executable, "-c", "from diag.__main__ import main; main()", "incidents"],
                check=False,
                capture_output=True,
                text=True,
                cwd=copy,
                env={**os.environ, "PYTHONPATH": str(copy)},
            )
        elsewhere = sentence.startswith(("the rule", "sentence must"))
        is_sentence = done.stderr.startswith(f"diag: diag/{name}:") or elsewhere
        if done.returncode != 64 or sentence not in done.stderr or not is_sentence or done.stderr.count("\n") != 1:
            wrong.append((name, new, done.returncode, done.stderr))
    assert wrong == []
