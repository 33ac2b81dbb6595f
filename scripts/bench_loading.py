"""How fast weights are loaded, and how much host memory it takes: safetensors, Orbax and GGUF beside the disk's rate.

python scripts/bench_loading.py [--model llama1b] [--folder FOLDER]

Writes random weights of the model's shape as safetensors (two shards) and Orbax into a temporary folder, takes the
embedded model's GGUF file for the third, and loads each in a process of its own, its files put out of the page cache
before. The disk's rate is that of reading the same files from end to end. Peak is the process's memory at its highest,
less what it held before; on a CPU the params themselves are part of it. On a GPU they are not.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from paxpage.bench.models import CONFIGS
from paxpage.models import checkpoint, embedded, hf_config, orbax_files
from paxpage.models.loading import LoadOptions, load_params, open_model
from paxpage.models.registry import abstract_params, num_bytes

READ_BYTES = 1 << 24
LINE = (
    "{format:12} {file_gb:6.2f} GB, {params_gb:.2f} in memory: {s:6.2f} s, {gb_s:.2f} GB/s of the file "
    "(disk: {disk_gb_s:.2f}), peak {peak_gb:.2f} GB"
)


def write_safetensors(folder: pathlib.Path, raw: dict[str, Any]) -> None:
    """Two files and their index, random weights."""
    config = hf_config.from_hf(raw)
    shapes = {
        source.name: source.shape
        for path, leaf in checkpoint.flatten(abstract_params(config, "bfloat16")).items()
        for source in checkpoint.sources(path, leaf.shape, config)
    }
    rng, names = np.random.default_rng(0), list(shapes)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        data = {name: rng.standard_normal(shapes[name], np.float32).astype(ml_dtypes.bfloat16) for name in part}
        save_file(data, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(raw))


def files_of(model: pathlib.Path) -> list[pathlib.Path]:
    """All files of a checkpoint."""
    return [model] if model.is_file() else [path for path in model.rglob("*") if path.is_file()]


def forget(files: list[pathlib.Path]) -> None:
    """Puts files out of the page cache, where the operating system can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_seconds(files: list[pathlib.Path]) -> float:
    """Time to read them from end to end."""
    forget(files)
    start = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass
    return time.perf_counter() - start


def peak_bytes(*, is_reset: bool = False) -> int:
    """The most memory that this process has held, files that it maps included; Linux only. is_reset: from now on."""
    if is_reset:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def measure(model: pathlib.Path, name: str) -> dict[str, Any]:
    """Loads a model in this process; see LINE."""
    files = files_of(model)
    file_bytes = sum(path.stat().st_size for path in files)
    disk_s = disk_seconds(files)
    source = open_model(str(model), LoadOptions(dtype="bfloat16"))
    jax.device_put(0).block_until_ready()
    forget(files)
    before = peak_bytes(is_reset=True)
    start = time.perf_counter()
    params = jax.block_until_ready(load_params(source))
    seconds = time.perf_counter() - start
    peak = peak_bytes() - before
    rates = {"gb_s": file_bytes / seconds / 1e9, "disk_gb_s": file_bytes / disk_s / 1e9}
    sizes = {"file_gb": file_bytes / 1e9, "params_gb": num_bytes(params) / 1e9, "peak_gb": peak / 1e9}
    return {"format": name, "s": seconds} | sizes | rates


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama1b", choices=sorted(CONFIGS))
    parser.add_argument("--folder", default=None, help="where to write; the disk to measure")
    parser.add_argument("--only", default=None, nargs=2, metavar=("FORMAT", "PATH"), help="load one, print it as JSON")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(pathlib.Path(args.only[1]), args.only[0])))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = pathlib.Path(folder)
        models = {
            "safetensors": root / "hf",
            "orbax": root / "orbax",
            "gguf": pathlib.Path(embedded.default_model_path()),
        }
        models["safetensors"].mkdir()
        with tqdm(total=2, desc="writing checkpoints", unit="checkpoint") as bar:
            write_safetensors(models["safetensors"], CONFIGS[args.model])
            bar.update()
            source = open_model(str(models["safetensors"]), LoadOptions(dtype="bfloat16", show_progress=False))
            orbax_files.save_params(models["orbax"], source.config, load_params(source))
            bar.update()
        for name, path in models.items():
            command = [sys.executable, __file__, "--only", name, str(path)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            print(LINE.format(**json.loads(done.stdout.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
