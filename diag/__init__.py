"""diag: what is wrong with a vLLM server, why, what it is not, and which flag to change."""

__all__ = ["__version__"]

try:
    from diag._version import __version__
except ImportError:  # a checkout that nobody has built or installed
    __version__ = "0+unknown"
