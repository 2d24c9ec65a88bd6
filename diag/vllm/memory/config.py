"""The fields of a config.json, under one name each."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from diag.core.declarations import PACKAGE, read
from diag.core.errors import BadUsage
from diag.vllm.command.free_text import hidden

T = TypeVar("T")
MOST = 2**30
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder_config")
"""Objects with the fields of the language part."""


@cache
def aliases() -> Mapping[str, tuple[str, ...]]:
    """Return other names of a field, by the name that diag uses; the first one that a file has counts."""
    return read(PACKAGE / "vllm" / "memory" / "aliases.toml", dict[str, tuple[str, ...]])


class Config:
    """The fields of a config.json; a field that is missing, of another type or absurd raises BadUsage with its name.

    `asked` collects the names of the fields that were looked for.
    """

    def __init__(self, fields: Mapping[str, Any], place: str, asked: set[str] | None = None) -> None:
        self.fields = fields
        self.place = place
        self.asked = set[str]() if asked is None else asked
        self._spellings: dict[str, str] = {}

    def changed(self, fields: Mapping[str, Any]) -> "Config":
        """Return these fields with some of them changed."""
        return Config({**self.fields, **fields}, self.place, self.asked)

    def _spelled(self, name: str) -> str:
        """Return the name under which the file has a field."""
        if name not in self._spellings:  # every layer asks for the same few
            names = (name, *aliases().get(name, ()))
            self.asked.update(names)
            self._spellings[name] = next((other for other in names if self.fields.get(other) is not None), name)
        return self._spellings[name]

    def has(self, *names: str) -> bool:
        """Return True if the file has one of these fields, whatever its spelling."""
        return any(self.fields.get(self._spelled(name)) is not None for name in names)

    def get(self, name: str) -> Any:
        """Return a field as it is; None if it is missing."""
        return self.fields.get(self._spelled(name))

    def size(self, name: str, default: int | None = None, most: int = MOST, least: int = 1) -> int:
        """Return a whole number of `least` to `most`; the default if the field is missing or null."""
        name = self._spelled(name)
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise BadUsage(f"{self.place} has no {name!r}: it is not the config.json of a known model")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise BadUsage(f"{self.place}: {name!r} is {quote(value)}, expected a whole number of {least} to {most}")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """Return a whole number that may be 0; the default if the field is missing or no number."""
        return self.size(name, default, least=0)

    def first(self, name: str, default: int = 0) -> int:
        """Return a whole number, or the first of a list with one for each layer; the default if it is missing."""
        value = self.get(name)
        value = value[0] if isinstance(value, list) and value else value
        return Config({name: value}, self.place).count(name, default)

    def switch(self, name: str, default: bool = False) -> bool:
        value = self._of_type(name, bool, "true or false")
        return default if value is None else value

    def _of_type(self, name: str, kind: type[T], expected: str) -> T | None:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, kind):
            raise BadUsage(f"{self.place}: {name!r} is {quote(value)}, expected {expected}")
        return value

    def any_switch(self, *names: str) -> bool:
        """Return True if one of these fields is true."""
        return any(self.fields.get(name) is True for name in names)

    def part(self, name: str) -> Mapping[str, Any]:
        """Return an object inside; {} if there is none."""
        self.asked.add(name)
        return self._of_type(name, dict, "an object") or {}

    def list(self, name: str) -> list[Any]:
        """Return a list; [] if there is none."""
        self.asked.add(name)
        return self._of_type(name, list, "a list") or []


_HARMLESS = re.compile(
    r"_.*|.*(_token_ids?|_token_index|_eps|_epsilon|_theta|_dropout|_pdrop|_range|_scaling|_scale|_factor|_multipliers?|_coef"
    r"|_rate|_loss|_std|_beta|_alpha|_limit|_version|_penalty|_beams|_beam_groups|_sequences|_length|_dtype|_capping"
    r"|_softcap|_step_min|_step_max|_step_floor|_mscale|_config)|id2label|label2id|auto_map|architectures|rope_\w*"
    r"|top_k|topk_group|n_group|num_expert_group|pretraining_tp|chunk_size\w*|num_logits_to_keep|bos|eos|pad"
    r"|max_position_embeddings|(original_)?max_\w*|seq_length|model_max_length|num_nextn_predict_layers|mtp_\w*"
    r"|vocab_size|(text|vision|audio|quantization|compression|llm|generation)_\w*|image_\w*|video_\w*|audio_\w*|vision_\w*"
    r"|rotary_\w*|partial_rotary_factor|torch_dtype|initializer\w*|transformers\w*|attention_value_scale|query_pre_attn_scalar|task_\w*"
)
"""Names of fields that do not describe a layer's shape."""


def unread_fields(config: Config) -> list[str]:
    """Return the names of numbers, lists and objects that may describe layers, and that were not read."""
    return sorted(
        name
        for name, value in config.fields.items()
        if isinstance(value, int | list | dict) and not isinstance(value, bool) and value and value != 1
        if name not in config.asked and not _HARMLESS.fullmatch(name)
    )


def quote(value: object) -> str:
    """Quote a value of a file or a command, short, without terminal escapes and without secrets."""
    text = hidden(repr(value))
    return text if len(text) <= 80 else f"{text[:76]} ..."
