"""The part of the table about a command that never becomes a server: what its parser, Python, a shell or a container
runtime print, all without a head of vLLM's.
"""

from diag.exporter.log.pattern import BAR, Pattern

_EXECUTABLE = r"(?:\S{0,300}/)?vllm|exec: (?:\S{0,300}/)?(?:vllm|python[\d.]{0,8})"
_WHERE = r"\S{1,300}: (?:line \d{1,9}: |\d{1,9}: )?"
"""The script and its line, as bash and dash name them."""
_NOT_RUN = r"(?:command )?not found|cannot execute|No such file or directory|Permission denied"

LAUNCH_PATTERNS = (
    Pattern("fatal", "engine_start_failed", r"(?:vllm(?: serve)?|api_server\.py|__main__\.py): error: ", BAR),
    Pattern("fatal", "engine_start_failed", rf"{_WHERE}(?:{_EXECUTABLE}): (?:{_NOT_RUN})", BAR),
    Pattern(
        "fatal", "engine_start_failed", r"exec \S{1,300}: (?:no such file|exec format error|permission denied)", BAR
    ),
    Pattern(
        "fatal",
        "engine_start_failed",
        r"\S{0,300}python[\d.]{0,8}: (?:No module named vllm|Error while finding module specification for 'vllm)",
        BAR,
    ),
)
