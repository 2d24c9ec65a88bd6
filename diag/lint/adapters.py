"""Rules about LoRA adapters and draft models beside the served model."""

import json
from collections.abc import Iterator

from diag.lint.conflicts import Conflict, conflict_rule, is_more
from diag.lint.rule import Edit, Example, LintTarget, Match, is_open, number, rule
from diag.vllm.command.command import Command

_MODULES, _RANK, _ENABLE = "--lora-modules", "--max-lora-rank", "--enable-lora"
_USUAL_RANK = 16
"""Default of max_lora_rank in vllm/config/lora.py in every release."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank that every release since 0.10.2 takes."""
_CONFLICT = Conflict(
    "more_adapters_than_in_memory",
    "--max-loras is above --max-cpu-loras",
    message="--max-loras {max-loras} is above --max-cpu-loras {max-cpu-loras}",
    holds=lambda target: (
        target.is_on(_ENABLE) and is_more(target.number("--max-loras"), target.number("--max-cpu-loras"))
    ),
    why="vLLM refuses it: the adapters of a step come from those in CPU memory",
    fix="Set --max-cpu-loras to {max-loras} or more",
    example=Example(
        "vllm serve m --enable-lora --max-loras 4 --max-cpu-loras 2",
        leaves="vllm serve m --enable-lora --max-loras 4 --max-cpu-loras 8",
    ),
)


def adapter_paths(command: Command) -> list[str]:
    """Return the path of each adapter in --lora-modules: name=path, or a JSON object with a path."""
    found = []
    for text in (text for given in command.all(_MODULES)[-1:] for text in given.values):
        path = text.partition("=")[2]
        if text.lstrip().startswith(("{", "[")):
            try:
                content = json.loads(text)
            except (ValueError, RecursionError):
                continue
            listed = content if isinstance(content, list) else [content]
            found += [str(one["path"]) for one in listed if isinstance(one, dict) and "path" in one]
        elif path and not is_open(path):
            found.append(path)
    return found


def adapter_rank(settings: object) -> int:
    """Return the largest rank in the content of an adapter_config.json; 0 if it has none."""
    fields = settings if isinstance(settings, dict) else {}
    patterns = fields.get("rank_pattern")
    ranks = [fields.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    return max((rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool)), default=0)


@rule(
    "error",
    "--lora-modules without --enable-lora",
    "A command with --lora-modules and without --enable-lora.",
    "vLLM loads the model and then exits: LoRA is not enabled",
    "Add --enable-lora",
    Example(
        "vllm serve m --lora-modules adapter=./adapter",
        leaves="vllm serve m --enable-lora --lora-modules adapter=./adapter",
    ),
)
def adapters_without_lora(target: LintTarget) -> Iterator[Match]:
    """Check like `init_static_loras`: lora_model_runner_mixin.py raises, and the API server exits."""
    command, end = target.command, len(target.command.words)
    if target.has(_MODULES) and (target.is_off(_ENABLE) or target.lacks(_ENABLE)):
        first = command.all(_MODULES)[0].words
        added = not command.all(_ENABLE) and bool(first) and command.arguments <= first.start <= end
        yield Match(edits=(Edit(range(first.start, first.start), (_ENABLE,)),) if added else ())


@rule(
    "error",
    "The rank of an adapter is above --max-lora-rank",
    f"An adapter in --lora-modules whose adapter_config.json on this host has a rank above --max-lora-rank, which is"
    f" {_USUAL_RANK} by default.",
    "vLLM loads the model and then exits: the LoRA rank is greater than max_lora_rank",
    "Set --max-lora-rank to the rank of the largest adapter, rounded up to a value that vLLM takes",
    Example(
        "vllm serve m --enable-lora --lora-modules adapter=./adapter-64",
        requires="./adapter-64/adapter_config.json has rank 64",
        leaves="vllm serve m --enable-lora --max-lora-rank 64 --lora-modules adapter=./adapter-64",
    ),
)
def adapter_rank_above_the_maximum(target: LintTarget) -> Iterator[Match]:
    given = target.command.get(_RANK)
    most = number(given) if given is not None else _USUAL_RANK if target.lacks(_RANK) else None
    ranks = (target.adapter_ranks.get(path, 0) for path in adapter_paths(target.command))
    rank = max(ranks, default=0)
    if most is not None and rank > most and target.is_on(_ENABLE):
        fitting = next((able for able in RANKS if able >= rank), 0)
        unset = " (the default)" if given is None else ""
        yield Match(
            f"An adapter has rank {rank}, and --max-lora-rank is {most:g}{unset}",
            fix=f"Set --max-lora-rank to {fitting}" if fitting else "Use an adapter of a smaller rank",
        )


_OTHER_HEADS = ("eagle", "medusa", "mtp", "dflash", "speculator", "dspark")
"""Parts of the names of draft models that share the target's vocabulary in their own ways."""


def draft_model(target: LintTarget) -> str:
    """Return the name of a draft model that drafts by itself, "" if there is none or another method drafts."""
    keys, command = target.keys("--speculative-config"), target.command
    name = str(keys.get("model") or command.get("--spec-model") or "")
    method = keys.get("method") or command.get("--spec-method") or "draft_model"
    is_other = any(part in name.lower() for part in _OTHER_HEADS)
    return "" if is_other or method != "draft_model" or is_open(name) else name


@rule(
    "error",
    "The draft model has another vocabulary",
    "A draft model whose vocab_size differs from that of the model, both by their config.json, without"
    " use_heterogeneous_vocab, since 0.16.0.",
    "vLLM refuses it: tokens of one vocabulary mean nothing in the other",
    "Use a draft model of the same family, or `use_heterogeneous_vocab: true` in --speculative-config where the release"
    " has it",
    Example(
        """vllm serve ./model --speculative-config '{"model": "./draft", "num_speculative_tokens": 4}'""",
        requires="./model has 128,256 tokens, ./draft 32,000 and ./small 128,256",
        leaves="""vllm serve ./model --speculative-config '{"model": "./small", "num_speculative_tokens": 4}'""",
    ),
)
def draft_of_another_vocabulary(target: LintTarget) -> Iterator[Match]:
    """Check like `verify_equal_vocab_size_if_draft_model` (vllm/config/speculative.py of 0.16.0 - 0.32.0)."""
    shape, draft = target.shape, target.draft
    if not (shape and draft and draft.family and draft_model(target)) or not target.since("0.16.0"):
        return
    is_allowed = target.keys("--speculative-config").get("use_heterogeneous_vocab") in (True, "true")
    is_changed = target.command.get("--hf-overrides") is not None
    if shape.vocabulary and shape.vocabulary != draft.vocabulary and not is_allowed and not is_changed:
        yield Match(
            f"The draft model has a vocabulary of {draft.vocabulary:,} tokens, and the model one of"
            f" {shape.vocabulary:,}"
        )


RULES = (
    adapters_without_lora,
    adapter_rank_above_the_maximum,
    conflict_rule(_CONFLICT),
    draft_of_another_vocabulary,
)
