"""A model's name or path -> its config, params, tokenizer and sampling defaults.

open_model reads headers only, and says all that is wrong with a checkpoint before anything is read or compiled;
load_params and load_tokenizer then do the work, in any order or side by side. load_model is the three together.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from paxpage.config import DTYPES, LOAD_FORMATS, ModelConfig, require, require_int
from paxpage.models import generation, gguf_config, hf_config, hub, orbax_files
from paxpage.models.checkpoint import Checkpoint, check_tensors, read_params
from paxpage.models.dummy import dummy_params
from paxpage.models.generation import GenerationDefaults
from paxpage.models.gguf_checkpoint import GGUFCheckpoint
from paxpage.models.gguf_files import GGUFFile, open_gguf
from paxpage.models.gguf_tokenizer import gguf_tokenizer, has_tokenizer
from paxpage.models.registry import Params, abstract_params, num_bytes
from paxpage.models.safetensors_files import SafetensorsCheckpoint
from paxpage.models.tokenizer import folder_tokenizer, has_tokenizer_files

logger = logging.getLogger(__name__)

MODEL_FORMS = "a folder, a .gguf file, or org/name on the Hugging Face hub"


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How to load a model.

    tokenizer: a folder, a .gguf file or org/name whose tokenizer is taken instead of the model's own.
    dtype: of the params; "auto" is the checkpoint's own on a GPU and float32 on a CPU.
    load_format: "auto" looks at what is there; "dummy" makes random weights from the config alone.
    revision, token: of the Hugging Face hub. seed: of dummy weights.
    """

    tokenizer: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    revision: str | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    seed: int = 0
    show_progress: bool = True

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        require(self.load_format in LOAD_FORMATS, "load_format", self.load_format, ", ".join(LOAD_FORMATS))
        require_int("seed", self.seed, 0, 2**63 - 1)


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model whose headers have been read and found to fit its config.

    dtype: what its params will have. generation: as the files say, the tokenizer not yet asked.
    """

    name: str
    path: Path
    config: ModelConfig
    dtype: str
    generation: GenerationDefaults
    options: LoadOptions
    gguf: GGUFFile | None  # of a GGUF file alone
    checkpoint: Checkpoint | None  # None for Orbax and for dummy weights


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """All that the engine needs of a model. tokenizer is a transformers.PreTrainedTokenizerBase, or None."""

    name: str
    config: ModelConfig
    params: Params
    tokenizer: Any
    generation: GenerationDefaults
    num_bytes: int  # of params


def load_model(model: str | Path, options: LoadOptions | None = None) -> LoadedModel:
    """Loads config, params and tokenizer of a folder (safetensors or Orbax), a .gguf file, or org/name on the hub.

    Raises ValueError, by name, for what cannot be found, read or computed.
    """
    source = open_model(model, options)
    params = load_params(source)
    tokenizer = load_tokenizer(source)
    defaults = generation.with_tokenizer(source.generation, tokenizer)
    return LoadedModel(source.name, source.config, params, tokenizer, defaults, num_bytes(params))


def open_model(model: str | Path, options: LoadOptions | None = None) -> ModelSource:
    """Finds (or downloads) a model and reads its config and headers, but no weights.

    Raises ValueError, by name: for a tokenizer or a model that is not found (the tokenizer first: it is downloaded
    sooner), an unsupported architecture, dtype or option, damaged
    files, and tensors that are missing, extra or of another shape than the config says.
    """
    require(isinstance(model, (str, Path)), "model", model, MODEL_FORMS)
    model = str(model)
    options = with_tokenizer_found(options or LoadOptions())
    path = _find(model, options)
    kind = _kind(path)
    require(
        options.load_format in ("auto", "dummy", kind), "load_format", options.load_format, f"auto, dummy or {kind}"
    )
    name = model if hub.is_repository(model) and not Path(model).exists() else path.resolve().name.removesuffix(".gguf")
    with _naming(path):
        opened = {"gguf": _open_gguf, "orbax": _open_orbax, "safetensors": _open_hf}[kind](name, path, options)
        _check_shapes(opened, kind)
    return opened


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Begins a ValueError's message with the model's path, unless that is in it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def load_params(source: ModelSource, go_on: Callable[[], None] = lambda: None) -> Params:
    """The params on jax's default device: nested dicts, all of source.dtype.

    go_on: called before each of a checkpoint's layers is read; what it raises ends that. Orbax reads all at once.
    """
    abstract = abstract_params(source.config, source.dtype)
    if source.options.load_format == "dummy":
        return dummy_params(abstract, source.options.seed)
    if source.checkpoint is None:
        return orbax_files.restore_params(source.path, abstract)
    return read_params(source.checkpoint, source.config, abstract, source.options.show_progress, go_on)


def load_tokenizer(source: ModelSource) -> Any:
    """A transformers.PreTrainedTokenizerBase, or None if the model has none.

    The first call imports transformers, which takes seconds: it pays to let it run beside load_params in a thread.
    Raises ValueError for one that cannot be read, or was chosen and has more tokens than the model.
    """
    if source.options.tokenizer is not None:
        return chosen_tokenizer(source.options.tokenizer, source.config.vocab_size)
    tokenizer = _own_tokenizer(source)
    if tokenizer is not None and len(tokenizer) > source.config.vocab_size:  # some fine-tuned models have an idle one
        message = "the tokenizer of %s has %d tokens, and the model %d: texts that come to more are refused"
        logger.warning(message, source.path, len(tokenizer), source.config.vocab_size)
    return tokenizer


def _own_tokenizer(source: ModelSource) -> Any:
    if source.gguf is None:
        return folder_tokenizer(source.path)
    return gguf_tokenizer(source.gguf) if has_tokenizer(source.gguf) else None


def resolve_dtype(dtype: str, config: ModelConfig) -> str:
    """The dtype to load in: "auto" is the checkpoint's own on a GPU, and float32, the fastest there, on a CPU."""
    if dtype != "auto":
        return dtype
    return "float32" if jax.default_backend() == "cpu" else config.dtype


def _find(model: str, options: LoadOptions) -> Path:
    path = Path(model).expanduser()
    if path.exists():
        require(options.revision is None, "revision", options.revision, "None for a model on disk")
        return path
    require(hub.is_repository(model), "model", model, MODEL_FORMS)
    has_weights = options.load_format != "dummy"
    return hub.download(model, options.revision, options.token, has_weights, options.show_progress)


def _kind(path: Path) -> str:
    if path.is_file() or (not (path / "config.json").exists() and list(path.glob("*.gguf"))):
        return "gguf"
    return "orbax" if (path / orbax_files.CONFIG_NAME).exists() else "safetensors"


def _open_gguf(name: str, path: Path, options: LoadOptions) -> ModelSource:
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        require(len(files) == 1, "model", str(path), "a folder with one .gguf file, or the path of one of them")
        path = files[0]
    file = open_gguf(path)
    config = gguf_config.model_config(file)
    checkpoint = None if options.load_format == "dummy" else GGUFCheckpoint(file, config)
    defaults = gguf_config.generation_defaults(file)
    return ModelSource(name, path, config, resolve_dtype(options.dtype, config), defaults, options, file, checkpoint)


def _open_orbax(name: str, path: Path, options: LoadOptions) -> ModelSource:
    config = orbax_files.read_config(path)
    defaults = generation.from_hf(_optional_json(path / "generation_config.json"), {})
    return ModelSource(name, path, config, resolve_dtype(options.dtype, config), defaults, options, None, None)


def _open_hf(name: str, path: Path, options: LoadOptions) -> ModelSource:
    require((path / "config.json").exists(), "model", str(path), f"{MODEL_FORMS}; this folder has no config.json")
    raw = hf_config.read_json(path / "config.json")
    config = hf_config.from_hf(raw)
    checkpoint = None if options.load_format == "dummy" else SafetensorsCheckpoint(path)
    if checkpoint is not None and not hf_config.has_dtype(raw):
        config = dataclasses.replace(config, dtype=checkpoint.dtype)
    defaults = generation.from_hf(_optional_json(path / "generation_config.json"), raw)
    return ModelSource(name, path, config, resolve_dtype(options.dtype, config), defaults, options, None, checkpoint)


def _check_shapes(source: ModelSource, kind: str) -> None:
    if source.options.load_format == "dummy":
        return
    if source.checkpoint is not None:
        num_layers, most = source.config.num_layers, len(source.checkpoint.tensors)
        # First: a damaged number would have billions of layers built only to find that they are missing.
        require(num_layers <= most, f"number of layers of {source.path}", num_layers, f"its number of tensors, {most}")
    abstract = abstract_params(source.config, source.dtype)
    if source.checkpoint is not None:
        check_tensors(source.config, abstract, source.checkpoint.tensors)
    elif kind == "orbax":
        orbax_files.check_orbax(source.path, abstract)


def _optional_json(path: Path) -> dict[str, Any]:
    return hf_config.read_json(path) if path.exists() else {}


def with_tokenizer_found(options: LoadOptions) -> LoadOptions:
    """The same, with the path of the tokenizer that is chosen, if one is; from the hub it is downloaded.

    ValueError for one that is not there.
    """
    name = options.tokenizer
    if name is None:
        return options
    path = Path(name).expanduser()
    if not path.exists():
        require(hub.is_repository(name), "tokenizer", name, MODEL_FORMS)
        path = hub.download(name, None, options.token, has_weights=False, show_progress=options.show_progress)
    is_there = path.is_file() or has_tokenizer_files(path)
    require(is_there, "tokenizer", name, "a folder or repository with tokenizer files")
    return dataclasses.replace(options, tokenizer=str(path))


def chosen_tokenizer(path: str, vocab_size: int | None) -> Any:
    """Of a path that with_tokenizer_found gives. ValueError for more tokens than vocab_size, where that is known."""
    tokenizer = gguf_tokenizer(open_gguf(Path(path))) if Path(path).is_file() else folder_tokenizer(Path(path))
    allowed = f"one with at most the model's {vocab_size} tokens; this one has {len(tokenizer)}"
    require(vocab_size is None or len(tokenizer) <= vocab_size, "tokenizer", path, allowed)
    return tokenizer
