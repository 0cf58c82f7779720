"""The drafting algorithms, over scripted draft models whose predictions are known."""

import random

import numpy as np
import pytest
import torch

from scripts.lib.specasr_simulation import Utterance, all_nodes, best_gain, simulate
from speech.specasr.draft_model import Prediction
from speech.specasr.draft_options import MODES, SpecASROptions
from speech.specasr.recycling import OldDraft, offsets
from speech.specasr.session import SpecASR
from speech.specasr.vocabulary import Vocabularies
from tests.unit.speech.specasr_models import POSITIONS, ScriptedModel, vocabulary

VOCABULARY = vocabulary()
SAME = Vocabularies(VOCABULARY, VOCABULARY)
SPECIAL = VOCABULARY.special
PROMPT = [SPECIAL[name] for name in ("<|startoftranscript|>", "<|en|>", "<|transcribe|>",
                                     "<|notimestamps|>")]  # fmt: skip
AUDIO = torch.zeros(1, 1)
END = VOCABULARY.end


def prediction(*choices: tuple[str | int, float]) -> Prediction:
    """The likeliest tokens with their chances, filled up to four."""
    known = [(ord(c) if isinstance(c, str) else c, p) for c, p in choices]
    known += [(200 + i, 0.0) for i in range(4 - len(known))]
    tokens, probs = zip(*known, strict=True)
    return Prediction(tokens, probs, probs)


def reader(text: str, doubts: dict[int, tuple[str, float]] | None = None, sure: float = 0.99):
    """A model that has heard `text` and knows its place by what was said: a wrong letter stands
    for the right one, a comma was put in, and the letter after next tells that one was left out.

    Args:
        doubts: by place in the text, the model's second choice there and its chance.
    """

    def predict(path):
        place = 0
        for char in map(chr, path[len(PROMPT) :]):
            if char != ",":
                place += 2 if text[place + 1 : place + 2] == char != text[place] else 1
        token = ord(text[place]) if place < len(text) else END
        other, chance = (doubts or {}).get(place, ("?", 1 - sure))
        return prediction((token, 1 - chance), (other, chance))

    return ScriptedModel(predict)


def propose(model, mode: str, committed: str = "", max_nodes: int = 64, **options):
    specasr = SpecASR(model, SAME)
    session = specasr.open(PROMPT, SpecASROptions(mode=mode, **options))
    specasr.encode([session], [AUDIO])
    specasr.commit(session, [ord(c) for c in committed])
    (tree,) = specasr.propose([session], max_nodes)
    return specasr, session, tree


def leaves(tree) -> list[str]:
    """What each path of a tree reads."""
    inner = set(tree.parents.tolist())
    paths = []
    for node in range(len(tree)):
        if node not in inner:
            text, at = "", node
            while at >= 0:
                text, at = chr(tree.tokens[at]) + text, tree.parents[at]
            paths.append(text)
    return paths


def test_fixed_drafts_so_many_tokens():
    specasr, _, tree = propose(reader("abcdefghijklmnop"), "fixed", "a", length=8)
    assert leaves(tree) == ["bcdefghi"]
    assert tree.probs == pytest.approx(0.99 ** np.arange(1, 9))
    assert (specasr.counters.draft_steps, specasr.counters.decoded_tokens) == (8, 8)


def test_a_draft_ends_with_the_text():
    for mode in MODES:
        _, _, tree = propose(reader("abcd"), mode, "a", length=8)
        assert tree.tokens[tree.tokens < 256].tolist() == [ord(c) for c in "bcd"]
        assert tree.tokens[-1] == END


def test_beams_keep_the_likeliest_ways():
    model = reader("abcdefgh", {2: ("x", 0.4)})
    specasr, _, tree = propose(model, "fixed", "a", length=4, beams=2)
    assert len(tree) == 8
    assert "bcde" in leaves(tree)
    assert any(leaf.startswith("bx") for leaf in leaves(tree))
    assert specasr.counters.draft_steps == 4


def test_asp_is_cut_where_a_token_is_doubtful():
    model = reader("abcdefghijklmnopqrstuvwxyzabcdefghij", {4: ("x", 0.65)})
    assert leaves(propose(model, "asp", "a")[2]) == ["bcd"]
    assert leaves(propose(model, "asp", "abcd")[2]) == []
    assert leaves(propose(model, "asp", "a", threshold=0.3)[2]) == ["bcdefghijklmnopqrstuvwxy"]


@pytest.mark.parametrize(
    ("committed", "goes_on"),
    [("abcX", "efghijkl"), ("abc,", "defghijkl"), ("abce", "fghijkl")],
    ids=["substituted", "inserted", "deleted"],
)
def test_the_rest_of_a_draft_is_recycled(committed, goes_on):
    model = reader("abcdefghijklm")
    specasr, session, tree = propose(model, "recycling", "a", length=11)
    assert leaves(tree) == ["bcdefghijkl"]
    assert specasr.counters.decoded_tokens == 11
    model.passes.clear()
    specasr.commit(session, [ord(c) for c in committed[1:]])
    (tree,) = specasr.propose([session], 64)
    assert leaves(tree)[0].startswith(goes_on)
    assert specasr.counters.recycled_tokens >= len(goes_on) - 1
    # The rest in one pass or two, then what is new.
    assert len(model.passes) <= 2 + len(leaves(tree)[0]) - len(goes_on) + 1


def test_what_was_right_but_not_verified_is_drafted_again_for_nothing():
    model = reader("abcdefghijklmnopqrstuvwxyz")
    specasr, session, _ = propose(model, "recycling", "a", length=8)
    specasr.commit(session, [ord(c) for c in "bcd"])
    model.passes.clear()
    (tree,) = specasr.propose([session], 64)
    assert leaves(tree) == ["efghijkl"]
    assert len(model.passes) == 3  # i was drafted but not fed; j, k, l are new but the last
    assert specasr.counters.recycled_tokens == 5


def test_offsets_widen_while_nothing_meets():
    assert offsets(0) == [0, -1, 1]
    assert offsets(1) == [0, -1, 1, -2, 2]
    assert offsets(9) == offsets(2)


def test_old_draft_lines_up():
    old = OldDraft.line_up([1, 2, 3, 4, 5, 6], [1, 2, 9], key=lambda token: token)
    assert old.rest() == [4, 5, 6]
    assert not old.meet(8)
    assert old.meet(5)
    assert old.rest() == [6]
    assert OldDraft.line_up([1, 2, 3], [1, 2, 3], key=lambda token: token).rest() == []


def random_model(seed: int) -> ScriptedModel:
    """Any predictions whatever, the same for the same last two tokens."""

    def predict(path):
        source = random.Random(f"{seed} {path[-2:]}")
        tokens = source.sample([97, 98, 99, 100, 101, END], 4)
        weights = sorted((source.random() ** 3 for _ in range(5)), reverse=True)
        probs = [w / sum(weights) for w in weights[:4]]
        return Prediction(tokens, probs, probs)

    return ScriptedModel(predict)


@pytest.mark.parametrize("seed", range(40))
def test_recycling_drafts_what_would_have_been_drafted_anew(seed):
    """In fewer passes, or as many; over random models and random outputs."""
    source = random.Random(seed)
    trees, steps = {}, {}
    outputs = [[source.choice([97, 98, 99, 100]) for _ in range(source.randint(1, 4))]
               for _ in range(12)]  # fmt: skip
    for mode in ("asp", "recycling"):
        specasr = SpecASR(random_model(seed), SAME)
        session = specasr.open(PROMPT, SpecASROptions(mode=mode, threshold=0.3))
        specasr.encode([session], [AUDIO])
        trees[mode] = []
        follow = random.Random(seed)
        for output in outputs:
            specasr.commit(session, output)
            (tree,) = specasr.propose([session], 64)
            trees[mode].append((tree.tokens.tolist(), tree.parents.tolist()))
            # At times the target goes along with part of the draft.
            specasr.commit(session, tree.tokens[: follow.randint(0, 3)].tolist())
        steps[mode] = specasr.counters.draft_steps
    assert trees["recycling"] == trees["asp"]
    assert steps["recycling"] <= steps["asp"]


def test_branches_only_where_in_doubt_and_back_on_the_trunk():
    text = "abcdefghij"
    specasr, _, tree = propose(reader(text, {3: ("x", 0.3)}), "tsp", "a")
    assert leaves(tree)[0].startswith("bcdefghij")
    (branch,) = [leaf for leaf in leaves(tree) if leaf.startswith("bcx")]
    # It says x for d and rejoins at e, or puts x before d; the rest is the trunk's.
    assert branch.removeprefix("bcx").lstrip("d").startswith("efghij")
    assert not specasr.counters.recycled_tokens
    sure = propose(reader(text), "tsp", "a")[2]
    assert len(leaves(sure)) == 1


def test_branches_grow_in_one_pass_each():
    doubts = {2: ("x", 0.3), 4: ("y", 0.3), 6: ("z", 0.3)}
    one = reader("abcdefghijklm", {2: ("x", 0.3)})
    three = reader("abcdefghijklm", doubts)
    propose(one, "tsp", "a")
    propose(three, "tsp", "a")
    assert len(three.passes) <= len(one.passes) + 1
    assert max(three.passes) >= 3


def said(text: str, tree, upto: int = 64) -> list[int]:
    """What a target that reads `text` from the tree's root on says after the root and each node,
    whatever wrong letter stands before."""
    depths: list[int] = []
    for parent in tree.parents[:upto]:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return [ord(text[0])] + [ord(text[depth + 1]) for depth in depths]


@pytest.mark.parametrize(
    ("feedback", "draft"), [(True, "dEfgHij"), (False, "defghij")], ids=["feedback", "none"]
)
def test_what_the_target_said_behind_a_rejected_token_advises_the_next_draft(feedback, draft):
    # The target writes bCdEfgHij where the draft model hears bcdefghij: C is where it is rejected.
    specasr, session, tree = propose(reader("abcdefghij"), "tsp", "a", feedback=feedback)
    assert leaves(tree)[0].startswith("bcdefghij")
    specasr.verified(session, said("bCdEfgHij.....", tree))
    specasr.commit(session, [ord("b"), ord("C")])
    (tree,) = specasr.propose([session], 64)
    assert any(leaf.startswith(draft) for leaf in leaves(tree))
    assert any(leaf.startswith("dE") for leaf in leaves(tree)) == feedback


def test_advice_ends_with_the_nodes_that_were_verified():
    specasr, session, tree = propose(reader("abcdefghij"), "tsp", "a")
    specasr.verified(session, said("bCdEfgHij.....", tree, upto=4))
    specasr.commit(session, [ord("b"), ord("C")])
    (tree,) = specasr.propose([session], 64)
    assert any(leaf.startswith("dEfghij") for leaf in leaves(tree))
    assert not any("H" in leaf for leaf in leaves(tree))


def test_what_the_prefill_showed_is_taken_as_it_is():
    specasr = SpecASR(reader("abcdefghij"), SAME)
    session = specasr.open(PROMPT, SpecASROptions())
    specasr.encode([session], [AUDIO])
    (tree,) = specasr.foresee([session], 64)
    assert leaves(tree) == ["abcdefghij" + leaves(tree)[0][10:]]
    specasr.verified(session, said("abcDefghij.....", tree))
    specasr.commit(session, [ord("a")])
    (tree,) = specasr.propose([session], 64)
    # D is certain, what comes behind it the draft model's again.
    assert leaves(tree)[0].startswith("bcDefghij")
    assert tree.probs[2] > 0.99
    assert specasr.counters.rounds == 1


@pytest.mark.parametrize("options", [{"mode": "asp"}, {"mode": "tsp", "feedback": False}])
def test_without_feedback_nothing_is_foreseen(options):
    specasr = SpecASR(reader("abcdefghij"), SAME)
    session = specasr.open(PROMPT, SpecASROptions(**options))
    specasr.encode([session], [AUDIO])
    assert [len(tree) for tree in specasr.foresee([session], 64)] == [0]
    assert specasr.counters.draft_steps == 0


@pytest.mark.parametrize("mode", ["fixed", "asp", "recycling"])
def test_the_papers_other_modes_take_no_advice(mode):
    specasr, session, tree = propose(reader("abcdefghij"), mode, "a", length=9)
    specasr.verified(session, said("bCdEfgHij.....", tree))
    specasr.commit(session, [ord("b"), ord("C")])
    (tree,) = specasr.propose([session], 64)
    assert leaves(tree)[0].startswith("defghij")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
def test_any_mode_follows_any_output(mode, seed):
    """Random models and outputs, requests joining and leaving: and alone as in a batch."""
    source = random.Random(seed)
    options = SpecASROptions(mode=mode, beams=1 + seed % 3, length=source.randint(1, 30))
    utterances = [
        Utterance(AUDIO, PROMPT, [source.choice([97, 98, 99]) for _ in range(n)] + [END], 1.0)
        for n in (0, 1, 30, 7, 60)
    ]
    totals = []
    for batch in (1, 5):
        specasr = SpecASR(random_model(seed), SAME)

        def say(utterance, output, tree, n):
            chatter = random.Random(repr((utterance.output, output)))
            return [chatter.choice([97, 98, 99, END]) for _ in range(n + 1)]

        result = simulate(specasr, utterances, options, 20, all_nodes, batch=batch,
                          target=say if seed % 2 else None)  # fmt: skip
        totals.append((result.rounds, result.verified, result.accepted))
        assert result.tokens == sum(len(u.output) - 1 for u in utterances)
    assert totals[0] == totals[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_nodes", [0, 1, 2, 5, 64])
def test_never_more_nodes_than_asked_for(mode, max_nodes):
    _, _, tree = propose(random_model(3), mode, "a", max_nodes, beams=2)
    assert len(tree) <= max_nodes


@pytest.mark.parametrize("mode", MODES)
def test_an_output_as_long_as_the_models_positions(mode):
    model = reader("a" * (2 * POSITIONS))
    for length in range(POSITIONS - 12, POSITIONS + 3, 2):
        specasr, session, tree = propose(model, mode, "a" * length)
        assert session.chain is not None
        assert len(session.chain.cache) <= POSITIONS
        if length + len(PROMPT) >= POSITIONS:
            assert len(tree) == 0
        specasr.commit(session, [97])


def test_no_audio_or_a_language_unknown_gives_no_draft():
    specasr = SpecASR(reader("abc"), SAME)
    session = specasr.open(PROMPT, SpecASROptions())
    assert len(specasr.propose([session], 10)[0]) == 0
    english = vocabulary(multilingual=False)
    specasr = SpecASR(reader("abc"), Vocabularies(VOCABULARY, english))
    session = specasr.open([PROMPT[0], SPECIAL["<|fr|>"], PROMPT[2]], SpecASROptions())
    specasr.encode([session], [AUDIO])
    specasr.commit(session, [97])
    assert len(specasr.propose([session], 10)[0]) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_that_fails_costs_one_draft(mode):
    model = reader("abcdefghij")
    specasr, session, _ = propose(model, mode, "a", length=4)
    specasr.commit(session, [ord("b")])
    step = model.step

    def fail(caches, feeds):
        step(caches, feeds)
        raise RuntimeError("out of memory")

    specasr.commit(session, [ord(","), ord("c")])
    model.step = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        specasr.propose([session], 64)
    model.step = step
    (tree,) = specasr.propose([session], 64)
    assert leaves(tree)[0].startswith("def")


def test_best_gain_weighs_chances_against_cost():
    _, _, tree = propose(reader("abcdefghij"), "asp", "a")
    assert best_gain(tree, node_cost=0.01) == len(tree)
    assert best_gain(tree, node_cost=5.0) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "best"}, "specasr.mode 'best': expected one of fixed"),
        ({"length": 0}, r"specasr.length 0: expected a whole number 1\.\.64"),
        ({"beams": True}, "specasr.beams True"),
        ({"threshold": 1.5}, r"specasr.threshold 1.5: expected a number 0\.\.1"),
        ({"threshold": "0.4"}, "specasr.threshold '0.4'"),
        ({"feedback": 1}, "specasr.feedback 1: expected true or false"),
        ({"beam": 2}, "specasr.beam is unknown; expected mode, length"),
        (["tsp"], "specasr must be an object"),
    ],
)
def test_wrong_options_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        SpecASROptions().merged(given)


def test_a_requests_options_come_before_the_servers():
    server = SpecASROptions(mode="asp", threshold=0.2)
    assert server.merged(None) is server
    assert server.merged({"length": 8}) == SpecASROptions("asp", 8, 0.2)
