"""Decoders with one feed-forward in every layer: Llama and its relatives, Gemma, GPT and what followed it.

Never here: tables whose layers have experts or states.
"""
