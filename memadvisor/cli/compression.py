"""The options that ask for smaller messages between ranks, and what they mean."""

from __future__ import annotations

import argparse

from memadvisor.compression import Compression
from memadvisor.local_sgd import LocalSgd, parse_local_sgd

FLAGS = ("gather_bits", "reduce_bits", "all_reduce_bits", "all_reduce_top", "all_reduce_rank")


def add_compression_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gather-bits",
        type=int,
        choices=(8,),
        help="with ZeRO stage 3: bits of an element of the float32 parameters that training passes gather (lossy)",
    )
    parser.add_argument(
        "--reduce-bits",
        type=int,
        choices=(4, 8),
        help="with ZeRO stages 2 and 3: bits of an element of their gradients on the way to their sum (lossy)",
    )
    parser.add_argument(
        "--all-reduce-bits",
        type=int,
        choices=(1, 4, 8),
        help="with ZeRO stages 0 and 1: bits of an element of a gradient that is sent, with error feedback (lossy)",
    )
    parser.add_argument(
        "--all-reduce-top",
        type=int,
        metavar="K",
        help="with ZeRO stages 0 and 1: send the K largest of each 256 elements of a gradient, with error feedback "
        "(lossy)",
    )
    parser.add_argument(
        "--all-reduce-rank",
        type=int,
        metavar="R",
        help="with ZeRO stages 0 and 1: send a matrix's gradient as two of R columns (PowerSGD), with error feedback "
        "(lossy)",
    )
    parser.add_argument(
        "--local-sgd",
        metavar="PERIOD[,warmup=STEPS]",
        help="with ZeRO stage 0: after the first STEPS each rank steps on its own gradients, and parameters are averaged "
        "every PERIOD steps (lossy)",
    )


def local_sgd_of(arguments: argparse.Namespace) -> LocalSgd | None:
    return None if arguments.local_sgd is None else parse_local_sgd(arguments.local_sgd)


def compression_of(arguments: argparse.Namespace) -> Compression:
    return Compression(**{flag: getattr(arguments, flag) for flag in FLAGS})
