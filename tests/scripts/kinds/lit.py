"""Lightning's Trainer; with an argument it starts a second rank by that strategy."""

import logging
import sys
import warnings

import lightning
import torch
from small import model_and_optimizer
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model_and_optimizer()[0]

    def training_step(self, x):
        loss = (self.model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        if self.global_rank == 0:
            print(repr(loss.item()), flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    strategy = sys.argv[1] if len(sys.argv) > 1 else "auto"
    devices = 2 if len(sys.argv) > 1 else 1
    lit = Lit()
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(lit, DataLoader(torch.randn(4 * 2 * devices, 4), batch_size=2))
