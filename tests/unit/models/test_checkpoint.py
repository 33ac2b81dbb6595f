"""Hugging Face folders -> params: every value in its place, every misfit named before a value is read."""

import gc
import json
import re
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxpage.config import ModelConfig
from paxpage.models.checkpoint import check_params, flatten, unflatten
from paxpage.models.embedded import default_model_path
from paxpage.models.hf_config import FAMILIES
from paxpage.models.loading import LoadOptions, load_model, load_params, open_model
from paxpage.models.registry import abstract_params
from paxpage.models.safetensors_files import INDEX_NAME
from tests.unit.models.checkpoints import expected_params, mapped_kib, read_hf, rewrite_hf
from tests.unit.models.conftest import Saver

LLAMA = "LlamaForCausalLM"
QUIET = LoadOptions(show_progress=False)


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


def assert_equal(params: dict, expected: dict[str, np.ndarray], dtype: str) -> None:
    flat = flatten(params)
    assert set(flat) == set(expected)
    for path, leaf in flat.items():
        assert isinstance(leaf, jax.Array) and leaf.dtype == dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), expected[path].astype(jnp.dtype(dtype)), err_msg=path)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_family(architecture: str, is_tied: bool, saved: Saver) -> None:
    folder = saved(architecture, tie_word_embeddings=is_tied)
    loaded = load_model(str(folder), QUIET)
    assert loaded.config.architecture == architecture
    assert ("lm_head" in loaded.params) == (not is_tied)
    assert_equal(loaded.params, expected_params(read_hf(folder)), "float32")
    assert loaded.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
def test_dtypes(stored: str, asked: str, saved: Saver) -> None:
    folder = saved(LLAMA, dtype=stored)
    loaded = load_model(str(folder), LoadOptions(dtype=asked, show_progress=False))
    assert loaded.config.dtype == stored
    own = "float32" if jax.default_backend() == "cpu" else stored
    assert_equal(loaded.params, expected_params(read_hf(folder)), own if asked == "auto" else asked)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_dtype_of_the_tensors_where_the_config_names_none(stored: str, saved: Saver, tmp_path: Path) -> None:
    folder = copy_of(saved(LLAMA, dtype=stored), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(kept))
    assert open_model(str(folder), QUIET).config.dtype == stored


def test_sharded(saved: Saver) -> None:
    folder = saved(LLAMA, shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2 and (folder / INDEX_NAME).exists()
    assert_equal(load_model(str(folder), QUIET).params, expected_params(read_hf(folder)), "float32")


def test_other_files_beside_an_index_are_not_read(saved: Saver, tmp_path: Path) -> None:
    folder = copy_of(saved(LLAMA, shard_size="10KB"), tmp_path)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    assert open_model(str(folder), QUIET).config.num_layers == 2


def test_the_one_file_may_have_any_name(saved: Saver, tmp_path: Path) -> None:
    folder = copy_of(saved(LLAMA), tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_equal(load_model(str(folder), QUIET).params, expected_params(read_hf(folder)), "float32")


def edited(saved: Saver, tmp_path: Path, drop: list[str], add: dict[str, np.ndarray], **config: object) -> str:
    folder = copy_of(saved(LLAMA), tmp_path)
    tensors = {name: tensor for name, tensor in read_hf(folder).items() if name not in drop}
    return str(rewrite_hf(folder, tensors | add, **config))


def test_one_error_names_all_misfits_with_their_shapes(saved: Saver, tmp_path: Path) -> None:
    norm, k_proj = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
    odd = {k_proj: np.zeros((8, 96), np.float32), "model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    model = edited(saved, tmp_path, [norm], odd)
    with pytest.raises(ValueError) as caught:
        open_model(model, QUIET)
    message = str(caught.value)
    assert "3 tensor(s)" in message
    assert f"{norm} [96] is missing" in message
    assert "model.layers.0.self_attn.q_proj.bias [64] is extra" in message
    assert f"{k_proj} is [8, 96], expected [32, 96]" in message


def test_long_lists_are_cut_and_counted(saved: Saver, tmp_path: Path) -> None:
    model = edited(saved, tmp_path, [], {}, num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"18 tensor\(s\).*and 8 more") as caught:
        open_model(model, QUIET)
    assert str(caught.value).count("is missing") == 10


def test_a_missing_head_is_an_error_unless_tied(saved: Saver, tmp_path: Path) -> None:
    model = edited(saved, tmp_path, ["lm_head.weight"], {})
    with pytest.raises(ValueError, match=r"lm_head\.weight \[80, 96\] is missing"):
        open_model(model, QUIET)
    rewrite_hf(tmp_path, read_hf(tmp_path), tie_word_embeddings=True)
    assert "lm_head" not in load_model(model, QUIET).params


def test_a_head_beside_a_tied_embedding_must_equal_it(saved: Saver, tmp_path: Path) -> None:
    embedding = read_hf(saved(LLAMA))["model.embed_tokens.weight"]
    model = edited(saved, tmp_path, [], {"lm_head.weight": embedding}, tie_word_embeddings=True)
    assert "lm_head" not in load_model(model, QUIET).params
    source = open_model(edited(saved, tmp_path, [], {}, tie_word_embeddings=True), QUIET)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_params(source)


def test_stored_rotary_frequencies_do_no_harm(saved: Saver, tmp_path: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert open_model(edited(saved, tmp_path, [], old), QUIET).config.num_layers == 2


def test_integer_weights_are_refused_by_name(saved: Saver, tmp_path: Path) -> None:
    model = edited(saved, tmp_path, [], {"model.norm.weight": np.zeros(96, np.int8)})
    with pytest.raises(ValueError, match=r"dtype of model\.norm\.weight .* 'I8'; allowed: F32, F16, BF16"):
        open_model(model, QUIET)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_by_name(name: str, saved: Saver, tmp_path: Path) -> None:
    folder = copy_of(saved(LLAMA), tmp_path)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ValueError, match=f"pickled checkpoint {re.escape(name)}"):
        open_model(str(folder), QUIET)


def test_no_weights_or_too_many(saved: Saver, tmp_path: Path) -> None:
    folder = copy_of(saved(LLAMA), tmp_path)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors.*b\.safetensors.*one safetensors file"):
        open_model(str(folder), QUIET)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        open_model(str(folder), QUIET)


def test_a_missing_shard_is_named(saved: Saver, tmp_path: Path) -> None:
    folder = copy_of(saved(LLAMA, shard_size="10KB"), tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"without {re.escape(shard.name)}"):
        open_model(str(folder), QUIET)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../a"}}'])
def test_a_damaged_index_is_named(index: str, saved: Saver, tmp_path: Path) -> None:
    folder = copy_of(saved(LLAMA, shard_size="10KB"), tmp_path)
    (folder / INDEX_NAME).write_text(index)
    with pytest.raises(ValueError, match=re.escape(INDEX_NAME)):
        open_model(str(folder), QUIET)


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, 5000, -1])
def test_a_file_cut_short_is_named(num_bytes: int, saved: Saver, tmp_path: Path) -> None:
    path = copy_of(saved(LLAMA), tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged, cut short or not safetensors"):
        open_model(str(tmp_path), QUIET)


def test_the_host_holds_little_more_than_the_result(saved: Saver) -> None:
    """bfloat16 to float32, where a whole copy on the way would show: at most two layers beside the result."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 12, "vocab_size": 128}
    source = open_model(str(saved(LLAMA, dtype="bfloat16", **sizes)), QUIET)
    load_params(source)  # whatever is allocated once
    tracemalloc.start()
    params = load_params(source)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    layer_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]["0"]))
    assert result_bytes > 12 * layer_bytes
    assert peak_bytes < result_bytes + 2 * layer_bytes


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is mapped")
def test_no_page_of_a_file_stays_in_memory(saved: Saver) -> None:
    """However many files a checkpoint has, the host need not hold more than a layer of it."""
    gc.collect()  # what earlier tests have mapped and left in cycles
    folder = saved(LLAMA, shard_size="10KB")
    for path in (folder, default_model_path()):
        source = open_model(str(path), QUIET)
        assert source.checkpoint is not None
        source.checkpoint.read_rows("model.embed_tokens.weight", 0, 40)
        assert mapped_kib(path) > 0
        load_params(source)
        assert mapped_kib(path) == 0


CONFIG = ModelConfig(LLAMA, 80, 96, 128, 2, 4, 2, 16, 128)


def zeros(dtype: str) -> dict:
    abstract = abstract_params(CONFIG, "float32")
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, dtype)), abstract)


def test_params_in_memory_pass_as_they_are() -> None:
    check_params(CONFIG, zeros("float16"))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("norm.weight", None, r"norm\.weight \[96\] is missing"),
        ("norm.bias", jnp.zeros(3), r"norm\.bias \[3\] is extra"),
        ("norm.weight", jnp.zeros(3), r"norm\.weight is \[3\], expected \[96\]"),
        ("norm.weight", jnp.zeros(96, "float16"), r"norm\.weight is float16"),
        ("norm.weight", np.zeros(96, np.float32), r"jax\.Array.*norm\.weight is .*ndarray"),
        ("layers.1.mlp.down_proj.weight", None, r"layers\.1\.mlp\.down_proj\.weight \[96, 128\] is missing"),
    ],
)
def test_misfits_in_memory_are_named(path: str, value: object, words: str) -> None:
    flat = flatten(zeros("float32"))
    flat = {key: leaf for key, leaf in (flat | {path: value}).items() if leaf is not None}
    with pytest.raises(ValueError, match=words):
        check_params(CONFIG, unflatten(flat))


def test_integer_params_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype of params"):
        check_params(CONFIG, zeros("int32"))


def test_flatten_and_unflatten_are_inverse() -> None:
    tree = {"a": {"0": {"w": 1}, "10": {"w": 2}}, "b": 3}
    assert flatten(tree) == {"a.0.w": 1, "a.10.w": 2, "b": 3}
    assert unflatten(flatten(tree)) == tree
