"""Generation that any executor shares: sampling, rows of a batch, beams, the generation loop, conversations.

Never here: ONNX Runtime or PyTorch.
"""
