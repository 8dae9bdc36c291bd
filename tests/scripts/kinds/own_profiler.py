"""Has torch's profiler on in every step, and a compiled model."""

import torch
from small import model_and_optimizer, step
from torch.profiler import ProfilerActivity, profile, schedule

model, optimizer = model_and_optimizer()
torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 4)).sum().backward()
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
with profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3, repeat=1)
) as prof:
    for _ in range(9):
        print(repr(step(compiled, optimizer)))
        prof.step()
print(sum(event.key == "aten::linear" or event.key == "aten::addmm" for event in prof.key_averages()))
print(torch._dynamo.utils.counters["frames"])
