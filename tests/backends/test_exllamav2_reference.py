"""Real weights behind ExLlamaV2's own generator, compared with the same weights computed plainly."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import torch

from engine_service.backends.base import Constraint, ConstraintKind, ModelError
from engine_service.backends.exllamav2.backend import ExLlamaV2Backend
from engine_service.backends.exllamav2.cpu_reference import ReferenceModel
from engine_service.backends.exllamav2.gguf import GgufFile
from engine_service.backends.exllamav2.provision import Options, open_backend
from engine_service.backends.llama_cpp.backend import LlamaCppBackend
from engine_service.backends.llama_cpp.provision import default_model_path
from engine_service.scheduling.model import PreemptionMode, RequestId
from tests.backends.driver import GREEDY, Driver
from tests.cli.process import TOKEN, command

NUM_TOKENS = 64
REFERENCE = Options(device="cpu-reference")


def rid(name: str) -> RequestId:
    return RequestId(name)


@pytest.fixture(scope="module")
def reference_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExLlamaV2Backend]:
    backend = open_backend(
        None,
        options=REFERENCE,
        cache_dir=tmp_path_factory.mktemp("reference"),
        context_tokens=2048,
        max_sequences=4,
        threads=1,
        progress=lambda _: None,
    )
    yield backend
    backend.close()


@pytest.fixture
def reference(reference_session: ExLlamaV2Backend) -> Iterator[ExLlamaV2Backend]:
    yield reference_session
    for request_id in reference_session.request_ids:
        reference_session.release(request_id)
    reference_session.check()
    assert reference_session.num_pages_held == 0
    reference_session.drop_cache()


def plainly(model: ReferenceModel, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Return the greedy output, computed without a page table: the whole sequence in one contiguous cache."""
    config, length = model.config, len(prompt) + num_tokens
    shape = (1, length, config.num_key_value_heads, config.head_dim)
    layers = range(config.num_hidden_layers)
    cache = SimpleNamespace(
        key_states=[torch.zeros(shape, dtype=torch.half) for _ in layers],
        value_states=[torch.zeros(shape, dtype=torch.half) for _ in layers],
    )
    ids, stored = list(prompt), 0
    with torch.inference_mode():
        while len(ids) < length:
            fresh = torch.tensor([ids[stored:]])
            logits = model.forward_chunk(fresh, SimpleNamespace(past_len=stored), cache)["logits"]
            stored = len(ids)
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_text_is_that_of_the_plainly_computed_model(reference: ExLlamaV2Backend) -> None:
    driver = Driver(reference)
    order = driver.order("sky", "Explain why the sky is blue in simple words.", NUM_TOKENS, ignore_eos=True)
    output = driver.run(order, chunk=17)
    assert output.token_ids == plainly(reference._loaded.model, order.prompt_ids, NUM_TOKENS)
    assert "sky" in output.text


def test_company_and_preemption_do_not_change_the_text(reference: ExLlamaV2Backend) -> None:
    driver = Driver(reference)
    questions = {"fruit": "List five fruits and their colours.", "poem": "Write a short poem about rain."}
    for name, question in questions.items():
        driver.admit(driver.order(name, question, 24, ignore_eos=True))
        driver.prefill(name)
    for _ in range(6):
        driver.step(decodes=list(questions))
    reference.preempt(rid("poem"), PreemptionMode.RELEASE)
    driver.step(decodes=["fruit"])
    driver.resume(rid("poem"))
    driver.finish(*questions)
    for name in questions:
        prompt = driver._orders[rid(name)].prompt_ids
        assert driver.outputs[rid(name)].token_ids == plainly(reference._loaded.model, prompt, 24)


def test_a_schema_forces_real_text(reference: ExLlamaV2Backend) -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        }
    )
    driver = Driver(reference)
    constraint = Constraint(kind=ConstraintKind.JSON_SCHEMA, text=schema)
    output = driver.run(driver.order("json", "Is the lamp on?", 24, constraint=constraint))
    assert output.text in ('{"on":true}', '{"on":false}')


def test_the_tokenizer_is_llama_cpps(reference: ExLlamaV2Backend, llama_cpp: LlamaCppBackend) -> None:
    texts = [
        "Turn on the lamp in the kitchen, please.",
        "Grüße, Ἀθῆνα, 日本語 💡🙂👩‍👩‍👧",
        "1234567 tokens   and\n\n\tindented  code(){ return 'x' }",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ]
    for text in texts:
        for parse_special in (False, True):
            ours = reference.tokenizer.encode(text, parse_special=parse_special)
            assert ours == llama_cpp.tokenizer.encode(text, parse_special=parse_special)
            assert reference.tokenizer.decode(ours) == llama_cpp.tokenizer.decode(ours)


def test_the_first_words_are_llama_cpps(reference: ExLlamaV2Backend, llama_cpp: LlamaCppBackend) -> None:
    """llama.cpp rounds activations to 8 bits, so only the beginning is compared."""
    texts = []
    for backend in (reference, llama_cpp):
        driver = Driver(backend)
        order = driver.order("capital", "What is the capital of France?", 12, sampling=GREEDY)
        texts.append(driver.run(order).text)
    assert texts[0] == texts[1]


# -- as a program --------------------------------------------------------------------------------------


async def test_the_command_serves_real_text_through_the_real_generator(tmp_path: Path) -> None:
    serve = ("serve", "--backend", "exllamav2", "--device", "cpu-reference", "--port", "0")
    async with command(tmp_path, *serve, "--context-tokens", "1024", "--max-sequences", "2") as process:
        url = await process.ready()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(url, headers=headers) as client:
            async with client.get("/v1/engine") as reply:
                about = await reply.json()
            question = {"role": "user", "content": "What is the capital of France?"}
            asked = {"messages": [question], "max_tokens": 8, "temperature": 0}
            async with client.post("/v1/chat/completions", json=asked) as reply:
                answer = await reply.json()
        assert (about["backend"], about["max_sequences"]) == ("exllamav2", 2)
        assert "capital of France is" in answer["choices"][0]["message"]["content"]
        process.signal(signal.SIGTERM)
        code, _, errors = await process.end()
    assert code == 0, errors
    assert "4 pages of 256 tokens, 2 requests at once" in errors
    assert "Traceback" not in errors


# -- what cannot be ------------------------------------------------------------------------------------


def opened(path: Path | None, tmp_path: Path, **options: object) -> ExLlamaV2Backend:
    return open_backend(
        path,
        options=Options(**options),  # type: ignore[arg-type]
        cache_dir=tmp_path / "cache",
        context_tokens=1024,
        max_sequences=2,
        progress=lambda _: None,
    )


def test_a_machine_without_a_gpu_is_named(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=r"torch .* was built without CUDA|finds no usable NVIDIA GPU"):
        opened(tmp_path, tmp_path)


def test_what_is_missing_in_a_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path must name a folder"):
        opened(None, tmp_path)
    with pytest.raises(ModelError, match="this is not a folder"):
        opened(tmp_path / "none", tmp_path)
    with pytest.raises(ModelError, match=r"there is no config\.json"):
        opened(tmp_path, tmp_path)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=r"there are no \*\.safetensors"):
        opened(tmp_path, tmp_path)
    header = b'{"w":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}}'
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(
        ModelError, match=f"cut short: {12 + len(header)} bytes instead of {16 + len(header)}"
    ):
        opened(tmp_path, tmp_path)
    weights.write_bytes(b"12345678not json")
    with pytest.raises(ModelError, match="the header is damaged"):
        opened(tmp_path, tmp_path)


def test_a_truncated_gguf_is_named(tmp_path: Path) -> None:
    data = default_model_path().read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[:50_000])
    with pytest.raises(ModelError, match=r"cut\.gguf: the header is damaged or cut short"):
        opened(path, tmp_path, device="cpu-reference")
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="is cut short; the file has"):
        opened(path, tmp_path, device="cpu-reference")
    path.write_bytes(b"something else entirely")
    with pytest.raises(ModelError, match="not a GGUF file"):
        opened(path, tmp_path, device="cpu-reference")
    with pytest.raises(ModelError, match="cannot be read"):
        opened(tmp_path / "none.gguf", tmp_path, device="cpu-reference")


def test_wrong_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chunk_tokens must be a multiple of 256, at least 256, not 100"):
        opened(None, tmp_path, device="cpu-reference", chunk_tokens=100)
    with pytest.raises(ModelError, match="context_tokens must be at least 256"):
        open_backend(
            None,
            options=REFERENCE,
            cache_dir=tmp_path,
            context_tokens=200,
            max_sequences=1,
            progress=lambda _: None,
        )


def test_quantised_blocks_are_read_as_ggml_writes_them(tmp_path: Path) -> None:
    """The token embedding (Q8_0) and a projection (Q4_1): values within what their scales allow."""
    file = GgufFile(default_model_path())
    assert file.tensor("token_embd.weight").shape == (49152, 576)
    weight = file.tensor("blk.0.attn_q.weight")
    assert weight.shape == (576, 576)
    assert 0.01 < abs(weight).mean() < 1
    with pytest.raises(ModelError, match="there is no tensor 'none'"):
        file.tensor("none")
