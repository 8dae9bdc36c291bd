from memadvisor.analyzers.activations import activations
from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.analyzers.peak import peak_breakdown
from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.records import Module
from memadvisor.tui.tree import module_tree
from tests.make_run import make_run


def nodes(tree):
    return {tree.name: tree} | {name: node for child in tree.children for name, node in nodes(child).items()}


def tree_of(rank):
    peak = peak_breakdown(rank, memory_timeline(rank))
    return module_tree(rank.modules, rank.parameters, peak, activations(traced_calls(rank)))


def test_the_root_holds_the_whole_peak_and_all_that_is_saved():
    rank = make_run().ranks[0]
    peak = peak_breakdown(rank, memory_timeline(rank))
    tree = tree_of(rank)

    assert tree.peak_bytes == peak.allocated_bytes - peak.unexplained_bytes
    assert tree.saved_bytes == activations(traced_calls(rank)).saved_bytes
    assert tree.num_parameters == sum(p.num_elements for p in rank.parameters)


def test_a_module_holds_at_least_what_its_children_hold():
    for node in nodes(tree_of(make_run().ranks[0])).values():
        assert node.peak_bytes >= sum(child.peak_bytes for child in node.children)
        assert node.saved_bytes >= sum(child.saved_bytes for child in node.children)


def test_a_module_without_a_listed_parent_hangs_from_its_nearest_ancestor():
    modules = tuple(Module(name=n, type_name="M", unit="") for n in ("", "a", "a.b.c", "other.x"))
    found = nodes(module_tree(modules, (), None, None))

    assert [child.name for child in found["a"].children] == ["a.b.c"]
    assert [child.name for child in found[""].children] == ["a", "other.x"]
    assert found[""].peak_bytes is None and found["a"].saved_bytes is None
