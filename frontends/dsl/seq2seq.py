"""Models that map one sequence to another: an encoder, and a decoder that attends to its output."""

from __future__ import annotations

from typing import Any

from weft.ir import ops
from weft.ir.display import Displayable
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Value
from weft.ir.types import TensorType, dtypes
from weft.ir.types.sizes import sym

from .attention import Attention
from .build import module, param, provided, providing, trace_as
from .models import IDS, Decoder, Encoder, describe_model, get_max_length
from .signals import AudioEncoder, get_max_frames


@module
class CrossAttention(Attention):
    """Attention of a decoder's tokens to the encoder's output, for the field `cross` of a `Block`; fields as in
    `Attention`. Generation computes keys and values once per source sequence."""

    def __call__(self, x: Value, memory: Value | None = None) -> Value:
        """Map x [batch, seq, dim] to [batch, seq, out_dim]. `memory` is [batch, source, width], by default the
        encoder's output."""
        memory = provided("memory") if memory is None else memory
        if memory is None:
            raise WeftError("CrossAttention has no encoder to read: put the decoder into an EncoderDecoder")
        return super().__call__(x, memory)


@module
class EncoderDecoder(Displayable):
    """An encoder and a decoder whose blocks have `cross` attention (Vaswani 2017)::

        attn, norm, ffn = Attention(8), LayerNorm(), MLP(2048, "relu", bias=True)
        EncoderDecoder(
            Encoder(37_000, 512, 6, Block(attn, ffn, norm, "post"), Sinusoidal(512)),
            Decoder(37_000, 512, 6, Block(attn, ffn, norm, "post", cross=CrossAttention(8)), positions=Sinusoidal(512)),
        )

    Encoder and decoder share one embedding table unless `share_embeddings` is False; with the decoder's
    `tie_embeddings` this table is also the weight of the output head. An `AudioEncoder` (Whisper) shares no embedding.
    """

    encoder: Encoder | AudioEncoder
    decoder: Decoder
    share_embeddings: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.encoder, AudioEncoder):
            return
        reads, writes = ((part.vocab, part.dim) for part in (self.encoder, self.decoder))
        if self.share_embeddings and reads != writes:
            raise WeftError(
                f"EncoderDecoder: (vocab, dim) is {reads} in the encoder and {writes} in the decoder: "
                "make them equal, or set share_embeddings=False"
            )
        if self.encoder.token_types:
            raise WeftError(f"EncoderDecoder: the encoder has token_types={self.encoder.token_types}, but must have 0")

    def __call__(self, *inputs: Value) -> Any:
        """Map the inputs of the encoder, then input_ids [batch, seq] of the decoder, to logits [batch, seq, vocab].

        An `Encoder` reads ids and mask [batch, source] (0 masks a token), an `AudioEncoder` the inputs of its stem. If
        the decoder has a task head (`Decoder.head`, such as a classifier), the inputs are ids and mask [batch, seq],
        and the decoder reads these ids shifted right by one; the result is a dict of outputs by name.
        """
        head, source = self.decoder.head, inputs if self.decoder.head is not None else inputs[:-1]
        shared = {}
        if self.share_embeddings and isinstance(self.encoder, Encoder):
            shared["embedding"] = param("embed.weight", (self.decoder.vocab, self.decoder.dim))
        with providing(**shared):
            encoded = self.encoder(*source)
            memory = encoded["last_hidden_state"]
            mask = source[1] if isinstance(self.encoder, Encoder) else encoded.get("frame_mask")
            with providing(memory=memory, **({} if mask is None else {"memory_mask": mask})):
                if head is None:
                    logits = self.decoder(inputs[-1])
                else:
                    with providing(text_ids=inputs[0]):
                        logits = self.decoder(_shift_right(inputs[0], head.start), mask)
        if not memory.uses:
            raise WeftError("no block of the decoder attends to the encoder: give a Block cross=CrossAttention(heads)")
        return logits

    def graph(self, seed: int = 0, name: str = "encoder_decoder") -> Graph:
        """Return the IR graph, with parameters initialized by `seed`; raise WeftError if settings do not fit.

        Inputs: encoder_input_ids and encoder_attention_mask (or the audio stem's inputs), input_ids, and position_ids
        if the decoder reads positions. Output: logits [batch, seq, vocab]. If the decoder has a head, the inputs are
        input_ids and attention_mask, the outputs last_hidden_state and the head's scores.
        """
        mask, encoder = "encoder_attention_mask", self.encoder
        if self.decoder.head is not None:
            graph = trace_as(self, {"input_ids": IDS, "attention_mask": IDS}, seed, name, "logits")
            describe_model(self.decoder, graph, "encoder")
            return graph
        if isinstance(encoder, AudioEncoder):
            source, context = encoder.stem.input_types(mask), get_max_frames(encoder)
        else:
            text = TensorType(IDS.dtype, (IDS.shape[0], sym("source")))
            source, context = {"encoder_input_ids": text, mask: text}, get_max_length(encoder)
        graph = trace_as(self, {**source, "input_ids": IDS}, seed, name, "logits")
        describe_model(self.decoder, graph, "encoder-decoder")
        graph.meta["source_context"] = context
        if self.encoder.positions is not None:
            graph.meta["max_source_positions"] = self.encoder.positions.length
        return graph


def _shift_right(ids: Value, start: int) -> Value:
    """Return `ids` [batch, seq] shifted right by one: the token `start`, then all tokens except the last."""
    index = ops.iota(ids, axis=1)
    is_later = ops.cast(ops.cast(index, to=dtypes.bool_), to=ids.type.dtype)  # 0 for the first, else 1
    previous = ops.gather(ids, ops.sub(index, is_later), axis=1)
    return ops.add(ops.mul(previous, is_later), ops.affine(is_later, by=-start, plus=start), name="shifted")
