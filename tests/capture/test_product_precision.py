"""What torch says of products of float32, under each way of setting it."""

import pytest
import torch

from memadvisor.capture.product_precision import float32_products

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def as_before():
    matmul, everything = torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision
    yield
    torch.backends.fp32_precision = everything
    torch.backends.cuda.matmul.fp32_precision = matmul


def test_by_default_products_are_exact_and_convolutions_are_not():
    assert float32_products(CUDA) == {"matmul": "ieee", "convolution": "tf32"}


def test_the_new_setting_is_told():
    torch.backends.cuda.matmul.fp32_precision = "tf32"

    assert float32_products(CUDA)["matmul"] == "tf32"


def test_what_is_set_for_everything_holds_where_nothing_else_is_set():
    torch.backends.fp32_precision = "tf32"

    assert float32_products(CUDA)["matmul"] == "tf32"


def test_a_processor_has_no_such_choice():
    assert float32_products(torch.device("cpu")) == {"matmul": None, "convolution": None}
