"""SpecDec++'s relaxed rule on the host: the tokens that nodes of verified trees go on with.

What `sglang_ext.step.relaxed` does on a device, compiled: only the rows of nodes that can be
reached by tokens that pass are looked at, each once for a child, and only until it has failed.
"""

import math

import numba
import numpy as np

# Logits that are looked at between two looks at whether the token has failed already.
_PART = 4096


@numba.njit(cache=True, nogil=True)
def relax_on_host(chosen, logits, parents, places, tokens, logprobs, top_betas, taus, ends):
    """Put what relaxation accepts in the place of the target's own tokens.

    Args:
        chosen: int64[T], the token that each row of logits goes on with; changed in place.
        logits: float32[T, vocab].
        parents, places, tokens, logprobs, top_betas, taus, ends: as in RelaxedNodes; a parent's
            node stands before its children.

    Returns:
        bool[T], the rows whose token was replaced.
    """
    passes = _passing(chosen, logits, parents, places, tokens, logprobs, top_betas, taus, ends)
    taken = np.zeros(len(chosen), dtype=np.bool_)
    reach = np.zeros(len(chosen), dtype=np.int64)
    best = np.full(len(chosen), -1, dtype=np.int64)
    # Backwards, so that children come before their parents and of equal ones the first stays.
    for n in range(len(tokens) - 1, -1, -1):
        row = parents[n]
        if passes[n] and (
            best[row] < 0
            or not _before(chosen[row], logits[row], tokens, reach, places, best[row], n)
        ):
            best[row] = n
            reach[row] = 1 + reach[places[n]]
    for row in range(len(chosen)):
        if best[row] >= 0 and tokens[best[row]] != chosen[row]:
            chosen[row] = tokens[best[row]]
            taken[row] = True
    return taken


@numba.njit(cache=True, nogil=True)
def _before(own, logits, tokens, reach, places, first, second):
    """Whether of two children that pass the first is better: its path is longer, or it holds the
    target's own token, or is likelier."""
    longer = reach[places[first]] - reach[places[second]]
    if longer != 0:
        return longer > 0
    if (tokens[first] == own) != (tokens[second] == own):
        return tokens[first] == own
    return logits[tokens[first]] > logits[tokens[second]]


@numba.njit(cache=True, nogil=True)
def _passing(chosen, logits, parents, places, tokens, logprobs, top_betas, taus, ends):
    """bool[m], the nodes that are reached by tokens that pass, and whose own token does."""
    reached = np.ones(len(chosen), dtype=np.bool_)
    for place in places:
        reached[place] = False
    passes = np.zeros(len(tokens), dtype=np.bool_)
    for n in range(len(tokens)):
        row = parents[n]
        if not reached[row]:
            continue
        own = chosen[row]
        if tokens[n] == own:
            passes[n] = True
        elif not (ends[n] == own).any():
            passes[n] = _is_good(logits[row], tokens[n], logprobs[n], top_betas[n], taus[n])
        reached[places[n]] = passes[n]
    return passes


@numba.njit(cache=True, nogil=True)
def _is_good(logits, token, logprob, top_beta, tau):
    """Eqs. 6 and 7; a token that the target cannot write never passes."""
    likely = logits[token]
    if not likely > -np.inf:
        return False
    score = likely
    if not math.isnan(logprob):
        score = np.float32(logprob + _log_sum_exp(logits))
    limit = np.float32(score + tau)
    better = far = 0
    for first in range(0, len(logits), _PART):
        for x in logits[first : first + _PART]:
            better += x > score
            far += x > limit
        if better >= top_beta or far > 0:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def _log_sum_exp(logits):
    most = logits.max()
    total = 0.0
    for x in logits:
        total += math.exp(x - most)
    return most + math.log(total)
