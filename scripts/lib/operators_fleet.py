"""check_operators: two servers on one datastore, each of which learns what the other serves, and
either of which may be killed.

fleet_process.py's processes stand for servers: the drafter and the datastore are those of a server.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tqdm import tqdm

from datastores import verify_folder
from scripts.lib.fleet_process import FleetProcess
from scripts.lib.isolation_drafts import NothingShown
from scripts.lib.known_outputs import is_stored, stored_documents

KILLS, QUICK_KILLS = 50, 8
SAMPLES, QUICK_SAMPLES = 60, 16
_SERVERS = 2
_LONGEST_LIFE_S = 1.5
_ELECTION_S = 30.0


@dataclass
class Toll:
    """What kills have cost.

    Attributes:
        kills, writers: all, and those of the process that folded.
        lost: outputs that were acknowledged and are not there.
        corrupt: problems that verify_folder() has found.
        failed: processes that did not come up.
        elections: seconds until the other one folded.
        gaps: the longest time without an acknowledgement of the other one meanwhile, in seconds.
    """

    kills: int = 0
    writers: int = 0
    lost: int = 0
    corrupt: int = 0
    failed: int = 0
    elections: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    acknowledged: set[int] = field(default_factory=set)


def check(options: argparse.Namespace) -> dict[str, float]:
    """fleet_found_seconds, fleet_kills, fleet_lost, fleet_corrupt, fleet_failed_starts,
    fleet_election_seconds and fleet_ingest_gap_seconds.

    Raises:
        NothingShown: no writer was among those that were killed, or nothing was served.
    """
    rng = random.Random(0)
    toll = Toll()
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        servers = [FleetProcess(folder, first, _SERVERS) for first in range(_SERVERS)]
        try:
            if not all(server.wait(lambda s: s.served) for server in servers):
                raise NothingShown("the servers of a fleet do not come up")
            delays = found_after(servers, QUICK_SAMPLES if options.quick else SAMPLES)
            for _ in tqdm(range(QUICK_KILLS if options.quick else KILLS), disable=None):
                kill_one(servers, folder, rng, toll)
        finally:
            for server in servers:
                server.close()
        count_lost(folder, servers, toll)
    if not toll.writers or len(toll.acknowledged) < toll.kills:
        raise NothingShown("no server that folded was killed, or nothing was served meanwhile")
    print(f"{toll.kills} kills, {toll.writers} of a writer, {len(toll.acknowledged)} outputs")
    return {
        "fleet_found_seconds": max(delays),
        "fleet_kills": toll.kills,
        "fleet_lost": toll.lost,
        "fleet_corrupt": toll.corrupt,
        "fleet_failed_starts": toll.failed,
        "fleet_election_seconds": max(toll.elections),
        "fleet_ingest_gap_seconds": max(toll.gaps),
    }


def found_after(servers: Sequence[FleetProcess], samples: int) -> list[float]:
    """Seconds from an output's acknowledgement by one to its being a draft on the other.

    Raises:
        NothingShown: one never was.
    """
    delays = []
    for number in range(samples):
        giver, taker = servers[number % 2], servers[1 - number % 2]
        giver.wait_for_outputs(1)
        k = max(giver.served)
        if not taker.finds(k):
            raise NothingShown(f"output {k} of one server is never a draft on the other")
        delays.append(taker.found[k] - giver.served[k])
    return delays


def kill_one(servers: list[FleetProcess], folder: str, rng: random.Random, toll: Toll) -> None:
    """Kill either server after some time, look at what is left, and start another in its place."""
    time.sleep(rng.uniform(0, _LONGEST_LIFE_S))
    place = rng.randrange(_SERVERS)
    victim, other = servers[place], servers[1 - place]
    was_writer = victim.role == "writer"
    at = victim.kill()
    toll.kills += 1
    if was_writer:
        toll.writers += 1
        elected = other.wait(lambda s: s.role == "writer", _ELECTION_S)
        toll.elections.append(other.role_at - at if elected else _ELECTION_S)
        other.wait_for_outputs(2)
        times = sorted(t for t in other.served.values() if t > at - 1.0)
        toll.gaps.append(max((b - a for a, b in pairwise(times)), default=_ELECTION_S))
    toll.corrupt += len(verify_folder(folder))
    count_lost(folder, servers, toll)
    servers[place] = FleetProcess(folder, victim.next, _SERVERS)
    toll.failed += not servers[place].wait(lambda s: s.served)


def count_lost(folder: str, servers: Sequence[FleetProcess], toll: Toll) -> None:
    """Look for all outputs that were acknowledged until now."""
    acknowledged = [k for server in servers for k in list(server.served)]
    toll.acknowledged.update(acknowledged)
    found = stored_documents(folder)
    toll.lost += sum(not is_stored(found, k) for k in toll.acknowledged)
