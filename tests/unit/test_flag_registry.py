"""Flags of each release, and updates of this data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.live import server
from support.rows import each_row

from diag.lint.rule import LintTarget
from diag.lint.rules import lint
from diag.vllm.command.parse import read
from diag.vllm.flags import installed_parser
from diag.vllm.flags.registry import FILE, Flag, described, environment, known, release, understood, versions

VALUES = {"integer": "1", "size": "1", "number": "0.5", "json": "{}", "object": "{}", "text": "x"}
SPELLING = {
    "unknown_flag",
    "ambiguous_flag",
    "removed_flag",
    "flag_of_a_later_release",
    "taken_for_another",
    "value_missing",
    "value_of_wrong_type",
    "switch_with_a_value",
    "word_too_many",
}
FLAGS = [each for each in known().values() if each.name != "--config"]  # which needs a file


def refused(flag: Flag, version: str) -> set[str]:
    form = flag.at(version)
    value = [] if form.takes == "none" else [form.choices[0] if form.choices else VALUES[form.value]]
    found = lint(LintTarget(read(" ".join(["vllm serve m", flag.name, *value]), version=version), version))
    return {each.rule for each in found if each.severity == "error"} & SPELLING


@pytest.mark.slow
@each_row("flag", FLAGS)
def test_a_flag_is_accepted_from_its_first_release_to_its_last_and_refused_before_and_after(flag: Flag) -> None:
    at = {release(each): each for each in versions()}
    order = sorted(at)
    first, last = order.index(release(flag.first)), order.index(release(flag.last))
    assert not refused(flag, flag.first)
    assert not refused(flag, flag.last)
    assert first == 0 or refused(flag, at[order[first - 1]])
    assert last == len(order) - 1 or refused(flag, at[order[last + 1]])


def test_every_range_is_one_of_known_releases_in_their_order() -> None:
    for flag in known().values():
        assert {flag.first, flag.last} <= {*versions()}
        assert release(flag.first) <= release(flag.last)
    assert [*versions()] == sorted(versions(), key=release)
    assert described() in versions()


@pytest.mark.parametrize(
    ("word", "version", "name", "on", "key"),
    [
        ("--max-num-seqs", "", "--max-num-seqs", True, ""),
        ("--max_num_seqs", "", "--max-num-seqs", True, ""),
        ("-tp", "", "--tensor-parallel-size", True, ""),
        ("--no-enable-prefix-caching", "", "--enable-prefix-caching", False, ""),
        ("--no_enable_prefix_caching", "", "--enable-prefix-caching", False, ""),
        ("--kv-cache-memory", "0.32.0", "--kv-cache-memory-bytes", True, ""),
        ("--compilation-config.cudagraph_mode", "", "--compilation-config", True, "cudagraph_mode"),
        ("-cc.pass_config.x", "", "--compilation-config", True, "pass_config.x"),
        ("-O3", "0.32.0", "--optimization-level", True, ""),
        ("-O3", "0.10.0", "--compilation-config", True, ""),
        ("-O", "0.32.0", "--compilation-config", True, ""),
        ("--swap-space", "0.32.0", "--swap-space", True, ""),
        ("--device", "0.25.0", "--device-ids", True, ""),  # argparse takes the beginning of a flag for the flag
        ("--device", "0.9.0", "--device", True, ""),
    ],
)
def test_a_word_is_understood_as_argparse_does(word: str, version: str, name: str, on: bool, key: str) -> None:
    option = understood(word, version)
    assert option is not None
    assert (option.flag.name, option.on, option.key) == (name, on, key)


@pytest.mark.parametrize("word", ["--max-num", "--", "--never-heard-of", "-x", "--no-never-heard-of"])
def test_unknown_or_ambiguous_word_is_no_flag(word: str) -> None:
    assert understood(word, "0.32.0") is None


def test_the_second_name_of_a_flag_counts_for_the_first() -> None:
    command = read("vllm serve m --device-memory-utilization 0.5")
    assert command.get("--gpu-memory-utilization") == "0.5"


def test_a_release_newer_than_all_keeps_the_flags_of_the_newest() -> None:
    assert known()["--max-num-seqs"].in_release("9.0.0")
    assert not known()["--swap-space"].in_release("9.0.0")


def test_a_build_without_tags_has_no_release() -> None:
    assert release("0.1.dev15917+g0a6396b45") == ()
    assert release("0.1.2") == (0, 1, 2)


# -- the update -------------------------------------------------------------------------------------------------------

KNOWN = {
    "about": "x",
    "versions": ["0.6.3.post1", "0.7.0"],
    "parsers": ["0.7.0"],
    "environment": ["VLLM_A"],
    "flags": {
        "--kept": {"versions": ["0.6.3.post1", "0.7.0"], "takes": "one", "value": "integer"},
        "--gone": {"versions": ["0.6.3.post1", "0.7.0"], "takes": "none"},
    },
}
SAID = {
    "--kept": {"takes": "many", "no": False, "short": ["-k"], "value": "number", "null": False, "choices": []},
    "--new": {"takes": "none", "no": True, "short": []},
}


def test_newer_release_extends_existing_flags_ends_missing_ones_and_adds_new_ones() -> None:
    merged = installed_parser.merged(KNOWN, {"version": "0.8.0", "environment": ["VLLM_B"], "flags": SAID})
    assert merged["versions"] == ["0.6.3.post1", "0.7.0", "0.8.0"]
    assert merged["flags"] == {
        "--gone": {"versions": ["0.6.3.post1", "0.7.0"], "takes": "none"},
        "--kept": {
            **{"versions": ["0.6.3.post1", "0.8.0"], "takes": "many", "short": ["-k"], "value": "number"},
            "until": {"0.7.0": {"takes": "one", "value": "integer"}},
        },
        "--new": {"versions": ["0.8.0", "0.8.0"], "takes": "none", "no": True},
    }
    assert (merged["parsers"], merged["environment"]) == (["0.7.0", "0.8.0"], ["VLLM_B"])


def test_older_release_extends_ranges_with_its_forms_of_flags() -> None:
    merged = installed_parser.merged(KNOWN, {"version": "0.6.0", "environment": ["VLLM_B"], "flags": SAID})
    assert merged["flags"]["--kept"] == {
        **{"versions": ["0.6.0", "0.7.0"], "takes": "one", "value": "integer"},
        "until": {"0.6.0": {"takes": "many", "short": ["-k"], "value": "number"}},
    }
    assert (merged["parsers"], merged["environment"]) == (["0.6.0", "0.7.0"], ["VLLM_A"])


def test_a_post_release_is_no_release_of_its_own() -> None:
    merged = installed_parser.merged(KNOWN, {"version": "0.6.3", "environment": [], "flags": {}})
    assert merged["versions"] == KNOWN["versions"]


def test_flag_file_survives_reading_and_writing() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert installed_parser.written(json.loads(text)) == text


@pytest.mark.live
@server.needed
def test_flag_file_matches_the_installed_vllm(tmp_path: Path) -> None:
    text = FILE.read_text(encoding="utf-8")
    said = installed_parser.describe(server.PYTHON)
    assert said["version"] == described()
    assert {*said["environment"]} == environment()
    assert installed_parser.written(installed_parser.merged(json.loads(text), said)) == text
    assert {name for name, each in known().items() if each.in_release(described())} == {*said["flags"]}


def test_an_interpreter_without_vllm_updates_nothing() -> None:
    before = FILE.read_bytes()
    command = [sys.executable, "-m", "diag.vllm.flags.installed_parser", "/nowhere/python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("/nowhere/python: vLLM's parser cannot be run with it")
    assert done.stderr.count("\n") == 1
    assert FILE.read_bytes() == before
