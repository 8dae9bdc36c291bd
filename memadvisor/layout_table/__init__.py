"""Tables of layouts as people publish them: a row becomes an architecture, a training step and a cluster."""
