"""Sessions and their table without HTTP: order, atomic updates, expiry, limits, listeners."""

import asyncio
import random
import time

import pytest

from sglang_ext.api.http import ApiError
from sglang_ext.api.translation import session_table
from sglang_ext.api.translation.session import MOST_WAITING, Session
from sglang_ext.api.translation.session_settings import SessionSettings, Update
from sglang_ext.api.translation.session_table import SessionTable
from sglang_ext.api.translation.translator import Translator
from tests.unit.api.fake_manager import FakeManager


class Clock:
    """Monotonic seconds that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def make(manager, clock=None, namespace="default", **settings):
    chosen = SessionSettings(source_language="English", target_language="French", **settings)
    return Session(namespace, chosen, Translator(manager), 100, clock or time.monotonic)


def append(text, **more):
    return Update(None, text, "append", **more)


def whole(text, **more):
    return Update(0, text, "source", **more)


async def reach(condition):
    """Let other tasks run until it holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never came to pass")


async def updated(session, update, stream=False):
    return await session.update(update, stream).result()


def test_updates_run_one_after_the_other_in_order(manager):
    async def run():
        session = make(manager)
        running = [session.update(append(f" w{i}"), i % 2 == 0) for i in range(20)]
        ending = session.finish()
        updates = [await r.result() for r in reversed(running)][::-1]
        assert [u["revision"] for u in updates] == list(range(1, 21))
        assert (await ending.result())["revision"] == 21
        words = "".join(f" w{i}" for i in range(20))
        assert session.state.source == words and updates[-1]["text"] == words.strip().upper()
        assert manager.sources == [words[: words.index(f" w{i}") + 1 + len(f"w{i}")].strip()
                                   for i in range(20)]  # fmt: skip
        assert manager.most_running == 1 and not session.busy

    asyncio.run(run())


def test_sessions_run_side_by_side_with_drafts_of_their_own(manager):
    async def run():
        sessions = [make(manager) for _ in range(3)]
        for step in range(3):
            manager.gate.clear()
            running = [s.update(append(f" s{i}.{step}"), False) for i, s in enumerate(sessions)]
            await reach(lambda: manager.running == 3)
            manager.gate.set()
            for r in running:
                await r.result()
        for request in manager.requests[3:]:
            draft = bytes(request.params["ssbd"]["draft"]).decode()
            assert manager.source(request).upper().startswith(draft) and draft
        assert "draft" not in manager.requests[0].params["ssbd"]

    asyncio.run(run())


def test_the_mask_holds_back_what_the_draft_keeps(manager):
    async def run():
        session = make(manager, mask=2)
        update = await updated(session, append("ab cd"))
        assert (update["stable"], update["unstable"], update["text"]) == ("AB ", "CD", "AB CD")
        update = await updated(session, append(" ef"))
        assert bytes(manager.requests[1].params["ssbd"]["draft"]) == b"AB CD"
        assert (update["stable"], update["final"]) == ("AB CD ", False)
        update = await updated(session, append(" g", final=True))
        assert (update["stable"], update["unstable"], update["final"]) == ("AB CD EF G", "", True)
        assert [r.params["ingest"] for r in manager.requests] == [False, False, True]
        names = [r.params.get("ingest_name") for r in manager.requests]
        assert names == [None, None, session.id]  # what a client can delete by
        update = await updated(session, append("h i"))
        assert (update["stable"], update["final"]) == ("AB CD EF GH", False)

    asyncio.run(run())


def test_finishing_shows_what_was_held_back_without_a_generation(manager):
    async def run():
        session = make(manager, mask=2)
        await updated(session, append("abcd"))
        update = await session.finish().result()
        assert (update["revision"], update["stable"], update["final"]) == (2, "ABCD", True)
        assert update["usage"]["total_tokens"] == 0 and len(manager.requests) == 1
        assert await session.finish().result() == update
        with pytest.raises(ApiError, match="is finished") as raised:
            await updated(session, append("e"))
        assert raised.value.status == 409
        assert session.message(0)["status"] == "finished" and session.state.revision == 2

    asyncio.run(run())


def test_what_needs_no_generation_gets_none(manager):
    async def run():
        session = make(manager)
        update = await updated(session, append("  \n"))
        assert (update["revision"], update["text"], update["usage"]["total_tokens"]) == (1, "", 0)
        await updated(session, append("ab"))
        same = await updated(session, append(" "))
        assert (same["text"], same["revision"]) == ("AB", 3) and len(manager.requests) == 1
        empty = await updated(session, whole(""))
        assert (empty["text"], session.state.source) == ("", "")
        await updated(session, whole("cd"))
        assert "draft" not in manager.requests[-1].params["ssbd"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "fault", [ValueError("no"), RuntimeError("broken"), {"type": "abort", "message": "shed"}]
)
def test_a_failed_update_leaves_no_trace(fault, manager):
    async def run():
        session = make(manager, mask=1)
        await updated(session, append("ab"))
        before = session.state
        manager.fault = fault
        with pytest.raises(ApiError, match="as it was, at revision 1"):
            await updated(session, append("cd"))
        assert session.state == before
        manager.fault = None
        update = await updated(session, append("ef"))
        assert (update["text"], update["revision"]) == ("ABEF", 2)

    asyncio.run(run())


def test_a_source_too_long_is_refused_and_others_go_on(manager):
    async def run():
        session, other = make(manager), make(manager)
        await updated(session, append("ab"))
        with pytest.raises(ApiError, match="would have 101 characters") as raised:
            await updated(session, append("x" * 99))
        assert raised.value.status == 413 and session.state.source == "ab"
        assert (await updated(other, append("x" * 100)))["text"] == "X" * 100
        assert (await updated(session, append("c")))["text"] == "ABC"

    asyncio.run(run())


def test_an_update_that_is_given_up_is_as_if_never_sent(manager):
    async def run():
        session = make(manager)
        await updated(session, append("ab"))
        manager.gate.clear()
        running, waiting, last = (session.update(append(text), True) for text in ("X", "Y", "c"))
        await reach(lambda: manager.running)
        waiting.cancel()
        running.cancel()
        manager.gate.set()
        update = await last.result()
        assert (update["text"], update["revision"]) == ("ABC", 2)
        assert manager.sources == ["ab", "abX", "abc"]
        assert manager.aborted == [manager.requests[1].rid] and not session.busy

    asyncio.run(run())


def test_deltas_grow_towards_the_update(manager):
    async def run():
        session = make(manager)
        running = session.update(append("hello world"), True)
        deltas = [delta async for delta in running.deltas()]
        texts = [delta["text"] for delta in deltas]
        assert texts and all("HELLO WORLD".startswith(text) for text in texts)
        assert texts == sorted(set(texts), key=len)
        assert {delta["revision"] for delta in deltas} == {1}
        assert (await running.result())["text"] == "HELLO WORLD"

    asyncio.run(run())


def test_too_many_waiting_updates_are_refused(manager):
    async def run():
        session = make(manager)
        manager.gate.clear()
        running = [session.update(append("a"), False) for _ in range(MOST_WAITING)]
        with pytest.raises(ApiError, match="wait already") as raised:
            session.update(append("b"), False)
        assert raised.value.status == 429
        manager.gate.set()
        assert (await running[-1].result())["text"] == "A" * MOST_WAITING
        await updated(session, append("b"))

    asyncio.run(run())


def test_listeners_get_the_last_update_then_every_one_then_the_end(manager):
    async def run():
        session = make(manager)
        with session.listening() as early:
            await updated(session, append("a"))
            with session.listening() as late, session.listening(seen=1) as knowing:
                await updated(session, append("b"))
                await session.finish().result()
                assert drained(early) == [1, 2, 3, None]
                assert drained(late) == [1, 2, 3, None]
                assert drained(knowing) == [2, 3, None]
        with session.listening() as after, session.listening(seen=3) as nothing:
            assert drained(after) == [3, None] and drained(nothing) == [None]
        assert not session._listeners

    asyncio.run(run())


def drained(events):
    """Revisions of the waiting events."""
    found = []
    while not events.empty():
        event = events.get_nowait()
        found.append(event and event["revision"])
    return found


def test_a_slow_listener_loses_old_events_only(manager, monkeypatch):
    monkeypatch.setattr("sglang_ext.api.translation.session._MOST_UNREAD", 3)

    async def run():
        session = make(manager)
        with session.listening() as events:
            for _ in range(5):
                await updated(session, append("a"))
            assert drained(events) == [3, 4, 5]
            for _ in range(3):
                await updated(session, append("a"))
            session.close()
            assert drained(events) == [7, 8, None]

    asyncio.run(run())


def test_deleting_aborts_what_runs_and_waits(manager):
    async def run():
        table, session = SessionTable(5, 60, lambda: False), make(manager)
        table.add(session)
        manager.gate.clear()
        running = [session.update(append("a"), stream) for stream in (False, True)]
        await reach(lambda: manager.running)
        table.delete(session.id, "default")
        for r in running:
            with pytest.raises(ApiError, match="was deleted") as raised:
                await asyncio.wait_for(r.result(), 5)
            assert raised.value.status == 404
        with pytest.raises(ApiError):
            await running[1].begun()
        assert len(manager.aborted) == 1 and manager.running == 0 and len(table) == 0

    asyncio.run(run())


def test_a_namespace_sees_only_its_own(manager):
    async def run():
        table = SessionTable(5, 60, lambda: False)
        session = make(manager, namespace="acme")
        table.add(session)
        for use in (table.get, table.delete):
            with pytest.raises(ApiError) as raised:
                use(session.id, "default")
            assert raised.value.status == 404
        assert table.get(session.id, "acme") is session
        await updated(session, append("a"))
        assert manager.requests[0].params["namespace"] == "acme"

    asyncio.run(run())


def test_idle_sessions_expire_and_used_ones_do_not(manager):
    async def run():
        clock = Clock()
        table = SessionTable(5, 10, lambda: False, clock)
        idle, used, busy = (make(manager, clock) for _ in range(3))
        for session in (idle, used, busy):
            table.add(session)
        assert 0 <= table.message(idle)["expires_at"] - table.message(idle)["created"] - 10 <= 1
        manager.gate.clear()
        running = busy.update(append("a"), False)
        await reach(lambda: manager.running)
        clock.now += 9.9
        table.get(used.id, "default")
        clock.now += 0.1
        table.drop_expired()
        assert len(table) == 2 and idle.gone.is_set()
        clock.now += 100
        with pytest.raises(ApiError):
            table.get(used.id, "default")
        manager.gate.set()
        await running.result()
        clock.now += 9
        assert table.get(busy.id, "default") is busy  # its idle time began with the answer

    asyncio.run(run())


def test_the_sweeper_closes_what_nobody_asks_for_and_ends(manager, monkeypatch):
    monkeypatch.setattr(session_table, "_SWEEP_S", 0.01)

    async def run():
        clock = Clock()
        table, session = SessionTable(5, 10, lambda: False, clock), make(manager, clock)
        table.add(session)
        sweeper = table._sweeper
        with session.listening() as events:
            clock.now += 10
            assert await asyncio.wait_for(events.get(), 5) is None
        await asyncio.wait_for(sweeper, 5)
        table.add(make(manager, clock))
        assert table._sweeper is not sweeper and not table._sweeper.done()

    asyncio.run(run())


def test_a_server_that_stops_lets_listeners_go_and_updates_end(manager, monkeypatch):
    monkeypatch.setattr(session_table, "_SWEEP_S", 0.01)

    async def run():
        table = SessionTable(5, 10, lambda: manager.gracefully_exit)
        session = make(manager)
        table.add(session)
        manager.gate.clear()
        running = session.update(append("a"), False)
        with session.listening() as events:
            manager.gracefully_exit = True
            assert await asyncio.wait_for(events.get(), 5) is None
        manager.gate.set()
        assert (await running.result())["text"] == "A"

    asyncio.run(run())


def test_the_table_is_bounded_and_finished_sessions_make_room(manager):
    async def run():
        clock = Clock()
        table = SessionTable(2, 10, lambda: False, clock)
        first, second = make(manager, clock), make(manager, clock)
        table.add(first)
        table.add(second)
        with pytest.raises(ApiError, match="2 translation sessions are open") as raised:
            table.add(make(manager, clock))
        assert raised.value.status == 429 and len(table) == 2
        await second.finish().result()
        third = make(manager, clock)
        table.add(third)
        assert second.gone.is_set() and not first.gone.is_set() and len(table) == 2
        clock.now += 10
        table.add(make(manager, clock))
        assert len(table) == 1

    asyncio.run(run())


def test_fifty_sessions_of_random_use_stay_apart():
    """Each session's text is its own source's, whatever is cancelled, fails or is deleted."""
    manager, choose = FakeManager(), random.Random(5)

    async def client(table, number):
        session = make(manager)
        table.add(session)
        expected = ""
        for step in range(20):
            text = f" {number}.{step}"
            running = session.update(append(text), choose.random() < 0.5)
            if choose.random() < 0.3:
                for _ in range(choose.randrange(12)):
                    await asyncio.sleep(0)
                running.cancel()
            try:
                update = await running.result()
            except ApiError:
                assert session.state.source == expected
                continue
            expected += text
            assert update["text"] == expected.strip().upper()
            assert session.state.source == expected
        if choose.random() < 0.5:
            table.delete(session.id, "default")

    async def run():
        table = SessionTable(50, 60, lambda: False)
        await asyncio.gather(*(client(table, number) for number in range(50)))
        for request in manager.requests:
            draft = bytes(request.params["ssbd"].get("draft", b"")).decode()
            assert manager.source(request).upper().startswith(draft)
        assert manager.running == 0 and manager.aborted and 0 < len(table) < 50

    asyncio.run(run())


def test_no_namespace_takes_all_sessions(manager):
    async def run():
        table = SessionTable(100, 60, lambda: False, share=0.5)

        def fill(namespace):
            count = 0
            with pytest.raises(ApiError, match="of this namespace are open") as raised:
                while True:
                    table.add(make(manager, namespace=namespace))
                    count += 1
            assert raised.value.status == 429 and raised.value.code == "too_many_sessions"
            return count

        assert [fill(name) for name in ("greedy", "next", "third")] == [50, 25, 12]
        for number in range(8):  # and one more namespace after the other has its first
            table.add(make(manager, namespace=f"small-{number}"))
        table.forget("greedy")
        assert fill("next") > 0

    asyncio.run(run())


def test_a_share_is_at_least_one_session_and_the_limit_holds_for_all(manager):
    async def run():
        table = SessionTable(3, 60, lambda: False, share=0.01)
        for namespace in "abc":
            table.add(make(manager, namespace=namespace))
        with pytest.raises(ApiError, match="3 translation sessions are open, which is this server"):
            table.add(make(manager, namespace="d"))

    asyncio.run(run())


def test_at_its_share_a_namespace_replaces_its_own_finished_sessions_only(manager):
    async def run():
        table = SessionTable(4, 60, lambda: False, share=0.5)
        others = make(manager, namespace="other")
        await others.finish().result()
        own = make(manager, namespace="mine")
        for session in (others, own):
            table.add(session)
        with pytest.raises(ApiError, match="--namespace-share"):
            table.add(make(manager, namespace="mine"))
        await own.finish().result()
        table.add(make(manager, namespace="mine"))
        assert table.get(others.id, "other") is others
        with pytest.raises(ApiError, match="there is no translation session"):
            table.get(own.id, "mine")

    asyncio.run(run())


def test_deletions_close_the_sessions_that_they_name(manager):
    async def run():
        table = SessionTable(9, 60, lambda: False)
        made = [make(manager, namespace=n) for n in ("a", "a", "b", "b")]
        for session in made:
            table.add(session)
        manager.gate.clear()
        running = made[0].update(append("x"), False)
        await reach(lambda: manager.running == 1)
        table.forget("b", made[0].id)  # another namespace's: nothing
        table.forget(None, made[2].id)
        assert [s.gone.is_set() for s in made] == [False, False, True, False]
        table.forget("a")
        assert [s.gone.is_set() for s in made] == [True, True, True, False]
        with pytest.raises(ApiError, match="there is no translation session"):
            await running.result()
        manager.gate.set()
        assert len(table) == 1 and table.get(made[3].id, "b") is made[3]

    asyncio.run(run())


def test_append_only_sessions_settle_what_two_translations_begin_with_alike():
    async def run():
        manager = FakeManager()
        session = make(manager, append_only=True)
        told = []
        for source, answer in (
            ("a", "Le chat."),
            ("a b", "Le chat dort."),  # "chat" was the last word before: it may be half of one
            ("a b c", "Le chat dort ici."),
            ("a b c d", "Un chat dort ici maintenant."),  # but it must begin with what is settled
        ):
            manager.answer = answer
            told.append(await updated(session, whole(source)))
        final = await updated(session, whole("a b c d", final=True))
        return manager, told, final

    manager, told, final = asyncio.run(run())
    assert [u["stable"] for u in told] == ["", "Le", "Le chat", "Le chat dort"]
    held = [bytes(manager.held(r)).decode() for r in manager.requests]
    assert held == ["", "", "Le", "Le chat"]
    drafts = [bytes(r.params["ssbd"].get("draft", ())).decode() for r in manager.requests]
    assert drafts == ["", "Le chat.", " chat dort.", " dort ici."]
    assert told[-1]["text"] == "Le chat dort ici maintenant." == final["stable"]
    assert final["unstable"] == "" and len(manager.requests) == 4


def test_append_only_sessions_take_nothing_back_whatever_is_written():
    async def run(seed):
        chance = random.Random(seed)
        manager, before = FakeManager(piece=1000), ""
        mask = chance.randrange(4)
        session = make(manager, append_only=True, mask=mask)
        for length in range(1, 30):
            words = chance.choices(
                ["né", "né", "né", "naïf", "犬", "犬", "\u200d", "."], k=length // 3
            )
            manager.answer = "".join(chance.choice(["", " "]) + word for word in words)
            source = "s" * length if chance.random() < 0.8 else session.state.source or "s"
            made = await updated(session, whole(source, final=length == 29))
            assert made["stable"].startswith(before)
            assert made["stable"] + made["unstable"] == made["text"]
            assert made["text"].startswith(before)
            before = made["stable"]
        assert made["unstable"] == ""

    for seed in range(50):
        asyncio.run(run(seed))


def test_append_only_sessions_hold_nothing_of_an_empty_source():
    async def run():
        session = make(FakeManager(), append_only=True)
        await updated(session, whole("one two three"))
        await updated(session, whole("one two three four"))
        assert session.state.stable == "ONE TWO"
        assert (await updated(session, whole(" ")))["text"] == ""
        return await updated(session, whole("five six"))

    assert asyncio.run(run())["stable"] == ""
