"""Lowering of a graph to the programs of a base model and its head, with caches, masks and names of transformers.

Ops for which transformers has functions or modules have lowerings here; others are lowered as for target torch.
Never here: source of classes (`modeling`), names of sizes (`config_fields`).
"""
