"""One rank of one engine for benchmarks/engines.py: trains a GPT, a few steps whenever its parent asks.

Started by benchmarks/engines.py with torchrun's environment variables. It answers each line on stdin with one line of
JSON on what was stdout: `steps N` with what it measured in N steps, `transfers` with what the messages of the last step
take by themselves (engines_cover.py). Whatever the engines print goes to stderr.
"""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "samples"))
from engines_cover import WINDOWS, Messages
from train_gpt import GPT

from memadvisor.capture.cpu_account import open_cpu_account
from memadvisor.compression import UNCOMPRESSED, Compression
from memadvisor.engines.apply import install
from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.fsdp2_comm import Gather, Scatter
from memadvisor.plan import Plan, UnitPlan

# layers, dim, heads, vocabulary (the head is tied to the embedding), sequence
MODELS = {"A": (8, 512, 8, 50304, 128), "B": (16, 512, 8, 2048, 128), "tiny": (4, 64, 4, 256, 32)}
MODELS |= {f"gpt{width}": (6, width, 8, 256, 128) for width in (64, 128, 384, 512)}
MICRO_BATCH = 2
BUCKET_ELEMENTS = 5_000_000  # DeepSpeed's own default of 5e8 holds the whole model several times
SAMPLE_S = 20e-6
COMPRESSIONS = {
    "8bit": Compression(gather_bits=8, reduce_bits=8),
    "4bit": Compression(gather_bits=8, reduce_bits=4),
}


def build_model(name):
    layers, dim, heads, vocabulary, seq = MODELS[name]
    torch.manual_seed(0)
    model = GPT(layers, dim, heads, seq)
    model.tok_emb = nn.Embedding(vocabulary, dim)
    nn.init.normal_(model.tok_emb.weight, std=0.02)
    model.head = nn.Linear(dim, vocabulary, bias=False)
    model.head.weight = model.tok_emb.weight
    return model


class Training:
    """The script's loop: DDP and AdamW as people write them. Subclasses change what their engine makes them."""

    def __init__(self, args, mode):
        self.args, self.mode = args, mode
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _, _, _, self.vocabulary, self.seq = MODELS[args.model]
        self.generator = torch.Generator().manual_seed(1 + self.rank)
        self.messages = Messages()
        self.window_s = dict.fromkeys(WINDOWS, 0.0)  # wall seconds so far
        dist.init_process_group("gloo")
        self.prepare()
        self.build(build_model(args.model))

    def prepare(self):
        """What a user does before the script runs."""

    def build(self, model):
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = self.adamw(self.model.parameters())

    def adamw(self, parameters):
        return torch.optim.AdamW(parameters, lr=1e-4, fused=self.args.fused or None)

    def step(self):
        words = torch.randint(self.vocabulary, (MICRO_BATCH, self.seq + 1), generator=self.generator)
        return self.train(words[:, :-1].contiguous(), words[:, 1:].contiguous())

    def train(self, words, targets):
        begins_s = time.perf_counter()
        loss = self.model(words, targets)
        self.messages.window, forward_ends_s = "backward", time.perf_counter()
        loss.backward()
        self.messages.window, backward_ends_s = "forward", time.perf_counter()
        self.messages.optimizer_begins()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.window_s["forward"] += forward_ends_s - begins_s
        self.window_s["backward"] += backward_ends_s - forward_ends_s
        return loss.item()


class Local(Training):
    """No communication at all: what the same compute takes beside the other rank's. Its losses are its own."""

    def build(self, model):
        self.model = model
        self.optimizer = self.adamw(model.parameters())


class Ours(Training):
    """The same script under a plan; `ours-3-overlap` is stage 3 with overlap, `ours-3-keep` has the last `--kept`
    blocks stay from their forward to their backward too, `ours-3-ahead` is that without reductions that overlap,
    `ours-3-deep` is overlap with two units' reductions under way, `ours-2-units` that with updates unit by unit, each gathered
    under the next (of stage 3 what the next forward begins with), `ours-3-inback` updates units in the backward too,
    `ours-3-8bit` has its messages quantised to 8 bits, and `ours-3-4bit` those of gradients to 4; `ours-3-silent` is overlap
    with all messages left out."""

    def prepare(self):
        stage, _, how = self.mode.removeprefix("ours-").partition("-")
        num_blocks = MODELS[self.args.model][0]
        num_kept = min(num_blocks, self.args.kept or num_blocks) if how in ("keep", "inback", "ahead") else 0
        plan = Plan(
            num_ranks=self.num_ranks,
            zero_stage=int(stage),
            units=tuple(
                UnitPlan(name=f"blocks.{number}", zero_stage=3, recompute=False, reshard=False)
                for number in range(num_blocks - num_kept, num_blocks)
            ),
            why="benchmark",
            overlap=how not in ("", "ahead"),
            reduce_depth=2 if how == "deep" or (how == "units" and stage != "1") else 1,
            gather_depth=int(how != ""),
            update_in_backward=how == "inback",
            update_by_unit=how == "units",
            compression=COMPRESSIONS.get(how, UNCOMPRESSED),
        )
        self.applied = install(plan)
        if how == "silent":
            self.messages.silence()
        elif self.args.listen:
            self.messages.listen()


class Redundancy(Training):
    def build(self, model):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, fused=self.args.fused or None
        )


class Fsdp2(Training):
    """`fully_shard` on each block and the whole; `keep` does not reshard after the forward."""

    def build(self, model):
        from torch.distributed.fsdp import fully_shard

        reshard = False if "keep" in self.mode else None
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        if "pairwise" in self.mode:
            wire = Wire(dist.group.WORLD, lambda tensor: None)
            for number, module in enumerate((*model.blocks, model)):
                module.set_custom_all_gather(Gather(wire, str(number), number, is_ahead=False))
                module.set_custom_reduce_scatter(Scatter(wire, str(number), number))
        self.model = model
        self.optimizer = self.adamw(model.parameters())


class Fsdp1(Training):
    def build(self, model):
        from functools import partial

        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
        from train_gpt import Block

        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        self.model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
        self.optimizer = self.adamw(self.model.parameters())


class DeepSpeed(Training):
    def prepare(self):
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("LOCAL_RANK", str(self.rank))

    def build(self, model):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "zero_optimization": {
                "stage": int(self.mode[-1]),
                "reduce_bucket_size": BUCKET_ELEMENTS,
                "allgather_bucket_size": BUCKET_ELEMENTS,
                "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
                "stage3_max_live_parameters": BUCKET_ELEMENTS,
                "stage3_max_reuse_distance": BUCKET_ELEMENTS,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=self.adamw(model.parameters()), config=config
        )

    def train(self, words, targets):
        loss = self.model(words, targets)
        self.model.backward(loss)
        self.model.step()
        return loss.item()


TRAININGS = {
    "ddp": Training,
    "local": Local,
    "ddp-redundancy": Redundancy,
    "fsdp2": Fsdp2,
    "fsdp2-keep": Fsdp2,
    "fsdp2-pairwise": Fsdp2,
    "fsdp2-keep-pairwise": Fsdp2,
    "fsdp1": Fsdp1,
    "deepspeed-1": DeepSpeed,
    "deepspeed-2": DeepSpeed,
    "deepspeed-3": DeepSpeed,
    "ours-0": Ours,
    "ours-1": Ours,
    "ours-2": Ours,
    "ours-3": Ours,
    "ours-1-overlap": Ours,
    "ours-2-overlap": Ours,
    "ours-3-overlap": Ours,
    "ours-2-deep": Ours,
    "ours-3-deep": Ours,
    **{f"ours-{stage}-units": Ours for stage in (1, 2, 3)},
    "ours-3-keep": Ours,
    "ours-3-inback": Ours,
    "ours-3-ahead": Ours,
    "ours-3-8bit": Ours,
    "ours-3-4bit": Ours,
    **{f"ours-{stage}-silent": Ours for stage in range(1, 4)},
}


class PeakMeter(threading.Thread):
    """The highest total of the CPU allocator's own account, looked at every few microseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.account = open_cpu_account([])
        if self.account is None:
            raise SystemExit("this build of torch does not let its CPU allocator's account be read")
        self.peak_bytes = 0
        sys.setswitchinterval(SAMPLE_S)
        self.start()

    def run(self):
        while True:
            self.peak_bytes = max(self.peak_bytes, self.account.allocated_bytes())
            time.sleep(SAMPLE_S)


def queued_s():
    """How long this thread was ready to run without a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def sent_bytes():
    """Of this rank's network interface, headers included; of loopback they are those of all ranks."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == os.environ.get("GLOO_SOCKET_IFNAME"):
            return int(counts.split()[8])
    return 0


def measured(training, num_steps, meter):
    """Wall seconds, seconds in which the thread that computes waited (neither ran nor was ready to), losses."""
    dist.barrier()
    if meter is not None:
        meter.peak_bytes = 0
    # Over a link a step more goes before, so that what it leaves under way is there as behind any other.
    before = [training.step()] if training.args.listen else []
    training.window_s, sent = dict.fromkeys(WINDOWS, 0.0), sent_bytes()
    wall_s, cpu_s, ready_s = time.perf_counter(), time.thread_time(), queued_s()
    losses = [training.step() for _ in range(num_steps)]
    wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
    ready_s = queued_s() - ready_s
    return {
        "step_s": wall_s / num_steps,
        "waiting_s": max(0.0, wall_s - cpu_s - ready_s) / num_steps,
        "window_s": {window: seconds / num_steps for window, seconds in training.window_s.items()},
        "sent_bytes": (sent_bytes() - sent) / num_steps,
        "peak_bytes": meter.peak_bytes if meter is not None else None,
        "losses": before + losses,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=TRAININGS)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--kept", type=int)
    parser.add_argument("--peak", action="store_true")
    parser.add_argument("--listen", action="store_true", help="for a link: be ready for `transfers`")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    meter = PeakMeter() if args.peak else None
    training = TRAININGS[args.mode](args, args.mode)
    for line in sys.stdin:
        order, *numbers = line.split()
        if order == "transfers":
            answer = {"transfer_s": training.messages.transfer_s()}
        else:
            answer = measured(training, int(numbers[0]), meter)
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # engines differ in how they end; nothing is measured from here on


if __name__ == "__main__":
    main()
