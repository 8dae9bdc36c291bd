"""Trainings of the zoo, each under memadvisor: `python profile_zoo.py DIR NAME...` leaves a run in DIR/NAME."""

import sys
from pathlib import Path

import memadvisor

sys.path.insert(0, str(Path(__file__).parent / "zoo"))
from kinds import train_all

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    train_all(sys.argv[2:], lambda name: memadvisor.profile(directory / name))
