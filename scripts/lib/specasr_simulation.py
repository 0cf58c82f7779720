"""SpecASR without a server: the target's greedy output is known, verification is looked up in it.

A draft node is right when it is on the target's own greedy output, so rounds can be replayed in
milliseconds, over and over, to tune the algorithms.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from speech.specasr.draft_model import DraftWhisper, Feed
from speech.specasr.draft_options import SpecASROptions
from speech.specasr.draft_tree import TargetTree
from speech.specasr.session import SpecASR

# How many of a tree's nodes, best first, are verified.
Choice = Callable[[TargetTree], int]
# (utterance, output so far, tree, n) -> the target's token after the root and the first n nodes.
Target = Callable[["Utterance", Sequence[int], TargetTree, int], Sequence[int]]


@dataclass(frozen=True)
class Utterance:
    """One request of the target's.

    Attributes:
        features: float32 [mel_bins, frames], for the draft model.
        prompt: the target's prompt tokens.
        output: the target's own greedy output, with its end.
        seconds: of audio.
    """

    features: torch.Tensor
    prompt: Sequence[int]
    output: Sequence[int]
    seconds: float


@dataclass
class Simulation:
    """Totals over all utterances.

    Attributes:
        rounds: verify steps (the target's prefill, which gives the first token, not counted).
        tokens: committed in them.
        verified: nodes verified, roots not counted.
        prefilled: draft tokens read along with the prompts.
        accepted: nodes accepted.
        draft_seconds: drafting's time without the encoder's; encoder_seconds: the encoder's.
        audio_seconds: of audio.
        target_steps: the rounds' cost in plain decode steps, 1 + `node_cost` for each node.
        draft_steps, decoded, recycled, predicted, accepted_draft: see session.Counters.
        probs, right: each verified node's probability, and whether it was right.
    """

    rounds: int = 0
    tokens: int = 0
    verified: int = 0
    prefilled: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    encoder_seconds: float = 0.0
    audio_seconds: float = 0.0
    target_steps: float = 0.0
    draft_steps: float = 0.0
    decoded: float = 0.0
    recycled: float = 0.0
    predicted: float = 0.0
    accepted_draft: float = 0.0
    probs: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def report(self, step_seconds: float = 0.14) -> dict[str, float]:
        """Figures per round and in all, for a target whose decode step takes `step_seconds`."""
        rounds = max(1, self.rounds)
        total = self.target_steps * step_seconds + self.draft_seconds
        return {
            "rounds": self.rounds,
            "draft_steps": self.draft_steps / rounds,
            "decoded": self.decoded / rounds,
            "recycled": self.recycled / rounds,
            "predicted": self.predicted / rounds,
            "verified": self.verified / rounds,
            "accepted": self.accepted / rounds,
            "decoding_acceptance": self.accepted_draft / max(1.0, self.decoded),
            "draft_ms": 1e3 * self.draft_seconds / rounds,
            "encoder_ms_per_10s": 1e4 * self.encoder_seconds / max(1e-9, self.audio_seconds),
            "speedup": self.tokens * step_seconds / max(1e-9, total),
        }


def greedy_output(
    target: DraftWhisper, features: torch.Tensor, prompt: Sequence[int], end: int
) -> list[int]:
    """What a target writes without speculation, `end` included: the likeliest token each time.

    Args:
        target: loaded in float32.
        features: float32 [mel_bins, frames], padded to 30 s as the target wants it.
        end: the target's <|endoftext|>.
    """
    cache = target.encode(features, margin=target.shape.source_positions)
    feed = list(prompt)
    output: list[int] = []
    while len(prompt) + len(output) < target.max_positions:
        logits = target.logits([cache], [Feed.chain(feed, len(cache) - 1)])
        output.append(int(logits[-1].argmax()))
        if output[-1] == end:
            break
        feed = output[-1:]
    return output


def best_gain(tree: TargetTree, node_cost: float = 0.05, fixed_cost: float = 1.1) -> int:
    """The number of nodes with the most expected tokens per cost, as a server's budget chooses."""
    if not len(tree):
        return 0
    gain = 1 + np.concatenate(([0.0], np.cumsum(tree.probs)))
    cost = fixed_cost + node_cost * np.arange(len(tree) + 1)
    return int((gain / cost).argmax())


def all_nodes(tree: TargetTree) -> int:
    """Every node, as plain speculative decoding verifies."""
    return len(tree)


def simulate(
    specasr: SpecASR,
    utterances: Sequence[Utterance],
    options: SpecASROptions,
    max_nodes: int = 32,
    choice: Choice = best_gain,
    node_cost: float = 0.05,
    batch: int = 1,
    target: Target | None = None,
) -> Simulation:
    """Decode all utterances, `batch` at once.

    Args:
        target: for options.feedback, which goes without it otherwise.

    Raises:
        AssertionError: an output differs from the target's own; it cannot.
    """
    result = Simulation()
    before = specasr.counters.as_dict()
    for first in range(0, len(utterances), batch):
        _run_batch(specasr, utterances[first : first + batch], options, max_nodes, choice,
                   node_cost, result, target)  # fmt: skip
    done = {name: value - before[name] for name, value in specasr.counters.as_dict().items()}
    result.draft_steps = done["draft_steps"]
    result.decoded, result.recycled = done["decoded_tokens"], done["recycled_tokens"]
    result.predicted, result.accepted_draft = done["predicted_tokens"], done["accepted_tokens"]
    result.encoder_seconds = done["encoder_seconds"]
    result.audio_seconds = sum(utterance.seconds for utterance in utterances)
    return result


def _run_batch(
    specasr: SpecASR,
    utterances: Sequence[Utterance],
    options: SpecASROptions,
    max_nodes: int,
    choice: Choice,
    node_cost: float,
    result: Simulation,
    target: Target | None,
) -> None:
    sessions = [specasr.open(utterance.prompt, options) for utterance in utterances]
    specasr.encode(sessions, [utterance.features for utterance in utterances])
    outputs = [[utterance.output[0]] for utterance in utterances]
    if target is not None:
        for i, tree in enumerate(specasr.foresee(sessions, max_nodes)):
            result.target_steps += node_cost * len(tree)
            specasr.verified(sessions[i], target(utterances[i], [], tree, len(tree)))
            outputs[i] = _prefilled(tree, utterances[i].output, result)
    for session, output in zip(sessions, outputs, strict=True):
        specasr.commit(session, output)
    running = [i for i, output in enumerate(outputs) if len(output) < len(utterances[i].output)]
    while running:
        start = time.perf_counter()
        trees = specasr.propose([sessions[i] for i in running], max_nodes)
        result.draft_seconds += time.perf_counter() - start
        for i, tree in zip(running, trees, strict=True):
            n = choice(tree)
            left = utterances[i].output[len(outputs[i]) :]
            path = _accepted(tree, n, left)
            committed = list(left[: len(path) + 1])
            if target is not None:
                said = target(utterances[i], outputs[i], tree, n)
                specasr.verified(sessions[i], said)
            result.rounds += 1
            result.verified += n
            result.accepted += len(path)
            result.tokens += len(committed)
            result.target_steps += 1 + node_cost * n
            result.probs += tree.probs[:n].tolist()
            right = set(path)
            result.right += [node in right for node in range(n)]
            outputs[i] += committed
            specasr.commit(sessions[i], committed)
        running = [i for i in running if len(outputs[i]) < len(utterances[i].output)]
    for session in sessions:
        specasr.close(session)
    for utterance, output in zip(utterances, outputs, strict=True):
        assert output == list(utterance.output)


def _prefilled(tree: TargetTree, output: Sequence[int], result: Simulation) -> list[int]:
    """The tokens of an output that are known once a draft was read behind the prompt."""
    known = list(output[: len(_accepted(tree, len(tree), output)) + 1])
    result.prefilled += len(tree)
    result.tokens += len(known) - 1
    return known


def _accepted(tree: TargetTree, n: int, output: Sequence[int]) -> list[int]:
    """The nodes among the first `n` that `output` passes through."""
    path: list[int] = []
    for node in range(n):
        above = path[-1] if path else -1
        if len(path) == len(output):
            break
        if tree.parents[node] == above and tree.tokens[node] == output[len(path)]:
            path.append(node)
    return path
