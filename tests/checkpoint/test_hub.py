"""Downloads with the real hub client from a local hub: files fetched, pinned and cached."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_config import DRAFTER, TARGET

COMMIT, OLDER = "a" * 40, "b" * 40
WEIGHTS = bytes(range(256)) * 400
WANTED = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
}  # fmt: skip


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Hub(ThreadingHTTPServer):
    """A hub. Every repository holds a Qwen3-4B target, or a drafter for it if its name contains DFlash."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.served: list[tuple[str, str, str]] = []  # repository, commit and file of each GET request
        self.tokens: set[str | None] = set()
        self.paths: set[str] = set()
        self.agents: set[str | None] = set()

    def files(self, repo: str) -> dict[str, bytes]:
        config = DRAFTER if "DFlash" in repo else TARGET
        if "Toy" in repo:
            config = config | {"architectures": ["ToyForCausalLM"], "model_type": "toy"}
        files = dict.fromkeys(WANTED, b"{}") | {"model.safetensors": WEIGHTS}
        if "Bare" in repo:
            del files["generation_config.json"], files["chat_template.jinja"]
        if "Sharded" in repo:
            weight_map = {str(i): shard for i, shard in enumerate(SHARDS)}
            del files["model.safetensors"]
            files |= dict.fromkeys(SHARDS, WEIGHTS)
            files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
        if "Mask" in repo:
            files["mask_embedding.pt"] = b"mask"
        files["config.json"] = json.dumps(config).encode()
        unwanted = (
            "original/model.safetensors", "consolidated.safetensors", "metal/model.bin", "onnx/config.json",
            "pytorch_model.bin", "README.md",
        )  # fmt: skip
        return files | dict.fromkeys(unwanted, b"unwanted")


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        self.server.paths.add(self.path)
        self.server.agents.add(self.headers.get("User-Agent"))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "api":  # /api/models/ORG/NAME/{revision,tree}/REVISION
            self.describe("/".join(parts[2:4]), parts[4] if len(parts) > 4 else "revision", parts[-1])
        elif parts[3:4] and parts[-1] in (files := self.server.files("/".join(parts[:2]))):
            self.file("/".join(parts[:2]), parts[3], parts[-1], files[parts[-1]])
        else:
            missing = {
                "X-Error-Code": "EntryNotFound",
                "X-Repo-Commit": parts[3] if len(parts) > 3 else COMMIT,
            }
            self.answer(404, b"", missing)

    def describe(self, repo: str, what: str, revision: str) -> None:
        commit = {"v1": OLDER, OLDER: OLDER}.get(revision, COMMIT)
        files = self.server.files(repo)
        tree = [
            {"type": "file", "path": n, "size": len(d), "oid": n.encode().hex()} for n, d in files.items()
        ]
        info = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        self.answer(200, json.dumps(tree if what == "tree" else info).encode())

    def file(self, repo: str, commit: str, name: str, data: bytes) -> None:
        span = self.headers.get("Range")
        start = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
        headers = {"ETag": f'"{name.encode().hex()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.command == "GET":
            self.server.served.append((repo, commit, name))
        if span:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206 if span else 200, data[start:], headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield hub
    hub.shutdown()
    hub.server_close()


def resolve(
    home: Path, endpoint: str, *arguments: str | None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run find_sources(*arguments, "copy") in its own process, because the client reads its environment on import."""
    program = (
        "import json, sys\n"
        "from dflash_trt.building.sources import find_sources\n"
        "from dflash_trt.errors import DFlashError\n"
        "try:\n"
        f"    print(json.dumps([[str(s.directory), s.repo, s.revision] for s in find_sources(*{arguments}, 'copy')]))\n"
        "except DFlashError as error:\n"
        "    sys.exit(f'ERROR {error}')\n"
    )
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=inherited
        | {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "PYTHONPATH": os.getcwd(),
        }
        | environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("ERROR ")]


def test_downloads(hub: Hub, tmp_path: Path) -> None:
    """A known target, pinned, with its drafter; then the same without a network."""
    url, drafter = f"http://127.0.0.1:{hub.server_port}", "z-lab/Qwen3-4B-DFlash-b16"
    done = resolve(tmp_path, url, "qwen3-4b@v1", None, HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    target_source, drafter_source = json.loads(done.stdout)
    assert target_source[1:] == ["Qwen/Qwen3-4B", OLDER]
    assert drafter_source[1:] == [drafter, COMMIT]
    for directory, _, _ in (target_source, drafter_source):
        assert {path.name for path in Path(directory).iterdir()} == WANTED
        assert (Path(directory) / "model.safetensors").read_bytes() == WEIGHTS
    # Each file once, and of the commit that was found or named first. Nothing from original/ or metal/.
    assert sorted(hub.served) == sorted(
        [("Qwen/Qwen3-4B", OLDER, name) for name in WANTED] + [(drafter, COMMIT, name) for name in WANTED]
    )
    assert "Bearer hf_secret" in hub.tokens
    assert "it/s" in done.stderr or "B/s" in done.stderr or "%" in done.stderr  # a progress bar

    hub.served.clear()
    again = resolve(tmp_path, url, "qwen3-4b@v1", None, HF_HUB_OFFLINE="1")
    assert json.loads(again.stdout) == [target_source, drafter_source], again.stderr
    assert hub.served == []


def test_a_file_that_a_cache_filled_by_hand_lacks_is_named(hub: Hub, tmp_path: Path) -> None:
    def warnings(**environment: str) -> list[str]:
        url = f"http://127.0.0.1:{hub.server_port}"
        done = resolve(tmp_path, url, "org/Bare", "z-lab/Qwen3-4B-DFlash-b16", **environment)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stderr.splitlines() if "the cache has no" in line]

    assert warnings() == []  # the hub says that it has no such files, which the cache keeps
    target, drafter = (
        tmp_path / "hub" / f"models--{name}" for name in ("org--Bare", "z-lab--Qwen3-4B-DFlash-b16")
    )
    (target / ".no_exist" / COMMIT / "generation_config.json").unlink()
    (ends,) = warnings(HF_HUB_OFFLINE="1")
    assert ends.startswith("org/Bare: the cache has no generation_config.json, and the hub was not asked")
    assert "would change the tokens that end an answer" in ends
    assert ends.endswith(f"hf download org/Bare generation_config.json --revision {COMMIT}")
    for repository in (target, drafter):
        shutil.rmtree(repository / ".no_exist")
    (target / "snapshots" / COMMIT / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert [line.split()[5].strip(",") for line in warnings(HF_HUB_OFFLINE="1")] == [
        "generation_config.json", "mask_embedding.pt", "embeddings.pt",
    ]  # fmt: skip


def test_the_files_of_the_index_are_fetched(hub: Hub, tmp_path: Path) -> None:
    """Mistral's repositories have all weights a second time, as consolidated.safetensors."""
    url = f"http://127.0.0.1:{hub.server_port}"
    done = resolve(tmp_path, url, "org/Sharded", "z-lab/Qwen3-4B-DFlash-b16")
    assert done.returncode == 0, done.stderr
    found = {path.name for path in Path(json.loads(done.stdout)[0][0]).iterdir()}
    assert found == {*WANTED, *SHARDS, "model.safetensors.index.json"} - {"model.safetensors"}


def test_a_side_file_that_changes_a_drafter_is_refused(hub: Hub, tmp_path: Path) -> None:
    done = resolve(tmp_path, f"http://127.0.0.1:{hub.server_port}", "qwen3-4b", "org/Mask-DFlash")
    assert errors(done)[0].startswith("ERROR org/Mask-DFlash: mask_embedding.pt changes what this drafter")
    assert ("org/Mask-DFlash", COMMIT, "model.safetensors") not in hub.served


def test_of_an_unknown_family_nothing_but_configurations_is_fetched(hub: Hub, tmp_path: Path) -> None:
    done = resolve(tmp_path, f"http://127.0.0.1:{hub.server_port}", "org/Toy", None)
    assert "ToyForCausalLM" in errors(done)[0]
    assert {name for _, _, name in hub.served} == {"config.json", "generation_config.json"}


def test_the_hub_learns_no_more_than_a_download_needs(hub: Hub, tmp_path: Path) -> None:
    def download(home: Path, **environment: str) -> tuple[set[str], str]:
        hub.paths.clear()
        hub.agents.clear()
        home.mkdir()
        done = resolve(home, f"http://127.0.0.1:{hub.server_port}", "qwen3-4b", None, **environment)
        assert done.returncode == 0, done.stderr
        about = {path for path in hub.paths if not re.match(r"(/api/models)?/(Qwen|z-lab)/Qwen3-4B", path)}
        return about, " ".join(sorted(filter(None, hub.agents)))

    paths, agents = download(tmp_path / "default")
    assert paths == set()
    assert re.fullmatch(r"unknown/None; hf_hub/[\d.]+; python/[\d.]+", agents), agents
    told = download(tmp_path / "on", HF_HUB_DISABLE_TELEMETRY="0")
    assert told != (paths, agents)  # a value of the user's stays


def test_no_hub_is_one_line(tmp_path: Path) -> None:
    done = resolve(tmp_path, "http://127.0.0.1:9", "qwen3-4b", None)
    assert errors(done) == done.stderr.splitlines()[-1:]
    message = errors(done)[0]
    assert message.startswith("ERROR Qwen/Qwen3-4B: cannot be fetched from the Hugging Face hub (")
    assert "a local directory with config.json, the safetensors files, tokenizer.json does as well" in message
