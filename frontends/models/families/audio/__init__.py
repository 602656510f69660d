"""Families that read sound: encoders of waveforms, and encoder-decoders that write what is said.

Never here: how a waveform becomes a spectrogram; processors of transformers do that.
"""
