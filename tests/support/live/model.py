"""The files of a random Llama with a byte tokenizer, without weights: the server invents them (`--load-format dummy`).

They are written as `PreTrainedTokenizerFast.save_pretrained` does it, which takes ten seconds to load.
"""

import json
from pathlib import Path

SPECIAL = ("<s>", "</s>", "<unk>", "<pad>")
HEAD = 64
SIZES = {"tiny": (128, 2), "small": (512, 4), "large": (4096, 32)}
"""Hidden size and layers: tiny decodes fast enough to fill a KV cache, small prefills slowly enough to stall its
neighbours, large is the load of a model of 8 billion parameters, for a GPU."""
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHAPES: dict[str, dict[str, object]] = {
    "large": {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "latent": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        **_EXPERTS,
    },
    "gated": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 8,
        "shared_expert_intermediate_size": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        **_EXPERTS,
    },
    "mamba": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_chunk_size": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "position_embedding_type": "rope",
    },
}
"""Models of other architectures: latent attention and gated delta net, both with experts, and Mamba 2."""


def write(folder: Path, size: str) -> None:
    """Write a model of that size."""
    words = {word: at for at, word in enumerate([*SPECIAL, *_bytes()])}
    hidden, layers = SIZES.get(size, (256, 4))
    files = {
        "config.json": _config(hidden, layers, len(words)) | SHAPES.get(size, {}),
        "tokenizer.json": _tokenizer(words),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict(zip(("bos_token", "eos_token", "unk_token", "pad_token"), SPECIAL, strict=True)),
        },
    }
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def _bytes() -> list[str]:
    """The characters that stand for bytes in a byte-level vocabulary: printable ones for themselves."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(each) for each in sorted([*own, *range(0x100, 0x200 - len(own))])]


def _tokenizer(words: dict[str, int]) -> dict[str, object]:
    """One token for a byte."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    by_bytes = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": words[each], "content": each, **plain} for each in SPECIAL],
        "pre_tokenizer": {**by_bytes, "add_prefix_space": False},
        "decoder": {**by_bytes, "add_prefix_space": True},
        "model": {"type": "BPE", "vocab": words, "merges": []},
    }


def _config(hidden: int, layers: int, words: int) -> dict[str, object]:
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
