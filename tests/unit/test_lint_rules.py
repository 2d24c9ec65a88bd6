"""The rules of `diag lint`: each has an id, a page and a case that it finds; findings can be ignored by id."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import MODELS
from support.rows import each_row

from diag.artefacts.reference import failure_reference, lint_rule_page, lint_rule_reference
from diag.commands.explain import run as explain
from diag.commands.lint import LintOptions, ignored_rules, judge, run
from diag.core.contract import read as read_contract
from diag.core.errors import BadContract, BadUsage
from diag.lint.rule import HostGpu, HostGpus, LintRule, LintTarget
from diag.lint.rules import RULES, lint
from diag.lint.weights import draft_model
from diag.vllm.command.parse import filled_in, read_all
from diag.vllm.command.shell import line
from diag.vllm.memory import model

GIB = 2**30
FREE, SMALL = HostGpu("0", "H100", 80 * GIB, 79 * GIB), HostGpu("1", "T4", 16 * GIB, 15 * GIB)
AMPERE = HostGpu("0", "A100-SXM4-80GB", 80 * GIB, 79 * GIB)
OTHER, BUSY = HostGpu("1", "H100", 80 * GIB, 79 * GIB), HostGpu("0", "H100", 80 * GIB, 8 * GIB, 1)
HOSTS = {
    "fewer_gpus_than_ranks": HostGpus((FREE,), {}),
    "unequal_gpus": HostGpus((FREE, SMALL), {}),
    "tensor_parallel_over_pcie": HostGpus((FREE, OTHER), {("0", "1"): "sys"}),
    "gpu_is_shared": HostGpus((BUSY,), {}),
    "gpu_memory_given_away": HostGpus((FREE,), {}),
    "tensor_parallel_of_a_small_model": HostGpus((FREE, OTHER), {}),
    "fp8_cache_is_converted": HostGpus((AMPERE,), {}),
    "option_of_another_gpu": HostGpus((AMPERE,), {}),
    "model_does_not_fit": HostGpus((FREE,), {}),
    "state_blocks_below_max_num_seqs": HostGpus((FREE,), {}),
}
"""What an example needs this host to be."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    **{"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "num_key_value_heads": 8, "intermediate_size": 14336},
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
PARSER_ERROR = "argument --lora-modules: expected name=path"
FOLDERS = {
    "model": CONFIG,
    "model-awq": {**CONFIG, "quantization_config": AWQ},
    "mixture": {**CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    "small": {**CONFIG, "num_hidden_layers": 2},
    "draft": {**CONFIG, "num_hidden_layers": 2, "vocab_size": 32000},
    "latent": json.loads((MODELS / "deepseek-v3" / "config.json").read_text()),
    "hybrid": json.loads((MODELS / "qwen3.5-27b" / "config.json").read_text()),
}
"""The models that examples name, by their folders."""
EACH_RULE = each_row("rule", RULES.values())


def target(rule: LintRule, command: str, version: str, folder: Path) -> LintTarget:
    """An example of a rule, with what it requires."""
    is_made = (folder / "c.yaml").exists()
    (folder / "c.yaml").write_text("enable-prefix-caching: false\n")
    for name, config in () if is_made else FOLDERS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))

    def shape(name: str) -> model.Model | None:
        place = folder / name.removeprefix("./")
        return model.read(place, str(place), version) if name.startswith("./") and place.is_dir() else None

    *before, parsed = read_all(command, folder, version)
    return LintTarget(
        parsed,
        version,
        shape=shape(parsed.model),
        gpus=HOSTS.get(rule.id),
        folder_without_config="./models" if parsed.model == "./models" else "",
        parser_error=PARSER_ERROR if command.endswith(" adapter") else "",
        draft=shape(draft_model(LintTarget(parsed, version))),
        host_memory=64 * GIB,
        adapter_ranks={"./adapter-64": 64},
        beside=tuple(LintTarget(other, version) for other in before),
        text=command,
    )


@EACH_RULE
def test_a_rule_finds_something_in_its_own_example(rule: LintRule, tmp_path: Path) -> None:
    found = lint(target(rule, rule.example.command, rule.example.version, tmp_path))
    assert [finding.severity for finding in found if finding.rule == rule.id] == [rule.severity]


@EACH_RULE
def test_a_rule_leaves_its_near_miss_alone(rule: LintRule, tmp_path: Path) -> None:
    example = rule.example
    version = example.leaves_version or example.version
    assert (example.leaves, version) != (example.command, example.version)
    found = lint(target(rule, example.leaves, version, tmp_path))
    assert rule.id not in {finding.rule for finding in found}
    assert not [finding for finding in found if finding.severity == "error"]


@EACH_RULE
def test_lint_example_without_host_needs_no_host(rule: LintRule) -> None:
    command, version = rule.example.command, rule.example.version
    if not rule.example.requires:
        *before, last = read_all(command, version=version)
        beside = tuple(LintTarget(other, version) for other in before)
        assert rule.id in {finding.rule for finding in lint(LintTarget(last, version, beside=beside, text=command))}


@EACH_RULE
def test_a_rule_has_a_page_with_every_part(rule: LintRule) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]+", rule.id)
    assert re.findall(r"^## (.+)$", lint_rule_page(rule), re.MULTILINE) == [
        *("What it finds", "Why it matters", "Example", "How to fix it", "How to ignore it")
    ]
    for part in (rule.title, rule.finds, rule.why, rule.fix, rule.example.command, rule.example.leaves):
        assert part.strip()


@EACH_RULE
def test_explain_prints_the_page_of_a_rule(rule: LintRule) -> None:
    assert explain(rule.id, None) == lint_rule_page(rule)


def test_the_reference_has_every_rule_with_its_page() -> None:
    index, *pages = lint_rule_reference().values()
    named = re.findall(r"^## (.+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(named) == sorted(RULES)
    assert re.findall(r"^\| \[(\w+)\]\(lint-rules/[\w-]+\.md#\w+\) \|", index, re.MULTILINE) == named


def test_no_generated_page_has_more_than_three_thousand_words() -> None:
    pages = {**lint_rule_reference(), **failure_reference()}
    assert max(len(text.split()) for text in pages.values()) < 3_000


def test_an_unknown_id_is_refused_in_one_sentence_that_names_both_lists() -> None:
    with pytest.raises(BadUsage, match=r"\A[^\n]*'kv_cascade'[^\n]*diag incidents[^\n]*docs/lint-rules.md[^\n]*\Z"):
        explain("kv_cascade", None)


COMMAND = "vllm serve m --max-model-len 8k --disable-log-stats --swap-space 4"


def test_ignored_findings_are_counted_and_neither_corrected_nor_part_of_the_exit_status() -> None:
    found = judge(COMMAND, "0.32.0", ignored=("removed_flag",))
    assert [finding.rule for finding in found.findings] == ["no_metrics"]
    assert (found.status, found.ignored) == (1, ("removed_flag",))
    assert found.corrected == "vllm serve m --max-model-len 8k --swap-space 4"


def test_report_counts_ignored_findings() -> None:
    options = LintOptions("0.32.0", ignore=["removed_flag", "no_metrics"])
    text, status = run(COMMAND, options, as_json=False)
    assert "  ignored      2 findings (removed_flag, no_metrics)\n" in text
    assert status == 0
    document = json.loads(run(COMMAND, options, as_json=True)[0])
    assert document["launches"][0]["ignored"] == {"removed_flag": 1, "no_metrics": 1}


def test_diag_toml_ignores_rules_too(tmp_path: Path) -> None:
    contract = tmp_path / "diag.toml"
    contract.write_text('[lint]\nignore = ["removed_flag"]\n')
    text, _ = run(COMMAND, LintOptions("0.32.0", ignore=["no_metrics"], contract=contract), as_json=False)
    assert "2 findings (removed_flag, no_metrics)" in text


def test_unknown_rule_is_refused_with_the_place_of_its_name(tmp_path: Path) -> None:
    file = tmp_path / "diag.toml"
    file.write_text('[site]\nlabels = ["pod"]\n\n[lint]\nignore = ["removed_flags"]\n')
    with pytest.raises(BadContract, match=rf"\A{file}:5: \[lint\] no rule is called 'removed_flags'[^\n]*\Z"):
        ignored_rules((), read_contract(file))
    with pytest.raises(BadUsage, match=r"\A--ignore: no lint rule is called 'removed_flags'[^\n]*\Z"):
        run(COMMAND, LintOptions(ignore=["removed_flags"]), as_json=False)


def _unknown(command: str, folder: Path, version: str) -> Iterator[str]:
    """Yield a command with the value of one of its flags replaced by a variable."""
    parsed = read_all(command, folder, version)[-1]
    words = list(filled_in(parsed.words, parsed.environment))
    for given in () if parsed.writing or parsed.around else parsed.given:
        if given.values and given.words:
            first = words[given.words.start]
            is_joined = len(given.words) == 1
            new = [f"{first.partition('=')[0]}=$X"] if is_joined else [first, "$X"]
            yield line([*words[: given.words.start], *new, *words[given.words.stop :]])


def test_a_value_that_the_text_does_not_show_makes_no_error(tmp_path: Path) -> None:
    for rule in RULES.values():
        example = rule.example
        versions = (example.version, example.leaves_version or example.version)
        for command, version in zip((example.command, example.leaves), versions, strict=True):
            known = {finding.message for finding in rule.findings(target(rule, command, version, tmp_path))}
            for text in _unknown(command, tmp_path, version):
                found = rule.findings(target(rule, text, version, tmp_path))
                assert not [each for each in found if each.severity == "error" and each.message not in known], text
