"""`memadvisor estimate`: memory and step time of a layout that nobody has run, or of a table of layouts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from memadvisor.architecture import Architecture, target_length
from memadvisor.cli.estimate_arguments import adapted, add_code, add_layout, offloaded_activations, packed
from memadvisor.cli.estimate_batch import (
    batch_of,
    degree_of,
    positive,
    read_batch_tokens,
    recompute_share,
    schedule_of,
)
from memadvisor.cli.estimate_images import add_images, asked_model, refuse_images
from memadvisor.cli.estimate_largest import largest_to_json, print_largest
from memadvisor.cli.estimate_search import found_to_json, nearest_to_json, print_found, print_nearest
from memadvisor.cli.estimate_table import predict_table, say_unused
from memadvisor.cli.estimate_view import estimate_to_json, print_estimate
from memadvisor.cli.estimate_what_if import outcome_to_json, print_outcomes
from memadvisor.cli.pipeline_drawing import print_pipeline
from memadvisor.cli.printing import stdout_console
from memadvisor.cost.pipelines.costs import PipelineTimes
from memadvisor.cost.pipelines.schedules import canonical_name
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.hardware.cluster_file import load_cluster
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.layout import Layout, TrainingStep
from memadvisor.layout_table.attention import with_attention
from memadvisor.layout_table.read import LayoutCase
from memadvisor.layout_table.training_code import is_reference
from memadvisor.planning.largest import QUANTITIES, LargestQuestion, largest_fits
from memadvisor.planning.layout_reasons import explain
from memadvisor.planning.layout_space import USUAL_MAX_P_OOM, USUAL_SCHEDULES, LayoutQuestion
from memadvisor.planning.layouts import search_layouts
from memadvisor.planning.modelled_split import with_balanced_stages
from memadvisor.planning.nearest_fit import nearest_fit
from memadvisor.planning.predict_layouts import predict_case
from memadvisor.planning.what_if import what_if
from memadvisor.software import MODERN, PRESETS, find_preset
from memadvisor.software_dtypes import on_accelerator, with_optimizer, with_plain_loss, with_precision
from memadvisor.software_traits import Preset, Software
from memadvisor.units import parse_bytes
from memadvisor.zeropp_options import zeropp_fields, zeropp_names

_OF_ONE_LAYOUT = (
    "show_schedule", "tp_kind", "tp_depth", "split", "shard", "micro_batch", "recompute", "recompute_layers", "chunks", "sequence_parallel", "context_kind",
    "offload_optimizer", "offload_parameters", "offload_activations", "expert_imbalance",
)  # fmt: skip
_UNSET = (None, False, 0.0, "none", "ring")
_DEGREES = ("dp", "tp", "pp", "cp", "ep", "zero")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME|FILE", help="gpt3-175b, llama3-70b ..., a config.json or a TOML file"
    )
    parser.add_argument("--gpus", metavar="8xH100[,nodes=4]", help="accelerators, by their data sheets")
    parser.add_argument(
        "--cluster", metavar="FILE.toml", help="accelerators and links from a file (docs/clusters.md)"
    )
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence")
    parser.add_argument(
        "--target", type=int, metavar="N", help="tokens of an encoder-decoder's target (default: as --seq)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="sequences of a step, over all replicas")
    parser.add_argument(
        "--batch-tokens", metavar="N", help="--batch in tokens, as 4M (a bare K, M or G is binary)"
    )
    parser.add_argument(
        "--max-p-oom",
        type=float,
        metavar="P",
        help="in a search: a likelier layout to run out of memory is no answer (default: 0.1)",
    )
    parser.add_argument(
        "--largest", choices=QUANTITIES, help="the largest that fits, under each technique (docs/largest.md)"
    )
    add_layout(parser.add_argument_group("layout"))
    add_code(parser.add_argument_group("training code"))
    add_images(parser.add_argument_group("images"))
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of an accelerator, in place of its data sheet's"
    )
    parser.add_argument(
        "--table", metavar="LAYOUTS.csv", help="predict every row of a table (docs/layout-table.md)"
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="with no layout named: search half and twice the accelerators, twice the memory, twice the network too",
    )
    parser.add_argument(
        "--show-schedule",
        action="store_true",
        help="draw the pipeline's schedule; with -o FILE.html as a page too",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where the table's predictions, or the page, go"
    )
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 where the layout fits (or a table was written), 1 where it does not."""
    read_batch_tokens(arguments)
    for option in ("max_p_oom", "widest_tp"):
        is_given = getattr(arguments, option) is not None
        if is_given and (arguments.table or arguments.largest or not _is_open(arguments)):
            raise UsageError(
                f"--{option.replace('_', '-')} goes with a search over layouts.",
                hint="leave it out, or name no layout to search all.",
            )
    if arguments.what_if and (arguments.table or arguments.largest or not _is_open(arguments)):
        raise UsageError(
            "--what-if goes with a search over layouts.",
            hint="name a model and several accelerators, and no layout (no --dp, --tp, --pp, --cp, --ep, --zero), without --largest.",
        )
    if arguments.table is not None:
        if arguments.largest is not None:
            raise UsageError(
                "--largest answers for one model, and --table names many.", hint="leave one out."
            )
        if arguments.output is None:
            raise UsageError("--table needs a file for its predictions.", hint="add -o PREDICTED.csv.")
        if arguments.zeropp is not None:
            raise UsageError(
                "--zeropp is of one layout or of a search, not of --table.",
                hint="give the table a column zeropp.",
            )
        refuse_images(arguments, "--table")
        say_unused(arguments)
        predict_table(arguments.table, arguments.output)
        return 0
    if arguments.output is not None and not arguments.show_schedule:
        raise UsageError(
            "-o goes with --table or --show-schedule.", hint="leave it out, or add --json and redirect."
        )
    if arguments.largest is not None:
        return _largest(arguments)
    if _is_open(arguments):
        return _search(arguments)
    case = _case(arguments)
    prediction = predict_case(case, timeline=arguments.show_schedule)
    if arguments.json:
        print(json.dumps(estimate_to_json(case, prediction), indent=1))
    else:
        print_estimate(case, prediction, stdout_console())
    if arguments.show_schedule:
        _show_schedule(prediction.estimate.pipeline, arguments)
    return 0 if prediction.estimate.fits else 1


def _show_schedule(pipeline: PipelineTimes, arguments: argparse.Namespace) -> None:
    if not arguments.json:
        print_pipeline(pipeline, stdout_console())
    if arguments.output is not None:
        from memadvisor.report.pipeline import write_pipeline_report  # nothing else here needs the report

        write_pipeline_report(pipeline, Path(arguments.output))
        print(f"memadvisor estimate: the schedule is drawn in {arguments.output}", file=sys.stderr)


def _is_open(arguments: argparse.Namespace) -> bool:
    """Whether nothing is said of how the accelerators share the work, or how one does a step of a known size."""
    if arguments.model is None or any(getattr(arguments, name) is not None for name in _DEGREES):
        return False
    if _cluster(arguments).num_accelerators > 1:
        return True
    is_known_step = arguments.batch is not None and arguments.seq is not None
    return is_known_step and all(getattr(arguments, option) in _UNSET for option in _OF_ONE_LAYOUT)


def _search(arguments: argparse.Namespace) -> int:
    if arguments.batch is None or arguments.seq is None:
        raise UsageError(
            "a search over layouts needs --seq and --batch, the sequences of a step.",
            hint="add them, as --seq 4096 --batch 512, or name a layout: --tp N --pp N --cp N --zero STAGE; --dp follows.",
        )
    for option in _OF_ONE_LAYOUT:
        if getattr(arguments, option) not in _UNSET:
            raise UsageError(
                f"--{option.replace('_', '-')} is a part of one layout, and none is named.",
                hint="leave it out to search all layouts, or name one: --tp N --pp N --cp N --zero STAGE.",
            )
    cluster = _cluster(arguments)
    _, software = _software(arguments)
    model = asked_model(arguments)
    question = LayoutQuestion(
        model=model,
        target_len=_target(arguments, model),
        cluster=cluster,
        seq_len=positive("seq", arguments.seq),
        batch_sequences=positive("batch", arguments.batch),
        widest_tensor=None if arguments.widest_tp is None else positive("widest-tp", arguments.widest_tp),
        schedules=_schedules(arguments.schedule),
        zeropp=zeropp_names(arguments.zeropp),
        max_p_oom=USUAL_MAX_P_OOM if arguments.max_p_oom is None else arguments.max_p_oom,
        software=on_accelerator(software, cluster.accelerator, is_given=arguments.precision is not None),
    )
    found = search_layouts(question)
    reasons = tuple(explain(question, one) for one in found.best)
    outcomes = what_if(question, found.best[0] if found.best else None) if arguments.what_if else ()
    nearest = None if found.smallest is None else nearest_fit(question, found.smallest)
    if arguments.json:
        answer = found_to_json(question, found, reasons)
        answer["nearest"] = None if nearest is None else nearest_to_json(nearest)
        if arguments.what_if:
            answer["what_if"] = [outcome_to_json(one) for one in outcomes]
        print(json.dumps(answer, indent=1))
    else:
        print_found(question, found, reasons, stdout_console())
        if nearest is not None:
            print_nearest(question, nearest, stdout_console())
        if outcomes:
            print_outcomes(outcomes, stdout_console())
    return 0 if found.best else 1


def _schedules(text: str | None) -> tuple[str, ...]:
    """Of a list with commas, each once; the usual ones where nothing is said."""
    if text is None:
        return USUAL_SCHEDULES
    return tuple(dict.fromkeys(canonical_name(name) for name in text.split(",")))


def _largest(arguments: argparse.Namespace) -> int:
    quantity = arguments.largest
    asked = {"micro-batch": "micro_batch", "sequence": "seq"}.get(quantity)
    if asked is not None and getattr(arguments, asked) is not None:
        option = asked.replace("_", "-")
        print(
            f"memadvisor estimate: --{option} has no effect, for --largest {quantity} finds it.",
            file=sys.stderr,
        )
        setattr(arguments, asked, None)
    _need(arguments, "model", *(() if quantity == "sequence" else ("seq",)))
    for option in ("batch", "schedule", "zeropp", *_DEGREES, *_OF_ONE_LAYOUT):
        is_given = getattr(arguments, option) not in _UNSET
        if is_given and option not in ("micro_batch", "sequence_parallel"):
            raise UsageError(
                f"--largest tries each technique by itself, and --{option.replace('_', '-')} names one.",
                hint="leave it out.",
            )
    cluster = _cluster(arguments)
    preset, software = _software(arguments)
    spread = arguments.sequence_parallel
    model = asked_model(arguments)
    question = LargestQuestion(
        quantity=quantity,
        model=model,
        target_len=_target(arguments, model),
        cluster=cluster,
        seq_len=degree_of(arguments, "seq"),
        micro_batch_size=degree_of(arguments, "micro_batch"),
        software=on_accelerator(software, cluster.accelerator, is_given=arguments.precision is not None),
        sequence_parallel=preset.sequence_parallel if spread is None else spread,
    )
    answers = largest_fits(question)
    if arguments.json:
        print(json.dumps(largest_to_json(question, answers), indent=1))
    else:
        print_largest(question, answers, stdout_console())
    return 0 if any(answer.fit for answer in answers) else 1


def _target(arguments: argparse.Namespace, model: Architecture) -> int | None:
    given = None if arguments.target is None else positive("target", arguments.target)
    return target_length(model, given, degree_of(arguments, "seq"))


def _need(arguments: argparse.Namespace, *options: str) -> None:
    for option in options:
        if getattr(arguments, option) is None:
            raise UsageError(
                f"--{option} is missing.", hint="--model, --gpus and --seq are needed, or --table."
            )


def _case(arguments: argparse.Namespace) -> LayoutCase:
    _need(arguments, "model", "seq")
    architecture = asked_model(arguments)
    cluster = _cluster(arguments)
    preset, software = _software(arguments)
    software = on_accelerator(software, cluster.accelerator, is_given=arguments.precision is not None)
    layout, is_open = _layout(arguments, cluster, preset, architecture.n_layers)
    if software.updates_in_backward and layout.num_microbatches > 1:
        raise UsageError(
            f"--optimizer-in-backward with {layout.num_microbatches} microbatches, which add to the same gradients.",
            hint="leave it out, or have one microbatch of each replica in a step.",
        )
    if arguments.split == "even":
        software = dataclasses.replace(software, stage_rule="even")
    step = TrainingStep(
        layout=layout,
        seq_len=positive("seq", arguments.seq),
        software=software,
        target_len=_target(arguments, architecture),
    )
    if arguments.split == "balanced":
        if is_open:
            raise UsageError(
                "--split balanced goes with one micro-batch size.", hint="add --micro-batch N to --batch."
            )
        step = with_balanced_stages(architecture, step, cluster)
    return LayoutCase(architecture=architecture, step=step, cluster=cluster, micro_batch_is_open=is_open)


def _cluster(arguments: argparse.Namespace) -> Cluster:
    if (arguments.gpus is None) == (arguments.cluster is None):
        raise UsageError(
            "--gpus or --cluster is needed, and not both.", hint="for example --gpus 8xH100,nodes=4."
        )
    cluster = parse_cluster(arguments.gpus) if arguments.cluster is None else load_cluster(arguments.cluster)
    if arguments.memory is None:
        return cluster
    accelerator = dataclasses.replace(cluster.accelerator, memory_bytes=parse_bytes(arguments.memory))
    return dataclasses.replace(cluster, accelerator=accelerator)


def _software(arguments: argparse.Namespace) -> tuple[Preset, Software]:
    preset = MODERN
    if arguments.framework is not None:
        found = find_preset(arguments.framework)
        if found is None:
            names = ", ".join(each.names[0] for each in PRESETS)
            raise UsageError(f"{arguments.framework!r} is no known framework.", hint=f"known are {names}.")
        preset = found
    software = preset.software
    if arguments.precision is not None:
        software = with_precision(software, arguments.precision)
    if arguments.attention is not None:
        software = with_attention(software, arguments.attention)
    if arguments.model_code is not None:
        software = dataclasses.replace(software, reference_code=is_reference(arguments.model_code))
    software = with_plain_loss(software)
    if arguments.optimizer is not None:
        software = with_optimizer(software, arguments.optimizer)
    if arguments.optimizer_in_backward:
        software = dataclasses.replace(software, updates_in_backward=True)
    return preset, packed(arguments, adapted(arguments, software))


def _layout(
    arguments: argparse.Namespace, cluster: Cluster, preset: Preset, n_layers: int
) -> tuple[Layout, bool]:
    """The layout, and whether its micro-batch size is open."""
    ranks, per_node = cluster.num_accelerators, cluster.per_node
    tensor, pipeline, context, expert = (degree_of(arguments, name) for name in ("tp", "pp", "cp", "ep"))
    inner = tensor * pipeline * context
    if ranks % inner:
        raise UsageError(
            f"--tp {tensor} x --pp {pipeline} x --cp {context} does not divide {ranks} accelerators.",
            hint="their product divides the number of accelerators.",
        )
    data = ranks // inner if arguments.dp is None else positive("dp", arguments.dp)
    size, count, is_open = batch_of(arguments, data)
    schedule, chunks = schedule_of(arguments, preset, n_layers // pipeline)
    sequence_parallel, kind = arguments.sequence_parallel, arguments.tp_kind or "1d"
    if sequence_parallel is None:  # grids part tokens by themselves
        sequence_parallel = preset.sequence_parallel and kind == "1d"
    layout = Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        zero_stage=preset.zero_stage if arguments.zero is None else arguments.zero,
        shard=arguments.shard,
        chunks=chunks if pipeline > 1 else 1,
        schedule=schedule if pipeline > 1 else "1f1b",
        sequence_parallel=tensor > 1 and sequence_parallel,
        tensor_kind=kind,
        tensor_depth=1 if arguments.tp_depth is None else positive("tp-depth", arguments.tp_depth),
        context_kind=arguments.context_kind,
        micro_batch_size=size,
        num_microbatches=count,
        recompute=arguments.recompute,
        recompute_share=recompute_share(arguments, n_layers / (pipeline * (chunks if pipeline > 1 else 1))),
        offload_optimizer=arguments.offload_optimizer,
        offload_parameters=arguments.offload_parameters,
        offload_activations=offloaded_activations(arguments, preset),
        expert_imbalance=1.0 if arguments.expert_imbalance is None else arguments.expert_imbalance,
    )
    fields = zeropp_fields(
        zeropp_names(arguments.zeropp), shard_ranks=layout.shard_ranks, tensor=tensor, per_node=per_node
    )
    if fields["secondary_shard"] == layout.shard_ranks:
        print(
            "memadvisor estimate: hpz takes memory and no time off, for the shards are in one node.",
            file=sys.stderr,
        )
    return dataclasses.replace(layout, **fields), is_open
