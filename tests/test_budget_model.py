"""A model's config.json, its files, and everything that they may be instead."""

import json
import struct
from pathlib import Path

import pytest

from diag.errors import BadUsage
from diag.vllm import weights
from diag.vllm.files import on_disk
from diag.vllm.model import Model, find, read

MODELS = Path(__file__).parent / "data" / "models"
PARAMETERS = {  # transformers 5.19 says the same: tests/test_live_budget.py
    "deepseek-v3": 671_026_404_352,
    "gemma-3-27b": 27_009_346_304,
    "gpt-oss-120b": 116_829_156_672,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-4-scout": 107_769_861_120,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
}


def changed(folder: Path, name: str = "llama-3-8b", **fields: object) -> Model:
    """A model of the data with other fields; ... takes one out."""
    found = json.loads((MODELS / name / "config.json").read_text()) | fields
    kept = {field: value for field, value in found.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return read(folder)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_shape_has_as_many_parameters_as_the_model(name: str) -> None:
    assert weights.parameters(read(MODELS / name)) == PARAMETERS[name]


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
        ({"num_key_value_heads": 5}, "32 attention heads are no multiple of its 5 key-value heads"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no', expected true or false"),
        ({"rope_scaling": 8}, "'rope_scaling' is 8, expected an object"),
        ({"text_config": []}, "'text_config' is [], expected an object"),
        ({"layer_types": "full"}, "'layer_types' is 'full', expected a list"),
        ({"hidden_size": "\x1b[31mred"}, r"'\x1b[31mred'"),
    ],
)
def test_a_field_that_is_no_such_thing_is_named(tmp_path: Path, fields: dict[str, object], says: str) -> None:
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
        (b"[1, 2]", "holds no object but [1, 2]"),
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


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="does not exist: name a model's folder"):
        read(tmp_path)


def test_an_unknown_architecture_can_be_read_but_not_reckoned(tmp_path: Path) -> None:
    model = changed(tmp_path, architectures=["NewForCausalLM\x1b[2J"])
    assert model.family is None
    assert model.unknown == r"the architecture 'NewForCausalLM\x1b[2J' is not one that diag knows"


def test_a_kind_of_layer_that_keeps_no_tokens_is_not_covered(tmp_path: Path) -> None:
    model = changed(tmp_path, layer_types=["linear_attention", "full_attention"] * 16)
    assert model.unknown == "layers of the kind 'linear_attention' are not covered"


def test_the_numbers_of_a_multimodal_model_are_those_of_its_language_part() -> None:
    model = read(MODELS / "gemma-3-27b")
    assert (model.layers, model.tied, bool(model.vision)) == (62, True, True)
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


def test_the_longest_context_of_longrope_is_that_before_it(tmp_path: Path) -> None:
    """As vLLM starts Phi-3 with 128k: long factors cost short prompts."""
    scaling = {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}
    model = changed(tmp_path, rope_scaling=scaling, original_max_position_embeddings=4096)
    assert (model.longest, model.positions) == (4096, 8192)


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
    """What get_pp_indices of vLLM 0.32 answers."""
    spans = weights.stages(changed(tmp_path, num_hidden_layers=layers), count)
    assert [len(each) for each in spans] == sizes
    assert (spans[0].start, spans[-1].stop) == (0, layers)


def test_a_tied_head_is_one_matrix_on_one_stage_and_two_on_several(tmp_path: Path) -> None:
    model = changed(tmp_path, tie_word_embeddings=True)
    matrix = weights.embedding(model)
    assert weights.of_stage(model, range(32)).count(matrix) == 1
    assert [weights.of_stage(model, each).count(matrix) for each in weights.stages(model, 2)] == [1, 1]


def test_words_are_padded_to_64(tmp_path: Path) -> None:
    assert weights.embedding(changed(tmp_path, vocab_size=32_001)).elements == 32_064 * 4096


def test_what_mla_copies_to_every_gpu_and_keeps_twice() -> None:
    """The way down of queries and of keys and values is on every GPU; the way up is kept in bfloat16 as well."""
    model = read(MODELS / "deepseek-v3")
    attention = weights.layer(model, 0)
    assert sum(each.elements for each in attention if each.ways == 1 and each.kind == "linear") == 7168 * (1536 + 576)
    assert weights.absorbed(model) == weights.Part(61 * 512 * 128 * 256, weights.EVERY)
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
    assert find("meta/llama", {"HF_HOME": str(tmp_path)}) == snapshot
    assert find("meta/llama", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == snapshot
    assert find("meta/llama", {"HF_HOME": str(tmp_path)}, "abc") == snapshot


@pytest.mark.parametrize("name", ["meta/other", "no\x1b[2J", "nul\0", "../../nowhere", "x" * 5000])
def test_an_id_that_is_not_in_the_cache_is_refused_without_a_network(tmp_path: Path, name: str) -> None:
    cached(tmp_path / "hub")
    with pytest.raises(BadUsage, match="neither a folder here nor in the cache") as refused:
        find(name, {"HF_HOME": str(tmp_path)})
    assert str(refused.value).isprintable()


# -- the files --------------------------------------------------------------------------------------------------------


def tensors(file: Path, **sizes: tuple[str, int]) -> None:
    """A safetensors file with tensors of these types and bytes; only its head is real."""
    at, header = 0, {}
    for name, (kind, size) in sizes.items():
        header[name.replace("__", ".")] = {"dtype": kind, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def test_files_are_weighed_by_their_heads(tmp_path: Path) -> None:
    model = changed(tmp_path)
    tensors(tmp_path / "model-1.safetensors", a=("BF16", 1000))
    tensors(tmp_path / "model-2.safetensors", b=("F32", 1000), layers__0__c=("I32", 10))
    tensors(tmp_path / "consolidated.safetensors", a=("BF16", 1000))
    assert on_disk(model) == 1000 + 500 + 10
    assert on_disk(model, whole=True) == 2000 + 1000 + 10


def test_what_vllm_does_not_load_is_not_weighed(tmp_path: Path) -> None:
    model = changed(tmp_path, tie_word_embeddings=True)
    tensors(
        tmp_path / "model.safetensors",
        model__layers__31__x=("BF16", 100),
        model__layers__32__mtp=("BF16", 1000),
        lm_head__weight=("BF16", 1000),
    )
    assert on_disk(model) == 100


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 2**40), b"version https://git-lfs"])
def test_files_that_cannot_be_read_weigh_nothing_known(tmp_path: Path, content: bytes) -> None:
    model = changed(tmp_path)
    tensors(tmp_path / "a.safetensors", a=("BF16", 1000))
    (tmp_path / "b.safetensors").write_bytes(content)
    assert on_disk(model) is None


def test_a_download_that_is_not_complete_weighs_nothing_known(tmp_path: Path) -> None:
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
    bits = weights.precision(changed(tmp_path, quantization_config=settings))
    assert bits
    assert (bits.linear, bits.expert, bits.plain, bits.exact) == (linear, expert, 16, False)


@pytest.mark.parametrize(
    "settings", [{"quant_method": "new"}, {"quant_method": "awq"}, {"quant_method": "compressed-tensors"}]
)
def test_an_unknown_quantisation_has_no_bits(tmp_path: Path, settings: dict[str, object]) -> None:
    assert weights.precision(changed(tmp_path, quantization_config=settings)) is None
