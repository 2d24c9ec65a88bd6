"""A proposed command run by a real shell: it starts with the secrets that are set, and without one of them not at all.

Programs that only note their arguments and the variables stand for vllm and docker.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from diag.commands import lint as linting
from diag.core.incident import Fix, judged
from diag.diagnosis.proposals import FlagChange, Proposal
from diag.diagnosis.relaunch import relaunch
from diag.report.layout import continued
from diag.vllm.command.shown import shown

NOTE = """#!/bin/sh
printf '%s\\n' "$@" "VLLM_API_KEY is $VLLM_API_KEY" "HF_TOKEN is $HF_TOKEN" > started
"""
CHANGE = FlagChange("--max-num-seqs", None, 6.0)
FIX = Fix(change="", effect="", why=judged(""), flag="--max-num-seqs")
KEY, TOKEN = {"VLLM_API_KEY": "the key's $1"}, {"HF_TOKEN": "hf_abcdefghijkl"}

COMMANDS: list[tuple[str, Mapping[str, str], str]] = [
    ("vllm serve m --api-key sk-1", KEY, "--api-key\nthe key's $1\n"),
    ("vllm serve m --api-key=sk-1", KEY, "--api-key=the key's $1\n"),
    ("vllm serve m --api-key 'sk 1' --port 1", KEY, "--api-key\nthe key's $1\n--port"),
    ('vllm serve m --api-key "$VLLM_API_KEY"', KEY, "--api-key\nthe key's $1\n"),
    ("vllm serve m --api-key a b --port 1", {**KEY, "VLLM_API_KEY_2": "b"}, "--api-key\nthe key's $1\nb\n--port"),
    ("VLLM_API_KEY=a vllm serve m", KEY, "VLLM_API_KEY is the key's $1\n"),
    ("export VLLM_API_KEY=a; vllm serve m", KEY, "VLLM_API_KEY is the key's $1\n"),
    ("VLLM_API_KEY=a HF_TOKEN=b vllm serve m", {**KEY, **TOKEN}, "HF_TOKEN is hf_abcdefghijkl\n"),
    ("env HF_TOKEN=b vllm serve m", TOKEN, "HF_TOKEN is hf_abcdefghijkl\n"),
    ("sh -c 'vllm serve m --api-key a'", KEY, "--api-key\nthe key's $1\n"),
    ("bash -c 'exec vllm serve m --api-key \"a b\"'", KEY, "--api-key\nthe key's $1\n"),
    ('bash -c "vllm serve m --hf-token a"', TOKEN, "--hf-token\nhf_abcdefghijkl\n"),
    ("docker run -e HF_TOKEN=b vllm/vllm-openai --model m", TOKEN, "-e\nHF_TOKEN=hf_abcdefghijkl\nvllm/vllm-openai"),
    ("docker run --env=VLLM_API_KEY=b vllm/vllm-openai --model m", KEY, "--env=VLLM_API_KEY=the key's $1\n"),
    ("docker run -eVLLM_API_KEY=b vllm/vllm-openai --model m", KEY, "-eVLLM_API_KEY=the key's $1\n"),
    ('docker run --env "HF_TOKEN=$X" vllm/vllm-openai --model m', TOKEN, "--env\nHF_TOKEN=hf_abcdefghijkl\n"),
    ("docker run -e HF_TOKEN vllm/vllm-openai --model m", TOKEN, "-e\nHF_TOKEN=hf_abcdefghijkl\n"),
    ("docker run --env=VLLM_API_KEY vllm/vllm-openai --model m", KEY, "--env=VLLM_API_KEY=the key's $1\n"),
    ("vllm serve m --ssl-keyfile /etc/x.key", {"SSL_KEYFILE": "k"}, "--ssl-keyfile\nk\n"),
    (
        'vllm serve m --hf-overrides \'{"a_token": "b c"}\'',
        {"HF_OVERRIDES": '{"a": "$1"}'},
        '--hf-overrides\n{"a": "$1"}\n',
    ),
    ("K=sk-1; vllm serve m --api-key $K", KEY, "--api-key\nthe key's $1\n"),
    ("vllm serve m -x -sk-1 --api-key -sk-2", {**KEY, "WORD_5": "-a b"}, "-x\n-a b\n--api-key\nthe key's $1\n"),
    ("JWT=abc vllm serve m", {"JWT": "j"}, "serve\nm\n"),
    ("sh -c 'ARGS=\"--api-key sk-1\"; vllm serve m $ARGS'", KEY, "--api-key\nthe key's $1\n"),
    (f"HF_TOKEN=b vllm serve m --api-key a {'--served-model-name name ' * 6}--port 1", {**KEY, **TOKEN}, "--port\n1\n"),
]


def ran(line: str, folder: Path, variables: Mapping[str, str]) -> str:
    """Return the notes of the programs, "" if none was started; a shell must be able to read the line."""
    for name in ("vllm", "docker"):
        (folder / name).write_text(NOTE)
        (folder / name).chmod(0o755)
    (folder / "started").unlink(missing_ok=True)
    subprocess.run(["bash", "-n", "-c", line], check=True)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = ["bash", "-c", line]
    done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)
    started = folder / "started"
    assert started.exists() == (done.returncode == 0), done.stderr
    return started.read_text() if started.exists() else ""


@pytest.mark.parametrize(("command", "secrets", "noted"), COMMANDS)
def test_a_relaunch_starts_with_its_secrets_or_not_at_all(
    command: str, secrets: Mapping[str, str], noted: str, tmp_path: Path
) -> None:
    line = relaunch(shown(command), [Proposal(FIX, None, None, (), False, "", changes=(CHANGE,))]) or ""
    assert "REDACTED" not in line
    line = "\n".join(continued(line, " " * 14, " " * 4)) or line  # as a report prints it
    assert noted in ran(line, tmp_path, secrets)
    for name in secrets:
        assert not ran(line, tmp_path, {key: value for key, value in secrets.items() if key != name}), name
        assert not ran(line, tmp_path, {**secrets, name: ""}), name


def test_a_corrected_command_starts_with_its_secrets_or_not_at_all(tmp_path: Path) -> None:
    line = linting.judge("vllm serve m --swap-space 4 --api-key sk-1", "0.32.0").corrected
    assert "--api-key\nthe key's $1\n" in ran(line, tmp_path, KEY)
    assert not ran(line, tmp_path, {})
