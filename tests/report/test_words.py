from memadvisor.report.words import ranks_in_words


def test_ranks_are_one_or_several_and_of_very_many_some():
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([0, 2]) == "ranks 0, 2"
    assert ranks_in_words(range(10), most=2) == "ranks 0, 1 and 8 more"
