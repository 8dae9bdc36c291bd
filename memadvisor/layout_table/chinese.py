"""Headers of tables in Chinese, as those of columns. Written as escapes, for the package is in ASCII."""

from __future__ import annotations

# model; cards (with, and without what counts them); nodes; cards of a node; sequence length; layers; hidden size; heads;
# vocabulary; parallelism of data, tensors, pipelines, contexts, experts, sequences; sizes of a microbatch, of a batch, of
# the whole one; accumulation; recomputation; precision; framework; optimizer; strategy; parameters
_WORDS = {
    "\u6a21\u578b": "model",
    "\u5361\u6570": "gpus",
    "\u663e\u5361\u6570\u91cf": "gpus",
    "gpu\u6570\u91cf": "gpus",
    "gpu\u6570": "gpus",
    "npu\u6570\u91cf": "gpus",
    "\u8282\u70b9\u6570": "nodes",
    "\u663e\u5361": "gpu",
    "\u786c\u4ef6": "gpu",
    "gpu\u578b\u53f7": "gpu",
    "\u5e8f\u5217\u957f\u5ea6": "seq_len",
    "\u4e0a\u4e0b\u6587\u957f\u5ea6": "seq_len",
    "\u5c42\u6570": "n_layers",
    "\u9690\u85cf\u5c42\u7ef4\u5ea6": "hidden",
    "\u9690\u85cf\u7ef4\u5ea6": "hidden",
    "\u6ce8\u610f\u529b\u5934\u6570": "n_heads",
    "\u8bcd\u8868\u5927\u5c0f": "vocab",
    "\u6570\u636e\u5e76\u884c": "dp",
    "\u5f20\u91cf\u5e76\u884c": "tp",
    "\u6d41\u6c34\u7ebf\u5e76\u884c": "pp",
    "\u6d41\u6c34\u5e76\u884c": "pp",
    "\u4e0a\u4e0b\u6587\u5e76\u884c": "cp",
    "\u4e13\u5bb6\u5e76\u884c": "ep",
    "\u5e8f\u5217\u5e76\u884c": "sequence_parallel",
    "\u5fae\u6279\u5927\u5c0f": "micro_batch_size",
    "\u5fae\u6279\u6b21\u5927\u5c0f": "micro_batch_size",
    "\u6279\u5927\u5c0f": "batch_size",
    "\u6279\u6b21\u5927\u5c0f": "batch_size",
    "\u5168\u5c40\u6279\u5927\u5c0f": "global_batch_seqs",
    "\u5168\u5c40\u6279\u6b21\u5927\u5c0f": "global_batch_seqs",
    "\u68af\u5ea6\u7d2f\u79ef": "grad_accum",
    "\u68af\u5ea6\u7d2f\u79ef\u6b65\u6570": "grad_accum",
    "\u91cd\u8ba1\u7b97": "recompute",
    "\u7cbe\u5ea6": "precision",
    "\u6846\u67b6": "framework",
    "\u4f18\u5316\u5668": "optimizer",
    "\u5e76\u884c\u7b56\u7565": "parallelism",
    "\u5e76\u884c\u914d\u7f6e": "parallelism",
    "\u53c2\u6570\u91cf": "n_params",
}


def in_english(name: str) -> str:
    """A header of this list in the reader's words; any other as it is."""
    written = name.strip().lower().replace(" ", "")
    return _WORDS.get(written) or _WORDS.get(written.rstrip("\u6570\u5ea6"), name)
