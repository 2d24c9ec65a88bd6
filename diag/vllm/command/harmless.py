"""Names known to be harmless: what stands behind them may be shown. All that harmless.json does not name is hidden."""

import json
from pathlib import Path

_CONTENT = json.loads((Path(__file__).parent / "harmless.json").read_text(encoding="utf-8"))

FLAGS = frozenset[str](_CONTENT["flags"])
"""The flags of vLLM that take a name, a folder, a host or a URL; of others only numbers, switches and choices are
shown.

Not among them, since they hold secrets or anything at all: --api-key, --hf-token, --ssl-*, --additional-config,
--model-loader-extra-config and their like.
"""
VARIABLES = frozenset[str](_CONTENT["variables"])
"""By whole name: vLLM's envs.py of the releases known, and the documentation of NCCL, RCCL, CUDA, PyTorch, OpenMP, UCX,
Triton and Hugging Face. Not among them: keys, tokens, URLs, and texts that people make up.
"""
KEYS = frozenset[str](_CONTENT["keys"])
"""Of the JSON objects that flags take: the fields of vllm/config, and those of rope scaling, generation and media."""
NAMED_KEYS = frozenset[str](_CONTENT["named_keys"])
"""Keys whose value is a name or a folder; of the others only numbers and switches are shown."""
