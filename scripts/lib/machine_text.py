"""Real text to fill a datastore with: what is installed on this machine, tokenized and kept."""

import gzip
import hashlib
import json
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from scripts.lib.data_folder import data_folder
from sglang_ext.models import resolve
from sglang_ext.models.cached_tables import replace_file
from sglang_ext.models.store import default_cache_dir

GSM8K = data_folder("text") / "gsm8k_train.jsonl.gz"
TEXT_SUFFIXES = frozenset(
    (".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".js", ".md", ".pl", ".pm",
     ".rb", ".rst", ".sh", ".tcl", ".txt")
)  # fmt: skip
MOST_FILE_BYTES = 1 << 20  # larger ones are tables and generated code
ENCODE_CHARACTERS = 8 << 20


@dataclass(frozen=True)
class Documents:
    """Documents of token ids, end to end."""

    tokens: np.ndarray
    """uint16 or uint32[n]."""
    starts: np.ndarray
    """int64[documents + 1]; the last is the end of all."""

    @classmethod
    def load(cls, path: Path) -> "Documents":
        """From an object array of documents, each a list of ids (.npy). ValueError if it is not."""
        documents = np.load(path, allow_pickle=True)
        if documents.ndim != 1 or not len(documents):
            raise ValueError(
                f"{path} must hold a one-dimensional object array of documents, each a list of "
                f"token ids; it is {documents.dtype}{list(documents.shape)}"
            )
        return cls.join([np.asarray(document, np.uint32) for document in documents])

    @classmethod
    def join(cls, documents: Sequence[np.ndarray]) -> "Documents":
        sizes = [document.size for document in documents]
        return cls(np.concatenate(documents), np.cumsum([0, *sizes], dtype=np.int64))

    def __len__(self) -> int:
        return self.starts.size - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """int32: one document."""
        return self.tokens[self.starts[index] : self.starts[index + 1]].astype(np.int32)

    def first(self, num_tokens: int) -> "Documents":
        """The first documents, num_tokens or a little more in all (or as many as there are)."""
        count = min(int(np.searchsorted(self.starts, num_tokens)), len(self))
        return Documents(self.tokens[: self.starts[count]], self.starts[: count + 1])


def machine_text(model: str, num_tokens: int) -> Documents:
    """num_tokens or more of this machine's text (less if there is no more), cached."""
    folder = default_cache_dir() / "bench"
    tokens_file = folder / f"text-{Path(model).name}.tokens.npy"
    starts_file = folder / f"text-{Path(model).name}.starts.npy"
    if tokens_file.exists() and starts_file.exists():
        cached = Documents(np.load(tokens_file, mmap_mode="r"), np.load(starts_file))
        if cached.tokens.size >= num_tokens and cached.starts[-1] == cached.tokens.size:
            return cached.first(num_tokens)
    made = tokenize_machine(model, num_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    for file, array in ((tokens_file, made.tokens), (starts_file, made.starts)):
        with replace_file(file) as content:
            np.save(content, array)
    return made


def tokenizer_size(model: str) -> int:
    """Ids that a model's tokenizer has."""
    return load_tokenizer(model).get_vocab_size()


@cache
def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model path or name."""
    return Tokenizer.from_file(str(Path(resolve(model)) / "tokenizer.json"))


def tokenize_machine(model: str, num_tokens: int) -> Documents:
    """Tokenizes texts until there are num_tokens."""
    tokenizer = load_tokenizer(model)
    dtype = np.uint16 if tokenizer.get_vocab_size() < 1 << 16 else np.uint32
    documents: list[np.ndarray] = []
    total, began = 0, time.perf_counter()
    for batch in batches(machine_texts()):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            if encoding.ids:
                documents.append(np.array(encoding.ids, dtype))
                total += documents[-1].size
        rate = total / (time.perf_counter() - began)
        print(
            f"\rtokenizing this machine's text: {total / 1e6:.1f} of {num_tokens / 1e6:.0f}M "
            f"tokens, {max(0.0, num_tokens - total) / rate:.0f} s left ",
            end="",
            flush=True,
        )
        if total >= num_tokens:
            break
    print()
    return Documents.join(documents)


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in groups of some megabytes."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= ENCODE_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def machine_texts() -> Iterator[str]:
    """Sources, headers, documentation and GSM8K's answers, each text once, in a random order."""
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "include")}
    roots = [Path(path) for path in sorted(paths)] + [Path("/usr/share"), Path("/usr/include")]
    files = {
        path
        for root in roots
        for path in root.rglob("*")
        if path.suffix in TEXT_SUFFIXES and not path.is_symlink() and path.is_file()
    }
    items: list[Path | str] = [*sorted(files), *gsm8k()]
    random.Random(0).shuffle(items)
    seen: set[bytes] = set()
    for item in items:
        text = item if isinstance(item, str) else read_text(item)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if text and digest not in seen:
            seen.add(digest)
            yield text


def read_text(path: Path) -> str:
    """Nothing of what is too large, not readable, or no UTF-8."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            return ""
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def gsm8k() -> list[str]:
    """Questions with worked answers, where the shared test data are at hand."""
    if not GSM8K.exists():
        return []
    with gzip.open(GSM8K, "rt", encoding="utf-8") as lines:
        return [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]
