"""Families that read audio: encoders of waveforms, and encoder-decoders that transcribe speech.

Never here: spectrograms, which processors of transformers compute.
"""
