"""Chat with a server through OpenAI's client, and choose for this request how it is drafted.

sglang-ext serve --model smollm2-135m-instruct --speculative-algorithm SSSD
python examples/chat.py "Name three rivers." --drafter none
"""

import argparse
import time

import openai


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("question", nargs="?", default="What is a river?")
    args.add_argument("--base-url", default="http://127.0.0.1:30000", help="[%(default)s]")
    args.add_argument("--drafter", help="a loaded drafter, or none; default: the server's")
    args.add_argument(
        "--namespace", default="example", help="whose past answers it reads and joins"
    )
    args.add_argument("--max-tokens", type=int, default=64, help="[%(default)s]")
    options = args.parse_args()

    client = openai.OpenAI(base_url=options.base_url + "/v1", api_key="none")
    # Any key of README's table of custom_params: a wrong value is a 400 that names it.
    custom = {"namespace": options.namespace}
    if options.drafter is not None:
        custom["drafter"] = options.drafter
    begun = time.monotonic()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=options.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"custom_params": custom},
    )
    tokens = 0
    for chunk in answer:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    print(f"\n{tokens} tokens in {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
