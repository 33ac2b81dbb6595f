"""A folder's tokenizer, through transformers."""

from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def has_tokenizer_files(folder: Path) -> bool:
    """Whether a folder seems to have a tokenizer."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def folder_tokenizer(folder: Path) -> Any:
    """A transformers.PreTrainedTokenizerBase, or None if the folder has no tokenizer files.

    Raises ValueError if they cannot be read, or ask for code of their own to be run.
    """
    if not has_tokenizer_files(folder):
        return None
    # imported here: it takes seconds, and whoever brings token ids of their own does without
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file makes of it
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error
