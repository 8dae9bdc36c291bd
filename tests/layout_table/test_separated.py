"""One table, however its cells are parted."""

import pytest

from memadvisor.layout_table.read import read_layout_table
from memadvisor.layout_table.separated import separated_rows

ROWS = [["Model", "TP, PP", "Seq"], ["GPT-3 13B", "8", ""], ["llama2-7b", "1", "4k"]]


@pytest.mark.parametrize(
    "text",
    [
        'Model,"TP, PP",Seq\nGPT-3 13B,8,\nllama2-7b,1,4k\n',
        'Model;"TP, PP";Seq\nGPT-3 13B;8;\nllama2-7b;1;4k\n',
        "Model\tTP, PP\tSeq\nGPT-3 13B\t8\t\nllama2-7b\t1\t4k\n",
        "| Model | TP, PP | Seq |\n|---|:--:|---|\n| GPT-3 13B | 8 | |\n| llama2-7b | 1 | 4k |\n",
        "Model | TP, PP | Seq\n--- | :--: | ---\nGPT-3 13B | 8 |\nllama2-7b | 1 | 4k\n",
        '[{"Model": "GPT-3 13B", "TP, PP": 8, "Seq": null}, {"Model": "llama2-7b", "TP, PP": 1, "Seq": "4k"}]',
        '{"Model": "GPT-3 13B", "TP, PP": 8}\n{"Model": "llama2-7b", "TP, PP": 1, "Seq": "4k"}\n',
    ],
    ids=["commas", "semicolons", "tabs", "markdown", "markdown without edges", "JSON", "JSON lines"],
)
def test_the_same_rows(text):
    assert list(separated_rows(text)) == ROWS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_what_spreadsheets_write(tmp_path, encoding):
    path = tmp_path / "layouts.csv"
    path.write_bytes("model,gpu,gpus,remark\nllama2-7b,A100,8,d\u00e9j\u00e0 vu\n".encode(encoding))
    (row,) = read_layout_table(path).rows
    assert row.case is not None and row.case.cluster.num_accelerators == 8
