"""Every module belongs to one unit, and blocks that stand side by side are units of their own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memadvisor.run.cut import ModuleNode, cut_units, module_tree, unwrap


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class GPT(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.tok_emb = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.ln_f = nn.LayerNorm(4)
        self.head = nn.Linear(4, 16, bias=False)
        if tied:
            self.head.weight = self.tok_emb.weight


def units_of(model):
    return cut_units(module_tree(model))


def test_a_gpt_is_its_embedding_its_blocks_its_norm_and_its_head():
    units = units_of(GPT())

    assert list(dict.fromkeys(units[name] for name in units if units[name])) == [
        "tok_emb",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "ln_f",
        "head",
    ]
    assert units["blocks.1.mlp.2"] == "blocks.1"


def test_tying_changes_no_unit():
    assert units_of(GPT(tied=True)) == units_of(GPT())


def test_repeated_leaves_are_units_one_by_one_and_no_block():
    """Linear layers side by side hold no modules: each is a leaf, and a unit for that alone."""
    assert units_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == {"": "", "0": "0", "1": "1"}


def test_a_single_leaf_is_the_root_unit():
    assert units_of(nn.Linear(2, 2)) == {"": ""}


def test_the_only_block_of_a_list_is_a_unit():
    """As in a model whose depths share one layer's weights."""
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([Block()]), "stages": nn.ModuleList([nn.Sequential(Block())])}
    )

    assert {units_of(model)[name] for name in ("layers.0", "layers.0.mlp", "layers.0.mlp.2")} == {"layers.0"}
    assert units_of(model)["stages.0.0.norm"] == "stages.0.0.norm"


def test_the_layer_that_a_pipelines_stage_has_kept_is_a_unit():
    """torchtitan's and the tutorial's layers are a ModuleDict by numbers, of which each stage deletes the others'."""
    stage, named = nn.Module(), nn.Module()
    stage.layers = nn.ModuleDict({"5": Block()})
    named.encoders = nn.ModuleDict({"vision": Block()})

    assert {units_of(stage)[name] for name in ("layers.5", "layers.5.norm", "layers.5.mlp.2")} == {"layers.5"}
    assert units_of(named)["encoders.vision.norm"] == "encoders.vision.norm"


def test_a_block_that_has_no_twin_is_looked_into():
    model = nn.Module()
    model.only = Block()

    assert set(units_of(model).values()) == {"", "only.norm", "only.mlp.0", "only.mlp.2"}


def test_two_stacks_of_one_class_are_cut_into_their_blocks():
    """T5's encoder and decoder; but the experts of a list's layers, however many, stay inside their layer."""
    model = nn.Module()
    model.encoder, model.decoder = GPT(), GPT()
    layers = nn.ModuleList([GPT(), GPT()])

    assert {"encoder.blocks.0", "decoder.blocks.2", "decoder.head"} <= set(units_of(model).values())
    assert set(units_of(layers).values()) == {"", "0", "1"}


def test_lists_in_a_list_are_one_list():
    """Layers as pairs of a norm and a block, each pair a list: the block has its twins in the other pairs."""
    pairs = nn.ModuleList(nn.ModuleList([nn.LayerNorm(4), Block()]) for _ in range(3))

    assert set(units_of(pairs).values()) == {"", *(f"{i}.{j}" for i in range(3) for j in range(2))}


def test_parameters_beside_blocks_belong_to_their_modules_unit():
    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(2))
    model.cls_token = nn.Parameter(nn.init.zeros_(nn.Linear(4, 1).weight))

    units = units_of(model)

    assert units[""] == ""
    assert units["layers"] == ""
    assert units["layers.0.norm"] == "layers.0"


def test_a_list_of_parameters_is_of_the_module_that_holds_it():
    """Nobody can call it: as a unit of its own it was none that runs. Keras's layers hold all they have so."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.ParameterDict(
                {"kernel": torch.zeros(2, 2), "more": nn.ParameterList([torch.zeros(2)])}
            )

    model = nn.ModuleDict({"first": Layer(), "last": nn.Linear(2, 2)})
    model["lists"] = nn.ModuleList([nn.ParameterList([torch.zeros(2)])])

    assert units_of(model) == {
        **{"": "", "last": "last", "lists": "", "lists.0": ""},
        **dict.fromkeys(["first", "first.inside", "first.inside.more"], "first"),
    }


def test_a_module_used_twice_is_described_once():
    shared = Block()
    model = nn.ModuleList([shared, Block(), shared])

    assert [child.name for child in module_tree(model).children] == ["0", "1"]


def test_a_second_models_names_carry_its_prefix():
    units = cut_units(module_tree(GPT(), "model1"))

    assert units["model1"] == "model1"
    assert units["model1.blocks.0.norm"] == "model1.blocks.0"


def test_what_torch_export_has_traced_is_cut_as_it_was_written():
    """Its modules are all of one class, lists too."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])

        def forward(self, x):
            x = self.down(x)
            for block in self.blocks:
                x = block(x)
            return x

    traced = torch.export.unflatten(torch.export.export(Written(), (torch.ones(1, 2),)))

    units = set(units_of(traced).values())
    assert units == set(units_of(Written()).values()) >= {"blocks.0", "blocks.1"}


def test_wrappers_are_taken_off():
    model = GPT()
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    compiled = type("OptimizedModule", (nn.Module,), {})()
    compiled._orig_mod = wrapped

    assert unwrap(compiled) is model
    assert unwrap(model) is model


def trees(depth=3):
    node = st.builds(
        lambda kind, own, children: (kind, own, children),
        st.sampled_from("ABC"),
        st.integers(0, 2),
        st.just(()) if depth == 0 else st.lists(st.deferred(lambda: trees(depth - 1)), max_size=3),
    )
    return node


def named(raw, name=""):
    kind, own, children = raw
    prefix = f"{name}." if name else ""
    return ModuleNode(name, kind, own, tuple(named(c, f"{prefix}{n}") for n, c in enumerate(children)))


def nodes_of(node):
    yield node
    for child in node.children:
        yield from nodes_of(child)


@given(trees().map(named))
def test_any_tree_is_cut_into_whole_subtrees(root):
    units = cut_units(root)
    nodes = {node.name: node for node in nodes_of(root)}

    assert set(units) == set(nodes)
    for name, unit in units.items():
        assert unit in nodes
        assert unit == "" or name == unit or name.startswith(unit + ".")
        assert units[unit] == unit
        if nodes[name].num_own_parameters == 0 and not nodes[name].children:
            continue
        parent = name.rpartition(".")[0]
        assert unit == name or unit == units[parent]


class Shared(torch.nn.Module):
    """A block that is registered once, and called from elsewhere."""

    def __init__(self, *, held, num_inside=0):
        super().__init__()
        self.embedding = torch.nn.Linear(4, 4)
        self.block = Pair() if not num_inside else torch.nn.Module()
        if num_inside:
            self.block.layers = torch.nn.ModuleList(Pair() for _ in range(num_inside))
        if held == "in a list":
            self.depths = [self.block] * 3
        elif held == "by layers":
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
            for layer in self.layers:
                layer.shared = (self.block,)
        elif held == "once":
            self.first = [self.block]
        elif held == "by its own":
            for child in self.block.children():
                child.owner = [self.block]


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)


@pytest.mark.parametrize(
    ("held", "num_inside", "expected"),
    [
        ("in a list", 0, {"block"}),
        ("by layers", 0, {"block"}),
        ("once", 0, {"block.first", "block.second"}),
        ("by its own", 0, {"block.first", "block.second"}),
        ("in a list", 2, {"block.layers.0", "block.layers.1"}),
    ],
)
def test_a_block_that_others_hold_in_several_places_is_one_unless_it_has_blocks(held, num_inside, expected):
    units = cut_units(module_tree(Shared(held=held, num_inside=num_inside)))
    assert {unit for unit in units.values() if unit.startswith("block")} == expected
