"""How much of the kit's time each phase may take."""

from collections.abc import Sequence

# Seconds that a phase asks for where the kit has nine minutes.
SECONDS = {
    "environment": 40,
    "kernels": 40,
    "lossless": 150,
    "sampling": 50,
    "latency": 180,
    "trace": 60,
}
# Kept back for what the kit itself writes at its end, and for killing what hangs.
RESERVE_S = 8.0
# Below this nothing is started: importing SGLang alone takes longer.
LEAST_S = 5.0


def allowance(remaining_s: float, phases: Sequence[str]) -> float:
    """Seconds for the first of `phases`, from what is left for all of them.

    A phase gets the part that its share of SECONDS is of the shares still to come, so that what an
    earlier one left over, or took too much, is spread over those behind it.
    """
    usable = max(0.0, remaining_s - RESERVE_S)
    return usable * SECONDS[phases[0]] / sum(SECONDS[phase] for phase in phases)


def chosen(text: str) -> list[str]:
    """Phases by name or number, comma-separated, in the kit's order.

    Raises:
        ValueError: one of them is unknown.
    """
    names = list(SECONDS)
    numbers = {str(n): name for n, name in enumerate(names, 1)}
    wanted = set()
    for word in text.split(","):
        name = numbers.get(word.strip(), word.strip())
        if name not in SECONDS:
            known = ", ".join(f"{n} {name}" for n, name in enumerate(names, 1))
            raise ValueError(f"--phases {text}: {word!r} is none of {known}")
        wanted.add(name)
    return [name for name in names if name in wanted]
