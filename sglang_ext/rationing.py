"""Which steps look for drafts: all while looking pays, a few while it does not."""

# Of the time of plain steps; drafting for a large batch takes as long as some percent of a step.
DRAFTING_SHARE = 0.003
# However long drafting takes, text that starts to repeat is noticed after so many steps.
MOST_UNDRAFTED = 16
# Looking pays while it promises to save so many times what it takes: a promise is no saving yet.
SURELY = 2.0
# Say of one look in what looks save in the mean.
_WEIGHT = 1 / 32


class DraftingRation:
    """Weighs what drafting takes against what the drafts that it finds save.

    At small batches one look in two or three finds drafts that save a good part of a step, and
    looking takes a percent of one: every step looks, whatever the last one found. Where looks
    save less than they take, they get DRAFTING_SHARE of the time.
    """

    def __init__(self) -> None:
        self.drafting_s = 0.0
        """Seconds that a look takes."""
        self._saved_s = 0.0  # by a look, in the mean
        self._credit = 0.0  # seconds that looking may still take
        self._undrafted = 0

    def allows(self) -> bool:
        """Whether this step looks for drafts; asked once a step."""
        self._undrafted += 1
        pays = self._saved_s > SURELY * self.drafting_s
        if not pays and self._credit < 0 and self._undrafted <= MOST_UNDRAFTED:
            return False
        self._undrafted = 0
        return True

    def note_look(self, seconds: float, found: bool, saved_s: float) -> None:
        """A look took `seconds`; what it found is verified, and should save `saved_s`."""
        if not self.drafting_s:
            self.drafting_s = seconds
        # One look that was disturbed is not what drafting takes.
        self.drafting_s += 0.1 * (min(seconds, 2 * self.drafting_s) - self.drafting_s)
        self._saved_s += _WEIGHT * (saved_s - self._saved_s)
        # What has just paid is looked for again.
        self._credit = 0.0 if found else -seconds

    def note_step(self, seconds: float) -> None:
        """A step's forward pass, and all that belongs to it, took `seconds`."""
        self._credit = min(0.0, self._credit + DRAFTING_SHARE * seconds)
