"""Only calls a model: there is no step to be seen."""

import torch
from small import model_and_optimizer

model = model_and_optimizer()[0].eval()
with torch.inference_mode():
    for _ in range(4):
        print(model(torch.randn(2, 4)).sum().item())
