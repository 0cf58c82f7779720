"""The load generator of `sglang-ext sweep` alone, beside what a server gives it to do.

A stand-in server in another process answers /generate with events as long as SGLang's, one token
each, to all connections in turn and as fast as they are taken: load_tokens_per_s. The real server
decodes with SSSD, 16 requests at once, and gets all prompts twice, so that the second time they
were served before, its best case: server_tokens_per_s is the faster pass. load_ratio is the one by
the other and should be at least 20. Both processes of the first part, and those of the second,
share the machine.

    python -m scripts.bench_load [--in-flight N] [--model M] [--quick] [--json FILE]
"""

import asyncio
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection

from scripts.lib.figures import parser, report
from scripts.lib.server import Server
from scripts.lib.spec_bench import spec_bench
from sglang_ext.servers.processes import end_with_parent
from sglang_ext.sweep.load import Load, run_batch
from sglang_ext.sweep.workloads import Item

WANTED_RATIO = 20
_PROMPT_TOKENS = 256
_MOST_BUFFERED = 1 << 16
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_DONE = b"data: [DONE]\n\n"


def event(token: int, last: bool) -> bytes:
    """A server-sent event as SGLang sends one for each step of a request that speculates."""
    answer = {
        "text": " token",
        "output_ids": [token],
        "meta_info": {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": {"type": "length", "length": token} if last else None,
            "prompt_tokens": _PROMPT_TOKENS,
            "weight_version": "default",
            "num_retractions": 0,
            "completion_tokens": token,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
            "spec_accept_rate": 0.25,
            "spec_accept_length": 2.5,
            "spec_num_correct_drafts": 120,
            "spec_num_proposed_drafts": 480,
            "spec_verify_ct": max(1, token // 2),
            "spec_correct_drafts_histogram": [10, 8, 6, 4, 2, 1, 1, 1],
            "e2e_latency": 1.2345678,
        },
    }
    return b"data: " + json.dumps(answer, separators=(",", ":")).encode() + b"\n\n"


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def serve_fast(tokens: int, port: Connection) -> None:
    """Serve until the process is ended; `port` gets the port's number."""
    end_with_parent()
    chunks = [_chunk(event(n, n == tokens)) for n in range(1, tokens + 1)]
    chunks.append(_chunk(_DONE) + b"0\r\n\r\n")
    streams: dict[asyncio.StreamWriter, int] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return writer.close()
            length = head.lower().split(b"content-length:")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
            writer.write(_HEAD)
            streams[writer] = 0

    async def stream() -> None:
        while True:
            # One token each, in turn: what a decode step of a batch looks like to its clients.
            for writer, sent in list(streams.items()):
                if writer.is_closing() or sent == len(chunks):
                    del streams[writer]
                elif writer.transport.get_write_buffer_size() < _MOST_BUFFERED:
                    writer.write(chunks[sent])
                    streams[writer] = sent + 1
            await asyncio.sleep(0 if streams else 0.001)

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await stream()

    asyncio.run(run())


def measure_load(requests: int, tokens: int, in_flight: int) -> float:
    """Tokens a second that the load generator takes in."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=serve_fast, args=(tokens, there), daemon=True)
    process.start()
    try:
        url = f"http://127.0.0.1:{here.recv()}"
        prompt = tuple(range(_PROMPT_TOKENS))
        items = [Item(str(i), "", prompt, tokens) for i in range(requests)]
        load = run_batch(url, items, in_flight)
    finally:
        process.terminate()
        process.join()
    _check(load)
    assert load.output_tokens == requests * tokens, "tokens were lost"
    return load.output_tokens / load.duration_s


def measure_server(model: str, prompts: int, tokens: int, in_flight: int) -> float:
    """Tokens a second of a real server, the better of two passes over the same prompts."""
    items = [
        Item(str(i), prompt.category, prompt.input_ids, tokens)
        for i, prompt in enumerate(spec_bench(model, max_prompt_tokens=512)[:prompts])
    ]
    flags = ["--speculative-algorithm", "SSSD", "--incremental-streaming-output"]
    with Server(model, flags, name="load") as server:
        rates = []
        for _ in range(2):
            load = run_batch(server.base_url, items, in_flight)
            _check(load)
            rates.append(load.output_tokens / load.duration_s)
            print(f"server: {rates[-1]:.1f} tokens/s", flush=True)
    return max(rates)


def _check(load: Load) -> None:
    if failed := [answer.error for answer in load.answers if answer.error is not None]:
        sys.exit(f"{len(failed)} of {len(load.answers)} requests failed: {failed[0]}")


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--in-flight", type=int, default=16, metavar="N", help="[%(default)s]")
    options = args.parse_args()
    if options.in_flight < 1:
        args.error("--in-flight must be at least 1")
    requests, prompts, tokens = (32, 16, 64) if options.quick else (128, 64, 128)
    rate = measure_load(requests, 1000, options.in_flight)
    print(f"load generator: {rate:.0f} tokens/s", flush=True)
    served = measure_server(options.model, prompts, tokens, options.in_flight)
    figures = {
        "load_tokens_per_s": rate,
        "server_tokens_per_s": served,
        "load_ratio": rate / served,
    }
    report(figures, options.json)
    return int(figures["load_ratio"] < WANTED_RATIO)


if __name__ == "__main__":
    sys.exit(main())
