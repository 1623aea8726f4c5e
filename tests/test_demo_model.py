"""The bundled models: complete checkpoint folders that `transformers` loads, and a prefix-stable template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from apcbatch.model.locate import BUNDLED, DEMO_DIR
from tests.effort import tries

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {"demo": "mamba", "demo-jamba": "jamba"}
PARAMETERS = {"demo": 2_800_896, "demo-jamba": 3_737_544}
EXAMPLES = ROOT / "examples" / "agents.jsonl"
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
MAX_BYTES = 8_000_000
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_DIR)


@pytest.fixture(scope="module", params=BUNDLED)
def name(request):
    """Each of the bundled models."""
    return request.param


@pytest.fixture(scope="module")
def folder(name):
    return BUNDLED[name]


@pytest.fixture(scope="module")
def model(folder):
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny
    yield loaded.eval()
    torch.set_num_threads(threads)


def render(tokenizer, messages, tools=None, prompt=False) -> str:
    """The conversation as text."""
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)


def ids_of(tokenizer, text: str) -> list[int]:
    """The token ids of rendered text."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_folder_is_complete_and_small(folder):
    """A file that was not added to the repository, or weights that have grown."""
    assert {path.name for path in folder.iterdir()} == FILES
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES


def test_it_is_small_and_of_its_family(name, model):
    """Weights of another shape than docs/models.md says."""
    assert model.config.model_type == FAMILIES[name]
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_special_tokens_agree(tokenizer, folder):
    """Generation that never stops, because config and tokenizer disagree about the end."""
    generation = GenerationConfig.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert generation.eos_token_id == config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.eos_token == "<|end|>" and tokenizer.bos_token == "<|bos|>"
    assert len(tokenizer) == config["vocab_size"]


@pytest.mark.slow
def test_template_is_prefix_stable_over_the_examples(tokenizer):
    """A prompt that is no prefix of the longer conversation, in characters or tokens: nothing to reuse."""
    for line in EXAMPLES.read_text(encoding="utf-8").splitlines()[::4]:
        record = json.loads(line)
        messages, tools = record["messages"], record["tools"]
        text = render(tokenizer, messages, tools)
        ids = ids_of(tokenizer, text)
        for turn in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
            prompt = render(tokenizer, messages[:turn], tools, prompt=True)
            prompt_ids = ids_of(tokenizer, prompt)
            assert text.startswith(prompt) and ids[: len(prompt_ids)] == prompt_ids, record["id"]
            assert prompt_ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_arguments_may_be_text_or_an_object(tokenizer):
    """Arguments as an object that are rendered differently, or as text that is quoted once more."""
    texts = []
    for arguments in ({"a": 1, "b": "é <x>"}, '{"a": 1, "b": "é <x>"}'):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        texts.append(render(tokenizer, [{"role": "user", "content": "?"}, answer], [TOOL]))
    assert texts[0] == texts[1]
    assert '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é <x>"}}</tool_call><|end|>' in texts[0]


def test_content_may_be_missing_or_in_parts(tokenizer):
    """None shown as the word None, or parts shown as Python lists."""
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    text = render(tokenizer, [{"role": "user", "content": parts}, {"role": "tool", "content": None}])
    assert text == "<|bos|><|user|>one two<|end|><|tool|><|end|>"


def test_an_unknown_role_is_refused(tokenizer):
    """A typing mistake in a role that is rendered as if it were fine."""
    with pytest.raises(Exception, match="asistant; expected system, user, assistant or tool"):
        render(tokenizer, [{"role": "asistant", "content": "?"}])


@settings(max_examples=tries(200), database=None)
@example("\x00\x7f\u2028\ufeff日本語 👩\u200d👧 ½ \t\r\n\n  don't I'LL 1234567 ... é")
@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    """A character outside of the vocabulary, or spaces and line ends that are tidied up."""
    assert tokenizer.decode(ids_of(tokenizer, text)) == text


@pytest.mark.drawn(1)
@pytest.mark.slow
def test_greedy_answers_are_sentences(tokenizer, model):
    """Weights whose answer is the same for every prompt, empty, without an end, or one token repeated."""
    answers = []
    lines = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    for record in lines[0], lines[1]:
        text = render(tokenizer, record["messages"][:2], record["tools"], prompt=True)
        prompt = torch.tensor([ids_of(tokenizer, text)])
        with torch.no_grad():
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=128)
        answers.append(out[0, prompt.shape[1] :].tolist())
    assert answers[0] != answers[1]
    assert all(answer[-1] == tokenizer.eos_token_id and 4 < len(answer) < 128 for answer in answers)
    assert "e-mail address" in tokenizer.decode(answers[0])  # by which the shop of the examples finds customers


def test_logits_depend_on_what_was_long_ago(model):
    """A model that forgets: a wrong restored state would not show in its answers."""
    ids = torch.arange(200)[None] % 3000 + 300
    other = ids.clone()
    other[0, :50] += 7
    with torch.no_grad():
        here, there = (model(x).logits[0, -1] for x in (ids, other))
    assert (here - there).abs().max() > 1e-2
