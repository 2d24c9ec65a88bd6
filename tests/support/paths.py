"""Paths of the checkout and of the tests' data."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
GOLDENS = TESTS / "goldens"
DATA = TESTS / "data"
LOGS = DATA / "logs"
MODELS = DATA / "models"
RECORDINGS = TESTS / "recordings"
ALL_RECORDINGS = sorted(file.parent for file in RECORDINGS.glob("*/recording.toml"))
"""The folder of every recording."""
