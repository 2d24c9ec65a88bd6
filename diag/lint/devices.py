"""Rules about options that the GPU, the model's attention or the release lacks, by devices.toml and names.toml."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from diag.core.declarations import did_you_mean, read
from diag.core.formatting import gibibytes, plural
from diag.lint.host import memory_ledger
from diag.lint.rule import HostGpu, HostGpus, LintTarget, Match, is_open, rule
from diag.lint.terms import all_hold, value_of
from diag.lint.weights import METHODS, checkpoint
from diag.vllm.devices import lacking, options
from diag.vllm.gpus import gpus
from diag.vllm.memory.ledger import WEIGHTS


class _NameList(NamedTuple):
    """Names that a flag takes, or with `never` (names of no release at all) the keys of its JSON."""

    flag: str
    known: tuple[str, ...]
    former: tuple[str, ...]
    plugin: str = ""
    never: tuple[str, ...] = ()


_NAMES = read(Path(__file__).with_name("names.toml"), tuple[_NameList, ...], "names")
_KEYS = read(Path(__file__).with_name("keys.toml"), tuple[_NameList, ...], "keys")
_KEYS_OF = ("0.32.0", "0.33.0")
"""The releases whose keys keys.toml has as known."""
_OTHER_CHIPS = re.compile(r"cpu|tpu|xla|gaudi|hpu|neuron|ascend|spyre|openvino", re.IGNORECASE)
_MOST_RANKS = 64
_STRICT = "0.16.0"
"""The first release that is known to refuse keys that it does not have (`config` in vllm/config/utils.py)."""
_LISTED = "0.33.0"
"""The release whose names names.toml has."""


@rule(topic="host")
def option_of_another_gpu(target: LintTarget) -> Iterator[Match]:
    for gpu in target.used_gpus()[:1]:
        for option, lacks in lacking(target.command, checkpoint(target), gpu.name, target.version):
            yield Match(lacks, fix=option.instead)


@rule(topic="weights")
def backend_of_another_attention(target: LintTarget) -> Iterator[Match]:
    for option, value, by in options(target.command, checkpoint(target), target.version):
        shape = target.shape
        if option.latent is not None and shape and shape.family and option.latent is not bool(shape.latent):
            yield Match(f"{by} {value}, and the model has {'' if shape.latent else 'no '}multi-head latent attention")


@rule(topic="values")
def no_such_name(target: LintTarget) -> Iterator[Match]:
    is_listed = target.since(_LISTED)
    for names in () if target.build else _NAMES:  # a build of its own has names of its own
        value = value_of(names.flag, target)
        allowed = names.known if is_listed else (*names.known, *names.former)
        by_plugin = names.plugin and not all_hold([f"{names.plugin} absent"], target)
        if not value or is_open(value) or {value, value.upper()} & {*allowed} or by_plugin:  # backends in any case
            continue
        which = f"{target.version} has none of this name" if is_listed else "no release that was read has this name"
        yield Match(
            f"{names.flag} {value[:40]}: {which}{did_you_mean(value, allowed)}",
            severity=None if is_listed else "warning",
        )


@rule(topic="values")
def no_such_key(target: LintTarget) -> Iterator[Match]:
    for keys in () if target.build else _KEYS:
        for key in target.keys(keys.flag):
            is_listed = target.version in _KEYS_OF or key in keys.never
            near = did_you_mean(key, keys.known)
            if "." not in key and key not in (*keys.known, *keys.former) and (near or is_listed) and not is_open(key):
                which = f"{target.version} has no such key" if is_listed else "no release that was read has this key"
                is_refused = is_listed and target.since(_STRICT)
                is_shown = near or key in keys.never  # another one may be a secret
                name = f"{keys.flag}.{key[:40]}" if is_shown else f"a key of {keys.flag}"
                why = (
                    ""
                    if is_refused
                    else f"Releases before {_STRICT} ignore a key that they do not have, later ones refuse it"
                )
                yield Match(f"{name}: {which}{near}", why, severity=None if is_refused else "warning")


@rule(topic="memory")
def model_does_not_fit(target: LintTarget) -> Iterator[Match]:
    ranks, largest = target.local_ranks(), max(gpus().values(), key=lambda kind: kind.memory)
    is_named = bool(target.used_gpus())
    command, box = target.command, target.command.container
    is_shown = target.lacks() and (box is None or box.is_whole or box.gpus is not None)  # and no values of a chart
    if (
        not is_named
        and is_shown
        and not _OTHER_CHIPS.search(f"{command.image} {target.build} {[*command.environment]}")
    ):
        any_gpu = HostGpu("0", largest.name, largest.memory, largest.memory)
        target = replace(target, gpus=HostGpus((any_gpu,) * min(ranks, _MOST_RANKS), {}))
    judged = memory_ledger(target) if target.used_gpus() else None
    if judged and not is_named and not judged.setup.removed:  # only weights tell, not a share
        weights = next(row.size for row in judged.rows if row.name == WEIGHTS)
        judged = judged if weights and weights.low > largest.memory else None
    if judged and any(f" has no {name}: " in judged.setup.removed for name in METHODS):
        return
    if judged and judged.setup.removed:
        is_sure = judged.verdict == "does not fit" and not target.is_assumed
        why, fix = "vLLM refuses an architecture that it has no code for", "Use a release that has it, or another model"
        yield Match(judged.setup.removed, why, fix, severity=None if is_sure else "warning")
    elif judged and judged.verdict == "does not fit" and not judged.setup.refused:
        gpu = target.used_gpus()[0].name if is_named else f"of any kind, {gibibytes(largest.memory)} at most"
        count = f"{ranks} x " if is_named and ranks > 1 else "" if is_named else f"{plural(ranks, 'GPU')} "
        is_guide = not is_named and "```" in target.text  # which may leave the parallelism to its reader
        message = f"The model does not fit {count}{gpu}: {'; '.join(judged.reasons)}"
        yield Match(message, severity="warning" if is_guide else None)
