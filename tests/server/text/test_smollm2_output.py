"""The fetched text model is right by what it says: through transformers, and through SGLang."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.lib.http_client import HTTP
from sglang_ext.models import resolve

# Two fp32 implementations may disagree where the best two tokens are this close (logits).
TIE = 1e-3

QUESTIONS = [
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Explain in two sentences why the sky is blue.",
    "What is 12 + 30?",
    "Name three animals that live in the sea.",
]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """Tokenizer and model, in transformers."""
    path = resolve("smollm2-135m-instruct")
    return AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.mark.parametrize("question", QUESTIONS)
def test_smollm2_through_sglang_says_what_transformers_says(plain_server, smollm2, question):
    tokenizer, model = smollm2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    length = prompt["input_ids"].shape[1]
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0]
    expected = tokens[length:].tolist()
    response = HTTP.post(
        plain_server.base_url + "/generate",
        json={
            "input_ids": tokens[:length].tolist(),
            "sampling_params": {"temperature": 0, "max_new_tokens": 64},
        },
        timeout=300,
    )
    assert response.is_success, response.text
    actual = response.json()["output_ids"]
    if actual == expected:
        return
    pairs = zip(actual, expected, strict=False)
    first = next((i for i, (a, e) in enumerate(pairs) if a != e), None)
    assert first is not None, f"one output is a prefix of the other: {actual} {expected}"
    with torch.no_grad():
        logits = model(tokens[None, : length + first]).logits[0, -1]
    gap = float(logits[expected[first]] - logits[actual[first]])
    assert gap < TIE, f"token {first} differs by {gap} in logits: {actual} {expected}"


def test_smollm2_chat_uses_its_template_and_ends(plain_server):
    response = HTTP.post(
        plain_server.base_url + "/v1/chat/completions",
        json={
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": QUESTIONS[0]}],
            "temperature": 0,
            "max_tokens": 64,
        },
        timeout=300,
    )
    assert response.is_success, response.text
    choice = response.json()["choices"][0]
    assert choice["message"]["content"].strip() == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
