"""Imports point one way: data, then capture and analysis, then planning, then views."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

# First matching prefix wins; each entry lists what that layer may import of ours.
DATA = (
    "memadvisor.units",
    "memadvisor.unit_ranges",
    "memadvisor.category_words",
    "memadvisor.errors",
    "memadvisor.executors",
    "memadvisor.loose",
    "memadvisor.compression",
    "memadvisor.local_sgd",
    "memadvisor.activation_bits",
    "memadvisor.coded_states",
    "memadvisor.fused_updates",
    "memadvisor.chunked_loss",
    "memadvisor.autocast",
    "memadvisor.asked",
    "memadvisor.precision",
    "memadvisor.architecture",
    "memadvisor.architectures",
    "memadvisor.recurrence",
    "memadvisor.layout",
    "memadvisor.layout_table",
    "memadvisor.json_field",
    "memadvisor.lora",
    "memadvisor.zeropp_options",
    "memadvisor.software",
    "memadvisor.software_traits",
    "memadvisor.software_torch",
    "memadvisor.software_dtypes",
    "memadvisor.run",
    "memadvisor.hardware",
    "memadvisor.plan",
    "memadvisor.plan_checks",
    "memadvisor.update_checks",
    "memadvisor.plan_file",
    "memadvisor.plan_words",
    "memadvisor.policies",
    "memadvisor.schedule",
    "memadvisor.schedule_names",
    "memadvisor.write_schedule",
    "memadvisor.write_transfers",
    "memadvisor.write_fsdp2",
    "memadvisor.merged_reductions",
    "memadvisor.stretches",
    "memadvisor.operator_calls",
)
COST = "memadvisor.cost"
TORCH = (
    "memadvisor.own_hooks",
    "memadvisor.never_compiled",
    "memadvisor.cuda_graphs",
    "memadvisor.backends",
    "memadvisor.key_value_caches",
    "memadvisor.in_making",
    "memadvisor.tensor_classes",
)  # what capture and engines know of it
ENGINES = {  # the rooms of the engines, and those below each
    "lanes": (),
    "collectives": ("lanes",),
    "script": (),
    "sharding": ("lanes", "collectives", "script"),
    "updates": ("lanes", "collectives", "script", "sharding"),
    "activations": ("lanes", "script", "sharding"),
    "losses": ("lanes", "script", "sharding", "updates"),
}
ANALYZERS = "memadvisor.analyzers"
ALLOWED = {
    **dict.fromkeys(DATA, DATA),
    **dict.fromkeys(TORCH, ()),
    "memadvisor.capture": (*DATA, *TORCH),
    "memadvisor.calibrate": (
        *DATA,
        "memadvisor.engines.lanes.dynamic_code",
        "memadvisor.engines.lanes.thread_lane",
        "memadvisor.engines.collectives.exchanges",
        "memadvisor.engines.collectives.native",
    ),
    COST: DATA,
    ANALYZERS: (*DATA, COST),
    "memadvisor.planning": (*DATA, COST, ANALYZERS),
    **{
        f"memadvisor.engines.{name}": (
            *DATA,
            COST,
            *TORCH,
            *(f"memadvisor.engines.{below}" for below in under),
        )
        for name, under in ENGINES.items()
    },
    "memadvisor.engines": (*DATA, COST, *TORCH),
    "memadvisor.doctor": (*DATA, ANALYZERS),
    "memadvisor.export": DATA,
    "memadvisor.report": (*DATA, COST, ANALYZERS),
    "memadvisor.gates": (*DATA, ANALYZERS),
    "memadvisor.tui": (*DATA, COST, ANALYZERS, "memadvisor.planning", "memadvisor.report"),
}
MAY_IMPORT_TORCH = ("memadvisor.capture", "memadvisor.calibrate", "memadvisor.engines", *TORCH)


def _inside(module, packages):
    return any(module == p or module.startswith(p + ".") for p in packages)


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # of a package, its files


def _module(path):
    """Import name of a file: the folders analyzers/ and tui/ are installed under memadvisor."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "memadvisor" else ("memadvisor", *parts))


def _files():
    return sorted(p for top in ("memadvisor", "analyzers", "tui") for p in (ROOT / top).rglob("*.py"))


def violations():
    for path in _files():
        module = _module(path)
        layer = next((name for name in ALLOWED if _inside(module, [name])), None)
        for target in _imports(path):
            ours = _inside(target, ("memadvisor",))
            if layer and ours and not _inside(target, (layer, *ALLOWED[layer])):
                yield f"{module} imports {target}"
            if _inside(target, ["torch"]) and not _inside(module, MAY_IMPORT_TORCH):
                yield f"{module} imports torch"


def test_imports_follow_the_layers():
    assert list(violations()) == []


def test_no_file_imports_another_that_imports_it():
    """Neither for types, nor inside a function."""
    files = {_module(path): path for path in _files()}
    graph = {
        module: {target for target in _imports(path) if target in files} for module, path in files.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(
        files
    )  # raises CycleError, which names the files
