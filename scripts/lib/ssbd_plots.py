"""The tables of SSBD's paper (arXiv 2509.21740, Tables 2 to 4) from kept outputs: printed, drawn.

1. The sweep of beta: quality, normalized erasure, accepted drafts, speed; of SSBD as published,
   with realignment alone, and with realignment and retrieval ("SSBD+").
2. mask-k: display-only, against mask-k that trims the draft as well.
3. AR and SSBD+ on all streams.
Rows of one table are over the same streams; speedups are against its AR, and NE is lower than
that of its AR without mask.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.ssbd_metrics import Decode, Language, Row, common_prefix, row, tokenizer_for
from scripts.lib.ssbd_streams import Settings, Update, by_stream

BETAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
BETA = 0.2
MASKS = (3, 5)
SHOWN_MISMATCHES = 5


@dataclass(frozen=True)
class Mode:
    """A way to decode a stream.

    Attributes:
        beta: the bias; None: plain decoding (AR).
        trim: tokens at the last output's end that are not drafted.
        realign: draft on from the last output behind a disagreement.
        retrieve: draft from prompt, output and datastore behind it.
        on_all_streams: measured on all streams, not on the timed ones alone.
    """

    name: str
    beta: float | None = None
    trim: int = 0
    realign: bool = False
    retrieve: bool = False
    on_all_streams: bool = False

    def params(self, draft: Sequence[int], final: bool = False) -> dict[str, Any]:
        """custom_params of a request whose stream wrote `draft` last.

        Args:
            final: it is the stream's last one; as in a session, its output joins the datastore.
        """
        if self.beta is None:
            return {"drafter": "none", "ingest": False}
        ssbd = {
            "draft": list(draft), "beta": self.beta, "trim": self.trim,
            "realign": self.realign, "retrieve": self.retrieve,
        }  # fmt: skip
        # A namespace of its own: no mode drafts from what another has written.
        return {
            "drafter": "ssbd", "ssbd": ssbd, "ingest": self.retrieve and final,
            "namespace": f"beta-{self.beta:g}",
        }  # fmt: skip


AR = Mode("AR", on_all_streams=True)
PUBLISHED = tuple(Mode(f"SSBD b={beta:g}", beta) for beta in BETAS)
PUBLISHED_DEFAULT = PUBLISHED[BETAS.index(BETA)]
EXACT, DEFAULT = (
    Mode(f"SSBD+ b={beta:g}", beta, realign=True, retrieve=True, on_all_streams=True)
    for beta in (0.0, BETA)
)
REALIGNED = Mode(f"SSBD b={BETA:g} realigned", BETA, realign=True)
TRIMMED = tuple(Mode(f"SSBD b={BETA:g} trim {k}", BETA, trim=k) for k in MASKS)
MODES = (AR, *PUBLISHED, REALIGNED, EXACT, DEFAULT, *TRIMMED)


@dataclass(frozen=True)
class Table:
    """Rows over the same streams, the first one AR's without mask."""

    title: str
    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def speedup(self, name: str) -> float:
        """A row's tokens per second by AR's."""
        return self[name].tokens_per_s / self.rows[0].tokens_per_s

    def ne_reduction(self, name: str) -> float:
        """How much lower a row's NE is than AR's, as a fraction of it; 0 where AR has none."""
        plain = self.rows[0].ne
        return 1 - self[name].ne / plain if plain else 0.0

    def lines(self) -> Iterator[str]:
        """The table as text."""
        yield f"{self.title} ({self.rows[0].streams} streams)"
        yield (
            f"{'mode':28} {'chrF':>6} {'BLEU':>6} {'NE':>6} {'less':>6} {'A/D':>6} {'A/O':>6} "
            f"{'tok/s':>7} {'speedup':>8}"
        )
        for r in self.rows:
            accepted = f"{r.ad:>6.1%} {r.ao:>6.1%}" if r.ad or r.ao else f"{'-':>6} {'-':>6}"
            yield (
                f"{r.name:28} {r.chrf:>6.2f} {r.bleu:>6.2f} {r.ne:>6.3f} "
                f"{self.ne_reduction(r.name):>6.1%} {accepted} {r.tokens_per_s:>7.2f} "
                f"{self.speedup(r.name):>7.2f}x"
            )


@dataclass(frozen=True)
class Exactness:
    """Outputs at beta 0 against AR's, token id by token id.

    Attributes:
        checked: outputs compared.
        mismatches: where they differ, in words.
        contradictions: sources on which AR itself differs between the batch sizes.
    """

    checked: int
    mismatches: tuple[str, ...]
    contradictions: int


class Tables:
    """What kept outputs say.

    Args:
        decode: the model's token ids to text, special tokens left out.

    Raises:
        ValueError: no stream was translated in all modes.
    """

    def __init__(self, settings: Settings, updates: Sequence[Update], decode: Decode):
        self.settings = settings
        self._updates = updates
        self._language = self.language(settings, decode)
        outputs = {mode.name: by_stream(updates, mode.name, 1) for mode in MODES}
        timed = _on_common_streams(outputs)
        self.sweep = Table(
            "Quality, flicker and speed against beta",
            tuple(self._row(timed, mode) for mode in MODES if not mode.trim),
        )
        masked = [(AR, 0), (AR, MASKS[-1])]
        masked += [(mode, k) for mode in (PUBLISHED_DEFAULT, DEFAULT) for k in (0, *MASKS)]
        masked += [(mode, mode.trim) for mode in TRIMMED]
        self.masks = Table(
            "mask-k: display-only, and trimming the draft",
            tuple(self._row(timed, mode, mask) for mode, mask in masked),
        )
        everywhere = _on_common_streams(
            {m.name: outputs[m.name] for m in MODES if m.on_all_streams}
        )
        main = [self._row(everywhere, mode) for mode in (AR, EXACT, DEFAULT)]
        main += [self._row(everywhere, DEFAULT, k) for k in MASKS]
        main += [self._row(everywhere, DEFAULT, k, whole_words=True) for k in MASKS[-1:]]
        self.all_streams = Table("AR and SSBD+ on all streams", tuple(main))

    @staticmethod
    def language(settings: Settings, decode: Decode) -> Language:
        """How the target language is read.

        Raises:
            ValueError: what its NE counts needs a file that is not there.
        """
        name = settings.target_language
        return Language(name, tokenizer_for(name), decode)

    def _row(
        self,
        outputs: Mapping[str, Mapping[int, Sequence[Update]]],
        mode: Mode,
        mask: int = 0,
        *,
        whole_words: bool = False,
    ) -> Row:
        name = _masked(mode, mask) + (", whole words" if whole_words else "")
        return row(
            name, outputs[mode.name], self.settings.references, self._language, mask=mask,
            trim=None if mode.beta is None else mode.trim, whole_words=whole_words,
        )  # fmt: skip

    def exactness(self) -> Exactness:
        """Every output at beta 0, both batch sizes."""
        texts = {
            (u.mode, u.batch, u.stream, u.step): u.token_ids
            for u in self._updates
            if u.mode in (AR.name, EXACT.name, PUBLISHED[0].name)
        }
        plain: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        for (mode, batch, stream, step), tokens in texts.items():
            if mode == AR.name:
                plain.setdefault((stream, step), {})[batch] = tokens
        checked, wrong = 0, []
        for (mode, batch, stream, step), tokens in texts.items():
            own = plain.get((stream, step), {})
            if mode == AR.name or batch not in own:
                continue
            checked += 1
            # At batch 1 AR is one server's answer to one request; at batch 8 its rounding may
            # depend on what else is in the batch, and either of its answers is right.
            if tokens not in ((own[batch],) if batch == 1 else own.values()):
                at = common_prefix(tokens, own[batch])
                wrong.append(f"{mode}, batch {batch}, stream {stream}, update {step}, token {at}")
        contradictions = sum(len(set(answers.values())) > 1 for answers in plain.values())
        return Exactness(checked, tuple(wrong), contradictions)

    def print(self) -> None:
        """All tables, and where an output at beta 0 is not AR's."""
        s = self.settings
        print(
            f"\n{s.model}, {s.source} ({s.source_language} to {s.target_language}), "
            f"lag {s.lag}, batch 1, greedy"
        )
        for table in (self.sweep, self.masks, self.all_streams):
            print("", *table.lines(), sep="\n")
        exact = self.exactness()
        print(
            f"\nbeta 0: {exact.checked} outputs compared with AR's, {len(exact.mismatches)} "
            "differ; AR contradicts itself between batch sizes on "
            f"{exact.contradictions} sources"
        )
        for line in exact.mismatches[:SHOWN_MISMATCHES]:
            print(f"    differs: {line}")
        print(
            "(less: NE below AR's without mask; A/D, A/O: accepted draft tokens by draft and by\n"
            "output tokens; SSBD: as published; realigned: with realignment alone; SSBD+: with\n"
            "realignment and retrieval; mask k: the last k tokens of each output but the last are\n"
            "not displayed; trim k: nor drafted; whole words: nor is the beginning of a word that\n"
            "the mask cuts)"
        )

    def figures(self) -> dict[str, float]:
        """What the benchmark reports, and what it rests on."""
        table, sweep, exact = self.all_streams, self.sweep, self.exactness()
        plain, ours, masked = table[AR.name], table[DEFAULT.name], _masked(DEFAULT, MASKS[-1])
        return {
            "mismatches_beta0": len(exact.mismatches),
            "speedup_beta02": table.speedup(DEFAULT.name),
            "ne_reduction_beta02": table.ne_reduction(DEFAULT.name),
            "ne_reduction_mask5": table.ne_reduction(masked),
            "ne_reduction_mask5_words": table.ne_reduction(f"{masked}, whole words"),
            "chrf_delta_beta02": ours.chrf - plain.chrf,
            "speedup_realign_vs_published": sweep.speedup(DEFAULT.name)
            / sweep.speedup(PUBLISHED_DEFAULT.name),
            "ad_beta02": ours.ad,
            "ao_beta02": ours.ao,
            "ne_ar": plain.ne,
            "outputs_compared": exact.checked,
            "ar_contradictions": exact.contradictions,
            "streams": plain.streams,
            "timed_streams": sweep.rows[0].streams,
        }

    def plot(self, folder: Path) -> None:
        """Draw the tables: beta.{png,svg} and mask.{png,svg} in a folder, made if not there."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in (("beta", self.draw_sweep()), ("mask", self.draw_masks())):
            for ending in ("png", "svg"):
                figure.savefig(folder / f"{name}.{ending}", dpi=150, bbox_inches="tight")
        print(f"plots: {folder}/beta.png, {folder}/mask.png, and the same as SVG")

    def draw_sweep(self) -> Any:
        """Quality, normalized erasure and speed against beta, as a matplotlib figure."""
        figure, axes = _panels(3)
        published = [self.sweep[mode.name] for mode in PUBLISHED]
        ours = [self.sweep[mode.name] for mode in (EXACT, DEFAULT)]
        plain = self.sweep.rows[0]
        drawn = {"chrf": "chrF", "ne": "normalized erasure", "tokens_per_s": "output tok/s"}
        for axis, (key, label) in zip(axes, drawn.items(), strict=True):
            axis.axhline(getattr(plain, key), color="gray", linestyle="--", label="AR")
            axis.plot(BETAS, [getattr(r, key) for r in published], marker="o", label="SSBD")
            axis.plot((0, BETA), [getattr(r, key) for r in ours], marker="s", label="SSBD+")
            axis.set(xlabel="beta", ylabel=label)
            axis.set_ylim(bottom=None if key == "chrf" else 0)
        axes[0].legend()
        figure.suptitle(f"{self.settings.model}, {plain.streams} streams")
        return figure

    def draw_masks(self) -> Any:
        """Normalized erasure and speed by mask, as a matplotlib figure."""
        figure, axes = _panels(2)
        rows = self.masks.rows[::-1]
        names = [r.name for r in rows]
        axes[0].barh(names, [r.ne for r in rows])
        axes[0].set_xlabel("normalized erasure")
        axes[1].barh(names, [self.masks.speedup(r.name) for r in rows], color="tab:orange")
        axes[1].set(xlabel="speedup over AR", yticklabels=[])
        figure.suptitle(f"{self.settings.model}, {rows[0].streams} streams")
        return figure


def _masked(mode: Mode, mask: int) -> str:
    return f"{mode.name}, mask {mask}" if mask else mode.name


def _on_common_streams(
    outputs: Mapping[str, Mapping[int, Sequence[Update]]],
) -> dict[str, dict[int, Sequence[Update]]]:
    """The streams that all of these modes translated."""
    common = set.intersection(*(set(own) for own in outputs.values()))
    if not common:
        missing = ", ".join(name for name, own in outputs.items() if not own)
        raise ValueError(f"no stream was translated in all modes (none in: {missing or '-'})")
    return {name: {i: own[i] for i in own if i in common} for name, own in outputs.items()}


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    """A figure with `count` panels side by side, drawn without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * count, 3.4), layout="constrained")
    return figure, list(figure.subplots(1, count))
