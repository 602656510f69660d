"""Decoders with one feed-forward in every layer: Llama and its relatives, Gemma, GPT and its successors.

Never here: tables whose layers have experts or states.
"""
