"""From a graph to the programs of a base model and of its head, with the caches, masks and names of transformers.

Ops that transformers computes in its own way have lowerings here; the others are lowered as for the target torch.
Never here: source of classes (`modeling`), names of sizes (`config_fields`).
"""
