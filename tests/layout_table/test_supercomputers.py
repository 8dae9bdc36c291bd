"""Machines of research centres in place of cards."""

import pytest

from tests.layout_table.test_read import case_of, read_one


@pytest.mark.parametrize(
    ("name", "card", "per_node"),
    [
        ("Frontier", "MI250X-die-64GB", 8),
        ("Perlmutter", "A100-SXM4-40GB", 4),
        ("Summit", "V100-SXM2-16GB", 6),
        ("JUWELS Booster", "A100-SXM4-40GB", 4),
        ("Leonardo", "A100-SXM4-80GB", 4),
        ("Selene", "A100-SXM4-80GB", 8),
        ("Alps (CSCS)", "GH200-96GB", 4),
    ],
)
@pytest.mark.parametrize("column", ["system", "cluster", "gpu"])
def test_a_supercomputer_says_its_cards_and_its_nodes(name, card, per_node, column):
    row = {"gpu": None, "n_gpus": "96", "global_batch_seqs": "96", column: name}

    cluster = case_of(**row).cluster
    assert (cluster.accelerator.name, cluster.per_node) == (card, per_node)


def test_what_a_row_says_itself_counts():
    told = case_of(gpu="H100", nodes="2", n_gpus="16", global_batch_seqs="16", cluster="Summit").cluster

    assert (told.accelerator.name, told.per_node) == ("H100-SXM-80GB", 8)


def test_a_word_that_is_part_of_another_is_no_machine():
    assert read_one(gpu=None, framework="summiteer").case.cluster.accelerator.name.startswith("A100")
