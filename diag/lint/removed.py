"""Flags that were removed from vLLM or lost their effect, their replacements, and the rule that finds removed flags.

The data is from the source of 59 releases, 0.6.0 - 0.33.0, and the release notes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diag.core.files import parse_json
from diag.lint.rule import Edit, LintTarget, Match, at_least, removal, rule, shown
from diag.vllm.command.command import Given
from diag.vllm.command.redaction import value
from diag.vllm.flags.registry import Flag, known

V1 = "0.8.0"
"""The first release in which V1 is the engine unless VLLM_USE_V1=0 is set."""
V1_ONLY = "0.11.0"
"""The first release without the V0 engine."""


@dataclass(frozen=True)
class ReplacedFlag:
    """The `flags` that replace a removed flag ("" in them: its value); none if the flag is to be removed.

    `advice` is the fix if the command cannot be corrected mechanically.
    """

    why: str
    flags: tuple[str, ...] = ()
    advice: str = ""


_SPECULATION = "Speculation is configured by one JSON object since 0.8.2"
_DECODING = "Structured outputs are configured by one JSON object since 0.11.0"
_EPLB = "Expert balancing is configured by one JSON object since 0.10.2"
INTO: Mapping[str, tuple[str, str, str]] = {
    "--speculative-model": ("--speculative-config", "model", _SPECULATION),
    "--num-speculative-tokens": ("--speculative-config", "num_speculative_tokens", _SPECULATION),
    "--speculative-draft-tensor-parallel-size": ("--speculative-config", "draft_tensor_parallel_size", _SPECULATION),
    "--speculative-max-model-len": ("--speculative-config", "max_model_len", _SPECULATION),
    "--speculative-model-quantization": ("--speculative-config", "quantization", _SPECULATION),
    "--speculative-disable-by-batch-size": ("--speculative-config", "disable_by_batch_size", _SPECULATION),
    "--ngram-prompt-lookup-max": ("--speculative-config", "prompt_lookup_max", _SPECULATION),
    "--ngram-prompt-lookup-min": ("--speculative-config", "prompt_lookup_min", _SPECULATION),
    "--guided-decoding-backend": ("--structured-outputs-config", "backend", _DECODING),
    "--guided-decoding-disable-fallback": ("--structured-outputs-config", "disable_fallback", _DECODING),
    "--guided-decoding-disable-any-whitespace": ("--structured-outputs-config", "disable_any_whitespace", _DECODING),
    "--guided-decoding-disable-additional-properties": (
        "--structured-outputs-config",
        "disable_additional_properties",
        _DECODING,
    ),
    "--eplb-window-size": ("--eplb-config", "window_size", _EPLB),
    "--eplb-step-interval": ("--eplb-config", "step_interval", _EPLB),
    "--eplb-log-balancedness": ("--eplb-config", "log_balancedness", _EPLB),
    "--num-redundant-experts": ("--eplb-config", "num_redundant_experts", _EPLB),
}
"""Removed flags whose value is now a key of a JSON object: the flag that takes it, the key, and why."""
KEYS_UNTIL: Mapping[str, str] = {"disable_by_batch_size": "0.16.0", "disable_fallback": "0.16.0"}
"""The last release that is known to take a key; 0.24.0 refuses these."""
BACKENDS_OF: Mapping[str, tuple[str, ...]] = {
    "disable_any_whitespace": ("xgrammar", "guidance"),
    "disable_additional_properties": ("guidance",),
}
"""A key of --structured-outputs-config that is refused unless the backend is one of these."""

_V0 = "Only the V0 engine had it"
_ROPE = "The model's own configuration is overridden instead"
_ROPE_ADVICE = (
    "Use --hf-overrides with rope_parameters, the whole of them (rope_type, factor, rope_theta ...), and with"
    " max_position_embeddings where the context grows"
)
REPLACED: Mapping[str, ReplacedFlag] = {
    "--num-scheduler-steps": ReplacedFlag("V1 has no multi-step scheduling; it schedules asynchronously instead"),
    "--multi-step-stream-outputs": ReplacedFlag("V1 has no multi-step scheduling"),
    "--swap-space": ReplacedFlag("V1 never swaps the KV cache to the CPU: it recomputes"),
    "--preemption-mode": ReplacedFlag("V1 preempts by recomputation only"),
    "--max-num-partial-prefills": ReplacedFlag(
        "V1 never supported more than one; --long-prefill-token-threshold keeps long prompts from taking a whole step"
    ),
    "--max-long-partial-prefills": ReplacedFlag("V1 never supported partial prefills side by side"),
    "--scheduler-delay-factor": ReplacedFlag(_V0),
    "--num-lookahead-slots": ReplacedFlag(_V0),
    "--use-v2-block-manager": ReplacedFlag(_V0),
    "--disable-async-output-proc": ReplacedFlag(_V0),
    "--disable-frontend-multiprocessing": ReplacedFlag(_V0),
    "--max-seq-len-to-capture": ReplacedFlag(
        "V1 captures CUDA graphs by batch size, not by length: --max-cudagraph-capture-size bounds them"
    ),
    "--max-context-len-to-capture": ReplacedFlag("V1 captures CUDA graphs by batch size, not by length"),
    "--disable-log-requests": ReplacedFlag("Since 0.10.1 requests are logged only with --enable-log-requests"),
    "--enable-reasoning": ReplacedFlag("--reasoning-parser alone enables it"),
    "--device": ReplacedFlag("vLLM detects the platform"),
    "--calculate-kv-scales": ReplacedFlag("The scales come with the checkpoint"),
    "--rope-scaling": ReplacedFlag(_ROPE, advice=_ROPE_ADVICE),
    "--rope-theta": ReplacedFlag(_ROPE, advice=_ROPE_ADVICE),
    "--cuda-graph-sizes": ReplacedFlag("It was renamed", ("--cudagraph-capture-sizes", "")),
    "--chat-template-text-format": ReplacedFlag("It was renamed", ("--chat-template-content-format", "")),
    "--override-pooler-config": ReplacedFlag("It was renamed", ("--pooler-config", "")),
    "--disable-mm-preprocessor-cache": ReplacedFlag("A cache of 0 GB does the same", ("--mm-processor-cache-gb", "0")),
    "--enable-multimodal-encoder-data-parallel": ReplacedFlag(
        "It became one of several modes", ("--mm-encoder-tp-mode", "data")
    ),
}
_POOLING = "--task was split into --runner and --convert"
TASKS: Mapping[str, ReplacedFlag] = {
    "generate": ReplacedFlag(_POOLING, ("--runner", "generate")),
    "auto": ReplacedFlag("vLLM detects the task"),
    "embed": ReplacedFlag(_POOLING, ("--runner", "pooling", "--convert", "embed")),
    "embedding": ReplacedFlag(_POOLING, ("--runner", "pooling", "--convert", "embed")),
    "classify": ReplacedFlag(_POOLING, ("--runner", "pooling", "--convert", "classify")),
    "score": ReplacedFlag(_POOLING, ("--runner", "pooling", "--convert", "classify")),
    "reward": ReplacedFlag(_POOLING, ("--runner", "pooling")),
}
"""Replacements by the value of --task."""
LARGEST_SIZE = ReplacedFlag("A single number was the largest size", ("--max-cudagraph-capture-size", ""))
"""Replaces --cuda-graph-sizes with a single value."""
POOLER = ReplacedFlag(
    "It was renamed, and some of its keys were removed",
    advice="Use --pooler-config with use_activation in the place of normalize or softmax",
)
"""Replaces --override-pooler-config with a key that was removed."""


@dataclass(frozen=True)
class IneffectiveFlag:
    """A flag that the parser accepts and that has no effect since the release `first`."""

    first: str
    why: str


INEFFECTIVE: Mapping[str, IneffectiveFlag] = {
    "--swap-space": IneffectiveFlag(V1, REPLACED["--swap-space"].why),
    "--preemption-mode": IneffectiveFlag(V1, REPLACED["--preemption-mode"].why),
    "--max-seq-len-to-capture": IneffectiveFlag(V1, REPLACED["--max-seq-len-to-capture"].why),
    "--num-lookahead-slots": IneffectiveFlag(V1, _V0),
    "--use-v2-block-manager": IneffectiveFlag(V1, _V0),
    "--disable-log-requests": IneffectiveFlag("0.10.1", REPLACED["--disable-log-requests"].why),
    "--show-hidden-metrics-for-version": IneffectiveFlag("0.15.0", "No hidden metric is left to show"),
    "--max-parallel-loading-workers": IneffectiveFlag("0.32.0", "vLLM logs at startup that it is ignored"),
    "--disable-cascade-attn": IneffectiveFlag("0.32.0", "Cascade attention was removed"),
}


@rule()
def removed_flag(target: LintTarget) -> Iterator[Match]:
    gone = [
        (given, given.option.flag)
        for given in target.command.given
        if given.option and not given.option.flag.in_release(target.version) and target.since(given.option.flag.first)
    ]
    for given, flag in gone:
        if given.name not in INTO:
            yield _report_replaced(given, flag, target.version)
    merged = [given for given, _ in gone if given.name in INTO]
    for name in dict.fromkeys(INTO[given.name][0] for given in merged):
        yield _report_merged(target, [given for given in merged if INTO[given.name][0] == name], name)


def _report_replaced(given: Given, flag: Flag, version: str) -> Match:
    text = " ".join(given.values)
    replacement = REPLACED.get(flag.name, ReplacedFlag(""))
    if flag.name == "--task":
        replacement = TASKS.get(text, TASKS["generate"])
    elif flag.name == "--cuda-graph-sizes" and len(given.values) == 1:
        replacement = LARGEST_SIZE
    elif flag.name == "--override-pooler-config" and re.search(r'"(?:normalize|softmax|activation)"', text):
        replacement = POOLER
    words = tuple(word for part in replacement.flags for word in ([part] if part else given.values))
    able = all(known()[word].in_release(version) for word in words if word in known())
    edited = given.words and not replacement.advice
    may_be_shown = [value(given, text) for text in given.values] == [*given.values]
    values = given.values if may_be_shown else ["VALUE"]
    spelled = " ".join(word for part in replacement.flags for word in ([part] if part else values))
    return Match(
        f"{shown(given)} was removed: {flag.last} is the last release with it",
        replacement.why or f"vLLM {version} exits with `unrecognized arguments`",
        replacement.advice or (f"Use {spelled}" if words and able else "Remove it"),
        (Edit(given.words, words if able else ()),) if edited else (),
    )


def _report_merged(target: LintTarget, parts: Sequence[Given], name: str) -> Match:
    """Report several removed flags that became keys of the JSON object that the flag `name` takes."""
    version = target.version
    content: dict[str, object] = {}
    for given in parts:
        key, text = INTO[given.name][1], " ".join(given.values).removesuffix(":no-fallback")
        if not at_least(KEYS_UNTIL.get(key, version), version):
            continue
        if text == "[ngram]":  # up to 0.8 the method was given as the model's name
            content["method"] = "ngram"
            continue
        try:
            content[key] = parse_json(text) if text else bool(given.option and given.option.on)
        except ValueError:
            content[key] = text

    names = ", ".join(shown(given) for given in parts)
    last = known()[parts[0].name].last
    message = f"{names} {'were' if len(parts) > 1 else 'was'} removed: {last} is the last release with it"
    if not content:
        return Match(message, f"vLLM {version} has nothing in its place", "Remove it", removal(parts))

    backend = content.get("backend")
    wanted = [able for key, able in BACKENDS_OF.items() if content.get(key) and backend not in able]
    requirement = ", with the options behind the colon as keys" if ":" in str(backend) else ""
    if wanted:
        requirement = f" with {' or '.join(wanted[-1])} as its backend: vLLM refuses it with any other"

    text = json.dumps(content)
    named = text if all(value(part, word) == word for part in parts for word in part.values) else "{...}"
    is_given = target.command.get(name) is not None
    able = known()[name].in_release(version) and not is_given and not requirement
    first, *others = [part for part in parts if part.words] or [parts[0]]
    return Match(
        message,
        INTO[parts[0].name][2],
        (f"Add {named} to {name}" if is_given else f"Use {name} '{named}'") + requirement,
        (Edit(first.words, (name, text)), *removal(others)) if first.words and able else (),
    )
