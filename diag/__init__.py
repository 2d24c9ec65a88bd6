"""diag: what is wrong with a vLLM server, why, what it is not, and which flag to change.

From Python: `diag.diagnose(target)`, and the others in `__all__`; docs/python.md shows them. Each is imported
when it is first used: `import diag` alone costs nothing.
"""

TYPE_CHECKING = False  # that of typing, whose import takes longer than this module
if TYPE_CHECKING:
    from diag.library import ServerReport, diagnose, lint_launch, memory_budget, signal_table

__version__ = "0.1.0"
__all__ = ["ServerReport", "diagnose", "lint_launch", "memory_budget", "signal_table"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'diag' has no attribute '{name}'")
    from diag import library

    return getattr(library, name)
