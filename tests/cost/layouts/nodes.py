"""Clusters of nodes of eight accelerators, or of one smaller node."""

from memadvisor.hardware.cluster import Cluster, Link
from memadvisor.hardware.load import load_hardware


def make_cluster(ranks=16, name="H100-SXM-80GB", inside=450e9, across=50e9, inside_s=0.0, across_s=0.0):
    return Cluster(
        accelerator=load_hardware(name),
        num_nodes=max(1, ranks // 8),
        per_node=min(8, ranks),
        inside=Link(kind="nvlink", bytes_per_s=inside, alpha_s=inside_s, source=""),
        across=Link(kind="ib", bytes_per_s=across, alpha_s=across_s, source=""),
    )
