"""What the datastore's routes answer, for /openapi.json."""

from pydantic import BaseModel, ConfigDict

from datastores import DatastoreInfo


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Ranks(_Answer):
    """The datastore of each data-parallel rank."""

    ranks: list[DatastoreInfo]


Info = DatastoreInfo | Ranks


class Flushed(_Answer):
    """Tokens that can be found."""

    tokens: int


class Namespaces(_Answer):
    """Served tokens by namespace."""

    namespaces: dict[str, int]


class NamespaceName(_Answer):
    """The name by which a namespace is listed and deleted."""

    namespace: str


class Deleted(_Answer):
    """Tokens that are gone."""

    deleted_tokens: int


class CorpusName(_Answer):
    """A corpus; namespace null: everybody's."""

    namespace: str | None
    name: str


class Corpora(_Answer):
    """The corpora of the datastore."""

    corpora: list[CorpusName]


class AddedCorpus(_Answer):
    """A corpus that can be drafted from now; note: what of it was left out."""

    namespace: str | None
    name: str
    tokens: int
    note: str | None = None
