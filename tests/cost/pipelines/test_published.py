"""Bubbles and order of schedules that arXiv:2401.10241 published, from the times that it profiled."""

import pytest

from memadvisor.cost.pipelines import ChunkCosts, simulate_pipeline

# Table 9 (devices, microbatches, F, B, W and a transfer in ms) and table 5 (bubble rates by the authors); W's share of
# the activations from table 1.
PUBLISHED = [
    # p, m, F, B, W, transfer, W's share, layers a device, 1f1b, interleaved, zb-h1, zb-h2, zb-1p, zb-2p
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.366, 3, 0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.366, 3, 0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.366, 3, 0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.432, 4, 0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.432, 4, 0.1898, 0.0628, 0.1045, 0.0559, 0.1045, 0.0022),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.432, 4, 0.1091, 0.0320, 0.0554, 0.0294, 0.0554, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.432, 3, 0.2552, 0.1104, 0.1397, 0.0672, 0.1397, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.432, 3, 0.2082, 0.0852, 0.1088, 0.0516, 0.1088, 0.0054),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.432, 3, 0.1251, 0.0445, 0.0576, 0.0266, 0.0576, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.432, 2, 0.2646, 0.1493, 0.1421, 0.0641, 0.1421, 0.0038),
]
NAMES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
# Table 4: measured samples per GPU and second, in the same order of rows.
MEASURED = [
    (11.8, 13.1, 12.9, 14.5),
    (12.5, 13.4, 13.4, 14.8),
    (13.6, 13.9, 14.2, 14.9),
    (3.50, 4.01, 3.88, 4.32),
    (3.70, 4.08, 4.00, 4.35),
    (4.03, 4.19, 4.20, 4.39),
    (1.40, 1.54, 1.61, 1.81),
    (1.49, 1.59, 1.67, 1.83),
    (1.64, 1.66, 1.76, 1.85),
    (0.76, 0.82, 0.87, 0.99),
]


def step_ms(name, row, blocking=False):
    devices, microbatches, forward, inputs, weights, transfer, share, layers, *_ = row
    chunks = layers if name == "interleaved" else 1
    costs = ChunkCosts(
        forward_s=forward / chunks,
        input_backward_s=inputs / chunks,
        weight_backward_s=weights / chunks,
        activation_bytes=1000,
        weight_activation_bytes=round(1000 * share),
    )
    return simulate_pipeline(
        name,
        [costs] * (devices * chunks),
        microbatches,
        num_devices=devices,
        transfer_s=transfer,
        blocking=blocking,
    ).step_s


@pytest.mark.parametrize("row", PUBLISHED)
def test_bubbles_are_those_that_the_authors_computed(row):
    """To the four digits given (ZB-2p once one off in the last); of the interleaved order, which differs, within 5 %."""
    work = row[1] * sum(row[2:5])
    for name, published in zip(NAMES, row[8:], strict=True):
        rate = 1 - work / step_ms(name, row)
        tolerance = 0.05 * published if name == "interleaved" else 0.00015
        assert rate == pytest.approx(published, abs=tolerance), name


@pytest.mark.parametrize(("row", "measured"), list(zip(PUBLISHED, MEASURED, strict=True)))
def test_schedules_come_in_the_measured_order(row, measured):
    """With interleaved exchanges waited for, as that code does; what the others do, their times have room for."""
    names = ("1f1b", "interleaved", "zb-1p", "zb-2p")
    steps = [step_ms(name, row, blocking=name == "interleaved") for name in names]
    for one in range(4):
        for other in range(4):
            if measured[one] < measured[other]:
                assert steps[one] > steps[other], (names[one], names[other])
