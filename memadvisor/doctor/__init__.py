"""Whether memadvisor works here: facts about this machine, small trainings that are recorded, what both mean."""
