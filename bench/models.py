"""Refresh the shapes that diag knows by name: python bench/models.py [ORG/NAME ...], all rows without a name.

Reads config.json (and hf_quant_config.json) of each repository at Hugging Face, keeps the fields that describe a shape,
and writes them to diag/vllm/memory/models.json with the revision as their source. A row whose file cannot be read,
or whose shape diag cannot read, stays as it is.
"""

import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]
from diag.core.errors import BadUsage  # noqa: E402
from diag.vllm.memory.model import parse  # noqa: E402

ROWS = Path(__file__).parent.parent / "diag" / "vllm" / "memory" / "models.json"
HUB = "https://huggingface.co"
NOISE = re.compile(
    r"_.*|.*(_token_ids?|_token_index|dropout|pdrop|_eps|_epsilon|_theta|softcapping|activation)|hidden_act|initializer_\w+"
    r"|transformers\w*|use_cache|(torch_)?dtype|id2label|label2id|auto_map|return_dict\w*|output_\w+|problem_type"
    r"|chunk_size\w*|is_(en)?decoder\w*|router_\w+|routed_scaling_factor|aux_loss\w*|seq_aux|norm_topk_prob|scoring_func"
    r"|topk_method|topk_group|n_group|time_step\w*|bos|eos|pad|architectures_\w+"
)
"""Fields that do not describe a shape."""
NUMBERED = re.compile(r"layers\.\d+(?=\.|$)")


def trimmed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that describe a shape; the layers in lists of modules are written as one."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or NOISE.fullmatch(name):
            continue
        if isinstance(value, dict):
            value = trimmed(value)  # noqa: PLW2901
        elif isinstance(value, list) and len(value) > 20 and isinstance(value[0], str) and "layers." in str(value):
            value = list(dict.fromkeys(NUMBERED.sub("layers.*", str(module)) for module in value))  # noqa: PLW2901
        found[name] = value
    return found


def fetched(address: str) -> Any:
    with urllib.request.urlopen(f"{HUB}/{address}", timeout=30) as answer:
        return json.load(answer)


def row(repository: str) -> dict[str, Any]:
    """Return the row of a repository at its newest revision."""
    about = fetched(f"api/models/{repository}")
    fields = fetched(f"{repository}/raw/{about['sha']}/config.json")
    if any(file["rfilename"] == "hf_quant_config.json" for file in about.get("siblings", ())):
        settings = fetched(f"{repository}/raw/{about['sha']}/hf_quant_config.json").get("quantization", {})
        fields.setdefault("quantization_config", {"quant_method": "modelopt", **settings})
    found = trimmed(fields)
    parse(found, repository, Path(repository), repository, "")
    return {"source": f"{HUB}/{repository}@{about['sha'][:8]} ({about['lastModified'][:10]})", "config": found}


if __name__ == "__main__":
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    for name in sys.argv[1:] or list(rows):
        try:
            rows[name] = row(name)
        except (OSError, ValueError, KeyError, BadUsage) as error:
            print(f"{name}: stays as it is: {error}", file=sys.stderr)
    lines = (f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows, key=str.lower))
    ROWS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
