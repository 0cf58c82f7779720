"""Tells steps that were held up from steps that are dear, by the CPU time that they used.

A dear step takes its threads longer. One that other programs, the host of a virtual machine or a
cgroup's limit held up takes as much work as ever and more of the clock: fewer processors a second
than steps of its kind use otherwise.
"""

# Below this part of the usual number of processors a step was held up.
_LEAST_PART = 0.8
# How fast the usual number follows steps that use more, and those that use fewer: held-up steps
# hardly move it, but where they stay (a machine that is shared for good) they are usual in some
# 200 steps, and are learned from.
_RISE, _FALL = 0.1, 0.005
# Steps of a kind before any of them is called held up.
_FIRST_STEPS = 8


class HeldUp:
    """Knows how many processors a step uses, plain ones and those that verify apart."""

    def __init__(self) -> None:
        self._usual = {False: 0.0, True: 0.0}
        self._steps = {False: 0, True: 0}

    def note(self, wall_s: float, cpu_s: float, verify: bool) -> bool:
        """Whether a step that took `wall_s` was held up.

        Args:
            wall_s: seconds of the clock.
            cpu_s: CPU seconds of all threads of the process meanwhile.
        """
        if wall_s <= 0.0:
            return False
        used, usual = cpu_s / wall_s, self._usual[verify]
        self._steps[verify] += 1
        if self._steps[verify] == 1:
            self._usual[verify] = used
            return False
        self._usual[verify] = usual + (_RISE if used > usual else _FALL) * (used - usual)
        return self._steps[verify] > _FIRST_STEPS and used < _LEAST_PART * usual
