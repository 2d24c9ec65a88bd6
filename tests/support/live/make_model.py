"""Run by vLLM's own Python: `make_model.py FOLDER HIDDEN LAYERS` writes a random Llama's config and a byte tokenizer.

No weights: the server invents them (`--load-format dummy`). A hidden size of 128 decodes fast enough to fill a KV pool,
one of 512 prefills slowly enough to freeze its neighbours.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<unk>", "<pad>"]
HEAD = 64


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    begin, end, unknown, pad = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token=begin, eos_token=end, unk_token=unknown, pad_token=pad
    )


def config(hidden: int, layers: int, words: int) -> dict[str, object]:
    """A Llama of that size."""
    heads = max(2, hidden // HEAD)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD,
        "vocab_size": -(-words // HEAD) * HEAD,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 3,
    }


if __name__ == "__main__":
    folder, size, depth = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    words = tokenizer()
    words.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config(size, depth, len(words))), encoding="utf-8")
