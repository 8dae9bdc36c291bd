"""Runs samples/train_gpt.py with its model compiled, and torch deciding what to recompute within a budget.

The budget is a share of the activations' memory, between 0 (recompute all) and 1 (keep all), as torch has it:
`torch._functorch.config.activation_memory_budget`.

    python benchmarks/compiled.py BUDGET samples/train_gpt.py [ARGS...]
"""

import importlib.util
import sys

import torch._functorch.config


def main():
    budget, script, *arguments = sys.argv[1:]
    torch._functorch.config.activation_memory_budget = float(budget)
    spec = importlib.util.spec_from_file_location("train_gpt", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain = module.GPT

    def compiled(*args):
        model = plain(*args)
        model.compile()
        return model

    module.GPT = compiled
    sys.argv = [script, *arguments]
    module.main()


if __name__ == "__main__":
    main()
