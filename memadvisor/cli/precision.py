"""The options that ask for another precision than the script's, and what they mean."""

from __future__ import annotations

import argparse

from memadvisor.autocast import wrong_autocast
from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.precision import Precision

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_precision_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--param-dtype",
        choices=_DTYPES,
        help="with ZeRO stage 3: what float32 parameters are gathered and computed with (lossy)",
    )
    parser.add_argument(
        "--reduce-dtype",
        choices=_DTYPES,
        help="with ZeRO stages 2 and 3: what their gradients are summed in over the ranks (lossy)",
    )

    parser.add_argument(
        "--optimizer-dtype",
        choices=("fp32",),
        help="with ZeRO stages 1 to 3: update bf16 and fp16 parameters in float32 masters, of which each rank keeps "
        "its share; losses differ",
    )


def add_optimizer_bits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizer-bits",
        type=int,
        choices=(8,),
        help="bits of an element of the larger optimizer states between updates (lossy)",
    )


def add_fused_updates(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fused-updates",
        action="store_true",
        default=None,
        help="torch's Adam, AdamW and SGD update in one kernel, without temporaries (results not bit for bit the same)",
    )


def add_autocast(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--autocast",
        type=_autocast,
        metavar="bf16",
        help="forwards of a float32 model run under torch.autocast to bfloat16; not with ZeRO stage 3 (lossy)",
    )


def _autocast(text: str) -> str:
    if wrong := wrong_autocast(text):
        raise argparse.ArgumentTypeError(wrong)
    return text


def add_chunked_loss(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chunked-loss",
        type=_chunked_loss,
        metavar="auto|ROWS",
        help="the product before the loss, and the loss, are done for so many rows (tokens) at a time (results not bit for bit the same)",
    )


def _chunked_loss(text: str) -> ChunkedLoss:
    if text == "auto":
        return ChunkedLoss()
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows; give auto, or 1 or more")
    return ChunkedLoss(rows=int(text))


def precision_of(arguments: argparse.Namespace) -> Precision:
    return Precision(
        param_dtype=_DTYPES.get(arguments.param_dtype),
        reduce_dtype=_DTYPES.get(arguments.reduce_dtype),
        optimizer_dtype=_DTYPES.get(arguments.optimizer_dtype),
    )
