"""What bench_specdec has seen: rows of the paper's tables, figures, and what is exact."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scripts.lib.specdec_methods import ALONE, AT, AUTO, HIGH_QUALITY, Method, Rule
from scripts.lib.ssbd_metrics import bleu, chrf, common_prefix

SENTENCES, SETTINGS, GROWING = "sentences", "settings", "growing sentences"
"""Suites: all sentences; some of them, for methods that differ in a setting; those that grow."""


@dataclass(frozen=True)
class Answer:
    """One sentence's translation; of a sentence that grows, all of its updates together.

    Attributes:
        suite: SENTENCES, SETTINGS or GROWING.
        batch: requests under way at once.
        number: the sentence's.
        token_ids: what was written last, without the end token.
        text: the same, decoded.
        requests: how many it took.
        tokens: output tokens of them all, end tokens included.
        steps: their decode steps, behind each request's first token.
        relaxed: tokens of theirs that were accepted by relaxation.
        seconds: from sending each to its end.
    """

    suite: str
    language: str
    method: str
    batch: int
    number: int
    token_ids: tuple[int, ...]
    text: str
    requests: int
    tokens: int
    steps: int
    relaxed: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """A line of the tables.

    Attributes:
        per_step: tokens that a decode step commits, the bonus included (the paper's Tok.).
        iterations: decode steps of a request (Iter.).
        repetition: words that equal the one before them, of all words.
        relaxed: tokens accepted by relaxation, of all tokens.
        tokens_per_s: output tokens by seconds of requests.
        memory: bytes that the server holds that ran it; None: it ran in none.
    """

    name: str
    sentences: int
    per_step: float
    iterations: float
    bleu: float
    chrf: float
    repetition: float
    relaxed: float
    tokens_per_s: float
    memory: int | None


@dataclass(frozen=True)
class Rate:
    """Output tokens and the seconds that all sentences took together, at one batch size."""

    language: str
    method: str
    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Exactness:
    """Outputs of exact methods against AT's.

    Attributes:
        compared: outputs.
        mismatches: where they differ, in words.
        contradictions: sentences on which AT differs from itself between batch sizes.
    """

    compared: int
    mismatches: tuple[str, ...]
    contradictions: int


@dataclass(frozen=True)
class Results:
    """All that was seen.

    Attributes:
        references: of each language, by sentence.
        memory: bytes that the plain server and ours hold.
        absent: rows that were not measured, with the reason.
    """

    methods: Mapping[str, Sequence[Method]]
    answers: Sequence[Answer]
    rates: Sequence[Rate]
    references: Mapping[str, Sequence[str]]
    memory: tuple[int, int]
    absent: Sequence[str]

    def rows(self, suite: str, language: str) -> list[Row]:
        """A table: each method's row, AT's first."""
        names = [method.name for method in self.methods[suite]]
        if any(a.method == ALONE for a in self.answers) and suite == SENTENCES:
            names.append(ALONE)
        return [row for name in names if (row := self.row(suite, language, name)) is not None]

    def row(self, suite: str, language: str, name: str) -> Row | None:
        """A method's row at batch 1; None: it was not measured."""
        own = [a for a in self._of(suite, name, 1) if a.language == language]
        if not own:
            return None
        texts = [a.text for a in own]
        wanted = [self.references[language][a.number] for a in own]
        tokens = sum(a.tokens for a in own)
        memory = {AT.name: self.memory[0], ALONE: None}.get(name, self.memory[1])
        return Row(
            name, len(own), per_step(own), sum(map(steps_of, own)) / sum(a.requests for a in own),
            bleu(texts, wanted, language), chrf(texts, wanted), repetition(texts),
            sum(a.relaxed for a in own) / tokens, tokens / sum(a.seconds for a in own), memory,
        )  # fmt: skip

    def languages(self) -> list[str]:
        """Those that were translated into."""
        return list(self.references)

    def exactness(self) -> Exactness:
        """Every output of an exact method, at all batch sizes."""
        exact = {m.name for methods in self.methods.values() for m in methods if m.exact}
        plain: dict[tuple[str, str, int], dict[int, tuple[int, ...]]] = {}
        for a in self.answers:
            if a.method == AT.name:
                plain.setdefault((a.suite, a.language, a.number), {})[a.batch] = a.token_ids
        compared, wrong = 0, []
        for a in self.answers:
            own = plain.get((a.suite, a.language, a.number), {})
            if a.method == AT.name or a.method not in exact or a.batch not in own:
                continue
            compared += 1
            # At batch 1 AT is one server's answer to one request; in a batch its rounding may
            # depend on what else is there, and either of its answers is right.
            right = (own[1],) if a.batch == 1 else tuple(own.values())
            if a.token_ids not in right:
                at = common_prefix(a.token_ids, own[a.batch])
                wrong.append(f"{a.method}, {a.language}, batch {a.batch}, {a.number}, token {at}")
        contradictions = sum(len(set(answers.values())) > 1 for answers in plain.values())
        return Exactness(compared, tuple(wrong), contradictions)

    def figures(self, length: int) -> dict[str, float]:
        """What the benchmark reports; what was not measured is not among them.

        Args:
            length: most nodes drafted a step.
        """
        exact = self.exactness()
        found: dict[str, float] = {
            "mismatches": len(exact.mismatches),
            "outputs_compared": exact.compared,
            "at_contradictions": exact.contradictions,
            "bleu_at": self._bleu(SENTENCES, AT.name),
            "accepted_per_step_sssd": per_step(self._of(SENTENCES, "SSSD", 1)),
            "speedup_sssd": self._speedup(SENTENCES, "SSSD"),
        }
        for suite, name, prefix in (
            (SETTINGS, "SSSD", "relaxed_sssd"), (GROWING, "SSBD", "relaxed_ssbd")
        ):  # fmt: skip
            for method in self.methods.get(suite, ()):
                if method.rule is not None and method.name.startswith(f"{name} relaxed"):
                    found |= self._relaxed(
                        suite, method.name, f"{prefix}_{{}}_{method.rule.figure}"
                    )
        if self._of(SENTENCES, f"SpecDec k={length}", 1):
            found |= self._specdec(length)
        return found

    def _specdec(self, length: int) -> dict[str, float]:
        names = f"SpecDec k={length}", f"SpecDec++ {Rule(*HIGH_QUALITY)}", "SpecDec with SSSD"
        specdec, relaxed, both = (self._speedup(SENTENCES, name) for name in names)
        sssd = self._speedup(SENTENCES, "SSSD")
        found = {
            "speedup_specdec": specdec,
            "speedup_specdecpp": relaxed,
            "speedup_specdec_vs_sssd": specdec / sssd,
            "speedup_together": both,
            "speedup_both_vs_better": both / max(specdec, sssd),
            "accepted_per_step_together": per_step(self._of(SENTENCES, names[2], 1)),
            "bleu_specdecpp": self._bleu(SENTENCES, names[1]),
            "bleu_loss_specdecpp": self._bleu(SENTENCES, AT.name) - self._bleu(SENTENCES, names[1]),
        }
        if self._of(SENTENCES, AUTO.name, 1):
            auto = self._speedup(SENTENCES, AUTO.name)
            budgeted = self._speedup(SENTENCES, "SSSD, budget auto")
            found["speedup_auto"] = auto
            found["speedup_auto_vs_best"] = auto / max(specdec, sssd, both, budgeted)
        for method in self.methods.get(SETTINGS, ()):
            if method.name.startswith("SpecDec k="):
                own = self._of(SETTINGS, method.name, 1)
                shape = "_chain" if method.name.endswith("chain") else ""
                found[f"accepted_per_step_k{method.length}{shape}"] = per_step(own)
            elif method.rule is not None and method.name.startswith("SpecDec++"):
                by = "" if method.rule.by == "target" else "_by_drafter"
                pattern = f"relaxed_specdec_{{}}_{method.rule.figure}{by}"
                found |= self._relaxed(SETTINGS, method.name, pattern)
        # On all sentences, not on those of its settings.
        chain = f"{names[0]}, chain"
        found[f"accepted_per_step_k{length}"] = per_step(self._of(SENTENCES, names[0], 1))
        found[f"accepted_per_step_k{length}_chain"] = per_step(self._of(SENTENCES, chain, 1))
        found["speedup_specdec_chain"] = self._speedup(SENTENCES, chain)
        return found

    def _relaxed(self, suite: str, name: str, pattern: str) -> dict[str, float]:
        own = self._of(suite, name, 1)
        return {
            pattern.format("accepted"): per_step(own),
            pattern.format("bleu"): self._bleu(suite, name),
            pattern.format("speedup"): self._speedup(suite, name),
        }

    def _of(self, suite: str, method: str, batch: int) -> list[Answer]:
        return [a for a in self.answers if (a.suite, a.method, a.batch) == (suite, method, batch)]

    def _bleu(self, suite: str, name: str) -> float:
        """The mean over languages."""
        rows = [self.row(suite, language, name) for language in self.languages()]
        return sum(r.bleu for r in rows if r is not None) / len(rows)

    def _speedup(self, suite: str, name: str) -> float:
        """Tokens by second over AT's, all languages together."""
        ours, plain = (self._of(suite, n, 1) for n in (name, AT.name))
        return _rate(ours) / _rate(plain)


def _rate(answers: Sequence[Answer]) -> float:
    return sum(a.tokens for a in answers) / sum(a.seconds for a in answers)


def steps_of(answer: Answer) -> int:
    """Decode steps; plain SGLang, which tells of none, takes one for each token but the first."""
    return answer.steps or answer.tokens - answer.requests


def per_step(answers: Iterable[Answer]) -> float:
    """Tokens that a decode step commits; those of prefills are not counted."""
    own = list(answers)
    steps = sum(map(steps_of, own))
    return sum(a.tokens - a.requests for a in own) / steps if steps else 0.0


def repetition(texts: Iterable[str]) -> float:
    """Words that equal the one before them, of all words: what blocks predicted at once do."""
    words = [text.lower().split() for text in texts]
    again = sum(a == b for line in words for a, b in pairwise(line))
    return again / max(1, sum(map(len, words)))
