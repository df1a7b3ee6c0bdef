"""Makes the tokenizer that a GGUF file describes, so that texts become the same tokens as in llama.cpp.

A file with an unknown rule of splitting text is refused: another rule's tokens would spoil the model's output, and
nothing would show it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer

from chairlift.engine.text.merges import make_merges
from chairlift.engine.text.splitting import PATTERNS, SEQUENCES
from chairlift.engine.text.tokenizer_parts import TokenizerParts
from chairlift.errors import CheckpointError, shown
from chairlift.models.gguf import GGUFFile

_PREFIX = "tokenizer.ggml."
_SENTENCE_PIECE, _BYTE_LEVEL, _GEMMA4 = "llama", "gpt2", "gemma4"  # as `tokenizer.ggml.model` has them
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # as `token_type` has them
_FOUND_WHOLE = {_UNKNOWN, _CONTROL, _USER_DEFINED}  # types of tokens that are found whole in a text
_GPT2_RULES = {"gpt-2", "olmo", "phi-2", "jais", "mpt"}
_DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell"}  # GPT-2's rule, with digits split singly
_PHI3, _PHI3_KEEPS = "phi3", {"<unk>", "<s>", "<|endoftext|>"}  # the architecture; tokens that swallow no white space
_GEMMA = "gemma"  # how the names of its architectures begin
# Texts begin with the BOS token unless the file says otherwise.
_BEGINNING = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
_WHOLE_WORDS = {*_BEGINNING, "glm4", "youtu"}  # words that are tokens need no merges
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCE_PIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # those of a file that names none
_MARK = "▁"  # a space in SentencePiece's tokens


def make_gguf_tokenizer(file: GGUFFile) -> TokenizerParts:
    """Makes it from a file's metadata. CheckpointError for an unknown kind of tokenizer or rule of splitting text."""
    given = {name.removeprefix(_PREFIX): value for name, value in file.metadata.items() if name.startswith(_PREFIX)}
    kind, rule, architecture = given.get("model"), given.get("pre"), file.metadata["general.architecture"]
    if kind == _SENTENCE_PIECE:
        special = _special_tokens(given, _SENTENCE_PIECE_IDS)
        backend = _sentence_piece(given, architecture, special.get("unk_token"))
    elif kind == _GEMMA4:  # SentencePiece's pieces, with merges in the file
        special = _special_tokens(given, {})
        backend = _sentence_piece(given, architecture, special.get("unk_token"))
        given["add_bos_token"] = True  # as in llama.cpp, since early files say otherwise
    elif kind == _BYTE_LEVEL:
        special = _special_tokens(given, {})
        backend = _byte_level(given, rule)
    else:
        raise CheckpointError(
            f"its tokenizer is of the kind {shown(kind)}, and only gpt2, llama and gemma4 can be read"
        )
    whole = _add_whole_tokens(backend, given, architecture)
    backend.add_tokens([AddedToken(token, special=True) for token in special.values() if token not in whole])
    begins = kind == _SENTENCE_PIECE or rule in _BEGINNING
    ends = (given.get("add_bos_token", begins), "bos_token"), (given.get("add_eos_token", False), "eos_token")
    first, last = (special.get(name) if is_added else None for is_added, name in ends)
    _put_around_texts(backend, first, last)
    eos = special.get("eos_token")
    return TokenizerParts(
        backend,
        special_tokens=special,
        eos_token_id=None if eos is None else backend.token_to_id(eos),
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )


def _put_around_texts(backend: BackendTokenizer, first: str | None, last: str | None) -> None:
    """Has texts begin and end with these tokens, where they are not None."""
    around = [token for token in (first, last) if token is not None]
    single = [*([first] if first else []), "$A", *([last] if last else [])]
    part: Any = processors.TemplateProcessing(
        single=single, special_tokens=[(token, backend.token_to_id(token)) for token in around]
    )
    backend.post_processor = part


def _special_tokens(given: dict[str, Any], habits: dict[str, int]) -> dict[str, str]:
    """Each by transformers' name for it. `habits`: ids where the file is silent, by its names."""
    tokens = given["tokens"]
    special: dict[str, str] = {}
    for name, theirs in _SPECIALS.items():
        token = given.get(f"{theirs}_token_id", habits.get(theirs))
        if token is not None and not (type(token) is int and 0 <= token < len(tokens)):
            raise CheckpointError(f"its {name} is {shown(token)}, and there are {len(tokens)} tokens")
        if token is not None:
            special[name] = tokens[token]
    return special


def _byte_level(given: dict[str, Any], rule: object) -> BackendTokenizer:
    """The file spells tokens that are found whole as they are, and all others in the byte alphabet."""
    vocab = _numbered(given["tokens"])
    backend: Any = BackendTokenizer(models.BPE(vocab, _merges_of(given), ignore_merges=rule in _WHOLE_WORDS))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_splitting(rule))
    backend.decoder = decoders.ByteLevel()
    return backend  # type: ignore[no-any-return]


def _merges_of(given: dict[str, Any]) -> list[tuple[str, str]]:
    """Splits the merges of the file, which leaves out an empty list."""
    return [merge.partition(" ")[::2] for merge in given.get("merges", ())]


def _splitting(rule: object) -> list[pre_tokenizers.PreTokenizer]:
    if rule in _DIGITS_ALONE:
        return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if rule in _GPT2_RULES:
        return [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    patterns = SEQUENCES.get(rule) or _single(PATTERNS.get(rule)) or _single(_patterns_of_transformers().get(rule))
    if not patterns:
        raise CheckpointError(
            f"its tokenizer splits text by an unknown rule ({_PREFIX}pre {shown(rule)}); name a directory with"
            " the model's own tokenizer as tokenizer"
        )
    return [
        *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _single(pattern: str | None) -> tuple[str, ...]:
    return () if pattern is None else (pattern,)


def _patterns_of_transformers() -> Mapping[object, str]:
    """Returns transformers' own table, which knows more rules in newer versions."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping  # slow to import
    except ImportError as error:
        raise CheckpointError("a GGUF file's tokenizer needs transformers 5.18 or newer; upgrade it") from error
    return {rule: pattern for rule, pattern in gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS.items()}


def _sentence_piece(given: dict[str, Any], architecture: str, unknown: str | None) -> BackendTokenizer:
    """One more space precedes a text unless the file says otherwise, also after a token that is found whole."""
    tokens, is_gemma = given["tokens"], architecture.startswith(_GEMMA)
    if is_gemma:  # the file has runs of spaces as they are
        tokens = [_MARK * len(token) if token.strip(" ") == "" else token for token in tokens]
    vocab = _numbered(tokens)
    merges = _merges_of(given) or _find_merges(vocab, given, is_gemma)
    backend: Any = BackendTokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces, has_first = normalizers.Replace(" ", _MARK), given.get("add_space_prefix", not is_gemma)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), spaces]) if has_first else spaces
    parts = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_first else parts)
    return backend  # type: ignore[no-any-return]


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    """Maps each token to its id: the last one of a token that the file has twice."""
    return dict(zip(tokens, range(len(tokens)), strict=True))


def _find_merges(vocab: dict[str, int], given: dict[str, Any], is_gemma: bool) -> list[tuple[str, str]]:
    """Finds the merges of a file that has none."""
    ranks = _ranks(given, is_gemma)
    if len(ranks) != len(given["tokens"]):
        raise CheckpointError(f"it ranks {len(ranks)} tokens, and has {len(given['tokens'])}")
    return make_merges(list(vocab), ranks[np.fromiter(vocab.values(), np.int64, len(vocab))])


def _ranks(given: dict[str, Any], is_gemma: bool) -> npt.NDArray[np.int64]:
    """For each token a rank. Two tokens become the one that ranks first: by its score, or else the first."""
    if is_gemma:
        # The scores of its user-defined tokens (runs of spaces and such) mean nothing: they come first, all alike.
        kinds = np.asarray(given["token_type"])
        return np.where(kinds == _USER_DEFINED, 0, np.arange(1, 1 + len(kinds)))
    order = np.argsort(-np.asarray(given["scores"], np.float64), kind="stable")
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks


def _numbers(read: Any) -> list[Any]:
    """Turns an array of numbers into Python's, through which loops are several times as fast."""
    return read.tolist() if isinstance(read, np.ndarray) else list(read)


def _add_whole_tokens(backend: BackendTokenizer, given: dict[str, Any], architecture: str) -> set[str]:
    """Adds the tokens that are found whole in a text, and returns them; all but user-defined ones are special.

    Phi-3's swallow the white space after them, which its template relies on, and no file says so.
    """
    kinds = zip(given["tokens"], _numbers(given.get("token_type", ())), strict=False)
    whole = {token: kind for token, kind in kinds if kind in _FOUND_WHOLE}
    added = [
        AddedToken(
            token,
            normalized=False,
            special=kind != _USER_DEFINED,
            rstrip=architecture == _PHI3 and token not in _PHI3_KEEPS,
        )
        for token, kind in whole.items()
        if backend.token_to_id(token) is not None
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    return {token.content for token in added}
