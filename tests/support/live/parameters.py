"""Run by vLLM's own Python: how many numbers transformers gives a model, for each config.json on standard input.

The models are made on torch's meta device: nothing is allocated. The answer has the numbers of the language part and
those of the encoders; a matrix that is used twice counts once. Heads that vLLM does not load are left out.
"""

import json
import sys

import torch
import transformers

ENCODERS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector.", "model.encoder.")
UNLOADED = ("vision_tower.head.", ".head.probe", "pooler.")
LEFT_OUT = ("quantization_config", "architectures", "torch_dtype")
AUTO = ("AutoModelForImageTextToText", "AutoModelForSpeechSeq2Seq", "AutoModelForCausalLM")


def parameters(fields: dict) -> list[int]:
    """Count the parameters of the language part and of the encoders."""
    kept = {name: value for name, value in fields.items() if name not in LEFT_OUT}
    text = kept.get("text_config", {})
    if "vision_config" in kept and fields["architectures"][0].startswith(("Gemma4", "Llama4")):
        kept = {**kept, **text}  # the encoders need packages that are not there
        kept.pop("text_config"), kept.pop("vision_config")
    for part in ("text_config", "vision_config"):
        if part in kept:
            kept[part] = {name: value for name, value in kept[part].items() if name not in LEFT_OUT}
    config = transformers.AutoConfig.for_model(kept.pop("model_type"), **kept)
    with torch.device("meta"):
        name = fields["architectures"][0]
        kinds = AUTO if name.endswith("ConditionalGeneration") else AUTO[::-1]
        kinds = ("AutoModel",) if name.endswith("Model") else kinds
        model = next(filter(None, (made(getattr(transformers, name), config) for name in kinds)))
    named = {id(each): (name, each.numel()) for name, each in model.named_parameters()}.values()
    counted = [(name, size) for name, size in named if not any(part in name for part in UNLOADED)]
    encoders = [size for name, size in counted if any(part in name for part in ENCODERS)]
    return [sum(size for _, size in counted) - sum(encoders), sum(encoders)]


def made(auto: type, config: object) -> object:
    """Return the model, None if this kind of class has none for it."""
    try:
        return auto.from_config(config)
    except ValueError:
        return None


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print(json.dumps([parameters(fields) for fields in json.load(sys.stdin)]))
