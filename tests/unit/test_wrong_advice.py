"""Popular wrong advice: each piece is answered by its names, and what it says of flags, metrics and memory is true."""

import re
from itertools import product
from pathlib import Path

import pytest
from support.live import server
from support.paths import MODELS
from support.rows import each_row

from diag.artefacts.reference import WrongAdvice, declared, spelled, wrong_advice
from diag.cli.app import main
from diag.commands import explain as explain_command
from diag.commands.explain import run as explain
from diag.core.errors import BadUsage
from diag.knowledge.catalog import load
from diag.lint.rules import RULES
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import known, release, versions
from diag.vllm.memory import model
from diag.vllm.memory.kv_layout import cache_layout
from diag.vllm.memory.setup import GpuSpec, setup

ADVICE = {advice.names[0]: advice for advice in wrong_advice().values()}
EACH = pytest.mark.parametrize("advice", ADVICE.values(), ids=ADVICE)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
METRIC = re.compile(r"vllm:[a-z_]+")
_DERIVED = ("_total", "_bucket", "_sum", "_count")


@EACH
def test_explain_answers_wrong_advice_by_every_name(advice: WrongAdvice) -> None:
    for name in advice.names:
        page = explain(name, None)
        assert page.startswith(f"# {advice.names[0]}: popular advice that is wrong")
        assert all(part in page for part in (advice.claim, advice.truth, advice.instead, advice.source))


def test_names_of_wrong_advice_hide_no_incident_rule_or_signal() -> None:
    signals = declared(load(None))
    taken = {*RULES, *signals, *(signal.name for signal in signals.values()), *(each.id for each in load(None))}
    assert not taken & {name for advice in ADVICE.values() for name in advice.names}
    assert sum(len({*map(spelled, advice.names)}) for advice in ADVICE.values()) == len(wrong_advice())


@EACH
def test_advice_proposes_only_flags_of_the_newest_release(advice: WrongAdvice) -> None:
    for flag in FLAG.findall(advice.instead):
        name = flag if flag in known() else flag.replace("--no-", "--", 1)
        assert known()[name].in_release(versions()[-1]), flag


@EACH
def test_advice_names_the_release_that_removed_a_flag(advice: WrongAdvice) -> None:
    for flag in (known()[name] for name in advice.names if name in known()):
        releases = [text for text in versions() if release(text) > release(flag.last)]
        assert releases[0] in advice.truth or flag.last in advice.truth


def test_kv_cache_of_a_token_is_what_the_ledger_computes() -> None:
    shape = model.read(MODELS / "llama-3-70b")
    planned = setup(Command((), 0, {}, "m", ()), shape, GpuSpec())
    kept = cache_layout(shape, planned)
    size = kept.token_bytes(kept.block_bytes())
    assert size == 320 * 1024
    page = explain("32 KB of KV per token", None)
    assert "320 KiB" in page
    assert f"{8192 * size / 2**30:.1f} GiB" in page


@pytest.mark.parametrize("name", ["--swap-space", "swap_space", "--num-scheduler-steps", "nccl", "vllm:batch_size"])
def test_command_line_takes_a_flag_to_explain(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["diag", "explain", name])
    with pytest.raises(SystemExit) as status:
        main()
    assert not status.value.code
    assert "popular advice that is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("--rope-theta", ["0.6.0 to 0.11.0", "--hf-overrides"]),
        ("guided_decoding_backend", ["`backend`", "`--structured-outputs-config`"]),
        ("--chat-template-text-format", ["`--chat-template-content-format VALUE`"]),
        ("--disable-cascade-attn", ["no effect since 0.32.0"]),
        ("--port", ["from 0.6.0 on"]),
    ],
)
def test_explain_describes_a_flag_in_any_spelling(name: str, expected: list[str]) -> None:
    page = explain(name, None)
    assert all(text in page for text in expected), page


@pytest.mark.live
@server.needed
def test_advice_agrees_with_the_metrics_of_an_installed_vllm() -> None:
    folder = next(Path(server.PYTHON).parent.parent.glob("lib/python3*/site-packages/vllm"))
    text = "".join(file.read_text(encoding="utf-8") for file in (folder / "v1" / "metrics").glob("*.py"))
    metrics = {*re.findall(r'"(vllm:\w+)"', text)}
    assert "vllm:kv_cache_usage_perc" in metrics

    def exists(name: str) -> bool:
        return name in metrics or any(name.removesuffix(end) in metrics for end in _DERIVED)

    for advice in ADVICE.values():
        proposed = {name for name in METRIC.findall(advice.instead) if name != "vllm:cache_config_info"}
        assert all(map(exists, proposed)), proposed
        gone = "removed" in advice.truth or "never existed" in advice.truth or "No release" in advice.truth
        for name in (name for name in advice.names if name.startswith("vllm:") and gone):
            assert not exists(name), name


@pytest.mark.live
@server.needed
def test_sources_of_advice_are_files_of_an_installed_vllm() -> None:
    packages = next(Path(server.PYTHON).parent.parent.glob("lib/python3*/site-packages"))
    for advice in ADVICE.values():
        for file in re.findall(r"vllm/[\w/]+\.py", advice.source):
            assert (packages / file).is_file(), file


@each_row("name", ["kv_" * 133, "a " * 200, " ".join(map("".join, product("kvecao", repeat=3)))[:400]])
def test_a_long_name_is_compared_with_few_ids(name: str) -> None:
    """Each of its words was compared with each word of 1,200 ids, nearly a million pairs."""
    compared: list[str] = []
    match = explain_command.SequenceMatcher
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(explain_command, "SequenceMatcher", lambda *texts: compared.append(texts[1]) or match(*texts))
        with pytest.raises(BadUsage):
            explain(name, None)
    assert 0 < len(compared) < 30_000
