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
SEVERAL_SERVERS = {"tp_rank_missing_on_node_b"}
"""Recordings of more than one exporter; tests that give a recording the name of a server take the others."""
OF_ONE_SERVER = [folder for folder in ALL_RECORDINGS if folder.name not in SEVERAL_SERVERS]
