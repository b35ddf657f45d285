"""The judge and the baseline."""

from __future__ import annotations

import pytest

from fastft.demo.scoring import NearestNeighbour, is_right, score

EXPECTED = '{"do":"timer","for":"tea","min":25}'


@pytest.mark.parametrize("answer", [EXPECTED, '{ "min": 25, "do": "timer",\n "for": "tea" }', f"  {EXPECTED}\n"])
def test_equal_json_is_right_however_it_is_written(answer: str) -> None:
    assert is_right(answer, EXPECTED)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "timer",
        EXPECTED[:-1],
        EXPECTED + " and more",
        '{"do":"timer","for":"tea"}',
        '{"do":"timer","for":"tea","min":25,"room":"den"}',
        '{"do":"timer","for":"tea","min":"25"}',
        '{"do":"timer","for":"tea","min":25.0}',
        '{"do":"timer","for":"Tea","min":25}',
        f"[{EXPECTED}]",
    ],
)
def test_anything_else_is_wrong(answer: str) -> None:
    assert not is_right(answer, EXPECTED)


def test_true_is_not_one() -> None:
    assert not is_right('{"on":true}', '{"on":1}')
    assert not is_right('{"on":1}', '{"on":true}')


def test_text_is_compared_by_its_words() -> None:
    assert is_right(" the  answer\n", "the answer")
    assert not is_right("The answer", "the answer")
    assert not is_right("25.0", "25"), "a bare number is text"


def test_score_counts_whole_answers_and_fields() -> None:
    answers = [EXPECTED, '{"do":"timer","for":"rice","min":7}', "no idea"]
    result = score(answers, [EXPECTED] * 3)
    assert result.right == pytest.approx(1 / 3)
    assert result.fields == pytest.approx((3 + 1 + 0) / 9)
    assert result.count == 3


def test_score_of_text_has_no_fields_and_lengths_must_agree() -> None:
    assert score(["a"], ["a"]).fields is None
    assert score(["{}"], ["a"]).right == 0
    with pytest.raises(ValueError):
        score(["a"], [])


def test_nearest_neighbour_prefers_rare_words_and_the_earlier_of_equals() -> None:
    baseline = NearestNeighbour(
        ["please play some jazz", "please dim the light", "please play some rock", "please play some jazz"],
        ["jazz", "light", "rock", "jazz again"],
    )
    assert baseline.answer("Please: the LIGHT!") == "light"
    assert baseline.answer("rock, please, play some") == "rock"
    assert baseline.answer("some jazz") == "jazz"
    assert baseline.answer("entirely unknown") == "jazz", "nothing in common: the first row"


def test_baseline_on_the_builtin_task_is_never_right_whole_but_knows_the_form() -> None:
    """No held-out value occurs in training, so what is looked up cannot be right; the command's name often is."""
    from fastft.demo.rows import builtin_data

    data = builtin_data()
    baseline = NearestNeighbour([row.question for row in data.train], [row.completion for row in data.train])
    for rows in data.held_out.values():
        result = score([baseline.answer(row.question) for row in rows], [row.completion for row in rows])
        assert result.right == 0
        assert result.fields is not None
        assert 0.1 < result.fields < 0.5
