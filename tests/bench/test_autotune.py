"""What scripts/autotune.py times and writes; the timing itself wants a GPU."""

import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from pallas_kernels.paged_attention import tuned
from pallas_kernels.paged_attention.shapes import HeadLayout
from scripts import autotune


def entry(kernel: str, num_rows: int, us: float) -> tuned.Entry:
    return tuned.Entry(kernel, 32, 8, 128, "bfloat16", num_rows, {"num_splits": 1}, us)


def test_one_row_order_is_that_of_all_batches() -> None:
    """A configuration is compiled once, with the order of the first batch's rows."""
    batches = autotune.batches_of(5, HeadLayout(2, 1, 64))
    lengths = [np.asarray(batch[4]) for batch in batches]
    assert len({tuple(each.tolist()) for each in lengths}) == 4
    assert all((np.argsort(-each, kind="stable") == np.arange(5)).all() for each in lengths)


def test_entries_that_were_not_found_anew_stay(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is interrupted, too."""
    path = tmp_path / "device.json"
    tuned.write(path, "device", "then", [entry("mosaic_decode", 1, 5.0), entry("mosaic_decode", 2, 5.0)])

    def entries(work: list[tuple[HeadLayout, int]]) -> Iterator[tuned.Entry]:
        assert work == [(HeadLayout(32, 8, 128), 1), (HeadLayout(32, 8, 128), 2)]
        yield entry("mosaic_decode", 1, 3.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(autotune, "entries", entries)
    monkeypatch.setattr("sys.argv", ["autotune.py", "--heads=32x8x128", "--rows=1,2", f"--out={path}"])
    with pytest.raises(KeyboardInterrupt):
        autotune.main()
    assert [(found.num_rows, found.us) for found in tuned.read(path)] == [(1, 3.0), (2, 5.0)]


def test_tiles_that_are_slower_anywhere_do_not_replace_decode_configs() -> None:
    timed = {"default": [10.0, 10.0], "faster": [9.0, 10.05], "fastest, but not everywhere": [2.0, 10.2]}
    assert autotune.choice(timed, "default") == "faster"


def test_a_gain_that_may_be_noise_changes_nothing() -> None:
    assert autotune.choice({"default": [10.0, 10.0], "faster": [9.8, 9.9]}, "default") == "default"


def test_where_decode_configs_tiles_do_not_compile_the_fastest_are_taken() -> None:
    assert autotune.choice({"a": [10.0, 10.0], "b": [9.0, 9.0]}, "default") == "b"


def test_where_there_is_no_gpu_nothing_is_tried() -> None:
    """Every kernel would fail to compile, shape after shape, and no file be written in the end."""
    with pytest.raises(ValueError, match=r"^device is 'cpu'; allowed: an NVIDIA GPU"):
        next(autotune.entries([(HeadLayout(2, 1, 64), 1)]))
