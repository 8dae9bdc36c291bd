"""One table, however its cells are parted."""

import pytest

from memadvisor.layout_table.separated import separated_rows

ROWS = [["Model", "TP, PP", "Seq"], ["GPT-3 13B", "8", ""], ["llama2-7b", "1", "4k"]]


@pytest.mark.parametrize(
    "text",
    [
        'Model,"TP, PP",Seq\nGPT-3 13B,8,\nllama2-7b,1,4k\n',
        'Model;"TP, PP";Seq\nGPT-3 13B;8;\nllama2-7b;1;4k\n',
        "Model\tTP, PP\tSeq\nGPT-3 13B\t8\t\nllama2-7b\t1\t4k\n",
        "| Model | TP, PP | Seq |\n|---|:--:|---|\n| GPT-3 13B | 8 | |\n| llama2-7b | 1 | 4k |\n",
    ],
    ids=["commas", "semicolons", "tabs", "markdown"],
)
def test_the_same_rows(text):
    assert list(separated_rows(text)) == ROWS
