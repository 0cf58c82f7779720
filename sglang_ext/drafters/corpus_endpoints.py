"""What SGLang asks of a speculative worker for its corpus routes (/add_external_corpus, ...)."""

from sglang_ext.drafters.named_corpora import Corpora, documents_of


class CorpusEndpoints:
    """SGLang's side of `Corpora`: a worker that inherits from it sets `_corpora`."""

    _corpora: Corpora

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        """SGLang's /add_external_corpus; returns the number of tokens loaded."""
        return self._corpora.add(corpus_id, documents_of(token_chunks))

    def commit_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Nothing left to do: a corpus serves as soon as it is added."""

    def remove_external_corpus(self, corpus_id: str) -> None:
        """SGLang's /remove_external_corpus."""
        self._corpora.remove(corpus_id)

    def list_external_corpora(self) -> dict[str, int]:
        """SGLang's /list_external_corpora: tokens by corpus."""
        return self._corpora.tokens_by_name()
