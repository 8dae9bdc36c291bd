"""A model that torch.compile turns into C++, by the backend that it takes by default."""

import torch
from small import model_and_optimizer, step

model, optimizer = model_and_optimizer()
compiled = torch.compile(model, fullgraph=True)
for _ in range(5):
    print(repr(step(compiled, optimizer)), flush=True)
print(torch._dynamo.utils.counters["stats"], torch._inductor.metrics.generated_kernel_count)
