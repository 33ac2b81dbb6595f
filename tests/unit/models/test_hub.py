"""Models by their name on the hub: against a server on the loopback that answers as the hub does, then without it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paxpage.models.hub import download, is_repository
from tests.unit.models.conftest import Saver

NAME = "someone/tiny-model"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
TOKEN = "hf_of_the_test"
UNWANTED = ("pytorch_model.bin", "consolidated.safetensors", "original/config.json", "README.md")


class Hub(ThreadingHTTPServer):
    """One repository with two revisions; v2 ties its embeddings. Keeps a log of requests."""

    def __init__(self, folders: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {commit: self._files(folders[revision]) for revision, commit in COMMITS.items()}
        self.log: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @staticmethod
    def _files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()} | dict.fromkeys(UNWANTED, b"unwanted")


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, is_head: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.log.append(f"{self.command} {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo"}, is_head)
        api, file = f"/api/models/{NAME}/", f"/{NAME}/resolve/"
        if path.startswith(api):
            return self._send_listing(path.removeprefix(api), is_head)
        revision, _, name = path.removeprefix(file).partition("/")
        commit = COMMITS.get(revision, revision)
        if not path.startswith(file) or name not in self.server.files.get(commit, {}):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, is_head)
        content = self.server.files[commit][name]
        return self._send(200, content, {"ETag": f'"{commit[:8]}-{name}"', "X-Repo-Commit": commit}, is_head)

    def _send_listing(self, path: str, is_head: bool) -> None:
        kind, revision = path.split("/")[:2]
        commit = COMMITS.get(revision, revision)
        if commit not in self.server.files:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, is_head)
        files = self.server.files[commit]
        listing: Any = {"id": NAME, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        if kind == "tree":
            listing = [{"type": "file", "path": p, "size": len(c), "oid": p} for p, c in files.items()]
        return self._send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"}, is_head)

    def _send(self, status: int, content: bytes, headers: dict[str, str], is_head: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if not is_head:
            self.wfile.write(content)


@pytest.fixture
def hub(saved: Saver) -> Iterator[Hub]:
    folders = {"main": saved("LlamaForCausalLM"), "v2": saved("LlamaForCausalLM", tie_word_embeddings=True)}
    with Hub(folders) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


# huggingface_hub reads its environment when it is imported, so each case is a process of its own
LOAD = """
import json, sys
from paxpage.models.loading import LoadOptions, load_model
for options in json.loads(sys.argv[2]):
    try:
        loaded = load_model(sys.argv[1], LoadOptions(show_progress=False, **options))
        print(json.dumps({"name": loaded.name, "is_tied": loaded.config.is_tied, "keys": sorted(loaded.params)}))
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
"""


DOWNLOAD = """
import json, sys
from paxpage.models.hub import download
for options in json.loads(sys.argv[2]):
    try:
        folder = download(sys.argv[1], None, None, **options)
        print(json.dumps({"files": sorted(path.name for path in folder.iterdir())}))
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
"""


def run(script: str, cache: Path, endpoint: str, cases: list[dict[str, Any]], **variables: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "HF_HOME": str(cache), "HF_ENDPOINT": endpoint, **variables}
    command = [sys.executable, "-c", script, NAME, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr  # no progress bar
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_by_name_then_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    token = {"token": TOKEN}
    results = run(LOAD, tmp_path, hub.endpoint, [{}, token, {**token, "revision": "v2"}, {**token, "revision": "v9"}])
    refused, main, tied, unknown = results
    assert NAME in refused["error"] and "401" in refused["error"]
    assert main == {"name": NAME, "is_tied": False, "keys": ["embed_tokens", "layers", "lm_head", "norm"]}
    assert tied == {"name": NAME, "is_tied": True, "keys": ["embed_tokens", "layers", "norm"]}
    assert "v9" in unknown["error"]
    fetched = " ".join(entry for entry in hub.log if entry.startswith("GET"))
    assert "model.safetensors" in fetched and "config.json" in fetched
    assert not any(name in fetched for name in UNWANTED)

    hub.log.clear()
    cases = [{}, {"revision": "v2"}, {"revision": "v9"}]
    offline = run(LOAD, tmp_path, hub.endpoint, cases, HF_HUB_OFFLINE="1")
    assert offline[:2] == [main, tied] and "v9" in offline[2]["error"]
    assert hub.log == []


def test_the_token_of_the_environment_and_configs_alone(hub: Hub, tmp_path: Path) -> None:
    cases = [{"has_weights": False, "show_progress": False}, {"show_progress": False}]
    configs, whole = run(DOWNLOAD, tmp_path, hub.endpoint, cases, HF_TOKEN=TOKEN)
    assert configs["files"] == ["config.json", "generation_config.json"]
    assert whole["files"] == ["config.json", "generation_config.json", "model.safetensors"]


def test_a_hub_that_is_not_there_is_a_value_error(tmp_path: Path) -> None:
    (result,) = run(DOWNLOAD, tmp_path, "http://127.0.0.1:9", [{}])
    assert NAME in result["error"] and "no such folder here" in result["error"]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("a/b", True),
        ("a-b.c/d_e.F", True),
        ("a", False),
        ("a/b/c", False),
        ("/a", False),
        ("./a", True),
        ("a b/c", False),
    ],
)
def test_names(name: str, is_one: bool) -> None:
    assert is_repository(name) == is_one


def test_an_impossible_name_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="a--b"):
        download("a--b/..", None, None)
