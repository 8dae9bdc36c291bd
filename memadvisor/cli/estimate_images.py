"""Options of `memadvisor estimate` for models of text and images."""

from __future__ import annotations

import argparse
import dataclasses

from memadvisor.architecture import Architecture
from memadvisor.architectures.load import load_architecture
from memadvisor.cli.estimate_batch import positive
from memadvisor.errors import UsageError

_OPTIONS = ("images", "image_tokens", "freeze_vision")


def add_images(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--images", type=int, metavar="N", help="images of a sequence (default: none)")
    group.add_argument(
        "--image-tokens",
        type=int,
        metavar="N",
        help="tokens that an image takes in the sequence (default: as the model has them)",
    )
    group.add_argument("--freeze-vision", action="store_true", help="the vision tower is not trained")


def asked_model(arguments: argparse.Namespace) -> Architecture:
    """The model that is named, with the images that are asked for. Raises UsageError where it has no tower for them, or the
    sequence no room."""
    model = load_architecture(arguments.model)
    given = [f"--{option.replace('_', '-')}" for option in _OPTIONS if getattr(arguments, option)]
    if model.tower is None:
        if given:
            raise UsageError(
                f"{', '.join(given)}: {model.name} has no vision tower that is known.",
                hint="leave it out; docs/estimate.md says whose towers are.",
            )
        return model
    tokens = model.tower.image_tokens
    if arguments.image_tokens is not None:
        tokens = positive("image-tokens", arguments.image_tokens)
    images = 0 if arguments.images is None else positive("images", arguments.images)
    if images and tokens is None:
        raise UsageError(
            f"how many tokens an image takes depends on its size in {model.name}.",
            hint="add --image-tokens N, as the model's processor makes them.",
        )
    if arguments.seq is not None and images * (tokens or 0) > arguments.seq:
        raise UsageError(
            f"{images} images of {tokens} tokens are more than the sequence's {arguments.seq}.",
            hint="their tokens are among those of --seq.",
        )
    # Adapters are beside the language model's matrices alone.
    is_trained = not arguments.freeze_vision and arguments.lora_rank is None
    tower = dataclasses.replace(model.tower, image_tokens=tokens, images=images, is_trained=is_trained)
    return dataclasses.replace(model, tower=tower)


def refuse_images(arguments: argparse.Namespace, what: str) -> None:
    """Raises UsageError where an option of images is given beside `what`, which has no use for it."""
    for option in _OPTIONS:
        if getattr(arguments, option):
            raise UsageError(f"--{option.replace('_', '-')} does not go with {what}.", hint="leave it out.")
