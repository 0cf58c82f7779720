"""Asking drafters so that nothing that they raise reaches the scheduler."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar, TypeVarTuple

from sglang_ext.drafters import Drafter, DraftRequest, overrides

logger = logging.getLogger(__name__)

_LOGGED_EVERY = 100

Args = TypeVarTuple("Args")
Answer = TypeVar("Answer")
Default = TypeVar("Default")


class AskedDrafter:
    """One of a server's drafters: which hooks it has, looked up once, and its guarded calls.

    A hook that raises costs its call: the caller gets a default, and one line is logged, with the
    traceback the first time, then of every hundredth failure of the hook.

    Args:
        name: the drafter's, for messages.
        drafter: the drafter.

    Attributes:
        reads_prompts: it has `prefill`, or what follows it: `prefill_draft` or `bias`.
        prepares: it has `prepare`, or `prefill` in its place.
        drafts_in_prefill: it has `prefill_draft`.
        observes: it has `observe`.
        learns: it has `verified`.
        biases: it has `bias`.
        uses_exit: it is to be told of early exits, by `early_exit`.
    """

    def __init__(self, name: str, drafter: Drafter) -> None:
        self.name = name
        self.drafter = drafter
        prefills = overrides(drafter, Drafter.prefill)
        self.prepares = prefills or overrides(drafter, Drafter.prepare)
        self.drafts_in_prefill = overrides(drafter, Drafter.prefill_draft)
        self.biases = overrides(drafter, Drafter.bias)
        self.uses_exit = drafter.uses_early_exit
        self.reads_prompts = prefills or self.drafts_in_prefill or self.biases
        self.observes = overrides(drafter, Drafter.observe)
        self.learns = overrides(drafter, Drafter.verified)
        self._chooses_exits = overrides(drafter, Drafter.wants_early_exit)
        self._failures: Counter[str] = Counter()

    def wants_exit(self, request: DraftRequest) -> bool:
        """Whether it is to be told of this request's early exits."""
        if not self.uses_exit or not self._chooses_exits:
            return self.uses_exit
        return self.ask(self.drafter.wants_early_exit, request, default=False)

    def ask(
        self,
        hook: Callable[[*Args], Answer],
        *args: *Args,
        default: Default,
        check: Callable[[Answer], object] | None = None,
    ) -> Answer | Default:
        """What a hook answers; `default` where it raises.

        Args:
            hook: a method of the drafter.
            check: raises where the answer is malformed, which counts as if the hook had raised.
        """
        try:
            answer = hook(*args)
            if check is not None:
                check(answer)
        except Exception as error:
            self._note_failure(hook, error)
            return default
        return answer

    def tell(self, hook: Callable[[*Args], None], *args: *Args) -> bool:
        """Call a hook that answers nothing; whether it went through."""
        try:
            hook(*args)
        except Exception as error:
            self._note_failure(hook, error)
            return False
        return True

    def counters(self) -> Mapping[str, float]:
        """The drafter's totals since the start by name; none where it raises."""

        def counters() -> Mapping[str, float]:
            return self.drafter.counters

        return self.ask(counters, default={})

    def _note_failure(self, hook: Callable[..., object], error: Exception) -> None:
        name = getattr(hook, "__name__", repr(hook))  # a class may have callables without one
        failures = self._failures[name]
        self._failures[name] += 1
        if failures % _LOGGED_EVERY == 0:
            logger.error(
                "drafter %s failed in %s (failure %d): %s: %s",
                self.name,
                name,
                failures + 1,
                type(error).__name__,
                error,
                exc_info=error if failures == 0 else None,
            )
