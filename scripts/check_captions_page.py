"""The page /captions in a real browser: a microphone that plays a file, and what the page shows.

A headless Chromium (Debian's package chromium) opens the page of a Whisper server, hears a clip
through its microphone, loses its connection in the middle, and stops behind the clip. wer_page:
word errors of what it shows against the reference; wer_live: of the same clip through OpenAI's
client, over the same WebSocket. srt_cues: cues of the SRT that it would save, srt_words_lost: words
that these lack. reconnects: 1 where it had to connect again and did. other_hosts: hosts besides the
server that it sent anything to. page_kib: the page's size, overlay_kib: the overlay's.
serious_problems: of axe-core, on both, where --axe names its axe.min.js.

The page translates with --translate-model (or the text server of --server), and the overlay shows
it too, in a second Chromium. page_translated_words: words of the translation on the page;
overlay_words_missing: of its last words, those that the overlay does not show; overlay_opaque: 1
where its ground is not transparent.

    python -m scripts.check_captions_page [--model M] [--translate-model T|none] [--audio DIR]
        [--server URL] [--axe FILE] [--screenshots DIR] [--quick] [--json FILE]
"""

import argparse
import asyncio
import base64
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from scripts.lib.chromium import Page, opened
from scripts.lib.figures import parser, report
from scripts.lib.http_client import HTTP
from scripts.lib.live_client import FORMATS, stream
from scripts.lib.server import Server
from scripts.lib.word_errors import WordErrors
from scripts.speech_data import FOLDER, Clip, joined, read_clips

RATE = 48_000
PAUSE_S = 0.8  # behind each clip
LEAD_S = 2.0  # before the clip, for the browser to begin
ANSWER_S = 180.0
CLIPS, QUICK_CLIPS = 4, 2
MOST_KIB = 60
LAST_WORDS = 5
# What the microphone's own processing may cost, in word errors.
SLACK = 0.05


def main() -> int:
    args = parser(__doc__, model=False)
    args.add_argument("--model", default="whisper-tiny.en", metavar="M", help="[%(default)s]")
    args.add_argument(
        "--translate-model", default="smollm2-135m-instruct", metavar="T", help="[%(default)s]"
    )
    args.add_argument("--audio", type=Path, default=FOLDER, metavar="DIR", help="[%(default)s]")
    args.add_argument("--server", metavar="URL", help="a Whisper server that runs already")
    args.add_argument("--axe", type=Path, metavar="FILE", help="axe-core's axe.min.js")
    args.add_argument("--screenshots", type=Path, metavar="DIR", help="write them here")
    options = args.parse_args()
    clips = [clip for clip in read_clips(options.audio) if clip.reference]
    clip, _ = joined(clips[: QUICK_CLIPS if options.quick else CLIPS], RATE, PAUSE_S)
    with served(options) as url:
        live = asyncio.run(stream(url, "none", clip, FORMATS[0], {"step_ms": 1000}))
        lead = np.zeros((1, round(LEAD_S * RATE)), np.float32)
        played = np.concatenate([lead, clip.samples, lead], axis=1)[0]
        with opened(f"{url}/captions", played, RATE) as page:
            address = page.run("$('overlay').href")
            with opened(address, lead[0], RATE) as overlay:
                figures = checked(page, clip, options)
                more = overlaid(overlay, page, options)
                figures |= {name: figures.get(name, 0) + value for name, value in more.items()}
        hosts = page.hosts() | overlay.hosts()
        figures["other_hosts"] = len(hosts - {url.split("/")[2]})
        for name, path in (("page_kib", "captions"), ("overlay_kib", "captions/overlay")):
            figures[name] = len(HTTP.get(f"{url}/{path}").content) / 1024
    figures["wer_live"] = WordErrors([clip.reference or ""]).rate([live.text])
    report(figures, options.json)
    return int(failed(figures, options))


def failed(figures: Mapping[str, float], options: argparse.Namespace) -> bool:
    """Whether a figure is beyond its limit."""
    translates = options.translate_model != "none"
    none_of = ("other_hosts", "serious_problems", "srt_words_lost", "overlay_opaque")
    return bool(
        figures["wer_page"] > figures["wer_live"] + SLACK
        or figures["page_kib"] > MOST_KIB
        or not figures["srt_cues"]
        or not figures["reconnects"]
        or (translates and not figures["page_translated_words"])
        or figures["overlay_words_missing"]
        or any(figures.get(name, 0) for name in none_of)
    )


@contextlib.contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """The address of the server, which is started where none was named."""
    if options.server:
        yield options.server.rstrip("/")
        return
    with contextlib.ExitStack() as stack:
        flags = []
        if options.translate_model != "none":
            ssbd = ["--speculative-algorithm", "SSSD", "--drafters", "ssbd"]
            text = stack.enter_context(Server(options.translate_model, ssbd, name="text"))
            flags = ["--translate-with", text.base_url]
        yield stack.enter_context(Server(options.model, flags, name="captions-page")).base_url


# What the page has heard (what it copies and saves as TXT has the translation as well), and what it
# has translated.
TRANSCRIPT = "items.map((item) => item.text).join(' ')"
TRANSLATION = "items.map((item) => item.translation()).join(' ')"


def checked(page: Page, clip: Clip, options: argparse.Namespace) -> dict[str, float]:
    """Caption the clip in the page, and look at it."""
    page.run("document.querySelector('#language').value = 'en'")
    if options.translate_model != "none":
        page.run("document.querySelector('#target').value = 'fr'")
    page.run("document.querySelector('#start').click()")
    page.wait("running && running.session.ready", ANSWER_S)
    # The fake microphone begins when it is opened; half of the clip has been heard then.
    half = LEAD_S + clip.seconds / 2
    page.wait(f"running.session.sentMs > {half * 1000}", ANSWER_S)
    page.run("running.session.socket.close()")
    page.wait("running.session.ready === false", ANSWER_S)
    page.wait("running.session.ready", ANSWER_S)
    end = LEAD_S + clip.seconds + 1.0
    page.wait(f"running.session.sentMs > {end * 1000}", ANSWER_S + clip.seconds)
    picture(page, options, "light")
    page.run("document.querySelector('#start').click()")
    page.wait("document.querySelector('#status').textContent === 'Done.'", ANSWER_S)
    page.run("document.querySelector('#theme').value = 'dark'")
    page.run("document.querySelector('#theme').dispatchEvent(new Event('change'))")
    picture(page, options, "dark")
    text, srt = page.run(TRANSCRIPT), page.run("srt()")
    blocks = [block.splitlines() for block in srt.strip().split("\n\n") if block]
    said = " ".join(" ".join(block[2:]) for block in blocks)
    figures: dict[str, float] = {
        "wer_page": WordErrors([clip.reference or ""]).rate([text]),
        "srt_cues": len(blocks),
        "srt_words_lost": len(text.split()) - len(said.split()),
        "reconnects": 1,
        "page_translated_words": len(page.run(TRANSLATION).split()),
    }
    return figures | problems(page, options.axe)


def overlaid(overlay: Page, page: Page, options: argparse.Namespace) -> dict[str, float]:
    """Compare what the overlay shows with the page."""
    translates = options.translate_model != "none"
    wanted = page.run(TRANSLATION if translates else TRANSCRIPT).split()[-LAST_WORDS:]
    place = "translation" if translates else "source"
    shown = overlay.run(f"document.querySelector('#{place}').textContent").split()
    picture(overlay, options, "overlay")
    ground = overlay.run("getComputedStyle(document.body).backgroundColor")
    same = sum(a == b for a, b in zip(reversed(wanted), reversed(shown), strict=False))
    figures: dict[str, float] = {
        "overlay_words_missing": len(wanted) - same,
        "overlay_opaque": ground != "rgba(0, 0, 0, 0)",
    }
    return figures | problems(overlay, options.axe)


def problems(page: Page, axe: Path | None) -> dict[str, float]:
    """How many things axe-core finds that are serious or worse; nothing where it is not there."""
    if axe is None:
        return {}
    page.run(axe.read_text(encoding="utf-8") + ";0")
    found = json.loads(page.run("axe.run().then((made) => JSON.stringify(made.violations))"))
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    for one in serious:
        print(f"axe: {one['id']}: {one['help']}")
    return {"serious_problems": len(serious)}


def picture(page: Page, options: argparse.Namespace, name: str) -> None:
    """Write a screenshot, if they were asked for."""
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
        data = page.call("Page.captureScreenshot", format="png")["data"]
        (options.screenshots / f"captions-{name}.png").write_bytes(base64.b64decode(data))


if __name__ == "__main__":
    sys.exit(main())
