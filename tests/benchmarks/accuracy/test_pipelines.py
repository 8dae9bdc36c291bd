import pandas as pd

from benchmarks.accuracy.pipelines import schedule_orders


def rows(measured, predicted):
    return pd.DataFrame(
        {
            "model": "m",
            "n_microbatches": 8,
            "schedule": ["1F1B", "1F1B-I", "ZB-1p"],
            "measured_s": measured,
            "predicted_s": predicted,
        }
    )


def test_an_order_is_right_where_no_pair_is_turned():
    assert schedule_orders(rows([3.0, 2.0, 1.0], [9.0, 8.0, 7.0])).right == 1
    # Two that measured alike may be predicted either way.
    assert schedule_orders(rows([3.0, 2.0, 2.0], [9.0, 7.0, 8.0])).right == 1


def test_a_turned_pair_is_named_the_faster_first():
    found = schedule_orders(rows([3.0, 1.0, 2.0], [9.0, 8.0, 7.0]))
    assert (found.groups, found.right) == (1, 0)
    assert found.wrong == ("m, 8 microbatches: 1F1B-I before ZB-1p",)
