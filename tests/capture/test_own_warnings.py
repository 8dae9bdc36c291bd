"""What is about memadvisor is not shown, and nothing else changes."""

import warnings

from memadvisor.capture.own_warnings import Silence

SILENCE = Silence(r"Ours \(\d\)", DeprecationWarning)


def test_ours_alone_are_silent_and_the_filters_are_as_they_were_afterwards():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        SILENCE.begin()
        SILENCE.begin()
        warnings.simplefilter("default", append=True)  # the script's own, meanwhile
        warnings.warn("Ours (1) and more", DeprecationWarning, stacklevel=1)
        warnings.warn("Ours (1) of another kind", UserWarning, stacklevel=1)
        warnings.warn("Not ours (1)", DeprecationWarning, stacklevel=1)
        SILENCE.end()
        warnings.warn("Ours (2)", DeprecationWarning, stacklevel=1)

        assert warnings.filters[: len(before)] == before

    assert [str(each.message) for each in shown] == ["Ours (1) of another kind", "Not ours (1)", "Ours (2)"]


def test_what_was_shown_once_is_not_shown_again():
    def warn():
        warnings.warn_explicit("said once", UserWarning, "script.py", 1, registry=registry)

    registry = {}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        warn()
        SILENCE.begin()
        warn()
        SILENCE.end()
        warn()

    assert len(shown) == 1
