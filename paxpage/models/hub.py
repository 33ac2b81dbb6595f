"""Models on the Hugging Face hub, downloaded to its cache or found there.

The environment variables of huggingface_hub hold: HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # configs, chat template, the tokenizer in any of its forms
WEIGHT_FILES = ("*.safetensors",)
UNWANTED_FILES = ("*/*", "consolidated*")  # the same weights once more, in their authors' own layouts


def is_repository(name: str) -> bool:
    """Whether a name has the form org/name."""
    return REPOSITORY.fullmatch(name) is not None


def download(
    name: str, revision: str | None, token: str | None, has_weights: bool = True, show_progress: bool = True
) -> Path:
    """The folder of a repository's files at a revision (branch, tag or commit; None: main).

    Only configs, tokenizer and safetensors files are fetched; without has_weights, only the former two. Raises
    ValueError when the repository, the revision or the network is not there, or access is refused.
    """
    from huggingface_hub import snapshot_download  # most models are on disk, and it takes half a second

    patterns = [*CONFIG_FILES, *(WEIGHT_FILES if has_weights else ())]
    try:
        with _progress_bars(show_progress):
            folder = snapshot_download(
                name,
                revision=revision,
                token=token,
                allow_patterns=patterns,
                ignore_patterns=list(UNWANTED_FILES),
            )
    except Exception as error:  # the hub's own, the HTTP library's and the file system's
        what = f"model is {name!r} at revision {revision or 'main'!r}: no such folder here, and the hub says: {error}"
        raise ValueError(what) from error
    return Path(folder)


@contextlib.contextmanager
def _progress_bars(is_shown: bool) -> Iterator[None]:
    """huggingface_hub's own bars, switched off for a while; they have no other switch."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if is_shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
