"""Which steps look for drafts: all while looking pays, a few while it does not."""

import math

# Of the time of plain steps: what looks may lose while they do not pay.
DRAFTING_SHARE = 0.003
# However much looking loses, text that starts to repeat is noticed after so many steps.
MOST_UNDRAFTED = 64
# Looking pays while it promises to save so many times what it takes.
SURELY = 1.1
# Steps in a row that verify drafts: then a plain one is timed. At first few, later so many.
FIRST_VERIFIED, MOST_VERIFIED = 4, 256
# Looks that are made whatever they save, for a first mean; the quickest tells what a look takes.
_FIRST_LOOKS = 4
# Say of one look in what looks save in the mean.
_WEIGHT = 1 / 32


class DraftingRation:
    """Weighs what drafting takes against what the drafts that it finds save.

    On a CPU looking takes a percent of a step, at small batches one look in two or three finds
    drafts that save a good part of one: every step looks, whatever the last one found. On a GPU
    the device waits while the host looks, for 5 to 30% of a step. Where looks save less than they
    take, they may lose DRAFTING_SHARE of the time: one that nearly pays comes again sooner than
    one that finds nothing.

    What drafts save is told by what a plain step costs, which is known of those that run. Where
    looks pay and all find drafts, a step between them decodes plainly at times.
    """

    def __init__(self) -> None:
        self.drafting_s = 0.0
        """Seconds that a look takes."""
        self._looks = 0
        self._saved_s = 0.0  # by a look, in the mean
        self._variance = 0.0  # of what looks save
        self._credit = 0.0  # seconds that looking may still lose
        self._undrafted = 0  # steps since the last look
        self._verified = 0  # steps in a row that verified drafts
        self._most_verified = FIRST_VERIFIED
        self._step_s = 0.0  # of a step, in the mean

    def allows(self) -> bool:
        """Whether this step looks for drafts; asked once a step."""
        due = self._credit >= 0 or self._undrafted >= MOST_UNDRAFTED
        looks = self._looks < _FIRST_LOOKS or self._pays() or due
        if looks and self._must_time_a_plain_step():
            self._most_verified = min(2 * self._most_verified, MOST_VERIFIED)
            self._verified = 0
            looks = False
        self._undrafted = 0 if looks else self._undrafted + 1
        return looks

    def note_look(self, seconds: float, found: bool, saved_s: float) -> None:
        """A look took `seconds`; if it found drafts, they are verified and should save `saved_s`.

        What it takes is what the device waits for it.
        """
        self._looks += 1
        self._verified = self._verified + 1 if found else 0
        if self._looks <= _FIRST_LOOKS:
            # The first ones load what they run.
            self.drafting_s = min(seconds, self.drafting_s or seconds)
        # One look that was disturbed is not what drafting takes.
        seconds = min(seconds, 2 * self.drafting_s)
        self.drafting_s += 0.1 * (seconds - self.drafting_s)
        weight, off = max(_WEIGHT, 1 / self._looks), saved_s - self._saved_s
        self._saved_s += weight * off
        self._variance += weight * ((1 - weight) * off**2 - self._variance)
        # What has just paid is looked for again.
        self._credit = min(0.0, saved_s - seconds)

    def note_step(self, seconds: float) -> None:
        """A step's forward pass, and all that belongs to it, took `seconds`."""
        self._step_s += 0.1 * (seconds - self._step_s)
        self._credit = min(0.0, self._credit + DRAFTING_SHARE * seconds)

    def _pays(self) -> bool:
        # The mean of few looks may be too low: one that is too high is found out, by looking.
        doubt = math.sqrt(self._variance / max(1, self._looks))
        return self._saved_s + doubt > SURELY * self.drafting_s

    def _must_time_a_plain_step(self) -> bool:
        # Where looks save whole steps, what a plain one costs to a few percent decides nothing.
        return self._verified >= self._most_verified and self._saved_s < self._step_s
