"""A known pair by its name: built into a cache once, and what a Python user meets at first."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from dflash_trt import LLM, AsyncLLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.engines.base import Engine
from dflash_trt.errors import BundleError
from dflash_trt.formats.precision import Precision


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(cache))


def test_a_pair_is_built_at_first_use_and_found_afterwards(cache, capsys) -> None:
    llm = LLM("tiny", max_batch_size=1)
    first = capsys.readouterr()
    place = cache / "bundles" / "tiny"
    assert llm.bundle.path == place
    assert first.out == ""
    assert f"building tiny into {place} (once)" in first.err
    assert "copy weights ..." in first.err
    assert repr(llm) == f"LLM({str(place)!r}, onnxruntime, block 8, up to 1024 tokens)"
    built = (place / "manifest.json").stat()
    again = LLM("Tiny", max_batch_size=1)
    assert capsys.readouterr().err == ""
    assert (place / "manifest.json").stat() == built
    answer = again.generate("12 + 7", SamplingParams(max_tokens=8, ignore_eos=True))
    assert repr(answer).startswith(f"Completion({answer.text!r}, 'length', 8 tokens, ")
    llm.close()
    assert repr(llm).endswith(", closed)")


def test_nothing_is_built_for_an_engine_without_its_packages(cache, capsys, monkeypatch) -> None:
    """A large pair would be downloaded first."""
    monkeypatch.setattr(Engine, "lacking", lambda self: list(self.needed))
    with pytest.raises(BundleError, match=r"--engine torch .*pip install"):
        LLM("tiny", engine="torch")
    assert "building" not in capsys.readouterr().err
    assert not [*cache.glob("bundles/tiny-torch*")]


def test_a_bundle_with_another_drafter_than_the_packages_is_built_again(cache, capsys) -> None:
    LLM("tiny", max_batch_size=1)
    place = cache / "bundles" / "tiny"
    whole, weights = (
        (place / "manifest.json").read_text(),
        place / "weights" / "drafter" / "model.safetensors",
    )
    weights.write_bytes(weights.read_bytes()[:-1])
    capsys.readouterr()
    LLM("tiny", max_batch_size=1)
    assert "building tiny" in capsys.readouterr().err
    assert (place / "manifest.json").read_text() == whole


def test_a_drafter_that_the_build_quantizes_is_built_once(cache, capsys, monkeypatch) -> None:
    """As that of smollm2-135m, by default: the bundle has other files than the package."""
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(cache / "quantized"))
    quantizing = partial(build, precision=Precision(drafter="int8"))
    monkeypatch.setattr("dflash_trt.building.build.build", quantizing)
    LLM("tiny", max_batch_size=1)
    assert "building tiny" in capsys.readouterr().err
    LLM("tiny", max_batch_size=1)
    assert capsys.readouterr().err == ""


def test_opening_a_bundle_imports_nothing_that_builds_one() -> None:
    """Which takes as long as the first answer."""
    LLM("tiny", max_batch_size=1)
    code = """if True:
        import sys
        from dflash_trt import LLM, SamplingParams
        llm = LLM("tiny", max_batch_size=1)
        llm.generate("12 + 7", SamplingParams(max_tokens=4))
        print({"onnx_ir", "sympy", "gguf", "dflash_trt.building.build"} & set(sys.modules))
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_a_path_is_never_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match="tiny: "):
        LLM(Path("tiny"))
    (tmp_path / "tiny").mkdir()
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        LLM("tiny")


def test_a_name_that_nothing_has_names_the_nearest(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLM("tiny", max_batch_size=1)
    with pytest.raises(
        BundleError,
        match=r"tinny: neither the directory of a bundle nor the name of a pair \(did you mean 'tiny'\?\)",
    ):
        LLM("tinny")
    place = cache / "bundles" / "tiny"
    with pytest.raises(BundleError, match=rf"did you mean '{place}'"):
        LLM(place.with_name("tinyy"))


def test_without_with_the_memory_is_freed_with_the_object() -> None:
    llm = LLM("tiny", max_batch_size=1)
    free = llm._free
    assert free.alive
    del llm
    gc.collect()
    assert not free.alive


def test_a_notebook_without_widgets_shows_lines(cache, capsys, monkeypatch) -> None:
    """Rich's bars would be empty there, below a warning."""
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(cache / "notebook"))
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # as if it were not installed
    LLM("tiny", max_batch_size=1)
    assert "copy weights ..." in capsys.readouterr().err


def test_an_event_loop_may_be_running_as_in_a_notebook() -> None:
    """A cell runs within a loop. The synchronous LLM works there, and an AsyncLLM outlives the loop of a cell."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    async def cell() -> list[int]:
        return LLM("tiny", max_batch_size=1).generate("12 + 7", params).token_ids

    expected = asyncio.run(cell())
    shared: list[AsyncLLM] = []

    async def one() -> list[int]:
        if not shared:
            shared.append(AsyncLLM("tiny", max_batch_size=1))
        assert repr(shared[0]).endswith(", 0 requests)")
        return (await shared[0].generate("12 + 7", params)).token_ids

    assert asyncio.run(one()) == expected
    assert asyncio.run(one()) == expected
    asyncio.run(shared[0].close())
    assert repr(shared[0]).endswith(", closed)")


def test_fields_of_sampling_params_given_to_a_call_are_answered_with_how_to_give_them() -> None:
    with LLM("tiny", max_batch_size=1) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(TypeError, match=r"SamplingParams\(max_tokens=5\)"):
                call("x = [", max_tokens=5)
        for chat in (llm.chat, llm.stream_chat):
            with pytest.raises(TypeError, match=r"temperature=0.5 belongs in .*stop='\\n'\)"):
                chat([{"role": "user", "content": "x"}], temperature=0.5, stop="\n")
        with pytest.raises(TypeError, match="unexpected keyword argument 'most_tokens'"):
            llm.generate("x = [", most_tokens=5)

    async def ask() -> None:
        async with AsyncLLM("tiny", max_batch_size=1) as llm:
            with pytest.raises(TypeError, match=r"SamplingParams\(max_tokens=5, seed=1\)"):
                await llm.generate("x = [", max_tokens=5, seed=1)
            with pytest.raises(TypeError, match=r"SamplingParams\(top_p=0\.5\)"):
                await anext(llm.stream("x = [", top_p=0.5))

    asyncio.run(ask())
