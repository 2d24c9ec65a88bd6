"""The platform of a server by its log, ROCm's words for NVIDIA's (rocm.toml), and ways around a kernel (kernels.toml).

A kernel that raised an error is found by the frames of its traceback; the option that takes another one depends on the
platform and the release.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.incident import Incident, LookAlike
from diag.core.log_events import LogContext
from diag.vllm.flags.registry import release


class Words(NamedTuple):
    """Words by which platforms, attention backends and options in use are told (platform_words.toml)."""

    platforms: Mapping[str, re.Pattern[str]]
    used: Mapping[str, re.Pattern[str]]
    refused: Mapping[str, re.Pattern[str]]
    in_use: Mapping[str, re.Pattern[str]]
    lacks: Mapping[str, re.Pattern[str]]
    shows: Mapping[str, re.Pattern[str]]
    tools: Mapping[str, Mapping[str, str]]
    hints: Mapping[str, re.Pattern[str]]


@cache
def words() -> Words:
    return read(PACKAGE / "knowledge" / "platform_words.toml", Words)


def _named(table: Mapping[str, re.Pattern[str]], text: str) -> Iterator[str]:
    return (name for name, pattern in table.items() if pattern.search(text))


def platform_of(text: str, context: LogContext) -> str:
    """Return the platform of a server, "cuda" if nothing in its log is of another one, "" without a log."""
    if context.platform:
        return context.platform
    named = {*_named(words().platforms, text), *_platforms_near(context.nearby)}
    return next((name for name in words().platforms if name in named), "cuda" if context.nearby else "")


@lru_cache(maxsize=8)
def _platforms_near(lines: str) -> tuple[str, ...]:
    """Look for platforms in the lines around an error, which are asked again for each kind of failure."""
    return tuple(_named(words().platforms, lines))


def offers_what_it_lacks(clause: str, platform: str) -> bool:
    """Return True if an advice is for NVIDIA's GPUs alone, and the server runs on others."""
    return platform in words().lacks and bool(words().lacks[platform].search(clause))


# -- ROCm


class Phrases(NamedTuple):
    """ROCm's phrase for each of NVIDIA's."""

    commands: Mapping[str, str]
    words: Mapping[str, str]


@cache
def rocm_phrases() -> Phrases:
    return read(PACKAGE / "knowledge" / "rocm.toml", Phrases)


@cache
def _phrase() -> re.Pattern[str]:
    phrases = {**rocm_phrases().commands, **rocm_phrases().words}
    return re.compile("|".join(map(re.escape, sorted(phrases, key=len, reverse=True))))


def _in_words(text: str) -> str:
    """Replace NVIDIA's phrases in a text; the longest one that fits counts."""
    return _phrase().sub(lambda phrase: {**rocm_phrases().commands, **rocm_phrases().words}[phrase[0]], text)


def rocm_commands_in(text: str) -> dict[str, str]:
    """Return ROCm's command for each of NVIDIA's in a text, in their order."""
    phrases = _phrase().findall(text)
    return {phrase: rocm_phrases().commands[phrase] for phrase in phrases if phrase in rocm_phrases().commands}


def look_alike_on_rocm(look_alike: LookAlike) -> LookAlike:
    return look_alike._replace(distinguish=_in_words(look_alike.distinguish))


def incident_on_rocm(incident: Incident) -> Incident:
    """Return an incident with ROCm's words in all texts for people; what is measured stays."""
    return incident._replace(
        cause=_in_words(" ".join(incident.cause.split())),
        looks_like=tuple(map(look_alike_on_rocm, incident.looks_like)),
        fixes=tuple(
            fix._replace(
                change=_in_words(fix.change),
                effect=_in_words(fix.effect),
                command=_in_words(fix.command),
                risk=_in_words(fix.risk),
                rollback=_in_words(fix.rollback),
            )
            for fix in incident.fixes
        ),
        mitigate=tuple(map(_in_words, incident.mitigate)),
        hand_over=tuple(map(_in_words, incident.hand_over)),
        do_not=tuple(map(_in_words, incident.do_not)),
    )


# -- kernels


class Way(NamedTuple):
    """An option that avoids a kernel, on these platforms (any if none is named) and since a release."""

    option: str
    since: str = ""
    platforms: tuple[str, ...] = ()


class Kernel(NamedTuple):
    """A kernel or library by the frames of its code, with the ways around it."""

    name: str
    frames: re.Pattern[str]
    avoid: tuple[Way, ...] = ()


@cache
def kernels() -> tuple[Kernel, ...]:
    return read(PACKAGE / "knowledge" / "kernels.toml", tuple[Kernel, ...], "kernel")


def kernel_of(frames: str, text: str) -> Kernel | None:
    """Return the kernel that the innermost frames of a traceback or its exception show; None while weights load."""
    if words().shows["loads"].search(frames):
        return None
    return next((kernel for kernel in kernels() if kernel.frames.search(f"{frames}\n{text}")), None)


def way_around(kernel: Kernel, near: str, frames: str, platform: str, version: str) -> str:
    """Return the option that takes another kernel, "" if none fits; `near` are the lines around the error."""
    at = release(version)
    for way in kernel.avoid:
        if (way.platforms and platform and platform not in way.platforms) or (at and at < release(way.since)):
            continue
        if way.option == "attention":
            return _attention(f"{frames}\n{near}", frames, platform, at)
        if way.option == "experts":
            return _experts(near, frames, platform, at)
        return way.option if at or not way.since else f"{way.option} (since {way.since})"
    return ""


def _attention(near: str, frames: str, platform: str, at: tuple[int, ...]) -> str:
    """Return the choice of another attention backend; of those that vLLM's own line lists, if the log has that line."""
    shows = words().shows
    if platform not in ("cuda", "rocm", "xpu", "") or shows["sparse"].search(near):
        return ""
    line = shows["used"].search(near)
    used = line["name"].upper().replace(" ", "_").replace("FLASHATTENTION", "FLASH_ATTENTION") if line else ""
    used = next(_named(words().used, frames), used).removesuffix("ENTION")
    is_mla, is_rocm = bool(shows["mla"].search(near)), platform == "rocm"
    wanted = ["TRITON_ATTN", "ROCM_ATTN"] if is_rocm else ["TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"]
    if is_mla:
        wanted = ["TRITON_MLA"] if is_rocm else ["TRITON_MLA", "FLASHMLA", "CUTLASS_MLA"]
    listed = ",".join(line["names"] for line in shows["offered"].finditer(near))
    offered = [name.strip(" '\"").rpartition(".")[2] for name in listed.split(",")]
    wanted = [name for name in wanted if name in offered] or wanted[: 1 if is_mla else None]  # FlashMLA: few GPUs
    tried = [name.removesuffix("_MLA") for name in (used, *shows["asked_for"].findall(near)) if name]
    refused = [*_named(words().refused, near), *tried]
    name = next((name for name in wanted if not name.startswith(tuple(refused))), "")
    name = name if not at or at >= (0, 8) or not name.startswith("TRITON") else "XFORMERS"
    if not name or not at:
        return f"--attention-backend {name} (before 0.13 VLLM_ATTENTION_BACKEND)" if name else ""
    old = "_VLLM_V1" if at < (0, 11) and name == "TRITON_ATTN" else ""
    return f"--attention-backend {name}" if at >= (0, 13) else f"VLLM_ATTENTION_BACKEND={name}{old}"


def _experts(near: str, frames: str, platform: str, at: tuple[int, ...]) -> str:
    """Return the choice of another kernel for the layer of experts."""
    if platform not in ("cuda", "rocm", ""):
        return ""
    if at and at < (0, 17):
        kind = (
            "FP4" if re.search(r"(?i)fp4", near + frames) else "FP8" if re.search(r"(?i)fp8", near + frames) else "FP16"
        )
        return f"VLLM_USE_FLASHINFER_MOE_{kind}=0" if "flashinfer" in frames else ""
    is_triton = bool(re.search(r"triton_kernels|fused_moe/(?:fused_moe|gpt_oss_triton\w{0,20})\.py", frames))
    if platform == "rocm" and is_triton:
        return ""
    few = words().shows["few_bits"].search(near) and platform != "rocm"
    name = "marlin" if few else "flashinfer_cutlass" if is_triton else "triton"
    return f"--moe-backend {name}{'' if at else ' (since 0.17)'}"
