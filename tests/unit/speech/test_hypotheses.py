"""What Whisper writes from no sound behind the end of speech."""

from speech.hypotheses import Word, without_invented

# What whisper-base's alignment heads attend to, in a clip that ends with "letterpress" at 8.62 s.
RECORDED = [
    Word(" to", 0, 7.46),
    Word(" form", 0, 7.52),
    Word(" letterpress,", 0, 8.26),
    Word(" you", 0, 8.84),
    *(Word(word, 0) for word in (" can", " find", " the", " link", " in", " the", " description.")),
]
SPOKEN = 8.62


def texts(words: list[Word], spoken: float = SPOKEN) -> str:
    return "".join(word.text for word in without_invented(words, spoken)).strip()


def test_an_end_that_attends_to_no_speech_and_has_no_time_goes():
    assert texts(RECORDED) == "to form letterpress,"


def test_an_end_that_attends_to_what_was_said_before_goes_too():
    back = [Word(word.text, 0, word.look or 1.6) for word in RECORDED]
    assert texts(back) == "to form letterpress,"


def test_words_stay_that_may_have_been_said():
    assert texts(RECORDED, 10.5) == texts(RECORDED, 99.0) != texts(RECORDED)
    # Of two words attention may be wrong.
    assert texts(RECORDED[:5]) == "to form letterpress, you can"


def test_words_whose_place_is_not_known_stay_before_one_that_is():
    words = [Word(" The", 0), Word(" invention", 0), Word(" of", 0), Word(" metal", 0, 8.2)]
    assert texts(words) == "The invention of metal"


def test_where_nothing_is_known_all_stay():
    words = [Word(word.text, 0) for word in RECORDED]
    assert texts(words) == "".join(word.text for word in words).strip()
    assert without_invented([], SPOKEN) == []
