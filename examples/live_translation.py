"""Translate a text that grows, over one WebSocket: each update starts from the last translation.

sglang-ext serve --model qwen2.5-coder-0.5b-instruct --speculative-algorithm SSSD --drafters ssbd
python examples/live_translation.py --target-language German
"""

import argparse
import json

import httpx
from websockets.sync.client import ClientConnection, connect

TEXT = "The train to Paris leaves at noon, and we will be there in the evening."
WORDS_AT_ONCE = 4


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("text", nargs="?", default=TEXT)
    args.add_argument("--base-url", default="http://127.0.0.1:30000", help="[%(default)s]")
    args.add_argument("--source-language", default="English", help="[%(default)s]")
    args.add_argument("--target-language", default="French", help="[%(default)s]")
    options = args.parse_args()

    sessions = options.base_url + "/v1/translation/sessions"
    languages = {
        "source_language": options.source_language,
        "target_language": options.target_language,
    }
    opened = httpx.post(sessions, json={**languages, "mask": 3}, timeout=60)
    opened.raise_for_status()
    session = f"{sessions}/{opened.json()['id']}"
    try:
        with connect(session.replace("http", "ws", 1) + "/ws") as socket:
            words = options.text.split()
            for at in range(0, len(words), WORDS_AT_ONCE):
                show(socket, {"append": " ".join(words[at : at + WORDS_AT_ONCE]) + " "})
            show(socket, {"finish": True})
    finally:
        httpx.delete(session, timeout=60)


def show(socket: ClientConnection, message: dict[str, object]) -> None:
    """Send an update and print the translation: [in brackets] what may still change."""
    socket.send(json.dumps(message))
    while True:
        answer = json.loads(socket.recv())
        if "error" in answer:
            raise SystemExit(answer["error"]["message"])
        if answer["object"] == "translation.update":  # behind its deltas
            unstable = f" [{answer['unstable'].strip()}]" if answer["unstable"] else ""
            print(answer["stable"] + unstable)
            return


if __name__ == "__main__":
    main()
