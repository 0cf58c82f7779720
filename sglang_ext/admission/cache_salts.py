"""`cache_salt` and `extra_key`, which divide SGLang's prefix cache, name the tenant here too."""

import hashlib
from typing import Any

from sglang_ext.request_options import RequestOptionError, shown

_PREFIX = "salt:"
_DIGEST_BYTES = 16


def salt_namespace(extra_key: str | None, cache_salt: str | None, key: str) -> str | None:
    """The namespace that a request's fields name; None: it has neither of them.

    Its name is a keyed BLAKE2b hash, so that names, files and logs give no salt away.

    Args:
        extra_key, cache_salt: SGLang's fields (managers/io_struct.py); empty is none.
        key: `--namespace-key`; who has it can try whether a salt has a name.
    """
    if not extra_key and not cache_salt:
        return None
    secret = hashlib.blake2b(key.encode()).digest()
    digest = hashlib.blake2b(key=secret, digest_size=_DIGEST_BYTES, person=b"sglext namespace")
    for field in (extra_key or "", cache_salt or ""):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return _PREFIX + digest.hexdigest()


def agreed_namespace(
    given: str | None, extra_key: str | None, cache_salt: str | None, key: str
) -> str | None:
    """The namespace that a request's salts name, else the one that is given.

    Args:
        given: by custom_params or the header; None: by neither.
        extra_key, cache_salt, key: as in `salt_namespace`.

    Raises:
        RequestOptionError: both name one, and not the same.
    """
    name = salt_namespace(extra_key, cache_salt, key)
    if name is None:
        return given
    if given not in (None, name):
        salts = (("extra_key", extra_key), ("cache_salt", cache_salt))
        fields = " and ".join(field for field, value in salts if value)
        raise RequestOptionError(
            f"the namespace {shown(given)} (custom_params.namespace, or the header) contradicts "
            f"{fields}, which names a namespace too: send one of them, or start the server with "
            "--salt-namespaces 0, where salts divide the prefix cache alone"
        )
    return name


def name_by_salts(request: Any, key: str) -> None:
    """Have a request's `custom_params` name the namespace of its salts.

    Args:
        request: SGLang's TokenizedGenerateReqInput, or one without sampling (embeddings), which is
            left as it is.
        key: `--namespace-key`.

    Raises:
        RequestOptionError: it names another namespace as well.
    """
    sampling = getattr(request, "sampling_params", None)
    extra_key, cache_salt = (getattr(request, n, None) for n in ("extra_key", "cache_salt"))
    if sampling is None or not (extra_key or cache_salt):
        return
    params = sampling.custom_params or {}
    namespace = agreed_namespace(params.get("namespace"), extra_key, cache_salt, key)
    sampling.custom_params = {**params, "namespace": namespace}
