"""Generation code shared by all executors: sampling, rows of a batch, beams, the generation loop, conversations.

Never here: ONNX Runtime or PyTorch.
"""
