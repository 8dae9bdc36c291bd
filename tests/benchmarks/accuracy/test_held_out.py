import json

from benchmarks.accuracy.held_out import fingerprint, held_out_lines


def write(path, models, of=None):
    keys = ("model", "num_times", "num_peaks", "seen_time", "held_time", "seen_memory", "held_memory")
    held = {
        "fingerprint": of or fingerprint(),
        "every": 8,
        "models": [dict(zip(keys, m, strict=True)) for m in models],
    }
    path.write_text(json.dumps(held), encoding="utf-8")
    return "\n".join(held_out_lines(path))


def test_models_count_by_their_rows(tmp_path):
    text = write(
        tmp_path / "held.json", [("small", 3, 1, 0.1, 0.1, 0.1, 0.1), ("large", 1, 3, 0.1, 0.3, 0.2, 0.2)]
    )
    assert "| each in turn | 4 | 10.0 % | 15.0 % | 1.50 | 4 | 17.5 % | 17.5 % | 1.00 |" in text
    assert "Not met" in text and "earlier coefficients" not in text


def test_errors_of_earlier_coefficients_say_so(tmp_path):
    text = write(tmp_path / "held.json", [("small", 3, 1, 0.1, 0.12, 0.1, 0.1)], of="0")
    assert "Met over all models" in text and "earlier coefficients" in text


def test_without_a_file_there_is_nothing_to_say(tmp_path):
    assert held_out_lines(tmp_path / "none.json") == []
