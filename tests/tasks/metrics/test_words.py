def test_an_empty_answer_to_a_question_without_one_is_right():
    answers = ["", "the cat sat on the mat", " "]
    assert set(rouge(answers, answers).values()) == {100.0}
    assert rouge(["", "a b"], ["x", ""])["rouge1"] == 0.0
    assert rouge([["", "a b"]], [""])["rouge1"] == 100.0
