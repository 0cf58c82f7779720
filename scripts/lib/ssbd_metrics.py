"""What SSBD measures: normalized erasure, accepted drafts, and translation quality.

Sources. Normalized erasure (NE): Arivazhagan et al. 2020, "Re-translation versus Streaming for
Simultaneous Translation", as SSBD (arXiv 2509.21740) uses it: over a stream's outputs O_1 .. O_T

    NE = (1 / |O_T|) sum_{t=2..T} (|O_{t-1}| - |LCP(O_t, O_{t-1})|)

LCP is the longest common prefix and |.| counts tokens. A/D and A/O: SSBD, accepted draft tokens
by draft tokens and by output tokens. chrF and BLEU: sacrebleu (Post 2018).

Assumptions, where the papers leave a choice:
- NE counts words (split at white space); flores200 pieces where the target is written without
  spaces (Chinese, Japanese). Over several streams numerators and denominators are summed.
- Display-only mask-k holds back the last k tokens *of the model* from every output but the last.
  Where that cuts a word in two, the part is on the screen and counts as a word: completing it is
  an erasure. With whole_words the part is held back as well.
- The accepted draft tokens are the longest common prefix of the draft and the output. What
  realignment or retrieval drafts is accepted on top and not counted. A/O is by all output tokens,
  those of a stream's first update included, which has no draft; the end token is not counted.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import sacrebleu

from scripts.lib.ssbd_streams import Update, is_unspaced
from sglang_ext.captions.session_summary import Erasure
from sglang_ext.captions.session_summary import common_prefix as common_prefix

Tokenize = Callable[[str], list[str]]
Decode = Callable[[Sequence[int]], str]

_LAST_WORD = re.compile(r"\S+$")
_REPLACEMENT = "\ufffd"  # what an incomplete character of several bytes decodes to


@dataclass(frozen=True)
class Ratio:
    """Counts that are summed over streams before they are divided."""

    part: int = 0
    whole: int = 0

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.part + other.part, self.whole + other.whole)

    @property
    def value(self) -> float:
        """part / whole; 0 where there is nothing."""
        return self.part / self.whole if self.whole else 0.0


def erasure(shown: Sequence[Sequence[str]]) -> Ratio:
    """One stream's NE: tokens erased by tokens of the last output.

    Args:
        shown: the tokens on display after each update.
    """
    counted = Erasure()
    for number, tokens in enumerate(shown, start=1):
        counted.show(0, tokens, final=number == len(shown))
    return Ratio(counted.erased, counted.words)


def displayed(
    token_ids: Sequence[int], mask: int, decode: Decode, *, whole_words: bool = False
) -> str:
    """The text on display while the last `mask` tokens of an output are held back.

    Args:
        whole_words: hold back the beginning of a word, too, whose rest is held back.
    """
    if not mask:
        return decode(token_ids)
    shown = decode(token_ids[: max(0, len(token_ids) - mask)]).rstrip(_REPLACEMENT)
    if whole_words and decode(token_ids)[len(shown) :][:1].strip():
        shown = _LAST_WORD.sub("", shown)
    return shown


def acceptance(drafts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[Ratio]:
    """A/D and A/O of a stream's updates, in this order.

    Args:
        drafts: each update's draft, empty where there was none.
        outputs: the token ids written, without the end token.
    """
    accepted = sum(common_prefix(d, o) for d, o in zip(drafts, outputs, strict=True))
    return [Ratio(accepted, sum(map(len, drafts))), Ratio(accepted, sum(map(len, outputs)))]


def words(text: str) -> list[str]:
    """The words of a text, split at white space."""
    return text.split()


def tokenizer_for(language: str) -> Tokenize:
    """What NE counts in a language: flores200 pieces where it has no spaces, else words.

    Raises:
        ValueError: sacrebleu's flores200 model is needed and not there; the message says what
            to do.
    """
    if not is_unspaced(language):
        return words
    spm = _flores200()
    return lambda text: spm(text).split()


def bleu_tokenizer(language: str) -> str:
    """sacrebleu's name of the tokenizer that BLEU takes for a target language."""
    if language.strip().lower() == "chinese":
        return "zh"
    return "flores200" if is_unspaced(language) else "13a"


def chrf(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF (chrF2, sacrebleu's defaults), 0 to 100."""
    return sacrebleu.corpus_chrf(outputs, [references]).score


def bleu(outputs: Sequence[str], references: Sequence[str], language: str) -> float:
    """Corpus BLEU (sacrebleu's defaults and `bleu_tokenizer`), 0 to 100."""
    return sacrebleu.corpus_bleu(outputs, [references], tokenize=bleu_tokenizer(language)).score


@dataclass(frozen=True)
class Language:
    """How outputs in the target language are read.

    Attributes:
        name: in English.
        tokenize: what NE counts; see `tokenizer_for`.
        decode: the model's token ids to text, special tokens left out.
    """

    name: str
    tokenize: Tokenize
    decode: Decode


@dataclass(frozen=True)
class Row:
    """A line of the paper's tables.

    Attributes:
        streams: how many it is over.
        chrf, bleu: of the last outputs, 0 to 100.
        ne: normalized erasure of what is displayed.
        ad, ao: accepted draft tokens by draft tokens, by output tokens.
        tokens_per_s: output tokens by seconds of requests.
    """

    name: str
    streams: int
    chrf: float
    bleu: float
    ne: float
    ad: float
    ao: float
    tokens_per_s: float


def row(
    name: str,
    outputs: Mapping[int, Sequence[Update]],
    references: Sequence[str],
    language: Language,
    *,
    mask: int = 0,
    trim: int | None = 0,
    whole_words: bool = False,
) -> Row:
    """What one mode did.

    Args:
        outputs: by stream, its updates in order.
        references: by stream.
        mask: display-only mask-k.
        trim: tokens at the last output's end that were not drafted; None: nothing was drafted.
        whole_words: see `displayed`.

    Raises:
        ValueError: there is no stream.
    """
    if not outputs:
        raise ValueError(f"{name}: no stream was translated")
    ne, ad, ao = Ratio(), Ratio(), Ratio()
    for updates in outputs.values():
        ids = [update.token_ids for update in updates]
        shown = [
            displayed(u.token_ids, 0 if u.final else mask, language.decode, whole_words=whole_words)
            for u in updates
        ]
        ne += erasure([language.tokenize(text) for text in shown])
        if trim is not None:
            drafts = [(), *(tokens[: max(0, len(tokens) - trim)] for tokens in ids[:-1])]
            by_draft, by_output = acceptance(drafts, ids)
            ad, ao = ad + by_draft, ao + by_output
    last = [updates[-1].text for updates in outputs.values()]
    wanted = [references[stream] for stream in outputs]
    return Row(
        name=name,
        streams=len(outputs),
        chrf=chrf(last, wanted),
        bleu=bleu(last, wanted, language.name),
        ne=ne.value,
        ad=ad.value,
        ao=ao.value,
        tokens_per_s=speed(outputs),
    )


def speed(outputs: Mapping[int, Sequence[Update]]) -> float:
    """Output tokens, end tokens included, by seconds of requests."""
    updates = [update for stream in outputs.values() for update in stream]
    return sum(u.tokens for u in updates) / sum(u.seconds for u in updates)


@cache
def _flores200() -> Callable[[str], str]:
    from sacrebleu.tokenizers.tokenizer_spm import Flores200Tokenizer
    from sacrebleu.utils import SACREBLEU_DIR

    try:
        return Flores200Tokenizer()
    except (OSError, RuntimeError, ImportError) as error:
        raise ValueError(
            "NE of a target without spaces counts flores200 pieces, and sacrebleu's model of them "
            f"could not be downloaded ({error}); put flores200_sacrebleu_tokenizer_spm.model at "
            f"{SACREBLEU_DIR}/models/flores200sacrebleuspm"
        ) from None
