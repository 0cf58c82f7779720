"""Real SGLang servers of a text model, one per configuration."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.lib.spec_bench import Prompt, spec_bench
from sglang_ext.block_drafter.drafter_files import save_drafter
from sglang_ext.block_drafter.drafter_manifest import Manifest, SourceRule
from sglang_ext.block_drafter.kept_tokens import KeptTokens
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.shapes import Shape
from sglang_ext.block_drafter.target_models import load_target
from tests.server.conftest import CHUNK, MODEL
from tests.server.servers import Server


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Short Spec-Bench prompts, one of each category that has one."""
    return spec_bench(MODEL, max_prompt_tokens=120)[:8]


@pytest.fixture(scope="package")
def plain_server() -> Iterator[Server]:
    """SGLang without speculation."""
    with Server(MODEL, CHUNK, name="plain") as server:
        yield server


@pytest.fixture(scope="session")
def block_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SpecDec's drafter for MODEL, not trained, but leaning to frequent tokens, most to " the".

    So that some of what it drafts is accepted and the most is not.
    """
    target = load_target(MODEL)
    common = target.encoder(" the of a and to in, is. The for\n that on with as are by it be")
    rest = set(range(3000)) - set(common["input_ids"])
    tokens = np.array([*dict.fromkeys(common["input_ids"]), *sorted(rest)], dtype=np.int64)
    kept = KeptTokens(tokens, len(tokens), target.vocab_size)
    shape = Shape(64, 2, 128, 1, 1, block=6, window=8, source_tokens=64)
    torch.manual_seed(0)
    model = BlockModel(shape, kept.num_rows, kept.num_classes)
    with torch.no_grad():
        model.output_bias[1 : 1 + len(tokens) - len(rest)] = 6.0
        model.output_bias[1] = 12.0
    made = tmp_path_factory.mktemp("block-drafter")
    rule = SourceRule(most_tokens=shape.source_tokens)
    stated = (target.name, target.tokenizer, target.vocab_size, target.ends, shape, rule)
    save_drafter(made, Manifest(*stated, len(tokens), "0" * 64), model, kept)
    return made
