"""Recording a real training step of an unmodified script.

script.py     runs the script as `python script.py` would; launch.py starts several ranks, children.py
              follows the script into those that it starts by itself
attach.py     waits for the script's own `import torch`, then installs the hooks
hooks.py      torch's global hooks: modules, backward, optimizer steps; never_compiled.py, above, keeps Dynamo off them
position.py   where the training stands: module stack, phase, micro-batch
models.py     the discovered models: names, units, parameters
recorder.py   told by the hooks; steps.py and unstepped.py say where a step ends
spans.py      the step under way, with as little work as possible; listening.py: whose modules are listened to;
              writer.py makes rows of it
tracing.py    when a step is traced; tracer.py traces it: truth.py (the allocator's account) and labels.py
              (what it is) with saved_hooks.py (what autograd keeps), joined from label_log.py by account.py in ledger.py.
              What labels.py sees is read by operator_kinds.py, collectives.py, operator_cost.py (flops*.py,
              traffic.py) and module_calls.py; tensor_storage.py tells whose memory a tensor's is, and
              node_places.py which module a node of the backward is of
later_hooks.py  what DDP's communication hooks do later only
census.py     what is alive beside that (ddp_buckets.py: what DDP's reducer holds); cpu_account.py and allocator*.py:
              what the allocators say
kept_beside.py  what is known by what it is like: kept_gradients.py, weight_copies.py
out_of_memory.py  a step that memory ran out in; memory_watch.py imposes a limit
"""
