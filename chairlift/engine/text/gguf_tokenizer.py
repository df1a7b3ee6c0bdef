"""Makes the tokenizer that a GGUF file describes: uses transformers' converter, and corrects its errors.

If the converter does not know the file's rule for splitting text (`tokenizer.ggml.pre`), it silently uses GPT-2's, and
only the model's output becomes worse. So the rule must be known, to the converter or here.
"""

from typing import Any, cast

import numpy as np
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from chairlift.errors import CheckpointError, shown
from chairlift.models.gguf import GGUFFile

_PREFIX = "tokenizer.ggml."
_SENTENCE_PIECE, _BYTE_LEVEL = "llama", "gpt2"  # as `tokenizer.ggml.model` has them
_GPT2_RULES = {"gpt-2", "olmo", "phi-2", "jais", "mpt"}
_DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell"}  # GPT-2's rule, with digits split singly
_PHI3, _PHI3_KEEPS = "phi3", {"<unk>", "<s>", "<|endoftext|>"}  # the architecture; tokens that swallow no white space
# Words that are tokens need no merges; and texts begin with the BOS token unless the file says otherwise.
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
_NAMES = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    **{name: name for name in ("tokens", "scores", "token_type", "merges")},
}
"""Metadata fields, and the converter's names for them."""
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def make_gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Makes it from a file's metadata. CheckpointError for an unknown kind of tokenizer or rule of splitting text."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer  # slow to import
    except ImportError as error:
        raise CheckpointError("a GGUF file's tokenizer needs transformers 5.18 or newer; upgrade it") from error
    given = {name.removeprefix(_PREFIX): value for name, value in file.metadata.items() if name.startswith(_PREFIX)}
    kind, rule = given.get("model"), given.get("pre")
    if kind not in (_SENTENCE_PIECE, _BYTE_LEVEL):
        raise CheckpointError(f"its tokenizer is of the kind {shown(kind)}, and only gpt2 and llama can be read")
    described = {
        theirs: value.tolist() if isinstance(value := given[ours], np.ndarray) else value
        for ours, theirs in _NAMES.items()
        if ours in given
    }
    if kind == _BYTE_LEVEL:
        described.setdefault("merges", [])  # an empty list is not in the file
    architecture = file.metadata["general.architecture"]
    backend, _ = convert_gguf_tokenizer(architecture, described)
    backend = _with_added_tokens(backend, _added_tokens(backend, len(given["tokens"]), architecture))
    if kind == _BYTE_LEVEL:
        _set_rule(backend, rule)
    else:
        _set_spaces(backend, given.get("add_space_prefix", not architecture.startswith("gemma")))
    return _wrapped(backend, file, given, begins=kind == _SENTENCE_PIECE or rule in _WHOLE_WORDS)


def _wrapped(backend: BackendTokenizer, file: GGUFFile, given: dict[str, Any], begins: bool) -> PreTrainedTokenizerFast:
    tokens = given["tokens"]
    special = {name: given.get(f"{theirs}_token_id") for name, theirs in _SPECIALS.items()}
    for name, token in special.items():
        if token is not None and not (type(token) is int and 0 <= token < len(tokens)):
            raise CheckpointError(f"its {name} is {shown(token)}, and there are {len(tokens)} tokens")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        add_bos_token=given.get("add_bos_token", begins) and special["bos_token"] is not None,
        add_eos_token=given.get("add_eos_token", False) and special["eos_token"] is not None,
        **{name: tokens[token] for name, token in special.items() if token is not None},
    )


def _added_tokens(backend: BackendTokenizer, size: int, architecture: str) -> list[AddedToken]:
    """Those of the file, without special tokens that the converter adds by default but the model does not have.

    Phi-3's tokens swallow the white space after them, which its template relies on, and no file says so.
    """
    added = [token for index, token in sorted(backend.get_added_tokens_decoder().items()) if index < size]
    if architecture != _PHI3:
        return added
    return [
        AddedToken(token.content, normalized=False, special=token.special, rstrip=token.content not in _PHI3_KEEPS)
        for token in added
    ]


def _with_added_tokens(backend: BackendTokenizer, added: list[AddedToken]) -> BackendTokenizer:
    rebuilt: Any = BackendTokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(rebuilt, part, value)
    rebuilt.add_special_tokens([token for token in added if token.special])
    rebuilt.add_tokens([token for token in added if not token.special])
    return cast("BackendTokenizer", rebuilt)


def _set_rule(backend: BackendTokenizer, rule: object) -> None:
    writing: Any = backend
    if rule in _DIGITS_ALONE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        writing.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif rule in _WHOLE_WORDS:
        writing.model.ignore_merges = True
    elif rule not in _GPT2_RULES and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        raise CheckpointError(
            f"its tokenizer splits text by an unknown rule ({_PREFIX}pre {shown(rule)}); name a directory with"
            " the model's own tokenizer as tokenizer"
        )


def _set_spaces(backend: BackendTokenizer, has_first: bool) -> None:
    """Writes spaces as U+2581. `has_first`: one more precedes a text, also after an added token, as in llama.cpp.

    The converter leaves that one out where a text begins with a space by itself, and so makes " a" the same as "a".
    """
    writing: Any = backend
    spaces = normalizers.Replace(" ", "▁")
    writing.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_first else spaces
    writing.pre_tokenizer = None
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    writing.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_first else parts)
