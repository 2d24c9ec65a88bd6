"""A model's config.json, its files, and everything that they may be instead."""

import json
import os
import struct
from pathlib import Path

import pytest
from support.models import MODELS, changed, tensors

from diag.core.errors import BadUsage
from diag.vllm.command.command import Command
from diag.vllm.memory import weights
from diag.vllm.memory.model import find, read
from diag.vllm.memory.quantization import precision, with_experts
from diag.vllm.memory.usage import on_disk

PARAMETERS = {  # language part and encoders; tests/live compares them with those of transformers
    "bge-m3": (566_752_256, 0),
    "deepseek-v3": (671_026_404_352, 0),
    "deepseek-v4-flash": (284_332_164_690, 0),
    "deepseek-v3.2": (671_877_929_216, 0),
    "embeddinggemma-300m": (302_863_104, 0),
    "falcon-h1": (8_514_961_408, 0),
    "gemma-3-27b": (27_009_346_304, 423_055_728),
    "gemma-3n-e4b": (6_835_239_408, 0),
    "gemma-4-26b-a4b": (25_232_800_000, 549_466_992),
    "glm-4.7": (352_797_814_784, 0),
    "glm-4.7-flash": (29_943_390_976, 0),
    "glm-5": (743_911_199_232, 0),
    "gpt-oss-120b": (116_829_156_672, 0),
    "granite-4-hybrid": (38_492_380_544, 0),
    "jamba-v0.1": (51_570_323_328, 0),
    "kimi-k2.5": (1_026_408_209_408, 471_781_744),
    "kimi-linear-48b": (49_122_675_072, 0),
    "lfm2": (2_921_931_840, 0),
    "llama-2-70b": (68_976_648_192, 0),
    "llama-2-7b": (6_738_415_616, 0),
    "llama-3-70b": (70_553_706_496, 0),
    "llama-3-8b": (8_030_261_248, 0),
    "llama-3.1-405b": (405_853_388_800, 0),
    "llama-3.1-8b": (8_030_261_248, 0),
    "llama-4-scout": (107_769_861_120, 842_891_008),
    "mimo-v2-flash": (308_778_766_336, 0),
    "minimax-m2.5": (228_689_748_992, 0),
    "minimax-m3": (426_174_565_632, 0),
    "minimax-text-01": (47_373_946_880, 0),
    "mistral-small-3.2": (23_572_403_200, 439_226_368),
    "mixtral-8x7b": (46_702_792_704, 0),
    "nemotron-3-nano-30b-a3b": (31_577_937_344, 0),
    "nemotron-3-super-120b": (120_668_687_360, 0),
    "pixtral-12b": (12_247_782_400, 435_216_384),
    "qwen2.5-14b": (14_770_033_664, 0),
    "qwen2.5-7b": (7_615_616_512, 0),
    "qwen2.5-vl-7b": (7_615_616_512, 676_512_640),
    "qwen3-235b-a22b": (235_093_634_560, 0),
    "qwen3-30b-a3b": (30_532_122_624, 0),
    "qwen3-next-80b": (79_674_391_296, 0),
    "qwen3-vl-30b-a3b": (30_532_122_624, 538_573_680),
    "qwen3-vl-8b": (8_190_735_360, 576_322_416),
    "qwen3.5-27b": (26_895_998_464, 460_716_912),
    "qwen3.5-35b-a3b": (34_660_610_688, 446_561_136),
    "whisper-large-v3": (906_652_160, 637_004_800),
    "zamba2-2.7b": (2_481_848_336, 0),
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_shape_has_as_many_parameters_as_the_model(name: str) -> None:
    model = read(MODELS / name)
    assert (model.unknown, model.doubt) == ("", "")
    assert (weights.parameters(model), weights.encoders(model).elements) == PARAMETERS[name]


def test_every_model_of_the_data_is_counted() -> None:
    assert {each.name for each in MODELS.iterdir()} == set(PARAMETERS)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": "4096"}, "'hidden_size' is '4096', expected a whole number"),
        ({"hidden_size": 0}, "'hidden_size' is 0"),
        ({"num_hidden_layers": -1}, "'num_hidden_layers' is -1"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"vocab_size": ...}, "has no 'vocab_size'"),
        ({"num_attention_heads": 1.5}, "'num_attention_heads' is 1.5"),
        ({"num_key_value_heads": 64}, "'num_key_value_heads' is 64"),
        ({"num_key_value_heads": 5}, "32 attention heads are not a multiple of its 5 key-value heads"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no', expected true or false"),
        ({"rope_scaling": 8}, "'rope_scaling' is 8, expected an object"),
        ({"text_config": []}, "'text_config' is [], expected an object"),
        ({"layer_types": "full"}, "'layer_types' is 'full', expected a list"),
        ({"hidden_size": "\x1b[31mred"}, r"'\x1b[31mred'"),
    ],
)
def test_invalid_config_field_is_named(tmp_path: Path, fields: dict[str, object], says: str) -> None:
    with pytest.raises(BadUsage) as refused:
        changed(tmp_path, **fields)
    assert says in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<!DOCTYPE html><title>Sign in</title>", "is an HTML page: download it again"),
        (b'{"hidden_size": 40', "is cut off or not JSON"),
        (b"\xff\xfe{}", "is cut off or not JSON"),
        (b"[" * 100_000, "is cut off or not JSON"),
        (b"[1, 2]", "holds [1, 2] instead of an object"),
        (b"", "is cut off or not JSON"),
        (b"version https://git-lfs.github.com/spec/v1", "is cut off or not JSON"),
        (b" " * (5 * 2**20), "is larger than 4 MiB"),
        (b"{}", "has no 'hidden_size'"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_a_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadUsage, match=r"config\.json") as refused:
        read(tmp_path)
    assert says in str(refused.value)


def test_a_config_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BadUsage, match="not a regular file"):
        read(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="does not exist: give a model's folder"):
        read(tmp_path)


def test_an_unknown_architecture_can_be_read_but_not_estimated(tmp_path: Path) -> None:
    model = changed(tmp_path, architectures=["NewForCausalLM\x1b[2J"])
    assert model.family is None
    assert model.doubt == r"the architecture 'NewForCausalLM\x1b[2J' is unknown: it is read like Llama"


def test_a_kind_of_layer_that_keeps_no_tokens_is_not_covered(tmp_path: Path) -> None:
    model = changed(tmp_path, layer_types=["new_attention", "full_attention"] * 16)
    assert model.unknown == "layers of the kind 'new_attention' are not covered"


@pytest.mark.parametrize("kinds", [[["x"]] * 32, [{"x": 1}] * 32, [[1], 2]])
def test_invalid_layer_types_are_not_covered(tmp_path: Path, kinds: list[object]) -> None:
    assert changed(tmp_path, layer_types=kinds).unknown.endswith("are not covered")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stream_ratios": [0, 4], "hc_mult": 4}, "and so are its fields 'hc_mult', 'stream_ratios'"),
        ({"pad_token_id": 7, "rope_theta": 10_000, "use_fast": True}, ""),
    ],
)
def test_fields_of_an_unknown_architecture_that_are_unknown_too_are_named(
    tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    model = changed(tmp_path, architectures=["NewForCausalLM"], **fields)
    assert said in model.unknown
    assert bool(model.doubt) == bool(model.stack) == (not said)


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_layers": "a,b", "num_experts": 8},
        {"attn_layer_indices": [[1]]},
        {"per_layer_config": {"0": 7}},
        {"block_configs": [{"ffn": {"ffn_mult": float("nan")}}]},
        {"hybrid_override_pattern": "M?"},
        {"linear_attn_config": {"full_attn_layers": [4], "num_heads": "x"}},
        {"num_attention_heads_per_layer": ["x"]},
        {"vision_config": {"hidden_size": "x", "depth": [], "mlp_ratio": "wide"}},
    ],
)
def test_odd_fields_of_layers_are_a_sentence(tmp_path: Path, fields: dict[str, object]) -> None:
    try:
        model = changed(tmp_path, **fields)
    except BadUsage as error:
        assert str(error).isprintable()
    else:
        assert weights.encoders(model).elements >= 0


@pytest.mark.parametrize(
    ("encoder", "numbers"),
    [
        ({"args": {"model": "vit_huge_patch16_224"}, "patch_size": 16}, 650_000_000),
        ({"model_type": "gemma4_audio", "hidden_size": 1024, "num_hidden_layers": 12}, 307_000_000),
        ({"model_type": "gemma3n_audio", "hidden_size": 1536, "conf_num_hidden_layers": 12}, 688_000_000),
        ({"model_type": "new", "blocks": 12}, 0),
    ],
)
def test_an_encoder_is_counted_or_said_to_be_unnamed(tmp_path: Path, encoder: dict[str, object], numbers: int) -> None:
    """The counts are those of transformers' classes, with the matrix that leads to the text."""
    model = changed(tmp_path, vision_config=encoder)
    assert weights.encoders(model).elements == pytest.approx(numbers, rel=0.02)
    assert weights.unnamed_encoders(model) == ([] if numbers else ["vision_config"])


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("LlamaForCausalLM", True),
        ("InternVLChatModel", True),
        ("GPT2LMHeadModel", True),
        ("ChatGLMModel", True),
        ("LlamaModel", False),
        ("Qwen3ForSequenceClassification", False),
        ("BertForMaskedLM", False),
    ],
)
def test_only_generating_models_have_a_head(tmp_path: Path, name: str, head: bool) -> None:
    assert weights.has_head(changed(tmp_path, architectures=[name])) == head


def test_a_ratio_of_compression_that_vllm_has_not_is_not_covered(tmp_path: Path) -> None:
    model = changed(tmp_path, "deepseek-v4-flash", compress_ratios=[0, 7] * 22)
    assert model.unknown == "layers that compress 7 tokens to one are not covered"


def test_experts_have_the_type_that_config_names_for_them() -> None:
    """DeepSeek V4: 8-bit matrices with experts in MXFP4, or in NVFP4 with lists that concern the experts alone."""
    settings = read(MODELS / "deepseek-v4-flash").quantization or {}
    found = precision(settings)
    assert found
    assert (found.linear, found.expert, found.plain) == (8.0, 4.25, 16.0)
    nvfp4 = {"quant_method": "fp8", "moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "ignore": ["*.attn.*"]}
    kept = with_experts(nvfp4, "fp4") or {}
    found = precision(kept)
    assert found
    assert (found.linear, found.expert, "ignore" in kept) == (8.0, 4.5, False)


def test_matrices_with_bits_of_their_own_are_weighed_by_them(tmp_path: Path) -> None:
    """ModelOpt's mixed precision: 8 bits for attention, NVFP4 for the rest, and one layer left alone."""
    layers = {f"model.layers.{at}.self_attn.o_proj": {"quant_algo": "FP8"} for at in range(32)}
    layers |= {f"model.layers.{at}.mlp.up_proj": {"quant_algo": "W4A16_NVFP4"} for at in range(1, 32)}
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    model = changed(tmp_path, quantization_config=settings)
    bits = precision(model.quantization or {})
    assert bits
    for at, up in ((0, 16.0), (1, 4.5)):
        sizes = {(part.elements, bits.of(part)) for part in weights.layer(model, at)}
        assert (4096 * 4096, 8.0) in sizes
        assert any(size == up and elements % (4096 * 14_336) == 0 for elements, size in sizes)


def test_modelopt_writes_its_quantization_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["a"]}}'
    )
    bits = precision(changed(tmp_path).quantization or {})
    assert bits
    assert bits.linear == 4.5


def test_fields_missing_in_gemma_configs_have_transformers_defaults(tmp_path: Path) -> None:
    """The files are those of google/gemma-3-4b-it."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vocab_size": None})
    )
    model = read(tmp_path)
    assert (model.heads, model.kv_heads, model.head_dim) == (8, 4, 256)
    assert (model.vocabulary, model.longest) == (262_208, 131_072)


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}, 1024),
        ({"architectures": ["WhisperForConditionalGeneration"], "d_model": 1280, "vocab_size": 51866}, 2**30),
        ({"model_type": "newvl", "text_config": {"vocab_size": 32064, "num_key_value_heads": 8}}, 2**30),
    ],
)
def test_unknown_model_may_use_other_field_names(tmp_path: Path, fields: dict[str, object], longest: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = read(tmp_path, version="0.32.0")
    assert (model.stack, model.layers, model.longest) == ((), 0, longest)
    assert model.unknown.endswith("num_hidden_layers")
    with pytest.raises(BadUsage, match=r"config\.json has no '"):
        read(tmp_path)


def test_the_numbers_of_a_multimodal_model_are_those_of_its_language_part() -> None:
    model = read(MODELS / "gemma-3-27b")
    assert (model.layers, model.tied, bool(model.encoders)) == (62, True, True)
    assert model.windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"type": "linear", "factor": 4.0}, 32768),
        ({"type": "dynamic", "factor": 2}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"type": "linear", "factor": "8"}, 8192),
        ({"type": "linear", "factor": float("nan")}, 8192),
    ],
)
def test_the_longest_context_is_what_vllm_derives(tmp_path: Path, scaling: object, longest: int) -> None:
    assert changed(tmp_path, rope_scaling=scaling).longest == longest


@pytest.mark.parametrize(("version", "usual"), [("0.11.0", 8192), ("0.11.1", 4096), ("0.32.0", 4096), ("", 4096)])
def test_longrope_starts_with_the_context_before_it_and_takes_the_longer_one(
    tmp_path: Path, version: str, usual: int
) -> None:
    """Phi-3 with 128k starts like this in vLLM: long factors cost short prompts."""
    scaling = {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}
    changed(tmp_path, rope_scaling=scaling, original_max_position_embeddings=4096)
    model = read(tmp_path, version=version)
    assert (model.usual, model.longest, model.positions) == (usual, 8192, 8192)


@pytest.mark.parametrize(("version", "longest"), [("0.8.5", 131_072), ("0.29.0", 131_072), ("0.30.0", 32_768)])
def test_yarn_is_multiplied_up_to_0_29(tmp_path: Path, version: str, longest: int) -> None:
    """Qwen2.5's form; vLLM 0.32 starts with 32,768 and refuses 131,072, 0.29 did otherwise."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    changed(tmp_path, rope_scaling=scaling, max_position_embeddings=32_768)
    model = read(tmp_path, version=version)
    assert (model.usual, model.longest, model.positions) == (longest, longest, 131_072)
    changed(tmp_path, rope_scaling=scaling, max_position_embeddings=131_072)  # DeepSeek's form
    assert read(tmp_path, version=version).longest == 131_072


@pytest.mark.parametrize(("use", "window"), [(True, 1024), (False, 0), (..., 1024)])
def test_a_window_can_be_switched_off(tmp_path: Path, use: object, window: int) -> None:
    assert set(changed(tmp_path, sliding_window=1024, use_sliding_window=use).windows) == {window}


@pytest.mark.parametrize(
    ("layers", "count", "sizes"),
    [
        (61, 4, [15, 15, 16, 15]),
        (80, 3, [27, 27, 26]),
        (32, 5, [6, 6, 7, 7, 6]),
        (7, 7, [1] * 7),
        (10, 4, [2, 3, 3, 2]),
    ],
)
def test_layers_are_divided_into_stages_as_vllm_divides_them(
    tmp_path: Path, layers: int, count: int, sizes: list[int]
) -> None:
    """The expected stages come from get_pp_indices of vLLM 0.32."""
    spans = weights.stages(changed(tmp_path, num_hidden_layers=layers), count)
    assert [len(each) for each in spans] == sizes
    assert (spans[0].start, spans[-1].stop) == (0, layers)


def test_a_tied_head_is_one_matrix_on_one_stage_and_two_on_several(tmp_path: Path) -> None:
    model = changed(tmp_path, tie_word_embeddings=True)
    matrix = weights.embedding(model)
    assert weights.of_stage(model, range(32))[matrix] == 1
    assert [weights.of_stage(model, each)[matrix] for each in weights.stages(model, 2)] == [1, 1]


@pytest.mark.parametrize(("architecture", "has"), [("ChatGLMModel", True), ("MistralModel", False)])
def test_a_model_that_generates_has_a_head_whatever_its_name(tmp_path: Path, architecture: str, has: bool) -> None:
    assert weights.has_head(changed(tmp_path, architectures=[architecture])) is has


def test_vocabulary_is_padded_to_64(tmp_path: Path) -> None:
    assert weights.embedding(changed(tmp_path, vocab_size=32_001)).elements == 32_064 * 4096


def test_mla_down_projections_are_replicated_and_up_projections_kept_twice() -> None:
    """The way down of queries and of keys and values is on every GPU; the way up is kept in bfloat16 as well."""
    model = read(MODELS / "deepseek-v3")
    attention = weights.layer(model, 0)
    assert sum(each.elements for each in attention if each.ways == 1 and each.kind == "linear") == 7168 * (1536 + 576)
    assert weights.absorbed(model) == weights.WeightPart(61 * 512 * 128 * 256, weights.MOST_WAYS)
    assert weights.absorbed(read(MODELS / "llama-3-8b")).elements == 0


# -- the local cache --------------------------------------------------------------------------------------------------


def cached(hub: Path) -> Path:
    snapshot = hub / "models--meta--llama" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    reference = hub / "models--meta--llama" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("abc\n")
    return snapshot


def test_an_id_is_found_in_the_cache(tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "hub")
    assert find("meta/llama", Command((), 0, {"HF_HOME": str(tmp_path)}, "", ())) == snapshot
    assert find("meta/llama", Command((), 0, {"HF_HUB_CACHE": str(tmp_path / "hub")}, "", ())) == snapshot
    assert find("meta/llama", Command((), 0, {"HF_HOME": str(tmp_path)}, "", ()), "abc") == snapshot


@pytest.mark.parametrize("name", ["meta/other", "no\x1b[2J", "nul\0", "../../nowhere", "x" * 5000])
def test_an_id_that_is_not_in_the_cache_is_refused_without_a_network(tmp_path: Path, name: str) -> None:
    cached(tmp_path / "hub")
    with pytest.raises(BadUsage, match="neither a folder nor in the local cache") as refused:
        find(name, Command((), 0, {"HF_HOME": str(tmp_path)}, "", ()))
    assert str(refused.value).isprintable()


# -- the files --------------------------------------------------------------------------------------------------------


def test_files_are_weighed_by_their_heads(tmp_path: Path) -> None:
    model = changed(tmp_path)
    tensors(tmp_path / "model-1.safetensors", a=("BF16", 1000))
    tensors(tmp_path / "model-2.safetensors", b=("F32", 1000), layers__0__c=("I32", 10))
    tensors(tmp_path / "consolidated.safetensors", a=("BF16", 1000))
    assert on_disk(model) == 1000 + 500 + 10
    assert on_disk(model, float32=True) == 2000 + 1000 + 10


def test_files_that_vllm_does_not_load_are_not_counted(tmp_path: Path) -> None:
    model = changed(tmp_path, tie_word_embeddings=True)
    tensors(
        tmp_path / "model.safetensors",
        model__layers__31__x=("BF16", 100),
        model__layers__32__mtp=("BF16", 1000),
        mtp__layers__0__x=("BF16", 1000),
        audio_tower__layers__40__x=("BF16", 10),
        lm_head__weight=("BF16", 1000),
    )
    assert on_disk(model) == 110


def head(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**40),
        b"version https://git-lfs",
        head('{"a": {"data_offsets": [0, 1e999], "dtype": "F16"}}'),
        head('{"a": {"data_offsets": [0, 10], "dtype": "F16"}}'),  # cut off
        head('{"a": {"data_offsets": [0, 10], "dtype": "F16"}}') + b"\0" * 9,
        head('{"a": {"data_offsets": [2, 0], "dtype": "F16"}}') + b"\0" * 9,
        head('{"a": {"dtype": "F16"}}'),
        head('{"a": 1}'),
    ],
)
def test_unreadable_files_have_an_unknown_size(tmp_path: Path, content: bytes) -> None:
    model = changed(tmp_path)
    tensors(tmp_path / "a.safetensors", a=("BF16", 1000))
    (tmp_path / "b.safetensors").write_bytes(content)
    assert on_disk(model) is None


def test_layers_of_a_model_that_does_not_count_them_are_weighed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["New"]}')
    tensors(tmp_path / "model.safetensors", model__layers__3__x=("BF16", 100))
    assert on_disk(read(tmp_path, version="0.32.0")) == 100


@pytest.mark.parametrize("name", ["b.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    model = changed(tmp_path)
    tensors(tmp_path / "a.safetensors", a=("BF16", 1000))
    os.mkfifo(tmp_path / name)
    assert on_disk(model) == (None if name == "b.safetensors" else 1000)


def test_incomplete_download_has_an_unknown_size(tmp_path: Path) -> None:
    model = changed(tmp_path)
    tensors(tmp_path / "a.safetensors", a=("BF16", 1000))
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert on_disk(model) is None


@pytest.mark.parametrize(
    ("settings", "linear", "expert"),
    [
        ({"quant_method": "fp8"}, 8, 8),
        ({"quant_method": "awq", "bits": 4}, 4 + 20 / 128, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64, 4 + 20 / 64),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, 4, 4),
        ({"quant_method": "gptq", "bits": 8}, 8, 8),
        ({"quant_method": "mxfp4"}, 16, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, 4.5),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            8,
            8,
        ),
    ],
)
def test_quantised_numbers_take_fewer_bits(
    tmp_path: Path, settings: dict[str, object], linear: float, expert: float
) -> None:
    bits = precision(changed(tmp_path, quantization_config=settings).quantization or {})
    assert bits
    assert (bits.linear, bits.expert, bits.plain, bits.exact) == (linear, expert, 16, False)


@pytest.mark.parametrize(
    ("listed", "module", "left"),
    [
        ("model.layers.0.self_attn.q_proj", "self_attn.q_proj", True),
        ("model.layers.1.self_attn.q_proj", "self_attn.q_proj", False),
        ("language_model.model.layers.0.self_attn.q_proj", "self_attn.q_proj", True),
        ("self_attn", "self_attn.o_proj", True),
        ("model.layers.0", "mlp.up_proj", True),
        ("model.layers.*.self_attn", "self_attn.k_proj", True),
        ("*self_attn*", "self_attn.k_proj", True),
        ("model.layers.0.mlp.gate_up_proj", "mlp.gate_proj", True),
        ("model.layers.0.mlp.gate_up_proj", "mlp.down_proj", False),
        ("mlp.gate", "mlp.gate_proj", False),
        ("model.layers.0.block_sparse_moe.experts", "mlp.experts", True),
        ("model.layers.0.mlp.shared_expert", "mlp.shared_experts.up_proj", True),
        ("re:.*self_attn", "self_attn.o_proj", True),
        ("re:.*mlp.gate$", "mlp.gate_proj", False),
        ("re:.*mlp\\.gate_proj$", "mlp.gate_proj", True),
        ("re:self_attn.*", "self_attn.o_proj", False),
        ("lm_head", "mlp.up_proj", False),
        ("re:(a+)+$", "mlp.up_proj", False),
        (7, "mlp.up_proj", False),
    ],
)
@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignore", "llm_int8_skip_modules"])
def test_tensors_excluded_from_quantisation_are_recognised_by_module(
    tmp_path: Path, field: str, listed: object, module: str, left: bool
) -> None:
    model = changed(tmp_path, quantization_config={"quant_method": "fp8", field: [listed]})
    assert model.unquantized.has(f"model.layers.0.{module}") is left
    assert bool(model.unquantized.unread) is (listed == "re:(a+)+$")


def test_half_of_a_pair_that_is_left_is_half_of_its_numbers(tmp_path: Path) -> None:
    listed = ["model.layers.0.self_attn.o_proj"]
    model = changed(tmp_path, quantization_config={"quant_method": "fp8", "ignore": listed})
    kinds = {each.kind: each.elements for each in weights.layer(model, 0) if each.elements == 4096 * 4096}
    assert kinds == {"linear": 4096 * 4096, "plain": 4096 * 4096}


def test_number_of_tried_patterns_is_bounded(tmp_path: Path) -> None:
    listed = [f"*{each}*" for each in range(1000)]
    model = changed(tmp_path, quantization_config={"quant_method": "fp8", "ignore": listed})
    assert (len(model.unquantized.patterns), len(model.unquantized.unread)) == (256, 744)


@pytest.mark.parametrize(
    "settings", [{"quant_method": "new"}, {"quant_method": "awq"}, {"quant_method": "compressed-tensors"}]
)
def test_an_unknown_quantisation_has_no_bits(tmp_path: Path, settings: dict[str, object]) -> None:
    assert precision(changed(tmp_path, quantization_config=settings).quantization or {}) is None
