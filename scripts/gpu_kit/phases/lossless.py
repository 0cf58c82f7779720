"""Phase 3: greedy output with speculation against plain SGLang's, up to ties of the arithmetic.

Every configuration is loaded once, in a process of its own, and answers the same traffic. Where an
answer parts from plain SGLang's, the last part replays the shared context through plain SGLang and
looks at the two tokens' logits, penalties and the like applied: both must be as close to the best
one as plain SGLang's own decode steps and prefills differ (ties.Rounding). Where nothing but the
model decides, its gaps are so wide that there may be no more divergences than plain SGLang has from
itself.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_kit import features
from scripts.gpu_kit.engine import SPECULATION, Answer, Engine, greedy
from scripts.gpu_kit.kit import Kit, Part
from scripts.gpu_kit.planted import with_wrong_tokens
from scripts.gpu_kit.ties import ROUNDING_MARGIN, Rounding, first_difference, judge

USES_ENGINE = True
# Rejected now and then, so that trees branch off and KV moves.
ORACLE_RIGHT = 0.8
DRAFTERS = ("random", "oracle", "sssd")
# Largest difference of a token's logprob that rounding explains where plain SGLang shows none.
LOGPROB_ERROR = 0.1
BASE_FLAGS = ["--enable-custom-logit-processor", "--attention-backend", "flashinfer"]

Answers = dict[str, list[Answer]]


def sizes(kit: Kit) -> tuple[int, int]:
    """Prompts and tokens per answer."""
    return (6, 24) if kit.emulated else (32, 96)


def prompts(kit: Kit) -> list[list[int]]:
    """Prompts of different lengths, some longer than a chunk of the Triton kernels."""
    count, _ = sizes(kit)
    return [kit.rule.prompt(24 + 37 * (n % 9), n) for n in range(count)]


def plain(part: Part) -> None:
    """The reference, and how often it contradicts itself at another batch size."""
    part.kit.make_model()
    with Engine(part.kit, _flags(part.kit)) as engine:
        answers = _ask(part, engine, {})
        alone = _alone(part.kit, engine)
        _note_rounding(part, engine)
    part.kit.keep("lossless-plain", _as_json(answers))
    _against_rule(part, "plain", [answers["staggered"], alone])
    _note_divergences(part, "plain at batch 1", answers, {"staggered": alone})


def _note_rounding(part: Part, engine: Engine) -> None:
    """How far plain SGLang's decode steps and its prefills are apart."""
    count, tokens = sizes(part.kit)
    pairs = engine.best_logprobs(prompts(part.kit)[: max(4, count // 4)], tokens)
    rounding = Rounding.between(pairs)
    part.kit.keep("lossless-rounding", vars(rounding))
    part.result(
        "plain, decode steps against a prefill", True, tokens=len(pairs),
        largest_logprob_difference=rounding.logprob, largest_gap_difference=rounding.gap,
    )  # fmt: skip


def _rounding(kit: Kit) -> Rounding:
    return Rounding(**(kit.kept("lossless-rounding") or {}))


def _against_rule(part: Part, label: str, unaided: Sequence[Sequence[Answer]]) -> None:
    """What the checkpoint must write where no feature is asked for: known without plain SGLang."""
    _, tokens = sizes(part.kit)
    pairs = [
        (answer.tokens, part.kit.rule.continuation(prompt, tokens))
        for answers in unaided
        for prompt, answer in zip(prompts(part.kit), answers, strict=False)
    ]
    differ = sum(got != expected for got, expected in pairs)
    part.result(f"{label} against the planted rule", differ == 0, answers=len(pairs), differ=differ)


def _alone(kit: Kit, engine: Engine) -> list[Answer]:
    count = min(4, sizes(kit)[0])
    return engine.answers(prompts(kit)[:count], greedy(sizes(kit)[1]), at_once=1)


def speculative(part: Part) -> None:
    """Every drafter, overlap and graphs on as by default."""
    _speculate(part, "overlap, graphs", DRAFTERS, [])


def without_overlap(part: Part) -> None:
    """Speculate with each step's results processed before the next step."""
    _speculate(part, "no overlap", ("random", "oracle"), ["--disable-overlap-schedule"])


def without_graphs(part: Part) -> None:
    """Speculate with every step launched kernel by kernel."""
    _speculate(part, "no graphs", ("random", "oracle"), ["--disable-cuda-graph"])


def _speculate(part: Part, label: str, drafters: Sequence[str], flags: list[str]) -> None:
    kit = part.kit
    kit.make_model()
    options = {
        "budget": "fixed",
        "drafters": "random,oracle",
        "oracle_file": str(_oracle(kit)),
        "bigram_seconds": "0",
    }
    with Engine(kit, [*_flags(kit), *SPECULATION, *flags], options) as engine:
        for drafter in drafters:
            with part.attempt(f"{label}, {drafter}"):
                answers = _ask(part, engine, {"drafter": drafter})
                alone = _alone(kit, engine)
                _against_rule(part, f"{label}, {drafter}", [answers["staggered"], alone])
                answers["staggered, batch 1"] = alone
                _note_divergences(part, f"{label}, {drafter}", _plain(kit), answers)


def plain_again(part: Part) -> None:
    """Plain SGLang loaded once more: its own divergences, then the replay of every one."""
    kit = part.kit
    with Engine(kit, _flags(kit)) as engine:
        _note_divergences(part, "plain again", _plain(kit), _ask(part, engine, {}))
        noted = kit.kept("lossless-divergences") or {}
        allowed = max(
            (
                sum(not place["feature"] for place in found["at"])
                for label, found in noted.items()
                if label.startswith("plain")
            ),
            default=0,
        )
        for label, found in noted.items():
            with part.attempt(f"divergences: {label}"):
                _replay(part, engine, label, found, allowed)


def _replay(part: Part, engine: Engine, label: str, found: dict[str, Any], allowed: int) -> None:
    places = found["at"]
    rows = engine.largest_logits([[*place["prompt"], *place["output"]] for place in places])
    judged = [
        judge(p["at"], p["tokens"], features.adjusted(r, p["feature"], p["output"], part.kit.shape))
        for p, r in zip(places, rows, strict=True)
    ]
    unaided = sum(not place["feature"] for place in places)
    rounding = _rounding(part.kit)
    part.result(
        f"divergences: {label}",
        all(divergence.is_tie(rounding) for divergence in judged)
        and (label.startswith("plain") or unaided <= allowed),
        answers=found["answers"],
        divergences=len(places),
        unaided_divergences=unaided,
        plain_divergences=allowed,
        features=[place["feature"] for place in places],
        gaps=[round(d.gap, 4) for d in judged],
        ulps=[round(d.ulps, 2) if d.ulps < 1e6 else None for d in judged],
        largest_ulps=max((d.ulps for d in judged if d.ulps < 1e6), default=0.0),
    )


def _ask(part: Part, engine: Engine, params: dict[str, Any]) -> Answers:
    """The traffic: arrivals apart, and each feature among plain requests."""
    from scripts.gpu_kit.processors import BanFirstCandidates

    kit = part.kit
    _, tokens = sizes(kit)
    given = {"custom_params": params} if params else {}
    every = prompts(kit)
    answers = {"staggered": engine.answers(every, greedy(tokens, **given), apart_s=0.02)}
    few = every[: max(4, len(every) // 4)]
    for name, feature in features.sampling(kit.shape).items():
        sampling = [greedy(tokens, **given) | (feature if n % 2 else {}) for n in range(len(few))]
        answers[name] = engine.answers(few, sampling)
    answers["logprobs"] = engine.answers(few, greedy(tokens, **given), return_logprob=True)
    processed = greedy(tokens) | {"custom_params": params | {"banned": list(features.BANNED)}}
    answers[features.PROCESSOR] = engine.answers(
        few, processed, custom_logit_processor=BanFirstCandidates.to_str()
    )
    return answers


def _note_divergences(part: Part, label: str, expected: Answers, got: Answers) -> None:
    """Report a configuration's counts, and leave its divergences for the replay."""
    places, total, steps, written = [], 0, 0, 0
    differences: list[float] = []
    for case, answers in got.items():
        reference = expected[case.partition(",")[0]]
        for number, (ours, theirs) in enumerate(zip(answers, reference, strict=False)):
            total += 1
            steps += ours.steps
            written += len(ours.tokens) if ours.steps else 0
            at = first_difference(ours.tokens, theirs.tokens)
            if ours.logprobs and theirs.logprobs and at is None:
                pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
                differences += [abs(a - b) for a, b in pairs]
            if at is None:
                continue
            pair = [a.tokens[at] for a in (ours, theirs) if at < len(a.tokens)]
            place = {"at": at, "tokens": pair, "prompt": prompts(part.kit)[number]}
            feature = feature_of(case, number)
            places.append(place | {"output": theirs.tokens[:at], "feature": feature})
    noted = part.kit.kept("lossless-divergences") or {}
    part.kit.keep("lossless-divergences", noted | {label: {"answers": total, "at": places}})
    part.result(
        f"answers: {label}",
        max(differences, default=0.0) <= _most_logprob_difference(part.kit),
        answers=total,
        divergences=len(places),
        accept_length=round(written / steps, 2) if steps else None,
        logprobs_compared=len(differences),
        largest_logprob_difference=max(differences, default=0.0),
    )


def _most_logprob_difference(kit: Kit) -> float:
    return max(LOGPROB_ERROR, ROUNDING_MARGIN * _rounding(kit).logprob)


def feature_of(case: str, number: int) -> str:
    """The feature of a case's request; every second one is plain in all but the processor's."""
    with_features = case == features.PROCESSOR or number % 2 == 1
    unaided = case.startswith(("staggered", "logprobs"))
    return case if with_features and not unaided else ""


def _flags(kit: Kit) -> list[str]:
    return ["--enable-custom-logit-processor"] if kit.emulated else BASE_FLAGS


def _oracle(kit: Kit) -> Path:
    """Known outputs with a share of wrong drafts, for the drafter 'oracle'."""
    _, tokens = sizes(kit)
    path = Path(kit.work) / "lossless-oracle.jsonl"
    lines = []
    for n, prompt in enumerate(prompts(kit)):
        output = kit.rule.continuation(prompt, tokens + 32)
        draft = with_wrong_tokens(output, ORACLE_RIGHT, kit.shape.vocab, seed=n)
        lines.append(json.dumps({"prompt": prompt, "output": output, "draft": draft}))
    path.write_text("\n".join(lines))
    return path


def _plain(kit: Kit) -> Answers:
    kept = kit.kept("lossless-plain")
    if kept is None:
        raise RuntimeError("plain SGLang's answers are missing: the part 'plain' did not end")
    return {case: [Answer(**answer) for answer in answers] for case, answers in kept.items()}


def _as_json(answers: Answers) -> dict[str, list[dict[str, Any]]]:
    return {case: [vars(answer) for answer in found] for case, found in answers.items()}


PARTS = {
    "plain": plain,
    "speculative": speculative,
    "without_overlap": without_overlap,
    "without_graphs": without_graphs,
    "plain_again": plain_again,
}
