"""Plans in a few words."""

from memadvisor.plan import UnitPlan
from memadvisor.plan_words import parts_text
from tests.engines.trainings import make_plan


def test_parts_are_named_once_for_all_units_that_have_them():
    parts = {
        "blocks.0": (("blocks.0.act", "blocks.0.proj"),),
        "blocks.1": (("blocks.1.act", "blocks.1.proj"),),
        "blocks.2": (("blocks.2.act", "blocks.2.proj"),),
        "blocks.3": (("blocks.3.mlp",), ("blocks.3.ln", "blocks.3.attn.q")),
        "": (("head",),),
        "blocks.4": (),
    }
    units = tuple(
        UnitPlan(name=name, zero_stage=0, recompute=False, parts=own) for name, own in parts.items()
    )

    words = "act to proj of blocks.0 to 2; mlp, ln to attn.q of blocks.3; head of (model)"
    assert parts_text(make_plan(1, policy="chosen", units=units)) == words
