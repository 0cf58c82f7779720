"""What bench_specdec asks of its two servers: sentences one by one, or several in flight."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scripts.lib.client import generate
from scripts.lib.data_folder import data_folder
from scripts.lib.specdec_methods import AT, Method
from scripts.lib.specdec_results import SENTENCES, Answer, Rate
from scripts.lib.ssbd_streams import Stream, read_streams
from scripts.lib.translation_runs import Progress, Prompts, fresh_cache, server_template

DATA = data_folder("parallel")
TEST, TRAIN = "multi30k.test_2016_flickr", "multi30k.train"
ENDINGS = {"French": "fr", "German": "de"}
AT_ONCE = 16


@dataclass(frozen=True)
class Pair:
    """A pair of languages to translate, as prompts are made from it (PromptSettings)."""

    model: str
    template: str
    source_language: str
    target_language: str


@dataclass(frozen=True)
class Bench:
    """Two servers that are up together, and what is asked of both.

    Attributes:
        plain, ours: their URLs.
        max_tokens: of an answer, the end token included.
    """

    plain: str
    ours: str
    prompts: Prompts
    language: str
    max_tokens: int

    def url(self, method: Method) -> str:
        """The server that a method runs on."""
        return self.plain if method is AT else self.ours

    def answer(
        self, suite: str, method: Method, number: int, sources: Sequence[str], batch: int = 1
    ) -> Answer:
        """Translate a sentence, or each beginning of one that grows, one after the other."""
        last: tuple[int, ...] = ()
        text, tokens, steps, relaxed, seconds = "", 0, 0, 0, 0.0
        for source in sources:
            made = generate(
                self.url(method),
                self.prompts.ids(source),
                params=method.params(last),
                max_new_tokens=self.max_tokens,
            )
            last, text = self.prompts.without_end(made.token_ids), made.text
            tokens += len(made.token_ids)
            steps += made.steps
            relaxed += made.relaxed
            seconds += made.seconds
        return Answer(
            suite, self.language, method.name, batch, number, last, text, len(sources), tokens,
            steps, relaxed, seconds,
        )  # fmt: skip

    def one_by_one(
        self, suite: str, methods: Sequence[Method], streams: Sequence[Stream]
    ) -> Iterator[Answer]:
        """Batch 1: each sentence by all methods, which take turns at being first."""
        progress = Progress(f"{self.language}, {suite}", len(streams) * len(methods))
        for number, stream in enumerate(streams):
            first = number % len(methods)
            for method in [*methods[first:], *methods[:first]]:
                fresh_cache(self.url(method), self.prompts)
                yield self.answer(suite, method, number, stream.sources)
            progress.show(len(methods), f"sentence {number + 1} of {len(streams)}")

    def in_flight(
        self, methods: Sequence[Method], streams: Sequence[Stream], batch: int
    ) -> Iterator[tuple[Rate, list[Answer]]]:
        """All sentences, `batch` of them under way at once, by each method."""
        for method in methods:
            fresh_cache(self.url(method), self.prompts)
            start = time.perf_counter()
            with ThreadPoolExecutor(batch) as pool:
                jobs = [
                    pool.submit(self.answer, SENTENCES, method, n, stream.sources, batch)
                    for n, stream in enumerate(streams)
                ]
                answers = [job.result() for job in jobs]
            seconds = time.perf_counter() - start
            tokens = sum(a.tokens for a in answers)
            print(f"{self.language}, batch {batch}: {method.name} {tokens / seconds:.1f} tok/s")
            yield Rate(self.language, method.name, batch, tokens, seconds), answers


def pair_of(model: str, language: str) -> Pair:
    """English into a language, as the server's own translation sessions ask."""
    return Pair(model, server_template(), "English", language)


def streams_of(language: str, count: int, lag: int) -> list[Stream]:
    """The first `count` sentences of the test, each growing by `lag` words."""
    source, reference = (DATA / f"{TEST}.{e}.gz" for e in ("en", ENDINGS[language]))
    return read_streams(source, reference, lag=lag, count=count)
