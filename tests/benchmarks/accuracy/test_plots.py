from xml.etree import ElementTree

from benchmarks.accuracy.plots import figure

SVG = "{http://www.w3.org/2000/svg}"


def drawn(**changed):
    given = {
        "dots": {"1<2": [(1.0, 1.0), (10.0, 20.0)]},
        "absolute_errors": {"predicted": [0.0, 1.0]},
    } | changed
    return ElementTree.fromstring(figure("a & b", "s", **given))


def test_every_row_is_a_dot_and_names_are_escaped():
    root = drawn()
    paths = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("class") == "dots c0"]
    assert paths[0].count("M") == 2
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a & b", "1<2", "measured, s", "predicted, s", "share of rows"} <= set(texts)


def test_a_right_prediction_lies_on_the_diagonal():
    root = drawn()
    first = next(path for path in root.iter(f"{SVG}path") if path.get("class") == "dots c0").get("d")
    x, y = (float(number) for number in first.split("h")[0].removeprefix("M").split(" "))
    assert abs((x - 62) - (334 - y)) < 0.11


def test_rows_off_by_more_than_all_are_not_drawn_as_within():
    line = next(
        path
        for path in drawn(absolute_errors={"ours": [0.5, 3.0]}).iter(f"{SVG}path")
        if path.get("class") == "line c0"
    )
    assert line.get("d").endswith(" 184.0")  # half of the rows, at the right end
