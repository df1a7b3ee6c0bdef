"""Reads a checkpoint's tokenizer: from a GGUF file, from a plain tokenizer.json, or as transformers reads it.

transformers takes seconds of processor time to import. A tokenizer.json is read without it where that gives the same
tokenizer: where transformers itself wrote the files for its class without code of its own, and they hold nothing but
fields known here. In all other cases transformers reads it, and so complains of what is wrong.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from chairlift.engine.text.defaults import read_json
from chairlift.engine.text.gguf_tokenizer import make_gguf_tokenizer
from chairlift.engine.text.tokenizer_parts import DECLARATIONS, PLAIN_CLASS, TokenizerParts
from chairlift.errors import CheckpointError
from chairlift.models.gguf import is_gguf, open_gguf

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")  # they may change it
_MODEL_TYPES = (None, "llama")  # those of which transformers does not choose another class
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NEEDLESS = {  # fields of a config that change neither tokens nor texts here
    *("tokenizer_class", "backend", "clean_up_tokenization_spaces", "model_max_length", "padding_side", "is_local"),
    *("local_files_only", "name_or_path", "model_input_names"),
}
_LARGEST = 100_000  # tokens; in larger vocabularies transformers looks for a faulty rule of splitting text


def read_tokenizer(path: Path) -> TokenizerParts:
    """Reads it from a directory, or a GGUF file. CheckpointError if there is none, or it cannot be read."""
    try:
        if is_gguf(path):
            return make_gguf_tokenizer(open_gguf(path))
        return read_plain(path) or _read_with_transformers(path)
    except Exception as error:  # the files may hold anything, so any error is due to them
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "custom code" in reason:
            reason += " Chairlift runs no code that a checkpoint brings."
        raise CheckpointError(f"{path} has no tokenizer that can be loaded: {reason}") from error


def read_plain(path: Path) -> TokenizerParts | None:
    """Reads a plain tokenizer.json of a directory; None if transformers might make something else of its files."""
    file = path / _FILE
    if not file.is_file() or any((path / name).exists() for name in _OTHER_FILES):
        return None
    config, model = read_json(path / _CONFIG), read_json(path / "config.json")
    specials = {name: config[name] for name in _SPECIALS if config.get(name) is not None}
    if config.get("tokenizer_class") != PLAIN_CLASS or model.get("model_type") not in _MODEL_TYPES:
        return None
    extra, template = config.get("extra_special_tokens"), _read_template(path, config)
    if config.keys() - _NEEDLESS - {*_SPECIALS, *DECLARATIONS, "extra_special_tokens", "chat_template"}:
        return None
    if not (template is None or isinstance(template, str)) or not (extra is None or isinstance(extra, list)):
        return None
    backend: Any = BackendTokenizer.from_file(str(file))
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    # transformers would add those that are missing.
    if not all(isinstance(token, str) and token in special for token in (*specials.values(), *(extra or ()))):
        return None
    if backend.get_vocab_size() > _LARGEST:
        return None
    eos = specials.get("eos_token")
    return TokenizerParts(
        _without_lengths(backend),
        special_tokens=specials,
        eos_token_id=None if eos is None else backend.token_to_id(eos),
        chat_template=template,
        declarations=_declarations(config),
    )


def _read_template(path: Path, config: dict[str, Any]) -> object:
    """Reads the chat template, whose own file counts before the config."""
    file = path / _TEMPLATE
    return file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")


def _read_with_transformers(path: Path) -> TokenizerParts:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import

    tokenizer: object = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError("it is no fast tokenizer, which is all in its tokenizer.json")
    return TokenizerParts(
        _without_lengths(tokenizer.backend_tokenizer),
        special_tokens={name: token for name in _SPECIALS if (token := getattr(tokenizer, name)) is not None},
        eos_token_id=tokenizer.eos_token_id,
        chat_template=tokenizer.chat_template,
        class_name=type(tokenizer).__name__,
        declarations=_declarations(tokenizer.init_kwargs),
    )


def _without_lengths(backend: BackendTokenizer) -> BackendTokenizer:
    """Turns off truncation and padding: lengths are checked against the slot, with a clearer message."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def _declarations(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in DECLARATIONS if config.get(name)}
