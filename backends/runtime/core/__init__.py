"""Generation code for all executors: sampling, batch contexts, beam search, the generation loop, conversations.

Never here: ONNX Runtime or PyTorch.
"""
