"""How quiet the machine was while a sweep ran, and whether its repeats bear out a least ratio.

The least of many ratios is the one that was disturbed most, if any was: it is stated only where
repeats of the same ratio agree well enough.
"""

from collections.abc import Iterator, Sequence

from sglang_ext.servers.cpu_watch import Shares
from sglang_ext.sweep.repeatability import ratio_error
from sglang_ext.sweep.results import PointResult

MOST_ERROR_PERCENT = 15.0
"""A least ratio is given where a point's median ratio is this far off at most, at 95%."""

Ratios = Sequence[Sequence[float]]


def supports(ratios: Ratios) -> bool:
    """Whether repeats agree well enough for the least of these points' ratios to be given."""
    error = ratio_error(ratios)
    return error is not None and error <= MOST_ERROR_PERCENT


def is_disturbed(ratios: Ratios) -> bool:
    """Whether points were repeated and their repeats differ too far."""
    error = ratio_error(ratios)
    return error is not None and error > MOST_ERROR_PERCENT


def doubts(ratios: Ratios) -> Iterator[str]:
    """Why no least ratio is given, where there are ratios."""
    if not any(ratios) or supports(ratios):
        return
    error = ratio_error(ratios)
    if error is None:
        yield (
            "no ratio was measured twice, so nothing tells how far off it is: no least ratio is "
            "given; --repeats 2 or more gives one"
        )
        return
    yield (
        f"disturbed: repeats of the same ratio differ so far that one may be off by {error:.0f}% "
        f"(at most {MOST_ERROR_PERCENT:.0f}% is borne): no least ratio is given; measure on a "
        "quieter machine, or with more --repeats and --prompts"
    )


def shares_of(runs: Sequence[PointResult]) -> Shares | None:
    """What others took over all of these runs, by their time; None: no run knows."""
    known = [(run.duration_s, run.others) for run in runs if run.others is not None]
    seconds = sum(duration for duration, _ in known)
    if not seconds:
        return None
    stolen = sum(duration * others.stolen for duration, others in known) / seconds
    foreign = [(duration, others.foreign) for duration, others in known]
    told = [(duration, share) for duration, share in foreign if share is not None]
    if not told:
        return Shares(None, stolen)
    return Shares(sum(d * s for d, s in told) / sum(d for d, _ in told), stolen)


def disturbed_runs(runs: Sequence[PointResult]) -> Iterator[str]:
    """One line on the runs that others disturbed, if there are any."""
    found = [run for run in runs if run.others is not None and run.others.disturbed]
    shares = shares_of(found)
    if shares is not None:
        yield f"disturbed: in {len(found)} of {len(runs)} runs {shares}"
