"""The tokenizer inside a GGUF file, rebuilt with the tokenizers library.

tokenizer.ggml.model "gpt2" is byte-level BPE; how it cuts text into words before merging is named by
tokenizer.ggml.pre, and only names whose rule is known are taken. "llama" is SentencePiece's BPE: whole text, spaces as
U+2581, unknown characters as bytes.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paxpage.config import require
from paxpage.models.gguf_files import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "\u2581"
NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# English contractions, then words with at most one leading mark, numbers, marks with the line ends after them, spaces
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """What a name in tokenizer.ggml.pre stands for."""

    words: str | None = None  # a regular expression for one word; None: GPT-2's own, built into tokenizers
    has_single_digits: bool = False  # every digit is a word
    is_nfc: bool = False  # text is brought to Unicode's composed form first
    ignores_merges: bool = False  # a word that is a token as it stands is not built by merging
    adds_bos: bool = False  # where the file does not say


LLAMA3 = PreTokenizer(words=WORDS.format(digits="{1,3}"), ignores_merges=True, adds_bos=True)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(has_single_digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": PreTokenizer(words=WORDS.format(digits=""), is_nfc=True),
}


def has_tokenizer(file: GGUFFile) -> bool:
    """Whether there is a tokenizer in the file at all: converters may leave it out."""
    return _entry(file, "model") not in (None, "none", "no_vocab")


def gguf_tokenizer(file: GGUFFile) -> Any:
    """The file's tokenizer as a transformers.PreTrainedTokenizerFast, chat template included.

    Raises ValueError for a tokenizer model or a tokenizer.ggml.pre that is not known, and for damaged tables.
    """
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    kind = _entry(file, "model")
    require(
        isinstance(kind, str) and kind in builders, f"tokenizer.ggml.model of {file.path}", kind, ", ".join(builders)
    )
    _check_tables(file)
    _check_named_tokens(file)
    try:
        tokenizer = builders[kind](file)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{file.path} has a damaged tokenizer: {error}") from error
    _add_tokens(tokenizer, file)
    tokenizer.post_processor = _post_processor(file)
    # imported here: it takes seconds, and whoever brings token ids of their own does without
    from transformers import PreTrainedTokenizerFast

    named = {name: _token(file, f"{key}_token_id") for name, key in NAMED_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )


def sentencepiece_merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merge list that makes plain BPE do what SentencePiece does.

    SentencePiece joins the neighbours whose union has the best score; so each token gives one merge for every way to
    cut it into two tokens, in the order of scores (equal scores: of token ids). Tokens that text never forms
    (control, unknown, byte) take no part.
    """
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    best_first = sorted(ids.values(), key=lambda i: (-scores[i], i))
    return [pair for i in best_first for pair in _cuts(tokens[i], ids)]


def _cuts(token: str, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
    yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _entry(file: GGUFFile, key: str, default: Any = None) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{key}", default)


def _token(file: GGUFFile, key: str) -> str | None:
    token_id, tokens = _entry(file, key), _entry(file, "tokens")
    return None if token_id is None else tokens[token_id]


def _check_tables(file: GGUFFile) -> None:
    tokens = _entry(file, "tokens")
    is_list = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
    require(
        is_list and bool(tokens), f"tokenizer.ggml.tokens of {file.path}", type(tokens).__name__, "a list of strings"
    )
    needed = {"gpt2": (), "llama": ("scores", "token_type")}[_entry(file, "model")]
    for key in ("token_type", "scores"):
        table = _entry(file, key)
        is_valid = (table is None and key not in needed) or (isinstance(table, list) and len(table) == len(tokens))
        require(is_valid, f"tokenizer.ggml.{key}", table and f"{len(table)} entries", f"{len(tokens)} entries")


def _check_named_tokens(file: GGUFFile) -> None:
    num_tokens = len(_entry(file, "tokens"))
    for key in NAMED_TOKENS.values():
        token_id = _entry(file, f"{key}_token_id")
        is_valid = token_id is None or (isinstance(token_id, int) and 0 <= token_id < num_tokens)
        require(is_valid, f"tokenizer.ggml.{key}_token_id", token_id, f"0 to {num_tokens - 1}")


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    name = _entry(file, "pre")
    require(
        isinstance(name, str) and name in PRE_TOKENIZERS,
        f"tokenizer.ggml.pre of {file.path}",
        name,
        ", ".join(PRE_TOKENIZERS),
    )
    return PRE_TOKENIZERS[name]


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    return {token: i for i, token in enumerate(_entry(file, "tokens"))}


def _byte_level_bpe(file: GGUFFile) -> Tokenizer:
    rule = _pre_tokenizer(file)
    merges = [tuple(merge.split(" ")) for merge in _entry(file, "merges", [])]
    tokenizer = Tokenizer(models.BPE(_vocabulary(file), merges, ignore_merges=rule.ignores_merges))
    if rule.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.has_single_digits else []
    if rule.words is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(file: GGUFFile) -> Tokenizer:
    tokens, scores, types = (_entry(file, key) for key in ("tokens", "scores", "token_type"))
    model = models.BPE(
        _vocabulary(file),
        sentencepiece_merges(tokens, scores, types),
        unk_token=_token(file, "unknown_token_id"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = _entry(file, "add_space_prefix", True)
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, file: GGUFFile) -> None:
    """Control and user-defined tokens are found in the text as they stand, before it is cut into words."""
    tokens, types = _entry(file, "tokens"), _entry(file, "token_type", [])
    special = {i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    special |= {_entry(file, f"{key}_token_id") for key in NAMED_TOKENS.values()} - {None}
    defined = {i for i, kind in enumerate(types) if kind == USER_DEFINED} - special
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in sorted(special)])
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False, special=False) for i in sorted(defined)])


def _post_processor(file: GGUFFile) -> Any:
    """Adds the beginning and end of sequence where the file, or else its kind of tokenizer, says so."""
    is_sentencepiece = _entry(file, "model") == "llama"
    adds_bos = _entry(file, "add_bos_token", is_sentencepiece or _pre_tokenizer(file).adds_bos)
    bos = _added(file, "bos_token_id") if adds_bos else {}
    eos = _added(file, "eos_token_id") if _entry(file, "add_eos_token", False) else {}
    return processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=list({**bos, **eos}.items()))


def _added(file: GGUFFile, key: str) -> dict[str, int]:
    token = _token(file, key)
    require(
        token is not None, f"tokenizer.ggml.{key} of {file.path}", None, "a token id, since the token is to be added"
    )
    return {str(token): _entry(file, key)}
