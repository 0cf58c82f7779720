"""What log files are called, and how what they hold is ordered.

    log-NNNNNNNN.wal                        of the process that holds LOCK
    member-XXXXXXXX-NNNNNNNN-EEEEEEEE.wal   of a member of a fleet: its id (8 hex digits, new with
                                            each start), the log's number, the epoch

Each log numbers its documents by itself. What orders those of several logs is the epoch, the upper
bits of a number, a Lamport clock: a deletion takes the next epoch, and whoever reads of it begins
another log in that one. So a deletion takes all documents with a lower number, whoever wrote them.
A log never holds documents of an epoch before its own.
"""

import re
from dataclasses import dataclass

# Numbers of files, sixteen digits at most: a folder never has so many.
FILE_NUMBER_LIMIT = 10**15
# 17 billion documents of one log between two deletions, and 268 million deletions (NUMBER_LIMIT).
EPOCH_BITS = 34
EPOCH_LIMIT = 1 << 28
_NUMBERED = re.compile(r"log-([0-9]{8,16})\.wal", re.ASCII)
_OF_MEMBER = re.compile(r"member-([0-9a-f]{8})-([0-9]{8,16})-([0-9]{8,9})\.wal", re.ASCII)
_MEMBER = re.compile(r"[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True)
class LogName:
    """A log, by its file's name."""

    member: str | None
    """None: of the process that holds LOCK."""
    number: int
    """They are folded in the order of these."""
    epoch: int = 0
    """That of the first document that it may hold; 0 where LOCK's holder writes it."""

    @property
    def place(self) -> tuple[str, int]:
        """What logs are sorted by, so that each member's are in the order of their numbers."""
        return self.member or "", self.number

    @property
    def file(self) -> str:
        """The file's name in the folder."""
        if self.member is None:
            return f"log-{self.number:08d}.wal"
        return f"member-{self.member}-{self.number:08d}-{self.epoch:08d}.wal"


def log_name(file: str) -> LogName | None:
    """The log of a file name; None: it is none of a log."""
    if found := _NUMBERED.fullmatch(file):
        return LogName(None, int(found[1]))
    if (found := _OF_MEMBER.fullmatch(file)) and int(found[3]) < EPOCH_LIMIT:
        return LogName(found[1], int(found[2]), int(found[3]))
    return None


def is_member(value: object) -> bool:
    """Whether it is the id of a member."""
    return isinstance(value, str) and _MEMBER.fullmatch(value) is not None


def epoch_of(number: int) -> int:
    """The epoch of a document or a deletion."""
    return number >> EPOCH_BITS


def first_number(epoch: int) -> int:
    """The lowest number of an epoch."""
    return epoch << EPOCH_BITS
