"""How well a target's early exit foresees its own next token: the paper's proxy, and the lens.

GSM8K's questions and worked answers in the model's chat template are read by the model, without a
server: some to fit the lenses on, others to ask. At each exit (a quarter, half and three quarters
of the depth) the token that the model's last layer finds likeliest is looked for among the proxy's
likeliest: with the LM head on the normalised state (head), with the lens in between (lens), with a
lens that was fitted on the text that the package carries, as a server's first start does (carried),
and with the LM head's rows of the most frequent tokens alone behind the lens (narrow).

    python -m scripts.check_lens [--quick] [--json FILE] [--model NAME]

Figures: {head,lens,carried,narrow}_{exit layer}_top{1,2,4,8}, shares of the held-back tokens;
fit_tokens, held_back, fit_seconds (one lens, the states known); head_ms_16 and narrow_ms_16, the
product alone for 16 nodes with this machine's plain torch. Exits with 1 where the lens at half the
depth does not find more than the head does.
"""

import itertools
import sys
import time
from collections.abc import Iterable, Mapping

import torch

from scripts.lib.figures import parser, report
from scripts.lib.lens_states import Model, gsm8k_texts, load, states_of, up_to
from scripts.lib.spec_bench import tokenizer
from sglang_ext.mirror.fit_texts import carried_texts, frequent_tokens
from sglang_ext.mirror.lens import Lens, RidgeSums
from sglang_ext.mirror.proxy import Proxy, narrowed

KAPPA = 8
TOPS = (1, 2, 4, 8)
NARROW = 8192
FULL, QUICK = (31_000, 6_500), (5_000, 1_500)

Texts = list[list[int]]


def main() -> int:
    options = parser(__doc__).parse_args()
    fit, held = QUICK if options.quick else FULL
    model = load(options.model)
    exits = [model.depth * part // 4 for part in (1, 2, 3)]
    texts = gsm8k_texts(options.model)
    fitted = up_to(texts, fit)
    asked = up_to(texts[len(fitted) :], held)
    known = up_to(carried_texts(tokenizer(options.model)), fit)
    lenses, seconds = fit_lenses(model, fitted, exits)
    carried, _ = fit_lenses(model, known, exits)
    frequent = frequent_tokens([*known, *fitted], NARROW, model.parts.vocab_size)
    proxies: dict[str, Proxy] = {}
    for at in exits:
        lensed = Proxy(model.parts, KAPPA, lenses[at])
        proxies[f"head_{at}"] = Proxy(model.parts, KAPPA)
        proxies[f"lens_{at}"] = lensed
        proxies[f"carried_{at}"] = Proxy(model.parts, KAPPA, carried[at])
        proxies[f"narrow_{at}"] = narrowed(lensed, frequent)
    shares = foreseen(model, asked, exits, proxies)
    figures: dict[str, float] = {
        "fit_tokens": sum(map(len, fitted)),
        "held_back": sum(map(len, asked)),
        "fit_seconds": seconds / len(exits),
        **shares,
        "head_ms_16": product_ms(proxies[f"head_{exits[1]}"]),
        "narrow_ms_16": product_ms(proxies[f"narrow_{exits[1]}"]),
    }
    report(figures, options.json)
    better = shares[f"lens_{exits[1]}_top8"] > shares[f"head_{exits[1]}_top8"]
    if not better:
        print("the lens at half the depth foresees no more than the LM head by itself does")
    return 0 if better else 1


@torch.no_grad()
def fit_lenses(model: Model, texts: Iterable, exits: list[int]) -> tuple[dict[int, Lens], float]:
    """A lens of each exit, and the seconds that sums and solving took."""
    proxy, seconds = Proxy(model.parts, KAPPA), 0.0
    sums: dict[int, RidgeSums] = {}
    for states, final in states_of(model, list(texts), exits):
        for at in exits:
            normed = proxy.normalised(states[at])
            began = time.perf_counter()
            sums.setdefault(at, RidgeSums(final.shape[-1])).add(normed, final)
            seconds += time.perf_counter() - began
    began = time.perf_counter()
    lenses = {at: each.solve() for at, each in sums.items()}
    return lenses, seconds + time.perf_counter() - began


@torch.no_grad()
def foreseen(
    model: Model, texts: list, exits: list[int], proxies: Mapping[str, Proxy]
) -> dict[str, float]:
    """The shares of the texts' tokens that each proxy has among its first 1, 2, 4 and 8."""
    found = {name: torch.zeros(KAPPA, dtype=torch.int64) for name in proxies}
    tokens = 0
    for states, final in states_of(model, texts, exits):
        said = model.parts.logits(final).argmax(dim=-1, keepdim=True)
        tokens += len(said)
        for name, proxy in proxies.items():
            at = int(name.rpartition("_")[2])
            candidates, _ = proxy.candidates(states[at])
            found[name] += (candidates == said).sum(dim=0)
    return {
        f"{name}_top{top}": float(found[name][:top].sum()) / tokens
        for name, top in itertools.product(proxies, TOPS)
    }


def product_ms(proxy: Proxy, rows: int = 16, rounds: int = 15) -> float:
    """The least milliseconds of a proxy for so many nodes."""
    states = torch.randn(rows, proxy.parts.layers[0].hidden_size)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        proxy.candidates(states)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


if __name__ == "__main__":
    sys.exit(main())
