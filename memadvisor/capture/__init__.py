"""Recording a real training step of an unmodified script.

attach.py     waits for the script's own `import torch`, then installs the hooks
hooks.py      torch's global hooks: modules, backward, optimizer steps
position.py   where the training stands: module stack, phase, micro-batch
models.py     the discovered models: names, units, parameters
recorder.py   told by the hooks; starts and stops the traced step
spans.py      the step under way, with as little work as possible; writer.py makes rows of it
tracer.py     one traced step: truth.py (the allocator's account) and labels.py (what it is),
              joined by account.py; collectives.py and flops.py read what labels.py sees
script.py     runs the script as `python script.py` would; launch.py starts several ranks
"""
