"""One engine in several processes: rank 0 is the worker's own, the others compute their share of every step.

Weights are cut by the plans that transformers has for a model (`plan`), partial results are put together over
torch.distributed (`group`, `layers`), KV lies in memory that all ranks share, in the layout of the whole model
(`shared_kv`), and rank 0 tells the others over sockets what step comes next (`messages`, `lead`, `follow`).
"""
