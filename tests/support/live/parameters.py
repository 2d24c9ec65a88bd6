"""Run by vLLM's own Python: how many numbers transformers gives a model, for each config.json on standard input.

The models are made on torch's meta device: nothing is allocated.
"""

import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def parameters(fields: dict) -> int:
    """Count the parameters of the language part; a matrix that is used twice counts once."""
    text = fields.pop("text_config", {})
    left_out = ("quantization_config", "vision_config", "architectures", "torch_dtype")
    merged = {name: value for name, value in (fields | text).items() if name not in left_out}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(merged.pop("model_type"), **merged))
    return sum({id(each): each.numel() for each in model.parameters()}.values())


if __name__ == "__main__":
    print(json.dumps([parameters(fields) for fields in json.load(sys.stdin)]))
