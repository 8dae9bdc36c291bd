"""Names of matrices and of what frozen ones are held in, as people write them."""

import pytest

from memadvisor.errors import UsageError
from memadvisor.lora import ATTENTION, LINEAR, Lora, base_named, targets_named


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("q_proj,v_proj", ("query", "value")),
        ("all-linear", LINEAR),
        ("ALL (all linear)", LINEAR),
        ("c_attn", ("qkv",)),
        ("attention, down_proj", (*ATTENTION, "down")),
        ("wq wk wv wo w1", None),
        ("q_proj|k_proj|v_proj|output_proj|mlp", LINEAR),
    ],
)
def test_targets(text, targets):
    if targets is None:
        with pytest.raises(UsageError, match="'w1'"):
            targets_named(text)
    else:
        assert targets_named(text) == targets


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("bnb.nf4", "nf4"),
        ("bnb.nf4-dq", "nf4-dq"),
        ("nf4 (bnb)", "nf4"),
        ("4", "nf4-dq"),
        ("4-bit", "nf4-dq"),
        ("int4 (gptq)", "int4"),
        ("AWQ", "int4"),
        ("int8 (gptq)", "int8"),
        ("None", "16bit"),
        ("16", "16bit"),
        ("fp32", "fp32"),
    ],
)
def test_bases(text, base):
    assert base_named(text) == base


def test_a_block_of_64_has_a_scale():
    """Dettmers et al. 2023, section 3: 32/64 bits of a parameter, 8/64 + 32/(64 256) = 0.127 with double quantisation."""
    assert Lora(rank=8, base="nf4").matrix_bytes * 8 == pytest.approx(4.5)
    assert Lora(rank=8, base="nf4-dq").matrix_bytes * 8 == pytest.approx(4.127, abs=1e-3)


@pytest.mark.parametrize(
    "fields", [{"rank": 0}, {"rank": 8, "targets": ("head",)}, {"rank": 8, "base": "nf5"}]
)
def test_adapters_that_make_no_sense(fields):
    with pytest.raises(UsageError):
        Lora(**fields)
