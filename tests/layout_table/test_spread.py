"""How a row spreads a model over its ranks."""

from tests.layout_table.test_read import case_of, read_one


def test_whole_experts_on_tensor_parallel_ranks():
    """Megatron Core's expert_tensor_parallel_size of 1: eight ranks share experts, four of them by tensor parallelism."""
    experts = {"n_experts": "64", "dp": "8", "tp": "4", "n_gpus": "32", "ep": "8"}
    parted, whole = (case_of(**experts, etp=etp).step for etp in ("4", "1"))
    assert (parted.layout.expert, parted.software.whole_experts, parted.expert_ranks) == (8, False, 8)
    assert (whole.layout.expert, whole.software.whole_experts, whole.expert_ranks) == (2, True, 8)
    beyond = case_of(**{**experts, "ep": "32"}).step
    assert (beyond.layout.expert, beyond.software.whole_experts) == (8, True)
    assert "expert_tensor is 2" in (read_one(**experts, etp="2").error or "")
    assert "whole experts" in (read_one(**{**experts, "ep": "2"}, etp="1").error or "")
