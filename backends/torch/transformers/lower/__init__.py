"""From a graph to the programs of a base model and of its head, with the caches, masks and names of transformers.

Ops that transformers computes its own way have functions here; the others are written as for the target torch.
Never here: text of classes (`shell`), names of numbers (`numbers`).
"""
