"""Sources that join the beginning of one sentence and the end of another."""

from scripts.join_sentences import joined

SENTENCES = [
    f"A {who} {does} in the {where} near a {what} ."
    for who in ("man", "woman", "dog", "boy")
    for does in ("sits", "runs", "sleeps")
    for where, what in (("park", "tree"), ("street", "car"), ("house", "door"))
]


def test_parts_of_two_sentences_are_joined_at_a_word_of_both():
    made = list(joined(SENTENCES, 20))
    assert len(set(made)) == 20 and not set(made) & set(SENTENCES)
    beginnings = {" ".join(s.split()[:n]) for s in SENTENCES for n in range(2, 10)}
    ends = {" ".join(s.split()[-n:]) for s in SENTENCES for n in range(2, 10)}
    for sentence in made:
        words = sentence.split()
        cuts = [(" ".join(words[:n]), " ".join(words[n:])) for n in range(2, len(words))]
        assert any(begin in beginnings and end in ends for begin, end in cuts)


def test_the_same_seed_makes_the_same_sentences():
    assert list(joined(SENTENCES, 9, seed=3)) == list(joined(SENTENCES, 9, seed=3))
    assert list(joined(SENTENCES, 9, seed=3)) != list(joined(SENTENCES, 9, seed=4))


def test_where_there_are_no_more_it_ends():
    assert list(joined(["A dog runs .", "", "A dog runs ."], 5)) == []
    assert len(list(joined(SENTENCES, 10_000))) < 1000
