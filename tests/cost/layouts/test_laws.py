"""What holds of every prediction, whatever the coefficients."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memadvisor.architecture import Architecture, Experts
from memadvisor.architectures.load import ARCHITECTURES
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.memory import device_contents, stage_parameters
from memadvisor.errors import UsageError
from memadvisor.layout import Layout, TrainingStep
from memadvisor.lora import Lora
from memadvisor.software import PRESETS
from memadvisor.software_traits import Software
from tests.cost.layouts.nodes import make_cluster

GPT = Architecture(
    name="gpt", n_layers=16, hidden=2048, n_heads=16, n_kv_heads=16, head_dim=128, ffn=8192, vocab=32768,
    tied_embeddings=False, gated_mlp=False, positions=0, biases=False,
)  # fmt: skip
MIXTURE = replace(GPT, experts=Experts(num_experts=8, experts_per_token=2, expert_ffn=4096, shared_ffn=1024))


def a100s(ranks):
    return make_cluster(ranks, "A100-SXM4-80GB", inside=300e9, across=25e9)


degrees = st.sampled_from([1, 2, 4])
layouts = st.builds(
    Layout,
    data=st.sampled_from([1, 2, 4, 8]),
    tensor=degrees,
    pipeline=degrees,
    context=st.sampled_from([1, 2]),
    zero_stage=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    micro_batch_size=st.integers(1, 4),
    num_microbatches=st.integers(1, 12),
    recompute=st.sampled_from(["none", "selective", "full"]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
models = st.sampled_from([GPT, MIXTURE, replace(GPT, tied_embeddings=True, gated_mlp=True)])


def estimate(model, layout, machines=None, known=FITTED, software=None):
    step = TrainingStep(layout=layout, seq_len=1024, software=software or Software())
    return estimate_step(model, step, machines or a100s(layout.num_ranks), known)


@given(models, layouts)
@settings(max_examples=25, deadline=None)
def test_times_are_parts_of_a_whole_and_shares_of_the_peak_are_below_one(model, layout):
    predicted = estimate(model, layout)
    assert all(seconds >= 0 for seconds in predicted.time_s.values())
    assert sum(predicted.time_s.values()) == pytest.approx(predicted.step_time_s)
    assert 0 < predicted.mfu <= predicted.hfu < 1
    assert predicted.worst.total_bytes >= max(predicted.first.total_bytes, predicted.last.total_bytes)


@given(models, layouts, st.floats(1.0, 8.0))
@settings(max_examples=25, deadline=None)
def test_more_bandwidth_is_never_slower_and_changes_no_memory(model, layout, factor):
    machines = a100s(layout.num_ranks)
    quicker = replace(
        machines,
        inside=replace(machines.inside, bytes_per_s=300e9 * factor),
        across=replace(machines.across, bytes_per_s=25e9 * factor),
    )
    before, after = estimate(model, layout, machines), estimate(model, layout, quicker)
    assert after.step_time_s <= before.step_time_s * (1 + 1e-9)
    assert after.peak_memory_bytes == before.peak_memory_bytes


@given(models, layouts)
@settings(max_examples=25, deadline=None)
def test_more_memory_on_the_card_changes_the_chance_alone(model, layout):
    machines = a100s(layout.num_ranks)
    accelerator = machines.accelerator
    larger = replace(machines, accelerator=replace(accelerator, memory_bytes=2 * accelerator.memory_bytes))
    before, after = estimate(model, layout, machines), estimate(model, layout, larger)
    assert after.step_time_s == before.step_time_s
    assert after.p_oom <= before.p_oom


@given(models, layouts)
@settings(max_examples=25, deadline=None)
def test_a_larger_micro_batch_or_a_lower_zero_stage_never_takes_less_memory(model, layout):
    here = estimate(model, layout).peak_memory_bytes
    larger = replace(layout, micro_batch_size=layout.micro_batch_size + 1)
    assert estimate(model, larger).peak_memory_bytes > here
    if layout.zero_stage in (1, 2):
        lower = replace(layout, zero_stage=layout.zero_stage - 1)
        assert estimate(model, lower).peak_memory_bytes >= here


@given(models, st.sampled_from([1, 2, 4, 8]), degrees, st.sampled_from([1, 2, 4, 8]))
def test_stages_and_ranks_together_hold_every_parameter_once(model, pipeline, tensor, expert):
    assume(model.experts is not None or expert == 1)
    step = TrainingStep(
        layout=Layout(pipeline=pipeline, tensor=tensor, expert=expert, data=expert), seq_len=1024
    )
    layers = (16 // pipeline,) * pipeline
    counts = [stage_parameters(model, step, device_contents((chunk,), layers)) for chunk in range(pipeline)]
    total = sum(count.shared * tensor + count.experts * tensor * expert for count in counts)
    twice = model.head_parameters() if model.tied_embeddings and pipeline > 1 else 0
    assert total == pytest.approx(model.num_parameters() - model.norm_parameters() + twice)


@pytest.mark.parametrize("microbatches", [4, 16])
def test_a_uniform_pipeline_has_the_bubble_of_its_formula(microbatches):
    """(p - 1) / (m + p - 1) of 1F1B, with a head that costs nothing and messages that take no time."""
    thin = replace(GPT, vocab=8)
    free = replace(FITTED, pipeline_message_s=0.0)
    swift = make_cluster(4, "A100-SXM4-80GB", inside=1e30, across=25e9)
    layout = Layout(pipeline=4, num_microbatches=microbatches)
    predicted = estimate(thin, layout, swift, free, Software(stage_rule="even"))
    pipeline_s = (
        predicted.step_time_s - predicted.time_s["gradients_and_parameters"] - predicted.time_s["optimizer"]
    )
    share = predicted.time_s["pipeline_bubble"] / pipeline_s
    assert share == pytest.approx(3 / (microbatches + 3), rel=0.03)


def test_what_goes_to_the_host_goes_in_proportion():
    """All of it leaves what is being computed or moved, half of it leaves half of the rest too."""
    layout = Layout(data=8, zero_stage=1, recompute="none")
    none, half, everything = (
        estimate(GPT, replace(layout, offload_activations=share)).worst for share in (0.0, 0.5, 1.0)
    )
    assert 0 < everything.activation_bytes < none.activation_bytes / 2
    assert half.activation_bytes == (none.activation_bytes + everything.activation_bytes) / 2


@given(models, layouts, st.floats(0.05, 0.95))
@settings(max_examples=15, deadline=None)
def test_layers_that_run_again_count_by_their_share(model, layout, share):
    """Kept bytes, time and FLOPs lie between those of no layer and of all, in proportion."""
    none, part, every = (
        estimate(model, replace(layout, recompute=how, recompute_share=share))
        for how, share in (("none", 1.0), ("full", share), ("full", 1.0))
    )
    for figure in (lambda e: e.first.activation_bytes, lambda e: e.hfu * e.step_time_s):
        low, high = figure(none), figure(every)
        assert figure(part) == pytest.approx(low + share * (high - low), rel=1e-6)
    assert none.step_time_s <= part.step_time_s * (1 + 1e-9)
    assert part.step_time_s <= every.step_time_s * (1 + 1e-9)


def test_experts_are_dealt_out_among_replicas():
    layout = Layout(data=8, expert=8, zero_stage=0)
    apart, together = estimate(MIXTURE, layout), estimate(MIXTURE, replace(layout, expert=1))
    experts = 16 * MIXTURE.expert_layer_parameters(0)
    assert together.worst.optimizer_bytes - apart.worst.optimizer_bytes == pytest.approx(12 * experts * 7 / 8)
    with pytest.raises(UsageError, match="experts do not part"):
        estimate(MIXTURE, replace(layout, expert=16))


def test_stage_3_has_room_for_gathered_experts_only_where_they_are_sharded():
    """Two layers' parameters in two bytes and one's gradients in four."""
    whole, sharded = (
        estimate(MIXTURE, Layout(data=8, expert=expert, zero_stage=3)).worst.buffer_bytes for expert in (8, 4)
    )
    assert sharded - whole == pytest.approx((2 * 2 + 4) * MIXTURE.expert_layer_parameters(0) / 4)


def test_uneven_experts_slow_and_fill_the_fullest_rank():
    """Twice the tokens: twice what experts keep, and no more; nothing changes for one rank that has all experts."""
    even = Layout(data=8, expert=8, micro_batch_size=2)
    uneven = replace(even, expert_imbalance=2.0)
    plain, full = (estimate(MIXTURE, layout) for layout in (even, uneven))
    tokens, experts = 2 * 1024, MIXTURE.experts
    routed = tokens * experts.experts_per_token * (4 * experts.expert_ffn + 4 * MIXTURE.hidden)
    more = full.worst.activation_bytes - plain.worst.activation_bytes
    assert more == pytest.approx(routed * MIXTURE.n_layers)
    assert plain.step_time_s < full.step_time_s < 2 * plain.step_time_s
    for imbalance, ranks in ((0.5, 8), (9.0, 8), (1.5, 1)):
        with pytest.raises(UsageError, match="imbalance"):
            Layout(data=8, expert=ranks, expert_imbalance=imbalance)


softwares = st.builds(
    replace,
    st.sampled_from([preset.software for preset in PRESETS]),
    fused_attention=st.booleans(),
    lora=st.sampled_from([None, Lora(rank=8), Lora(rank=8, base="nf4")]),
)


def beside_bytes(model, layout, software, how):
    """At most what a layer's second run has beside what it would hold if it ran once (test_second_run.py counts it): its input,
    its result, and operator by operator what a scattered sum left."""
    tensors = {"full": 2, "selective": 3 if software.selective == "operators" else 0}.get(how, 0)
    size = 4 if software.autocast else software.element_bytes
    return tensors * size * layout.micro_batch_size * 1024 / layout.context * model.hidden


@given(st.sampled_from(ARCHITECTURES), softwares, layouts)
@settings(max_examples=25, deadline=None)
def test_of_every_family_and_trainer_what_runs_again_takes_time_and_saves_memory(model, software, layout):
    target = 256 if model.encoder_layers else None
    assume(model.n_layers >= layout.pipeline and not (model.encoder_layers and layout.context > 1))
    found = {}
    for how in ("none", "pointwise", "selective", "full"):
        step = TrainingStep(
            layout=replace(layout, recompute=how), seq_len=1024, target_len=target, software=software
        )
        found[how] = estimate_step(model, step, a100s(layout.num_ranks))
    for less, more in (
        ("none", "pointwise"),
        ("none", "selective"),
        ("pointwise", "full"),
        ("selective", "full"),
    ):
        # Operator by operator results of frozen products are kept, which nothing keeps where nothing runs again.
        if software.lora and software.selective == "operators" and (less, more) == ("none", "selective"):
            continue
        # Where a single layer is all that is left, running it again saves nothing. What runs again as a whole has no more beside it
        # than what does operator by operator.
        is_strict = (less, more) == ("selective", "full") and software.stops_early
        allowed = 0.0 if is_strict else FITTED.allocator_share * beside_bytes(model, layout, software, more)
        most = found[less].peak_memory_bytes * (1 + 1e-9) + allowed
        assert found[more].peak_memory_bytes <= most, (less, more)
    assert all(found["none"].step_time_s <= one.step_time_s * (1 + 1e-9) for one in found.values())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_pack_of_samples_is_as_sequences_of_their_length(recompute):
    """Attention that skips other samples does what it does of sequences as long as these: one of 8,192 tokens, four of 2,048."""
    layout = Layout(data=8, zero_stage=3, recompute=recompute)
    pack = TrainingStep(layout=layout, seq_len=8192, software=Software(sample_len=2048))
    apart = TrainingStep(layout=replace(layout, micro_batch_size=4), seq_len=2048, software=Software())
    found, wanted = (estimate_step(GPT, step, a100s(8)) for step in (pack, apart))

    assert found.step_time_s == pytest.approx(wanted.step_time_s)
    assert (found.mfu, found.mfu_halved, found.hfu) == pytest.approx(
        (wanted.mfu, wanted.mfu_halved, wanted.hfu)
    )
    assert found.peak_memory_bytes == pytest.approx(wanted.peak_memory_bytes)


def test_scores_in_memory_are_those_of_a_whole_pack():
    """They are masked, and no fewer; the FLOPs that a model needs are of its samples all the same."""
    layout = Layout(data=8)
    whole, pack = (
        estimate_step(
            GPT,
            TrainingStep(
                layout=layout, seq_len=8192, software=Software(fused_attention=False, sample_len=length)
            ),
            a100s(8),
        )
        for length in (None, 2048)
    )

    assert pack.step_time_s == whole.step_time_s
    assert pack.mfu < whole.mfu


def test_packs_of_an_encoder_decoder_are_refused():
    (model,) = (each for each in ARCHITECTURES if each.name == "t5-3b")
    step = TrainingStep(layout=Layout(data=8), seq_len=512, target_len=512, software=Software(sample_len=64))
    with pytest.raises(UsageError, match="packs of samples of an encoder-decoder"):
        estimate_step(model, step, a100s(8))
